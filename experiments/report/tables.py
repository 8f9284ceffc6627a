"""The tables: ours, the paper's and the difference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.report.checks import (
    FEASIBLE,
    PAPER_PROJECTORS,
    Check,
    our_rank_correlations,
    published_rank_correlation,
    table_correlation,
)
from experiments.report.document import Strong, Table
from experiments.report.numbers import (
    NOTHING,
    PAPER_SEEDS,
    WITHOUT_DIMENSION,
    Difference,
    Estimate,
    Measurements,
    Published,
    Quote,
    counted,
    number,
    on_grid,
    signed,
    span,
    with_error,
)

NOT_RUN = "not run yet"
TITLES = {
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier score",
    "kl": "KL, joint",
    "kl_mean": "KL, mean an input",
    "log_trace": "log-trace",
}
LARGER_IS_BETTER = ("log_trace",)
FAR = 2.0  # standard errors from which a difference is set in bold


def title(metric: str) -> str:
    return TITLES.get(metric, metric.replace("_", " "))


# Ours next to the paper's ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of a table of the paper: its place and its name."""

    label: str
    dataset: str
    s: int


def lines_of(published: Published, table: str, dataset: str | None = None) -> list[Line]:
    """Return the lines of a table of scores: one per dimension of a data set, or one per corruption and dimension."""
    if dataset is not None:
        return [Line(f"s = {s}", dataset, s) for s in published.dims(table, dataset)]
    lines = []
    for name in published.distinct(table, "dataset"):
        label, dims = name.split("/")[-1].replace("_", " "), published.dims(table, name)
        lines += [Line(label if len(dims) == 1 else f"{label}, s = {s}", name, s) for s in dims]
    return lines


def beside_paper(
    measurements: Measurements, published: Published, table: str, metric: str, lines: Sequence[Line], caption: str
) -> Table:
    """Return three rows per line: ours (best in bold), the paper's, the difference (bold from two standard errors)."""
    projectors = published.distinct(table, "projector")
    rows: list[list[str]] = []
    for line in lines:
        quotes = [published.quote(table, line.dataset, metric, p, line.s) for p in projectors]
        ours = [measurements.estimate(line.dataset, p, metric, line.s) for p in projectors]
        digits = max(quote.digits for quote in quotes if quote is not None)
        rows.append([line.label, "ours", *_best_in_bold(ours, metric, digits), seeds_of(ours)])
        rows.append([line.label, "paper", *(with_error(quote, digits) for quote in quotes), str(PAPER_SEEDS)])
        differences = [difference_of(estimate, quote) for estimate, quote in zip(ours, quotes, strict=True)]
        rows.append([line.label, "difference", *(difference_cell(d, digits) for d in differences), ""])
    return Table(caption, ["", "", *projectors, "seeds"], rows, labels=2)


def seeds_of(estimates: Sequence[Estimate | None]) -> str:
    """Return '5', '2 to 5' if methods differ, or 'not run yet'."""
    counts = [estimate.seeds for estimate in estimates if estimate is not None]
    return span(counts) if counts else NOT_RUN


def _best_in_bold(estimates: Sequence[Estimate | None], metric: str, digits: int) -> list[str]:
    means = [estimate.mean for estimate in estimates if estimate is not None]
    best = (max if metric in LARGER_IS_BETTER else min)(means) if means else None
    cells = [with_error(estimate, digits) for estimate in estimates]
    return [Strong(c) if e is not None and e.mean == best else c for e, c in zip(estimates, cells, strict=True)]


def difference_of(ours: Estimate | None, paper: Quote | None) -> Difference | None:
    return None if ours is None or paper is None else Difference.between(ours, paper)


def difference_cell(difference: Difference | None, digits: int) -> str:
    if difference is None:
        return NOTHING
    text = signed(difference.value, digits)
    far = difference.standard_errors is not None and difference.standard_errors > FAR
    return Strong(text) if far else text


@dataclass(frozen=True)
class Agreement:
    """Comparison of a table of the paper with ours: the number of cells, and how many with standard errors agree."""

    cells: int
    tested: int
    within: int  # two standard errors
    median_difference: float
    correlation: float | None


def agreement(
    measurements: Measurements,
    published: Published,
    table: str,
    metric: str,
    lines: Sequence[Line],
    offset: float = 0.0,
) -> Agreement | None:
    """Return how a table compares with ours plus an offset; None if no cell was run. Cells of −∞ are left out."""
    pairs = []
    for line in lines:
        for projector in published.distinct(table, "projector"):
            ours = measurements.estimate(line.dataset, projector, metric, line.s)
            paper = published.quote(table, line.dataset, metric, projector, line.s)
            if ours is not None and paper is not None and math.isfinite(ours.mean) and math.isfinite(paper.mean):
                pairs.append((replace(ours, mean=ours.mean + offset), paper))
    if not pairs:
        return None
    differences = [Difference.between(ours, paper) for ours, paper in pairs]
    apart = [d.standard_errors for d in differences if d.standard_errors is not None]
    return Agreement(
        cells=len(pairs),
        tested=len(apart),
        within=sum(value <= FAR for value in apart),
        median_difference=float(np.median([d.value for d in differences])),
        correlation=table_correlation([ours.mean for ours, _ in pairs], [paper.mean for _, paper in pairs]),
    )


def agreement_table(
    measurements: Measurements, published: Published, parts: Sequence[tuple[str, str, Sequence[Line]]]
) -> Table:
    """Return one row per part (its name, the table, its lines) and metric."""
    rows = []
    for name, table, lines in parts:
        for metric in published.distinct(table, "metric"):
            found = agreement(measurements, published, table, metric, lines)
            if found is None:
                rows.append([name, title(metric), NOT_RUN, NOTHING, NOTHING, NOTHING])
                continue
            within = f"{found.within} of {found.tested}" if found.tested else NOTHING
            difference = signed(found.median_difference, 3)
            rows.append([name, title(metric), str(found.cells), within, difference, number(found.correlation, 2)])
    header = ["table", "metric", "cells", "within two standard errors", "median difference", "Spearman's ρ"]
    return Table("Our cells compared with the paper's", header, rows, labels=2)


# What was run ---------------------------------------------------------------------------------------------------------


def overview(measurements: Measurements, expected: Sequence[str]) -> Table:
    """Return every data set of the paper and of the results, with its seeds."""
    rows = []
    for dataset in dict.fromkeys([*expected, *measurements.datasets]):
        methods = measurements.methods(dataset)
        run = f"{measurements.seeds_of_methods(dataset)} of {PAPER_SEEDS}" if methods else NOT_RUN
        rows.append([dataset, run, str(len(methods)) if methods else NOTHING])
    header = ["data set", "seeds", "methods"]
    return Table("Seeds and methods of each data set", header, _corruptions_joined(rows), labels=3)


def notes(measurements: Measurements) -> Table:
    """Return what the runs noted: precision, ranks, anything that was cut."""
    noted = measurements.rows[measurements.rows["note"] != ""]
    rows = []
    for (dataset, note), group in noted.groupby(["dataset", "note"], sort=False):
        methods = list(dict.fromkeys(group["method"]))
        text = ", ".join(methods) if len(methods) <= 3 else counted(len(methods), "method")
        seeds = ", ".join(str(seed) for seed in sorted(group["seed"].unique()))
        rows.append([dataset, note, text, seeds])
    return Table("What the runs noted", ["data set", "note", "methods", "seeds"], _corruptions_joined(rows), labels=4)


def _corruptions_joined(rows: list[list[str]]) -> list[list[str]]:
    """Join rows that differ only in the corruption."""
    joined: dict[tuple[str, ...], int] = {}
    for dataset, *rest in rows:
        name = f"{dataset.split('/')[0]}/…" if "/" in dataset else dataset
        joined[name, *rest] = joined.get((name, *rest), 0) + 1
    return [[f"{name} ({n} corruptions)" if "/" in name else name, *rest] for (name, *rest), n in joined.items()]


# Methods of ours ------------------------------------------------------------------------------------------------------


def divergences(measurements: Measurements, dataset: str, methods: Sequence[str], largest: float) -> Table:
    """Return KL from the full posterior for every s of the grid."""
    metric = measurements.divergence(dataset)
    shown = [m for m in methods if measurements.dims(dataset, m, metric) and m not in WITHOUT_DIMENSION]
    grid = sorted({s for m in shown for s in measurements.dims(dataset, m, metric) if on_grid(s, largest)})
    rows = []
    for s in grid:
        estimates = [measurements.estimate(dataset, m, metric, s) for m in shown]
        rows.append([str(s), *_with_fewer_seeds_marked(estimates), seeds_of(estimates)])
    plain = measurements.estimate(dataset, "map", metric)
    caption = f"{dataset}: KL from the full posterior ({metric}); the plain network has {with_error(plain)}"
    if any("[" in cell for row in rows for cell in row):
        caption += ". In brackets the number of seeds, where others have more"
    return Table(caption, ["s", *shown, "seeds"], rows)


def _with_fewer_seeds_marked(estimates: Sequence[Estimate | None]) -> list[str]:
    most = max((estimate.seeds for estimate in estimates if estimate is not None), default=0)
    return [with_error(e) + (f" [{e.seeds}]" if e is not None and e.seeds < most else "") for e in estimates]


def reference_dims(measurements: Measurements, dataset: str) -> list[int]:
    """Return two dimensions at which methods are compared: the one nearest to 100 in ratio, and the largest."""
    dims = measurements.dims(dataset, "lowrank-kfac", "nll")
    return sorted({min(dims, key=lambda s: abs(math.log(s / 100))), dims[-1]}) if dims else []


def baselines(measurements: Measurements, dataset: str) -> Table:
    """Return all methods of one data set side by side, methods without a choice of s first."""
    metrics = [m for m in ("nll", "ece", "brier", "coverage", measurements.divergence(dataset), "log_trace")]
    methods = measurements.methods(dataset)
    fixed: list[tuple[str, int | None]] = [(m, None) for m in WITHOUT_DIMENSION if m in (*methods, "ensemble")]
    chosen = [
        (m, s) for s in reference_dims(measurements, dataset) for m in sorted(methods) if m not in WITHOUT_DIMENSION
    ]
    rows = []
    for method, s in [*fixed, *chosen]:
        estimates = [measurements.estimate(dataset, method, metric, s) for metric in metrics]
        run = any(estimate is not None for estimate in estimates)
        if run or method == "ensemble":
            cells = [with_error(estimate) for estimate in estimates]
            seeds = f"{PAPER_SEEDS} together" if run and method == "ensemble" else seeds_of(estimates)
            rows.append([method, NOTHING if s is None else str(s), *cells, seeds])
    known = [i for i in range(len(metrics)) if any(row[2 + i] != NOTHING for row in rows)]
    kept = [[*row[:2], *(row[2 + i] for i in known), row[-1]] for row in rows]
    return Table(dataset, ["method", "s", *(title(metrics[i]) for i in known), "seeds"], kept, labels=1)


def corrupted_baselines(measurements: Measurements, datasets: Sequence[str], s: int, metric: str) -> Table:
    """Return methods that the paper does not have, on corrupted data, next to lowrank-kfac; the best in bold."""
    methods = ("map", "temperature", "ensemble", "last-layer", "kfac", "lowrank-isotropic", "lowrank-kfac")
    run = [d for d in datasets if measurements.estimate(d, "lowrank-kfac", metric, s) is not None]
    shown = [m for m in methods if any(measurements.estimate(d, m, metric, s) is not None for d in run)]
    rows = []
    for dataset in run:
        found = [measurements.estimate(dataset, m, metric, s) for m in shown]
        rows.append([dataset.split("/")[-1].replace("_", " "), *_best_in_bold(found, metric, 3), seeds_of(found)])
    caption = f"Corrupted {datasets[0].split('-c/')[0]}, {title(metric)} of the baselines, subspaces at s = {s}"
    return Table(caption, ["corruption", *shown, "seeds"], rows)


# Trace criterion ------------------------------------------------------------------------------------------------------


def rank_correlations(measurements: Measurements, datasets: Sequence[str], largest: dict[str, float]) -> Table:
    """Return Spearman's ρ of KL with −log-trace for each set and s: the paper's projectors, and all feasible ones."""
    rows = []
    for dataset in datasets:
        dims = {s for m in FEASIBLE for s in measurements.dims(dataset, m, "log_trace")}
        for s in sorted(s for s in dims if on_grid(s, largest.get(dataset, math.inf))):
            cells = []
            for methods in (PAPER_PROJECTORS, FEASIBLE):
                found, most = our_rank_correlations(measurements, dataset, s, methods)
                cells += [with_error(Estimate.of(found), 3) if found else NOTHING, str(most) if most else NOTHING]
            if cells[0] != NOTHING or cells[2] != NOTHING:
                rows.append([dataset, str(s), *cells])
    header = ["data set", "s", "ρ, the paper's projectors", "methods", "ρ, all feasible projectors", "methods"]
    return Table("Spearman's ρ of KL with −log-trace, mean over seeds", header, rows)


def corrupted_rank_correlations(measurements: Measurements, published: Published) -> Table:
    """Return ρ of KL with −log-trace on each corruption: ours, and the one of the paper's table."""
    rows = []
    for line in lines_of(published, "mnist_c_approximation_quality"):
        found, _ = our_rank_correlations(measurements, line.dataset, line.s, PAPER_PROJECTORS)
        paper = published_rank_correlation(published, line.dataset, line.s)
        ours = with_error(Estimate.of(found), 3) if found else NOTHING
        rows.append([line.label, ours, number(paper, 3), str(len(found)) if found else NOT_RUN])
    return Table("Corrupted MNIST, s = 100", ["corruption", "ours", "paper", "seeds"], rows)


def check_table(checks: Sequence[Check]) -> Table:
    rows = [
        [
            check.claim,
            str(check.checked),
            str(len(check.violations)),
            number(check.worst) if check.violations else NOTHING,
        ]
        for check in checks
    ]
    return Table("Relations that must hold in every row", ["relation", "rows", "violations", "worst"], rows)
