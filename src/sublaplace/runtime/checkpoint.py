"""Checkpoints on disk, from which an interrupted fit resumes.

A checkpoint is a folder. Its file `about.json` identifies the fit. Every stage of the fit has a file with a checksum,
written atomically. The stages hold plain sums over the batches read so far, so a resumed fit adds the same numbers in
the same order. On a CPU, a resumed fit and an uninterrupted fit agree bit for bit.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from sublaplace.data.batches import batches
from sublaplace.data.loaders import shuffles
from sublaplace.runtime import files as checked_file
from sublaplace.runtime.files import SavedFileError
from sublaplace.runtime.warning import warn

SECONDS_BETWEEN_WRITES = 10.0
_WRITING_SHARE = 0.05  # largest fraction of the time spent on writing


class Sums(Protocol):
    """Sums accumulated in one pass over the data."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums so far, unnormalised."""

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Resume from the sums that `tensors` returned."""


class Checkpoint:
    """The checkpoint folder of one fit.

    The folder is created if it does not exist.

    Args:
        folder: where the checkpoint is.
        identity: what the fit depends on, as values that JSON can hold.
        device: where `read` puts tensors.

    Raises:
        SavedFileError: if the folder holds another fit's checkpoint, a damaged checkpoint or other files.
    """

    def __init__(self, folder: str | os.PathLike[str], identity: dict[str, Any], device: torch.device) -> None:
        self.folder = Path(folder).expanduser()
        self._device = device
        self._last_write = time.monotonic()
        self._seconds_of_write = 0.0
        self._usable = True
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
            with checked_file.explained(self.folder, "written"):
                self.folder.mkdir(parents=True, exist_ok=True)
                begun.write_text(json.dumps(identity))
                os.replace(begun, about)

    def _same(self, identity: dict[str, Any], about: Path) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(about.read_text())
        except ValueError as error:
            raise SavedFileError(f"{about} is damaged. Delete the folder and fit again.") from error
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
        """Return the tensors and numbers written for a stage, or None if there are none."""
        path = self._path(stage)
        return checked_file.read(path, self._device) if path.exists() else None

    def write(self, stage: str, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Write the tensors and numbers of a stage, atomically.

        If it cannot be written, a warning says so, and nothing is written from then on: a fit is worth more than its
        checkpoint. What was written before stays valid.
        """
        if not self._usable:
            return
        start = time.monotonic()
        try:
            checked_file.write(self._path(stage), tensors, numbers)
        except SavedFileError as error:
            self._usable = False
            warn(f"{error} The fit goes on without a checkpoint.")
            return
        self._last_write = time.monotonic()
        self._seconds_of_write = self._last_write - start

    def due(self) -> bool:
        """Return whether it is time to write, so that writing takes at most a twentieth of the time."""
        pause = max(SECONDS_BETWEEN_WRITES, self._seconds_of_write / _WRITING_SHARE)
        return self._usable and time.monotonic() - self._last_write >= pause

    def remove(self) -> None:
        """Delete the folder, after a completed fit; if that fails, a warning says so.

        What identifies the fit goes last: a process that is killed meanwhile leaves a folder that a fit can still use.
        """
        about = self.folder / "about.json"
        try:
            for path in self.folder.iterdir():
                if path != about:
                    path.unlink()
            about.unlink()
            self.folder.rmdir()
        except OSError as error:
            warn(f"The fit is complete, but its checkpoint in {self.folder} cannot be removed ({error}); delete it.")

    def _path(self, stage: str) -> Path:
        return self.folder / f"{stage.replace(' ', '-')}.safetensors"


class Fingerprint:
    """A running digest of data, which shows whether a loader repeats the same batches in the same order."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, data: Any) -> None:
        """Add a tensor or any nesting of tensors to the digest."""
        for leaf in tree_flatten(data)[0]:
            if isinstance(leaf, Tensor):
                self._digest.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
                self._digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            elif hasattr(leaf, "__array__"):
                self._digest.update(np.asarray(leaf).tobytes())
            else:  # the text of other objects may hold their address
                known = leaf is None or isinstance(leaf, str | bytes | int | float)
                self._digest.update(repr(leaf if known else type(leaf)).encode())

    def text(self) -> str:
        """Return the digest in hexadecimal."""
        return self._digest.hexdigest()


def fingerprint_of(data: Any) -> str:
    """Return the digest of one nesting of tensors."""
    digest = Fingerprint()
    digest.add(data)
    return digest.text()


def fingerprint(loader: Iterable[Any]) -> str:
    """Return the digest of all batches. Cost: one read of the data."""
    digest = Fingerprint()
    for batch in batches(loader):
        digest.add(tuple(batch))
    return digest.text()


def require_fixed_order(loader: Iterable[Any]) -> None:
    """Raise ValueError if a loader shuffles, judging by its sampler and its first batch."""
    shuffled = shuffles(loader)
    if not shuffled:
        first, again = (next(batches(loader), ()) for _ in range(2))
        shuffled = fingerprint_of(tuple(first)) != fingerprint_of(tuple(again))
    if shuffled:
        raise ValueError(other_order("It shuffles."))


def other_order(evidence: str) -> str:
    """Return the error message for a loader whose order changes, with `evidence` as one of its sentences."""
    return (
        f"A checkpoint needs a loader that gives the same batches in the same order every time. {evidence} A resumed "
        "fit would see some inputs twice and others never. Use shuffle=False, or no checkpoint."
    )
