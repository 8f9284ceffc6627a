"""Binary and multi-label classification."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sublaplace.model.likelihoods.base import LIKELIHOODS, Likelihood, longest_first
from sublaplace.model.likelihoods.links import (
    PROBIT_VARIANCE,
    Covariance,
    Interval,
    mean_sigmoid,
    probit_logits,
    sigmoid_interval,
)
from sublaplace.model.likelihoods.roots import DiagonalRoot


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Independent yes/no outputs, p(y_c|f) = sigmoid(f_c) for y_c = 1: H = diag φ(1 − φ).

    One output is binary classification, several are multi-label classification. Targets are 0 or 1, of the shape of
    the outputs (n, C), or (n,) for one output. Outputs may have any shape (n, …): every entry is an output of its own.

    Args:
        ignore_index: targets equal to it do not count (missing labels).
    """

    ignore_index: int | None = None
    name: ClassVar[str] = "binary"

    @property
    def noise_variances(self) -> tuple[float, ...]:
        return (PROBIT_VARIANCE,)

    @property
    def has_probabilities(self) -> bool:
        return True

    @property
    def takes_positions(self) -> bool:
        return True

    @property
    def needs_variances_only(self) -> bool:
        return True

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """Return √(φ_c (1 − φ_c)) times the c-th unit vector, longest first: K = C."""
        return longest_first(torch.diag_embed(_spread(outputs).sqrt())).to(outputs.dtype)

    def root(self, outputs: Tensor) -> DiagonalRoot:
        return DiagonalRoot(_spread(outputs).sqrt().to(outputs.dtype))

    def hessian_sum(self, outputs: Tensor, weights: Tensor | None, diagonal: bool = False) -> Tensor:
        spread = _spread(outputs) if weights is None else _spread(outputs) * weights
        return spread.sum(0) if diagonal else spread.sum(0).diag()

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
                f"Yes/no targets must be 0 or 1, but there is {example}. To leave labels out: "
                "Bernoulli(ignore_index=…)."
            )

    def counted(self, targets: Tensor) -> Tensor | None:
        return None if self.ignore_index is None else (targets != self.ignore_index).view(len(targets), -1)

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._log_probabilities(outputs.double(), targets).sum(1)

    def log_predictive(self, outputs: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """Return ln p(y|x, D) by the probit approximation, each output on its own."""
        return self._log_probabilities(probit_logits(outputs, covariance), targets).sum(1)

    def predictive_divergences(self, outputs: Tensor, covariance: Tensor, other: Tensor) -> Tensor:
        """Return the divergences by the probit approximation, each output on its own."""
        p, q = (probit_logits(outputs, each) for each in (covariance, other))
        yes, no = (
            p.sigmoid() * (F.logsigmoid(p) - F.logsigmoid(q)),
            (-p).sigmoid() * (F.logsigmoid(-p) - F.logsigmoid(-q)),
        )
        return (yes + no).sum(1)

    def probabilities(
        self, outputs: Tensor, covariance: Covariance, link: str, samples: int, generator: torch.Generator
    ) -> Tensor:
        """Return the probability of yes for each output."""
        return mean_sigmoid(outputs, covariance.variance, link, samples, generator)

    def probability_interval(self, outputs: Tensor, lower: Tensor, upper: Tensor) -> Interval:
        return sigmoid_interval(outputs, lower, upper)

    def as_classes(self, probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return every output that is not ignored as a choice between no and yes."""
        yes, labels, counted = probabilities.reshape(-1), targets.reshape(-1).long(), self.counted(targets)
        if counted is not None:
            yes, labels = yes[counted.reshape(-1)], labels[counted.reshape(-1)]
        return torch.stack([1 - yes, yes], dim=1), labels

    def plain_probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def entropy(self, probabilities: Tensor) -> Tensor:
        return (torch.special.entr(probabilities) + torch.special.entr(1 - probabilities)).sum(1)

    def training_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -self._log_probabilities(outputs, targets).mean(1)

    def _log_probabilities(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return ln p of each target: (n, C); 0 for ignored ones."""
        targets = targets.view(logits.shape)
        found = F.logsigmoid(torch.where(targets == 1, logits, -logits))
        counted = self.counted(targets)
        return found if counted is None else found.where(counted, 0)


def _spread(outputs: Tensor) -> Tensor:
    """Return φ(1 − φ), from two sigmoids, which keep their digits for confident outputs: (n, C), in float64."""
    return outputs.double().sigmoid() * (-outputs.double()).sigmoid()


LIKELIHOODS["multi-label"] = Bernoulli  # another word for several yes/no outputs
