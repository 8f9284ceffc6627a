"""Our results and the paper's figures as numbers with standard errors."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.networks import num_parameters
from experiments.recipes import RECIPES
from experiments.resnets import freeze_norms
from experiments.results import Results, Row
from experiments.training import initial_network

SMALL_DIM = 20  # up to here s has a figure of its own
WITHOUT_DIMENSION = ("map", "temperature", "ensemble", "last-layer", "kfac", "full")  # s is not a choice of theirs
PUBLISHED = Path(__file__).resolve().parents[1] / "published"
PAPER_SEEDS = 5


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its standard error, which is None for a single seed or an infinite value."""

    mean: float
    standard_error: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Return the mean and the standard error (Σ(v − mean)² / (n − 1) / n)^½."""
        n, mean = len(values), float(np.mean(values))
        error = float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 and math.isfinite(mean) else None
        return cls(mean, error, n)


@dataclass(frozen=True)
class Quote:
    """A number of the paper as printed, with its standard error if it has one."""

    mean: float
    standard_error: float | None
    digits: int  # after the decimal point


@dataclass(frozen=True)
class Difference:
    """Ours minus the paper's, also in standard errors of the difference (None if the paper has none)."""

    value: float
    standard_errors: float | None

    @classmethod
    def between(cls, ours: Estimate, paper: Quote) -> "Difference":
        """Return the difference, and how many standard errors it is.

        Rounding of the printed figures, half a unit of their last digit, counts as agreement. The standard error is
        the one of Student's test, from the pooled variance of our seeds and the paper's: a few seeds do not tell their
        own variance.
        """
        value = 0.0 if ours.mean == paper.mean else ours.mean - paper.mean  # −∞ agrees with −∞
        if paper.standard_error is None or not math.isfinite(value):
            return cls(value, None)
        rounding = 0.5 * 10.0**-paper.digits
        n, m = ours.seeds, PAPER_SEEDS
        squares = n * (n - 1) * (ours.standard_error or 0.0) ** 2 + m * (m - 1) * (paper.standard_error + rounding) ** 2
        error = math.sqrt(squares / (n + m - 2) * (1 / n + 1 / m))
        return cls(value, max(abs(value) - rounding, 0.0) / error)


class Measurements:
    """Our results, averaged over seeds on demand.

    A method is named by its projector, and by its differences from the paper's use of it (inputs of the subspace,
    curvature outside of it).
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        named = [vars(row) | {"method": method_name(row.projector, row.inputs, row.complement)} for row in rows]
        self.rows = pd.DataFrame(sorted(named, key=lambda row: _place(row["dataset"])))
        # By data set, method and metric: for every s the value of every seed.
        self._values: dict[tuple[str, str, str], dict[int | None, dict[int, float]]] = {}
        for row in self.rows.itertuples():
            s = None if row.method in WITHOUT_DIMENSION else row.s
            sweep = self._values.setdefault((row.dataset, row.method, row.metric), {})
            sweep.setdefault(s, {})[row.seed] = row.value

    @classmethod
    def read(cls, path: Path) -> "Measurements":
        """Read the results from a file that `python -m experiments run` has written."""
        if not path.exists():
            raise FileNotFoundError(f"There are no results at {path}; run `python -m experiments run` first.")
        rows = Results(path).rows()
        if not rows:
            raise ValueError(f"{path} holds no results yet; run `python -m experiments run` first.")
        return cls(rows)

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(self.rows["dataset"]))

    def methods(self, dataset: str) -> list[str]:
        return list(dict.fromkeys(self.rows.loc[self.rows["dataset"] == dataset, "method"]))

    def by_seed(self, dataset: str, method: str, metric: str, s: int | None = None) -> dict[int, float]:
        """Return the value of every seed. `s` is ignored for methods that have no choice of it."""
        return self._values.get((dataset, method, metric), {}).get(None if method in WITHOUT_DIMENSION else s, {})

    def estimate(self, dataset: str, method: str, metric: str, s: int | None = None) -> Estimate | None:
        """Return the mean over seeds; None if nothing was run."""
        values = self.by_seed(dataset, method, metric, s)
        return Estimate.of(list(values.values())) if values else None

    def common(self, dataset: str, methods: Sequence[str], metric: str, s: int | None = None) -> dict[str, Estimate]:
        """Return the means of several methods over the seeds that all of them have; empty if one was not run."""
        found = {method: self.by_seed(dataset, method, metric, s) for method in methods}
        seeds = sorted(set.intersection(*(set(values) for values in found.values())))
        return {method: Estimate.of([values[seed] for seed in seeds]) for method, values in found.items() if seeds}

    def dims(self, dataset: str, method: str, metric: str) -> list[int]:
        """Return the dimensions s that all seeds of a method have, ascending.

        If the rank of the Jacobian ends the grid, seeds end at different s; these last ones are left out.
        """
        sweep = self._values.get((dataset, method, metric), {})
        most = max((len(seeds) for seeds in sweep.values()), default=0)
        return sorted(s for s, seeds in sweep.items() if s is not None and len(seeds) == most)

    def all_dims(self, dataset: str, method: str) -> list[int]:
        """Return the dimensions s that any seed of a method has, ascending."""
        dims = {s for (d, m, _), sweep in self._values.items() if (d, m) == (dataset, method) for s in sweep}
        return sorted(s for s in dims if s is not None)

    def divergence(self, dataset: str) -> str:
        """Return the metric that the paper calls KL: joint over inputs for regression, a mean for classification."""
        metrics = set(self.rows.loc[self.rows["dataset"] == dataset, "metric"])
        return "kl" if "kl" in metrics else "kl_mean"

    def seeds(self, dataset: str) -> list[int]:
        """Return the seeds of a data set; the ensemble, one for all seeds, does not count."""
        chosen = (self.rows["dataset"] == dataset) & (self.rows["method"] != "ensemble")
        return sorted(int(seed) for seed in self.rows.loc[chosen, "seed"].unique())

    def seeds_of_methods(self, dataset: str) -> str:
        """Return '5', or '1 to 2' if methods differ; the ensemble does not count."""
        chosen = self.rows[(self.rows["dataset"] == dataset) & (self.rows["method"] != "ensemble")]
        counts = chosen.groupby("method")["seed"].nunique()
        return span(counts.tolist())


def _place(dataset: str) -> tuple[int, str]:
    """Return the place of a data set: in the order of the recipes, each before its corrupted versions, others last."""
    name = dataset.split("-c/")[0]
    return list(RECIPES).index(name) if name in RECIPES else len(RECIPES), dataset


def method_name(projector: str, inputs: str, complement: str) -> str:
    name = projector
    if inputs not in ("", "train") and name != "lowrankopt-ggn":
        name += f" from {inputs}"
    outside = complement.replace("kfac-fitted", "fitted kfac")
    return f"{name}, {outside} outside" if outside else name


def on_grid(s: int, largest: float) -> bool:
    """Whether s belongs to the main figures: 10, and from 20 on up to the largest."""
    return s == 10 or SMALL_DIM <= s <= largest


class Published:
    """The paper's numbers; `name` is the name of a file in the folder `published`."""

    def __init__(self, folder: Path = PUBLISHED) -> None:
        tables = {path.stem: pd.read_csv(path, dtype=str, keep_default_na=False) for path in folder.glob("*.csv")}
        self.names = tables.pop("names")
        self.tables = tables
        self._quotes = {
            (name, row.dataset, row.projector, int(row.s) if row.s else None, row.metric): _quote(row)
            for name, table in tables.items()
            for row in table.itertuples()
        }

    def quote(self, name: str, dataset: str, metric: str, projector: str = "", s: int | None = None) -> Quote | None:
        return self._quotes.get((name, dataset, projector, s, metric))

    def distinct(self, name: str, column: str, dataset: str | None = None) -> list[str]:
        """Return the different values of a column, in the table's order, for one data set or all."""
        table = self.tables[name]
        return list(dict.fromkeys(table.loc[table["dataset"] == dataset, column] if dataset else table[column]))

    def dims(self, name: str, dataset: str) -> list[int]:
        return [int(s) for s in self.distinct(name, "s", dataset)]


def _quote(row: object) -> Quote:
    value, error = row.value, row.standard_error  # type: ignore[attr-defined]
    digits = len(value.split("e")[0].partition(".")[2])
    return Quote(float(value), float(error) if error else None, digits)


# Numbers as text ------------------------------------------------------------------------------------------------------

NOTHING = "–"


def number(value: float | None, digits: int | None = None) -> str:
    """Return a number with this many digits after the point, or with four significant digits."""
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "−∞" if value < 0 else "∞"
    text = f"{value:.{digits}f}" if digits is not None else f"{value:.4g}"
    return text.replace("-", "−")


def with_error(estimate: Estimate | Quote | None, digits: int | None = None) -> str:
    """Return the mean, with its standard error in parentheses."""
    if estimate is None:
        return NOTHING
    text = number(estimate.mean, digits)
    error = estimate.standard_error
    if error is None:
        return text
    if digits is None and error < 99.5:
        return f"{text} ({error:.2g})".replace("-", "−")
    return f"{text} ({number(error, digits or 0)})"


def signed(value: float, digits: int) -> str:
    rounded = round(value, digits)
    return number(abs(rounded) if rounded == 0 else rounded, digits) if rounded <= 0 else f"+{number(rounded, digits)}"


def span(counts: Sequence[int]) -> str:
    """Return '5', or '2 to 5' if the numbers differ; 'no' if there are none."""
    return " to ".join(str(end) for end in sorted({min(counts), max(counts)})) if counts else "no"


def counted(amount: int, thing: str) -> str:
    """Return '1 seed', '3 seeds'."""
    return f"{amount} {thing}" if amount == 1 else f"{amount} {thing}s"


def bayesian_parameters(dataset: str) -> int:
    """Return p of the data set's network; the fixed scales and shifts of batch normalisation do not count."""
    return num_parameters(freeze_norms(initial_network(RECIPES[dataset].network, seed=0)))
