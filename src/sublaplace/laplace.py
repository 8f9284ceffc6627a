"""`SubspaceLaplace`, the door through which users come in."""

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from sublaplace import checked_file, serialization
from sublaplace.arguments import (
    checked_count,
    checked_dim,
    checked_likelihood,
    checked_noise,
    checked_positive,
    checked_prior,
)
from sublaplace.checkpoint import Checkpoint, fingerprint, fingerprint_of, other_order, require_fixed_order
from sublaplace.curvature import CurvatureStream, reduced_ggn
from sublaplace.data import Reservoir, checked_loader, input_batches, inputs_at, join
from sublaplace.jacobians import Jacobian, Jacobians, Linearization
from sublaplace.jacobians.inputs import call_model, num_inputs
from sublaplace.likelihoods import Gaussian, Likelihood, Noise
from sublaplace.memory import default_budget, readable, require
from sublaplace.parameters import ParameterLayout, in_working_precision
from sublaplace.posterior import Posterior, SubspacePosterior
from sublaplace.predictive import LINKS, Prediction
from sublaplace.prior import Evidence, best_prior_on, evidence_of
from sublaplace.projection import Projection
from sublaplace.projectors.context import Projector, ProjectorContext
from sublaplace.projectors.names import PROJECTORS
from sublaplace.survey import NoiseEstimate, Survey, survey_of

_NEEDS_NO_INPUTS = ("subset-magnitude", "subset-diagonal", "subset-swag", "last-layer", "full")


class SubspaceLaplace:
    """The Laplace approximation of a trained network in a subspace of its parameters.

    Args:
        model: any module that maps a batch to (n, C); trained; left as it is. Devices and dtypes follow it; a half
            precision model is copied to float32, with a warning.
        likelihood: "classification", "regression", "binary" (also "multi-label": yes/no outputs) or a likelihood
            object, such as ``Categorical(ignore_index=-100)``.
        projector: a name from `PROJECTORS`, "full", or a function from a `ProjectorContext` to a `Projection`.
        dim: s, the dimension of the subspace ("full" and "last-layer" have their own).
        prior_precision: λ > 0 of the prior N(0, λ⁻¹ I), or "marglik": the λ that maximises the evidence of the KFAC
            approximation, found before P is built.
        noise_std: σ of regression, one number or one for each output; None: the standard deviation of the training
            residuals, pooled over the outputs; "per-output": that of each output. Alias `sigma_noise`.
        subspace_inputs: X′, a tensor or loader of inputs (no labels needed) that P is built from; None: drawn from the
            training data.
        num_subspace_inputs: how many are drawn; None: max(100, 2s/C), at most all.
        memory_budget: bytes for temporary chunks; None: a quarter of what is free.
        seed: of the library's own generators; the global random state is never touched.
        forward: how the model is called, (model, inputs) → (n, C); None: ``model(x)``, ``model(**x)`` for a mapping,
            ``model(*x)`` for a tuple, and ``.logits`` of the result where there is such a thing.
        direction_tolerance: the share of the trace of the output Hessians that may be dropped to save backward passes;
            None: 1e-8, and 0 for float64 models.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        projector: str | Projector = "lowrank-kfac",
        dim: int = 100,
        prior_precision: float | str = 1.0,
        noise_std: float | Sequence[float] | Tensor | str | None = None,
        subspace_inputs: Any = None,
        num_subspace_inputs: int | None = None,
        memory_budget: int | None = None,
        seed: int = 0,
        *,
        sigma_noise: float | Sequence[float] | Tensor | str | None = None,
        forward: Callable[[nn.Module, Any], Tensor] | None = None,
        direction_tolerance: float | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
        if noise_std is not None and sigma_noise is not None:
            raise ValueError("noise_std and sigma_noise are two names of the same thing; give one of them.")
        self.model = model
        self.projector = _checked_projector(projector)
        self.requested_dim = checked_dim(dim)
        # None: λ is tuned when fitting.
        self._prior_precision = None if prior_precision == "marglik" else checked_prior(prior_precision)
        given_noise = noise_std if noise_std is not None else sigma_noise
        self._noise_std = checked_noise(given_noise)
        self._likelihood = checked_likelihood(likelihood, given_noise)
        self._estimated_noise: NoiseEstimate | None = None
        if isinstance(likelihood, str) and likelihood == "regression" and self._noise_std is None:
            self._estimated_noise = "pooled" if given_noise is None else "per-output"
        self._subspace_inputs = subspace_inputs
        self._num_subspace_inputs = (
            None if num_subspace_inputs is None else checked_count(num_subspace_inputs, "num_subspace_inputs")
        )
        self._memory_budget = None if memory_budget is None else checked_count(memory_budget, "memory_budget")
        self.seed = seed
        self._forward = call_model if forward is None else forward
        self._tolerance = direction_tolerance
        self._layout = ParameterLayout.of(model)
        self._posterior: Posterior | None = None
        self._linearization: Linearization | None = None
        self._survey: Survey | None = None
        self._fingerprint: tuple[object, ...] = ()
        self._seconds: dict[str, float] = {}

    # Fitting ----------------------------------------------------------------------------------------------------------

    def fit(
        self,
        train_loader: Iterable[Any],
        progress: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> "SubspaceLaplace":
        """Builds P and the reduced posterior from a re-iterable of (inputs, targets) batches; returns self.

        A batch may hold sample weights as well, (inputs, targets, weights): weight 2 counts like the input given twice.
        Streams the data a few times: once to look at it, once or twice for the curvature. If anything fails, the model
        and this object are as before.

        checkpoint: a folder where the work done so far is put aside every few seconds; a killed fit called again with
        it goes on from there, and ends with the same result. It needs a loader that does not shuffle, and is removed
        when the fit is done.
        """
        loader = checked_loader(train_loader)
        seconds: dict[str, float] = {}
        linearization = self._new_linearization()
        with linearization.borrowed():
            kept = None if checkpoint is None else self._checkpoint(checkpoint, loader, linearization)
            with _timed(seconds, "survey"):
                survey, subspace_inputs, fingerprint = self._look_at(loader, linearization, kept, progress)
            stream = replace(
                self._stream(loader, linearization, survey, progress), checkpoint=kept, fingerprint=fingerprint
            )
            context = ProjectorContext(
                stream=stream,
                subspace_jacobians=Jacobians(linearization, subspace_inputs),
                num_data=survey.num_data,
                num_outputs=survey.num_outputs,
                dim=self._fitting_dim(linearization),
                prior_precision=1.0,
                seed=self.seed,
            )
            if self._prior_precision is None:
                with _timed(seconds, "prior precision"):
                    context, prior = self._tuned(context, survey)
            else:
                prior = self._prior_precision
            posterior = self._posterior_from(replace(context, prior_precision=prior), seconds)
        self._posterior, self._linearization, self._survey = posterior, linearization, survey
        self._fingerprint = ParameterLayout.fingerprint(self.model)
        self._seconds = seconds
        if kept is not None:
            kept.remove()
        return self

    def _checkpoint(
        self, folder: str | os.PathLike[str], loader: Iterable[Any], linearization: Linearization
    ) -> Checkpoint:
        """The checkpoint of this fit, and the memory budget that it was begun with, which decides the order of sums."""
        require_fixed_order(loader)
        identity = {
            "model": serialization.model_fingerprint(self.model),
            "likelihood": serialization.likelihood_numbers(self._likelihood),
            "estimated noise": self._estimated_noise,
            "projector": self._projector_name,
            "dim": self.requested_dim,
            "prior_precision": self._prior_precision,
            "num_subspace_inputs": self._num_subspace_inputs,
            "seed": self.seed,
            "direction_tolerance": self._tolerance,
            "memory_budget": linearization.memory_budget,
        }
        checkpoint = Checkpoint(folder, identity, linearization.device)
        linearization.memory_budget = checkpoint.identity["memory_budget"]
        return checkpoint

    def _new_linearization(self) -> Linearization:
        linearization = Linearization(in_working_precision(self.model), self._forward)
        linearization.memory_budget = self._memory_budget or default_budget(linearization.device)
        return linearization

    def _posterior_from(self, context: ProjectorContext, seconds: dict[str, float]) -> Posterior:
        if self.projector == "full":
            with _timed(seconds, "full posterior"):
                return context.exact()
        with _timed(seconds, "projector"):
            projection = self._projection(context)
        with _timed(seconds, "reduced posterior"):
            curvatures = reduced_ggn(context.stream, projection, resumable=True)
        return SubspacePosterior(
            projection,
            curvatures,
            projection.gram(),
            context.stream.likelihood.curvature_scales,
            context.prior_precision,
        )

    def _projection(self, context: ProjectorContext) -> Projection:
        """P, built or taken from the checkpoint."""
        build = PROJECTORS[self.projector] if isinstance(self.projector, str) else self.projector
        checkpoint = context.stream.checkpoint
        if checkpoint is None:
            return build(context)
        if found := checkpoint.read("projection"):
            return serialization.projection_from(found[0], self._layout, context.linearization.dtype)
        projection = build(context)
        checkpoint.write("projection", serialization.projection_tensors(projection), {})
        return projection

    def _stream(
        self, loader: Iterable[Any], linearization: Linearization, survey: Survey, progress: bool
    ) -> CurvatureStream:
        tolerance = self._tolerance
        if tolerance is None:
            tolerance = 0.0 if linearization.dtype == torch.float64 else 1e-8
        return CurvatureStream(linearization, loader, survey.likelihood, tolerance, progress, num_data=survey.num_data)

    def _tuned(self, context: ProjectorContext, survey: Survey) -> tuple[ProjectorContext, float]:
        """λ from the evidence of the KFAC approximation, before P is built, as in the paper."""
        kfac = context.kfac()
        context = replace(context, known_kfac=kfac)
        evidence = self._evidence(kfac, survey)
        return context, evidence.best_prior(survey.noise_std)

    def _evidence(self, posterior: Posterior, survey: Survey) -> Evidence:
        squared_norm = float(self._layout.flat(self.model).double().square().sum())
        return evidence_of(posterior, survey, squared_norm)

    def _fitting_dim(self, linearization: Linearization) -> int:
        p = self._layout.num_parameters
        dim = self.requested_dim
        if self.projector in ("full", "last-layer"):
            return p
        if dim > p:
            warnings.warn(f"dim={dim} is above the number of parameters; dim={p}, their rank, is used.", stacklevel=3)
            dim = p
        if not (isinstance(self.projector, str) and self.projector.startswith("subset")):
            require(
                2 * p * dim * linearization.dtype.itemsize,
                linearization.device,
                f"A projection of {p:,} × {dim:,} numbers",
                "Choose a smaller dim, a subset projector (which stores indices only), or fewer parameters with "
                "requires_grad=True.",
            )
        return dim

    def _look_at(
        self, loader: Iterable[Any], linearization: Linearization, checkpoint: Checkpoint | None, progress: bool
    ) -> tuple[Survey, Any, str | None]:
        """The survey of the training data, X′, and with a checkpoint the data's fingerprint."""
        given = self._subspace_inputs
        if given is not None:
            given = linearization.to_device(self._joined(given, "subspace_inputs"))
        data = None if checkpoint is None else fingerprint(loader)
        if checkpoint is not None and (found := checkpoint.read("survey")):
            numbers = found[1]
            if [data, fingerprint_of(given)] != numbers["fingerprints"]:
                raise ValueError(other_order("It gives other data than when the checkpoint was begun."))
            drawn = numbers["positions"] and linearization.to_device(inputs_at(loader, numbers["positions"]))
            return serialization.survey_from(numbers["survey"]), drawn if given is None else given, data

        def reservoir_for(num_outputs: int) -> Reservoir | None:
            if given is not None or self.projector in _NEEDS_NO_INPUTS:
                return None
            size = self._num_subspace_inputs or max(100, ceil(2 * self.requested_dim / num_outputs))
            return Reservoir(size, self.seed)

        survey, reservoir = survey_of(
            loader, linearization, self._likelihood, self._estimated_noise, reservoir_for, progress
        )
        if checkpoint is not None:
            positions = reservoir.positions if reservoir else None
            numbers = {
                "survey": serialization.survey_numbers(survey),
                "positions": positions,
                "fingerprints": [data, fingerprint_of(given)],
            }
            checkpoint.write("survey", {}, numbers)
        return survey, reservoir.inputs if reservoir else given, data

    @staticmethod
    def _joined(x: Any, what: str) -> Any:
        """All inputs of a tensor, mapping or loader as one batch."""
        batches_of_inputs = list(input_batches(x))
        if not any(num_inputs(inputs) for inputs in batches_of_inputs):
            raise ValueError(f"There are no inputs: {what} is empty.")
        return join(batches_of_inputs)

    # Predicting -------------------------------------------------------------------------------------------------------

    def __call__(self, x: Any, link: str = "probit") -> Tensor | tuple[Tensor, Tensor]:
        """Classification: probabilities (n, C). Regression: outputs (n, C), covariance without σ² (n, C, C)."""
        prediction = self.predict(x, link)
        if prediction.probabilities is not None:
            return prediction.probabilities
        return prediction.mean, prediction.epistemic

    def predict(self, x: Any, link: str = "probit", samples: int = 1000) -> Prediction:
        """The prediction for a tensor, a dict batch or a loader of inputs, in chunks under the memory budget.

        link: how logits become probabilities, "probit", "mc" (with `samples`) or "bridge".
        """
        if link not in LINKS:
            raise ValueError(f"Unknown link '{link}'; choose one of {', '.join(LINKS)}.")
        posterior, survey = self._fitted()
        self._require_room_for_covariances(x)
        means, covariances = [], []
        with self._usable_linearization().borrowed():
            for jacobian in self._jacobians(x):
                means.append(jacobian.outputs)
                covariances.append(posterior.covariance(jacobian))
        generator = torch.Generator().manual_seed(self.seed)
        return survey.likelihood.prediction(torch.cat(means), torch.cat(covariances), link, samples, generator)

    def functional_covariance(self, x: Any, joint: bool = False) -> Tensor:
        """Σ_{P,x} = J P (PᵀΛP)⁻¹ PᵀJᵀ for each input (n, C, C), or with `joint` over all of them (nC, nC)."""
        posterior, _ = self._fitted()
        linearization = self._usable_linearization()
        if not joint:
            self._require_room_for_covariances(x)
            with linearization.borrowed():
                return torch.cat([posterior.covariance(jacobian) for jacobian in self._jacobians(x)])
        inputs = linearization.to_device(self._joined(x, "x"))
        rows = num_inputs(inputs) * self._fitted()[1].num_outputs
        require(
            2 * 8 * rows**2,
            linearization.device,
            f"A joint covariance of {rows:,} outputs",
            "Give fewer inputs at once, or use joint=False.",
        )
        return posterior.joint_covariance(Jacobians(linearization, inputs)).to(linearization.dtype)

    def functional_variance(self, x: Any) -> Tensor:
        """The diagonal of `functional_covariance`, (n, C), without forming (C, C)."""
        posterior, _ = self._fitted()
        with self._usable_linearization().borrowed():
            return torch.cat([posterior.variance(jacobian) for jacobian in self._jacobians(x)])

    def _require_room_for_covariances(self, x: Any) -> None:
        """A word before (n, C, C) numbers that do not fit; for a loader, whose length is not known, there is none."""
        if isinstance(x, Tensor | Mapping):
            n, C = num_inputs(x), self._fitted()[1].num_outputs
            linearization = self._usable_linearization()
            require(
                2 * n * C**2 * linearization.dtype.itemsize,
                linearization.device,
                f"An array of covariances of {C:,} outputs for {n:,} inputs",
                "Give fewer inputs at once, or use functional_variance, which needs C numbers an input.",
            )

    def trace(self, x: Any) -> Tensor:
        """Tr Σ_{P,x} over all inputs, for every leading dimension 1 … s: (s,) in float64, for the price of one."""
        posterior = self._subspace()
        with self._usable_linearization().borrowed():
            return torch.stack([posterior.traces(jacobian) for jacobian in self._jacobians(x)]).sum(0)

    def _jacobians(self, x: Any) -> Iterator[Jacobian]:
        linearization = self._linearization
        assert linearization is not None
        seen = 0
        for inputs in input_batches(x):
            if num_inputs(inputs):
                for jacobian in linearization.chunks(linearization.to_device(inputs)):
                    seen += jacobian.num_inputs
                    yield jacobian
        if not seen:
            raise ValueError("There are no inputs to predict for: x is empty.")

    # The posterior and its relatives ----------------------------------------------------------------------------------

    @property
    def projection(self) -> Tensor:
        """P (p, s) with orthonormal columns, leading ones first; built on demand for subsets."""
        projection = self._subspace().projection
        require(
            self._layout.num_parameters * projection.dim * self._usable_linearization().dtype.itemsize,
            self._usable_linearization().device,
            "The projection as a matrix",
            "Use truncate() first.",
        )
        return projection.matrix()

    @property
    def dim(self) -> int:
        """s, as used: p for "full"; at most the numerical rank."""
        posterior, _ = self._fitted()
        return posterior.dim if isinstance(posterior, SubspacePosterior) else self._layout.num_parameters

    @property
    def num_parameters(self) -> int:
        """p: the parameters that require grad."""
        return self._layout.num_parameters

    @property
    def prior_precision(self) -> float | None:
        """λ; None before fit where it is to be tuned."""
        return self._posterior.prior_precision if self._posterior is not None else self._prior_precision

    @property
    def noise_std(self) -> Noise | None:
        """σ of regression, given or estimated, one number or one for each output; None for classification and before
        an estimate."""
        likelihood = self._survey.likelihood if self._survey else self._likelihood
        if not isinstance(likelihood, Gaussian):
            return None
        return likelihood.noise_std if self._survey else self._noise_std

    def truncate(self, dim: int) -> "SubspaceLaplace":
        """The same posterior in the leading `dim` dimensions, without a pass over the data."""
        posterior = self._subspace()
        if checked_dim(dim) > posterior.dim:
            raise ValueError(f"Cannot truncate to {dim} dimensions: there are {posterior.dim}.")
        return self._with(posterior.truncated(dim))

    def with_prior(self, prior_precision: float) -> "SubspaceLaplace":
        """The same subspace under another λ, without a pass over the data (P was built at the old λ)."""
        posterior, _ = self._fitted()
        return self._with(posterior.with_prior(checked_prior(prior_precision)))

    def log_marginal_likelihood(
        self, prior_precision: float | Tensor | None = None, noise_std: float | Tensor | None = None
    ) -> Tensor:
        """The evidence ln p(D|θ̂) − ½λ‖θ̂‖² + ½ Σ ln(λ/(λ + γ)) at these (or the fitted) λ and σ, differentiable in both.

        γ are the eigenvalues of PᵀGGN P; for "full" of the whole GGN, whose eigenvalues cost O(p³). A likelihood
        without noise does not depend on σ.
        """
        posterior, survey = self._fitted()
        self._usable_linearization()
        prior = posterior.prior_precision if prior_precision is None else prior_precision
        checked_positive(prior, "prior_precision")
        noise = torch.as_tensor(survey.noise_std if noise_std is None else noise_std, dtype=torch.float64)
        if noise_std is not None:
            checked_noise(noise)
            self._require_noise_like(posterior, survey, noise.numel())
        return self._evidence(posterior, survey)(torch.as_tensor(prior, dtype=torch.float64), noise)

    @staticmethod
    def _require_noise_like(posterior: Posterior, survey: Survey, count: int) -> None:
        """Whether the evidence is known at another σ of so many numbers."""
        scales = survey.likelihood.curvature_scales
        if count != len(scales):
            raise ValueError(f"noise_std holds {count} numbers, but the posterior was fitted with {len(scales)}.")
        posterior.with_scales(scales)  # refuses where the outputs were summed up

    def optimize_prior_precision(
        self, method: str = "marglik", val_loader: Iterable[Any] | None = None, tune_noise: bool = False
    ) -> "SubspaceLaplace":
        """Sets λ to its best value, with P kept, and returns self.

        "marglik": the evidence, with `tune_noise` over λ and σ together. "validation": the least NLL on `val_loader`,
        found on a grid of λ and then on a finer one; two passes over these data.
        """
        posterior, survey = self._fitted()
        self._usable_linearization()
        noise = survey.noise_std
        if method == "marglik":
            if tune_noise:
                self._require_noise_like(posterior, survey, len(survey.likelihood.curvature_scales))
            evidence = self._evidence(posterior, survey)
            prior, noise = evidence.best_prior_and_noise(noise) if tune_noise else (evidence.best_prior(noise), noise)
        elif method == "validation":
            if val_loader is None:
                raise ValueError("method='validation' needs val_loader, a loader of (inputs, targets) batches.")
            if tune_noise:
                raise ValueError("tune_noise=True goes with method='marglik'; validation data tune λ alone.")
            linearization = self._usable_linearization()
            with linearization.borrowed():
                prior = best_prior_on(checked_loader(val_loader), posterior, survey, linearization)
        else:
            raise ValueError(f"Unknown method '{method}'; choose 'marglik' or 'validation'.")
        if isinstance(survey.likelihood, Gaussian) and tune_noise:
            survey = replace(survey.with_noise(noise), estimated_noise=None)
            posterior = posterior.with_scales(survey.likelihood.curvature_scales)
        self._posterior, self._survey = posterior.with_prior(prior), survey
        return self

    def sample(self, count: int) -> Tensor:
        """Draws of the parameters, (count, p), in `named_parameters()` order; the same for the same seed."""
        posterior, _ = self._fitted()
        linearization = self._usable_linearization()
        drawn = posterior.sample(self._noise(count))
        return self._layout.flat(linearization.model) + drawn.to(linearization.device, linearization.dtype)

    def functional_samples(self, x: Any, count: int) -> Tensor:
        """Draws of the linearised network's outputs, (count, n, C); a draw is one function, smooth across inputs and
        calls: the same draws of the parameters serve all inputs."""
        posterior, _ = self._fitted()
        linearization = self._usable_linearization()
        drawn = posterior.sample(self._noise(count)).to(linearization.device, linearization.dtype)
        vectors = self._layout.unflatten(drawn)
        with linearization.borrowed():
            parts = [jacobian.outputs + jacobian.matmul(vectors).permute(2, 0, 1) for jacobian in self._jacobians(x)]
        return torch.cat(parts, dim=1)

    def _noise(self, count: int) -> Callable[[int], Tensor]:
        rows = checked_count(count, "count")
        require(
            3 * 8 * rows * self._layout.num_parameters,
            self._usable_linearization().device,
            f"A set of {rows:,} draws of {self._layout.num_parameters:,} parameters",
            "Draw fewer at once.",
        )
        generator = torch.Generator().manual_seed(self.seed)
        return lambda width: torch.randn(rows, width, generator=generator, dtype=torch.float64)

    def update(self, loader: Iterable[Any], progress: bool = False) -> "SubspaceLaplace":
        """A new posterior that has also seen `loader`, with P kept: that of a fit on both with this P."""
        posterior, survey = self._subspace(), self._fitted()[1]
        linearization = self._usable_linearization()
        loader = checked_loader(loader)
        with linearization.borrowed():
            added, _ = survey_of(loader, linearization, survey.likelihood, None, lambda _: None, progress)
            stream = self._stream(loader, linearization, added, progress)
            curvatures = posterior.curvatures + reduced_ggn(stream, posterior.projection)
        joined = survey.joined(added)
        other = self._with(replace(posterior, curvatures=curvatures, scales=joined.likelihood.curvature_scales))
        other._survey = joined
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted posterior to one safetensors file with a checksum; the model is only fingerprinted."""
        posterior, survey = self._fitted()
        self._usable_linearization()
        tensors, numbers = serialization.posterior_tensors(posterior)
        description = {
            "posterior": numbers,
            "model": serialization.model_fingerprint(self.model),
            "survey": serialization.survey_numbers(survey),
            "projector": self.projector if isinstance(self.projector, str) else None,
            "dim": self.requested_dim,
            "seed": self.seed,
            "direction_tolerance": self._tolerance,
        }
        checked_file.write(path, tensors, description)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        forward: Callable[[nn.Module, Any], Tensor] | None = None,
        memory_budget: int | None = None,
    ) -> "SubspaceLaplace":
        """The posterior that `save` wrote, for the same model; tensors go to the model's device.

        No code is executed. Raises `SavedFileError` for a file that is not ours, altered or from another model.
        """
        layout = ParameterLayout.of(model)
        tensors, description = checked_file.read(path, layout.flat(model).device)
        try:
            serialization.require_same_model(description["model"], model)
            survey = serialization.survey_from(description["survey"])
            la = cls(
                model,
                survey.likelihood,
                projector=description["projector"] or custom,
                dim=description["dim"],
                prior_precision=description["posterior"]["prior_precision"],
                seed=description["seed"],
                forward=forward,
                memory_budget=memory_budget,
                direction_tolerance=description["direction_tolerance"],
            )
            la._survey = survey
            la._linearization = la._new_linearization()
            la._posterior = serialization.posterior_from(
                tensors, description["posterior"], layout, la._linearization.dtype
            )
        except (KeyError, TypeError) as error:
            raise checked_file.SavedFileError(f"{path} is not complete: {error} is missing or odd.") from error
        la._fingerprint = ParameterLayout.fingerprint(model)
        return la

    def summary(self) -> str:
        """What was fitted, as text: sizes, λ, σ, how parameters are treated, and the seconds of each stage."""
        posterior, survey = self._fitted()
        linearization = self._usable_linearization()
        lines = [
            repr(self),
            f"  parameters p      {self.num_parameters:,} in {len(self._layout.names)} tensors ({linearization.dtype})",
            f"  dimension s       {self.dim:,}",
            f"  prior precision λ {posterior.prior_precision:.6g}",
        ]
        if self.noise_std is not None:
            lines.append(f"  noise σ           {self._noise_text(6)}{' (estimated)' if survey.estimated_noise else ''}")
        lines += [
            f"  data N            {survey.num_data:,} inputs, {survey.num_outputs} outputs",
            f"  memory of P       {readable(self._projection_bytes())}",
            f"  backward passes   {linearization.passes:,} through one input",
        ]
        for name, why in linearization.unusual_parameters().items():
            lines.append(f"  general path      {name}: {why}")
        for stage, seconds in self._seconds.items():
            lines.append(f"  {stage:<18}{seconds:.2f} s")
        return "\n".join(lines)

    def _projection_bytes(self) -> int:
        posterior, _ = self._fitted()
        if not isinstance(posterior, SubspacePosterior):
            return 0
        tensors, _ = serialization.posterior_tensors(posterior)
        return sum(t.numel() * t.element_size() for name, t in tensors.items() if name.startswith(("basis", "indices")))

    def _with(self, posterior: Posterior) -> "SubspaceLaplace":
        other = copy.copy(self)
        other._posterior = posterior
        return other

    def _fitted(self) -> tuple[Posterior, Survey]:
        if self._posterior is None or self._survey is None:
            raise RuntimeError("This SubspaceLaplace is not fitted yet; call fit(train_loader) first.")
        return self._posterior, self._survey

    def _subspace(self) -> SubspacePosterior:
        posterior, _ = self._fitted()
        if not isinstance(posterior, SubspacePosterior):
            raise ValueError(
                "projector='full' has no subspace: no projection, leading dimensions, truncation or update."
            )
        return posterior

    def _usable_linearization(self) -> Linearization:
        self._fitted()
        assert self._linearization is not None
        if ParameterLayout.fingerprint(self.model) != self._fingerprint:
            raise RuntimeError(
                "The model's parameters have changed since fit, so the posterior no longer belongs to it; fit again."
            )
        return self._linearization

    @property
    def _projector_name(self) -> str:
        return self.projector if isinstance(self.projector, str) else getattr(self.projector, "__name__", "custom")

    def _noise_text(self, digits: int) -> str:
        stds = self.noise_std if isinstance(self.noise_std, tuple) else (self.noise_std,)
        return ", ".join(f"{std:.{digits}g}" for std in stds)

    def __repr__(self) -> str:
        head = f"SubspaceLaplace({type(self.model).__name__}, {self._likelihood.kind}, {self._projector_name}"
        if self._posterior is None or self._survey is None:
            return f"{head}, not fitted)"
        noise = "" if self.noise_std is None else f", σ={self._noise_text(4)}"
        prior = f"λ={self._posterior.prior_precision:.4g}"
        return f"{head}, s={self.dim} of p={self.num_parameters:,}, {prior}{noise}, N={self._survey.num_data:,})"


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


def custom(context: ProjectorContext) -> Projection:
    """Stands for the function that built the subspace of a loaded posterior; functions are not saved."""
    raise RuntimeError("This posterior was loaded, and its projector was a function: make a new one to fit again.")


def _checked_projector(projector: Any) -> str | Projector:
    if isinstance(projector, str):
        if projector != "full" and projector not in PROJECTORS:
            raise ValueError(f"Unknown projector '{projector}'; choose one of {', '.join([*PROJECTORS, 'full'])}.")
        return projector
    if not callable(projector):
        raise TypeError("projector must be a name or a function from a ProjectorContext to a Projection.")
    return projector
