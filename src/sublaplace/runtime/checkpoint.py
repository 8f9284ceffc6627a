"""A fit on disk while it runs, so that a killed one goes on where it was.

A checkpoint is a folder: `about.json` says what fit it belongs to, and each stage of the fit has a file of its own with
a checksum, written atomically. What is put aside are plain sums over the batches read so far, so going on from them
adds the same numbers in the same order: on a CPU the result is that of an undisturbed fit, bit for bit.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from sublaplace.data.batches import batches
from sublaplace.data.loaders import shuffles
from sublaplace.runtime import files as checked_file
from sublaplace.runtime.files import SavedFileError

SECONDS_BETWEEN_WRITES = 10.0
_WRITING_SHARE = 0.05  # of the time at most


class Sums(Protocol):
    """What one pass over the data adds up."""

    def tensors(self) -> dict[str, Tensor]:
        """The sums so far, unnormalised."""

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Goes on from sums that `tensors` gave."""


class Checkpoint:
    """The folder of one fit, described by `identity`: begun anew where there is none, refused if it is another's."""

    def __init__(self, folder: str | os.PathLike[str], identity: dict[str, Any], device: torch.device) -> None:
        self.folder = Path(folder)
        self._device = device
        self._last_write = time.monotonic()
        self._seconds_of_write = 0.0
        if self.folder.exists() and not self.folder.is_dir():
            raise SavedFileError(f"{folder} is a file; a checkpoint is a folder. Choose another path.")
        identity = json.loads(json.dumps(identity))
        about, begun = self.folder / "about.json", self.folder / ".about.json.tmp"
        if about.exists():
            self.identity = self._same(identity, about)
        elif self.folder.exists() and any(path != begun for path in self.folder.iterdir()):
            raise SavedFileError(f"{folder} is not empty and not a checkpoint of sublaplace. Choose another path.")
        else:
            self.identity = identity
            self.folder.mkdir(parents=True, exist_ok=True)
            begun.write_text(json.dumps(identity))
            os.replace(begun, about)

    def _same(self, identity: dict[str, Any], about: Path) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(about.read_text())
        except ValueError as error:
            raise SavedFileError(f"{about} is damaged. Delete the folder and fit anew.") from error
        for key in sorted(identity.keys() | found.keys()):
            if key != "memory_budget" and identity.get(key) != found.get(key):
                then, now = (str(values.get(key))[:60] for values in (found, identity))
                detail = "" if key == "model" else f" ({then} then, {now} now)"
                raise SavedFileError(
                    f"The checkpoint in {self.folder} belongs to another fit: its {key} differs{detail}. "
                    "Delete the folder or choose another path."
                )
        return found

    def read(self, stage: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What was written for a stage; None if nothing was."""
        path = self._path(stage)
        return checked_file.read(path, self._device) if path.exists() else None

    def write(self, stage: str, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        start = time.monotonic()
        checked_file.write(self._path(stage), tensors, numbers)
        self._last_write = time.monotonic()
        self._seconds_of_write = self._last_write - start

    def due(self) -> bool:
        """Whether it is time to write: not too often, and never more than a twentieth of the time."""
        pause = max(SECONDS_BETWEEN_WRITES, self._seconds_of_write / _WRITING_SHARE)
        return time.monotonic() - self._last_write >= pause

    def remove(self) -> None:
        """The fit is done."""
        shutil.rmtree(self.folder)

    def _path(self, stage: str) -> Path:
        return self.folder / f"{stage.replace(' ', '-')}.safetensors"


class Fingerprint:
    """A running digest of data, to tell whether the same batches come in the same order."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, data: Any) -> None:
        for leaf in tree_flatten(data)[0]:
            if isinstance(leaf, Tensor):
                self._digest.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
                self._digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            else:
                self._digest.update(repr(leaf).encode())

    def text(self) -> str:
        return self._digest.hexdigest()


def fingerprint_of(data: Any) -> str:
    """The digest of one nesting of tensors."""
    digest = Fingerprint()
    digest.add(data)
    return digest.text()


def fingerprint(loader: Iterable[Any]) -> str:
    """The digest of all batches. Cost: reads the data once."""
    digest = Fingerprint()
    for batch in batches(loader):
        digest.add(tuple(batch))
    return digest.text()


def require_fixed_order(loader: Iterable[Any]) -> None:
    """Refuses a loader that shuffles, as far as one can tell before reading it all."""
    shuffled = shuffles(loader)
    if not shuffled:
        first, again = (next(batches(loader), ()) for _ in range(2))
        shuffled = fingerprint_of(tuple(first)) != fingerprint_of(tuple(again))
    if shuffled:
        raise ValueError(other_order("It shuffles."))


def other_order(evidence: str) -> str:
    return (
        f"A checkpoint needs a loader that gives the same batches in the same order every time. {evidence} A fit that "
        "goes on in the middle would see some inputs twice and others never: use shuffle=False, or no checkpoint."
    )
