"""All data sets of the benchmark by name: tables, pictures and text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from experiments.calibration import cifar, fashion, text
from experiments.calibration.problem import Problem
from experiments.calibration.sets import TABLE_SETS, Kind
from experiments.calibration.trained import table_problems

Load = Callable[[Sequence[int]], dict[int, list[Problem]]]
"""Gives, for each split, the problems whose predictions are pooled: one, or two halves that are tuned on each other."""


@dataclass(frozen=True)
class Registered:
    """A data set: whether defaults may be chosen on it, how its splits are loaded, and what a reader must know."""

    kind: Kind
    load: Load
    most_splits: int = 5
    note: str = ""


def all_sets() -> dict[str, Registered]:
    """Return all sets, in the order in which they are run."""
    tables = {name: Registered(each.kind, _tabular(name)) for name, each in TABLE_SETS.items()}
    return {
        **tables,
        "fashionmnist": Registered("report", fashion.fashion_problems, 3, fashion.NOTE),
        **{
            name: Registered(each.kind, partial(cifar.cifar_problems, name=name), 1, each.note)
            for name, each in cifar.NETWORKS.items()
        },
        "movie-reviews": Registered("report", text.text_problems, 3, text.NOTE),
    }


def _tabular(name: str) -> Load:
    def load(splits: Sequence[int]) -> dict[int, list[Problem]]:
        return {problem.split: [problem] for problem in table_problems(TABLE_SETS[name], splits)}

    return load
