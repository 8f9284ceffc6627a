"""The experiments on made-up data: scores against other ways to them, what theory demands, runs that are resumed."""

import itertools
import math
import multiprocessing
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from tqdm import tqdm

from experiments import datasets, fits, runs, seed_run
from experiments import scores as scoring
from experiments.__main__ import main
from experiments.cost import Cost, measured
from experiments.datasets import Dataset
from experiments.methods import (
    COMPLEMENTED,
    Complemented,
    Problem,
    drawn,
    feasible_projection,
    optimal_projection,
    reduced_posterior,
)
from experiments.recipes import RECIPES, Recipe, TrainingRecipe
from experiments.results import Results, Row
from experiments.scored_sets import scored_sets
from experiments.seed_run import SeedRun
from experiments.sensitivity import sensitivities
from experiments.sweeps import SubspaceSweep, capped
from experiments.training import trained_network
from sublaplace import PROJECTORS, Gaussian, SubspaceLaplace, metrics

pytestmark = pytest.mark.usefixtures("small_networks")

METHODS = {
    "full": "",
    "lowrank-ggn": "train",
    "lowrankopt-ggn": "test",
    "lowrank-kfac": "train",
    "lowrank-diagonal": "train",
    "lowrank-isotropic": "train",
    "subset-magnitude": "",
    "subset-diagonal": "",
    "subset-swag": "",
    "last-layer": "",
    "kfac": "",
    "map": "",
}
PLAIN = replace(
    RECIPES["enb"],
    dataset="toy",
    network="small-mlp",
    training=TrainingRecipe(0.01, 30, 0.1, 0.5, batch_size=40),
    num_inputs=12,
    largest_dim=19,
    swag_snapshots=3,
    maps_sensitivity=False,
)
NUM_PARAMETERS, LAST_LAYER = 866, 50  # of the network of PLAIN
IMAGES = replace(
    RECIPES["mnist"],
    dataset="mnist",
    network="small-cnn",
    training=TrainingRecipe(0.004, 2, 0.1, 0.3, batch_size=24),
    num_inputs=5,
    largest_dim=30,
    swag_snapshots=2,
)


def regression() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(55, 8, generator=generator)
    targets = inputs[:, :2].sin() + 0.2 * torch.randn(55, 2, generator=generator)
    return Dataset("toy", "regression", inputs[:40], targets[:40], inputs[40:], targets[40:])


def pictures() -> Dataset:
    """Bright bars whose place tells the class, on a grey that varies."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, 66)
    pixels = generator.integers(0, 90, (66, 28, 28)).astype(np.uint8)
    for picture, label in zip(pixels, labels, strict=True):
        picture[2 * label + 4 : 2 * label + 7, 6:22] = 230
    images, classes = datasets.image_tensor(pixels), torch.tensor(labels)
    return Dataset("mnist", "classification", images[:48], classes[:48], images[48:], classes[48:])


Table = dict[tuple[str, str, int], dict[str, float]]


def table(rows: list[Row]) -> Table:
    """All scores of pure subspaces."""
    found: Table = {}
    for row in rows:
        if row.complement:
            continue
        assert row.metric not in found.setdefault((row.dataset, row.projector, row.s), {}), f"{row} is doubled"
        found[row.dataset, row.projector, row.s][row.metric] = row.value
    return found


@pytest.fixture(scope="module")
def regression_rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("regression")
    results = Results(folder / "results.csv")
    clock, readings = time.process_time, itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        # Some clocks advance in steps of 10 ms; here each reading is later than the one before.
        patch.setattr(time, "process_time", lambda: clock() + 1e-6 * next(readings))
        runs.run(PLAIN, regression(), range(5), results, folder)
    return results.rows()


@pytest.fixture(scope="module")
def picture_rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("pictures")
    results = Results(folder / "results.csv")
    runs.run(IMAGES, pictures(), [0], results, folder, ["rotate", "fog"])
    return results.rows()


# What is in the table


def test_every_method_is_there_for_every_seed(regression_rows: list[Row]) -> None:
    jobs = {(row.seed, row.projector, row.inputs) for row in regression_rows if not row.complement}
    expected = {(seed, name, inputs) for seed in range(5) for name, inputs in METHODS.items()}
    assert jobs == expected | {(0, "ensemble", "")}


def test_every_score_is_there_for_every_dimension(regression_rows: list[Row]) -> None:
    scores = table([row for row in regression_rows if row.seed == 0])
    grid = PLAIN.dims("lowrank-kfac")
    assert grid == list(range(10, 20))
    for name in METHODS:
        dims = [s for _, found, s in scores if found == name]
        alone = {"full": NUM_PARAMETERS, "kfac": NUM_PARAMETERS, "map": 0, "last-layer": LAST_LAYER}
        assert dims == ([alone[name]] if name in alone else grid), name
        for s in dims:
            assert {"kl", "log_trace", "relative_error", "nll", "coverage"} <= set(scores["toy", name, s]), name
    assert {"dead_percent", "noise_std", "rmse"} <= set(scores["toy", "map", 0])
    assert scores["toy", "kfac", NUM_PARAMETERS]["prior_precision"] > 0
    assert set(scores["toy", "ensemble", 0]) == {"nll", "coverage"}


def test_costs_are_noted(regression_rows: list[Row]) -> None:
    for row in regression_rows:
        built = row.projector not in ("map", "ensemble")
        assert (row.seconds is not None and row.seconds > 0) == built
        assert (row.peak_memory_mb is not None) == built


def test_corrupted_pictures_are_scored_at_one_dimension(picture_rows: list[Row]) -> None:
    scores = table(picture_rows)
    methods = [name for name in METHODS if name not in ("lowrank-ggn", "lowrankopt-ggn")] + ["temperature"]
    for corruption in ("rotate", "fog"):
        found = {name: s for dataset, name, s in scores if dataset == f"mnist-c/{corruption}"}
        assert set(found) == set(methods)
        assert found["subset-magnitude"] == 100 and found["last-layer"] == 550
        assert found["lowrank-kfac"] == 50  # the rank: five inputs with ten outputs
        for name, s in found.items():
            row = scores[f"mnist-c/{corruption}", name, s]
            assert ("nll" in row) == (name != "full") and ("kl_mean" in row) == (name != "temperature")
    assert scores["mnist-c/fog", "map", 0]["nll"] != scores["mnist", "map", 0]["nll"]


def test_classification_has_every_candidate_with_a_complement(picture_rows: list[Row]) -> None:
    rows = [row for row in picture_rows if row.complement]
    assert {Complemented(row.projector, row.inputs, row.complement) for row in rows} == set(COMPLEMENTED)
    values = {row.metric: row.value for row in rows if row.projector == "lowrank-correction"}
    assert values["kl_mean"] >= 0 and 0 < values["brier"] < 2


# What theory demands


@pytest.mark.parametrize("kind", ["regression", "pictures"])
def test_the_optimum_of_theorem_1_is_one(kind: str, regression_rows: list[Row], picture_rows: list[Row]) -> None:
    rows = regression_rows if kind == "regression" else picture_rows
    name, divergence = ("toy", "kl") if kind == "regression" else ("mnist", "kl_mean")
    tolerance = 1e-9 if kind == "regression" else 1e-4  # pictures: all but the exact methods are in float32
    for seed in {row.seed for row in rows}:
        scores = table([row for row in rows if row.seed == seed])
        for (dataset, method, s), found in scores.items():
            best = scores.get((name, "lowrankopt-ggn", s))
            if dataset == name and best and method not in ("temperature", "ensemble"):
                assert best["relative_error"] <= found["relative_error"] + tolerance, (method, s)
                assert best["log_trace"] >= found["log_trace"] - tolerance, (method, s)
        full = next(found for (dataset, method, _), found in scores.items() if (dataset, method) == (name, "full"))
        assert full[divergence] < 1e-12 and full["relative_error"] < 1e-10


@pytest.mark.parametrize("kind", ["regression", "pictures"])
def test_traces_grow_with_the_dimension_up_to_the_full_one(
    kind: str, regression_rows: list[Row], picture_rows: list[Row]
) -> None:
    scores = table([r for r in (regression_rows if kind == "regression" else picture_rows) if r.seed == 0])
    name = "toy" if kind == "regression" else "mnist"
    (full,) = (found["log_trace"] for (d, method, _), found in scores.items() if (d, method) == (name, "full"))
    for method in METHODS:
        if method.startswith(("lowrank", "subset")):
            traces = [found["log_trace"] for (d, m, _), found in sorted(scores.items()) if (d, m) == (name, method)]
            assert traces == sorted(traces) and traces[-1] <= full + 1e-6, method


def test_a_subspace_of_all_directions_is_the_full_posterior(picture_rows: list[Row]) -> None:
    """P built from the drawn inputs with as many dimensions as outputs loses nothing on them."""
    recipe = replace(PLAIN, num_inputs=5, largest_dim=10)
    network = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    problem = Problem(recipe, regression(), network, 0)
    exact = problem.context.exact()
    inputs = regression().test_inputs[:5]
    projection = optimal_projection(exact, problem.jacobians(inputs), 10)
    sweep = SubspaceSweep(reduced_posterior(problem, projection), [10])
    reference = exact.joint_covariance(problem.jacobians(inputs))
    scores = scoring.approximation_scores(problem, inputs, sweep, reference)[10]
    assert scores["kl"] < 1e-12 and scores["relative_error"] < 1e-8


# Scores by other ways


@pytest.mark.parametrize("name", ["lowrank-kfac", "lowrank-diagonal", "subset-magnitude", "subset-diagonal"])
def test_scores_are_those_of_the_facade(name: str, regression_rows: list[Row], tmp_path: Path) -> None:
    """The same posterior fitted, truncated and evaluated through `SubspaceLaplace` alone."""
    data = regression()
    network = trained_network(PLAIN, data, 2, tmp_path).double()
    train, targets = data.train_inputs.double(), data.train_targets.double()
    noise = (targets - network(train)).std(correction=0).item()
    likelihood, prior = Gaussian(noise), PLAIN.prior_precision
    chosen = drawn(40, 12, 2, "subspace inputs")
    inputs = train[chosen] if PROJECTORS[name].needs_inputs else None
    la = SubspaceLaplace.paper(network, likelihood, 19, prior, projector=name, subspace_inputs=inputs)
    la.fit([(train, targets)])
    full = SubspaceLaplace.paper(network, likelihood, None, prior, projector="full").fit([(train, targets)])
    test = data.test_inputs.double()
    draw = test[drawn(15, 12, 2, "test inputs")]
    reference = full.functional_covariance(draw, joint=True)
    scores = table([row for row in regression_rows if row.seed == 2])
    for s in (10, 14, 19):
        small = la.truncated(s)
        joint, prediction = small.functional_covariance(draw, joint=True), small.predict(test)
        white = noise**2 * torch.eye(len(joint)).double()
        expected = {
            "kl": metrics.kl_gaussian(reference + white, joint + white),
            "log_trace": metrics.log_trace(joint),
            "relative_error": metrics.relative_error(joint, reference),
            "nll": metrics.nll(prediction.mean, data.test_targets, prediction.total),
            "coverage": metrics.coverage(prediction.mean, prediction.total, data.test_targets),
        }
        found = {metric: scores["toy", name, s][metric] for metric in expected}
        assert found == pytest.approx(expected, rel=1e-6), s


def test_scores_of_classification_are_those_of_the_facade(picture_rows: list[Row], tmp_path: Path) -> None:
    data = pictures()
    network = trained_network(IMAGES, data, 0, tmp_path)
    la = SubspaceLaplace.paper(
        network, "classification", projector="last-layer", prior_precision=IMAGES.prior_precision
    )
    la.fit([(data.train_inputs, data.train_targets)])
    probabilities = la(data.test_inputs)
    assert isinstance(probabilities, Tensor)
    found = table(picture_rows)["mnist", "last-layer", 550]
    assert found["nll"] == pytest.approx(metrics.nll(probabilities, data.test_targets), rel=1e-4)
    assert found["ece"] == pytest.approx(metrics.ece(probabilities, data.test_targets), abs=1e-4)
    assert found["brier"] == pytest.approx(metrics.brier(probabilities, data.test_targets), rel=1e-4)
    full = SubspaceLaplace.paper(network, "classification", projector="full", prior_precision=IMAGES.prior_precision)
    full.fit([(data.train_inputs, data.train_targets)])
    draw = data.test_inputs[drawn(18, 5, 0, "test inputs")]
    p, q = full(draw), la(draw)
    assert isinstance(p, Tensor) and isinstance(q, Tensor)
    assert found["kl_mean"] == pytest.approx(metrics.kl_categorical(p, q), rel=1e-3)
    assert found["kl_sum"] == pytest.approx(5 * found["kl_mean"])


def test_the_plain_network_is_scored_without_uncertainty(picture_rows: list[Row], tmp_path: Path) -> None:
    data = pictures()
    network = trained_network(IMAGES, data, 0, tmp_path)
    logits = network(data.test_inputs).double()
    found = table(picture_rows)["mnist", "map", 0]
    assert found["nll"] == pytest.approx(nn.functional.cross_entropy(logits, data.test_targets).item(), rel=1e-6)
    assert found["accuracy"] == (logits.argmax(1) == data.test_targets).double().mean().item()
    assert found["log_trace"] == -math.inf and found["relative_error"] == 1


def test_ensemble_of_regression_is_a_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(3, 7, 2, generator=generator, dtype=torch.float64)
    targets = torch.randn(7, 2, generator=generator, dtype=torch.float64)
    deviations = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    parts = Independent(Normal(means.transpose(0, 1), deviations[None, :, None]), 1)
    mixture = MixtureSameFamily(Categorical(torch.ones(7, 3)), parts)
    found = scoring.mixture_scores(means, deviations, targets)
    assert found["nll"] == pytest.approx(-mixture.log_prob(targets).mean().item())
    # The ellipsoid of the mixture's moments, which do not depend on the parts' correlation.
    covariance = torch.diag_embed(mixture.variance)
    spread = means - means.mean(0)
    covariance[:, 0, 1] = covariance[:, 1, 0] = (spread[:, :, 0] * spread[:, :, 1]).mean(0)
    assert found["coverage"] == metrics.coverage(mixture.mean, covariance, targets)


def test_ensemble_of_one_network_is_that_network() -> None:
    mean = torch.randn(1, 30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.zeros(30, 2)
    found = scoring.mixture_scores(mean, torch.tensor([0.7], dtype=torch.float64), targets)
    covariance = 0.49 * torch.eye(2).double().expand(30, 2, 2)
    assert found["nll"] == pytest.approx(metrics.nll(mean[0], targets, covariance))
    assert found["coverage"] == metrics.coverage(mean[0], covariance, targets)


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_temperature_is_found(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20_000, 4, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    assert scoring.best_temperature(temperature * logits, labels) == pytest.approx(temperature, rel=0.03)


def test_dead_parameters_are_those_without_any_gradient() -> None:
    """A hidden unit that no input switches on: its weights and bias are dead, and so is the weight that follows it."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        network[0].bias[:] = 50.0
        network[0].bias[3] = -50.0
    problem = Problem(PLAIN, regression(), network, 0)
    largest = sensitivities(problem, regression().train_inputs).amax(0)
    assert int((largest == 0).sum()) == 8 + 1 + 2


def test_sensitivity_map_is_kept_in_order(tmp_path: Path) -> None:
    recipe = replace(PLAIN, network="mlp-8-2", maps_sensitivity=True)
    network = trained_network(recipe, regression(), 0, tmp_path).double()
    problem = Problem(recipe, regression(), network, 0)
    run = SeedRun(problem, scored_sets(recipe, regression(), ()), Results(tmp_path / "results.csv"), tmp_path)
    run._facts_of_the_network()
    kept = np.load(tmp_path / "dead_parameters-toy.npz")
    assert kept["sensitivity"].shape == (17922,) and kept["heat_map"].shape == (15, 512)
    assert (np.diff(kept["sensitivity"]) <= 0).all()
    assert kept["heat_map"].mean() == pytest.approx(kept["sensitivity"].mean(), rel=1e-2)


# Small pieces


def test_grid_ends_at_the_rank() -> None:
    assert capped([1, 5, 10, 20], 7) == [1, 5, 7]
    assert capped([1, 5], 7) == [1, 5]


def test_draws_depend_on_seed_and_purpose() -> None:
    first = drawn(100, 20, 0, "a")
    assert torch.equal(first, drawn(100, 20, 0, "a"))
    assert len(first.unique()) == 20
    assert not torch.equal(first, drawn(100, 20, 1, "a")) and not torch.equal(first, drawn(100, 20, 0, "b"))
    assert torch.equal(drawn(5, 20, 0, "a"), torch.arange(5))


def test_measured_memory_is_that_of_the_work() -> None:
    result, cost = measured(lambda: torch.ones(50, 2**20).sum(0))
    assert len(result) == 2**20
    assert 190 < cost.peak_memory_mb < 260 and cost.kept_memory_mb < 60


def test_costs_add_up() -> None:
    both = Cost(1.0, peak_memory_mb=100.0, kept_memory_mb=30.0).then(Cost(2.0, 80.0, 5.0))
    assert both == Cost(3.0, 110.0, 35.0)


def test_swag_follows_the_recipe(tmp_path: Path) -> None:
    network = trained_network(PLAIN, regression(), 0, tmp_path).double()

    def chosen(recipe: Recipe) -> list[int]:
        projection = feasible_projection("subset-swag", Problem(recipe, regression(), network, 0), 30)
        return projection.indices.tolist()  # type: ignore[attr-defined]

    assert chosen(PLAIN) == chosen(PLAIN)
    assert chosen(PLAIN) != chosen(replace(PLAIN, swag_snapshots=12))
    assert chosen(PLAIN) != chosen(replace(PLAIN, swag_learning_rate=0.1))


# Resumed runs

TINY = replace(PLAIN, training=replace(PLAIN.training, epochs=3), num_inputs=4, largest_dim=10)


def values(results: Results) -> dict[tuple[object, ...], float]:
    """All numbers but times and memory, which are other ones every time."""
    rows = [row for row in results.rows() if not row.metric.endswith("_seconds")]
    assert len({(row.job, row.s, row.metric) for row in rows}) == len(rows), "a row is doubled"
    return {(row.job, row.s, row.metric): row.value for row in rows}


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("through")
    runs.run(TINY, regression(), [0], Results(folder / "results.csv"), folder)
    return folder


@pytest.fixture
def finished(through: Path, tmp_path: Path) -> Results:
    """A copy of a finished run, whose results are in the folder of what was computed."""
    shutil.copytree(through, tmp_path, dirs_exist_ok=True)
    return Results(tmp_path / "results.csv")


def test_a_finished_run_adds_nothing(finished: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    before = finished.path.read_bytes()

    def fail(*_: object) -> None:
        raise AssertionError("done again")

    monkeypatch.setattr(seed_run, "measured", fail)
    runs.run(TINY, regression(), [0], finished, finished.path.parent)
    assert finished.path.read_bytes() == before


def test_a_missing_job_is_done_again_without_the_exact_ggn(finished: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = values(finished)
    lines = finished.path.read_text().splitlines(keepends=True)
    finished.path.write_text("".join(line for line in lines if ",lowrank-diagonal," not in line))
    assert len(values(finished)) < len(expected)
    monkeypatch.setattr(fits, "exact_posterior", lambda _: pytest.fail("the covariance is on disk"))
    runs.run(TINY, regression(), [0], finished, finished.path.parent)
    assert values(finished) == expected


def test_some_methods_alone_give_the_rows_that_they_have_among_all(through: Path, tmp_path: Path) -> None:
    some = Results(tmp_path / "some.csv")
    runs.run(TINY, regression(), [0], some, tmp_path, methods=["map", "lowrank-diagonal"])
    assert {row.projector for row in some.rows()} == {"map", "lowrank-diagonal"}
    everything = Results(through / "results.csv")
    assert values(some).items() < values(everything).items()
    runs.run(TINY, regression(), [0], some, tmp_path)
    assert values(some) == values(everything)


def test_a_reference_of_another_recipe_is_not_used(finished: Results) -> None:
    second = Results(finished.path.with_name("other.csv"))
    other = replace(TINY, prior_precision=50.0)
    runs.run(other, regression(), [0], second, finished.path.parent, methods=["full"])
    (zero,) = [row.value for row in second.rows() if (row.projector, row.metric) == ("full", "kl")]
    assert zero < 1e-12


def test_a_killed_run_goes_on_where_it_was(through: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    fork = multiprocessing.get_context("fork")

    def run() -> None:
        # A child of a process with threads must not start more of them.
        torch.set_num_threads(1)
        # tqdm's lock is shared with this process, which would wait for ever for a child killed while it holds it.
        tqdm.set_lock(threading.RLock())
        runs.run(TINY, regression(), [0], Results(path), tmp_path / "killed")

    seen = 0
    for jobs in (1, 4, 7):
        process = fork.Process(target=run)
        process.start()
        while len(Results(path).done()) < jobs and process.is_alive():
            time.sleep(0.01)
        process.kill()
        process.join()
        assert len(Results(path).done()) >= max(jobs, seen), "a job is lost"
        seen = len(Results(path).done())
    runs.run(TINY, regression(), [0], Results(path), tmp_path / "killed")
    assert values(Results(path)) == pytest.approx(values(Results(through / "results.csv")), rel=1e-9, nan_ok=False)


# The command line


def test_commands_explain_bad_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"unknown data set 'iris'; choose of enb, redwine"):
        main(["train", "iris"])
    with pytest.raises(SystemExit, match="name the data sets to run, or give --smoke"):
        main(["run"])
    with pytest.raises(SystemExit, match=r"unknown method 'swag'; choose of full, lowrank-ggn"):
        main(["run", "enb", "--methods", "map", "swag"])
    monkeypatch.setenv("SUBLAPLACE_DATA", "/nowhere/at/all")
    assert main(["train", "enb", "--seeds", "1"]) == 1
    assert "SUBLAPLACE_DATA=/nowhere/at/all is not a folder" in capsys.readouterr().err


def test_an_interrupted_command_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> Dataset:
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.datasets.load", interrupted)
    assert main(["train", "enb", "--seeds", "1"]) == 130
    assert "same command goes on" in capsys.readouterr().err


def test_list_shows_every_data_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results = Results(tmp_path / "results.csv")
    results.add([Row("mnist-c/fog", 0, "map", 0, "nll", 1.0), Row("mnist", 0, "map", 0, "nll", 1.0)])
    assert main(["list", "--results", str(results.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(RECIPES)
    counts = {line.split()[0]: line.split()[-1] for line in lines[1:]}
    assert counts["mnist"] == "2" and counts["enb"] == "0"


@pytest.mark.slow
@pytest.mark.skipif("SUBLAPLACE_DATA" not in os.environ, reason="SUBLAPLACE_DATA names no data folder")
def test_smoke(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--smoke"]) == 0
    assert "the experiments run" in capsys.readouterr().out
