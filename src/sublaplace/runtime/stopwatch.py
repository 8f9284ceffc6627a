"""Seconds by kind of work."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

PASSES = "passes"
"""Passes over the training data, whose seconds grow with N."""

FACTORISATIONS = "factorisations"
"""Curvature besides its passes, such as eigendecompositions, whose seconds do not grow with N."""

PROBING = "probing"
"""The first look at a network, whose seconds do not grow with N."""


class Stopwatch:
    """Seconds by kind of work. Work inside other work counts once, for the inner kind."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._kinds: list[str] = []
        self._since = 0.0

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Count what happens inside for this kind of work."""
        self._book()
        self._kinds.append(kind)
        try:
            yield
        finally:
            self._book()
            self._kinds.pop()

    def _book(self) -> None:
        now = time.perf_counter()
        if self._kinds:
            self.seconds[self._kinds[-1]] += now - self._since
        self._since = now
