"""The GGN in a subspace."""

import torch
from torch import Tensor

from sublaplace.curvature.stream import CurvatureStream
from sublaplace.projection import Projection


def reduced_ggn(stream: CurvatureStream, projection: Projection) -> Tensor:
    """Pᵀ GGN P = Σ_i (R_iᵀ J_i P)ᵀ (R_iᵀ J_i P), without the likelihood's scale: (s, s) in float64, one pass.

    Cost: K backward passes and K·p·s multiplications an input, K·s² in float64; memory s² beside P.
    """
    s = projection.dim
    total = torch.zeros(s, s, dtype=torch.float64, device=stream.linearization.device)
    for jacobian in stream.jacobians("reduced posterior"):
        rows = projection.apply(jacobian).flatten(0, 1).double()
        total.addmm_(rows.T, rows)
        del jacobian  # or it would stand in memory beside the next one
    return total
