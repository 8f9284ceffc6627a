"""Predictions for many classes without (n, C, C): factors of low rank, the most probable classes, chosen outputs."""

import pytest
import torch
from torch import nn

from sublaplace import Complement, SubspaceLaplace
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.likelihoods.links import Covariance, bridge, laplace_bridge, monte_carlo, sampled_softmax

C, N, S = 30, 40, 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, C)).double()


def data(n=N, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, C, (n,), generator=generator)


def fitted(**options):
    given = {"dim": S, "prior_precision": 0.05, "complement": None} | options
    return SubspaceLaplace(network(), "classification", **given).fit([data()])


def test_a_factor_gives_the_bridge_and_the_mean_of_samples():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(5, C, generator=generator, dtype=torch.float64)
    factor = torch.randn(5, C, S, generator=generator, dtype=torch.float64)
    matrix = factor @ factor.mT
    uncertainty = Covariance(factor.square().sum(2), lambda: pytest.fail("not formed"), lambda: factor)
    assert torch.allclose(uncertainty.row_sums, matrix.sum(2))
    found = bridge(outputs, uncertainty.variance, uncertainty.row_sums)
    assert torch.allclose(found, laplace_bridge(outputs, matrix), rtol=1e-9)
    low = sampled_softmax(outputs, uncertainty.factor, 20_000, torch.Generator().manual_seed(1))
    whole = monte_carlo(outputs, matrix, 20_000, torch.Generator().manual_seed(2))
    assert (low - whole).abs().max() < 0.02


@pytest.mark.parametrize("link", ["mc", "bridge", "probit"])
def test_no_link_forms_matrices_in_a_subspace_of_fewer_dimensions_than_classes(link, monkeypatch):
    la, x = fitted(), data(6, seed=2)[0]
    matrices = la.functional_covariance(x)
    monkeypatch.setattr(type(la._state.posterior), "covariance", lambda *_: pytest.fail("not formed"))
    prediction = la.predict(x, link, samples=4000 if link == "mc" else None)
    probabilities = prediction.probabilities
    assert torch.allclose(prediction.variance, matrices.diagonal(dim1=1, dim2=2), rtol=1e-9)
    assert (prediction.mutual_information >= 0).all()
    if link == "bridge":
        assert torch.allclose(probabilities, laplace_bridge(prediction.mean, matrices), rtol=1e-8)
    elif link == "mc":
        expected = monte_carlo(prediction.mean, matrices, 4000, torch.Generator().manual_seed(5))
        assert (probabilities - expected).abs().max() < 0.03
    once = la.predict(iter([x]), link)
    assert torch.allclose(once.covariance, matrices, rtol=1e-9, atol=1e-12)


def test_draws_of_a_factor_are_the_same_every_time():
    la, x = fitted(), data(6, seed=2)[0]
    assert torch.equal(la(x, link="mc"), la(x, link="mc"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"complement": Complement("kfac", 1.0)},
        {"projector": "last-layer", "dim": None},
        {"projector": "full", "dim": None},
    ],
    ids=["subspace", "complement", "last layer", "full"],
)
def test_chosen_outputs_have_their_part_of_the_covariance(options):
    la, x = fitted(**options), data(6, seed=2)[0]
    whole = la.functional_covariance(x)
    places = torch.tensor([3, 17, 4])
    assert torch.allclose(la.functional_covariance(x, outputs=places), whole[:, places][:, :, places], atol=1e-10)
    assert torch.allclose(
        la.functional_variance(x, outputs=[7, 2]), whole.diagonal(dim1=1, dim2=2)[:, [7, 2]], atol=1e-10
    )
    top = la.predict(x).top(5)
    assert torch.equal(top.probabilities, la(x).sort(dim=1, descending=True).values[:, :5])
    expected = torch.stack([matrix[c][:, c] for matrix, c in zip(whole, top.classes, strict=True)])
    batches = [x[:4], x[4:]]  # one row of classes per input, over several batches
    assert torch.allclose(la.functional_covariance(batches, outputs=top.classes), expected, atol=1e-10)
    assert torch.allclose(top.variance, expected.diagonal(dim1=1, dim2=2), atol=1e-10)


def test_chosen_outputs_cost_one_pass_each():
    la, x = fitted(complement=Complement("kfac", 1.0)), data(6, seed=2)[0]
    linearization = la._state.linearization
    before = linearization.passes
    la.functional_covariance(x, outputs=[1, 2])
    assert linearization.passes == before + 6 * 2


@pytest.mark.parametrize(
    ("outputs", "match"),
    [
        ([], "indices of shape"),
        ([0.5], "indices of shape"),
        ([True], "indices of shape"),
        (3, "indices of shape"),
        ([-1], "lie in 0 … 29"),
        ([30], "lie in 0 … 29"),
        ([[1], [2]], "one row per input"),
    ],
)
def test_other_outputs_are_refused(outputs, match):
    la = fitted()
    with pytest.raises(ValueError, match=match):
        la.functional_variance(data(6)[0], outputs=outputs)
    with pytest.raises(ValueError, match="joint=True"):
        la.functional_covariance(data(6)[0], joint=True, outputs=[1])


@pytest.mark.parametrize("count", [0, C + 1])
def test_other_numbers_of_classes_are_refused(count):
    with pytest.raises(ValueError, match="number of classes, 30"):
        fitted().predict(data(3)[0]).top(count)


def test_covariances_that_do_not_fit_are_refused_with_the_ways_to_go_on(monkeypatch):
    la = fitted()
    monkeypatch.setattr("sublaplace.runtime.memory.available_bytes", lambda _: 1000)
    with pytest.raises(MemoryError, match=r"covariances of 30 outputs.*choose outputs.*functional_variance"):
        la.functional_covariance(data(6)[0])


def test_rows_by_forward_mode_are_no_choice_for_chosen_outputs(monkeypatch):
    la, x = fitted(), data(6)[0]
    monkeypatch.setattr(Linearization, "forward_jacobian", lambda *_: pytest.fail("rows cost less"))
    assert la.functional_variance(x, outputs=[1]).shape == (6, 1)
