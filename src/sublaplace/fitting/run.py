"""The stages of a fit: a look at the data, λ, the projector, and one pass for the posterior."""

import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

import torch

from sublaplace.curvature.cache import Curvatures
from sublaplace.curvature.directions import Roots, SampledRoots, random_signs
from sublaplace.curvature.kfac import trace_ratios
from sublaplace.curvature.last_layer_sums import LastLayerSums
from sublaplace.data.batches import Batch, Ragged, by_form, num_inputs, parts_of, select
from sublaplace.data.subspace_inputs import Given, Reservoir, batch_at, inputs_of, joined_inputs, split
from sublaplace.fitting import steps
from sublaplace.fitting.fitted import GIVEN, Fitted, Stage
from sublaplace.fitting.last_layer_pass import LastLayerPass
from sublaplace.fitting.leave_one_out import (
    DIMENSIONS,
    LOG_PRIORS,
    LinearisedData,
    num_left_out,
    num_with_positions,
    prior_by_leave_one_out,
)
from sublaplace.fitting.survey import Survey, survey_of
from sublaplace.fitting.tuning import layer_priors, prior_by_evidence
from sublaplace.jacobians.jacobian import Jacobian, Jacobians
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.layer_priors import units_of
from sublaplace.model.likelihoods.gaussian import PER_OUTPUT
from sublaplace.options import Captured, Options
from sublaplace.posteriors.certificate import Certificate
from sublaplace.posteriors.complement import ComplementedPosterior, keeps_basis
from sublaplace.posteriors.drawn import DRAWS, DRAWS_MUST_SAVE
from sublaplace.posteriors.protocol import Posterior
from sublaplace.posteriors.subspace import SubspacePosterior
from sublaplace.posteriors.sweep import variances_at
from sublaplace.posteriors.weighting import SUBSAMPLE, Weighted, fitted_weight
from sublaplace.projectors.context import ProjectorContext
from sublaplace.projectors.subspace_iteration import sketched_rows
from sublaplace.runtime.checkpoint import Checkpoint, fingerprint, fingerprint_of, other_order
from sublaplace.runtime.memory import peak_bytes, require
from sublaplace.runtime.stopwatch import FACTORISATIONS, PASSES, Stopwatch
from sublaplace.runtime.warning import warn

_TRACE_DIRECTIONS = 2  # per input, for the ratio of KFAC's traces to the exact ones


@dataclass(frozen=True)
class Look:
    """What the first look at the data gives."""

    survey: Survey
    inputs: Any  # X′; None where it is not needed
    drawn: (
        Batch | Ragged | None
    )  # training data: those of X′ first, if they were drawn, then more for the complement's weight
    fingerprint: str | None  # of the data, with a checkpoint
    last_layer_sums: LastLayerSums | None = None  # of the same pass, for a posterior of the last layer alone


@dataclass
class Run:
    """One fit: its settings, and the seconds of its stages."""

    options: Options
    loader: Iterable[Any]
    linearization: Linearization
    checkpoint: Checkpoint | None
    certify: bool
    validated: bool
    progress: bool
    stages: dict[str, Stage] = field(default_factory=dict)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def fitted(self) -> Fitted:
        """Run all stages."""
        with self._stage("survey"):
            look = self._look()
        options = self.options  # the data have told whether there are positions
        chosen, held_back = look.inputs, None
        if options.holds_back and chosen is not None:
            chosen, held_back = (by_form(part) for part in split(chosen))
        elif chosen is not None:
            chosen = by_form(chosen)
        context = self._context(look, chosen)
        how = GIVEN
        if options.prior_structure == "layer":
            with self._stage("layers' units"):
                context = self._in_layer_units(context, look, chosen)
        if options.given_prior is None:
            last = self._last_layer()
            how = "the evidence of the last layer's KFAC" if last else "the evidence of KFAC"
            with self._stage("prior precision"):
                prior = prior_by_evidence(context.curvatures, look.survey, last)
            context = replace(context, prior_precision=prior)
        posterior, certificate = self._posterior(context, held_back)
        posterior = self._weighted(posterior, context, held_back, look, chosen)
        drawn_with = self._drawn_with(posterior, context)
        if options.leaves_one_out:
            with self._stage("leave-one-out"):
                left_out = self._left_out_prior(posterior, look, drawn_with)
            if left_out is None:
                how += "; leave-one-out of so many outputs does not fit into the memory budget"
            else:
                how = "leave-one-out of the linearised network"
                posterior = posterior.with_prior(left_out)
                certificate = None if certificate is None else certificate.with_prior(left_out)
        share = None
        if certificate is not None and (judged := chosen if held_back is None else held_back) is not None:
            share = float(certificate.captured(self._jacobians(judged))[-1])
        with self._stage("KFAC's traces"):
            ratios = self._kfac_trace_ratios(context)
        units = self.linearization.units
        directions = self._described_directions(context, drawn_with is not None)
        fitted = Fitted(
            *(self.linearization, posterior, look.survey, certificate, self.stages, ratios, share, units),
            directions,
            how,
            self._dim_note(posterior),
            drawn_with,
        )
        if drawn_with is not None and not self.validated:  # with another λ, the draws will be others
            with self._stage("draws"):
                _ = fitted.predictive
        return fitted

    def _drawn_with(self, posterior: Posterior, context: ProjectorContext) -> int | None:
        """Return the seed of the draws that stand for a complement in predictions; None where it is exact.

        Counted costs decide. Likelihoods that need whole covariances get exact ones.
        """
        options, inputs = self.options, context.subspace_jacobians.inputs
        sampled = options.resources.samples(context.num_outputs) is not None and options.likelihood.needs_variances_only
        if not sampled or inputs is None or not isinstance(posterior, ComplementedPosterior):
            return None
        first, s = parts_of(inputs)[0], posterior.dim
        saves = self.linearization.saves_by_forward_mode(first, s + DRAWS, 2 * s, DRAWS_MUST_SAVE)
        return options.seed if saves else None

    def _described_directions(self, context: ProjectorContext, draws: bool) -> str:
        """Return which output directions were dropped or sampled, and whether the complement is drawn, for people."""
        samples, sketched = context.stream.used_samples, context.subspace_jacobians.directions
        said = []
        if self.linearization.passes and not context.stream.keeps_all_directions:
            said.append(f"those dropped hold at most {context.stream.tolerance:g} of each output Hessian's trace")
        if samples is not None and (context.curvatures.has("kfac") or context.curvatures.has("diagonal")):
            said.append(f"{samples} sampled per input for the curvature of all parameters")
        if sketched is not None:
            said.append(f"P from {sketched.shape[1]} random combinations of the outputs per input, refined with all")
        if draws:
            said.append(f"predictions by {DRAWS} draws of what stands outside")
        return "; ".join(said)

    # The data ---------------------------------------------------------------------------------------------------------

    def _look(self) -> Look:
        """Look at the data, or take what an earlier look found from the checkpoint."""
        given = None
        if isinstance(self.options.subspace_inputs, Given):
            given = self.linearization.to_device(joined_inputs(self.options.subspace_inputs.inputs, "subspace_inputs"))
        if self.checkpoint is None:
            return self._fresh_look(given, None)
        data = fingerprint(self.loader)
        found = self.checkpoint.read("survey")
        return self._fresh_look(given, data) if found is None else self._restored_look(given, data, found[1])

    def _fresh_look(self, given: Any, data: str | None) -> Look:
        def reservoir_for(num_outputs: int) -> Reservoir | None:
            self.options = self.options.resolved(self.linearization.output_layout is not None)
            size = self._num_drawn(num_outputs)
            return Reservoir(size, self.options.seed) if size else None

        last_layer = LastLayerPass(self.linearization, self._last_layer_sums)
        survey, reservoir = survey_of(
            self.loader,
            self.linearization,
            self.options.likelihood,
            reservoir_for,
            progress=self.progress,
            last_layer=last_layer,
            stopwatch=self.stopwatch,
        )
        if self.checkpoint is not None:
            numbers = {
                "survey": survey.numbers(),
                "positions": reservoir.positions if reservoir else None,
                "fingerprints": [data, fingerprint_of(given)],
            }
            self.checkpoint.write("survey", {}, numbers)
        look = self._looked(survey, given, reservoir.batch if reservoir else None, data)
        return replace(look, last_layer_sums=last_layer.sums)

    def _last_layer_sums(self, num_outputs: int) -> LastLayerSums | None:
        """Return empty sums for the survey's pass, if the posterior is one of the last layer alone.

        A checkpoint stores passes of their own, several σ have sums of their own, and so has every other arrangement of
        the outputs. In units of its own, the layer's evidence needs KFAC of all layers first.
        """
        options, names = self.options, self._last_layer()
        likelihood, sizes = options.likelihood, self.linearization.layout.sizes
        several = len(likelihood.curvature_scales) > 1 or likelihood.noise_estimate == PER_OUTPUT
        elsewhere = self.checkpoint is not None or several or options.prior_structure == "layer"
        if not names or elsewhere or self.linearization.output_layout is not None:
            return None
        size = sum(sizes[name] for name in names)
        exact = size <= steps.LARGEST_EXACT_LAST_LAYER
        if exact:
            steps.require_room_for_subspace(self.linearization, size, 1)
        kronecker = not exact or options.given_prior is None
        return LastLayerSums.of(self.linearization, likelihood, names, num_outputs, kronecker, exact)

    def _restored_look(self, given: Any, data: str, numbers: dict[str, Any]) -> Look:
        if [data, fingerprint_of(given)] != numbers["fingerprints"]:
            raise ValueError(other_order("It gives other data than when the checkpoint was begun."))
        drawn = batch_at(self.loader, numbers["positions"]) if numbers["positions"] else None
        survey = Survey.from_numbers(numbers["survey"])
        self.options = self.options.resolved(survey.layout is not None)
        return self._looked(survey, given, drawn, data)

    def _looked(self, survey: Survey, given: Any, drawn: Batch | Ragged | None, data: str | None) -> Look:
        if drawn is not None:
            drawn = self.linearization.to_device(drawn)
        inputs = given
        if given is None and drawn is not None:
            inputs = inputs_of(select(drawn, slice(0, self._num_subspace_inputs(survey.num_outputs))))
        return Look(survey, inputs, drawn, data)

    def _num_subspace_inputs(self, num_outputs: int) -> int:
        """Return how many of X′ are drawn; 0 where none are."""
        options, source = self.options, self.options.subspace_inputs
        if isinstance(source, Given) or not options.needs_inputs:
            return 0
        return source.number(options.largest_dim, num_outputs)

    def _num_drawn(self, num_outputs: int) -> int:
        """Return how many training data are drawn, for X′ and for the complement's weight."""
        complement = self.options.outside
        fits_weight = complement is not None and complement.fits_weight
        more = SUBSAMPLE if fits_weight or self.options.leaves_one_out else 0
        return self._num_subspace_inputs(num_outputs) + more

    def _subsample(self, look: Look, chosen: Any) -> Batch | Ragged | None:
        """Return the drawn training data that were not held back."""
        if look.drawn is None or isinstance(self.options.subspace_inputs, Given) or chosen is None:
            return look.drawn
        total, first, behind = num_inputs(look.drawn), num_inputs(chosen), num_inputs(look.inputs)
        kept = torch.cat([torch.arange(first, device="cpu"), torch.arange(behind, total, device="cpu")])
        subsample: Batch | Ragged = select(look.drawn, kept)
        return subsample

    def _context(self, look: Look, chosen: Any) -> ProjectorContext:
        options, linearization = self.options, self.linearization
        tolerance = options.resources.tolerance(linearization.dtype)
        samples = options.resources.samples(look.survey.num_outputs)
        stream = steps.curvature_stream(
            self.loader, linearization, look.survey, tolerance, self.progress, samples, options.seed
        )
        stream = replace(stream, checkpoint=self.checkpoint, fingerprint=look.fingerprint, stopwatch=self.stopwatch)
        return ProjectorContext(
            curvatures=Curvatures(stream, look.survey.num_data, look.survey.num_outputs, look.last_layer_sums),
            subspace_jacobians=self._sketched(chosen, look.survey.num_outputs),
            dim=self._dim(),
            prior_precision=options.given_prior or 1.0,
            seed=options.seed,
        )

    def _in_layer_units(self, context: ProjectorContext, look: Look, chosen: Any) -> ProjectorContext:
        """Return the context with parameters in units in which every layer's λ is the same."""
        units = self.options.given_units(self.linearization.layout)
        if units is None:
            units = units_of(layer_priors(context.curvatures, look.survey), self.linearization.layout)
        self.linearization = self.linearization.with_units(units)
        curvatures = context.curvatures.in_units(self.linearization, units)
        sketched = self._sketched(chosen, look.survey.num_outputs)
        return replace(context, curvatures=curvatures, subspace_jacobians=sketched)

    def _dim(self) -> int:
        """Return the dimension that P is built with."""
        options, p = self.options, self.linearization.layout.num_parameters
        projector, dim = options.projector, options.largest_dim
        if projector is None or projector.own_dim:
            return p
        if dim > p:
            if not options.chooses_dim and not options.default_dim:
                message = f"dim={dim} is above the number of parameters; dim={p}, their rank, is used."
                warn(message)
            dim = p
        outside = 0
        if options.outside is not None:  # Y, two rotated copies of a layer, perhaps of nearly all, and Q if it is kept
            outside = 3 + keeps_basis(p, dim, self.linearization.dtype)
        matrices = projector.stores_matrix + outside + self.certify
        steps.require_room_for_projection(self.linearization, dim, matrices)
        return dim

    def _dim_note(self, posterior: Posterior) -> str:
        """Return why s is smaller than the dimension asked for; empty where it is not."""
        options, projector = self.options, self.options.projector
        if projector is None or projector.own_dim or options.chooses_dim or posterior.dim >= options.largest_dim:
            return ""
        asked = "the default is" if options.default_dim else "asked for:"
        return f"{asked} {options.largest_dim}, but P has rank {posterior.dim}"

    def _jacobians(self, inputs: Any) -> Jacobians:
        """Return J of some of X′, as they are used."""
        varied = None if inputs is None else self.options.subspace_inputs.varied(inputs, self.options.seed)
        return Jacobians(self.linearization, varied, self.progress)

    def _sketched(self, inputs: Any, num_outputs: int) -> Jacobians:
        """Return J of X′, with a few random combinations of the outputs as rows if there are many outputs."""
        jacobians, options = self._jacobians(inputs), self.options
        exact = options.projector is None or options.projector.needs_exact
        if inputs is None or exact or options.resources.samples(num_outputs) is None:
            return jacobians
        n = num_inputs(inputs)
        num_outputs = max(self.linearization.num_outputs(part) for part in parts_of(inputs))
        size = self.linearization.layout.num_parameters * self.linearization.dtype.itemsize
        rows = sketched_rows(options.largest_dim, n, size)
        if 2 * rows >= num_outputs:
            return jacobians
        require(
            2 * n * rows * num_outputs,
            torch.device("cpu"),
            f"A set of {rows} random combinations of {num_outputs:,} outputs for {n:,} subspace inputs",
            "Choose fewer of them, as in subspace_inputs=Drawn(20), or fewer positions per input.",
        )
        signs = random_signs(options.seed, torch.arange(n, device="cpu"), rows, num_outputs)
        return replace(jacobians, directions=signs.to(self.linearization.device))

    # The posterior ----------------------------------------------------------------------------------------------------

    def _posterior(self, context: ProjectorContext, held_back: Any) -> tuple[Posterior, Certificate | None]:
        options, projector = self.options, self.options.projector
        if projector is not None and not projector.reduces:
            with self._stage("full posterior"):
                return context.exact(), None
        last = self._last_layer()
        if sum(self.linearization.layout.sizes[name] for name in last) > steps.LARGEST_EXACT_LAST_LAYER:
            with self._stage("last layer"):
                return context.curvatures.last_layer(last, context.prior_precision), None
        outside = None
        if options.outside is not None:
            with self._stage("complement"):
                outside = context.kfac() if options.outside.kind == "kfac" else context.diagonal()
        if projector is None:
            assert outside is not None
            return outside, None
        with self._stage("projector"), warnings.catch_warnings():
            if options.default_dim:  # nobody asked for so many dimensions
                warnings.filterwarnings("ignore", message=r"dim=\d+ is above the numerical rank")
            projection = steps.built_projection(projector, context)
        with self._stage("reduced posterior"):
            stream, prior = context.stream, context.prior_precision
            summed = context.curvatures.last_layer_sums
            if summed is not None and summed.exact is not None:
                return steps.last_layer_posterior(stream, projection, summed.exact, prior), None
            if not self.certify and outside is None:
                return steps.subspace_posterior(stream, projection, prior, resumable=True), None
            if self.certify:
                stream = steps.without_dropping(stream)
            inside, product = steps.subspace_posterior_and_product(stream, projection, prior, resumable=True)
            posterior: SubspacePosterior | ComplementedPosterior = inside
            if outside is not None:
                # A certificate takes the memory of the product; without one, the complement does.
                own = {name: part.clone() for name, part in product.items()} if self.certify else product
                posterior = steps.complemented_posterior(inside, outside, own, stream.scale)
            certificate = Certificate.of(inside, product, stream.scale) if self.certify else None
        if isinstance(options.dim, Captured) and certificate is not None:
            dim = steps.smallest_dim(options.dim.share, certificate, self._jacobians(held_back))
            posterior, certificate = posterior.truncated(dim), certificate.of_leading(dim)
        return posterior, certificate

    def _last_layer(self) -> tuple[str, ...]:
        """Return the parameters of the last layer, if the posterior covers them alone and needs no backward pass."""
        options, linearization = self.options, self.linearization
        alone = options.projector is not None and options.projector.last_layer and options.outside is None
        if not alone or self.certify or not linearization.ends_linear():
            return ()
        return tuple(sorted(linearization.last_linear(), key=linearization.layout.names.index))

    def _weighted(
        self, posterior: Posterior, context: ProjectorContext, held_back: Any, look: Look, chosen: Any
    ) -> Posterior:
        """Return the posterior with the weight of its complement, if it has one."""
        complement = self.options.outside
        if complement is None:
            return posterior
        weighted = cast(Weighted, posterior)  # as every posterior with a complement
        if not complement.fits_weight:
            return weighted if complement.weight == 1.0 else weighted.reweighted(float(complement.weight))
        subsample = self._subsample(look, chosen)
        assert subsample is not None
        with self._stage("complement's weight"):
            inputs = Jacobians(self.linearization, held_back)
            weight = fitted_weight(weighted, context.stream, look.survey.num_counting, inputs, subsample)
            return weighted.reweighted(weight)

    def _left_out_prior(self, posterior: Posterior, look: Look, drawn_with: int | None) -> float | None:
        """Return λ by leave-one-out, of the subspace alone or with what stands outside; None if it does not fit."""
        subspace, drawn = posterior.subspace, look.drawn
        assert subspace is not None and drawn is not None
        survey = look.survey
        count: int | None = num_left_out(survey.num_outputs)
        if survey.layout is not None:
            count = num_with_positions(survey.num_outputs, self.linearization.memory_budget)
        if count is None:
            return None
        few = by_form(select(drawn, slice(0, count)))
        projection = subspace.projection.leading(min(subspace.dim, DIMENSIONS))
        data = LinearisedData.of(survey.likelihood, self.linearization, projection, few, survey.num_counting)
        variances = None
        if posterior.outside is not None:
            variances = variances_at(posterior, Jacobians(self.linearization, inputs_of(few)), LOG_PRIORS, drawn_with)
        return prior_by_leave_one_out(data, variances, at_end=not self.validated)

    def _kfac_trace_ratios(self, context: ProjectorContext, count: int = 16) -> dict[str, float]:
        """Return how far KFAC's traces are from the exact ones on a few of X′; none where KFAC was not used.

        Both traces are linear in H, so two sampled directions per input are enough.
        """
        inputs = context.subspace_jacobians.inputs
        if not context.curvatures.has("kfac") or inputs is None:
            return {}
        jacobians: list[Iterator[Jacobian]] = []
        for part in parts_of(select(inputs, slice(0, count))):
            places = torch.arange(num_inputs(part), device="cpu")
            roots = SampledRoots(Roots(context.stream.likelihood, None), _TRACE_DIRECTIONS, places, self.options.seed)
            jacobians.append(self.linearization.chunks(part, roots(self.linearization.outputs(part))))
        return trace_ratios(chain.from_iterable(jacobians))

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start, before = time.perf_counter(), dict(self.stopwatch.seconds)
        yield
        inside = [self.stopwatch.seconds[kind] - before.get(kind, 0.0) for kind in (PASSES, FACTORISATIONS)]
        self.stages[name] = Stage(time.perf_counter() - start, peak_bytes(self.linearization.device), *inside)
