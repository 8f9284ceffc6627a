"""What is left of the residuals of a data set: sums, from which the noise σ and the likelihood follow."""

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Residuals:
    """Weighted sums over the residuals y − f of a data set for each output, from which σ and the likelihood follow.

    Squares are summed about the mean, so that no digits cancel when parts are joined.
    """

    count: Tensor  # Σ w: (C,), float64
    mean: Tensor  # Σ w r / Σ w
    spread: Tensor  # Σ w (r − mean)²

    @classmethod
    def none(cls, num_outputs: int) -> "Residuals":
        zeros = torch.zeros(num_outputs, dtype=torch.float64)
        return cls(zeros, zeros, zeros)

    @classmethod
    def of(cls, residuals: Tensor, weights: Tensor | None = None) -> "Residuals":
        """Of residuals (n, C) with weights (n,)."""
        values = residuals.double().cpu()
        w = torch.ones(len(values), 1, dtype=torch.float64) if weights is None else weights.double().cpu()[:, None]
        count = w.sum().expand(values.shape[1])
        mean = (w * values).sum(0) / count.clamp_min(torch.finfo(torch.float64).tiny)
        return cls(count, mean, (w * (values - mean).square()).sum(0))

    def joined(self, other: "Residuals") -> "Residuals":
        total, shift = self.count + other.count, other.mean - self.mean
        share = other.count / total.clamp_min(torch.finfo(torch.float64).tiny)
        spread = self.spread + other.spread + shift.square() * self.count * share
        return Residuals(total, self.mean + shift * share, spread)

    def pooled(self) -> "Residuals":
        """As if all outputs were one."""
        parts = [Residuals(*values) for values in zip(*(t.view(-1, 1) for t in self.sums), strict=True)]
        result = parts[0]
        for part in parts[1:]:
            result = result.joined(part)
        return result

    @property
    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.count, self.mean, self.spread

    def standard_deviations(self) -> tuple[float, ...]:
        """About the mean, of each output."""
        if not (self.spread > 0).all():
            raise ValueError(
                "The training residuals are all equal, so no noise can be estimated from them; give noise_std."
            )
        return tuple((self.spread / self.count).sqrt().tolist())

    def standard_deviation(self) -> float:
        """About the mean, pooled over the outputs."""
        return self.pooled().standard_deviations()[0]

    def log_likelihood(self, noise_std: Tensor) -> Tensor:
        """Σ ln N(y | f, σ²), differentiable in σ, which is one number or one for each output."""
        squares = self.spread + self.count * self.mean.square()
        return -0.5 * (squares / noise_std**2 + self.count * (2 * pi * noise_std**2).log()).sum()
