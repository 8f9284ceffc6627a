"""Checks of the arguments of `SubspaceLaplace`: what is wrong with each, and what to do."""

import operator
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from sublaplace.data.loaders import with_labels_under
from sublaplace.data.subspace_inputs import Drawn, Given, Perturbed, SubspaceInputs
from sublaplace.model.layer_priors import PriorPrecision
from sublaplace.model.likelihoods.base import LIKELIHOODS, Likelihood
from sublaplace.options import AUTO, EVIDENCE, Captured, Complement, Options, Resources
from sublaplace.projectors.registry import FULL, PROJECTORS, Builder, Projector
from sublaplace.runtime.checks import checked_count, checked_positive, checked_seed


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
        prior_structure="layer" if isinstance(prior_precision, Mapping) else checked_structure(prior_structure),
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
    if options.prior_structure == "layer" and isinstance(options.prior_precision, float):
        raise ValueError(
            "prior_structure='layer' has no effect with a given prior_precision: the evidence chooses one λ per layer. "
            "Leave prior_precision out, or give one λ for each parameter by name."
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


def checked_prior(prior_precision: Any) -> PriorPrecision | str:
    """Return λ, one for each parameter by name, "auto" or "evidence"."""
    if isinstance(prior_precision, Mapping):
        return {name: checked_positive(prior, f"prior_precision['{name}']") for name, prior in prior_precision.items()}
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
