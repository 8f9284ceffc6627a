"""Length scales by the evidence: closed forms by brute force, gradients by finite differences, irrelevant inputs."""

import pytest
import torch
from torch.distributions import MultivariateNormal

from sublaplace import Gaussian, SubspaceLaplace
from sublaplace.fitting.length_scales import Evidence, trained_with_length_scales
from sublaplace.model.fourier import FourierNetwork


def data(n=30, d=3, outputs=1, seed=0):
    """Smooth outcomes of the first two inputs; the others are irrelevant."""
    x = torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = torch.stack([(7 * x[:, 0]).sin() + x[:, 1], x[:, 0] - x[:, 1].square()][:outputs], dim=1)
    return x, (y - y.mean(0)) / y.std(0)


def network(x, outputs=1, seed=1):
    return FourierNetwork(x, outputs, torch.Generator().manual_seed(seed))


def position(d, seed=2):
    return 0.3 * torch.randn(d + 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance_of_weights(h, model):
    """The prior covariance of all parameters but δ, as the documentation states it."""
    stds = [h[-3].exp()] * model.joint.in_features + [h[-2].exp()] * model.single.in_features + [torch.ones_like(h[0])]
    return torch.stack(stds).square().diag()


def design(x, model, h):
    """The features by the definition, one direction at a time."""
    z = (x - x.mean(0)) / x.std(0, correction=0) / h[:-3].exp()
    parts = []
    for directions in (model.joint_directions, model.single_directions):
        sines = torch.stack([(z * row).sum(1).sin() for row in directions], dim=1)
        cosines = torch.stack([(z * row).sum(1).cos() for row in directions], dim=1)
        parts.append(torch.cat([sines, cosines], dim=1) / len(directions) ** 0.5)
    return torch.cat([*parts, torch.ones(len(x), 1, dtype=torch.float64)], dim=1)


@pytest.mark.parametrize("outputs", [1, 2])
def test_differences_of_the_evidence_are_those_of_normal_densities(outputs):
    x, y = data(outputs=outputs)
    model = network(x, outputs)
    evidence = Evidence(model, x, y)

    def expected(h):
        F = design(x, model, h)
        covariance = F @ covariance_of_weights(h, model) @ F.T + (2 * h[-1]).exp() * torch.eye(len(x)).double()
        density = sum(MultivariateNormal(torch.zeros(len(x)).double(), covariance).log_prob(column) for column in y.T)
        mean = torch.tensor([0.6], dtype=torch.float64).log() + 0.5 * torch.tensor([3.0], dtype=torch.float64).log()
        prior = ((h[:3] - mean) / 1.0).square().sum() + (h[3:5] / 2.0).square().sum() + ((h[5] + 4.0) / 2.0).square()
        return density - 0.5 * prior

    one, other = position(3) - torch.tensor([0, 0, 0, 0, 0, 1.0]).double(), position(3, seed=5) - 0.8
    found = evidence.log_density(one) - evidence.log_density(other)
    assert float(found) == pytest.approx(float(expected(one) - expected(other)), rel=1e-9)


def test_gradients_of_the_evidence_equal_finite_differences():
    x, y = data()
    evidence = Evidence(network(x), x, y)
    h = (position(3) - 0.5).requires_grad_()
    (found,) = torch.autograd.grad(evidence.log_density(h), h)
    for place in range(len(h)):
        moved = torch.zeros_like(h)
        moved[place] = 1e-5
        with torch.no_grad():
            expected = (evidence.log_density(h + moved) - evidence.log_density(h - moved)) / 2e-5
        assert float(found[place]) == pytest.approx(float(expected), rel=1e-6, abs=1e-6)


def trained(x, y, prior_precision=None, noise_std=None, max_steps=200):
    model = network(x, y.shape[1])
    return model, trained_with_length_scales(model, x, y, prior_precision, noise_std, max_steps)


def test_the_evidence_is_largest_at_the_result():
    x, y = data(outputs=2)
    y = y + 0.1 * torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    model, found = trained(x, y)
    evidence = Evidence(model, x, y)
    stds = [found.prior_precision[f"{name}.weight"] ** -0.5 for name in ("joint", "single")]
    h = torch.cat([model.length_scales, torch.tensor([*stds, found.noise_std], dtype=torch.float64)]).log()
    for step in (-0.1, 0.1):
        for moved in h + step * torch.eye(len(h), dtype=torch.float64):
            assert float(evidence.log_density(moved)) < float(evidence.log_density(h))


def test_the_gradient_of_all_parameters_vanishes_at_the_end():
    x, y = data(outputs=2)
    model, found = trained(x, y, noise_std=0.05)
    penalty = sum(found.prior_precision[name] * p.square().sum() / 2 for name, p in model.named_parameters())
    loss = (y - model(x)).square().sum() / (2 * found.noise_std**2) + penalty
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-2
    assert float(model.change.detach().abs().max()) > 1e-3
    stds = [found.prior_precision[f"{name}.weight"] ** -0.5 for name in ("joint", "single")]
    h = torch.cat([model.length_scales, torch.tensor([*stds, 0.05], dtype=torch.float64)]).log()
    objective = Evidence(model, x, y, noise_std=0.05).objective(h, model.change)
    assert float(loss.detach()) == pytest.approx(float(objective.detach()), rel=1e-6)


def test_irrelevant_inputs_have_long_length_scales():
    x, y = data(40, 4)
    model, _ = trained(x, y)
    assert model.length_scales[2:].min() > 3 * model.length_scales[0]


def test_given_values_are_kept():
    x, y = data()
    _, found = trained(x, y, 0.7, 0.2)
    assert found.prior_precision["joint.weight"] == pytest.approx(0.7)
    assert found.prior_precision["single.weight"] == pytest.approx(0.7)
    assert found.noise_std == pytest.approx(0.2)


def test_the_posterior_is_the_one_of_all_parameters_by_brute_force():
    """With δ, the Laplace approximation has more variance than the linear model of the weights alone."""
    x, y = data(15, 2)
    model, tuned = trained(x, y)
    la = SubspaceLaplace(model, Gaussian(tuned.noise_std), projector="full", prior_precision=tuned.prior_precision).fit(
        [(x, y)]
    )
    new = torch.rand(6, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    priors = torch.cat([torch.full((p.numel(),), tuned.prior_precision[n]) for n, p in model.named_parameters()])

    def rows(points, chosen):
        return torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(output, chosen, retain_graph=True)])
                for output in model(points).flatten()
            ]
        )

    J, K = rows(x, parameters), rows(new, parameters)
    precision = J.T @ J / tuned.noise_std**2 + priors.double().diag()
    expected = (K @ torch.linalg.solve(precision, K.T)).diagonal()
    assert torch.allclose(la.functional_variance(new).flatten(), expected, rtol=1e-5)
    kept = slice(model.change.numel(), None)
    assert names[0] == "change"
    alone = (K[:, kept] @ torch.linalg.solve(precision[kept, kept], K[:, kept].T)).diagonal()
    assert (expected > alone).all() and (expected / alone).max() > 1.1
