"""Seconds and peak memory of large fits: ResNet18, ResNet9 and many subspace inputs, each in a process of its own.

Weights are random, which is the worst case: no direction of the output Hessians is negligible.
"""

import contextlib
import csv
import dataclasses
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from experiments import colour_images, datasets
from experiments.datasets import Dataset
from experiments.methods import FEASIBLE
from experiments.networks import ReusedConvolutionCNN
from experiments.resnets import ResNet18, freeze_norms, resnet9
from sublaplace import PROJECTORS, Complement, Drawn, ProjectorContext, SubspaceLaplace
from sublaplace.projection import Projection

RESULTS = Path(__file__).resolve().parent.parent / "results" / "scale.csv"
COLUMNS = [
    "network",
    "projector",
    "dim",
    "num_subspace_inputs",
    "num_data",
    "prior_precision",
    "num_predictions",
    "complement",
    "parameters",
    "fit_seconds",
    "projector_seconds",
    "posterior_seconds",
    "predict_ms_an_input",
    "trace",
    "base_mb",
    "peak_mb",
    "threads",
]


@dataclass(frozen=True)
class Case:
    """One fit, and a few predictions."""

    network: str
    projector: str
    dim: int
    num_subspace_inputs: int  # n
    num_data: int  # N
    prior_precision: float
    num_predictions: int = 20  # 0: only P is built, not the posterior
    complement: Literal["kfac", "diagonal"] | None = None

    @property
    def name(self) -> str:
        return f"{self.network}-{self.projector}-s{self.dim}-n{self.num_subspace_inputs}"


def _resnet18(projector: str, num_predictions: int) -> Case:
    return Case("resnet18", projector, 100, 100, 331, 13.0, num_predictions)


CASES = {
    case.name: case
    for case in (
        _resnet18("lowrank-kfac", num_predictions=20),
        *(_resnet18(name, num_predictions=0) for name in FEASIBLE if name != "lowrank-kfac"),
        Case("resnet9", "lowrank-kfac", 1000, 100, 1000, 68.07, num_predictions=100),
        Case("resnet9", "lowrank-kfac", 100, 100, 1000, 68.07, num_predictions=100),
        Case("cnn", "lowrank-kfac", 100, 100, 20000, 32.69, num_predictions=500),
        Case("cnn", "lowrank-kfac", 100, 10000, 20000, 32.69, num_predictions=500),
    )
}


def _problem(case: Case) -> tuple[nn.Module, Dataset]:
    torch.manual_seed(0)
    if case.network == "resnet18":
        return freeze_norms(ResNet18()), colour_images.imagenet10()
    if case.network == "resnet9":
        return freeze_norms(resnet9()), colour_images.cifar10()
    return ReusedConvolutionCNN(), datasets.load("fashionmnist")


def measure(case: Case) -> dict[str, object]:
    """Fit and predict in this process; its peak memory includes the network, the data and the libraries."""
    network, dataset = _problem(case)
    inputs, targets = dataset.train_inputs[: case.num_data], dataset.train_targets[: case.num_data]
    test = dataset.test_inputs[: case.num_predictions].clone()
    base = _peak_mb()
    built: dict[str, float] = {}

    projector = PROJECTORS[case.projector]

    def timed(context: ProjectorContext) -> Projection:
        start = time.perf_counter()
        projection = projector(context)
        built.update(projector_seconds=time.perf_counter() - start, dim=projection.dim)
        if not case.num_predictions:
            raise _ProjectionBuiltError
        return projection

    la = SubspaceLaplace(
        network.eval(),
        "classification",
        None if projector.own_dim else case.dim,
        projector=replace(projector, build=timed),
        complement=None if case.complement is None else Complement(case.complement, weight=1.0),
        prior_precision=case.prior_precision,
        subspace_inputs=Drawn(case.num_subspace_inputs) if projector.needs_inputs else None,
    )
    row = dataclasses.asdict(case) | {"parameters": la.num_parameters, "base_mb": base}
    start = time.perf_counter()
    with contextlib.suppress(_ProjectionBuiltError):
        la.fit(DataLoader(TensorDataset(inputs, targets), 50))
        fitted = time.perf_counter()
        trace = la.leading_traces(test)
        la.predict(test)
        row |= {
            "fit_seconds": fitted - start,
            "posterior_seconds": la.stages["reduced posterior"].seconds,
            "predict_ms_an_input": 1000 * (time.perf_counter() - fitted) / 2 / len(test),
            "trace": float(trace[-1]),
        }
    return row | built | {"peak_mb": _peak_mb(), "threads": torch.get_num_threads()}


class _ProjectionBuiltError(Exception):
    """Raised to end a fit once P is built."""


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(names: list[str], threads: int, results: Path = RESULTS) -> None:
    """Measure the named cases (all if none is named), each in a fresh process, and write them to a file."""
    for name in names or list(CASES):
        if name not in CASES:
            raise SystemExit(f"error: unknown case '{name}'; choose of {', '.join(CASES)}.")
        command = [sys.executable, "-m", "experiments.scale", name, str(threads)]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(process.stdout.splitlines()[-1])
        print(
            " ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
            )
        )
        _write(row, results)


def _write(row: dict[str, object], results: Path) -> None:
    """Write one row per case; a new measurement replaces the old one."""
    key = ("network", "projector", "dim", "num_subspace_inputs", "complement")
    rows = list(csv.DictReader(results.open())) if results.exists() else []
    written = {name: "" if (value := row.get(name)) is None else str(value) for name in COLUMNS}
    rows = [other for other in rows if any(other[name] != written[name] for name in key)] + [written]
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(measure(CASES[sys.argv[1]])))
