"""The same likelihood at every position of an input."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sublaplace.model.likelihoods.base import Likelihood, Noise, likelihood_from, longest_first
from sublaplace.model.likelihoods.links import variances_of
from sublaplace.model.likelihoods.roots import PositionsRoot
from sublaplace.model.output_layout import OutputLayout


@dataclass(frozen=True)
class AtPositions(Likelihood):
    """p(y|f) = Π_t p(y_t|f_t) over the L positions t of an input, with C outputs each: H is block diagonal.

    A fit makes it from the user's likelihood when it sees the network's outputs. Outputs are flat, (n, L·C), those of
    a position next to each other. Predictive densities are products over the positions too: the posterior's covariance
    between positions is left out of them.

    Args:
        single: the likelihood of one position.
        classes: C; 1 for likelihoods of which every entry is an output of its own.
    """

    single: Likelihood
    classes: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.single.name)
        if self.single.noise_estimate == "per-output" or len(self.single.curvature_scales) > 1:
            raise ValueError(
                "Outputs with positions have one σ for all of them, so noise_std cannot be one number for each output. "
                "Give one number, or None: the root mean square of all training residuals."
            )

    # By position ------------------------------------------------------------------------------------------------------

    @property
    def takes_positions(self) -> bool:
        return True

    @property
    def class_dim(self) -> int | None:
        return self.single.class_dim

    @property
    def of_one_position(self) -> Likelihood:
        return self.single

    def by_position(self, values: Tensor) -> Tensor:
        return values.unflatten(1, (-1, self.classes)).flatten(0, 1)

    def targets_by_position(self, targets: Tensor) -> Tensor:
        return targets.reshape(-1) if self._has_classes else targets.reshape(-1, 1)

    def spread_weights(self, weights: Tensor) -> Tensor:
        if weights.ndim == 1:
            return weights[:, None]
        return weights.flatten(1).repeat_interleave(self.classes, dim=1)

    @property
    def _has_classes(self) -> bool:
        return self.class_dim is not None

    def _summed(self, values: Tensor, num_inputs: int) -> Tensor:
        """Return the sums over the positions, (n,), of numbers (n·L,)."""
        return values.view(num_inputs, -1).sum(1)

    # The likelihood ---------------------------------------------------------------------------------------------------

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows, labels = self.by_position(outputs), self.targets_by_position(targets)
        return self._summed(self.single.log_density(rows, labels), len(outputs))

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """Return the rows of all positions' roots, longest first. Memory: n·(L·C)²; `root` needs n·L·C."""
        blocks = self.single.hessian_root(self.by_position(outputs)).unflatten(0, (len(outputs), -1))
        n, L, k, C = blocks.shape
        rows = outputs.new_zeros(n, L, k, L, C)
        places = torch.arange(L, device=outputs.device)
        rows[:, places, :, places] = blocks.transpose(0, 1)
        return longest_first(rows.reshape(n, L * k, L * C))

    def root(self, outputs: Tensor) -> PositionsRoot:
        return PositionsRoot(self.single.root(self.by_position(outputs)), outputs.shape[1] // self.classes)

    def hessian_sum(self, outputs: Tensor, weights: Tensor | None, diagonal: bool = False) -> Tensor:
        """Return Σ √w H √w over inputs and positions: (C, C), or its diagonal (C,)."""
        each = None if weights is None else self.by_position(weights.expand(outputs.shape))
        return self.single.hessian_sum(self.by_position(outputs), each, diagonal)

    def are_probabilities(self, outputs: Tensor) -> bool:
        return self.single.are_probabilities(self.by_position(outputs))

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ValueError where targets do not fit outputs in the network's arrangement, (n, …)."""
        layout = OutputLayout.of(tuple(outputs.shape), self.class_dim)
        if layout.num_classes != self.classes:
            raise ValueError(f"The model had {self.classes} classes at first, and now {layout.num_classes}.")
        expected = (len(outputs), *layout.positions)
        if tuple(targets.shape) != expected:
            what = f"one label per position, of shape {expected}" if self._has_classes else "of the same shape"
            raise ValueError(
                f"The model's outputs have shape {tuple(outputs.shape)}, so targets must be {what}; they have shape "
                f"{tuple(targets.shape)}."
            )
        self.single.check_targets(self.by_position(layout.flat(outputs)), self.targets_by_position(targets))

    def counted(self, targets: Tensor) -> Tensor | None:
        found = self.single.counted(self.targets_by_position(targets))
        return None if found is None else self.spread_weights(found.view(len(targets), -1))

    def log_predictive(self, outputs: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """Return ln p(y|x, D), summed over the positions, from the variances of the outputs alone."""
        rows, variances = self.by_position(outputs), self.by_position(variances_of(covariance))
        return self._summed(
            self.single.log_predictive(rows, variances, self.targets_by_position(targets)), len(outputs)
        )

    def predictive_divergences(self, outputs: Tensor, covariance: Tensor, other: Tensor) -> Tensor:
        """Return the sums of the positions' divergences, from the variances of the outputs alone."""
        rows = self.by_position(outputs)
        p, q = (self.by_position(variances_of(each)).diag_embed() for each in (covariance, other))
        return self._summed(self.single.predictive_divergences(rows, p, q), len(outputs))

    def training_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the positions that count."""
        losses = self.single.training_losses(self.by_position(outputs), self.targets_by_position(targets))
        losses, counted = losses.view(len(outputs), -1), self.counted(targets)
        if counted is None:
            return losses.mean(1)
        return losses.sum(1) / (counted.sum(1) / self.classes).clamp_min(1)

    @property
    def needs_variances_only(self) -> bool:
        return True

    @property
    def default_link(self) -> str:
        return self.single.default_link

    @property
    def curvature_scales(self) -> tuple[float, ...]:
        return self.single.curvature_scales

    @property
    def noise_variances(self) -> tuple[float, ...]:
        return self.single.noise_variances

    @property
    def has_probabilities(self) -> bool:
        return self.single.has_probabilities

    @property
    def has_target_variance(self) -> bool:
        return self.single.has_target_variance

    @property
    def drops_directions(self) -> bool:
        return self.single.drops_directions

    # The noise --------------------------------------------------------------------------------------------------------

    @property
    def noise_std(self) -> Noise | None:
        return self.single.noise_std

    @property
    def noise_estimate(self) -> str | None:
        return self.single.noise_estimate

    @property
    def has_noise(self) -> bool:
        return self.single.has_noise

    def with_noise(self, noise_std: Noise) -> "AtPositions":
        return replace(self, single=self.single.with_noise(noise_std))

    def with_given_noise(self, noise_std: Noise) -> "AtPositions":
        return replace(self, single=self.single.with_given_noise(noise_std))

    # Saving -----------------------------------------------------------------------------------------------------------

    def numbers(self) -> dict[str, Any]:
        return self.single.numbers() | {"at_positions_of": self.classes}


def at_positions(likelihood: Likelihood, layout: OutputLayout | None) -> Likelihood:
    """Return the likelihood of outputs in this arrangement; None: they have no positions."""
    if layout is None or isinstance(likelihood, AtPositions):
        return likelihood
    return AtPositions(likelihood, layout.num_classes)


def restored_likelihood(numbers: dict[str, Any]) -> Likelihood:
    """Return the likelihood of `numbers`, with positions or without."""
    values = dict(numbers)
    classes = values.pop("at_positions_of", None)
    single = likelihood_from(values)
    return single if classes is None else AtPositions(single, classes)
