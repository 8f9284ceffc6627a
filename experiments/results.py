"""The table of results: one tidy CSV file that grows job by job and survives a kill at any point."""

import csv
import fcntl
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from sublaplace import __version__


@dataclass(frozen=True)
class Job:
    """A unit of work, written at once: one posterior of one trained network on one data set."""

    dataset: str
    seed: int
    projector: str
    inputs: str = ""  # what P was built from: "train", "test", or nothing
    complement: str = ""  # what stands outside of the subspace, if anything


@dataclass(frozen=True)
class Row:
    """One number. `s` is the dimension of the subspace (p for posteriors over all parameters, 0 without any).

    `seconds` (of processor time) and `peak_memory_mb` belong to building the projection, or the posterior if there is
    no projection. They are equal for all rows of a job, and None if nothing was built.
    """

    dataset: str
    seed: int
    projector: str
    s: int
    metric: str
    value: float
    inputs: str = ""
    complement: str = ""
    seconds: float | None = None
    peak_memory_mb: float | None = None
    note: str = ""
    version: str = __version__

    @property
    def job(self) -> Job:
        return Job(self.dataset, self.seed, self.projector, self.inputs, self.complement)


COLUMNS = tuple(field.name for field in fields(Row))
_HEADER = ",".join(COLUMNS) + "\n"


class ResultsError(Exception):
    """A results file that this program did not write; the message says why."""


class Results:
    """The file of results. Several processes may add to it at a time.

    An addition is first written completely to a journal next to the file, together with the length of the file before
    the addition. The next process that opens the file finishes what a killed process left in the journal. So an
    addition is in the file completely and once, or not at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._journal = path.with_name(path.name + ".journal")
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            self._repair()

    def add(self, rows: Iterable[Row]) -> None:
        """Append the rows of one or more complete jobs; they are on disk when this returns."""
        text = _as_csv(rows)
        with self._locked():
            self._repair()
            length = self.path.stat().st_size
            _write_whole(self._journal, f"{length}\n{text}")
            self._apply_journal()

    def rows(self) -> list[Row]:
        """Return all rows, in the order in which they were added."""
        with self._locked():
            self._repair()
            text = self.path.read_text()
        return [_row_of(line) for line in csv.DictReader(io.StringIO(text))]

    def done(self) -> set[Job]:
        """Return the jobs that need not be run again."""
        return {row.job for row in self.rows()}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self.path.with_name(self.path.name + ".lock")
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _repair(self) -> None:
        """Bring the file to a state in which every line is complete."""
        if self._journal.exists():
            self._apply_journal()
        if not self.path.exists() or self.path.stat().st_size == 0:
            _write_whole(self.path, _HEADER)
        with open(self.path, "r+b") as file:
            content = file.read()
            if not content.startswith(_HEADER.encode()):
                raise ResultsError(
                    f"{self.path} does not start with the header of results, {_HEADER.strip()}; give another file."
                )
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                file.truncate(whole)

    def _apply_journal(self) -> None:
        length, text = self._journal.read_text().split("\n", 1)
        with open(self.path, "r+b") as file:
            file.seek(int(length))  # over whatever part of the rows is there already
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        self._journal.unlink()


def _as_csv(rows: Iterable[Row]) -> str:
    # repr writes the shortest digits that give back the same float.
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        values = [getattr(row, name) for name in COLUMNS]
        if any("\n" in value for value in values if isinstance(value, str)):
            raise ValueError(f"A row must be one line, but it holds a line break: {row}.")
        writer.writerow(
            ["" if value is None else repr(value) if isinstance(value, float) else value for value in values]
        )
    return text.getvalue()


def _row_of(line: dict[str, str]) -> Row:
    return Row(
        dataset=line["dataset"],
        seed=int(line["seed"]),
        projector=line["projector"],
        s=int(line["s"]),
        metric=line["metric"],
        value=float(line["value"]),
        inputs=line["inputs"],
        complement=line["complement"],
        seconds=float(line["seconds"]) if line["seconds"] else None,
        peak_memory_mb=float(line["peak_memory_mb"]) if line["peak_memory_mb"] else None,
        note=line["note"],
        version=line["version"],
    )


def _write_whole(path: Path, text: str) -> None:
    """Replace a file so that it is the old or the new one at any moment."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
