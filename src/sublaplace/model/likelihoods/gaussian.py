"""Regression with Gaussian noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import pi
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from sublaplace.model.likelihoods.base import Likelihood, Noise
from sublaplace.model.likelihoods.roots import DiagonalRoot
from sublaplace.runtime.checks import checked_positive

POOLED, PER_OUTPUT = "pooled", "per-output"


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """p(y|f) = N(y | f, diag σ²): H = diag σ⁻².

    Outputs may have any shape (n, …). Beyond (n, C), every entry is an output of its own with the same σ, and targets
    have the shape of the outputs.

    Args:
        noise_std: σ, one number or one for each output. None: the root mean square of the training residuals, pooled
            over the outputs; "per-output": that of each output.
        noise_estimate: how σ is estimated from training residuals; None where it is given. It follows from
            `noise_std`, and stays when the estimate is filled in.
    """

    noise_std: Any = None
    noise_estimate: Any = None
    name: ClassVar[str] = "regression"

    def __post_init__(self) -> None:
        given = self.noise_std
        if isinstance(given, str):
            if given != PER_OUTPUT:
                raise ValueError(f"Unknown noise_std '{given}'; give a number, one for each output, or '{PER_OUTPUT}'.")
            object.__setattr__(self, "noise_estimate", PER_OUTPUT)
            object.__setattr__(self, "noise_std", None)
        elif given is None:
            object.__setattr__(self, "noise_estimate", self.noise_estimate or POOLED)
        else:
            object.__setattr__(self, "noise_std", checked_noise(given))

    @property
    def stds(self) -> tuple[float, ...]:
        """σ as a tuple of one or C numbers; 1 where it is still to be estimated."""
        if self.noise_std is None:
            return (1.0,)
        return self.noise_std if isinstance(self.noise_std, tuple) else (self.noise_std,)

    @property
    def has_noise(self) -> bool:
        return True

    @property
    def takes_positions(self) -> bool:
        return True

    @property
    def curvature_scales(self) -> tuple[float, ...]:
        return tuple(std**-2 for std in self.stds)

    @property
    def noise_variances(self) -> tuple[float, ...]:
        return tuple(std**2 for std in self.stds)

    @property
    def drops_directions(self) -> bool:
        return False

    def with_noise(self, noise_std: Noise) -> "Gaussian":
        return replace(self, noise_std=noise_std)

    def with_given_noise(self, noise_std: Noise) -> "Gaussian":
        return Gaussian(noise_std)

    def variances(self, outputs: Tensor) -> Tensor:
        """Return σ² of every output: (C,), in float64."""
        stds = torch.tensor(self.stds, dtype=torch.float64, device=outputs.device)
        return stds.square().expand(outputs.shape[1])

    def hessian_root(self, outputs: Tensor) -> Tensor:
        n, C = outputs.shape
        return torch.eye(C, dtype=outputs.dtype, device=outputs.device).expand(n, C, C)

    def root(self, outputs: Tensor) -> DiagonalRoot:
        return DiagonalRoot(torch.ones_like(outputs))

    def hessian_sum(self, outputs: Tensor, weights: Tensor | None, diagonal: bool = False) -> Tensor:
        ones = torch.ones_like(outputs, dtype=torch.float64)
        total = (ones if weights is None else ones * weights).sum(0)
        if len(self.curvature_scales) > 1:
            total = total * total.new_tensor(self.curvature_scales)
        return total if diagonal else total.diag()

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        if not targets.is_floating_point():
            raise ValueError(f"Regression needs floating-point targets, but they are {targets.dtype}.")
        if targets.shape != outputs.shape:
            raise ValueError(
                f"Targets have shape {tuple(targets.shape)}, the model's outputs {tuple(outputs.shape)}; "
                "for a single output give targets of shape (n, 1)."
            )
        if not torch.isfinite(targets).all():
            raise ValueError("The targets hold NaN or infinity.")
        if len(self.stds) not in (1, outputs.shape[1]):
            raise ValueError(
                f"noise_std holds {len(self.stds)} numbers, but the model has {outputs.shape[1]} outputs; give one "
                "number, or one for each output."
            )

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        variances = self.variances(outputs)
        squares = (outputs.double() - targets.double()).square()
        return -0.5 * (squares / variances + (2 * pi * variances).log()).sum(1)

    def log_predictive(self, outputs: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        if covariance.ndim == 2:
            variances = covariance.double() + self.variances(outputs)
            squares = (outputs.double() - targets.double()).square()
            return -0.5 * (squares / variances + (2 * pi * variances).log()).sum(1)
        total = covariance.double() + self.variances(outputs).diag()
        return MultivariateNormal(outputs.double(), total, validate_args=False).log_prob(targets.double())

    def training_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1)


def checked_noise(noise_std: Any) -> Noise:
    """Return σ as one number or a tuple of one for each output, or raise an error that says what is wrong."""
    if getattr(noise_std, "ndim", 0) > 1:
        raise ValueError(
            f"noise_std must be one number, or one for each output in a row, but it has shape {tuple(noise_std.shape)}."
        )
    if getattr(noise_std, "ndim", 0) or isinstance(noise_std, Sequence):
        stds = tuple(checked_positive(std, "noise_std") for std in noise_std)
        if not stds:
            raise ValueError("noise_std holds no number; give one, or one for each output.")
        return stds
    return checked_positive(noise_std, "noise_std")
