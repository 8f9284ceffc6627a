"""Query free memory; fail before an allocation that cannot fit."""

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows does not have it
    resource = None  # type: ignore[assignment]


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of the device in bytes, or None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    free = [number for number in (_system_bytes(), _container_bytes()) if number is not None]
    return min(free) if free else None


def _container_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what the limit of a container leaves free; beyond it, the system ends the process."""
    for limit, used, statistics in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            free = int((root / limit).read_text()) - int((root / used).read_text())
            entries = dict(line.split() for line in (root / statistics).read_text().splitlines())
        except (OSError, ValueError):  # "max": without a limit
            continue
        return max(0, free + int(entries.get("inactive_file", 0)))  # cached files make room
    return None


def _system_bytes() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def default_budget(device: torch.device) -> int:
    """Return a quarter of the free memory, or 1 GiB if the system does not report it."""
    free = available_bytes(device)
    return 2**30 if free is None else free // 4


def on_disk(size: int, dtype: torch.dtype, folder: str | os.PathLike[str]) -> torch.Tensor:
    """Return a vector of zeros that is mapped to a file in `folder`.

    The file is already unlinked, so it is deleted together with the vector. The operating system caches as much of the
    file as fits into memory.

    Raises:
        MemoryError: if the disk is full.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix="sublaplace-") as file:
        file.truncate(size * dtype.itemsize)
        if size and hasattr(os, "posix_fallocate"):
            # Without blocks of its own, a page that does not fit onto the disk would end the process by a signal.
            try:
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            except OSError as error:
                raise MemoryError(
                    f"{readable(size * dtype.itemsize)} cannot be kept in {folder}: the disk is full, or {error}. Make "
                    "room, or choose a smaller dim."
                ) from error
        return torch.from_file(file.name, shared=True, size=size, dtype=dtype)


def require_disk(needed: int, folder: str | os.PathLike[str], what: str, remedy: str) -> None:
    """Raise MemoryError if `needed` bytes are not free in the file system of `folder`.

    Args:
        needed: the number of bytes.
        folder: any folder of the file system.
        what: the subject of the message, such as "The basis".
        remedy: a sentence that tells the user what to do.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise MemoryError(f"{what} needs {readable(needed)}, but {readable(free)} are free in {folder}. {remedy}")


def fits(needed: int, device: torch.device) -> bool:
    """Return whether `needed` bytes are free; True if the system does not report it."""
    free = available_bytes(device)
    return free is None or needed <= free


def require(needed: int, device: torch.device, what: str, remedy: str) -> None:
    """Raise MemoryError if `needed` bytes are not free on the device, before anything is allocated.

    Args:
        needed: the number of bytes.
        device: where the allocation will be.
        what: the subject of the message, such as "The exact GGN".
        remedy: a sentence that tells the user what to do.
    """
    free = available_bytes(device)
    if free is not None and needed > free:
        raise MemoryError(f"{what} needs {readable(needed)}, but {readable(free)} are free on {device}. {remedy}")


def grouped(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Split names, in order, into groups of total size at most `limit`; a larger item is a group by itself."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def readable(count: float) -> str:
    """Format a number of bytes with its unit, such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory of this process on the device so far, or None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type != "cpu" or resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
