"""The methods that are compared, one row each; a changed definition is run again."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from experiments.calibration import baselines, halves, ours, peers
from experiments.calibration.prediction import Predicted
from experiments.calibration.problem import Problem
from experiments.calibration.sets import Task

PROTOCOL = "1"  # of splits, networks and scores: a new number runs everything again
BOTH: tuple[Task, ...] = ("regression", "classification")


def anything(problem: Problem) -> bool:
    """Accept any problem."""
    return True


def members(problem: Problem) -> bool:
    """Accept a problem with further networks for an ensemble."""
    return bool(problem.members)


def dropout_network(problem: Problem) -> bool:
    """Accept a problem with a network that was trained with dropout."""
    return problem.dropout_network is not None


def has_held_out_network(problem: Problem) -> bool:
    """Accept a problem whose validation data were held out of the training, by a second network."""
    return problem.held_out_network is not problem.network


def half(problem: Problem) -> bool:
    """Accept a half of a test set, as those of the large networks are."""
    return problem.is_half


@dataclass(frozen=True)
class Method:
    """A way from a trained network, or several, to predictions.

    `definition` says all that decides the predictions. `predict` gives the predictions for the test inputs and the
    seconds that fitting and predicting took. `needs` says whether a problem has what the method needs.
    """

    name: str
    label: str
    definition: str
    uses_validation: bool
    predict: Callable[[Problem], tuple[Predicted, float]]
    tasks: tuple[Task, ...] = BOTH
    needs: Callable[[Problem], bool] = anything

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{PROTOCOL}\n{self.name}\n{self.definition}".encode()).hexdigest()[:12]

    def applies_to(self, problem: Problem) -> bool:
        """Whether the problem has what the method needs."""
        return problem.task in self.tasks and self.needs(problem)


METHODS: tuple[Method, ...] = (
    Method(
        "plain",
        "plain network",
        "softmax, or one σ: root mean square of the training residuals, pooled over outputs",
        False,
        baselines.timed(baselines.plain),
    ),
    Method(
        "plain-held-out",
        "plain network, trained without the validation data",
        "held-out network; softmax, or one σ: root mean square of its training residuals, pooled over outputs",
        False,
        baselines.timed(baselines.plain_held_out),
        needs=has_held_out_network,
    ),
    Method(
        "noise-validation",
        "plain network, σ from validation",
        "held-out network; one σ: root mean square of the validation residuals",
        True,
        baselines.timed(baselines.validated_noise),
        ("regression",),
    ),
    Method(
        "temperature",
        "temperature scaling",
        "held-out network; the temperature with the least validation NLL",
        True,
        baselines.timed(baselines.temperature_scaling),
        ("classification",),
    ),
    Method(
        "ensemble",
        "deep ensemble of 5",
        "five networks; mean of the probabilities, or the Gaussian with the moments of the mixture",
        False,
        baselines.timed(baselines.deep_ensemble),
        needs=members,
    ),
    Method(
        "dropout",
        "Monte-Carlo dropout",
        "rate 0.1 in training and prediction, 50 draws; σ: root mean square of the training residuals of the mean",
        False,
        baselines.timed(baselines.monte_carlo_dropout),
        needs=dropout_network,
    ),
    Method(
        "laplace-torch-last-layer",
        "laplace-torch, last layer",
        "last layer, KFAC; λ (and σ) by the marginal likelihood",
        False,
        peers.runner("last_layer", validation=False),
        needs=peers.can_build,
    ),
    Method(
        "laplace-torch-all",
        "laplace-torch, all weights",
        "all weights, KFAC; λ (and σ) by the marginal likelihood",
        False,
        peers.runner("all", validation=False),
        needs=peers.can_run_all_weights,
    ),
    Method(
        "laplace-torch-last-layer-validation",
        "laplace-torch, last layer, grid search",
        "held-out network; last layer, KFAC; σ by the marginal likelihood, then λ by the grid search on the NLL, "
        "21 points",
        True,
        peers.runner("last_layer", validation=True),
        needs=peers.can_build,
    ),
    Method(
        "laplace-torch-all-validation",
        "laplace-torch, all weights, grid search",
        "held-out network; all weights, KFAC; σ by the marginal likelihood, then λ by the grid search on the NLL, "
        "21 points",
        True,
        peers.runner("all", validation=True),
        needs=peers.can_run_all_weights,
    ),
    Method(
        "paper",
        "the paper's posterior, λ = 1",
        "lowrank-kfac, s = 100, λ = 1, nothing outside",
        False,
        baselines.timed(ours.paper),
    ),
    Method(
        "paper-evidence",
        "the paper's posterior, λ by the evidence",
        "lowrank-kfac, s = 100, λ by the evidence of KFAC, nothing outside",
        False,
        baselines.timed(ours.paper_with_evidence),
    ),
    Method("ours", "sublaplace", "all defaults, fit(train)", False, halves.shared(ours.default, tuned=False)),
    Method(
        "ours-validation",
        "sublaplace with validation data",
        "held-out network; all defaults, fit(train, validation)",
        True,
        halves.shared(ours.default_with_validation, tuned=True),
    ),
    Method(
        "ours-last-layer-validation",
        "sublaplace, last layer, with validation data",
        'held-out network; projector="last-layer", fit(train, validation)',
        True,
        partial(halves.predicted_half, tuned=True, projector="last-layer"),
        needs=half,
    ),
    Method(
        "ours-subspace-validation",
        "sublaplace, subspace alone, with validation data",
        "held-out network; complement=None, fit(train, validation)",
        True,
        partial(halves.predicted_half, tuned=True, complement=None),
        needs=half,
    ),
    Method(
        "ours-kfac-validation",
        "sublaplace, KFAC alone, with validation data",
        'held-out network; projector=None, complement="kfac", fit(train, validation)',
        True,
        partial(halves.predicted_half, tuned=True, projector=None, complement="kfac"),
        needs=half,
    ),
)
BY_NAME = {method.name: method for method in METHODS}
