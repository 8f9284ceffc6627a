"""From Gaussian outputs to probabilities: each link against its formula and against sampling."""

import math

import pytest
import torch
from dense_reference import pairwise_probabilities

from sublaplace import Categorical, Gaussian, Prediction
from sublaplace.model.likelihoods import links
from sublaplace.model.likelihoods.links import (
    LINKS,
    Covariance,
    laplace_bridge,
    log_probabilities,
    mean_softmax,
    monte_carlo,
    probit,
    symmetric_root,
)

EPS = torch.finfo(torch.float64).eps
CLASSES = [2, 3, 10, 70]


def gaussian_outputs(C, n=5, seed=0, scale=1.0):
    """Outputs (n, C) and covariances (n, C, C)."""
    generator = torch.Generator().manual_seed(seed)
    outputs = 2 * torch.randn(n, C, generator=generator, dtype=torch.float64)
    root = torch.randn(n, C, C, generator=generator, dtype=torch.float64) * (scale / C) ** 0.5
    return outputs, root @ root.transpose(1, 2)


@pytest.mark.parametrize("C", CLASSES)
def test_probit_scales_every_logit_by_its_own_variance(C):
    outputs, covariance = gaussian_outputs(C)
    found = mean_softmax(outputs, covariance, "probit")
    for i in range(len(outputs)):
        scaled = [f / math.sqrt(1 + math.pi / 8 * v) for f, v in zip(outputs[i], covariance[i].diagonal(), strict=True)]
        weights = torch.tensor([math.exp(value) for value in scaled], dtype=torch.float64)
        assert torch.allclose(found[i], weights / weights.sum(), rtol=100 * EPS)


@pytest.mark.parametrize("C", [2, 3, 5])
def test_pairwise_is_the_mean_field_approximation(C):
    outputs, covariance = gaussian_outputs(C)
    variance = covariance.diagonal(dim1=1, dim2=2)
    found = mean_softmax(outputs, covariance, "pairwise")
    torch.testing.assert_close(found, pairwise_probabilities(outputs, variance))
    torch.testing.assert_close(mean_softmax(outputs, torch.zeros_like(covariance), "pairwise"), outputs.softmax(1))
    torch.testing.assert_close(mean_softmax(outputs + 7, covariance, "pairwise"), found)  # as softmax, unlike probit
    assert (probit(outputs + 7, variance) - probit(outputs, variance)).abs().max() > 0.01


def test_pairwise_for_two_classes_is_close_to_the_integral():
    draws = torch.randn(200_000, 2, generator=torch.Generator().manual_seed(0)).double()
    for variance in (0.1, 1.0, 10.0, 100.0):
        outputs = torch.tensor([[2.0, -0.5]], dtype=torch.float64)
        spread = torch.tensor([[variance, variance / 3]], dtype=torch.float64)
        expected = float((outputs + spread.sqrt() * draws).softmax(1)[:, 0].mean())
        assert float(log_probabilities(outputs, spread, "pairwise").exp()[0, 0]) == pytest.approx(expected, abs=0.02)


def test_pairwise_works_in_pieces_and_is_probit_for_a_great_many_classes(monkeypatch):
    outputs, covariance = gaussian_outputs(3)
    variance = covariance.diagonal(dim1=1, dim2=2)
    whole = log_probabilities(outputs, variance, "pairwise")
    monkeypatch.setattr(links, "_PAIRS_AT_ONCE", 18)
    torch.testing.assert_close(log_probabilities(outputs, variance, "pairwise"), whole)
    assert log_probabilities(outputs[:0], variance[:0], "pairwise").shape == (0, 3)
    monkeypatch.setattr(links, "MOST_PAIRED", 2)
    torch.testing.assert_close(log_probabilities(outputs, variance, "pairwise").exp(), probit(outputs, variance))


def test_probit_for_two_classes_is_close_to_the_integral():
    """∫ σ(z) N(z | m, v) dz by quadrature, with the logit difference as z."""
    for mean, variance in ((0.5, 1.0), (-1.0, 4.0), (2.0, 0.25)):
        z = torch.linspace(-40, 40, 40_001, dtype=torch.float64)
        density = torch.exp(-0.5 * (z - mean) ** 2 / variance) / math.sqrt(2 * math.pi * variance)
        expected = float((z.sigmoid() * density).sum() * (z[1] - z[0]))
        # One logit fixed at zero: its variance is zero and the other carries all of it.
        outputs = torch.tensor([[mean, 0.0]], dtype=torch.float64)
        found = float(probit(outputs, torch.tensor([[variance, 0.0]], dtype=torch.float64))[0, 0])
        assert found == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("C", [2, 3, 10])
def test_monte_carlo_converges_to_the_mean_of_many_samples(C):
    outputs, covariance = gaussian_outputs(C)
    generator = torch.Generator().manual_seed(1)
    factor = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(C))
    draws = torch.randn(200_000, C, generator=generator, dtype=torch.float64)
    expected = torch.stack([(f + draws @ L.T).softmax(1).mean(0) for f, L in zip(outputs, factor, strict=True)])
    errors = []
    for samples in (50, 5000):
        found = monte_carlo(outputs, covariance, samples, torch.Generator().manual_seed(2))
        errors.append(float((found - expected).square().mean().sqrt()))
    # The standard error of a mean of 5,000 numbers in [0, 1] is below 0.5/√5000 ≈ 0.007; three of them.
    assert errors[1] <= 0.021
    assert errors[1] < errors[0]


def test_monte_carlo_sees_correlations_that_probit_does_not():
    outputs = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    together = torch.full((1, 2, 2), 9.0, dtype=torch.float64)  # both logits move as one: nothing is uncertain
    found = monte_carlo(outputs, together, 200, torch.Generator().manual_seed(0))
    assert torch.allclose(found, outputs.softmax(1), rtol=1e-6)
    assert (probit(outputs, together.diagonal(dim1=1, dim2=2)) - outputs.softmax(1)).abs().max() > 0.1


@pytest.mark.parametrize("C", CLASSES)
def test_the_bridge_equals_its_formula(C):
    """The sum of the logits is conditioned to zero; then α_k = (1 − 2/C + e^{m_k} Σ_l e^{−m_l} / C²) / S_kk."""
    outputs, covariance = gaussian_outputs(C)
    found = laplace_bridge(outputs, covariance)
    ones = torch.ones(C, dtype=torch.float64)
    for i, (f, S) in enumerate(zip(outputs, covariance, strict=True)):
        gain = S @ ones / (ones @ S @ ones)
        mean, conditioned = f - gain * (ones @ f), S - torch.outer(gain, ones @ S)
        assert abs(float(mean.sum())) <= 1e3 * EPS * C
        alpha = torch.tensor(
            [
                (1 - 2 / C + math.exp(mean[k]) * sum(math.exp(-m) for m in mean) / C**2) / conditioned[k, k]
                for k in range(C)
            ],
            dtype=torch.float64,
        )
        assert torch.allclose(found[i], alpha / alpha.sum(), rtol=1e6 * EPS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("C", CLASSES)
def test_every_link_gives_probabilities(link, C, dtype):
    outputs, covariance = gaussian_outputs(C, scale=3.0)
    found = mean_softmax(outputs.to(dtype), covariance.to(dtype), link, 100, torch.Generator().manual_seed(0))
    assert found.shape == (5, C)
    assert found.dtype == dtype
    assert (found >= 0).all()
    assert torch.allclose(found.sum(1), torch.ones(5, dtype=dtype), atol=100 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("span", [10.0, 100.0, 1000.0])
def test_every_link_stays_finite_for_confident_float32_outputs(link, span):
    outputs = torch.tensor([[span, 0.0, -span], [0.0, span, span]])
    found = mean_softmax(outputs, torch.eye(3).expand(2, 3, 3), link, 50, torch.Generator().manual_seed(0))
    assert torch.isfinite(found).all()
    assert torch.allclose(found.sum(1), torch.ones(2), atol=1e-5)
    assert found[0].argmax() == 0
    assert torch.allclose(found[1, 1], found[1, 2], atol=0.2)


@pytest.mark.parametrize("link", LINKS)
def test_every_link_stays_finite_without_uncertainty(link):
    outputs, _ = gaussian_outputs(4)
    found = mean_softmax(outputs, torch.zeros(5, 4, 4).double(), link, 10, torch.Generator().manual_seed(0))
    assert torch.isfinite(found).all()
    if link != "bridge":
        assert torch.allclose(found, outputs.softmax(1), rtol=100 * EPS)


@pytest.mark.parametrize("link", LINKS)
def test_more_uncertainty_makes_probabilities_less_confident(link):
    outputs = torch.tensor([[3.0, 0.0, -1.0]], dtype=torch.float64)
    confidences = []
    for variance in (0.1, 1.0, 10.0, 100.0):
        covariance = variance * torch.eye(3).double()[None]
        generator = torch.Generator().manual_seed(0)
        confidences.append(float(mean_softmax(outputs, covariance, link, 4000, generator)[0, 0]))
    if link == "bridge":  # equal variances cancel in α / Σα
        assert max(confidences) - min(confidences) <= 1e-6
    else:
        assert confidences == sorted(confidences, reverse=True)
        assert confidences[-1] < confidences[0] - 0.2


def test_an_unknown_link_is_refused_with_those_that_exist():
    outputs, covariance = gaussian_outputs(3)
    with pytest.raises(ValueError, match=r"'logistic'.*pairwise, probit, mc, bridge"):
        mean_softmax(outputs, covariance, "logistic")


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_the_symmetric_root_squares_to_the_matrix_also_where_it_is_singular(rank):
    factor = torch.randn(3, 4, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covariance = factor @ factor.transpose(1, 2)
    root = symmetric_root(covariance)
    assert torch.allclose(root, root.transpose(1, 2), atol=1e-12)
    assert torch.allclose(root @ root, covariance, atol=1e-7)


def predicted(likelihood, outputs, covariance, **options):
    """A prediction, and a list that grows each time its covariances are formed."""
    formed = []

    def form():
        formed.append(True)
        return covariance

    uncertainty = Covariance(covariance.diagonal(dim1=1, dim2=2), form)
    return Prediction(outputs, likelihood, uncertainty, **options), formed


def test_a_prediction_cannot_be_changed():
    prediction, _ = predicted(Categorical(), *gaussian_outputs(2))
    with pytest.raises(AttributeError):
        prediction.mean = torch.zeros(5, 2)


def test_a_prediction_of_regression_has_covariances_and_no_probabilities():
    outputs, covariance = gaussian_outputs(2)
    prediction, _ = predicted(Gaussian((0.5, 2.0)), outputs, covariance)
    noise = torch.diag(torch.tensor([0.25, 4.0], dtype=torch.float64))
    assert not prediction.has_probabilities
    with pytest.raises(ValueError, match="'regression' has no probabilities; use mean and variance"):
        _ = prediction.probabilities
    assert torch.equal(prediction.covariance, covariance)
    assert torch.equal(prediction.epistemic, covariance)
    assert torch.allclose(prediction.aleatoric, noise.expand(5, 2, 2))
    assert torch.allclose(prediction.total, covariance + noise)


def test_a_prediction_of_classes_splits_its_entropy():
    outputs, covariance = gaussian_outputs(3, scale=3.0)
    prediction, _ = predicted(Categorical(), outputs, covariance)
    averaged, _ = predicted(Categorical(), outputs, covariance, link="mc", samples=20_000)
    entropy = -(averaged.probabilities * averaged.probabilities.log()).sum(1)
    assert torch.allclose(prediction.total, entropy, atol=0.05)
    assert torch.equal(prediction.epistemic, prediction.mutual_information)
    assert (prediction.epistemic > 0).all()
    assert torch.allclose(prediction.aleatoric + prediction.epistemic, prediction.total)
    with pytest.raises(ValueError, match="Classes have no interval"):
        prediction.interval()


def test_covariances_are_formed_only_where_they_are_needed():
    outputs, covariance = gaussian_outputs(3)
    prediction, formed = predicted(Categorical(), outputs, covariance)
    assert torch.allclose(prediction.probabilities, probit(outputs, covariance.diagonal(dim1=1, dim2=2)))
    assert torch.equal(prediction.variance, covariance.diagonal(dim1=1, dim2=2))
    assert not formed
    assert torch.equal(prediction.covariance, covariance)
    assert formed
    drawn, formed = predicted(Categorical(), outputs, covariance, link="mc", samples=50)
    assert torch.isfinite(drawn.probabilities).all()
    assert formed


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_an_interval_is_central_and_knows_the_noise(level):
    outputs, covariance = gaussian_outputs(2)
    prediction, formed = predicted(Gaussian(0.5), outputs, covariance)
    lower, upper = prediction.interval(level)
    spread = (covariance.diagonal(dim1=1, dim2=2) + 0.25).sqrt()
    normal = torch.distributions.Normal(outputs, spread)
    for end, share in ((lower, (1 - level) / 2), (upper, (1 + level) / 2)):
        assert torch.allclose(normal.cdf(end), torch.full_like(end, share))
    assert not formed
    for wrong in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match="level must lie between 0 and 1"):
            prediction.interval(wrong)
