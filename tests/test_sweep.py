"""V at many prior precisions and weights from one set of Jacobian rows: against brute force in float64."""

import copy
import itertools

import pytest
import torch
from dense_reference import dense_ggn, dense_outputs
from test_complement import NOISE, PRIOR, Problem, close, dense_complemented, dense_outside

from sublaplace import Complement, Gaussian, SubspaceLaplace
from sublaplace.curvature.exact_precision import DensePrecision, DualPrecision
from sublaplace.model import linalg
from sublaplace.posteriors import binned_sweep, sweep
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.posteriors.subspace import SubspacePosterior

KINDS = ["classification", "regression", "per-output"]
NAMES = ["mlp", "paper-cnn", "conv-groups", "embedding", "tied-weights"]
TAUS = torch.tensor([1e-4, 1e-2, 0.3, 1.0, 20.0, 1e4], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 0.01, 5.0, 0.3, 1e-4, 40.0], dtype=torch.float64)
WEIGHTED = Complement("kfac", weight=3.0)


def problem_of(name, kind):
    if kind != "per-output":
        problem = Problem(name, kind)
        problem.unit = 1.0 if kind == "classification" else NOISE**-2
        return problem
    problem = Problem(name, "regression")
    C = dense_outputs(problem.model, problem.new).shape[1]
    noise = tuple(0.2 + 0.3 * k for k in range(C))
    problem.options = {"likelihood": Gaussian(noise)}
    count = len(dense_outputs(problem.model, problem.training))
    hessians = torch.tensor(noise, dtype=torch.float64).pow(-2).diag().expand(count, C, C)
    problem.ggn = dense_ggn(problem.model, problem.training, hessians)
    problem.unit = 1.0  # where outputs have scales of their own, V holds them
    return problem


def swept(la, inputs, taus=TAUS, whole=True):
    (jacobian,) = la._state.linearization.chunks(inputs)
    return sweep.prior_sweep(la._state.posterior, taus)(jacobian, whole)


def swept_weights(la, inputs, whole=True):
    (jacobian,) = la._state.linearization.chunks(inputs)
    return sweep.weight_sweep(la._state.posterior, WEIGHTS)(jacobian, whole)


def blocks(joint, n):
    C = len(joint) // n
    return torch.stack([joint[i : i + C, i : i + C] for i in range(0, n * C, C)])


def expected_of(problem, psi):
    """V = unit · JΨJᵀ for every input."""
    return problem.unit * blocks(problem.jacobian @ psi @ problem.jacobian.T, 4)


def identity(problem):
    return torch.eye(len(problem.ggn), dtype=torch.float64)


def assert_same(found, expected, tolerance):
    """Each point for itself, so that a small V is judged as strictly as a large one."""
    assert found.shape == expected.shape and found.dtype == torch.float64
    for one, other in zip(found, expected, strict=True):
        assert close(one, other, tolerance)


def one_bin_for_every_eigenvalue(monkeypatch):
    monkeypatch.setattr(binned_sweep, "BINS_PER_DECADE", 100)  # 1,201 bins, more than there are parameters
    monkeypatch.setattr(binned_sweep, "_NEGLIGIBLE", 1e-15)  # none share the last bin
    used = itertools.count()
    monkeypatch.setattr(
        binned_sweep, "_bins", lambda eigenvalues, _, count: torch.tensor([next(used) % count for _ in eigenvalues])
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_subspace_is_swept_exactly(name, kind):
    problem = problem_of(name, kind)
    la = problem.fit()
    assert isinstance(la._state.posterior, SubspacePosterior)
    P = la.projection_matrix()
    expected = torch.stack(
        [
            expected_of(
                problem,
                P @ torch.linalg.solve(P.T @ (problem.ggn + float(tau) * problem.unit * identity(problem)) @ P, P.T),
            )
            for tau in TAUS
        ]
    )
    assert_same(swept(la, problem.new), expected, 1e-9)
    assert_same(swept(la, problem.new, whole=False), expected.diagonal(dim1=2, dim2=3), 1e-9)


def test_a_basis_that_is_not_orthonormal_is_swept_exactly():
    problem = problem_of("mlp", "classification")
    posterior = problem.fit()._state.posterior
    mix = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, turn = linalg.diagonalised(mix.T @ posterior.curvature @ mix, mix.T @ posterior.gram @ mix)
    for tau in (0.01, 3.0):
        expected = mix @ torch.linalg.solve(mix.T @ (posterior.curvature + tau * posterior.gram) @ mix, mix.T)
        assert close(mix @ turn @ (1 / (values + tau)).diag() @ turn.T @ mix.T, expected, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [DensePrecision, DualPrecision])
@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "embedding", "tied-weights"])
def test_the_full_posterior_is_swept_exactly(name, form, kind):
    problem = problem_of(name, kind)
    la = problem.fit(projector="full", dim=None)
    if form is DensePrecision:
        dense = DensePrecision(la._layout, problem.ggn, PRIOR, problem.unit)
        object.__setattr__(la._state, "posterior", dense)
    assert isinstance(la._state.posterior, form)
    expected = torch.stack(
        [
            expected_of(problem, torch.linalg.inv(problem.ggn + float(tau) * problem.unit * identity(problem)))
            for tau in TAUS
        ]
    )
    assert_same(swept(la, problem.new), expected, 1e-8)
    assert_same(swept(la, problem.new, whole=False), expected.diagonal(dim1=2, dim2=3), 1e-8)


def dense_kfac(problem, kind, tau, weight):
    """(wK + τ · unit)⁻¹ with K of the fit with the weight 1."""
    curvature = torch.linalg.inv(dense_outside(problem, kind)) - PRIOR * identity(problem)
    return torch.linalg.inv(weight * curvature + tau * problem.unit * identity(problem))


def dense_points(problem, P, points, kind="kfac"):
    found = []
    for tau, weight in points:
        psi = dense_kfac(problem, kind, tau, weight)
        if P is not None:
            psi = dense_complemented(problem, P, psi, tau * problem.unit)
        found.append(expected_of(problem, psi))
    return torch.stack(found)


def along_prior(weight):
    return [(tau, weight) for tau in TAUS.tolist()]


def along_weight(problem):
    return [(PRIOR / problem.unit, weight) for weight in WEIGHTS.tolist()]


CASES = [(name, True) for name in NAMES] + [("paper-cnn", False), ("embedding", False)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "subspace"), CASES)
def test_a_complement_is_exact_where_every_eigenvalue_has_its_own_bin(name, subspace, kind, monkeypatch):
    problem = problem_of(name, kind)
    options = {"dim": 3} if subspace else {"projector": None, "dim": None}
    la = problem.fit(complement=WEIGHTED, **options)
    assert isinstance(la._state.posterior, ComplementedPosterior) is subspace
    P = la.projection_matrix() if subspace else None
    expected = dense_points(problem, P, along_prior(WEIGHTED.weight))
    variances = expected.diagonal(dim1=2, dim2=3)
    # So few eigenvalues as here do not average out what rounding them to bins does; twice the bins halve it.
    for bins, most in ((5, 0.1), (10, 0.03)):
        monkeypatch.setattr(binned_sweep, "BINS_PER_DECADE", bins)
        rough = swept(la, problem.new, whole=False)
        assert ((rough - variances).abs() <= most * variances).all()
        assert_same(swept(la, problem.new), expected, most)
    one_bin_for_every_eigenvalue(monkeypatch)
    assert_same(swept(la, problem.new), expected, 1e-8)
    assert_same(swept(la, problem.new, whole=False), variances, 1e-8)
    weighted = dense_points(problem, P, along_weight(problem))
    assert_same(swept_weights(la, problem.new), weighted, 1e-8)
    assert_same(swept_weights(la, problem.new, whole=False), weighted.diagonal(dim1=2, dim2=3), 1e-8)


@pytest.mark.parametrize("options", [{"dim": 8}, {"projector": None}])
def test_on_a_network_of_ordinary_size_bins_change_variances_by_less_than_three_percent(options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [
            torch.nn.Linear(8, 60),
            torch.nn.ReLU(),
            torch.nn.Linear(60, 60),
            torch.nn.ReLU(),
            torch.nn.Linear(60, 2),
        ]
        model, inputs, new = torch.nn.Sequential(*layers).double(), torch.randn(150, 8).double(), torch.randn(20, 8)
    targets = model(inputs).detach() + 0.1
    complement = Complement("kfac", weight=1.0)
    la = SubspaceLaplace(model, "regression", complement=complement, prior_precision=1.0, **options)
    la.fit([(inputs, targets)])
    unit = la.noise_std**-2
    expected = torch.stack([unit * la.with_prior(float(tau) * unit).functional_variance(new.double()) for tau in TAUS])
    found = swept(la, new.double(), whole=False)
    assert ((found - expected).abs() <= 0.03 * expected).all()


@pytest.mark.parametrize("subspace", [True, False])
def test_a_diagonal_complement_is_swept_as_well(subspace, monkeypatch):
    problem = problem_of("paper-cnn", "classification")
    options = {"dim": 3} if subspace else {"projector": None, "dim": None}
    la = problem.fit(complement=Complement("diagonal", weight=0.5), **options)
    one_bin_for_every_eigenvalue(monkeypatch)
    P = la.projection_matrix() if subspace else None
    assert_same(swept(la, problem.new), dense_points(problem, P, along_prior(0.5), "diagonal"), 1e-8)
    assert_same(swept_weights(la, problem.new), dense_points(problem, P, along_weight(problem), "diagonal"), 1e-8)


@pytest.mark.parametrize("projector", ["subset-magnitude", "lowrank-ggn"])
def test_other_projectors_and_leading_dimensions_are_swept(projector, monkeypatch):
    problem = problem_of("mlp", "regression")
    la = problem.fit(projector=projector, dim=6, complement=WEIGHTED).truncated(2)
    one_bin_for_every_eigenvalue(monkeypatch)
    expected = dense_points(problem, la.projection_matrix(), along_prior(WEIGHTED.weight))
    assert_same(swept(la, problem.new), expected, 1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"complement": WEIGHTED}, {"projector": "full", "dim": None}])
def test_it_does_not_depend_on_the_prior_and_the_noise_of_the_posterior(options, kind):
    problem = problem_of("mlp", kind)
    la = problem.fit(**options)
    other = la.with_prior(30.0)
    points = torch.tensor([0.1, 2.0], dtype=torch.float64)
    assert_same(swept(other, problem.new, points), swept(la, problem.new, points), 1e-9)
    if kind == "regression":
        scaled = la._with(la._state.with_noise_factor(3.0))
        assert_same(swept(scaled, problem.new, points), swept(la, problem.new, points), 1e-9)


@pytest.mark.parametrize("options", [{}, {"complement": WEIGHTED}, {"projector": "full", "dim": None}])
def test_at_its_own_prior_it_is_what_the_posterior_predicts(options, monkeypatch):
    problem = problem_of("paper-cnn", "regression")
    la = problem.fit(**options)
    one_bin_for_every_eigenvalue(monkeypatch)
    own = torch.tensor([PRIOR / problem.unit], dtype=torch.float64)
    found = swept(la, problem.new, own)[0] / problem.unit
    assert close(found, la.functional_covariance(problem.new), 1e-8)


def test_a_network_without_curvature_is_swept():
    # One input at which every layer before the last has no gradient: most eigenvalues are zero.
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1, bias=False)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    la = SubspaceLaplace(
        model, Gaussian(0.5), projector=None, complement=Complement("kfac", weight=1.0), prior_precision=1.0
    ).fit([(torch.ones(4, 2).double(), torch.zeros(4, 1).double())])
    found = swept(la, torch.ones(1, 2).double())
    assert torch.equal(found, torch.zeros(len(TAUS), 1, 1, 1, dtype=torch.float64))


def test_in_float32_it_is_right_to_its_rounding():
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    generator = torch.Generator().manual_seed(0)
    inputs, new = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (40, 5))
    targets = model(inputs).detach() + 0.1
    found = []
    for dtype in (torch.float64, torch.float32):
        network = torch.nn.Sequential(*(copy.deepcopy(layer) for layer in model)).to(dtype)
        la = SubspaceLaplace(network, Gaussian(0.3), 6, complement=WEIGHTED, prior_precision=1.0)
        la.fit([(inputs.to(dtype), targets.to(dtype))])
        found.append([swept(la, new.to(dtype), whole=whole) for whole in (True, False)])
        found[-1] += [swept_weights(la, new.to(dtype), whole=whole) for whole in (True, False)]
    for exact, rounded in zip(*found, strict=True):
        assert_same(rounded, exact, 1e-3)
