"""Checks of what users pass in, with messages that say what is wrong and what to do."""

import operator
from math import isfinite
from typing import Any

from torch import Tensor

from sublaplace.likelihoods import Categorical, Gaussian, Likelihood


def checked_dim(dim: Any) -> int:
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"dim must be an integer, not {dim!r}.")
    dim = operator.index(dim)
    if dim < 0:
        raise ValueError(f"dim must not be negative, but it is {dim}.")
    if dim == 0:
        raise ValueError("dim=0 leaves no uncertainty at all; choose at least 1.")
    return int(dim)


def checked_prior(prior_precision: Any) -> float:
    if isinstance(prior_precision, str):
        raise ValueError(f"Unknown prior_precision '{prior_precision}'; give a positive number or 'marglik'.")
    return checked_positive(prior_precision, "prior_precision")


def checked_positive(number: Any, name: str) -> float:
    try:
        value = float(number.detach() if isinstance(number, Tensor) else number)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be one positive number, not {number!r}.") from None
    if not (isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, but it is {value}.")
    return value


def checked_count(count: Any, name: str) -> int:
    if isinstance(count, bool) or not hasattr(count, "__index__") or operator.index(count) < 1:
        raise ValueError(f"{name} must be a positive integer, not {count!r}.")
    return operator.index(count)


def checked_likelihood(likelihood: Any, noise_std: float | None) -> Likelihood:
    if likelihood == "classification":
        if noise_std is not None:
            raise ValueError("noise_std belongs to regression; classification has none.")
        return Categorical()
    if likelihood == "regression":
        return Gaussian(1.0 if noise_std is None else float(noise_std))
    if isinstance(likelihood, str):
        raise ValueError(f"Unknown likelihood '{likelihood}'; choose 'classification', 'regression' or an object.")
    if not hasattr(likelihood, "cotangents"):
        raise TypeError(
            "likelihood must be 'classification', 'regression' or a likelihood object such as "
            f"sublaplace.Gaussian(0.1), not {likelihood!r}."
        )
    if noise_std is not None:
        raise ValueError("noise_std is part of the likelihood object; give it there, or likelihood='regression'.")
    return likelihood
