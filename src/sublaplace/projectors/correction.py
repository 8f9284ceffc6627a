"""The projector for KFAC outside of the subspace: it takes in what KFAC gets wrong and leaves out the rest."""

import torch
from torch import Tensor

from sublaplace.curvature.precision import BlockPrecision, Precision
from sublaplace.jacobians.jacobian import Jacobians
from sublaplace.model.linalg import cholesky
from sublaplace.projection import Basis
from sublaplace.projectors.low_rank import basis_of, rank_tolerance, transpose_products
from sublaplace.runtime.memory import require


def correction(
    jacobians: Jacobians, exact: Precision, kfac: BlockPrecision, noise_variances: tuple[float, ...], dim: int
) -> Basis:
    r"""P = Ψ Jᵀ Z, with Z the s output directions of X′ along which KFAC is furthest from the exact covariance.

    With the exact Σ = JΨJᵀ, KFAC's Σ_K = JΨ_KJᵀ and the noise R of the outputs, the divergence of N(0, Σ_K + R) from
    N(0, Σ + R) is a sum over the solutions of (Σ_K + R) z = ρ (Σ + R) z,

        KL = ½ Σ_z (1/ρ − 1 + ln ρ),

    and Z are those with the largest summands. With KFAC as its complement the posterior in span P is exact along
    them, Σ̃Z = ΣZ. Directions about which KFAC is right follow in the order of their variance.

    Cost: the exact GGN; joint covariances of X′, (nC)²·p; (nC)³; memory 5·(nC)² beside them.
    """
    num_rows = jacobians.num_rows
    require(
        5 * 8 * num_rows**2,
        jacobians.device,
        f"The covariances of the {num_rows:,} outputs of the subspace inputs",
        "Choose fewer subspace inputs, as in subspace_inputs=Drawn(100).",
    )
    covariance = exact.joint_covariance(jacobians).double()
    noise = torch.tensor(noise_variances, dtype=torch.float64, device=covariance.device)
    noise = noise.repeat(num_rows // len(noise))  # given for one output, or for all of an input
    Z = _most_mistaken(covariance, kfac.joint_covariance(jacobians).double(), noise, dim, jacobians.dtype)
    vectors = exact.solve(transpose_products(jacobians, Z.to(jacobians.dtype)))
    return basis_of(jacobians, vectors, Z.shape[1], dim)


def _most_mistaken(covariance: Tensor, approximation: Tensor, noise: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Z: (nC, at most s), every column of unit variance; without directions that have none beyond rounding."""
    tolerance = rank_tolerance(len(noise), dtype)
    # A little is added to the noise, which may be zero next to the covariance.
    total = covariance + torch.diag(noise + tolerance * covariance.diagonal().mean())
    root = cholesky(total, "The covariance of the subspace inputs' outputs")
    whitened = torch.linalg.solve_triangular(root, approximation - covariance, upper=False)
    whitened = torch.linalg.solve_triangular(root, whitened.T, upper=False)
    excess, vectors = torch.linalg.eigh((whitened + whitened.T) / 2)
    Z = torch.linalg.solve_triangular(root.T, vectors, upper=True)
    ratios = (1 + excess).clamp_min(torch.finfo(torch.float64).eps)
    divergence = (1 / ratios - 1 + ratios.log()) / 2
    variance = (Z * (covariance @ Z)).sum(0)  # between 0 and 1
    # 1e-9 of the variance decides between directions about which KFAC is right.
    order = (divergence + 1e-9 * variance).argsort(descending=True)
    kept = order[variance[order] > tolerance * variance.max()][:dim]
    return Z[:, kept] * variance[kept].rsqrt()
