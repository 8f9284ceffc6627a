"""The façade against brute force: J P (PᵀΛP)⁻¹ PᵀJᵀ on every architecture."""

import copy

import pytest
import torch
from dense_reference import (
    dense_ggn,
    dense_jacobian,
    dense_outputs,
    full_covariance,
    softmax_hessians,
    subspace_covariance,
)
from networks import NETWORKS, make, pairs
from torch import nn

from sublaplace import PROJECTORS, Categorical, Gaussian, Resources, SubspaceLaplace
from sublaplace.data.batches import num_inputs, select

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
PRIOR = 0.7


def loader(inputs, targets, size=3):
    """A list of batches: the simplest loader that can be run through twice."""
    return [(select(inputs, slice(i, i + size)), targets[i : i + size]) for i in range(0, num_inputs(inputs), size)]


def sized(projector, dim):
    """The options of a projector with `dim` dimensions; one that has its own takes no `dim`."""
    own = isinstance(projector, str) and (projector == "full" or PROJECTORS[projector].own_dim)
    return {"projector": projector} if own else {"projector": projector, "dim": dim}


def labels(model, inputs):
    outputs = dense_outputs(model, inputs)
    return torch.arange(len(outputs)) % outputs.shape[1]


def close(value, expected, tolerance):
    return (value.double() - expected).abs().max() <= tolerance * expected.abs().max()


def precision_matrix(model, inputs, prior=PRIOR):
    ggn = dense_ggn(model, inputs, softmax_hessians(dense_outputs(model, inputs)))
    return ggn + prior * torch.eye(len(ggn), dtype=torch.float64)


@pytest.mark.parametrize(("name", "dtype"), pairs([torch.float64, torch.float32]))
def test_covariance_in_the_subspace_equals_brute_force(name, dtype):
    model, inputs = make(name, 8, dtype)
    _, new = make(name, 4, dtype, seed=1)
    la = SubspaceLaplace.paper(model, "classification", dim=5, prior_precision=PRIOR).fit(
        loader(inputs, labels(model, inputs))
    )
    P = la.projection_matrix().double()
    assert close(P.T @ P, torch.eye(la.dim, dtype=torch.float64), 1e-5 if dtype == torch.float32 else 1e-12)
    expected = subspace_covariance(dense_jacobian(model, new), P, precision_matrix(model, inputs))
    C = dense_outputs(model, new).shape[1]
    assert close(la.functional_covariance(new, joint=True), expected, TOLERANCE[dtype])
    blocks = torch.stack([expected[i : i + C, i : i + C] for i in range(0, 4 * C, C)])
    assert close(la.functional_covariance(new), blocks, TOLERANCE[dtype])
    assert close(la.functional_variance(new), blocks.diagonal(dim1=1, dim2=2), TOLERANCE[dtype])


@pytest.mark.parametrize("projector", PROJECTORS)
@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "embedding", "tied-weights", "attention"])
def test_every_projector_is_exact_in_its_subspace(name, projector):
    model, inputs = make(name, 8)
    la = SubspaceLaplace.paper(model, "classification", **sized(projector, 4), prior_precision=PRIOR)
    la.fit(loader(inputs, labels(model, inputs)))
    expected = subspace_covariance(
        dense_jacobian(model, inputs), la.projection_matrix(), precision_matrix(model, inputs)
    )
    found = la.functional_covariance(inputs, joint=True)
    assert (found - expected).abs().max() <= 1e-8 * max(float(expected.abs().max()), 1e-12)


@pytest.mark.parametrize("repeats", [1, 40])
@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "attention"])
def test_full_posterior_equals_brute_force_in_primal_and_dual_form(name, repeats):
    model, inputs = make(name, 6 * repeats)
    la = SubspaceLaplace.paper(model, "classification", projector="full", prior_precision=PRIOR)
    la.fit(loader(inputs, labels(model, inputs), size=16))
    new = select(inputs, slice(0, 4))
    expected = full_covariance(dense_jacobian(model, new), precision_matrix(model, inputs))
    assert close(la.functional_covariance(new, joint=True), expected, 1e-8)
    assert la.dim == la.num_parameters


@pytest.mark.parametrize("name", NETWORKS)
def test_low_rank_with_the_exact_precision_attains_the_eckart_young_optimum(name):
    model, inputs = make(name, 8)
    _, new = make(name, 5, seed=1)
    expected = full_covariance(dense_jacobian(model, new), precision_matrix(model, inputs))
    values, vectors = torch.linalg.eigh(expected)
    s = 4
    la = SubspaceLaplace.paper(
        model, "classification", projector="lowrank-ggn", dim=s, prior_precision=PRIOR, subspace_inputs=new
    ).fit(loader(inputs, labels(model, inputs)))
    best = vectors[:, -s:] * values[-s:] @ vectors[:, -s:].T
    assert close(la.functional_covariance(new, joint=True), best, 1e-8)


def test_regression_predicts_with_noise_from_the_residuals():
    model, inputs = make("mlp", 12)
    targets = dense_outputs(model, inputs) + torch.randn(12, 2, dtype=torch.float64)
    residuals = targets - dense_outputs(model, inputs)
    la = SubspaceLaplace.paper(model, "regression", dim=5, prior_precision=PRIOR).fit(loader(inputs, targets))
    assert la.noise_std == pytest.approx(float(residuals.square().mean().sqrt()))
    hessians = torch.eye(2, dtype=torch.float64).expand(12, 2, 2) / la.noise_std**2
    precision = dense_ggn(model, inputs, hessians) + PRIOR * torch.eye(la.num_parameters, dtype=torch.float64)
    mean, covariance = la(inputs)
    expected = subspace_covariance(dense_jacobian(model, inputs), la.projection_matrix(), precision)
    assert torch.allclose(mean, dense_outputs(model, inputs))
    assert close(covariance[3], expected[6:8, 6:8], 1e-8)
    prediction = la.predict(inputs)
    noise = la.noise_std**2 * torch.eye(2, dtype=torch.float64).expand(12, 2, 2)
    assert close(prediction.total - prediction.covariance, noise, 1e-12)


def test_truncation_and_another_prior_need_no_data():
    model, inputs = make("paper-cnn", 8)
    la = SubspaceLaplace.paper(model, "classification", dim=6, prior_precision=PRIOR).fit(
        loader(inputs, labels(model, inputs))
    )
    jacobian = dense_jacobian(model, inputs)
    smaller = la.truncated(3)
    assert smaller.dim == 3
    assert la.dim == 6
    expected = subspace_covariance(jacobian, la.projection_matrix()[:, :3], precision_matrix(model, inputs))
    assert close(smaller.functional_covariance(inputs, joint=True), expected, 1e-8)
    traces = la.leading_traces(inputs)
    assert len(traces) == 6
    assert traces[2] == pytest.approx(float(expected.trace()), rel=1e-8)
    other = la.with_prior(5.0)
    expected = subspace_covariance(jacobian, la.projection_matrix(), precision_matrix(model, inputs, 5.0))
    assert close(other.functional_covariance(inputs, joint=True), expected, 1e-8)
    assert la.prior_precision == PRIOR
    assert other.prior_precision == 5.0


def test_last_layer_equals_a_laplace_approximation_of_that_layer_alone():
    model, inputs = make("paper-cnn", 8)
    batches = loader(inputs, labels(model, inputs))
    la = SubspaceLaplace.paper(model, "classification", projector="last-layer", prior_precision=PRIOR).fit(batches)
    frozen = copy.deepcopy(model)
    frozen.first.requires_grad_(False)
    frozen.block.requires_grad_(False)
    full = SubspaceLaplace.paper(frozen, "classification", projector="full", prior_precision=PRIOR).fit(batches)
    assert la.dim == full.num_parameters
    assert close(la.functional_covariance(inputs), full.functional_covariance(inputs), 1e-8)


def test_links_agree_where_there_is_no_uncertainty_and_are_probabilities():
    model, inputs = make("paper-cnn", 8)
    batches = loader(inputs, labels(model, inputs))
    certain = SubspaceLaplace.paper(model, "classification", dim=4, prior_precision=1000000000000.0).fit(batches)
    for link in ("probit", "mc"):
        assert torch.allclose(certain(inputs, link=link), dense_outputs(model, inputs).softmax(1), atol=1e-5)
    la = SubspaceLaplace.paper(model, "classification", dim=4, prior_precision=0.001).fit(batches)
    for link in ("probit", "mc", "bridge"):
        probabilities = la(inputs, link=link)
        assert torch.allclose(probabilities.sum(1), torch.ones(8, dtype=torch.float64))
        assert (probabilities > 0).all()
        assert torch.equal(probabilities, la(inputs, link=link))


def test_a_loader_and_a_tensor_give_the_same_prediction():
    model, inputs = make("mlp", 9)
    targets = labels(model, inputs)
    la = SubspaceLaplace.paper(model, "classification", dim=4).fit(loader(inputs, targets))
    assert torch.allclose(la(inputs), la(loader(inputs, targets)))
    assert torch.allclose(la(inputs), la(loader(inputs, targets, size=2)), rtol=1e-12)


def test_dropped_directions_change_little_and_save_passes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6)).double()
    inputs = torch.randn(300, 4, dtype=torch.float64)
    with torch.no_grad():
        model[2].weight *= 300  # confident, as a trained network is
    batches = loader(inputs, torch.arange(300) % 6, size=50)
    exact = SubspaceLaplace.paper(model, "classification", dim=20, resources=Resources(direction_tolerance=0.0)).fit(
        batches
    )
    quick = SubspaceLaplace.paper(model, "classification", dim=20, resources=Resources(direction_tolerance=1e-08)).fit(
        batches
    )
    assert quick._state.linearization.passes < 0.8 * exact._state.linearization.passes
    assert close(quick.functional_variance(inputs), exact.functional_variance(inputs), 1e-6)


def test_long_work_shows_progress_only_when_asked(capsys):
    model, inputs = make("mlp", 12)
    batches = loader(inputs, labels(model, inputs))
    la = SubspaceLaplace.paper(model, "classification", dim=4).fit(batches)
    la.predict(inputs)
    la.optimize_prior_precision("validation", val_loader=batches)
    assert capsys.readouterr().err == ""
    la.fit(batches, progress=True)
    fitted = capsys.readouterr().err
    assert all(stage in fitted for stage in ("survey", "KFAC", "Jacobians", "reduced posterior"))
    la.predict(inputs, progress=True)
    assert "predictions" in capsys.readouterr().err
    la.optimize_prior_precision("validation", val_loader=batches, progress=True)
    assert "validation" in capsys.readouterr().err
    la.captured_share(inputs, progress=True)
    assert "reduced posterior" in capsys.readouterr().err


def test_parameters_frozen_before_the_fit_are_left_out_of_it():
    model, inputs = make("mlp", 8)
    la = SubspaceLaplace.paper(model, "classification", dim=4, prior_precision=PRIOR)
    first = next(iter(model.parameters()))
    first.requires_grad_(False)
    la.fit(loader(inputs, labels(model, inputs)))
    expected = SubspaceLaplace.paper(model, "classification", dim=4, prior_precision=PRIOR)
    expected.fit(loader(inputs, labels(model, inputs)))
    assert la.num_parameters == expected.num_parameters == la.projection_matrix().shape[0]
    assert la.log_marginal_likelihood() == expected.log_marginal_likelihood()
    assert la.sample(2).shape == (2, la.num_parameters)


def test_parameters_that_have_changed_places_are_noticed():
    model, inputs = make("mlp", 8)
    la = SubspaceLaplace.paper(model, "classification", dim=4).fit(loader(inputs, labels(model, inputs)))
    last = list(model.parameters())[-1]
    with torch.no_grad():
        last.copy_(last.flip(0))
    with pytest.raises(RuntimeError, match="changed since fit"):
        la(inputs)


def test_the_summary_tells_where_there_are_fewer_dimensions_than_asked_for():
    model, inputs = make("mlp", 8)
    data = loader(inputs, labels(model, inputs))
    la = SubspaceLaplace(model, "classification", prior_precision=1.0).fit(data)
    assert la.dim < 100
    assert f"{la.dim} (the default is 100, but P has rank {la.dim})" in la.summary()
    assert "the default is" in la.with_prior(3.0).summary()
    assert "the default is" not in la.truncated(3).summary()
    with pytest.warns(UserWarning, match="dim=50 is above"):
        la = SubspaceLaplace(model, "classification", 50, prior_precision=1.0).fit(data)
    assert f"{la.dim} (asked for: 50, but P has rank {la.dim})" in la.summary()
    for options in ({"dim": 5}, {"projector": "last-layer"}):
        la = SubspaceLaplace(model, "classification", **options, prior_precision=1.0).fit(data)
        assert "but P has" not in la.summary()


def test_the_likelihood_has_the_noise_in_use():
    model, inputs = make("mlp", 12)
    targets = model(inputs).detach() + 0.1
    la = SubspaceLaplace(model, "regression", 4)
    assert la.likelihood == Gaussian() and la.likelihood.noise_std is None
    la.fit(loader(inputs, targets))
    assert la.likelihood.noise_std == la.noise_std == pytest.approx(0.1)
    assert SubspaceLaplace(model, Categorical(ignore_index=-1)).likelihood == Categorical(ignore_index=-1)


def test_the_summary_tells_the_captured_share_where_it_is_known():
    model, inputs = make("mlp", 40)
    data = loader(inputs, labels(model, inputs), 10)
    assert "captured share" not in SubspaceLaplace.paper(model, "classification", dim=4).fit(data).summary()
    la = SubspaceLaplace.paper(model, "classification", dim=4, subspace_inputs=inputs).fit(data, certify=True)
    assert f"at least {float(la.captured_share(inputs)[-1]):.1%}" in la.summary()
    assert "captured share" not in la.with_prior(3.0).summary()
