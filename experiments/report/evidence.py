"""The evidence for claims of the paper: cases that hold or do not, and the numbers behind them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.report.numbers import Measurements, Published, number, on_grid
from experiments.report.tables import LARGER_IS_BETTER, NOT_RUN, Line

REGRESSION = ("enb", "redwine", "california", "naval")
FIGURE_1 = (*REGRESSION, "fashionmnist")
LOW_RANK = ("lowrank-kfac", "lowrank-diagonal")
SUBSETS = ("subset-magnitude", "subset-diagonal", "subset-swag")
LARGE = ("cifar10", "imagenet10")
ALL_SETS = (*FIGURE_1, "mnist", *LARGE)
TABLE_1 = "eval_uq_extended"


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, whether it holds here, and by which numbers."""

    claim: str
    verdict: str
    evidence: str


@dataclass(frozen=True)
class Case:
    """One instance of a claim: whether it holds there, and the number that says so."""

    holds: bool
    text: str


def judged(claim: str, rule: str, cases: Sequence[Case], expected: int = 1) -> Finding:
    """Return a finding: it holds if all cases hold, and in part if some do; the evidence counts missing cases."""
    if not cases:
        return Finding(claim, NOT_RUN, "")
    holding = sum(case.holds for case in cases)
    verdict = "holds" if holding == len(cases) else "holds in part" if holding else "does not hold"
    missing = f"So far {len(cases)} of {expected} cases. " if len(cases) < expected else ""
    return Finding(claim, verdict, f"Judged by: {rule}. {missing}" + "; ".join(case.text for case in cases) + ".")


@dataclass(frozen=True)
class Tally:
    """How often some methods are the best, alone or with ties, and of how many lines: ours, and the paper's."""

    ours: tuple[int, int, int]
    paper: tuple[int, int, int]

    @property
    def won(self) -> int:
        return self.ours[0]

    @property
    def total(self) -> int:
        return self.ours[2]

    def text(self, what: str) -> str:
        ours, paper = (
            (f"{won} of {total}", f", {with_ties - won} more tied" if with_ties > won else "")
            for won, with_ties, total in (self.ours, self.paper)
        )
        unit = what if what == "s" or self.total == 1 else f"{what}s"
        return f"best at {ours[0]} {unit}{ours[1]} (paper {paper[0]}{paper[1]})"


def ratio_range(ratios: Sequence[float]) -> str:
    return f"{number(min(ratios), 2)} to {number(max(ratios), 2)}"


@dataclass(frozen=True)
class Evidence:
    """Our numbers and the paper's. `largest` is the end of the grid of s of each set."""

    measurements: Measurements
    published: Published
    largest: dict[str, float]

    def run(self, datasets: Sequence[str]) -> list[str]:
        return [dataset for dataset in datasets if dataset in self.measurements.datasets]

    def grid(self, dataset: str, method: str, metric: str) -> list[int]:
        """Return the dimensions of the main figures."""
        largest = self.largest.get(dataset, math.inf)
        return [s for s in self.measurements.dims(dataset, method, metric) if on_grid(s, largest)]

    def mean(self, dataset: str, method: str, metric: str, s: int | None = None) -> float | None:
        estimate = self.measurements.estimate(dataset, method, metric, s)
        return None if estimate is None else estimate.mean

    def means(self, line: Line, methods: Sequence[str], metric: str) -> dict[str, float]:
        """Return the means over the seeds that all of the methods have; empty if one of them was not run."""
        found = self.measurements.common(line.dataset, methods, metric, line.s)
        return {method: estimate.mean for method, estimate in found.items()}

    def quoted(self, table: str, line: Line, metric: str) -> dict[str, float]:
        columns = self.published.distinct(table, "projector")
        found = {m: self.published.quote(table, line.dataset, metric, m, line.s) for m in columns}
        return {m: quote.mean for m, quote in found.items() if quote is not None}

    def tally(self, table: str, lines: Sequence[Line], metric: str, methods: Sequence[str]) -> "Tally":
        """Return on how many of the lines that were run one of the methods is the best of the table's columns."""
        columns = self.published.distinct(table, "projector")
        better = max if metric in LARGER_IS_BETTER else min
        found: dict[str, list[set[str]]] = {"ours": [], "paper": []}
        for line in lines:
            quotes = [self.published.quote(table, line.dataset, metric, m, line.s) for m in columns]
            digits = max((quote.digits for quote in quotes if quote is not None), default=3)
            both = {"ours": self.means(line, columns, metric), "paper": self.quoted(table, line, metric)}
            for whose, means in both.items():
                if len(means) == len(columns):
                    printed = {method: round(value, digits) for method, value in means.items()}
                    best = better(printed.values())
                    found[whose].append({method for method, value in printed.items() if value == best})
        counts = [
            (sum(best <= set(methods) for best in sets), sum(not best.isdisjoint(methods) for best in sets), len(sets))
            for sets in found.values()
        ]
        return Tally(*counts)

    def ratios(self, dataset: str, first: Sequence[str], second: Sequence[str]) -> list[float]:
        """Return at every s of the grid the smallest KL of the first methods over the smallest KL of the second."""
        metric = self.measurements.divergence(dataset)
        found = []
        for s in self.grid(dataset, first[0], metric):
            if means := self.means(Line("", dataset, s), (*first, *second), metric):
                found.append(min(means[m] for m in first) / min(means[m] for m in second))
        return found
