"""The weight of the curvature outside of the subspace, given and fitted: against brute force in float64."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_reference import dense_jacobian, dense_outputs, pairwise_probabilities
from networks import make, pairs
from test_complement import KINDS, PRIOR, SMALL, Problem, close, dense_complemented, dense_outside

from sublaplace import Bernoulli, Complement, Gaussian, Jacobians, SubspaceLaplace, low_rank, metrics
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.data.batches import Batch, num_inputs, select
from sublaplace.posteriors import weighting


def weighted_outside(problem, complement, weight, prior=PRIOR):
    """(wK + λ)⁻¹ from (K + λ)⁻¹."""
    identity = torch.eye(len(problem.ggn), dtype=torch.float64)
    curvature = torch.linalg.inv(dense_outside(problem, complement)) - PRIOR * identity
    return torch.linalg.inv(weight * curvature + prior * identity)


@pytest.mark.parametrize(("name", "kind"), pairs(KINDS))
def test_the_covariance_is_that_of_the_formula_with_the_weighted_curvature(name, kind):
    problem = Problem(name, kind)
    la = problem.fit(complement=Complement("kfac", weight=3.0))
    expected = dense_complemented(problem, la.projection_matrix(), weighted_outside(problem, "kfac", 3.0))
    assert la.complement_weight == 3.0
    assert close(problem.covariance(la), problem.jacobian @ expected @ problem.jacobian.T)


@pytest.mark.parametrize("complement", ["kfac", "diagonal"])
def test_another_prior_and_fewer_dimensions_keep_the_weight(complement):
    problem = Problem("mlp", "regression")
    la = problem.fit(complement=Complement(complement, weight=0.25))
    other = la._state.posterior.with_prior(2.0).truncated(3)
    outside = weighted_outside(problem, complement, 0.25, prior=2.0)
    expected = dense_complemented(problem, la.projection_matrix()[:, :3], outside, prior=2.0)
    jacobians = Jacobians(la._state.linearization, problem.new)
    assert close(other.joint_covariance(jacobians), problem.jacobian @ expected @ problem.jacobian.T)


def test_without_a_subspace_the_whole_posterior_is_weighted():
    problem = Problem("mlp", "regression")
    la = problem.fit(projector=None, dim=None, complement=Complement("kfac", weight=4.0))
    expected = problem.jacobian @ weighted_outside(problem, "kfac", 4.0) @ problem.jacobian.T
    assert close(problem.covariance(la), expected)


# Fitted


def divergences(problem, la, inputs, rest=None):
    """Summed KL of some inputs as a function of the weight, dense; `rest`: of the data without the only input."""
    J, outputs = dense_jacobian(problem.model, inputs), dense_outputs(problem.model, inputs)
    likelihood = la._options.likelihood
    C = len(J) // num_inputs(inputs)

    def divergence(exact, covariance, f):
        if isinstance(likelihood, Gaussian):
            noise = likelihood.noise_std**2 * torch.eye(C).double()
            return metrics.kl_gaussian(exact + noise, covariance + noise)
        return metrics.kl_categorical(
            *(pairwise_probabilities(f[None], c.diagonal()[None]) for c in (exact, covariance)), "sum"
        )

    precise = problem if rest is None else rest
    exact = J @ torch.linalg.solve(precise.precision, J.T)

    def summed(weight):
        outside = weighted_outside(problem, "kfac", weight)
        covariance = J @ (dense_complemented(precise, la.projection_matrix(), outside) if la.dim else outside) @ J.T
        blocks = [slice(i, i + C) for i in range(0, len(J), C)]
        return sum(divergence(exact[b, b], covariance[b, b], f) for b, f in zip(blocks, outputs, strict=True))

    return summed


def assert_best(weight, divergence):
    """The weight is as good as any power of two; KFAC's eigenvalues are in bins where it is looked for."""
    assert divergence(weight) <= 1.02 * min(divergence(2.0**k) for k in range(-12, 11)) + 1e-8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SMALL)
def test_the_fitted_weight_is_the_best_on_new_inputs_that_were_held_back(name, kind):
    problem = Problem(name, kind)
    seen = []

    def spy(context):
        seen.append(context.subspace_jacobians.inputs)
        return low_rank(context.subspace_jacobians, context.kfac(), context.dim)

    given = {"subspace_inputs": problem.new, "projector": spy, "complement": "kfac"}
    la = problem.fit(**given)
    assert num_inputs(seen[0]) == 3
    assert la.complement_weight == 1.0  # fewer than 32 training inputs tell nothing of it
    held_back = select(problem.new, slice(3, 4))
    J = dense_jacobian(problem.model, held_back)
    exact = (J @ torch.linalg.solve(problem.precision, J.T))[None]
    jacobians = Jacobians(la._state.linearization, held_back)
    weight = weighting.nearest(la._state.posterior, exact, jacobians, la._options.likelihood, torch.zeros(1, 1))
    assert_best(weight, divergences(problem, la, held_back))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, 4])
@pytest.mark.parametrize("name", SMALL)
def test_a_training_input_is_judged_as_if_it_had_not_been_seen(name, dim, kind):
    problem, rest = Problem(name, kind), Problem(name, kind, skip=1)
    plain = Complement("kfac", weight=1.0)
    la = problem.fit(complement=plain, dim=dim) if dim else problem.fit(complement=plain, dim=None, projector=None)
    first = select(problem.training, slice(0, 1))
    J = dense_jacobian(problem.model, first)
    exact = (J @ torch.linalg.solve(problem.precision, J.T))[None]
    jacobians, likelihood = Jacobians(la._state.linearization, first), la._state.survey.likelihood
    weight = weighting.nearest(
        la._state.posterior, exact, jacobians, likelihood, torch.ones(num_inputs(jacobians.inputs), 1)
    )
    assert_best(weight, divergences(problem, la, first, rest))


def test_where_the_exact_curvature_does_not_fit_the_weight_is_the_same(monkeypatch):
    problem = Problem("mlp", "regression")
    options = {"complement": "kfac"}
    expected = problem.fit(**options).complement_weight
    monkeypatch.setattr("sublaplace.curvature.cache.fits", lambda *_: False)
    monkeypatch.setattr("sublaplace.curvature.cache.exact_ggn", lambda *_: pytest.fail("it does not fit"))
    assert problem.fit(**options).complement_weight == expected


def test_a_complement_of_the_wrong_size_is_corrected():
    # KFAC of a single layer is exact in regression: a quarter of the curvature needs the weight 4.
    torch.manual_seed(0)
    inputs = torch.randn(40, 4, dtype=torch.float64)
    model = torch.nn.Linear(4, 1, bias=False).double()
    batches = [(inputs, model(inputs).detach() + torch.randn(40, 1).double())]
    right = SubspaceLaplace(model, Gaussian(0.5), projector=None, complement="kfac", prior_precision=1.0).fit(batches)
    assert right.complement_weight == pytest.approx(1.0, rel=0.02)
    linearization = right._state.linearization
    stream = CurvatureStream(linearization, batches, Gaussian(0.5), num_data=40)
    quarter = replace(right._state.posterior.reweighted(0.25), weight=1.0)
    new = Jacobians(linearization, torch.randn(8, 4, dtype=torch.float64))
    corrected = weighting.fitted_weight(quarter, stream, 40, new, Batch(*batches[0], None))
    assert corrected == pytest.approx(4.0 * right.complement_weight, rel=0.05)


def test_the_weight_is_kept_in_a_file(tmp_path: Path):
    problem = Problem("mlp", "classification")
    la = problem.fit(complement="kfac")
    la.save(tmp_path / "la.safetensors")
    other = SubspaceLaplace.load(tmp_path / "la.safetensors", problem.model)
    assert other.complement_weight == la.complement_weight
    assert torch.equal(other.functional_covariance(problem.new), la.functional_covariance(problem.new))
    assert (f"{la.complement_weight:g}" in la.summary()) or la.complement_weight == 1.0


def test_bad_weights_are_refused():
    model, _ = make("mlp", 3)
    for weight, message in (("best", "Unknown weight 'best'.*'fitted'"), (-1, "weight must be positive")):
        with pytest.raises(ValueError, match=message):
            Complement("kfac", weight=weight)
    with pytest.raises(TypeError, match="weight must be one positive number"):
        Complement("kfac", weight=None)
    with pytest.raises(ValueError, match="Unknown complement None"):
        Complement(None, weight=2.0)
    for options in ({"complement_weight": 2.0}, {"complement": "kfac", "complement_weight": "fitted"}):
        with pytest.raises(TypeError, match=r"'complement_weight'.*complement=Complement\('kfac', weight=1\.0\)"):
            SubspaceLaplace(model, "classification", **options)


def test_a_complement_by_name_has_a_fitted_weight():
    problem = Problem("mlp", "regression")
    named, explicit = problem.fit(complement="kfac"), problem.fit(complement=Complement("kfac", weight="fitted"))
    assert named.complement_weight == explicit.complement_weight
    assert torch.equal(named.functional_covariance(problem.new), explicit.functional_covariance(problem.new))


@pytest.mark.parametrize("weight", [1.0, 0.1, 0.01])
def test_a_weighted_training_input_is_taken_out_with_its_weight(weight):
    """Regression with weight w on every input is regression with the noise σ/√w: the fitted weight is the same."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)
    model = torch.nn.Sequential(*layers).double()
    inputs, targets = torch.randn(40, 4).double(), torch.randn(40, 2).double()
    options = {"dim": 6, "complement": "kfac", "prior_precision": 0.01}
    la = SubspaceLaplace(model, Gaussian(0.1), **options)
    la.fit([(inputs, targets, torch.full((40,), weight).double())])
    expected = SubspaceLaplace(model, Gaussian(0.1 / weight**0.5), **options).fit([(inputs, targets)])
    # What is predicted differs in its noise, so that the weights may differ by a step; without the weight of the
    # inputs, variances would be negative and the weight 64.
    assert 0.5 <= la.complement_weight / expected.complement_weight <= 2


def test_ignored_targets_are_not_taken_out():
    model, inputs = make("mlp", 30)
    answers = (dense_outputs(model, inputs) > 0).long()
    missing = answers.clone()
    missing[:, 1:] = -1
    options = {"dim": 4, "complement": "kfac", "prior_precision": 0.01}
    la = SubspaceLaplace(model, Bernoulli(ignore_index=-1), **options).fit([(inputs, missing)])
    (jacobian,) = Jacobians(la._state.linearization, inputs[:3])
    H = weighting._hessians(jacobian, Bernoulli(ignore_index=-1), torch.tensor([[1.0, 0]]).expand(3, 2).double())
    assert (H[:, 1:] == 0).all() and (H[:, :, 1:] == 0).all() and (H[:, 0, 0] > 0).all()
    assert torch.linalg.eigvalsh(la.functional_covariance(inputs)).min() > 0


def test_where_no_weight_is_better_it_stays_one():
    # Training inputs that are all in the subspace, each six times: nothing of them is left outside.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()
    inputs = torch.randn(6, 4).double().repeat(10, 1)
    targets = torch.randn(60, 2).double()
    la = SubspaceLaplace(
        model, Gaussian(0.5), projector="lowrank-ggn", dim=12, complement=Complement("kfac", weight="fitted")
    ).fit([(inputs, targets)])
    assert la.complement_weight == 1.0
