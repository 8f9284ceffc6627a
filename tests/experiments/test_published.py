"""The paper's numbers, as kept in experiments/published, agree with each other and with what its text quotes."""

import csv
import math
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "published"
COLUMNS = ["table", "dataset", "projector", "s", "metric", "value", "standard_error"]
CELLS = {
    "authors_code": 16,
    "compute_time": 5,
    "dead_parameters": 8,
    "eval_uq": 3 * 6 * 6,  # metrics × (sets, s) × columns
    "eval_uq_extended": 3 * 15 * 6,
    "memory_load": 8 * 6,
    "mnist_c_approximation_quality": 2 * 15 * 5,
    "mnist_c_uq_eval": 3 * 15 * 6,
    "num_parameters": 8 + 8 + 7,
    "ood": 3 * 4 * 6,
    "ood_extended": 3 * 7 * 3 * 6,
    "prior_precision": 8,
    "text": 11,
    "training": 8 * 4,
}
WITH_ERRORS = ("eval_uq_extended", "ood_extended", "mnist_c_approximation_quality", "mnist_c_uq_eval")
Cell = dict[str, str]


def cells(name: str) -> list[Cell]:
    with open(FOLDER / f"{name}.csv", newline="") as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == COLUMNS
        return list(reader)


def key(cell: Cell) -> tuple[str, str, str, str]:
    return cell["dataset"], cell["projector"], cell["s"], cell["metric"]


def values(name: str) -> dict[tuple[str, str, str, str], str]:
    return {key(cell): cell["value"] for cell in cells(name)}


def test_every_table_is_counted_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.csv")} == {*CELLS, "names"}


@pytest.mark.parametrize("name", CELLS)
def test_each_cell_is_there_once_and_is_a_number(name: str) -> None:
    rows = cells(name)
    assert len(rows) == CELLS[name]
    assert max(Counter(key(row) for row in rows).values()) == 1
    for row in rows:
        assert not math.isnan(float(row["value"]))
        has_error = name in WITH_ERRORS and row["value"] != "-inf"
        assert bool(row["standard_error"]) == has_error, row
        assert not has_error or 0 <= float(row["standard_error"]) < 1
        assert row["value"] != "-inf" or (row["projector"], row["metric"]) == ("subset-diagonal", "log_trace")


@pytest.mark.parametrize(
    ("name", "cell", "value", "error"),
    [
        ("eval_uq_extended", ("fashionmnist", "map", "120", "nll"), "0.293", "0.004"),
        ("eval_uq_extended", ("fashionmnist", "map", "120", "ece"), "0.041", "0.001"),
        ("eval_uq_extended", ("fashionmnist", "map", "120", "brier"), "0.135", "0.001"),
        ("eval_uq_extended", ("fashionmnist", "lowrank-kfac", "120", "nll"), "0.248", "0.002"),
        ("eval_uq_extended", ("fashionmnist", "lowrank-kfac", "120", "ece"), "0.010", "0.001"),
        ("eval_uq_extended", ("fashionmnist", "lowrank-kfac", "120", "brier"), "0.128", "0.001"),
        ("eval_uq_extended", ("imagenet10", "lowrank-diagonal", "100", "nll"), "0.271", "0.015"),
        ("ood_extended", ("cifar10-c/speckle_noise", "subset-swag", "300", "brier"), "0.489", "0.008"),
        ("ood_extended", ("cifar10-c/impulse_noise", "subset-magnitude", "100", "nll"), "1.848", "0.057"),
        ("mnist_c_approximation_quality", ("mnist-c/stripe", "subset-diagonal", "100", "kl_mean"), "3.254", "0.449"),
        ("mnist_c_approximation_quality", ("mnist-c/fog", "subset-swag", "100", "log_trace"), "7.015", "0.079"),
        ("mnist_c_uq_eval", ("mnist-c/canny_edges", "map", "100", "nll"), "2.784", "0.301"),
        ("mnist_c_uq_eval", ("mnist-c/zigzag", "lowrank-kfac", "100", "brier"), "0.205", "0.011"),
        ("dead_parameters", ("enb", "", "", "dead_percent"), "92", ""),
        ("dead_parameters", ("naval", "", "", "dead_percent_standard_deviation"), "4", ""),
        ("prior_precision", ("cifar10", "", "", "prior_precision"), "68.1", ""),
        ("compute_time", ("imagenet10", "lowrank-kfac", "", "projector_minutes"), "17", ""),
        ("training", ("redwine", "", "", "warm_up"), "0.3", ""),
    ],
)
def test_quoted_cells(name: str, cell: tuple[str, str, str, str], value: str, error: str) -> None:
    found = {key(row): (row["value"], row["standard_error"]) for row in cells(name)}
    assert found[cell] == (value, error)


@pytest.mark.parametrize(("short", "long"), [("eval_uq", "eval_uq_extended"), ("ood", "ood_extended")])
def test_short_tables_are_parts_of_their_extensions(short: str, long: str) -> None:
    assert values(short).items() <= values(long).items()


@pytest.mark.parametrize("name", ["eval_uq_extended", "ood_extended"])
def test_the_plain_network_does_not_depend_on_s(name: str) -> None:
    found: dict[tuple[str, str], set[str]] = {}
    for row in cells(name):
        if row["projector"] == "map":
            found.setdefault((row["dataset"], row["metric"]), set()).add(row["value"])
    assert all(len(numbers) == 1 for numbers in found.values())


def test_memory_and_shares_follow_from_the_numbers_of_parameters() -> None:
    sizes = values("num_parameters")
    for (dataset, _, s, metric), value in [*values("memory_load").items(), *sizes.items()]:
        p = int(sizes[dataset, "", "", "num_parameters"])
        if metric == "memory_numbers":
            assert float(value) == pytest.approx(int(s) * (int(s) + p), rel=5.1e-4)
        elif metric == "share_percent":
            assert float(value) == pytest.approx(100 * int(s) / p, abs=0.01)


def test_prior_precisions_of_text_and_code_agree() -> None:
    code = values("authors_code")
    for cell, value in values("prior_precision").items():
        assert float(value) == pytest.approx(float(code[cell]), abs=0.051)


def test_all_names_are_in_the_glossary() -> None:
    with open(FOLDER / "names.csv", newline="") as file:
        glossary = list(csv.DictReader(file))
    known = {
        kind: {row["ours"] for row in glossary if row["kind"] == kind} for kind in ("table", "dataset", "projector")
    }
    for name in CELLS:
        for row in cells(name):
            assert row["table"] in known["table"]
            assert row["dataset"].split("/")[0] in known["dataset"]
            assert row["projector"] in {"", *known["projector"]}
