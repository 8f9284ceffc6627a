"""How a fit goes: a look at the data, λ, the projector, and one pass for the posterior."""

import os
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from sublaplace import serialization
from sublaplace.arguments import AUTO
from sublaplace.certificate import Certificate
from sublaplace.checkpoint import Checkpoint, fingerprint, fingerprint_of, other_order, require_fixed_order
from sublaplace.complement import ComplementedPosterior
from sublaplace.curvature import reduced_ggn, reduced_ggn_and_product
from sublaplace.curvature.kfac import trace_ratios
from sublaplace.data import Reservoir, batch_at
from sublaplace.distributed import ranks_of
from sublaplace.jacobians import Jacobians, Linearization
from sublaplace.jacobians.inputs import num_inputs, select
from sublaplace.likelihoods import target_weights
from sublaplace.memory import peak_bytes, require, require_disk
from sublaplace.parameters import Vectors
from sublaplace.posterior import Posterior, SubspacePosterior
from sublaplace.precision import BlockPrecision
from sublaplace.prior import evidence_of
from sublaplace.projection import Projection
from sublaplace.projectors.context import ProjectorContext
from sublaplace.projectors.names import PROJECTORS
from sublaplace.settings import Settings
from sublaplace.subspace_inputs import joined_inputs, split
from sublaplace.survey import Survey, survey_of
from sublaplace.weighting import with_fitted_weight

_NEEDS_NO_INPUTS = ("subset-magnitude", "subset-diagonal", "subset-swag", "last-layer", "full")


@dataclass(frozen=True)
class Stage:
    """What a stage of a fit took."""

    seconds: float
    peak_bytes: int | None  # of the process (or device) up to its end


@dataclass(frozen=True)
class Fitted:
    """What a fit gives."""

    posterior: Posterior
    survey: Survey
    certificate: Certificate | None
    stages: dict[str, Stage] = field(default_factory=dict)
    kfac_trace_ratios: dict[str, float] = field(default_factory=dict)  # where KFAC was used
    captured: float | None = None  # of the full trace, at least: of inputs held back, else of X′; with a certificate


def fit(
    settings: Settings,
    loader: Iterable[Any],
    linearization: Linearization,
    folder: str | os.PathLike[str] | None,
    progress: bool,
) -> Fitted:
    """The posterior, with the model borrowed; `folder` is that of a checkpoint."""
    stages: dict[str, Stage] = {}
    with linearization.borrowed():
        checkpoint = None if folder is None else _checkpoint(settings, folder, loader, linearization)
        with _noted(stages, "survey", linearization.device):
            survey, chosen, counts, data = _look_at(settings, loader, linearization, checkpoint, progress)
        stream = settings.stream(loader, linearization, survey, progress)
        held_back = None
        if settings.holds_back and chosen is not None:
            chosen, held_back = split(chosen)
            counts = counts[num_inputs(chosen) :]
        context = ProjectorContext(
            stream=replace(stream, checkpoint=checkpoint, fingerprint=data),
            subspace_jacobians=Jacobians(linearization, settings.varied(chosen), progress),
            num_data=survey.num_data,
            num_outputs=survey.num_outputs,
            dim=_fitting_dim(settings, linearization),
            prior_precision=1.0,
            seed=settings.seed,
        )
        prior = settings.prior_precision
        if prior is None:
            with _noted(stages, "prior precision", linearization.device):
                prior = tuned_prior(context, survey)
        context = replace(context, prior_precision=prior)
        posterior, certificate = _posterior(settings, context, stages)
        if settings.dim == AUTO and held_back is not None:
            assert certificate is not None and isinstance(posterior, SubspacePosterior | ComplementedPosterior)
            dim = _smallest_dim(settings, certificate, Jacobians(linearization, settings.varied(held_back)))
            posterior, certificate = posterior.truncated(dim), certificate.of_leading(dim)
        if isinstance(posterior, ComplementedPosterior | BlockPrecision):
            if isinstance(settings.complement_weight, str):
                with _noted(stages, "complement's weight", linearization.device):
                    posterior = with_fitted_weight(posterior, context, Jacobians(linearization, held_back), counts)
            elif settings.complement_weight != 1.0:
                posterior = posterior.reweighted(settings.complement_weight)
        ratios = _kfac_trace_ratios(context, survey)
        share = None
        if certificate is not None and (judged := chosen if held_back is None else held_back) is not None:
            share = float(certificate.captured(Jacobians(linearization, settings.varied(judged)))[-1])
    if checkpoint is not None:
        checkpoint.remove()
    return Fitted(posterior, survey, certificate, stages, ratios, share)


def _kfac_trace_ratios(context: ProjectorContext, survey: Survey, count: int = 16) -> dict[str, float]:
    """How far KFAC's traces are from the exact ones, on a few of the subspace inputs; none where it was not used."""
    inputs = context.subspace_jacobians.inputs
    if "kfac" not in context.known or inputs is None:
        return {}
    few = select(inputs, slice(0, count))
    return trace_ratios(context.linearization.chunks(few, survey.likelihood.cotangents))


def _checkpoint(
    settings: Settings, folder: str | os.PathLike[str], loader: Iterable[Any], linearization: Linearization
) -> Checkpoint:
    """The checkpoint of this fit, and the memory budget that it was begun with, which decides the order of sums."""
    if ranks_of(loader).size > 1:
        raise ValueError("fit(checkpoint=…) is for a single process; in a process group start all ranks again.")
    require_fixed_order(loader)
    identity = {
        "model": serialization.model_fingerprint(linearization.model),
        **settings.identity(),
        "memory_budget": linearization.memory_budget,
    }
    checkpoint = Checkpoint(folder, identity, linearization.device)
    linearization.memory_budget = checkpoint.identity["memory_budget"]
    return checkpoint


# The data -------------------------------------------------------------------------------------------------------------


def _look_at(
    settings: Settings,
    loader: Iterable[Any],
    linearization: Linearization,
    checkpoint: Checkpoint | None,
    progress: bool,
) -> tuple[Survey, Any, Tensor, str | None]:
    """The survey of the training data, X′, how much its targets count there, and with a checkpoint the data's
    fingerprint."""
    given = settings.subspace_inputs
    if isinstance(given, str):
        given = None
    if given is not None:
        given = linearization.to_device(joined_inputs(given, "subspace_inputs"))
    data = None if checkpoint is None else fingerprint(loader)
    if checkpoint is not None and (found := checkpoint.read("survey")):
        numbers = found[1]
        if [data, fingerprint_of(given)] != numbers["fingerprints"]:
            raise ValueError(other_order("It gives other data than when the checkpoint was begun."))
        survey = serialization.survey_from(numbers["survey"])
        drawn, counts = None, None
        if numbers["positions"]:
            batch = batch_at(loader, numbers["positions"])
            drawn = linearization.to_device(batch.inputs)
            counts = target_weights(survey.likelihood, batch.targets, batch.weights)
    else:

        def reservoir_for(num_outputs: int) -> Reservoir | None:
            if given is not None or (settings.projector in _NEEDS_NO_INPUTS and not settings.holds_back):
                return None
            size = settings.num_subspace_inputs or max(100, ceil(2 * settings.largest_dim / num_outputs))
            return Reservoir(size, settings.seed)

        survey, reservoir = survey_of(
            loader, linearization, settings.likelihood, settings.estimated_noise, reservoir_for, progress
        )
        drawn, counts = (reservoir.inputs, reservoir.counts) if reservoir else (None, None)
        if checkpoint is not None:
            numbers = {
                "survey": serialization.survey_numbers(survey),
                "positions": reservoir.positions if reservoir else None,
                "fingerprints": [data, fingerprint_of(given)],
            }
            checkpoint.write("survey", {}, numbers)
    if given is not None:
        return survey, given, torch.zeros(num_inputs(given), 1), data  # not known to be among the data
    if counts is None:
        counts = torch.ones(0 if drawn is None else num_inputs(drawn), 1)
    return survey, drawn, counts, data


# The posterior --------------------------------------------------------------------------------------------------------


def _fitting_dim(settings: Settings, linearization: Linearization) -> int:
    p = linearization.layout.num_parameters
    dim = settings.largest_dim
    if settings.projector in ("full", "last-layer"):
        return p
    if dim > p:
        if settings.dim != AUTO:
            warnings.warn(f"dim={dim} is above the number of parameters; dim={p}, their rank, is used.", stacklevel=4)
        dim = p
    subset = isinstance(settings.projector, str) and settings.projector.startswith("subset")
    matrices = (not subset) + (settings.complement is not None) + settings.makes_certificate
    needed, what = matrices * p * dim * linearization.dtype.itemsize, f"A projection of {p:,} × {dim:,} numbers"
    remedy = (
        "Choose a smaller dim, a subset projector (which stores indices only) without a complement, or fewer "
        "parameters with requires_grad=True"
    )
    if linearization.scratch_folder is None:
        require(needed, linearization.device, what, f"{remedy}; or keep it on disk with scratch_folder='…'.")
    else:
        require_disk(needed, linearization.scratch_folder, what, f"{remedy}.")
    return dim


def tuned_prior(context: ProjectorContext, survey: Survey) -> float:
    """λ from the evidence of the KFAC approximation, before P is built, as in the paper."""
    linearization = context.linearization
    squared_norm = float(linearization.layout.flat(linearization.model).double().square().sum())
    return evidence_of(context.kfac(), survey, squared_norm).best_prior(survey.noise_std)


def _posterior(
    settings: Settings, context: ProjectorContext, stages: dict[str, Stage]
) -> tuple[Posterior, Certificate | None]:
    device = context.linearization.device
    if settings.projector == "full":
        with _noted(stages, "full posterior", device):
            return context.exact(), None
    outside: BlockPrecision | None = None
    if settings.complement is not None:
        with _noted(stages, "complement", device):
            outside = context.kfac() if settings.complement == "kfac" else context.diagonal()
        if settings.dim == 0:
            return outside, None
    with _noted(stages, "projector", device):
        projection = _projection(settings, context)
    with _noted(stages, "reduced posterior", device):
        stream = context.stream
        if settings.makes_certificate:
            stream = replace(stream, tolerance=0.0)
        product: Vectors | None = None
        if settings.makes_certificate or outside is not None:
            curvatures, product = reduced_ggn_and_product(stream, projection, resumable=True)
        else:
            curvatures = reduced_ggn(stream, projection, resumable=True)
        inside = SubspacePosterior(
            projection,
            curvatures,
            projection.gram(),
            stream.likelihood.curvature_scales,
            context.prior_precision,
        )
        posterior: Posterior = inside
        if outside is not None:
            assert product is not None
            # A certificate takes the memory of the product; without one, the complement does.
            scaled = {
                n: part * stream.scale if settings.makes_certificate else part.mul_(stream.scale)
                for n, part in product.items()
            }
            posterior = ComplementedPosterior.of(inside, outside, scaled)
        if not settings.makes_certificate:
            return posterior, None
        assert product is not None
        return posterior, Certificate.of(inside, product, stream.scale)


def _projection(settings: Settings, context: ProjectorContext) -> Projection:
    """P, built or taken from the checkpoint."""
    build = PROJECTORS[settings.projector] if isinstance(settings.projector, str) else settings.projector
    checkpoint = context.stream.checkpoint
    if checkpoint is None:
        projection = build(context)
        ranks = ranks_of(context.stream.loader)
        if ranks.size > 1:
            # All ranks have built it from the same numbers; on different machines rounding may differ.
            ranks.same(serialization.projection_tensors(projection).values())
        return projection
    if found := checkpoint.read("projection"):
        linearization = context.linearization
        return serialization.projection_from(found[0], linearization.layout, linearization.dtype)
    projection = build(context)
    checkpoint.write("projection", serialization.projection_tensors(projection), {})
    return projection


def _smallest_dim(settings: Settings, certificate: Certificate, jacobians: Jacobians) -> int:
    """The smallest leading s whose guaranteed share of the trace on held-back inputs reaches the target."""
    shares = certificate.captured(jacobians)
    reached = torch.nonzero(shares >= settings.captured)
    if len(reached):
        return int(reached[0]) + 1
    warnings.warn(
        f"dim='auto' was to capture {settings.captured:.0%} of the trace; {len(shares)} dimensions guarantee "
        f"{float(shares[-1]):.0%}, and are used. A larger max_dim or other subspace_inputs may capture more.",
        stacklevel=4,
    )
    return len(shares)


@contextmanager
def _noted(stages: dict[str, Stage], name: str, device: torch.device) -> Iterator[None]:
    start = time.perf_counter()
    yield
    stages[name] = Stage(time.perf_counter() - start, peak_bytes(device))
