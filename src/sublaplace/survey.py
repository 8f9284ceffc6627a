"""A first look at data: checked, counted, compared with the network's outputs, and X′ drawn from it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sublaplace.data import Reservoir, batches
from sublaplace.jacobians import Linearization
from sublaplace.likelihoods import Gaussian, Likelihood, Residuals


@dataclass(frozen=True)
class Survey:
    """What one forward pass over the training data tells."""

    num_data: int  # N
    num_outputs: int  # C
    likelihood: Likelihood  # with σ, where it was estimated
    estimates_noise: bool
    residuals: Residuals  # of regression
    fixed_log_likelihood: float  # ln p(D|θ̂) of a likelihood without noise

    def log_likelihood(self, noise_std: Tensor) -> Tensor:
        """ln p(D|θ̂), differentiable in σ."""
        if isinstance(self.likelihood, Gaussian):
            return self.residuals.log_likelihood(noise_std)
        return torch.tensor(self.fixed_log_likelihood, dtype=torch.float64)

    def with_noise(self, noise_std: float) -> "Survey":
        assert isinstance(self.likelihood, Gaussian)
        return replace(self, likelihood=self.likelihood.with_noise(noise_std))

    def joined(self, other: "Survey") -> "Survey":
        """The survey of both data sets together; an estimated σ is estimated anew."""
        residuals = self.residuals.joined(other.residuals)
        result = replace(
            self,
            num_data=self.num_data + other.num_data,
            residuals=residuals,
            fixed_log_likelihood=self.fixed_log_likelihood + other.fixed_log_likelihood,
        )
        return result.with_noise(residuals.standard_deviation()) if self.estimates_noise else result


def survey_of(
    loader: Iterable[Any],
    linearization: Linearization,
    likelihood: Likelihood,
    estimates_noise: bool,
    reservoir_for: Callable[[int], Reservoir | None],
    progress: bool,
) -> tuple[Survey, Reservoir | None]:
    """One forward pass over the data. `reservoir_for` C outputs gives what X′ is drawn into, if it is drawn."""
    total, C, fixed = 0, 0, 0.0
    residuals, reservoir = Residuals(), None
    for inputs, targets in batches(tqdm(loader, desc="survey", disable=not progress, leave=False)):
        inputs, targets = linearization.to_device(inputs), targets.to(linearization.device)
        if total == 0:
            linearization.chunk_size(inputs)  # probes the network
        outputs = linearization.outputs(inputs)
        likelihood.check_targets(outputs, targets)
        if total == 0:
            C = outputs.shape[1]
            reservoir = reservoir_for(C)
        if reservoir is not None:
            reservoir.add(inputs)
        if isinstance(likelihood, Gaussian):
            residuals = residuals.joined(Residuals.of(targets - outputs))
        else:
            fixed += float(likelihood.log_likelihood(outputs, targets).sum())
        total += len(outputs)
    if total == 0:
        raise ValueError("The loader is empty: there is nothing to fit.")
    survey = Survey(total, C, likelihood, estimates_noise, residuals, fixed)
    if estimates_noise:
        survey = survey.with_noise(residuals.standard_deviation())
    return survey, reservoir
