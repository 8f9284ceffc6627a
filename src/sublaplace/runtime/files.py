"""Tensors and numbers in one file that is complete, unaltered and ours, or refused: safetensors with a checksum.

Reading never executes code. The checksum stands in the file's own header: it is the SHA-256 of the file with zeros in
its place.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SCHEMA = 3
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
            # Copies begin where torch wants tensors to begin in memory; the order of sums, and with it the last digit,
            # may depend on that.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no mapping)
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
