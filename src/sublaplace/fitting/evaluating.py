"""One pass over held-out data, scored for the plain network and for the posterior."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sublaplace.data.batches import batches
from sublaplace.evaluation import ClassPart, Evaluation, Judged, judged_classes, judged_values
from sublaplace.fitting.fitted import Fitted
from sublaplace.model.likelihoods.base import Likelihood, Noise, target_weights
from sublaplace.model.likelihoods.links import Covariance
from sublaplace.runtime.progress import shown


def evaluated(
    fitted: Fitted, loader: Iterable[Any], given_noise: Noise | None = None, progress: bool = False
) -> Evaluation:
    """Return the scores of both; see `SubspaceLaplace.evaluate`.

    given_noise: σ, where the user gave it; otherwise the plain network has that of its training residuals.
    """
    posterior, linearization, likelihood = fitted.predictive, fitted.linearization, fitted.survey.likelihood
    whole = fitted.survey.num_outputs > 1 and not likelihood.needs_variances_only
    single = likelihood.of_one_position
    plain = _plain(single, fitted, given_noise)
    parts: list[tuple[_Scored, _Scored]] = []
    owners: list[Tensor] = []
    num_inputs = 0
    with linearization.borrowed():
        for inputs, targets, weights in batches(shown(loader, "evaluation", progress)):
            kept = _kept(likelihood, targets, weights)
            start = 0
            for jacobian in linearization.chunks(linearization.to_device(inputs), wanted=posterior.wanted):
                part = slice(start, start + jacobian.num_inputs)
                start = part.stop
                found = targets[part].to(linearization.device)
                likelihood.check_targets(linearization.arranged(jacobian.outputs), found)
                spread = likelihood.by_position(
                    posterior.covariance(jacobian) if whole else posterior.variance(jacobian)
                )
                rows, labels = likelihood.by_position(jacobian.outputs), likelihood.targets_by_position(found)
                del jacobian  # or it would stand in memory beside the next one
                counts = likelihood.counts_by_position(kept[part].to(linearization.device), rows.view(len(found), -1))
                places = torch.arange(len(found), device=linearization.device) + num_inputs
                num_inputs += len(found)
                if counts.any():
                    owners.append(places.repeat_interleave(len(counts) // len(found))[counts])
                    rows, labels, spread = rows[counts], labels[counts], spread[counts]
                    none = torch.zeros_like(spread)
                    parts.append((_scored(plain, rows, none, labels), _scored(single, rows, spread, labels)))
    if not num_inputs:
        raise ValueError("The loader is empty: there is nothing to evaluate.")
    if not parts:
        raise ValueError("All labels are ignored: there is nothing to evaluate.")
    every = torch.cat(owners)
    before, after = (_judged([part[k] for part in parts]) for k in (0, 1))
    return Evaluation(before, after, len(every), None if fitted.survey.layout is None else every)


def _plain(likelihood: Likelihood, fitted: Fitted, given_noise: Noise | None) -> Likelihood:
    """Return the likelihood of the plain network, whose σ is that of its training residuals."""
    residuals = fitted.survey.residuals
    if not likelihood.has_noise or not (residuals.squares > 0).all():  # then σ was given, and serves both
        return likelihood
    single = len(likelihood.noise_variances) == 1
    noise = residuals.root_mean_square() if single else residuals.root_mean_squares()
    return likelihood.with_given_noise(noise if given_noise is None else given_noise)


def _kept(likelihood: Likelihood, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return which targets are scored, (n, 1) or (n, K): those that are neither ignored nor masked."""
    if weights is not None and (weights.ndim == 1 or not ((weights == 0) | (weights == 1)).all()):
        raise ValueError("evaluate counts every input once; give pairs (inputs, targets) without weights.")
    counts = target_weights(likelihood, targets, weights)
    return torch.ones(len(targets), 1, dtype=torch.bool, device=targets.device) if counts is None else counts > 0


@dataclass(frozen=True)
class _Values:
    """Means, variances with the noise, and targets of a part of the data; without noise their densities alone."""

    log_densities: Tensor
    numbers: tuple[Tensor, Tensor, Tensor] | None


_Scored = ClassPart | _Values


def _scored(likelihood: Likelihood, outputs: Tensor, covariance: Tensor, targets: Tensor) -> _Scored:
    """Return what scores need of a part of the data, with variances (n, C) or matrices (n, C, C) of the outputs."""
    log_densities = likelihood.log_predictive(outputs, covariance, targets)
    variance = covariance if covariance.ndim == 2 else covariance.diagonal(dim1=1, dim2=2)
    generator = torch.Generator().manual_seed(0)
    uncertainty = Covariance(variance, lambda: covariance)
    probabilities = likelihood.probabilities(outputs, uncertainty, likelihood.default_link, 1, generator)
    if probabilities is not None:
        return ClassPart.of(*likelihood.as_classes(probabilities, targets), log_densities)
    if not likelihood.has_noise:
        return _Values(log_densities, None)
    noise = torch.tensor(likelihood.noise_variances, dtype=variance.dtype, device=variance.device)
    return _Values(log_densities, (outputs, variance + noise, targets))


def _judged(parts: list[_Scored]) -> Judged:
    """Return the scores of all parts together."""
    classes = [part for part in parts if isinstance(part, ClassPart)]
    if classes:
        return judged_classes(classes)
    log_densities = torch.cat([part.log_densities for part in parts])
    numbers = [part.numbers for part in parts if isinstance(part, _Values) and part.numbers is not None]
    if not numbers:
        return Judged({"nll": -float(log_densities.mean())}, log_densities)
    mean, variance, targets = (torch.cat(part) for part in zip(*numbers, strict=True))
    return judged_values(mean, variance, targets, log_densities)
