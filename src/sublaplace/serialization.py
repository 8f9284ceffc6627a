"""Fitted posteriors on disk: safetensors with a checksum over the whole file and a fingerprint of the model.

Loading never executes code. A file that is not ours, cut short, altered or made with another model is refused with what
is wrong. The checksum stands in the file's own header: it is the SHA-256 of the file with zeros in its place.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sublaplace.likelihoods import Categorical, Gaussian, Residuals
from sublaplace.parameters import ParameterLayout
from sublaplace.posterior import Posterior, SubspacePosterior
from sublaplace.precision import DensePrecision, DualPrecision
from sublaplace.projection import Basis, Subset
from sublaplace.survey import Survey

SCHEMA = 1
_EMPTY = "0" * 64
_MARK = b'"checksum":"'
_PIECE = 2**22


class SavedFileError(ValueError):
    """A saved posterior that cannot be used, with the reason."""


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Writes tensors and a description, atomically: the file is complete or not there."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    metadata = {"checksum": _EMPTY, "sublaplace": json.dumps({"schema": SCHEMA, **description})}
    try:
        save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, temporary, metadata)
        place = _checksum_place(temporary)
        digest = _digest(temporary, place)
        with open(temporary, "r+b") as file:
            file.seek(place)
            file.write(digest.encode())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: str | os.PathLike[str], device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description of an unaltered file."""
    source = Path(path)
    if not source.is_file():
        raise SavedFileError(f"There is no file at {source}.")
    place = _checksum_place(source)
    with open(source, "rb") as file:
        file.seek(place)
        expected = file.read(64)
    if _digest(source, place).encode() != expected:
        raise SavedFileError(f"{source} was altered or cut short: its checksum is wrong. Save the posterior again.")
    try:
        with safe_open(source, framework="pt", device=str(device)) as file:
            description = json.loads(file.metadata()["sublaplace"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SavedFileError(f"{source} is not a posterior saved by sublaplace: {error}.") from error
    if description.get("schema") != SCHEMA:
        raise SavedFileError(
            f"{source} has schema {description.get('schema')}, but this version of sublaplace reads schema {SCHEMA}."
        )
    return tensors, description


def _checksum_place(path: Path) -> int:
    """Where in the file the checksum stands."""
    with open(path, "rb") as file:
        head = file.read(_PIECE)
    start = head.find(_MARK)
    if start < 0:
        raise SavedFileError(f"{path} is not a posterior saved by sublaplace, or its beginning was altered.")
    return start + len(_MARK)


def _digest(path: Path, place: int) -> str:
    digest = hashlib.sha256()
    for start, piece in _pieces(path):
        inside = range(max(place - start, 0), min(place + 64 - start, len(piece)))
        if len(inside):
            piece = piece[: inside.start] + b"0" * len(inside) + piece[inside.stop :]
        digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        start = 0
        while piece := file.read(_PIECE):
            yield start, piece
            start += len(piece)


def posterior_tensors(posterior: Posterior) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A posterior as tensors and numbers."""
    numbers: dict[str, Any] = {"prior_precision": posterior.prior_precision}
    if isinstance(posterior, DensePrecision):
        return {"ggn": posterior.ggn}, {**numbers, "kind": "dense", "scale": posterior.scale}
    if isinstance(posterior, DualPrecision):
        return {"rows": posterior.rows}, {**numbers, "kind": "dual", "scale": posterior.scale}
    if not isinstance(posterior, SubspacePosterior):
        raise TypeError(f"A posterior of type {type(posterior).__name__} cannot be saved.")
    tensors = {"curvature": posterior.curvature, "gram": posterior.gram}
    numbers["scale"] = posterior.scale
    projection = posterior.projection
    if isinstance(projection, Subset):
        return {**tensors, "indices": projection.indices}, {**numbers, "kind": "subset"}
    if not isinstance(projection, Basis):
        raise TypeError(f"A projection of type {type(projection).__name__} cannot be saved; use Basis or Subset.")
    vectors = {f"basis.{name}": part for name, part in projection.vectors.items()}
    return {**tensors, **vectors}, {**numbers, "kind": "basis"}


def posterior_from(
    tensors: dict[str, Tensor], numbers: dict[str, Any], layout: ParameterLayout, dtype: torch.dtype
) -> Posterior:
    """The inverse of `posterior_tensors`."""
    prior, scale, kind = numbers["prior_precision"], numbers["scale"], numbers["kind"]
    if kind == "dense":
        return DensePrecision(layout, tensors["ggn"], prior, scale)
    if kind == "dual":
        return DualPrecision(layout, tensors["rows"], prior, scale)
    projection: Basis | Subset
    if kind == "subset":
        projection = Subset(layout, tensors["indices"], dtype)
    else:
        projection = Basis(layout, {name: tensors[f"basis.{name}"] for name in layout.names})
    return SubspacePosterior(projection, tensors["curvature"], tensors["gram"], scale, prior)


def survey_numbers(survey: Survey) -> dict[str, Any]:
    """A survey as numbers."""
    likelihood = survey.likelihood
    if not isinstance(likelihood, Gaussian | Categorical):
        raise TypeError("Only posteriors with a Gaussian or Categorical likelihood can be saved.")
    return {
        "num_data": survey.num_data,
        "num_outputs": survey.num_outputs,
        "noise_std": likelihood.noise_std if isinstance(likelihood, Gaussian) else None,
        "estimates_noise": survey.estimates_noise,
        "residuals": asdict(survey.residuals),
        "fixed_log_likelihood": survey.fixed_log_likelihood,
    }


def survey_from(numbers: dict[str, Any]) -> Survey:
    """The inverse of `survey_numbers`."""
    noise = numbers["noise_std"]
    return Survey(
        numbers["num_data"],
        numbers["num_outputs"],
        Categorical() if noise is None else Gaussian(noise),
        numbers["estimates_noise"],
        Residuals(**numbers["residuals"]),
        numbers["fixed_log_likelihood"],
    )


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """What identifies a trained model: each parameter's and buffer's name, shape, dtype, need of grad and SHA-256."""
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


def require_same_model(saved: dict[str, Any], model: nn.Module) -> None:
    """Raises SavedFileError with what differs between the model of a file and the given one."""
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
