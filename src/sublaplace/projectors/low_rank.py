"""The paper's projector: the subspace that carries most of the predictive covariance of given inputs."""

import warnings

import torch
from torch import Tensor

from sublaplace.curvature.precision import BlockPrecision, Precision, Solvable
from sublaplace.jacobians.jacobian import Jacobians
from sublaplace.model.linalg import Vectors, dominant_eigenvectors, gram, orthonormalise
from sublaplace.projection import Basis
from sublaplace.projectors.subspace_iteration import dominant_directions
from sublaplace.runtime.memory import require

DENSE_ROWS = 6000
"""Outputs (n·C) of X′ up to which their covariance is formed and decomposed."""


def low_rank(jacobians: Jacobians, precision: Precision, dim: int) -> Basis:
    r"""P = Ψ Jᵀ U_s with U_s the s dominant eigenvectors of M = J Ψ Jᵀ, over the inputs X′ (Theorem 1, Algorithm 1).

    With the exact Ψ = Λ⁻¹ and X′ the inputs to be predicted, no other subspace of this dimension comes closer to
    the full covariance; with KFAC or a diagonal in place of Λ and training inputs it is the paper's practical
    choice. Columns are scaled by the inverse root of their eigenvalue (which makes them orthonormal under Λ) and
    then orthonormalised; every leading span is kept.

    Where the rows B = J Ψ^½ fit into the memory budget they are kept, and P = Ψ^½ Bᵀ U_s needs no second pass. Beyond
    6,000 outputs (and four times the dimension) M is not formed at all, see `dominant_directions`.

    Cost: one pass over X′ (two or more if B does not fit) with C backward passes an input, (nC)²·p/2 for M, (nC)³ for
    its eigenvectors, nC·p·s for P; memory (nC)² + p·s, and nC·p if that fits.
    """
    num_rows = jacobians.num_rows
    tolerance = rank_tolerance(num_rows, jacobians.dtype)
    if num_rows > max(DENSE_ROWS, 4 * dim):
        values, vectors = dominant_directions(jacobians, precision, dim, tolerance)
    else:
        values, vectors = _by_covariance(jacobians, precision, dim, tolerance)
    return basis_of(jacobians, vectors, len(values), dim)


def refined(jacobians: Jacobians, precision: Solvable, start: Basis) -> Basis:
    """P = Ψ Jᵀ U_s for a Ψ that only multiplies vectors, found from the P of an approximation of it.

    Cost: for each of two or three rounds, a pass over X′ and Ψ of s vectors.
    """
    tolerance = rank_tolerance(jacobians.num_rows, jacobians.dtype)
    values, vectors = dominant_directions(jacobians, precision, start.dim, tolerance, 1e-2, start.vectors)
    return basis_of(jacobians, vectors, len(values), start.dim)


def basis_of(jacobians: Jacobians, vectors: Vectors, rank: int, dim: int) -> Basis:
    """P with the span of `rank` vectors, orthonormal, in their memory; a warning if they are fewer than asked for."""
    if not rank:
        raise ValueError(
            "The network's outputs for subspace_inputs do not depend on its parameters: their Jacobian is zero."
        )
    if rank < dim:
        warnings.warn(
            f"dim={dim} is above the numerical rank {rank} of the covariance of the {jacobians.num_rows} "
            f"outputs that the subspace is built from; dim={rank} is used. More subspace inputs raise the rank.",
            stacklevel=3,
        )
    return Basis(jacobians.linearization.layout, orthonormalise(vectors))


def _by_covariance(jacobians: Jacobians, precision: Precision, dim: int, tolerance: float) -> tuple[Tensor, Vectors]:
    """μ and z as in `dominant_directions`, from M itself."""
    require(
        3 * 8 * jacobians.num_rows**2,
        jacobians.device,
        f"The covariance of the {jacobians.num_rows:,} outputs of the subspace inputs, and its eigenvectors,",
        "Choose fewer subspace inputs, as in subspace_inputs=Drawn(100).",
    )
    rows = precision.whitened(jacobians)
    M = precision.joint_covariance(jacobians) if rows is None else gram(rows)
    values, U = dominant_eigenvectors(M, dim, tolerance)
    if not len(values):
        return values, {}
    weights = (U / values.sqrt()).to(jacobians.dtype)
    if rows is not None:
        assert isinstance(precision, BlockPrecision)  # the others form no rows
        vectors = jacobians.linearization.zero_vectors(weights.shape[1])
        for name, part in vectors.items():
            torch.mm(weights.T, rows.pop(name), out=part)
        return values, precision.unwhitened(vectors)
    return values, precision.solve(transpose_products(jacobians, weights))


def transpose_products(jacobians: Jacobians, weights: Tensor) -> Vectors:
    """Jᵀ U for U (nC, r), by a pass over the Jacobians."""
    vectors = jacobians.linearization.zero_vectors(weights.shape[1])
    start = 0
    for jacobian in jacobians:
        n, K = jacobian.num_inputs, jacobian.num_rows
        jacobian.add_transpose_matmul(weights[start : start + n * K].view(n, K, -1), vectors)
        start += n * K
        del jacobian  # or it would stand in memory beside the next one
    return vectors


def rank_tolerance(size: int, dtype: torch.dtype) -> float:
    """The ratio to the largest eigenvalue of M = B Bᵀ below which an eigenvalue is rounding.

    M is formed in float64; the entries of B carry the rounding of the model's dtype, relative to its largest singular
    value, which is the root of M's largest eigenvalue.
    """
    return size * max(torch.finfo(torch.float64).eps, 10 * torch.finfo(dtype).eps ** 2)
