r"""A posterior with a complement in networks with many outputs: what stands outside of the subspace is known by draws.

The exact covariance of all C outputs takes min(C, F) backward passes per input, and their rows times P and Ψ_K. Draws
z₁ … z_m ~ N(0, Ψ_K) are made once instead, and with S = (I − Π) [z₁ … z_m] / √m

.. math:: \tilde\Sigma \approx \Sigma_P + J S S^\top J^\top .

J P and J S come from forward mode, whose cost does not depend on C. The second term is unbiased. Variances of it have a
relative standard deviation of √(2/m), 20 percent for 50 draws; KFAC's own error is larger (see DESIGN.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.wanted import Wanted
from sublaplace.model.linalg import Vectors
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.posteriors.subspace import SubspacePosterior

DRAWS = 50
"""m, for predictions."""

DRAWS_MUST_SAVE = 2.0
"""How many times less a prediction by draws must cost, in counted multiplications, to take an exact one's place."""

DRAWS_OF_A_POINT = 5
"""m, at each point of a search over λ: the same draws at all of them, so that their errors hardly move the best one."""


@dataclass(frozen=True)
class DrawnPosterior:
    """What predicts in place of a `ComplementedPosterior`: F Fᵀ with F = [P L⁻ᵀ, S], of rank s + m.

    Memory: m·p for S. Cost: s + m Jacobian–vector products per input, and C·s².
    """

    inside: SubspacePosterior
    draws: Vectors  # Sᵀ: (m, size) per parameter

    @classmethod
    def of(cls, posterior: ComplementedPosterior, seed: int) -> "DrawnPosterior":
        """Make the draws. The likelihood has a scale of 1, as those of classes do."""
        return cls(posterior.inside, draws_along_prior(posterior, [posterior.prior_precision], DRAWS, seed))

    @property
    def rank(self) -> int:
        """S + m."""
        return self.inside.dim + DRAWS

    @property
    def wanted(self) -> Wanted:
        """Products alone."""
        return Wanted(self.rank)

    def whitened(self, jacobian: Jacobian) -> Tensor:
        """Return J F: (n, K, s + m), in float64."""
        return torch.cat([self.inside.whitened(jacobian), jacobian.matmul(self.draws).double()], dim=2)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        """Return the covariance of each input's outputs: (n, K, K)."""
        rows = self.whitened(jacobian)
        return (rows @ rows.transpose(1, 2)).to(jacobian.outputs.dtype)

    def variance(self, jacobian: Jacobian) -> Tensor:
        """Return the diagonal of `covariance`: (n, K)."""
        inside = self.inside.whitened(jacobian).square().sum(2)
        return (inside + jacobian.matmul(self.draws).square().sum(2)).to(jacobian.outputs.dtype)


def draws_along_prior(posterior: ComplementedPosterior, taus: Sequence[float], count: int, seed: int) -> Vectors:
    """Return Sᵀ at every τ, one point after another: (taus·m, size) per parameter.

    Curvatures are in units of the likelihood's scale. The same standard normal draws serve all points. Memory: that of
    the result, and of P for one parameter. Cost: a rotation of all draws, and 3·p·s multiplications for each.
    """
    inside, unit = posterior.inside, posterior.inside.unit
    outside = posterior.outside.scaled(1 / unit)
    generator = torch.Generator().manual_seed(seed)
    draws: Vectors = {}
    by_product, by_basis = inside.gram.new_zeros(2, len(taus) * count, inside.dim)  # products of draws with Y and Q
    for name, part in outside.parts.items():
        Y, Q = posterior.product_and_basis(name, unit)
        noise = torch.randn(count, Y.shape[1], generator=generator, dtype=Y.dtype, device="cpu").to(Y)
        rows = torch.cat([noise * (part.eigenvalues() + tau).rsqrt() for tau in taus])  # in the eigenbasis
        by_product += (rows @ Y.T).double()
        by_basis += (rows @ Q.T).double()
        draws[name] = torch.cat([part.unwhiten(noise, tau) for tau in taus])
    taken_back = torch.cat(
        [
            torch.linalg.solve(inside.curvature / unit + tau * inside.gram, (one + tau * other).T).T
            for tau, one, other in zip(taus, by_product.split(count), by_basis.split(count), strict=True)
        ]
    )
    for name, found in draws.items():
        found.sub_(taken_back.to(found) @ posterior.projection.part(name)).div_(count**0.5)
    return draws
