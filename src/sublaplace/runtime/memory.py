"""How much memory there is, and a clear word before too much is asked for."""

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping

import torch

try:
    import resource
except ImportError:  # there is none on Windows
    resource = None  # type: ignore[assignment]


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
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
    """A quarter of what is free, or 1 GiB where the system does not tell."""
    free = available_bytes(device)
    return 2**30 if free is None else free // 4


def on_disk(size: int, dtype: torch.dtype, folder: str | os.PathLike[str]) -> torch.Tensor:
    """A vector of zeros in a file of `folder` that has no name any more: it is gone when the vector is.

    The system keeps as much of it in memory as there is room for.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix="sublaplace-") as file:
        file.truncate(size * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=size, dtype=dtype)


def require_disk(needed: int, folder: str | os.PathLike[str], what: str, remedy: str) -> None:
    """Raises MemoryError if `needed` bytes are not free in the file system of `folder`."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise MemoryError(f"{what} needs {readable(needed)}, but {readable(free)} are free in {folder}. {remedy}")


def fits(needed: int, device: torch.device) -> bool:
    """Whether `needed` bytes are there, as far as the system tells."""
    free = available_bytes(device)
    return free is None or needed <= free


def require(needed: int, device: torch.device, what: str, remedy: str) -> None:
    """Raises MemoryError, before anything is allocated, if `needed` bytes are not there."""
    free = available_bytes(device)
    if free is not None and needed > free:
        raise MemoryError(f"{what} needs {readable(needed)}, but {readable(free)} are free on {device}. {remedy}")


def grouped(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names, in order, in groups whose sizes together are within the limit; one that is not has its own."""
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
    """Bytes with a unit: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def peak_bytes(device: torch.device) -> int | None:
    """The most that this process (or its part of the device) has held so far; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type != "cpu" or resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
