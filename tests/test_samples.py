"""Draws of parameters and functions: their moments, their reproducibility, and that they are one function each."""

import copy

import pytest
import torch
from dense_reference import dense_ggn, dense_jacobian, dense_outputs, softmax_hessians
from networks import make
from sensitive import untouched
from test_laplace import labels, loader, sized

from sublaplace import PROJECTORS, DensePrecision, DualPrecision, Gaussian, Resources, SubspaceLaplace
from sublaplace.data.batches import select

PRIOR = 0.7
COUNT = 20_000  # draws, where moments are estimated
SIGMAS = 5  # of the sampling error that are allowed
FORMS = {
    "subspace": ("lowrank-kfac", 8),
    "subset": ("subset-magnitude", 8),
    "dual": ("full", 8),
    "primal": ("full", 45),
}


def fit(projector="lowrank-kfac", n=8, name="mlp", dtype=torch.float64, **options):
    model, inputs = make(name, n, dtype)
    la = SubspaceLaplace.paper(model, "classification", **sized(projector, 6), **{"prior_precision": PRIOR} | options)
    return la.fit(loader(inputs, labels(model, inputs), size=16)), inputs


@pytest.fixture(scope="module", params=FORMS.values(), ids=FORMS.keys())
def drawn(request):
    """A posterior with many draws of θ − θ̂, and the training inputs."""
    la, inputs = fit(*request.param)
    expected = {("full", 8): DualPrecision, ("full", 45): DensePrecision}.get(request.param)
    assert expected is None or isinstance(la._state.posterior, expected)
    return la, la.sample(COUNT) - theta(la), inputs


def theta(la):
    return torch.cat([p.detach().flatten() for p in la.model.parameters() if p.requires_grad])


def precision_matrix(la, inputs):
    ggn = dense_ggn(la.model, inputs, softmax_hessians(dense_outputs(la.model, inputs)))
    return ggn + PRIOR * torch.eye(len(ggn), dtype=torch.float64)


def whitened(la, deltas, inputs):
    """μLᵀ for L Lᵀ = PᵀΛP by brute force: standard normal, if the draws have the covariance that they should."""
    precision = precision_matrix(la, inputs)
    if la.projector.name == "full":
        return deltas @ torch.linalg.cholesky(precision)
    P = la.projection_matrix()
    return deltas @ P @ torch.linalg.cholesky(P.T @ precision @ P)


# Moments --------------------------------------------------------------------------------------------------------------


def test_samples_have_the_mean_of_the_trained_parameters(drawn):
    la, deltas, inputs = drawn
    mean = whitened(la, deltas, inputs).mean(0)
    assert mean.abs().max() < SIGMAS * COUNT**-0.5


def test_samples_have_the_posterior_covariance_in_every_direction(drawn):
    la, deltas, inputs = drawn
    normal = whitened(la, deltas, inputs)
    assert normal.shape == (COUNT, la.dim)
    covariance = normal.T @ normal / COUNT
    error = (covariance - torch.eye(la.dim, dtype=torch.float64)).abs()
    assert error.diagonal().max() < SIGMAS * (2 / COUNT) ** 0.5
    assert (error - error.diagonal().diag()).max() < SIGMAS * COUNT**-0.5
    assert abs(float(covariance.trace()) / la.dim - 1) < SIGMAS * (2 / (COUNT * la.dim)) ** 0.5


def test_linearised_samples_have_the_functional_covariance(drawn):
    la, deltas, _ = drawn
    _, new = make("mlp", 4, seed=1)
    outputs = deltas @ dense_jacobian(la.model, new).T
    expected = la.functional_covariance(new, joint=True)
    variance = expected.diagonal()
    error = ((variance[:, None] * variance + expected**2) / COUNT).sqrt()  # of an entry of a Wishart matrix
    assert ((outputs.T @ outputs / COUNT - expected).abs() < SIGMAS * error).all()
    assert (outputs.mean(0).abs() < SIGMAS * (variance / COUNT).sqrt()).all()


def test_functional_samples_have_the_functional_covariance_and_the_outputs_as_mean():
    la, _ = fit()
    _, new = make("mlp", 3, seed=1)
    draws = la.functional_samples(new, COUNT)
    expected = la.functional_covariance(new, joint=True)
    variance = expected.diagonal()
    centred = (draws - dense_outputs(la.model, new)).flatten(1)
    error = ((variance[:, None] * variance + expected**2) / COUNT).sqrt()
    assert ((centred.T @ centred / COUNT - expected).abs() < SIGMAS * error).all()
    assert (centred.mean(0).abs() < SIGMAS * (variance / COUNT).sqrt()).all()


@pytest.mark.parametrize("projector", ["full", "lowrank-kfac"])
def test_samples_of_regression_know_its_noise(projector):
    model, inputs = make("mlp", 8)
    targets = dense_outputs(model, inputs) + 0.1
    precise, vague = (
        SubspaceLaplace.paper(model, Gaussian(noise), **sized(projector, 6), prior_precision=PRIOR).fit(
            loader(inputs, targets)
        )
        for noise in (0.01, 10.0)
    )
    for la in (precise, vague):
        found = la.functional_samples(inputs, 2000).var(0)
        expected = la.functional_variance(inputs)
        assert ((found / expected - 1).abs() < SIGMAS * (2 / 2000) ** 0.5).all()
    assert (precise.functional_variance(inputs) < 1e-2 * vague.functional_variance(inputs)).all()


def test_samples_follow_another_prior():
    la, _ = fit("full")
    certain = la.with_prior(1e6).sample(50) - theta(la)
    assert certain.square().mean() == pytest.approx(1e-6, rel=0.2)
    assert (la.sample(50) - theta(la)).square().mean() > 0.1


# Shape and place ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projector", [*PROJECTORS, "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_projector_can_be_sampled(projector, dtype):
    la, inputs = fit(projector, name="paper-cnn", dtype=dtype)
    parameters, functions = la.sample(3), la.functional_samples(inputs, 3)
    assert parameters.shape == (3, la.num_parameters) and functions.shape == (3, 8, 3)
    assert parameters.dtype == functions.dtype == dtype
    assert not parameters.requires_grad and not functions.requires_grad
    assert torch.isfinite(parameters).all() and torch.isfinite(functions).all()
    assert len(parameters.unique(dim=0)) == 3
    if projector != "subset-diagonal":  # which picks parameters that no output depends on
        assert len(functions.unique(dim=0)) == 3


@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "frozen-layer"])
def test_samples_stay_in_the_subspace_around_the_trained_parameters(name):
    la, _ = fit(name=name)
    deltas = la.sample(20) - theta(la)
    P = la.projection_matrix()
    assert deltas.shape == (20, la.num_parameters)
    assert torch.linalg.matrix_rank(deltas) == la.dim
    assert (deltas - deltas @ P @ P.T).abs().max() < 1e-12 * deltas.abs().max()


@pytest.mark.parametrize("projector", ["subset-magnitude", "last-layer"])
def test_samples_of_a_subset_leave_all_other_parameters_alone(projector):
    la, _ = fit(projector)
    chosen = la.projection_matrix().any(1)
    samples = la.sample(20)
    assert (samples[:, ~chosen] == theta(la)[~chosen]).all()
    assert (samples[:, chosen] != theta(la)[chosen]).all()


def test_truncated_samples_stay_in_the_leading_dimensions():
    la, _ = fit()
    smaller = la.truncated(2)
    deltas = smaller.sample(10) - theta(la)
    P = la.projection_matrix()[:, :2]
    assert (deltas - deltas @ P @ P.T).abs().max() < 1e-12 * deltas.abs().max()


# One function each ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projector", ["lowrank-kfac", "subset-magnitude", "full"])
@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "tied-weights", "attention", "keyword-inputs"])
def test_functional_samples_are_the_linearised_network_at_the_sampled_parameters(name, projector):
    la, _ = fit(projector, name=name)
    _, new = make(name, 5, seed=1)
    outputs = dense_outputs(la.model, new)
    changes = (la.sample(4) - theta(la)) @ dense_jacobian(la.model, new).T
    found = la.functional_samples(new, 4)
    assert found.shape == (4, *outputs.shape)
    assert torch.allclose(found, outputs + changes.view(4, *outputs.shape), rtol=1e-9, atol=1e-9)


def test_a_draw_is_the_same_function_in_every_call():
    la, _ = fit(name="paper-cnn")
    _, new = make("paper-cnn", 9, seed=1)
    together = la.functional_samples(new, 4)
    apart = [la.functional_samples(select(new, part), 4) for part in (slice(0, 1), slice(1, 7), slice(7, 9))]
    assert torch.allclose(torch.cat(apart, dim=1), together, rtol=1e-12)
    backwards = la.functional_samples(new.flip(0), 4)
    assert torch.allclose(backwards.flip(1), together, rtol=1e-12)
    as_loader = la.functional_samples(loader(new, torch.zeros(9), size=2), 4)
    assert torch.allclose(as_loader, together, rtol=1e-12)


def test_functional_samples_do_not_depend_on_the_memory_budget():
    large, inputs = fit()
    small, _ = fit(resources=Resources(memory_budget=1))
    assert torch.allclose(small.functional_samples(inputs, 5), large.functional_samples(inputs, 5), rtol=1e-9)


# Randomness -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("projector", "n"), FORMS.values(), ids=FORMS.keys())
def test_samples_are_determined_by_the_seed(projector, n):
    (first, inputs), (same, _), (other, _) = (fit(projector, n, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.sample(5), first.sample(5))
    assert torch.equal(first.sample(5), same.sample(5))
    assert torch.equal(first.functional_samples(inputs, 5), same.functional_samples(inputs, 5))
    assert (first.functional_samples(inputs, 5) != other.functional_samples(inputs, 5)).all()


@pytest.mark.parametrize(("projector", "n"), FORMS.values(), ids=FORMS.keys())
def test_samples_neither_read_nor_touch_the_global_random_state(projector, n):
    la, inputs = fit(projector, n)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = la.sample(5), la.functional_samples(inputs, 5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(la.sample(5), first[0])
    assert torch.equal(la.functional_samples(inputs, 5), first[1])


def test_sampling_leaves_the_model_untouched():
    la, inputs = fit(name="residual-batch-norm")
    la.model.train()
    with untouched(la.model):
        la.sample(3)
        la.functional_samples(inputs, 3)


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, 2.0, 1.5, True, "3", None])
def test_a_count_that_is_no_positive_integer_is_refused(count):
    la, inputs = fit()
    with pytest.raises((TypeError, ValueError), match="count must be a positive integer"):
        la.sample(count)
    with pytest.raises((TypeError, ValueError), match="count must be a positive integer"):
        la.functional_samples(inputs, count)


def test_there_are_no_functional_samples_without_inputs():
    la, inputs = fit()
    with pytest.raises(ValueError, match="empty"):
        la.functional_samples(inputs[:0], 3)


def test_samples_before_fit_are_refused():
    model, inputs = make("mlp", 4)
    la = SubspaceLaplace.paper(model, "classification")
    with pytest.raises(RuntimeError, match="not fitted"):
        la.sample(3)
    with pytest.raises(RuntimeError, match="not fitted"):
        la.functional_samples(inputs, 3)


def test_samples_around_parameters_that_have_changed_are_refused():
    la, inputs = fit()
    with torch.no_grad():
        la.model[0].bias += 1
    with pytest.raises(RuntimeError, match="changed since fit"):
        la.sample(3)
    with pytest.raises(RuntimeError, match="changed since fit"):
        la.functional_samples(inputs, 3)


# Networks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "residual-batch-norm", "keyword-inputs", "tied-weights"])
def test_drawn_networks_are_those_with_the_drawn_parameters(name):
    la, inputs = fit(name=name)
    found = la.network_samples(inputs, 3)
    with untouched(la.model):
        la.network_samples(inputs, 2)
    model = copy.deepcopy(la.model).eval()
    for draw, outputs in zip(la.sample(3), found, strict=True):
        torch.nn.utils.vector_to_parameters(draw, [p for p in model.parameters() if p.requires_grad])
        assert torch.allclose(outputs, dense_outputs(model, inputs), rtol=1e-8, atol=1e-10)


def test_drawn_networks_approach_the_linearised_ones_with_a_narrow_prior():
    la, inputs = fit(prior_precision=1e8)
    moved = la.network_samples(inputs, 5) - dense_outputs(la.model, inputs)
    linear = la.functional_samples(inputs, 5) - dense_outputs(la.model, inputs)
    assert (moved - linear).abs().max() < 1e-3 * linear.abs().max()


def test_drawn_networks_can_be_differentiated_and_take_loaders():
    la, inputs = fit()
    x = inputs.clone().requires_grad_()
    la.network_samples(x, 2).sum().backward()
    assert x.grad is not None and x.grad.abs().max() > 0
    assert not la.network_samples(inputs, 2).requires_grad
    parts = la.network_samples([inputs[:3], inputs[3:]], 2, torch.Generator().manual_seed(4))
    assert torch.allclose(parts, la.network_samples(inputs, 2, torch.Generator().manual_seed(4)))
    with pytest.raises(ValueError, match="x is empty"):
        la.network_samples([], 2)
