"""The Jacobian of the last linear layer, whose rows for single outputs need neither a backward pass nor storage."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sublaplace.jacobians.blocks import OuterBlock


@dataclass(frozen=True)
class HeadBlock:
    """Rows e_c ⊗ a for a last linear layer f = W a + b and one row per output c; the bias has a = 1.

    All n·C rows follow from n·I numbers. Shapes as in `blocks.py`, with K = C = O.
    """

    inputs: Tensor  # a: (n, I)
    outputs: int  # C
    transposed: bool = False  # whether the parameter is stored as (I, C)

    @classmethod
    def of(cls, block: OuterBlock) -> "HeadBlock":
        """Return the block of a map that is applied once per input, from its inputs; gradients are not used."""
        return cls(block.inputs[:, 0, :, 0], block.fan_out, block.transposed)

    def outer(self) -> OuterBlock:
        """Return the same rows with unit vectors as gradients. Memory: n·C²."""
        n, C = len(self.inputs), self.outputs
        units = torch.eye(C, dtype=self.inputs.dtype, device=self.inputs.device)
        return OuterBlock.of(self.inputs[:, None, :, None], units.expand(n, C, C)[:, :, None, :, None], self.transposed)

    @property
    def size(self) -> int:
        return self.inputs.shape[1] * self.outputs

    def as_maps(self, vectors: Tensor) -> Tensor:
        """Return vectors (…, size) as maps (…, C, I)."""
        I, C = self.inputs.shape[1], self.outputs
        return vectors.unflatten(-1, (I, C)).transpose(-1, -2) if self.transposed else vectors.unflatten(-1, (C, I))

    def rows(self) -> Tensor:
        n, C, I = len(self.inputs), self.outputs, self.inputs.shape[1]
        rows = self.inputs.new_zeros(n, C, C * I)
        self.as_maps(rows).diagonal(dim1=1, dim2=2).copy_(self.inputs[:, :, None].expand(n, I, C))
        return rows

    def matmul(self, vectors: Tensor) -> Tensor:
        if self.transposed:
            return torch.einsum("ni,rci->ncr", self.inputs, self.as_maps(vectors))
        products = self.inputs @ vectors.reshape(-1, self.inputs.shape[1]).T  # einsum would copy all vectors
        return products.view(len(self.inputs), len(vectors), self.outputs).transpose(1, 2)

    def add_transpose_matmul(self, weights: Tensor, into: Tensor) -> None:
        self.as_maps(into).add_(torch.einsum("ncr,ni->rci", weights, self.inputs))

    def squared_sum(self) -> Tensor:
        result = self.inputs.new_empty(self.size)
        self.as_maps(result).copy_(self.inputs.square().sum(0).expand(self.outputs, -1))
        return result

    def scaled(self, factor: float) -> "HeadBlock":
        return replace(self, inputs=self.inputs * factor)

    def columns(self, indices: Tensor) -> Tensor:
        C, I = self.outputs, self.inputs.shape[1]
        output, source = (indices % C, indices // C) if self.transposed else (indices // I, indices % I)
        own = torch.arange(C, device=indices.device)[:, None] == output
        return self.inputs[:, None, source] * own

    def variances(self, weights: Tensor) -> Tensor:
        """Return Σ_k w_k r_k² of every row r, for weights (size,): (n, C)."""
        return self.inputs.square() @ self.as_maps(weights).T


@dataclass(frozen=True)
class CurvedHeadBlock:
    """Rows of a last linear layer along all directions of the output Hessians H, known by H alone.

    Sums of squared rows follow from Σ H and the diagonals of H, so that no direction is formed: n·C + C² numbers.
    """

    inputs: Tensor  # a: (n, I)
    hessians: Tensor  # Σ_n H: (C, C) in float64
    diagonals: Tensor  # of H: (n, C)
    transposed: bool = False  # whether the parameter is stored as (I, C)

    @classmethod
    def of(cls, block: OuterBlock, hessians: Tensor, diagonals: Tensor) -> "CurvedHeadBlock":
        """Return the block of a map that is applied once per input, from its inputs; gradients are not used."""
        return cls(block.inputs[:, 0, :, 0], hessians, diagonals, block.transposed)

    @property
    def size(self) -> int:
        """The number of entries of the parameter."""
        return self.inputs.shape[1] * len(self.hessians)

    @property
    def device(self) -> torch.device:
        """The device of the factors."""
        return self.inputs.device

    @property
    def factor_sides(self) -> tuple[int, ...]:
        """The number of groups, and the side lengths of the square Kronecker factors of one group."""
        return 1, self.inputs.shape[1], len(self.hessians)

    @property
    def gradient_key(self) -> tuple[object, ...]:
        """A key that is equal for blocks with the same gradients, such as a weight and its bias."""
        return (id(self.hessians),)

    def gradient_moment(self) -> Tensor:
        """Return Σ_n H: (1, C, C)."""
        return self.hessians[None]

    def gradient_squares(self) -> Tensor:
        """Return the diagonal of `gradient_moment`: (1, C)."""
        return self.hessians.diagonal()[None]

    def input_moment(self, weights: Tensor | None = None, present: Tensor | None = None) -> Tensor:
        """Return Σ_n w_n a aᵀ for weights (n,), by default 1: (1, I, I); there is one position, which is present."""
        weighted = self.inputs if weights is None else self.inputs * weights.to(self.inputs)[:, None]
        return (weighted.T @ self.inputs)[None]

    def num_terms(self, weights: Tensor | None = None, present: Tensor | None = None) -> float:
        """Return the weighted number of terms of `input_moment`."""
        return len(self.inputs) if weights is None else float(weights.sum())

    def squared_sum(self) -> Tensor:
        """Return the sum of the squared rows over the inputs and directions: (size,)."""
        maps = self.diagonals.T @ self.inputs.square()
        return (maps.T if self.transposed else maps).reshape(-1)

    def scaled(self, factor: float) -> "CurvedHeadBlock":
        """Return the rows times a factor."""
        return replace(self, inputs=self.inputs * factor)
