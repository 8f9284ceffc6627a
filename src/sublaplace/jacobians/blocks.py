r"""The Jacobian of a batch with respect to one parameter, stored as factors.

For a linear map applied at T positions, a Jacobian row is a sum of outer products of the map's inputs a and the
gradients g at its outputs,

.. math:: \partial f_k(x_n) / \partial W = \sum_t g_{nkt} a_{nt}^\top .

With (a, g) in place of the rows, a product with the Jacobian is a few matrix multiplications. Their best order depends
on T, on the number K of rows per input, and on the number of vectors. `OuterBlock` counts multiplications and takes the
cheaper order. Shapes: n inputs, K rows per input, G groups, I inputs and O outputs of the map, T positions, r vectors.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from sublaplace.model.linalg import add_product, symmetric_product

ROWS_AT_ONCE = 2**23 - 2**11
"""Numbers of a parameter's rows that a product with vectors forms at once.

These are just below 32 MiB in float32, the largest block that glibc keeps. Larger ones are mapped page by page, every
time, and leave the caches before they are read.
"""


class Block(Protocol):
    """The Jacobian J of a batch with respect to one parameter."""

    @property
    def size(self) -> int:
        """The number of entries of the parameter."""

    def rows(self) -> Tensor:
        """Return the dense rows: (n, K, size)."""

    def matmul(self, vectors: Tensor) -> Tensor:
        """Return J V for V given as (r, size): (n, K, r)."""

    def add_transpose_matmul(self, weights: Tensor, into: Tensor) -> None:
        """Add Jᵀ U, for U given as (n, K, r), to `into` (r, size)."""

    def squared_sum(self) -> Tensor:
        """Return the sum of the squared rows over n and K: (size,)."""

    def scaled(self, factor: float) -> "Block":
        """Return the rows times a factor."""

    def columns(self, indices: Tensor) -> Tensor:
        """Return the columns at `indices` (m,): (n, K, m)."""


@dataclass(frozen=True)
class RowBlock:
    """Dense rows, for parameters whose rows are as small as any factor, such as the scales of a normalisation layer."""

    values: Tensor  # (n, K, size)

    @property
    def size(self) -> int:
        return self.values.shape[2]

    def rows(self) -> Tensor:
        return self.values

    def matmul(self, vectors: Tensor) -> Tensor:
        return self.values @ vectors.T

    def add_transpose_matmul(self, weights: Tensor, into: Tensor) -> None:
        add_product(into, weights.flatten(0, 1).T, self.values.flatten(0, 1))

    def squared_sum(self) -> Tensor:
        return self.values.square().sum((0, 1))

    def scaled(self, factor: float) -> "RowBlock":
        return RowBlock(self.values * factor)

    def columns(self, indices: Tensor) -> Tensor:
        return self.values[:, :, indices]


@dataclass(frozen=True)
class OuterUse:
    """One call of a linear map: its inputs, and the gradients at its outputs for each of the K rows."""

    inputs: Tensor  # a: (n, G, I, T)
    gradients: tuple[Tensor, ...]  # g: K tensors (n, G, O, T), as the backward passes returned them
    outputs: int  # O
    is_bias: bool = False  # a = 1 everywhere

    @property
    def positions(self) -> int:
        """The number of positions, T."""
        return self.inputs.shape[3]

    def weighted_inputs(self, weights: Tensor | None, present: Tensor | None) -> Tensor:
        """Return √w a, with zeros at positions that are not present: (n, G, I, T)."""
        a, own = self.inputs, _of_positions(present, self.positions)
        if weights is not None:
            a = a * weights.sqrt().to(a).view(-1, 1, 1, 1)
        return a if own is None else a * own.to(a)[:, None, None, :]

    def transposed_map(self, k: int) -> Tensor:
        """Return Σ_t a_t g_tᵀ for row k: (n, G, I, O)."""
        if self.is_bias:
            return self.gradients[k].sum(-1).unsqueeze(2)
        return self.inputs @ self.gradients[k].transpose(-1, -2)


@dataclass(frozen=True)
class OuterBlock:
    """Rows Σ_t g_t a_tᵀ: the weight of a linear or convolutional map, grouped or not, or its bias, with a = 1.

    A weight that is used several times has several uses, whose rows add up. `transposed` means that the parameter is
    stored as (I, O), as in ``x @ W``. Gradients are a tuple over the rows, because stacking them would cost as much
    memory traffic as a backward pass.
    """

    uses: tuple[OuterUse, ...]
    num_rows: int  # K
    transposed: bool = False

    @classmethod
    def of(cls, inputs: Tensor, gradients: Tensor, transposed: bool = False) -> "OuterBlock":
        """Return a block with one use, from inputs a (n, G, I, T) and gradients g (n, K, G, O, T)."""
        use = OuterUse(inputs, gradients.unbind(1), gradients.shape[3])
        return cls((use,), gradients.shape[1], transposed)

    @property
    def num_inputs(self) -> int:
        """The number of inputs, n."""
        return self.uses[0].inputs.shape[0]

    @property
    def groups(self) -> int:
        """The number of groups, G."""
        return self.uses[0].inputs.shape[1]

    @property
    def fan_in(self) -> int:
        """The number of inputs of the map, I."""
        return self.uses[0].inputs.shape[2]

    @property
    def fan_out(self) -> int:
        """The number of outputs of the map, O."""
        return self.uses[0].outputs

    @property
    def positions(self) -> int:
        """The number of positions T, over all uses."""
        return sum(use.positions for use in self.uses)

    def scaled(self, factor: float) -> "OuterBlock":
        # The inputs are scaled: gradients are larger, and a weight shares them with its bias.
        uses = tuple(replace(use, inputs=use.inputs * factor, is_bias=False) for use in self.uses)
        return replace(self, uses=uses)

    @property
    def is_single(self) -> bool:
        """Whether every row is a single outer product."""
        return self.positions == 1 and self.groups == 1

    @property
    def size(self) -> int:
        return self.groups * self.fan_in * self.fan_out

    @cached_property
    def inputs(self) -> Tensor:
        """The inputs a of all uses, concatenated: (n, G, I, T)."""
        return self.uses[0].inputs if len(self.uses) == 1 else torch.cat([use.inputs for use in self.uses], dim=3)

    @cached_property
    def gradients(self) -> Tensor:
        """The gradients g of all uses, stacked and concatenated: (n, K, G, O, T)."""
        if not self.num_rows:
            shape = (self.num_inputs, 0, self.groups, self.fan_out, self.positions)
            return self.uses[0].inputs.new_zeros(shape)
        stacked = [torch.stack(use.gradients, dim=1) for use in self.uses]
        return stacked[0] if len(stacked) == 1 else torch.cat(stacked, dim=4)

    def rows(self) -> Tensor:
        return self._stored(self._maps_of_rows()).reshape(self.num_inputs, self.num_rows, self.size)

    def _maps_of_rows(self) -> Tensor:
        """Return the rows as maps: (n, K, G, O, I)."""
        if self.positions == 1:
            return self.gradients * self.inputs.unsqueeze(1).transpose(-1, -2)
        if not self.num_rows:
            return self.uses[0].inputs.new_zeros(self.num_inputs, 0, self.groups, self.fan_out, self.fan_in)
        n, K, G, O, I = self.num_inputs, self.num_rows, self.groups, self.fan_out, self.fan_in
        if I < O and I < 32:
            # Reading g is the bottleneck, so g is not copied; the transposed product is twice as fast.
            products = [self._transposed_map(k) for k in range(K)]
            return torch.stack(products, dim=1).view(n, K, G, I, O).transpose(-1, -2)
        # Multiplications are the bottleneck: one larger product for all rows of an input outweighs the copy of g.
        total: Tensor | None = None
        for use in self.uses:
            g = _beside(use.gradients).flatten(0, 1)  # (nG, K·O, T)
            a = use.inputs.flatten(0, 1).transpose(1, 2)
            total = g @ a if total is None else total.baddbmm_(g, a)
        assert total is not None
        return total.view(n, G, K, O, I).transpose(1, 2)

    def _parts(self) -> Iterator[tuple[slice, slice, "OuterBlock"]]:
        """Yield parts whose rows have about `ROWS_AT_ONCE` numbers, with the inputs and the columns of each.

        A part belongs to a few outputs of the map, so that every vector is read once. Where the columns of an output
        are not next to each other, it belongs to a few inputs.
        """
        one = max(1, self.num_inputs * self.num_rows * self.fan_in)  # the rows of one output
        if one * self.groups * self.fan_out <= ROWS_AT_ONCE:
            yield slice(None), slice(None), self
        elif self.groups > 1 or self.transposed:
            step = max(1, ROWS_AT_ONCE // (self.num_rows * self.size))
            for start in range(0, self.num_inputs, step):
                yield slice(start, start + step), slice(None), self._of_inputs(start, start + step)
        else:
            step = max(1, ROWS_AT_ONCE // one)
            for start in range(0, self.fan_out, step):
                stop = min(start + step, self.fan_out)
                yield slice(None), slice(start * self.fan_in, stop * self.fan_in), self.of_outputs(start, stop)

    def _of_inputs(self, start: int, stop: int) -> "OuterBlock":
        uses = (
            replace(use, inputs=use.inputs[start:stop], gradients=tuple(g[start:stop] for g in use.gradients))
            for use in self.uses
        )
        return replace(self, uses=tuple(uses))

    def _transposed_map(self, k: int) -> Tensor:
        """Return Σ_t a_t g_tᵀ over all uses, for row k: (n, G, I, O)."""
        return _total(use.transposed_map(k) for use in self.uses)

    def _stored(self, matrices: Tensor) -> Tensor:
        """Return maps (…, O, I) in the order in which the parameter is stored; an involution."""
        return matrices.transpose(-1, -2) if self.transposed else matrices

    def _as_maps(self, vectors: Tensor) -> Tensor:
        """Return vectors (r, size) as maps (r, G, O, I)."""
        sides = (self.fan_in, self.fan_out) if self.transposed else (self.fan_out, self.fan_in)
        return self._stored(vectors.reshape(-1, self.groups, *sides))

    def factors_first(self, count: int) -> bool:
        """Return whether contracting `count` vectors with a factor costs less than forming the rows first."""
        K, T = self.num_rows, self.positions
        factors = T * count * (self.size + K * self.groups * self.fan_out)
        rows = K * self.size * (count + (T if T > 1 else 1))
        return factors < rows

    def matmul(self, vectors: Tensor) -> Tensor:
        r = len(vectors)
        if not self.factors_first(r):
            result = vectors.new_zeros(self.num_inputs, self.num_rows, r)
            for inputs, columns, part in self._parts():
                result[inputs] += part.rows() @ vectors[:, columns].T
            return result
        n, K, G, O, T = self.gradients.shape
        a = self.inputs.permute(1, 0, 3, 2).reshape(G, n * T, -1)
        maps = self._as_maps(vectors).transpose(0, 1).reshape(G, r * O, -1)
        mapped = (a @ maps.transpose(-1, -2)).view(G, n, T, r, O)
        g = self.gradients.permute(2, 0, 1, 4, 3).reshape(G, n, K, T * O)
        return (g @ mapped.transpose(3, 4).reshape(G, n, T * O, r)).sum(0)

    def add_transpose_matmul(self, weights: Tensor, into: Tensor) -> None:
        n, K, r = weights.shape
        if not self.factors_first(r):
            for inputs, columns, part in self._parts():
                add_product(into[:, columns], weights[inputs].flatten(0, 1).T, part.rows().flatten(0, 1))
            return
        _, _, G, O, T = self.gradients.shape
        weighted = (weights.transpose(1, 2) @ self.gradients.reshape(n, K, G * O * T)).view(n, r, G, O, T)
        left = weighted.permute(2, 1, 3, 0, 4).reshape(G, r * O, n * T)
        right = self.inputs.permute(1, 0, 3, 2).reshape(G, n * T, -1)
        maps = (left @ right).unflatten(1, (r, O)).transpose(0, 1)
        into += self._stored(maps).reshape(r, self.size)

    def squared_sum(self) -> Tensor:
        if self.positions > 1:
            # One row k at a time, so that the maps to be squared stay in the cache.
            total = self.uses[0].inputs.new_zeros(self.groups, self.fan_in, self.fan_out)
            for k in range(self.num_rows):
                total += self._transposed_map(k).square_().sum(0)
            return self._stored(total.transpose(1, 2)).reshape(-1)
        g = self.gradients[..., 0].square().sum(1)  # (n, G, O)
        a = self.inputs[..., 0].square()  # (n, G, I)
        return self._stored(torch.einsum("ngo,ngi->goi", g, a)).reshape(-1)

    def columns(self, indices: Tensor) -> Tensor:
        if len(indices) * self.positions > self.size:
            return self.rows()[:, :, indices]
        O, I = self.fan_out, self.fan_in
        inner = O if self.transposed else I
        group, rest = indices // (O * I), indices % (O * I)
        first, second = rest // inner, rest % inner
        output, source = (second, first) if self.transposed else (first, second)
        return torch.einsum("nkmt,nmt->nkm", self.gradients[:, :, group, output], self.inputs[:, group, source])

    def rotated(self, into_inputs: Tensor, into_outputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return Q_inᵀ a and Q_outᵀ g for a block with one position: (n, G, I) and (n, K, G, O).

        Args:
            into_inputs: Q_in, an orthonormal basis (G, I, I).
            into_outputs: Q_out, an orthonormal basis (G, O, O); None: the identity.
        """
        a, g = torch.einsum("gij,ngi->ngj", into_inputs, self.inputs[..., 0]), self.gradients[..., 0]
        return a, g if into_outputs is None else torch.einsum("gop,nkgo->nkgp", into_outputs, g)

    def rotated_rows(self, into_inputs: Tensor | None, into_outputs: Tensor | None) -> Tensor:
        """Return the rows in other bases, Q_outᵀ (Σ_t g_t a_tᵀ) Q_in: (n, K, size); no Q_out stands for 1."""
        assert into_inputs is not None
        if self.positions == 1:
            a, g = self.rotated(into_inputs, into_outputs)
            maps = g.unsqueeze(-1) * a.unsqueeze(1).unsqueeze(3)
            return self._stored(maps).reshape(self.num_inputs, self.num_rows, self.size)
        # Each side is rotated before or after the sum over the positions, whichever involves fewer columns.
        turns_inputs, turns_outputs = self.positions < self.num_rows * self.fan_out, self.positions < self.fan_in
        uses = self.uses
        if turns_inputs:
            turned = (torch.einsum("gij,ngit->ngjt", into_inputs, use.inputs) for use in uses)
            uses = tuple(replace(use, inputs=a, is_bias=False) for use, a in zip(uses, turned, strict=True))
        if turns_outputs and into_outputs is not None:
            uses = tuple(replace(use, gradients=_turned(use.gradients, into_outputs)) for use in uses)
        maps = replace(self, uses=uses)._maps_of_rows()
        if not turns_inputs:
            maps = maps @ into_inputs
        if not turns_outputs and into_outputs is not None:
            maps = into_outputs.transpose(1, 2) @ maps
        return self._stored(maps).reshape(self.num_inputs, self.num_rows, self.size)

    @property
    def num_elements(self) -> int:
        """The number of entries of all factors."""
        return sum(use.inputs.numel() + sum(g.numel() for g in use.gradients) for use in self.uses)

    def turned(self, into_inputs: Tensor, into_outputs: Tensor | None) -> "OuterBlock":
        """Return the factored block whose rows are `rotated_rows`."""
        uses = (
            replace(
                use,
                inputs=torch.einsum("gij,ngit->ngjt", into_inputs, use.inputs),
                gradients=use.gradients if into_outputs is None else _turned(use.gradients, into_outputs),
                is_bias=False,
            )
            for use in self.uses
        )
        return replace(self, uses=tuple(uses))

    def of_outputs(self, start: int, stop: int) -> "OuterBlock":
        """Return the part of the block that belongs to the outputs `start` to `stop` of the map, in every group."""
        uses = (
            replace(use, gradients=tuple(g[:, :, start:stop] for g in use.gradients), outputs=stop - start)
            for use in self.uses
        )
        return replace(self, uses=tuple(uses))

    def indices_of_outputs(self, start: int, stop: int) -> Tensor:
        """Return the indices of the columns of `of_outputs` among the columns of the block."""
        places = self._as_maps(torch.arange(self.size, device=self.device)[None])
        return self._stored(places[:, :, start:stop]).reshape(-1)

    def input_moment(self, weights: Tensor | None = None, present: Tensor | None = None) -> Tensor:
        """Return Σ_{n,t} w_n a aᵀ over the positions that are present: (G, I, I).

        Args:
            weights: w, (n,); None: 1.
            present: which of T positions are data rather than padding, (n, T); uses with another number of positions
                count all of theirs. None: all.
        """
        return _total(_second_moment(use.weighted_inputs(weights, present)) for use in self.uses)

    def gradient_moment(self) -> Tensor:
        """Return Σ_{n,k,t} g gᵀ: (G, O, O)."""
        if not self.num_rows:
            return self.uses[0].inputs.new_zeros(self.groups, self.fan_out, self.fan_out)
        return _total(_second_moment(g) for use in self.uses for g in use.gradients)

    def gradient_squares(self) -> Tensor:
        """Return the diagonal of `gradient_moment`, Σ g²: (G, O)."""
        if not self.num_rows:
            return self.uses[0].inputs.new_zeros(self.groups, self.fan_out)
        return _total(g.square().sum((0, 3)) for use in self.uses for g in use.gradients)

    @property
    def factor_sides(self) -> tuple[int, ...]:
        """The number of groups, and the side lengths of the square Kronecker factors of one group."""
        return self.groups, self.fan_in, self.fan_out

    @property
    def device(self) -> torch.device:
        """The device of the factors."""
        return self.uses[0].inputs.device

    @property
    def gradient_key(self) -> tuple[object, ...]:
        """A key that is equal for blocks with the same gradients, such as a weight and its bias."""
        return tuple(_identity(g) for use in self.uses for g in use.gradients) or (self.groups, self.fan_out)

    def num_terms(self, weights: Tensor | None = None, present: Tensor | None = None) -> float:
        """Return the weighted number of terms of `input_moment`: T Σ_n w_n, if all positions are present."""
        return sum(_num_terms(self.num_inputs, use.positions, weights, present) for use in self.uses)

    def reduced(self, present: Tensor | None = None) -> "OuterBlock":
        """Return the block with inputs averaged and gradients summed over the positions: KFAC's reduce setting."""
        total = _total(use.weighted_inputs(None, present).sum(-1, keepdim=True) for use in self.uses)
        each = [_of_positions(present, use.positions) for use in self.uses]
        counts = sum(
            use.positions if own is None else own.sum(1).clamp_min(1).to(total).view(-1, 1, 1, 1)
            for use, own in zip(self.uses, each, strict=True)
        )
        return OuterBlock.of(total / counts, self.gradients.sum(-1, keepdim=True), self.transposed)


def _of_positions(present: Tensor | None, positions: int) -> Tensor | None:
    """Return which positions of a call are data, (n, T); None: all, as where the call has others than the inputs."""
    return None if present is None or present.shape[1] != positions else present


def _num_terms(n: int, positions: int, weights: Tensor | None, present: Tensor | None) -> float:
    """Return the weighted number of positions of a call that are present."""
    own = _of_positions(present, positions)
    if own is None:
        return positions * (n if weights is None else float(weights.sum()))
    counts = own.sum(1)
    return float(counts.sum() if weights is None else (counts.to(weights) * weights).sum())


def _total(fresh: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors, in the memory of the first; no caller may hold a reference to it."""
    tensors = iter(fresh)
    total = next(tensors)
    for tensor in tensors:
        total += tensor
    return total


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal only for identical views of the same memory."""
    # Some tensor subclasses have no memory of their own: all of them have the address 0.
    return tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride()


def _second_moment(factor: Tensor) -> Tensor:
    """Return Σ_{n,t} f fᵀ for factors f (n, G, F, T): (G, F, F)."""
    _, _, F, T = factor.shape
    if factor.stride(2) == 1:  # positions before features in memory
        return symmetric_product(factor.permute(1, 0, 3, 2).flatten(1, 2).transpose(1, 2))
    if T < F or factor.stride(0) == T:
        return symmetric_product(factor.permute(1, 2, 0, 3).flatten(2))
    return (factor @ factor.transpose(-1, -2)).sum(0)


def _turned(gradients: tuple[Tensor, ...], basis: Tensor) -> tuple[Tensor, ...]:
    """Return Qᵀ g for gradients g (n, G, O, T) and a basis Q (G, O, O)."""
    return tuple((g.transpose(2, 3) @ basis).transpose(2, 3) for g in gradients)


def _beside(gradients: tuple[Tensor, ...]) -> Tensor:
    """Copy K tensors (n, G, O, T) to one tensor (n, G, K·O, T) that keeps their memory order."""
    if gradients[0].stride(2) == 1:  # positions before outputs
        return torch.stack([g.transpose(2, 3) for g in gradients], dim=3).flatten(3).transpose(2, 3)
    return torch.stack(gradients, dim=2).flatten(2, 3)


@dataclass(frozen=True)
class EmbeddingBlock:
    """Rows for an embedding table: every position uses one table row, so a is one-hot and stored as an index."""

    indices: Tensor  # (n, T)
    gradients: Tensor  # (n, K, T, D)
    table_rows: int

    @property
    def size(self) -> int:
        return self.table_rows * self.gradients.shape[3]

    def rows(self) -> Tensor:
        n, K, T, D = self.gradients.shape
        rows = self.gradients.new_zeros(n, K, self.table_rows, D)
        rows.scatter_add_(2, self.indices.view(n, 1, T, 1).expand(n, K, T, D), self.gradients)
        return rows.flatten(2)

    def matmul(self, vectors: Tensor) -> Tensor:
        table = vectors.view(len(vectors), self.table_rows, -1)[:, self.indices]  # (r, n, T, D)
        return self.gradients.flatten(2) @ table.flatten(2).permute(1, 2, 0)

    def add_transpose_matmul(self, weights: Tensor, into: Tensor) -> None:
        n, _, T, D = self.gradients.shape
        r = weights.shape[2]
        weighted = (weights.transpose(1, 2) @ self.gradients.flatten(2)).view(n, r, T, D)
        table = into.view(r, self.table_rows, D)
        table.index_add_(1, self.indices.flatten(), weighted.transpose(0, 1).reshape(r, n * T, D))

    def squared_sum(self) -> Tensor:
        _, K, _, D = self.gradients.shape
        result = self.gradients.new_zeros(self.table_rows, D)
        for indices, gradients in zip(self.indices, self.gradients, strict=True):
            used, place = torch.unique(indices, return_inverse=True)
            rows = gradients.new_zeros(K, len(used), D).index_add_(1, place, gradients)
            result[used] += rows.square().sum(0)
        return result.flatten()

    def scaled(self, factor: float) -> "EmbeddingBlock":
        return EmbeddingBlock(self.indices, self.gradients * factor, self.table_rows)

    def columns(self, indices: Tensor) -> Tensor:
        width = self.gradients.shape[3]
        hit = (self.indices[:, :, None] == indices // width).to(self.gradients.dtype)  # (n, T, m)
        return torch.einsum("nktm,ntm->nkm", self.gradients[..., indices % width], hit)

    def rotated_rows(self, into_inputs: Tensor | None, into_outputs: Tensor | None) -> Tensor:
        """Return the rows in another output basis; none stands for the identity.

        One-hot inputs need no rotation: their second moment is diagonal.
        """
        assert into_inputs is None
        if into_outputs is None:
            return self.rows()
        return EmbeddingBlock(self.indices, self.gradients @ into_outputs[0], self.table_rows).rows()

    @property
    def factor_sides(self) -> tuple[int, ...]:
        """The same as in `OuterBlock`, without the input factor, which is diagonal."""
        return 1, self.gradients.shape[3]

    @property
    def device(self) -> torch.device:
        """The device of the indices."""
        return self.indices.device

    @property
    def gradient_key(self) -> tuple[object, ...]:
        """The same as in `OuterBlock`."""
        return ("table", _identity(self.gradients))

    def input_moment(self, weights: Tensor | None = None, present: Tensor | None = None) -> Tensor:
        """Return the diagonal of Σ w a aᵀ, the weighted number of uses of each table row: (1, I)."""
        counts = None if weights is None else weights[:, None].expand(self.indices.shape)
        own = _of_positions(present, self.indices.shape[1])
        if own is not None:
            counts = own.to(self.gradients) if counts is None else counts * own.to(counts)
        flat = None if counts is None else counts.flatten().to(self.device)
        return torch.bincount(self.indices.flatten(), flat, minlength=self.table_rows).to(self.gradients)[None]

    def gradient_moment(self) -> Tensor:
        """Return Σ_{n,k,t} g gᵀ: (1, D, D)."""
        g = self.gradients.flatten(0, 2)
        return (g.T @ g)[None]

    def gradient_squares(self) -> Tensor:
        """Return the diagonal of `gradient_moment`: (1, D)."""
        return self.gradients.square().sum((0, 1, 2))[None]

    def num_terms(self, weights: Tensor | None = None, present: Tensor | None = None) -> float:
        """Return the weighted number of terms, T Σ_n w_n, if all positions are present."""
        n, positions = self.indices.shape
        return _num_terms(n, positions, weights, present)


@dataclass(frozen=True)
class SumBlock:
    """The sum of blocks, for a parameter used in several ways, such as an embedding tied to an output layer."""

    parts: tuple[Block, ...]

    @property
    def size(self) -> int:
        return self.parts[0].size

    def rows(self) -> Tensor:
        return torch.stack([part.rows() for part in self.parts]).sum(0)

    def matmul(self, vectors: Tensor) -> Tensor:
        return torch.stack([part.matmul(vectors) for part in self.parts]).sum(0)

    def add_transpose_matmul(self, weights: Tensor, into: Tensor) -> None:
        for part in self.parts:
            part.add_transpose_matmul(weights, into)

    def squared_sum(self) -> Tensor:
        return self.rows().square().sum((0, 1))

    def scaled(self, factor: float) -> "SumBlock":
        return SumBlock(tuple(part.scaled(factor) for part in self.parts))

    def columns(self, indices: Tensor) -> Tensor:
        return torch.stack([part.columns(indices) for part in self.parts]).sum(0)


def summed(blocks: list[Block]) -> Block:
    """Return one block for all uses of a parameter."""
    if len(blocks) == 1:
        return blocks[0]
    outer = [b for b in blocks if isinstance(b, OuterBlock)]
    same_form = len({(b.groups, b.fan_in, b.fan_out, b.transposed) for b in outer}) == 1
    if len(outer) == len(blocks) and same_form:
        return replace(outer[0], uses=tuple(use for b in outer for use in b.uses))
    tables = [b for b in blocks if isinstance(b, EmbeddingBlock)]
    if len(tables) == len(blocks):
        return EmbeddingBlock(
            torch.cat([b.indices for b in tables], dim=1),
            torch.cat([b.gradients for b in tables], dim=2),
            tables[0].table_rows,
        )
    if all(isinstance(b, RowBlock) for b in blocks):
        return RowBlock(torch.stack([b.rows() for b in blocks]).sum(0))
    return SumBlock(tuple(blocks))
