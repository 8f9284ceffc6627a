"""Classification into one of C classes."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sublaplace.model.likelihoods.base import Likelihood, longest_first
from sublaplace.model.likelihoods.links import (
    PROBIT_VARIANCE,
    WITH_MATRICES,
    Covariance,
    Interval,
    bridge,
    log_probabilities,
    pairwise_interval,
    probit_interval,
    sampled_softmax,
    variances_of,
)
from sublaplace.model.likelihoods.roots import SoftmaxRoot

_EIGENVECTORS_UP_TO = 64  # classes


@dataclass(frozen=True)
class Categorical(Likelihood):
    """p(y|f) = softmax(f)_y: H = diag φ − φφᵀ, of rank C − 1.

    Outputs (n, …) with a class at every position, such as those of a sequence or a segmentation, need `class_dim`.
    Targets are then one label per position. The log-likelihood of an input is the sum over its positions.

    Args:
        ignore_index: inputs, or positions of them, with this label do not count.
        link: how logits and their variances become probabilities, "pairwise" or "probit". λ is tuned for it, and
            predictions use it unless they name another one.
        class_dim: the dimension of the outputs with the classes, such as 1 for (n, C, H, W) or −1 for (n, T, C). None:
            outputs are (n, C).
    """

    ignore_index: int | None = None
    link: str = "pairwise"
    class_dim: int | None = None
    name: ClassVar[str] = "classification"
    absent: ClassVar[dict[str, Any]] = {"link": "probit"}

    def __post_init__(self) -> None:
        if self.link not in ("pairwise", "probit"):
            raise ValueError(
                f"The link of a likelihood must be 'pairwise' or 'probit', not '{self.link}'. Others are for "
                "predictions: la.predict(x, link='mc')."
            )
        if self.class_dim is not None and (isinstance(self.class_dim, bool) or not isinstance(self.class_dim, int)):
            raise TypeError(f"class_dim must be an integer or None, not {self.class_dim!r}.")
        if self.class_dim == 0:
            raise ValueError("class_dim=0 is the batch; give the dimension of the classes, such as 1 or -1.")

    @property
    def takes_positions(self) -> bool:
        return self.class_dim is not None

    @property
    def default_link(self) -> str:
        return self.link

    @property
    def noise_variances(self) -> tuple[float, ...]:
        return (PROBIT_VARIANCE,)

    @property
    def has_probabilities(self) -> bool:
        return True

    @property
    def needs_variances_only(self) -> bool:
        return True

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """Return √e_k times the k-th eigenvector of H, descending; beyond C = 64 the columns of diag √φ − φ√φᵀ.

        The eigenvector of eigenvalue 0 is left out, so K = C − 1; the columns of the second form are sorted by length.
        Cost: C³ per input for the first form, C² for the second.
        """
        probabilities = outputs.double().softmax(1)
        C = outputs.shape[1]
        if C == 2:
            columns = probabilities.prod(1).sqrt()[:, None, None] * outputs.new_tensor([[[1.0, -1.0]]])
        elif C <= _EIGENVECTORS_UP_TO:
            hessians = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None, :]
            values, vectors = torch.linalg.eigh(hessians)
            columns = values.clamp_min(0).sqrt()[:, :, None] * vectors.transpose(1, 2)
            columns = columns[:, 1:].flip(1)
        else:
            roots = probabilities.sqrt()
            columns = torch.diag_embed(roots) - roots[:, :, None] * probabilities[:, None, :]
            columns = longest_first(columns)
        return columns.to(outputs.dtype)

    def root(self, outputs: Tensor) -> SoftmaxRoot:
        return SoftmaxRoot(outputs.double().softmax(1).to(outputs.dtype))

    def hessian_sum(self, outputs: Tensor, weights: Tensor | None, diagonal: bool = False) -> Tensor:
        """Return Σ_n w (diag φ − φφᵀ). Cost: n·C², or n·C for the diagonal."""
        probabilities = outputs.double().softmax(1)
        weighted = probabilities if weights is None else probabilities * weights
        if diagonal:
            return (weighted * (1 - probabilities)).sum(0)
        return weighted.sum(0).diag() - weighted.T @ probabilities

    def are_probabilities(self, outputs: Tensor) -> bool:
        return bool((outputs >= 0).all() and ((outputs.sum(1) - 1).abs() < 1e-3).all())

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
            hint = " To leave labels out: Categorical(ignore_index=…)." if self.ignore_index is None else ""
            raise ValueError(f"Labels must lie in 0 … {C - 1}, but they range from {low} to {high}.{hint}")

    def counted(self, targets: Tensor) -> Tensor | None:
        return None if self.ignore_index is None else (targets != self.ignore_index)[:, None]

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._picked(outputs.double().log_softmax(1), targets)

    def log_predictive(self, outputs: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """Return ln p(y|x, D) by the likelihood's link."""
        return self._picked(log_probabilities(outputs.double(), variances_of(covariance), self.link), targets)

    def predictive_divergences(self, outputs: Tensor, covariance: Tensor, other: Tensor) -> Tensor:
        """Return the divergences by the likelihood's link."""
        p, q = (log_probabilities(outputs.double(), variances_of(each), self.link) for each in (covariance, other))
        return (p.exp() * (p - q)).sum(1)

    def probabilities(
        self, outputs: Tensor, covariance: Covariance, link: str, samples: int, generator: torch.Generator
    ) -> Tensor:
        if link not in WITH_MATRICES:
            return log_probabilities(outputs, covariance.variance, link).exp()
        if link == "mc":
            return sampled_softmax(outputs, covariance.factor, samples, generator)
        return bridge(outputs, covariance.variance, covariance.row_sums)

    def probability_interval(self, outputs: Tensor, lower: Tensor, upper: Tensor) -> Interval:
        interval = pairwise_interval if self.link == "pairwise" else probit_interval
        return interval(outputs, lower, upper)

    def plain_probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(1)

    def training_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -self._picked(outputs.log_softmax(1), targets)

    def _picked(self, log_probabilities: Tensor, targets: Tensor) -> Tensor:
        """Return the entry of each target: (n,); 0 for ignored ones."""
        counted = self.counted(targets)
        labels = targets.long() if counted is None else targets.long() * counted[:, 0]
        picked = log_probabilities.gather(1, labels[:, None]).squeeze(1)
        return picked if counted is None else picked.where(counted[:, 0], 0)
