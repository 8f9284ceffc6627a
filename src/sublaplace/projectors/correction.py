"""The projector for a KFAC complement: the subspace covers the directions in which KFAC is least accurate."""

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
    """Return P = Ψ Jᵀ Z, where Z holds the s output directions of X′ in which KFAC is least accurate.

    With the exact Σ = JΨJᵀ, KFAC's Σ_K = JΨ_KJᵀ and the noise R of the outputs, the divergence of N(0, Σ_K + R) from
    N(0, Σ + R) is a sum over the solutions of (Σ_K + R) z = ρ (Σ + R) z,

        KL = ½ Σ_z (1/ρ − 1 + ln ρ).

    Z holds the solutions with the largest terms. With KFAC as complement, the posterior in span P is exact along
    them, Σ̃Z = ΣZ. Directions in which KFAC is exact follow in the order of their variance.

    Cost: the exact GGN, (nC)²·p for the joint covariances of X′, and O((nC)³); memory 5·(nC)² in addition.

    Args:
        jacobians: J of X′.
        exact: the exact precision Ψ⁻¹.
        kfac: KFAC's precision Ψ_K⁻¹.
        noise_variances: the diagonal of R for one input: one number, or one per output.
        dim: s.

    Raises:
        MemoryError: if the covariances do not fit into memory.
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
    noise = noise.repeat(num_rows // len(noise))  # one number, or one per output of an input
    Z = _most_mistaken(covariance, kfac.joint_covariance(jacobians).double(), noise, dim, jacobians.dtype)
    vectors = exact.solve(transpose_products(jacobians, Z.to(jacobians.dtype)))
    return basis_of(jacobians, vectors, Z.shape[1], dim)


def _most_mistaken(covariance: Tensor, approximation: Tensor, noise: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return Z (nC, at most s) with columns of unit variance, without directions whose variance is rounding error."""
    tolerance = rank_tolerance(len(noise), dtype)
    # A small addition to the noise keeps the sum positive definite even without noise.
    total = covariance + torch.diag(noise + tolerance * covariance.diagonal().mean())
    root = cholesky(total, "The covariance of the subspace inputs' outputs")
    whitened = torch.linalg.solve_triangular(root, approximation - covariance, upper=False)
    whitened = torch.linalg.solve_triangular(root, whitened.T, upper=False)
    excess, vectors = torch.linalg.eigh((whitened + whitened.T) / 2)
    Z = torch.linalg.solve_triangular(root.T, vectors, upper=True)
    ratios = (1 + excess).clamp_min(torch.finfo(torch.float64).eps)
    divergence = (1 / ratios - 1 + ratios.log()) / 2
    variance = (Z * (covariance @ Z)).sum(0)  # between 0 and 1
    # The variance, times 1e-9, breaks ties between directions in which KFAC is exact.
    order = (divergence + 1e-9 * variance).argsort(descending=True)
    kept = order[variance[order] > tolerance * variance.max()][:dim]
    return Z[:, kept] * variance[kept].rsqrt()
