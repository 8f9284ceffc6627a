"""`SubspaceLaplace`, the door through which users come in."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from sublaplace import checked_file, fitting, later_passes, serialization
from sublaplace.arguments import (
    AUTO,
    checked_complement,
    checked_complement_weight,
    checked_count,
    checked_dim,
    checked_folder,
    checked_likelihood,
    checked_noise,
    checked_positive,
    checked_prior,
    checked_projector,
    checked_seed,
    checked_share,
    checked_subspace_inputs,
    checked_tolerance,
    optional_count,
)
from sublaplace.certificate import Bounds, Certificate
from sublaplace.complement import ComplementedPosterior
from sublaplace.data import Chained, checked_loader, input_batches, with_labels_under
from sublaplace.distributed import shared_out
from sublaplace.fitting import Stage
from sublaplace.jacobians import Jacobian, Jacobians, Linearization
from sublaplace.jacobians.inputs import call_model, num_inputs
from sublaplace.likelihoods import Gaussian, Likelihood, Noise
from sublaplace.matrix_free import FullCovariance
from sublaplace.memory import default_budget, require
from sublaplace.parameters import ParameterLayout, in_working_precision
from sublaplace.posterior import Posterior, SubspacePosterior
from sublaplace.precision import BlockPrecision
from sublaplace.predictive import LINKS, Prediction
from sublaplace.prior import Evidence, best_prior_on, evidence_of
from sublaplace.projection import Projection
from sublaplace.projectors.context import Projector, ProjectorContext
from sublaplace.settings import Settings
from sublaplace.subspace_inputs import joined_inputs
from sublaplace.summary import summary_text
from sublaplace.survey import NoiseEstimate, Survey


class SubspaceLaplace:
    """The Laplace approximation of a trained network in a subspace of its parameters.

    Args:
        model: any module that maps a batch to (n, C); trained; left as it is. Devices and dtypes follow it; a half
            precision model is copied to float32, with a warning.
        likelihood: "classification", "regression", "binary" (also "multi-label": yes/no outputs) or a likelihood
            object, such as ``Categorical(ignore_index=-100)``.
        projector: a name from `PROJECTORS`, "full", or a function from a `ProjectorContext` to a `Projection`.
        dim: s, the dimension of the subspace ("full" and "last-layer" have their own). "auto": the smallest that
            guarantees the share `captured` of the full approximation's trace. 0, with a complement: no subspace.
        prior_precision: λ > 0 of the prior N(0, λ⁻¹ I), or "marglik": the λ that maximises the evidence of the KFAC
            approximation, found before P is built.
        noise_std: σ of regression, one number or one for each output; None: the standard deviation of the training
            residuals, pooled over the outputs; "per-output": that of each output. Alias `sigma_noise`.
        subspace_inputs: X′, a tensor or loader of inputs (no labels needed) that P is built from; None: drawn from the
            training data; "perturbed": drawn, with noise of `perturbation` times the spread of the data.
        num_subspace_inputs: how many are drawn; None: max(100, 2s/C), at most all.
        complement: what the posterior is outside of the subspace: None (nothing, as in the paper), "kfac" or
            "diagonal".
        complement_weight: how much the curvature outside counts. "fitted": the weight that brings the posterior nearest
            to the full Laplace approximation on a fifth of X′, which is held back.
        memory_budget: bytes for temporary chunks; None: a quarter of what is free.
        scratch_folder: keep P, and its products with the GGN, in nameless files of this folder instead of in memory;
            for CPU models whose p·s numbers do not fit.
        seed: of the library's own generators; the global random state is never touched.
        forward: how the model is called, (model, inputs) → (n, C); None: ``model(x)``, ``model(**x)`` for a mapping,
            ``model(*x)`` for a tuple, and ``.logits`` of the result where there is such a thing.
        direction_tolerance: the share of the trace of the output Hessians that may be dropped to save backward passes;
            None: 1e-8, and 0 for float64 models.
        labels_key: where a batch that is a mapping holds its targets; all else in it is given to the model.
        captured: the share that dim="auto" must guarantee.
        max_dim: the largest dimension that dim="auto" may take; None: 500.
        perturbation: of subspace_inputs="perturbed".
        certified: make what `bounds` and `captured` need in the same pass as the posterior, with no direction dropped;
            otherwise they make it when first asked, in a pass of their own over the training data.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        projector: str | Projector = "lowrank-kfac",
        dim: int | str = 100,
        prior_precision: float | str = 1.0,
        noise_std: float | Sequence[float] | Tensor | str | None = None,
        subspace_inputs: Any = None,
        num_subspace_inputs: int | None = None,
        complement: str | None = None,
        memory_budget: int | None = None,
        seed: int = 0,
        *,
        sigma_noise: float | Sequence[float] | Tensor | str | None = None,
        forward: Callable[[nn.Module, Any], Tensor] | None = None,
        labels_key: str = "labels",
        direction_tolerance: float | None = None,
        captured: float = 0.5,
        max_dim: int | None = None,
        perturbation: float = 0.1,
        complement_weight: float | str = 1.0,
        certified: bool = False,
        scratch_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
        if noise_std is not None and sigma_noise is not None:
            raise ValueError("noise_std and sigma_noise are two names of the same thing; give one of them.")
        self.model = model
        given_noise = noise_std if noise_std is not None else sigma_noise
        self._noise_std = checked_noise(given_noise)
        estimated_noise: NoiseEstimate | None = None
        if isinstance(likelihood, str) and likelihood == "regression" and self._noise_std is None:
            estimated_noise = "pooled" if given_noise is None else "per-output"
        self._settings = Settings(
            likelihood=checked_likelihood(likelihood, given_noise),
            estimated_noise=estimated_noise,
            projector=checked_projector(projector, checked_complement(complement), dim),
            dim=AUTO if isinstance(dim, str) and dim == AUTO else checked_dim(dim, 1 if complement is None else 0),
            # None: λ is tuned when fitting.
            prior_precision=None if prior_precision == "marglik" else checked_prior(prior_precision),
            subspace_inputs=checked_subspace_inputs(subspace_inputs, labels_key),
            num_subspace_inputs=optional_count(num_subspace_inputs, "num_subspace_inputs"),
            complement=complement,
            complement_weight=checked_complement_weight(complement_weight, complement),
            seed=checked_seed(seed),
            direction_tolerance=checked_tolerance(direction_tolerance),
            certified=certified,
            captured=checked_share(captured, "captured"),
            max_dim=optional_count(max_dim, "max_dim"),
            perturbation=checked_positive(perturbation, "perturbation"),
        )
        self._memory_budget = optional_count(memory_budget, "memory_budget")
        self._scratch_folder = checked_folder(scratch_folder, model)
        self._forward = call_model if forward is None else forward
        self._labels_key = labels_key
        self._layout = ParameterLayout.of(model)
        self._posterior: Posterior | None = None
        self._certificate: Certificate | None = None
        self._linearization: Linearization | None = None
        self._survey: Survey | None = None
        self._data: Iterable[Any] | None = None  # for a certificate that is asked for later
        self._fingerprint: tuple[object, ...] = ()
        self._stages: dict[str, Stage] = {}
        self._kfac_trace_ratios: dict[str, float] = {}
        self._captured: float | None = None  # as the fit found it

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
        loader = shared_out(self._checked_loader(train_loader))
        linearization = self._new_linearization()
        fitted = fitting.fit(self._settings, loader, linearization, checkpoint, progress)
        self._posterior, self._survey, self._certificate = fitted.posterior, fitted.survey, fitted.certificate
        self._linearization, self._layout, self._data = linearization, linearization.layout, loader
        self._stages, self._kfac_trace_ratios = fitted.stages, fitted.kfac_trace_ratios
        self._captured = fitted.captured
        self._fingerprint = ParameterLayout.fingerprint(self.model)
        return self

    def _checked_loader(self, loader: Any) -> Iterable[Any]:
        return with_labels_under(self._labels_key, checked_loader(loader))

    def _new_linearization(self) -> Linearization:
        linearization = Linearization(in_working_precision(self.model), self._forward)
        linearization.scratch_folder = self._scratch_folder
        linearization.num_vectors = self._settings.num_vectors
        linearization.memory_budget = self._memory_budget or default_budget(linearization.device)
        return linearization

    def _evidence(self, posterior: Posterior, survey: Survey) -> Evidence:
        squared_norm = float(self._layout.flat(self.model).double().square().sum())
        return evidence_of(posterior, survey, squared_norm)

    # Predicting -------------------------------------------------------------------------------------------------------

    def __call__(self, x: Any, link: str = "probit") -> Tensor | tuple[Tensor, Tensor]:
        """Classification: probabilities (n, C). Regression: outputs (n, C), covariance without σ² (n, C, C)."""
        prediction = self.predict(x, link)
        if prediction.probabilities is not None:
            return prediction.probabilities
        return prediction.mean, prediction.epistemic

    def predict(self, x: Any, link: str = "probit", samples: int = 1000, progress: bool = False) -> Prediction:
        """The prediction for a tensor, a dict batch or a loader of inputs, in chunks under the memory budget.

        link: how logits become probabilities, "probit", "mc" (with `samples`) or "bridge". progress: show a bar.
        """
        if link not in LINKS:
            raise ValueError(f"Unknown link '{link}'; choose one of {', '.join(LINKS)}.")
        checked_count(samples, "samples")
        posterior, survey = self._fitted()
        self._require_room_for_covariances(x)
        means, covariances = [], []
        with self._usable_linearization().borrowed():
            for jacobian in self._jacobians(x, progress):
                means.append(jacobian.outputs)
                covariances.append(posterior.covariance(jacobian))
        generator = torch.Generator().manual_seed(self._settings.seed)
        return survey.likelihood.prediction(torch.cat(means), torch.cat(covariances), link, samples, generator)

    def functional_covariance(self, x: Any, joint: bool = False) -> Tensor:
        """Σ_{P,x} = J P (PᵀΛP)⁻¹ PᵀJᵀ for each input (n, C, C), or with `joint` over all of them (nC, nC)."""
        posterior, _ = self._fitted()
        linearization = self._usable_linearization()
        if not joint:
            self._require_room_for_covariances(x)
            with linearization.borrowed():
                return torch.cat([posterior.covariance(jacobian) for jacobian in self._jacobians(x)])
        inputs = linearization.to_device(joined_inputs(with_labels_under(self._labels_key, x), "x"))
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

    def bounds(self, x: Any, progress: bool = False) -> Bounds:
        """Covariances between which that of the full Laplace approximation lies, for each input: lower ≼ Σ ≼ upper.

        The lower one is that of the subspace (without a complement). For classification, `.probabilities` is the
        interval of each predicted probability by the probit link. Needs no more than p × s matrices; see `Certificate`.
        """
        certificate, survey = self._certified(progress), self._fitted()[1]
        outputs, lower, upper = [], [], []
        with self._usable_linearization().borrowed():
            for jacobian in self._jacobians(x, progress):
                outputs.append(jacobian.outputs)
                lower.append(certificate.lower(jacobian).to(jacobian.outputs.dtype))
                upper.append(certificate.upper(jacobian).to(jacobian.outputs.dtype))
        result = Bounds(torch.cat(lower), torch.cat(upper))
        variances = (ends.diagonal(dim1=1, dim2=2) for ends in result)
        result.probabilities = survey.likelihood.probability_interval(torch.cat(outputs), *variances)
        return result

    def captured(self, x: Any, progress: bool = False) -> Tensor:
        """The share of the full Laplace approximation's trace that every leading dimension captures at least: (s,).

        Tr Σ_{P_s} over the upper bound of the trace, both summed over the inputs; in float64.
        """
        certificate = self._certified(progress)
        with self._usable_linearization().borrowed():
            return certificate.captured(self._jacobians(x, progress))

    def _certified(self, progress: bool) -> Certificate:
        """The certificate; made from the training data where the fit did not."""
        posterior, linearization = self._subspace(), self._usable_linearization()
        if self._certificate is None:
            if self._data is None:
                raise RuntimeError(
                    "Bounds need the products of the GGN with the subspace, which were not saved: fit with "
                    "certified=True before saving."
                )
            self._certificate = later_passes.certificate_of(
                self._settings, posterior, self._fitted()[1], self._data, linearization, progress
            )
        return self._certificate

    def full_covariance(
        self, x: Any, joint: bool = False, tolerance: float = 1e-6, progress: bool = False
    ) -> FullCovariance:
        r"""The covariance of the *full* Laplace approximation for a few inputs, at any size of network: a yardstick.

        Λ⁻¹Jᵀ by block conjugate gradients to a relative residual of `tolerance`, without any matrix of p × p.
        `.covariance` is (n, C, C), or (nC, nC) with `joint`; the true one lies above it by at most `.error`, in
        every direction. The training data are read once an iteration (`.passes`: ten to forty usually, more where λ is
        small). Rounding, or too little memory for the directions of earlier iterations, may end the search before, as a
        warning and `.relative_residual` tell. Memory: 8·p·n·C numbers, and the memory budget.
        """
        posterior, survey = self._fitted()
        linearization = self._usable_linearization()
        checked_positive(tolerance, "tolerance")
        if self._data is None:
            raise RuntimeError("The full covariance needs the training data, which are not saved: fit again.")
        inputs = linearization.to_device(joined_inputs(with_labels_under(self._labels_key, x), "x"))
        full = later_passes.full_covariance_of(
            self._settings, posterior, survey, self._data, Jacobians(linearization, inputs), tolerance, progress
        )
        if joint:
            return full
        n, C = num_inputs(inputs), survey.num_outputs
        blocks = full.covariance.view(n, C, n, C).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        return full._replace(covariance=blocks)

    def trace(self, x: Any) -> Tensor:
        """Tr Σ_{P,x} over all inputs, for every leading dimension 1 … s: (s,) in float64, for the price of one.

        Of the subspace alone, without a complement.
        """
        posterior = self._subspace()
        with self._usable_linearization().borrowed():
            return torch.stack([posterior.traces(jacobian) for jacobian in self._jacobians(x)]).sum(0)

    def _jacobians(self, x: Any, progress: bool = False) -> Iterator[Jacobian]:
        linearization = self._linearization
        assert linearization is not None
        total = num_inputs(x) if isinstance(x, Tensor | Mapping) else None
        seen = 0
        with tqdm(total=total, desc="predictions", unit="input", disable=not progress, leave=False) as bar:
            for inputs in input_batches(with_labels_under(self._labels_key, x)):
                if num_inputs(inputs):
                    for jacobian in linearization.chunks(linearization.to_device(inputs)):
                        yield jacobian
                        seen += jacobian.num_inputs
                        bar.update(jacobian.num_inputs)
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
    def projector(self) -> str | Projector:
        """As it was given."""
        return self._settings.projector

    @property
    def dim(self) -> int:
        """s, as used: p for "full", 0 for a complement alone; at most the numerical rank."""
        posterior, _ = self._fitted()
        if isinstance(posterior, SubspacePosterior | ComplementedPosterior):
            return posterior.dim
        return 0 if isinstance(posterior, BlockPrecision) else self._layout.num_parameters

    @property
    def complement_weight(self) -> float | None:
        """The weight of the curvature outside of the subspace, as used; None without a complement."""
        posterior, _ = self._fitted()
        outside = posterior.outside if isinstance(posterior, ComplementedPosterior) else posterior
        return outside.weight if isinstance(outside, BlockPrecision) else None

    @property
    def stages(self) -> dict[str, Stage]:
        """What each stage of the fit took: `.seconds`, and `.peak_bytes` of the process up to its end."""
        return dict(self._stages)

    @property
    def num_parameters(self) -> int:
        """p: the parameters that require grad."""
        return self._layout.num_parameters

    @property
    def prior_precision(self) -> float | None:
        """λ; None before fit where it is to be tuned."""
        return self._posterior.prior_precision if self._posterior is not None else self._settings.prior_precision

    @property
    def noise_std(self) -> Noise | None:
        """σ of regression, given or estimated, one number or one for each output; None for classification and before
        an estimate."""
        likelihood = self._survey.likelihood if self._survey else self._settings.likelihood
        if not isinstance(likelihood, Gaussian):
            return None
        return likelihood.noise_std if self._survey else self._noise_std

    def truncate(self, dim: int) -> "SubspaceLaplace":
        """The same posterior in the leading `dim` dimensions, without a pass over the data."""
        subspace = self._subspace()
        if checked_dim(dim, 0) == 0:
            raise ValueError("Cannot truncate to dim=0: at least one dimension must be left.")
        if dim > subspace.dim:
            raise ValueError(f"Cannot truncate to {dim} dimensions: there are {subspace.dim}.")
        whole = self._posterior if isinstance(self._posterior, ComplementedPosterior) else subspace
        certificate = None if self._certificate is None else self._certificate.truncated(dim)
        return self._with(whole.truncated(dim), certificate)

    def with_prior(self, prior_precision: float) -> "SubspaceLaplace":
        """The same subspace under another λ, without a pass over the data (P was built at the old λ)."""
        posterior, _ = self._fitted()
        prior = checked_positive(prior_precision, "prior_precision")
        certificate = None if self._certificate is None else self._certificate.with_prior(prior)
        return self._with(posterior.with_prior(prior), certificate)

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
        self,
        method: str = "marglik",
        val_loader: Iterable[Any] | None = None,
        tune_noise: bool = False,
        progress: bool = False,
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
                prior = best_prior_on(self._checked_loader(val_loader), posterior, survey, linearization, progress)
        else:
            raise ValueError(f"Unknown method '{method}'; choose 'marglik' or 'validation'.")
        if isinstance(survey.likelihood, Gaussian) and tune_noise:
            survey = replace(survey.with_noise(noise), estimated_noise=None)
            scales = survey.likelihood.curvature_scales
            posterior = posterior.with_scales(scales)
            if self._certificate is not None:
                # With several scales the products were summed over the outputs: they are made anew when asked for.
                self._certificate = self._certificate.with_scale(scales[0]) if len(scales) == 1 else None
        self._posterior, self._survey = posterior.with_prior(prior), survey
        self._certificate = None if self._certificate is None else self._certificate.with_prior(prior)
        self._captured = None
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
        generator = torch.Generator().manual_seed(self._settings.seed)
        return lambda width: torch.randn(rows, width, generator=generator, dtype=torch.float64)

    def update(self, loader: Iterable[Any], progress: bool = False) -> "SubspaceLaplace":
        """A new posterior that has also seen `loader`, with P kept: that of a fit on both with this P."""
        posterior, survey = self._subspace(), self._fitted()[1]
        if isinstance(self._posterior, ComplementedPosterior):
            raise ValueError(
                "A posterior with a complement cannot be updated: its factors outside of the subspace were summed over "
                "the first data alone. Fit again on all data."
            )
        linearization = self._usable_linearization()
        loader = shared_out(self._checked_loader(loader))
        updated, certificate, joined = later_passes.updated(
            self._settings, posterior, self._certificate, survey, loader, linearization, progress
        )
        other = self._with(updated, certificate)
        other._survey = joined
        other._data = None if self._data is None else Chained((self._data, loader))
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted posterior to one safetensors file with a checksum; the model is only fingerprinted."""
        posterior, survey = self._fitted()
        self._usable_linearization()
        tensors, numbers = serialization.posterior_tensors(posterior)
        settings = self._settings
        description = {
            "posterior": numbers,
            "certificate": None,
            "model": serialization.model_fingerprint(self.model),
            "survey": serialization.survey_numbers(survey),
            "projector": settings.projector if isinstance(settings.projector, str) else None,
            "dim": settings.dim,
            "complement": settings.complement,
            "complement_weight": settings.complement_weight,
            "seed": settings.seed,
            "direction_tolerance": settings.direction_tolerance,
        }
        if self._certificate is not None:
            products, description["certificate"] = serialization.certificate_tensors(self._certificate)
            tensors = tensors | products
        checked_file.write(path, tensors, description)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        forward: Callable[[nn.Module, Any], Tensor] | None = None,
        memory_budget: int | None = None,
        labels_key: str = "labels",
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
                complement=description["complement"],
                complement_weight=description["complement_weight"],
                prior_precision=description["posterior"]["prior_precision"],
                seed=description["seed"],
                forward=forward,
                memory_budget=memory_budget,
                labels_key=labels_key,
                direction_tolerance=description["direction_tolerance"],
            )
            la._survey = survey
            la._linearization = la._new_linearization()
            la._posterior = serialization.posterior_from(
                tensors, description["posterior"], layout, la._linearization.dtype
            )
            if description["certificate"] is not None:
                la._certificate = serialization.certificate_from(
                    tensors, description["certificate"], layout, la._linearization.dtype
                )
        except (KeyError, TypeError) as error:
            raise checked_file.SavedFileError(f"{path} is not complete: {error} is missing or odd.") from error
        la._fingerprint = ParameterLayout.fingerprint(model)
        return la

    def summary(self) -> str:
        """What was fitted, as text: sizes, λ, σ, how parameters are treated, seconds and memory of each stage; and with
        `certified` or dim="auto" the captured share of the trace."""
        posterior, survey = self._fitted()
        linearization = self._usable_linearization()
        return summary_text(
            repr(self), posterior, survey, linearization, self._stages, self._kfac_trace_ratios, self._captured
        )

    def _with(self, posterior: Posterior, certificate: Certificate | None) -> "SubspaceLaplace":
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._posterior, other._certificate, other._captured = posterior, certificate, None
        return other

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: all but the linearization, which knows the modules of this very model."""
        return self.__dict__ | {"_linearization": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._posterior is not None:
            self._linearization = self._new_linearization()

    def _fitted(self) -> tuple[Posterior, Survey]:
        if self._posterior is None or self._survey is None:
            raise RuntimeError("This SubspaceLaplace is not fitted yet; call fit(train_loader) first.")
        return self._posterior, self._survey

    def _subspace(self) -> SubspacePosterior:
        posterior, _ = self._fitted()
        if isinstance(posterior, ComplementedPosterior):
            return posterior.inside
        if not isinstance(posterior, SubspacePosterior):
            which = "projector='full'" if self.dim else "dim=0"
            raise ValueError(
                f"{which} has no subspace: no projection, leading dimensions, truncation, update or bounds."
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

    def __repr__(self) -> str:
        settings = self._settings
        outside = "" if settings.complement is None else f" + {settings.complement} outside"
        what = f"{settings.likelihood.kind}, {settings.projector_name}{outside}"
        head = f"SubspaceLaplace({type(self.model).__name__}, {what}"
        if self._posterior is None or self._survey is None:
            return f"{head}, not fitted)"
        noise = self.noise_std
        stds = () if noise is None else noise if isinstance(noise, tuple) else (noise,)
        sigma = f", σ={', '.join(f'{std:.4g}' for std in stds)}" if stds else ""
        prior = f"λ={self._posterior.prior_precision:.4g}"
        return f"{head}, s={self.dim} of p={self.num_parameters:,}, {prior}{sigma}, N={self._survey.num_data:,})"


def custom(context: ProjectorContext) -> Projection:
    """Stands for the function that built the subspace of a loaded posterior; functions are not saved."""
    raise RuntimeError("This posterior was loaded, and its projector was a function: make a new one to fit again.")
