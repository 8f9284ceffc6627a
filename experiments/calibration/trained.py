"""The trained networks of tabular sets, kept on disk outside of the repository."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.calibration.networks import described, mlp
from experiments.calibration.problem import Examples, Problem
from experiments.calibration.sets import TableSet, Task
from experiments.calibration.splits import joined, split_table
from experiments.calibration.stack import StackRecipe, train_stack

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "calibration"
ENSEMBLE_SIZE = 5
DROPOUT = 0.1
EPOCHS: dict[Task, int] = {"regression": 200, "classification": 100}

# The networks of a split: their names, whether they see the validation data, and their rate of dropout.
_GROUPS: dict[str, tuple[Sequence[str], bool, float]] = {
    "all": ([f"member-{k}" for k in range(ENSEMBLE_SIZE)], True, 0.0),
    "held-out": (["held-out"], False, 0.0),
    "dropout": (["dropout"], True, DROPOUT),
}

Parts = tuple[Examples, Examples, Examples]
Networks = dict[str, nn.Sequential]


def table_problems(table_set: TableSet, splits: Sequence[int], folder: Path = CACHE) -> list[Problem]:
    """Return the splits of a tabular set with their networks; networks that are not on disk are trained at once."""
    parts = {split: split_table(table_set, split) for split in splits}
    num_outputs = _num_outputs(table_set)
    built = {split: _initial(split, parts[split][0].inputs.shape[1], num_outputs) for split in splits}
    missing = [split for split in splits if not _load(_path(folder, table_set, split), table_set.task, built[split])]
    if missing:
        _train({split: parts[split] for split in missing}, {split: built[split] for split in missing}, table_set.task)
        for split in missing:
            _save(_path(folder, table_set, split), table_set.task, built[split])
    return [_problem(table_set, split, parts[split], built[split]) for split in splits]


def _problem(table_set: TableSet, split: int, parts: Parts, networks: Networks) -> Problem:
    fit, validation, test = parts
    trained = {name: network.eval() for name, network in networks.items()}
    return Problem(
        dataset=table_set.name,
        split=split,
        task=table_set.task,
        train=joined(fit, validation),
        fit=fit,
        validation=validation,
        test=test,
        network=trained["member-0"],
        held_out_network=trained["held-out"],
        members=tuple(trained[f"member-{k}"] for k in range(1, ENSEMBLE_SIZE)),
        dropout_network=trained["dropout"],
    )


def _num_outputs(table_set: TableSet) -> int:
    """Count classes over the whole set: a rare class may be absent from one split."""
    targets = table_set.read()[1]
    return targets.shape[1] if table_set.task == "regression" else int(targets.max()) + 1


def _seed(split: int, name: str) -> int:
    """Return the seed of a network; the held-out network shares it with the first member."""
    return 100 * split + (int(name.removeprefix("member-")) if name.startswith("member-") else 0)


def _initial(split: int, num_inputs: int, num_outputs: int) -> Networks:
    networks: Networks = {}
    for names, _, dropout in _GROUPS.values():
        for name in names:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_seed(split, name))
                network = mlp(num_inputs, num_outputs, dropout)
            sizes = {"num_inputs": num_inputs, "num_outputs": num_outputs, "dropout": dropout}
            networks[name] = cast(nn.Sequential, described(network, "mlp", **sizes))
    return networks


def _train(parts: dict[int, Parts], built: dict[int, Networks], task: Task) -> None:
    for names, sees_validation, dropout in _GROUPS.values():
        stack, seeds, examples = [], [], []
        for split, (fit, validation, _) in parts.items():
            for name in names:
                stack.append(built[split][name])
                seeds.append(_seed(split, name))
                examples.append(joined(fit, validation) if sees_validation else fit)
        inputs = torch.stack([each.inputs for each in examples])
        targets = torch.stack([each.targets for each in examples])
        train_stack(stack, inputs, targets, seeds, StackRecipe(EPOCHS[task], dropout=dropout))


def _fingerprint(task: Task) -> str:
    settings = [asdict(StackRecipe(EPOCHS[task])), DROPOUT, ENSEMBLE_SIZE, "100 * split + member"]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def _path(folder: Path, table_set: TableSet, split: int) -> Path:
    return folder / f"{table_set.name}-{split}.safetensors"


def _save(path: Path, task: Task, networks: Networks) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, network in networks.items():
        tensors |= {f"{name}/{key}": value.contiguous() for key, value in network.state_dict().items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, {"fingerprint": _fingerprint(task)})
    os.replace(partial, path)


def _load(path: Path, task: Task, networks: Networks) -> bool:
    """Load the weights into the networks; False if this recipe has not trained them yet."""
    if not path.exists():
        return False
    with safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("fingerprint") != _fingerprint(task):
            return False
        for name, network in networks.items():
            network.load_state_dict({key: file.get_tensor(f"{name}/{key}") for key in network.state_dict()})
    return True
