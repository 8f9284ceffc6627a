"""The diagonal of the GGN."""

import torch

from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians.jacobian import non_finite_jacobian
from sublaplace.parts import DiagonalPart, Part
from sublaplace.precision import BlockPrecision


def diagonal_ggn(stream: CurvatureStream, prior_precision: float) -> BlockPrecision:
    r"""Λ with GGN ≈ diag Σ_i J_iᵀ H_i J_i: exact diagonal, one pass.

    Cost: K backward passes an input and the squared rows, n·K·p multiplications; memory p.
    """
    layout = stream.linearization.layout
    device, dtype = stream.linearization.device, stream.linearization.dtype
    sums = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in layout.sizes.items()}
    for jacobian in stream.jacobians("diagonal GGN", row_by_row=True):
        for name, block in jacobian.blocks.items():
            sums[name] += block.squared_sum()
    for name, value in sums.items():
        if not torch.isfinite(value).all():
            raise ValueError(non_finite_jacobian(name))
    parts: dict[str, Part] = {name: DiagonalPart(value.to(dtype)) for name, value in sums.items()}
    return BlockPrecision(layout, parts, prior_precision).scaled(stream.likelihood.curvature_scale)
