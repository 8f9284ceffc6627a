"""The projectors by name: the one place where a new one is entered."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sublaplace.curvature.matrix_free import MatrixFreePrecision
from sublaplace.curvature.precision import isotropic_precision
from sublaplace.projection import Projection, Subset
from sublaplace.projectors.context import ProjectorContext
from sublaplace.projectors.correction import correction
from sublaplace.projectors.low_rank import low_rank, refined
from sublaplace.projectors.subset import diagonal_variances, largest, last_layer
from sublaplace.projectors.swag import swag_variances
from sublaplace.runtime.distributed import unshared


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


def _low_rank_kfac(context: ProjectorContext) -> Projection:
    return low_rank(context.subspace_jacobians, context.kfac(), context.dim)


def _low_rank_diagonal(context: ProjectorContext) -> Projection:
    return low_rank(context.subspace_jacobians, context.diagonal(), context.dim)


def _subset_diagonal(context: ProjectorContext) -> Subset:
    return largest(context.linearization, diagonal_variances(context.diagonal()), context.dim)


def _last_layer(context: ProjectorContext) -> Subset:
    return last_layer(context.linearization, context.num_outputs)


def _no_reduction(context: ProjectorContext) -> Projection:
    raise ValueError("projector='full' keeps all parameters; it has no projection.")


Builder = Callable[[ProjectorContext], Projection]


@dataclass(frozen=True)
class Projector:
    """How P is chosen, and what that takes; `projector` makes one from a function.

    Args:
        name: identifies it in files, checkpoints and summaries; None: an anonymous function.
        build: from a context to a `Projection` of at most `context.dim` dimensions.
        needs_inputs: P is built from the inputs X′.
        stores_matrix: P is p × s numbers, not a choice of single parameters.
        needs_exact: it asks for the exact GGN.
        own_dim: it has a dimension of its own and does not take `dim`.
        reduces: whether there is a P at all; "full" has none.
    """

    name: str | None
    build: Builder
    needs_inputs: bool = True
    stores_matrix: bool = True
    needs_exact: bool = False
    own_dim: bool = False
    reduces: bool = True

    def __call__(self, context: ProjectorContext) -> Projection:
        return self.build(context)

    @property
    def label(self) -> str:
        """The name for people."""
        return self.name or str(getattr(self.build, "__name__", "custom"))


PROJECTORS: dict[str, Projector] = {}
"""By name; `projector` enters new ones."""


def projector(
    name: str,
    *,
    needs_inputs: bool = True,
    stores_matrix: bool = True,
    needs_exact: bool = False,
    own_dim: bool = False,
) -> Callable[[Builder], Projector]:
    """Make a projector of a function from a `ProjectorContext` to a `Projection`, and enter it under its name.

    Args:
        name: what ``SubspaceLaplace(projector=name)`` and saved files call it.
        needs_inputs: P is built from the inputs X′, which are drawn only then.
        stores_matrix: P is p × s numbers (a `Basis`); False for a choice of single parameters (a `Subset`).
        needs_exact: it asks for the exact GGN.
        own_dim: it has a dimension of its own and does not take `dim`.

    Raises:
        ValueError: if the name is taken by another function.
    """

    def entered(build: Builder) -> Projector:
        made = Projector(name, build, needs_inputs, stores_matrix, needs_exact, own_dim)
        known = PROJECTORS.get(name)
        if known is not None and known.build.__qualname__ != build.__qualname__:
            raise ValueError(f"There is a projector '{name}' already; choose another name.")
        PROJECTORS[name] = made
        return made

    return entered


for _entry in (
    Projector("lowrank-kfac", _low_rank_kfac),
    Projector("lowrank-diagonal", _low_rank_diagonal),
    Projector("lowrank-isotropic", _isotropic),
    Projector("lowrank-ggn", _exact, needs_exact=True),
    Projector("lowrank-correction", _correction, needs_exact=True),
    Projector("subset-magnitude", _magnitude, needs_inputs=False, stores_matrix=False),
    Projector("subset-diagonal", _subset_diagonal, needs_inputs=False, stores_matrix=False),
    Projector("subset-swag", _swag, needs_inputs=False, stores_matrix=False),
    Projector("last-layer", _last_layer, needs_inputs=False, stores_matrix=False, own_dim=True),
):
    assert _entry.name is not None
    PROJECTORS[_entry.name] = _entry

FULL = Projector("full", _no_reduction, needs_inputs=False, stores_matrix=False, own_dim=True, reduces=False)
"""All parameters, without a reduction."""


def restored_projector(name: str | None) -> Projector | None:
    """Return the projector of a saved posterior; one that is not known here is good for all but another fit."""
    if name is None or name == FULL.name:
        return None if name is None else FULL
    return PROJECTORS.get(name) or Projector(name, _unknown)


def _unknown(context: ProjectorContext) -> Projection:
    raise RuntimeError("This posterior was loaded, and its projector is not defined here: give one to fit again.")
