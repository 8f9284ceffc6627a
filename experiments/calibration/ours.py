"""sublaplace's own methods, by its public interface alone."""

from functools import lru_cache

from torch import nn

from experiments.calibration.prediction import Normal, Predicted, Probabilities
from experiments.calibration.problem import Examples, Problem
from experiments.calibration.sets import Task
from sublaplace import SubspaceLaplace

PAPER_DIM = 100


def paper(problem: Problem) -> Predicted:
    """Predict with the paper's posterior and λ = 1."""
    la = SubspaceLaplace.paper(problem.network, problem.task, PAPER_DIM, prior_precision=1.0)
    return _predicted(la.fit(problem.train.loader()), problem.test)


def paper_with_evidence(problem: Problem) -> Predicted:
    """Predict with the paper's posterior, λ by the evidence."""
    la = SubspaceLaplace.paper(problem.network, problem.task, PAPER_DIM, prior_precision="evidence")
    return _predicted(la.fit(problem.train.loader()), problem.test)


def default(problem: Problem) -> Predicted:
    """Predict with all defaults, without validation data."""
    return _predicted(_fitted(problem.network, problem.task, problem.train), problem.test)


def default_with_validation(problem: Problem) -> Predicted:
    """Predict with all defaults and validation data."""
    return _validated(problem)


def last_layer_with_validation(problem: Problem) -> Predicted:
    """Predict with the posterior of the last layer alone and validation data."""
    return _validated(problem, projector="last-layer")


def subspace_with_validation(problem: Problem) -> Predicted:
    """Predict with the default subspace, nothing outside, and validation data."""
    return _validated(problem, complement=None)


def kfac_with_validation(problem: Problem) -> Predicted:
    """Predict with KFAC of all weights, no subspace, and validation data."""
    return _validated(problem, projector=None, complement="kfac")


def _validated(problem: Problem, **options: str | None) -> Predicted:
    la = _fitted(problem.held_out_network, problem.task, problem.fit, validated=True, **options)
    return _predicted(la.tuned(problem.validation.loader()), problem.test)


@lru_cache(maxsize=1)
def _fitted(
    network: nn.Module, task: Task, train: Examples, validated: bool = False, **options: str | None
) -> SubspaceLaplace:
    """Fit a posterior, once for the halves of a test set, which share network and training data.

    `tuned` then gives what `fit` with validation data would. `validated` keeps the fit of a method without validation
    data apart, so that each method's seconds have a fit in them.
    """
    return SubspaceLaplace(network, task, **options).fit(train.loader())


def _predicted(la: SubspaceLaplace, test: Examples) -> Predicted:
    prediction = la.predict(test.inputs)
    note = f"λ={la.prior_precision:.3g}"
    if prediction.has_probabilities:
        return Probabilities(prediction.probabilities.double(), note)
    return Normal(prediction.mean.double(), prediction.total.double(), f"{note}, σ={la.noise_std:.3g}")
