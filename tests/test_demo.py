"""The demonstration on tiny networks and few inputs."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from demo import CHOICES, COLUMNS, choice_texts, markdown, notes, practice_notes, texts
from demo_comparison import METHODS, OPTIMUM, Comparison, compare, has_own_dim
from demo_figures import draw_bands, draw_certificate, draw_reliability, draw_sweeps
from demo_practice import PRACTICE, Choice, parted, practice
from demo_tasks import Task, digits_task, gap_task


def shortened(task: Task) -> Task:
    inputs, targets = task.test
    return replace(task, test=(inputs[:40], targets[:40]), num_drawn=20, dims=(1, 3, 5))


@pytest.fixture(scope="module")
def digits() -> Comparison:
    return compare(shortened(digits_task(num_train=60, width=4, epochs=3)))


@pytest.fixture(scope="module")
def gap() -> Comparison:
    return compare(shortened(gap_task(num_train=40, width=8, epochs=20)))


@pytest.fixture(scope="module")
def choices() -> list[Choice]:
    tasks = [digits_task(num_train=100, width=4, epochs=3), gap_task(num_train=100, width=8, epochs=20)]
    return [choice for task in tasks for choice in practice(shortened(task))]


def cells_of(table: str) -> list[list[str]]:
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_first_table_holds_what_a_practitioner_chooses_between(choices):
    assert [(choice.data, choice.method) for choice in choices] == [
        (data, method) for data in ("digits", "gap") for method in PRACTICE
    ]
    cells = cells_of(markdown([CHOICES, *map(choice_texts, choices)]))
    assert cells[0] == CHOICES
    column = {name: [line[CHOICES.index(name)] for line in cells[2:]] for name in CHOICES}
    for data, method, ece, coverage in zip(*(column[k] for k in ("data", "method", "ECE", "coverage")), strict=True):
        assert (ece == "–") == (data == "gap")
        assert (coverage == "–") == (data == "digits")
        assert (column["λ"][PRACTICE.index(method)] == "–") == (method == "plain network")
    notes = practice_notes(choices)
    assert "10 % of the training data are held out" in notes
    assert f"NLL {choices[3].own_plain['nll']:.3f}, ECE" in notes


def test_intervals_of_every_posterior_cover_at_least_what_the_plain_network_covers(choices):
    plain, *posteriors = [choice.scores["coverage"] for choice in choices if choice.data == "gap"]
    assert all(coverage >= plain for coverage in posteriors[:2])  # the last one has another network


def test_held_out_data_are_a_part_of_the_training_data():
    task = gap_task(num_train=40, width=4, epochs=1)
    parts = parted(task.train)
    assert [len(inputs) for inputs, _ in parts] == [36, 4]
    for k in range(2):
        assert torch.equal(torch.cat([part[k] for part in parts]), task.train[k])


@pytest.mark.parametrize("name", ["digits", "gap"])
def test_no_subspace_of_its_dimension_holds_more_of_the_trace_than_the_optimum(name, request):
    rows = {row.method: row for row in request.getfixturevalue(name).rows}
    assert set(rows) == {"map", "full", *METHODS}
    assert all(0 <= row.captured <= 1 + 1e-9 for row in rows.values())
    grown = [method for method in METHODS if not has_own_dim(method)]
    assert all(rows[method].captured <= rows[OPTIMUM].captured * (1 + 1e-9) for method in grown)


@pytest.mark.parametrize("name", ["digits", "gap"])
def test_traces_grow_with_the_dimension(name, request):
    for sweep in request.getfixturevalue(name).sweeps.values():
        assert sweep.log_trace == sorted(sweep.log_trace)


def test_the_table_shows_a_dash_where_a_score_does_not_exist(digits, gap):
    cells = cells_of(markdown([COLUMNS, *map(texts, [*digits.rows, *gap.rows])]))
    assert cells[0] == COLUMNS
    column = {name: [line[COLUMNS.index(name)] for line in cells[2:]] for name in COLUMNS}
    for data, brier, coverage in zip(column["data"], column["Brier"], column["coverage"], strict=True):
        assert (brier == "–") == (data == "gap")
        assert (coverage == "–") == (data == "digits")
    assert "λ = 1," in notes([gap])


def test_the_pictures_are_written(digits, gap, tmp_path):
    draw_bands(gap, tmp_path / "bands.png", small=2, large=5)
    draw_sweeps([digits, gap], tmp_path / "sweep.png")
    draw_reliability(digits, tmp_path / "reliability.png")
    draw_certificate(gap, tmp_path / "certificate.png", dim=3)
    names = ("bands", "sweep", "reliability", "certificate")
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in names)


def test_training_data_has_a_gap_and_test_data_none():
    task = gap_task(num_train=40, width=4, epochs=1)
    assert task.train[0].abs().min() >= 1
    assert task.test[0].abs().min() < 0.2
    assert isinstance(task.model, nn.Module)
