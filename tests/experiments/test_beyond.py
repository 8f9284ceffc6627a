"""KFAC outside of the subspace: the rows of the experiments against the façade, and resumed runs."""

from pathlib import Path

import pytest
import torch
from test_runs import IMAGES, PLAIN, pictures, regression

from experiments import beyond, runs
from experiments.beyond import CANDIDATES
from experiments.methods import Problem
from experiments.results import Results
from experiments.runs import SeedRun, TestSet
from experiments.training import trained_network
from sublaplace import SubspaceLaplace, metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("beyond")
    results = Results(place / "results.csv")
    runs.run(PLAIN, regression(), [0], results, place)
    beyond.run(PLAIN, regression(), [0], results, place)
    return place


def test_every_candidate_has_its_rows_and_none_twice(folder: Path) -> None:
    results = Results(folder / "results.csv")
    rows = [row for row in results.rows() if row.complement]
    assert {(row.projector, row.inputs) for row in rows} == set(CANDIDATES)
    assert {row.metric for row in rows} >= {"kl", "log_trace", "relative_error", "nll", "coverage"}
    assert len({(row.projector, row.inputs, row.s, row.metric) for row in rows}) == len(rows)
    beyond.run(PLAIN, regression(), [0], results, folder)
    assert len(Results(folder / "results.csv").rows()) == len(results.rows())


def test_the_divergence_is_that_of_the_facade(folder: Path) -> None:
    data = regression()
    network = trained_network(PLAIN, data, 0, folder / "weights")
    problem = Problem(PLAIN, data, network, 0).to(PLAIN.dtype)
    test_set = TestSet("toy", data.test_inputs, data.test_targets)
    run = SeedRun(problem, [test_set], Results(folder / "results.csv"), folder)
    rows = [row for row in run.results.rows() if row.complement and row.metric == "kl"]
    drawn = run.draw(test_set).double()
    loader = [(data.train_inputs.double(), data.train_targets.double())]
    assert problem.noise_std is not None
    options = {"prior_precision": PLAIN.prior_precision, "noise_std": problem.noise_std}
    full = SubspaceLaplace(problem.network, "regression", "full", **options).fit(loader)
    X = problem.context.subspace_jacobians.inputs
    la = SubspaceLaplace(
        problem.network, "regression", "lowrank-isotropic", 400, complement="kfac", subspace_inputs=X, **options
    )
    with pytest.warns(UserWarning, match="rank"):
        la.fit(loader)
    noise = problem.noise_std**2 * torch.eye(2 * len(drawn), dtype=torch.float64)
    joint = [posterior.functional_covariance(drawn, joint=True) + noise for posterior in (full, la)]
    (found,) = (row for row in rows if row.projector == "lowrank-isotropic")
    assert found.s == la.dim
    assert found.value == pytest.approx(metrics.kl_gaussian(*joint), rel=1e-4)


def test_classification_has_the_candidates_that_need_no_exact_curvature(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.csv")
    data = pictures()
    runs.run(IMAGES, data, [0], results, tmp_path)
    beyond.run(IMAGES, data, [0], results, tmp_path)
    rows = [row for row in results.rows() if row.complement]
    assert {row.projector for row in rows} == {"lowrank-kfac", "lowrank-isotropic"}
    values = {row.metric: row.value for row in rows if row.projector == "lowrank-kfac"}
    assert values["kl_mean"] >= 0 and 0 < values["brier"] < 2


def test_a_set_that_was_not_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="experiments run"):
        beyond.run(PLAIN, regression(), [0], Results(tmp_path / "results.csv"), tmp_path)
