r"""The Jacobian of a batch with respect to one parameter, never larger than its factors.

For a linear map applied at T positions, a Jacobian row is a sum of outer products of the map's inputs a and the
gradients g at its outputs,

.. math:: \partial f_k(x_n) / \partial W = \sum_t g_{nkt} a_{nt}^\top .

Holding (a, g) in place of the rows makes products with the Jacobian a few matrix multiplications, whose best
order depends on T, on the number K of rows an input, and on the number of vectors: `OuterBlock` counts and takes the
cheaper one. Shapes: n inputs, K rows an input, G groups, I inputs and O outputs of the map, T positions, r vectors.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Block(Protocol):
    """What a parameter's part of a Jacobian can do."""

    @property
    def size(self) -> int: ...

    def rows(self) -> Tensor:
        """The rows themselves, (n, K, size): n·K·size numbers, for this parameter alone."""

    def matmul(self, vectors: Tensor) -> Tensor:
        """J V for V given as (r, size): (n, K, r)."""

    def transpose_matmul(self, weights: Tensor) -> Tensor:
        """Jᵀ U for U given as (n, K, r): (r, size)."""

    def squared_sum(self) -> Tensor:
        """Σ over n and K of the squared rows: (size,)."""

    def columns(self, indices: Tensor) -> Tensor:
        """The columns at `indices` (m,): (n, K, m)."""


@dataclass(frozen=True)
class RowBlock:
    """Rows held as they are, for parameters whose rows are as small as any factor: norm scales, free parameters."""

    values: Tensor  # (n, K, size)

    @property
    def size(self) -> int:
        return self.values.shape[2]

    def rows(self) -> Tensor:
        return self.values

    def matmul(self, vectors: Tensor) -> Tensor:
        return self.values @ vectors.T

    def transpose_matmul(self, weights: Tensor) -> Tensor:
        return weights.flatten(0, 1).T @ self.values.flatten(0, 1)

    def squared_sum(self) -> Tensor:
        return self.values.square().sum((0, 1))

    def columns(self, indices: Tensor) -> Tensor:
        return self.values[:, :, indices]


@dataclass(frozen=True)
class OuterBlock:
    """Σ_t g_t a_tᵀ: the weight of a linear or convolution map (or its bias, with a = 1), grouped or not.

    A weight that is used several times has all of its uses side by side along T. `transposed` says that the parameter
    is stored as (I, O), as in ``x @ W``.
    """

    inputs: Tensor  # a: (n, G, I, T)
    gradients: Tensor  # g: (n, K, G, O, T)
    transposed: bool = False

    @property
    def size(self) -> int:
        _, groups, fan_in, _ = self.inputs.shape
        return groups * fan_in * self.gradients.shape[3]

    @property
    def positions(self) -> int:
        return self.inputs.shape[3]

    def rows(self) -> Tensor:
        n, K, G, O, T = self.gradients.shape
        if T == 1:
            rows = self.gradients * self.inputs.unsqueeze(1).transpose(-1, -2)
        else:
            g = self.gradients.transpose(1, 2).reshape(n, G, K * O, T)
            rows = (g @ self.inputs.transpose(-1, -2)).unflatten(2, (K, O)).transpose(1, 2)
        return self._stored(rows).reshape(n, K, self.size)

    def _stored(self, matrices: Tensor) -> Tensor:
        """(…, O, I) in the order in which the parameter is stored; its own inverse."""
        return matrices.transpose(-1, -2) if self.transposed else matrices

    def _maps(self, vectors: Tensor) -> Tensor:
        """Vectors (r, size) as maps (r, G, O, I)."""
        _, _, G, O, _ = self.gradients.shape
        fan_in = self.inputs.shape[2]
        shape = (-1, G, fan_in, O) if self.transposed else (-1, G, O, fan_in)
        return self._stored(vectors.reshape(shape))

    def _factors_first(self, count: int) -> bool:
        """Whether contracting `count` vectors with a factor costs less than forming the rows first."""
        _, K, G, O, T = self.gradients.shape
        factors = T * count * (self.size + K * G * O)
        rows = K * self.size * (count + (T if T > 1 else 1))
        return factors < rows

    def matmul(self, vectors: Tensor) -> Tensor:
        r = len(vectors)
        if not self._factors_first(r):
            return self.rows() @ vectors.T
        n, K, G, O, T = self.gradients.shape
        a = self.inputs.permute(1, 0, 3, 2).reshape(G, n * T, -1)
        maps = self._maps(vectors).transpose(0, 1).reshape(G, r * O, -1)
        mapped = (a @ maps.transpose(-1, -2)).view(G, n, T, r, O)
        g = self.gradients.permute(2, 0, 1, 4, 3).reshape(G, n, K, T * O)
        return (g @ mapped.transpose(3, 4).reshape(G, n, T * O, r)).sum(0)

    def transpose_matmul(self, weights: Tensor) -> Tensor:
        n, K, r = weights.shape
        if not self._factors_first(r):
            return weights.flatten(0, 1).T @ self.rows().flatten(0, 1)
        _, _, G, O, T = self.gradients.shape
        weighted = (weights.transpose(1, 2) @ self.gradients.reshape(n, K, G * O * T)).view(n, r, G, O, T)
        left = weighted.permute(2, 1, 3, 0, 4).reshape(G, r * O, n * T)
        right = self.inputs.permute(1, 0, 3, 2).reshape(G, n * T, -1)
        maps = (left @ right).unflatten(1, (r, O)).transpose(0, 1)
        return self._stored(maps).reshape(r, self.size)

    def squared_sum(self) -> Tensor:
        if self.positions > 1:
            return self.rows().square().sum((0, 1))
        g = self.gradients[..., 0].square().sum(1)  # (n, G, O)
        a = self.inputs[..., 0].square()  # (n, G, I)
        return self._stored(torch.einsum("ngo,ngi->goi", g, a)).reshape(-1)

    def columns(self, indices: Tensor) -> Tensor:
        _, _, _, O, T = self.gradients.shape
        fan_in = self.inputs.shape[2]
        if len(indices) * T > self.size:
            return self.rows()[:, :, indices]
        inner = O if self.transposed else fan_in
        group, rest = indices // (O * fan_in), indices % (O * fan_in)
        first, second = rest // inner, rest % inner
        output, source = (second, first) if self.transposed else (first, second)
        return torch.einsum("nkmt,nmt->nkm", self.gradients[:, :, group, output], self.inputs[:, group, source])

    def rotated(self, into_inputs: Tensor | None, into_outputs: Tensor) -> "OuterBlock":
        """The block in other bases: a → Q_inᵀ a, g → Q_outᵀ g, with bases (G, I, I) and (G, O, O)."""
        assert into_inputs is not None
        a = torch.einsum("gij,ngit->ngjt", into_inputs, self.inputs)
        g = torch.einsum("gop,nkgot->nkgpt", into_outputs, self.gradients)
        return OuterBlock(a, g, self.transposed)

    def input_moment(self) -> Tensor:
        """Σ_{n,t} a aᵀ: (G, I, I)."""
        a = self.inputs.permute(1, 2, 0, 3).flatten(2)
        return a @ a.transpose(-1, -2)

    def gradient_moment(self) -> Tensor:
        """Σ_{n,k,t} g gᵀ: (G, O, O)."""
        g = self.gradients.permute(2, 3, 0, 1, 4).flatten(2)
        return g @ g.transpose(-1, -2)

    @property
    def num_positions(self) -> int:
        """How many inputs a the moments sum over: n·T."""
        return self.inputs.shape[0] * self.positions

    def reduced(self) -> "OuterBlock":
        """Inputs averaged and gradients summed over the positions: KFAC's reduce setting."""
        return OuterBlock(self.inputs.mean(-1, keepdim=True), self.gradients.sum(-1, keepdim=True), self.transposed)


@dataclass(frozen=True)
class EmbeddingBlock:
    """A table of which each position uses one row: a is one-hot and held as indices."""

    indices: Tensor  # (n, T)
    gradients: Tensor  # (n, K, T, D)
    num_rows: int

    @property
    def size(self) -> int:
        return self.num_rows * self.gradients.shape[3]

    def rows(self) -> Tensor:
        n, K, T, D = self.gradients.shape
        rows = self.gradients.new_zeros(n, K, self.num_rows, D)
        rows.scatter_add_(2, self.indices.view(n, 1, T, 1).expand(n, K, T, D), self.gradients)
        return rows.flatten(2)

    def matmul(self, vectors: Tensor) -> Tensor:
        table = vectors.view(len(vectors), self.num_rows, -1)[:, self.indices]  # (r, n, T, D)
        return self.gradients.flatten(2) @ table.flatten(2).permute(1, 2, 0)

    def transpose_matmul(self, weights: Tensor) -> Tensor:
        n, _, T, D = self.gradients.shape
        r = weights.shape[2]
        weighted = (weights.transpose(1, 2) @ self.gradients.flatten(2)).view(n, r, T, D)
        table = weighted.new_zeros(r, self.num_rows, D)
        table.index_add_(1, self.indices.flatten(), weighted.transpose(0, 1).reshape(r, n * T, D))
        return table.flatten(1)

    def squared_sum(self) -> Tensor:
        _, K, _, D = self.gradients.shape
        result = self.gradients.new_zeros(self.num_rows, D)
        for indices, gradients in zip(self.indices, self.gradients, strict=True):
            used, place = torch.unique(indices, return_inverse=True)
            rows = gradients.new_zeros(K, len(used), D).index_add_(1, place, gradients)
            result[used] += rows.square().sum(0)
        return result.flatten()

    def columns(self, indices: Tensor) -> Tensor:
        width = self.gradients.shape[3]
        hit = (self.indices[:, :, None] == indices // width).to(self.gradients.dtype)  # (n, T, m)
        return torch.einsum("nktm,ntm->nkm", self.gradients[..., indices % width], hit)

    def rotated(self, into_inputs: Tensor | None, into_outputs: Tensor) -> "EmbeddingBlock":
        """Other output basis only: one-hot inputs are already in the eigenbasis of their second moment."""
        assert into_inputs is None
        return EmbeddingBlock(self.indices, self.gradients @ into_outputs[0], self.num_rows)

    def input_moment(self) -> Tensor:
        """The diagonal of Σ a aᵀ, which is diagonal: how often each row is used, (1, I)."""
        return torch.bincount(self.indices.flatten(), minlength=self.num_rows).to(self.gradients)[None]

    def gradient_moment(self) -> Tensor:
        """Σ_{n,k,t} g gᵀ: (1, D, D)."""
        g = self.gradients.flatten(0, 2)
        return (g.T @ g)[None]

    @property
    def num_positions(self) -> int:
        return self.indices.numel()


@dataclass(frozen=True)
class SumBlock:
    """A parameter used in several ways at once, such as an embedding tied to an output layer."""

    parts: tuple[Block, ...]

    @property
    def size(self) -> int:
        return self.parts[0].size

    def rows(self) -> Tensor:
        return torch.stack([part.rows() for part in self.parts]).sum(0)

    def matmul(self, vectors: Tensor) -> Tensor:
        return torch.stack([part.matmul(vectors) for part in self.parts]).sum(0)

    def transpose_matmul(self, weights: Tensor) -> Tensor:
        return torch.stack([part.transpose_matmul(weights) for part in self.parts]).sum(0)

    def squared_sum(self) -> Tensor:
        return self.rows().square().sum((0, 1))

    def columns(self, indices: Tensor) -> Tensor:
        return torch.stack([part.columns(indices) for part in self.parts]).sum(0)


def summed(blocks: list[Block], joined: dict[tuple[int, ...], Tensor]) -> Block:
    """One block for all uses of a parameter: outer blocks of one form side by side along T, else a sum.

    `joined` remembers gradients that were put side by side, so that the weight and the bias of a map share them.
    """
    if len(blocks) == 1:
        return blocks[0]
    outer = [b for b in blocks if isinstance(b, OuterBlock)]
    same_form = len({(b.inputs.shape[1:3], b.gradients.shape[3], b.transposed) for b in outer}) == 1
    if len(outer) == len(blocks) and same_form:
        parts = [b.gradients for b in outer]
        key = tuple(part.data_ptr() for part in parts)
        if key not in joined:
            joined[key] = torch.cat(parts, dim=-1)
        return OuterBlock(torch.cat([b.inputs for b in outer], dim=-1), joined[key], outer[0].transposed)
    tables = [b for b in blocks if isinstance(b, EmbeddingBlock)]
    if len(tables) == len(blocks):
        return EmbeddingBlock(
            torch.cat([b.indices for b in tables], dim=1),
            torch.cat([b.gradients for b in tables], dim=2),
            tables[0].num_rows,
        )
    if all(isinstance(b, RowBlock) for b in blocks):
        return RowBlock(torch.stack([b.rows() for b in blocks]).sum(0))
    return SumBlock(tuple(blocks))
