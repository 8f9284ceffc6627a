"""Which claims of the paper hold here: each is judged by a stated rule, and the sentence gives the numbers."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scipy.stats import spearmanr

from experiments.report.checks import FEASIBLE, OPTIMUM, PAPER_PROJECTORS, our_rank_correlations
from experiments.report.numbers import (
    SMALL_DIM,
    Estimate,
    Measurements,
    Published,
    counted,
    number,
    on_grid,
    with_error,
)
from experiments.report.tables import LARGER_IS_BETTER, NOT_RUN, Line, agreement, lines_of, reference_dims, title

REGRESSION = ("enb", "redwine", "california", "naval")
FIGURE_1 = (*REGRESSION, "fashionmnist")
LOW_RANK = ("lowrank-kfac", "lowrank-diagonal")
SUBSETS = ("subset-magnitude", "subset-diagonal", "subset-swag")


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
    """'holds' where all cases do, 'holds in part' where some do; where cases are missing, the evidence says so."""
    if not cases:
        return Finding(claim, NOT_RUN, "")
    holding = sum(case.holds for case in cases)
    verdict = "holds" if holding == len(cases) else "holds in part" if holding else "does not hold"
    missing = f"So far {len(cases)} of {expected} cases. " if len(cases) < expected else ""
    return Finding(claim, verdict, f"Judged by: {rule}. {missing}" + "; ".join(case.text for case in cases) + ".")


def findings(measurements: Measurements, published: Published, largest: dict[str, float]) -> list[Finding]:
    """All findings, in the order of the paper. `largest` is the end of the grid of s of each set."""
    claims: list[Callable[[_Claims], Finding]] = [
        _Claims.few_dimensions_suffice,
        _Claims.low_rank_is_nearer_than_subsets,
        _Claims.enb_is_the_exception,
        _Claims.diagonal_low_rank_beats_diagonal_subset,
        _Claims.subset_diagonal_has_no_trace,
        _Claims.trace_orders_as_divergence,
        lambda context: context.best_scores("fashionmnist", "FashionMNIST"),
        lambda context: context.best_scores("cifar10", "CIFAR10"),
        lambda context: context.best_scores("imagenet10", "ImageNet10"),
        _Claims.largest_trace_of_large_networks,
        _Claims.regression_likelihoods_agree,
        _Claims.corrupted_approximation,
        _Claims.corrupted_scores,
        _Claims.corrupted_colour_scores,
        _Claims.full_posterior_is_not_best,
        _Claims.small_dimensions_do_not_suffice,
        _Claims.subsets_need_thousands,
        _Claims.dead_parameters_favour_subsets,
        _Claims.projectors_cost_alike,
        _Claims.prior_precisions_agree,
    ]
    context = _Claims(measurements, published, largest)
    return [claim(context) for claim in claims]


@dataclass(frozen=True)
class _Claims:
    measurements: Measurements
    published: Published
    largest: dict[str, float]

    # Faithfulness to the full posterior

    def few_dimensions_suffice(self) -> Finding:
        cases = []
        for dataset in self._run(FIGURE_1):
            metric, p = self.measurements.divergence(dataset), self._num_parameters(dataset)
            plain = self._mean(dataset, "map", metric)
            curve = {s: self._mean(dataset, OPTIMUM, metric, s) for s in self._grid(dataset, OPTIMUM, metric)}
            if plain is None or p is None or not curve:
                continue
            enough = [s for s, kl in curve.items() if kl is not None and kl <= 0.01 * plain]
            if enough:
                share = 100 * enough[0] / p
                cases.append(Case(share <= 10, f"{dataset} s = {enough[0]} ({number(share, 1)} % of p)"))
            else:
                cases.append(Case(False, f"{dataset} not up to s = {max(curve)}"))
        rule = "at some s of at most 10 % of p the optimum's KL is at most 1 % of the plain network's"
        return judged("The optimum of Theorem 1 needs only a fraction of the parameters.", rule, cases, len(FIGURE_1))

    def low_rank_is_nearer_than_subsets(self) -> Finding:
        cases = [case for d in FIGURE_1 if d != "enb" if (case := self._low_rank_case(d))]
        rule = "at every s the smaller KL of lowrank-kfac and lowrank-diagonal is below the smallest of the subsets"
        claim = "Low-rank subspaces are nearer to the full posterior than subsets, but for ENB."
        return judged(claim, rule, cases, len(FIGURE_1) - 1)

    def enb_is_the_exception(self) -> Finding:
        case = self._low_rank_case("enb")
        rule = "at some s a subset's KL is the smallest"
        cases = [Case(not case.holds, case.text)] if case else []
        return judged("On ENB some subsets are slightly nearer than low-rank subspaces.", rule, cases)

    def _low_rank_case(self, dataset: str) -> Case | None:
        won, total = self._wins(dataset, LOW_RANK, SUBSETS)
        return Case(won == total, f"{dataset}: low-rank nearer at {won} of {total} s") if total else None

    def diagonal_low_rank_beats_diagonal_subset(self) -> Finding:
        cases = []
        for dataset in FIGURE_1:
            won, total = self._wins(dataset, ["lowrank-diagonal"], ["subset-diagonal"])
            if total:
                cases.append(Case(won == total, f"{dataset} {won} of {total} s"))
        rule = "its KL is smaller at every s"
        return judged("lowrank-diagonal is strictly better than subset-diagonal.", rule, cases, len(FIGURE_1))

    def subset_diagonal_has_no_trace(self) -> Finding:
        cases = []
        for dataset in self._run(REGRESSION):
            grid = self._grid(dataset, "subset-diagonal", "log_trace")
            sweep = [self.measurements.by_seed(dataset, "subset-diagonal", "log_trace", s).values() for s in grid]
            zero = sum(all(value == -math.inf for value in seeds) for seeds in sweep)
            if grid:
                cases.append(Case(zero == len(grid), f"{dataset} {zero} of {len(grid)} s"))
        rule = "the trace of subset-diagonal is zero at every s of the grid, in every seed"
        claim = "On the regression sets subset-diagonal finds nothing but dead parameters."
        return judged(claim, rule, cases, len(REGRESSION))

    def trace_orders_as_divergence(self) -> Finding:
        cases = []
        for dataset in self._run(FIGURE_1):
            dims = self._grid(dataset, "lowrank-kfac", "log_trace")
            found = [
                rho for s in dims for rho in our_rank_correlations(self.measurements, dataset, s, PAPER_PROJECTORS)[0]
            ]
            if found:
                mean, smallest = sum(found) / len(found), min(found)
                cases.append(Case(mean >= 0.9, f"{dataset} {number(mean, 3)} (smallest {number(smallest, 2)})"))
        rule = "Spearman's ρ of KL with −log-trace over the paper's projectors, mean over s and seeds, is at least 0.9"
        return judged("The log-trace orders projectors as the KL divergence does.", rule, cases, len(FIGURE_1))

    # Scores

    def best_scores(self, dataset: str, name: str) -> Finding:
        cases = []
        for metric in ("nll", "ece", "brier"):
            won, total = 0, 0
            texts: list[str] = []
            for line in lines_of(self.published, "eval_uq_extended", dataset):
                means = self._means(line, PAPER_PROJECTORS, metric) | self._means(line, ["map"], metric)
                if "lowrank-kfac" in means and len(means) > 1:
                    total += 1
                    won += min(means, key=lambda m: means[m]) == "lowrank-kfac"
                    if "map" in means and not texts:
                        texts.append(
                            f"{number(means['lowrank-kfac'], 3)} against {number(means['map'], 3)} at {line.label}"
                        )
            if total:
                cases.append(Case(won == total, f"{title(metric)} smallest at {won} of {total} s ({', '.join(texts)})"))
        rule = "lowrank-kfac has the smallest score of all projectors and the plain network at every s of the table"
        return judged(f"On {name} lowrank-kfac has the best NLL, ECE and Brier score.", rule, cases)

    def largest_trace_of_large_networks(self) -> Finding:
        cases = []
        for dataset in self._run(("cifar10", "imagenet10")):
            won, total = 0, 0
            for s in self._grid(dataset, "lowrank-kfac", "log_trace"):
                means = self._means(Line("", dataset, s), PAPER_PROJECTORS, "log_trace")
                if len(means) > 1:
                    total += 1
                    won += max(means, key=lambda m: means[m]) == "lowrank-kfac"
            if total:
                cases.append(Case(won == total, f"{dataset} at {won} of {total} s"))
        rule = "its log-trace is the largest of the paper's projectors at every s"
        return judged("On CIFAR10 and ImageNet10 lowrank-kfac has the largest trace.", rule, cases, expected=2)

    def regression_likelihoods_agree(self) -> Finding:
        cases = []
        for dataset in self._run(REGRESSION):
            for s in self._grid(dataset, "lowrank-kfac", "nll")[-1:]:
                known = [self.measurements.estimate(dataset, m, "nll", s) for m in (*PAPER_PROJECTORS, "map")]
                estimates = [e for e in known if e is not None and e.standard_error is not None]
                if len(estimates) < 2:
                    continue
                low, high = min(estimates, key=lambda e: e.mean), max(estimates, key=lambda e: e.mean)
                spread = math.hypot(low.standard_error or 0, high.standard_error or 0)
                text = f"{dataset} {with_error(low)} to {with_error(high)} at s = {s}"
                cases.append(Case(high.mean - low.mean <= 2 * spread, text))
        rule = "the smallest and the largest NLL, the plain network's among them, are at most two standard errors apart"
        return judged("On the regression sets the NLL is the same for all methods.", rule, cases, len(REGRESSION))

    def corrupted_approximation(self) -> Finding:
        table = "mnist_c_approximation_quality"
        cases = []
        for metric in ("kl_mean", "log_trace"):
            won, total, text = self._best_on_corruptions(table, metric, ["lowrank-kfac"])
            if total:
                cases.append(Case(won == total, text))
        rule = "it has the smallest KL and the largest trace on every corruption"
        return judged("On corrupted MNIST lowrank-kfac is nearest to the full posterior.", rule, cases)

    def corrupted_scores(self) -> Finding:
        table = "mnist_c_uq_eval"
        cases = []
        for metric in ("nll", "ece", "brier"):
            won, total, text = self._best_on_corruptions(table, metric, LOW_RANK)
            if total:
                cases.append(Case(2 * won > total, text))
        rule = "a low-rank method has the best score on more than half of the corruptions, the plain network included"
        return judged("On corrupted MNIST low-rank methods have the best scores in the majority of cases.", rule, cases)

    def corrupted_colour_scores(self) -> Finding:
        cases = []
        for metric in ("nll", "ece", "brier"):
            won, total, text = self._best_on_corruptions("ood_extended", metric, ["lowrank-kfac"])
            if total:
                cases.append(Case(won == total, text))
        rule = "it has the best score at every s and corruption, the plain network included"
        return judged("On corrupted CIFAR10 lowrank-kfac has the best scores.", rule, cases)

    def full_posterior_is_not_best(self) -> Finding:
        cases = []
        for dataset in self._run(("mnist", "fashionmnist")):
            full = self.measurements.estimate(dataset, "full", "nll")
            for s in reference_dims(self.measurements, dataset)[:1]:
                subspace = self.measurements.estimate(dataset, "lowrank-kfac", "nll", s)
                if full is not None and subspace is not None:
                    text = f"{dataset} full {with_error(full)}, lowrank-kfac {with_error(subspace)} at s = {s}"
                    cases.append(Case(full.mean > subspace.mean, text))
        rule = "its NLL on the clean test set is above that of lowrank-kfac at the s nearest to 100"
        return judged("The full posterior itself need not have the best scores.", rule, cases, expected=2)

    # Dimensions

    def small_dimensions_do_not_suffice(self) -> Finding:
        cases = []
        plain = self._mean("redwine", "map", "kl")
        kls = {m: kl for m in (*LOW_RANK, *SUBSETS) if (kl := self._mean("redwine", m, "kl", SMALL_DIM)) is not None}
        if plain and kls:
            best = min(kls, key=lambda m: kls[m])
            text = f"{best} has the smallest at s = {SMALL_DIM}, {number(kls[best])}, the plain network {number(plain)}"
            cases.append(Case(kls[best] > 0.1 * plain, text))
        rule = f"on Red Wine every KL at s = {SMALL_DIM} is above a tenth of the plain network's"
        return judged(f"Dimensions up to {SMALL_DIM} do not suffice.", rule, cases)

    def subsets_need_thousands(self) -> Finding:
        cases = []
        plain = self._mean("redwine", "map", "kl")
        dims = self.measurements.dims("redwine", "subset-diagonal", "kl")
        kls = {s: kl for s in dims if (kl := self._mean("redwine", "subset-diagonal", "kl", s)) is not None}
        if plain and kls and max(kls) > 5000:
            below = [s for s, kl in kls.items() if kl < 0.9 * plain]
            where = f"first at s = {below[0]}" if below else f"not up to s = {max(kls)}"
            cases.append(Case(bool(below) and below[0] >= 5000, f"{where} of the dimensions tried"))
        rule = "on Red Wine its KL falls below nine tenths of the plain network's from s = 5000 on only"
        return judged("subset-diagonal improves from about s = 10,000 on only.", rule, cases)

    def dead_parameters_favour_subsets(self) -> Finding:
        dead, advantage = [], []
        texts = []
        for dataset in self._run(REGRESSION):
            share = self._mean(dataset, "map", "dead_percent")
            metric = self.measurements.divergence(dataset)
            for s in reference_dims(self.measurements, dataset)[:1]:
                line = Line("", dataset, s)
                low, subset = self._means(line, LOW_RANK, metric), self._means(line, SUBSETS, metric)
                if share is not None and low and subset:
                    ratio = min(low.values()) / min(subset.values())
                    dead.append(share)
                    advantage.append(ratio)
                    texts.append(f"{dataset} {number(share, 1)} % dead, KL ratio {number(ratio)} at s = {s}")
        cases = []
        if len(dead) >= 3:
            rho = float(spearmanr(dead, advantage).statistic)
            cases = [Case(rho > 0, f"ρ = {number(rho, 2)} over {counted(len(dead), 'set')}: " + ", ".join(texts))]
        rule = (
            "Spearman's ρ of the share of dead parameters with the KL of the best low-rank method over that of the "
            "best subset, at the s nearest to 100, is positive"
        )
        return judged("The more parameters are dead, the better are subsets beside low-rank methods.", rule, cases)

    # Cost and prior

    def projectors_cost_alike(self) -> Finding:
        frame = self.measurements.rows.dropna(subset=["seconds"])
        jobs = frame.drop_duplicates(["dataset", "method", "seed"])
        seconds = jobs.groupby(["dataset", "method"])["seconds"].mean()
        cases = []
        for dataset in self._run((*FIGURE_1, "mnist")):
            times = {m: float(seconds[dataset, m]) for m in PAPER_PROJECTORS if (dataset, m) in seconds.index}
            others = [t for m, t in times.items() if m != "subset-magnitude"]
            if "subset-magnitude" in times and len(others) > 1:
                alike = max(others) <= 5 * min(others) and times["subset-magnitude"] <= min(others)
                text = f"{dataset} {number(min(others))} to {number(max(others))} s, subset-magnitude"
                cases.append(Case(alike, f"{text} {number(times['subset-magnitude'])} s"))
        rule = "the slowest but subset-magnitude takes at most 5 times as long as the fastest, and that one less"
        claim = "All projectors cost about the same but subset-magnitude, which costs least."
        return judged(claim, rule, cases, len(FIGURE_1) + 1)

    def prior_precisions_agree(self) -> Finding:
        cases = []
        for dataset in self._run((*FIGURE_1, "mnist")):
            ours = self.measurements.estimate(dataset, "kfac", "prior_precision")
            paper = self.published.quote("prior_precision", dataset, "prior_precision")
            if ours is not None and paper is not None:
                ratio = ours.mean / paper.mean
                cases.append(
                    Case(0.8 <= ratio <= 1.25, f"{dataset} {with_error(ours)} (paper {number(paper.mean, 1)})")
                )
        rule = "our optimum is within 25 % of the paper's"
        claim = "The evidence of the KFAC posterior gives the paper's prior precisions."
        return judged(claim, rule, cases, len(FIGURE_1) + 1)

    # Numbers of one method

    def _run(self, datasets: Sequence[str]) -> list[str]:
        return [dataset for dataset in datasets if dataset in self.measurements.datasets]

    def _grid(self, dataset: str, method: str, metric: str) -> list[int]:
        """The dimensions of the main figures."""
        largest = self.largest.get(dataset, math.inf)
        return [s for s in self.measurements.dims(dataset, method, metric) if on_grid(s, largest)]

    def _mean(self, dataset: str, method: str, metric: str, s: int | None = None) -> float | None:
        estimate = self.measurements.estimate(dataset, method, metric, s)
        return None if estimate is None else estimate.mean

    def _means(self, line: Line, methods: Sequence[str], metric: str) -> dict[str, float]:
        found = {m: self._mean(line.dataset, m, metric, line.s) for m in methods}
        return {m: value for m, value in found.items() if value is not None}

    def _quoted(self, table: str, line: Line, metric: str) -> dict[str, float]:
        columns = self.published.distinct(table, "projector")
        found = {m: self.published.quote(table, line.dataset, metric, m, line.s) for m in columns}
        return {m: quote.mean for m, quote in found.items() if quote is not None}

    def _best_on_corruptions(self, table: str, metric: str, methods: Sequence[str]) -> tuple[int, int, str]:
        """On how many corruptions one of the methods is the best of the table's columns, of how many, and the words."""
        ours: list[set[str]] = []
        paper: list[set[str]] = []
        columns = self.published.distinct(table, "projector")
        for line in lines_of(self.published, table):
            for found, means in (
                (ours, self._means(line, columns, metric)),
                (paper, self._quoted(table, line, metric)),
            ):
                if len(means) == len(columns):
                    best = (max if metric in LARGER_IS_BETTER else min)(means.values())
                    found.append({method for method, value in means.items() if value == best})
        won, quoted = (sum(best <= set(methods) for best in found) for found in (ours, paper))
        tied = sum(not best <= set(methods) and not best.isdisjoint(methods) for best in paper)
        ties = f", {tied} more tied as printed" if tied else ""
        counts = f"{won} of {counted(len(ours), 'line')} (paper {quoted} of {len(paper)}{ties})"
        return won, len(ours), f"{title(metric)}: {counts}"

    def _wins(self, dataset: str, first: Sequence[str], second: Sequence[str]) -> tuple[int, int]:
        """At how many s of the grid the smallest KL of the first methods is below the second's; and of how many."""
        metric = self.measurements.divergence(dataset)
        won = total = 0
        for s in self._grid(dataset, first[0], metric):
            ours, theirs = (self._means(Line("", dataset, s), methods, metric) for methods in (first, second))
            if ours and theirs:
                total += 1
                won += min(ours.values()) < min(theirs.values())
        return won, total

    def _num_parameters(self, dataset: str) -> int | None:
        sizes = self.measurements.rows.query("dataset == @dataset and method in ('full', 'kfac')")["s"]
        return int(sizes.max()) if len(sizes) else None


def summary(found: Sequence[Finding], measurements: Measurements) -> str:
    """How many claims hold, and of how many seeds the numbers are."""
    counts = Counter(finding.verdict for finding in found)
    text = f"Of {counted(len(found), 'claim')}, {counts['holds']} hold, {counts['holds in part']} hold in part"
    text += f" and {counts['does not hold']} {'does' if counts['does not hold'] == 1 else 'do'} not"
    text += f"; {counts[NOT_RUN]} cannot be judged yet. " if counts[NOT_RUN] else ". "
    seeds = [f"{d} {len(measurements.seeds(d))}" for d in measurements.datasets if "/" not in d]
    return f"{text}Seeds of the numbers below: {', '.join(seeds)}."


def beside_baselines(measurements: Measurements, dataset: str) -> str | None:
    """NLL of all methods of a set in one sentence, the best first; None where too little was run."""
    scores: dict[str, Estimate] = {}
    for method in (*FEASIBLE, "map", "temperature", "ensemble", "last-layer", "kfac", "full"):
        for s in reference_dims(measurements, dataset)[:1]:
            estimate = measurements.estimate(dataset, method, "nll", s)
            if estimate is not None:
                scores[method] = estimate
    if len(scores) < 2:
        return None
    order = sorted(scores, key=lambda m: scores[m].mean)
    s = reference_dims(measurements, dataset)[0]
    return f"{dataset}, NLL from best to worst (subspaces of s = {s}): " + ", ".join(
        f"{m} {with_error(scores[m])}" for m in order
    )


def agreement_sentences(
    measurements: Measurements, published: Published, parts: Sequence[tuple[str, str, Sequence[Line]]]
) -> list[str]:
    """For each table of the paper how many of its cells ours agree with."""
    sentences = []
    for name, table, lines in parts:
        found = [
            a for m in published.distinct(table, "metric") if (a := agreement(measurements, published, table, m, lines))
        ]
        tested, within = sum(a.tested for a in found), sum(a.within for a in found)
        if tested:
            sentences.append(
                f"{name}: {within} of {counted(tested, 'cell')} within two standard errors of the paper's."
            )
        elif found:
            sentences.append(
                f"{name}: {counted(sum(a.cells for a in found), 'cell')}, too few seeds for standard errors."
            )
        else:
            sentences.append(f"{name}: {NOT_RUN}.")
    return sentences
