r"""Likelihoods: how outputs and targets are compared, and the root of the output Hessian that curvature needs.

With :math:`H = \nabla_f^2 (-\ln p(y|f)) = R R^\top`, the GGN is :math:`\sum_i J_i^\top R_i R_i^\top J_i`, and a column
of R is the cotangent of one backward pass. Every likelihood gives the columns as `cotangents` (n, K, C).
"""

from dataclasses import dataclass, replace
from math import isfinite, pi
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import MultivariateNormal

from sublaplace.predictive import (
    PROBIT_VARIANCE,
    Interval,
    Prediction,
    mean_sigmoid,
    mean_softmax,
    probit_interval,
    sigmoid_interval,
)

Noise = float | tuple[float, ...]
"""σ of regression: one number, or one for each output."""


class Likelihood(Protocol):
    """What the library asks of a likelihood."""

    @property
    def kind(self) -> str:
        """Its name for people, such as 'classification'."""

    @property
    def curvature_scales(self) -> tuple[float, ...]:
        """The factors between H and RRᵀ, one for all or one for each row of R: H = Rᵀdiag(scales)R.

        Kept apart, so that they can change without a pass over data.
        """

    @property
    def noise_variances(self) -> tuple[float, ...]:
        """The variance that predictions have beside that of the outputs, one for all or one for each of them."""

    def cotangents(self, outputs: Tensor) -> Tensor:
        """The columns of R as rows: (n, K, C), most important first."""

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises ValueError where targets do not fit to outputs."""

    def counted(self, targets: Tensor) -> Tensor | None:
        """1 for a target that counts, 0 for one that is to be ignored: (n, 1), or (n, C); None: all count."""

    def log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """ln p(y|f) for every input: (n,), in float64; an ignored target adds nothing."""

    def log_predictive(self, outputs: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """ln p(y|x, D) for every input, with outputs of this covariance (n, C, C): (n,), in float64."""

    def predictive_divergences(self, outputs: Tensor, covariance: Tensor, other: Tensor) -> Tensor:
        """KL(p(y|x, Σ) ‖ p(y|x, Σ′)) of the predictives under two covariances (n, C, C), an input: (n,), in float64."""

    def prediction(
        self, outputs: Tensor, covariance: Tensor, link: str, samples: int, generator: torch.Generator
    ) -> Prediction:
        """What is predicted for outputs of this covariance."""

    def probability_interval(self, outputs: Tensor, lower: Tensor, upper: Tensor) -> Interval | None:
        """The ends of the predicted probabilities over all variances (n, C) between two; None for regression."""

    def training_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The usual loss that networks are trained with, for every input (n,); it does not depend on σ."""


def _probit_logits(outputs: Tensor, covariance: Tensor) -> Tensor:
    """f / √(1 + π/8 · diag Σ), in float64: (n, C)."""
    return outputs.double() / (1 + pi / 8 * covariance.double().diagonal(dim1=1, dim2=2)).sqrt()


@dataclass(frozen=True)
class Gaussian:
    """p(y|f) = N(y | f, diag σ²): H = diag σ⁻². σ is one number or one for each output; the root is kept without it."""

    noise_std: Noise = 1.0

    def __post_init__(self) -> None:
        if not self.stds:
            raise ValueError("noise_std holds no number; give one, or one for each output.")
        if not all(isfinite(std) and std > 0 for std in self.stds):
            raise ValueError(f"noise_std must be positive and finite, not {self.noise_std}.")

    @property
    def kind(self) -> str:
        return "regression"

    @property
    def stds(self) -> tuple[float, ...]:
        """σ as a tuple of one or C numbers."""
        return self.noise_std if isinstance(self.noise_std, tuple) else (self.noise_std,)

    @property
    def curvature_scales(self) -> tuple[float, ...]:
        return tuple(std**-2 for std in self.stds)

    @property
    def noise_variances(self) -> tuple[float, ...]:
        return tuple(std**2 for std in self.stds)

    def with_noise(self, noise_std: Noise) -> "Gaussian":
        return replace(self, noise_std=noise_std)

    def variances(self, outputs: Tensor) -> Tensor:
        """σ² of every output: (C,), in float64."""
        stds = torch.tensor(self.stds, dtype=torch.float64, device=outputs.device)
        return stds.square().expand(outputs.shape[1])

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
        if len(self.stds) not in (1, outputs.shape[1]):
            raise ValueError(
                f"noise_std holds {len(self.stds)} numbers, but the model has {outputs.shape[1]} outputs; give one "
                "number, or one for each output."
            )

    def counted(self, targets: Tensor) -> None:
        return None

    def log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        variances = self.variances(outputs)
        squares = (outputs.double() - targets.double()).square()
        return -0.5 * (squares / variances + (2 * pi * variances).log()).sum(1)

    def log_predictive(self, outputs: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        total = covariance.double() + self.variances(outputs).diag()
        return MultivariateNormal(outputs.double(), total, validate_args=False).log_prob(targets.double())

    def predictive_divergences(self, outputs: Tensor, covariance: Tensor, other: Tensor) -> Tensor:
        noise = torch.diag(self.variances(outputs))
        ratio = torch.linalg.solve(other.double() + noise, covariance.double() + noise)
        trace = ratio.diagonal(dim1=1, dim2=2).sum(1)
        return (trace - outputs.shape[1] - torch.linalg.slogdet(ratio).logabsdet) / 2

    def prediction(
        self, outputs: Tensor, covariance: Tensor, link: str, samples: int, generator: torch.Generator
    ) -> Prediction:
        return Prediction(outputs, covariance, total=covariance + self.variances(outputs).diag().to(covariance))

    def probability_interval(self, outputs: Tensor, lower: Tensor, upper: Tensor) -> None:
        return None

    def training_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1)


@dataclass(frozen=True)
class Categorical:
    """p(y|f) = softmax(f)_y: H = diag φ − φφᵀ, of rank C − 1. Inputs with the label `ignore_index` do not count."""

    ignore_index: int | None = None

    @property
    def kind(self) -> str:
        return "classification"

    @property
    def curvature_scales(self) -> tuple[float, ...]:
        return (1.0,)

    @property
    def noise_variances(self) -> tuple[float, ...]:
        return (PROBIT_VARIANCE,)

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
            columns = longest_first(columns)
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
            raise ValueError(
                "Classification needs at least two outputs (logits); the model has one. For a single yes/no output "
                "use likelihood='binary'."
            )
        kept = targets if self.ignore_index is None else targets[targets != self.ignore_index]
        if not len(kept):
            return
        low, high = int(kept.min()), int(kept.max())
        if low < 0 or high >= C:
            hint = " Labels that shall not count: Categorical(ignore_index=…)." if self.ignore_index is None else ""
            raise ValueError(f"Labels must lie in 0 … {C - 1}, but they range from {low} to {high}.{hint}")

    def counted(self, targets: Tensor) -> Tensor | None:
        return None if self.ignore_index is None else (targets != self.ignore_index)[:, None]

    def log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._picked(outputs.double().log_softmax(1), targets)

    def log_predictive(self, outputs: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """By the probit approximation."""
        return self._picked(_probit_logits(outputs, covariance).log_softmax(1), targets)

    def predictive_divergences(self, outputs: Tensor, covariance: Tensor, other: Tensor) -> Tensor:
        """By the probit approximation."""
        p, q = (_probit_logits(outputs, each).log_softmax(1) for each in (covariance, other))
        return (p.exp() * (p - q)).sum(1)

    def prediction(
        self, outputs: Tensor, covariance: Tensor, link: str, samples: int, generator: torch.Generator
    ) -> Prediction:
        return Prediction(outputs, covariance, mean_softmax(outputs, covariance, link, samples, generator))

    def probability_interval(self, outputs: Tensor, lower: Tensor, upper: Tensor) -> Interval:
        return probit_interval(outputs, lower, upper)

    def training_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -self._picked(outputs.log_softmax(1), targets)

    def _picked(self, log_probabilities: Tensor, targets: Tensor) -> Tensor:
        """The entry of each target: (n,); 0 for ignored ones."""
        counted = self.counted(targets)
        labels = targets.long() if counted is None else targets.long() * counted[:, 0]
        picked = log_probabilities.gather(1, labels[:, None]).squeeze(1)
        return picked if counted is None else picked.where(counted[:, 0], 0)


@dataclass(frozen=True)
class Bernoulli:
    """Independent yes/no outputs, p(y_c|f) = sigmoid(f_c) for y_c = 1: H = diag φ(1 − φ).

    One output is binary classification, several are multi-label classification. Targets are 0 or 1, of the shape of
    the outputs (n, C), or (n,) for one output; those equal to `ignore_index` do not count (missing labels).
    """

    ignore_index: int | None = None

    @property
    def kind(self) -> str:
        return "binary"

    @property
    def curvature_scales(self) -> tuple[float, ...]:
        return (1.0,)

    @property
    def noise_variances(self) -> tuple[float, ...]:
        return (PROBIT_VARIANCE,)

    def cotangents(self, outputs: Tensor) -> Tensor:
        """√(φ_c (1 − φ_c)) times the c-th unit vector, longest first: K = C."""
        # φ(1 − φ) from the two sigmoids keeps its digits for confident outputs, where 1 − φ does not.
        spread = outputs.double().sigmoid() * (-outputs.double()).sigmoid()
        return longest_first(torch.diag_embed(spread.sqrt())).to(outputs.dtype)

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        single = targets.ndim == 1 and outputs.shape[1] == 1 and len(targets) == len(outputs)
        if targets.shape != outputs.shape and not single:
            raise ValueError(
                f"Yes/no targets have shape {tuple(targets.shape)}, the model's outputs {tuple(outputs.shape)}; they "
                "must agree."
            )
        wrong = (targets != 0) & (targets != 1)
        if self.ignore_index is not None:
            wrong &= targets != self.ignore_index
        if wrong.any():
            example = targets[wrong].flatten()[0].item()
            raise ValueError(
                f"Yes/no targets must be 0 or 1, but there is {example}. Labels that shall not count: "
                "Bernoulli(ignore_index=…)."
            )

    def counted(self, targets: Tensor) -> Tensor | None:
        return None if self.ignore_index is None else (targets != self.ignore_index).view(len(targets), -1)

    def log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._log_probabilities(outputs.double(), targets).sum(1)

    def log_predictive(self, outputs: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """By the probit approximation, each output on its own."""
        return self._log_probabilities(_probit_logits(outputs, covariance), targets).sum(1)

    def predictive_divergences(self, outputs: Tensor, covariance: Tensor, other: Tensor) -> Tensor:
        """By the probit approximation, each output on its own."""
        p, q = (_probit_logits(outputs, each) for each in (covariance, other))
        yes, no = (
            p.sigmoid() * (F.logsigmoid(p) - F.logsigmoid(q)),
            (-p).sigmoid() * (F.logsigmoid(-p) - F.logsigmoid(-q)),
        )
        return (yes + no).sum(1)

    def prediction(
        self, outputs: Tensor, covariance: Tensor, link: str, samples: int, generator: torch.Generator
    ) -> Prediction:
        variance = covariance.diagonal(dim1=1, dim2=2)
        return Prediction(outputs, covariance, mean_sigmoid(outputs, variance, link, samples, generator))

    def probability_interval(self, outputs: Tensor, lower: Tensor, upper: Tensor) -> Interval:
        return sigmoid_interval(outputs, lower, upper)

    def training_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -self._log_probabilities(outputs, targets).mean(1)

    def _log_probabilities(self, logits: Tensor, targets: Tensor) -> Tensor:
        """ln p of each target: (n, C); 0 for ignored ones."""
        targets = targets.view(logits.shape)
        found = F.logsigmoid(torch.where(targets == 1, logits, -logits))
        counted = self.counted(targets)
        return found if counted is None else found.where(counted, 0)


def target_weights(likelihood: Likelihood, targets: Tensor, weights: Tensor | None) -> Tensor | None:
    """How much each target counts, from sample weights (n,) and ignored targets: (n, 1), (n, C), or None for once."""
    counted = likelihood.counted(targets)
    if weights is None:
        return None if counted is None else counted.double()
    each = weights.double()[:, None]
    return each if counted is None else each * counted


def longest_first(columns: Tensor) -> Tensor:
    """Cotangents (n, K, C) of each input, ordered by their length."""
    order = columns.square().sum(2).argsort(1, descending=True)
    return columns.gather(1, order[:, :, None].expand_as(columns))


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
