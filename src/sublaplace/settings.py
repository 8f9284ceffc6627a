"""What the user decided, as every pass over the data needs it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from sublaplace import serialization
from sublaplace.arguments import AUTO, FITTED
from sublaplace.curvature import CurvatureStream
from sublaplace.jacobians import Linearization
from sublaplace.likelihoods import Likelihood
from sublaplace.projectors.context import Projector
from sublaplace.subspace_inputs import perturbed
from sublaplace.survey import NoiseEstimate, Survey

DEFAULT_MAX_DIM = 500


@dataclass(frozen=True)
class Settings:
    """What the user decided; see `SubspaceLaplace`."""

    likelihood: Likelihood
    estimated_noise: NoiseEstimate | None
    projector: str | Projector
    dim: int | str
    prior_precision: float | None  # None: tuned
    subspace_inputs: Any
    num_subspace_inputs: int | None
    complement: str | None
    complement_weight: float | str
    seed: int
    direction_tolerance: float | None
    certified: bool
    captured: float
    max_dim: int | None
    perturbation: float

    @property
    def projector_name(self) -> str:
        return self.projector if isinstance(self.projector, str) else getattr(self.projector, "__name__", "custom")

    @property
    def largest_dim(self) -> int:
        """s, or the most that "auto" may choose."""
        return (self.max_dim or DEFAULT_MAX_DIM) if isinstance(self.dim, str) else self.dim

    @property
    def num_vectors(self) -> int:
        """How many columns P has, if it is a matrix and not a choice of parameters: the most that it may have."""
        name = self.projector_name
        return 0 if name in ("full", "last-layer") or name.startswith("subset") else self.largest_dim

    @property
    def holds_back(self) -> bool:
        """Whether a part of X′ is not for P, but to choose s or the weight of the complement."""
        return self.dim == AUTO or self.complement_weight == FITTED

    def varied(self, inputs: Any) -> Any:
        """Drawn inputs, with noise where that is asked for."""
        if inputs is None or not isinstance(self.subspace_inputs, str):
            return inputs
        return perturbed(inputs, self.perturbation, self.seed)

    @property
    def makes_certificate(self) -> bool:
        return self.certified or self.dim == AUTO

    def stream(
        self, loader: Iterable[Any], linearization: Linearization, survey: Survey, progress: bool
    ) -> CurvatureStream:
        tolerance = self.direction_tolerance
        if tolerance is None:
            tolerance = 0.0 if linearization.dtype == torch.float64 else 1e-8
        return CurvatureStream(linearization, loader, survey.likelihood, tolerance, progress, num_data=survey.num_data)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with, beside the model and the data."""
        return {
            "likelihood": serialization.likelihood_numbers(self.likelihood),
            "estimated noise": self.estimated_noise,
            "projector": self.projector_name,
            "dim": self.dim,
            "prior_precision": self.prior_precision,
            "subspace_inputs": self.subspace_inputs if isinstance(self.subspace_inputs, str) else None,
            "num_subspace_inputs": self.num_subspace_inputs,
            "complement": self.complement,
            "complement_weight": self.complement_weight,
            "seed": self.seed,
            "direction_tolerance": self.direction_tolerance,
            "certificate": self.makes_certificate,
            "captured": self.captured,
            "max_dim": self.max_dim,
            "perturbation": self.perturbation,
        }
