"""KFAC outside of the subspace: the rows of the experiments against the façade, and resumed runs."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from test_runs import IMAGES, PLAIN, pictures, regression
from torch import nn
from torch.distributions import Normal

from experiments import runs, scores
from experiments.fits import Fits
from experiments.methods import (
    COMPLEMENTED,
    Complemented,
    Problem,
    complemented_posteriors,
    feasible_projection,
    reduced_posterior,
)
from experiments.results import Job, Results
from experiments.scored_sets import TestSet
from experiments.scores import own_prior_scores
from experiments.seed_run import SeedRun
from experiments.sweeps import Sweep
from experiments.training import trained_network
from experiments.weighting import WEIGHTS, nearest_power
from sublaplace import Complement, DensePrecision, SubspaceLaplace, metrics
from sublaplace.data.subspace_inputs import perturbed
from sublaplace.posteriors.weighting import nearest

pytestmark = pytest.mark.usefixtures("small_networks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("complements")
    results = Results(place / "results.csv")
    runs.run(PLAIN, regression(), [0], results, place)
    return place


def test_every_candidate_has_its_rows_and_none_twice(folder: Path) -> None:
    results = Results(folder / "results.csv")
    rows = [row for row in results.rows() if row.complement]
    assert {Complemented(row.projector, row.inputs, row.complement) for row in rows} == set(COMPLEMENTED)
    assert {row.metric for row in rows} >= {"kl", "log_trace", "relative_error", "nll", "coverage"}
    assert len({(row.job, row.s, row.metric) for row in rows}) == len(rows)
    runs.run(PLAIN, regression(), [0], results, folder)
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
    prior = PLAIN.prior_precision
    full = SubspaceLaplace.paper(problem.network, problem.likelihood, projector="full", prior_precision=prior)
    full.fit(loader)
    X = problem.context.subspace_jacobians.inputs
    la = SubspaceLaplace(
        problem.network,
        problem.likelihood,
        projector="lowrank-kfac",
        dim=400,
        complement=Complement("kfac", weight=1.0),
        prior_precision=prior,
        subspace_inputs=X,
    )
    with pytest.warns(UserWarning, match="rank"):
        la.fit(loader)
    noise = problem.noise_std**2 * torch.eye(2 * len(drawn), dtype=torch.float64)
    joint = [posterior.functional_covariance(drawn, joint=True) + noise for posterior in (full, la)]
    (found,) = (row for row in rows if row.projector == "lowrank-kfac")
    assert found.s == la.dim
    assert found.value == pytest.approx(metrics.kl_gaussian(*joint), rel=1e-4)


@pytest.mark.parametrize("method", [method for method in COMPLEMENTED if method.needs_exact])
def test_candidates_with_the_exact_curvature_are_those_of_the_facade(folder: Path, method: Complemented) -> None:
    data = regression()
    problem = Problem(PLAIN, data, trained_network(PLAIN, data, 0, folder / "weights"), 0).to(PLAIN.dtype)
    key = Job("toy", 0, method.projector, method.inputs, method.complement)
    found = {row.metric: row.value for row in Results(folder / "results.csv").rows() if row.job == key}
    X = problem.context.subspace_jacobians.inputs
    if method.complement == "kfac-fitted":
        X = X[:-2]  # a fifth of twelve is held back
    noisy = perturbed(X, 0.1, 0)
    la = SubspaceLaplace(
        problem.network,
        problem.likelihood,
        projector=method.projector,
        dim=400,
        complement=Complement("kfac", weight=found["complement_weight"]),
        prior_precision=PLAIN.prior_precision,
        subspace_inputs={"train": X, "perturbed": noisy, "augmented": torch.cat([X, noisy])}[method.inputs],
    )
    with pytest.warns(UserWarning, match="rank"):
        la.fit([(data.train_inputs.double(), data.train_targets.double())])
    prediction = la.predict(data.test_inputs.double())
    expected = metrics.nll(prediction.mean, data.test_targets, prediction.total)
    assert found["nll"] == pytest.approx(expected, rel=1e-5)


def small_problem(kind: str, seed: int) -> Problem:
    """In float64, with fewer parameters than rows of the GGN."""
    torch.manual_seed(0)
    if kind == "regression":
        recipe, data, network = PLAIN, regression(), nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    else:
        network = nn.Sequential(nn.AvgPool2d(7), nn.Flatten(), nn.Linear(16, 10))
        recipe, data = IMAGES, pictures()
    return Problem(recipe, data, network, seed).to(torch.float64)


@pytest.mark.parametrize("projector", ["lowrank-kfac", "subset-magnitude", "last-layer"])
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_dense_curvature_stands_for_passes_over_the_data(kind: str, projector: str) -> None:
    problem = small_problem(kind, 0)
    exact = problem.context.exact()
    assert isinstance(exact, DensePrecision)
    projection = feasible_projection(projector, problem, 12)
    by_pass, by_matrix = (reduced_posterior(problem, projection, known) for known in (None, exact))
    torch.testing.assert_close(by_matrix.curvature, by_pass.curvature, rtol=1e-10, atol=1e-10)
    jacobian = next(iter(problem.jacobians(problem.dataset.test_inputs)))
    by_passes, by_matrix = (
        complemented_posteriors(problem, COMPLEMENTED[0], projection, [5, 12], known)[5].covariance(jacobian)
        for known in (None, exact)
    )
    torch.testing.assert_close(by_matrix, by_passes, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_weight_is_the_power_of_two_next_to_the_library_s(kind: str) -> None:
    problem = small_problem(kind, 0)
    projection = feasible_projection("lowrank-kfac", problem, 5)
    posterior = complemented_posteriors(problem, COMPLEMENTED[0], projection, [5], None)[5]
    inputs = problem.jacobians(problem.dataset.train_inputs[-10:])
    exact = problem.context.exact()
    covariances = torch.cat([exact.covariance(jacobian) for jacobian in inputs])
    expected = nearest(posterior, covariances, inputs, problem.likelihood, torch.ones(10, 1))
    found = nearest_power(posterior, covariances, inputs, problem.likelihood).outside.weight
    assert found in WEIGHTS
    assert abs(math.log2(found) - min(max(math.log2(expected), -6.0), 6.0)) < 0.75


def test_the_first_seed_shows_what_passes_cost_and_the_others_do_without() -> None:
    problems = [small_problem("regression", seed) for seed in (0, 1)]
    first, second = (Fits(problem) for problem in problems)
    for fits, problem in zip((first, second), problems, strict=True):
        fits.exact(problem)
    assert first.dense is None and second.dense is not None
    _, _, cost = first.posterior("subset-magnitude", 5)
    assert cost is not None and cost.seconds > 0
    posterior, _, no_cost = second.posterior("subset-magnitude", 5)
    assert no_cost is None
    by_pass = reduced_posterior(problems[1], posterior.projection)
    torch.testing.assert_close(posterior.curvature, by_pass.curvature, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tuned, best", [(5000, 1.0), (6, 100.0)])
def test_every_half_of_the_test_set_is_scored_with_the_prior_that_suits_the_other(
    tuned: int, best: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One output with a variance of 1/λ: the best λ of each half is known, 0.1 of the first.
    monkeypatch.setattr(scores, "TUNED_OUTPUTS", tuned)
    targets = torch.tensor([[3.0], [0.1]] * 20)
    targets[30:] = torch.tensor([[0.3], [1.0]] * 5)  # beyond those on which λ is chosen, if these are few
    test_set = TestSet("toy", torch.zeros(40, 1), targets)
    problem = Problem(PLAIN, cast("Any", SimpleNamespace(likelihood="regression")), ZeroNetwork(), 0)
    problem.__dict__["noise_std"] = 0.1
    found, certain = own_prior_scores(
        problem, test_set, cast("Sweep", InversePrior()), [1, 0], [0.1, 1.0, 100.0]
    ).values()
    assert certain["own_nll"] == pytest.approx(-float(Normal(0.0, 0.1).log_prob(targets).mean()), rel=1e-5)
    assert found["own_prior_precision"] == pytest.approx(math.sqrt(0.1 * best))
    of_first, of_second = (Normal(0.0, math.sqrt(1 / prior + 0.01)) for prior in (0.1, best))
    expected = -(of_first.log_prob(targets[1::2]).mean() + of_second.log_prob(targets[::2]).mean()) / 2
    assert found["own_nll"] == pytest.approx(float(expected), rel=1e-5)


class ZeroNetwork(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        nn.init.zeros_(self.bias)


class InversePrior:
    """A posterior of one parameter without data, or of none."""

    def under(self, pairs: list[tuple[int, float]]) -> Any:
        return lambda jacobian: (
            ((s, prior), torch.full((jacobian.num_inputs, 1, 1), s / prior).double()) for s, prior in pairs
        )
