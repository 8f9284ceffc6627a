"""Labelled texts written by people: the snippets that the package vaderSentiment carries in its source archive."""

import io
import re
import tarfile

from experiments.calibration.packaged import PackagedFile, archive
from experiments.datasets import SourceFile

ARCHIVE = PackagedFile(
    "vaderSentiment==3.3.2",
    True,
    SourceFile(
        "text/vaderSentiment-3.3.2.tar.gz",
        "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
        "https://github.com/cjhutto/vaderSentiment",
    ),
)
SOURCE = (
    "10,605 snippets of film reviews from rottentomatoes.com (Pang and Lee), each rated by twenty people (Hutto and "
    f"Gilbert 2014), from the source archive of {ARCHIVE.requirement} (MIT licence, "
    f"SHA-256 {ARCHIVE.file.sha256[:16]}…)"
)
COLLECTIONS = {
    "movie": "movieReviewSnippets",
    "amazon": "amazonReviewSnippets",
    "tweets": "tweets",
    "editorials": "nytEditorialSnippets",
}
_INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"


def rated_snippets(collection: str = "movie") -> tuple[list[str], list[int]]:
    """Read the rated snippets of one of `COLLECTIONS`: film or product reviews, tweets or editorials.

    Gives the texts, and 1 for those whose mean rating is above 0. Snippets whose mean rating is exactly 0 are left out.
    The archive is downloaded with pip if it is missing.
    """
    with (
        tarfile.open(fileobj=io.BytesIO(archive(ARCHIVE))) as outer,
        tarfile.open(fileobj=_member(outer, _INNER)) as inner,
    ):
        name = f"hutto_ICWSM_2014/{COLLECTIONS[collection]}_GroundTruth.txt"
        return parsed(_member(inner, name).read().decode("utf-8"))


def parsed(text: str) -> tuple[list[str], list[int]]:
    """Split lines of number, mean rating and text."""
    rows = [line.split("\t") for line in text.splitlines()]
    rated = [(snippet, float(rating)) for _, rating, snippet in rows if float(rating) != 0]
    return [snippet for snippet, _ in rated], [int(rating > 0) for _, rating in rated]


def words_of(text: str) -> list[str]:
    """Split a text into words in lower case and single signs."""
    return re.findall(r"[\w']+|[^\w\s]", text.lower())


def _member(archive: tarfile.TarFile, name: str) -> io.BytesIO:
    file = archive.extractfile(name)
    assert file is not None
    return io.BytesIO(file.read())
