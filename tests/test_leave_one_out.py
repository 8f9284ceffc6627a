"""λ of classification by leave-one-out: the refit, what is left out, and the choice, against brute force in float64."""

import warnings
from dataclasses import replace
from math import log10, pi

import pytest
import torch
import torch.nn.functional as F
from dense_reference import dense_jacobian, dense_outputs, pairwise_probabilities, softmax_hessians
from networks import make
from test_laplace import loader

from sublaplace import Bernoulli, Categorical, Complement, Gaussian, SubspaceLaplace
from sublaplace.data.batches import Batch
from sublaplace.fitting import leave_one_out
from sublaplace.fitting.leave_one_out import (
    LOG_PRIORS,
    OUTSIDE_FACTOR,
    LinearisedData,
    prior_by_leave_one_out,
)

PRIORS = [0.01, 0.5, 20.0]
KINDS = ["classification", "multi-label"]


def problem(kind="classification", name="mlp", n=24, steps=60):
    """A network that was trained for a while on labels with errors."""
    model, inputs = make(name, n)
    generator = torch.Generator().manual_seed(1)
    outputs = dense_outputs(model, inputs)
    outputs = (outputs - outputs.mean(0)) / outputs.std(0) + torch.randn(outputs.shape, generator=generator).double()
    targets = outputs.argmax(1) if kind == "classification" else (outputs > 0).long()
    optimizer = torch.optim.Adam(model.parameters(), 0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        found = model(inputs)
        loss = (
            F.cross_entropy(found, targets)
            if kind == "classification"
            else F.binary_cross_entropy_with_logits(found, targets.double())
        )
        loss.backward()
        optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None
    return model, inputs, targets


def likelihood_of(kind, **options):
    return Categorical(**options) if kind == "classification" else Bernoulli(**options)


def fitted(model, kind, inputs, targets, **options):
    options = {"dim": 5, "complement": None, **options}
    return SubspaceLaplace(model, likelihood_of(kind), **options).fit(loader(inputs, targets, 7))


def linearised(la, inputs, targets, weights=None, num_data=None, likelihood=None):
    return LinearisedData.of(
        likelihood or la._state.survey.likelihood,
        la._state.linearization,
        la._subspace().projection,
        Batch(inputs, targets, weights),
        len(targets) if num_data is None else num_data,
    )


def dense_basis(model, P):
    """An orthonormal basis Q of [θ̂, P], and Qᵀθ̂."""
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    rest = theta - P @ (P.T @ theta)
    Q = torch.cat([rest[:, None] / rest.norm(), P], dim=1)
    return Q, Q.T @ theta


def log_likelihoods(kind, outputs, targets):
    if kind == "classification":
        return -F.cross_entropy(outputs, targets, reduction="none")
    return -F.binary_cross_entropy_with_logits(outputs, targets.double(), reduction="none").sum(1)


def mode_of(kind, outputs, rows, targets, centre, prior, counts):
    """The mode by LBFGS, from nothing but its definition."""
    mu = torch.zeros_like(centre, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [mu], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        density = (log_likelihoods(kind, outputs + rows @ mu, targets) * counts).sum()
        loss = prior / 2 * (mu + centre).square().sum() - density
        loss.backward()
        return loss

    optimizer.step(closure)
    return mu.detach(), closure().item()


@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "embedding", "tied-weights"])
def test_the_data_are_those_of_the_linearised_network(name):
    model, inputs, targets = problem(name=name)
    la = fitted(model, "classification", inputs, targets)
    data = linearised(la, inputs, targets)
    Q, centre = dense_basis(model, la.projection_matrix())
    expected = (dense_jacobian(model, inputs) @ Q).view(len(targets), -1, Q.shape[1])
    assert (data.rows - expected).abs().max() <= 1e-9 * expected.abs().max()
    assert (data.centre - centre).abs().max() <= 1e-9 * centre.abs().max()
    assert torch.allclose(data.outputs, dense_outputs(model, inputs), rtol=1e-12)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_refit_is_the_mode(kind, prior):
    model, inputs, targets = problem(kind)
    data = linearised(fitted(model, kind, inputs, targets), inputs, targets)
    state = data.refitted(prior)
    one = torch.ones(len(targets)).double()
    mu, least = mode_of(kind, data.outputs, data.rows, targets, data.centre, prior, one)
    assert data.loss(state.coordinates, prior) == pytest.approx(least, abs=1e-6 * (1 + abs(least)))
    assert (state.outputs - data.outputs - data.rows @ mu).abs().max() <= 5e-3 * mu.norm()
    # What Newton's method would still gain, gᵀA⁻¹g / 2.
    gradient = prior * (state.coordinates + data.centre) - torch.einsum("ncs,nc->s", data.rows, state.gradients)
    assert gradient @ torch.linalg.solve(state.precision, gradient) / 2 <= 1e-6 * (1 + abs(least))
    assert data.loss(torch.zeros_like(mu), prior) > least + 1e-3  # it had to move


def test_a_start_elsewhere_leads_to_the_same_mode():
    model, inputs, targets = problem()
    data = linearised(fitted(model, "classification", inputs, targets), inputs, targets)
    far = 3 * torch.randn(len(data.centre), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = data.refitted(0.5), data.refitted(0.5, far)
    assert data.loss(one.coordinates, 0.5) == pytest.approx(data.loss(other.coordinates, 0.5), rel=1e-6)


def predictive_densities(kind, outputs, variance, targets):
    if kind == "classification":
        return pairwise_probabilities(outputs, variance).gather(1, targets[:, None])[:, 0].log()
    return log_likelihoods(kind, outputs / (1 + pi / 8 * variance).sqrt(), targets)


def newton_without_one(kind, data, prior, copies=1.0):
    """The mean NLL of every input after one exact Newton step away from the mode without it."""
    mu = data.refitted(prior).coordinates

    def objective(mu, counts):
        density = (log_likelihoods(kind, data.outputs + data.rows @ mu, data.targets) * counts).sum()
        return prior / 2 * (mu + data.centre).square().sum() - density

    everything = torch.full((len(data.targets),), copies).double()
    gradient = torch.autograd.functional.jacobian(lambda m: objective(m, everything), mu)
    losses = []
    for i in range(len(data.targets)):
        counts = everything.clone()
        counts[i] -= 1
        # Without what is left of the gradient at the mode, which is not exactly zero.
        step = torch.autograd.functional.jacobian(lambda m, c=counts: objective(m, c), mu) - gradient
        hessian = torch.autograd.functional.hessian(lambda m, c=counts: objective(m, c), mu)
        moved = mu - torch.linalg.solve(hessian, step)
        variance = (data.rows[i] @ torch.linalg.solve(hessian, data.rows[i].T)).diagonal()
        outputs = (data.outputs[i] + data.rows[i] @ moved)[None]
        losses.append(float(predictive_densities(kind, outputs, variance[None], data.targets[i : i + 1])))
    return -sum(losses) / len(losses)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_out_is_one_newton_step_without_it(kind, prior):
    model, inputs, targets = problem(kind, n=12)
    data = linearised(fitted(model, kind, inputs, targets), inputs, targets)
    found = data.left_out(data.refitted(prior))
    assert found == pytest.approx(newton_without_one(kind, data, prior), rel=1e-9)
    inside = -float(log_likelihoods(kind, data.refitted(prior).outputs, targets).mean())
    assert found > inside  # it is harder not to have seen the label


def test_an_input_that_stands_for_others_is_taken_out_alone():
    model, inputs, targets = problem(n=12)
    la = fitted(model, "classification", inputs, targets)
    data = linearised(la, inputs, targets, num_data=48)
    assert torch.equal(data.counts, torch.full((12, 1), 4.0).double())
    found = data.left_out(data.refitted(0.5))
    assert found == pytest.approx(newton_without_one("classification", data, 0.5, 4.0), rel=1e-9)
    many = linearised(la, inputs.repeat(4, 1), targets.repeat(4))
    assert found == pytest.approx(many.left_out(many.refitted(0.5)), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_really_leaving_out_gives(kind):
    model, inputs, targets = problem(kind, n=40)
    data = linearised(fitted(model, kind, inputs, targets, dim=3), inputs, targets)
    prior, losses = 5.0, []
    for i in range(len(targets)):
        counts = torch.ones(len(targets)).double()
        counts[i] = 0
        mu, _ = mode_of(kind, data.outputs, data.rows, targets, data.centre, prior, counts)
        outputs = data.outputs + data.rows @ mu
        hessian = torch.autograd.functional.hessian(
            lambda m, c=counts: -(log_likelihoods(kind, data.outputs + data.rows @ m, targets) * c).sum(), mu
        )
        A = hessian + prior * torch.eye(len(mu)).double()
        variance = (data.rows[i] @ torch.linalg.solve(A, data.rows[i].T)).diagonal()
        losses.append(float(predictive_densities(kind, outputs[i : i + 1], variance[None], targets[i : i + 1])))
    expected = -sum(losses) / len(losses)
    found = data.left_out(data.refitted(prior))
    seen = -float(log_likelihoods(kind, data.refitted(prior).outputs, targets).mean())
    assert found == pytest.approx(expected, abs=2e-3)
    assert expected - seen > 1e-2  # so that two thousandths mean something


def test_for_a_linear_model_with_gaussian_noise_it_is_exact():
    generator = torch.Generator().manual_seed(0)
    rows, targets = (torch.randn(15, k, generator=generator, dtype=torch.float64) for k in (4, 1))
    outputs, centre = torch.zeros(15, 1).double(), torch.tensor([1.0, -2.0, 0.5, 0.0]).double()
    one, noise, prior = torch.ones(15, 1).double(), 0.6, 2.0
    data = LinearisedData(Gaussian(noise), outputs, rows[:, None, :], targets, one, one, centre)
    losses = []
    for i in range(15):
        kept = [k for k in range(15) if k != i]
        A = rows[kept].T @ rows[kept] / noise**2 + prior * torch.eye(4).double()
        mu = torch.linalg.solve(A, (rows[kept].T @ targets[kept])[:, 0] / noise**2 - prior * centre)
        variance = rows[i] @ torch.linalg.solve(A, rows[i]) + noise**2
        losses.append(float(torch.distributions.Normal(rows[i] @ mu, variance.sqrt()).log_prob(targets[i])))
    assert data.left_out(data.refitted(prior)) == pytest.approx(-sum(losses) / 15, rel=1e-9)


# Weights and ignored labels


def test_ignored_labels_are_as_if_they_were_not_there():
    model, inputs, targets = problem()
    la = fitted(model, "classification", inputs, targets)
    some = targets.clone()
    some[5:12] = -1
    kept = some >= 0
    found = linearised(la, inputs, some, likelihood=Categorical(ignore_index=-1))
    expected = linearised(la, inputs[kept], targets[kept])
    for prior in PRIORS:
        assert found.left_out(found.refitted(prior)) == pytest.approx(
            expected.left_out(expected.refitted(prior)), rel=1e-9
        )
    assert prior_by_leave_one_out(found) == pytest.approx(prior_by_leave_one_out(expected), rel=1e-6)


@pytest.mark.parametrize("prior", PRIORS)
def test_a_single_ignored_label_of_several_is_not_taken_out(prior):
    model, inputs, targets = problem("multi-label", n=12)
    la = fitted(model, "multi-label", inputs, targets)
    some = targets.clone()
    some[:, 1] = -1
    found = linearised(la, inputs, some, likelihood=Bernoulli(ignore_index=-1))
    # The same network with the first output alone.
    alone = replace(
        linearised(la, inputs, targets),
        outputs=found.outputs[:, :1],
        rows=found.rows[:, :1],
        targets=targets[:, :1],
        counts=torch.ones(12, 1).double(),
        own=torch.ones(12, 1).double(),
    )
    assert found.left_out(found.refitted(prior)) == pytest.approx(alone.left_out(alone.refitted(prior)), rel=1e-8)


def test_weight_two_counts_like_the_input_given_twice():
    model, inputs, targets = problem()
    la = fitted(model, "classification", inputs, targets)
    weights = torch.ones(24).double()
    weights[:6], weights[6:9] = 2, 0
    twice = torch.cat([torch.arange(24), torch.arange(6)])
    twice = twice[(twice < 6) | (twice >= 9)]
    found = linearised(la, inputs, targets, weights)
    expected = linearised(la, inputs[twice], targets[twice])
    for prior in PRIORS:
        assert found.left_out(found.refitted(prior)) == pytest.approx(
            expected.left_out(expected.refitted(prior)), rel=1e-6
        )


def test_an_input_of_little_weight_is_taken_out_with_its_weight():
    model, inputs, targets = problem()
    la = fitted(model, "classification", inputs, targets)
    data = linearised(la, inputs, targets, torch.full((24,), 1 / 16).double())
    state = data.refitted(0.01)
    rows = data.rows
    losses = []
    for i in range(24):
        own = rows[i].T @ softmax_hessians(state.outputs[i : i + 1])[0] @ rows[i]
        A = state.precision - own / 16
        assert torch.linalg.eigvalsh(A)[0] > 0
        covariance = rows[i] @ torch.linalg.solve(A, rows[i].T)
        outputs = state.outputs[i] - covariance @ state.gradients[i] / 16
        variance = covariance.diagonal()[None]
        losses.append(float(predictive_densities("classification", outputs[None], variance, targets[i : i + 1])))
    assert data.left_out(state) == pytest.approx(-sum(losses) / 24, rel=1e-9)


def test_many_outputs_are_left_out_as_few_are():
    """More outputs than dimensions: the inverse is that of another matrix, the result the same."""
    model, inputs, targets = problem()
    la = fitted(model, "classification", inputs, targets)
    data = linearised(la, inputs, targets)
    C = data.rows.shape[1]
    few = replace(data, rows=data.rows[:, :, : C - 1], centre=data.centre[: C - 1])
    state = few.refitted(0.1)
    losses = []
    for i in range(24):
        rows = few.rows[i]
        A = state.precision - rows.T @ softmax_hessians(state.outputs[i : i + 1])[0] @ rows
        covariance = rows @ torch.linalg.solve(A, rows.T)
        outputs = state.outputs[i] - covariance @ state.gradients[i]
        variance = covariance.diagonal()[None]
        losses.append(float(predictive_densities("classification", outputs[None], variance, targets[i : i + 1])))
    assert few.left_out(state) == pytest.approx(-sum(losses) / 24, rel=1e-9)


# The choice


def grid_of(data):
    return [data.left_out(data.refitted(10.0**log_prior)) for log_prior in LOG_PRIORS]


@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_has_the_smallest_loss_of_all(kind):
    model, inputs, targets = problem(kind, n=40)
    data = linearised(fitted(model, kind, inputs, targets), inputs, targets)
    losses = grid_of(data)
    best = losses.index(min(losses))
    assert 0 < best < len(losses) - 1
    prior = prior_by_leave_one_out(data)
    assert abs(log10(prior) - LOG_PRIORS[best]) <= 0.25
    assert data.left_out(data.refitted(prior)) <= min(losses) + 1e-4


@pytest.mark.parametrize("right", [True, False])
def test_an_end_of_the_search_warns(right):
    model, inputs, targets = problem()
    data = linearised(fitted(model, "classification", inputs, targets), inputs, targets)
    # Labels that a direction explains, which hardly moves outputs, ask for a small λ; right outputs for a large one.
    labels = torch.arange(24) % 2
    signs = 2.0 * labels.double() - 1
    rows = torch.zeros_like(data.rows)
    rows[:, 1, 0] = 1e-3 * signs
    moved = replace(data, rows=rows, outputs=torch.zeros_like(data.outputs), targets=labels)
    if not right:
        moved = replace(moved, outputs=torch.stack([-signs, signs], dim=1), rows=1e-6 * rows, centre=0 * data.centre)
    with pytest.warns(
        UserWarning, match=r"by leave-one-out lies at an end of its search.*fit\(train_loader, val_loader"
    ):
        prior = prior_by_leave_one_out(moved)
    assert log10(prior) == pytest.approx(LOG_PRIORS[-1] if right else LOG_PRIORS[0], abs=1e-9)


def dense_data(model, inputs, targets, la):
    """All training inputs as the linearised network sees them in the span of θ̂ and P, by brute force."""
    Q, centre = dense_basis(model, la.projection_matrix())
    rows = (dense_jacobian(model, inputs) @ Q).view(len(inputs), -1, Q.shape[1])
    one = torch.ones(len(inputs), 1).double()
    return LinearisedData(Categorical(), dense_outputs(model, inputs), rows, targets, one, one, centre)


def test_a_fit_takes_it_for_classification_and_says_so():
    model, inputs, targets = problem(n=40)
    alone = fitted(model, "classification", inputs, targets)
    data = dense_data(model, inputs, targets, alone)
    expected = prior_by_leave_one_out(data)
    assert alone.prior_precision == pytest.approx(expected, rel=1e-5)
    assert "(by leave-one-out of the linearised network)" in alone.summary()
    outside = fitted(model, "classification", inputs, targets, complement=Complement("kfac", weight=1.0))
    assert outside.prior_precision == pytest.approx(OUTSIDE_FACTOR * expected, rel=1e-5)
    evidence = fitted(model, "classification", inputs, targets, prior_precision="evidence")
    assert "leave-one-out" not in evidence.summary() and "(by the evidence of KFAC)" in evidence.summary()
    given = fitted(model, "classification", inputs, targets, prior_precision=2.0)
    assert given.prior_precision == 2.0 and "(given)" in given.summary()


def seen_by(seen):
    """What stands in for the search, and keeps its data."""
    return lambda data, *_, **__: seen.append(data) or 3.0


def test_a_sample_of_the_data_stands_for_all(monkeypatch):
    model, inputs, targets = problem(n=40)
    seen = []
    monkeypatch.setattr("sublaplace.fitting.run.num_left_out", lambda num_outputs: 16)
    monkeypatch.setattr(
        "sublaplace.fitting.run.prior_by_leave_one_out", lambda data, *_, **__: seen.append(data) or 3.0
    )
    la = fitted(model, "classification", inputs, targets)
    assert la.prior_precision == 3.0
    assert seen[0].counts.shape == (16, 1) and (seen[0].counts == 40 / 16).all()
    # Every one of them is a training input with its own label.
    expected = dense_outputs(model, inputs)
    for output, label in zip(seen[0].outputs, seen[0].targets, strict=True):
        (place,) = torch.nonzero((expected - output).abs().sum(1) < 1e-9)[:, 0].tolist()
        assert targets[place] == label


def test_ignored_labels_do_not_make_the_others_count_more(monkeypatch):
    model, inputs, targets = problem(n=40)
    seen = []
    monkeypatch.setattr(
        "sublaplace.fitting.run.prior_by_leave_one_out", lambda data, *_, **__: seen.append(data) or 3.0
    )
    targets[::4] = -1
    batches = loader(inputs, targets, 7)
    SubspaceLaplace(model, Categorical(ignore_index=-1), 5, complement=None).fit(batches)
    assert seen[0].counts.shape == (30, 1) and (seen[0].counts == 1).all()


def test_regression_and_subspaces_of_single_parameters_do_not_take_it(monkeypatch):
    model, inputs, targets = problem()
    monkeypatch.setattr("sublaplace.fitting.run.prior_by_leave_one_out", lambda *_, **__: pytest.fail("not for these"))
    SubspaceLaplace(model, "regression", dim=4).fit(loader(inputs, dense_outputs(model, inputs) + 0.1, 7))
    fitted(model, "classification", inputs, targets, projector="last-layer", dim=None)
    fitted(model, "classification", inputs, targets, projector="full", dim=None)


def test_parameters_that_lie_in_the_subspace_are_no_direction_of_their_own():
    model, inputs, targets = problem(n=40)
    la = fitted(model, "classification", inputs, targets, dim=4)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    P = torch.linalg.qr(torch.cat([theta[:, None], la.projection_matrix()], dim=1)).Q
    projection = replace(la._subspace().projection, vectors=la._layout.unflatten(P.T.contiguous()))
    data = LinearisedData.of(
        Categorical(), la._state.linearization, projection, Batch(inputs, targets, None), len(targets)
    )
    assert data.rows.shape[2] == P.shape[1] == 5
    # The same span as that of θ̂ beside the four: the same λ.
    assert prior_by_leave_one_out(data) == pytest.approx(la.prior_precision, rel=1e-3)


def test_the_model_is_left_as_it_was():
    model, inputs, targets = problem()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fitted(model, "classification", inputs, targets)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert leave_one_out.LOG_PRIORS[0] > leave_one_out.LOG_PRIORS[-1]  # falling, as the warm starts need it


def test_a_large_variance_outside_asks_for_a_larger_prior_precision(monkeypatch):
    """In large networks the variance outside is far above the subspace's, and a small λ would drown all logits."""
    model, inputs, targets = problem(n=40)
    alone = fitted(model, "classification", inputs, targets)
    data = dense_data(model, inputs, targets, alone)
    plain = prior_by_leave_one_out(data)
    priors = 10.0 ** torch.tensor(LOG_PRIORS, dtype=torch.float64)
    shape = dense_outputs(model, inputs).shape
    little, much = ((size / priors)[:, None, None].expand(-1, *shape) for size in (1e-9, 3e5))
    assert prior_by_leave_one_out(data, little) == pytest.approx(OUTSIDE_FACTOR * plain, rel=1e-12)
    left_out = min(data.left_out(data.refitted(float(prior))) for prior in priors)

    def assert_least(found, variances, most):
        at = [data.kept(variance) for variance in variances]
        assert at[LOG_PRIORS.index(log10(found))] <= most < at[LOG_PRIORS.index(log10(found)) + 1]

    with pytest.warns(UserWarning, match="say little about λ for this network"):
        found = prior_by_leave_one_out(data, much)
    assert found > leave_one_out.FAR * OUTSIDE_FACTOR * plain
    assert_least(found, much, left_out)
    monkeypatch.setattr(leave_one_out, "FAR", 1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prior_by_leave_one_out(data, much) == found
