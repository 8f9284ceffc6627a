"""The curvature of one parameter: a diagonal, Kronecker-factored or dense block of the GGN.

λ is not part of a block. It is added to the eigenvalues when the block is used, so changing λ is free.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sublaplace.jacobians.blocks import Block, EmbeddingBlock, OuterBlock, RowBlock
from sublaplace.jacobians.head import HeadBlock

DENSE_OUTPUTS = 4096
"""Largest number of outputs of a layer whose factor G is a matrix; beyond, its diagonal is used."""


class Part(Protocol):
    """One parameter's block of a GGN approximation. J is the parameter's Jacobian block, `prior` is λ."""

    def solve(self, vectors: Tensor, prior: float) -> Tensor:
        """Return (GGN + λ)⁻¹ v for vectors (r, size)."""

    def matmul(self, vectors: Tensor, prior: float) -> Tensor:
        """Return (GGN + λ) v for vectors (r, size)."""

    def rotated_rows(self, block: Block) -> Tensor:
        """Return the rows of J in the eigenbasis: (n, K, size)."""

    def whiten(self, block: Block, prior: float) -> Tensor:
        """Return J F with a root F Fᵀ = (GGN + λ)⁻¹: (n, K, size)."""

    def unwhiten(self, vectors: Tensor, prior: float) -> Tensor:
        """Return F v for vectors (r, size), with the root F of `whiten`."""

    def turn(self, block: Block) -> Block:
        """Return the block in the eigenbasis, in factored form if possible.

        Its rows times (eigenvalues + λ)^(−½) are the result of `whiten`.
        """

    def covariance(self, block: Block, prior: float) -> Tensor:
        """Return J_i (GGN + λ)⁻¹ J_iᵀ for every input: (n, K, K)."""

    def variance(self, block: Block, prior: float) -> Tensor:
        """Return the diagonals of `covariance`: (n, K)."""

    def head_bases(self) -> tuple[Tensor | None, Tensor | None]:
        """Return Q_A and Q_B if the eigenbasis is Q_B ⊗ Q_A for a last layer; None stands for the identity."""

    def sample(self, noise: Tensor, prior: float) -> Tensor:
        """Return draws (k, size) from N(0, (GGN + λ)⁻¹), given standard normal `noise` (k, size).

        The noise is multiplied by the symmetric root, which does not depend on the order or signs of eigenvectors.
        """

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues (size,), in the order of `rotate`."""

    def rotate(self, vectors: Tensor) -> Tensor:
        """Return vectors (r, size) in the eigenbasis."""

    def joined(self, other: "Part") -> "Part":
        """Return the curvature of both data sets together."""

    def scaled(self, factor: float) -> "Part":
        """Return the curvature times a factor."""


def inner_products(rows: Tensor) -> Tensor:
    """Return B Bᵀ for each matrix B in a batch (n, K, m): (n, K, K)."""
    return rows @ rows.transpose(1, 2)


def _linear(block: Block) -> OuterBlock | EmbeddingBlock:
    if isinstance(block, HeadBlock):
        return block.outer()
    if isinstance(block, OuterBlock | EmbeddingBlock):
        return block
    raise TypeError(
        "A parameter that was used as a linear map during the fit is now used in another way; the network's control "
        "flow depends on its inputs. Use projector='lowrank-diagonal' for this network."
    )


@dataclass(frozen=True)
class DiagonalPart:
    """The diagonal of one parameter's GGN block; with zeros, only the isotropic prior remains."""

    diagonal: Tensor  # (size,)

    def solve(self, vectors: Tensor, prior: float) -> Tensor:
        return vectors / (self.diagonal + prior)

    def matmul(self, vectors: Tensor, prior: float) -> Tensor:
        return vectors * (self.diagonal + prior)

    def rotated_rows(self, block: Block) -> Tensor:
        return block.rows()

    def whiten(self, block: Block, prior: float) -> Tensor:
        return block.rows() * (self.diagonal + prior).rsqrt()

    def turn(self, block: Block) -> Block:
        return block.outer() if isinstance(block, HeadBlock) else block

    def unwhiten(self, vectors: Tensor, prior: float) -> Tensor:
        return vectors * (self.diagonal + prior).rsqrt()

    def covariance(self, block: Block, prior: float) -> Tensor:
        if isinstance(block, HeadBlock):
            return self.variance(block, prior).diag_embed()
        return inner_products(self.whiten(block, prior))

    def variance(self, block: Block, prior: float) -> Tensor:
        if isinstance(block, HeadBlock):
            return block.variances(1 / (self.diagonal + prior))
        return self.whiten(block, prior).square().sum(2)

    def head_bases(self) -> tuple[None, None]:
        return None, None

    def sample(self, noise: Tensor, prior: float) -> Tensor:
        return self.unwhiten(noise, prior)

    def eigenvalues(self) -> Tensor:
        return self.diagonal

    def rotate(self, vectors: Tensor) -> Tensor:
        return vectors

    def joined(self, other: "Part") -> "Part":
        if isinstance(other, DiagonalPart):
            return DiagonalPart(self.diagonal + other.diagonal)
        return other.joined(self)  # where the first data did not use the parameter

    def scaled(self, factor: float) -> "DiagonalPart":
        return DiagonalPart(self.diagonal * factor)


@dataclass(frozen=True)
class DensePart:
    """The exact GGN block of a small parameter, as an eigendecomposition."""

    values: Tensor  # (size,)
    vectors: Tensor  # (size, size)

    @classmethod
    def of(cls, matrix: Tensor, dtype: torch.dtype) -> "DensePart":
        """Return the part of a GGN block (size, size), with its eigendecomposition in `dtype`."""
        values, vectors = torch.linalg.eigh(matrix.double())
        return cls(values.clamp_min(0).to(dtype), vectors.to(dtype).contiguous())  # as in a file

    def solve(self, vectors: Tensor, prior: float) -> Tensor:
        return (vectors @ self.vectors / (self.values + prior)) @ self.vectors.T

    def matmul(self, vectors: Tensor, prior: float) -> Tensor:
        return (vectors @ self.vectors * (self.values + prior)) @ self.vectors.T

    def rotated_rows(self, block: Block) -> Tensor:
        return block.rows() @ self.vectors

    def whiten(self, block: Block, prior: float) -> Tensor:
        return self.rotated_rows(block) * (self.values + prior).rsqrt()

    def turn(self, block: Block) -> Block:
        return RowBlock(block.rows() @ self.vectors)

    def unwhiten(self, vectors: Tensor, prior: float) -> Tensor:
        return (vectors * (self.values + prior).rsqrt()) @ self.vectors.T

    def covariance(self, block: Block, prior: float) -> Tensor:
        return inner_products(self.whiten(block, prior))

    def variance(self, block: Block, prior: float) -> Tensor:
        return self.whiten(block, prior).square().sum(2)

    def head_bases(self) -> tuple[None, None]:
        raise TypeError("A dense block of a last layer has no Kronecker factors.")

    def sample(self, noise: Tensor, prior: float) -> Tensor:
        return (self.rotate(noise) * (self.values + prior).rsqrt()) @ self.vectors.T

    def eigenvalues(self) -> Tensor:
        return self.values

    def rotate(self, vectors: Tensor) -> Tensor:
        return vectors @ self.vectors

    def joined(self, other: "Part") -> "Part":
        if not isinstance(other, DensePart):
            return _joined_unused(self, other)
        both = (part.vectors.double() * part.values.double() @ part.vectors.double().T for part in (self, other))
        return DensePart.of(sum(both), self.values.dtype)  # type: ignore[arg-type]

    def scaled(self, factor: float) -> "DensePart":
        return replace(self, values=self.values * factor)


@dataclass(frozen=True)
class KroneckerPart:
    """A Kronecker-factored block GGN ≈ G ⊗ A, as the eigendecompositions of both factors.

    Eigenvalue (o, i) is the product of the factors' eigenvalues, to which λ is added exactly. A grouped convolution has
    one block per group. `input_vectors` is None if A is diagonal (embeddings), `output_vectors` if G is (layers with
    more than `DENSE_OUTPUTS` outputs). `transposed` means that the parameter is stored as (I, O).
    """

    input_values: Tensor  # (G, I)
    input_vectors: Tensor | None  # (G, I, I)
    output_values: Tensor  # (G, O)
    output_vectors: Tensor | None  # (G, O, O)
    transposed: bool
    terms: float = 1.0  # of the mean A

    @property
    def _products(self) -> Tensor:
        """All eigenvalues: (G, O, I)."""
        return self.output_values[:, :, None] * self.input_values[:, None, :]

    def _stored(self, matrices: Tensor) -> Tensor:
        return matrices.transpose(-1, -2) if self.transposed else matrices

    def _as_maps(self, vectors: Tensor) -> Tensor:
        """Return vectors (r, size) as maps (r, G, O, I)."""
        (G, O), I = self.output_values.shape, self.input_values.shape[1]
        return self._stored(vectors.reshape(-1, G, *((I, O) if self.transposed else (O, I))))

    def _into_eigenbasis(self, vectors: Tensor) -> Tensor:
        """Return vectors (r, size) in the eigenbasis, as maps (r, G, O, I)."""
        maps = self._as_maps(vectors)
        if self.output_vectors is not None:
            maps = self.output_vectors.transpose(1, 2) @ maps
        return maps if self.input_vectors is None else maps @ self.input_vectors

    def _from_eigenbasis(self, maps: Tensor) -> Tensor:
        if self.input_vectors is not None:
            maps = maps @ self.input_vectors.transpose(1, 2)
        if self.output_vectors is not None:
            maps = self.output_vectors @ maps
        return self._stored(maps).reshape(len(maps), -1)

    def _transformed(self, vectors: Tensor, factors: Tensor) -> Tensor:
        """Multiply vectors by `factors` (G, O, I) in the eigenbasis."""
        return self._from_eigenbasis(self._into_eigenbasis(vectors) * factors)

    def solve(self, vectors: Tensor, prior: float) -> Tensor:
        return self._transformed(vectors, 1 / (self._products + prior))

    def matmul(self, vectors: Tensor, prior: float) -> Tensor:
        return self._transformed(vectors, self._products + prior)

    def rotated_rows(self, block: Block) -> Tensor:
        return _linear(block).rotated_rows(self.input_vectors, self.output_vectors)

    def whiten(self, block: Block, prior: float) -> Tensor:
        rows = self.rotated_rows(block)
        return rows.mul_((self.eigenvalues() + prior).rsqrt())  # in place: `rotated_rows` returns a new tensor

    def turn(self, block: Block) -> Block:
        block = _linear(block)
        if isinstance(block, OuterBlock) and self.input_vectors is not None:
            return block.turned(self.input_vectors, self.output_vectors)
        return RowBlock(block.rotated_rows(self.input_vectors, self.output_vectors))

    def unwhiten(self, vectors: Tensor, prior: float) -> Tensor:
        return self._from_eigenbasis(self._as_maps(vectors) * (self._products + prior).rsqrt())

    def _root(self, block: Block, prior: float) -> Tensor:
        """Return B (n, K, ·) with B Bᵀ = J (GGN + λ)⁻¹ Jᵀ, with as few columns as possible."""
        if not isinstance(block, OuterBlock) or block.positions > 1 or self.input_vectors is None:
            return self.whiten(block, prior)
        # Every row is one outer product, so B Bᵀ = Σ_oi g_o g'_o a_i² / (λ + e_oi), and the sum over i comes first.
        a, g = block.rotated(self.input_vectors, self.output_vectors)
        squares = a.square().transpose(0, 1)  # (G, n, I)
        weights = (squares @ (1 / (self._products + prior)).transpose(1, 2)).transpose(0, 1)  # (n, G, O)
        smallest = torch.finfo(weights.dtype).tiny  # where a = 0, the root would have no derivative
        return (g * weights.clamp_min(smallest).sqrt().unsqueeze(1)).flatten(2)

    def _head_weights(self, block: HeadBlock, prior: float) -> Tensor:
        """Return w_c = Σ_j (Q_Aᵀa)_j² / (a_j b_c + λ), so that the covariance is Q_B diag(w) Q_Bᵀ: (n, C)."""
        assert self.input_vectors is not None
        squares = (block.inputs @ self.input_vectors[0]).square()
        return squares @ (1 / (self._products[0] + prior)).T

    def covariance(self, block: Block, prior: float) -> Tensor:
        if isinstance(block, HeadBlock):
            weights = self._head_weights(block, prior)
            if self.output_vectors is None:
                return weights.diag_embed()
            Q = self.output_vectors[0]
            return (Q * weights[:, None, :]) @ Q.T
        return inner_products(self._root(block, prior))

    def variance(self, block: Block, prior: float) -> Tensor:
        if isinstance(block, HeadBlock):
            weights = self._head_weights(block, prior)
            return weights if self.output_vectors is None else weights @ self.output_vectors[0].square().T
        return self._root(block, prior).square().sum(2)

    def head_bases(self) -> tuple[Tensor | None, Tensor | None]:
        inputs, outputs = self.input_vectors, self.output_vectors
        return None if inputs is None else inputs[0], None if outputs is None else outputs[0]

    def sample(self, noise: Tensor, prior: float) -> Tensor:
        return self._transformed(noise, (self._products + prior).rsqrt())

    def eigenvalues(self) -> Tensor:
        return self._stored(self._products).reshape(-1)

    def rotate(self, vectors: Tensor) -> Tensor:
        return self._stored(self._into_eigenbasis(vectors)).reshape(len(vectors), -1)

    def joined(self, other: "Part") -> "Part":
        if not isinstance(other, KroneckerPart):
            return _joined_unused(self, other)
        terms = self.terms + other.terms
        moment = (self._input_moment() * self.terms + other._input_moment() * other.terms) / terms
        gradients = self._output_moment() + other._output_moment()
        return KroneckerPart.of(moment, gradients, self.transposed, terms, self.output_values.dtype)

    def _input_moment(self) -> Tensor:
        """Return A: (G, I, I), or its diagonal (G, I); float64."""
        values = self.input_values.double()
        if self.input_vectors is None:
            return values
        vectors = self.input_vectors.double()
        return (vectors * values[:, None, :]) @ vectors.transpose(1, 2)

    def _output_moment(self) -> Tensor:
        """Return G: (G, O, O), or its diagonal (G, O); float64."""
        if self.output_vectors is None:
            return self.output_values.double()
        vectors = self.output_vectors.double()
        return (vectors * self.output_values.double()[:, None, :]) @ vectors.transpose(1, 2)

    @classmethod
    def of(
        cls, moment: Tensor, gradients: Tensor, transposed: bool, terms: float, dtype: torch.dtype
    ) -> "KroneckerPart":
        """Return the block of A, (G, I, I), and G, (G, O, O), or their diagonals, (G, I) and (G, O)."""
        if moment.ndim == 2:
            input_values, input_vectors = moment, None
        else:
            input_values, vectors = torch.linalg.eigh(moment)
            input_vectors = vectors.to(dtype).contiguous()  # as in a file
        output_vectors = None
        if gradients.ndim == 2:
            output_values = gradients
        else:
            output_values, vectors = torch.linalg.eigh(gradients)
            output_vectors = vectors.to(dtype).contiguous()
        return cls(
            input_values.clamp_min(0).to(dtype),
            input_vectors,
            output_values.clamp_min(0).to(dtype),
            output_vectors,
            transposed,
            terms,
        )

    def scaled(self, factor: float) -> "KroneckerPart":
        return replace(self, output_values=self.output_values * factor)


def _joined_unused(part: Part, other: Part) -> Part:
    """Return `part`, if the other data did not use the parameter, so that their curvature is zero."""
    if float(other.eigenvalues().abs().max()):
        raise ValueError("A parameter is used in another way in the new data, so its curvatures cannot be added.")
    return part


PARTS: dict[str, type[DiagonalPart] | type[DensePart] | type[KroneckerPart]] = {
    kind.__name__: kind for kind in (DiagonalPart, DensePart, KroneckerPart)
}
"""Kinds of parts, by the names that saved files use."""
