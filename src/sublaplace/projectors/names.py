"""The projectors by name: the one place where a new one is entered."""

import torch

from sublaplace.distributed import unshared
from sublaplace.matrix_free import MatrixFreePrecision
from sublaplace.precision import isotropic_precision
from sublaplace.projection import Projection, Subset
from sublaplace.projectors.context import Projector, ProjectorContext
from sublaplace.projectors.correction import correction
from sublaplace.projectors.low_rank import low_rank, refined
from sublaplace.projectors.subset import diagonal_variances, largest, last_layer
from sublaplace.projectors.swag import swag_variances


def _isotropic(context: ProjectorContext) -> Projection:
    like = torch.empty(0, dtype=context.linearization.dtype, device=context.linearization.device)
    precision = isotropic_precision(context.linearization.layout, like, context.prior_precision)
    return low_rank(context.subspace_jacobians, precision, context.dim)


def _exact(context: ProjectorContext) -> Projection:
    """With the exact Λ as a matrix; where that does not fit, by solutions with it, from the subspace of KFAC."""
    if context.exact_fits():
        return low_rank(context.subspace_jacobians, context.exact(), context.dim)
    matrix_free = MatrixFreePrecision(context.stream, context.kfac(), tolerance=1e-3)
    start = low_rank(context.subspace_jacobians, context.kfac(), context.dim)
    return refined(context.subspace_jacobians, matrix_free, start)


def _correction(context: ProjectorContext) -> Projection:
    noise = context.stream.likelihood.noise_variances
    return correction(context.subspace_jacobians, context.exact(), context.kfac(), noise, context.dim)


def _magnitude(context: ProjectorContext) -> Subset:
    linearization = context.linearization
    return largest(linearization, linearization.layout.flat(linearization.model).abs(), context.dim)


def _swag(context: ProjectorContext) -> Subset:
    stream = context.stream
    scores = swag_variances(
        stream.linearization,
        unshared(stream.loader),
        stream.likelihood,
        progress=stream.progress,
        checkpoint=stream.checkpoint,
    )
    return largest(stream.linearization, scores, context.dim)


PROJECTORS: dict[str, Projector] = {
    "lowrank-kfac": lambda c: low_rank(c.subspace_jacobians, c.kfac(), c.dim),
    "lowrank-diagonal": lambda c: low_rank(c.subspace_jacobians, c.diagonal(), c.dim),
    "lowrank-isotropic": _isotropic,
    "lowrank-ggn": _exact,
    "lowrank-correction": _correction,
    "subset-magnitude": _magnitude,
    "subset-diagonal": lambda c: largest(c.linearization, diagonal_variances(c.diagonal()), c.dim),
    "subset-swag": _swag,
    "last-layer": lambda c: last_layer(c.linearization, c.num_outputs),
}
"""From names to builders; "full" is no projection and has no entry."""
