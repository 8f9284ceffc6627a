"""The halves of a test set, each predicted at the λ that the other asks for, from one pass over each.

Tuning on a half gives its variances at every λ, so its own prediction needs no further pass. The variances are
interpolated between the points of the tuning's grid, which is right to 0.4 percent.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import log

from torch import nn

from experiments.calibration.baselines import timed
from experiments.calibration.prediction import Predicted, Probabilities
from experiments.calibration.problem import Examples, Problem
from sublaplace.arguments import checked_options
from sublaplace.fitting.fit import fit
from sublaplace.fitting.fitted import Fitted
from sublaplace.fitting.validation import ValidationData, chosen_from, validation_data
from sublaplace.model.calling import call_model
from sublaplace.model.likelihoods.links import log_probabilities
from sublaplace.runtime.stopwatch import Stopwatch


@dataclass(frozen=True, eq=False)
class _Posterior:
    """A fitted posterior, and the processor time that it took."""

    fitted: Fitted
    seconds: float


@dataclass(frozen=True, eq=False)
class _Half:
    """The variances of a half at every λ, and the processor time that they took."""

    data: ValidationData
    seconds: float


def shared(method: Callable[[Problem], Predicted], tuned: bool) -> Callable[[Problem], tuple[Predicted, float]]:
    """Make a method with sublaplace's defaults share its work between halves; other problems go to `method`."""
    whole = timed(method)

    def predict(problem: Problem) -> tuple[Predicted, float]:
        return predicted_half(problem, tuned) if problem.is_half else whole(problem)

    return predict


def predicted_half(
    problem: Problem, tuned: bool, projector: str | None = "lowrank-kfac", complement: str | None = "auto"
) -> tuple[Probabilities, float]:
    """Predict a half, with `tuned` at the λ of the smallest NLL on the other one, and return the seconds as well.

    The seconds of work that is shared count whenever it is used, so that they are those of a single problem.
    """
    posterior = _posterior(problem.network, problem.train, projector, complement)
    half = _half(posterior, problem.test)
    prior, seconds = posterior.fitted.posterior.prior_precision, posterior.seconds + half.seconds
    if tuned:
        other = _half(posterior, problem.validation)
        chosen = chosen_from(other.data, noise=False)
        assert chosen is not None, "a half has enough inputs to choose λ by"
        prior, seconds = chosen.prior_precision, seconds + other.seconds
    data = half.data
    variances = data.covariance(log(prior / data.unit)) / data.unit
    link = posterior.fitted.survey.likelihood.link  # type: ignore[attr-defined]  # of a categorical likelihood
    return Probabilities(log_probabilities(data.outputs.double(), variances, link).exp(), f"λ={prior:.3g}"), seconds


@lru_cache(maxsize=1)
def _posterior(network: nn.Module, train: Examples, projector: str | None, complement: str | None) -> _Posterior:
    options = checked_options(
        "classification", None, projector, complement, "auto", "scalar", None, "labels", 0, resources=None
    )
    start = time.process_time()
    fitted = fit(options, train.loader(), network, call_model, False, True, None, False)
    return _Posterior(fitted, time.process_time() - start)


@lru_cache(maxsize=2)
def _half(posterior: _Posterior, examples: Examples) -> _Half:
    start = time.process_time()
    data = validation_data(posterior.fitted, examples.loader(), Stopwatch())
    return _Half(data, time.process_time() - start)
