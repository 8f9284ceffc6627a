"""The prior precision and the noise, chosen by the evidence or on validation data."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from tqdm import tqdm

from sublaplace.curvature.cache import Curvatures
from sublaplace.data.batches import batches
from sublaplace.fitting.fitted import Fitted
from sublaplace.fitting.survey import Survey
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.likelihoods.base import target_weights
from sublaplace.posteriors.evidence import Evidence
from sublaplace.posteriors.protocol import Posterior


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
        # Exact posteriors and complements are large for each λ.
        small = (posterior.subspace is None) == (posterior.outside is not None)
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
        return fitted.with_prior(evidence.best_prior(survey.noise_std))
    fitted.require_noise_like(len(survey.likelihood.curvature_scales))
    prior, std = evidence.best_prior_and_noise(survey.noise_std)
    return fitted.with_noise(std).with_prior(prior)


def tuned_on(fitted: Fitted, loader: Iterable[Any], noise: bool = False, progress: bool = False) -> Fitted:
    """Return the posterior with the λ of the smallest NLL on validation data; P is kept."""
    if noise:
        raise ValueError("noise=True goes with 'evidence'; validation data tune λ alone.")
    linearization = fitted.linearization
    with linearization.borrowed():
        prior = best_prior_on(loader, fitted.posterior, fitted.survey, linearization, progress)
    return fitted.with_prior(prior)
