"""Means, standard errors and ranks over splits and data sets."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.calibration.table import Line

RESAMPLES = 2000
Values = Mapping[tuple[str, str], Mapping[int, float]]
"""For each data set and method the values of a score by split."""


@dataclass(frozen=True)
class Mean:
    """A mean with its standard error, which is NaN where it cannot be known."""

    value: float
    error: float


@dataclass(frozen=True)
class Rank:
    """A mean rank over data sets with the 95 % bootstrap interval over the data sets."""

    value: float
    low: float
    high: float


def values_of(lines: Iterable[Line], score: str) -> dict[tuple[str, str], dict[int, float]]:
    """Gather a score by data set, method and split; lines without it, or with NaN, are left out."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for line in lines:
        if not math.isnan(line.scores.get(score, math.nan)):
            values.setdefault((line.dataset, line.method), {})[line.split] = line.scores[score]
    return values


def common_sets(values: Values, methods: Sequence[str]) -> list[str]:
    """List the data sets on which all of the methods were run, on the same splits, in order of first occurrence."""
    names = dict.fromkeys(name for name, _ in values)

    def is_common(name: str) -> bool:
        splits = [set(values.get((name, method), ())) for method in methods]
        return bool(splits[0]) and all(each == splits[0] for each in splits)

    return [name for name in names if is_common(name)]


def mean_over_splits(by_split: Mapping[int, float]) -> Mean:
    """Return the mean over the splits and its standard error s/√k."""
    found = np.array(list(by_split.values()))
    error = found.std(ddof=1) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return Mean(float(found.mean()), float(error))


def mean_over_sets(values: Values, method: str, names: Sequence[str]) -> Mean:
    """Return the mean of the sets' means, with the standard error that the splits cause, √(Σ errorᵢ²)/m.

    Sets with a single split have no error that is known and add none.
    """
    means = [mean_over_splits(values[name, method]) for name in names]
    squares = [mean.error**2 for mean in means if not math.isnan(mean.error)]
    error = math.sqrt(sum(squares)) / len(means) if squares else math.nan
    return Mean(sum(mean.value for mean in means) / len(means), error)


def mean_ranks(values: Values, methods: Sequence[str], names: Sequence[str]) -> dict[str, Rank]:
    """Rank the methods on each set by their mean over the splits, least first, ties shared; average over the sets."""
    from scipy.stats import rankdata

    table = np.array([[mean_over_splits(values[name, method]).value for method in methods] for name in names])
    ranks = rankdata(table, axis=1)
    draws = np.random.default_rng(0).integers(len(names), size=(RESAMPLES, len(names)))
    low, high = np.quantile(ranks[draws].mean(1), [0.025, 0.975], axis=0)
    return {method: Rank(float(ranks[:, k].mean()), float(low[k]), float(high[k])) for k, method in enumerate(methods)}


def difference(values: Values, name: str, method: str, reference: str) -> Mean:
    """Return the mean difference method − reference on a set, paired by split, with its standard error."""
    ours, others = values[name, method], values[name, reference]
    return mean_over_splits({split: ours[split] - others[split] for split in ours if split in others})


def worse_sets(values: Values, names: Sequence[str], method: str, reference: str) -> dict[str, Mean]:
    """Find the sets on which a method is worse than the reference by more than two standard errors."""
    differences = {name: difference(values, name, method, reference) for name in names}
    return {name: found for name, found in differences.items() if found.value > 2 * found.error}
