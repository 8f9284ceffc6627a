"""How much the approximate curvature outside of the subspace counts, fitted to the exact Laplace approximation."""

from dataclasses import replace
from math import log2

import torch
from torch import Tensor

from sublaplace.curvature.exact import exact_ggn
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.curvature.reduced import reduced_ggn_and_product
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.data.batches import Batch, Ragged, by_form, num_inputs, parts_of, select
from sublaplace.jacobians.jacobian import Jacobian, Jacobians
from sublaplace.model.likelihoods.base import Likelihood
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.posteriors.subspace import SubspacePosterior
from sublaplace.posteriors.sweep import weight_sweep
from sublaplace.projection import Projection

Weighted = ComplementedPosterior | BlockPrecision
"""Posteriors with an approximate curvature whose weight can be changed."""

SUBSAMPLE = 1000
"""Training inputs that the weight is fitted on at the most."""

_FEWEST = 32  # inputs of a subsample; with fewer the weight stays 1
_LOWEST, _HIGHEST, _STEP = -20.0, 10.0, 0.25  # of log₂ w
_NEARLY_ALL = 0.93  # share of the data from which on a subsample stands for all of them


def fitted_weight(
    posterior: Weighted, stream: CurvatureStream, num_data: int, held_back: Jacobians, subsample: Batch | Ragged
) -> float:
    r"""Return the weight w of K in Ψ_K = (wK + λ)⁻¹ that brings the posterior nearest to the full one.

    KFAC misses the size of the curvature by a factor that differs from network to network. The exact posterior of n of
    the N data is affordable at any size of network, and so is the weight w_n that is nearest to it (see `nearest`).
    log w_n is nearly a straight line in log n, so that two nested subsamples give the weight for all data. The slope is
    kept between 0 and 1, and extrapolation does not lift w above 1.

    Args:
        posterior: with the weight 1.
        stream: the training data.
        num_data: N, without data that do not count.
        held_back: J of inputs that neither P nor the subsample has seen.
        subsample: some of the training data.

    Cost: Jacobian rows of the subsample, at most 1,000 inputs; their Gram matrix, (nC)²·p; (nC)³. Memory: nC·p.
    """
    linearization = stream.linearization
    row_bytes = 3 * 8 * linearization.layout.num_parameters * linearization.num_outputs(held_back.inputs)
    n = min(num_inputs(subsample), SUBSAMPLE, linearization.memory_budget // row_bytes)
    if n < _FEWEST:
        return 1.0
    sizes = [n] if n >= _NEARLY_ALL * num_data else [n // 2, n]
    found = [_log_weight_of(posterior, stream, num_data, held_back, subsample, size) for size in sizes]
    value = found[-1]
    if len(sizes) > 1:
        slope = min(max((found[1] - found[0]) / log2(sizes[1] / sizes[0]), 0.0), 1.0)
        value = max(value, min(value + slope * log2(num_data / n), 0.0))
    return float(2.0**value)


def _log_weight_of(
    posterior: Weighted,
    stream: CurvatureStream,
    num_data: int,
    held_back: Jacobians,
    subsample: Batch | Ragged,
    size: int,
) -> float:
    """Return log₂ of the weight that is nearest to the exact posterior of the first `size` inputs of the subsample."""
    data = parts_of(by_form(select(subsample, slice(0, size))))
    part = replace(stream, loader=data, num_data=size, checkpoint=None, fingerprint=None, progress=False)
    outside = posterior.outside
    share = replace(outside.reweighted(outside.weight * size / num_data), weight=1.0)
    own: Weighted = share
    if posterior.subspace is not None:
        own = _complemented(part, posterior.subspace.projection, share)
    rows = size * stream.linearization.num_outputs(held_back.inputs)
    exact = exact_ggn(part, rows, posterior.prior_precision)
    covariances = torch.cat([exact.covariance(jacobian).double() for jacobian in held_back])
    unseen = covariances.new_zeros(len(covariances), 1)
    return log2(nearest(own, covariances, held_back, stream.likelihood, unseen))


def _complemented(stream: CurvatureStream, projection: Projection, outside: BlockPrecision) -> ComplementedPosterior:
    curvatures, product = reduced_ggn_and_product(stream, projection)
    scales = stream.likelihood.curvature_scales
    inside = SubspacePosterior(projection, curvatures, projection.gram(), scales, outside.prior_precision)
    return ComplementedPosterior.of(inside, outside, {name: p.mul_(stream.scale) for name, p in product.items()})


def nearest(posterior: Weighted, exact: Tensor, inputs: Jacobians, likelihood: Likelihood, counts: Tensor) -> float:
    r"""Return the weight at which the divergence of the predictives, Σ_i KL(p_i ‖ p̃_i), is least.

    p_i is what is predicted with Σ_i, one of `exact` (n, C, C), p̃_i with the posterior's covariance: for regression
    N(f, Σ + σ²), for classification the probabilities by its link. (Gaussians of the logits would weigh all
    directions alike, also those that hardly move a probability.) Inputs of the posterior's own training data are judged
    as if they had not been seen: taking one out, Λ′ = Λ − JᵀHJ, gives by Woodbury's identity

        Σ′ = (I − ΣH)⁻¹ Σ,    Σ̃′ = G Σ_P + G (J_c Ψ_K J_cᵀ) Gᵀ  with G = (I − Σ_P H)⁻¹,

    with H the Hessian of its outputs, times how much each of its targets counts in the data: `counts`, (n, 1) or
    (n, C), 0 for inputs that are not among them. (KFAC, a mean over the data times their number, hardly changes by one
    of them.) The search runs over log₂ w in steps of ¼ from −20 to 10, refined by a parabola, with KFAC's eigenvalues
    in bins (see `sweep.py`). The weight stays 1 where no other is better by more than rounding.
    """
    unit = posterior.scale if posterior.subspace is None else posterior.subspace.unit
    grid = torch.arange(_LOWEST, _HIGHEST + _STEP / 2, _STEP, dtype=torch.float64, device="cpu")
    sweep, divergences, start = weight_sweep(posterior, 2.0**grid), torch.zeros_like(grid), 0
    for jacobian in inputs:
        part = slice(start, start + jacobian.num_inputs)
        covariance, start = exact[part], part.stop
        identity = torch.eye(covariance.shape[1], dtype=torch.float64, device=covariance.device)
        H = _hessians(jacobian, likelihood, counts[part].to(covariance))
        unseen = torch.linalg.solve(identity - covariance @ H, covariance)
        inside = torch.zeros_like(covariance)
        if posterior.subspace is not None:
            inside = posterior.subspace.covariance(jacobian).double()
        grown = torch.linalg.inv(identity - inside @ H)
        for index, total in enumerate(sweep(jacobian, whole=True) / unit):
            approximation = grown @ inside + grown @ (total - inside) @ grown.transpose(1, 2)
            divergences[index] += likelihood.predictive_divergences(jacobian.outputs, unseen, approximation).sum().cpu()
        del jacobian  # or it would stand in memory beside the next one
    divergences = divergences.nan_to_num(nan=torch.inf)
    best, plain = int(divergences.argmin()), int((grid == 0).nonzero())
    better = divergences[plain] - divergences[best] > 1e-6 * divergences[plain] + 1e-13 * len(exact)
    if not better:
        return 1.0
    value = float(grid[best])
    if 0 < best < len(grid) - 1:
        left, middle, right = divergences[best - 1 : best + 2].tolist()
        curvature = left - 2 * middle + right
        if curvature > 0:
            value += 0.5 * _STEP * (left - right) / curvature
    return float(2.0**value)


def _hessians(jacobian: Jacobian, likelihood: Likelihood, counts: Tensor) -> Tensor:
    """Return H of every input, as it stands in the data: (n, C, C) in float64."""
    roots = likelihood.hessian_root(jacobian.outputs).double() * counts.sqrt()[:, None, :]
    scales = torch.tensor(likelihood.curvature_scales, dtype=torch.float64, device=roots.device)
    return roots.transpose(1, 2) @ (scales[:, None] * roots)
