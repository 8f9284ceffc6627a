"""How much outputs depend on each parameter: many depend on none."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.methods import Problem, drawn

DEAD_PARAMETER_INPUTS = 1000
HEAT_MAP_SHAPE = (64, 512)  # test inputs × groups of parameters


def sensitivities(problem: Problem, inputs: Tensor) -> Tensor:
    """Return |∂f/∂θ| of every input and parameter, averaged over the outputs: (n, p).

    It is zero only where the derivatives of all outputs are.
    """
    return torch.cat(
        [
            jacobian.dense_rows().view(jacobian.num_inputs, jacobian.num_rows, -1).abs().mean(1)
            for jacobian in problem.jacobians(inputs)
        ]
    )


def dead_percent(problem: Problem) -> float:
    """Return the percentage of dead parameters, on which no output of the drawn training inputs depends."""
    inputs = problem.dataset.train_inputs
    count = min(DEAD_PARAMETER_INPUTS, len(inputs))
    chosen = drawn(len(inputs), count, problem.seed, "dead parameters")
    largest = sensitivities(problem, inputs[chosen]).amax(0)
    return 100 * (largest == 0).double().mean().item()


def keep_heat_map(path: Path, values: Tensor) -> None:
    """Write the mean sensitivity of every parameter, descending, and the sensitivities of inputs in this order.

    The sensitivities of inputs are averaged over groups of neighbouring parameters.
    """
    mean, order = values.mean(0).sort(descending=True)
    groups = values[:, order].tensor_split(HEAT_MAP_SHAPE[1], dim=1)
    heat_map = torch.stack([group.mean(1) for group in groups], dim=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(partial, sensitivity=mean.float().numpy(), heat_map=heat_map.float().numpy())
    os.replace(partial, path)
