"""What the user decided, checked, as every pass over the data needs it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from sublaplace.data.subspace_inputs import Drawn, Given, Perturbed, SubspaceInputs
from sublaplace.model.layer_priors import PriorPrecision, reference_prior, units_of
from sublaplace.model.likelihoods.base import Likelihood
from sublaplace.model.parameters import ParameterLayout
from sublaplace.projectors.registry import Projector
from sublaplace.runtime.checks import checked_count, checked_positive, checked_share, checked_tolerance

AUTO, EVIDENCE, FITTED, ALL = "auto", "evidence", "fitted", "all"

DEFAULT_SAMPLES, SAMPLED_BEYOND = 10, 32
"""Sampled directions per input, and the number of outputs up to which all directions are used.

With eight directions, variances of KFAC for 100 classes change by 0.3 to 1.5 percent, KFAC's own error being 24 to 78.
"""


@dataclass(frozen=True)
class Captured:
    """The smallest dimension that guarantees a share of the full approximation's trace, as the `dim` of a fit.

    Args:
        share: of the trace, on subspace inputs that are held back.
        at_most: the largest dimension that may be taken.
    """

    share: float
    at_most: int = 500

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", checked_share(self.share, "share"))
        object.__setattr__(self, "at_most", checked_count(self.at_most, "at_most"))


@dataclass(frozen=True)
class Complement:
    """What the posterior is outside of the subspace.

    Args:
        kind: "kfac" or "diagonal".
        weight: how much its curvature counts; "fitted": as much as brings the posterior nearest to the full Laplace
            approximation on subspace inputs that are held back.
    """

    kind: Literal["kfac", "diagonal"] = "kfac"
    weight: float | str = FITTED

    def __post_init__(self) -> None:
        if self.kind not in ("kfac", "diagonal"):
            raise ValueError(f"Unknown complement {self.kind!r}; choose 'kfac', 'diagonal' or None.")
        if isinstance(self.weight, str):
            if self.weight != FITTED:
                raise ValueError(f"Unknown weight '{self.weight}'; give a positive number or '{FITTED}'.")
        else:
            object.__setattr__(self, "weight", checked_positive(self.weight, "weight"))

    @property
    def fits_weight(self) -> bool:
        """Whether the weight is fitted."""
        return isinstance(self.weight, str)


DIRECTION_TOLERANCE = 1e-5
"""Of float32 models: on trained networks it changes covariances by less than 1e-3 of their norm."""


@dataclass(frozen=True)
class Resources:
    """What a fit may use of the machine, and which approximations it may make to save time.

    Args:
        memory_budget: bytes for temporary chunks; None: a quarter of what is free.
        scratch_folder: keep P, and its products with the GGN, in nameless files of this folder instead of in memory;
            for CPU models whose p·s numbers do not fit.
        direction_tolerance: the share of the trace of the output Hessians that may be dropped to save backward passes;
            None: 1e-5, and 0 for float64 models and certificates.
        curvature_samples: m, the number of sampled output directions per input for KFAC and the diagonal; "all": every
            direction. None: 10 if there are more than 32 outputs, else all. With sampled directions, the search for P
            starts from a few random combinations of the outputs, and classifiers predict with 50 draws of what stands
            outside of the subspace where that saves much. The posterior in the subspace is exact.
    """

    memory_budget: int | None = None
    scratch_folder: str | os.PathLike[str] | None = None
    direction_tolerance: float | None = None
    curvature_samples: int | str | None = None

    def __post_init__(self) -> None:
        if self.memory_budget is not None:
            checked_count(self.memory_budget, "memory_budget")
        if self.direction_tolerance is not None:
            object.__setattr__(self, "direction_tolerance", checked_tolerance(self.direction_tolerance))
        if self.scratch_folder is not None:
            folder = os.path.expanduser(self.scratch_folder)
            if not os.path.isdir(folder):
                raise ValueError(f"scratch_folder={os.fspath(folder)!r} is not a folder; create it first.")
            object.__setattr__(self, "scratch_folder", folder)
        if isinstance(self.curvature_samples, str):
            if self.curvature_samples != ALL:
                raise ValueError(
                    f"Unknown curvature_samples '{self.curvature_samples}'; give a positive integer, '{ALL}' or None."
                )
        elif self.curvature_samples is not None:
            checked_count(self.curvature_samples, "curvature_samples")

    def tolerance(self, dtype: torch.dtype) -> float:
        """Return the direction tolerance for a model of this type."""
        if self.direction_tolerance is not None:
            return self.direction_tolerance
        return 0.0 if dtype == torch.float64 else DIRECTION_TOLERANCE

    def samples(self, num_outputs: int) -> int | None:
        """Return the number of sampled directions per input for a network with C outputs; None: all directions."""
        count = self.curvature_samples
        if count is None:
            count = DEFAULT_SAMPLES if num_outputs > SAMPLED_BEYOND else ALL
        return None if isinstance(count, str) or count >= num_outputs else count


@dataclass(frozen=True)
class Options:
    """What the user decided; see `SubspaceLaplace`."""

    likelihood: Likelihood
    projector: Projector | None  # None: no subspace, the complement alone
    dim: int | Captured
    complement: Complement | str | None  # "auto" until `resolved`
    prior_precision: PriorPrecision | str  # or "auto", "evidence"
    prior_structure: str  # "scalar" or "layer"
    subspace_inputs: SubspaceInputs
    seed: int
    resources: Resources
    default_dim: bool = False  # the user did not ask for a dimension

    def resolved(self, positions: bool = False) -> "Options":
        """Return the options of one fit, in which "auto" has become what it stands for.

        KFAC stands outside of a low-rank subspace, for regression with a fitted weight. (For classification λ is chosen
        so that another weight gains nothing.) Subspaces of single parameters have nothing outside. Neither have those
        of outputs with positions: KFAC would need a backward pass for each of them, and the subspace forward mode.

        Args:
            positions: whether the outputs have positions, which only the data tell.

        Raises:
            ValueError: for a complement with a fitted weight, if the outputs have positions.
        """
        complement = self.complement
        if isinstance(complement, str):
            suits = self.projector is None or (self.projector.needs_inputs and not positions)
            fits = self.likelihood.has_noise and not positions
            complement = Complement("kfac", FITTED if fits else 1.0) if suits else None
        if positions and complement is not None and complement.fits_weight:
            raise ValueError(
                "The weight of a complement cannot be fitted to outputs with positions, whose covariances are too "
                f"large; give it, as in complement=Complement({complement.kind!r}, weight=1.0)."
            )
        return replace(self, complement=complement)

    @property
    def outside(self) -> Complement | None:
        """What stands outside of the subspace, once it is resolved."""
        return None if isinstance(self.complement, str) else self.complement

    @property
    def given_prior(self) -> float | None:
        """λ, if it is given; the one that stands for all, if there are several."""
        return None if isinstance(self.prior_precision, str) else reference_prior(self.prior_precision)

    def given_units(self, layout: ParameterLayout) -> dict[str, float] | None:
        """Return the units of the parameters under given λ of their own; None: they are not given.

        Raises:
            ValueError: if the names are not those of the parameters.
        """
        return units_of(self.prior_precision, layout) if isinstance(self.prior_precision, dict) else None

    @property
    def leaves_one_out(self) -> bool:
        """Whether λ is chosen by leave-one-out: "auto" for classification in a low-rank subspace."""
        low_rank = self.projector is not None and self.projector.needs_inputs
        return self.prior_precision == AUTO and low_rank and self.likelihood.has_probabilities

    @property
    def label(self) -> str:
        """The projector's name for people."""
        return "no subspace" if self.projector is None else self.projector.label

    @property
    def reduces(self) -> bool:
        """Whether there is a subspace."""
        return self.projector is not None and self.projector.reduces

    @property
    def largest_dim(self) -> int:
        """s, or the most that `Captured` may choose."""
        return self.dim.at_most if isinstance(self.dim, Captured) else self.dim

    @property
    def num_vectors(self) -> int:
        """How many columns P has at the most, if it is a matrix and not a choice of parameters."""
        return self.largest_dim if self.projector is not None and self.projector.stores_matrix else 0

    @property
    def chooses_dim(self) -> bool:
        """Whether s follows from the captured share."""
        return isinstance(self.dim, Captured)

    @property
    def holds_back(self) -> bool:
        """Whether a part of X′ is not for P, but to choose s or the weight of the complement."""
        return self.chooses_dim or (self.outside is not None and self.outside.fits_weight)

    @property
    def needs_inputs(self) -> bool:
        """Whether X′ is needed."""
        return self.holds_back or (self.projector is not None and self.projector.needs_inputs)

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint must agree with, beside the model and the data.

        Raises:
            ValueError: if the projector is an anonymous function, which cannot be told from another one.
        """
        if self.projector is not None and self.projector.name is None:
            raise ValueError(
                "fit(checkpoint=…) needs a projector with a name, by which a resumed fit recognises it: decorate your "
                "function with @sublaplace.projector('my-name')."
            )
        return self.described()

    def described(self) -> dict[str, Any]:
        """Return what the posterior depends on, beside the model and the data, as values that JSON can hold."""
        given = isinstance(self.subspace_inputs, Given)
        return {
            "likelihood": self.likelihood.numbers(),
            "projector": None if self.projector is None else self.projector.name,
            "dim": plain_numbers(self.dim),
            "prior_precision": self.prior_precision,
            "prior_structure": self.prior_structure,
            "subspace_inputs": "given" if given else plain_numbers(self.subspace_inputs),
            "complement": plain_numbers(self.complement),
            "seed": self.seed,
            "direction_tolerance": self.resources.direction_tolerance,
            "default_tolerance": DIRECTION_TOLERANCE,  # sums of a version with another one do not go on
            "curvature_samples": self.resources.curvature_samples,
        }


def plain_numbers(option: Any) -> Any:
    """Return a small dataclass as a mapping with its name, anything else as it is."""
    if option is None or isinstance(option, int | str):
        return option
    return {"is": type(option).__name__} | {f.name: getattr(option, f.name) for f in fields(option)}


def option_from(numbers: Any) -> Any:
    """Return the option of `plain_numbers`."""
    if not isinstance(numbers, Mapping):
        return numbers
    values = dict(numbers)
    kinds: dict[str, Any] = {"Captured": Captured, "Complement": Complement, "Drawn": Drawn, "Perturbed": Perturbed}
    return kinds[values.pop("is")](**values)
