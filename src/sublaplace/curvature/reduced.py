"""The GGN in a subspace, and the product of the GGN with the basis of the subspace."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.wanted import Wanted
from sublaplace.model.linalg import Vectors
from sublaplace.projection import Projection


@dataclass(frozen=True)
class _ReducedSums:
    projection: Projection
    scales: tuple[float, ...]
    sums: Tensor  # (G, s, s)
    product: Vectors | None  # (s, size) per parameter

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
    """Return Pᵀ GGN P = Σ_i (R_iᵀ J_i P)ᵀ (R_iᵀ J_i P), without the likelihood's scales, in one pass over the data.

    Cost: K backward passes and K·p·s multiplications per input, or s Jacobian–vector products (2·s forward passes)
    where that is less; and K·s² multiplications in float64. Memory: G·s².

    Args:
        stream: the training data.
        projection: P.
        resumable: whether the stream's checkpoint stores the sums.

    Returns:
        (G, s, s) in float64, where G is the number of scales: 1, or one per output if each output has its own σ⁻².
    """
    return _accumulated(stream, projection, None, resumable).sums


def reduced_ggn_and_product(
    stream: CurvatureStream, projection: Projection, resumable: bool = False
) -> tuple[Tensor, Vectors]:
    """Return `reduced_ggn` and Y = GGN P, computed in the same pass.

    Y has rows (s, size) per parameter. It does not include a single scale of the likelihood, but it does include
    several scales.

    Cost: another K·p·s multiplications per input; memory p·s, and up to a quarter of it for rows that both products
    share. In forward mode, s backward passes per batch give Y.
    """
    product = stream.linearization.zero_vectors(projection.dim)
    return _accumulated(stream, projection, product, resumable).sums, product


def _accumulated(
    stream: CurvatureStream, projection: Projection, product: Vectors | None, resumable: bool
) -> _ReducedSums:
    s, scales = projection.dim, stream.likelihood.curvature_scales
    zeros = torch.zeros(len(scales), s, s, dtype=torch.float64, device=stream.linearization.device)
    reduced = _ReducedSums(projection, scales, zeros, product)
    wanted = Wanted(s, names=projection.support) if product is None else Wanted(s, transposed=True)
    stream.accumulate("reduced posterior", reduced, scaled=False, resumable=resumable, wanted=wanted)
    return reduced
