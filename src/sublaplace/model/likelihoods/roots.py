"""Roots R of output Hessians, H = RᵀR, in forms that need not be matrices (n, K, C)."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Root(Protocol):
    """The root R (n, K, C) of the output Hessians of n inputs, without the likelihood's scales."""

    def times(self, columns: Tensor) -> Tensor:
        """Return R M for M (n, C, r): (n, K, r)."""

    def combined(self, weights: Tensor) -> Tensor:
        """Return Z R for Z (n, m, K): (n, m, C)."""

    def squared_lengths(self) -> Tensor:
        """Return the squared lengths of the rows: (n, K)."""

    def diagonal(self) -> Tensor:
        """Return the diagonal of H, the squared lengths of the columns: (n, C)."""


@dataclass(frozen=True)
class MatrixRoot:
    """A root as a matrix."""

    rows: Tensor  # (n, K, C)

    def times(self, columns: Tensor) -> Tensor:
        return self.rows @ columns

    def combined(self, weights: Tensor) -> Tensor:
        return weights @ self.rows

    def squared_lengths(self) -> Tensor:
        return self.rows.square().sum(2)

    def diagonal(self) -> Tensor:
        return self.rows.square().sum(1)


@dataclass(frozen=True)
class DiagonalRoot:
    """The root diag d of independent outputs: K = C."""

    values: Tensor  # d: (n, C)

    def times(self, columns: Tensor) -> Tensor:
        return self.values.unsqueeze(2) * columns

    def combined(self, weights: Tensor) -> Tensor:
        return weights * self.values.unsqueeze(1)

    def squared_lengths(self) -> Tensor:
        return self.values.square()

    def diagonal(self) -> Tensor:
        return self.values.square()


@dataclass(frozen=True)
class SoftmaxRoot:
    """The root of diag φ − φφᵀ with the rows √φ_k (e_k − φ): K = C. All products cost n·C per column."""

    probabilities: Tensor  # φ: (n, C)

    def times(self, columns: Tensor) -> Tensor:
        phi = self.probabilities.unsqueeze(2)
        return phi.sqrt() * (columns - (phi * columns).sum(1, keepdim=True))

    def combined(self, weights: Tensor) -> Tensor:
        phi = self.probabilities.unsqueeze(1)
        weighted = weights * phi.sqrt()
        return weighted - weighted.sum(2, keepdim=True) * phi

    def squared_lengths(self) -> Tensor:
        phi = self.probabilities
        return phi * (1 - 2 * phi + phi.square().sum(1, keepdim=True))

    def diagonal(self) -> Tensor:
        return self.probabilities * (1 - self.probabilities)


@dataclass(frozen=True)
class PositionsRoot:
    """The block-diagonal root of inputs with L positions each, from the roots of the single positions.

    K = L·k and L·C columns; nothing larger than the arguments is formed.
    """

    single: Root  # of all positions of all inputs: (n·L, k, C)
    positions: int  # L

    def times(self, columns: Tensor) -> Tensor:
        L = self.positions
        return self.single.times(columns.unflatten(1, (L, -1)).flatten(0, 1)).unflatten(0, (-1, L)).flatten(1, 2)

    def combined(self, weights: Tensor) -> Tensor:
        L = self.positions
        rows = weights.unflatten(2, (L, -1)).transpose(1, 2).flatten(0, 1)  # (n·L, m, k)
        return self.single.combined(rows).unflatten(0, (-1, L)).transpose(1, 2).flatten(2)

    def squared_lengths(self) -> Tensor:
        return self.single.squared_lengths().unflatten(0, (-1, self.positions)).flatten(1)

    def diagonal(self) -> Tensor:
        return self.single.diagonal().unflatten(0, (-1, self.positions)).flatten(1)
