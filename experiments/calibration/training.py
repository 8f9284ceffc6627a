"""Training one network that is not an MLP, with its weights kept on disk."""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from experiments.calibration.problem import Examples


@dataclass(frozen=True)
class NetworkRecipe:
    """How a network is trained: AdamW, a rise to `learning_rate` over the share `warm` of the steps, a cosine to 0."""

    epochs: int
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    batch_size: int = 64
    warm: float = 0.0

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate of step 0 ≤ `step` < `num_steps`."""
        rise = min(1.0, (step + 1) / (self.warm * num_steps)) if self.warm else 1.0
        return self.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def kept_network(
    path: Path, build: Callable[[], nn.Module], train: Callable[[nn.Module], None], seed: int, about: str
) -> nn.Module:
    """Return a trained network in evaluation mode: from its file, or trained and then kept.

    `about` says how it was trained; a file that says otherwise is replaced. Only parameters are kept.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build()
        if not _load(path, network, about):
            train(network)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            weights = {name: part.detach().contiguous() for name, part in network.named_parameters()}
            save_file(weights, partial, {"about": about})
            os.replace(partial, path)
    return network.eval()


def described_recipe(recipe: NetworkRecipe, *other: object) -> str:
    """Return a short text that changes with the recipe, or with what else is named."""
    return hashlib.sha256(json.dumps([asdict(recipe), *map(str, other)]).encode()).hexdigest()[:16]


def train_classifier(network: nn.Module, examples: Examples, seed: int, recipe: NetworkRecipe) -> None:
    """Minimise the cross entropy over the parameters that require grad, in place."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, recipe.learning_rate, weight_decay=recipe.weight_decay)
    num_steps, step = recipe.epochs * math.ceil(len(examples) / recipe.batch_size), 0
    network.train()
    for epoch in range(recipe.epochs):
        order = torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(len(examples)))
        for rows in order.split(recipe.batch_size):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate_at(step, num_steps)
            optimizer.zero_grad()
            F.cross_entropy(network(examples.inputs[rows]), examples.targets[rows]).backward()
            optimizer.step()
            step += 1
    network.eval()


def _load(path: Path, network: nn.Module, about: str) -> bool:
    if not path.exists():
        return False
    with safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("about") != about:
            return False
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(file.get_tensor(name))
    return True
