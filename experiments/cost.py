"""The cost of building a posterior: processor time and memory."""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Cost:
    """Seconds of processor time, and memory (MB) above what was in use before: at the peak, and held by the result."""

    seconds: float
    peak_memory_mb: float
    kept_memory_mb: float

    def then(self, other: "Cost") -> "Cost":
        """Return the cost of both, one after the other."""
        return Cost(
            self.seconds + other.seconds,
            max(self.peak_memory_mb, self.kept_memory_mb + other.peak_memory_mb),
            self.kept_memory_mb + other.kept_memory_mb,
        )


def measured(build: Callable[[], Result]) -> tuple[Result, Cost]:
    """Return the result of `build` and its cost. Linux only: memory is read from /proc."""
    ctypes.CDLL(None).malloc_trim(0)  # gives freed memory back, so that it does not hide new use
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    # Processor time: with one thread, it hardly depends on what else is running on this machine.
    before, start = _memory_mb("VmRSS"), time.process_time()
    result = build()
    seconds = time.process_time() - start
    return result, Cost(seconds, _memory_mb("VmHWM") - before, _memory_mb("VmRSS") - before)


def _memory_mb(field: str) -> float:
    """Return VmRSS (resident memory now) or VmHWM (its peak) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))
