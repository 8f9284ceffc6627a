"""What a release consists of agrees with itself."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

import sublaplace

ROOT = Path(__file__).parent.parent
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_links_of_the_readme_are_absolute_in_the_long_description():
    text = SETUP["with_absolute_links"]((ROOT / "README.md").read_text(), "https://host/owner/name", "1.2.3")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert "![Predictive bands" in prose
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", prose)
    assert pictures and all(path.startswith("https://host/owner/name/raw/v1.2.3/") for path in pictures)
    links = re.findall(r"(?<!!)\[[^]]*\]\(([^)]*)\)", prose)
    assert links and all(re.match(r"https://|#", path) for path in links)
    for path in [*pictures, *links]:
        inside = re.match(r"https://host/owner/name/(?:raw|blob)/v1\.2\.3/([^#]*)", path)
        assert inside is None or (ROOT / inside[1]).exists()


def test_without_a_repository_no_link_to_a_file_is_left():
    text = SETUP["with_absolute_links"]("a [page](docs/a.md), ![b](b.png) and [c](https://c)", "", "1")
    assert text == "a page,  and [c](https://c)"
    assert SETUP["project_urls"]("") == {}


def test_code_is_left_as_it_is():
    code = "```python\nx = table[0](docs)\n```"
    assert SETUP["with_absolute_links"](code, "https://host", "1") == code


def test_the_version_is_the_same_everywhere():
    assert SETUP["version"]() == sublaplace.__version__
    recipe = (ROOT / "recipe" / "recipe.yaml").read_text()
    assert re.search(r"^  version: (.+)$", recipe, flags=re.MULTILINE)[1] == sublaplace.__version__
    released = re.search(r"^## \[(\d.*?)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {released[1]}\ndate-released: {released[2]}\n" in citation
    assert "dev" in sublaplace.__version__ or released[1] == sublaplace.__version__


def test_the_recipe_needs_what_the_package_needs():
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())
    run = recipe["requirements"]["run"]
    names = {"torch": "pytorch"}
    wanted = [re.sub(r"^[\w-]+", lambda found: names.get(found[0], found[0]), need) for need in PROJECT["dependencies"]]
    assert {need.replace(" ", "") for need in run if not need.startswith("python ")} == set(wanted)
    assert PROJECT["requires-python"] == f">={recipe['context']['python_min']}"
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["summary"] == PROJECT["description"]


def test_every_supported_python_has_a_classifier():
    versions = [text.rsplit(" ", 1)[1] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    matrix = re.search(r"^PYTHONS \?= (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split()
    assert [f"python{version}" for version in versions] == matrix
    assert PROJECT["requires-python"] == f">={versions[0]}"
