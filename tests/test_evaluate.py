"""`la.evaluate`: every score against what the metrics give for predictions made by hand."""

import builtins
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import pytest
import torch
from dense_reference import dense_outputs
from networks import make, mlp
from sensitive import untouched
from test_laplace import loader

from sublaplace import Bernoulli, Categorical, Gaussian, Likelihood, SubspaceLaplace, metrics
from sublaplace.evaluation import COLUMNS

TRAIN, TEST = slice(0, 40), slice(40, 75)
PRIOR = 0.5


def single_output():
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return mlp(outputs=1).double()


def problem(kind):
    model, inputs = make("mlp", 75)
    if kind in ("one output", "binary"):
        model = single_output()
    with torch.no_grad():
        for parameter in list(model.parameters())[-2:]:
            parameter.mul_(6)
    outputs = dense_outputs(model, inputs)
    drawn = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    if kind == "classification":
        return model, inputs, (outputs + drawn).argmax(1)
    if kind in ("binary", "multi-label"):
        return model, inputs, (outputs + drawn > 0).long()
    drawn[TEST] *= 1.7
    return model, inputs, outputs + drawn * torch.linspace(0.3, 0.9, outputs.shape[1]).double()


def fitted(model, likelihood, inputs, targets, **options):
    options = {"dim": 5, "prior_precision": PRIOR, "complement": None, **options}
    return SubspaceLaplace(model, likelihood, **options).fit(loader(inputs[TRAIN], targets[TRAIN], 16))


def evaluated(la, inputs, targets):
    return la.evaluate(loader(inputs[TEST], targets[TEST], 16))


@pytest.mark.parametrize("complement", [None, "kfac"])
def test_scores_of_classes_are_those_of_the_predictions(complement):
    model, inputs, targets = problem("classification")
    la = fitted(model, "classification", inputs, targets, complement=complement)
    found = evaluated(la, inputs, targets)
    pairs = (found.plain, model(inputs[TEST]).softmax(1).detach()), (found.posterior, la(inputs[TEST]))
    for judged, probabilities in pairs:
        assert list(judged.scores) == ["nll", "accuracy", "ece", "brier"]
        for name in judged.scores:
            expected = getattr(metrics, name)(probabilities, targets[TEST])
            assert judged.scores[name] == pytest.approx(expected, rel=1e-9), name
        bins = metrics.reliability_bins(probabilities, targets[TEST])
        assert torch.equal(judged.curve[1], bins.accuracy[bins.count > 0])
        assert judged.curve[0].shape == judged.curve[1].shape and not judged.curve[0].isnan().any()
    assert found.plain.scores["nll"] != found.posterior.scores["nll"]
    assert found.num_inputs == len(found.plain.log_densities) == 35


@pytest.mark.parametrize("kind", ["binary", "multi-label"])
def test_every_yes_or_no_is_a_choice_between_two_classes(kind):
    model, inputs, targets = problem(kind)
    la = fitted(model, kind, inputs, targets)
    found = evaluated(la, inputs, targets)
    for judged, yes in ((found.plain, model(inputs[TEST]).sigmoid().detach()), (found.posterior, la(inputs[TEST]))):
        both = torch.stack([1 - yes.flatten(), yes.flatten()], dim=1)
        for name in ("accuracy", "ece", "brier"):
            expected = getattr(metrics, name)(both, targets[TEST].flatten())
            assert judged.scores[name] == pytest.approx(expected, rel=1e-9)
        # Per input, so that labels of one input add up.
        expected = metrics.nll(both, targets[TEST].flatten()) * yes.shape[1]
        assert judged.scores["nll"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("likelihood", ["regression", Gaussian(0.7), Gaussian("per-output")])
@pytest.mark.parametrize("kind", ["one output", "regression"])
def test_scores_of_regression_are_those_of_the_predictions(kind, likelihood):
    model, inputs, targets = problem(kind)
    la = fitted(model, likelihood, inputs, targets)
    found = evaluated(la, inputs, targets)
    mean, test = model(inputs[TEST]).detach(), targets[TEST]
    C = mean.shape[1]
    residuals = (targets - dense_outputs(model, inputs))[TRAIN]
    pooled = residuals.square().mean().sqrt().expand(C)
    training = residuals.square().mean(0).sqrt() if likelihood == Gaussian("per-output") else pooled
    if likelihood == Gaussian(0.7):
        training = torch.full((C,), 0.7, dtype=torch.float64)  # what was given serves both
    if likelihood == Gaussian(0.7):
        training = torch.full((C,), 0.7, dtype=torch.float64)  # given, so for both
    own = torch.as_tensor(la.noise_std, dtype=torch.float64).expand(C)
    covariance = la.functional_covariance(inputs[TEST])
    zero = torch.zeros_like(covariance)
    for judged, total in (
        (found.plain, zero + training.square().diag()),
        (found.posterior, covariance + own.square().diag()),
    ):
        variance = total.diagonal(dim1=1, dim2=2)
        assert list(judged.scores) == ["nll", "rmse", "crps", "coverage"]
        assert judged.scores["nll"] == pytest.approx(metrics.nll(mean, test, total), rel=1e-9)
        assert judged.scores["rmse"] == pytest.approx(float((mean - test).square().mean().sqrt()), rel=1e-12)
        assert judged.scores["crps"] == pytest.approx(metrics.crps(mean, variance, test), rel=1e-9)
        for level, share in zip(*judged.curve, strict=True):
            half = torch.distributions.Normal(0.0, 1.0).icdf((1 + level.double()) / 2) * variance.sqrt()
            inside = ((test - mean).abs() <= half).double().mean()
            assert float(share) == pytest.approx(float(inside), abs=1e-6)
        assert judged.scores["coverage"] == pytest.approx(float(judged.curve[1][17]), abs=1e-6)
        assert float(judged.curve[0][17]) == pytest.approx(0.9)
    assert found.plain.scores["rmse"] == found.posterior.scores["rmse"]


def test_the_interval_whose_coverage_is_told_is_that_of_a_prediction():
    model, inputs, targets = problem("regression")
    la = fitted(model, "regression", inputs, targets)
    interval = la.predict(inputs[TEST]).interval(0.9)
    inside = (targets[TEST] >= interval.lower) & (targets[TEST] <= interval.upper)
    found = evaluated(la, inputs, targets).posterior.scores["coverage"]
    assert found == pytest.approx(float(inside.double().mean()), abs=1e-12)
    assert 0 < found < 1


def test_a_biased_network_covers_its_own_training_data():
    model, inputs, targets = problem("one output")
    shifted = targets + 5.0  # the residuals are all about five
    la = fitted(model, "regression", inputs, shifted)
    assert la.noise_std == pytest.approx(float((shifted - dense_outputs(model, inputs))[TRAIN].square().mean().sqrt()))
    found = la.evaluate(loader(inputs[TRAIN], shifted[TRAIN], 16))
    assert found.plain.scores["coverage"] == 1.0 and found.posterior.scores["coverage"] == 1.0
    assert found.plain.scores["nll"] < 4


def test_a_given_noise_serves_both_where_the_network_has_no_residuals():
    model, inputs, _ = problem("regression")
    la = fitted(model, Gaussian(0.3), inputs, model(inputs).detach())
    found = evaluated(la, inputs, model(inputs).detach() + 0.1)
    expected = -float(torch.distributions.Normal(0.0, 0.3).log_prob(torch.tensor(0.1))) * 2
    assert found.plain.scores["nll"] == pytest.approx(expected, rel=1e-5)


@dataclass(frozen=True)
class Counts(Likelihood):
    """p(y|f) Poisson with the rate eᶠ: neither classes nor noise."""

    name: ClassVar[str] = ""

    def log_density(self, outputs, targets):
        return torch.distributions.Poisson(outputs.double().exp()).log_prob(targets.double()).sum(1)

    def hessian_root(self, outputs):
        return torch.diag_embed((outputs / 2).exp())


def test_a_likelihood_with_neither_classes_nor_noise_has_an_nll_alone():
    model, inputs, _ = problem("one output")
    outputs = dense_outputs(model, inputs).clamp(-2, 2)
    with torch.no_grad():
        model[-1].weight.mul_(0.05)
    targets = torch.poisson(outputs.exp(), generator=torch.Generator().manual_seed(0))
    la = SubspaceLaplace.paper(model, Counts(), 4, 1.0).fit(loader(inputs[TRAIN], targets[TRAIN], 16))
    found = evaluated(la, inputs, targets)
    assert list(found.plain.scores) == list(found.posterior.scores) == ["nll"]
    expected = -float(Counts().log_density(model(inputs[TEST]).detach(), targets[TEST]).mean())
    assert found.plain.scores["nll"] == pytest.approx(expected, rel=1e-9)
    assert "NLL" in str(found) and "accuracy" not in str(found) and "RMSE" not in str(found)
    assert found.posterior.scores["nll"] != pytest.approx(expected, rel=1e-6)


# Ignored labels


def test_ignored_labels_are_left_out():
    model, inputs, targets = problem("classification")
    la = fitted(model, Categorical(ignore_index=-1), inputs, targets)
    some = targets.clone()
    some[45:60] = -1
    found = la.evaluate(loader(inputs[TEST], some[TEST], 16))
    kept = torch.cat([torch.arange(40, 45), torch.arange(60, 75)])
    expected = la.evaluate(loader(inputs[kept], targets[kept], 16))
    assert found.num_inputs == expected.num_inputs == 20
    assert found.posterior.scores == pytest.approx(expected.posterior.scores, rel=1e-9)
    assert found.plain.scores == pytest.approx(expected.plain.scores, rel=1e-9)
    with pytest.raises(ValueError, match="All labels are ignored"):
        la.evaluate([(inputs[TEST], torch.full((35,), -1))])


def test_a_missing_label_does_not_take_the_others_of_its_input_with_it():
    model, inputs, targets = problem("multi-label")
    la = fitted(model, Bernoulli(ignore_index=-1), inputs, targets)
    some = targets.clone()
    some[40:60, 1] = -1
    found = la.evaluate(loader(inputs[TEST], some[TEST], 16))
    counted = some[TEST].flatten() >= 0
    yes = la(inputs[TEST]).flatten()[counted]
    both, labels = torch.stack([1 - yes, yes], dim=1), some[TEST].flatten()[counted]
    assert found.num_inputs == 35
    assert found.posterior.scores["nll"] == pytest.approx(metrics.nll(both, labels) * len(labels) / 35, rel=1e-9)
    for name in ("accuracy", "ece", "brier"):
        assert found.posterior.scores[name] == pytest.approx(getattr(metrics, name)(both, labels), rel=1e-9)


# Words and pictures


def test_every_score_has_a_title():
    scores = [
        list(evaluated(fitted(model, kind, inputs, targets), inputs, targets).posterior.scores)
        for kind in ("classification", "regression")
        for model, inputs, targets in [problem(kind)]
    ]
    assert {name for names in scores for name in names} == set(COLUMNS)


def test_the_table_shows_both_and_a_verdict():
    model, inputs, targets = problem("classification")
    found = evaluated(fitted(model, "classification", inputs, targets), inputs, targets)
    lines = str(found).splitlines()
    assert repr(found) == str(found)  # as a notebook shows it
    assert lines[0].split() == ["NLL", "accuracy", "ECE", "Brier"]
    assert lines[1].startswith("plain network") and lines[2].startswith("posterior")
    for line, judged in ((lines[1], found.plain), (lines[2], found.posterior)):
        assert f"{judged.scores['nll']:.4f}" in line and f"{judged.scores['accuracy']:.1%}" in line
    assert len({len(line) for line in lines[:3]}) == 1
    difference = found.posterior.log_densities - found.plain.log_densities
    gain, error = found.gain
    assert gain == pytest.approx(float(difference.mean()), rel=1e-12)
    assert gain == pytest.approx(found.plain.scores["nll"] - found.posterior.scores["nll"], rel=1e-9)
    assert error == pytest.approx(float(difference.std()) / sqrt(35), rel=1e-12)
    assert lines[3].startswith(f"NLL {-gain:+.4f} ± {error:.4f} on 35 inputs: ")


@pytest.mark.parametrize(("shift", "verdict"), [(1.0, "better"), (-1.0, "worse"), (0.0, "no clear difference")])
def test_the_verdict_needs_two_standard_errors(shift, verdict):
    model, inputs, targets = problem("regression")
    found = evaluated(fitted(model, "regression", inputs, targets), inputs, targets)
    noise = torch.linspace(-1, 1, 35).double()
    object.__setattr__(found.plain, "log_densities", torch.zeros(35).double())
    object.__setattr__(found.posterior, "log_densities", shift + noise)
    assert str(found).endswith(f"on 35 inputs: {verdict}")


def test_a_single_input_has_no_verdict():
    model, inputs, targets = problem("one output")
    la = fitted(model, "regression", inputs, targets)
    assert str(la.evaluate([(inputs[:1], targets[:1])])).endswith("on 1 inputs: no clear difference")


@pytest.mark.parametrize(
    ("kind", "words"), [("classification", ("confidence", "accuracy")), ("regression", ("interval", "inside"))]
)
def test_the_picture_shows_both_curves(kind, words):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    model, inputs, targets = problem(kind)
    found = evaluated(fitted(model, kind, inputs, targets), inputs, targets)
    axes = found.plot()
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert set(lines) == {"calibrated", "plain network", "posterior"}
    for title, judged in (("plain network", found.plain), ("posterior", found.posterior)):
        assert list(lines[title].get_xdata()) == judged.curve[0].tolist()
        assert list(lines[title].get_ydata()) == judged.curve[1].tolist()
    assert words[0] in axes.get_xlabel() and words[1] in axes.get_ylabel()
    if kind == "classification":
        for judged, markers in zip((found.plain, found.posterior), axes.collections, strict=True):
            areas = torch.tensor(markers.get_sizes())
            assert int(judged.counts.sum()) == found.num_inputs
            assert torch.allclose(areas.double() / areas.sum(), judged.counts.double() / found.num_inputs)
    axes.figure.canvas.draw()
    _, own = plt.subplots()
    assert found.plot(own) is own
    plt.close("all")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    model, inputs, targets = problem("classification")
    found = evaluated(fitted(model, "classification", inputs, targets), inputs, targets)
    imported = builtins.__import__

    def refusing(name, *arguments, **keywords):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(ImportError, match=r"matplotlib.*sublaplace\[plot\]"):
        found.plot()


# What is refused


def test_bad_data_are_refused_and_the_model_is_left_as_it_was():
    model, inputs, targets = problem("classification")
    la = fitted(model, "classification", inputs, targets)
    with pytest.raises(RuntimeError, match="fit"):
        SubspaceLaplace(model, "classification").evaluate([(inputs, targets)])
    for data, message in (
        ([], "The loader is empty"),
        ([(inputs[:0], targets[:0])], "The loader is empty"),
        ([(inputs[:3], torch.tensor([0, 1, 2]))], "Labels must lie in 0 … 1"),
        ([(inputs[:3], targets[:4])], "4 targets were given for 3 inputs"),
        ([(inputs[:3] * float("nan"), targets[:3])], "NaN"),
    ):
        with untouched(model), pytest.raises(ValueError, match=message):
            la.evaluate(data)
    with pytest.raises(TypeError, match="evaluate needs a loader"):
        la.evaluate(inputs)


def test_the_data_are_read_once():
    model, inputs, targets = problem("regression")
    la = fitted(model, "regression", inputs, targets)
    reads = []

    class Once:
        def __iter__(self):
            for batch in loader(inputs[TEST], targets[TEST], 16):
                reads.append(len(batch[1]))
                yield batch

    with untouched(model):
        found = la.evaluate(Once())
    assert reads == [16, 16, 3]
    assert la.evaluate(iter(Once())).posterior.scores == found.posterior.scores
