"""Complements that are known by draws, for networks with many outputs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sublaplace import Drawn, Resources, SubspaceLaplace
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.posteriors.drawn import DRAWS, DRAWS_OF_A_POINT, DrawnPosterior, draws_along_prior
from sublaplace.posteriors.sweep import prior_sweep

C, S = 60, 8


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """A network in which forward mode takes much less than rows: wide layers, many outputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, C)).double().eval()


def batches(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, C, (count,), generator=generator)
    return list(zip(x.split(20), y.split(20), strict=True))


def fitted(network: nn.Module, samples: int | str | None = None) -> SubspaceLaplace:
    options = {"subspace_inputs": Drawn(10), "resources": Resources(curvature_samples=samples)}
    return SubspaceLaplace(network, "classification", S, prior_precision=3.0, **options).fit(batches(60, 1))


@pytest.fixture(scope="module")
def exact(network: nn.Module) -> SubspaceLaplace:
    """The same without any sampling."""
    return fitted(network, "all")


@pytest.fixture(scope="module")
def la(network: nn.Module) -> SubspaceLaplace:
    """The default: by draws."""
    return fitted(network)


def posterior_of(la: SubspaceLaplace) -> ComplementedPosterior:
    posterior = la._fitted().posterior
    assert isinstance(posterior, ComplementedPosterior)
    return posterior


def exact_variance(la: SubspaceLaplace, x: Tensor) -> Tensor:
    return la.functional_variance(x, outputs=range(C))


X = torch.randn(7, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def outside_variances(la: SubspaceLaplace, draws: dict[str, Tensor]) -> Tensor:
    """J S Sᵀ Jᵀ by dense rows: (n, C)."""
    linearization = la._fitted().linearization
    with linearization.borrowed():
        rows = linearization.jacobian(X).dense_rows()
    return (rows @ torch.cat(list(draws.values()), dim=1).T).square().sum(1).view(len(X), C)


def test_variances_are_right_on_average_and_spread_as_they_should(la: SubspaceLaplace) -> None:
    posterior, many = posterior_of(la), 200
    inside = DrawnPosterior.of(posterior, 0).inside
    linearization = la._fitted().linearization
    with linearization.borrowed():
        within = inside.whitened(linearization.jacobian(X)).square().sum(2)
    exact = exact_variance(la, X) - within
    found = torch.stack(
        [outside_variances(la, draws_along_prior(posterior, [3.0], DRAWS, seed)) for seed in range(many)]
    )
    relative = found / exact - 1
    deviation = (2 / DRAWS) ** 0.5
    assert relative.mean(0).abs().max() < 5 * deviation / many**0.5
    assert relative.std(0).mean() == pytest.approx(deviation, rel=0.05)


def test_predictions_use_the_draws_of_the_seed(la: SubspaceLaplace) -> None:
    posterior = posterior_of(la)
    draws = draws_along_prior(posterior, [3.0], DRAWS, seed=0)
    linearization = la._fitted().linearization
    with linearization.borrowed():
        within = posterior.inside.whitened(linearization.jacobian(X)).square().sum(2)
    expected = within + outside_variances(la, draws)
    torch.testing.assert_close(la.functional_variance(X), expected, rtol=1e-9, atol=0)
    covariance = la.functional_covariance(X)
    torch.testing.assert_close(covariance.diagonal(dim1=1, dim2=2), expected, rtol=1e-9, atol=0)


def test_chosen_outputs_are_exact(la: SubspaceLaplace) -> None:
    chosen = [3, 50, 7]
    own = la.functional_variance(X, outputs=chosen)
    with la._fitted().linearization.borrowed():
        jacobian = la._fitted().linearization.jacobian(X)
    torch.testing.assert_close(own, posterior_of(la).variance(jacobian)[:, chosen], rtol=1e-7, atol=0)
    assert not torch.allclose(la.functional_variance(X)[:, chosen], own, rtol=1e-3)


def test_all_directions_make_everything_exact(exact: SubspaceLaplace) -> None:
    assert exact._fitted().drawn_with is None
    torch.testing.assert_close(exact.functional_variance(X), exact_variance(exact, X), rtol=1e-7, atol=0)
    assert "draws" not in exact.summary()


def test_the_summary_says_so(la: SubspaceLaplace) -> None:
    assert f"predictions by {DRAWS} draws of what stands outside" in la.summary()


def test_a_sweep_gives_the_variances_of_the_posterior_at_every_prior(la: SubspaceLaplace) -> None:
    taus = torch.logspace(-3, 3, 13, dtype=torch.float64) * 3
    posterior, linearization = posterior_of(la), la._fitted().linearization
    sweep = prior_sweep(posterior, taus, drawn_with=4)
    with linearization.borrowed():
        (jacobian,) = linearization.chunks(X, wanted=sweep.wanted(whole=False))
        found = sweep(jacobian, whole=False)
        rows = linearization.jacobian(X)
        for k, tau in enumerate(taus.tolist()):
            other = posterior.with_prior(tau)
            draws = draws_along_prior(other, [tau], DRAWS_OF_A_POINT, seed=4)
            expected = other.inside.whitened(rows).square().sum(2) + outside_variances(la, draws)
            if k % 2 == 0:
                torch.testing.assert_close(found[k], expected, rtol=1e-8, atol=0)
            else:  # with few draws, single variances come close to zero by chance
                assert (found[k] / expected - 1).abs().mean() < 0.1


def test_tuning_comes_close_to_that_with_exact_variances(la: SubspaceLaplace, exact: SubspaceLaplace) -> None:
    drawn, precise = (each.tuned(batches(60, 2)) for each in (la, exact))
    assert drawn._fitted().drawn_with is not None
    assert drawn.prior_precision == pytest.approx(precise.prior_precision, rel=0.6)
    scores = [each.evaluate(batches(200, 3)).posterior.scores["nll"] for each in (drawn, precise)]
    assert scores[0] == pytest.approx(scores[1], abs=0.02)


def test_files_bring_the_same_draws_back(la: SubspaceLaplace, network: nn.Module, tmp_path: Path) -> None:
    la.save(tmp_path / "la.safetensors")
    again = SubspaceLaplace.load(tmp_path / "la.safetensors", network)
    torch.testing.assert_close(again.functional_variance(X), la.functional_variance(X))


@pytest.mark.parametrize("link", ["mc", "bridge", "pairwise", "probit"])
def test_every_link_gives_probabilities_close_to_exact_ones(
    la: SubspaceLaplace, exact: SubspaceLaplace, link: str
) -> None:
    found, expected = (each.predict(X, link=link).probabilities for each in (la, exact))
    torch.testing.assert_close(found.sum(1), torch.ones(len(X), dtype=torch.float64))
    assert 0.5 * (found - expected).abs().sum(1).max() < 0.1


def test_predictions_can_be_differentiated(la: SubspaceLaplace) -> None:
    x = X.clone().requires_grad_()
    variance = la.functional_variance(x)
    torch.testing.assert_close(variance.detach(), la.functional_variance(X), rtol=1e-9, atol=0)
    (gradient,) = torch.autograd.grad(variance.sum(), x)
    step = torch.zeros_like(X)
    step[2, 3] = 1e-5
    with torch.no_grad():
        expected = (la.functional_variance(X + step) - la.functional_variance(X - step)).sum() / 2e-5
    assert float(gradient[2, 3]) == pytest.approx(float(expected), rel=1e-4)


def test_regression_with_many_outputs_stays_exact() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 40)).double()
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(20, k, generator=generator, dtype=torch.float64) for k in (3, 40)]
    la = SubspaceLaplace(model, "regression", 5, prior_precision=1.0).fit([tuple(data)])
    assert la._fitted().drawn_with is None
