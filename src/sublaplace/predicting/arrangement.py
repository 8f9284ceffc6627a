"""Results for flat outputs in the arrangement of the network's own outputs."""

from typing import Any

from torch import Tensor

from sublaplace.model.output_layout import OutputLayout


def arranged(layout: OutputLayout | None, found: Tensor, outputs: Any = None, sides: int = 1) -> Tensor:
    """Return numbers of outputs (n, K), or with two sides matrices (n, K, K), in the network's arrangement.

    outputs: which outputs were asked for; None: all.
    """
    if layout is None:
        return found
    if outputs is not None:
        if layout.class_axis is None:
            return found
        layout = layout.with_classes(found.shape[1] // (layout.num_outputs // layout.num_classes))
    return layout.arranged(found) if sides == 1 else layout.matrix(found)


def arranged_draws(layout: OutputLayout | None, drawn: Tensor) -> Tensor:
    """Return draws of flat outputs, (count, n, K), in the network's arrangement: (count, n, …)."""
    return drawn if layout is None else layout.arranged(drawn, dim=2)


def jointly_arranged(layout: OutputLayout | None, matrix: Tensor, n: int) -> Tensor:
    """Return a matrix over all outputs of n inputs in the order of the network's own flattened outputs."""
    if layout is None:
        return matrix
    half = layout.arranged(matrix.unflatten(1, (n, -1)), dim=2).flatten(1)
    return layout.arranged(half.unflatten(0, (n, -1)), dim=1).flatten(0, -2)


def require_one_layout(layouts: set[OutputLayout | None]) -> None:
    """Raise ValueError if the outputs of several batches cannot stand in one tensor."""
    shapes = sorted(layout.shape for layout in layouts if layout is not None)
    if len(layouts) > 1:
        raise ValueError(
            f"The batches have outputs of different shapes, from (n, {', '.join(map(str, shapes[0]))}) to "
            f"(n, {', '.join(map(str, shapes[-1]))}), which one tensor cannot hold: predict for each batch, or pad the "
            "inputs to one shape."
        )
