"""What `mkdocs build` takes from outside of docs/ (the report, pages made from scripts), and formulas as MathML."""

import ast
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
GALLERY = ["one_dimension", "two_moons", "rejected_predictions", "dead_parameters", "outside"]
# Formulas as GitHub shows them too: a block ```math … ```, and $`…`$ within a line.
FORMULA_BLOCK = re.compile(r"^```math\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
FORMULA = re.compile(r"\$`([^`]+)`\$")
PICTURE = re.compile(r'<p>(<img [^>]*src="([^"]+)"[^>]*>)</p>')


def on_files(files: Files, config: Any) -> Files:
    """Adds the self-contained report, so that pages can link to it, and the pages of the gallery."""
    report = ROOT / "results" / "report.html"
    if report.exists():
        files.append(File.generated(config, "report.html", abs_src_path=str(report)))
    for name in GALLERY:
        files.append(File.generated(config, f"gallery/{name}.md", content=page(name)))
    files.append(File.generated(config, "gallery/index.md", content=overview()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Formulas as MathML, which browsers show by themselves: no script, no font, nothing to fetch."""
    markdown = FORMULA_BLOCK.sub(
        lambda found: f'<div class="formula">{convert(found[1].strip(), display="block")}</div>', markdown
    )
    return FORMULA.sub(lambda found: f"<span>{convert(found[1])}</span>", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """A picture that stands alone can be opened by itself, to look closer on a small screen."""
    return PICTURE.sub(r'<p><a href="\2">\1</a></p>', html)


def page(name: str) -> str:
    """A script as a page: its text, its picture, its code."""
    title, text, code = _parts(name)
    run = f"`python examples/gallery/{name}.py` draws it:"
    return f"# {title}\n\n{text}\n\n![{title}](../images/gallery/{name}.png)\n\n{run}\n\n```python\n{code}\n```\n"


def overview() -> str:
    """All pictures on one page, each with the beginning of its text."""
    parts = ["# Gallery\n\nOne short script draws each picture, and stands on its page. `make gallery` runs them all."]
    for name in GALLERY:
        title, text, _ = _parts(name)
        picture = f"[![{title}](../images/gallery/{name}.png)]({name}.md)"
        first = text.split("\n\n")[0]
        parts.append(f"## {title}\n\n{first}\n\n{picture}\n\n[More, and the script]({name}.md)")
    parts.append(
        "## Unfamiliar images\n\nA network trained on clothes is shown digits. Which score tells?\n\n"
        "[![Scores of clothes and of digits](../images/out_of_distribution.png)](../out_of_distribution.md)\n\n"
        "[More, and the numbers](../out_of_distribution.md)"
    )
    return "\n\n".join(parts) + "\n"


def _parts(name: str) -> tuple[str, str, str]:
    """The title, the text and the code of a script of the gallery."""
    source = (ROOT / "examples" / "gallery" / f"{name}.py").read_text(encoding="utf-8")
    title, _, text = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    return title.removeprefix("# "), text.strip(), source.split('"""', 2)[2].strip()
