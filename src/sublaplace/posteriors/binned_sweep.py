r"""The sweep of KFAC or a diagonal, around a subspace or alone, with its eigenvalues in bins."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sublaplace.curvature.operators import Part
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.jacobians.blocks import Block
from sublaplace.jacobians.features import FeatureBlock
from sublaplace.jacobians.head import HeadBlock
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.wanted import Wanted
from sublaplace.model.linalg import diagonalised
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.projection import Projection

BINS_PER_DECADE = 5
"""Of KFAC's eigenvalues, which are rounded to their bin's mean: variances are right to about two percent.

On tiny networks, where few eigenvalues carry a variance, single ones are off by up to eight percent.
"""

_NUMBERS_AT_ONCE = 2**23  # of what differs between the points of a sweep
_DECADES = 12  # below the largest eigenvalue; smaller ones share the last bin


@dataclass(frozen=True)
class _BinnedPart:
    """One parameter's eigenvectors, ordered by bins of their eigenvalues."""

    part: Part
    order: Tensor  # (size,)
    starts: tuple[tuple[int, int, int], ...]  # (bin, start, stop) in that order
    both: Tensor | None  # Y and Q, with T, in that basis and order: (2s, size); None without a subspace


@dataclass(frozen=True)
class ComplementSweep:
    r"""V(τ, w) = m (S + τ) mᵀ + J_c (wK + τ)⁻¹ J_cᵀ with m = JQ(S + τ)⁻¹ and J_c = J − m (Y + τQ)ᵀ.

    In KFAC's eigenbasis the second term is a sum over eigenvalues e_k. They are rounded to bins, and per bin b only
    Σ j_k², Σ j_k Y_k and Σ j_k Q_k are kept of a row, and Σ YYᵀ, Σ YQᵀ, Σ QQᵀ once. A point then costs bins·s + s² per
    row. Without a subspace (s = 0) it is KFAC alone.
    """

    projection: Projection | None
    values: Tensor  # γ: (s,)
    turn: Tensor  # T: (s, s)
    eigenvalues: Tensor  # of K, for w = 1, by bin: (B,)
    parts: dict[str, _BinnedPart]
    grams: Tensor  # of Y and Q by bin: (B, 2s, 2s)

    @classmethod
    def of_complement(cls, posterior: ComplementedPosterior) -> "ComplementSweep":
        """Prepare the sweep of a posterior with a complement. Cost: rotations of Q and Y, and p·s²."""
        inside = posterior.inside
        values, turn = diagonalised(inside.curvature / inside.unit, inside.gram)
        return cls._of(posterior.outside, inside.unit, posterior, values, turn)

    @classmethod
    def of_blocks(cls, posterior: BlockPrecision) -> "ComplementSweep":
        """Prepare the sweep of KFAC or a diagonal alone."""
        none = torch.zeros(0, dtype=torch.float64, device=next(iter(posterior.parts.values())).eigenvalues().device)
        return cls._of(posterior, posterior.scale, None, none, none.view(0, 0))

    @classmethod
    def _of(
        cls,
        outside: BlockPrecision,
        unit: float,
        posterior: ComplementedPosterior | None,
        values: Tensor,
        turn: Tensor,
    ) -> "ComplementSweep":
        unweighted = 1 / (unit * outside.weight)
        largest = max(float(part.eigenvalues().max()) for part in outside.parts.values()) * unweighted
        count = BINS_PER_DECADE * _DECADES + 1
        totals = torch.zeros(count, 2, dtype=torch.float64, device="cpu")
        width = 2 * len(values)
        grams = torch.zeros(count, width, width, dtype=torch.float64, device=values.device)
        parts = {}
        for name, part in outside.parts.items():
            eigenvalues = part.eigenvalues().double() * unweighted
            places = _bins(eigenvalues, largest, count)
            order = torch.argsort(places, stable=True)
            starts = _runs(places[order])
            totals += _sums_by_bin(eigenvalues, places, count)
            both = None
            if posterior is not None:
                both = posterior.product_and_basis(name, unit)  # Y and Q as rows, in the eigenbasis
                s = len(turn)
                turned = [turn.T.to(both) @ half for half in (both[:s], both[s:])]
                both = torch.cat(turned)[:, order]
                for place, start, stop in starts:
                    exact = both[:, start:stop].double()
                    grams[place] += exact @ exact.T
            parts[name] = _BinnedPart(part, order, starts, both)
        means = (totals[:, 0] / totals[:, 1].clamp_min(1)).to(values.device)
        used = (totals[:, 1] > 0).to(values.device)
        renumbered = {int(b): k for k, b in enumerate(torch.nonzero(used).squeeze(1))}
        parts = {
            name: _BinnedPart(p.part, p.order, tuple((renumbered[b], i, j) for b, i, j in p.starts), p.both)
            for name, p in parts.items()
        }
        projection = None if posterior is None else posterior.projection
        return cls(projection, values, turn, means[used], parts, grams[used])

    @property
    def numbers_per_row(self) -> int:
        return len(self.eigenvalues) * (2 * len(self.values) + 1)

    def wanted(self, whole: bool) -> Wanted:
        return Wanted(features=not whole)

    def __call__(self, jacobian: Jacobian, taus: Tensor, weights: Tensor, whole: bool) -> Tensor:
        """Evaluate a few points at a time, so that the memory of what differs between them stays small."""
        if jacobian.has_features:
            return self._with_features(jacobian, taus, weights)
        squares, products = self._sums(jacobian, whole)
        step = max(1, _NUMBERS_AT_ONCE // max(1, products[0].numel() + self.grams[0].numel()))
        points = zip(taus.to(squares.device).split(step), weights.to(squares.device).split(step), strict=True)
        return torch.cat([self._at(squares, products, *some) for some in points])

    def _at(self, squares: Tensor, products: Tensor, taus: Tensor, weights: Tensor) -> Tensor:
        """Return V at some points from a chunk's sums by bin."""
        s, L = len(self.values), len(taus)
        outside = 1 / (weights[:, None] * self.eigenvalues + taus[:, None])  # (L, B)
        total = _over_bins(outside, squares)
        if not s:
            return total
        rows = products[..., s:].sum(0)  # JQ: every bin's share of it
        mixed, grams = _over_bins(outside, products), _over_bins(outside, self.grams)
        for k in range(L):
            tau = taus[k]
            if total.ndim == 3:
                total[k] += self._corrected(rows, mixed[k], grams[k], tau)
                continue
            m = rows / (self.values + tau)
            cross = mixed[k, ..., :s] + tau * mixed[k, ..., s:]  # Σ j (Y + τQ) / (we + τ)
            G = grams[k]
            inner = G[:s, :s] + tau * (G[:s, s:] + G[s:, :s]) + tau**2 * G[s:, s:]
            inner.diagonal().add_(self.values + tau)  # the first term of V
            both = m @ cross.transpose(1, 2)
            total[k] += m @ inner @ m.transpose(1, 2) - both - both.transpose(1, 2)
        return total

    def _with_features(self, jacobian: Jacobian, taus: Tensor, weights: Tensor) -> Tensor:
        """Return the variances of outputs that are linear in features, point by point.

        The sums by bin are those of the F features. The last layer's part of each point comes from its factors, with
        eigenvalues rounded to the same bins. Cost: C·(F + C)·s per input and point.
        """
        s = len(self.values)
        inner, heads, mix = {}, [], None
        for name, block in jacobian.blocks.items():
            if isinstance(block, FeatureBlock):
                inner[name], mix = block.inner, block.mix.double()
            else:
                heads.append(_HeadPoints.of(self.parts[name], self.eigenvalues, block))
        assert mix is not None
        features = replace(jacobian, blocks=inner, num_rows=mix.shape[1])
        squares, products = self._sums(features, whole=True)
        ones = torch.ones_like(self.eigenvalues)
        rows = mix @ products[..., s:].sum(0)  # JQ
        for head in heads:
            rows = rows + head.products(ones)[..., s:]
        result = []
        for tau, weight in zip(taus.tolist(), weights.tolist(), strict=True):
            outside = 1 / (weight * self.eigenvalues + tau)
            (square,), (product,) = _over_bins(outside[None], squares), _over_bins(outside[None], products)
            total, mixed = ((mix @ square) * mix).sum(2), mix @ product
            for head in heads:
                total, mixed = total + head.variances(outside), mixed + head.products(outside)
            if s:
                total = total + self._corrected(rows, mixed, _over_bins(outside[None], self.grams)[0], tau)
            result.append(total)
        return torch.stack(result)

    def _corrected(self, rows: Tensor, mixed: Tensor, G: Tensor, tau: float | Tensor) -> Tensor:
        """Return what the subspace changes of the variance outside, at one point: (n, K)."""
        s = len(self.values)
        m = rows / (self.values + tau)
        cross = mixed[..., :s] + tau * mixed[..., s:]
        inner = G[:s, :s] + tau * (G[:s, s:] + G[s:, :s]) + tau**2 * G[s:, s:]
        inner.diagonal().add_(self.values + tau)
        return ((m @ inner - 2 * cross) * m).sum(2)

    def _sums(self, jacobian: Jacobian, whole: bool) -> tuple[Tensor, Tensor]:
        """Return by bin Σ j_k² (B, n, K), or Σ j_k j′_k (B, n, K, K), and Σ j_k Y_k, Σ j_k Q_k: (B, n, K, 2s)."""
        n, K, s, B = jacobian.num_inputs, jacobian.num_rows, len(self.values), len(self.eigenvalues)
        device = jacobian.outputs.device
        squares = torch.zeros(B, n, K, *([K] if whole else []), dtype=torch.float64, device=device)
        products = torch.zeros(B, n, K, 2 * s, dtype=torch.float64, device=device)
        for name, block in jacobian.blocks.items():
            binned = self.parts[name]
            rows = binned.part.rotated_rows(block)[:, :, binned.order]
            for place, start, stop in binned.starts:
                some = rows[:, :, start:stop]
                squares[place] += (some @ some.transpose(1, 2)) if whole else some.square().sum(2)
                if binned.both is not None:
                    products[place] += some @ binned.both[:, start:stop].T
        return squares, products


@dataclass(frozen=True)
class _HeadPoints:
    """The last layer's part of variances, Σ_k Q_ck a_j² o_kj and the like, for factors o that depend on the bin.

    In the eigenbasis of a Kronecker part the row of output c is Q_B[c] ⊗ (Q_Aᵀ a).
    """

    bins: Tensor  # of the eigenvalues: (C, I)
    inputs: Tensor  # Q_Aᵀ a: (n, I)
    basis: Tensor | None  # Q_B: (C, C); None: the identity
    both: Tensor | None  # Y and Q: (2s, C, I)

    @classmethod
    def of(cls, binned: _BinnedPart, eigenvalues: Tensor, block: Block) -> "_HeadPoints":
        """Prepare the sums of one parameter of the last layer."""
        if not isinstance(block, HeadBlock):
            raise TypeError("Only the last layer may have rows of its own beside those of features.")
        into_inputs, into_outputs = binned.part.head_bases()
        places = torch.empty(len(binned.order), dtype=torch.long, device=binned.order.device)
        for place, start, stop in binned.starts:
            places[binned.order[start:stop]] = place
        both = None
        if binned.both is not None:
            both = torch.empty_like(binned.both)
            both[:, binned.order] = binned.both
            both = block.as_maps(both).double()
        a = block.inputs.double()
        a = a if into_inputs is None else a @ into_inputs.double()
        basis = None if into_outputs is None else into_outputs.double()
        return cls(block.as_maps(places), a, basis, both)

    def variances(self, factors: Tensor) -> Tensor:
        """Return Σ j² f for factors f by bin (B,): (n, C)."""
        weighted = self.inputs.square() @ factors[self.bins].T
        return weighted if self.basis is None else weighted @ self.basis.square().T

    def products(self, factors: Tensor) -> Tensor:
        """Return Σ j Y f and Σ j Q f: (n, C, 2s)."""
        if self.both is None:
            return self.inputs.new_zeros(len(self.inputs), len(self.bins), 0)
        seen = torch.einsum("ni,kci->nck", self.inputs, self.both * factors[self.bins])
        return seen if self.basis is None else self.basis @ seen


def _over_bins(factors: Tensor, sums: Tensor) -> Tensor:
    """Return Σ_b f_lb x_b for factors (L, B) and sums (B, …): (L, …)."""
    return (factors @ sums.flatten(1)).view(len(factors), *sums.shape[1:])


def _bins(eigenvalues: Tensor, largest: float, count: int) -> Tensor:
    """Return the bin of each eigenvalue, 0 for the smallest."""
    scale = torch.tensor(max(largest, torch.finfo(torch.float64).tiny), dtype=torch.float64, device="cpu")
    decades = (eigenvalues.clamp_min(torch.finfo(torch.float64).tiny) / scale).log10() + _DECADES
    return (decades * BINS_PER_DECADE).floor().clamp(0, count - 1).long()


def _runs(places: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Return (bin, start, stop) of every run of equal bins in their order."""
    found, counts = torch.unique_consecutive(places, return_counts=True)
    stops = counts.cumsum(0)
    ends = zip(found.tolist(), (stops - counts).tolist(), stops.tolist(), strict=True)
    return tuple(ends)


def _sums_by_bin(eigenvalues: Tensor, places: Tensor, count: int) -> Tensor:
    """Return the sum and the number of the eigenvalues in every bin: (count, 2)."""
    both = torch.stack([eigenvalues, torch.ones_like(eigenvalues)], dim=1)
    return torch.zeros(count, 2, dtype=torch.float64, device=places.device).index_add_(0, places, both).cpu()
