"""The exact GGN, where it fits."""

import torch
from torch import Tensor

from sublaplace.curvature.stream import CurvatureStream
from sublaplace.precision import DensePrecision, DualPrecision


def exact_ggn(stream: CurvatureStream, num_rows: int, prior_precision: float) -> DensePrecision | DualPrecision:
    """Λ = Σ_i J_iᵀ H_i J_i + λI, dense in float64: as p × p, or as its `num_rows` rows (N·C) where these are fewer.

    Cost: num_rows·min(p, num_rows)·p; memory: see `exact_bytes`.
    """
    layout = stream.linearization.layout
    p = layout.num_parameters
    scale = stream.likelihood.curvature_scale
    device = stream.linearization.device
    if num_rows < p:
        rows = [torch.zeros(0, p, dtype=torch.float64, device=device)]
        rows += [j.dense_rows().double() for j in stream.jacobians("exact GGN (dual)")]
        return DualPrecision(layout, torch.cat(rows), prior_precision).scaled(scale)
    ggn: Tensor = torch.zeros(p, p, dtype=torch.float64, device=device)
    for jacobian in stream.jacobians("exact GGN"):
        dense = jacobian.dense_rows().double()
        ggn.addmm_(dense.T, dense)
    return DensePrecision(layout, ggn.mul_(scale), prior_precision, scale)


def exact_bytes(num_parameters: int, num_rows: int) -> int:
    """Memory that `exact_ggn` and one Cholesky factor of it need at their peak."""
    smaller = min(num_parameters, num_rows)
    return 8 * (2 * smaller * num_parameters + 2 * smaller**2)
