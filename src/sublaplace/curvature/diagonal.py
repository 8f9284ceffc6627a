"""The diagonal of the GGN."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sublaplace.curvature.operators import DiagonalPart, Part
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians.jacobian import Jacobian, require_finite_sum


@dataclass(frozen=True)
class _SquaredRows:
    sums: dict[str, Tensor]

    def add(self, jacobian: Jacobian) -> None:
        for name, block in jacobian.blocks.items():
            self.sums[name] += block.squared_sum()
        for name, head in jacobian.curved.items():
            self.sums[name] += head.squared_sum()

    def tensors(self) -> dict[str, Tensor]:
        return self.sums

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.sums.update(tensors)


def diagonal_ggn(stream: CurvatureStream, prior_precision: float) -> BlockPrecision:
    """Return Λ with GGN ≈ diag Σ_i J_iᵀ H_i J_i in one pass over the data.

    The diagonal is exact, or right in the mean if the stream samples directions.

    Cost: K backward passes and K·p multiplications per input; memory p. Of K directions, min(K, F) are enough if the
    network ends in a linear layer of F features.
    """
    layout = stream.linearization.layout
    device, dtype = stream.linearization.device, stream.linearization.dtype
    squares = _SquaredRows(
        {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in layout.sizes.items()}
    )
    stream.accumulate("diagonal GGN", squares, row_by_row=True, sampled=True)
    for name, value in squares.sums.items():
        require_finite_sum(name, value)
    parts: dict[str, Part] = {name: DiagonalPart(value.to(dtype)) for name, value in squares.sums.items()}
    return BlockPrecision(layout, parts, prior_precision).scaled(stream.scale)
