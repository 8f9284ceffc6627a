"""What `mkdocs build` takes from outside of docs/ (the report, pages made from scripts), and formulas as MathML.

Documents link to files of the repository, so that every link works where the repository is read. On the site, links to
`SHOWN` files lead to their pages.
"""

import ast
import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
GALLERY = ["one_dimension", "two_moons", "rejected_predictions", "dead_parameters", "outside", "one_call"]
# Files of the repository that the site shows under another address.
DOCUMENTS = {"DESIGN.md": "design.md", "benchmarks/RESULTS.md": "benchmarks.md"}
SHOWN = (
    DOCUMENTS
    | {"results/REPORT.md": "report.html"}
    | {f"examples/gallery/{name}.py": f"gallery/{name}.md" for name in GALLERY}
)
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(?=[)#])")
# Tables that programs write; a link to one of them, on a line of its own, is replaced by the table.
TABLES = ("demo_table.md", "sklearn_comparison.md")
TABLE = re.compile(rf"^\[[^]]*\]\(({'|'.join(TABLES)})\)$", flags=re.MULTILINE)
# Formulas as GitHub shows them too: a block ```math … ```, and $`…`$ within a line.
FORMULA_BLOCK = re.compile(r"^```math\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
FORMULA = re.compile(r"\$`([^`]+)`\$")
PICTURE = re.compile(r'<p>(<img [^>]*src="([^"]+)"[^>]*>)</p>')


def on_files(files: Files, config: Any) -> Files:
    """Adds the self-contained report, so that pages can link to it, documents, and the pages of the gallery."""
    report = ROOT / "results" / "report.html"
    if report.exists():
        files.append(File.generated(config, "report.html", abs_src_path=str(report)))
    for name in GALLERY:
        files.append(File.generated(config, f"gallery/{name}.md", content=page(name)))
    for source, address in DOCUMENTS.items():
        files.append(File.generated(config, address, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Tables in their place, links to the site's pages, and formulas as MathML."""
    markdown = TABLE.sub(lambda found: (ROOT / "docs" / found[1]).read_text(encoding="utf-8"), markdown)
    return with_formulas(with_links(markdown, page.file.src_uri))


def with_links(markdown: str, address: str) -> str:
    """Links to files that the site shows elsewhere, as links to their pages; `address` is that of the page."""
    source = {page: file for file, page in DOCUMENTS.items()}.get(address, f"docs/{address}")

    def link(found: re.Match[str]) -> str:
        file = os.path.normpath(os.path.join(os.path.dirname(source), found[1]))
        if file not in SHOWN and source.startswith("docs/"):
            return found[1]
        return os.path.relpath(SHOWN.get(file, os.path.relpath(file, "docs")), os.path.dirname(address) or ".")

    return LINK.sub(link, markdown)


def with_formulas(markdown: str) -> str:
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


def _parts(name: str) -> tuple[str, str, str]:
    """The title, the text and the code of a script of the gallery."""
    source = (ROOT / "examples" / "gallery" / f"{name}.py").read_text(encoding="utf-8")
    title, _, text = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    return title.removeprefix("# "), text.strip(), source.split('"""', 2)[2].strip()
