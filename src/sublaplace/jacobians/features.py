r"""Jacobian rows of many outputs that are linear in fewer features.

If the network ends in a linear layer, :math:`f = W\varphi + b` with F < C features, the rows of all parameters before
it are :math:`W \, \partial\varphi/\partial\theta`: F backward passes give the rows of all C outputs.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from sublaplace.jacobians.blocks import Block


@dataclass(frozen=True)
class FeatureBlock:
    """Rows W r for the rows r of F features, of which only the latter are stored: K = C."""

    inner: Block  # rows of the features: K = F
    mix: Tensor  # W: (C, F)

    @property
    def size(self) -> int:
        return self.inner.size

    def rows(self) -> Tensor:
        return self.mix @ self.inner.rows()

    def matmul(self, vectors: Tensor) -> Tensor:
        return self.mix @ self.inner.matmul(vectors)

    def add_transpose_matmul(self, weights: Tensor, into: Tensor) -> None:
        self.inner.add_transpose_matmul(self.mix.T @ weights, into)

    def squared_sum(self) -> Tensor:
        return self.rows().square().sum((0, 1))

    def scaled(self, factor: float) -> "FeatureBlock":
        return replace(self, inner=self.inner.scaled(factor))

    def columns(self, indices: Tensor) -> Tensor:
        return self.mix @ self.inner.columns(indices)
