"""`SubspaceLaplace`, the door through which users come in."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from sublaplace.arguments import checked_options, require_cpu_for
from sublaplace.curvature.matrix_free import FullCovariance
from sublaplace.data.batches import num_inputs
from sublaplace.data.loaders import Chained, checked_loader, with_labels_under
from sublaplace.data.subspace_inputs import joined_inputs
from sublaplace.evaluation import Evaluation
from sublaplace.fitting import update
from sublaplace.fitting.estimating import Estimate, Estimator
from sublaplace.fitting.evaluating import evaluated
from sublaplace.fitting.fit import fit, new_linearization
from sublaplace.fitting.fitted import Fitted, Stage
from sublaplace.fitting.report import summary_text
from sublaplace.fitting.saving import arguments_from, complete, fitted_from, stored
from sublaplace.fitting.tuning import evidence_of, tuned_by_evidence, tuned_on
from sublaplace.fitting.validation import check_first_batch
from sublaplace.former_names import refuse_arguments, refuse_member
from sublaplace.jacobians.jacobian import Jacobians
from sublaplace.jacobians.linearization import Linearization
from sublaplace.jacobians.network import Forward
from sublaplace.model.borrowing import claimed, full_precision
from sublaplace.model.calling import call_model
from sublaplace.model.fingerprint import Fingerprint
from sublaplace.model.likelihoods.base import Likelihood, Noise
from sublaplace.model.likelihoods.categorical import Categorical
from sublaplace.model.likelihoods.gaussian import checked_noise
from sublaplace.model.likelihoods.links import LINKS, unknown
from sublaplace.model.linalg import diagonal_blocks
from sublaplace.model.parameters import ParameterLayout
from sublaplace.model.prediction import Prediction
from sublaplace.options import Captured, Complement, Resources
from sublaplace.posteriors.certificate import Bounds, Certificate
from sublaplace.posteriors.subspace import SubspacePosterior
from sublaplace.predicting import samples
from sublaplace.predicting.arrangement import arranged, jointly_arranged, require_one_layout
from sublaplace.predicting.predictor import Predictor
from sublaplace.projectors.registry import Builder, Projector
from sublaplace.runtime import files
from sublaplace.runtime.checks import checked_count, checked_positive, checked_prior
from sublaplace.runtime.distributed import require_same_data, shared_out
from sublaplace.runtime.memory import require

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _with_model(
    method: "Callable[Concatenate[SubspaceLaplace, _Arguments], _Result]",
) -> "Callable[Concatenate[SubspaceLaplace, _Arguments], _Result]":
    """Let a method run only if the model is the fitted one, in one thread at a time and without autocast."""

    @functools.wraps(method)
    def call(la: "SubspaceLaplace", *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with la._claimed():
            return method(la, *args, **kwargs)

    return call


class SubspaceLaplace:
    """The Laplace approximation of a trained network, exact in a subspace of its parameters.

    Args:
        model: any module that maps a batch to (n, C), or to outputs with positions, (n, …); trained; left as it is.
            Devices and dtypes follow it. A half-precision model is copied to float32, with a warning.
        likelihood: "classification", "regression", "binary", "multi-label", or a likelihood object such as
            ``Gaussian(0.1)`` (σ given), ``Gaussian("per-output")`` or ``Categorical(ignore_index=-100)``. Classes at
            every position need ``Categorical(class_dim=…)``.
        dim: s, the dimension of the subspace, or ``Captured(0.5, at_most=500)``: the smallest that guarantees this
            share of the full approximation's trace. None: 100. A smaller rank of P limits s, and `summary` says so.
        projector: a name from `PROJECTORS`, "full", or a function from a `ProjectorContext` to a `Projection`. None,
            with a complement: no subspace.
        complement: what the posterior is outside of the subspace: None (nothing, as in the paper), "kfac" or
            "diagonal" with a fitted weight, or ``Complement("kfac", weight=1.0)``. "auto": KFAC around a low-rank
            subspace, with a fitted weight for regression and weight 1 otherwise; None around other subspaces, and
            for outputs with positions.
        prior_precision: λ > 0 of the prior N(0, λ⁻¹ I), or one for each parameter by name, or "evidence": the λ that
            maximises the evidence of the KFAC approximation, found before P is built. "auto": the evidence for
            regression, leave-one-out of the linearised network for classification; then tuned on validation data, if
            there are any.
        prior_structure: "scalar", or "layer": one λ per layer, in ratios that the evidence of KFAC chooses.
        subspace_inputs: X′, from which P is built: inputs (a tensor, a batch or a loader; labels are not needed),
            ``Drawn(200)`` or ``Perturbed(0.1)``. None: drawn from the training data.
        forward: how the model is called, (model, inputs) → (n, C). None: ``model(x)``, ``model(**x)`` for a mapping,
            ``model(*x)`` for a tuple, and ``.logits`` of the result if it has them.
        labels_key: where a batch that is a mapping holds its targets; all else in it is given to the model.
        seed: of the library's own generators; the global random state is never touched.
        resources: memory, scratch folder and tolerances, see `Resources`.
        positional: arguments of version 0.1 without their names, refused.
        former: arguments of version 0.1, refused with their new spelling.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        dim: int | Captured | None = None,
        *positional: Any,
        projector: str | Projector | Builder | None = "lowrank-kfac",
        complement: str | Complement | None = "auto",
        prior_precision: float | dict[str, float] | str = "auto",
        prior_structure: str = "scalar",
        subspace_inputs: Any = None,
        forward: Forward | None = None,
        labels_key: str = "labels",
        seed: int = 0,
        resources: Resources | None = None,
        **former: Any,
    ) -> None:
        refuse_arguments(positional, former)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
        self.model = model
        self._options = checked_options(
            likelihood,
            dim,
            projector,
            complement,
            prior_precision,
            prior_structure,
            subspace_inputs,
            labels_key,
            seed,
            resources,
        )
        require_cpu_for(self._options.resources.scratch_folder, model)
        self._forward: Forward = call_model if forward is None else forward
        self._labels_key = labels_key
        if self._options.given_prior is not None:
            checked_prior(self._options.given_prior, next(model.parameters()).dtype.itemsize)
        with claimed(model):  # another thread that has borrowed it has changed its flags for a while
            self._layout = ParameterLayout.of(model)
            self._options.given_units(self._layout)  # refuses unknown names
        self._resolved = self._options.resolved()  # with what "auto" stands for
        self._state: Fitted | None = None
        self._fingerprint = Fingerprint({}, (), "")
        self._data: Iterable[Any] | None = None  # for a certificate that is asked for later

    @classmethod
    def paper(
        cls,
        model: nn.Module,
        likelihood: str | Likelihood,
        dim: int | Captured | None = None,
        prior_precision: float | str = 1.0,
        *,
        projector: str | Projector | Builder = "lowrank-kfac",
        **options: Any,
    ) -> "SubspaceLaplace":
        """Return exactly the paper's posterior: the subspace alone, with a given λ and nothing outside.

        Probabilities are those of the probit link, unless the likelihood is given as an object with another one.

        Args:
            model: as for the class.
            likelihood: as for the class.
            dim: as for the class.
            prior_precision: λ; "evidence" as the paper tuned it.
            projector: as for the class.
            options: any other argument of the class.
        """
        return cls(
            model,
            Categorical(link="probit") if likelihood == Categorical.name else likelihood,
            dim,
            projector=projector,
            complement=None,
            prior_precision=prior_precision,
            **options,
        )

    # Fitting ----------------------------------------------------------------------------------------------------------

    def fit(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        *,
        certify: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        sharded: bool = False,
        progress: bool = False,
    ) -> "SubspaceLaplace":
        """Build P and the posterior from the training data, and return self.

        A batch may hold sample weights as well, (inputs, targets, weights): weight 2 counts like the input given twice.
        For outputs with positions, weights or a mask may have the targets' shape.
        The data are read a few times: once to look at them, once or twice for the curvature. The last layer alone needs
        one reading. If anything fails, the
        model and this object are as before.

        Args:
            train_loader: a re-iterable of (inputs, targets) batches.
            val_loader: validation data; with them λ (and σ) minimise their NLL, see `tuned`.
            certify: make what `bounds` and `captured_share` need in the same pass, with no direction dropped;
                otherwise they make it when first asked, in a pass of their own.
            checkpoint: a folder where the work done so far is put aside every few seconds. A killed fit called again
                with it goes on from there and ends with the same result. It needs a loader that does not shuffle.
            sharded: in a process group, each rank's loader holds its own share of the data already; otherwise every
                rank is given the same loader, whose batches are shared out.
            progress: show bars.

        Raises:
            ValueError: for data that do not fit the model or the likelihood.
            MemoryError: before an allocation that cannot fit.
        """
        loader = shared_out(self._checked_loader(train_loader), sharded)
        options = self._options
        with claimed(self.model), full_precision(next(self.model.parameters()).device):
            if val_loader is not None:
                self._require_other_data(train_loader, val_loader)
                val_loader = self._checked_loader(val_loader, "val_loader", once=True)
                if not isinstance(val_loader, Iterator):  # faults of the data are found before the work, not after it
                    require_same_data(val_loader, "The validation data")
                    check_first_batch(val_loader, self._new_linearization(None), options.likelihood)
            validated = val_loader is not None
            fitted = fit(options, loader, self.model, self._forward, certify, validated, checkpoint, progress)
            if val_loader is not None:
                fitted = tuned_on(fitted, val_loader, progress=progress)
            self._state = fitted
            self._resolved = options.resolved(fitted.survey.layout is not None)
            self._layout, self._data = fitted.linearization.layout, loader
            self._fingerprint = Fingerprint.of(self.model)
        return self

    def estimate(self, train_loader: Iterable[Any], val_loader: Iterable[Any] | None = None) -> Estimate:
        """Return what `fit` with these loaders will take, by stage, and what a prediction takes per input.

        The fit is rehearsed on as few inputs as have the full rank of P. If that takes less than four seconds, it is
        rehearsed again with more of them. Each stage is then scaled to all data by how it grows. This object and the
        model stay as they are. `docs/costs.md` compares estimates with measured fits.

        Cost: usually a few seconds. A large network takes about s/C inputs' share of a fit, and the eigendecompositions
        of its KFAC factors. The number of data is read off the loader's sampler; a loader without one is read once.

        Args:
            train_loader: the training data, a re-iterable of (inputs, targets) batches. Only the first are read.
            val_loader: validation data, as for `fit`.

        Raises:
            ValueError: for data that do not fit the model or the likelihood.
        """
        loader = self._checked_loader(train_loader, "estimate")
        if val_loader is not None:
            self._require_other_data(train_loader, val_loader)
            val_loader = self._checked_loader(val_loader, "val_loader")
        device = next(self.model.parameters()).device

        def predict(fitted: Fitted, inputs: Any) -> Any:
            return self._with(fitted)._called(fitted, inputs, None)

        with claimed(self.model), full_precision(device):
            return Estimator(self._options, self.model, self._forward, loader, val_loader, predict).estimate()

    def _checked_loader(self, loader: Any, name: str = "fit", once: bool = False) -> Iterable[Any]:
        return with_labels_under(self._labels_key, checked_loader(loader, name, once))

    def _require_other_data(self, train_loader: Any, val_loader: Any) -> None:
        """Raise ValueError if validation data cannot tell anything: λ is fixed, or they are the training data."""
        if self._options.prior_precision != "auto":
            raise ValueError(
                f"val_loader has no effect: prior_precision={self._options.prior_precision!r} says how λ is chosen. "
                "Leave prior_precision out to choose λ on the validation data."
            )
        same = val_loader is train_loader
        data = [getattr(loader, "dataset", None) for loader in (train_loader, val_loader)]
        if same or (data[0] is not None and data[0] is data[1]):
            raise ValueError(
                "val_loader gives the training data, on which every posterior looks too sure of itself. Give data that "
                "the network was not trained on."
            )

    # Predicting -------------------------------------------------------------------------------------------------------

    @_with_model
    def __call__(self, x: Any, link: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return probabilities (n, C), or for regression the outputs (n, C) and their covariance without σ² (n, C, C).

        With positions, probabilities have the shape of the outputs, and regression gives the outputs and their
        variances, both of that shape.

        Args:
            x: a tensor, a batch or a loader of inputs.
            link: how logits become probabilities, see `predict`.
        """
        return self._called(self._fitted(), x, link)

    def _called(self, fitted: Fitted, x: Any, link: str | None) -> Tensor | tuple[Tensor, Tensor]:
        used = _used_link(fitted.survey.likelihood, link)
        if fitted.survey.likelihood.has_probabilities:
            return self._predictor().prediction(x, used).probabilities
        if fitted.survey.layout is not None:
            prediction = self._predictor().prediction(x, used)
            return prediction.mean, prediction.variance
        return self._predictor().passed(x, "matrix")

    @_with_model
    def predict(
        self, x: Any, link: str | None = None, samples: int | None = None, progress: bool = False
    ) -> Prediction:
        """Return the prediction for a tensor, a batch or a loader of inputs, in chunks under the memory budget.

        Means and variances come from one pass. Covariances (n, C, C) are only formed if they are asked for, in another
        pass over x, or if the link needs them.

        Where x requires grad, everything in the prediction can be differentiated with respect to it. The same holds for
        `functional_variance`, `functional_covariance` and `functional_samples`. Values are the same up to rounding.
        Cost: two to five times a prediction, with the backward pass. Memory: activations and gradients of all inputs at
        once, n·C·(activations of the network), as the graph holds them until the backward pass.

        Args:
            x: the inputs.
            link: how logits become probabilities: "pairwise" or "probit" by the outputs' variances, "mc" or "bridge" by
                their covariances. None: that of the likelihood, which λ was tuned for.
            samples: how many draws "mc" takes; None: 1000.
            progress: show a bar.
        """
        fitted = self._fitted()
        used = _used_link(fitted.survey.likelihood, link)
        if samples is not None and used != "mc":
            raise ValueError(f"samples={samples!r} has no effect with link={used!r}; it belongs to link='mc'.")
        count = 1000 if samples is None else checked_count(samples, "samples")
        return self._predictor().prediction(x, used, count, progress)

    @_with_model
    def functional_variance(self, x: Any, outputs: Any = None) -> Tensor:
        """Return the posterior variance of each output, (n, C), without forming (C, C).

        Args:
            x: the inputs.
            outputs: the outputs that are asked for, (k,) for all inputs or (n, k), such as those of the k most
                probable classes: the result is (n, k). None: all. With positions, these are classes, (k,) for all
                positions or in the shape of the outputs with k classes, as `Prediction.top` returns them. If every
                entry is an output of its own, they are places among the flattened entries.

        Returns:
            Variances in the shape of the outputs, or of the chosen ones.
        """
        found = self._predictor().passed(x, "variance", outputs=outputs)[1]
        return arranged(self._fitted().linearization.output_layout, found, outputs)

    @_with_model
    def functional_covariance(self, x: Any, joint: bool = False, outputs: Any = None) -> Tensor:
        """Return J Ψ Jᵀ for each input, (n, C, C), or with `joint` over all of them together, (nC, nC).

        With positions, the outputs' shape stands on both sides, (n, …, …); `joint` has the flattened outputs.

        Args:
            x: the inputs.
            joint: over all inputs together.
            outputs: the outputs that are asked for, as in `functional_variance`: the result is (n, k, k).
        """
        if not joint:
            found = self._predictor().passed(x, "matrix", outputs=outputs)[1]
            return arranged(self._fitted().linearization.output_layout, found, outputs, sides=2)
        if outputs is not None:
            raise ValueError("outputs has no effect with joint=True, which gives the covariance of all outputs.")
        return self._predictor().joint_covariance(x)

    @_with_model
    def predict_groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of groups of inputs and their joint covariance in each group, as BoTorch asks for them.

        Cost: for groups of at most 8 inputs, q·C backward passes for all of them together. Larger groups run one after
        another, with C backward passes each. Memory: b·(qC)² numbers.

        Args:
            x: b groups of q inputs each, (b, q, …). Where it requires grad, the results can be differentiated.

        Returns:
            The outputs (b, q, C), and their covariances without σ², (b, q·C, q·C), rows ordered by inputs, then
            outputs.

        Raises:
            ValueError: if x is not of this shape, or holds nothing, or the outputs have positions.
        """
        return self._predictor().groups(x)

    @_with_model
    def evaluate(self, loader: Iterable[Any], *, progress: bool = False) -> Evaluation:
        """Return scores of the plain network and of the posterior, on data that neither has seen.

        NLL, accuracy, ECE and Brier score for classes; NLL, RMSE, CRPS and the coverage of 90 % intervals for
        regression, where the plain network's σ is the root mean square of its training residuals. `print` shows a
        table, `.plot()` draws reliability or coverage. Cost: one prediction of the data.

        Args:
            loader: (inputs, targets) batches.
            progress: show a bar.

        Raises:
            ValueError: if the loader is empty, or all its labels are ignored.
        """
        fitted = self._fitted()
        data = self._checked_loader(loader, "evaluate", once=True)
        return evaluated(fitted, data, self._options.likelihood.noise_std, progress)

    # Held against the full Laplace approximation ----------------------------------------------------------------------

    @_with_model
    def bounds(self, x: Any, train_loader: Iterable[Any] | None = None, *, progress: bool = False) -> Bounds:
        """Return covariances between which the full Laplace approximation lies for each input: lower ≼ Σ ≼ upper.

        The lower one is that of the subspace (without a complement). For classification, `.probabilities` is the
        interval of each predicted probability by the likelihood's link. Needs no more than p × s matrices; see
        `Certificate`.

        Args:
            x: the inputs.
            train_loader: the training data, where they are not kept: after loading, copying or pickling.
            progress: show bars.
        """
        fitted = self._fitted()
        if fitted.survey.layout is not None:
            raise ValueError(
                "bounds() gives matrices over all outputs of an input, which outputs with positions are too many for; "
                "captured_share(x) gives the guaranteed share of their trace."
            )
        certificate = self._certified(fitted, train_loader, progress)
        outputs, lower, upper = [], [], []
        with fitted.linearization.borrowed():
            for jacobian in self._predictor().jacobians(x, progress):
                outputs.append(jacobian.outputs)
                lower.append(certificate.lower(jacobian).to(jacobian.outputs.dtype))
                upper.append(certificate.upper(jacobian).to(jacobian.outputs.dtype))
        ends = torch.cat(lower), torch.cat(upper)
        variances = (end.diagonal(dim1=1, dim2=2) for end in ends)
        probabilities = fitted.survey.likelihood.probability_interval(torch.cat(outputs), *variances)
        return Bounds(*ends, probabilities)

    @_with_model
    def captured_share(self, x: Any, train_loader: Iterable[Any] | None = None, *, progress: bool = False) -> Tensor:
        """Return the guaranteed share of the full trace for every leading dimension: (s,) in float64.

        That is Tr Σ_{P_s} over the upper bound of the trace, both summed over the inputs. Arguments as of `bounds`.
        """
        fitted = self._fitted()
        certificate = self._certified(fitted, train_loader, progress)
        with fitted.linearization.borrowed():
            return certificate.captured(self._predictor().jacobians(x, progress))

    def _certified(self, fitted: Fitted, train_loader: Iterable[Any] | None, progress: bool) -> Certificate:
        """Return the certificate; made from the training data where the fit did not."""
        subspace = self._subspace()
        if fitted.certificate is not None:
            return fitted.certificate
        certificate = update.certificate_of(
            subspace,
            fitted.survey,
            self._training_data(train_loader, "Bounds"),
            fitted.linearization,
            progress,
        )
        self._state = replace(fitted, certificate=certificate)  # kept for the next time; no result changes by it
        return certificate

    def _training_data(self, train_loader: Iterable[Any] | None, what: str) -> Iterable[Any]:
        if train_loader is not None:
            return shared_out(self._checked_loader(train_loader))
        if self._data is None:
            raise RuntimeError(
                f"{what} need the training data, which are not kept in files and copies: give train_loader=…, or fit "
                "with certify=True before saving."
            )
        return self._data

    @_with_model
    def full_covariance(
        self,
        x: Any,
        train_loader: Iterable[Any] | None = None,
        *,
        joint: bool = False,
        tolerance: float = 1e-6,
        progress: bool = False,
    ) -> FullCovariance:
        r"""Return the covariance of the *full* Laplace approximation for a few inputs, at any size of network.

        Λ⁻¹Jᵀ by block conjugate gradients, without any p × p matrix. `.covariance` is (n, C, C), or (nC, nC) with
        `joint`; the true one lies above it by at most `.error`, in every direction. With positions, it is arranged as
        in `functional_covariance`. The training data are read once per iteration (`.passes`: ten to forty usually, more
        where λ is small). Rounding, or too little memory for the
        directions of earlier iterations, may end the search before; a warning and `.relative_residual` say so.
        Memory: 8·p·n·C numbers, and the memory budget.

        Args:
            x: the inputs.
            train_loader: the training data, where they are not kept.
            joint: over all inputs together.
            tolerance: the relative residual at which the search ends.
            progress: show bars.
        """
        fitted = self._fitted()
        linearization = fitted.linearization
        checked_positive(tolerance, "tolerance")
        data = self._training_data(train_loader, "Full covariances")
        inputs = linearization.to_device(joined_inputs(with_labels_under(self._labels_key, x), "x"))
        require_one_layout(linearization.output_layouts(inputs))
        full = update.full_covariance_of(
            fitted.posterior,
            fitted.survey,
            data,
            linearization,
            Jacobians(linearization, inputs),
            tolerance,
            progress,
        )
        n, layout = num_inputs(inputs), linearization.output_layout
        if joint:
            return full._replace(covariance=jointly_arranged(layout, full.covariance, n))
        each = diagonal_blocks(full.covariance, n)
        return full._replace(covariance=each if layout is None else layout.matrix(each))

    @_with_model
    def leading_traces(self, x: Any) -> Tensor:
        """Return Tr Σ_{P,x} over all inputs for every leading dimension 1 … s: (s,) in float64, for the price of one.

        Of the subspace alone, without a complement.
        """
        fitted, subspace = self._fitted(), self._subspace()
        with fitted.linearization.borrowed():
            jacobians = self._predictor().jacobians(x, wanted=subspace.wanted)
            return torch.stack([subspace.traces(jacobian) for jacobian in jacobians]).sum(0)

    # What was fitted --------------------------------------------------------------------------------------------------

    @_with_model
    def projection_matrix(self) -> Tensor:
        """Return P (p, s), leading columns first; orthonormal, in units of each layer's λ where that has its own."""
        projection = self._subspace().projection
        linearization = self._fitted().linearization
        require(
            self._layout.num_parameters * projection.dim * linearization.dtype.itemsize,
            linearization.device,
            "The projection as a matrix",
            "Use truncated() first.",
        )
        matrix = projection.matrix()
        return matrix if linearization.units is None else matrix * linearization.flat_units(matrix)[:, None]

    @property
    def dim(self) -> int:
        """s, as used: p for "full", 0 without a subspace; at most the numerical rank."""
        return self._fitted().posterior.dim

    @property
    def num_parameters(self) -> int:
        """p: the parameters that require grad."""
        return self._layout.num_parameters

    @property
    def num_outputs(self) -> int:
        """C: the outputs of the network; with positions all of them, L·C."""
        return self._fitted().survey.num_outputs

    @property
    def prior_precision(self) -> float | None:
        """λ; None before fit where it is to be tuned."""
        return self._options.given_prior if self._state is None else self._state.posterior.prior_precision

    @property
    def prior_precisions(self) -> dict[str, float]:
        """λ of every parameter tensor; they differ between layers with prior_structure="layer"."""
        fitted = self._fitted()
        units = fitted.units or dict.fromkeys(self._layout.names, 1.0)
        return {name: fitted.posterior.prior_precision / unit**2 for name, unit in units.items()}

    @property
    def noise_std(self) -> Noise | None:
        """σ of regression, one number or one for each output; None for classification and before an estimate."""
        return self.likelihood.noise_std

    @property
    def likelihood(self) -> Likelihood:
        """How targets depend on the outputs; after fit with the σ in use, where it has one."""
        return self._options.likelihood if self._state is None else self._state.survey.likelihood

    @property
    def complement_weight(self) -> float | None:
        """The weight of the curvature outside of the subspace, as used; None without a complement."""
        outside = self._fitted().posterior.outside
        return None if outside is None else outside.weight

    @property
    def projector(self) -> Projector | None:
        """How the subspace was chosen; None without a subspace."""
        return self._options.projector

    @property
    def stages(self) -> dict[str, Stage]:
        """What each stage of the fit took: `.seconds`, and `.peak_bytes` of the process up to its end."""
        return dict(self._fitted().stages)

    @_with_model
    def summary(self) -> str:
        """Return what was fitted as text: sizes, λ, σ, how parameters are treated, seconds and memory of each stage."""
        return summary_text(repr(self), self._fitted())

    # Relatives --------------------------------------------------------------------------------------------------------

    @_with_model
    def truncated(self, dim: int) -> "SubspaceLaplace":
        """Return the same posterior in the leading `dim` dimensions, without a pass over the data."""
        fitted, subspace = self._fitted(), self._subspace()
        if checked_count(dim, "dim") > subspace.dim:
            raise ValueError(f"Cannot truncate to {dim} dimensions: there are {subspace.dim}.")
        certificate = None if fitted.certificate is None else fitted.certificate.truncated(dim)
        posterior = fitted.posterior.truncated(dim)
        return self._with(replace(fitted, posterior=posterior, certificate=certificate, dim_note=""))

    @_with_model
    def with_prior(self, prior_precision: float) -> "SubspaceLaplace":
        """Return the same subspace under another λ, without a pass over the data (P was built at the old λ)."""
        fitted = self._fitted()
        prior = checked_prior(prior_precision, fitted.linearization.dtype.itemsize)
        return self._with(fitted.with_prior(prior))

    @_with_model
    def updated(self, loader: Iterable[Any], *, progress: bool = False) -> "SubspaceLaplace":
        """Return a new posterior that has also seen `loader`: that of a fit on both with the same P, λ and weight.

        Args:
            loader: more training data.
            progress: show bars.
        """
        fitted = self._fitted()
        loader = shared_out(self._checked_loader(loader, "updated"))
        resources, seed, outside = self._options.resources, self._options.seed, self._resolved.outside
        kind = "kfac" if outside is None else outside.kind
        other = self._with(update.updated(fitted, kind, resources, seed, loader, progress))
        other._data = None if self._data is None else Chained((self._data, loader))
        return other

    @_with_model
    def tuned(self, by: Any = "evidence", *, noise: bool | None = None, progress: bool = False) -> "SubspaceLaplace":
        """Return the same posterior with its best λ, with P kept.

        Args:
            by: "evidence", or a loader of validation data. Their NLL is minimised, with a mild pull of λ (and σ)
                towards the values before, so that few inputs do no harm; see `fitting/validation.py`.
            noise: tune σ as well; None: on validation data yes, by the evidence no.
            progress: show a bar.
        """
        fitted = self._fitted()
        if isinstance(by, str):
            if by != "evidence":
                raise ValueError(f"Unknown way to tune, '{by}'; choose 'evidence' or give a loader of validation data.")
            found = tuned_by_evidence(fitted, bool(noise))
        else:
            found = tuned_on(fitted, self._checked_loader(by, "tuned", once=True), noise, progress)
        return self._with(found)

    def optimize_prior_precision(
        self,
        method: str = "marglik",
        val_loader: Iterable[Any] | None = None,
        tune_noise: bool = False,
        progress: bool = False,
    ) -> "SubspaceLaplace":
        """Set λ to its best value in place, and return self: laplace-torch's spelling of `tuned`.

        Args:
            method: "marglik" (or "evidence"), or "validation" (or "gridsearch") with `val_loader`.
            val_loader: validation data.
            tune_noise: tune σ as well.
            progress: show a bar.
        """
        if method in ("marglik", "evidence"):
            if val_loader is not None:
                raise ValueError("val_loader has no effect with method='marglik'; it belongs to method='validation'.")
            by: Any = "evidence"
        elif method in ("validation", "gridsearch"):
            if val_loader is None:
                raise ValueError("method='validation' needs val_loader, a loader of (inputs, targets) batches.")
            by = val_loader
        else:
            raise ValueError(f"Unknown method '{method}'; choose 'marglik' or 'validation'.")
        self._state = self.tuned(by, noise=tune_noise, progress=progress)._state
        return self

    @_with_model
    def log_marginal_likelihood(
        self, prior_precision: float | Tensor | None = None, noise_std: float | Tensor | None = None
    ) -> Tensor:
        """Return the evidence ln p(D|θ̂) − ½λ‖θ̂‖² + ½ Σ ln(λ/(λ + γ)), differentiable in λ and σ.

        γ are the eigenvalues of PᵀGGN P; for "full" of the whole GGN, whose eigenvalues cost O(p³).

        Args:
            prior_precision: λ; None: as fitted.
            noise_std: σ; None: as fitted. A likelihood without noise does not depend on it.
        """
        fitted = self._fitted()
        prior = fitted.posterior.prior_precision if prior_precision is None else prior_precision
        checked_positive(prior, "prior_precision")
        noise = torch.as_tensor(
            fitted.survey.noise_std if noise_std is None else noise_std, dtype=torch.float64, device="cpu"
        )
        if noise_std is not None:
            checked_noise(noise)
            fitted.require_noise_like(noise.numel())
        evidence = evidence_of(fitted.posterior, fitted.survey, fitted.linearization.squared_norm())
        return evidence(torch.as_tensor(prior, dtype=torch.float64, device="cpu"), noise)

    # Samples ----------------------------------------------------------------------------------------------------------

    @_with_model
    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Return draws of the parameters, (count, p), in `named_parameters()` order.

        Args:
            count: how many.
            generator: on any device; None: one on the CPU with the object's seed, so that all calls draw the same.
        """
        return samples.parameters(self._fitted(), count, self._generator(generator))

    @_with_model
    def functional_samples(self, x: Any, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Return draws of the linearised network's outputs, (count, n, C), or (count, n, …) with positions.

        A draw is one function, smooth across inputs and calls: the same draws of the parameters serve all inputs.

        Args:
            x: the inputs.
            count: how many functions.
            generator: as of `sample`.
        """
        return samples.linearised_outputs(self._predictor(), x, count, self._generator(generator))

    @_with_model
    def network_samples(self, x: Any, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Return the outputs of networks drawn from the posterior, without linearisation: (count, n, C).

        Their parameters are those of `sample`, so that draw k belongs to draw k of `functional_samples`. The Laplace
        approximation belongs to the linearised network, so `functional_samples` is usually the better choice.
        Cost: `count` forward passes per input.

        Args:
            x: the inputs. Where they require grad, the outputs can be differentiated.
            count: how many networks.
            generator: as of `sample`.
        """
        return samples.network_outputs(self._predictor(), x, count, self._generator(generator))

    def _generator(self, given: torch.Generator | None) -> torch.Generator:
        return torch.Generator().manual_seed(self._options.seed) if given is None else given

    # Files ------------------------------------------------------------------------------------------------------------

    @_with_model
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted posterior to one safetensors file with a checksum; the model is only fingerprinted."""
        files.write(path, *stored(self._fitted(), self._resolved, self.model))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        forward: Forward | None = None,
        labels_key: str = "labels",
        memory_budget: int | None = None,
    ) -> "SubspaceLaplace":
        """Return the posterior that `save` wrote, for the same model; tensors go to the model's device.

        Args:
            path: the file.
            model: the network that it was fitted for.
            forward: as for the class.
            labels_key: as for the class.
            memory_budget: bytes for temporary chunks; None: a quarter of what is free.

        Raises:
            SavedFileError: for a file that is not ours, altered or from another model. No code is executed.
        """
        with claimed(model):
            tensors, found = files.read(path, next(model.parameters()).device)
            with complete(path):
                arguments = arguments_from(found, model, memory_budget)
                la = cls(model, **arguments, forward=forward, labels_key=labels_key)
                linearization = la._new_linearization(found["units"])
                la._state = fitted_from(tensors, found, linearization, ParameterLayout.of(model))
            la._fingerprint = Fingerprint.of(model)
            return la

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the engine, which knows the modules of this very model, and the training data."""
        fitted = None if self._state is None else replace(self._state, linearization=None)  # type: ignore[arg-type]
        return self.__dict__ | {"_state": fitted, "_data": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._state is not None:
            self._state = replace(self._state, linearization=self._new_linearization(self._state.units))

    # Inside -----------------------------------------------------------------------------------------------------------

    def _new_linearization(self, units: dict[str, float] | None) -> Linearization:
        budget = self._options.resources.memory_budget
        return new_linearization(self._options, self.model, self._forward, budget, units)

    def _with(self, fitted: Fitted) -> "SubspaceLaplace":
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._state = replace(fitted, captured=None)
        return other

    def _fitted(self) -> Fitted:
        if self._state is None:
            raise RuntimeError("This SubspaceLaplace is not fitted yet; call fit(train_loader) first.")
        return self._state

    def _predictor(self) -> Predictor:
        return Predictor(self._fitted(), self._labels_key, self._options.seed, self._claimed)

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Keep other threads off the model, and make sure that it is still the one that was fitted."""
        device = self._fitted().linearization.device
        with claimed(self.model), full_precision(device):
            changed = self._fingerprint.difference(Fingerprint.of(self.model))
            if changed is not None:
                raise RuntimeError(
                    f"{changed} has changed since fit, so the posterior no longer belongs to the model; fit again."
                )
            yield

    def _subspace(self) -> SubspacePosterior:
        subspace = self._fitted().posterior.subspace
        if subspace is None:
            which = "projector='full'" if self.dim else "projector=None"
            raise ValueError(
                f"{which} has no subspace: no projection, leading dimensions, truncation, update or bounds."
            )
        return subspace

    def __getattr__(self, name: str) -> Any:
        refuse_member(name)
        return object.__getattribute__(self, name)  # raises, also for what a property raised inside

    def __repr__(self) -> str:
        options = self._resolved
        outside = "" if options.outside is None else f" + {options.outside.kind} outside"
        what = f"{options.likelihood.name or type(options.likelihood).__name__}, {options.label}{outside}"
        head = f"SubspaceLaplace({type(self.model).__name__}, {what}"
        if self._state is None:
            return f"{head}, not fitted)"
        noise = self.noise_std
        stds = () if noise is None else noise if isinstance(noise, tuple) else (noise,)
        sigma = f", σ={', '.join(f'{std:.4g}' for std in stds)}" if stds else ""
        prior = f"λ={self._state.posterior.prior_precision:.4g}"
        return f"{head}, s={self.dim} of p={self.num_parameters:,}, {prior}{sigma}, N={self._state.survey.num_data:,})"


def _used_link(likelihood: Likelihood, link: str | None) -> str:
    """Return the link of a prediction: the one asked for, or that of the likelihood."""
    if link is None:
        return likelihood.default_link
    if link not in LINKS:
        raise unknown(link)
    if not likelihood.has_probabilities:
        raise ValueError(f"link={link!r} has no effect: a likelihood without probabilities needs no link.")
    return link
