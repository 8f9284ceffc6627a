"""What `mkdocs build` takes from outside of docs/: the report of the reproduction, and pages made from scripts."""

import ast
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
GALLERY = {
    "one_dimension": "gallery/one_dimension.png",
    "two_moons": "gallery/two_moons.png",
    "rejected_predictions": "gallery/rejected_predictions.png",
    "dead_parameters": "gallery/dead_parameters.png",
    "outside": "gallery/outside.png",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the self-contained report, so that pages can link to it, and a page for every script of the gallery."""
    report = ROOT / "results" / "report.html"
    if report.exists():
        files.append(File.generated(config, "report.html", abs_src_path=str(report)))
    for name, picture in GALLERY.items():
        files.append(File.generated(config, f"gallery/{name}.md", content=page(name, picture)))
    return files


def page(name: str, picture: str) -> str:
    """A script as a page: its text, its picture, its code."""
    source = (ROOT / "examples" / "gallery" / f"{name}.py").read_text()
    text = ast.get_docstring(ast.parse(source)) or ""
    title = text.splitlines()[0].removeprefix("# ")
    code = source.split('"""', 2)[2].strip()
    run = f"`python examples/gallery/{name}.py` makes it."
    return f"{text}\n\n![{title}](../images/{picture})\n\n{run}\n\n```python\n{code}\n```\n"
