"""A first look at data: checked, counted, compared with the network's outputs, and X′ drawn from it."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sublaplace.data.batches import Batch, num_inputs, split_batch
from sublaplace.data.subspace_inputs import Reservoir
from sublaplace.fitting.last_layer_pass import LastLayerPass
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.likelihoods.at_positions import at_positions, restored_likelihood
from sublaplace.model.likelihoods.base import Likelihood, Noise, target_weights
from sublaplace.model.likelihoods.gaussian import PER_OUTPUT
from sublaplace.model.output_layout import OutputLayout
from sublaplace.model.residuals import Residuals
from sublaplace.runtime.distributed import Share, placed, ranks_of
from sublaplace.runtime.progress import shown
from sublaplace.runtime.stopwatch import PASSES, PROBING, Stopwatch
from sublaplace.runtime.warning import warn


@dataclass(frozen=True)
class Survey:
    """What one forward pass over the training data tells."""

    num_data: int  # N
    num_counting: int  # those whose weight is not zero and whose labels are not all ignored
    num_outputs: int  # C
    likelihood: Likelihood  # with σ, where it was estimated
    residuals: Residuals  # of a likelihood with noise
    fixed_log_likelihood: float  # ln p(D|θ̂) of a likelihood without noise
    layout: OutputLayout | None = None  # of the outputs of an input, in the first batch; None: they have no positions

    def log_likelihood(self, noise_std: Tensor) -> Tensor:
        """Return ln p(D|θ̂), differentiable in σ."""
        if self.likelihood.has_noise:
            return self.residuals.log_likelihood(noise_std)
        return torch.tensor(self.fixed_log_likelihood, dtype=torch.float64, device="cpu")

    @property
    def noise_std(self) -> Noise:
        """σ; 1 for a likelihood without noise."""
        noise = self.likelihood.noise_std
        return 1.0 if noise is None else noise

    def with_noise(self, noise_std: Noise) -> "Survey":
        """Return the survey with another σ."""
        return replace(self, likelihood=self.likelihood.with_noise(noise_std))

    def with_given_noise(self, noise_std: Noise) -> "Survey":
        """Return the survey with another σ, which more data will not change."""
        return replace(self, likelihood=self.likelihood.with_given_noise(noise_std))

    def with_estimated_noise(self) -> "Survey":
        """Return the survey with σ from the residuals, where it is not given."""
        estimate = self.likelihood.noise_estimate
        if estimate is None:
            return self
        residuals = self.residuals
        return self.with_noise(
            residuals.root_mean_squares() if estimate == PER_OUTPUT else residuals.root_mean_square()
        )

    def joined(self, other: "Survey") -> "Survey":
        """Return the survey of both data sets together; an estimated σ is estimated again."""
        result = replace(
            self,
            num_data=self.num_data + other.num_data,
            num_counting=self.num_counting + other.num_counting,
            residuals=self.residuals.joined(other.residuals),
            fixed_log_likelihood=self.fixed_log_likelihood + other.fixed_log_likelihood,
        )
        return result.with_estimated_noise()

    def numbers(self) -> dict[str, Any]:
        """Return what a file keeps of the survey."""
        return {
            "num_data": self.num_data,
            "num_counting": self.num_counting,
            "num_outputs": self.num_outputs,
            "likelihood": self.likelihood.numbers(),
            "residuals": [sums.tolist() for sums in self.residuals.sums],
            "fixed_log_likelihood": self.fixed_log_likelihood,
            "layout": None if self.layout is None else [list(self.layout.shape), self.layout.class_axis],
        }

    @classmethod
    def from_numbers(cls, numbers: dict[str, Any]) -> "Survey":
        """Return the survey of `numbers`."""
        layout = numbers.get("layout")
        return cls(
            numbers["num_data"],
            numbers.get("num_counting", numbers["num_data"]),
            numbers["num_outputs"],
            restored_likelihood(numbers["likelihood"]),
            Residuals(*(torch.tensor(sums, dtype=torch.float64, device="cpu") for sums in numbers["residuals"])),
            numbers["fixed_log_likelihood"],
            None if layout is None else OutputLayout(tuple(layout[0]), layout[1]),
        )


def survey_of(
    loader: Iterable[Any],
    linearization: Linearization,
    likelihood: Likelihood,
    reservoir_for: Callable[[int], Reservoir | None] = lambda _: None,
    estimate: bool = True,
    progress: bool = False,
    last_layer: LastLayerPass | None = None,
    stopwatch: Stopwatch | None = None,
) -> tuple[Survey, Reservoir | None]:
    """Run one forward pass over the data.

    Args:
        loader: the training data.
        linearization: the network.
        likelihood: how outputs and targets are compared.
        reservoir_for: from C to what X′ is drawn into, if it is drawn.
        estimate: fill in σ where the likelihood asks for an estimate.
        progress: show a bar.
        last_layer: sums up the curvature of a last layer in the same pass.
        stopwatch: counts the seconds of the pass, and those of probing the network apart.

    Raises:
        ValueError: if there are no data, none that counts, or no noise to be estimated.
    """
    total, counted, fixed, largest, num_outputs = 0, 0, 0.0, 0.0, 0
    residuals: Residuals | None = None
    layout: OutputLayout | None = None
    reservoir, probabilities = None, True
    stopwatch = Stopwatch() if stopwatch is None else stopwatch
    with stopwatch.counting(PASSES):
        for position, batch in shown(placed(loader), "survey", progress):
            inputs, targets, weights = split_batch(batch)
            if not num_inputs(inputs):
                continue
            inputs, targets = linearization.to_device(inputs), targets.to(linearization.device)
            if total == 0:
                with stopwatch.counting(PROBING):
                    linearization.look_at(inputs)
            outputs = linearization.outputs(inputs) if last_layer is None else last_layer.outputs(inputs)
            likelihood = at_positions(likelihood, linearization.output_layout)
            likelihood.check_targets(linearization.arranged(outputs), targets)
            probabilities = probabilities and likelihood.are_probabilities(outputs)
            rows, single = likelihood.by_position(outputs), likelihood.of_one_position
            if residuals is None:
                residuals, num_outputs, layout = (
                    Residuals.none(rows.shape[1]),
                    outputs.shape[1],
                    linearization.output_layout,
                )
                reservoir = reservoir_for(num_outputs)
            own = None if weights is None else weights.to(linearization.device)
            counts = target_weights(likelihood, targets, own)
            if reservoir is not None:
                reservoir.add(Batch(inputs, targets, weights), position, counts)
            if last_layer is not None:
                last_layer.add(counts)
            counted += len(outputs) if counts is None else int((counts.amax(1) > 0).sum())
            found = likelihood.targets_by_position(targets)
            each_weight = None
            if own is not None:
                each_weight = likelihood.counts_by_position(likelihood.spread_weights(own), outputs)
            if likelihood.has_noise:
                residuals = residuals.joined(Residuals.of(found - rows, each_weight))
                largest = max(largest, float(outputs.abs().max()))
            else:
                each = single.log_density(rows, found)
                fixed += float((each if each_weight is None else each * each_weight.to(each)).sum())
            total += len(outputs)
    ranks = ranks_of(loader)
    if isinstance(loader, Share):
        loader.require_same_reading()
    parts = ranks.gather((total, counted, fixed, largest, residuals, reservoir))
    sums = [part[4] for part in parts if part[4] is not None]
    if not sums:
        raise ValueError("The loader is empty: there is nothing to fit.")
    if len(sums) < ranks.size:
        raise ValueError(f"There are fewer batches than the {ranks.size} ranks; use smaller batches.")
    total, counted = sum(part[0] for part in parts), sum(part[1] for part in parts)
    fixed, largest = sum(part[2] for part in parts), max(part[3] for part in parts)
    residuals = functools.reduce(Residuals.joined, sums)
    if last_layer is not None:
        last_layer.finish(ranks)
    if not counted:
        raise ValueError("No training input counts: all weights are zero, or all labels are ignored.")
    if reservoir is not None:
        reservoir = reservoir.joined([part[5] for part in parts if part[5] is not None])
    if probabilities:
        warn(
            "The network's outputs look like probabilities: none is negative, and those of an input sum to 1. Logits "
            "are expected, without a softmax at the end; with probabilities in their place, all predictions are wrong."
        )
    survey = Survey(total, counted, num_outputs, likelihood, residuals, fixed, layout)
    if estimate and likelihood.noise_estimate is not None:
        survey = survey.with_estimated_noise()
        rounding = 4 * torch.finfo(linearization.dtype).eps * largest
        if min(variance**0.5 for variance in survey.likelihood.noise_variances) <= rounding:
            raise ValueError(
                "The training residuals are no larger than rounding, so no noise can be estimated from them; give "
                "noise_std, as in Gaussian(0.1)."
            )
    return survey, reservoir
