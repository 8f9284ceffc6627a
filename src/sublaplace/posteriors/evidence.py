r"""The evidence of the Laplace approximation, and the prior precision and noise that maximise it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log

import torch
from torch import Tensor

from sublaplace.model.likelihoods.base import Noise
from sublaplace.posteriors.protocol import Occam
from sublaplace.runtime.warning import warn

LogLikelihood = Callable[[Tensor], Tensor]
"""ln p(D | θ̂) as a function of the noise σ; constant for a likelihood without noise."""


@dataclass(frozen=True)
class Evidence:
    r"""ln p(D) ≈ ln p(D|θ̂) − ½ λ‖θ̂‖² + ½ Σ_i ln(λ / (λ + γ_i)), differentiable in λ and σ.

    γ are the eigenvalues of the curvature at σ (PᵀGGN P, KFAC or the full GGN). Directions outside of a subspace
    contribute nothing.
    """

    log_likelihood: LogLikelihood
    occam: Occam  # ½ Σ ln(λ / (λ + γ)) as a function of λ and the likelihood's scales
    squared_norm: float  # ‖θ̂‖²
    fixed_scales: tuple[float, ...] | None = None  # of a likelihood without noise; None: σ⁻²

    def __call__(self, prior_precision: Tensor, noise_std: Tensor) -> Tensor:
        prior = prior_precision.squeeze()
        noise = noise_std.squeeze()
        fixed = self.fixed_scales
        scales = noise**-2 if fixed is None else torch.tensor(fixed, dtype=torch.float64, device="cpu")
        return self.log_likelihood(noise) - 0.5 * prior * self.squared_norm + self.occam(prior, scales)

    def best_prior(self, noise_std: Noise, low: float = 1e-8, high: float = 1e10) -> float:
        """Return the λ that maximises the evidence at a given σ, by a grid and golden sections around its best point.

        Warns if it lies at an end of the search.
        """
        noise = torch.tensor(noise_std, dtype=torch.float64, device="cpu")

        def value(log_prior: float) -> float:
            return float(self(torch.tensor(log_prior, dtype=torch.float64, device="cpu").exp(), noise))

        start, stop = (float(torch.tensor(bound, dtype=torch.float64, device="cpu").log()) for bound in (low, high))
        grid = torch.linspace(start, stop, 73, dtype=torch.float64, device="cpu").tolist()
        values = [value(point) for point in grid]
        best = values.index(max(values))
        if best in (0, len(grid) - 1):
            message = f"The λ of the largest evidence lies at an end of its search, {(low, high)[best > 0]:g}."
            warn(message)
        left, right = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        return float(torch.tensor(golden_section(value, left, right), dtype=torch.float64, device="cpu").exp())

    def best_prior_and_noise(self, noise_std: Noise, rounds: int = 100) -> tuple[float, Noise]:
        """Return the λ and σ, one or one per output, that maximise the evidence: each in turn, until none moves."""
        prior = self.best_prior(noise_std)
        if self.fixed_scales is not None:
            return prior, noise_std
        stds = list(noise_std) if isinstance(noise_std, tuple) else [noise_std]

        def value(which: int, log_noise: float) -> float:
            tried = torch.tensor(stds, dtype=torch.float64, device="cpu")
            tried[which] = exp(log_noise)
            return float(self(torch.tensor(prior, dtype=torch.float64, device="cpu"), tried))

        for _ in range(rounds):
            before = [prior, *stds]
            for which, std in enumerate(stds):
                stds[which] = exp(golden_section(partial(value, which), log(std) - 3, log(std) + 3))
            prior = self.best_prior(_noise_like(noise_std, stds))
            if all(abs(now - then) < 1e-8 * now for now, then in zip([prior, *stds], before, strict=True)):
                break
        return prior, _noise_like(noise_std, stds)

    def best_prior_and_factor(self, noise_std: Noise, rounds: int = 100) -> tuple[float, float]:
        """Return the λ and the common factor c of all σ that maximise the evidence: each in turn, until none moves.

        Curvature times c⁻² under λ has the Occam term of the curvature under λc².
        """
        noise = torch.tensor(noise_std, dtype=torch.float64, device="cpu")
        prior, log_factor = self.best_prior(noise_std), 0.0

        def value(log_c: float) -> float:
            at = torch.tensor(prior, dtype=torch.float64, device="cpu")
            return float(self.with_noise_factor(exp(log_c))(at, noise))

        for _ in range(rounds):
            before = prior, log_factor
            log_factor = golden_section(value, log_factor - 3, log_factor + 3)
            prior = self.with_noise_factor(exp(log_factor)).best_prior(noise_std)
            if abs(prior - before[0]) < 1e-8 * prior and abs(log_factor - before[1]) < 1e-8:
                break
        return prior, exp(log_factor)

    def with_noise_factor(self, c: float) -> "Evidence":
        """Return the evidence at c times the noise that it is asked for; its curvature is that of the noise itself."""
        return replace(
            self,
            log_likelihood=lambda noise: self.log_likelihood(c * noise),
            occam=lambda prior, scales: self.occam(c**2 * prior, scales),
        )


def _noise_like(noise_std: Noise, stds: list[float]) -> Noise:
    return tuple(stds) if isinstance(noise_std, tuple) else stds[0]


def golden_section(function: Callable[[float], float], left: float, right: float, width: float = 1e-10) -> float:
    """Return where a function with one maximum in [left, right] has it."""
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
