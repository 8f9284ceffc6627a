"""How much the approximate curvature outside of the subspace counts, fitted to the full Laplace approximation."""

import torch
from torch import Tensor

from sublaplace.curvature.matrix_free import MatrixFreePrecision
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.data.batches import num_inputs
from sublaplace.jacobians.jacobian import Jacobian, Jacobians
from sublaplace.model.likelihoods.base import Likelihood
from sublaplace.model.linalg import diagonal_blocks
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.projectors.context import ProjectorContext

Weighted = ComplementedPosterior | BlockPrecision
"""Posteriors with an approximate curvature whose weight can be changed."""

WEIGHTS = tuple(2.0**k for k in range(-6, 7))
_FEW_INPUTS = 16  # for which the exact covariance comes from conjugate gradients, where the exact GGN does not fit


def with_fitted_weight(posterior: Weighted, context: ProjectorContext, inputs: Jacobians, counts: Tensor) -> Weighted:
    r"""The posterior with the weight w of K in Ψ_K = (wK + λ)⁻¹ that brings it nearest to the full one.

    KFAC misses the size of the curvature by a factor that differs from network to network. w is the power of two,
    between 2⁻⁶ and 2⁶, at which the predictives of the given inputs diverge least from those of the full Laplace
    approximation, see `nearest`. P should not be built from these inputs. Labels are not needed.

    Cost: the exact covariance of the inputs (a pass over the data for the GGN where that fits, else one for every
    iteration, for 16 of the inputs), and 13 predictions of the posterior.
    """
    if context.exact_fits():
        exact = context.exact()
        covariances = torch.cat([exact.covariance(jacobian).double() for jacobian in inputs])
    else:
        inputs = inputs.few(_FEW_INPUTS)
        precision = MatrixFreePrecision(context.stream, context.kfac(), tolerance=1e-3)
        full = precision.full_covariance(inputs).covariance
        covariances = diagonal_blocks(full, num_inputs(inputs.inputs))
    return nearest(posterior, covariances, inputs, context.stream.likelihood, counts)


def nearest(posterior: Weighted, exact: Tensor, inputs: Jacobians, likelihood: Likelihood, counts: Tensor) -> Weighted:
    r"""The posterior with the weight at which the divergence of the predictives, Σ_i KL(p_i ‖ p̃_i), is least.

    p_i is what is predicted with Σ_i, one of `exact` (n, C, C), p̃_i with the posterior's covariance: for regression
    N(f, Σ + σ²), for classification the probabilities by the probit link. (The Gaussians of the logits would weigh all
    directions alike, also those that hardly move a probability.) A posterior knows the inputs of its own training data
    better than new ones. So each is judged as if it had not been seen: taking it out, Λ′ = Λ − JᵀHJ, gives by
    Woodbury's identity

        Σ′ = (I − ΣH)⁻¹ Σ,    Σ̃′ = G Σ_P + G (J_c Ψ_K J_cᵀ) Gᵀ  with G = (I − Σ_P H)⁻¹,

    with H the Hessian of its outputs, times how much each of its targets counts in the data: `counts`, (n, 1) or
    (n, C), 0 for inputs that are not among them. These are C × C matrices of what is known anyway. (KFAC, a mean over
    the data times their number, hardly changes by one of them.) The weight stays 1 where no other is better by more
    than rounding.
    """
    divergences = torch.zeros(len(WEIGHTS), dtype=torch.float64)
    start = 0
    for jacobian in inputs:
        part = slice(start, start + jacobian.num_inputs)
        covariance, start = exact[part], part.stop
        identity = torch.eye(covariance.shape[1], dtype=torch.float64, device=covariance.device)
        H = _hessians(jacobian, likelihood, counts[part].to(covariance))
        unseen = torch.linalg.solve(identity - covariance @ H, covariance)
        inside = torch.zeros_like(covariance)
        if posterior.subspace is not None:
            inside = posterior.subspace.covariance(jacobian).double()
        outsides = posterior.outside_covariances(jacobian, WEIGHTS)
        grown = torch.linalg.inv(identity - inside @ H)
        for index, outside in enumerate(outsides):
            approximation = grown @ inside + grown @ outside @ grown.transpose(1, 2)
            divergences[index] += likelihood.predictive_divergences(jacobian.outputs, unseen, approximation).sum().cpu()
        del jacobian  # or it would stand in memory beside the next one
    divergences = divergences.nan_to_num(nan=torch.inf)
    best, plain = int(divergences.argmin()), WEIGHTS.index(1.0)
    better = divergences[plain] - divergences[best] > 1e-6 * divergences[plain] + 1e-13 * len(exact)
    return posterior.reweighted(WEIGHTS[best if better else plain])


def _hessians(jacobian: Jacobian, likelihood: Likelihood, counts: Tensor) -> Tensor:
    """H of every input, as it stands in the data: (n, C, C) in float64."""
    roots = likelihood.hessian_root(jacobian.outputs).double() * counts.sqrt()[:, None, :]
    scales = torch.tensor(likelihood.curvature_scales, dtype=torch.float64, device=roots.device)
    return roots.transpose(1, 2) @ (scales[:, None] * roots)
