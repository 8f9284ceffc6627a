"""Variances of parameters along an SGD trajectory (SWAG), as scores for a subset."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sublaplace.data.batches import batches
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.likelihoods.base import Likelihood, target_weights
from sublaplace.model.parameters import ParameterLayout
from sublaplace.runtime.checkpoint import Checkpoint
from sublaplace.runtime.progress import shown


def swag_variances(
    linearization: Linearization,
    loader: Iterable[Any],
    likelihood: Likelihood,
    snapshots: int = 10,
    learning_rate: float = 0.01,
    progress: bool = False,
    checkpoint: Checkpoint | None = None,
) -> Tensor:
    """Return the variance of every parameter over some epochs of SGD from θ̂, (p,) in float64 (Maddox et al., 2019).

    SGD has momentum 0.9 and weight decay 3e-4 and minimises the usual training loss, with one snapshot per epoch. It
    trains a copy of the model in eval mode, so that batch norm and dropout behave as at θ̂, and the user's model is
    unchanged.

    Cost: `snapshots` epochs of training; memory: a copy of the model and 3p numbers.

    Args:
        linearization: the network at θ̂.
        loader: the training data.
        likelihood: defines the training loss.
        snapshots: the number of epochs.
        learning_rate: of SGD.
        progress: whether to show a progress bar.
        checkpoint: where every epoch is stored; an interrupted run resumes after the last complete epoch.

    Raises:
        ValueError: if SGD diverges.
    """
    model = copy.deepcopy(linearization.model).eval()
    layout: ParameterLayout = linearization.layout
    parameters = [p for name, p in model.named_parameters() if name in layout.sizes]
    for p in model.parameters():
        p.requires_grad_(False)
    for p in parameters:
        p.requires_grad_(True)
    optimizer = torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9, weight_decay=3e-4)
    start = layout.flat(model).double()
    first, second = torch.zeros_like(start), torch.zeros_like(start)
    device = linearization.device
    epochs_done = 0
    if checkpoint is not None and (found := checkpoint.read("SWAG")):
        tensors, numbers = found
        epochs_done = numbers["epochs"]
        first, second = tensors["first"], tensors["second"]
        for name, p in zip(layout.names, parameters, strict=True):
            with torch.no_grad():
                p.copy_(tensors[f"parameter.{name}"])
            optimizer.state[p]["momentum_buffer"] = tensors[f"momentum.{name}"]
    for epoch in shown(range(epochs_done, snapshots), "SWAG", progress):
        for inputs, targets, weights in batches(loader):
            inputs = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, inputs)
            targets = targets.to(device)
            counts = target_weights(likelihood, targets, None if weights is None else weights.to(device))
            with torch.enable_grad():
                losses = likelihood.training_losses(linearization.forward(model, inputs), targets)
                loss = losses.mean() if counts is None else _weighted_mean(losses, counts.amax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        # Moments of the distance from the start are small numbers, which limits cancellation in their difference.
        moved = layout.flat(model).double() - start
        first += moved / snapshots
        second += moved.square() / snapshots
        if checkpoint is not None:
            state = {"first": first, "second": second}
            for name, p in zip(layout.names, parameters, strict=True):
                state[f"parameter.{name}"] = p
                state[f"momentum.{name}"] = optimizer.state[p]["momentum_buffer"]
            checkpoint.write("SWAG", state, {"epochs": epoch + 1})
    if not torch.isfinite(second).all():
        raise ValueError(f"SWAG diverged with learning_rate={learning_rate}; choose a smaller one.")
    return (second - first.square()).clamp_min(0)


def _weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights).sum() / weights.sum().clamp_min(torch.finfo(torch.float64).tiny)
