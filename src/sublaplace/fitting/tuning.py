"""The prior precision and the noise, chosen by the evidence or on validation data."""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sublaplace.curvature.cache import Curvatures
from sublaplace.curvature.precision import EigenvalueOccam
from sublaplace.fitting.fitted import Fitted, Stage
from sublaplace.fitting.survey import Survey
from sublaplace.fitting.validation import chosen_on
from sublaplace.model.layer_priors import layer_of
from sublaplace.posteriors.evidence import Evidence
from sublaplace.posteriors.protocol import Posterior
from sublaplace.runtime.memory import peak_bytes
from sublaplace.runtime.stopwatch import FACTORISATIONS, Stopwatch


def evidence_of(posterior: Posterior, survey: Survey, squared_norm: float) -> Evidence:
    """Return the evidence of a fitted posterior. Cost: the eigenvalues of its curvature, s³ (p³ for the full one)."""
    likelihood = survey.likelihood
    fixed = None if likelihood.has_noise else likelihood.curvature_scales
    return Evidence(survey.log_likelihood, posterior.occam(), squared_norm, fixed)


def prior_by_evidence(curvatures: Curvatures, survey: Survey, last_layer: tuple[str, ...] = ()) -> float:
    """Return the λ of the largest evidence of the KFAC approximation, before P is built, as in the paper.

    last_layer: the parameters of the last layer, if the posterior is one of this layer alone; so is the evidence then.
    """
    linearization = curvatures.stream.linearization
    if last_layer:
        theta = linearization.layout.unflatten(linearization.flat_parameters()[None])
        squared_norm = sum(float(theta[name].double().square().sum()) for name in last_layer)
        return evidence_of(curvatures.last_layer(last_layer, 1.0), survey, squared_norm).best_prior(survey.noise_std)
    return evidence_of(curvatures.kfac(1.0), survey, linearization.squared_norm()).best_prior(survey.noise_std)


def layer_priors(curvatures: Curvatures, survey: Survey) -> dict[str, float]:
    """Return the λ of each parameter: for every layer the one of the largest evidence of KFAC.

    The evidence of KFAC is a sum over layers, so that each layer's λ is found on its own. Parameters of one module make
    up a layer.
    """
    linearization, kfac = curvatures.stream.linearization, curvatures.kfac(1.0)
    theta = linearization.layout.unflatten(linearization.flat_parameters()[None])
    layers: dict[str, list[str]] = {}
    for name in linearization.layout.names:
        layers.setdefault(layer_of(name), []).append(name)
    priors = {}
    for layer, names in layers.items():
        eigenvalues = torch.cat([kfac.parts[name].eigenvalues().double() for name in names])
        squared_norm = sum(float(theta[name].double().square().sum()) for name in names)
        occam = EigenvalueOccam(eigenvalues, kfac.scale)
        evidence = Evidence(_no_log_likelihood, occam, squared_norm, (kfac.scale,))
        priors[layer] = evidence.best_prior(1.0, low=1e-6, high=1e8)
    return {name: priors[layer_of(name)] for name in linearization.layout.names}


def _no_log_likelihood(noise_std: Tensor) -> Tensor:
    """Return 0: the log likelihood is the same for every λ."""
    return torch.zeros((), dtype=torch.float64, device="cpu")


def tuned_by_evidence(fitted: Fitted, noise: bool = False) -> Fitted:
    """Return the posterior with the λ of the largest evidence, with `noise` over λ and σ together; P is kept.

    Several σ are tuned one by one where each has a curvature of its own, as in a subspace, else by a common factor.
    """
    survey, linearization = fitted.survey, fitted.linearization
    if noise and not survey.likelihood.has_noise:
        raise ValueError(f"A likelihood of kind '{survey.likelihood.name}' has no noise σ to tune.")
    evidence = evidence_of(fitted.posterior, survey, linearization.squared_norm())
    if not noise:
        return replace(fitted.with_prior(evidence.best_prior(survey.noise_std)), chosen_by="its evidence")
    if isinstance(survey.noise_std, tuple) and not fitted.has_curvature_per_output:
        prior, factor = evidence.best_prior_and_factor(survey.noise_std)
        scaled = fitted.with_noise_factor(factor).with_prior(prior)
        return replace(scaled, chosen_by="its evidence, with a common factor of all σ")
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
    start, stopwatch = time.perf_counter(), Stopwatch()
    with_noise = likelihood.noise_estimate is not None if noise is None else noise
    chosen = chosen_on(fitted, loader, with_noise, stopwatch, progress)
    if chosen is None:
        return fitted
    changed = fitted if chosen.noise_factor == 1.0 else fitted.with_noise_factor(chosen.noise_factor)
    how = f"the NLL of {chosen.num_inputs:,} validation inputs{', with σ' if chosen.noise_factor != 1.0 else ''}"
    seconds, algebra = time.perf_counter() - start, stopwatch.seconds[FACTORISATIONS]
    stage = Stage(seconds, peak_bytes(fitted.linearization.device), in_factorisations=algebra)
    stages = fitted.stages | {"validation": stage}
    return replace(changed.with_prior(chosen.prior_precision), chosen_by=how, stages=stages)
