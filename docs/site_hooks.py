"""What `mkdocs build` takes from outside of docs/: the report of the reproduction."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Adds the self-contained report, so that pages can link to it."""
    report = ROOT / "results" / "report.html"
    if report.exists():
        files.append(File.generated(config, "report.html", abs_src_path=str(report)))
    return files
