"""Print as JSON which cases there are, and on what machine and with which versions they run."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import cases_peers
from protocol import NUM_THREADS

PACKAGES = [
    "sublaplace",
    "torch",
    "laplace-torch",
    "curvlinops-for-pytorch",
    "backpack-for-pytorch",
    "asdfghjkl",
]


def our_cases() -> list[str]:
    if importlib.util.find_spec("cases_ours") is None:
        return []
    import cases_ours

    return list(cases_ours.CASES)


def proc_field(path: str, field: str) -> str:
    lines = Path(path).read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith(field))


def main() -> None:
    gigabytes = int(proc_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20
    description = {
        "cases": [*our_cases(), *cases_peers.CASES],
        "machine": {
            "processor": proc_field("/proc/cpuinfo", "model name"),
            "cores": os.cpu_count(),
            "threads used": NUM_THREADS,
            "memory": f"{gigabytes:.0f} GB",
            "system": platform.system(),
        },
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    }
    print(json.dumps(description))


if __name__ == "__main__":
    main()
