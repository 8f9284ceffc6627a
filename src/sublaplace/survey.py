"""A first look at data: checked, counted, compared with the network's outputs, and X′ drawn from it."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from sublaplace.data import Reservoir, split_batch
from sublaplace.distributed import placed, ranks_of
from sublaplace.jacobians import Linearization
from sublaplace.jacobians.inputs import num_inputs
from sublaplace.likelihoods import Gaussian, Likelihood, Noise, target_weights
from sublaplace.residuals import Residuals

NoiseEstimate = Literal["pooled", "per-output"]
"""How σ is estimated from the residuals: one for all outputs, or one for each."""


@dataclass(frozen=True)
class Survey:
    """What one forward pass over the training data tells."""

    num_data: int  # N
    num_outputs: int  # C
    likelihood: Likelihood  # with σ, where it was estimated
    estimated_noise: NoiseEstimate | None
    residuals: Residuals  # of regression
    fixed_log_likelihood: float  # ln p(D|θ̂) of a likelihood without noise

    def log_likelihood(self, noise_std: Tensor) -> Tensor:
        """ln p(D|θ̂), differentiable in σ."""
        if isinstance(self.likelihood, Gaussian):
            return self.residuals.log_likelihood(noise_std)
        return torch.tensor(self.fixed_log_likelihood, dtype=torch.float64)

    @property
    def noise_std(self) -> Noise:
        """σ; 1 for a likelihood without noise."""
        return self.likelihood.noise_std if isinstance(self.likelihood, Gaussian) else 1.0

    def with_noise(self, noise_std: Noise) -> "Survey":
        assert isinstance(self.likelihood, Gaussian)
        return replace(self, likelihood=self.likelihood.with_noise(noise_std))

    def with_estimated_noise(self) -> "Survey":
        """With σ from the residuals, where it is not given."""
        if self.estimated_noise is None:
            return self
        per_output = self.estimated_noise == "per-output"
        return self.with_noise(
            self.residuals.standard_deviations() if per_output else self.residuals.standard_deviation()
        )

    def joined(self, other: "Survey") -> "Survey":
        """The survey of both data sets together; an estimated σ is estimated anew."""
        result = replace(
            self,
            num_data=self.num_data + other.num_data,
            residuals=self.residuals.joined(other.residuals),
            fixed_log_likelihood=self.fixed_log_likelihood + other.fixed_log_likelihood,
        )
        return result.with_estimated_noise()


def survey_of(
    loader: Iterable[Any],
    linearization: Linearization,
    likelihood: Likelihood,
    estimated_noise: NoiseEstimate | None = None,
    reservoir_for: Callable[[int], Reservoir | None] = lambda _: None,
    progress: bool = False,
) -> tuple[Survey, Reservoir | None]:
    """One forward pass over the data. `reservoir_for` C outputs gives what X′ is drawn into, if it is drawn."""
    total, counted, fixed, largest = 0, 0.0, 0.0, 0.0
    residuals: Residuals | None = None
    reservoir = None
    for position, batch in tqdm(placed(loader), desc="survey", disable=not progress, leave=False):
        inputs, targets, weights = split_batch(batch)
        if not num_inputs(inputs):
            continue
        inputs, targets = linearization.to_device(inputs), targets.to(linearization.device)
        if total == 0:
            linearization.look_at(inputs)  # probes the network
        outputs = linearization.outputs(inputs)
        likelihood.check_targets(outputs, targets)
        if residuals is None:
            residuals = Residuals.none(outputs.shape[1])
            reservoir = reservoir_for(outputs.shape[1])
        counts = target_weights(likelihood, targets, None if weights is None else weights.to(linearization.device))
        if reservoir is not None:
            reservoir.add(inputs, position, counts)
        counted += len(outputs) if counts is None else float(counts.amax(1).sum())
        if isinstance(likelihood, Gaussian):
            residuals = residuals.joined(Residuals.of(targets - outputs, weights))
            largest = max(largest, float(outputs.abs().max()))
        else:
            each = likelihood.log_likelihood(outputs, targets)
            fixed += float((each if weights is None else each * weights.to(each)).sum())
        total += len(outputs)
    ranks = ranks_of(loader)
    parts = ranks.gather((total, counted, fixed, largest, residuals, reservoir))
    found = [part[4] for part in parts if part[4] is not None]
    if not found:
        raise ValueError("The loader is empty: there is nothing to fit.")
    if len(found) < ranks.size:
        raise ValueError(f"There are fewer batches than the {ranks.size} ranks; use smaller batches.")
    total, counted = sum(part[0] for part in parts), sum(part[1] for part in parts)
    fixed, largest = sum(part[2] for part in parts), max(part[3] for part in parts)
    residuals = functools.reduce(Residuals.joined, found)
    if not counted:
        raise ValueError("No training input counts: all weights are zero, or all labels are ignored.")
    if reservoir is not None:
        reservoir = reservoir.joined([part[5] for part in parts if part[5] is not None])
    survey = Survey(total, len(residuals.count), likelihood, estimated_noise, residuals, fixed)
    survey = survey.with_estimated_noise()
    if estimated_noise is not None and isinstance(survey.likelihood, Gaussian):
        rounding = 4 * torch.finfo(linearization.dtype).eps * largest
        if min(survey.likelihood.stds) <= rounding:
            raise ValueError(
                "The training residuals are no larger than rounding, so no noise can be estimated from them; give "
                "noise_std."
            )
    return survey, reservoir
