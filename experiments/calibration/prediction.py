"""What a method gives for the test inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Probabilities:
    """Class probabilities (n, C)."""

    values: Tensor
    note: str = ""


@dataclass(frozen=True, eq=False)
class Normal:
    """A Gaussian for each input: mean (n, C) and covariance (n, C, C), the noise included."""

    mean: Tensor
    covariance: Tensor
    note: str = ""


Predicted = Probabilities | Normal


def pooled(parts: list[Predicted]) -> Predicted:
    """Join the predictions for several sets of test inputs."""
    note = "; ".join(dict.fromkeys(part.note for part in parts if part.note))
    if all(isinstance(part, Probabilities) for part in parts):
        return Probabilities(torch.cat([part.values for part in parts if isinstance(part, Probabilities)]), note)
    normals = [part for part in parts if isinstance(part, Normal)]
    if len(normals) != len(parts):
        raise ValueError("Probabilities and Gaussians cannot be joined.")
    return Normal(torch.cat([part.mean for part in normals]), torch.cat([part.covariance for part in normals]), note)


def with_noise(mean: Tensor, covariance: Tensor, noise_std: float, note: str = "") -> Normal:
    """Add σ²I to the covariance (n, C, C) of the mean, in float64."""
    eye = torch.eye(mean.shape[1], dtype=torch.float64)
    return Normal(mean.double(), covariance.double() + noise_std**2 * eye, note)
