"""Make the virtual environment in which sublaplace and its peers are measured side by side.

Run ``python benchmarks/make_environment.py``. Again, it does nothing unless the requirements have changed.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "peers_requirements.txt"
ENVIRONMENT = HERE / ".venv-peers"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
INSTALLED_REQUIREMENTS = ENVIRONMENT / "installed_requirements.txt"


def pip(*arguments: str) -> None:
    subprocess.run([PYTHON, "-m", "pip", *arguments], check=True, cwd=HERE)


def has_module(name: str) -> bool:
    return subprocess.run([PYTHON, "-c", f"import {name}"], capture_output=True).returncode == 0


def make_environment() -> Path:
    """Install what is missing and return the environment's Python interpreter."""
    requirements = REQUIREMENTS.read_text()
    if not PYTHON.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    if not INSTALLED_REQUIREMENTS.exists() or INSTALLED_REQUIREMENTS.read_text() != requirements:
        pip("install", "-r", REQUIREMENTS.name)
        pip("uninstall", "-y", "torchvision")
        INSTALLED_REQUIREMENTS.write_text(requirements)
    if not has_module("sublaplace"):
        pip("install", "--no-deps", "--editable", "..")
    return PYTHON


if __name__ == "__main__":
    print(make_environment())
