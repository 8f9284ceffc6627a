"""What a fit gives."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from sublaplace.fitting.survey import Survey
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.likelihoods.base import Noise
from sublaplace.posteriors.certificate import Certificate
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.posteriors.drawn import DrawnPosterior
from sublaplace.posteriors.protocol import Posterior

GIVEN = "given"
"""How λ was chosen, where the user did."""


@dataclass(frozen=True)
class Stage:
    """What a stage of a fit took."""

    seconds: float
    peak_bytes: int | None  # of the process (or device) up to its end
    in_passes: float = 0.0  # of the seconds, those of passes over the training data
    in_factorisations: float = 0.0  # of the seconds, those of the curvature besides its passes


@dataclass(frozen=True)
class Fitted:
    """What a fit gives."""

    linearization: Linearization
    posterior: Posterior
    survey: Survey
    certificate: Certificate | None
    stages: dict[str, Stage] = field(default_factory=dict)
    kfac_trace_ratios: dict[str, float] = field(default_factory=dict)  # where KFAC was used
    captured: float | None = None  # of the full trace, at least: of inputs held back, else of X′; with a certificate
    units: dict[str, float] | None = None  # of the parameters, with one λ per layer
    directions: str = ""  # which output directions were dropped or sampled, for people; empty: none
    chosen_by: str = ""  # how λ (and σ) were chosen, for people
    dim_note: str = ""  # why s is smaller than the dimension asked for, for people
    drawn_with: int | None = None  # seed of the draws that stand for the complement in predictions; None: it is exact

    @cached_property
    def predictive(self) -> Posterior | DrawnPosterior:
        """What predicts: the posterior itself, or its complement by draws. Those are made once."""
        if self.drawn_with is None or not isinstance(self.posterior, ComplementedPosterior):
            return self.posterior
        return DrawnPosterior.of(self.posterior, self.drawn_with)

    @property
    def has_curvature_per_output(self) -> bool:
        """Whether several σ can be changed one by one: in a subspace, with nothing outside."""
        return self.posterior.subspace is not None and self.posterior.outside is None

    def with_prior(self, prior_precision: float) -> "Fitted":
        """Return it under another λ."""
        certificate = None if self.certificate is None else self.certificate.with_prior(prior_precision)
        return replace(self, posterior=self.posterior.with_prior(prior_precision), certificate=certificate)

    def with_noise(self, noise_std: Noise) -> "Fitted":
        """Return it under another σ, which is no longer an estimate from the residuals."""
        survey = self.survey.with_given_noise(noise_std)
        scales = survey.likelihood.curvature_scales
        certificate = self.certificate
        if certificate is not None:
            # With several scales the products were summed over the outputs: they are made again when asked for.
            certificate = certificate.with_scale(scales[0]) if len(scales) == 1 else None
        return replace(self, posterior=self.posterior.with_scales(scales), survey=survey, certificate=certificate)

    def with_noise_factor(self, factor: float) -> "Fitted":
        """Return it with σ, one or all of them, times a factor."""
        noise = self.survey.noise_std
        changed = tuple(std * factor for std in noise) if isinstance(noise, tuple) else noise * factor
        survey = self.survey.with_given_noise(changed)
        scales, certificate = survey.likelihood.curvature_scales, self.certificate
        if certificate is not None:
            certificate = certificate.with_scale(scales[0]) if len(scales) == 1 else None
        return replace(self, posterior=self.posterior.scaled(factor**-2), survey=survey, certificate=certificate)

    def require_noise_like(self, count: int) -> None:
        """Raise ValueError where the evidence is not known at another σ of so many numbers."""
        scales = self.survey.likelihood.curvature_scales
        if count != len(scales):
            raise ValueError(f"noise_std holds {count} numbers, but the posterior was fitted with {len(scales)}.")
        self.posterior.with_scales(scales)  # refuses where the outputs were summed up
