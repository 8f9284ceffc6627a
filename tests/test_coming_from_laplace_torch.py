"""The examples of laplace-torch's README and of its regression page, with `SubspaceLaplace` in place of `Laplace`."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sublaplace import SubspaceLaplace
from sublaplace.fitting.validation import PRIOR_PULL


def trained(model, loader, loss, steps=300):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return model


def sine(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 8 * torch.rand(n, 1, generator=generator)
    return x, torch.sin(x) + 0.3 * torch.randn(n, 1, generator=generator)


def test_the_classification_example():
    torch.manual_seed(0)
    x = torch.randn(120, 2)
    y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    train_loader = DataLoader(TensorDataset(x[:80], y[:80]), batch_size=20)
    val_loader = DataLoader(TensorDataset(x[80:], y[80:]), batch_size=20)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
    model = trained(model, train_loader, nn.CrossEntropyLoss(), steps=40)

    la = SubspaceLaplace.paper(model, "classification", dim=30)
    la.fit(train_loader)
    la.optimize_prior_precision(method="validation", val_loader=val_loader)
    pred = la(x[80:], link="probit")

    assert pred.shape == (40, 3)
    assert torch.allclose(pred.sum(1), torch.ones(40), atol=1e-5)

    def nll(posterior):
        return float(-posterior(x[80:]).gather(1, y[80:, None]).log().mean())

    def pulled(posterior):
        """What is minimised: the NLL, and a pull towards λ before, which was 1."""
        return nll(posterior) + PRIOR_PULL * math.log10(posterior.prior_precision) ** 2 / 40

    assert pulled(la) <= min(pulled(la.with_prior(prior)) for prior in (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)) + 1e-6
    assert nll(la) <= nll(la.with_prior(1.0))
    with torch.no_grad():
        assert nll(la) <= float(nn.functional.cross_entropy(model(x[80:]), y[80:])) + 1e-3


def test_the_regression_example():
    torch.manual_seed(711)
    x, y = sine(150, 0)
    train_loader = DataLoader(TensorDataset(x, y), batch_size=150)
    x_test = torch.linspace(-5, 13, 50)[:, None]
    model = trained(nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)), train_loader, nn.MSELoss())

    la = SubspaceLaplace.paper(model, "regression", projector="full")
    la.fit(train_loader)
    log_prior, log_sigma = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    hyper_optimizer = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    for _ in range(300):
        hyper_optimizer.zero_grad()
        neg_marglik = -la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        neg_marglik.backward()
        hyper_optimizer.step()
    # In place of this loop there is one line, which also sets λ and σ (the loop leaves `la` as it is):
    la.optimize_prior_precision(method="marglik", tune_noise=True)
    assert log_prior.exp().item() == pytest.approx(la.prior_precision, rel=0.02)
    assert log_sigma.exp().item() == pytest.approx(la.noise_std, rel=0.02)
    assert la.noise_std == pytest.approx(0.3, rel=0.2)

    f_mu, f_var = la(x_test)
    f_mu = f_mu.squeeze().detach().cpu().numpy()
    f_sigma = f_var.squeeze().sqrt().cpu().numpy()
    pred_std = np.sqrt(f_sigma**2 + la.noise_std**2)
    assert f_mu.shape == f_sigma.shape == (50,)
    assert np.allclose(pred_std, la.predict(x_test).total.squeeze().sqrt().numpy(), rtol=1e-5)
    inside = (x_test.squeeze().numpy() > 1) & (x_test.squeeze().numpy() < 7)
    assert f_sigma[~inside].max() > 5 * f_sigma[inside].max(), "uncertainty must grow away from the data"
