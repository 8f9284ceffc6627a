"""How much the approximate curvature outside of the subspace counts, fitted to the full Laplace approximation."""

import torch
from torch import Tensor

from sublaplace.complement import ComplementedPosterior
from sublaplace.jacobians import Jacobians
from sublaplace.jacobians.inputs import select
from sublaplace.matrix_free import MatrixFreePrecision
from sublaplace.metrics import kl_gaussian
from sublaplace.precision import BlockPrecision
from sublaplace.projectors.context import ProjectorContext

Weighted = ComplementedPosterior | BlockPrecision
WEIGHTS = tuple(2.0**k for k in range(-6, 7))
_FEW_INPUTS = 16  # for which the exact covariance comes from conjugate gradients, where the exact GGN does not fit


def with_fitted_weight(posterior: Weighted, context: ProjectorContext, inputs: Jacobians) -> Weighted:
    r"""The posterior with the weight w of K in Ψ_K = (wK + λ)⁻¹ that brings it nearest to the full one.

    KFAC misses the size of the curvature by a factor that differs from network to network. w is the power of two,
    between 2⁻⁶ and 2⁶, at which the joint predictive of the given inputs diverges least from that of the full Laplace
    approximation. The inputs should not be among those that P was built from. Labels are not needed.

    Cost: the exact covariance of the inputs (a pass over the data for the GGN where that fits, else one for every
    iteration, for 16 of the inputs), and 13 joint covariances of the posterior.
    """
    exact, inputs = _exact_covariance(context, inputs)
    return nearest(posterior, exact, inputs, context.stream.likelihood.noise_variances)


def nearest(posterior: Weighted, exact: Tensor, inputs: Jacobians, noise_variances: tuple[float, ...]) -> Weighted:
    """The posterior with the weight at which KL(N(0, Σ + R) ‖ N(0, Σ̃ + R)) of these inputs is least.

    `exact` is Σ over all of them together, R the noise of the outputs.
    """
    noise = torch.tensor(noise_variances, dtype=torch.float64, device=exact.device)
    noise = torch.diag(noise.repeat(len(exact) // len(noise)))

    def divergence(weight: float) -> float:
        covariance = posterior.reweighted(weight).joint_covariance(inputs).double()
        return kl_gaussian(exact + noise, covariance + noise)

    return posterior.reweighted(min(WEIGHTS, key=divergence))


def _exact_covariance(context: ProjectorContext, inputs: Jacobians) -> tuple[Tensor, Jacobians]:
    """Σ of the inputs, or of the first few, and these."""
    if context.exact_fits():
        return context.exact().joint_covariance(inputs).double(), inputs
    few = Jacobians(inputs.linearization, select(inputs.inputs, slice(0, _FEW_INPUTS)))
    return MatrixFreePrecision(context.stream, context.kfac(), tolerance=1e-3).full_covariance(few).covariance, few
