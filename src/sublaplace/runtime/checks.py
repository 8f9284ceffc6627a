"""Checks of single numbers that users pass, with errors that say what is wrong."""

import operator
from math import isfinite
from typing import Any

from torch import Tensor


def checked_share(share: Any, name: str) -> float:
    """Return a share of the trace, between 0 and 1."""
    value = checked_positive(share, name)
    if value >= 1:
        raise ValueError(f"{name} is a share of the trace and must lie between 0 and 1, but it is {value}.")
    return value


def checked_positive(number: Any, name: str) -> float:
    """Return a positive, finite number."""
    try:
        value = float(number.detach() if isinstance(number, Tensor) else number)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be one positive number, not {number!r}.") from None
    if not (isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, but it is {value}.")
    return value


_SMALLEST_PRIOR = 1e-30  # of a model in float32, whose numbers end at 1e-38


def checked_prior(number: Any, itemsize: int) -> float:
    """Return λ, which must be large enough for the numbers of the model, of `itemsize` bytes each."""
    value = checked_positive(number, "prior_precision")
    if itemsize < 8 and value < _SMALLEST_PRIOR:
        raise ValueError(
            f"prior_precision={value:g} is too small for a model in single precision: variances up to 1/λ would leave "
            f"the range of its numbers. Choose at least {_SMALLEST_PRIOR:g}, or convert the model to float64."
        )
    return value


def checked_count(count: Any, name: str) -> int:
    """Return a positive integer."""
    if isinstance(count, bool) or not hasattr(count, "__index__") or operator.index(count) < 1:
        raise ValueError(f"{name} must be a positive integer, not {count!r}.")
    return operator.index(count)


def checked_seed(seed: Any) -> int:
    """Return an integer."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed must be an integer, not {seed!r}.")
    return operator.index(seed)


def checked_tolerance(tolerance: Any) -> float:
    """Return a share of a trace that may be dropped, in [0, 1)."""
    try:
        value = float(tolerance)
    except (TypeError, ValueError):
        raise TypeError(f"direction_tolerance must be a number, not {tolerance!r}.") from None
    if not 0 <= value < 1:
        raise ValueError(f"direction_tolerance is a share of a trace and must lie in [0, 1), but it is {value}.")
    return value
