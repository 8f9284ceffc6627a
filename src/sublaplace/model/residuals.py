"""Sums over the residuals of a data set, from which the noise σ and the likelihood follow."""

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Residuals:
    """Weighted sums over the residuals y − f of a data set, per output.

    Squares are summed about the mean, so that joining parts is free of cancellation.
    """

    count: Tensor  # Σ w: (C,), float64
    mean: Tensor  # Σ w r / Σ w
    spread: Tensor  # Σ w (r − mean)²

    @classmethod
    def none(cls, num_outputs: int) -> "Residuals":
        """Return the sums over an empty data set."""
        zeros = torch.zeros(num_outputs, dtype=torch.float64, device="cpu")
        return cls(zeros, zeros, zeros)

    @classmethod
    def of(cls, residuals: Tensor, weights: Tensor | None = None) -> "Residuals":
        """Return the sums over residuals (n, C) with weights (n,), by default 1."""
        values = residuals.double().cpu()
        w = values.new_ones(len(values), 1) if weights is None else weights.double().cpu()[:, None]
        count = w.sum().expand(values.shape[1])
        mean = (w * values).sum(0) / count.clamp_min(torch.finfo(torch.float64).tiny)
        return cls(count, mean, (w * (values - mean).square()).sum(0))

    def joined(self, other: "Residuals") -> "Residuals":
        """Return the sums over both data sets together."""
        total, shift = self.count + other.count, other.mean - self.mean
        share = other.count / total.clamp_min(torch.finfo(torch.float64).tiny)
        spread = self.spread + other.spread + shift.square() * self.count * share
        return Residuals(total, self.mean + shift * share, spread)

    def pooled(self) -> "Residuals":
        """Return the sums over all outputs, as if they were one output."""
        parts = [Residuals(*values) for values in zip(*(t.view(-1, 1) for t in self.sums), strict=True)]
        result = parts[0]
        for part in parts[1:]:
            result = result.joined(part)
        return result

    @property
    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three sums in the order of the fields."""
        return self.count, self.mean, self.spread

    @property
    def squares(self) -> Tensor:
        """Σ w r² per output: (C,)."""
        return self.spread + self.count * self.mean.square()

    def root_mean_squares(self) -> tuple[float, ...]:
        """Return √(Σ w r² / Σ w) per output, the maximum-likelihood estimate of σ.

        Raises:
            ValueError: if the residuals of an output are all zero.
        """
        if not (self.squares > 0).all():
            raise ValueError(
                "The training residuals are all zero, so the noise cannot be estimated from them; give noise_std, as "
                "in Gaussian(0.1)."
            )
        return tuple((self.squares / self.count).sqrt().tolist())

    def root_mean_square(self) -> float:
        """Return the root mean square, pooled over the outputs."""
        return self.pooled().root_mean_squares()[0]

    def log_likelihood(self, noise_std: Tensor) -> Tensor:
        """Return Σ w ln N(y | f, σ²), differentiable in σ, which is a scalar or has one entry per output."""
        return -0.5 * (self.squares / noise_std**2 + self.count * (2 * pi * noise_std**2).log()).sum()
