"""The GGN in a subspace."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians import Jacobian
from sublaplace.projection import Projection


@dataclass(frozen=True)
class _ReducedSums:
    projection: Projection
    sums: Tensor  # (G, s, s)

    def add(self, jacobian: Jacobian) -> None:
        rows = self.projection.apply(jacobian).double()
        if len(self.sums) == 1:
            flat = rows.flatten(0, 1)
            self.sums[0].addmm_(flat.T, flat)
        else:
            self.sums.baddbmm_(rows.permute(1, 2, 0), rows.transpose(0, 1))

    def tensors(self) -> dict[str, Tensor]:
        return {"sums": self.sums}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.sums.copy_(tensors["sums"])


def reduced_ggn(stream: CurvatureStream, projection: Projection, resumable: bool = False) -> Tensor:
    """Pᵀ GGN P = Σ_i (R_iᵀ J_i P)ᵀ (R_iᵀ J_i P), without the likelihood's scales: (G, s, s) in float64, one pass.

    G = 1, or one for each output where each has a scale of its own (σ⁻² of that output).

    Cost: K backward passes and K·p·s multiplications an input, K·s² in float64; memory G·s² beside P.
    """
    s, groups = projection.dim, len(stream.likelihood.curvature_scales)
    zeros = torch.zeros(groups, s, s, dtype=torch.float64, device=stream.linearization.device)
    reduced = _ReducedSums(projection, zeros)
    stream.accumulate("reduced posterior", reduced, scaled=False, resumable=resumable)
    return reduced.sums
