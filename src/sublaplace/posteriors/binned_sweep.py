r"""The sweep of KFAC or a diagonal, around a subspace or alone, with its eigenvalues in bins."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, log10

import torch
from torch import Tensor

from sublaplace.curvature.precision import BlockPrecision
from sublaplace.jacobians.features import FeatureBlock
from sublaplace.jacobians.head import HeadBlock
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.wanted import Wanted
from sublaplace.model.linalg import diagonalised
from sublaplace.posteriors.binned_parts import BinnedPart, HeadPart
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.projection import Projection

BINS_PER_DECADE = 5
"""Of KFAC's eigenvalues, which are rounded to their bin's mean: variances are right to about two percent.

On tiny networks, where few eigenvalues carry a variance, single ones are off by up to eight percent.
"""

_NUMBERS_AT_ONCE = 2**23  # of what differs between the points of a sweep
_DECADES = 12  # below the largest eigenvalue; smaller ones share the last bin
_SIZE_TOGETHER = 2**13  # entries of small parameters that share their products
_NEGLIGIBLE = 0.03  # share of τ below which eigenvalues of wK share the last bin


@dataclass(frozen=True)
class ComplementSweep:
    r"""V(τ, w) = m (S + τ) mᵀ + J_c (wK + τ)⁻¹ J_cᵀ with m = JQ(S + τ)⁻¹ and J_c = J − m (Y + τQ)ᵀ, along τ or w.

    In KFAC's eigenbasis the second term is a sum over eigenvalues e_k. They are rounded to bins, and with
    f = (we + τ)⁻¹ and vectors Z that are the same at all points

        V = Σ f j² − 2 m (Σ f j Z)ᵀ + m (base + Σ f ZᵀZ) mᵀ .

    Along w, Z = Y + τQ and base = S + τ. Along τ, Z = Y − weQ and base = S − wQᵀKQ, because
    f (Y + τQ) = Q + f Z. Per bin only Σ j² and Σ j Z are kept of a row, and Σ ZᵀZ once. A point then costs
    bins·s + s² per row. Without a subspace (s = 0) it is KFAC alone.
    """

    along_prior: bool  # whether τ differs between the points, or w
    points: Tensor  # τ or w: (L,)
    fixed: float  # the other one of w and τ
    projection: Projection | None
    values: Tensor  # γ: (s,)
    turn: Tensor  # T: (s, s)
    base: Tensor  # (s, s)
    eigenvalues: Tensor  # of K, for w = 1, by bin: (B,)
    parts: dict[str, BinnedPart]
    grams: Tensor  # ZᵀZ by bin: (B, s, s)
    heads: dict[str, HeadPart] = field(default_factory=dict)  # the parts of the last layer seen so far
    joined: dict[tuple[str, ...], tuple[BinnedPart, ...]] = field(default_factory=dict)  # of parameters seen so far

    @classmethod
    def of_complement(cls, posterior: ComplementedPosterior, points: Tensor, along_prior: bool) -> "ComplementSweep":
        """Prepare the sweep of a posterior with a complement. Cost: a rotation of Q unless it is kept, and p·s²."""
        inside = posterior.inside
        values, turn = diagonalised(inside.curvature / inside.unit, inside.gram)
        return cls._of(along_prior, points, posterior.outside, inside.unit, posterior, values, turn)

    @classmethod
    def of_blocks(cls, posterior: BlockPrecision, points: Tensor, along_prior: bool) -> "ComplementSweep":
        """Prepare the sweep of KFAC or a diagonal alone."""
        none = torch.zeros(0, dtype=torch.float64, device=next(iter(posterior.parts.values())).eigenvalues().device)
        return cls._of(along_prior, points, posterior, posterior.scale, None, none, none.view(0, 0))

    @classmethod
    def _of(
        cls,
        along_prior: bool,
        points: Tensor,
        outside: BlockPrecision,
        unit: float,
        posterior: ComplementedPosterior | None,
        values: Tensor,
        turn: Tensor,
    ) -> "ComplementSweep":
        fixed = outside.weight if along_prior else outside.prior_precision / unit
        largest_ratio = fixed / float(points.min()) if along_prior else float(points.max()) / fixed  # of w to τ
        smallest = _NEGLIGIBLE / largest_ratio
        eigenvalues, parts = _binned(outside, 1 / (unit * outside.weight), smallest, values.device)
        base = torch.zeros_like(turn) if along_prior else (fixed * torch.ones_like(values)).diag()
        base += values.diag()
        grams = turn.new_zeros(len(eigenvalues), *turn.shape)
        if posterior is not None:
            for name, part in parts.items():
                Z, Q = (turn.T.to(half) @ half[:, part.order] for half in posterior.product_and_basis(name, unit))
                inside = Q if posterior.keeps_basis else None
                for place, start, stop in part.starts:
                    some, share = Q[:, start:stop], fixed  # Z is Y yet
                    if along_prior:
                        share = -fixed * float(eigenvalues[place])
                        base += share * _gram(some)
                    grams[place] += _gram(Z[:, start:stop].add_(some, alpha=share))
                parts[name] = replace(part, vectors=Z, inside=inside)
        projection = None if posterior is None else posterior.projection
        points = points.to(values)
        return cls(along_prior, points, fixed, projection, values, turn, base, eigenvalues, parts, grams)

    @property
    def numbers_per_row(self) -> int:
        return len(self.eigenvalues) * (len(self.values) + 1)

    def wanted(self, whole: bool) -> Wanted:
        return Wanted(features=not whole)

    def __call__(self, jacobian: Jacobian, whole: bool) -> Tensor:
        """Evaluate a few points at a time, so that the memory of what differs between them stays small."""
        if jacobian.has_features:
            return self._with_features(jacobian)
        squares, products, rows = self._sums(jacobian, whole)
        rows, step = rows.to(products), max(1, _NUMBERS_AT_ONCE // max(1, products[0].numel()))
        starts = range(0, len(self.points), step)
        return torch.cat([self._at(rows, squares, products, slice(start, start + step)) for start in starts])

    @cached_property
    def _priors(self) -> Tensor:
        """τ of the points: (L,)."""
        return self.points if self.along_prior else torch.full_like(self.points, self.fixed)

    @cached_property
    def _factors(self) -> Tensor:
        """The factors f = (we + τ)⁻¹ of the points, by bin: (L, B)."""
        weights = torch.full_like(self.points, self.fixed) if self.along_prior else self.points
        return 1 / (weights[:, None] * self.eigenvalues + self._priors[:, None])

    @cached_property
    def _shares(self) -> Tensor:
        """The factors D = (γ + τ)⁻¹ of the points, so that m = JQT D: (L, s)."""
        return 1 / (self.values + self._priors[:, None])

    def _forms(self, some: slice) -> Tensor:
        """Return D (base + Σ f ZᵀZ) D at some points, the matrix of a quadratic form in JQT: (l, s, s)."""
        if len(self.points) * self.base.numel() <= _NUMBERS_AT_ONCE:
            return self._all_forms[some]
        return self._new_forms(some)

    @cached_property
    def _all_forms(self) -> Tensor:
        return self._new_forms(slice(None))

    def _new_forms(self, some: slice) -> Tensor:
        D = self._shares[some]
        return (self.base + _over_bins(self._factors[some], self.grams)) * D[:, :, None] * D[:, None, :]

    def _inside_rows(self, jacobian: Jacobian) -> Tensor:
        """Return J Q T: (n, K, s) in float64."""
        if self.projection is None:
            return self.turn.new_zeros(jacobian.num_inputs, jacobian.num_rows, 0)
        return self.projection.apply(jacobian).double() @ self.turn

    def _at(self, rows: Tensor, squares: Tensor, products: Tensor, some: slice) -> Tensor:
        """Return V at some points from a chunk's sums by bin; what has s columns is multiplied in the model's dtype."""
        factors = self._factors[some]
        total = _over_bins(factors, squares)
        if not len(self.values):
            return total
        n, K, s = rows.shape
        mixed = _over_bins(factors, products).mul_(self._shares[some, None, None, :].to(products))
        inner = (rows.view(n * K, s) @ self._forms(some).to(rows)).view_as(mixed)
        if total.ndim == 3:
            return total + (inner.sub_(mixed, alpha=2).mul_(rows)).sum(3)
        cross = rows @ mixed.transpose(2, 3)
        return total + (inner @ rows.transpose(1, 2) - cross - cross.transpose(2, 3))

    def _with_features(self, jacobian: Jacobian) -> Tensor:
        """Return the variances of outputs that are linear in features, point by point.

        The sums by bin are those of the F features. The last layer's part of each point comes from its factors, with
        eigenvalues rounded to the same bins. What has C rows is multiplied in the model's dtype, as predictions are.
        Cost: C·(F² + (F + C)·s) per input and point.
        """
        dtype = jacobian.outputs.dtype
        inner, heads, mix = {}, [], None
        for name, block in jacobian.blocks.items():
            if isinstance(block, FeatureBlock):
                inner[name], mix = block.inner, block.mix
            elif isinstance(block, HeadBlock):
                head = self._head(name, block)
                heads.append((head, *head.unit_sums(block.inputs)))
            else:
                raise TypeError("Only the last layer may have rows of its own beside those of features.")
        assert mix is not None
        features = replace(jacobian, blocks=inner, num_rows=mix.shape[1])
        squares, products, _ = self._sums(features, whole=True)
        rows, result = self._inside_rows(jacobian), []
        for place, factors in enumerate(self._factors):
            (square,), (product,) = _over_bins(factors[None], squares), _over_bins(factors[None], products)
            total, mixed = ((mix @ square.to(dtype)) * mix).sum(2), mix @ product
            for head, unit_squares, unit_products in heads:
                (unit_square,), (unit_product,) = (_over_bins(factors[None], x) for x in (unit_squares, unit_products))
                total, mixed = total + head.variances(unit_square).to(dtype), mixed + head.products(unit_product)
            (form,) = self._forms(slice(place, place + 1))
            result.append(total.double() + ((rows @ form - 2 * mixed.double() * self._shares[place]) * rows).sum(2))
        return torch.stack(result)

    def _head(self, name: str, block: HeadBlock) -> HeadPart:
        """Return a parameter of the last layer as maps; its vectors are brought into this form once."""
        if name not in self.heads:
            self.heads[name] = HeadPart.of(self.parts[name], block, len(self.eigenvalues))
        return self.heads[name]

    def _joined(self, names: tuple[str, ...]) -> tuple[BinnedPart, ...]:
        """Return the parts of some parameters, small ones together; they are joined once."""
        if names not in self.joined:
            groups: list[list[BinnedPart]] = []
            size = _SIZE_TOGETHER
            for part in (self.parts[name] for name in names):
                if size + len(part.order) > _SIZE_TOGETHER:
                    groups.append([])
                    size = 0
                groups[-1].append(part)
                size += len(part.order)
            self.joined[names] = tuple(BinnedPart.joined(group) for group in groups)
        return self.joined[names]

    def _sums(self, jacobian: Jacobian, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return by bin Σ j_k² (B, n, K), or Σ j_k j′_k (B, n, K, K), and Σ j_k Z_k (B, n, K, s), and J Q T (n, K, s).

        The last comes from the same rows if QT is kept in their basis.
        """
        n, K, s, B = jacobian.num_inputs, jacobian.num_rows, len(self.values), len(self.eigenvalues)
        device, dtype = jacobian.outputs.device, jacobian.outputs.dtype
        squares = torch.zeros(B, n, K, *([K] if whole else []), dtype=torch.float64, device=device)
        products = torch.zeros(B, n, K, s, dtype=dtype, device=device)  # no more digits than its terms
        kept = all(part.inside is not None for part in self.parts.values())
        inside = torch.zeros(n, K, s, dtype=torch.float64, device=device) if kept else self._inside_rows(jacobian)
        in_rows = []
        for name, block in jacobian.blocks.items():
            if not isinstance(block, HeadBlock) or block.inputs.shape[1] <= K:
                in_rows.append(name)
                continue
            self._head(name, block).add_sums(block.inputs, squares, products)
            if kept and self.projection is not None:
                inside += block.matmul(self.projection.part(name)).double() @ self.turn
        for binned in self._joined(tuple(in_rows)):
            rows = binned.rows(jacobian.blocks)
            if binned.inside is not None:
                inside += rows @ binned.inside.T
            if not whole:
                binned.add_squares(rows, squares)
            for place, start, stop in binned.starts:
                some = rows[:, :, start:stop]
                if whole:
                    squares[place] += some @ some.transpose(1, 2)
                if binned.vectors is not None:
                    products[place].view(n * K, s).addmm_(some.flatten(0, 1), binned.vectors[:, start:stop].T)
        return squares, products, inside


def _binned(
    outside: BlockPrecision, unweighted: float, smallest: float, device: torch.device
) -> tuple[Tensor, dict[str, BinnedPart]]:
    """Return the mean eigenvalue of every bin that is used, times a factor, and the parts without their vectors.

    Eigenvalues below `smallest` share a bin.
    """
    largest = max(float(part.eigenvalues().max()) for part in outside.parts.values()) * unweighted
    decades = min(max(log10(largest / smallest), 0.0), _DECADES) if largest > 0 else 0.0
    count = ceil(BINS_PER_DECADE * decades) + 1
    totals = torch.zeros(count, 2, dtype=torch.float64, device="cpu")
    places = {}
    for name, part in outside.parts.items():
        eigenvalues = part.eigenvalues().double() * unweighted
        places[name] = _bins(eigenvalues, largest, count)
        totals += _sums_by_bin(eigenvalues, places[name], count)
    used = totals[:, 1] > 0
    renumbered = (used.cumsum(0) - 1).to(device)
    parts = {}
    for name, part in outside.parts.items():
        order = torch.argsort(places[name], stable=True)
        parts[name] = BinnedPart({name: part}, renumbered[places[name][order]], order, None)
    return (totals[used, 0] / totals[used, 1]).to(device), parts


def _gram(vectors: Tensor) -> Tensor:
    """Return the products of vectors (s, size) with each other in float64: (s, s)."""
    exact = vectors.double()
    return exact @ exact.T


def _over_bins(factors: Tensor, sums: Tensor) -> Tensor:
    """Return Σ_b f_lb x_b for factors (L, B) and sums (B, …): (L, …)."""
    return (factors.to(sums) @ sums.flatten(1)).view(len(factors), *sums.shape[1:])


def _bins(eigenvalues: Tensor, largest: float, count: int) -> Tensor:
    """Return the bin of each eigenvalue, 0 for the smallest."""
    scale = torch.tensor(max(largest, torch.finfo(torch.float64).tiny), dtype=torch.float64, device="cpu")
    decades = (eigenvalues.clamp_min(torch.finfo(torch.float64).tiny) / scale).log10()
    return (decades * BINS_PER_DECADE + count - 1).floor().clamp(0, count - 1).long()


def _sums_by_bin(eigenvalues: Tensor, places: Tensor, count: int) -> Tensor:
    """Return the sum and the number of the eigenvalues in every bin: (count, 2)."""
    both = torch.stack([eigenvalues, torch.ones_like(eigenvalues)], dim=1)
    return torch.zeros(count, 2, dtype=torch.float64, device=places.device).index_add_(0, places, both).cpu()
