"""A report as sections of paragraphs, lists, tables and figures, written as Markdown and as one HTML page."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class Strong(str):
    """A cell to be set in bold."""


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Bullets:
    """A list; `leads`, one per item or none at all, are set in bold before the items."""

    items: Sequence[str]
    leads: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """Cells are text; `labels` columns at the left name the row, all others hold numbers."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(
                    f"a row of {self.caption!r} has {len(row)} cells, its header {len(self.header)}: {row}"
                )


@dataclass(frozen=True)
class Figure:
    """A picture as SVG. `name` is the name of its file, `alt` says what it shows."""

    name: str
    alt: str
    svg: bytes


@dataclass(frozen=True)
class Figures:
    """Pictures side by side where there is room, with one caption."""

    caption: str
    figures: Sequence[Figure]


Block = Paragraph | Bullets | Table | Figures


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.title.lower()).strip("-")


@dataclass(frozen=True)
class Document:
    title: str
    introduction: str
    sections: Sequence[Section]

    def figures(self) -> list[Figure]:
        groups = [block for section in self.sections for block in section.blocks if isinstance(block, Figures)]
        return [figure for group in groups for figure in group.figures]

    def write(self, folder: Path) -> None:
        """Write REPORT.md with its figures as files, and report.html, which needs no other file."""
        pictures = folder / "figures"
        pictures.mkdir(parents=True, exist_ok=True)
        for figure in self.figures():
            (pictures / f"{figure.name}.svg").write_bytes(figure.svg)
        (folder / "REPORT.md").write_text(_markdown(self), encoding="utf-8")
        (folder / "report.html").write_text(_html(self), encoding="utf-8")


def _led(leads: Sequence[str], items: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(leads or [""] * len(items), items, strict=True))


# Markdown -------------------------------------------------------------------------------------------------------------


def _markdown(document: Document) -> str:
    parts = [f"# {document.title}", document.introduction]
    for section in document.sections:
        parts += [f"## {section.title}", *(_markdown_block(block) for block in section.blocks)]
    return "\n\n".join(parts) + "\n"


def _markdown_block(block: Block) -> str:
    match block:
        case Paragraph(text):
            return text
        case Bullets(items, leads):
            return "\n".join(f"- **{lead}** {item}" if lead else f"- {item}" for lead, item in _led(leads, items))
        case Figures(caption, figures):
            pictures = "\n".join(f"![{figure.alt}](figures/{figure.name}.svg)" for figure in figures)
            return f"{pictures}\n\n*{caption}*"
        case Table():
            marks = [":---" if column < block.labels else "---:" for column in range(len(block.header))]
            lines = [block.header, marks, *([_markdown_cell(cell) for cell in row] for row in block.rows)]
            return f"**{block.caption}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_cell(cell: str) -> str:
    text = cell.replace("|", "\\|")
    return f"**{text}**" if isinstance(cell, Strong) else text


# HTML -----------------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 86rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid #bbb; }
a { color: #0072b2; }
nav ul { columns: 18rem; padding-left: 1.2rem; }
p, li { max-width: 50rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: separate; border-spacing: 0; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .25rem 0; caption-side: top; }
caption span { position: sticky; left: 0; display: inline-block; max-width: min(50rem, calc(100vw - 2rem)); }
th, td { padding: .15rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e2e2e2; }
thead th { border-bottom: 2px solid #555; }
.label { text-align: left; }
th:first-child, td:first-child { position: sticky; left: 0; background: #fff; }
td { vertical-align: top; }
td.wide { white-space: normal; min-width: 12rem; }
figure { margin: 1.5rem 0; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(17rem, 100%), 1fr)); gap: .5rem; }
.pictures img { width: 100%; max-width: 28rem; height: auto; }
@media (max-width: 40rem) {
  th, td { padding: .15rem .35rem; }
  ul { padding-left: 1.2rem; }
}
figcaption { max-width: 50rem; font-size: .9rem; color: #333; }
"""
_WIDE = 40  # characters from which a cell may break into lines


def _html(document: Document) -> str:
    links = "".join(f'<li><a href="#{s.anchor}">{html.escape(s.title)}</a></li>' for s in document.sections)
    sections = "\n".join(
        f'<section id="{s.anchor}">\n<h2>{html.escape(s.title)}</h2>\n'
        + "\n".join(_html_block(block) for block in s.blocks)
        + "\n</section>"
        for s in document.sections
    )
    # The empty icon keeps browsers from asking for one.
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(document.title)}</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<h1>{html.escape(document.title)}</h1>
<p>{html.escape(document.introduction)}</p>
<nav><ul>{links}</ul></nav>
{sections}
</body>
</html>
"""


def _html_block(block: Block) -> str:
    match block:
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Bullets(items, leads):
            escaped = ((html.escape(lead), html.escape(item)) for lead, item in _led(leads, items))
            return "<ul>" + "".join(f"<li><b>{lead}</b> {item}</li>" for lead, item in escaped) + "</ul>"
        case Figures(caption, figures):
            pictures = "".join(
                f'<img alt="{html.escape(figure.alt, quote=True)}" '
                f'src="data:image/svg+xml;base64,{base64.b64encode(figure.svg).decode()}">'
                for figure in figures
            )
            below = f"<figcaption>{html.escape(caption)}</figcaption>"
            return f'<figure><div class="pictures">{pictures}</div>{below}</figure>'
        case Table():
            head = "".join(f"<th{_class(block, i, '')}>{html.escape(cell)}</th>" for i, cell in enumerate(block.header))
            body = "\n".join(
                "<tr>" + "".join(_html_cell(block, i, cell) for i, cell in enumerate(row)) + "</tr>"
                for row in block.rows
            )
            return (
                f'<div class="scroll"><table><caption><span>{html.escape(block.caption)}</span></caption>'
                f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
            )


def _html_cell(table: Table, column: int, cell: str) -> str:
    text = html.escape(cell)
    return f"<td{_class(table, column, cell)}>{f'<b>{text}</b>' if isinstance(cell, Strong) else text}</td>"


def _class(table: Table, column: int, cell: str) -> str:
    names = [name for name, holds in (("label", column < table.labels), ("wide", len(cell) > _WIDE)) if holds]
    return f' class="{" ".join(names)}"' if names else ""
