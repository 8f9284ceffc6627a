r"""The evidence of the Laplace approximation, and the prior precision and noise that maximise it."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import exp, log
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from sublaplace.complement import ComplementedPosterior
from sublaplace.data import batches
from sublaplace.jacobians import Linearization
from sublaplace.likelihoods import Gaussian, Noise, target_weights
from sublaplace.posterior import Posterior, SubspacePosterior
from sublaplace.precision import BlockPrecision, DensePrecision, DualPrecision
from sublaplace.survey import Survey

LogLikelihood = Callable[[Tensor], Tensor]
"""ln p(D | θ̂) as a function of the noise σ; constant for a likelihood without noise."""


@dataclass(frozen=True)
class Evidence:
    r"""ln p(D) ≈ ln p(D|θ̂) − ½ λ‖θ̂‖² + ½ Σ_i ln(λ / (λ + γ_i)), differentiable in λ and σ.

    γ are the eigenvalues of the curvature at σ (PᵀGGN P, KFAC or the full GGN). Directions outside of a subspace
    contribute nothing.
    """

    log_likelihood: LogLikelihood
    occam: "Occam"  # ½ Σ ln(λ / (λ + γ)) as a function of λ and σ
    squared_norm: float  # ‖θ̂‖²
    has_noise: bool

    def __call__(self, prior_precision: Tensor, noise_std: Tensor) -> Tensor:
        prior = prior_precision.squeeze()
        noise = noise_std.squeeze()
        return self.log_likelihood(noise) - 0.5 * prior * self.squared_norm + self.occam(prior, noise)

    def best_prior(self, noise_std: Noise, low: float = 1e-8, high: float = 1e10) -> float:
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

    def best_prior_and_noise(self, noise_std: Noise, rounds: int = 100) -> tuple[float, Noise]:
        """λ and σ (one, or one for each output) that maximise the evidence together: each in turn, until none moves."""
        prior = self.best_prior(noise_std)
        if not self.has_noise:
            return prior, noise_std
        stds = list(noise_std) if isinstance(noise_std, tuple) else [noise_std]

        def value(which: int, log_noise: float) -> float:
            tried = torch.tensor(stds, dtype=torch.float64)
            tried[which] = exp(log_noise)
            return float(self(torch.tensor(prior, dtype=torch.float64), tried))

        for _ in range(rounds):
            before = [prior, *stds]
            for which, std in enumerate(stds):
                stds[which] = exp(golden_section(partial(value, which), log(std) - 3, log(std) + 3))
            prior = self.best_prior(_noise_like(noise_std, stds))
            if all(abs(now - then) < 1e-8 * now for now, then in zip([prior, *stds], before, strict=True)):
                break
        return prior, _noise_like(noise_std, stds)


def _noise_like(noise_std: Noise, stds: list[float]) -> Noise:
    return tuple(stds) if isinstance(noise_std, tuple) else stds[0]


class Occam(Protocol):
    """½ Σ ln(λ / (λ + γ)), the price of the parameters that the data determine."""

    def __call__(self, prior_precision: Tensor, noise_std: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class EigenvalueOccam:
    """By the eigenvalues γ of a curvature whose scale is a single σ⁻², or fixed. Cost: one pass over them."""

    eigenvalues: Tensor  # without σ⁻² if they scale with it: float64
    scales_with_noise: bool

    def __call__(self, prior_precision: Tensor, noise_std: Tensor) -> Tensor:
        scale = noise_std**-2 if self.scales_with_noise else 1.0
        return 0.5 * (prior_precision / (prior_precision + scale * self.eigenvalues)).log().sum()


@dataclass(frozen=True)
class PerOutputOccam:
    """By the matrices of a subspace with one scale an output: ½ (ln det λPᵀP − ln det PᵀΛP). Cost: s³ for each σ."""

    curvatures: Tensor  # (C, s, s)
    gram: Tensor  # (s, s)

    def __call__(self, prior_precision: Tensor, noise_std: Tensor) -> Tensor:
        scales = (noise_std**-2).expand(len(self.curvatures))
        prior = prior_precision * self.gram
        precision = prior + torch.tensordot(scales, self.curvatures, dims=1)
        return 0.5 * (torch.logdet(prior) - torch.logdet(precision))


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


@dataclass(frozen=True)
class ComplementOccam:
    """Of a posterior with a complement: ½ (p ln λ + ln det Ψ̃), with
    ln det Ψ̃ = ln det Ψ_K + ln det QᵀΨ_K⁻¹Q − ln det QᵀΛQ. Cost: s³ and one pass over KFAC's eigenvalues."""

    outside_eigenvalues: Tensor
    outside_in_subspace: Tensor  # QᵀKQ
    curvature: Tensor  # QᵀGGN Q
    gram: Tensor
    fitted_noise: float | None  # σ whose σ⁻² is in all of these; None: they do not depend on it

    def __call__(self, prior_precision: Tensor, noise_std: Tensor) -> Tensor:
        ratio = 1.0 if self.fitted_noise is None else (self.fitted_noise / noise_std) ** 2
        outside = (prior_precision / (prior_precision + ratio * self.outside_eigenvalues)).log().sum()
        prior = prior_precision * self.gram
        replaced = torch.logdet(ratio * self.outside_in_subspace + prior)
        measured = torch.logdet(ratio * self.curvature + prior)
        return 0.5 * (outside + replaced - measured)


def evidence_of(posterior: Posterior, survey: Survey, squared_norm: float) -> Evidence:
    """The evidence of a fitted posterior. Cost: the eigenvalues of its curvature, s³ (p³ for the full one)."""
    has_noise = isinstance(survey.likelihood, Gaussian)
    occam: Occam
    if isinstance(posterior, ComplementedPosterior):
        inside, stds = posterior.inside, survey.likelihood.stds if isinstance(survey.likelihood, Gaussian) else ()
        occam = ComplementOccam(
            posterior.outside.curvature_eigenvalues(),
            posterior.outside_in_subspace,
            inside.curvature,
            inside.gram,
            stds[0] if len(stds) == 1 else None,
        )
        return Evidence(survey.log_likelihood, occam, squared_norm, has_noise)
    assert isinstance(posterior, SubspacePosterior | BlockPrecision | DensePrecision | DualPrecision)
    if len(survey.likelihood.curvature_scales) == 1:
        scale = survey.likelihood.curvature_scales[0]
        occam = EigenvalueOccam(posterior.curvature_eigenvalues() / scale, has_noise)
    elif isinstance(posterior, SubspacePosterior):
        occam = PerOutputOccam(posterior.curvatures, posterior.gram)
    else:
        occam = EigenvalueOccam(posterior.curvature_eigenvalues(), scales_with_noise=False)
    return Evidence(survey.log_likelihood, occam, squared_norm, has_noise)


def best_prior_on(
    loader: Iterable[Any],
    posterior: Posterior,
    survey: Survey,
    linearization: Linearization,
    progress: bool = False,
) -> float:
    """The λ of the smallest NLL on validation data: a coarse grid of factors of ten, then a fine one around its best.

    Cost: two passes over the data; one pass a λ for an exact posterior or a complement, which are large for each λ.
    """

    def best(priors: list[float]) -> float:
        small = isinstance(posterior, SubspacePosterior | BlockPrecision)
        groups = [priors] if small else [[prior] for prior in priors]
        shown = tqdm(loader, desc="validation", disable=not progress, leave=False)
        scores = [score for group in groups for score in _nll(group, shown, posterior, survey, linearization)]
        return min(zip(scores, priors, strict=True))[1]

    grid = [10.0**k for k in range(-4, 8)]
    coarse = best(grid)
    if coarse in (grid[0], grid[-1]):
        more = "more uncertainty than this posterior has; a larger dim or a complement may help"
        what = more if coarse == grid[0] else "next to no uncertainty"
        warnings.warn(
            f"The best λ for the validation data lies at an end of the search, {coarse:g}: they ask for {what}.",
            stacklevel=3,
        )
    return best([coarse * 10 ** (k / 10) for k in range(-10, 11)])


def _nll(
    priors: list[float],
    loader: Iterable[Any],
    posterior: Posterior,
    survey: Survey,
    linearization: Linearization,
) -> list[float]:
    """The mean negative log predictive density for each λ, in one pass over the data."""
    totals, count = [0.0] * len(priors), 0.0
    candidates = [posterior.with_prior(prior) for prior in priors]
    for inputs, targets, weights in batches(loader):
        start = 0
        counts = target_weights(survey.likelihood, targets, weights)
        each = torch.ones(len(targets), dtype=torch.float64) if counts is None else counts.amax(1)
        for jacobian in linearization.chunks(linearization.to_device(inputs)):
            part = slice(start, start + jacobian.num_inputs)
            found = targets[part].to(linearization.device)
            survey.likelihood.check_targets(jacobian.outputs, found)
            for k, candidate in enumerate(candidates):
                log_densities = survey.likelihood.log_predictive(
                    jacobian.outputs, candidate.covariance(jacobian), found
                )
                totals[k] -= float((log_densities * each[part].to(log_densities)).sum())
            start += jacobian.num_inputs
        count += float(each.sum())
    if not count:
        raise ValueError("The validation loader is empty, or nothing in it counts.")
    return [total / count for total in totals]
