"""A BoTorch model of a network with its Laplace approximation, for Bayesian optimisation.

Install with ``pip install 'sublaplace[botorch]'``.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sublaplace.fitting.gauss_newton import Trained, trained_by_gauss_newton
from sublaplace.fitting.length_scales import TrainedWithLengthScales, trained_with_length_scales
from sublaplace.laplace import SubspaceLaplace
from sublaplace.model.fourier import FourierNetwork
from sublaplace.model.likelihoods.gaussian import Gaussian
from sublaplace.model.mlp import ACTIVATIONS, mlp
from sublaplace.runtime.checks import checked_count

try:
    from botorch.models.deterministic import GenericDeterministicModel
    from botorch.models.model import FantasizeMixin, Model
    from botorch.models.transforms.outcome import OutcomeTransform, Standardize
    from botorch.posteriors import GPyTorchPosterior, Posterior
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from linear_operator import to_linear_operator
except ImportError as error:
    raise ImportError("sublaplace.botorch needs BoTorch and GPyTorch: pip install 'sublaplace[botorch]'.") from error


class SubspaceLaplaceModel(Model, FantasizeMixin):
    r"""A BoTorch model whose posterior is the one of a fitted `SubspaceLaplace` for regression.

    `posterior` gives multivariate normal distributions with gradients with respect to X, so BoTorch's acquisition
    functions and `optimize_acqf` work unchanged. X is (…, q, d): q points jointly, for every t-batch.

    The network is no submodule: BoTorch's ``eval()``, ``train()`` and ``to()`` leave it as it is. X is converted to its
    dtype and device, and results back to those of X.

    Cost: see `SubspaceLaplace.predict_groups`. Every point that the model is conditioned on is one more point of q.

    Args:
        laplace: fitted for regression, on outcomes and inputs as the transforms give them.
        outcome_transform: of the outcomes that `laplace` was fitted to, such as ``Standardize``; posteriors are
            transformed back. None: outcomes are as they are.
        input_transform: applied to X before the network. None: X is as it is.
        num_features: d, to check X against; None: not checked.
    """

    def __init__(
        self,
        laplace: SubspaceLaplace,
        outcome_transform: OutcomeTransform | None = None,
        input_transform: nn.Module | None = None,
        num_features: int | None = None,
    ) -> None:
        if not laplace.likelihood.has_noise:
            raise ValueError(
                "A BoTorch model needs a likelihood with noise, SubspaceLaplace(model, 'regression'); this one is "
                f"'{laplace.likelihood.name}'."
            )
        super().__init__()
        self.laplace = laplace
        self._outputs = tuple(range(laplace.num_outputs))
        self._num_features = num_features
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform.eval()
        if input_transform is not None:
            self.input_transform = input_transform.eval()
        self._observed: tuple[Tensor, Tensor, Tensor] | None = None  # inputs, outcomes and noise variances

    @classmethod
    def trained(
        cls,
        train_X: Tensor,
        train_Y: Tensor,
        *,
        hidden_layer_sizes: Sequence[int] | None = None,
        activation: str | None = None,
        prior_precision: float | None = None,
        noise_std: float | None = None,
        max_steps: int = 60,
        projector: str = "full",
        outcome_transform: OutcomeTransform | None = None,
        input_transform: nn.Module | None = None,
        seed: int = 0,
        **options: Any,
    ) -> "SubspaceLaplaceModel":
        r"""Return the model of a small network that is trained on the data, in the way of ``SingleTaskGP(X, Y)``.

        Inputs x are standardised inside of the network. By default, it has one layer of k sines and k cosines:

        .. math:: f(x) = W_1 φ(A z) + W_2 φ(B z) + b, \quad z = x (1 + δ) / ℓ, \quad φ(a) = [\sin a, \cos a] / \sqrt k.

        The directions A and B are random and fixed; each row of B sees one input. The evidence chooses a length scale ℓ
        per input, σ, and one λ for each of W₁ and W₂. W, b and δ are trained; δ keeps the length scales uncertain in
        the posterior. Cost of training: n²·p + n³/3, up to 5·`max_steps` times, with p = (513 + 32d)·m + d.

        With `hidden_layer_sizes`, the network is fully connected, with one λ. Gauss–Newton steps train it. Cost:
        (n·m)²·p + (n·m)³/3 per step. Both are for up to a few hundred data, and followed by one fit of the posterior.

        Args:
            train_X: (n, d).
            train_Y: (n, m).
            hidden_layer_sizes: widths of the hidden layers of a fully connected network. None: sines and cosines,
                in float64.
            activation: of a fully connected network: "tanh", "silu", "gelu" or "relu"; the first three have smooth
                gradients. None: "silu".
            prior_precision: λ of the weights; None: tuned by the evidence.
            noise_std: σ of the transformed outcomes; None: tuned by the evidence.
            max_steps: at most this many Gauss–Newton steps; by default, at most this many of L-BFGS in each search.
            outcome_transform: of the outcomes. None: ``Standardize``.
            input_transform: applied to X before the network.
            seed: of directions or weights, and of the order of the data.
            projector: as of `SubspaceLaplace`. "full" is exact; with few data, it costs no more than a subspace.
            options: further arguments of `SubspaceLaplace`.

        Raises:
            ValueError: if shapes do not fit, or the activation is unknown or would have no effect.
        """
        if train_X.ndim != 2 or train_Y.ndim != 2 or len(train_X) != len(train_Y) or not len(train_X):
            raise ValueError(
                f"train_X must be (n, d) and train_Y (n, m) with the same n, but they are {tuple(train_X.shape)} and "
                f"{tuple(train_Y.shape)}. Outcomes of one output are (n, 1)."
            )
        transform = Standardize(m=train_Y.shape[1]) if outcome_transform is None else outcome_transform
        inputs = train_X.detach() if input_transform is None else input_transform.train()(train_X.detach())
        targets = transform.train()(train_Y.detach(), X=inputs)[0]
        generator, steps = torch.Generator().manual_seed(seed), checked_count(max_steps, "max_steps")
        network: nn.Module
        training: Trained | TrainedWithLengthScales
        if hidden_layer_sizes is None:
            if activation is not None:
                raise ValueError("activation has no effect without hidden_layer_sizes; give both, or neither.")
            inputs, targets = inputs.double(), targets.double()
            network = FourierNetwork(inputs, targets.shape[1], generator)
            training = trained_with_length_scales(network, inputs, targets, prior_precision, noise_std, steps)
        else:
            kind = "silu" if activation is None else activation
            if kind not in ACTIVATIONS:
                raise ValueError(f"Unknown activation {kind!r}; choose one of {', '.join(ACTIVATIONS)}.")
            network = mlp(inputs, hidden_layer_sizes, targets.shape[1], ACTIVATIONS[kind], generator, scaled=True)
            training = trained_by_gauss_newton(network, inputs, targets, prior_precision, noise_std, steps)
        network.eval()
        laplace = SubspaceLaplace(
            network,
            Gaussian(training.noise_std),
            projector=projector,
            prior_precision=training.prior_precision,
            seed=seed,
            **options,
        ).fit([(inputs, targets)])
        return cls(laplace, transform, input_transform, train_X.shape[1])

    # What BoTorch asks for --------------------------------------------------------------------------------------------

    @property
    def num_outputs(self) -> int:
        """The number of outputs, m."""
        return len(self._outputs)

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape: empty, or the one of the observations that the model is conditioned on."""
        return torch.Size() if self._observed is None else self._observed[1].shape[:-2]

    @property
    def likelihood(self) -> Any:
        """The likelihood of the posterior, with its σ."""
        return self.laplace.likelihood

    def _set_transformed_inputs(self) -> None:
        """Do nothing: no training inputs are kept."""

    def _revert_to_original_inputs(self) -> None:
        """Do nothing: no training inputs are kept."""

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
        **kwargs: Any,
    ) -> Posterior:
        """Return the joint posterior of the outputs at q points, for every t-batch.

        Args:
            X: (…, q, d). Where it requires grad, the posterior can be differentiated.
            output_indices: the outputs that are asked for; None: all.
            observation_noise: whether to add σ², or the noise variances to add, (…, q or 1, m), in transformed units.
            posterior_transform: applied to the result.
            kwargs: not used; BoTorch gives some to every model.

        Raises:
            ValueError: if X has another shape.
        """
        self._require_points(X, "X")
        inputs = self.transform_inputs(X)
        mean, covariance = self._joint(inputs)
        if observation_noise is not False:
            given = observation_noise if isinstance(observation_noise, Tensor) else None
            noise = self._noise(mean.shape, given, X).flatten(-2)
            covariance = covariance + noise.diag_embed()
        result: Posterior = _normal(mean, covariance, self._outputs)
        if hasattr(self, "outcome_transform"):
            result = self.outcome_transform.untransform_posterior(result, X=X)
        if output_indices is not None:
            if not hasattr(result, "distribution"):
                raise ValueError("output_indices needs a linear outcome_transform; use subset_output instead.")
            result = _normal(result.mean, _covariance_of(result), tuple(output_indices))
        return result if posterior_transform is None else posterior_transform(result)

    def _joint(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean (…, q, C) and covariance (…, qC, qC) of all outputs, given what was observed."""
        if self._observed is None:
            return self._of_groups(inputs)
        observed, outcomes, noise = self._observed
        q, C = inputs.shape[-2], self.laplace.num_outputs
        shape = torch.broadcast_shapes(inputs.shape[:-2], observed.shape[:-2])
        both = torch.cat(
            [inputs.expand(*shape, *inputs.shape[-2:]), observed.expand(*shape, *observed.shape[-2:])], dim=-2
        )
        mean, covariance = self._of_groups(both)
        here = q * C
        own, cross, theirs = covariance[..., :here, :here], covariance[..., :here, here:], covariance[..., here:, here:]
        factor = torch.linalg.cholesky(theirs + noise.flatten(-2).diag_embed())
        residuals = (outcomes - mean[..., q:, :]).flatten(-2).unsqueeze(-1)
        half = torch.linalg.solve_triangular(factor, cross.mT, upper=False)
        solved = torch.linalg.solve_triangular(factor, residuals, upper=False)
        moved = (half.mT @ solved).squeeze(-1)
        mean = mean[..., :q, :] + moved.unflatten(-1, (q, C))
        covariance = own - half.mT @ half
        return mean, covariance.expand(*mean.shape[:-2], q * C, q * C)

    def _of_groups(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean (…, q, C) and covariance (…, qC, qC) of the network's outputs, in the type of the inputs."""
        groups = self._for_network(inputs.reshape(-1, *inputs.shape[-2:]))
        mean, covariance = self.laplace.predict_groups(groups)
        batch = inputs.shape[:-2]
        return mean.to(inputs).reshape(*batch, *mean.shape[1:]), covariance.to(inputs).reshape(
            *batch, *covariance.shape[1:]
        )

    def _for_network(self, inputs: Tensor) -> Tensor:
        """Return inputs on the network's device and in its dtype, at least float32."""
        like = next(self.laplace.model.parameters())
        return inputs.to(like.device, torch.promote_types(like.dtype, torch.float32))

    def _noise(self, shape: Sequence[int], given: Tensor | None, like: Tensor) -> Tensor:
        """Return the noise variances of outcomes of a shape (…, q, C): those given, or σ²."""
        if given is not None:
            return given.to(like).expand(*shape)
        variances = torch.tensor(self.likelihood.noise_variances, dtype=like.dtype, device=like.device)
        return variances.expand(*shape)

    def _require_points(self, X: Tensor, name: str) -> None:
        d = self._num_features
        if X.ndim < 2 or (d is not None and X.shape[-1] != d):
            expected = "(…, q, d)" if d is None else f"(…, q, {d})"
            raise ValueError(
                f"{name} must be of shape {expected}, q points of d features in every t-batch, but it is "
                f"{tuple(X.shape)}."
            )

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> "SubspaceLaplaceModel":
        """Return the model that has also observed (X, Y), exactly under the linearised network.

        The outputs are jointly normal, so mean and covariance follow from the usual formulas; batches of fantasies are
        possible. The covariance is the one of `SubspaceLaplace.updated` where that is exact, and the mean moves as
        well, which `updated` leaves at θ̂. After a few observations, train again: the network's features stay as
        they are here. Cost: every prediction treats the observed points as further points of q.

        Args:
            X: (…, n, d).
            Y: (…, n, m), in the units of the outcomes.
            noise: variances of Y in transformed units, (…, n, m); None: σ².
            kwargs: not used; BoTorch gives some to every model.

        Raises:
            ValueError: if shapes do not fit.
        """
        self._require_points(X, "X")
        if self._outputs != tuple(range(self.laplace.num_outputs)):
            raise ValueError("A model of some outputs cannot be conditioned; condition the whole model first.")
        if Y.ndim < 2 or Y.shape[-2:] != (X.shape[-2], self.num_outputs):
            raise ValueError(
                f"Y must be of shape (…, {X.shape[-2]}, {self.num_outputs}), one row per point of X, but it is "
                f"{tuple(Y.shape)}."
            )
        inputs = self.transform_inputs(X)
        outcomes = self.outcome_transform(Y, X=X)[0] if hasattr(self, "outcome_transform") else Y
        variances = self._noise(outcomes.shape, noise, outcomes)
        if self._observed is not None:
            inputs, outcomes, variances = (
                _beside(old, new) for old, new in zip(self._observed, (inputs, outcomes, variances), strict=True)
            )
        other = copy.copy(self)
        other._observed = inputs, outcomes, variances
        return other

    def subset_output(self, idcs: list[int]) -> "SubspaceLaplaceModel":
        """Return the model of some of the outputs."""
        other = copy.copy(self)
        other._modules = dict(self._modules)
        other._outputs = tuple(self._outputs[k] for k in idcs)
        if hasattr(self, "outcome_transform"):
            other.outcome_transform = self.outcome_transform.subset_output(idcs)
        return other

    # Functions --------------------------------------------------------------------------------------------------------

    def function_sample(self, seed: int = 0) -> GenericDeterministicModel:
        """Return one function drawn from the posterior, as a deterministic model, for Thompson sampling.

        The draw is one function of X, with gradients: maximise it with ``optimize_acqf(PosteriorMean(draw), …)``.

        Args:
            seed: another seed gives another function.

        Raises:
            ValueError: for a model that is conditioned on further observations.
        """
        if self._observed is not None:
            raise ValueError("A conditioned model has no function samples; train it on all data first.")

        def function(X: Tensor) -> Tensor:
            self._require_points(X, "X")
            inputs = self.transform_inputs(X)
            flat = self._for_network(inputs.reshape(-1, inputs.shape[-1]))
            drawn = self.laplace.functional_samples(flat, 1, torch.Generator().manual_seed(seed))[0]
            values = drawn.to(X).reshape(*inputs.shape[:-1], -1)[..., list(self._outputs)]
            return self.outcome_transform.untransform(values, X=X)[0] if hasattr(self, "outcome_transform") else values

        return GenericDeterministicModel(function, num_outputs=self.num_outputs)


def _beside(old: Tensor, new: Tensor) -> Tensor:
    """Return both sets of points, (…, n, ·) and (…, k, ·), as one with a common batch shape: (…, n + k, ·)."""
    batch = torch.broadcast_shapes(old.shape[:-2], new.shape[:-2])
    return torch.cat([part.expand(*batch, *part.shape[-2:]) for part in (old, new)], dim=-2)


def _normal(mean: Tensor, covariance: Tensor, outputs: tuple[int, ...]) -> GPyTorchPosterior:
    """Return the distribution of some outputs, from the mean (…, q, C) and covariance (…, qC, qC) of all."""
    q, C = mean.shape[-2:]
    if outputs != tuple(range(C)):
        places = (
            torch.arange(q, device=mean.device)[:, None] * C + torch.tensor(outputs, device=mean.device)
        ).flatten()
        mean, covariance = mean[..., list(outputs)], covariance[..., places, :][..., :, places]
    matrix = to_linear_operator(covariance)  # a root of a singular one is found with some jitter, and only if asked for
    if len(outputs) == 1:
        return GPyTorchPosterior(MultivariateNormal(mean.squeeze(-1), matrix))
    return GPyTorchPosterior(MultitaskMultivariateNormal(mean, matrix))


def _covariance_of(posterior: GPyTorchPosterior) -> Tensor:
    """Return the covariance of a distribution, points first and outputs within: (…, qC, qC)."""
    distribution = posterior.distribution
    covariance: Tensor = distribution.covariance_matrix
    if getattr(distribution, "_interleaved", True):
        return covariance
    q, C = distribution.event_shape
    order = torch.arange(q * C, device=covariance.device).view(C, q).T.flatten()
    return covariance[..., order, :][..., :, order]
