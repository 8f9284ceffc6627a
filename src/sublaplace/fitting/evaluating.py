"""One pass over held-out data, scored for the plain network and for the posterior."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sublaplace.data.batches import batches
from sublaplace.evaluation import Evaluation, Judged, judged_classes, judged_values
from sublaplace.fitting.fitted import Fitted
from sublaplace.model.likelihoods.base import Likelihood, Noise
from sublaplace.model.likelihoods.links import Covariance
from sublaplace.runtime.progress import shown


def evaluated(
    fitted: Fitted, loader: Iterable[Any], given_noise: Noise | None = None, progress: bool = False
) -> Evaluation:
    """Return the scores of both; see `SubspaceLaplace.evaluate`.

    given_noise: σ, where the user gave it; otherwise the plain network has that of its training residuals.
    """
    posterior, linearization, likelihood = fitted.posterior, fitted.linearization, fitted.survey.likelihood
    whole = fitted.survey.num_outputs > 1 and not likelihood.needs_variances_only
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with linearization.borrowed():
        for inputs, targets, weights in batches(shown(loader, "evaluation", progress)):
            if weights is not None:
                raise ValueError("evaluate counts every input once; give pairs (inputs, targets) without weights.")
            start = 0
            for jacobian in linearization.chunks(linearization.to_device(inputs), wanted=posterior.wanted):
                found = targets[start : start + jacobian.num_inputs].to(linearization.device)
                start += jacobian.num_inputs
                likelihood.check_targets(jacobian.outputs, found)
                spread = posterior.covariance(jacobian) if whole else posterior.variance(jacobian)
                parts.append((jacobian.outputs, found, spread))
                del jacobian  # or it would stand in memory beside the next one
    if not parts:
        raise ValueError("The loader is empty: there is nothing to evaluate.")
    outputs, targets, covariance = (torch.cat(part) for part in zip(*parts, strict=True))
    counted = likelihood.counted(targets)
    if counted is not None:
        kept = counted.any(1)
        if not kept.any():
            raise ValueError("All labels are ignored: there is nothing to evaluate.")
        outputs, targets, covariance = outputs[kept], targets[kept], covariance[kept]
    plain_likelihood, residuals = likelihood, fitted.survey.residuals
    if likelihood.has_noise and (residuals.squares > 0).all():  # otherwise σ was given, and serves both
        single = len(likelihood.noise_variances) == 1
        noise = residuals.root_mean_square() if single else residuals.root_mean_squares()
        noise = noise if given_noise is None else given_noise
        plain_likelihood = likelihood.with_given_noise(noise)
    plain = _judged(plain_likelihood, outputs, torch.zeros_like(covariance), targets)
    return Evaluation(plain, _judged(likelihood, outputs, covariance, targets), len(outputs))


def _judged(likelihood: Likelihood, outputs: Tensor, covariance: Tensor, targets: Tensor) -> Judged:
    """Score what is predicted for outputs of this covariance: variances (n, C) or matrices (n, C, C)."""
    log_densities = likelihood.log_predictive(outputs, covariance, targets)
    variance = covariance if covariance.ndim == 2 else covariance.diagonal(dim1=1, dim2=2)
    generator = torch.Generator().manual_seed(0)
    uncertainty = Covariance(variance, lambda: covariance)
    probabilities = likelihood.probabilities(outputs, uncertainty, likelihood.default_link, 1, generator)
    if probabilities is None and not likelihood.has_noise:
        return Judged({"nll": -float(log_densities.mean())}, log_densities)
    if probabilities is None:
        noise = torch.tensor(likelihood.noise_variances, dtype=variance.dtype, device=variance.device)
        return judged_values(outputs, variance + noise, targets, log_densities)
    return judged_classes(*likelihood.as_classes(probabilities, targets), log_densities)
