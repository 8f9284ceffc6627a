"""What the default posterior costs beside the paper's, and tuning beside a prediction of the same inputs.

Run ``python benchmarks/default_cost.py``, after ``make venv`` with the data of the experiments. Networks are trained: a
CNN on FashionMNIST and the ResNet20 of the calibration benchmark. Both posteriors have the same s and λ, and run in one
process, one after the other in every round. The table shows medians of the rounds' ratios, with the smallest and the
largest; times are those of the clock.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sublaplace import SubspaceLaplace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from experiments import datasets  # noqa: E402
from experiments.calibration.cifar import cifar_problems  # noqa: E402
from experiments.calibration.networks import cnn  # noqa: E402
from experiments.calibration.problem import Examples  # noqa: E402
from experiments.calibration.training import NetworkRecipe, train_classifier  # noqa: E402

PRIOR_PRECISION = 10.0
SIZES = {"cnn": (2000, 1000), "resnet20": (500, 200)}
"""Training inputs, and inputs that are predicted and tuned with."""


def problem(name: str) -> tuple[torch.nn.Module, Examples, Examples]:
    """Return a trained network, its training examples and others."""
    num_train, num_others = SIZES[name]
    if name == "resnet20":
        found = cifar_problems([0])[0][0]
        return found.network, found.train[:num_train], found.test[:num_others]
    dataset = datasets.load("fashionmnist")
    train = Examples(dataset.train_inputs[:num_train], dataset.train_targets[:num_train])
    torch.manual_seed(0)
    network = cnn()
    train_classifier(network, train, 0, NetworkRecipe(epochs=10))
    return network.eval(), train, Examples(dataset.test_inputs[:num_others], dataset.test_targets[:num_others])


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measured(name: str, rounds: int, dim: int) -> dict[str, list[float]]:
    """Return the ratios of every round."""
    network, train, others = problem(name)
    ratios: dict[str, list[float]] = {"fit": [], "prediction": [], "tuning": []}
    for _ in range(rounds):
        paper = SubspaceLaplace.paper(network, "classification", dim, prior_precision=PRIOR_PRECISION)
        ours = SubspaceLaplace(network, "classification", dim, prior_precision=PRIOR_PRECISION)
        fits = [seconds(lambda la=la: la.fit(train.loader())) for la in (paper, ours)]
        predictions = [seconds(lambda la=la: [la(x) for x, _ in others.loader()]) for la in (paper, ours)]
        tuning = seconds(lambda la=ours: la.tuned(others.loader()))
        ratios["fit"].append(fits[1] / fits[0])
        ratios["prediction"].append(predictions[1] / predictions[0])
        ratios["tuning"].append(tuning / predictions[1])
        print(name, *(f"{key} {values[-1]:.2f}" for key, values in ratios.items()), file=sys.stderr, flush=True)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dim", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--networks", nargs="+", choices=list(SIZES), default=list(SIZES))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| network | N | others | fit / paper's | prediction / paper's | tuning / prediction |")
    print("|---|---|---|---|---|---|")
    for name in arguments.networks:
        ratios = measured(name, arguments.rounds, arguments.dim)
        cells = [f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})" for values in ratios.values()]
        print(f"| {name} | {SIZES[name][0]:,} | {SIZES[name][1]:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
