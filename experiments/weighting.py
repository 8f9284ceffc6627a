"""The weight of KFAC outside the subspace, as the recorded results have it: a power of two.

The library fits the weight on a finer scale and from fewer data; see `sublaplace.posteriors.weighting`.
"""

import torch
from torch import Tensor

from sublaplace import ComplementedPosterior, Jacobian, Jacobians, Likelihood

WEIGHTS = tuple(2.0**k for k in range(-6, 7))


def nearest_power(
    posterior: ComplementedPosterior, exact: Tensor, inputs: Jacobians, likelihood: Likelihood
) -> ComplementedPosterior:
    """Return the posterior with the weight whose predictives diverge least from the predictives of `exact`.

    The inputs are training data, which the posterior knows better than new ones. Each input is therefore taken out,
    Λ′ = Λ − JᵀHJ, which by Woodbury's identity gives

        Σ′ = (I − ΣH)⁻¹ Σ,    Σ̃′ = G Σ_P + G (J_c Ψ_K J_cᵀ) Gᵀ  with G = (I − Σ_P H)⁻¹.

    The weight stays 1 where no other weight is better by more than rounding. Cost: a prediction per weight.

    Args:
        posterior: exact in the subspace, with KFAC outside.
        exact: Σ of the full posterior for each input, (n, C, C).
        inputs: training inputs that P was not built from.
        likelihood: the likelihood of the data, whose Hessian is H.
    """
    divergences = torch.zeros(len(WEIGHTS), dtype=torch.float64)
    start = 0
    for jacobian in inputs:
        covariance = exact[start : start + jacobian.num_inputs]
        start += jacobian.num_inputs
        identity = torch.eye(covariance.shape[1], dtype=torch.float64)
        H = _hessians(jacobian, likelihood)
        unseen = torch.linalg.solve(identity - covariance @ H, covariance)
        inside = posterior.subspace.covariance(jacobian).double()
        G = torch.linalg.inv(identity - inside @ H)
        for index, weight in enumerate(WEIGHTS):
            outside = posterior.reweighted(weight).covariance(jacobian).double() - inside
            found = G @ inside + G @ outside @ G.transpose(1, 2)
            divergences[index] += likelihood.predictive_divergences(jacobian.outputs, unseen, found).sum()
    divergences = divergences.nan_to_num(nan=torch.inf)
    best, plain = int(divergences.argmin()), WEIGHTS.index(1.0)
    better = divergences[plain] - divergences[best] > 1e-6 * divergences[plain] + 1e-13 * len(exact)
    return posterior.reweighted(WEIGHTS[best if better else plain])


def _hessians(jacobian: Jacobian, likelihood: Likelihood) -> Tensor:
    """Return H for each input: (n, C, C) in float64."""
    roots = likelihood.hessian_root(jacobian.outputs).double()
    scales = torch.tensor(likelihood.curvature_scales, dtype=torch.float64)
    return roots.transpose(1, 2) @ (scales[:, None] * roots)
