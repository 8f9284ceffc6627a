"""Progress bars, if they are asked for.

A hidden bar of tqdm takes a lock and starts a thread all the same. An interrupt in it would block all other threads,
and a forked process would inherit both.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


class Bar(Protocol):
    """A bar that is moved by hand."""

    def update(self, count: int) -> object:
        """Move on by `count`."""


class _Hidden:
    def update(self, count: int) -> None:
        pass


def shown(items: Iterable[Item], what: str, progress: bool) -> Iterable[Item]:
    """Return the items, with a bar named `what` if `progress` is set."""
    return tqdm(items, desc=what, leave=False) if progress else items


@contextmanager
def input_bar(total: int | None, what: str, progress: bool) -> Iterator[Bar]:
    """Yield a bar that counts inputs; without `progress`, it does nothing."""
    if not progress:
        yield _Hidden()
        return
    with tqdm(total=total, desc=what, unit="input", leave=False) as bar:
        yield bar
