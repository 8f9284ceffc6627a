"""Posteriors over functions: in a subspace, or over all parameters."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from sublaplace.jacobians import Jacobian, Jacobians
from sublaplace.linalg import cholesky, symmetric_product
from sublaplace.projection import Projection


class Posterior(Protocol):
    """What predictions need; `SubspacePosterior` and every precision of `precision.py` are posteriors."""

    @property
    def prior_precision(self) -> float: ...

    def with_prior(self, prior_precision: float) -> "Posterior": ...

    def with_scales(self, scales: tuple[float, ...]) -> "Posterior":
        """Under other scales of the likelihood's curvature (σ⁻²)."""

    def sample(self, noise: Callable[[int], Tensor]) -> Tensor:
        """Draws of θ − θ̂, (k, p), from standard normal draws: `noise(m)` gives (k, m)."""

    def covariance(self, jacobian: Jacobian) -> Tensor:
        """Σ for each input: (n, K, K)."""

    def variance(self, jacobian: Jacobian) -> Tensor:
        """Its diagonal: (n, K)."""

    def joint_covariance(self, jacobians: Jacobians) -> Tensor:
        """Σ over all inputs together: (nK, nK), float64."""


@dataclass(frozen=True)
class SubspacePosterior:
    r"""μ ~ N(0, (PᵀΛP)⁻¹) with PᵀΛP = Σ_g scale_g · PᵀGGN_g P + λ PᵀP (Lemma 1): all of it s × s and float64.

    There is one g, or one for each output of a regression with a σ of its own.

    One Cholesky factor L of PᵀΛP serves every leading dimension: with W = L⁻¹ (J P)ᵀ, Σ_{P_s} = W[:s]ᵀ W[:s].
    Another λ or noise costs s³/3 and no pass over data.
    """

    projection: Projection
    curvatures: Tensor  # PᵀGGN_g P without the likelihood's scales: (G, s, s)
    gram: Tensor  # PᵀP: (s, s)
    scales: tuple[float, ...]
    prior_precision: float

    @property
    def dim(self) -> int:
        return len(self.gram)

    @cached_property
    def curvature(self) -> Tensor:
        """PᵀGGN P with the likelihood's scales: (s, s)."""
        return torch.tensordot(self.curvatures.new_tensor(self.scales), self.curvatures, dims=1)

    @cached_property
    def factor(self) -> Tensor:
        """L with L Lᵀ = PᵀΛP."""
        return cholesky(self.curvature + self.prior_precision * self.gram, "The reduced precision PᵀΛP")

    def with_prior(self, prior_precision: float) -> "SubspacePosterior":
        return replace(self, prior_precision=prior_precision)

    def with_scales(self, scales: tuple[float, ...]) -> "SubspacePosterior":
        return replace(self, scales=scales)

    def truncated(self, dim: int) -> "SubspacePosterior":
        """The posterior in the leading `dim` dimensions."""
        return replace(
            self,
            projection=self.projection.leading(dim),
            curvatures=self.curvatures[:, :dim, :dim],
            gram=self.gram[:dim, :dim],
        )

    def curvature_eigenvalues(self) -> Tensor:
        root = cholesky(self.gram, "The Gram matrix of P")
        half = torch.linalg.solve_triangular(root, self.curvature, upper=False)
        whole = torch.linalg.solve_triangular(root, half.T, upper=False)
        return torch.linalg.eigvalsh((whole + whole.T) / 2).clamp_min(0)

    def sample(self, noise: Callable[[int], Tensor]) -> Tensor:
        return self.projection.lift(self.coordinates(noise(self.dim)))

    def coordinates(self, noise: Tensor) -> Tensor:
        """μ = L⁻ᵀ ε for ε (k, s)."""
        return torch.linalg.solve_triangular(self.factor.T, noise.double().T, upper=True).T

    def whitened(self, jacobian: Jacobian) -> Tensor:
        """Wᵀ = J P L⁻ᵀ: (n, K, s) in float64; its leading part belongs to the leading dimensions. Cost: n·K·s²."""
        rows = self.projection.apply(jacobian)
        n, K, s = rows.shape
        solved = torch.linalg.solve_triangular(self.factor, rows.reshape(n * K, s).double().T, upper=False)
        return solved.T.reshape(n, K, s)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        """Σ_P for each input: (n, K, K)."""
        W = self.whitened(jacobian)
        return (W @ W.transpose(1, 2)).to(jacobian.outputs.dtype)

    def variance(self, jacobian: Jacobian) -> Tensor:
        """The diagonal of `covariance`: (n, K)."""
        return self.whitened(jacobian).square().sum(2).to(jacobian.outputs.dtype)

    def joint_covariance(self, jacobians: Jacobians) -> Tensor:
        """Σ_P over all inputs together: (nK, nK)."""
        return symmetric_product(torch.cat([self.whitened(jacobian).flatten(0, 1) for jacobian in jacobians]))

    def traces(self, jacobian: Jacobian) -> Tensor:
        """Tr Σ_{P_s} for every leading s: (s,)."""
        return self.whitened(jacobian).square().sum((0, 1)).cumsum(0)
