"""A fit: what is checked before it, and which engine, memory budget and checkpoint it gets."""

import json
import os
from collections.abc import Iterable
from typing import Any

from torch import nn

from sublaplace.data.loaders import has_items, probed
from sublaplace.data.subspace_inputs import Given
from sublaplace.fitting.fitted import Fitted
from sublaplace.fitting.run import Run
from sublaplace.fitting.saving import model_fingerprint
from sublaplace.jacobians.chunks import ChunkPolicy
from sublaplace.jacobians.linearization import Linearization
from sublaplace.jacobians.network import Forward
from sublaplace.jacobians.widening import in_float32
from sublaplace.model.attributes import as_texts, settings_of
from sublaplace.model.fingerprint import Fingerprint, described_modules
from sublaplace.model.output_layout import FlatOutputs
from sublaplace.model.parameters import in_working_precision
from sublaplace.options import Options
from sublaplace.runtime.checkpoint import Checkpoint, fingerprint_of, require_fixed_order
from sublaplace.runtime.distributed import ranks_of
from sublaplace.runtime.memory import default_budget
from sublaplace.runtime.warning import warn


def fit(
    options: Options,
    loader: Iterable[Any],
    model: nn.Module,
    forward: Forward,
    certify: bool,
    validated: bool,
    folder: str | os.PathLike[str] | None,
    progress: bool,
) -> Fitted:
    """Fit the posterior; `folder` is that of a checkpoint, `validated` says that λ will be tuned on other data."""
    certify = certify or options.chooses_dim
    _warn_of_training_mode(model)
    checkpoint = None
    budget = options.resources.memory_budget
    if folder is not None:
        checkpoint = _checkpoint(options, folder, loader, model, certify)
        budget = checkpoint.identity["memory_budget"]  # as begun: it decides the order of sums
    elif (ranks := ranks_of(loader)).size > 1:
        facts = {
            "The model": Fingerprint.of(model).digest,
            "The settings": json.dumps(options.described() | {"certify": certify, "validated": validated}),
        }
        if isinstance(options.subspace_inputs, Given):
            facts["The inputs of subspace_inputs"] = fingerprint_of(probed(options.subspace_inputs.inputs))
        ranks.require_same(facts, "Give every rank the same.")
        budget = min(ranks.gather(budget or default_budget(next(model.parameters()).device)))
    else:
        _warn_of_augmentation(loader)
    linearization = new_linearization(options, model, forward, budget)
    run = Run(options, loader, linearization, checkpoint, certify, validated, progress)
    with linearization.borrowed():
        fitted = run.fitted()
    if checkpoint is not None:
        checkpoint.remove()
    return fitted


def _warn_of_training_mode(model: nn.Module) -> None:
    """Warn if a module is in training mode, and would give other outputs in evaluation mode."""
    if any(module.training and _depends_on_mode(module) for module in model.modules()):
        warn(
            "The model is in training mode, with dropout or batch norm. The posterior is that of its evaluation mode. "
            "Call model.eval() before the fit, and before you use the network itself."
        )


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _warn_of_augmentation(loader: Iterable[Any]) -> None:
    """Warn if some items of a data set are not the same when they are read twice."""
    if has_items(loader) and fingerprint_of(probed(loader)) != fingerprint_of(probed(loader)):
        warn(
            "The training data differ from one reading to the next, as with random augmentation. They are read several "
            "times, so the posterior would belong to no single data set. Switch the augmentation off for the fit."
        )


def new_linearization(
    options: Options, model: nn.Module, forward: Forward, budget: int | None, units: dict[str, float] | None = None
) -> Linearization:
    """Return the engine for a model, in float32 where the model has half precision."""
    working = in_working_precision(model)
    device = next(working.parameters()).device
    policy = ChunkPolicy(budget or default_budget(device), options.num_vectors)
    forward = in_float32(working, forward)
    if options.likelihood.takes_positions:
        forward = FlatOutputs(forward, options.likelihood.class_dim)
    return Linearization(working, forward, policy, options.resources.scratch_folder, units)


def _checkpoint(
    options: Options, folder: str | os.PathLike[str], loader: Iterable[Any], model: nn.Module, certify: bool
) -> Checkpoint:
    if ranks_of(loader).size > 1:
        raise ValueError("fit(checkpoint=…) is for a single process; in a process group start all ranks again.")
    identity = options.identity()
    require_fixed_order(loader)
    device = next(model.parameters()).device
    identity |= {
        "model": model_fingerprint(model),
        "modules": described_modules(model),
        "settings of modules": as_texts(settings_of(model)),
        "certify": certify,
        "memory_budget": options.resources.memory_budget or default_budget(device),
    }
    return Checkpoint(folder, identity, device)
