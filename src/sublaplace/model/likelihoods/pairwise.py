r"""The sums over pairs of classes in the mean-field approximation to E[softmax f], at less than C² for many classes.

.. math:: L_k = \ln \sum_j \exp\bigl((f_j - f_k) / \sqrt{1 + \tfrac{\pi}{8} (v_j + v_k)}\bigr)

is the value at (f_k, v_k) of one smooth function of two numbers. For many classes it is evaluated on a small grid and
interpolated between its points. The error is measured on some of the classes, and bounded by a finer grid or by all
pairs where it is too large.
"""

from math import pi

import torch
from torch import Tensor

INTERPOLATED_FROM = 200
"""Classes from which on sums over pairs are interpolated."""

TOLERANCE = 1e-6
"""Largest error of an interpolated L, in nats, on the classes where it is measured."""

_PAIRS_AT_ONCE = 2**18  # of classes, over several inputs; more leave the caches
_GRIDS = (8, 12, 16)  # points along f and along v
_CHECKED = 5  # classes by their f, and by their v


def log_odds(outputs: Tensor, variance: Tensor) -> Tensor:
    """Return L of every class for f and v (n, C): (n, C).

    Cost: C² exponentials per input; from 200 classes on about 80·C, with an error of about 1e-6 at the most.
    """
    n, C = outputs.shape
    if C < INTERPOLATED_FROM:
        return _sums(outputs, variance, outputs, variance)
    f, v = outputs.double(), variance.double()
    found, left = torch.empty_like(f), torch.arange(n, device=f.device)
    for points in _GRIDS:
        if len(left):
            values, right = _interpolated(f[left], v[left], points)
            found[left] = values
            left = left[~right]
    if len(left):
        found[left] = _sums(f[left], v[left], f[left], v[left])
    return found.to(outputs.dtype)


def _sums(f: Tensor, v: Tensor, at_f: Tensor, at_v: Tensor) -> Tensor:
    """Return L at k places (f, v) of every input, (n, k) each: (n, k)."""
    step = max(1, _PAIRS_AT_ONCE // max(1, f.shape[1] * at_f.shape[1]))
    parts = []
    for some in range(0, len(f), step):
        part = slice(some, some + step)
        spread = (v[part, None, :] + at_v[part, :, None]).mul_(pi / 8).add_(1).rsqrt_()
        parts.append((f[part, None, :] - at_f[part, :, None]).mul_(spread).logsumexp(2))
    return torch.cat(parts) if parts else torch.zeros_like(at_f)


def _interpolated(f: Tensor, v: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """Return L by polynomials in f and ln(½ + π/8 v) through a grid of `points`², and for which inputs it is right."""
    n = len(f)
    k = torch.arange(points, dtype=f.dtype, device=f.device)
    angles = (2 * k + 1) * (pi / (2 * points))
    nodes, factors = angles.cos(), angles.sin() * (1 - 2 * (k % 2))  # Chebyshev's, and their barycentric weights
    grid_f, by_f = _placed(f, nodes, factors)
    grid_u, by_u = _placed((0.5 + pi / 8 * v).log(), nodes, factors)
    grid_v = (grid_u.exp() - 0.5) * (8 / pi)
    shape = (n, points, points)
    grid = _sums(f, v, grid_f[:, :, None].expand(shape).flatten(1), grid_v[:, None, :].expand(shape).flatten(1))
    values = ((by_f @ grid.view(shape)) * by_u).sum(2)
    ranks = torch.linspace(0, f.shape[1] - 1, _CHECKED, device=f.device).round().long()
    checked = torch.cat([f.argsort(1)[:, ranks], v.argsort(1)[:, ranks]], dim=1)
    errors = values.gather(1, checked) - _sums(f, v, f.gather(1, checked), v.gather(1, checked))
    return values, errors.abs().amax(1) <= TOLERANCE


def _placed(values: Tensor, nodes: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nodes in the range of each input's values, (n, m), and what each contributes to each value: (n, C, m).

    Args:
        values: (n, C).
        nodes: between −1 and 1: (m,).
        factors: their barycentric weights: (m,).
    """
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    middle, half = (low + high) / 2, ((high - low) / 2).clamp_min(torch.finfo(values.dtype).tiny ** 0.5)
    away = ((values - middle) / half)[:, :, None] - nodes
    shares = factors / torch.where(away.abs() < 1e-14, 1e-14, away)
    return middle + half * nodes, shares / shares.sum(2, keepdim=True)
