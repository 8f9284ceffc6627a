"""Beyond the paper: KFAC outside of the subspace, at the paper's prior precision and at each posterior's own."""

import math
from collections.abc import Sequence

from experiments.methods import COMPLEMENTED
from experiments.recipes import COMPARED_DIMS, RECIPES
from experiments.report.checks import OPTIMUM
from experiments.report.document import Strong, Table
from experiments.report.numbers import NOTHING, Estimate, Measurements, method_name, number, with_error
from experiments.report.tables import seeds_of, title
from experiments.seed_run import PRIOR_FACTORS

PAPER = "lowrank-kfac"
COMPLEMENTS = tuple(method_name(m.projector, m.inputs, m.complement) for m in COMPLEMENTED)
NEED_EXACT = tuple(m for m, method in zip(COMPLEMENTS, COMPLEMENTED, strict=True) if method.needs_exact)
COMPARED = ("map", "kfac", PAPER, *COMPLEMENTS, OPTIMUM)
BEST = method_name("lowrank-correction", "train", "kfac-fitted")
SETS = ("enb", "redwine", "california", "naval", "fashionmnist")
SCORES = ("nll", "ece", "brier", "coverage")


def estimate_up_to(measurements: Measurements, dataset: str, method: str, metric: str, s: int) -> Estimate | None:
    """Return the mean over seeds at s, or at the largest dimension below s if the rank is lower."""
    values = _by_seed_up_to(measurements, dataset, method, metric, s)
    return Estimate.of(list(values.values())) if values else None


def _by_seed_up_to(measurements: Measurements, dataset: str, method: str, metric: str, s: int) -> dict[int, float]:
    values = [measurements.by_seed(dataset, method, metric, t) for t in _dims_up_to(measurements, dataset, method, s)]
    return {seed: value for by_seed in values for seed, value in by_seed.items()}


def _dims_up_to(measurements: Measurements, dataset: str, method: str, s: int) -> list[int]:
    """Return s alone if the method has it, else all dimensions below, the largest last."""
    dims = measurements.all_dims(dataset, method) or [s]  # empty: the method has no choice of s
    return [s] if s in dims else [t for t in dims if t <= s]


def _rank_below(measurements: Measurements, dataset: str, method: str, s: int) -> str:
    """Return ', s = 308' if the rank ends a method before s."""
    dims = _dims_up_to(measurements, dataset, method, s)
    return "" if not dims or dims[-1] == s else f", s = {dims[-1]}"


def _divergences_of_common_seeds(
    measurements: Measurements, dataset: str, methods: Sequence[str], s: int
) -> list[float] | None:
    """Return the mean KL of each method over the seeds that all of them have; None if there are none."""
    metric = measurements.divergence(dataset)
    found = [_by_seed_up_to(measurements, dataset, method, metric, s) for method in methods]
    seeds = set(found[0]).intersection(*found[1:])
    return [sum(values[seed] for seed in seeds) / len(seeds) for values in found] if seeds else None


def divergences(measurements: Measurements, datasets: Sequence[str], s: int) -> Table:
    """Return KL from the full posterior, one column per data set.

    The smallest KL of methods without the exact curvature over all parameters is in bold. The smallest KL of the others
    is in bold if it is smaller still.
    """
    columns = []
    for dataset in datasets:
        metric = measurements.divergence(dataset)
        found = {method: estimate_up_to(measurements, dataset, method, metric, s) for method in COMPARED}
        best: list[float] = []
        for needs_exact in (False, True):
            least = [e.mean for m, e in found.items() if e and m != OPTIMUM and (m in NEED_EXACT) == needs_exact]
            best += [min(least)] if least and min([*best, *least]) == min(least) else []
        cells = [with_error(e) + _rank_below(measurements, dataset, m, s) if e else NOTHING for m, e in found.items()]
        columns.append([Strong(c) if e and e.mean in best else c for e, c in zip(found.values(), cells, strict=True)])
        columns[-1].append(seeds_of(list(found.values())))
    labels = [f"{name} †" if name in NEED_EXACT else name for name in COMPARED]
    rows = [[name, *cells] for name, cells in zip([*labels, "seeds"], zip(*columns, strict=True), strict=True)]
    caption = (
        f"KL from the full posterior at s = {s} (joint over inputs; their mean for classification). † needs "
        "the exact curvature over all parameters; bold: the least without it, and the least with it where that is less"
    )
    return Table(caption, ["method", *datasets], rows)


def closed_gaps(measurements: Measurements, datasets: Sequence[str], s: int) -> Table:
    """Return how much of the gap between lowrank-kfac and the optimum of Theorem 1 is closed: 100 % at the optimum."""
    rows = []
    for method in ("kfac", *COMPLEMENTS):
        shares = [closed_gap(measurements, dataset, method, s) for dataset in datasets]
        rows.append(
            [method, *(NOTHING if share is None else f"{100 * share:.0f} %".replace("-", "−") for share in shares)]
        )
    caption = f"Share of the gap in KL between {PAPER} and the optimum of pure subspaces that is closed, s = {s}"
    return Table(caption, ["method", *datasets], rows)


def closed_gap(measurements: Measurements, dataset: str, method: str, s: int) -> float | None:
    """Return the closed share of the gap, over the seeds that all three methods have."""
    found = _divergences_of_common_seeds(measurements, dataset, (method, PAPER, OPTIMUM), s)
    if found is None:
        return None
    ours, paper, optimum = found
    return (paper - ours) / (paper - optimum)


def verdict(measurements: Measurements, datasets: Sequence[str]) -> str:
    """Return what the chosen method reaches, in one or two sentences."""
    below, gaps = [], []
    for dataset in datasets:
        for s in COMPARED_DIMS:
            found = _divergences_of_common_seeds(measurements, dataset, (BEST, "kfac", PAPER), s)
            if found is not None:
                best, *others = found
                below.append((f"{dataset} at s = {s}", best < min(others)))
        if (gap := closed_gap(measurements, dataset, BEST, COMPARED_DIMS[0])) is not None:
            gaps.append((dataset, gap))
    misses = [where for where, holds in below if not holds]
    held = (
        f"Closer to the full posterior than both KFAC and {PAPER} in {len(below) - len(misses)} of {len(below)} cases"
    )
    exceptions = f" (not on {', '.join(misses)})" if misses else ""
    closed = ", ".join(f"{dataset} {100 * gap:.0f} %".replace("-", "−") for dataset, gap in gaps)
    text = f"{BEST}: {held}{exceptions}. Gap to the optimum closed at s = {COMPARED_DIMS[0]}: {closed}."
    return f"{text} {_scores_beside_the_paper(measurements, datasets)}"


def _scores_beside_the_paper(measurements: Measurements, datasets: Sequence[str]) -> str:
    """Return on how many sets the best method's score is better than the paper's: closer need not be better."""
    s, texts = COMPARED_DIMS[0], []
    for metric, where in (("nll", "at the paper's λ"), ("own_nll", "at its own λ")):
        pairs = [measurements.common(dataset, (BEST, PAPER), metric, s) for dataset in datasets]
        better = sum(pair[BEST].mean < pair[PAPER].mean for pair in pairs if pair)
        texts.append(f"{where} on {better} of {sum(map(bool, pairs))} sets")
    return (
        f"Its NLL at s = {s} is below that of {PAPER} {', '.join(texts)}: nearness is not the same as a better score."
    )


def scores(measurements: Measurements, dataset: str) -> Table:
    """Return scores on the whole test set at the paper's λ, and on each half at the λ that suits the other half."""
    metrics = [m for m in SCORES if measurements.estimate(dataset, "map", m) is not None]
    rows = []
    for s in COMPARED_DIMS:
        for method in COMPARED:
            found = [estimate_up_to(measurements, dataset, method, m, s) for m in metrics]
            if all(estimate is None for estimate in found) or (method in ("map", "kfac") and s != COMPARED_DIMS[0]):
                continue
            own = [estimate_up_to(measurements, dataset, method, f"own_{m}", s) for m in metrics]
            priors = list(_by_seed_up_to(measurements, dataset, method, "own_prior_precision", s).values())
            cells = [cell for pair in zip(found, own, strict=True) for cell in map(_short, pair)]
            label = NOTHING if method in ("map", "kfac") else str(_dims_up_to(measurements, dataset, method, s)[-1])
            rows.append([method, label, *cells, *_own_prior(dataset, priors), seeds_of([*found, *own])])
    header = [name for m in metrics for name in (title(m), f"{title(m)}, own λ")]
    caption = (
        f"{dataset}: scores at the paper's λ and at each posterior's own (geometric mean over seeds; 'at the end': in "
        f"how many seeds it is the smallest or the largest λ tried, {PRIOR_FACTORS[0]:g} and {PRIOR_FACTORS[-1]:g} "
        "times the paper's)"
    )
    return Table(caption, ["method", "s", *header, "own λ", "at the end", "seeds"], rows, 2)


def _own_prior(dataset: str, priors: Sequence[float]) -> list[str]:
    """Return the geometric mean of λ, and in how many seeds it is an end of the grid that it was chosen from."""
    if not priors:
        return [NOTHING, NOTHING]
    ends = [RECIPES[dataset].prior_precision * factor for factor in (PRIOR_FACTORS[0], PRIOR_FACTORS[-1])]
    at_end = sum(any(math.isclose(prior, end, rel_tol=1e-6) for end in ends) for prior in priors)
    mean = math.exp(sum(map(math.log, priors)) / len(priors))
    return [number(mean), f"{at_end} of {len(priors)}"]


def _short(estimate: Estimate | None) -> str:
    return with_error(estimate, 4)
