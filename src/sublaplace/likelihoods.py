r"""Likelihoods: how outputs and targets are compared, and the root of the output Hessian that curvature needs.

With :math:`H = \nabla_f^2 (-\ln p(y|f)) = R R^\top`, the GGN is :math:`\sum_i J_i^\top R_i R_i^\top J_i`, and a column
of R is the cotangent of one backward pass. Both likelihoods give the columns as `cotangents` (n, K, C).
"""

from dataclasses import dataclass, replace
from math import log, pi
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import MultivariateNormal

from sublaplace.predictive import probit


class Likelihood(Protocol):
    """What the library asks of a likelihood."""

    @property
    def kind(self) -> str:
        """'regression' or 'classification'."""

    @property
    def curvature_scale(self) -> float:
        """The factor between the GGN and Σ JᵀRRᵀJ: kept apart, so that it can change without a pass over data."""

    def cotangents(self, outputs: Tensor) -> Tensor:
        """The columns of R as rows: (n, K, C), most important first."""

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises ValueError where targets do not fit to outputs."""

    def log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """ln p(y|f) for every input: (n,), in float64."""

    def log_predictive(self, outputs: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """ln p(y|x, D) for every input, with outputs of this covariance (n, C, C): (n,), in float64."""

    def training_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The usual loss that networks are trained with, averaged over the batch; it does not depend on σ."""


@dataclass(frozen=True)
class Gaussian:
    """p(y|f) = N(y | f, σ² I): H = I/σ². The root is kept without σ (R = I), σ⁻² is the curvature scale."""

    noise_std: float = 1.0

    def __post_init__(self) -> None:
        if not (self.noise_std > 0 and self.noise_std < float("inf")):
            raise ValueError(f"noise_std must be positive and finite, not {self.noise_std}.")

    @property
    def kind(self) -> str:
        return "regression"

    @property
    def curvature_scale(self) -> float:
        return self.noise_std**-2

    def with_noise(self, noise_std: float) -> "Gaussian":
        return replace(self, noise_std=noise_std)

    def cotangents(self, outputs: Tensor) -> Tensor:
        n, C = outputs.shape
        return torch.eye(C, dtype=outputs.dtype, device=outputs.device).expand(n, C, C)

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        if not targets.is_floating_point():
            raise ValueError(f"Regression needs floating-point targets, but they are {targets.dtype}.")
        if targets.shape != outputs.shape:
            raise ValueError(
                f"Targets have shape {tuple(targets.shape)}, the model's outputs {tuple(outputs.shape)}; "
                "for a single output give targets of shape (n, 1)."
            )
        if not torch.isfinite(targets).all():
            raise ValueError("The targets hold NaN or infinity.")

    def log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        squares = (outputs.double() - targets.double()).square().sum(1)
        return -0.5 * (squares * self.noise_std**-2 + outputs.shape[1] * log(2 * pi * self.noise_std**2))

    def log_predictive(self, outputs: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        noise = self.noise_std**2 * torch.eye(outputs.shape[1], dtype=torch.float64, device=outputs.device)
        normal = MultivariateNormal(outputs.double(), covariance.double() + noise, validate_args=False)
        return normal.log_prob(targets.double())

    def training_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets)


@dataclass(frozen=True)
class Residuals:
    """Sums over the residuals y − f of a data set, from which σ and the likelihood follow for any σ.

    Squares are summed about the mean, so that no digits cancel when parts are joined.
    """

    count: int = 0
    mean: float = 0.0
    spread: float = 0.0  # Σ (r − mean)²

    @classmethod
    def of(cls, residuals: Tensor) -> "Residuals":
        values = residuals.double()
        mean = float(values.mean())
        return cls(values.numel(), mean, float((values - mean).square().sum()))

    def joined(self, other: "Residuals") -> "Residuals":
        total, shift = self.count + other.count, other.mean - self.mean
        if not total:
            return self
        spread = self.spread + other.spread + shift**2 * self.count * other.count / total
        return Residuals(total, self.mean + shift * other.count / total, spread)

    def standard_deviation(self) -> float:
        """About the mean, pooled over the outputs."""
        if self.spread <= 0:
            raise ValueError(
                "The training residuals are all equal, so no noise can be estimated from them; give noise_std."
            )
        return (self.spread / self.count) ** 0.5

    def log_likelihood(self, noise_std: Tensor) -> Tensor:
        """Σ ln N(y | f, σ²), differentiable in σ."""
        squares = self.spread + self.count * self.mean**2
        return -0.5 * (squares / noise_std**2 + self.count * (2 * pi * noise_std**2).log())


@dataclass(frozen=True)
class Categorical:
    """p(y|f) = softmax(f)_y: H = diag φ − φφᵀ, of rank C − 1."""

    @property
    def kind(self) -> str:
        return "classification"

    @property
    def curvature_scale(self) -> float:
        return 1.0

    def cotangents(self, outputs: Tensor) -> Tensor:
        """√e_k times the k-th eigenvector of H, descending; beyond C = 64 the columns of diag √φ − φ√φᵀ.

        The eigenvector of eigenvalue 0 is left out, so K = C − 1; the columns of the second form are sorted by length.
        Cost: C³ an input for the first form, C² for the second.
        """
        probabilities = outputs.double().softmax(1)
        C = outputs.shape[1]
        if C == 2:
            columns = probabilities.prod(1).sqrt()[:, None, None] * outputs.new_tensor([[[1.0, -1.0]]])
        elif C <= 64:
            hessians = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None, :]
            values, vectors = torch.linalg.eigh(hessians)
            columns = values.clamp_min(0).sqrt()[:, :, None] * vectors.transpose(1, 2)
            columns = columns[:, 1:].flip(1)
        else:
            roots = probabilities.sqrt()
            columns = torch.diag_embed(roots) - roots[:, :, None] * probabilities[:, None, :]
            order = columns.square().sum(2).argsort(1, descending=True)
            columns = columns.gather(1, order[:, :, None].expand_as(columns))
        return columns.to(outputs.dtype)

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        if targets.is_floating_point() or targets.ndim != 1:
            raise ValueError(
                f"Classification needs integer labels of shape (n,), but targets are {targets.dtype} of shape "
                f"{tuple(targets.shape)}."
            )
        if len(targets) != len(outputs):
            raise ValueError(f"{len(targets)} labels were given for {len(outputs)} inputs.")
        C = outputs.shape[1]
        if C < 2:
            raise ValueError("Classification needs at least two outputs (logits); the model has one.")
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= C:
            raise ValueError(f"Labels must lie in 0 … {C - 1}, but they range from {low} to {high}.")

    def log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.double().log_softmax(1).gather(1, targets[:, None].long()).squeeze(1)

    def log_predictive(self, outputs: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """By the probit approximation."""
        probabilities = probit(outputs.double(), covariance.double().diagonal(dim1=1, dim2=2))
        return probabilities.log().gather(1, targets[:, None].long()).squeeze(1)

    def training_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets.long())


def significant(cotangents: Tensor, tolerance: float) -> Tensor:
    """How many leading cotangents of each input matter: (n,).

    The shortest ones are dropped, over all inputs together, as long as they make up no more than `tolerance` of the
    total squared length, which is the trace of the output Hessians. tolerance = 0 keeps all.
    """
    n, K = cotangents.shape[:2]
    lengths = cotangents.double().square().sum(2).flatten()
    ordered, order = lengths.sort()
    count = int((ordered.cumsum(0) <= tolerance * ordered.sum()).sum()) if tolerance else 0
    dropped = torch.zeros(n * K, dtype=torch.long, device=lengths.device)
    dropped[order[:count]] = 1
    return K - dropped.view(n, K).sum(1)
