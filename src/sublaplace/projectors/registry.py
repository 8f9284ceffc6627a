"""The registry of projectors by name."""

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
    """Use the exact Λ as a matrix if it fits; otherwise refine KFAC's subspace by solving linear systems with Λ."""
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
    layout = context.linearization.output_layout
    return last_layer(context.linearization, (context.num_outputs,) if layout is None else layout.shape)


def _no_reduction(context: ProjectorContext) -> Projection:
    raise ValueError("projector='full' keeps all parameters; it has no projection.")


Builder = Callable[[ProjectorContext], Projection]


@dataclass(frozen=True)
class Projector:
    """A function that builds P, with its name and requirements; the decorator `projector` creates one.

    Args:
        name: identifies the projector in files, checkpoints and summaries; None: an anonymous function.
        build: a function from a context to a `Projection` with at most `context.dim` dimensions.
        needs_inputs: whether P depends on the inputs X′. If so, "auto" means KFAC outside, and leave-one-out for the λ
            of a likelihood with probabilities. If not, "auto" means nothing outside, and the evidence for λ.
        stores_matrix: whether P is a p × s matrix rather than a subset of single parameters.
        needs_exact: whether it uses the exact GGN; for callers that select projectors.
        own_dim: whether it determines its own dimension; `context.dim` is then p.
        reduces: whether there is a P; "full" has none.
        last_layer: whether P covers the last linear layer, whose curvature needs no backward pass.
    """

    name: str | None
    build: Builder
    needs_inputs: bool = True
    stores_matrix: bool = True
    needs_exact: bool = False
    own_dim: bool = False
    reduces: bool = True
    last_layer: bool = False

    def __call__(self, context: ProjectorContext) -> Projection:
        """Return the projection for a context."""
        return self.build(context)

    @property
    def label(self) -> str:
        """The name to display."""
        return self.name or str(getattr(self.build, "__name__", "custom"))


PROJECTORS: dict[str, Projector] = {}
"""All projectors by name; the decorator `projector` adds new ones."""


def projector(
    name: str,
    *,
    needs_inputs: bool = True,
    stores_matrix: bool = True,
    needs_exact: bool = False,
    own_dim: bool = False,
) -> Callable[[Builder], Projector]:
    """Register a function from a `ProjectorContext` to a `Projection` as a projector.

    Args:
        name: the name in ``SubspaceLaplace(projector=name)`` and in saved files.
        needs_inputs: whether P depends on the inputs X′, which are drawn only in this case. It also decides what
            "auto" stands for in `complement` and `prior_precision`, see `Projector`.
        stores_matrix: whether P is a p × s matrix (a `Basis`) rather than a subset of single parameters (a `Subset`).
        needs_exact: whether it uses the exact GGN; for callers that select projectors.
        own_dim: whether it determines its own dimension; `context.dim` is then p.

    Returns:
        A decorator that turns the function into a `Projector`.

    Raises:
        ValueError: if another function has the same name.
    """

    def entered(build: Builder) -> Projector:
        made = Projector(name, build, needs_inputs, stores_matrix, needs_exact, own_dim)
        known = FULL if name == FULL.name else PROJECTORS.get(name)
        if known is not None and not _same_function(known.build, build):
            raise ValueError(f"There is a projector '{name}' already; choose another name.")
        PROJECTORS[name] = made
        return made

    return entered


def _same_function(one: Builder, other: Builder) -> bool:
    """Return whether two functions are the same or, as after running a notebook cell again, have the same name."""
    names = [(getattr(f, "__module__", None), getattr(f, "__qualname__", "<lambda>")) for f in (one, other)]
    return one is other or (names[0] == names[1] and not names[0][1].endswith("<lambda>"))


for _entry in (
    Projector("lowrank-kfac", _low_rank_kfac),
    Projector("lowrank-diagonal", _low_rank_diagonal),
    Projector("lowrank-isotropic", _isotropic),
    Projector("lowrank-ggn", _exact, needs_exact=True),
    Projector("lowrank-correction", _correction, needs_exact=True),
    Projector("subset-magnitude", _magnitude, needs_inputs=False, stores_matrix=False),
    Projector("subset-diagonal", _subset_diagonal, needs_inputs=False, stores_matrix=False),
    Projector("subset-swag", _swag, needs_inputs=False, stores_matrix=False),
    Projector("last-layer", _last_layer, needs_inputs=False, stores_matrix=False, own_dim=True, last_layer=True),
):
    assert _entry.name is not None
    PROJECTORS[_entry.name] = _entry

FULL = Projector("full", _no_reduction, needs_inputs=False, stores_matrix=False, own_dim=True, reduces=False)
"""The posterior over all parameters, without a projection."""


def restored_projector(name: str | None) -> Projector | None:
    """Return the projector of a saved posterior; an unknown projector supports everything except another fit."""
    if name is None or name == FULL.name:
        return None if name is None else FULL
    return PROJECTORS.get(name) or Projector(name, _unknown)


def _unknown(context: ProjectorContext) -> Projection:
    raise RuntimeError("This posterior was loaded, and its projector is not defined here: pass one to fit again.")
