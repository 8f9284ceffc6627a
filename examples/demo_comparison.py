"""Compare every projector with the full Laplace approximation on one task: scores for a table, and a sweep over s."""

import time
from dataclasses import dataclass, replace

import torch
from demo_tasks import Task
from torch import Tensor
from tqdm import tqdm

from sublaplace import PROJECTORS, Prediction, SubspaceLaplace, metrics
from sublaplace.model.likelihoods.links import Covariance

OPTIMUM = "lowrankopt-ggn"  # "lowrank-ggn" built from the inputs that it is judged on: Theorem 1
METHODS = [*PROJECTORS, OPTIMUM]


@dataclass(frozen=True)
class Row:
    """One line of the table; None where a score does not exist."""

    data: str
    method: str
    dim: int | None
    kl: float
    captured: float  # the share of the full posterior's trace
    nll: float
    ece: float | None = None
    brier: float | None = None
    coverage: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Sweep:
    """Divergence from the full posterior, and trace, for growing dimensions."""

    dims: list[int]
    kl: list[float]
    log_trace: list[float]


@dataclass(frozen=True)
class Comparison:
    """The results for one task; the dictionaries are keyed by method, and predictions are for the test inputs."""

    task: Task
    rows: list[Row]
    sweeps: dict[str, Sweep]
    map_kl: float
    full_log_trace: float
    posteriors: dict[str, SubspaceLaplace]
    predictions: dict[str, Prediction]


def compare(task: Task) -> Comparison:
    """Fit and score the full Laplace approximation, the plain network and every one of `METHODS`."""
    inputs, targets = task.test
    full, seconds = fitted(task, "full", task.prior_precisions[0])
    full = full.with_prior(best_prior_precision(full, task))
    reference = predictive(full, task.drawn)
    full_trace = full.functional_variance(task.drawn).sum()
    posteriors = {"full": full}
    predictions = {"map": certain(full.predict(inputs)), "full": full.predict(inputs)}
    map_kl = divergence(task, reference, plain_predictive(full, task.drawn))
    rows = [
        Row(task.name, "map", None, map_kl, 0.0, **scores(predictions["map"], targets)),
        Row(task.name, "full", full.dim, 0.0, 1.0, **scores(predictions["full"], targets), seconds=seconds),
    ]
    sweeps = {}
    for method in (progress := tqdm(METHODS, leave=False)):
        progress.set_description(f"{task.name}: {method}")
        la, seconds = fitted(task, method, full.prior_precision)
        traces = la.leading_traces(task.drawn)
        # A projector with a dimension of its own is one fixed subspace; for all others one fit serves every dimension.
        dims = [la.dim] if has_own_dim(method) else [s for s in task.dims if s < la.dim] + [la.dim]
        kl = [divergence(task, reference, predictive(la.truncated(s), task.drawn)) for s in dims]
        sweeps[method] = Sweep(dims, kl, [traces[s - 1].log().item() for s in dims])
        posteriors[method], predictions[method] = la, la.predict(inputs)
        captured = (traces[-1] / full_trace).item()
        rows.append(
            Row(task.name, method, la.dim, kl[-1], captured, **scores(predictions[method], targets), seconds=seconds)
        )
    return Comparison(task, rows, sweeps, map_kl, full_trace.log().item(), posteriors, predictions)


def has_own_dim(method: str) -> bool:
    """Tell whether the method decides its dimension itself."""
    return method == "full" or (method in PROJECTORS and PROJECTORS[method].own_dim)


def fitted(
    task: Task, method: str, prior_precision: float, subspace_inputs: Tensor | None = None
) -> tuple[SubspaceLaplace, float]:
    """Return the fitted posterior, and the seconds that the fit took."""
    la = SubspaceLaplace.paper(
        task.model,
        task.likelihood,
        None if has_own_dim(method) else task.dims[-1],
        prior_precision,
        projector="lowrank-ggn" if method == OPTIMUM else method,
        subspace_inputs=task.drawn if method == OPTIMUM else subspace_inputs,
    )
    start = time.perf_counter()
    la.fit(task.loader)
    return la, time.perf_counter() - start


def best_prior_precision(full: SubspaceLaplace, task: Task) -> float:
    """Return the candidate under which the full posterior predicts the validation data best."""
    if len(task.prior_precisions) == 1:
        return task.prior_precisions[0]
    inputs, targets = task.validation
    candidates = tqdm(task.prior_precisions, desc=f"{task.name}: prior precision", leave=False)
    return min(candidates, key=lambda value: scores(full.with_prior(value).predict(inputs), targets)["nll"])


def scores(prediction: Prediction, targets: Tensor) -> dict[str, float]:
    """Return the scores that exist for this kind of prediction."""
    if prediction.has_probabilities:
        probabilities = prediction.probabilities
        return {
            "nll": metrics.nll(probabilities, targets),
            "ece": metrics.ece(probabilities, targets),
            "brier": metrics.brier(probabilities, targets),
        }
    return {
        "nll": metrics.nll(prediction.mean, targets, prediction.total),
        "coverage": metrics.coverage(prediction.mean, prediction.total, targets, level=0.9),
    }


def divergence(task: Task, p: Tensor, q: Tensor) -> float:
    """Return KL(p ‖ q) of two predictives: the mean over inputs for classification, joint for regression."""
    return metrics.kl_gaussian(p, q) if task.likelihood.has_noise else metrics.kl_categorical(p, q)


def predictive(la: SubspaceLaplace, inputs: Tensor) -> Tensor:
    """Return what `divergence` compares: probabilities (n, C), or the joint covariance of n targets, with noise."""
    if la.noise_std is None:
        return la.predict(inputs).probabilities
    covariance = la.functional_covariance(inputs, joint=True)
    return covariance + la.noise_std**2 * torch.eye(len(covariance)).to(covariance)


def plain_predictive(la: SubspaceLaplace, inputs: Tensor) -> Tensor:
    """Return what `divergence` compares, for the network without model uncertainty."""
    prediction = certain(la.predict(inputs))
    return prediction.probabilities if prediction.has_probabilities else torch.block_diag(*prediction.total)


def certain(prediction: Prediction) -> Prediction:
    """Return the prediction of the same network without model uncertainty."""
    zero = torch.zeros_like(prediction.variance)
    return replace(prediction, uncertainty=Covariance(zero, lambda: torch.diag_embed(zero)))
