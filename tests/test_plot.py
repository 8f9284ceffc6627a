"""Pictures: each shows the numbers that the posterior gives."""

import pytest
import torch
from torch import nn

from sublaplace import Gaussian, SubspaceLaplace, metrics, plot

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def regression():
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 30, dtype=torch.float64)[:, None]
    y = x.sin() + 0.1 * torch.randn_like(x)
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    la = SubspaceLaplace.paper(model, Gaussian(0.1), dim=6).fit([(x, y)], certify=True)
    return la, [(x[:20], y[:20]), (x[20:], y[20:])]


@pytest.fixture(scope="module")
def classification():
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    data = [(x, torch.arange(60) % 3)]
    return SubspaceLaplace(model, "classification", 10, prior_precision=1.0).fit(data), data


def line(axes, label):
    return next(found for found in axes.get_lines() if str(found.get_label()).startswith(label))


def test_reliability_and_coverage_are_those_of_the_evaluation(regression, classification):
    for (la, data), draw in ((classification, plot.reliability), (regression, plot.coverage)):
        axes = draw(la, data)
        expected = la.evaluate(data).posterior.curve
        assert list(line(axes, "posterior").get_xdata()) == expected[0].tolist()
        assert list(line(axes, "posterior").get_ydata()) == expected[1].tolist()
        axes.figure.canvas.draw()


def test_the_rejection_curve_is_the_one_of_the_metrics(regression, classification):
    la, data = classification
    x, y = data[0]
    axes = plot.rejection(la, data)
    probabilities = la(x)
    expected = metrics.rejection_curve((probabilities.argmax(1) != y).double(), 1 - probabilities.amax(1).double())
    assert line(axes, "posterior").get_ydata() == pytest.approx(expected.risk.tolist())
    area = metrics.aurc((probabilities.argmax(1) != y).double(), 1 - probabilities.amax(1).double())
    assert f"AURC {area:.3g}" in line(axes, "posterior").get_label()
    la, data = regression
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    errors, prediction = (la.predict(x).mean - y).square().mean(1), la.predict(x)
    axes = plot.rejection(la, data)
    risk = metrics.rejection_curve(errors, prediction.variance.sum(1)).risk
    assert line(axes, "posterior").get_ydata() == pytest.approx(risk.tolist())
    # A plain network has one variance for all inputs, so nothing is gained by a rejection.
    assert line(axes, "plain").get_ydata() == pytest.approx([float(errors.mean())] * 30)


def test_the_captured_share_rises_to_the_last_dimension(regression):
    la, data = regression
    axes = plot.captured_share(la, data)
    assert axes.get_lines()[0].get_ydata() == pytest.approx(la.captured_share(data).tolist())
    assert len(axes.get_lines()[0].get_xdata()) == la.dim


def test_bands_are_the_intervals_and_the_bounds(regression):
    la, data = regression
    grid = torch.linspace(-3, 3, 50, dtype=torch.float64)[:, None]
    _, own = plt.subplots()
    axes = plot.bands(la, data, own, grid=grid, level=0.8, bounds=True)
    assert axes is own
    lower, upper = la.predict(grid).interval(0.8)
    band, above, below = axes.collections
    assert band.get_label() == "80% interval"
    ends = band.get_paths()[0].vertices
    assert ends[:, 1].min() == pytest.approx(float(lower.min())) and ends[:, 1].max() == pytest.approx(
        float(upper.max())
    )
    # The paper's posterior is the lower bound, so the region of the full one's ends begins where its band ends.
    outer = above.get_paths()[0].vertices[:, 1].max()
    assert outer > float(upper.max())
    deviation = (la.bounds(grid).upper[:, 0, 0] + 0.1**2).sqrt()
    assert outer == pytest.approx(float((la.predict(grid).mean[:, 0] + 1.2815515655 * deviation).max()))
    assert below.get_paths()[0].vertices[:, 1].min() < float(lower.min())
    assert list(line(axes, "data").get_xdata()) == torch.cat([x for x, _ in data])[:, 0].tolist()
    assert not plot.bands(la, data).collections[1:]


def test_wrong_kinds_are_refused(regression, classification):
    with pytest.raises(ValueError, match=r"use plot\.coverage"):
        plot.reliability(*regression)
    with pytest.raises(ValueError, match=r"use plot\.reliability"):
        plot.coverage(*classification)
    with pytest.raises(ValueError, match=r"inputs of shape \(n, 1\)"):
        plot.bands(*classification)
    with pytest.raises(ValueError, match=r"inputs of shape \(n, 1\)"):
        plot.bands(regression[0], [])
