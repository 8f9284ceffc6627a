"""Training of the MAP networks: deterministic for a seed, resumable, with the weights kept on disk."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from experiments.augmentation import AUGMENTATIONS
from experiments.datasets import Dataset
from experiments.networks import NETWORKS
from experiments.recipes import Recipe
from experiments.resnets import freeze_norms

WEIGHTS = Path(__file__).resolve().parent / "computed" / "weights"
SECONDS_BETWEEN_CHECKPOINTS = 5.0


def trained_network(recipe: Recipe, dataset: Dataset, seed: int, folder: Path = WEIGHTS) -> nn.Module:
    """Return the network of a seed at θ̂ in eval mode: from disk if this recipe trained it, else trained and kept.

    An interrupted training continues from its last checkpoint and gives the same weights as an uninterrupted one. A
    network of no epochs comes trained. Scales and shifts of batch normalisation are fixed, as in the paper.
    """
    network = initial_network(recipe.network, seed)
    if not recipe.training.epochs:
        return freeze_norms(network).eval()
    path = _weights_path(recipe, seed, folder)
    fingerprint = recipe.training_fingerprint()
    weights = _kept_weights(path, fingerprint)
    if weights is None:
        folder.mkdir(parents=True, exist_ok=True)
        _train(network, recipe, dataset, seed, path.with_suffix(".checkpoint"))
        partial = path.with_suffix(".partial")
        whole = {name: part.contiguous() for name, part in network.state_dict().items()}
        save_file(whole, partial, {"fingerprint": fingerprint})
        os.replace(partial, path)
        path.with_suffix(".checkpoint").unlink(missing_ok=True)
    else:
        network.load_state_dict(weights)
    return freeze_norms(network).eval()


def is_trained(recipe: Recipe, seed: int, folder: Path = WEIGHTS) -> bool:
    """Whether `trained_network` would have nothing to train."""
    if not recipe.training.epochs:
        return True
    return _kept_weights(_weights_path(recipe, seed, folder), recipe.training_fingerprint()) is not None


def _weights_path(recipe: Recipe, seed: int, folder: Path) -> Path:
    return folder / f"{recipe.dataset}-{seed}.safetensors"


def held_out(dataset: Dataset) -> tuple[Dataset, Tensor, Tensor]:
    """Return the data set without a twelfth of its training data, and the inputs and targets of this twelfth."""
    kept = len(dataset.train_inputs) - len(dataset.train_inputs) // 12
    order = torch.from_numpy(np.random.default_rng(42).permutation(len(dataset.train_inputs)))
    inputs, targets = dataset.train_inputs[order], dataset.train_targets[order]
    rest = replace(dataset, name=f"{dataset.name}-held-out", train_inputs=inputs[:kept], train_targets=targets[:kept])
    return rest, inputs[kept:], targets[kept:]


def initial_network(name: str, seed: int) -> nn.Module:
    """Build the named network with the random weights of a seed; the global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETWORKS[name]()


def _kept_weights(path: Path, fingerprint: str) -> dict[str, Tensor] | None:
    """Return weights that this recipe trained; None if there are none or another recipe trained them."""
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("fingerprint") != fingerprint:
            return None
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is not a mapping)


def _train(network: nn.Module, recipe: Recipe, dataset: Dataset, seed: int, checkpoint: Path) -> None:
    training = recipe.training
    loss_of = F.mse_loss if dataset.likelihood == "regression" else F.cross_entropy
    inputs, targets = dataset.train_inputs, dataset.train_targets
    optimizer = torch.optim.Adam(network.parameters(), weight_decay=training.weight_decay)
    steps_an_epoch = -(-len(inputs) // training.batch_size)
    num_steps = training.epochs * steps_an_epoch
    # Pictures run channels last, which is a quarter faster or more; rounding aside, the result is the same.
    memory_format = torch.channels_last if inputs.ndim == 4 else torch.contiguous_format
    network.to(memory_format=memory_format).train()  # type: ignore[call-overload]
    start = _resume(checkpoint, recipe.training_fingerprint(), network, optimizer)
    saved_at = time.monotonic()
    progress = tqdm(range(start, training.epochs), f"{recipe.dataset} seed {seed}", training.epochs, initial=start)
    for epoch in progress:
        # The order of an epoch depends on nothing before it, so that a resumed training sees the same batches.
        order = torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(len(inputs)))
        mean_loss = 0.0
        for index, rows in enumerate(order.split(training.batch_size)):
            rate = training.learning_rate_at(epoch * steps_an_epoch + index, num_steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            batch = inputs[rows]
            if training.augmentation:
                batch = AUGMENTATIONS[training.augmentation](batch, np.random.default_rng([seed, epoch, index]))
            loss = loss_of(network(batch.contiguous(memory_format=memory_format)), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), training.gradient_norm)
            optimizer.step()
            mean_loss += loss.item() * len(rows) / len(inputs)
        if not np.isfinite(mean_loss):
            raise RuntimeError(f"The training of {recipe.dataset}, seed {seed}, diverged in epoch {epoch}.")
        progress.set_postfix(loss=f"{mean_loss:.4g}", refresh=False)
        if time.monotonic() - saved_at > SECONDS_BETWEEN_CHECKPOINTS:
            _keep(checkpoint, recipe.training_fingerprint(), network, optimizer, epoch + 1)
            saved_at = time.monotonic()


def _keep(path: Path, fingerprint: str, network: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Write the state of a training so that the file is complete at any moment."""
    state = {"fingerprint": fingerprint, "epoch": epoch, "network": network.state_dict()}
    partial = path.with_suffix(".checkpoint.partial")
    torch.save({**state, "optimizer": optimizer.state_dict()}, partial)
    os.replace(partial, path)


def _resume(path: Path, fingerprint: str, network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the epoch to continue with; 0 without a checkpoint of this recipe."""
    if not path.exists():
        return 0
    state: dict[str, Any] = torch.load(path, weights_only=True)
    if state["fingerprint"] != fingerprint:
        return 0
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epoch"])
