"""What replaces matrices that do not fit: factored covariances, directions without M, solutions without Λ."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from dense_reference import dense_jacobian
from networks import NETWORKS, InfiniteSlope, make, pairs
from test_curvature import PRIOR, stream
from test_laplace import labels, loader
from torch import nn

from sublaplace import ChunkPolicy, Complement, Drawn, Gaussian, Jacobians, Linearization, Resources, SubspaceLaplace
from sublaplace.curvature.exact import exact_ggn
from sublaplace.curvature.joint import factored_joint_covariance
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.matrix_free import MatrixFreePrecision
from sublaplace.curvature.precision import isotropic_precision
from sublaplace.jacobians import probing
from sublaplace.model.likelihoods.categorical import Categorical
from sublaplace.model.linalg import combine, cross_gram, gram, orthonormalise
from sublaplace.projectors.low_rank import rank_tolerance
from sublaplace.projectors.subspace_iteration import dominant_directions

low_rank_module = sys.modules["sublaplace.projectors.low_rank"]
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}


def problem(name, count=8, dtype=torch.float64):
    """A network's data, its KFAC precision and the Jacobians of all inputs."""
    model, inputs = make(name, count, dtype)
    source = stream(model, inputs)
    return source, kronecker_ggn(source, PRIOR), Jacobians(source.linearization, inputs)


def overlap(vectors, others):
    """The smallest cosine between the spans of two sets of vectors."""
    a, b = (orthonormalise({name: part.clone() for name, part in v.items()}) for v in (vectors, others))
    return torch.linalg.svdvals(cross_gram(a, b)).min()


# The covariance of many outputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), pairs([torch.float64, torch.float32]))
def test_joint_covariance_from_factors_equals_that_from_rows(name, dtype, monkeypatch):
    source, kfac, jacobians = problem(name, dtype=dtype)
    expected = gram(kfac.whitened(jacobians))
    source.linearization.policy = ChunkPolicy(500)  # several groups
    monkeypatch.setattr("sublaplace.curvature.joint._ROWS_AT_ONCE", 500)  # several pieces of a layer
    assert kfac.whitened(jacobians) is None
    found = kfac.joint_covariance(jacobians)
    assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE[dtype] * float(expected.max()))


def test_joint_covariance_from_factors_has_the_gradient_of_that_from_rows(monkeypatch):
    source, kfac, jacobians = problem("paper-cnn", 3)
    monkeypatch.setattr("sublaplace.curvature.joint._ROWS_AT_ONCE", 500)
    found = []
    for budget in (2**30, 500):
        inputs = jacobians.inputs.clone().requires_grad_()
        linearization = source.linearization.differentiable()
        linearization.policy = ChunkPolicy(budget)
        joint = kfac.joint_covariance(Jacobians(linearization, inputs))
        found += torch.autograd.grad((joint * torch.arange(len(joint))).sum(), inputs)
    assert float(found[0].abs().max()) > 0
    assert torch.allclose(*found, rtol=0, atol=1e-10 * float(found[0].abs().max()))


def test_joint_covariance_from_factors_without_kfac():
    source, _, jacobians = problem("paper-cnn")
    precision = isotropic_precision(source.linearization.layout, torch.zeros(0, dtype=torch.float64), PRIOR)
    found = factored_joint_covariance(precision.parts, PRIOR, jacobians)
    rows = dense_jacobian(source.linearization.model, jacobians.inputs)
    assert torch.allclose(found, rows @ rows.T / PRIOR)


def test_joint_covariance_from_factors_names_the_parameter_that_is_not_finite():
    model = InfiniteSlope().double()
    with torch.no_grad():
        model.inner.weight.copy_(torch.eye(4, 3))
        model.inner.bias.fill_(0.1)
    inputs = torch.rand(6, 3, dtype=torch.float64)
    source = stream(model, inputs)
    kfac = kronecker_ggn(source, PRIOR)
    with pytest.raises(ValueError, match=r"'inner.*NaN or infinity"):
        factored_joint_covariance(kfac.parts, PRIOR, Jacobians(source.linearization, torch.cat([inputs, -1 - inputs])))


def test_a_first_look_needs_no_more_rows_for_more_outputs(monkeypatch):
    torch.manual_seed(0)
    linearization = Linearization(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 300)).double())
    rows, verify, jacobian = [], probing._verify, Linearization.jacobian

    def counting(function):
        def counted(*arguments):
            found = function(*arguments)
            rows.append(found.num_rows)
            return found

        return counted

    def spy(network, plan, inputs, jacobian_of):
        verify(network, plan, inputs, counting(jacobian_of))

    monkeypatch.setattr(probing, "_verify", spy)
    monkeypatch.setattr(Linearization, "jacobian", counting(jacobian))
    linearization.look_at(torch.randn(4, 5, dtype=torch.float64))
    assert rows == [2]


# Directions without the covariance ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_dominant_directions_are_those_of_the_covariance(name):
    _, kfac, jacobians = problem(name)
    expected = torch.linalg.eigvalsh(kfac.joint_covariance(jacobians)).flip(0)[:4]
    tolerance = rank_tolerance(jacobians.num_rows, torch.float64)
    values, vectors = dominant_directions(jacobians, kfac, 4, tolerance, tolerance=1e-13)
    assert torch.allclose(values, expected, rtol=1e-8)
    _, dense = low_rank_module._by_covariance(jacobians, kfac, 4, tolerance)
    gap = torch.linalg.eigvalsh(kfac.joint_covariance(jacobians)).flip(0)
    if gap[4] < 0.9 * gap[3]:  # else the span is hardly defined
        assert overlap(vectors, dense) > 1 - 1e-8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_many_outputs_take_the_way_without_the_covariance(dtype, monkeypatch):
    model, inputs = make("paper-cnn", 30, dtype)
    data = loader(inputs, labels(model, inputs), 10)
    traces = []
    for limit in (6000, 10):
        monkeypatch.setattr(low_rank_module, "DENSE_ROWS", limit)
        la = SubspaceLaplace.paper(model, "classification", dim=6, subspace_inputs=Drawn(30)).fit(data)
        assert la.dim == 6
        traces.append(float(la.leading_traces(inputs)[-1]))
    assert traces[1] == pytest.approx(traces[0], rel=1e-3)
    P = la.projection_matrix().double()
    assert torch.allclose(P.T @ P, torch.eye(6, dtype=torch.float64), atol=1e-6)


def test_directions_above_the_rank_are_not_given(monkeypatch):
    monkeypatch.setattr(low_rank_module, "DENSE_ROWS", 10)
    # Ten parameters, but the map is one of 2 × 3 numbers: J has rank 6, whatever the number of inputs.
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    inputs = torch.randn(40, 3, dtype=torch.float64)
    la = SubspaceLaplace.paper(model, Gaussian(1.0), dim=9)
    with pytest.warns(UserWarning, match="numerical rank 6"):
        la.fit(loader(inputs, torch.zeros(40, 2, dtype=torch.float64), 20))
    assert la.dim == 6


def test_directions_of_a_zero_jacobian_are_refused(monkeypatch):
    monkeypatch.setattr(low_rank_module, "DENSE_ROWS", 10)
    model = nn.Linear(3, 2, bias=False).double()
    inputs = torch.zeros(40, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="their Jacobian is zero"):
        SubspaceLaplace.paper(model, Gaussian(1.0), dim=2).fit(loader(inputs, torch.zeros(40, 2).double(), 20))


# Solutions without the precision matrix -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "likelihood"), pairs([Categorical(), Gaussian(0.4)], lambda value: value.name))
def test_matrix_free_covariance_equals_the_dense_one(name, likelihood):
    model, inputs = make(name, 6)
    source = stream(model, inputs, likelihood)
    jacobians = Jacobians(source.linearization, inputs)
    expected = exact_ggn(source, 10**9, PRIOR).joint_covariance(jacobians)
    found = MatrixFreePrecision(source, kronecker_ggn(source, PRIOR), 1e-7).full_covariance(jacobians)
    assert found.relative_residual <= 1e-7
    assert torch.allclose(found.covariance, expected, rtol=0, atol=1e-9 * float(expected.max()))


@pytest.mark.parametrize("tolerance", [0.5, 1e-1, 1e-3])
def test_error_of_the_matrix_free_covariance_is_certified(tolerance):
    source, kfac, jacobians = problem("paper-cnn")
    kfac = kfac.with_prior(0.05)
    expected = exact_ggn(source, 10**9, 0.05).joint_covariance(jacobians)
    found = MatrixFreePrecision(source, kfac, tolerance).full_covariance(jacobians)
    missing = torch.linalg.eigvalsh(expected - found.covariance)
    rounding = 1e-10 * float(expected.diagonal().max())
    assert missing[0] >= -rounding
    assert missing[-1] <= found.error + rounding
    assert missing[-1] > rounding or tolerance < 0.1  # a loose one does miss something


def test_full_covariance_of_a_fitted_subspace_equals_the_full_posterior():
    model, inputs = make("paper-cnn", 9)
    data = loader(inputs, labels(model, inputs), 4)
    few = inputs[:3]
    full = SubspaceLaplace.paper(model, "classification", projector="full", prior_precision=0.5).fit(data)
    for complement in (None, Complement("kfac", weight=1.0), Complement("diagonal", weight=1.0)):
        la = SubspaceLaplace(model, "classification", dim=4, complement=complement, prior_precision=0.5).fit(data)
        found = la.full_covariance(few)
        assert found.covariance.shape == (3, 3, 3)
        assert torch.allclose(found.covariance, full.functional_covariance(few), atol=1e-8)
        joint = la.full_covariance(few, joint=True).covariance
        assert torch.allclose(joint, full.functional_covariance(few, joint=True), atol=1e-8)
        assert 0 < found.passes < 100
        assert found.error < 1e-6


def test_full_covariance_with_a_noise_of_each_output():
    model, inputs = make("mlp", 9)
    targets = torch.zeros_like(model(inputs).detach())
    likelihood, options = Gaussian([0.3, 2.0]), {"prior_precision": 0.5}
    full = SubspaceLaplace.paper(model, likelihood, projector="full", **options).fit([(inputs, targets)])
    la = SubspaceLaplace.paper(model, likelihood, dim=4, **options).fit([(inputs, targets)])
    found = la.full_covariance(inputs[:2]).covariance
    assert torch.allclose(found, full.functional_covariance(inputs[:2]), atol=1e-8)


def test_full_covariance_after_loading_says_what_is_missing(tmp_path):
    model, inputs = make("mlp", 9)
    SubspaceLaplace.paper(model, "classification", dim=4).fit(loader(inputs, labels(model, inputs), 4)).save(
        tmp_path / "la"
    )
    with pytest.raises(RuntimeError, match="training data"):
        SubspaceLaplace.load(tmp_path / "la", model).full_covariance(inputs[:1])


@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "transformer"])
def test_lowrank_ggn_without_the_exact_matrix_captures_as_much(name, monkeypatch):
    model, inputs = make(name, 12)
    data = loader(inputs, labels(model, inputs), 6)
    options = {"projector": "lowrank-ggn", "dim": 5, "prior_precision": 0.1, "subspace_inputs": inputs}
    dense = SubspaceLaplace.paper(model, "classification", **options).fit(data)
    monkeypatch.setattr("sublaplace.curvature.cache.fits", lambda needed, device: False)
    free = SubspaceLaplace.paper(model, "classification", **options).fit(data)
    kfac = SubspaceLaplace.paper(model, "classification", **options | {"projector": "lowrank-kfac"}).fit(data)
    best, found, start = (float(la.leading_traces(inputs)[-1]) for la in (dense, free, kfac))
    assert found <= best * (1 + 1e-8)
    assert found >= 0.98 * best
    assert found > start


# In place -------------------------------------------------------------------------------------------------------------


def test_vectors_are_combined_and_orthonormalised_in_their_own_memory():
    vectors = {"a": torch.randn(4, 3000, dtype=torch.float64), "b": torch.randn(4, 7, dtype=torch.float64)}
    copies = {name: part.clone() for name, part in vectors.items()}
    matrix = torch.randn(3, 4, dtype=torch.float64)
    fewer = combine(matrix, vectors)
    for name, part in copies.items():
        assert fewer[name].data_ptr() == vectors[name].data_ptr()
        assert torch.allclose(fewer[name], matrix @ part)
    assert torch.allclose(cross_gram(copies, copies), gram(copies))
    addresses = {name: part.data_ptr() for name, part in copies.items()}
    basis = orthonormalise(copies)
    assert {name: part.data_ptr() for name, part in basis.items()} == addresses
    assert torch.allclose(gram(basis), torch.eye(4, dtype=torch.float64), atol=1e-14)


# On disk --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("complement", [None, Complement("kfac", weight=1.0)], ids=["none", "kfac"])
@pytest.mark.parametrize("certify", [False, True], ids=["plain", "certified"])
def test_a_projection_on_disk_gives_the_same_posterior(certify, complement, tmp_path):
    model, inputs = make("paper-cnn", 9)
    data = loader(inputs, labels(model, inputs), 4)
    options = {"dim": 6, "prior_precision": 1.0, "complement": complement}
    expected = SubspaceLaplace(model, "classification", **options).fit(data, certify=certify)
    la = SubspaceLaplace(model, "classification", resources=Resources(scratch_folder=tmp_path), **options)
    la.fit(data, certify=certify)
    assert torch.equal(la.functional_covariance(inputs), expected.functional_covariance(inputs))
    assert str(tmp_path) in Path("/proc/self/maps").read_text()  # in a file …
    assert not list(tmp_path.iterdir())  # … that has no name any more
    assert torch.equal(la.with_prior(3.0)(inputs), expected.with_prior(3.0)(inputs))
    la.save(tmp_path / "la")
    assert torch.equal(SubspaceLaplace.load(tmp_path / "la", model)(inputs), la(inputs))


def test_a_scratch_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        SubspaceLaplace.paper(
            nn.Linear(2, 2), "classification", resources=Resources(scratch_folder=tmp_path / "absent")
        )


def test_too_little_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sublaplace.runtime.memory.shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(10, 10, 0)
    )
    model, inputs = make("mlp", 9)
    la = SubspaceLaplace.paper(model, "classification", dim=4, resources=Resources(scratch_folder=tmp_path))
    with pytest.raises(MemoryError, match="free in"):
        la.fit(loader(inputs, labels(model, inputs), 4))


# Small λ --------------------------------------------------------------------------------------------------------------


def small_regression(dtype):
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(40, width, generator=generator, dtype=torch.float64) for width in (4, 2))
    return nn.Sequential(*layers).to(dtype), inputs.to(dtype), targets.to(dtype)


@pytest.mark.parametrize("prior", [1.0, 1e-2, 1e-4])
def test_the_full_covariance_reaches_its_tolerance_where_the_curvature_is_far_above_the_prior(prior):
    model, inputs, targets = small_regression(torch.float64)
    likelihood, options = Gaussian(0.1), {"prior_precision": prior}
    la = SubspaceLaplace.paper(model, likelihood, dim=5, **options).fit([(inputs, targets)])
    full = SubspaceLaplace.paper(model, likelihood, projector="full", **options).fit([(inputs, targets)])
    new = inputs[:1] + 1
    found = la.full_covariance(new)
    assert found.relative_residual <= 1e-6
    expected = full.functional_covariance(new)
    assert (found.covariance - expected).abs().max() <= 1e-8 * expected.abs().max()


def test_a_full_covariance_above_its_tolerance_warns_and_knows_its_error():
    model, inputs, targets = small_regression(torch.float32)
    likelihood, options = Gaussian(0.1), {"prior_precision": 1e-2}
    la = SubspaceLaplace.paper(model, likelihood, dim=5, **options).fit([(inputs, targets)])
    with pytest.warns(UserWarning, match=r"relative residual of .*above the tolerance 1\.0e-06.*memory_budget"):
        found = la.full_covariance(inputs[:1] + 1)
    exact, inputs, targets = small_regression(torch.float64)
    full = SubspaceLaplace.paper(exact, likelihood, projector="full", **options).fit([(inputs, targets)])
    difference = full.functional_covariance(inputs[:1] + 1) - found.covariance
    assert torch.linalg.eigvalsh(difference).max() <= found.error + 1e-4 * float(found.covariance.abs().max())


def test_labels_under_another_key_are_left_out_of_a_full_covariance():
    model, inputs, targets = small_regression(torch.float64)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x)

    named = Named()
    la = SubspaceLaplace.paper(named, Gaussian(0.5), dim=5, labels_key="target")
    la.fit([{"x": inputs, "target": targets}])
    with_labels = la.full_covariance({"x": inputs[:2], "target": targets[:2]}).covariance
    assert torch.equal(with_labels, la.full_covariance({"x": inputs[:2]}).covariance)
