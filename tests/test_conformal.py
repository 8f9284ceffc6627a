"""Split-conformal intervals and sets: the guarantee by simulation, and the quantile by hand."""

import math

import pytest
import torch
from torch import nn

from sublaplace import Categorical, Gaussian, SubspaceLaplace
from sublaplace.conformal import ConformalIntervals, ConformalSets
from sublaplace.model.likelihoods.links import Covariance
from sublaplace.model.prediction import Prediction

SIMULATIONS, NEW = 200, 500


def regression(mean, variance, noise=0.5):
    return Prediction(mean, Gaussian(noise), Covariance(variance, variance.diag_embed))


def classes(logits):
    zero = torch.zeros_like(logits)
    return Prediction(logits, Categorical(), Covariance(zero, zero.diag_embed), link="probit")


def expected_coverage(n, level):
    """Of continuous scores, and its standard deviation over simulations with NEW new data each (beta-binomial)."""
    place = math.ceil((n + 1) * level)
    a, b = place, n + 1 - place
    spread = a * b * (a + b + NEW) / (NEW * (a + b) ** 2 * (a + b + 1))
    return place / (n + 1), math.sqrt(spread / SIMULATIONS)


@pytest.mark.parametrize(("n", "level"), [(19, 0.9), (50, 0.8), (100, 0.95)])
def test_the_coverage_of_intervals_is_what_is_guaranteed(n, level):
    """Predictions are wrong on purpose: biased, too narrow in one place and too wide in another."""
    generator = torch.Generator().manual_seed(0)
    inside = []
    for _ in range(SIMULATIONS):
        x = torch.rand(n + NEW, 1, generator=generator, dtype=torch.float64)
        y = x + (0.1 + x) * torch.randn(x.shape, generator=generator, dtype=torch.float64)
        prediction = regression(0.3 - x, 0.01 + 4 * (1 - x), noise=0.2)
        calibration, new = (regression(0.3 - part, 0.01 + 4 * (1 - part), 0.2) for part in (x[:n], x[n:]))
        assert prediction.mean.shape == x.shape
        lower, upper = ConformalIntervals.of(calibration, y[:n], level).interval(new)
        inside.append(((lower <= y[n:]) & (y[n:] <= upper)).double().mean())
    expected, spread = expected_coverage(n, level)
    assert abs(float(torch.stack(inside).mean()) - expected) < 3 * spread
    assert expected >= level


@pytest.mark.parametrize(("n", "level"), [(19, 0.9), (50, 0.8), (100, 0.95)])
def test_the_coverage_of_sets_is_what_is_guaranteed(n, level):
    generator = torch.Generator().manual_seed(1)
    inside, sizes = [], []
    for _ in range(SIMULATIONS):
        logits = 2 * torch.randn(n + NEW, 4, generator=generator, dtype=torch.float64)
        labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
        wrong = 3 * logits + torch.randn(4, generator=generator, dtype=torch.float64)  # overconfident, and shifted
        found = ConformalSets.of(classes(wrong[:n]), labels[:n], level).contains(classes(wrong[n:]))
        inside.append(found.gather(1, labels[n:, None]).double().mean())
        sizes.append(found.double().sum(1).mean())
    expected, spread = expected_coverage(n, level)
    assert abs(float(torch.stack(inside).mean()) - expected) < 3 * spread
    assert 1 < float(torch.stack(sizes).mean()) < 4


def test_the_factor_is_the_right_order_statistic():
    y = torch.arange(1.0, 20.0)[:, None]  # 19 residuals, 1 … 19
    prediction = regression(torch.zeros(19, 1), torch.full((19, 1), 0.75), noise=0.5)  # σ = 1
    assert float(ConformalIntervals.of(prediction, y, 0.9).factors) == pytest.approx(18)  # ⌈20 · 0.9⌉
    assert float(ConformalIntervals.of(prediction, y, 0.5).factors) == pytest.approx(10)
    two = regression(torch.zeros(19, 2), torch.full((19, 2), 0.75))
    assert torch.allclose(
        ConformalIntervals.of(two, torch.cat([y, -2 * y], 1), 0.9).factors, torch.tensor([18.0, 36.0]).double()
    )


def test_the_threshold_counts_the_class_that_is_exactly_there():
    logits = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20) % 3
    sets = ConformalSets.of(classes(logits), labels, 0.9)
    inside = sets.contains(classes(logits)).gather(1, labels[:, None])
    assert int(inside.sum()) == math.ceil(21 * 0.9)


def test_intervals_of_a_fitted_posterior_are_calibrated_by_one_factor():
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    y = x.sum(1, keepdim=True).sin() + 0.3 * torch.randn(200, 1)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    la = SubspaceLaplace(model, Gaussian(0.3), prior_precision=1.0).fit([(x[:50], y[:50])])
    intervals = ConformalIntervals.of(la.predict(x[50:150]), y[50:150], 0.9)
    lower, upper = intervals.interval(la.predict(x[150:]))
    own = la.predict(x[150:]).interval(0.9)
    ratio = (upper - lower) / (own.upper - own.lower)
    assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-4)
    assert float(ratio[0]) == pytest.approx(float(intervals.factors) / 1.6449, rel=1e-3)


def test_what_cannot_be_guaranteed_is_refused():
    prediction = regression(torch.zeros(8, 1), torch.ones(8, 1))
    with pytest.raises(ValueError, match=r"8 calibration data cannot guarantee a coverage of 0\.9; at least 9"):
        ConformalIntervals.of(prediction, torch.zeros(8, 1), 0.9)
    ConformalIntervals.of(regression(torch.zeros(9, 1), torch.ones(9, 1)), torch.zeros(9, 1), 0.9)
    with pytest.raises(ValueError, match="shape of the predicted means"):
        ConformalIntervals.of(prediction, torch.zeros(8), 0.9)
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        ConformalIntervals.of(prediction, torch.zeros(8, 1), 1.0)
    with pytest.raises(ValueError, match="NaN"):
        ConformalIntervals.of(prediction, torch.full((8, 1), torch.nan), 0.5)
    with pytest.raises(ValueError, match="no probabilities"):
        ConformalSets.of(prediction, torch.zeros(8, dtype=torch.long), 0.5)
    with pytest.raises(ValueError, match="Classes have no interval"):
        ConformalIntervals.of(classes(torch.zeros(8, 3)), torch.zeros(8, 3), 0.5)
    with pytest.raises(ValueError, match="class indices of shape"):
        ConformalSets.of(classes(torch.zeros(8, 3)), torch.zeros(8), 0.5)
