"""Pictures of a fitted posterior, one call each, with matplotlib.

Install with ``pip install 'sublaplace[plot]'``. Every function draws into given axes or new ones, and returns them.
"""

from collections.abc import Iterable
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from sublaplace.data.batches import batches
from sublaplace.evaluation import given_or_new
from sublaplace.laplace import SubspaceLaplace

_GRID_POINTS = 300
_MARGIN = 0.25  # of the data's range, on both sides


def reliability(laplace: SubspaceLaplace, loader: Iterable[Any], axes: Any = None) -> Any:
    """Draw accuracy against confidence, of the plain network and of the posterior.

    Cost: one prediction of the data.

    Args:
        laplace: fitted with a likelihood of classes or yes/no outputs.
        loader: held-out (inputs, targets) batches.
        axes: to draw into; None: new ones.

    Raises:
        ValueError: for a likelihood without probabilities.
    """
    if not laplace.likelihood.has_probabilities:
        raise ValueError("Reliability is drawn for probabilities; use plot.coverage for regression.")
    return laplace.evaluate(loader).plot(axes)


def coverage(laplace: SubspaceLaplace, loader: Iterable[Any], axes: Any = None) -> Any:
    """Draw the share of targets inside of intervals against their level, of the plain network and of the posterior.

    Cost: one prediction of the data.

    Args:
        laplace: fitted for regression.
        loader: held-out (inputs, targets) batches.
        axes: to draw into; None: new ones.

    Raises:
        ValueError: for a likelihood with probabilities.
    """
    if laplace.likelihood.has_probabilities:
        raise ValueError("Coverage is drawn for intervals; use plot.reliability for probabilities.")
    return laplace.evaluate(loader).plot(axes)


def rejection(laplace: SubspaceLaplace, loader: Iterable[Any], axes: Any = None) -> Any:
    """Draw the error of the predictions that are kept, if the most uncertain are rejected.

    Cost: one prediction of the data.

    Args:
        laplace: fitted.
        loader: held-out (inputs, targets) batches.
        axes: to draw into; None: new ones.
    """
    return laplace.evaluate(loader).plot_rejection(axes)


def captured_share(
    laplace: SubspaceLaplace, inputs: Any, axes: Any = None, *, train_loader: Iterable[Any] | None = None
) -> Any:
    """Draw the guaranteed share of the full variance against the dimension s of the subspace.

    Cost: as `SubspaceLaplace.captured_share`.

    Args:
        laplace: fitted with a subspace.
        inputs: a tensor, a batch or a loader of inputs; labels are not needed.
        axes: to draw into; None: new ones.
        train_loader: the training data, where `laplace` does not keep them.
    """
    share = laplace.captured_share(inputs, train_loader)
    axes = given_or_new(axes)
    axes.plot(range(1, len(share) + 1), share.tolist(), color="C0")
    axes.set(xlabel="dimension s of the subspace", ylabel="guaranteed share of the full variance", ylim=(0, 1.02))
    axes.set_xlim(1, max(len(share), 2))
    return axes


def bands(
    laplace: SubspaceLaplace,
    loader: Iterable[Any],
    axes: Any = None,
    *,
    grid: Tensor | None = None,
    level: float = 0.9,
    bounds: bool = False,
    output: int = 0,
) -> Any:
    """Draw mean and intervals over inputs of one dimension, with the data.

    With `bounds`, the ends of the full Laplace approximation's interval are shaded: it ends somewhere inside of them.
    Cost: one prediction of the grid; with `bounds` one pass over the training data, where the fit made none.

    Args:
        laplace: fitted for regression, with inputs (n, 1).
        loader: (inputs, targets) batches, drawn as points.
        axes: to draw into; None: new ones.
        grid: inputs (n, 1) in ascending order. None: 300 between the data, and a quarter of their range beyond.
        level: of the intervals of new observations.
        bounds: whether to draw what the subspace guarantees about the full approximation.
        output: which output to draw.

    Raises:
        ValueError: if inputs have more dimensions, or there is no interval.
    """
    parts = list(batches(loader))
    inputs = torch.cat([part.inputs for part in parts]) if parts else torch.empty(0, device="cpu")
    if inputs.ndim != 2 or inputs.shape[1] != 1:
        raise ValueError(f"Bands are drawn over inputs of shape (n, 1), but these are {tuple(inputs.shape)}.")
    targets = torch.cat([part.targets for part in parts])
    if grid is None:
        low, high = float(inputs.min()), float(inputs.max())
        more = _MARGIN * (high - low)
        grid = torch.linspace(low - more, high + more, _GRID_POINTS, dtype=inputs.dtype, device=inputs.device)[:, None]
    with torch.no_grad():
        prediction = laplace.predict(grid)
        lower, upper = (end[:, output].tolist() for end in prediction.interval(level))
    axes, at, mean = given_or_new(axes, (6.0, 4.0)), grid[:, 0].tolist(), prediction.mean[:, output]
    axes.fill_between(at, lower, upper, color="C0", alpha=0.25, linewidth=0, label=f"{level:.0%} interval")
    if bounds:
        found, noise = laplace.bounds(grid), prediction.aleatoric[:, output, output]
        factor = NormalDist().inv_cdf((1 + level) / 2)
        least, most = (factor * (matrix[:, output, output] + noise).sqrt() for matrix in (found.lower, found.upper))
        for sign, label in ((1, "where the full approximation's ends"), (-1, None)):
            axes.fill_between(
                at,
                (mean + sign * least).tolist(),
                (mean + sign * most).tolist(),
                color="C1",
                alpha=0.35,
                linewidth=0,
                label=label,
            )
    axes.plot(at, mean.tolist(), color="C0", label="mean")
    axes.plot(inputs[:, 0].tolist(), targets[:, output].tolist(), "k.", markersize=4, label="data")
    axes.set(xlabel="input x", ylabel="target y")
    axes.legend(loc="best")
    return axes
