"""The table of results: exact numbers, and no row lost or doubled, whenever a process is killed."""

import csv
import math
import multiprocessing
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import sublaplace
from experiments.results import COLUMNS, Job, Results, ResultsError, Row


def rows_of(seed: int, count: int = 3, **other: object) -> list[Row]:
    return [Row("toy", seed, "lowrank-kfac", 10 * k, "nll", seed + k / 7, "train", **other) for k in range(count)]  # type: ignore[arg-type]


def test_columns_are_the_agreed_ones(tmp_path: Path) -> None:
    path = tmp_path / "results" / "results.csv"
    Results(path).add(rows_of(0, 1, seconds=1.5, note="a, b"))
    with open(path) as file:
        lines = list(csv.reader(file))
    assert lines[0][:6] == ["dataset", "seed", "projector", "s", "metric", "value"]
    assert lines[0][6:] == ["inputs", "complement", "seconds", "peak_memory_mb", "note", "version"]
    assert lines[1] == [
        "toy",
        "0",
        "lowrank-kfac",
        "0",
        "nll",
        "0.0",
        "train",
        "",
        "1.5",
        "",
        "a, b",
        sublaplace.__version__,
    ]


@pytest.mark.parametrize("value", [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, -math.inf, -0.0])
def test_numbers_come_back_to_the_last_bit(tmp_path: Path, value: float) -> None:
    results = Results(tmp_path / "results.csv")
    row = Row("toy", 0, "map", 0, "nll", value, seconds=value, peak_memory_mb=None)
    results.add([row])
    (found,) = Results(tmp_path / "results.csv").rows()
    assert found == row and math.copysign(1, found.value) == math.copysign(1, value)


def test_jobs_are_done_when_they_are_written(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.csv")
    assert results.done() == set()
    results.add(rows_of(0))
    results.add(rows_of(1))
    assert results.done() == {Job("toy", seed, "lowrank-kfac", "train") for seed in (0, 1)}
    assert results.rows() == rows_of(0) + rows_of(1)


def test_a_half_written_last_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    Results(path).add(rows_of(0))
    whole = path.read_bytes()
    path.write_bytes(whole + b"toy,1,lowrank-kfac,0,nl")
    assert Results(path).rows() == rows_of(0)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("written", [0, 5, 60, 10_000], ids=["nothing", "a few letters", "a row and more", "all"])
def test_an_addition_that_was_cut_is_finished_once(tmp_path: Path, written: int) -> None:
    """A process that dies while it appends leaves the journal, and any part of the rows."""
    path = tmp_path / "results.csv"
    Results(path).add(rows_of(0))
    before = path.read_text()
    Results(path).add(rows_of(1))
    after = path.read_text()
    added = after.removeprefix(before)
    path.write_text(before + added[:written])
    (tmp_path / "results.csv.journal").write_text(f"{len(before.encode())}\n{added}")
    Results(path).add(rows_of(2))
    assert Results(path).rows() == rows_of(0) + rows_of(1) + rows_of(2)
    assert not (tmp_path / "results.csv.journal").exists()


def test_an_unfinished_journal_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    Results(path).add(rows_of(0))
    (tmp_path / "results.csv.journal.partial").write_text("17\ntoy,1,low")
    assert Results(path).rows() == rows_of(0)


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("name,score\na,1\nb,")
    with pytest.raises(ResultsError, match=r"results.csv does not start with the header"):
        Results(path)
    assert path.read_text() == "name,score\na,1\nb,"


def test_a_line_break_in_a_row_is_refused(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.csv")
    with pytest.raises(ValueError, match="line break"):
        results.add(rows_of(0, note="first\nsecond"))
    assert results.rows() == []


def write_jobs(path: Path, first: int, last: int) -> None:
    """Writes the jobs of these seeds which are not there yet."""
    for seed in range(first, last):
        results = Results(path)
        if Job("toy", seed, "map") not in results.done():
            results.add(Row("toy", seed, "map", s, "nll", seed + s / 7) for s in range(100))


def writing(path: Path, first: int, last: int) -> BaseProcess:
    """A process that does so."""
    process = multiprocessing.get_context("fork").Process(target=write_jobs, args=(path, first, last))
    process.start()
    return process


def assert_whole(path: Path, num_jobs: int) -> None:
    """Every row of every job is there once; the file has no other line."""
    found = sorted((row.seed, row.s, row.value) for row in Results(path).rows())
    assert found == [(seed, s, seed + s / 7) for seed in range(num_jobs) for s in range(100)]
    assert path.read_text().count("\n") == 1 + 100 * num_jobs
    assert path.read_text().startswith(",".join(COLUMNS))


def test_no_row_is_lost_or_doubled_by_kills(tmp_path: Path) -> None:
    """Processes are killed at random moments, then one may finish."""
    path, moments = tmp_path / "results.csv", random.Random(0)
    for _ in range(40):
        process = writing(path, 0, 40)
        time.sleep(moments.uniform(0.0, 0.05))
        process.kill()
        process.join()
    process = writing(path, 0, 40)
    process.join()
    assert process.exitcode == 0
    assert_whole(path, 40)


def test_two_processes_may_write_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    processes = [writing(path, 0, 15), writing(path, 15, 30)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert_whole(path, 30)
