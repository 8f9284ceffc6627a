"""Interpolation between points of a logarithmic grid."""

from math import prod

import torch
from torch import Tensor

NEIGHBOURS = 6
"""Points of the grid that an interpolation uses."""


def log_interpolation(points: Tensor, log_value: float) -> tuple[slice, Tensor]:
    """Return the points next to a value, and their factors in Lagrange's interpolation in logarithms.

    Args:
        points: of a grid with equal ratios: (L,), at least `NEIGHBOURS`.
        log_value: the natural logarithm of the value.
    """
    logs = points.log()
    place = min(max(float((log_value - logs[0]) / (logs[1] - logs[0])), 0.0), len(logs) - 1.0)
    first = min(max(int(place) - NEIGHBOURS // 2 + 1, 0), len(logs) - NEIGHBOURS)
    near, u = range(NEIGHBOURS), place - first
    factors = [prod((u - j) / (k - j) for j in near if j != k) for k in near]
    return slice(first, first + NEIGHBOURS), torch.tensor(factors, dtype=torch.float64, device="cpu")
