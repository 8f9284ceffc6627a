"""The code in the documents runs as it stands there."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sublaplace import PROJECTORS, former_names
from sublaplace.jacobians.rules import RULES
from sublaplace.model.likelihoods.base import LIKELIHOODS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

LINKING = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "benchmarks/RESULTS.md"))]
LINKING += [*sorted((ROOT / "results").glob("*.md")), *sorted((ROOT / "experiments").glob("*.md"))]


@pytest.fixture(autouse=True)
def registries_as_before():
    """Pages that teach how to extend the library add to its tables; other tests must not see that."""
    tables = (PROJECTORS, LIKELIHOODS, RULES)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def blocks(document):
    return [code for code, _ in runs(document)]


def runs(document):
    """Every block of code, with the output that the document shows below it, if any."""
    return re.findall(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", document.read_text(), flags=re.DOTALL)


NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*")


def is_shown_truly(shown, printed):
    """Whether the words agree, and the numbers up to what differs between machines."""
    words = [NUMBER.sub("#", text).split() for text in (shown, printed)]
    numbers = [[float(found.replace(",", "")) for found in NUMBER.findall(text)] for text in (shown, printed)]
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=0.1, abs=0.02)


def pictures(document):
    return [document.parent / path for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", document.read_text())]


@pytest.mark.parametrize("document", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_code_in_the_documents_runs_and_prints_what_they_show(document, capsys):
    if "sublaplace.botorch" in "".join(blocks(document)):
        pytest.importorskip("botorch")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = torch.randn(60, 4)
        data = TensorDataset(inputs, inputs[:, :3].argmax(1))
        names = {
            "model": nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)),
            "train_loader": DataLoader(data, batch_size=20),
        }
        for code, shown in runs(document):
            if "sublaplace.lightning" in code and find_spec("lightning") is None:
                continue
            capsys.readouterr()
            exec(code, names)
            assert not shown or is_shown_truly(shown, capsys.readouterr().out)


def test_pages_that_teach_have_code():
    names = {page.name for page in PAGES if blocks(page)}
    assert names >= {
        "README.md",
        "DESIGN.md",
        "adding_a_likelihood.md",
        "adding_a_projector.md",
        "huggingface.md",
        "migration.md",
        "out_of_distribution.md",
        "sklearn.md",
        "training_loops.md",
    }


@pytest.mark.parametrize("document", [page for page in PAGES if pictures(page)], ids=lambda page: page.name)
def test_the_pictures_of_the_documents_exist(document):
    assert all(picture.stat().st_size > 10_000 for picture in pictures(document))


@pytest.mark.parametrize(
    "document", [ROOT / "CHANGELOG.md", ROOT / "docs" / "migration.md"], ids=lambda page: page.name
)
def test_every_former_name_is_explained(document):
    text = document.read_text()
    missing = [
        name for name in [*former_names._ARGUMENTS, *former_names._MEMBERS] if not re.search(rf"`{name}\b", text)
    ]
    assert not missing


def anchors(document):
    """The anchors of the titles, as they are made where the repository is read."""
    titles = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), flags=re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_of_the_repository(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    assert "--8<--" not in text  # an include of the site alone
    for address, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        target = document.parent / address if address else document
        assert target.exists(), address
        assert not anchor or anchor in anchors(target), f"{address}#{anchor}"


@pytest.mark.parametrize("document", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_placeholder_is_left(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    assert not re.findall(r"^[A-Z][A-Z_]+$", text, flags=re.MULTILINE)


def test_the_gallery_shows_every_script():
    text = (ROOT / "docs" / "gallery.md").read_text()
    scripts = {path.stem for path in (ROOT / "examples" / "gallery").glob("*.py")} - {"pictures"}
    hooks = (ROOT / "docs" / "site_hooks.py").read_text()
    for name in scripts:
        assert f"(images/gallery/{name}.png)" in text and f"(../examples/gallery/{name}.py)" in text
        assert f'"{name}"' in hooks  # as a page of the site
        title = (ROOT / "examples" / "gallery" / f"{name}.py").read_text().splitlines()[0].removeprefix('"""# ')
        assert f"## {title}\n" in text


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    made_by_programs = {"demo_table.md", "sklearn_comparison.md"}
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - made_by_programs
    assert {page for page in pages if f": {page}" not in navigation} == set()
