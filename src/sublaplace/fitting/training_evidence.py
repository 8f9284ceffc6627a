"""λ and σ by the evidence of the KFAC approximation, while a network is trained."""

from collections.abc import Iterable
from math import exp, log
from typing import Any

import torch
from torch import nn

from sublaplace.curvature.cache import Curvatures
from sublaplace.fitting.fit import new_linearization
from sublaplace.fitting.steps import curvature_stream
from sublaplace.fitting.survey import Survey, survey_of
from sublaplace.fitting.training_recipe import Recipe, Training
from sublaplace.fitting.tuning import evidence_of, layer_priors
from sublaplace.model.layer_priors import PriorPrecision, reference_prior, units_of
from sublaplace.model.likelihoods.base import Likelihood, Noise
from sublaplace.model.likelihoods.gaussian import PER_OUTPUT
from sublaplace.posteriors.evidence import Evidence, golden_section

SMALLEST_NOISE = 1e-3
"""Lower bound on σ relative to the spread of the targets; without it, exactly fitted residuals would lead σ to zero."""

_FIRST_NOISE, _LARGEST_NOISE = 0.5, 2.0  # σ at first and at most, relative to the spread of the targets


def tune(result: Training, model: nn.Module, loader: Iterable[Any], recipe: Recipe, spread: Noise) -> None:
    """Maximise KFAC's evidence at the current network over λ, then over σ, unless they are given."""
    options = recipe.options
    linearization = new_linearization(options, model, recipe.forward, options.resources.memory_budget)
    with linearization.borrowed():
        survey, _ = survey_of(loader, linearization, result.likelihood, estimate=False)
        if isinstance(spread, tuple) and recipe.tunes_noise:
            survey = survey.with_given_noise(_residual_stds(survey, spread))
        tolerance = options.resources.tolerance(linearization.dtype)
        samples = options.resources.samples(survey.num_outputs)
        stream = curvature_stream(loader, linearization, survey, tolerance, samples=samples, seed=options.seed)
        curvatures = Curvatures(stream, survey.num_data, survey.num_outputs)
        prior = reference_prior(result.prior_precision)
        curvatures.kfac(prior)
    if options.prior_structure == "layer":
        if recipe.tunes_prior:
            result.prior_precision = layer_priors(curvatures, survey)
        assert isinstance(result.prior_precision, dict)
        prior, units = reference_prior(result.prior_precision), units_of(result.prior_precision, linearization.layout)
        linearization = linearization.with_units(units)
        curvatures = curvatures.in_units(linearization, units)
    evidence = evidence_of(curvatures.kfac(prior), survey, linearization.squared_norm())
    if options.prior_structure == "scalar" and recipe.tunes_prior:
        prior = result.prior_precision = evidence.best_prior(survey.noise_std)
    noise = survey.noise_std
    if recipe.tunes_noise:
        noise = _best_noise(evidence, prior, noise, spread)
        result.likelihood = recipe.options.likelihood.with_given_noise(noise)
    result.evidence.append(_value(evidence, prior, noise))


def _best_noise(evidence: Evidence, prior: float, noise: Noise, spread: Noise) -> Noise:
    """Return the σ of the largest evidence: one number, or all of `noise` times a common factor."""
    if isinstance(noise, tuple):

        def scaled(log_factor: float) -> float:
            return _value(evidence.with_noise_factor(exp(log_factor)), prior, noise)

        factor = exp(golden_section(scaled, -log(_LARGEST_NOISE), log(_LARGEST_NOISE), width=1e-3))
        return tuple(factor * std for std in noise)

    def value(log_noise: float) -> float:
        return _value(evidence, prior, exp(log_noise))

    assert isinstance(spread, float)
    return exp(golden_section(value, log(SMALLEST_NOISE * spread), log(_LARGEST_NOISE * spread), width=1e-3))


def _value(evidence: Evidence, prior: float, noise: Noise) -> float:
    """Return ln p(D) at λ and σ."""
    at = (torch.tensor(number, dtype=torch.float64, device="cpu") for number in (prior, noise))
    return evidence(*at).item()


def _residual_stds(survey: Survey, spread: tuple[float, ...]) -> tuple[float, ...]:
    """Return the root mean square of each output's residuals, with the lower bound on σ."""
    squares = (survey.residuals.squares / survey.residuals.count).sqrt().tolist()
    return tuple(max(std, SMALLEST_NOISE * scale) for std, scale in zip(squares, spread, strict=True))


def first_likelihood(recipe: Recipe, spread: Noise) -> Likelihood:
    """Return the likelihood until σ is tuned."""
    likelihood = recipe.options.likelihood
    if not recipe.tunes_noise:
        return likelihood
    stds = tuple(_FIRST_NOISE * std for std in spread) if isinstance(spread, tuple) else _FIRST_NOISE * spread
    return likelihood.with_given_noise(stds)


def first_prior(recipe: Recipe, spread: Noise) -> PriorPrecision:
    """Return λ until it is tuned: 1, or less where large targets may need large parameters."""
    given = recipe.options.prior_precision
    largest = max(spread) if isinstance(spread, tuple) else spread
    return min(1.0, largest**-2) if isinstance(given, str) else given


def spread_of(survey: Survey) -> Noise:
    """Return the standard deviation of the untrained network's residuals, a measure of the targets' spread."""
    if not survey.likelihood.has_noise or survey.likelihood.noise_estimate is None:
        return 1.0
    residuals = survey.residuals
    if survey.likelihood.noise_estimate != PER_OUTPUT:
        return _std(float(residuals.spread.sum() / residuals.count.sum()))
    return tuple(_std(variance) for variance in (residuals.spread / residuals.count).tolist())


def _std(variance: float) -> float:
    if not variance > 0:
        raise ValueError(
            "The targets differ from the network's outputs by a constant, so there is no scale to search σ in; give "
            "it, as in Gaussian(0.1)."
        )
    return variance**0.5
