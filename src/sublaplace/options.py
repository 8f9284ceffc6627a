"""What the user decided, checked, as every pass over the data needs it."""

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import nn

from sublaplace.data.loaders import with_labels_under
from sublaplace.data.subspace_inputs import Drawn, Given, Perturbed, SubspaceInputs
from sublaplace.model.likelihoods.base import LIKELIHOODS, Likelihood
from sublaplace.projectors.registry import FULL, PROJECTORS, Builder, Projector
from sublaplace.runtime.checks import checked_count, checked_positive, checked_seed, checked_share, checked_tolerance

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


@dataclass(frozen=True)
class Resources:
    """What a fit may use of the machine, and which approximations it may make to save time.

    Args:
        memory_budget: bytes for temporary chunks; None: a quarter of what is free.
        scratch_folder: keep P, and its products with the GGN, in nameless files of this folder instead of in memory;
            for CPU models whose p·s numbers do not fit.
        direction_tolerance: the share of the trace of the output Hessians that may be dropped to save backward passes;
            None: 1e-8, and 0 for float64 models.
        curvature_samples: m, the number of sampled output directions per input for KFAC and the diagonal; "all": every
            direction. None: 10 if there are more than 32 outputs, else all. With sampled directions, the search for P
            starts from a few random combinations of the outputs. They decide P and what stands outside of the
            subspace; the posterior in the subspace is exact.
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
        return 0.0 if dtype == torch.float64 else 1e-8

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
    prior_precision: float | str  # or "auto", "evidence"
    prior_structure: str  # "scalar" or "layer"
    subspace_inputs: SubspaceInputs
    seed: int
    resources: Resources
    default_dim: bool = False  # the user did not ask for a dimension

    def resolved(self) -> "Options":
        """Return the options of one fit, in which "auto" has become what it stands for.

        KFAC stands outside of a low-rank subspace, for regression with a fitted weight. (For classification λ is chosen
        so that another weight gains nothing.) Subspaces of single parameters have nothing outside.
        """
        complement = self.complement
        if isinstance(complement, str):
            suits = self.projector is None or self.projector.needs_inputs
            complement = Complement("kfac", FITTED if self.likelihood.has_noise else 1.0) if suits else None
        return replace(self, complement=complement)

    @property
    def outside(self) -> Complement | None:
        """What stands outside of the subspace, once it is resolved."""
        return None if isinstance(self.complement, str) else self.complement

    @property
    def given_prior(self) -> float | None:
        """λ, if it is a number."""
        return None if isinstance(self.prior_precision, str) else self.prior_precision

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


# Checks of single arguments -------------------------------------------------------------------------------------------


def checked_options(
    likelihood: Any,
    dim: Any,
    projector: Any,
    complement: Any,
    prior_precision: Any,
    prior_structure: Any,
    subspace_inputs: Any,
    labels_key: str,
    seed: Any,
    resources: Any,
) -> Options:
    """Return the options of `SubspaceLaplace`, or raise an error that says what is wrong and what to do."""
    chosen_projector = checked_projector(projector)
    chosen_complement = checked_complement(complement)
    options = Options(
        likelihood=checked_likelihood(likelihood),
        projector=chosen_projector,
        dim=checked_dim(dim),
        complement=chosen_complement,
        prior_precision=checked_prior(prior_precision),
        prior_structure=checked_structure(prior_structure),
        subspace_inputs=checked_subspace_inputs(subspace_inputs, labels_key),
        seed=checked_seed(seed),
        resources=checked_resources(resources),
        default_dim=dim is None,
    )
    _refuse_without_effect(options.resolved(), dim, subspace_inputs)
    return options


def _refuse_without_effect(options: Options, dim: Any, subspace_inputs: Any) -> None:
    """Raise ValueError for an argument that has no effect in the chosen mode."""
    projector = options.projector
    if projector is None and options.complement is None:
        raise ValueError(
            "projector=None leaves no uncertainty at all: it goes with a complement, which then is the whole "
            "posterior, as in complement='kfac'."
        )
    if projector is FULL and options.outside is not None:
        raise ValueError("projector='full' leaves nothing outside: it goes without a complement.")
    if options.prior_structure == "layer" and options.given_prior is not None:
        raise ValueError(
            "prior_structure='layer' has no effect with a given prior_precision: the evidence chooses one λ per layer. "
            "Leave prior_precision out."
        )
    has_dim = projector is not None and not projector.own_dim
    if dim is not None and not has_dim:
        which = "projector=None has no subspace" if projector is None else f"projector='{projector.label}' has its own"
        raise ValueError(f"dim has no effect: {which}. Leave it out, or choose a low-rank or subset projector.")
    if options.chooses_dim and not (projector is not None and projector.needs_inputs):
        raise ValueError("dim=Captured(…) needs a low-rank projector, whose inputs it can hold back a part of.")
    if subspace_inputs is not None and not options.needs_inputs:
        raise ValueError(
            f"subspace_inputs has no effect: projector='{options.label}' is not built from inputs. It belongs to the "
            "low-rank projectors, to dim=Captured(…) and to a complement with a fitted weight."
        )


DEFAULT_DIM = 100


def checked_dim(dim: Any) -> int | Captured:
    """Return s or `Captured`; None stands for the default."""
    if dim is None:
        return DEFAULT_DIM
    if isinstance(dim, Captured):
        return dim
    if isinstance(dim, str) and dim == AUTO:
        raise ValueError("dim='auto' is now dim=Captured(0.5, at_most=500), with the share to be guaranteed.")
    if isinstance(dim, str) and (dim in PROJECTORS or dim == FULL.name):
        raise TypeError(f"The third argument is now dim; name the projector, as in projector='{dim}'.")
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"dim must be an integer or Captured(share), not {dim!r}.")
    dim = operator.index(dim)
    if dim < 0:
        raise ValueError(f"dim must not be negative, but it is {dim}.")
    if dim == 0:
        raise ValueError(
            "dim=0 leaves no subspace; choose at least 1, or projector=None with complement='kfac' or 'diagonal', "
            "which then is the whole posterior."
        )
    return int(dim)


def checked_complement(complement: Any) -> Complement | str | None:
    """Return what stands outside of the subspace; a name has a fitted weight."""
    if complement is None or isinstance(complement, Complement):
        return complement
    if isinstance(complement, str) and complement == AUTO:
        return AUTO
    if complement not in ("kfac", "diagonal"):
        raise ValueError(
            f"Unknown complement {complement!r}; choose 'kfac', 'diagonal', Complement('kfac', weight=1.0) or None."
        )
    return Complement(complement)


def checked_prior(prior_precision: Any) -> float | str:
    """Return λ, "auto" or "evidence"."""
    if isinstance(prior_precision, str):
        if prior_precision == "marglik":
            raise ValueError("prior_precision='marglik' is now prior_precision='evidence'.")
        if prior_precision not in (AUTO, EVIDENCE):
            raise ValueError(
                f"Unknown prior_precision '{prior_precision}'; give a positive number, '{AUTO}' or '{EVIDENCE}'."
            )
        return prior_precision
    return checked_positive(prior_precision, "prior_precision")


def checked_structure(structure: Any) -> str:
    """Return whether there is one λ, or one per layer."""
    if structure not in ("scalar", "layer"):
        raise ValueError(f"Unknown prior_structure {structure!r}; choose 'scalar' or 'layer'.")
    return str(structure)


def checked_likelihood(likelihood: Any) -> Likelihood:
    """Return the likelihood of a name or an object."""
    if isinstance(likelihood, str):
        if likelihood not in LIKELIHOODS:
            names = ", ".join(f"'{name}'" for name in LIKELIHOODS)
            raise ValueError(f"Unknown likelihood '{likelihood}'; choose one of {names}, or an object.")
        return LIKELIHOODS[likelihood]()
    if not isinstance(likelihood, Likelihood):
        raise TypeError(
            "likelihood must be 'classification', 'regression', 'binary' or a likelihood object such as "
            f"sublaplace.Gaussian(0.1), not {likelihood!r}."
        )
    return likelihood


def checked_projector(projector: Any) -> Projector | None:
    """Return the projector of a name or a function; None: no subspace."""
    if projector is None or isinstance(projector, Projector):
        return projector
    if isinstance(projector, str):
        if projector == FULL.name:
            return FULL
        if projector not in PROJECTORS:
            raise ValueError(f"Unknown projector '{projector}'; choose one of {', '.join([*PROJECTORS, 'full'])}.")
        return PROJECTORS[projector]
    if not callable(projector):
        raise TypeError("projector must be a name or a function from a ProjectorContext to a Projection.")
    build: Builder = projector
    return Projector(None, build)


def checked_subspace_inputs(inputs: Any, labels_key: str) -> SubspaceInputs:
    """Return where X′ comes from; None: drawn from the training data."""
    if isinstance(inputs, str):
        hint = " 'perturbed' is now Perturbed(0.1)." if inputs == "perturbed" else ""
        raise ValueError(f"Unknown subspace_inputs '{inputs}'; give inputs, Drawn(200) or Perturbed(0.1).{hint}")
    if inputs is None:
        return Drawn()
    if isinstance(inputs, Drawn | Perturbed):
        if inputs.count is not None:
            checked_count(inputs.count, "count")
        if isinstance(inputs, Perturbed):
            checked_positive(inputs.scale, "scale")
        return inputs
    return Given(with_labels_under(labels_key, inputs))


def checked_resources(resources: Any) -> Resources:
    """Return the resources; None: the default."""
    if resources is None:
        return Resources()
    if not isinstance(resources, Resources):
        raise TypeError(f"resources must be Resources(…), not {resources!r}.")
    return resources


def require_cpu_for(folder: str | os.PathLike[str] | None, model: nn.Module) -> None:
    """Raise ValueError if vectors are to be kept in files for a model that is not on the CPU."""
    if folder is not None and any(p.device.type != "cpu" for p in model.parameters()):
        raise ValueError("scratch_folder keeps vectors in files, which only a model on the CPU can use.")
