"""The eigenvectors of KFAC's parameters, with their eigenvalues in bins, and those of a last layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from sublaplace.curvature.operators import Part
from sublaplace.jacobians.blocks import Block
from sublaplace.jacobians.head import HeadBlock

_MOST_MEMBERS = 2**20  # numbers that say which entries of a part belong to which bin


@dataclass(frozen=True)
class BinnedPart:
    """The eigenvectors of one parameter, or of several small ones together, ordered by bins of their eigenvalues."""

    parts: dict[str, Part]
    bins: Tensor  # in that order: (size,)
    order: Tensor  # places among the entries of all parts, one after another: (size,)
    vectors: Tensor | None  # Z, with T, in that basis and order: (s, size); None without a subspace
    inside: Tensor | None = None  # QT likewise, if it is kept

    @classmethod
    def joined(cls, several: Sequence["BinnedPart"]) -> "BinnedPart":
        """Return several parts as one, so that one product per bin serves all. Memory: that of their vectors."""
        if len(several) == 1:
            return several[0]
        bins, sorting = torch.sort(torch.cat([one.bins for one in several]), stable=True)
        starts = accumulate((len(one.order) for one in several), initial=0)
        order = torch.cat([one.order + start for one, start in zip(several, starts, strict=False)])[sorting]

        def beside(vectors: list[Tensor | None]) -> Tensor | None:
            present = [each for each in vectors if each is not None]
            return torch.cat(present, dim=1)[:, sorting] if len(present) == len(several) else None

        parts = {name: part for one in several for name, part in one.parts.items()}
        return cls(
            parts, bins, order, beside([one.vectors for one in several]), beside([one.inside for one in several])
        )

    @cached_property
    def starts(self) -> tuple[tuple[int, int, int], ...]:
        """(bin, start, stop) of every run of equal bins."""
        found, counts = torch.unique_consecutive(self.bins, return_counts=True)
        stops = counts.cumsum(0)
        return tuple(zip(found.tolist(), (stops - counts).tolist(), stops.tolist(), strict=True))

    def rows(self, blocks: Mapping[str, Block]) -> Tensor:
        """Return the rows of a Jacobian in the order of the bins: (n, K, size)."""
        rows = [part.rotated_rows(blocks[name]) for name, part in self.parts.items()]
        whole = rows[0] if len(rows) == 1 else torch.cat(rows, dim=2)
        ordered = whole.flatten(0, 1).index_select(1, self.order)  # ten times as fast as with three dimensions
        return ordered.view_as(whole)

    @cached_property
    def _members(self) -> Tensor | None:
        """Which entries belong to which bin of the part, as zeros and ones: (size, bins); None for large parts."""
        if len(self.order) * len(self.starts) > _MOST_MEMBERS:
            return None
        members = torch.zeros(len(self.order), len(self.starts), device=self.order.device)
        for place, (_, start, stop) in enumerate(self.starts):
            members[start:stop, place] = 1
        return members

    def add_squares(self, rows: Tensor, into: Tensor) -> None:
        """Add Σ j² by bin, (B, n, K), for rows (n, K, size) in the order of the bins.

        One product for all bins of a part costs less than their sums one by one, unless the bins are large.
        """
        if self._members is None:
            for place, start, stop in self.starts:
                into[place] += rows[:, :, start:stop].square().sum(2)
            return
        sums = (rows.square() @ self._members.to(rows)).movedim(2, 0)
        for (place, _, _), own in zip(self.starts, sums, strict=True):
            into[place] += own


@dataclass(frozen=True)
class HeadPart:
    """A parameter of the last layer, whose row of output c is Q_B[c] ⊗ (Q_Aᵀ a) in the eigenbasis of its part.

    So the rows of all C outputs are combinations of C rows with I entries each.
    """

    into_inputs: Tensor | None  # Q_A: (I, I); None: the identity
    basis: Tensor | None  # Q_B: (C, C), in float64; None: the identity
    bins: Tensor  # of the eigenvalues: (C, I)
    num_bins: int  # B
    vectors: Tensor  # Z: (s, C, I)

    @classmethod
    def of(cls, binned: BinnedPart, block: HeadBlock, num_bins: int) -> "HeadPart":
        """Bring a part into the form of maps (C, I)."""
        (part,) = binned.parts.values()
        into_inputs, basis = part.head_bases()
        places = torch.empty_like(binned.order)
        places[binned.order] = binned.bins
        vectors = block.inputs.new_empty(0, len(places))
        if binned.vectors is not None:
            vectors = torch.empty_like(binned.vectors)
            vectors[:, binned.order] = binned.vectors
        basis = None if basis is None else basis.double()
        return cls(into_inputs, basis, block.as_maps(places), num_bins, block.as_maps(vectors))

    def _rotated(self, inputs: Tensor) -> Tensor:
        return inputs if self.into_inputs is None else inputs @ self.into_inputs

    @cached_property
    def _pieces(self) -> tuple[Tensor, Tensor, Tensor]:
        """Runs of entries of equal bins, cut into pieces of one width w, so that one batched product serves all.

        Columns of the entries (m, w), their vectors (m, w, s), and which bin and row of a map each piece belongs to,
        as bin·C + row (m,). Where a piece is shorter, the column is I, which `unit_sums` fills with zeros. The width is
        half of the mean length of a run: padding then adds about a third.
        """
        (C, I), device = self.bins.shape, self.bins.device
        sorted_bins, order = torch.sort(self.bins, dim=1, stable=True)
        rows = torch.arange(C, device=device)[:, None]
        owners, run, lengths = torch.unique_consecutive(
            (rows * self.num_bins + sorted_bins).flatten(), return_inverse=True, return_counts=True
        )
        width = max(1, -(-C * I // (2 * len(owners))))
        starts, pieces = lengths.cumsum(0) - lengths, -(-lengths // width)
        rank = torch.arange(C * I, device=device) - starts[run]
        piece, slot = (pieces.cumsum(0) - pieces)[run] + rank // width, rank % width
        columns = torch.full((int(pieces.sum()), width), I, device=device)
        columns[piece, slot] = order.flatten()
        vectors = self.vectors.new_zeros(*columns.shape, len(self.vectors))
        vectors[piece, slot] = self.vectors.flatten(1).T[(rows * I + order).flatten()]
        owner = owners.repeat_interleave(pieces)
        return columns, vectors, owner % self.num_bins * C + owner // self.num_bins

    def unit_sums(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ j² and Σ j Z by bin of the C rows that those of the outputs are combinations of.

        Shapes (B, n, C), in float64, and (B, C, n, s). Cost: n·C·I·s, a C-th of what rows of outputs would cost.
        """
        n, C, B = len(inputs), len(self.bins), self.num_bins
        columns, vectors, places = self._pieces
        padded = torch.cat([self._rotated(inputs).T, inputs.new_zeros(1, n)])
        entries = padded.index_select(0, columns.flatten()).view(*columns.shape, n)
        products = inputs.new_zeros(B * C, n, vectors.shape[2])
        products.index_add_(0, places, entries.transpose(1, 2) @ vectors)
        squares = inputs.new_zeros(B * C, n).index_add_(0, places, entries.square_().sum(1))
        return squares.double().view(B, C, n).transpose(1, 2), products.view(B, C, *products.shape[1:])

    def variances(self, unit_squares: Tensor) -> Tensor:
        """Return Σ j² of the outputs from those of the C rows: (…, C)."""
        return unit_squares if self.basis is None else unit_squares @ self.basis.square().T

    def products(self, unit_products: Tensor) -> Tensor:
        """Return Σ j Z of the outputs, (…, n, C, s), from those of the C rows, (…, C, n, s)."""
        mixed = unit_products
        if self.basis is not None:
            mixed = (self.basis.to(mixed) @ mixed.flatten(-2)).view_as(mixed)
        return mixed.transpose(-2, -3)

    def add_sums(self, inputs: Tensor, squares: Tensor, products: Tensor) -> None:
        """Add Σ j² and Σ j Z by bin, see `ComplementSweep._sums`."""
        unit_squares, unit_products = self.unit_sums(inputs)
        if squares.ndim == 3:
            squares += self.variances(unit_squares)
        elif self.basis is None:
            squares += unit_squares.diag_embed()
        else:
            squares += (self.basis * unit_squares[:, :, None, :]) @ self.basis.T
        products += self.products(unit_products)
