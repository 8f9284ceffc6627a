"""Products with the Jacobian by forward-mode differentiation, beside those of its rows."""

import pytest
import torch
from dense_reference import dense_ggn, dense_jacobian, dense_outputs, softmax_hessians, subspace_covariance
from networks import NETWORKS, make
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sublaplace import Complement, Gaussian, SubspaceLaplace
from sublaplace.jacobians.forward import forward_mode_works
from sublaplace.jacobians.linearization import Linearization
from sublaplace.jacobians.wanted import ROWS, Wanted

OUTPUTS = 40


def vectors_of(layout, count):
    flat = torch.randn(count, layout.num_parameters, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return flat, layout.unflatten(flat)


def many_outputs(hidden=6):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, OUTPUTS)).double()


def classes(n=30):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, OUTPUTS, (n,), generator=generator)


def forward_passes(la):
    return la._state.linearization.forward_passes


@pytest.mark.parametrize("name", NETWORKS)
def test_products_by_forward_mode_equal_those_of_the_rows(name):
    model, inputs = make(name, 5)
    linearization = Linearization(model)
    with linearization.borrowed():
        assert forward_mode_works(linearization.network, inputs)
    flat, vectors = vectors_of(linearization.layout, 23)  # more than one pass takes
    expected = dense_jacobian(model, inputs)
    jacobian = linearization.forward_jacobian(inputs)
    found = jacobian.matmul(vectors).flatten(0, 1)
    assert (found - expected @ flat.T).abs().max() <= 1e-10 * (expected @ flat.T).abs().max()
    indices = torch.randperm(linearization.layout.num_parameters)[:17]
    columns = jacobian.columns(linearization.layout.split_indices(indices), 17).flatten(0, 1)
    assert torch.allclose(columns, expected[:, indices], rtol=1e-10, atol=1e-10)
    weights = torch.randn(5, jacobian.num_rows, 3, dtype=torch.float64)
    into = linearization.layout.zeros(3, flat)
    jacobian.add_transpose_matmul(weights, into)
    transposed = weights.flatten(0, 1).T @ expected
    assert (linearization.layout.flatten(into) - transposed).abs().max() <= 1e-10 * transposed.abs().max()
    assert torch.allclose(jacobian.dense_rows(), expected, rtol=1e-10, atol=1e-10)  # by backward passes


def test_forward_mode_is_chosen_for_few_products_of_many_outputs_only():
    linearization, inputs = Linearization(many_outputs()), classes()[0]
    assert linearization.prefers_forward(inputs, OUTPUTS, Wanted(products=3))
    assert not linearization.prefers_forward(inputs, 2, Wanted(products=100))
    assert not linearization.prefers_forward(inputs, OUTPUTS, ROWS)


class WithoutForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.saved_tensors[0].cos()


class WrongForwardMode(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(context, inputs, output):
        context.save_for_backward(*inputs)
        context.save_for_forward(*inputs)

    @staticmethod
    def backward(context, gradient):
        return gradient * context.saved_tensors[0].cos()

    @staticmethod
    def jvp(context, tangent):
        return 1.01 * tangent * context.saved_tensors[0].cos()


class Custom(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.head, self.function = nn.Linear(3, 6), nn.Linear(6, OUTPUTS), function

    def forward(self, x):
        return self.head(self.function.apply(self.first(x)))


@pytest.mark.parametrize("function", [WithoutForwardMode, WrongForwardMode])
def test_a_network_whose_forward_mode_fails_or_errs_uses_its_rows(function):
    torch.manual_seed(0)
    model, inputs = Custom(function).double(), classes()[0]
    linearization = Linearization(model)
    assert not linearization.prefers_forward(inputs, OUTPUTS, Wanted(products=3))
    flat, vectors = vectors_of(linearization.layout, 3)
    found = torch.cat([j.matmul(vectors) for j in linearization.chunks(inputs, wanted=Wanted(products=3))])
    assert torch.allclose(found.flatten(0, 1), dense_jacobian(model, inputs) @ flat.T, atol=1e-10)
    assert linearization.forward_passes == 0


@pytest.mark.parametrize("projector", ["lowrank-diagonal", "subset-magnitude"])
def test_a_subspace_of_many_classes_equals_brute_force(projector, monkeypatch):
    monkeypatch.setattr(Linearization, "prefers_features", lambda *_: False)
    model, (inputs, labels) = many_outputs(), classes()
    loader = DataLoader(TensorDataset(inputs, labels), 7)
    la = SubspaceLaplace.paper(model, "classification", 4, 0.3, projector=projector).fit(loader)
    assert forward_passes(la) >= 30 * 4
    assert "forward mode" in la.summary()
    x = torch.randn(5, 3, dtype=torch.float64)
    hessians = softmax_hessians(dense_outputs(model, inputs))
    precision = dense_ggn(model, inputs, hessians) + 0.3 * torch.eye(la.num_parameters, dtype=torch.float64)
    expected = subspace_covariance(dense_jacobian(model, x), la.projection_matrix(), precision)
    assert torch.allclose(la.functional_covariance(x, joint=True), expected, rtol=1e-9, atol=1e-12)
    before = forward_passes(la)
    assert torch.allclose(la.functional_variance(x).flatten(), expected.diagonal(), rtol=1e-9, atol=1e-12)
    assert forward_passes(la) == before + 5 * 4


@pytest.mark.parametrize("noise", [0.7, tuple(0.5 + 0.01 * k for k in range(OUTPUTS))])
def test_weighted_regression_with_many_outputs_equals_the_posterior_by_rows(noise, monkeypatch):
    monkeypatch.setattr(Linearization, "prefers_features", lambda *_: False)
    model, (inputs, _) = many_outputs(), classes()
    targets, weights = torch.randn(30, OUTPUTS, dtype=torch.float64), torch.rand(30, dtype=torch.float64)
    loader = [(inputs[i : i + 9], targets[i : i + 9], weights[i : i + 9]) for i in range(0, 30, 9)]

    def fitted():
        return SubspaceLaplace.paper(model, Gaussian(noise), 4, 0.3, projector="lowrank-isotropic").fit(loader)

    forward = fitted()
    monkeypatch.setattr(Linearization, "prefers_forward", lambda *_: False)
    rows = fitted()
    assert forward_passes(forward) and not forward_passes(rows)
    x = torch.randn(5, 3, dtype=torch.float64)
    assert torch.allclose(forward.functional_covariance(x), rows.functional_covariance(x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("structure", ["scalar", "layer"])
def test_a_complement_of_many_outputs_agrees_with_that_by_rows(likelihood, structure, monkeypatch):
    model, (inputs, labels) = many_outputs(60), classes()
    targets = labels if likelihood == "classification" else torch.randn(30, OUTPUTS, dtype=torch.float64)
    loader = [(inputs[i : i + 9], targets[i : i + 9], torch.rand(9).double()[: 30 - i]) for i in range(0, 30, 9)]
    chosen = Gaussian(0.5) if likelihood == "regression" else likelihood
    options = {"complement": Complement("kfac", 1.0), "prior_structure": structure}
    if structure == "scalar":
        options["prior_precision"] = 0.3

    def fitted():
        return SubspaceLaplace(model, chosen, 4, projector="lowrank-kfac", **options).fit(loader, certify=True)

    forward = fitted()
    monkeypatch.setattr(Linearization, "prefers_forward", lambda *_: False)
    rows = fitted()
    assert forward_passes(forward) >= 30 * 4 and not forward_passes(rows)
    x = torch.randn(5, 3, dtype=torch.float64)
    assert torch.allclose(forward.functional_covariance(x), rows.functional_covariance(x), rtol=1e-7, atol=1e-10)
    for one, other in zip(forward.bounds(x), rows.bounds(x), strict=True):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-10)


def test_tuning_evaluation_and_samples_agree_with_those_by_rows(monkeypatch):
    monkeypatch.setattr(Linearization, "prefers_features", lambda *_: False)
    model, (inputs, labels) = many_outputs(), classes()
    loader = DataLoader(TensorDataset(inputs, labels), 10)
    la = SubspaceLaplace.paper(model, "classification", 4, 0.3, projector="lowrank-isotropic").fit(loader)
    x, y = torch.randn(25, 3, dtype=torch.float64), torch.randint(0, OUTPUTS, (25,))
    held_out = [(x, y)]

    def results():
        tuned = la.tuned(held_out)
        scores = tuned.evaluate(held_out).posterior.scores
        return tuned.prior_precision, *scores.values(), *la.functional_samples(x, 2).flatten().tolist()

    before = forward_passes(la)
    forward = results()
    after = forward_passes(la)
    assert after == before + 25 * (4 + 4 + 2)
    monkeypatch.setattr(Linearization, "prefers_forward", lambda *_: False)
    assert results() == pytest.approx(forward, rel=1e-9)
    assert forward_passes(la) == after


def test_parameters_in_other_units_have_products_in_these_units():
    model, inputs = many_outputs(), classes()[0]
    units = {name: 2.0 + k for k, name in enumerate(dict(model.named_parameters()))}
    linearization = Linearization(model, units=units)
    _, vectors = vectors_of(linearization.layout, 3)
    by_rows, forward = linearization.jacobian(inputs), linearization.forward_jacobian(inputs)
    assert torch.allclose(forward.matmul(vectors), by_rows.matmul(vectors), rtol=1e-10)


def test_products_that_are_not_finite_name_the_parameter():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(3, 4, bias=False), nn.Linear(4, OUTPUTS)

        def forward(self, x):
            return self.head(self.first(x).abs().sqrt())

    inputs = classes()[0].clone()
    inputs[4] = 0  # behind those that are probed
    linearization = Linearization(Root().double())
    with pytest.raises(ValueError, match=r"'first\.weight' holds NaN or infinity"):
        linearization.forward_jacobian(inputs).matmul(vectors_of(linearization.layout, 2)[1])
