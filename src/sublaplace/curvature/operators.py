r"""The curvature of one parameter: a diagonal, Kronecker-factored or dense block of the GGN.

λ is not part of a block; it is added to the eigenvalues when the block is used, so that another λ costs nothing.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sublaplace.jacobians.blocks import Block, EmbeddingBlock, OuterBlock, RowBlock


class Part(Protocol):
    """One parameter's block of a GGN approximation; λ is added to its eigenvalues when it is used."""

    def solve(self, vectors: Tensor, prior: float) -> Tensor: ...

    def matmul(self, vectors: Tensor, prior: float) -> Tensor: ...

    def whiten(self, block: Block, prior: float) -> Tensor:
        """B = J F (n, K, size) with a root F Fᵀ = (GGN + λ)⁻¹, for this parameter's J."""

    def unwhiten(self, vectors: Tensor, prior: float) -> Tensor:
        """F v for vectors (r, size), with the root F of `whiten`."""

    def turn(self, block: Block) -> Block:
        """The block in the eigenbasis, factored if it is: times (eigenvalues + λ)^(−½), its rows are those of
        `whiten`."""

    def covariance(self, block: Block, prior: float) -> Tensor: ...

    def variance(self, block: Block, prior: float) -> Tensor: ...

    def sample(self, noise: Tensor, prior: float) -> Tensor:
        """Draws from N(0, (GGN + λ)⁻¹), (k, size): its symmetric root times standard normal draws of that shape, which
        does not depend on the order or signs of eigenvectors."""

    def eigenvalues(self) -> Tensor:
        """(size,), in the order of `rotate`."""

    def rotate(self, vectors: Tensor) -> Tensor:
        """Vectors (r, size) in the eigenbasis."""

    def scaled(self, factor: float) -> "Part": ...


def inner_products(rows: Tensor) -> Tensor:
    return rows @ rows.transpose(1, 2)


def _linear(block: Block) -> OuterBlock | EmbeddingBlock:
    if isinstance(block, OuterBlock | EmbeddingBlock):
        return block
    raise TypeError(
        "A parameter that was used as a linear map when the curvature was fitted is now used in another way; "
        "the network's control flow depends on its inputs. Use projector='lowrank-diagonal' for such a network."
    )


@dataclass(frozen=True)
class DiagonalPart:
    """The diagonal of the GGN for one parameter; zeros make it the isotropic prior alone."""

    diagonal: Tensor  # (size,)

    def solve(self, vectors: Tensor, prior: float) -> Tensor:
        return vectors / (self.diagonal + prior)

    def matmul(self, vectors: Tensor, prior: float) -> Tensor:
        return vectors * (self.diagonal + prior)

    def whiten(self, block: Block, prior: float) -> Tensor:
        return block.rows() * (self.diagonal + prior).rsqrt()

    def turn(self, block: Block) -> Block:
        return block

    def unwhiten(self, vectors: Tensor, prior: float) -> Tensor:
        return vectors * (self.diagonal + prior).rsqrt()

    def covariance(self, block: Block, prior: float) -> Tensor:
        return inner_products(self.whiten(block, prior))

    def variance(self, block: Block, prior: float) -> Tensor:
        return self.whiten(block, prior).square().sum(2)

    def sample(self, noise: Tensor, prior: float) -> Tensor:
        return self.unwhiten(noise, prior)

    def eigenvalues(self) -> Tensor:
        return self.diagonal

    def rotate(self, vectors: Tensor) -> Tensor:
        return vectors

    def scaled(self, factor: float) -> "DiagonalPart":
        return DiagonalPart(self.diagonal * factor)


@dataclass(frozen=True)
class DensePart:
    """The exact GGN block of a small parameter, by its eigendecomposition."""

    values: Tensor  # (size,)
    vectors: Tensor  # (size, size)

    @classmethod
    def of(cls, matrix: Tensor, dtype: torch.dtype) -> "DensePart":
        values, vectors = torch.linalg.eigh(matrix.double())
        return cls(values.clamp_min(0).to(dtype), vectors.to(dtype))

    def solve(self, vectors: Tensor, prior: float) -> Tensor:
        return (vectors @ self.vectors / (self.values + prior)) @ self.vectors.T

    def matmul(self, vectors: Tensor, prior: float) -> Tensor:
        return (vectors @ self.vectors * (self.values + prior)) @ self.vectors.T

    def whiten(self, block: Block, prior: float) -> Tensor:
        return (block.rows() @ self.vectors) * (self.values + prior).rsqrt()

    def turn(self, block: Block) -> Block:
        return RowBlock(block.rows() @ self.vectors)

    def unwhiten(self, vectors: Tensor, prior: float) -> Tensor:
        return (vectors * (self.values + prior).rsqrt()) @ self.vectors.T

    def covariance(self, block: Block, prior: float) -> Tensor:
        return inner_products(self.whiten(block, prior))

    def variance(self, block: Block, prior: float) -> Tensor:
        return self.whiten(block, prior).square().sum(2)

    def sample(self, noise: Tensor, prior: float) -> Tensor:
        return (self.rotate(noise) * (self.values + prior).rsqrt()) @ self.vectors.T

    def eigenvalues(self) -> Tensor:
        return self.values

    def rotate(self, vectors: Tensor) -> Tensor:
        return vectors @ self.vectors

    def scaled(self, factor: float) -> "DensePart":
        return replace(self, values=self.values * factor)


@dataclass(frozen=True)
class KroneckerPart:
    r"""GGN ≈ G ⊗ A in eigenbases: eigenvalue (o, i) is the product of both factors' eigenvalues, λ is added exactly.

    One block a group of a grouped convolution. `input_vectors` is None where A is diagonal (embeddings).
    `transposed`: the parameter is stored as (I, O).
    """

    input_values: Tensor  # (G, I)
    input_vectors: Tensor | None  # (G, I, I)
    output_values: Tensor  # (G, O)
    output_vectors: Tensor  # (G, O, O)
    transposed: bool

    @property
    def _products(self) -> Tensor:
        """All eigenvalues, (G, O, I)."""
        return self.output_values[:, :, None] * self.input_values[:, None, :]

    def _stored(self, matrices: Tensor) -> Tensor:
        return matrices.transpose(-1, -2) if self.transposed else matrices

    def _as_maps(self, vectors: Tensor) -> Tensor:
        """Vectors (r, size) as maps (r, G, O, I)."""
        (G, O), I = self.output_values.shape, self.input_values.shape[1]
        return self._stored(vectors.reshape(-1, G, *((I, O) if self.transposed else (O, I))))

    def _into_eigenbasis(self, vectors: Tensor) -> Tensor:
        """Vectors (r, size) in the eigenbasis, as maps (r, G, O, I)."""
        maps = self.output_vectors.transpose(1, 2) @ self._as_maps(vectors)
        return maps if self.input_vectors is None else maps @ self.input_vectors

    def _from_eigenbasis(self, maps: Tensor) -> Tensor:
        if self.input_vectors is not None:
            maps = maps @ self.input_vectors.transpose(1, 2)
        return self._stored(self.output_vectors @ maps).reshape(len(maps), -1)

    def _transformed(self, vectors: Tensor, factors: Tensor) -> Tensor:
        """Into the eigenbasis, times the factors, and back."""
        return self._from_eigenbasis(self._into_eigenbasis(vectors) * factors)

    def solve(self, vectors: Tensor, prior: float) -> Tensor:
        return self._transformed(vectors, 1 / (self._products + prior))

    def matmul(self, vectors: Tensor, prior: float) -> Tensor:
        return self._transformed(vectors, self._products + prior)

    def whiten(self, block: Block, prior: float) -> Tensor:
        rows = _linear(block).rotated_rows(self.input_vectors, self.output_vectors)
        return rows.mul_((self.eigenvalues() + prior).rsqrt())  # these rows are nobody else's

    def turn(self, block: Block) -> Block:
        block = _linear(block)
        if isinstance(block, OuterBlock) and self.input_vectors is not None:
            return block.turned(self.input_vectors, self.output_vectors)
        return RowBlock(block.rotated_rows(self.input_vectors, self.output_vectors))

    def unwhiten(self, vectors: Tensor, prior: float) -> Tensor:
        return self._from_eigenbasis(self._as_maps(vectors) * (self._products + prior).rsqrt())

    def _root(self, block: Block, prior: float) -> Tensor:
        """B (n, K, ·) with B Bᵀ = J (GGN + λ)⁻¹ Jᵀ, as narrow as possible."""
        if not isinstance(block, OuterBlock) or block.positions > 1 or self.input_vectors is None:
            return self.whiten(block, prior)
        # A single outer product a row: Σ_oi g_o g'_o a_i² / (λ + e_oi), and the sum over i comes first.
        a, g = block.rotated(self.input_vectors, self.output_vectors)
        squares = a.square().transpose(0, 1)  # (G, n, I)
        weights = (squares @ (1 / (self._products + prior)).transpose(1, 2)).transpose(0, 1)  # (n, G, O)
        return (g * weights.sqrt().unsqueeze(1)).flatten(2)

    def covariance(self, block: Block, prior: float) -> Tensor:
        return inner_products(self._root(block, prior))

    def variance(self, block: Block, prior: float) -> Tensor:
        return self._root(block, prior).square().sum(2)

    def sample(self, noise: Tensor, prior: float) -> Tensor:
        return self._transformed(noise, (self._products + prior).rsqrt())

    def eigenvalues(self) -> Tensor:
        return self._stored(self._products).reshape(-1)

    def rotate(self, vectors: Tensor) -> Tensor:
        return self._stored(self._into_eigenbasis(vectors)).reshape(len(vectors), -1)

    def scaled(self, factor: float) -> "KroneckerPart":
        return replace(self, output_values=self.output_values * factor)


PARTS: dict[str, type[DiagonalPart] | type[DensePart] | type[KroneckerPart]] = {
    kind.__name__: kind for kind in (DiagonalPart, DensePart, KroneckerPart)
}
"""By the names that saved files use."""
