"""Training many MLPs at once: a step multiplies batches of matrices, which on a small CPU is far faster than a loop."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class StackRecipe:
    """How each network of a stack is trained: AdamW with a cosine from `learning_rate` to 0, step by step."""

    epochs: int
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    batch_size: int = 64
    dropout: float = 0.0


def train_stack(
    networks: Sequence[nn.Sequential], inputs: Tensor, targets: Tensor, seeds: Sequence[int], recipe: StackRecipe
) -> None:
    """Train m MLPs of one shape in place, network k on inputs[k] (n, d) and targets[k] with the batches of seeds[k].

    A network ends with the same weights, up to rounding, as if it were trained alone. Targets are (m, n, C) numbers for
    the squared error or (m, n) classes for the cross entropy. Cost per step: three batched products forward, six back.
    """
    linears = [[layer for layer in network if isinstance(layer, nn.Linear)] for network in networks]
    weights = [torch.stack([layer.weight.detach().T for layer in layers]) for layers in zip(*linears, strict=True)]
    biases = [torch.stack([layer.bias.detach()[None] for layer in layers]) for layers in zip(*linears, strict=True)]
    parameters = [*weights, *biases]
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.AdamW(parameters, recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True)
    masks = [torch.Generator().manual_seed(seed) for seed in seeds]
    n = inputs.shape[1]
    num_steps = recipe.epochs * -(-n // recipe.batch_size)
    member = torch.arange(len(networks))[:, None]
    step = 0
    for epoch in range(recipe.epochs):
        orders = [np.random.default_rng([seed, epoch]).permutation(n) for seed in seeds]
        for rows in torch.from_numpy(np.stack(orders)).split(recipe.batch_size, dim=1):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * step / num_steps))
            hidden = inputs[member, rows]
            for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                hidden = torch.baddbmm(bias, hidden, weight)
                if index < len(weights) - 1:
                    hidden = hidden.relu()
                    if recipe.dropout:
                        hidden = hidden * _kept(masks, hidden.shape[1:], recipe.dropout)
            optimizer.zero_grad()
            _loss(hidden, targets[member, rows]).backward()
            optimizer.step()
            step += 1
    with torch.no_grad():
        for k, layers in enumerate(linears):
            for layer, weight, bias in zip(layers, weights, biases, strict=True):
                layer.weight.copy_(weight[k].T)
                layer.bias.copy_(bias[k, 0])


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum the mean losses of the networks, so that each gets the gradient that it would get alone."""
    if targets.is_floating_point():
        return (outputs - targets).square().mean((1, 2)).sum()
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(1).sum()


def _kept(masks: Sequence[torch.Generator], shape: torch.Size, rate: float) -> Tensor:
    """Draw which units stay, scaled so that the mean is kept, from the generator of each network."""
    drawn = torch.stack([torch.rand(shape, generator=generator) for generator in masks])
    return (drawn >= rate) / (1 - rate)
