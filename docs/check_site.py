"""Checks the built documentation: links, anchors, pictures, and that a page needs nothing from elsewhere.

`make docs-check` builds and checks; `python docs/check_site.py site` checks what was built, with nothing but Python. A
link to another host is not followed; a script, style sheet, font or picture from another host is a fault, since the
site shall work offline.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

# What the browser fetches by itself, by tag: the attribute with the address.
FETCHED = {"img": "src", "script": "src", "source": "src", "video": "src", "audio": "src", "iframe": "src"}
STYLE_ADDRESS = re.compile(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""")
SITE = "http://site.invalid/"


class Page(HTMLParser):
    """The addresses and anchors of a page of HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.fetched: list[str] = []
        self.without_text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "modulepreload"):
            self.fetched.append(values["href"])
        address = values.get(FETCHED.get(tag, ""), "")
        if tag == "img":
            self.pictures.append(address)
            if not values.get("alt"):
                self.without_text.append(address)
        elif address:
            self.fetched.append(address)


@dataclass
class Count:
    """What was looked at."""

    pages: int = 0
    links: int = 0
    anchors: int = 0
    pictures: int = 0
    foreign_links: int = 0

    def __str__(self) -> str:
        return (
            f"{self.pages} pages, {self.links} internal links ({self.anchors} with an anchor), "
            f"{self.pictures} pictures; {self.foreign_links} links to other hosts, not followed"
        )


def faults(site: Path, count: Count) -> Iterator[str]:
    """What is wrong, one line each; `count` is filled on the way."""
    files = {path.relative_to(site).as_posix(): path for path in sorted(site.rglob("*")) if path.is_file()}
    pages = {name: Page(path.read_text(encoding="utf-8")) for name, path in files.items() if path.suffix == ".html"}
    if not pages:
        yield f"{site}: no page; build the site first"
    for name, page in pages.items():
        count.pages += 1
        base = SITE if name == "404.html" else urljoin(SITE, name)  # that page is shown at any address
        for link in page.links:
            yield from _link_faults(name, base, link, files, pages, count)
        for address in page.pictures:
            count.pictures += not address.startswith("data:")
            yield from _fetch_faults(name, base, address, files)
        for address in page.fetched:
            yield from _fetch_faults(name, base, address, files)
        for address in page.without_text:
            yield f"{name}: a picture without a text for those who cannot see it: {address[:80]}"
    for name, path in files.items():
        if path.suffix == ".css":
            for address in map("".join, STYLE_ADDRESS.findall(path.read_text(encoding="utf-8"))):
                yield from _fetch_faults(name, urljoin(SITE, name), address, files)


def _link_faults(
    name: str, base: str, link: str, files: dict[str, Path], pages: dict[str, Page], count: Count
) -> Iterator[str]:
    address = urlsplit(urljoin(base, link))
    if address.scheme not in ("http", "https"):
        return
    if address.netloc != urlsplit(SITE).netloc:
        count.foreign_links += 1
        return
    count.links += 1
    target = _file_of(address.path, files)
    if target is None:
        yield f"{name}: nothing at {link}"
    elif address.fragment and target in pages:
        count.anchors += 1
        if unquote(address.fragment) not in pages[target].anchors:
            yield f"{name}: no such anchor: {link}"


def _fetch_faults(name: str, base: str, address: str, files: dict[str, Path]) -> Iterator[str]:
    if address.startswith(("data:", "#")):
        return
    parts = urlsplit(urljoin(base, address))
    if parts.netloc != urlsplit(SITE).netloc:
        yield f"{name}: fetched from another host: {address}"
    elif (target := _file_of(parts.path, files)) is None:
        yield f"{name}: missing: {address}"
    elif files[target].stat().st_size == 0:
        yield f"{name}: empty: {address}"


def _file_of(path: str, files: dict[str, Path]) -> str | None:
    """The file that a server gives for the path."""
    name = unquote(path).removeprefix("/")
    candidates = (name, f"{name.rstrip('/')}/index.html".removeprefix("/"))
    return next((candidate for candidate in candidates if candidate in files), None)


def main() -> int:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site")
    count = Count()
    found = list(faults(site, count))
    for fault in found:
        print(fault, file=sys.stderr)
    print(f"{count}: {f'{len(found)} faults' if found else 'all in order'}.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
