r"""The evidence of the Laplace approximation, and the prior precision and noise that maximise it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sublaplace.data import batches
from sublaplace.jacobians import Linearization
from sublaplace.likelihoods import Gaussian
from sublaplace.posterior import Posterior
from sublaplace.precision import DensePrecision, DualPrecision
from sublaplace.survey import Survey

LogLikelihood = Callable[[Tensor], Tensor]
"""ln p(D | θ̂) as a function of the noise σ; constant for a likelihood without noise."""


@dataclass(frozen=True)
class Evidence:
    r"""ln p(D) ≈ ln p(D|θ̂) − ½ λ‖θ̂‖² + ½ Σ_i ln(λ / (λ + σ⁻² γ_i)), differentiable in λ and σ.

    γ are the eigenvalues of the curvature (PᵀGGN P, KFAC or the full GGN) without the likelihood's scale. Directions
    outside of a subspace contribute nothing. Cost: one pass over the eigenvalues.
    """

    log_likelihood: LogLikelihood
    eigenvalues: Tensor  # γ: (s,), float64
    squared_norm: float  # ‖θ̂‖²
    has_noise: bool

    def __call__(self, prior_precision: Tensor, noise_std: Tensor) -> Tensor:
        scale = noise_std**-2 if self.has_noise else torch.ones_like(noise_std)
        occam = (prior_precision / (prior_precision + scale * self.eigenvalues)).log().sum()
        return self.log_likelihood(noise_std) - 0.5 * prior_precision * self.squared_norm + 0.5 * occam

    def best_prior(self, noise_std: float, low: float = 1e-8, high: float = 1e10) -> float:
        """The λ that maximises the evidence at a given σ: a grid, then golden sections around its best point."""
        noise = torch.tensor(noise_std, dtype=torch.float64)

        def value(log_prior: float) -> float:
            return float(self(torch.tensor(log_prior, dtype=torch.float64).exp(), noise))

        start, stop = (float(torch.tensor(bound, dtype=torch.float64).log()) for bound in (low, high))
        grid = torch.linspace(start, stop, 73, dtype=torch.float64).tolist()
        values = [value(point) for point in grid]
        best = values.index(max(values))
        left, right = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        return float(torch.tensor(golden_section(value, left, right), dtype=torch.float64).exp())

    def best_prior_and_noise(self, noise_std: float, steps: int = 100) -> tuple[float, float]:
        """λ and σ that maximise the evidence together: λ at a given σ, then σ, until neither moves."""
        prior = self.best_prior(noise_std)
        if not self.has_noise:
            return prior, noise_std

        def value(log_noise: float) -> float:
            noise = torch.tensor(log_noise, dtype=torch.float64).exp()
            return float(self(torch.tensor(prior, dtype=torch.float64), noise))

        for _ in range(steps):
            before = prior, noise_std
            centre = float(torch.tensor(noise_std, dtype=torch.float64).log())
            noise_std = float(torch.tensor(golden_section(value, centre - 3, centre + 3), dtype=torch.float64).exp())
            prior = self.best_prior(noise_std)
            if abs(prior - before[0]) < 1e-8 * prior and abs(noise_std - before[1]) < 1e-8 * noise_std:
                break
        return prior, noise_std


def golden_section(function: Callable[[float], float], left: float, right: float, width: float = 1e-10) -> float:
    """Where a function with one maximum in [left, right] has it."""
    ratio = (5**0.5 - 1) / 2
    inner, outer = right - ratio * (right - left), left + ratio * (right - left)
    low, high = function(inner), function(outer)
    while right - left > width * max(1.0, abs(left) + abs(right)):
        if low > high:
            right, outer, high = outer, inner, low
            inner = right - ratio * (right - left)
            low = function(inner)
        else:
            left, inner, low = inner, outer, high
            outer = left + ratio * (right - left)
            high = function(outer)
    return (left + right) / 2


def evidence_of(posterior: Posterior, survey: Survey, squared_norm: float) -> Evidence:
    """The evidence of a fitted posterior. Cost: the eigenvalues of its curvature, s³ (p³ for the full one)."""
    return Evidence(
        survey.log_likelihood,
        posterior.curvature_eigenvalues() / survey.likelihood.curvature_scale,
        squared_norm,
        isinstance(survey.likelihood, Gaussian),
    )


def best_prior_on(loader: Iterable[Any], posterior: Posterior, survey: Survey, linearization: Linearization) -> float:
    """The λ of the smallest NLL on validation data: a coarse grid of factors of ten, then a fine one around its best.

    Cost: two passes over the data; for an exact posterior, whose factor is large, one pass a λ.
    """

    def best(priors: list[float]) -> float:
        exact = isinstance(posterior, DensePrecision | DualPrecision)
        groups = [[prior] for prior in priors] if exact else [priors]
        scores = [score for group in groups for score in _nll(group, loader, posterior, survey, linearization)]
        return min(zip(scores, priors, strict=True))[1]

    coarse = best([10.0**k for k in range(-4, 8)])
    return best([coarse * 10 ** (k / 10) for k in range(-10, 11)])


def _nll(
    priors: list[float],
    loader: Iterable[Any],
    posterior: Posterior,
    survey: Survey,
    linearization: Linearization,
) -> list[float]:
    """The mean negative log predictive density for each λ, in one pass over the data."""
    totals, count = [0.0] * len(priors), 0
    candidates = [posterior.with_prior(prior) for prior in priors]
    for inputs, targets in batches(loader):
        start = 0
        for jacobian in linearization.chunks(linearization.to_device(inputs)):
            part = targets[start : start + jacobian.num_inputs].to(linearization.device)
            survey.likelihood.check_targets(jacobian.outputs, part)
            for k, candidate in enumerate(candidates):
                covariance = candidate.covariance(jacobian)
                totals[k] -= float(survey.likelihood.log_predictive(jacobian.outputs, covariance, part).sum())
            start += jacobian.num_inputs
        count += start
    if not count:
        raise ValueError("The validation loader is empty.")
    return [total / count for total in totals]
