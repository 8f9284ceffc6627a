"""Training by Gauss–Newton steps: the MAP by brute force, and λ and σ by the evidence."""

import pytest
import torch
from torch import nn

from sublaplace.fitting.gauss_newton import trained_by_gauss_newton
from sublaplace.model.mlp import mlp


def data(n=20, noise=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    y = (4 * x).sin().sum(1, keepdim=True)
    y = (y - y.mean()) / y.std()
    return x, y + noise * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def network(x, outputs=1):
    return mlp(x, (12,), outputs, nn.Tanh, torch.Generator().manual_seed(1))


def test_a_linear_network_reaches_ridge_regression_in_few_steps():
    x, y = data()
    linear = nn.Linear(2, 1).double()
    trained_by_gauss_newton(linear, x, y, prior_precision=2.0, noise_std=0.5, max_steps=30)
    design = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    ridge = torch.linalg.solve(design.T @ design + 2.0 * 0.25 * torch.eye(3, dtype=torch.float64), design.T @ y)
    assert torch.allclose(torch.cat([linear.weight, linear.bias[None]], dim=1).T, ridge, rtol=1e-5)


def test_the_gradient_of_the_objective_vanishes_at_the_end():
    x, y = data()
    model = network(x, 2)
    found = trained_by_gauss_newton(model, x, torch.cat([y, y.square()], dim=1), 0.7, 0.1, max_steps=300)
    assert all(after < before for before, after in zip(found.objective, found.objective[1:], strict=False))
    residuals = torch.cat([y, y.square()], dim=1) - model(x)
    loss = residuals.square().sum() / (2 * 0.1**2) + 0.35 * sum(p.square().sum() for p in model.parameters())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert found.objective[-1] == pytest.approx(float(loss.detach()), rel=1e-3)
    assert max(float(g.abs().max()) for g in gradients) < 0.05 * found.objective[-1]


def test_given_values_are_kept_and_others_tuned():
    x, y = data()
    assert trained_by_gauss_newton(network(x), x, y, 0.7, 0.1, 10).prior_precision == 0.7
    found = trained_by_gauss_newton(network(x), x, y, 0.7, None, 40)
    assert found.prior_precision == pytest.approx(0.7) and found.noise_std != 0.1
    found = trained_by_gauss_newton(network(x), x, y, None, 0.2, 40)
    assert found.noise_std == pytest.approx(0.2) and found.prior_precision != 1.0


@pytest.mark.parametrize("noise", [0.03, 0.3])
def test_the_evidence_finds_the_noise(noise):
    x, y = data(150, noise)
    found = trained_by_gauss_newton(network(x), x, y, None, None, 80)
    assert found.noise_std == pytest.approx(noise, rel=0.35)


def test_a_scaled_network_is_the_same_function():
    x, _ = data()
    plain, scaled = (mlp(x, (12,), 1, nn.Tanh, torch.Generator().manual_seed(1), scaled=s) for s in (False, True))
    assert torch.allclose(plain(x), scaled(x))
    weights = [[p for p in model.parameters() if p.ndim == 2] for model in (plain, scaled)]
    for one, other in zip(*weights, strict=True):
        assert torch.allclose(one * one.shape[1] ** 0.5, other)
