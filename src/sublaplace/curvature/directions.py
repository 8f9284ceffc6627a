r"""Directions in the outputs: the roots of output Hessians, all of them or a few sampled ones.

Sampled directions u of an input have the right second moment, :math:`E[\sum_j u_j u_j^\top] = H`. With m of them, the
m/2 longest rows of the root R are taken as they are. The others are random combinations of the remaining rows,
:math:`u = \sum_k z_k r_k / \sqrt{m - m/2}` with independent signs z. A trained classifier has nearly all of its
curvature in a few rows, which are then exact. Signs depend on the seed and on the input's place in the data alone, so
that batches, chunks, checkpoints and ranks give the same ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sublaplace.model.likelihoods.base import Likelihood, significant

_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of the splitmix64 generator, as int64
_KEYS_AT_ONCE = 2**22


@dataclass(frozen=True)
class Roots:
    """The rows Rᵀ of the output Hessians' roots, with scales and weights, as directions of Jacobian rows.

    Args:
        likelihood: whose Hessians.
        weights: how much each target counts, (n, 1) or (n, C); None: once.
        scaled: whether to include several scales of the likelihood, one per row; a single one is never included.
    """

    likelihood: Likelihood
    weights: Tensor | None
    scaled: bool = True

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return the rows times the square roots of scales and weights: (n, K, C)."""
        return self.weighted(self.likelihood.hessian_root(outputs) * self.scales(outputs))

    def times(self, outputs: Tensor, products: Tensor) -> Tensor:
        """Return the product with M (n, C, r), without forming the rows: (n, ·, r)."""
        if self.weights is not None:
            products = products * self.weights.sqrt().to(products.dtype)[:, :, None]
        return self.likelihood.root(outputs).times(products) * self.scales(outputs)

    def combined(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return the product of Z (n, r, ·) with the rows of `times`, without forming them: (n, r, C)."""
        scales = self.scales(outputs)
        weights = weights * (scales.T if scales.ndim else scales)
        return self.weighted(self.likelihood.root(outputs).combined(weights))

    def weighted(self, rows: Tensor) -> Tensor:
        """Return rows (n, ·, C) times the square roots of the weights."""
        return rows if self.weights is None else rows * self.weights.sqrt().to(rows.dtype)[:, None, :]

    def scales(self, outputs: Tensor) -> Tensor:
        """Return the square roots of several scales, one per row (K, 1), or 1."""
        scales = self.likelihood.curvature_scales
        if not self.scaled or len(scales) == 1:
            return outputs.new_ones(())
        return torch.tensor(scales, dtype=outputs.dtype, device=outputs.device).sqrt()[:, None]


@dataclass(frozen=True)
class FeatureRoots:
    """All directions, seen from fewer features φ of outputs Wφ + b: roots of Wᵀ H W have at most F rows, not C − 1.

    Sums over all directions u of what depends on Wᵀu alone, as everything before the last layer does, are exact.

    Args:
        roots: all directions, with a single scale.
        tolerance: the share of the trace that may be dropped.
    """

    roots: Roots
    tolerance: float

    def __call__(self, outputs: Tensor, weight: Tensor) -> Tensor:
        """Return directions in the features, longest first, for W (C, F): (n, ≤ F, F). Cost: C·F² + F³ per input."""
        n, (C, F) = len(outputs), weight.shape
        rows = self.roots.times(outputs, weight.expand(n, C, F)).double()
        values, vectors = torch.linalg.eigh(rows.mT @ rows)
        found = (values.clamp_min(0).sqrt()[:, :, None] * vectors.mT).flip(1)
        return found[:, : int(significant(found, self.tolerance).max())].to(outputs.dtype)

    def hessian_sum(self, outputs: Tensor) -> Tensor:
        """Return Σ_n H with weights: (C, C) in float64."""
        return self.roots.likelihood.hessian_sum(outputs, self.roots.weights)

    def hessian_diagonals(self, outputs: Tensor) -> Tensor:
        """Return the diagonals of H with weights: (n, C)."""
        found = self.roots.likelihood.root(outputs).diagonal()
        return found if self.roots.weights is None else found * self.roots.weights.to(found)


@dataclass(frozen=True)
class SampledRoots:
    """m directions per input with the second moment of all; see the module.

    Args:
        roots: all directions.
        count: m.
        places: of the inputs in the data: (n,).
        seed: of the signs.
    """

    roots: Roots
    count: int
    places: Tensor
    seed: int

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return the directions: (n, m, C)."""
        root = self.roots.likelihood.root(outputs)
        lengths = root.squared_lengths()
        n, K = lengths.shape
        exact = min(self.count // 2, K)
        longest = lengths.topk(exact, dim=1).indices if exact else lengths.new_zeros(n, 0, dtype=torch.long)
        combinations = torch.zeros(n, self.count, K, dtype=outputs.dtype, device=outputs.device)
        combinations[:, :exact].scatter_(2, longest.unsqueeze(2), 1.0)
        sampled = combinations[:, exact:]
        drawn = random_signs(self.seed, self.places, self.count - exact, K).to(outputs)
        sampled.copy_(drawn / (self.count - exact) ** 0.5)
        sampled.scatter_(2, longest.unsqueeze(1).expand(-1, self.count - exact, -1), 0.0)
        return self.roots.combined(outputs, combinations)


def random_signs(seed: int, places: Tensor, rows: int, columns: int) -> Tensor:
    """Return signs ±1 for inputs at `places` (n,): (n, rows, columns), int8.

    Each sign is a bit of a hash of (seed, place, row, column), so any part can be drawn on its own.
    """
    places = places.cpu().long()
    result = torch.empty(len(places), rows, columns, dtype=torch.int8, device="cpu")
    inner = torch.arange(rows * columns, device="cpu").view(rows, columns)
    step = max(1, _KEYS_AT_ONCE // (rows * columns))
    for start in range(0, len(places), step):
        keys = _hashed(places[start : start + step] + _hashed(torch.tensor(seed, device="cpu")))[:, None, None] + inner
        result[start : start + step] = 1 - 2 * (_hashed(keys) & 1)
    return result


def _hashed(keys: Tensor) -> Tensor:
    """Return well-mixed integers (splitmix64), with wrap-around arithmetic and logical shifts."""
    keys = keys * _MIX[0] + _MIX[0]
    keys = (keys ^ ((keys >> 30) & (2**34 - 1))) * _MIX[1]
    keys = (keys ^ ((keys >> 27) & (2**37 - 1))) * _MIX[2]
    return keys ^ ((keys >> 31) & (2**33 - 1))
