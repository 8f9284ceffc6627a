"""The check of the built documentation finds what is broken, and a release has one version."""

import re
import sys
from pathlib import Path

import pytest

import sublaplace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "docs"))

import check_site
from check_site import Count, faults

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def site(tmp_path):
    (tmp_path / "guide").mkdir()
    (tmp_path / "picture.png").write_bytes(b"something")
    (tmp_path / "style.css").write_text("a { background: url(picture.png) }")
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="style.css"><h1 id="top">Title</h1><a href="guide/#more">guide</a>'
        '<a href="https://elsewhere.example/">not followed</a><img src="picture.png" alt="a picture">'
    )
    (tmp_path / "guide" / "index.html").write_text(
        '<h2 id="more">More</h2><a href="..#top">back</a><a href="#more">here</a>'
    )
    return tmp_path


def test_a_site_in_order_has_no_faults(site):
    count = Count()
    assert list(faults(site, count)) == []
    assert count == Count(pages=2, links=3, anchors=3, pictures=1, foreign_links=1)


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<a href="nowhere/">x</a>', "nothing at nowhere/"),
        ('<a href="guide/#less">x</a>', "no such anchor: guide/#less"),
        ('<img src="lost.png" alt="x">', "missing: lost.png"),
        ('<img src="picture.png">', "without a text"),
        ('<img src="https://elsewhere.example/x.png" alt="x">', "another host"),
        ('<script src="//elsewhere.example/x.js"></script>', "another host"),
        ('<link rel="stylesheet" href="lost.css">', "missing: lost.css"),
    ],
)
def test_a_fault_is_named_with_its_page(site, html, fault, monkeypatch, capsys):
    (site / "page.html").write_text(html)
    (found,) = faults(site, Count())
    assert found.startswith("page.html: ") and fault in found
    monkeypatch.setattr(sys, "argv", ["check_site.py", str(site)])
    assert check_site.main() == 1
    assert found in capsys.readouterr().err


def test_style_sheets_fetch_nothing_from_elsewhere(site):
    (site / "style.css").write_text('@import "https://elsewhere.example/font.css"; a { background: url("lost.png") }')
    assert [fault.split(": ")[1] for fault in faults(site, Count())] == ["fetched from another host", "missing"]


def test_an_empty_folder_is_a_fault(tmp_path):
    assert len(list(faults(tmp_path, Count()))) == 1


def test_the_citation_and_the_changelog_know_the_version():
    """A release has its section, and is cited; while the next one is developed, the last release is cited."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.+?)\]", changelog, flags=re.MULTILINE)
    releases = [section for section in sections if section != "Unreleased"]
    assert re.findall(r"^version: (.+)$", citation, flags=re.MULTILINE) == releases[:1]
    if "dev" in sublaplace.__version__:
        assert sections[0] == "Unreleased"
    else:
        assert releases[0] == sublaplace.__version__
