"""The scores of posteriors: their distance to the full posterior, and the quality of their predictions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from experiments.methods import Problem, outputs_of
from experiments.scored_sets import TestSet
from experiments.sweeps import Sweep
from sublaplace import Jacobian, metrics
from sublaplace.jacobians.blocks import OuterBlock
from sublaplace.model.likelihoods.links import probit

Scores = dict[str, float]
Key = TypeVar("Key")


def approximation_scores(problem: Problem, inputs: Tensor, sweep: Sweep, reference: Tensor) -> dict[int, Scores]:
    """Return for each s how close a posterior is to the full one, whose covariance is the reference, on drawn inputs.

    Regression: KL of the joint predictives with noise (`kl`). Classification: KL of the probit predictives, mean and
    sum over the inputs. `log_trace` and `relative_error` are of the joint covariance of the outputs.
    """
    outputs = outputs_of(problem.network, inputs).double()
    scores: dict[int, Scores] = {}
    for s, covariance in zip(sweep.dims, sweep.joint_covariances(problem.jacobians(inputs)), strict=True):
        scores[s] = {"log_trace": metrics.log_trace(covariance)}
        if problem.noise_std is None:
            p, q = (probit(outputs, c.diagonal().view_as(outputs)) for c in (reference, covariance))
            scores[s]["kl_mean"] = metrics.kl_categorical(p, q)
            scores[s]["kl_sum"] = metrics.kl_categorical(p, q, "sum")
        else:
            noise = problem.noise_std**2 * torch.eye(len(covariance), dtype=torch.float64)
            scores[s]["kl"] = metrics.kl_gaussian(reference + noise, covariance + noise)
        scores[s]["relative_error"] = metrics.relative_error(covariance, reference)
    return scores


def predictive_scores(
    problem: Problem, test_set: TestSet, sweeps: dict[str, Sweep], traced: Tensor | None = None
) -> dict[str, dict[int, Scores]]:
    """Return for each posterior and s how well the whole test set is predicted, from one pass for all of them.

    With `traced`, the places of some of the inputs, also return the `log_trace` of these inputs.
    """

    def covariances(jacobian: Jacobian) -> Iterator[tuple[tuple[str, int], Tensor]]:
        if len(sweeps) > 1:
            jacobian = _with_kept_rows(jacobian)
        for name, sweep in sweeps.items():
            for s, covariance in zip(sweep.dims, sweep.covariances(jacobian), strict=True):
                yield (name, s), covariance

    scores: dict[str, dict[int, Scores]] = {name: {} for name in sweeps}
    for (name, s), found in _scores_of_all(problem, test_set.inputs, test_set.targets, covariances, traced).items():
        scores[name][s] = found
    return scores


class _KeptRows(OuterBlock):
    """A block that forms its rows once, for several posteriors."""

    @cached_property
    def _rows(self) -> Tensor:
        return super().rows()

    def rows(self) -> Tensor:
        return self._rows


def _with_kept_rows(jacobian: Jacobian) -> Jacobian:
    """Return the same Jacobian, which keeps rows once they are formed: n·K·p numbers, for the inputs of one chunk."""
    blocks = {
        name: _KeptRows(block.uses, block.num_rows, block.transposed) if isinstance(block, OuterBlock) else block
        for name, block in jacobian.blocks.items()
    }
    return replace(jacobian, blocks=blocks)


def _scores_of_all(
    problem: Problem,
    inputs: Tensor,
    targets: Tensor,
    covariances: Callable[[Jacobian], Iterator[tuple[Key, Tensor]]],
    traced: Tensor | None = None,
) -> dict[Key, Scores]:
    """Return how well targets are predicted with each of several covariances, from one pass for all of them."""
    outputs: list[Tensor] = []
    parts: dict[Key, list[Tensor]] = {}
    for jacobian in problem.jacobians(inputs):
        outputs.append(jacobian.outputs.double())
        for key, covariance in covariances(jacobian):
            parts.setdefault(key, []).append(covariance)
    mean = torch.cat(outputs)
    scores: dict[Key, Scores] = {}
    for key, part in parts.items():
        covariance = torch.cat(part)
        scores[key] = _scores(problem, mean, covariance, targets)
        if traced is not None:
            scores[key]["log_trace"] = metrics.log_trace(covariance[traced])
    return scores


TUNED_OUTPUTS = 5000  # of a half of the test set, on which λ is chosen


def own_prior_scores(
    problem: Problem, test_set: TestSet, sweep: Sweep, dims: Sequence[int], priors: Sequence[float]
) -> dict[int, Scores]:
    """Return for each s how well the test set is predicted by the posterior with its own λ and the same P.

    λ is the one of `priors` with the best NLL on one half of the test set (on the first `TUNED_OUTPUTS` of its
    outputs). The other half is scored, and then the halves change places. `own_nll` and so on are the means,
    `own_prior_precision` is the geometric mean.
    """
    halves = [torch.arange(half, len(test_set.inputs), 2) for half in (0, 1)]
    most = TUNED_OUTPUTS // outputs_of(problem.network, test_set.inputs[:1]).shape[1]
    pairs = [(s, prior) for s in dims for prior in priors]
    tuned = [_scores_under(problem, test_set, half[:most], sweep, pairs) for half in halves]
    chosen = [{s: min(priors, key=lambda prior: on[s, prior]["nll"]) for s in dims} for on in tuned]
    scored = [
        _scores_under(problem, test_set, other, sweep, list(best.items()))
        for best, other in zip(chosen, reversed(halves), strict=True)
    ]
    found: dict[int, Scores] = {}
    for s in dims:
        own = [scores[s, best[s]] for scores, best in zip(scored, chosen, strict=True)]
        found[s] = {f"own_{name}": (own[0][name] + own[1][name]) / 2 for name in own[0]}
        found[s]["own_prior_precision"] = float(np.sqrt(chosen[0][s] * chosen[1][s]))
    return found


def _scores_under(
    problem: Problem, test_set: TestSet, rows: Tensor, sweep: Sweep, pairs: Sequence[tuple[int, float]]
) -> dict[tuple[int, float], Scores]:
    """Return for each pair of s and λ how well some of the test inputs are predicted."""
    return _scores_of_all(problem, test_set.inputs[rows], test_set.targets[rows], sweep.under(pairs))


def _scores(problem: Problem, mean: Tensor, covariance: Tensor, targets: Tensor) -> Scores:
    """Return how well targets are predicted by outputs of this mean (n, C) and covariance (n, C, C)."""
    if problem.noise_std is None:
        return classification_scores(probit(mean, covariance.diagonal(dim1=1, dim2=2)), targets)
    total = covariance + problem.noise_std**2 * torch.eye(mean.shape[1], dtype=torch.float64)
    return {"nll": metrics.nll(mean, targets, total), "coverage": metrics.coverage(mean, total, targets)}


def best_temperature(outputs: Tensor, targets: Tensor) -> float:
    """Return the T that minimises the NLL of softmax(f / T)."""

    def nll(log_temperature: float) -> float:
        return float(nn.functional.cross_entropy(outputs / np.exp(log_temperature), targets))

    return float(np.exp(minimize_scalar(nll, bounds=(-3, 3), method="bounded", options={"xatol": 1e-6}).x))


def classification_scores(probabilities: Tensor, targets: Tensor) -> Scores:
    return {
        "nll": metrics.nll(probabilities, targets),
        "ece": metrics.ece(probabilities, targets),
        "brier": metrics.brier(probabilities, targets),
    }


def mixture_scores(means: Tensor, deviations: Tensor, targets: Tensor) -> Scores:
    """Return the NLL of the mixture of N(mean_k, deviation_k² I), means (k, n, C), and the coverage by its moments."""
    k, _, C = means.shape
    variances = deviations.square()
    squares = (means - targets.double()).square().sum(2) / variances[:, None]
    log_densities = -0.5 * (squares + C * (2 * np.pi * variances[:, None]).log())
    nll = (np.log(k) - log_densities.logsumexp(0)).mean().item()
    centre = means.mean(0)
    spread = (means - centre).permute(1, 2, 0)
    covariance = spread @ spread.transpose(1, 2) / k + variances.mean() * torch.eye(C, dtype=torch.float64)
    return {"nll": nll, "coverage": metrics.coverage(centre, covariance, targets)}
