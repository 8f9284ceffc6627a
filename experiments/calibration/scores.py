"""The scores of predictions."""

import math

import numpy as np
import torch
from torch import Tensor

from experiments.calibration.prediction import Normal, Predicted
from sublaplace import metrics

BINS = 15
LEVEL = 0.9
LARGE_ERRORS = 0.1
"""The share of the test inputs whose errors count as large, in the AUROC of regression."""
RESAMPLES = 200
_LEAST_PROBABILITY = torch.finfo(torch.float32).tiny  # so that a method in float32 is not punished with infinity

Scores = dict[str, float]


def scores_of(predicted: Predicted, targets: Tensor) -> Scores:
    """Score predictions for all test inputs; the names are columns of the table of results."""
    if isinstance(predicted, Normal):
        return _regression_scores(predicted.mean, predicted.covariance, targets.double())
    return _classification_scores(predicted.values, targets)


def _classification_scores(probabilities: Tensor, targets: Tensor) -> Scores:
    confidence, top = probabilities.max(1)
    wrong = top != targets
    low, high = ece_interval(confidence.numpy(), ~wrong.numpy())
    return {
        "nll": metrics.nll(probabilities.clamp_min(_LEAST_PROBABILITY), targets),
        "accuracy": float((~wrong).double().mean()),
        "ece": metrics.ece(probabilities, targets, BINS),
        "brier": metrics.brier(probabilities, targets),
        "auroc": _auroc(-confidence, wrong),
        "ece_low": low,
        "ece_high": high,
        "ece_perfect": ece_of_perfect(confidence.numpy()),
    }


def _regression_scores(mean: Tensor, covariance: Tensor, targets: Tensor) -> Scores:
    distance = (mean - targets).square().sum(1)
    num_large = max(1, round(LARGE_ERRORS * len(distance)))
    large = torch.zeros(len(distance), dtype=torch.bool)
    large[distance.argsort(descending=True)[:num_large]] = True
    variance = covariance.diagonal(dim1=1, dim2=2)
    coverage = metrics.coverage(mean, covariance, targets, LEVEL)
    return {
        "nll": metrics.nll(mean, targets, covariance),
        "rmse": float((mean - targets).square().mean().sqrt()),
        "coverage": coverage,
        "coverage_error": abs(coverage - LEVEL),
        "crps": float(crps(mean, variance.sqrt(), targets).mean()),
        "auroc": _auroc(variance.sum(1), large),
    }


def crps(mean: Tensor, std: Tensor, targets: Tensor) -> Tensor:
    """Return the continuous ranked probability score of N(mean, std²) for each target, in closed form.

    σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π] with z = (y − m)/σ.
    """
    z = (targets - mean) / std
    density = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return std * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))


def ece_interval(confidence: np.ndarray, correct: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the ECE over the test inputs. Cost: O(n) per resample.

    The ECE of a resample is biased upwards by its own noise, as the ECE itself is; the interval is not corrected.
    """
    generator = np.random.default_rng(0)
    n = len(confidence)
    draws = (generator.integers(n, size=n) for _ in range(RESAMPLES))
    found = [_ece(confidence[rows], correct[rows]) for rows in draws]
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def ece_of_perfect(confidence: np.ndarray) -> float:
    """Return the mean ECE that a perfectly calibrated predictor with these confidences would show on as many inputs."""
    generator = np.random.default_rng(0)
    draws = (generator.random(len(confidence)) < confidence for _ in range(RESAMPLES))
    return float(np.mean([_ece(confidence, correct) for correct in draws]))


def expected_coverage_error(num_test: int) -> float:
    """Return E|k/n − 0.9| for k of n targets inside perfectly calibrated intervals."""
    from scipy.stats import binom

    counts = np.arange(num_test + 1)
    return float((binom.pmf(counts, num_test, LEVEL) * np.abs(counts / num_test - LEVEL)).sum())


def _ece(confidence: np.ndarray, correct: np.ndarray) -> float:
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    gaps = np.bincount(bins, confidence - correct, BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def _auroc(scores: Tensor, positive: Tensor) -> float:
    """Return how well the scores tell positives from the others; NaN if there are only positives, or none."""
    if positive.all() or not positive.any():
        return math.nan
    return metrics.auroc(scores[positive], scores[~positive])
