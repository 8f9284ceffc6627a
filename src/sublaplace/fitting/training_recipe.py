"""How a network is trained, and what comes of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sublaplace.arguments import checked_options
from sublaplace.jacobians.network import Forward
from sublaplace.model.calling import call_model
from sublaplace.model.layer_priors import PriorPrecision
from sublaplace.model.likelihoods.base import Likelihood, Noise
from sublaplace.options import Complement, Options, Resources
from sublaplace.runtime.checks import checked_positive

DEFAULT_LEARNING_RATE = 1e-3

_ROUNDS = 10  # how often λ and σ are tuned in the first half of the training

Parameters = list[nn.Parameter]
OptimizerFactory = Callable[[Parameters], torch.optim.Optimizer]


@dataclass
class Training:
    """The result of a training, for ``SubspaceLaplace(model, result.likelihood, prior_precision=…)``.

    Args:
        prior_precision: λ, one number or, with ``prior_structure="layer"``, one for each parameter by name.
        likelihood: the likelihood with the σ in use.
        objective: mean −ln p(y|f) + λ/2N ‖θ‖² after each epoch, as measured during the epoch.
        evidence: ln p(D) of the KFAC approximation, each time λ and σ were tuned.
        validation_nll: mean −ln p(y|f) of the validation data after each epoch; empty without them.
    """

    prior_precision: PriorPrecision
    likelihood: Likelihood
    objective: list[float] = field(default_factory=list)
    evidence: list[float] = field(default_factory=list)
    validation_nll: list[float] = field(default_factory=list)

    @property
    def noise_std(self) -> Noise | None:
        """σ of regression; None for a likelihood without noise."""
        return self.likelihood.noise_std


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Args:
        options: the likelihood, whose σ is tuned if it is not given, λ, and the resources of KFAC.
        epochs: passes over the data.
        optimizer: from parameters to an optimizer without weight decay.
        forward: how the model is called.
        progress: show a bar.
    """

    options: Options
    epochs: int
    optimizer: OptimizerFactory
    forward: Forward = call_model
    progress: bool = False

    @property
    def tunes_prior(self) -> bool:
        """Whether λ is tuned."""
        return self.options.given_prior is None

    @property
    def tunes_noise(self) -> bool:
        """Whether σ is tuned."""
        return self.options.likelihood.has_noise and self.options.likelihood.noise_std is None

    @property
    def tunes(self) -> bool:
        """Whether anything is tuned."""
        return self.tunes_prior or self.tunes_noise

    @property
    def tuned_at(self) -> set[int]:
        """The epochs before which λ and σ are tuned."""
        if not self.tunes:
            return set()
        return {self.epochs * part // (2 * _ROUNDS) for part in range(1, _ROUNDS + 1)} - {0}


def training_options(
    likelihood: str | Likelihood,
    prior_precision: float | dict[str, float] | str,
    prior_structure: str = "scalar",
    seed: int = 0,
    resources: Resources | None = None,
    labels_key: str = "labels",
) -> Options:
    """Return checked options whose posterior is the KFAC approximation, by whose evidence λ and σ are tuned."""
    whole = Complement("kfac", 1.0)
    return checked_options(
        likelihood, None, None, whole, prior_precision, prior_structure, None, labels_key, seed, resources
    )


def adam(learning_rate: float) -> OptimizerFactory:
    """Return the factory of Adam with a learning rate."""

    def factory(parameters: Parameters) -> torch.optim.Optimizer:
        fused = True if parameters[0].device.type == "cpu" else None
        return torch.optim.Adam(parameters, learning_rate, fused=fused)

    return factory


def optimizer_factory(optimizer: Any, learning_rate: Any) -> OptimizerFactory:
    """Return a factory of optimizers that refuses what is no optimizer, or has weight decay of its own."""
    if optimizer is None:
        rate = DEFAULT_LEARNING_RATE if learning_rate is None else learning_rate
        return adam(checked_positive(rate, "learning_rate"))
    if learning_rate is not None:
        raise ValueError("learning_rate has no effect with an optimizer of your own; give it there.")
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise TypeError(
            "optimizer must be a function from the list of parameters to an optimizer, such as "
            "partial(torch.optim.SGD, lr=0.1)."
        )

    def factory(parameters: Parameters) -> torch.optim.Optimizer:
        made = optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"optimizer must return a torch.optim.Optimizer, not {type(made).__name__}.")
        if any(group.get("weight_decay", 0) for group in made.param_groups):
            raise ValueError(
                "The optimizer has a weight decay of its own, but λ stands for it; give weight_decay=0, and "
                "prior_precision=N·weight_decay if you want to keep its value."
            )
        return made

    return factory
