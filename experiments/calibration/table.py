"""The table of results: one line for each data set, split and method, appended when it is computed."""

import csv
import fcntl
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from experiments.calibration.scores import Scores

SCORES = (
    "nll",
    "accuracy",
    "rmse",
    "ece",
    "coverage",
    "coverage_error",
    "brier",
    "crps",
    "auroc",
    "ece_low",
    "ece_high",
    "ece_perfect",
)


class Key(NamedTuple):
    """What a line is about. The fingerprint is that of the method's definition."""

    dataset: str
    split: int
    method: str
    fingerprint: str


@dataclass(frozen=True)
class Line:
    """One line of the table. `version` is that of sublaplace, `seconds` are processor time without training."""

    dataset: str
    kind: str
    task: str
    split: int
    method: str
    fingerprint: str
    version: str
    scores: Scores
    num_test: int
    seconds: float
    note: str = ""

    @property
    def key(self) -> Key:
        return Key(self.dataset, self.split, self.method, self.fingerprint)


_PLAIN = tuple(field.name for field in fields(Line) if field.name != "scores")
COLUMNS = (*_PLAIN[:7], *SCORES, *_PLAIN[7:])


class CalibrationTable:
    """The file of results. Several processes may append at a time; a line that a kill cut short is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            self._repair()

    def append(self, line: Line) -> None:
        """Add a line, which is on the disk when this returns."""
        values = {name: getattr(line, name) for name in _PLAIN} | line.scores
        text = io.StringIO()
        csv.DictWriter(text, COLUMNS, lineterminator="\n").writerow(values)
        with self._locked():
            self._repair()
            with open(self.path, "a") as file:
                file.write(text.getvalue())
                file.flush()
                os.fsync(file.fileno())

    def lines(self) -> dict[Key, Line]:
        """Return all lines; of several with one key, the last."""
        with self._locked():
            self._repair()
            rows = list(csv.DictReader(io.StringIO(self.path.read_text())))
        lines = [_line_of(row) for row in rows]
        return {line.key: line for line in lines}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.path.with_name(self.path.name + ".lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _repair(self) -> None:
        header = ",".join(COLUMNS) + "\n"
        if not self.path.exists() or not self.path.stat().st_size:
            self.path.write_text(header)
        content = self.path.read_bytes()
        if not content.startswith(header.encode()):
            raise ValueError(f"{self.path} does not start with the columns {header.strip()}; give another file.")
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)


def _line_of(row: dict[str, str]) -> Line:
    return Line(
        dataset=row["dataset"],
        kind=row["kind"],
        task=row["task"],
        split=int(row["split"]),
        method=row["method"],
        fingerprint=row["fingerprint"],
        version=row["version"],
        scores={name: float(row[name]) for name in SCORES if row[name]},
        num_test=int(row["num_test"]),
        seconds=float(row["seconds"]),
        note=row["note"],
    )
