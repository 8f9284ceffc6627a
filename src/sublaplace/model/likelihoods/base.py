r"""What the library asks of a likelihood, with a default for all that a new one need not decide.

With :math:`H = \nabla_f^2 (-\ln p(y|f)) = R R^\top`, the GGN is :math:`\sum_i J_i^\top R_i R_i^\top J_i`, and a column
of R is the cotangent of one backward pass. A new likelihood is one subclass with `log_density` and `hessian_root`.
"""

from abc import ABC, abstractmethod
from dataclasses import fields, is_dataclass
from math import log
from typing import Any, ClassVar

import torch
from torch import Tensor

from sublaplace.model.likelihoods.links import Covariance, Interval, standard_normal, symmetric_root
from sublaplace.model.likelihoods.roots import MatrixRoot, Root
from sublaplace.runtime.files import SavedFileError

Noise = float | tuple[float, ...]
"""σ of regression: one number, or one for each output."""

LIKELIHOODS: dict[str, type["Likelihood"]] = {}
"""Likelihoods by name, as constructors and saved files use them; every named subclass enters itself."""

_DRAWS = 256  # of the outputs, where a predictive density has no closed form


class Likelihood(ABC):
    """p(y|f), how targets depend on the network's outputs.

    A subclass is final and, to be saved, a frozen dataclass of plain numbers with a `name`. It must give `log_density`
    and `hessian_root`; the other members have defaults.
    """

    name: ClassVar[str] = ""
    """For people, for ``SubspaceLaplace(model, name)`` and for saved files; empty: not to be saved."""

    absent: ClassVar[dict[str, Any]] = {}
    """Values of fields that older files do not have, where they are not the defaults."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = LIKELIHOODS.get(cls.name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"There is a likelihood named '{cls.name}' already; choose another name.")
        if cls.name:
            LIKELIHOODS[cls.name] = cls

    # To be written for a new likelihood -------------------------------------------------------------------------------

    @abstractmethod
    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return ln p(y|f) for every input: (n,), in float64; an ignored target adds nothing."""

    @abstractmethod
    def hessian_root(self, outputs: Tensor) -> Tensor:
        """Return the columns of R as rows, (n, K, C), most important first, with H = Rᵀ diag(curvature_scales) R."""

    # To be replaced where the default does not suit -------------------------------------------------------------------

    def root(self, outputs: Tensor) -> Root:
        """Return a root of H that may differ from `hessian_root` by a rotation of its rows.

        With several scales, row k belongs to scale k. A likelihood of many outputs can do without the matrix.
        """
        return MatrixRoot(self.hessian_root(outputs))

    def hessian_sum(self, outputs: Tensor, weights: Tensor | None, diagonal: bool = False) -> Tensor:
        """Return Σ_n √w H √w, without a single scale: (C, C), or its diagonal (C,); float64.

        Args:
            outputs: (n, C).
            weights: how much each target counts, (n, 1) or (n, C); None: once.
            diagonal: whether to return the diagonal alone.
        """
        roots = self.hessian_root(outputs).double()
        if len(self.curvature_scales) > 1:
            roots = roots * torch.tensor(self.curvature_scales, device=roots.device).double().sqrt()[:, None]
        if weights is not None:
            roots = roots * weights.double().sqrt()[:, None, :]
        flat = roots.flatten(0, 1)
        return flat.square().sum(0) if diagonal else flat.T @ flat

    def are_probabilities(self, outputs: Tensor) -> bool:
        """Return whether outputs (n, C) look like probabilities, though logits are expected."""
        return False

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ValueError where targets do not fit the outputs (n, C)."""
        if len(targets) != len(outputs):
            raise ValueError(f"{len(targets)} targets were given for {len(outputs)} inputs.")
        if not torch.isfinite(targets).all():
            raise ValueError("The targets hold NaN or infinity.")

    def counted(self, targets: Tensor) -> Tensor | None:
        """Return 1 for each target that counts and 0 for each ignored one, (n, 1) or (n, C); None: all count."""
        return None

    def log_predictive(self, outputs: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """Return ln p(y|x, D) for every input, for f ~ N(outputs, covariance): (n,), in float64.

        covariance: matrices (n, C, C), or variances (n, C) of independent outputs. The default averages the density
        over draws of f that are the same in every call.
        """
        generator = torch.Generator().manual_seed(0)
        matrices = covariance.diag_embed() if covariance.ndim == 2 else covariance
        root = symmetric_root(matrices.double())
        mean = outputs.double()
        draws = [
            self.log_density(mean + (root @ standard_normal(mean, generator).unsqueeze(2)).squeeze(2), targets)
            for _ in range(_DRAWS)
        ]
        return torch.stack(draws).logsumexp(0) - log(_DRAWS)

    def predictive_divergences(self, outputs: Tensor, covariance: Tensor, other: Tensor) -> Tensor:
        """Return KL(p(y|x, Σ) ‖ p(y|x, Σ′)) for two covariances (n, C, C) of the outputs: (n,), in float64.

        The default compares Gaussians with the noise of `noise_variances`.
        """
        noise = _spread(self.noise_variances, outputs).diag()
        ratio = torch.linalg.solve(other.double() + noise, covariance.double() + noise)
        trace = ratio.diagonal(dim1=1, dim2=2).sum(1)
        return (trace - outputs.shape[1] - torch.linalg.slogdet(ratio).logabsdet) / 2

    def probabilities(
        self, outputs: Tensor, covariance: Covariance, link: str, samples: int, generator: torch.Generator
    ) -> Tensor | None:
        """Return the predicted probabilities (n, C); None where the likelihood has none."""
        return None

    def probability_interval(self, outputs: Tensor, lower: Tensor, upper: Tensor) -> Interval | None:
        """Return the ends of the probabilities over all variances (n, C) between two; None where there are none."""
        return None

    @property
    def default_link(self) -> str:
        """How logits become probabilities in predictions that do not say it."""
        return "probit"

    def as_classes(self, probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities (m, classes) and labels (m,), as scores of classes need them."""
        return probabilities, targets

    def plain_probabilities(self, outputs: Tensor) -> Tensor | None:
        """Return the probabilities (n, C) of the network alone; None where the likelihood has none."""
        return None

    def entropy(self, probabilities: Tensor) -> Tensor:
        """Return the entropy in nats of each input's label under probabilities (n, C): (n,)."""
        return torch.special.entr(probabilities).sum(1)

    def training_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss that networks are trained with for every input, (n,); it does not depend on σ."""
        return -self.log_density(outputs, targets)

    @property
    def curvature_scales(self) -> tuple[float, ...]:
        """The factors between H and RᵀR, one for all rows or one per row of R.

        They are kept apart from R, so that they can change without a pass over the data.
        """
        return (1.0,)

    @property
    def single_scale(self) -> float:
        """The scale, if there is a single one; 1 otherwise, where the rows of R are multiplied with their scales."""
        return self.curvature_scales[0] if len(self.curvature_scales) == 1 else 1.0

    @property
    def noise_variances(self) -> tuple[float, ...]:
        """The variance of predictions beside the outputs' own, one for all or one per output; σ² of regression."""
        return (1.0,)

    @property
    def has_probabilities(self) -> bool:
        """Whether targets are classes or yes/no, so that there are `probabilities`."""
        return False

    @property
    def has_target_variance(self) -> bool:
        """Whether `noise_variances` is the variance of targets given the outputs, so that there are intervals."""
        return type(self).noise_variances is not Likelihood.noise_variances and not self.has_probabilities

    @property
    def needs_variances_only(self) -> bool:
        """Whether predictive densities depend on the outputs' variances alone, not on their covariance."""
        return False

    @property
    def drops_directions(self) -> bool:
        """Whether rows of R may be negligible for some inputs and not for others."""
        return len(self.curvature_scales) == 1

    # Outputs with positions, such as those of a sequence; `AtPositions` is the likelihood of all of them --------------

    @property
    def takes_positions(self) -> bool:
        """Whether outputs may have positions, (n, …): the likelihood then holds at each of them."""
        return False

    @property
    def class_dim(self) -> int | None:
        """The dimension of the outputs (n, …) with the classes; None: every entry is an output of its own."""
        return None

    @property
    def of_one_position(self) -> "Likelihood":
        """The likelihood of a single position."""
        return self

    def by_position(self, values: Tensor) -> Tensor:
        """Return what belongs to the outputs, (n, L·C, …), with a row for each position: (n·L, C, …)."""
        return values

    def targets_by_position(self, targets: Tensor) -> Tensor:
        """Return the targets with a row for each position."""
        return targets

    def counts_by_position(self, counts: Tensor, outputs: Tensor) -> Tensor:
        """Return how much each position counts, (n·L,), from how much each target does, (n, 1) or (n, K)."""
        return self.by_position(counts.expand(outputs.shape)).amax(1)

    def spread_weights(self, weights: Tensor) -> Tensor:
        """Return sample weights as weights of targets: (n, 1), or one per output, (n, K).

        Raises:
            ValueError: for weights of positions, where the outputs have none.
        """
        if weights.ndim > 1:
            raise ValueError(
                f"Weights of shape {tuple(weights.shape)} belong to outputs with positions; these have none, so give "
                "one weight per input."
            )
        return weights[:, None]

    # The noise σ, which only a Gaussian has ---------------------------------------------------------------------------

    @property
    def noise_std(self) -> Noise | None:
        """σ; None for a likelihood without noise, and where it is still to be estimated."""
        return None

    @property
    def noise_estimate(self) -> str | None:
        """How σ is estimated from the training residuals: "pooled", "per-output", or None: it is not."""
        return None

    @property
    def has_noise(self) -> bool:
        """Whether there is a σ."""
        return False

    def with_noise(self, noise_std: Noise) -> "Likelihood":
        """Return the same likelihood with another σ."""
        raise ValueError(f"A likelihood of kind '{self.name}' has no noise σ.")

    def with_given_noise(self, noise_std: Noise) -> "Likelihood":
        """Return the same likelihood with another σ that is not an estimate."""
        raise ValueError(f"A likelihood of kind '{self.name}' has no noise σ.")

    # Saving -----------------------------------------------------------------------------------------------------------

    def numbers(self) -> dict[str, Any]:
        """Return what a file keeps of this likelihood."""
        if not self.name or not is_dataclass(type(self)):
            raise TypeError(
                f"A posterior with the likelihood {type(self).__name__} cannot be saved: make it a frozen dataclass "
                "with a `name`."
            )
        return {"name": self.name, **{f.name: getattr(self, f.name) for f in fields(self)}}  # type: ignore[arg-type]


def likelihood_from(numbers: dict[str, Any]) -> Likelihood:
    """Return the likelihood of `Likelihood.numbers`.

    Raises:
        SavedFileError: if no likelihood of that name has been defined.
    """
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in numbers.items() if key != "name"
    }
    name = numbers["name"]
    if name not in LIKELIHOODS:
        raise SavedFileError(
            f"The posterior was saved with a likelihood named '{name}', which is not defined here: import the module "
            "that defines it before loading."
        )
    return LIKELIHOODS[name](**{**LIKELIHOODS[name].absent, **values})


def _spread(numbers: tuple[float, ...], outputs: Tensor) -> Tensor:
    """Return one number per output, (C,) in float64, from one for all or one for each."""
    return torch.tensor(numbers, dtype=torch.float64, device=outputs.device).expand(outputs.shape[1])


def target_weights(likelihood: Likelihood, targets: Tensor, weights: Tensor | None) -> Tensor | None:
    """Return how much each target counts, from sample weights and ignored targets: (n, 1), (n, C); None: once."""
    counted = likelihood.counted(targets)
    if weights is None:
        return None if counted is None else counted.double()
    each = likelihood.spread_weights(weights.double())
    return each if counted is None else each * counted


def longest_first(columns: Tensor) -> Tensor:
    """Order the rows (n, K, C) of each input by their length."""
    order = columns.square().sum(2).argsort(1, descending=True)
    return columns.gather(1, order[:, :, None].expand_as(columns))


def significant(root: Tensor, tolerance: float) -> Tensor:
    """Return how many leading rows of R (n, K, C) matter for each input: (n,).

    The shortest ones are dropped, over all inputs together, as long as they make up no more than `tolerance` of the
    total squared length, which is the trace of the output Hessians. tolerance = 0 keeps all.
    """
    return significant_lengths(root.double().square().sum(2), tolerance)


def significant_lengths(lengths: Tensor, tolerance: float) -> Tensor:
    """Return the same as `significant` from the squared lengths of the rows, (n, K)."""
    n, K = lengths.shape
    lengths = lengths.double().flatten()
    ordered, order = lengths.sort()
    count = int((ordered.cumsum(0) <= tolerance * ordered.sum()).sum()) if tolerance else 0
    dropped = torch.zeros(n * K, dtype=torch.long, device=lengths.device)
    dropped[order[:count]] = 1
    return K - dropped.view(n, K).sum(1)
