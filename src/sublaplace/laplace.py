"""`SubspaceLaplace`, the door through which users come in."""

import copy
import operator
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from sublaplace.curvature import CurvatureStream, reduced_ggn
from sublaplace.data import Reservoir, batches, checked_loader, input_batches, join
from sublaplace.jacobians import Jacobian, Jacobians, Linearization
from sublaplace.jacobians.linearization import call_model, num_inputs
from sublaplace.likelihoods import Categorical, Gaussian, Likelihood, Residuals
from sublaplace.memory import default_budget, readable, require
from sublaplace.parameters import ParameterLayout
from sublaplace.posterior import Posterior, SubspacePosterior
from sublaplace.precision import isotropic_precision
from sublaplace.predictive import LINKS, Prediction, probabilities
from sublaplace.projection import Projection, Subset
from sublaplace.projectors.context import Projector, ProjectorContext
from sublaplace.projectors.low_rank import low_rank
from sublaplace.projectors.subset import diagonal_variances, largest, last_layer
from sublaplace.projectors.swag import swag_variances


def _isotropic(context: ProjectorContext) -> Projection:
    like = torch.empty(0, dtype=context.linearization.dtype, device=context.linearization.device)
    precision = isotropic_precision(context.linearization.layout, like, context.prior_precision)
    return low_rank(context.subspace_jacobians, precision, context.dim)


def _magnitude(context: ProjectorContext) -> Subset:
    linearization = context.linearization
    return largest(linearization, linearization.layout.flat(linearization.model).abs(), context.dim)


def _swag(context: ProjectorContext) -> Subset:
    stream = context.stream
    scores = swag_variances(stream.linearization, stream.loader, stream.likelihood, progress=stream.progress)
    return largest(stream.linearization, scores, context.dim)


PROJECTORS: dict[str, Projector] = {
    "lowrank-kfac": lambda c: low_rank(c.subspace_jacobians, c.kfac(), c.dim),
    "lowrank-diagonal": lambda c: low_rank(c.subspace_jacobians, c.diagonal(), c.dim),
    "lowrank-isotropic": _isotropic,
    "lowrank-ggn": lambda c: low_rank(c.subspace_jacobians, c.exact(), c.dim),
    "subset-magnitude": _magnitude,
    "subset-diagonal": lambda c: largest(c.linearization, diagonal_variances(c.diagonal()), c.dim),
    "subset-swag": _swag,
    "last-layer": lambda c: last_layer(c.linearization, c.num_outputs),
}
"""The only table from names to builders; "full" is no projection and has no entry."""

_NEEDS_NO_INPUTS = ("subset-magnitude", "subset-diagonal", "subset-swag", "last-layer", "full")


@dataclass(frozen=True)
class _Survey:
    """What a first look at the training data tells."""

    num_data: int
    num_outputs: int
    likelihood: Likelihood
    subspace_inputs: Any
    log_likelihood: float


class SubspaceLaplace:
    """The Laplace approximation of a trained network in a subspace of its parameters.

    Args:
        model: any module that maps a batch to (n, C); trained; left as it is.
        likelihood: "classification", "regression" or a likelihood object.
        projector: a name from `PROJECTORS`, "full", or a function from a `ProjectorContext` to a `Projection`.
        dim: s, the dimension of the subspace ("full" and "last-layer" have their own).
        prior_precision: λ > 0 of the prior N(0, λ⁻¹ I).
        noise_std: σ of regression; None: the standard deviation of the training residuals. Alias `sigma_noise`.
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
        prior_precision: float = 1.0,
        noise_std: float | None = None,
        subspace_inputs: Any = None,
        num_subspace_inputs: int | None = None,
        memory_budget: int | None = None,
        seed: int = 0,
        *,
        sigma_noise: float | None = None,
        forward: Callable[[nn.Module, Any], Tensor] | None = None,
        direction_tolerance: float | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
        if noise_std is not None and sigma_noise is not None:
            raise ValueError("noise_std and sigma_noise are two names of the same thing; give one of them.")
        self.model = model
        self.projector = _checked_projector(projector)
        self.requested_dim = _checked_dim(dim)
        self._prior_precision = _checked_prior(prior_precision)
        self._noise_std = noise_std if noise_std is not None else sigma_noise
        self._likelihood = _checked_likelihood(likelihood, self._noise_std)
        self._estimates_noise = likelihood == "regression" and self._noise_std is None
        self._subspace_inputs = subspace_inputs
        self._num_subspace_inputs = _checked_count(num_subspace_inputs, "num_subspace_inputs")
        self._memory_budget = _checked_count(memory_budget, "memory_budget")
        self.seed = seed
        self._forward = call_model if forward is None else forward
        self._tolerance = direction_tolerance
        self._layout = ParameterLayout.of(model)
        self._posterior: Posterior | None = None
        self._linearization: Linearization | None = None
        self._survey: _Survey | None = None
        self._fingerprint: tuple[object, ...] = ()
        self._seconds: dict[str, float] = {}

    # Fitting ----------------------------------------------------------------------------------------------------------

    def fit(self, train_loader: Iterable[Any], progress: bool = False) -> "SubspaceLaplace":
        """Builds P and the reduced posterior from a re-iterable of (inputs, targets) batches; returns self.

        Streams the data a few times: once to look at it, once or twice for the curvature. If anything fails, the model
        and this object are as before.
        """
        loader = checked_loader(train_loader)
        seconds: dict[str, float] = {}
        linearization = Linearization(self.model, self._forward)
        linearization.memory_budget = self._memory_budget or default_budget(linearization.device)
        with linearization.borrowed():
            with _timed(seconds, "survey"):
                survey = self._look_at(loader, linearization, progress)
            tolerance = self._tolerance
            if tolerance is None:
                tolerance = 0.0 if linearization.dtype == torch.float64 else 1e-8
            stream = CurvatureStream(
                linearization, loader, survey.likelihood, tolerance, progress, num_data=survey.num_data
            )
            context = ProjectorContext(
                stream=stream,
                subspace_jacobians=Jacobians(linearization, survey.subspace_inputs),
                num_data=survey.num_data,
                num_outputs=survey.num_outputs,
                dim=self._fitting_dim(linearization),
                prior_precision=self._prior_precision,
                seed=self.seed,
            )
            posterior = self._posterior_from(context, seconds)
        self._posterior, self._linearization, self._survey = posterior, linearization, survey
        self._fingerprint = ParameterLayout.fingerprint(self.model)
        self._seconds = seconds
        return self

    def _posterior_from(self, context: ProjectorContext, seconds: dict[str, float]) -> Posterior:
        if self.projector == "full":
            with _timed(seconds, "full posterior"):
                return context.exact()
        build = PROJECTORS[self.projector] if isinstance(self.projector, str) else self.projector
        with _timed(seconds, "projector"):
            projection = build(context)
        with _timed(seconds, "reduced posterior"):
            curvature = reduced_ggn(context.stream, projection)
        return SubspacePosterior(
            projection,
            curvature,
            projection.gram(),
            context.stream.likelihood.curvature_scale,
            self._prior_precision,
        )

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

    def _look_at(self, loader: Iterable[Any], linearization: Linearization, progress: bool) -> _Survey:
        """One forward pass over the data: checks it, counts it, estimates σ and draws X′."""
        likelihood = self._likelihood
        total, C = 0, 0
        log_likelihood, residuals = 0.0, Residuals()
        reservoir: Reservoir | None = None
        for inputs, targets in batches(tqdm(loader, desc="survey", disable=not progress, leave=False)):
            inputs, targets = linearization.to_device(inputs), targets.to(linearization.device)
            if total == 0:
                linearization.chunk_size(inputs)  # probes the network
            outputs = linearization.outputs(inputs)
            likelihood.check_targets(outputs, targets)
            if total == 0:
                C = outputs.shape[1]
                if self._subspace_inputs is None and self.projector not in _NEEDS_NO_INPUTS:
                    reservoir = Reservoir(self._drawn_inputs(C), self.seed)
            if reservoir is not None:
                reservoir.add(inputs)
            if isinstance(likelihood, Gaussian):
                residuals.add(targets - outputs)
            else:
                log_likelihood += float(likelihood.log_likelihood(outputs, targets).sum())
            total += len(outputs)
        if total == 0:
            raise ValueError("The loader is empty: there is nothing to fit.")
        if isinstance(likelihood, Gaussian):
            if self._estimates_noise:
                likelihood = likelihood.with_noise(residuals.standard_deviation())
            log_likelihood = residuals.log_likelihood(likelihood.noise_std)
        given = self._subspace_inputs
        subspace = reservoir.inputs if reservoir else None
        if given is not None:
            subspace = linearization.to_device(self._joined(given, "subspace_inputs"))
        return _Survey(total, C, likelihood, subspace, log_likelihood)

    @staticmethod
    def _joined(x: Any, what: str) -> Any:
        """All inputs of a tensor, mapping or loader as one batch."""
        batches_of_inputs = list(input_batches(x))
        if not any(num_inputs(inputs) for inputs in batches_of_inputs):
            raise ValueError(f"There are no inputs: {what} is empty.")
        return join(batches_of_inputs)

    def _drawn_inputs(self, num_outputs: int) -> int:
        return self._num_subspace_inputs or max(100, ceil(2 * self.requested_dim / num_outputs))

    # Predicting -------------------------------------------------------------------------------------------------------

    def __call__(self, x: Any, link: str = "probit") -> Tensor | tuple[Tensor, Tensor]:
        """Classification: probabilities (n, C). Regression: outputs (n, C) and their covariance (n, C, C) without
        σ²."""
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
        means, covariances = [], []
        with self._usable_linearization().borrowed():
            for jacobian in self._jacobians(x):
                means.append(jacobian.outputs)
                covariances.append(posterior.covariance(jacobian))
        mean, covariance = torch.cat(means), torch.cat(covariances)
        if isinstance(survey.likelihood, Gaussian):
            noise = survey.likelihood.noise_std**2 * torch.eye(survey.num_outputs).to(covariance)
            return Prediction(mean, covariance, total=covariance + noise)
        generator = torch.Generator().manual_seed(self.seed)
        return Prediction(mean, covariance, probabilities(mean, covariance, link, samples, generator))

    def functional_covariance(self, x: Any, joint: bool = False) -> Tensor:
        """Σ_{P,x} = J P (PᵀΛP)⁻¹ PᵀJᵀ for each input (n, C, C), or with `joint` over all of them (nC, nC)."""
        posterior, _ = self._fitted()
        linearization = self._usable_linearization()
        if not joint:
            with linearization.borrowed():
                return torch.cat([posterior.covariance(jacobian) for jacobian in self._jacobians(x)])
        inputs = linearization.to_device(self._joined(x, "x"))
        return posterior.joint_covariance(Jacobians(linearization, inputs)).to(linearization.dtype)

    def functional_variance(self, x: Any) -> Tensor:
        """The diagonal of `functional_covariance`, (n, C), without forming (C, C)."""
        posterior, _ = self._fitted()
        with self._usable_linearization().borrowed():
            return torch.cat([posterior.variance(jacobian) for jacobian in self._jacobians(x)])

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
    def prior_precision(self) -> float:
        """λ."""
        return self._prior_precision

    @property
    def noise_std(self) -> float | None:
        """σ of regression, given or estimated; None for classification and before an estimate."""
        likelihood = self._survey.likelihood if self._survey else self._likelihood
        if not isinstance(likelihood, Gaussian):
            return None
        return likelihood.noise_std if self._survey else self._noise_std

    def truncate(self, dim: int) -> "SubspaceLaplace":
        """The same posterior in the leading `dim` dimensions, without a pass over the data."""
        posterior = self._subspace()
        if _checked_dim(dim) > posterior.dim:
            raise ValueError(f"Cannot truncate to {dim} dimensions: there are {posterior.dim}.")
        return self._with(posterior.truncated(dim))

    def with_prior(self, prior_precision: float) -> "SubspaceLaplace":
        """The same subspace under another λ, without a pass over the data (P was built at the old λ)."""
        posterior, _ = self._fitted()
        other = self._with(posterior.with_prior(_checked_prior(prior_precision)))
        other._prior_precision = float(prior_precision)
        return other

    def _with(self, posterior: Posterior) -> "SubspaceLaplace":
        other = copy.copy(self)
        other._posterior = posterior
        return other

    def _fitted(self) -> tuple[Posterior, _Survey]:
        if self._posterior is None or self._survey is None:
            raise RuntimeError("This SubspaceLaplace is not fitted yet; call fit(train_loader) first.")
        return self._posterior, self._survey

    def _subspace(self) -> SubspacePosterior:
        posterior, _ = self._fitted()
        if not isinstance(posterior, SubspacePosterior):
            raise ValueError("projector='full' has no subspace: no projection, leading dimensions or truncation.")
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
        name = self.projector if isinstance(self.projector, str) else getattr(self.projector, "__name__", "custom")
        head = f"SubspaceLaplace({type(self.model).__name__}, {self._likelihood.kind}, {name}"
        if self._posterior is None or self._survey is None:
            return f"{head}, not fitted)"
        noise = "" if self.noise_std is None else f", σ={self.noise_std:.4g}"
        size = readable(self.dim * self.num_parameters * 4)
        return (
            f"{head}, s={self.dim} of p={self.num_parameters:,}, λ={self.prior_precision:.4g}{noise}, "
            f"N={self._survey.num_data:,}, P up to {size})"
        )


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


def _checked_projector(projector: Any) -> str | Projector:
    if isinstance(projector, str):
        if projector != "full" and projector not in PROJECTORS:
            raise ValueError(f"Unknown projector '{projector}'; choose one of {', '.join([*PROJECTORS, 'full'])}.")
        return projector
    if not callable(projector):
        raise TypeError("projector must be a name or a function from a ProjectorContext to a Projection.")
    return projector


def _checked_dim(dim: Any) -> int:
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"dim must be an integer, not {dim!r}.")
    dim = operator.index(dim)
    if dim < 0:
        raise ValueError(f"dim must not be negative, but it is {dim}.")
    if dim == 0:
        raise ValueError("dim=0 leaves no uncertainty at all; choose at least 1.")
    return int(dim)


def _checked_prior(prior_precision: Any) -> float:
    if isinstance(prior_precision, str):
        raise ValueError(f"Unknown prior_precision '{prior_precision}'; give a positive number.")
    try:
        value = float(prior_precision)
    except (TypeError, ValueError):
        raise TypeError(f"prior_precision must be one positive number, not {prior_precision!r}.") from None
    if not (isfinite(value) and value > 0):
        raise ValueError(f"prior_precision must be positive and finite, but it is {value}.")
    return value


def _checked_count(count: Any, name: str) -> int | None:
    if count is None:
        return None
    if isinstance(count, bool) or not hasattr(count, "__index__") or operator.index(count) < 1:
        raise ValueError(f"{name} must be a positive integer, not {count!r}.")
    return operator.index(count)


def _checked_likelihood(likelihood: Any, noise_std: float | None) -> Likelihood:
    if likelihood == "classification":
        if noise_std is not None:
            raise ValueError("noise_std belongs to regression; classification has none.")
        return Categorical()
    if likelihood == "regression":
        return Gaussian(1.0 if noise_std is None else float(noise_std))
    if isinstance(likelihood, str):
        raise ValueError(f"Unknown likelihood '{likelihood}'; choose 'classification', 'regression' or an object.")
    if not hasattr(likelihood, "cotangents"):
        raise TypeError(
            "likelihood must be 'classification', 'regression' or a likelihood object such as "
            f"sublaplace.Gaussian(0.1), not {likelihood!r}."
        )
    if noise_std is not None:
        raise ValueError("noise_std is part of the likelihood object; give it there, or likelihood='regression'.")
    return likelihood
