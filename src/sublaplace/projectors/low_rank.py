"""The paper's projector: the subspace that captures most of the predictive covariance of given inputs."""

import torch
from torch import Tensor

from sublaplace.curvature.precision import BlockPrecision, Precision, Solvable
from sublaplace.jacobians.jacobian import Jacobians
from sublaplace.model.linalg import Vectors, dominant_eigenvectors, gram, orthonormalise
from sublaplace.projection import Basis
from sublaplace.projectors.subspace_iteration import dominant_directions, widened
from sublaplace.runtime.memory import require
from sublaplace.runtime.warning import warn

DENSE_ROWS = 6000
"""Largest number of outputs (n·C) of X′ whose covariance is formed and decomposed."""


def low_rank(jacobians: Jacobians, precision: Precision, dim: int) -> Basis:
    """Return P = Ψ Jᵀ U_s, where U_s holds the s dominant eigenvectors of M = J Ψ Jᵀ over the inputs X′.

    This is Theorem 1 and Algorithm 1 of the paper. If Ψ = Λ⁻¹ is exact and X′ are the test inputs, no other subspace of
    this dimension comes closer to the full covariance. With training inputs, and KFAC or a diagonal in place of Λ, it
    is the paper's practical choice.

    Columns are scaled by the inverse root of their eigenvalue, which makes them orthonormal under Λ, and then
    orthonormalised. The span of the first k columns stays the same for every k. If the rows B = J Ψ^½ fit into the
    memory budget, P = Ψ^½ Bᵀ U_s needs no second pass. M is not formed if X′ has more than 6,000 outputs and more than
    4·s (see `dominant_directions`).

    If the Jacobians are a sketch of those of many outputs, its subspace, a fifth larger, is the start of a search with
    all outputs. Two multiplications by Ψ JᵀJ and a Rayleigh–Ritz step between them follow, by products with vectors.

    Cost: one pass over X′ (two or more if B does not fit) with C backward passes per input, (nC)²·p/2 for M, O((nC)³)
    for its eigenvectors, and nC·p·s for P; memory (nC)² + p·s, and nC·p if it fits.

    Args:
        jacobians: J of X′.
        precision: Λ or an approximation of it.
        dim: s; fewer columns and a warning if the numerical rank of M is smaller.

    Raises:
        ValueError: if the Jacobian is zero.
        MemoryError: if M does not fit into memory.
    """
    num_rows = jacobians.num_rows
    tolerance = rank_tolerance(num_rows, jacobians.dtype)
    sketched = jacobians.directions is not None
    count = widened(dim) if sketched else dim
    if num_rows > max(DENSE_ROWS, 4 * count):
        values, vectors = dominant_directions(jacobians, precision, count, tolerance)
    else:
        values, vectors = _by_covariance(jacobians, precision, count, tolerance)
    if sketched and len(values):
        whole = jacobians.whole(len(values))
        tolerance = rank_tolerance(whole.num_rows, whole.dtype)
        values, vectors = dominant_directions(whole, precision, dim, tolerance, start=vectors, most_passes=1)
    return basis_of(jacobians, vectors, len(values), dim)


def refined(jacobians: Jacobians, precision: Solvable, start: Basis) -> Basis:
    """Return P = Ψ Jᵀ U_s for a Ψ that is only available through products with vectors.

    Cost: two or three rounds, each with one pass over X′ and the product of Ψ with s vectors.

    Args:
        jacobians: J of X′.
        precision: Ψ⁻¹.
        start: the P of an approximation of Ψ, from which the search starts.
    """
    tolerance = rank_tolerance(jacobians.num_rows, jacobians.dtype)
    values, vectors = dominant_directions(jacobians, precision, start.dim, tolerance, 1e-2, start.vectors)
    return basis_of(jacobians, vectors, len(values), start.dim)


def basis_of(jacobians: Jacobians, vectors: Vectors, rank: int, dim: int) -> Basis:
    """Return the basis with the span of `rank` vectors, orthonormalised in place; warn if `rank` is below `dim`.

    Raises:
        ValueError: if `rank` is zero.
    """
    if not rank:
        raise ValueError(
            "The network's outputs for subspace_inputs do not depend on its parameters: their Jacobian is zero."
        )
    if rank < dim:
        warn(
            f"dim={dim} is above the numerical rank {rank} of the covariance of the {jacobians.num_rows} "
            f"outputs that the subspace is built from; dim={rank} is used. More subspace inputs raise the rank."
        )
    return Basis(jacobians.linearization.layout, orthonormalise(vectors))


def _by_covariance(jacobians: Jacobians, precision: Precision, dim: int, tolerance: float) -> tuple[Tensor, Vectors]:
    """Return the same as `dominant_directions`, from the eigenvectors of M."""
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
        assert isinstance(precision, BlockPrecision)  # `whitened` is None for all others
        vectors = jacobians.linearization.zero_vectors(weights.shape[1])
        for name, part in vectors.items():
            torch.mm(weights.T, rows.pop(name), out=part)
        return values, precision.unwhitened(vectors)
    return values, precision.solve(transpose_products(jacobians, weights))


def transpose_products(jacobians: Jacobians, weights: Tensor) -> Vectors:
    """Return Jᵀ U for U (nC, r), in one pass over the Jacobians."""
    vectors = jacobians.linearization.zero_vectors(weights.shape[1])
    start = 0
    for jacobian in jacobians:
        n, K = jacobian.num_inputs, jacobian.num_rows
        jacobian.add_transpose_matmul(weights[start : start + n * K].view(n, K, -1), vectors)
        start += n * K
        del jacobian  # frees its memory before the next one is computed
    return vectors


def rank_tolerance(size: int, dtype: torch.dtype) -> float:
    """Return the ratio to the largest eigenvalue of M = B Bᵀ below which an eigenvalue is rounding error.

    M is formed in float64. The entries of B carry the rounding errors of the model's dtype, relative to the largest
    singular value of B. Its square is the largest eigenvalue of M.
    """
    return size * max(torch.finfo(torch.float64).eps, 10 * torch.finfo(dtype).eps ** 2)
