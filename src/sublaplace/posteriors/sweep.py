r"""Predictive variances at many prior precisions, and weights of the complement, from one set of Jacobian rows.

With curvature in units of the likelihood's scale (σ⁻²) and τ = λ/scale, the covariance of outputs at any λ and σ is
V(τ)/scale. So one pass over some inputs gives what is predicted for them at every λ and σ of a search.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sublaplace.curvature.exact_precision import DensePrecision, DualPrecision
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.jacobians.jacobian import Jacobian, Jacobians
from sublaplace.jacobians.wanted import ROWS, Wanted
from sublaplace.model.interpolation import log_interpolation
from sublaplace.model.linalg import Vectors, diagonalised, filled_up, symmetric_product
from sublaplace.posteriors.binned_sweep import ComplementSweep
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.posteriors.drawn import DRAWS_OF_A_POINT, draws_along_prior
from sublaplace.posteriors.protocol import Posterior
from sublaplace.posteriors.subspace import SubspacePosterior
from sublaplace.projection import Projection


class Sweep(Protocol):
    """V at several points τ, or at several weights w of what stands outside; the points are fixed beforehand."""

    @property
    def numbers_per_row(self) -> int:
        """How many numbers are kept per row of a Jacobian while its points are evaluated."""

    def wanted(self, whole: bool) -> Wanted:
        """Return what the sweep asks of a Jacobian, for variances or whole matrices."""

    def __call__(self, jacobian: Jacobian, whole: bool) -> Tensor:
        """Return V at the L points: variances (L, n, K), or matrices (L, n, K, K); float64."""


def prior_sweep(posterior: Posterior, taus: Tensor, drawn_with: int | None = None) -> Sweep:
    """Return the sweep of a posterior along τ. Memory: for a complement that of P; for the full posterior p².

    drawn_with: the seed of draws, if what stands outside of a subspace is known by draws (see `drawn.py`).
    """
    if drawn_with is not None and isinstance(posterior, ComplementedPosterior):
        return DrawnSweep.of(posterior, taus, drawn_with)
    return _SWEEPS[type(posterior)](posterior, taus)


def weight_sweep(posterior: ComplementedPosterior | BlockPrecision, weights: Tensor) -> Sweep:
    """Return the sweep along the weight of what stands outside, at the posterior's own τ. Memory: that of P."""
    if isinstance(posterior, ComplementedPosterior):
        return ComplementSweep.of_complement(posterior, weights, along_prior=False)
    return ComplementSweep.of_blocks(posterior, weights, along_prior=False)


def variances_at(
    posterior: Posterior, inputs: Jacobians, log_priors: Sequence[float], drawn_with: int | None = None
) -> Tensor:
    """Return the posterior's variances at every log₁₀ λ, for a likelihood of scale 1: (λ, n, C), in float64.

    Outputs that some inputs lack, such as positions of shorter sequences, get zeros. Cost: one prediction of the
    inputs, and little more.
    """
    sweep = prior_sweep(posterior, 10.0 ** torch.tensor(log_priors, dtype=torch.float64, device="cpu"), drawn_with)
    wanted = replace(inputs, wanted=sweep.wanted(whole=False))
    return filled_up([sweep(jacobian, whole=False).movedim(0, 2) for jacobian in wanted]).movedim(2, 0)


def _weighted_products(rows: Tensor, factors: Tensor, whole: bool) -> Tensor:
    """Return Σ_k r_k² f_k for rows (n, K, m) and factors (L, m): (L, n, K), or Σ_k r_k r′_k f_k: (L, n, K, K)."""
    if whole:
        return torch.stack([(rows * each) @ rows.transpose(1, 2) for each in factors])
    n, K, m = rows.shape
    return (rows.square().reshape(n * K, m) @ factors.T).T.reshape(len(factors), n, K)


@dataclass(frozen=True)
class SubspaceSweep:
    """V(τ) = JP (S + τ PᵀP)⁻¹ PᵀJᵀ, diagonalised once. Cost: s³ once, then s per row and point."""

    points: Tensor  # τ: (L,)
    projection: Projection
    values: Tensor  # γ: (s,)
    turn: Tensor  # T: (s, s)

    @classmethod
    def of(cls, posterior: SubspacePosterior, points: Tensor) -> "SubspaceSweep":
        """Prepare the sweep of a posterior."""
        values, turn = diagonalised(posterior.curvature / posterior.unit, posterior.gram)
        return cls(points.to(values), posterior.projection, values, turn)

    @property
    def numbers_per_row(self) -> int:
        return len(self.values)

    def wanted(self, whole: bool) -> Wanted:
        return Wanted(self.projection.dim, names=self.projection.support)

    def __call__(self, jacobian: Jacobian, whole: bool) -> Tensor:
        rows = self.projection.apply(jacobian).double() @ self.turn
        return _weighted_products(rows, 1 / (self.values + self.points[:, None]), whole)


@dataclass(frozen=True)
class DrawnSweep:
    """V(τ) of a posterior with a complement that is known by draws, for variances alone.

    The same draws are made at every second point of the grid. Between those, ln V of the complement is interpolated.
    Cost: s + m·L/2 Jacobian–vector products per input, and s³ and p·s per point once.
    """

    inside: SubspaceSweep
    draws: Vectors  # Sᵀ at the nodes, one after another: (nodes·m, size) per parameter
    between: Tensor  # the factors of the nodes at every point: (L, nodes)

    @classmethod
    def of(cls, posterior: ComplementedPosterior, points: Tensor, seed: int) -> "DrawnSweep":
        """Prepare the sweep of a posterior along a grid of equal ratios with an odd number of points."""
        nodes = points[::2]
        between = torch.zeros(len(points), len(nodes), dtype=torch.float64, device="cpu")
        for row, log_tau in zip(between, points.log().tolist(), strict=True):
            near, factors = log_interpolation(nodes, log_tau)
            row[near] = factors
        inside = SubspaceSweep.of(posterior.inside, points)
        draws = draws_along_prior(posterior, nodes.tolist(), DRAWS_OF_A_POINT, seed)
        return cls(inside, draws, between.to(inside.values))

    @property
    def numbers_per_row(self) -> int:
        return self.inside.numbers_per_row + self.between.shape[1] * DRAWS_OF_A_POINT

    def wanted(self, whole: bool) -> Wanted:
        return Wanted(self.numbers_per_row)

    def __call__(self, jacobian: Jacobian, whole: bool) -> Tensor:
        if whole:
            raise TypeError("Draws give variances, not whole covariances.")
        rows = jacobian.matmul(self.draws).unflatten(2, (-1, DRAWS_OF_A_POINT))
        at_nodes = rows.double().square().sum(3).clamp_min(torch.finfo(torch.float64).tiny).log_()
        return (at_nodes @ self.between.T).exp_().movedim(2, 0) + self.inside(jacobian, whole=False)


@dataclass(frozen=True)
class LastLayerSweep:
    """V(τ) of the last layer's Kronecker factors, point by point. Cost: C·(I + C) per input and point."""

    posterior: BlockPrecision
    points: Tensor  # τ: (L,)

    @property
    def numbers_per_row(self) -> int:
        return 1

    def wanted(self, whole: bool) -> Wanted:
        return self.posterior.wanted

    def __call__(self, jacobian: Jacobian, whole: bool) -> Tensor:
        unscaled = self.posterior.scaled(1 / self.posterior.scale)
        posteriors = map(unscaled.with_prior, self.points.tolist())
        found = (each.covariance(jacobian) if whole else each.variance(jacobian) for each in posteriors)
        return torch.stack([each.double() for each in found])


@dataclass(frozen=True)
class ExactSweep:
    """V(τ) of the full posterior, by the eigenvectors of its GGN. Cost: min(p, NC)³ once, p² per row."""

    points: Tensor  # τ: (L,)
    values: Tensor  # γ: (r,)
    vectors: Tensor  # (p, r), orthonormal

    @classmethod
    def of_dense(cls, posterior: DensePrecision, points: Tensor) -> "ExactSweep":
        """Prepare the sweep of a p × p posterior."""
        values, vectors = torch.linalg.eigh(posterior.ggn / posterior.scale)
        return cls(points.to(values), values.clamp_min(0), vectors)

    @classmethod
    def of_dual(cls, posterior: DualPrecision, points: Tensor) -> "ExactSweep":
        """Prepare the sweep of a posterior by its rows."""
        values, vectors = torch.linalg.eigh(symmetric_product(posterior.rows) / posterior.scale)
        kept = values > len(values) * torch.finfo(torch.float64).eps * values[-1].clamp_min(0)
        values, vectors = values[kept], vectors[:, kept]
        return cls(points.to(values), values, posterior.rows.T @ vectors / (values * posterior.scale).sqrt())

    @property
    def numbers_per_row(self) -> int:
        return sum(self.vectors.shape)

    def wanted(self, whole: bool) -> Wanted:
        return ROWS

    def __call__(self, jacobian: Jacobian, whole: bool) -> Tensor:
        dense = jacobian.dense_rows().double().view(jacobian.num_inputs, jacobian.num_rows, -1)
        rows = dense @ self.vectors
        priors = self.points[:, None]
        seen = _weighted_products(rows, 1 / (self.values + priors) - 1 / priors, whole)
        all_rows = dense @ dense.transpose(1, 2) if whole else dense.square().sum(2)
        return seen + all_rows / self.points.view(-1, *([1] * all_rows.ndim))


_SWEEPS: dict[type, Callable[[Any, Tensor], Sweep]] = {
    SubspacePosterior: SubspaceSweep.of,
    ComplementedPosterior: lambda posterior, taus: ComplementSweep.of_complement(posterior, taus, along_prior=True),
    BlockPrecision: lambda blocks, taus: (
        ComplementSweep.of_blocks(blocks, taus, along_prior=True) if blocks.covers_all else LastLayerSweep(blocks, taus)
    ),
    DensePrecision: ExactSweep.of_dense,
    DualPrecision: ExactSweep.of_dual,
}
"""How each kind of posterior is swept; a new one is one more row."""
