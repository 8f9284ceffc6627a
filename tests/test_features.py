"""Rows of many outputs from those of fewer features."""

import pytest
import torch
from dense_reference import dense_ggn, dense_jacobian, dense_outputs, softmax_hessians, subspace_covariance
from torch import nn

from sublaplace import Bernoulli, Categorical, Complement, CurvatureStream, Gaussian, Linearization, SubspaceLaplace
from sublaplace.curvature.diagonal import diagonal_ggn
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.jacobians.features import FeatureBlock
from sublaplace.jacobians.head import HeadBlock
from sublaplace.jacobians.wanted import Wanted
from sublaplace.posteriors.sweep import prior_sweep

C, F = 20, 4
FEATURES = Wanted(features=True)


class Body(nn.Module):
    """A convolution, a norm and a hidden layer before a linear one, in three spellings."""

    def __init__(self, ending="linear", outputs=C):
        super().__init__()
        self.convolution = nn.Conv1d(2, 3, 2)
        self.norm = nn.LayerNorm(9)
        self.hidden = nn.Linear(9, F)
        self.ending = ending
        self.head = nn.Linear(F, outputs)
        self.matrix = nn.Parameter(torch.randn(F, outputs))

    def forward(self, x):
        x = self.hidden(self.norm(self.convolution(x).flatten(1)).tanh()).tanh()
        if self.ending == "linear":
            return self.head(x)
        if self.ending == "matmul":
            return x @ self.matrix
        return torch.addmm(self.head.bias, x, self.matrix)


def network(ending="linear", outputs=C):
    torch.manual_seed(0)
    return Body(ending, outputs).double()


def inputs_of(n=6, seed=1):
    return torch.randn(n, 2, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("outputs", [C, 2 * F])
@pytest.mark.parametrize("ending", ["linear", "matmul", "addmm"])
def test_features_give_the_rows_of_all_outputs(ending, outputs):
    model, inputs = network(ending, outputs), inputs_of()
    expected = dense_jacobian(model, inputs)
    linearization = Linearization(model)
    linearization.look_at(inputs)
    jacobian = linearization.jacobian(inputs, wanted=FEATURES)
    assert linearization.passes == len(inputs) * F
    kinds = {name: type(block) for name, block in jacobian.blocks.items()}
    assert kinds["convolution.weight"] == kinds["norm.weight"] == kinds["hidden.bias"] == FeatureBlock
    assert kinds["matrix" if ending != "linear" else "head.weight"] == HeadBlock
    assert torch.allclose(jacobian.dense_rows(), expected, atol=1e-12)
    layout = linearization.layout
    generator = torch.Generator().manual_seed(0)
    V = torch.randn(3, layout.num_parameters, generator=generator, dtype=torch.float64)
    U = torch.randn(len(inputs), outputs, 3, generator=generator, dtype=torch.float64)
    assert torch.allclose(jacobian.matmul(layout.unflatten(V)).flatten(0, 1), expected @ V.T, atol=1e-11)
    into = layout.zeros(3, V)
    jacobian.add_transpose_matmul(U, into)
    assert torch.allclose(layout.flatten(into), U.flatten(0, 1).T @ expected, atol=1e-11)
    indices = torch.randperm(layout.num_parameters, generator=generator)[:20]
    columns = jacobian.columns(layout.split_indices(indices), 20).flatten(0, 1)
    assert torch.allclose(columns, expected[:, indices], atol=1e-11)
    block = jacobian.blocks["hidden.weight"]
    assert torch.allclose(block.squared_sum(), block.rows().square().sum((0, 1)))
    assert torch.allclose(block.scaled(2.0).rows(), 2 * block.rows())


@pytest.mark.parametrize("wanted", [Wanted(), Wanted(features=True)])
def test_few_outputs_have_rows_of_their_own(wanted):
    model, inputs = network(outputs=2 * F - 1), inputs_of()
    jacobian = Linearization(model).jacobian(inputs, wanted=wanted)
    assert not jacobian.has_features
    assert torch.allclose(jacobian.dense_rows(), dense_jacobian(model, inputs), atol=1e-12)


def test_a_parameter_without_a_rule_keeps_all_rows_of_their_own():
    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.sliced = network(), nn.Parameter(torch.randn(3, C, dtype=torch.float64))

        def forward(self, x):
            return self.body(x * self.sliced[0, 0])

    torch.manual_seed(0)
    model, inputs = Sliced(), inputs_of()
    jacobian = Linearization(model).jacobian(inputs, wanted=FEATURES)
    assert not jacobian.has_features
    assert torch.allclose(jacobian.dense_rows(), dense_jacobian(model, inputs), atol=1e-12)


POSTERIORS = {
    "kfac outside": {"dim": 5, "complement": Complement("kfac", 1.0)},
    "kfac outside, other weight": {"dim": 5, "complement": Complement("kfac", 0.3)},
    "diagonal outside": {"dim": 5, "complement": Complement("diagonal", 1.0)},
    "kfac alone": {"projector": None, "complement": Complement("kfac", 1.0)},
    "diagonal alone": {"projector": None, "complement": Complement("diagonal", 1.0)},
}


@pytest.mark.parametrize("likelihood", ["classification", Gaussian(0.3)])
@pytest.mark.parametrize("name", POSTERIORS)
def test_predictions_by_features_equal_those_by_rows(name, likelihood, monkeypatch):
    model, inputs = network(), inputs_of(30)
    targets = torch.arange(30) % C if likelihood == "classification" else torch.randn(30, C, dtype=torch.float64)
    la = SubspaceLaplace(model, likelihood, prior_precision=0.5, **POSTERIORS[name]).fit([(inputs, targets)])
    x = inputs_of(7, seed=2)
    linearization = la._state.linearization

    def predicted():
        before = linearization.passes
        found = la.functional_variance(x), la.functional_covariance(x)
        return *found, linearization.passes - before

    variance, covariance, passes = predicted()
    assert passes == 2 * 7 * F
    assert torch.allclose(la.with_prior(2.0).functional_variance(x).sqrt(), by_rows(la.with_prior(2.0), x), rtol=1e-8)
    monkeypatch.setattr(Linearization, "uses_features", lambda *_: False)
    other, others, more = predicted()
    assert more == 2 * 7 * C
    assert torch.allclose(variance, other, rtol=1e-9, atol=1e-12)
    assert torch.allclose(covariance, others, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", POSTERIORS)
def test_sweeps_by_features_equal_those_by_rows(name):
    model, inputs = network(), inputs_of(30)
    la = SubspaceLaplace(model, "classification", prior_precision=0.5, **POSTERIORS[name])
    la.fit([(inputs, torch.arange(30) % C)])
    taus = torch.tensor([1e-2, 0.5, 30.0]).double()
    sweep, linearization, x = prior_sweep(la._state.posterior, taus), la._state.linearization, inputs_of(7, seed=2)
    features = linearization.jacobian(x, wanted=sweep.wanted(whole=False))
    rows = linearization.jacobian(x, wanted=sweep.wanted(whole=True))
    assert features.has_features and not rows.has_features
    found, expected = (sweep(jacobian, whole=False) for jacobian in (features, rows))
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-12)


def test_a_tied_last_layer_has_rows_of_its_own():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.hidden = nn.Embedding(C, F), nn.Linear(F, F)

        def forward(self, ids):
            return nn.functional.linear(self.hidden(self.table(ids).mean(1)).tanh(), self.table.weight)

    torch.manual_seed(0)
    model, ids = Tied().double(), torch.randint(0, C, (6, 3))
    jacobian = Linearization(model).jacobian(ids, wanted=FEATURES)
    assert not jacobian.has_features
    assert torch.allclose(jacobian.dense_rows(), dense_jacobian(model, ids), atol=1e-12)


def by_rows(la, x):
    rows = la._state.linearization.jacobian(x)
    return la._state.posterior.variance(rows).sqrt()


def test_tuning_with_a_complement_agrees_with_the_posterior_that_it_gives():
    model, inputs = network(), inputs_of(40)
    labels = torch.arange(40) % C
    la = SubspaceLaplace(model, "classification", 5, prior_precision=0.5).fit([(inputs, labels)])
    held_out = [(inputs_of(30, seed=3), torch.arange(30) % C)]
    tuned = la.tuned(held_out)

    def loss(prior):
        return la.with_prior(prior).evaluate(held_out).posterior.scores["nll"]

    for factor in (0.5, 2.0):
        assert loss(tuned.prior_precision) <= loss(tuned.prior_precision * factor) + 0.01


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("likelihood", [Categorical(), Categorical(ignore_index=3), Bernoulli(), Gaussian(0.3)])
@pytest.mark.parametrize("ending", ["linear", "matmul"])
@pytest.mark.parametrize("tolerance", [0.0, 1e-8])
def test_exact_curvatures_need_as_many_passes_as_features(ending, likelihood, weighted, tolerance, monkeypatch):
    model, inputs = network(ending), inputs_of(11)
    generator = torch.Generator().manual_seed(2)
    targets = torch.arange(11) % C
    if not isinstance(likelihood, Categorical):
        targets = torch.randint(0, 2, (11, C), generator=generator).double()
    weights = torch.rand(11, generator=generator, dtype=torch.float64) if weighted else None
    batch = (inputs, targets) if weights is None else (inputs, targets, weights)

    def curvatures(kind):
        linearization = Linearization(model, units={name: 0.5 + k for k, name in enumerate(names)})
        found = kind(CurvatureStream(linearization, [batch], likelihood, tolerance), 1.0)
        return found, linearization.passes

    names = Linearization(model).layout.names
    by_features = {kind: curvatures(kind) for kind in (kronecker_ggn, diagonal_ggn)}
    monkeypatch.setattr(Linearization, "num_features", lambda *_: None)
    for kind, (found, passes) in by_features.items():
        expected, more = curvatures(kind)
        assert passes < 11 * (F + 1) + 3 * C < more  # with the passes of probing
        for name, part in found.parts.items():
            other = expected.parts[name]
            vectors = torch.randn(3, other.eigenvalues().numel(), generator=generator, dtype=torch.float64)
            assert torch.allclose(part.matmul(vectors, 0.1), other.matmul(vectors, 0.1), rtol=1e-8, atol=1e-10)


def test_the_exact_diagonal_by_features_is_that_of_the_dense_ggn():
    model, inputs = network(), inputs_of(9)
    stream = CurvatureStream(Linearization(model), [(inputs, torch.arange(9))], Categorical(), 0.0)
    found = diagonal_ggn(stream, 1.0)
    expected = dense_ggn(model, inputs, softmax_hessians(dense_outputs(model, inputs))).diagonal()
    flat = torch.cat([found.parts[name].diagonal for name in stream.linearization.layout.names])
    assert torch.allclose(flat, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_subspace_by_features_equals_brute_force(weighted):
    model, inputs, labels = network(), inputs_of(12), torch.arange(12)
    weights = torch.rand(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
    batch = (inputs, labels, weights) if weighted else (inputs, labels)
    la = SubspaceLaplace.paper(model, "classification", 6, 0.3).fit([batch])
    linearization = la._state.linearization
    assert linearization.prefers_features(inputs, C, Wanted(products=6))
    assert not linearization.forward_passes
    hessians = softmax_hessians(dense_outputs(model, inputs))
    if weighted:
        hessians = hessians * weights[:, None, None]
    precision = dense_ggn(model, inputs, hessians) + 0.3 * torch.eye(la.num_parameters, dtype=torch.float64)
    x = inputs_of(5, seed=4)
    expected = subspace_covariance(dense_jacobian(model, x), la.projection_matrix(), precision)
    assert torch.allclose(la.functional_covariance(x, joint=True), expected, rtol=1e-9, atol=1e-12)
    before = linearization.passes
    assert torch.allclose(la.functional_variance(x).flatten(), expected.diagonal(), rtol=1e-9, atol=1e-12)
    assert linearization.passes - before == 5 * F
