"""The subspace Laplace estimators, Gaussian processes and the plain network on scikit-learn's diabetes and digits.

Prints one table, and writes it to docs/sklearn_comparison.md. Every number is the mean over several random splits, with
its standard deviation. A split has 331 training data for diabetes. For digits it has 500, because the time of a
Gaussian process grows with their cube. Takes a few minutes.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.datasets import load_diabetes, load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from sublaplace import metrics
from sublaplace.sklearn import SubspaceLaplaceClassifier, SubspaceLaplaceRegressor

TABLE = Path(__file__).resolve().parent.parent / "docs" / "sklearn_comparison.md"

NUM_TRAIN = {"diabetes": 331, "digits": 500}

BARE = "bare subspace, λ of the training"
POSTERIORS: dict[str, dict[str, Any]] = {
    BARE: {"complement": None, "prior_precision": "evidence"},
    "λ from the training data": {"validation_fraction": None},
    "λ from a held-out tenth": {"validation_fraction": 0.1},
}

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    """Training and test data."""

    train_inputs: Array
    test_inputs: Array
    train_targets: Array
    test_targets: Array


Scores = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="random splits")
    parser.add_argument("--table", type=Path, default=TABLE, help="file of the table, as Markdown")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with threadpool_limits(1):  # as for the networks; several threads only slow down matrices this small
        table = markdown(comparison(arguments.seeds))
    print(table)
    arguments.table.write_text(table, encoding="utf-8")


def comparison(seeds: int, max_iter: int = 200, num_train: int | None = None) -> dict[tuple[str, str], list[Scores]]:
    """Return the scores of every split, for each data set and method."""
    result: dict[tuple[str, str], list[Scores]] = {}
    for data, load, methods in (("diabetes", load_diabetes, diabetes_scores), ("digits", load_digits, digits_scores)):
        inputs, targets = load(return_X_y=True)
        for seed in range(seeds):
            parts = train_test_split(
                inputs,
                targets,
                train_size=num_train or NUM_TRAIN[data],
                random_state=seed,
                stratify=targets if data == "digits" else None,
            )
            for method, scores in methods(Split(*parts), seed, max_iter):
                result.setdefault((data, method), []).append(scores)
                print(f"{data}, split {seed}: {method}, NLL {scores['NLL']:.4f}", file=sys.stderr)
    return result


def diabetes_scores(split: Split, seed: int, max_iter: int) -> Iterator[tuple[str, Scores]]:
    """Yield each method's NLL in units of the target, error, and coverage of the 90 % interval."""

    def scores(predict: Callable[[Array], tuple[Array, Array]], seconds: float) -> Scores:
        mean, std = (torch.tensor(part)[:, None] for part in predict(split.test_inputs))
        targets, covariance = torch.tensor(split.test_targets)[:, None], std[:, :, None] ** 2
        return {
            "NLL": metrics.nll(mean, targets, covariance),
            "error": (mean - targets).square().mean().sqrt().item(),
            "calibration": metrics.coverage(mean, covariance, targets, level=0.9),
            "seconds": seconds,
        }

    process = make_pipeline(
        StandardScaler(),
        GaussianProcessRegressor(ConstantKernel() * RBF() + WhiteKernel(), normalize_y=True, random_state=seed),
    )
    seconds = fit_seconds(process, split)
    yield "Gaussian process", scores(lambda inputs: process.predict(inputs, return_std=True), seconds)
    for name, options in POSTERIORS.items():
        laplace = SubspaceLaplaceRegressor(**options, max_iter=max_iter, random_state=seed)
        seconds = fit_seconds(laplace, split)
        if name == BARE:

            def plain(inputs: Array, network: SubspaceLaplaceRegressor = laplace) -> tuple[Array, Array]:
                mean = network.predict(inputs)
                return mean, np.full_like(mean, network.noise_std_)

            yield "plain network (MAP, same λ and σ)", scores(plain, seconds)
        yield name, scores(lambda inputs, fitted=laplace: fitted.predict(inputs, return_std=True), seconds)


def digits_scores(split: Split, seed: int, max_iter: int) -> Iterator[tuple[str, Scores]]:
    """Yield each method's NLL, share of wrong labels and expected calibration error."""
    labels = torch.tensor(split.test_targets)

    def scores(probabilities: Array, seconds: float) -> Scores:
        predicted = torch.tensor(probabilities)
        return {
            "NLL": metrics.nll(predicted, labels),
            "error": (predicted.argmax(1) != labels).double().mean().item(),
            "calibration": metrics.ece(predicted, labels),
            "seconds": seconds,
        }

    process = make_pipeline(StandardScaler(), GaussianProcessClassifier(ConstantKernel() * RBF(8.0), random_state=seed))
    seconds = fit_seconds(process, split)
    yield "Gaussian process", scores(process.predict_proba(split.test_inputs), seconds)
    for name, options in POSTERIORS.items():
        laplace = SubspaceLaplaceClassifier(**options, max_iter=max_iter, random_state=seed)
        seconds = fit_seconds(laplace, split)
        if name == BARE:
            with torch.no_grad():
                logits = laplace.laplace_.model(torch.tensor(split.test_inputs))
            yield "plain network (MAP, same λ)", scores(logits.softmax(1).numpy(), seconds)
        yield name, scores(laplace.predict_proba(split.test_inputs), seconds)


def fit_seconds(estimator: BaseEstimator, split: Split) -> float:
    """Fit the estimator, and return the seconds that it took."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        # Kernels for the noisy diabetes data reach the bounds of their parameters, as they should.
        warnings.simplefilter("ignore", ConvergenceWarning)
        estimator.fit(split.train_inputs, split.train_targets)
    return time.perf_counter() - start


def markdown(comparison: dict[tuple[str, str], list[Scores]]) -> str:
    """Return the means over the splits, with standard deviations, as a Markdown table."""
    lines = [
        "| data | method | NLL | error | calibration | fit, seconds |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for (data, method), runs in comparison.items():
        cells = [spread([scores[name] for scores in runs], digits) for name, digits in DIGITS[data].items()]
        lines.append(f"| {data} | {method} | {' | '.join(cells)} |")
    count = len(next(iter(comparison.values())))
    notes = (
        f"Mean ± standard deviation over {count} random splits: diabetes with 331 training and 111 test data, digits "
        "with 500 and 1,297. diabetes: error is the root mean square error in units of the target, calibration the "
        "coverage of 90 % intervals (0.90 is right). digits: error is the share of wrong labels, calibration the "
        "expected calibration error (0 is right). Lower NLL is better. Holding out a tenth is the default for "
        "classes, λ from the training data that for numbers; the network is trained on the rest."
    )
    return "\n".join([*lines, "", notes, ""])


DIGITS = {
    "diabetes": {"NLL": 3, "error": 1, "calibration": 3, "seconds": 1},
    "digits": {"NLL": 4, "error": 4, "calibration": 4, "seconds": 1},
}


def spread(values: list[float], digits: int) -> str:
    """Return mean ± standard deviation as text."""
    return f"{np.mean(values):.{digits}f} ± {np.std(values):.{digits}f}"


if __name__ == "__main__":
    main()
