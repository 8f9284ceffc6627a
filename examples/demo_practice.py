"""Score what a practitioner chooses between: the plain network, the paper's posterior, and the library's defaults."""

import time
from dataclasses import dataclass

from demo_tasks import Data, Task, in_batches

from sublaplace import Categorical, SubspaceLaplace

HELD_OUT = 0.1
"""The share of the training data that the last method keeps from its network, to tune λ (and σ)."""

PRACTICE = ["plain network", "paper", "default", "default with validation data"]


@dataclass(frozen=True)
class Choice:
    """One line of the first table; None where a number does not exist."""

    data: str
    method: str
    scores: dict[str, float]
    own_plain: dict[str, float]  # scores of the plain network that the posterior belongs to
    dim: int | None = None
    prior_precision: float | None = None
    noise_std: float | None = None
    seconds: float | None = None  # of the fit


def practice(task: Task) -> list[Choice]:
    """Fit and score `PRACTICE` on one task. All of them use the same labelled data."""
    kind, test = task.likelihood.name, in_batches(task.test)
    likelihood = Categorical(link="probit") if task.likelihood.has_probabilities else task.likelihood
    paper = SubspaceLaplace.paper(task.model, likelihood, prior_precision="evidence")
    default = SubspaceLaplace(task.model, kind)
    train, held_out = parted(task.train)
    validated = SubspaceLaplace(task.network_for(train), kind)
    fits = [
        (paper, (task.loader,)),
        (default, (task.loader,)),
        (validated, (in_batches(train), in_batches(held_out))),
    ]
    choices = []
    for (la, loaders), method in zip(fits, PRACTICE[1:], strict=True):
        start = time.perf_counter()
        la.fit(*loaders)
        seconds = time.perf_counter() - start
        evaluation = la.evaluate(test)
        if la is paper:
            plain = evaluation.plain.scores
            choices.append(Choice(task.name, PRACTICE[0], plain, plain, noise_std=la.noise_std))
        scores = (evaluation.posterior.scores, evaluation.plain.scores)
        choices.append(Choice(task.name, method, *scores, la.dim, la.prior_precision, la.noise_std, seconds))
    return choices


def parted(data: Data) -> tuple[Data, Data]:
    """Return the data without the held-out part, and the held-out part. Their order is random already."""
    inputs, targets = data
    kept = len(inputs) - round(HELD_OUT * len(inputs))
    return (inputs[:kept], targets[:kept]), (inputs[kept:], targets[kept:])
