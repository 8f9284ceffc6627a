"""The steps of a fit as functions: each takes what the one before it gives, and can be used on its own."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from sublaplace.curvature.exact_last_layer import ExactLastLayerSums
from sublaplace.curvature.exact_precision import DensePrecision
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.curvature.reduced import reduced_ggn, reduced_ggn_and_product
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.fitting.survey import Survey
from sublaplace.jacobians.jacobian import Jacobians
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.linalg import Vectors
from sublaplace.posteriors.certificate import Certificate
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.posteriors.subspace import SubspacePosterior
from sublaplace.projection import Projection, Subset, projection_from
from sublaplace.projectors.context import ProjectorContext
from sublaplace.projectors.registry import Projector
from sublaplace.runtime.distributed import ranks_of
from sublaplace.runtime.memory import require, require_disk
from sublaplace.runtime.warning import warn


def curvature_stream(
    loader: Iterable[Any],
    linearization: Linearization,
    survey: Survey,
    tolerance: float,
    progress: bool = False,
    samples: int | None = None,
    seed: int = 0,
) -> CurvatureStream:
    """Return the training data as rows of the GGN's root, for passes over them; see `CurvatureStream`."""
    return CurvatureStream(
        linearization,
        loader,
        survey.likelihood,
        tolerance,
        progress,
        num_data=survey.num_data,
        samples=samples,
        seed=seed,
    )


LARGEST_EXACT_LAST_LAYER = 5000
"""Parameters of a last layer up to which its posterior is exact; larger ones have Kronecker factors."""


def require_room_for_projection(linearization: Linearization, dim: int, matrices: int) -> None:
    """Raise MemoryError if so many p × s matrices do not fit, with the chunks of a pass, into memory.

    In a scratch folder, they must fit onto its disk.
    """
    p = linearization.layout.num_parameters
    needed, what = matrices * p * dim * linearization.dtype.itemsize, f"A projection of {p:,} × {dim:,} numbers"
    remedy = (
        "Choose a smaller dim, a subset projector (which stores indices only) without a complement, or fewer "
        "parameters with requires_grad=True"
    )
    if linearization.scratch_folder is None:
        needed += linearization.policy.peak_bytes if matrices else 0  # the chunks of the passes
        require(needed, linearization.device, what, f"{remedy}; or keep it on disk with Resources(scratch_folder='…').")
    else:
        require_disk(needed, linearization.scratch_folder, what, f"{remedy}.")


def built_projection(projector: Projector, context: ProjectorContext) -> Projection:
    """Return P, built or taken from the checkpoint of the context's stream.

    Raises:
        TypeError: if the projector returns something else than a projection.
    """
    checkpoint, linearization = context.stream.checkpoint, context.linearization
    if checkpoint is not None and (found := checkpoint.read("projection")):
        return projection_from(found[0], linearization.layout, linearization.dtype)
    projection = projector(context)
    if not hasattr(projection, "apply"):
        raise TypeError(
            f"The projector '{projector.label}' must return a projection, a Basis or a Subset, not "
            f"{type(projection).__name__}."
        )
    ranks = ranks_of(context.stream.loader)
    if ranks.size > 1:
        # All ranks have built it from the same numbers; on different machines rounding may differ.
        ranks.same(projection.tensors().values())
    if checkpoint is not None:
        checkpoint.write("projection", projection.tensors(), {})
    return projection


def require_room_for_subspace(linearization: Linearization, dim: int, num_scales: int) -> None:
    """Raise MemoryError if the s × s matrices of a posterior do not fit, with the chunks of a pass, into memory."""
    require(
        (2 + num_scales) * 8 * dim**2 + linearization.policy.peak_bytes,
        linearization.device,
        f"A posterior in {dim:,} dimensions",
        "Choose a smaller dim, or a projector that needs fewer dimensions.",
    )


def last_layer_posterior(
    stream: CurvatureStream, projection: Projection, sums: ExactLastLayerSums, prior_precision: float
) -> SubspacePosterior:
    """Return the exact posterior of the last layer from the sums of an earlier pass."""
    scales = stream.likelihood.curvature_scales
    return SubspacePosterior(
        projection, sums.matrix(stream.linearization.layout)[None], projection.gram(), scales, prior_precision
    )


def subspace_posterior(
    stream: CurvatureStream, projection: Projection, prior_precision: float, resumable: bool = False
) -> SubspacePosterior:
    """Return the exact posterior in the subspace: one pass over the data, see `reduced_ggn`.

    Raises:
        MemoryError: if the s × s matrices do not fit, with the chunks of the pass.
    """
    require_room_for_subspace(stream.linearization, projection.dim, len(stream.likelihood.curvature_scales))
    curvatures = reduced_ggn(stream, projection, resumable)
    scales = stream.likelihood.curvature_scales
    return SubspacePosterior(projection, curvatures, projection.gram(), scales, prior_precision)


def subspace_posterior_and_product(
    stream: CurvatureStream, projection: Projection, prior_precision: float, resumable: bool = False
) -> tuple[SubspacePosterior, Vectors]:
    """Return the posterior in the subspace, and Y = GGN P of the same pass (see `reduced_ggn_and_product`)."""
    curvatures, product = reduced_ggn_and_product(stream, projection, resumable)
    scales = stream.likelihood.curvature_scales
    return SubspacePosterior(projection, curvatures, projection.gram(), scales, prior_precision), product


def dense_posterior_and_product(exact: DensePrecision, projection: Projection) -> tuple[SubspacePosterior, Vectors]:
    """Return what `subspace_posterior_and_product` does, from the p × p GGN instead of a pass over the data.

    Cost: s·p², and s·p for a `Subset`.
    """
    if isinstance(projection, Subset):
        dtype = projection.dtype
        product = exact.ggn[projection.indices] / exact.scale
        curvature = product[:, projection.indices]
    else:
        P = projection.matrix()
        dtype = P.dtype
        product = P.T.double() @ exact.ggn / exact.scale
        curvature = product @ P.double()
    prior, scales = exact.prior_precision, (exact.scale,)
    inside = SubspacePosterior(projection, curvature[None], projection.gram(), scales, prior)
    return inside, exact.layout.unflatten(product.to(dtype))


def complemented_posterior(
    inside: SubspacePosterior, outside: BlockPrecision, product: Vectors, scale: float
) -> ComplementedPosterior:
    """Return the posterior with `outside` outside of the subspace, from Y, whose memory it takes.

    scale: the likelihood's, where it has a single one, which is not in Y.
    """
    return ComplementedPosterior.of(inside, outside, {name: part.mul_(scale) for name, part in product.items()})


def smallest_dim(share: float, certificate: Certificate, jacobians: Jacobians) -> int:
    """Return the smallest leading s whose guaranteed share of the trace on these inputs reaches the target."""
    shares = certificate.captured(jacobians)
    reached = torch.nonzero(shares >= share)
    if len(reached):
        return int(reached[0]) + 1
    warn(
        f"dim=Captured({share:g}) was to capture {share:.0%} of the trace; {len(shares)} dimensions "
        f"guarantee {float(shares[-1]):.0%}, and are used. A larger at_most or other subspace_inputs may capture more."
    )
    return len(shares)


def without_dropping(stream: CurvatureStream) -> CurvatureStream:
    """Return the same passes with every direction kept, as certificates need them."""
    return replace(stream, tolerance=0.0)
