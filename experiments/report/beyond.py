"""Beyond the paper: KFAC outside of the subspace, at the paper's prior precision and at each posterior's own."""

from collections.abc import Sequence

from experiments.methods import COMPLEMENTED
from experiments.recipes import COMPARED_DIMS
from experiments.report.checks import OPTIMUM
from experiments.report.document import Strong, Table
from experiments.report.numbers import NOTHING, Estimate, Measurements, method_name, number, with_error
from experiments.report.tables import seeds_of, title

PAPER = "lowrank-kfac"
COMPLEMENTS = tuple(method_name(m.projector, m.inputs, m.complement) for m in COMPLEMENTED)
COMPARED = ("map", "kfac", PAPER, *COMPLEMENTS, OPTIMUM)
BEST = method_name("lowrank-correction", "train", "kfac-fitted")
SETS = ("enb", "redwine", "california", "naval", "fashionmnist")
SCORES = ("nll", "ece", "brier", "coverage")


def estimate_up_to(measurements: Measurements, dataset: str, method: str, metric: str, s: int) -> Estimate | None:
    """The mean over seeds at s, or at the largest dimension below, where the rank is lower."""
    values = _by_seed_up_to(measurements, dataset, method, metric, s)
    return Estimate.of(list(values.values())) if values else None


def _by_seed_up_to(measurements: Measurements, dataset: str, method: str, metric: str, s: int) -> dict[int, float]:
    if found := measurements.by_seed(dataset, method, metric, s):
        return found
    values = [
        measurements.by_seed(dataset, method, metric, t) for t in measurements.all_dims(dataset, method) if t <= s
    ]
    return {seed: value for by_seed in values for seed, value in by_seed.items()}


def _divergences_of_common_seeds(
    measurements: Measurements, dataset: str, methods: Sequence[str], s: int
) -> list[float] | None:
    """The mean KL of each method over the seeds that all of them have; None where there are none."""
    metric = measurements.divergence(dataset)
    found = [_by_seed_up_to(measurements, dataset, method, metric, s) for method in methods]
    seeds = set(found[0]).intersection(*found[1:])
    return [sum(values[seed] for seed in seeds) / len(seeds) for values in found] if seeds else None


def divergences(measurements: Measurements, datasets: Sequence[str], s: int) -> Table:
    """KL from the full posterior, one column a data set; the least of what can be had in practice in bold."""
    columns = []
    for dataset in datasets:
        metric = measurements.divergence(dataset)
        found = [estimate_up_to(measurements, dataset, method, metric, s) for method in COMPARED]
        practical = [e.mean for e, method in zip(found, COMPARED, strict=True) if e is not None and method != OPTIMUM]
        least = min(practical, default=None)
        cells = [with_error(e) for e in found]
        columns.append(
            [Strong(c) if e is not None and e.mean == least else c for e, c in zip(found, cells, strict=True)]
        )
        columns[-1].append(seeds_of(found))
    rows = [[name, *cells] for name, cells in zip([*COMPARED, "seeds"], zip(*columns, strict=True), strict=True)]
    caption = f"KL from the full posterior at s = {s} (joint over the inputs; a mean an input for classification)"
    return Table(caption, ["method", *datasets], rows)


def closed_gaps(measurements: Measurements, datasets: Sequence[str], s: int) -> Table:
    """How much of the gap between lowrank-kfac and the optimum of Theorem 1 is closed: 100 % at the optimum."""
    rows = []
    for method in ("kfac", *COMPLEMENTS):
        shares = [closed_gap(measurements, dataset, method, s) for dataset in datasets]
        rows.append(
            [method, *(NOTHING if share is None else f"{100 * share:.0f} %".replace("-", "−") for share in shares)]
        )
    caption = f"Share of the gap in KL between {PAPER} and the optimum of pure subspaces that is closed, s = {s}"
    return Table(caption, ["method", *datasets], rows)


def closed_gap(measurements: Measurements, dataset: str, method: str, s: int) -> float | None:
    """Of the seeds that all three have."""
    found = _divergences_of_common_seeds(measurements, dataset, (method, PAPER, OPTIMUM), s)
    if found is None:
        return None
    ours, paper, optimum = found
    return (paper - ours) / (paper - optimum)


def verdict(measurements: Measurements, datasets: Sequence[str]) -> str:
    """What the chosen method reaches, in a sentence or two."""
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
        f"Nearer to the full posterior than both KFAC and {PAPER} in {len(below) - len(misses)} of {len(below)} cases"
    )
    exceptions = f" (not on {', '.join(misses)})" if misses else ""
    closed = ", ".join(f"{dataset} {100 * gap:.0f} %".replace("-", "−") for dataset, gap in gaps)
    return f"{BEST}: {held}{exceptions}. Gap to the optimum closed at s = {COMPARED_DIMS[0]}: {closed}."


def scores(measurements: Measurements, dataset: str) -> Table:
    """Scores on the whole test set at the paper's λ, and on either half at the λ that suits the other half."""
    metrics = [m for m in SCORES if measurements.estimate(dataset, "map", m) is not None]
    rows = []
    for s in COMPARED_DIMS:
        for method in COMPARED:
            found = [estimate_up_to(measurements, dataset, method, m, s) for m in metrics]
            if all(estimate is None for estimate in found) or (method in ("map", "kfac") and s != COMPARED_DIMS[0]):
                continue
            own = [estimate_up_to(measurements, dataset, method, f"own_{m}", s) for m in metrics]
            prior = estimate_up_to(measurements, dataset, method, "own_prior_precision", s)
            cells = [cell for pair in zip(found, own, strict=True) for cell in map(_short, pair)]
            label = NOTHING if method in ("map", "kfac") else str(s)
            rows.append([method, label, *cells, number(prior.mean if prior else None)])
    header = [name for m in metrics for name in (title(m), f"{title(m)}, own λ")]
    return Table(
        f"{dataset}: scores at the paper's λ and at each posterior's own", ["method", "s", *header, "own λ"], rows, 2
    )


def _short(estimate: Estimate | None) -> str:
    return with_error(estimate, 4)
