"""The eigenvectors of one parameter of KFAC, with their eigenvalues in bins, and those of a last layer."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sublaplace.curvature.operators import Part
from sublaplace.jacobians.head import HeadBlock

_MOST_MEMBERS = 2**20  # numbers that say which entries of a part belong to which bin


@dataclass(frozen=True)
class BinnedPart:
    """One parameter's eigenvectors, ordered by bins of their eigenvalues."""

    part: Part
    order: Tensor  # (size,)
    starts: tuple[tuple[int, int, int], ...]  # (bin, start, stop) in that order
    vectors: Tensor | None  # Z, with T, in that basis and order: (s, size); None without a subspace
    inside: Tensor | None = None  # QT likewise, if it is kept

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
        into_inputs, basis = binned.part.head_bases()
        places = torch.empty_like(binned.order)
        for place, start, stop in binned.starts:
            places[binned.order[start:stop]] = place
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

        Columns of the entries (m, w), their vectors (m, s, w), with zeros where a piece is shorter, and which bin and
        row of a map each piece belongs to, as bin·C + row (m,). The width is the mean length of a run, so that the
        padded vectors take at most about twice the memory of the others.
        """
        (C, I), device = self.bins.shape, self.bins.device
        sorted_bins, order = torch.sort(self.bins, dim=1, stable=True)
        rows = torch.arange(C, device=device)[:, None]
        owners, run, lengths = torch.unique_consecutive(
            (rows * self.num_bins + sorted_bins).flatten(), return_inverse=True, return_counts=True
        )
        width = max(1, -(-C * I // len(owners)))
        starts, pieces = lengths.cumsum(0) - lengths, -(-lengths // width)
        rank = torch.arange(C * I, device=device) - starts[run]
        piece, slot = (pieces.cumsum(0) - pieces)[run] + rank // width, rank % width
        # The places of all entries in the maps; one more column of zeros fills up what is shorter.
        entries = torch.full((int(pieces.sum()), width), C * I, device=device)
        entries[piece, slot] = (rows * I + order).flatten()
        padded = torch.cat([self.vectors.flatten(1), self.vectors.new_zeros(len(self.vectors), 1)], dim=1)
        vectors = padded.index_select(1, entries.flatten()).view(-1, *entries.shape).movedim(0, 1).contiguous()
        owner = owners.repeat_interleave(pieces)
        return entries % I, vectors, owner % self.num_bins * C + owner // self.num_bins

    @cached_property
    def _members(self) -> Tensor:
        """Which entries of a map belong to which bin, as zeros and ones: (I, B·C). Memory: that of B vectors."""
        bins = torch.arange(self.num_bins, device=self.bins.device)
        return (self.bins.T[:, None, :] == bins[:, None]).flatten(1).to(self.vectors.dtype)

    def unit_sums(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ j² and Σ j Z by bin of the C rows that those of the outputs are combinations of.

        Shapes (B, n, C), in float64, and (B, C, s, n). Cost: n·C·I·s, a C-th of what rows of outputs would cost.
        """
        a, C, B = self._rotated(inputs), len(self.bins), self.num_bins
        squares = (a.square() @ self._members).double().view(len(a), B, C).transpose(0, 1)
        columns, vectors, places = self._pieces
        entries = a.T.contiguous().index_select(0, columns.flatten()).view(*columns.shape, len(a))
        products = a.new_zeros(B * C, len(self.vectors), len(a))
        products.index_add_(0, places, vectors @ entries)
        return squares, products.view(B, C, *products.shape[1:])

    def variances(self, unit_squares: Tensor) -> Tensor:
        """Return Σ j² of the outputs from those of the C rows: (…, C)."""
        return unit_squares if self.basis is None else unit_squares @ self.basis.square().T

    def products(self, unit_products: Tensor) -> Tensor:
        """Return Σ j Z of the outputs, (…, n, C, s), from those of the C rows, (…, C, s, n)."""
        mixed = unit_products
        if self.basis is not None:
            mixed = (self.basis.to(mixed) @ mixed.flatten(-2)).view_as(mixed)
        return mixed.movedim(-1, -3)

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
