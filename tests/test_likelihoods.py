"""Roots of output Hessians in all their forms, and how many of their columns matter."""

import math

import pytest
import torch
from dense_reference import pairwise_probabilities, softmax_hessians
from torch.distributions import MultivariateNormal, kl_divergence

from sublaplace.model.likelihoods.base import significant
from sublaplace.model.likelihoods.bernoulli import Bernoulli
from sublaplace.model.likelihoods.categorical import Categorical
from sublaplace.model.likelihoods.gaussian import Gaussian
from sublaplace.model.likelihoods.links import pairwise_log_probabilities, probit

EPS = torch.finfo(torch.float64).eps


def logits(C, n=6, scale=2.0, seed=0):
    return scale * torch.randn(n, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def products(cotangents):
    """R Rᵀ from the columns of R as rows."""
    return cotangents.transpose(1, 2) @ cotangents


# Categorical ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("C", "K"), [(2, 1), (3, 2), (10, 9), (64, 63), (65, 65), (100, 100)])
def test_a_categorical_needs_one_direction_less_than_classes_until_the_columns_are_taken(C, K):
    outputs = logits(C)
    R = Categorical().hessian_root(outputs)
    assert R.shape == (6, K, C)
    assert torch.allclose(products(R), softmax_hessians(outputs), rtol=0, atol=100 * EPS)


@pytest.mark.parametrize("C", [2, 3, 10])
def test_cotangents_are_eigenvectors_of_the_output_hessian_that_do_not_see_a_common_shift(C):
    outputs = logits(C)
    R = Categorical().hessian_root(outputs)
    crossed = R @ R.transpose(1, 2)  # eigenvectors are orthogonal: the eigenvalues on the diagonal, nothing beside it
    values = torch.linalg.eigvalsh(softmax_hessians(outputs))[:, 1:].flip(1)
    assert torch.allclose(crossed, torch.diag_embed(values), rtol=0, atol=100 * EPS)
    assert R.sum(2).abs().max() <= 100 * EPS**0.5


@pytest.mark.parametrize("C", [2, 3, 10, 70])
def test_cotangents_do_not_change_the_hessian_when_all_logits_move_together(C):
    outputs = logits(C)
    one, other = (products(Categorical().hessian_root(f)) for f in (outputs, outputs + 100))
    assert torch.allclose(one, other, rtol=0, atol=1e4 * EPS)


@pytest.mark.parametrize("C", [2, 3, 70])
def test_cotangents_of_a_saturated_output_are_zero_and_finite(C):
    outputs = torch.zeros(1, C, dtype=torch.float64)
    outputs[0, 0] = 1e4
    R = Categorical().hessian_root(outputs)
    assert torch.isfinite(R).all()
    assert R.abs().max() <= 10 * EPS


@pytest.mark.parametrize("C", [2, 5, 70])
def test_cotangents_of_float32_outputs_are_formed_in_double_precision(C):
    outputs = logits(C).float()
    R = Categorical().hessian_root(outputs)
    assert R.dtype == torch.float32
    expected = softmax_hessians(outputs)
    assert (products(R.double()) - expected).abs().max() <= 10 * torch.finfo(torch.float32).eps * expected.abs().max()


def test_log_likelihood_of_a_label_without_probability_is_finite_and_very_small():
    found = Categorical().log_density(torch.tensor([[1000.0, 0.0]]), torch.tensor([1]))
    assert found.item() == -1000.0


def test_labels_of_any_integer_dtype_are_labels():
    outputs = logits(3, n=3)
    expected = Categorical().log_density(outputs, torch.tensor([0, 1, 2]))
    for dtype in (torch.uint8, torch.int32, torch.int16):
        targets = torch.tensor([0, 1, 2], dtype=dtype)
        Categorical().check_targets(outputs, targets)
        assert torch.equal(Categorical().log_density(outputs, targets), expected)


# Gaussian -------------------------------------------------------------------------------------------------------------


def test_the_noise_of_a_gaussian_is_in_its_scale_and_not_in_its_root():
    outputs = logits(3)
    assert torch.equal(Gaussian(0.2).hessian_root(outputs), Gaussian(5.0).hessian_root(outputs))
    assert Gaussian(0.2).curvature_scales == pytest.approx((25.0,), rel=4 * EPS)
    assert Gaussian(0.2).with_noise(0.5) == Gaussian(0.5)


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, math.inf])
def test_noise_without_meaning_is_refused(noise):
    with pytest.raises(ValueError, match="noise_std must be positive and finite"):
        Gaussian(noise)


# How many directions matter -------------------------------------------------------------------------------------------


def dropped_share(cotangents, counts):
    kept = torch.arange(cotangents.shape[1]) < counts[:, None]
    lengths = cotangents.double().square().sum(2)
    return float((lengths * ~kept).sum() / lengths.sum())


@pytest.mark.parametrize("C", [2, 3, 10, 70])
@pytest.mark.parametrize("tolerance", [1e-8, 1e-4, 1e-2, 0.3])
def test_the_dropped_share_is_no_more_than_the_tolerance_and_no_direction_more_could_be_dropped(C, tolerance):
    cotangents = Categorical().hessian_root(logits(C, n=40, scale=8.0))
    counts = significant(cotangents, tolerance)
    assert counts.shape == (40,)
    assert dropped_share(cotangents, counts) <= tolerance * (1 + 100 * EPS)
    lengths = cotangents.square().sum(2)
    kept = torch.arange(cotangents.shape[1]) < counts[:, None]
    assert dropped_share(cotangents, counts) + float(lengths[kept].min() / lengths.sum()) > tolerance


def test_a_tolerance_of_zero_keeps_every_direction():
    cotangents = Categorical().hessian_root(logits(5, n=7))
    cotangents[2] = 0
    assert significant(cotangents, 0.0).tolist() == [4] * 7


def test_inputs_without_curvature_need_no_direction():
    cotangents = Categorical().hessian_root(logits(5, n=7))
    cotangents[2] = 0
    assert significant(cotangents, 1e-8)[2] == 0
    assert (significant(cotangents, 1e-8)[[0, 1, 3]] > 0).all()


def test_data_without_any_curvature_need_no_direction():
    assert significant(torch.zeros(4, 3, 5), 1e-8).tolist() == [0] * 4


@pytest.mark.parametrize("tolerance", [0.05, 0.3, 0.99])
def test_directions_of_equal_length_are_not_dropped_beyond_the_tolerance(tolerance):
    cotangents = torch.zeros(10, 1, 2, dtype=torch.float64)
    cotangents[:, 0, 0] = 1  # the same input ten times
    counts = significant(cotangents, tolerance)
    assert dropped_share(cotangents, counts) <= tolerance


def test_many_equal_inputs_are_not_all_dropped():
    cotangents = Categorical().hessian_root(
        torch.cat([logits(3, n=2), torch.tensor([[9.0, 0.0, -9.0]]).repeat(500, 1)])
    )
    for tolerance in (1e-4, 1e-3, 1e-2):
        assert dropped_share(cotangents, significant(cotangents, tolerance)) <= tolerance


# Divergences of predictives -------------------------------------------------------------------------------------------


def covariances(n, C, seed):
    root = torch.randn(n, C, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.transpose(1, 2)


@pytest.mark.parametrize("noise", [0.3, (0.3, 0.5, 2.0)])
def test_divergences_of_regression_are_those_of_gaussians_with_noise(noise):
    outputs, one, other = logits(3), covariances(6, 3, 1), covariances(6, 3, 2)
    added = torch.diag(torch.tensor([noise] * 3 if isinstance(noise, float) else noise).double().square())
    p, q = (MultivariateNormal(outputs, each + added) for each in (one, other))
    found = Gaussian(noise).predictive_divergences(outputs, one, other)
    torch.testing.assert_close(found, kl_divergence(p, q))


@pytest.mark.parametrize(("link", "reference"), [("pairwise", pairwise_probabilities), ("probit", probit)])
def test_divergences_of_classification_are_those_of_its_probabilities(link, reference):
    outputs, one, other = logits(4), covariances(6, 4, 1), covariances(6, 4, 2)
    p, q = (torch.distributions.Categorical(reference(outputs, each.diagonal(dim1=1, dim2=2))) for each in (one, other))
    found = Categorical(link=link).predictive_divergences(outputs, one, other)
    torch.testing.assert_close(found, kl_divergence(p, q))


@pytest.mark.parametrize(("link", "reference"), [("pairwise", pairwise_probabilities), ("probit", probit)])
def test_the_link_of_a_likelihood_is_that_of_its_densities_probabilities_and_intervals(link, reference):
    outputs, covariance = logits(4), covariances(6, 4, 1)
    targets, variance = torch.arange(6) % 4, covariance.diagonal(dim1=1, dim2=2)
    likelihood, expected = Categorical(link=link), reference(outputs, variance)
    assert likelihood.default_link == link
    for spread in (covariance, variance):
        found = likelihood.log_predictive(outputs, spread, targets)
        torch.testing.assert_close(found, expected.gather(1, targets[:, None])[:, 0].log())
    interval = likelihood.probability_interval(outputs, variance, variance)
    torch.testing.assert_close(interval.lower, expected)
    torch.testing.assert_close(interval.upper, expected)


def test_a_likelihood_has_no_link_that_needs_covariances():
    with pytest.raises(ValueError, match=r"'pairwise' or 'probit', not 'mc'.*predict\(x, link='mc'\)"):
        Categorical(link="mc")


def test_divergences_of_yes_and_no_are_summed_over_the_outputs():
    outputs, one, other = logits(2), covariances(6, 2, 1), covariances(6, 2, 2)
    scaled = (outputs / (1 + math.pi / 8 * each.diagonal(dim1=1, dim2=2)).sqrt() for each in (one, other))
    p, q = (torch.distributions.Bernoulli(logits=each) for each in scaled)
    found = Bernoulli().predictive_divergences(outputs, one, other)
    torch.testing.assert_close(found, kl_divergence(p, q).sum(1))


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), Categorical(), Bernoulli()])
def test_a_predictive_does_not_diverge_from_itself(likelihood):
    outputs, covariance = logits(3, scale=30.0), covariances(6, 3, 1)
    assert likelihood.predictive_divergences(outputs, covariance, covariance).abs().max() < 1e-12


def pairwise_class_by_class(f, v):
    spreads = (1 + torch.pi / 8 * (v + v[:, k, None]) for k in range(f.shape[1]))
    odds = [((f - f[:, k, None]) / spread.sqrt()).exp().sum(1) for k, spread in enumerate(spreads)]
    found = 1 / torch.stack(odds, dim=1)
    return found / found.sum(1, keepdim=True)


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.5])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pairwise_probabilities_of_many_classes_equal_brute_force(spread, size, scale, dtype):
    generator = torch.Generator().manual_seed(0)
    outputs = scale * torch.randn(4, 500, generator=generator, dtype=torch.float64)
    variance = size * (spread * torch.randn(4, 500, generator=generator, dtype=torch.float64)).exp()
    outputs[0, 7], variance[1, 9] = 40.0, 1e4 * size  # one sure class, one of which nothing is known
    found = pairwise_log_probabilities(outputs.to(dtype), variance.to(dtype)).exp()
    expected = pairwise_class_by_class(outputs.to(dtype).double(), variance.to(dtype).double())
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-30)
    assert pairwise_log_probabilities(outputs[:0], variance[:0]).shape == (0, 500)
