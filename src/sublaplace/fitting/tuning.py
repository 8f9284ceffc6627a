"""The prior precision and the noise, chosen by the evidence or on validation data."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sublaplace.curvature.cache import Curvatures
from sublaplace.fitting.fitted import Fitted
from sublaplace.fitting.survey import Survey
from sublaplace.fitting.validation import chosen_on
from sublaplace.posteriors.evidence import Evidence
from sublaplace.posteriors.protocol import Posterior


def evidence_of(posterior: Posterior, survey: Survey, squared_norm: float) -> Evidence:
    """Return the evidence of a fitted posterior. Cost: the eigenvalues of its curvature, s³ (p³ for the full one)."""
    likelihood = survey.likelihood
    fixed = None if likelihood.has_noise else likelihood.curvature_scales
    return Evidence(survey.log_likelihood, posterior.occam(), squared_norm, fixed)


def prior_by_evidence(curvatures: Curvatures, survey: Survey) -> float:
    """Return the λ of the largest evidence of the KFAC approximation, before P is built, as in the paper."""
    linearization = curvatures.stream.linearization
    squared_norm = linearization.layout.squared_norm(linearization.model)
    return evidence_of(curvatures.kfac(1.0), survey, squared_norm).best_prior(survey.noise_std)


def tuned_by_evidence(fitted: Fitted, noise: bool = False) -> Fitted:
    """Return the posterior with the λ of the largest evidence, with `noise` over λ and σ together; P is kept."""
    survey, linearization = fitted.survey, fitted.linearization
    evidence = evidence_of(fitted.posterior, survey, linearization.layout.squared_norm(linearization.model))
    if not noise or not survey.likelihood.has_noise:
        return replace(fitted.with_prior(evidence.best_prior(survey.noise_std)), chosen_by="its evidence")
    fitted.require_noise_like(len(survey.likelihood.curvature_scales))
    prior, std = evidence.best_prior_and_noise(survey.noise_std)
    return replace(fitted.with_noise(std).with_prior(prior), chosen_by="its evidence, with σ")


def tuned_on(fitted: Fitted, loader: Iterable[Any], noise: bool | None = None, progress: bool = False) -> Fitted:
    """Return the posterior with the λ, and for regression the σ, of the smallest NLL on validation data; P is kept.

    Args:
        fitted: what was fitted; its λ and σ are where the search begins.
        loader: the validation data, which are read once.
        noise: whether σ is tuned too; None: where it was estimated.
        progress: show a bar.
    """
    likelihood = fitted.survey.likelihood
    if noise and not likelihood.has_noise:
        raise ValueError(f"A likelihood of kind '{likelihood.name}' has no noise σ to tune.")
    chosen = chosen_on(fitted, loader, likelihood.noise_estimate is not None if noise is None else noise, progress)
    if chosen is None:
        return fitted
    changed = fitted if chosen.noise_factor == 1.0 else fitted.with_noise_factor(chosen.noise_factor)
    how = f"the NLL of {chosen.num_inputs:,} validation inputs{', with σ' if chosen.noise_factor != 1.0 else ''}"
    return replace(changed.with_prior(chosen.prior_precision), chosen_by=how)
