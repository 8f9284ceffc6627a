"""How the seconds of a fit's stages grow from a rehearsal to all data."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sublaplace.fitting.fitted import Stage
from sublaplace.projectors.low_rank import DENSE_ROWS

_SHORT = 0.5  # seconds; shorter work is timed three times, because other work on the machine disturbs it
_SEARCH_PASSES = 10  # of a search for P without the covariance of X′


@dataclass(frozen=True)
class Sizes:
    """How much of everything a fit handles."""

    num_data: int  # N
    subspace_inputs: int  # n of X′
    left_out: int  # inputs of leave-one-out
    weighted: tuple[int, ...]  # sizes of the subsamples that the complement's weight is fitted on
    validated: int  # validation inputs
    rows: int  # Jacobian rows of X′
    num_parameters: int  # p


@dataclass(frozen=True)
class Rates:
    """Seconds of two operations on this machine, in float64, as the algebra of a fit uses them."""

    multiplication: float  # in a product of large matrices
    eigenvector: float  # of a decomposition, over the cube of its size

    @classmethod
    def measured(cls, device: torch.device, size: int = 512) -> "Rates":
        """Measure both. Cost: about a tenth of a second."""
        matrix = torch.randn(size, size, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(0))
        matrix = (matrix @ matrix.T).to(device)
        cube = size**3
        product = least_seconds(lambda: matrix @ matrix)
        return cls(product / cube, least_seconds(lambda: torch.linalg.eigh(matrix)) / cube)

    def gram(self, rows: int, num_parameters: int) -> float:
        """Return the seconds of a Gram matrix of rows, of which one triangle is computed, and of its eigenvectors."""
        return self.multiplication * rows**2 * num_parameters / 2 + self.eigenvector * rows**3


def scaled_stage(name: str, stage: Stage, rehearsed: Sizes, real: Sizes, rates: Rates) -> float:
    """Return the seconds of a stage with all data from its seconds in a rehearsal.

    Passes over the training data grow with N; factorisations of the curvature stay. The rest grows with the inputs that
    the stage looks at: X′ for the projector, subsamples for the complement's weight and leave-one-out. Gram matrices of
    rows, and their eigenvectors, are counted apart, because they grow faster.
    """
    if name == "validation":
        growth = real.validated / max(1, rehearsed.validated)
        return stage.in_factorisations + (stage.seconds - stage.in_factorisations) * growth
    if name == "leave-one-out":
        return stage.seconds * real.left_out / max(1, rehearsed.left_out)
    if name == "complement's weight":
        return _scaled_weight(stage.seconds, rehearsed, real, rates)
    per_pass = stage.in_passes * real.num_data / rehearsed.num_data
    rest = max(0.0, stage.seconds - stage.in_passes - stage.in_factorisations)
    if name == "projector" and rehearsed.subspace_inputs:
        rest = _scaled_projector(rest, rehearsed, real, rates)
    return per_pass + stage.in_factorisations + rest


def _scaled_projector(seconds: float, rehearsed: Sizes, real: Sizes, rates: Rates) -> float:
    growth = real.subspace_inputs / rehearsed.subspace_inputs
    linear = _remaining(seconds, rates.gram(rehearsed.rows, real.num_parameters)) * growth
    if real.rows > DENSE_ROWS:
        return _SEARCH_PASSES * linear
    return linear + rates.gram(real.rows, real.num_parameters)


def _scaled_weight(seconds: float, rehearsed: Sizes, real: Sizes, rates: Rates) -> float:
    outputs = rehearsed.rows // max(1, rehearsed.subspace_inputs)

    def grams(sizes: Sizes) -> float:
        return sum(rates.gram(size * outputs, sizes.num_parameters) for size in sizes.weighted)

    growth = sum(real.weighted) / max(1, sum(rehearsed.weighted))
    return _remaining(seconds, grams(rehearsed)) * growth + grams(real)


def _remaining(seconds: float, part: float) -> float:
    """Return the seconds without a counted part, which may be counted too high: at least a quarter remains."""
    return max(seconds - part, seconds / 4)


def least_seconds(run: Callable[[], Any]) -> float:
    """Return the seconds of some work, the least of three if it is short."""
    found: list[float] = []
    while len(found) < (3 if sum(found) < _SHORT else 1):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)
