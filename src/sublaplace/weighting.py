"""How much the approximate curvature outside of the subspace counts, fitted to the full Laplace approximation."""

from dataclasses import replace

import torch
from torch import Tensor

from sublaplace.complement import ComplementedPosterior
from sublaplace.jacobians import Jacobians
from sublaplace.jacobians.inputs import num_inputs, select
from sublaplace.likelihoods import Likelihood
from sublaplace.linalg import cholesky
from sublaplace.matrix_free import MatrixFreePrecision
from sublaplace.metrics import kl_gaussian
from sublaplace.precision import BlockPrecision, single
from sublaplace.projectors.context import ProjectorContext

Weighted = ComplementedPosterior | BlockPrecision
WEIGHTS = tuple(2.0**k for k in range(-6, 7))
_FEW_INPUTS = 16  # for which the exact covariance comes from conjugate gradients, where the exact GGN does not fit


def with_fitted_weight(
    posterior: Weighted, context: ProjectorContext, inputs: Jacobians, in_the_data: bool
) -> Weighted:
    r"""The posterior with the weight w of K in Ψ_K = (wK + λ)⁻¹ that brings it nearest to the full one.

    KFAC misses the size of the curvature by a factor that differs from network to network. w is the power of two,
    between 2⁻⁶ and 2⁶, at which the joint predictive of the given inputs diverges least from that of the full Laplace
    approximation. P should not be built from them. Labels are not needed.

    Inputs of the training data are better known than new ones. Where the given ones are such, both posteriors are
    compared as they would be if these inputs had not been seen, which takes no pass over the data, see `nearest`.

    Cost: the exact covariance of the inputs (a pass over the data for the GGN where that fits, else one for every
    iteration, for 16 of the inputs), and 13 joint covariances of the posterior.
    """
    exact, inputs = _exact_covariance(context, inputs)
    unseen = context.num_data if in_the_data else None
    return nearest(posterior, exact, inputs, context.stream.likelihood, unseen)


def nearest(
    posterior: Weighted, exact: Tensor, inputs: Jacobians, likelihood: Likelihood, num_data: int | None
) -> Weighted:
    r"""The posterior with the weight at which KL(N(0, Σ + R) ‖ N(0, Σ̃ + R)) of these inputs is least.

    `exact` is Σ over all of them together, R the noise of the outputs. With `num_data`, they are among so many training
    data and are taken out of them: Λ′ = Λ − JᵀHJ gives Σ′ = Σ + Σ H^½ (I − H^½ᵀ Σ H^½)⁻¹ H^½ᵀ Σ, the measured
    products become Λ′Q = ΛQ − JᵀH(JQ), and KFAC, a sum over the data, has (N − n)/N of its size.
    """
    noise = torch.tensor(likelihood.noise_variances, dtype=torch.float64, device=exact.device)
    noise = torch.diag(noise.repeat(len(exact) // len(noise)))
    share, compared = 1.0, posterior
    if num_data is not None:
        roots = _hessian_roots(inputs, likelihood)
        exact = _left_out(exact, roots)
        share = 1 - num_inputs(inputs.inputs) / num_data
        if isinstance(posterior, ComplementedPosterior):
            compared = _measured_without(posterior, inputs, roots)

    def divergence(weight: float) -> float:
        covariance = compared.reweighted(share * weight).joint_covariance(inputs).double()
        return kl_gaussian(exact + noise, covariance + noise)

    return posterior.reweighted(min(WEIGHTS, key=divergence))


def _hessian_roots(inputs: Jacobians, likelihood: Likelihood) -> Tensor:
    """H^½ of every input, with the likelihood's scales: (n, C, K) in float64."""
    outputs = torch.cat([jacobian.outputs for jacobian in inputs])
    cotangents = likelihood.cotangents(outputs).double()
    scales = torch.tensor(likelihood.curvature_scales, dtype=torch.float64, device=outputs.device)
    return (cotangents * scales.sqrt()[:, None]).transpose(1, 2)


def _left_out(exact: Tensor, roots: Tensor) -> Tensor:
    """Σ of inputs that have been taken out of the data, from their Σ with them."""
    n, C, K = roots.shape
    products = (exact.view(n * C, n, 1, C) @ roots).view(n * C, n * K)  # Σ H^½
    leverage = (roots.transpose(1, 2) @ products.view(n, C, n * K)).view(n * K, n * K)
    remaining = torch.eye(n * K, dtype=torch.float64, device=exact.device) - (leverage + leverage.T) / 2
    factor = cholesky(remaining, "What other data say of the inputs that were held back")
    solved = torch.linalg.solve_triangular(factor, products.T, upper=False)
    return exact + solved.T @ solved


def _measured_without(posterior: ComplementedPosterior, inputs: Jacobians, roots: Tensor) -> ComplementedPosterior:
    """The posterior whose products ΛQ miss the data at these inputs; its curvature outside is as it was."""
    inside, prior = posterior.inside, posterior.prior_precision
    removed = inputs.linearization.zero_vectors(posterior.dim)
    in_subspace, start = torch.zeros_like(inside.gram), 0
    for jacobian in inputs:
        H = roots[start : start + jacobian.num_inputs]
        start += jacobian.num_inputs
        rows = inside.projection.apply(jacobian).double()
        curved = H @ (H.transpose(1, 2) @ rows)
        in_subspace += rows.flatten(0, 1).T @ curved.flatten(0, 1)
        jacobian.add_transpose_matmul(curved.to(jacobian.outputs.dtype), removed)
    mixed = {}
    for name, part in posterior.outside.parts.items():
        root = (part.eigenvalues() + prior).rsqrt()
        mixed[name] = posterior.mixed[name] - part.rotate(removed[name]) * root
    curvatures = inside.curvatures - in_subspace / single(inside.scales)
    return replace(posterior, inside=replace(inside, curvatures=curvatures), mixed=mixed)


def _exact_covariance(context: ProjectorContext, inputs: Jacobians) -> tuple[Tensor, Jacobians]:
    """Σ of the inputs, or of the first few, and these."""
    if context.exact_fits():
        return context.exact().joint_covariance(inputs).double(), inputs
    few = Jacobians(inputs.linearization, select(inputs.inputs, slice(0, _FEW_INPUTS)))
    return MatrixFreePrecision(context.stream, context.kfac(), tolerance=1e-3).full_covariance(few).covariance, few
