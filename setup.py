"""What pyproject.toml cannot say: the README as the long description, with links that work outside of the repository.

``SUBLAPLACE_REPOSITORY=https://… python -m build`` makes every link and picture absolute, at the tag of the version,
and adds the addresses of the project. Without it, pictures are left out and links become their text.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^]]*)\]\((?!\w+:|#)(?P<path>[^)\s]+)\)")


def with_absolute_links(text: str, repository: str, version: str) -> str:
    """Return Markdown whose links to files of the repository are absolute; without a repository, none are left."""

    def absolute(found: re.Match[str]) -> str:
        if not repository:
            return "" if found["picture"] else found["text"]
        kind = "raw" if found["picture"] else "blob"
        return f"{found['picture']}[{found['text']}]({repository}/{kind}/v{version}/{found['path']})"

    blocks = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(absolute, part) for part in blocks)


def project_urls(repository: str) -> dict[str, str]:
    """Return the addresses that an index shows; none without a repository."""
    pages = {"Repository": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md"}
    return {name: repository + page for name, page in (pages | {"Issues": "/issues"}).items()} if repository else {}


def version() -> str:
    """Return the version of the package, without importing it."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/sublaplace/__init__.py").read_text(), flags=re.MULTILINE)
    assert found is not None
    return found[1]


if __name__ == "__main__":
    repository = os.environ.get("SUBLAPLACE_REPOSITORY", "").rstrip("/")
    setup(
        long_description=with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), repository, version()),
        long_description_content_type="text/markdown",
        project_urls=project_urls(repository),
    )
