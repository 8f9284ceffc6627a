"""laplace-torch, which lives in an environment of its own and runs there as a process."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.calibration.networks import description
from experiments.calibration.prediction import Normal, Predicted, Probabilities
from experiments.calibration.problem import Problem

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = "SUBLAPLACE_PEERS"
"""The environment variable that names the interpreter with laplace-torch; by default that of the other benchmarks."""
ALL_WEIGHTS_LIMIT = 50_000  # parameters: beyond, the peer's Jacobians take hours on a small CPU


class PeerError(Exception):
    """The peer failed; the message is its own."""


def interpreter() -> Path:
    """Return the interpreter with laplace-torch, in an environment that is made if it is missing."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(named)
    script = ROOT / "benchmarks" / "make_environment.py"
    made = subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE, text=True)
    return Path(made.stdout.splitlines()[-1])


def can_build(problem: Problem) -> bool:
    """Tell whether the peer can build the network."""
    return description(problem.network) is not None


def can_run_all_weights(problem: Problem) -> bool:
    """Tell whether the peer can build the network, and it is small enough for Jacobians of all weights."""
    learned = (parameter for parameter in problem.network.parameters() if parameter.requires_grad)
    return can_build(problem) and sum(parameter.numel() for parameter in learned) <= ALL_WEIGHTS_LIMIT


def runner(weights: str, validation: bool) -> Callable[[Problem], tuple[Predicted, float]]:
    """Make a method of laplace-torch's posterior over "all" weights or the "last_layer"."""

    def run(problem: Problem) -> tuple[Predicted, float]:
        network = problem.held_out_network if validation else problem.network
        train = problem.fit if validation else problem.train
        answer = _worker().answer(
            {
                "task": problem.task,
                "weights": weights,
                "network": _as_message(network),
                "train": (train.inputs, train.targets),
                "validation": (problem.validation.inputs, problem.validation.targets) if validation else None,
                "test": problem.test.inputs,
            }
        )
        seconds, note = float(answer["seconds"]), str(answer["note"])
        if problem.task == "classification":
            return Probabilities(answer["probabilities"].double(), note), seconds
        return Normal(answer["mean"].double(), answer["covariance"].double(), note), seconds

    return run


def _as_message(network: nn.Module) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    built = description(network)
    assert built is not None
    return *built, network.state_dict()


class _Worker:
    """A process in the peer's environment that answers requests until this process ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [interpreter(), "-W", "ignore", "-m", "experiments.calibration.peers_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            asked, answered = Path(folder) / "request.pt", Path(folder) / "answer.pt"
            torch.save(request, asked)
            print(asked, answered, sep="\t", file=self._process.stdin, flush=True)
            outcome = self._process.stdout.readline().strip()
            if outcome != "done":
                raise PeerError(outcome or "The process of laplace-torch ended without an answer.")
            answer: dict[str, Any] = torch.load(answered, weights_only=True)
            return answer


@cache
def _worker() -> _Worker:
    return _Worker()
