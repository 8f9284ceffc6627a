"""Relations that must hold in every row (traces are bounded and grow), and how well the trace orders methods."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scipy.stats import spearmanr

from experiments.report.numbers import Measurements, Published

TOLERANCE = 1e-6  # in the logarithm of the trace, for rounding
PAPER_PROJECTORS = ("lowrank-diagonal", "lowrank-kfac", "subset-diagonal", "subset-magnitude", "subset-swag")
FEASIBLE = (*PAPER_PROJECTORS, "lowrank-isotropic", "lowrank-ggn")
OPTIMUM = "lowrankopt-ggn"


@dataclass
class Check:
    """A relation that theory demands, over all rows to which it applies."""

    claim: str
    checked: int = 0
    violations: list[str] = field(default_factory=list)
    worst: float = 0.0

    def test(self, excess: float, where: str) -> None:
        """Count one row; a positive `excess` is the amount by which the relation fails."""
        self.checked += 1
        if not excess <= TOLERANCE:  # NaN fails too
            self.violations.append(where)
            self.worst = max(self.worst, excess)


def trace_checks(measurements: Measurements) -> list[Check]:
    """Return Lemma 2 and Theorem 1 checked on every seed, set and subspace, from the logarithms of traces."""
    below_full = Check("the trace of a subspace is at most that of the full posterior (Lemma 2)")
    below_optimum = Check("the trace of a subspace is at most that of the optimum of the same s (Theorem 1)")
    growing = Check("the trace grows with s")
    for dataset in measurements.datasets:
        full = measurements.by_seed(dataset, "full", "log_trace")
        for method in (*FEASIBLE, OPTIMUM, "last-layer"):
            last: dict[int, float] = {}
            for s in _all_dims(measurements, dataset, method):
                optimum = measurements.by_seed(dataset, OPTIMUM, "log_trace", s)
                for seed, value in measurements.by_seed(dataset, method, "log_trace", s).items():
                    where = f"{dataset}, seed {seed}, {method}, s = {s}"
                    if seed in full:
                        below_full.test(_excess(value, full[seed]), where)
                    if seed in optimum and method != OPTIMUM:
                        below_optimum.test(_excess(value, optimum[seed]), where)
                    if seed in last:
                        growing.test(_excess(last[seed], value), where)
                    last[seed] = value
    return [below_full, below_optimum, growing]


def divergence_check(measurements: Measurements) -> Check:
    """Return the check that KL ≥ 0 wherever it was computed."""
    check = Check("the KL divergence from the full posterior is not negative")
    rows = measurements.rows
    for row in rows[rows["metric"].isin(["kl", "kl_mean", "kl_sum"])].itertuples():
        check.test(-row.value, f"{row.dataset}, seed {row.seed}, {row.method}, s = {row.s}")
    return check


def _all_dims(measurements: Measurements, dataset: str, method: str) -> list[int]:
    rows = measurements.rows
    chosen = (rows["dataset"] == dataset) & (rows["method"] == method) & (rows["metric"] == "log_trace")
    return sorted(int(s) for s in rows.loc[chosen, "s"].unique())


def _excess(smaller: float, larger: float) -> float:
    return 0.0 if smaller == larger else smaller - larger  # −∞ is not above −∞


def rank_correlation(divergences: Sequence[float], log_traces: Sequence[float]) -> float | None:
    """Return Spearman's ρ of KL with −log-trace: 1 if a larger trace always means a smaller divergence.

    Return None with fewer than three methods, or if one of the two is equal for all methods.
    """
    if len(divergences) < 3 or len(set(divergences)) == 1 or len(set(log_traces)) == 1:
        return None
    return float(spearmanr(divergences, [-value for value in log_traces]).statistic)


def our_rank_correlations(
    measurements: Measurements, dataset: str, s: int, methods: Sequence[str]
) -> tuple[list[float], int]:
    """Return ρ of every seed, and over how many methods at most."""
    metric = measurements.divergence(dataset)
    divergences = {m: measurements.by_seed(dataset, m, metric, s) for m in methods}
    log_traces = {m: measurements.by_seed(dataset, m, "log_trace", s) for m in methods}
    found, most = [], 0
    for seed in measurements.seeds(dataset):
        both = [m for m in methods if seed in divergences[m] and seed in log_traces[m]]
        rho = rank_correlation([divergences[m][seed] for m in both], [log_traces[m][seed] for m in both])
        if rho is not None:
            found.append(rho)
            most = max(most, len(both))
    return found, most


def published_rank_correlation(published: Published, dataset: str, s: int) -> float | None:
    """Return ρ of the paper's own table on corrupted MNIST."""
    table = "mnist_c_approximation_quality"
    pairs = [
        (published.quote(table, dataset, "kl_mean", p, s), published.quote(table, dataset, "log_trace", p, s))
        for p in PAPER_PROJECTORS
    ]
    known = [(kl.mean, trace.mean) for kl, trace in pairs if kl is not None and trace is not None]
    return rank_correlation([kl for kl, _ in known], [trace for _, trace in known])


def table_correlation(ours: Sequence[float], paper: Sequence[float]) -> float | None:
    """Return Spearman's ρ of our cells with the paper's cells."""
    finite = [(a, b) for a, b in zip(ours, paper, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len(finite) < 3:
        return None
    return float(spearmanr([a for a, _ in finite], [b for _, b in finite]).statistic)
