"""Safetensors files with a checksum: a file that is incomplete, altered or foreign is refused.

Reading never executes code. The header holds the checksum, which is the SHA-256 of the file with zeros in place of the
checksum itself.
"""

import errno
import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SCHEMA = 4
_EMPTY = "0" * 64
_MARK = b'"checksum":"'
_PIECE = 2**22


class SavedFileError(ValueError):
    """An error that says why a saved posterior or checkpoint cannot be used."""


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write tensors and a description atomically: the file is either complete, or as it was before.

    An existing file keeps its mode, and a symbolic link keeps pointing to the file. ``~`` is the home folder.

    Raises:
        SavedFileError: if it cannot be written, with the reason.
    """
    target = Path(os.path.realpath(Path(path).expanduser()))
    with explained(target, "written"):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder")
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        metadata = {"checksum": _EMPTY, "sublaplace": json.dumps({"schema": SCHEMA, **description})}
        try:
            temporary.touch()
            mode = (target if target.exists() else temporary).stat().st_mode
            save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, temporary, metadata)
            place = _checksum_place(temporary)
            digest = _digest(temporary, place)
            with open(temporary, "r+b") as file:
                file.seek(place)
                file.write(digest.encode())
            temporary.chmod(stat.S_IMODE(mode))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def explained(path: Path, what: str) -> Iterator[None]:
    """Turn an error of the operating system into a SavedFileError, which says why a file cannot be `what`."""
    try:
        yield
    except OSError as error:
        raise SavedFileError(f"{path} cannot be {what}: {_reason(error.errno, path) or error}") from error
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found.group(1)) if found else None
        raise SavedFileError(f"{path} cannot be {what}: {_reason(number, path) or error}") from error


def _reason(number: int | None, path: Path) -> str | None:
    """Return why the operating system refused to use a file, and what to do about it."""
    match number:
        case errno.ENOENT | errno.ENOTDIR:
            return f"the folder {path.parent} does not exist. Create it first."
        case errno.EISDIR:
            return "it is a folder. Give the name of a file."
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return "the disk is full, or files may not grow so large. Make room, or choose another path."
        case errno.EROFS:
            return "the file system is read-only. Choose another path."
        case errno.EACCES | errno.EPERM:
            return (
                "there is no permission to do so. Change the mode of the folder and the file, or choose another path."
            )
        case None:
            return None
        case _:
            return f"{os.strerror(number)}."


def read(path: str | os.PathLike[str], device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the description of an unaltered file.

    Raises:
        SavedFileError: if the file is missing, altered, incomplete, foreign or of another schema.
    """
    source = Path(path).expanduser()
    if not source.is_file():
        raise SavedFileError(f"There is no file at {source}.")
    with explained(source, "read"):
        return _read(source, device)


def _read(source: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    place = _checksum_place(source)
    with open(source, "rb") as file:
        file.seek(place)
        expected = file.read(64)
    if _digest(source, place).encode() != expected:
        raise SavedFileError(f"{source} was altered or cut short: its checksum is wrong. Save the posterior again.")
    try:
        with safe_open(source, framework="pt", device="cpu") as file:
            description = json.loads(file.metadata()["sublaplace"])
            # A copy has the memory alignment that torch gives to new tensors. The order of sums, and with it the last
            # digit, may depend on the alignment.
            tensors = {name: file.get_tensor(name).clone().to(device) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SavedFileError(f"{source} is not a posterior saved by sublaplace: {error}.") from error
    if description.get("schema") != SCHEMA:
        raise SavedFileError(
            f"{source} has schema {description.get('schema')}, but this version of sublaplace reads schema {SCHEMA}."
        )
    return tensors, description


def _checksum_place(path: Path) -> int:
    """Return the offset of the checksum in the file."""
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
