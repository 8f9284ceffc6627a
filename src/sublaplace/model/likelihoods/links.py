"""From the mean and covariance of logits to probabilities."""

from collections.abc import Callable
from functools import cached_property
from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from sublaplace.model.likelihoods.pairwise import log_odds

LINKS = ("pairwise", "probit", "mc", "bridge")
WITH_MATRICES = ("mc", "bridge")
"""The links that need the whole covariance of an input's outputs, (C, C); the others need their variances."""

MOST_PAIRED = 1000
"""Classes up to which "pairwise" looks at pairs; beyond, it is "probit"."""

PROBIT_VARIANCE = 8 / pi
"""Of the Gaussian error whose distribution function resembles the sigmoid: probit divides f by √(1 + Σ / this)."""


_PAIRS_AT_ONCE = 2**22  # of classes, over several inputs


class Interval(NamedTuple):
    """Two ends of what is known."""

    lower: Tensor
    upper: Tensor


class Covariance:
    """The covariances Σ of n outputs, formed as matrices only if they are asked for.

    Args:
        variance: their diagonals, (n, C).
        matrix: gives them, (n, C, C).
        factor: gives F with FFᵀ = Σ, (n, C, r), if there is one with r < C; None: there is none.
    """

    def __init__(
        self, variance: Tensor, matrix: Callable[[], Tensor], factor: Callable[[], Tensor] | None = None
    ) -> None:
        self.variance = variance
        self._matrix, self._factor = matrix, factor

    @classmethod
    def of(cls, matrix: Tensor) -> "Covariance":
        """Return the covariances of matrices that were formed already, (n, C, C)."""
        found = cls(matrix.diagonal(dim1=1, dim2=2), lambda: matrix)
        vars(found)["matrix"] = matrix  # where the cached property keeps it
        return found

    @cached_property
    def matrix(self) -> Tensor:
        """The whole matrices, (n, C, C)."""
        return self._matrix()

    @cached_property
    def factor(self) -> Tensor:
        """F with FFᵀ = Σ, (n, C, r): of low rank, or the symmetric root, which costs C³ per input."""
        return symmetric_root(self.matrix) if self._factor is None else self._factor()

    @cached_property
    def row_sums(self) -> Tensor:
        """The sums of the rows of Σ, (n, C)."""
        if self._factor is None:
            return self.matrix.sum(2)
        return (self.factor @ self.factor.sum(1).unsqueeze(2)).squeeze(2)

    @property
    def is_formed(self) -> bool:
        """Whether the matrices were formed, so that `matrix` costs nothing."""
        return "matrix" in vars(self)


def scaled(outputs: Tensor, variance: Tensor) -> Tensor:
    """Return f / √(1 + π/8 · variance): the logits whose probabilities are, by the probit approximation, the mean."""
    return outputs / (1 + pi / 8 * variance).sqrt()


def mean_softmax(
    outputs: Tensor, covariance: Tensor, link: str, samples: int = 1000, generator: torch.Generator | None = None
) -> Tensor:
    """Return E[softmax f] for f ~ N(outputs, covariance), by one of four approximations: (n, C).

    pairwise: see `pairwise_log_probabilities`. probit: softmax(f / √(1 + π/8 · diag Σ)). mc: the mean over samples of
    f. bridge: the Laplace bridge, the mean of the Dirichlet that matches the Gaussian on the simplex (MacKay 1998;
    Hobbhahn et al. 2022).
    """
    if link not in WITH_MATRICES:
        return log_probabilities(outputs, covariance.diagonal(dim1=1, dim2=2), link).exp()
    if link == "mc":
        return monte_carlo(outputs, covariance, samples, generator)
    if link == "bridge":
        return laplace_bridge(outputs, covariance)
    raise unknown(link)


def unknown(link: str) -> ValueError:
    """Return the error for a link that there is not."""
    return ValueError(f"Unknown link '{link}'; choose one of {', '.join(LINKS)}.")


def log_probabilities(outputs: Tensor, variance: Tensor, link: str) -> Tensor:
    """Return ln E[softmax f] by a link that needs variances (n, C) alone: (n, C)."""
    if link == "pairwise" and outputs.shape[1] <= MOST_PAIRED:
        return pairwise_log_probabilities(outputs, variance)
    if link in ("pairwise", "probit"):
        return scaled(outputs, variance).log_softmax(1)
    raise unknown(link)


def pairwise_log_probabilities(outputs: Tensor, variance: Tensor) -> Tensor:
    r"""Return ln p of the mean-field approximation to E[softmax f] (Lu, Ie and Sha 2020), variance (n, C).

    softmax(f)_k = 1 / (1 + Σ_{j≠k} e^{f_j − f_k}), and f_j − f_k has the variance v_j + v_k for independent outputs. So

        p_k ∝ 1 / (1 + Σ_{j≠k} exp((f_j − f_k) / √(1 + π/8 (v_j + v_k)))) .

    Unlike probit it does not depend on a constant added to all outputs, and so does softmax. Cost: C² per input, and
    less from 200 classes on (see `pairwise.py`).
    """
    return (-log_odds(outputs, variance)).log_softmax(1)


def pairwise_interval(outputs: Tensor, lower: Tensor, upper: Tensor) -> Interval:
    """Return bounds of the pairwise probabilities over all variances v in [lower, upper] (n, C), class by class.

    Each odds e^{…} of a pair is monotone in v_j + v_k, so that p_k before it is normalised lies between two corners.
    Normalised with the others at their opposite ends it is bounded, but the bounds need not be attained. Beyond
    `MOST_PAIRED` classes these are the ends of probit.
    """
    C = outputs.shape[1]
    if C > MOST_PAIRED:
        return probit_interval(outputs, lower, upper)
    step = max(1, _PAIRS_AT_ONCE // C**2)
    least, most = [], []
    for f, low, high in zip(outputs.split(step), lower.split(step), upper.split(step), strict=True):
        differences = f[:, None, :] - f[:, :, None]
        ends = [scaled(differences, v[:, None, :] + v[:, :, None]) for v in (low, high)]
        least.append(-torch.maximum(*ends).logsumexp(2))
        most.append(-torch.minimum(*ends).logsumexp(2))
    below, above = torch.cat(least).exp(), torch.cat(most).exp()
    return Interval(
        below / (below + above.sum(1, keepdim=True) - above), above / (above + below.sum(1, keepdim=True) - below)
    )


def mean_sigmoid(
    outputs: Tensor, variance: Tensor, link: str, samples: int = 1000, generator: torch.Generator | None = None
) -> Tensor:
    """Return E[sigmoid f] for f ~ N(outputs, variance), each output on its own: (n, C); "probit" or "mc"."""
    if link == "probit":
        return scaled(outputs, variance).sigmoid()
    if link == "mc":
        total = torch.zeros_like(outputs)
        for _ in range(samples):
            total += (outputs + variance.sqrt() * standard_normal(outputs, generator)).sigmoid()
        return total / samples
    raise ValueError(
        f"Yes/no outputs have no link '{link}'; choose 'probit' or 'mc'. (The mean of the Laplace bridge is "
        "sigmoid(f) for them, whatever the variance.)"
    )


def probit(outputs: Tensor, variance: Tensor) -> Tensor:
    """Return softmax(f / √(1 + π/8 · variance)), variance (n, C)."""
    return scaled(outputs, variance).softmax(1)


def probit_interval(outputs: Tensor, lower: Tensor, upper: Tensor) -> Interval:
    """Return the ends of softmax(f / √(1 + π/8 v)) over all variances v in [lower, upper] (n, C), class by class.

    Softmax grows in its own logit and falls in the others, f/√(1 + π/8 v) is monotone in v: the ends are at corners.
    """
    least, most = _scaled_ends(outputs, lower, upper)
    own = torch.eye(outputs.shape[1], dtype=torch.bool, device=outputs.device)

    def end(for_own: Tensor, for_others: Tensor) -> Tensor:
        logits = torch.where(own, for_own[:, :, None], for_others[:, None, :])
        return logits.softmax(2).diagonal(dim1=1, dim2=2)

    return Interval(end(least, most), end(most, least))


def sigmoid_interval(outputs: Tensor, lower: Tensor, upper: Tensor) -> Interval:
    """Return the ends of sigmoid(f / √(1 + π/8 v)), as `probit_interval`."""
    least, most = _scaled_ends(outputs, lower, upper)
    return Interval(least.sigmoid(), most.sigmoid())


def _scaled_ends(outputs: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    one, other = (scaled(outputs, variance) for variance in (lower, upper))
    return torch.minimum(one, other), torch.maximum(one, other)


def monte_carlo(outputs: Tensor, covariance: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """Return the mean of softmax over Gaussian samples. Cost: C³ per input and n·samples·C²."""
    return sampled_softmax(outputs, symmetric_root(covariance), samples, generator)


def sampled_softmax(outputs: Tensor, factor: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """Return the mean of softmax over samples of N(outputs, FFᵀ), for F (n, C, r). Cost: n·samples·C·r."""
    total = torch.zeros_like(outputs)
    for _ in range(samples):
        total += (outputs + normal_product(factor, generator)).softmax(1)
    return total / samples


def normal_product(factor: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return F ε for standard normal ε and factors (n, C, r): (n, C)."""
    return (factor @ standard_normal(factor[:, 0], generator).unsqueeze(2)).squeeze(2)


def standard_normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw on the CPU, so that every device sees the same numbers."""
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device="cpu").to(like.device)


def symmetric_root(covariance: Tensor) -> Tensor:
    """Return Σ^½ of positive semi-definite matrices, singular ones included."""
    values, vectors = torch.linalg.eigh(covariance.double())
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.transpose(-1, -2)
    return root.to(covariance.dtype)


def laplace_bridge(outputs: Tensor, covariance: Tensor) -> Tensor:
    """Return the mean of the Laplace bridge for covariances (n, C, C), see `bridge`."""
    return bridge(outputs, covariance.diagonal(dim1=1, dim2=2), covariance.sum(2))


def bridge(outputs: Tensor, variance: Tensor, row_sums: Tensor) -> Tensor:
    """Return α / Σα with α_k = (1 − 2/C + e^{f_k} Σ_l e^{−f_l} / C²) / Σ_kk, after conditioning f to sum to zero.

    Only the diagonal and the row sums of Σ are needed, (n, C) each.
    """
    C = outputs.shape[1]
    total = row_sums.sum(1, keepdim=True).clamp_min(torch.finfo(row_sums.dtype).tiny)
    mean = outputs - row_sums * outputs.sum(1, keepdim=True) / total
    variance = (variance - row_sums.square() / total).clamp_min(torch.finfo(row_sums.dtype).eps)
    # In logarithms: confident outputs overflow otherwise.
    log_ratio = mean + torch.logsumexp(-mean, 1, keepdim=True) - 2 * log(C)
    constant = torch.full_like(log_ratio, 1 - 2 / C).log()
    return (torch.logaddexp(constant, log_ratio) - variance.log()).softmax(1)


def variances_of(covariance: Tensor) -> Tensor:
    """Return the variances (n, C) of covariances (n, C, C), or of variances, in float64."""
    return (covariance if covariance.ndim == 2 else covariance.diagonal(dim1=1, dim2=2)).double()


def probit_logits(outputs: Tensor, covariance: Tensor) -> Tensor:
    """Return the scaled logits for covariances (n, C, C), or variances (n, C), in float64: (n, C)."""
    return scaled(outputs.double(), variances_of(covariance))
