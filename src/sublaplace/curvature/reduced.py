"""The GGN in a subspace, and its product with the subspace."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.model.linalg import Vectors
from sublaplace.projection import Projection


@dataclass(frozen=True)
class _ReducedSums:
    projection: Projection
    scales: tuple[float, ...]
    sums: Tensor  # (G, s, s)
    product: Vectors | None  # (s, size) a parameter

    def add(self, jacobian: Jacobian) -> None:
        if self.product is not None:
            jacobian = jacobian.formed(self.projection.dim)
        rows = self.projection.apply(jacobian)
        exact = rows.double()
        if len(self.scales) == 1:
            flat = exact.flatten(0, 1)
            self.sums[0].addmm_(flat.T, flat)
        else:
            self.sums.baddbmm_(exact.permute(1, 2, 0), exact.transpose(0, 1))
        if self.product is not None:
            weights = rows if len(self.scales) == 1 else rows * rows.new_tensor(self.scales)[:, None]
            jacobian.add_transpose_matmul(weights, self.product)

    def tensors(self) -> dict[str, Tensor]:
        return {"sums": self.sums, **{f"product.{name}": part for name, part in (self.product or {}).items()}}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.sums.copy_(tensors["sums"])
        for name, part in (self.product or {}).items():
            part.copy_(tensors[f"product.{name}"])


def reduced_ggn(stream: CurvatureStream, projection: Projection, resumable: bool = False) -> Tensor:
    """Pᵀ GGN P = Σ_i (R_iᵀ J_i P)ᵀ (R_iᵀ J_i P), without the likelihood's scales: (G, s, s) in float64, one pass.

    G = 1, or one for each output where each has a scale of its own (σ⁻² of that output).

    Cost: K backward passes and K·p·s multiplications an input, K·s² in float64; memory G·s² beside P.
    """
    return _accumulated(stream, projection, None, resumable).sums


def reduced_ggn_and_product(
    stream: CurvatureStream, projection: Projection, resumable: bool = False
) -> tuple[Tensor, Vectors]:
    """`reduced_ggn`, and Y = GGN P in the same pass, as rows (s, p) held by parameter.

    A single scale of the likelihood is not in Y, several are. Cost: another K·p·s multiplications an input; memory p·s,
    and up to a quarter of that for rows that both products need.
    """
    product = stream.linearization.zero_vectors(projection.dim)
    return _accumulated(stream, projection, product, resumable).sums, product


def _accumulated(
    stream: CurvatureStream, projection: Projection, product: Vectors | None, resumable: bool
) -> _ReducedSums:
    s, scales = projection.dim, stream.likelihood.curvature_scales
    zeros = torch.zeros(len(scales), s, s, dtype=torch.float64, device=stream.linearization.device)
    reduced = _ReducedSums(projection, scales, zeros, product)
    stream.accumulate("reduced posterior", reduced, scaled=False, resumable=resumable)
    return reduced
