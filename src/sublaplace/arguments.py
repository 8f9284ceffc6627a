"""Checks of what users pass in, with messages that say what is wrong and what to do."""

import operator
import os
from collections.abc import Sequence
from math import isfinite
from typing import Any

from torch import Tensor, nn

from sublaplace.data import with_labels_under
from sublaplace.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Noise
from sublaplace.projectors.context import Projector
from sublaplace.projectors.names import PROJECTORS

AUTO = "auto"
"""dim: the smallest that guarantees the share `captured`."""


def checked_dim(dim: Any, least: int = 1) -> int:
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"dim must be an integer or '{AUTO}', not {dim!r}.")
    dim = operator.index(dim)
    if dim < 0:
        raise ValueError(f"dim must not be negative, but it is {dim}.")
    if dim < least:
        raise ValueError(
            "dim=0 leaves no uncertainty at all; choose at least 1, or complement='kfac' or 'diagonal', which then is "
            "the whole posterior."
        )
    return int(dim)


def checked_complement(complement: Any) -> str | None:
    if complement not in (None, "kfac", "diagonal"):
        raise ValueError(f"Unknown complement {complement!r}; choose 'kfac', 'diagonal' or None.")
    return complement


PERTURBED = "perturbed"
"""subspace_inputs: training inputs with noise."""

FITTED = "fitted"
"""complement_weight: the one that brings the posterior nearest to the full one."""


def checked_complement_weight(weight: Any, complement: str | None) -> float | str:
    if weight != 1.0 and complement is None:
        raise ValueError("complement_weight is of the curvature outside of the subspace, but there is no complement.")
    if isinstance(weight, str):
        if weight != FITTED:
            raise ValueError(f"Unknown complement_weight '{weight}'; give a positive number or '{FITTED}'.")
        return weight
    return checked_positive(weight, "complement_weight")


def checked_share(share: Any, name: str) -> float:
    value = checked_positive(share, name)
    if value >= 1:
        raise ValueError(f"{name} is a share of the trace and must lie between 0 and 1, but it is {value}.")
    return value


def checked_prior(prior_precision: Any) -> float:
    if isinstance(prior_precision, str):
        raise ValueError(f"Unknown prior_precision '{prior_precision}'; give a positive number or 'marglik'.")
    return checked_positive(prior_precision, "prior_precision")


def checked_positive(number: Any, name: str) -> float:
    try:
        value = float(number.detach() if isinstance(number, Tensor) else number)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be one positive number, not {number!r}.") from None
    if not (isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, but it is {value}.")
    return value


def checked_count(count: Any, name: str) -> int:
    if isinstance(count, bool) or not hasattr(count, "__index__") or operator.index(count) < 1:
        raise ValueError(f"{name} must be a positive integer, not {count!r}.")
    return operator.index(count)


def checked_tolerance(tolerance: Any) -> float | None:
    """The share of the output Hessians' trace that may be dropped; None for the default."""
    if tolerance is None:
        return None
    try:
        value = float(tolerance)
    except (TypeError, ValueError):
        raise TypeError(f"direction_tolerance must be a number, not {tolerance!r}.") from None
    if not 0 <= value < 1:
        raise ValueError(f"direction_tolerance is a share of a trace and must lie in [0, 1), but it is {value}.")
    return value


def checked_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed must be an integer, not {seed!r}.")
    return operator.index(seed)


PER_OUTPUT = "per-output"
"""noise_std: one σ for each output, estimated from the training residuals."""


def checked_noise(noise_std: Any) -> Noise | None:
    """σ as one number, a tuple of one for each output, or None where it is to be estimated."""
    if noise_std is None:
        return None
    if isinstance(noise_std, str):
        if noise_std != PER_OUTPUT:
            raise ValueError(f"Unknown noise_std '{noise_std}'; give a number, one for each output, or '{PER_OUTPUT}'.")
        return None
    if getattr(noise_std, "ndim", 0) or isinstance(noise_std, Sequence):
        return tuple(checked_positive(std, "noise_std") for std in noise_std)
    return checked_positive(noise_std, "noise_std")


def checked_likelihood(likelihood: Any, noise_std: Any) -> Likelihood:
    if isinstance(likelihood, str) and likelihood == "regression":
        noise = checked_noise(noise_std)
        return Gaussian(1.0 if noise is None else noise)
    if noise_std is not None:
        raise ValueError(
            "noise_std belongs to likelihood='regression'; classification has none, and a likelihood object its own."
        )
    if isinstance(likelihood, str):
        if likelihood not in _WITHOUT_NOISE:
            names = ", ".join(f"'{name}'" for name in ["regression", *_WITHOUT_NOISE])
            raise ValueError(f"Unknown likelihood '{likelihood}'; choose one of {names}, or an object.")
        return _WITHOUT_NOISE[likelihood]()
    if not hasattr(likelihood, "cotangents"):
        raise TypeError(
            "likelihood must be 'classification', 'regression', 'binary' or a likelihood object such as "
            f"sublaplace.Gaussian(0.1), not {likelihood!r}."
        )
    return likelihood


_WITHOUT_NOISE: dict[str, type[Categorical] | type[Bernoulli]] = {
    "classification": Categorical,
    "binary": Bernoulli,
    "multi-label": Bernoulli,
}


def checked_projector(projector: Any, complement: str | None, dim: Any) -> str | Projector:
    if isinstance(projector, str):
        if projector != "full" and projector not in PROJECTORS:
            raise ValueError(f"Unknown projector '{projector}'; choose one of {', '.join([*PROJECTORS, 'full'])}.")
        if projector == "full" and (complement is not None or dim == AUTO):
            raise ValueError("projector='full' leaves nothing outside: it goes without a complement and dim='auto'.")
        if dim == AUTO and not projector.startswith("lowrank"):
            raise ValueError("dim='auto' needs a low-rank projector, whose inputs it can hold back a part of.")
        return projector
    if not callable(projector):
        raise TypeError("projector must be a name or a function from a ProjectorContext to a Projection.")
    return projector


def checked_folder(folder: str | os.PathLike[str] | None, model: nn.Module) -> str | os.PathLike[str] | None:
    if folder is None:
        return None
    if not os.path.isdir(folder):
        raise ValueError(f"scratch_folder={os.fspath(folder)!r} is not a folder; create it first.")
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise ValueError("scratch_folder keeps vectors in files, which only a model on the CPU can use.")
    return folder


def checked_subspace_inputs(inputs: Any, labels_key: str) -> Any:
    if isinstance(inputs, str) and inputs != PERTURBED:
        raise ValueError(f"Unknown subspace_inputs '{inputs}'; give inputs, '{PERTURBED}' or None.")
    return inputs if inputs is None or isinstance(inputs, str) else with_labels_under(labels_key, inputs)


def optional_count(count: Any, name: str) -> int | None:
    return None if count is None else checked_count(count, name)
