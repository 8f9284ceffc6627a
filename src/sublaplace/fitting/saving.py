"""Fitted posteriors in files, and a fingerprint of the model that they belong to."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sublaplace.curvature.exact_precision import DensePrecision, DualPrecision
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.fitting.fitted import Fitted
from sublaplace.fitting.survey import Survey
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.attributes import Settings, as_texts, changed_setting, settings_of
from sublaplace.model.fingerprint import described_modules
from sublaplace.model.likelihoods.base import likelihood_from
from sublaplace.model.parameters import ParameterLayout
from sublaplace.options import Options, Resources, option_from, plain_numbers
from sublaplace.posteriors.certificate import Certificate
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.posteriors.protocol import Posterior
from sublaplace.posteriors.subspace import SubspacePosterior
from sublaplace.projectors.registry import restored_projector
from sublaplace.runtime.files import SavedFileError

POSTERIORS = {
    cls.kind: cls for cls in (SubspacePosterior, ComplementedPosterior, BlockPrecision, DensePrecision, DualPrecision)
}
"""By the kind that files name."""


def stored(fitted: Fitted, options: Options, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file, and its description in plain numbers and texts."""
    tensors, numbers = fitted.posterior.stored()
    description = {
        "posterior": numbers,
        "certificate": None,
        "model": model_fingerprint(model),
        "modules": described_modules(model),
        "settings": as_texts(settings_of(model)),
        "survey": fitted.survey.numbers(),
        "likelihood": options.likelihood.numbers(),  # as given: whether σ is to be estimated
        "projector": None if options.projector is None else options.projector.label,
        "dim": plain_numbers(options.dim) if _asks_for_dim(options) else None,
        "complement": plain_numbers(options.complement),
        "seed": options.seed,
        "direction_tolerance": options.resources.direction_tolerance,
        "curvature_samples": options.resources.curvature_samples,
        "prior_precision": options.prior_precision,
        "prior_structure": options.prior_structure,
        "chosen_by": fitted.chosen_by,
        "dim_note": fitted.dim_note,
        "drawn_with": fitted.drawn_with,
        "units": fitted.units,
    }
    if fitted.certificate is not None:
        products, description["certificate"] = fitted.certificate.stored()
        tensors = tensors | products
    return tensors, description


def arguments_from(found: dict[str, Any], model: nn.Module, memory_budget: int | None) -> dict[str, Any]:
    """Return the arguments of `SubspaceLaplace` that a description names, for the model that it belongs to."""
    require_same_model(found["model"], found["modules"], found.get("settings"), model)
    return {
        "likelihood": likelihood_from(found["likelihood"]),
        "dim": option_from(found["dim"]),
        "projector": restored_projector(found["projector"]),
        "complement": option_from(found["complement"]),
        "prior_precision": found["prior_precision"],
        "prior_structure": found["prior_structure"],
        "seed": found["seed"],
        "resources": Resources(
            memory_budget,
            direction_tolerance=found["direction_tolerance"],
            curvature_samples=found["curvature_samples"],
        ),
    }


def fitted_from(
    tensors: dict[str, Tensor], found: dict[str, Any], linearization: Linearization, layout: ParameterLayout
) -> Fitted:
    """Return what was fitted, from the tensors and the description of a file."""
    posterior = posterior_from(tensors, found["posterior"], layout, linearization.dtype)
    certificate = None
    if found["certificate"] is not None:
        certificate = Certificate.restored(tensors, found["certificate"], layout, linearization.dtype)
    about = {key: found[key] for key in ("units", "chosen_by", "dim_note")}
    about["drawn_with"] = found.get("drawn_with")  # files of earlier versions have none
    return Fitted(linearization, posterior, Survey.from_numbers(found["survey"]), certificate, **about)


@contextmanager
def complete(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a missing or odd entry of a description into a SavedFileError."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise SavedFileError(f"{path} is not complete: {error} is missing or odd.") from error


def posterior_from(
    tensors: dict[str, Tensor], numbers: dict[str, Any], layout: ParameterLayout, dtype: torch.dtype
) -> Posterior:
    """Return the posterior of `Posterior.stored`."""
    return POSTERIORS[numbers["kind"]].restored(tensors, numbers, layout, dtype)


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return what identifies a trained model.

    That is the name, shape, dtype, need of grad and SHA-256 of each parameter and buffer. Cost: reads them once.
    """
    described = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        value = tensor.detach().cpu().contiguous()
        content = value.reshape(-1).view(torch.uint8) if value.numel() else value.reshape(-1)
        described[name] = [
            list(value.shape),
            str(value.dtype),
            bool(tensor.requires_grad),
            hashlib.sha256(content.numpy().tobytes()).hexdigest(),
        ]
    return described


def require_same_model(
    saved: dict[str, Any], modules: dict[str, str], settings: Settings | None, model: nn.Module
) -> None:
    """Raise SavedFileError with what differs between the model of a file and the given one.

    Args:
        saved: the `model_fingerprint` of the file.
        modules: what each module was, see `described_modules`.
        settings: what the modules held, see `settings_of`; None for files of earlier versions.
        model: the given model.
    """
    given = model_fingerprint(model)
    missing, extra = sorted(saved.keys() - given.keys()), sorted(given.keys() - saved.keys())
    if missing or extra:
        raise SavedFileError(
            "The posterior was saved with another model: "
            f"parameters that the given model lacks: {missing[:3] or 'none'}, that the saved one lacked: "
            f"{extra[:3] or 'none'}."
        )
    for place, what in enumerate(("shape", "dtype", "requires_grad flag", "values")):
        for name, entry in saved.items():
            if entry[place] != given[name][place]:
                detail = "" if what == "values" else f": {entry[place]} when saved, {given[name][place]} now"
                raise SavedFileError(f"The posterior was saved with another model: '{name}' has other {what}{detail}.")
    now = described_modules(model)
    for name in [*modules, *now]:
        if modules.get(name) != now.get(name):
            raise SavedFileError(
                f"The posterior was saved with another model: the module '{name}' was "
                f"{modules.get(name, 'missing')} when saved and is {now.get(name, 'missing')} now."
            )
    if settings is None:
        return
    if changed := changed_setting(settings, as_texts(settings_of(model)), "when saved"):
        raise SavedFileError(
            f"The posterior was saved with another model: {changed[0].lower()}{changed[1:]} is not the same. Give the "
            "model the settings that it had, or fit again."
        )


def _asks_for_dim(options: Options) -> bool:
    projector = options.projector
    return projector is not None and projector.reduces and not projector.own_dim and not options.default_dim
