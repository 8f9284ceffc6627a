"""The dominant directions of a predictive covariance over any number of inputs, without forming the covariance."""

from collections.abc import Callable, Iterable
from math import ceil

import torch
from torch import Tensor

from sublaplace.curvature.precision import Solvable
from sublaplace.jacobians.jacobian import Jacobian, Jacobians
from sublaplace.model.linalg import Vectors, combine, cross_gram
from sublaplace.runtime.memory import require

_MOST_PASSES = 30
_SKETCHED_ROWS, _SKETCHED_BYTES = 8, 2**28
_ROWS_AT_ONCE = 2**16  # that are converted to float64


def dominant_directions(
    jacobians: Jacobians,
    precision: Solvable,
    dim: int,
    rank_tolerance: float,
    tolerance: float = 1e-4,
    start: Vectors | None = None,
    most_passes: int = _MOST_PASSES,
) -> tuple[Tensor, Vectors]:
    """Return the s largest eigenvalues μ of M = J Λ⁻¹ Jᵀ, descending, and z = Λ⁻¹Jᵀu/√μ for its eigenvectors u.

    M u = μ u is equivalent to JᵀJ z = μ Λ z, a problem in parameter space, whose size does not depend on the number of
    inputs. Subspace iteration repeatedly multiplies a block Z of r vectors, a few more than s, by Λ⁻¹JᵀJ. After every
    pass over the inputs, a Rayleigh–Ritz step takes the best combinations of the vectors; ZᵀΛZ follows from Z = Λ⁻¹W.
    The iteration ends when the sum of the s leading μ, the captured trace, grows by less than `tolerance` of itself.

    Cost: usually 5 to 15 passes, each with C backward passes and 2·C·p·r multiplications per input, and Λ⁻¹ times r
    vectors, where r is about 1.2·s; memory 2·p·r, independent of the number of inputs.

    Args:
        jacobians: J.
        precision: Λ.
        dim: s.
        rank_tolerance: eigenvalues below this share of the largest eigenvalue are rounding errors and are dropped.
        tolerance: the relative growth of the captured trace at which the iteration ends.
        start: r initial directions, for example from an approximation of Λ; None: random ones.
        most_passes: how many Rayleigh–Ritz steps there are at the most.

    Raises:
        MemoryError: if the vectors do not fit into memory.
    """
    layout, total_rows = jacobians.linearization.layout, jacobians.num_rows
    r = min(widened(dim), total_rows, layout.num_parameters)
    if start is not None:
        r = len(next(iter(start.values())))
    like = torch.empty(0, dtype=jacobians.dtype, device=jacobians.device)
    require(
        2 * r * layout.num_parameters * like.element_size() + jacobians.memory_budget,
        like.device,
        f"The search for {dim:,} directions among {layout.num_parameters:,} parameters",
        "Choose a smaller dim, or fewer parameters with requires_grad=True.",
    )
    generator = torch.Generator().manual_seed(0)

    def first(jacobian: Jacobian) -> Tensor:
        if start is not None:
            return jacobian.matmul(start)
        shape = (jacobian.num_inputs, jacobian.num_rows, r)
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(like)

    W = jacobians.linearization.zero_vectors(r)
    _add_products(jacobians, first, W)
    captured = 0.0
    for _ in range(most_passes):
        Z = precision.solve({name: part.clone() for name, part in W.items()})
        metric = cross_gram(Z, W)
        for part in W.values():
            part.zero_()
        projected = torch.zeros_like(metric)

        def rows_of(jacobian: Jacobian, Z: Vectors = Z, projected: Tensor = projected) -> Tensor:
            rows = jacobian.matmul(Z)
            for some in rows.flatten(0, 1).split(_ROWS_AT_ONCE):
                exact = some.double()
                projected.addmm_(exact.T, exact)
            return rows

        _add_products(jacobians, rows_of, W)
        del Z
        values, mix = _ritz(projected, metric, rank_tolerance)
        if not len(values):
            break
        W = combine((mix / values).T, W)
        before, captured = captured, float(values[:dim].sum())
        if captured - before <= tolerance * captured:
            break
    leading = {name: part[:dim] for name, part in W.items()}
    return values[:dim], precision.solve(leading)


def widened(dim: int) -> int:
    """Return how many vectors are multiplied to find `dim` directions: more converge faster."""
    return dim + max(10, dim // 5)


def sketched_rows(dim: int, num_inputs: int, bytes_per_row: int) -> int:
    """Return how many random combinations of many outputs a search starts from, per input.

    Eight; more where there are few inputs, so that there are two for each vector; and fewer where their rows would take
    more than 256 MB, as long as there are four for each vector.
    """
    least = widened(dim) / num_inputs
    fitting = max(ceil(4 * least), _SKETCHED_BYTES // (num_inputs * bytes_per_row))
    return max(ceil(2 * least), min(_SKETCHED_ROWS, fitting))


def _add_products(jacobians: Iterable[Jacobian], weights: Callable[[Jacobian], Tensor], into: Vectors) -> None:
    """Add Jᵀ U to `into`, where `weights` returns U (n, K, r) for the Jacobian of each chunk."""
    for jacobian in jacobians:
        jacobian.add_transpose_matmul(weights(jacobian), into)
        del jacobian  # frees its memory before the next one is computed


def _ritz(projected: Tensor, metric: Tensor, rank_tolerance: float) -> tuple[Tensor, Tensor]:
    """Return μ, descending, and C with Cᵀ metric C = I and Cᵀ projected C = diag(μ), above rounding level."""
    length = metric.diagonal().clamp_min(torch.finfo(metric.dtype).tiny).rsqrt()
    values, vectors = torch.linalg.eigh(_symmetric(metric * length * length[:, None]))
    kept = values > rank_tolerance * values[-1].clamp_min(0)
    roots = length[:, None] * vectors[:, kept] * values[kept].rsqrt()
    values, vectors = torch.linalg.eigh(_symmetric(roots.T @ projected @ roots))
    values, vectors = values.flip(0), vectors.flip(1)
    kept = values > rank_tolerance * values[:1].clamp_min(0)
    return values[kept], (roots @ vectors)[:, kept]


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2
