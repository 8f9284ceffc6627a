"""What a prediction says of its uncertainty: sums, information, intervals; and what is not computed."""

from math import log, pi

import numpy as np
import pytest
import torch
from dense_reference import dense_outputs, pairwise_probabilities
from networks import make, mlp
from test_laplace import labels, loader

from sublaplace import Bernoulli, Categorical, Gaussian, SubspaceLaplace
from sublaplace.model import prediction
from sublaplace.model.likelihoods.links import Covariance
from sublaplace.model.prediction import Prediction

LIKELIHOODS = {
    "classification": Categorical(),
    "multi-label": Bernoulli(),
    "regression": Gaussian(0.3),
    "per-output": Gaussian((0.3, 0.7)),
}
WITH_PROBABILITIES = [kind for kind, likelihood in LIKELIHOODS.items() if likelihood.has_probabilities]


def problem(kind, outputs=2):
    model, inputs = make("mlp", 20)
    if outputs != 2:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            model = mlp(outputs=outputs).double()
    with torch.no_grad():
        for parameter in list(model.parameters())[-2:]:
            parameter.mul_(5)
    found = dense_outputs(model, inputs)
    if kind == "classification":
        targets = labels(model, inputs)
    elif kind in ("binary", "multi-label"):
        targets = (found > 0).long()
    else:
        targets = found + 0.1
    return model, inputs, targets


def fitted(kind, outputs=2, **options):
    model, inputs, targets = problem(kind, outputs)
    likelihood = LIKELIHOODS.get(kind, kind)
    la = SubspaceLaplace(model, likelihood, **{"dim": 6, "complement": None, "prior_precision": 0.2, **options})
    return la.fit(loader(inputs, targets, 7)), inputs


def made(likelihood, mean, covariance, **options):
    """A prediction from nothing but numbers."""
    uncertainty = Covariance(covariance.diagonal(dim1=1, dim2=2), lambda: covariance)
    return Prediction(mean, likelihood, uncertainty, **options)


def test_its_text_tells_shapes_and_computes_nothing():
    la, inputs = fitted("classification")
    found = la.predict(inputs)
    text = "Prediction(classification, link='pairwise', mean (20, 2), variance (20, 2), covariance not formed yet)"
    assert repr(found) == text and not found.uncertainty.is_formed and "probabilities" not in vars(found)
    _ = found.covariance
    assert repr(found) == text.replace("not formed yet", "formed")
    assert "link='mc'" in repr(la.predict(inputs, "mc")) and "covariance formed" in repr(la.predict(inputs, "mc"))
    la, inputs = fitted("regression")
    assert repr(la.predict(inputs)).startswith("Prediction(regression, mean (20, 2), variance")


def gaussians(n=6, C=3, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean, root = (torch.randn(n, C, *more, generator=generator, dtype=torch.float64) for more in ((), (C,)))
    return 2 * mean, scale * root @ root.mT


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in LIKELIHOODS), *((kind, {"link": "mc", "samples": 50}) for kind in WITH_PROBABILITIES)],
)
def test_the_total_is_what_stays_and_what_more_data_would_remove(kind, options):
    la, inputs = fitted(kind)
    found = la.predict(inputs, **options)
    assert torch.allclose(found.total, found.aleatoric + found.epistemic, rtol=1e-12, atol=1e-12)
    assert found.total.shape == ((20,) if found.has_probabilities else (20, 2, 2))
    assert (found.epistemic if found.has_probabilities else found.epistemic.diagonal(dim1=1, dim2=2)).min() > 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_the_sum_also_holds_for_next_to_no_and_very_much_uncertainty(likelihood, scale):
    mean, covariance = gaussians(40, scale=scale)
    found = made(likelihood, scale**0.5 * mean, covariance)
    assert torch.allclose(found.total, found.aleatoric + found.epistemic, rtol=1e-12, atol=1e-12)
    assert (found.aleatoric >= 0).all() and (found.epistemic >= 0).all()
    assert (found.mutual_information <= found.total + 1e-12).all()
    assert torch.equal(found.epistemic, found.mutual_information)


@pytest.mark.parametrize("kind", ["regression", "per-output"])
def test_regression_has_the_noise_beside_the_covariance(kind):
    la, inputs = fitted(kind)
    found = la.predict(inputs)
    noise = torch.tensor([0.09, 0.09 if kind == "regression" else 0.49], dtype=torch.float64).diag()
    assert torch.allclose(found.aleatoric, noise.expand(20, 2, 2), rtol=1e-12)
    assert torch.equal(found.epistemic, la.functional_covariance(inputs))
    assert torch.allclose(found.total, la.functional_covariance(inputs) + noise, rtol=1e-12)
    # What a target tells about the parameters: ½ ln det(I + Σσ⁻²).
    expected = 0.5 * torch.logdet(torch.eye(2).double() + found.covariance @ torch.linalg.inv(noise))
    assert torch.allclose(found.mutual_information, expected, rtol=1e-9)


def entropies(kind, logits):
    if kind == "classification":
        p = logits.softmax(-1)
        return torch.special.entr(p).sum(-1), p
    p = logits.sigmoid()
    return (torch.special.entr(p) + torch.special.entr(1 - p)).sum(-1), p


def entropy_of(kind, p):
    if kind == "classification":
        return torch.special.entr(p).sum(-1)
    return (torch.special.entr(p) + torch.special.entr(1 - p)).sum(-1)


@pytest.mark.parametrize("kind", ["classification", "multi-label"])
def test_the_entropies_are_those_of_many_draws(kind, monkeypatch):
    mean, covariance = gaussians()
    draws = torch.distributions.MultivariateNormal(mean, covariance).sample((100_000,))
    each, p = entropies(kind, draws)
    expected = entropy_of(kind, p.mean(0)) - each.mean(0)
    rough = made(LIKELIHOODS[kind], mean, covariance).mutual_information
    assert torch.allclose(rough, expected, atol=0.12)  # 256 draws
    monkeypatch.setattr(prediction, "_ENTROPY_DRAWS", 20_000)
    found = made(LIKELIHOODS[kind], mean, covariance)
    assert found.mutual_information.dtype == torch.float64
    assert torch.allclose(found.mutual_information, expected, atol=0.012)
    assert torch.allclose(found.total, entropy_of(kind, p.mean(0)), atol=0.02)
    assert torch.allclose(found.aleatoric, each.mean(0), atol=0.02)
    assert expected.min() > 0.05 and (expected.max() - expected.min()) > 0.1


def test_mutual_information_of_one_yes_or_no_is_the_integral(monkeypatch):
    monkeypatch.setattr(prediction, "_ENTROPY_DRAWS", 20_000)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    mean, variance = torch.tensor([[-1.0], [0.0], [2.0]]).double(), torch.tensor([[1.0], [4.0], [9.0]]).double()
    grid = mean + variance.sqrt() * torch.from_numpy(nodes)
    p, w = grid.sigmoid(), torch.from_numpy(weights / weights.sum())
    average = p @ w
    expected = entropy_of("", average[:, None]) - (entropy_of("", p[..., None]) * w).sum(1)
    found = made(Bernoulli(), mean, variance[:, :, None]).mutual_information
    assert torch.allclose(found, expected, atol=0.01)


def test_without_uncertainty_a_label_tells_nothing():
    mean, covariance = gaussians()
    found = made(Categorical(), mean, 0 * covariance)
    assert found.mutual_information.abs().max() < 1e-12
    assert torch.allclose(found.total, found.aleatoric)
    # Very much of it: what is left is ln C, and a label tells all of it.
    lots = made(Categorical(), 0 * mean, 1e8 * torch.eye(3).double().expand(6, 3, 3))
    assert torch.allclose(lots.mutual_information, torch.tensor(log(3)).double(), atol=0.02)


@pytest.mark.parametrize("kind", ["classification", "multi-label"])
def test_the_same_seed_gives_the_same_information(kind):
    mean, covariance = gaussians()
    one, two, other = (made(LIKELIHOODS[kind], mean, covariance, seed=seed).mutual_information for seed in (0, 0, 1))
    assert torch.equal(one, two) and not torch.equal(one, other)


# Intervals


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("kind", ["regression", "per-output"])
def test_an_interval_is_that_of_the_predictive_gaussian(kind, level):
    la, inputs = fitted(kind)
    found = la.predict(inputs).interval(level)
    noise = torch.tensor([0.09, 0.09 if kind == "regression" else 0.49], dtype=torch.float64)
    gaussian = torch.distributions.Normal(
        dense_outputs(la.model, inputs), (la.functional_variance(inputs) + noise).sqrt()
    )
    assert torch.allclose(gaussian.cdf(found.lower), torch.tensor((1 - level) / 2).double(), atol=1e-7)
    assert torch.allclose(gaussian.cdf(found.upper), torch.tensor((1 + level) / 2).double(), atol=1e-7)
    drawn = gaussian.sample((20_000,))
    share = ((drawn >= found.lower) & (drawn <= found.upper)).double().mean()
    assert float(share) == pytest.approx(level, abs=0.005)


def test_what_has_no_interval_or_no_probabilities_says_so():
    la, inputs = fitted("classification")
    with pytest.raises(ValueError, match="Classes have no interval; use probabilities"):
        la.predict(inputs).interval(0.9)
    la, inputs = fitted("regression")
    with pytest.raises(ValueError, match="has no probabilities; use mean and variance"):
        _ = la.predict(inputs).probabilities
    for level in (0.0, 1.0, -1, 2, float("nan")):
        with pytest.raises(ValueError, match="level must lie between 0 and 1"):
            la.predict(inputs).interval(level)


# What is not asked for


@pytest.mark.parametrize("complement", [None, "kfac"])
@pytest.mark.parametrize("kind", ["classification", "multi-label"])
def test_probabilities_by_variances_need_no_covariance(kind, complement, monkeypatch):
    la, inputs = fitted(kind, complement=complement)
    covariance = la.functional_covariance(inputs)
    kinds = {type(la._state.posterior), type(la._subspace())}
    for posterior in kinds:
        monkeypatch.setattr(posterior, "covariance", lambda *_: pytest.fail("it was not asked for"))
    found = la.predict(inputs)
    variance = covariance.diagonal(dim1=1, dim2=2)
    assert torch.allclose(found.variance, variance, rtol=1e-9)
    outputs = dense_outputs(la.model, inputs)
    if kind == "classification":
        expected = pairwise_probabilities(outputs, variance)
    else:
        expected = (outputs / (1 + pi / 8 * variance).sqrt()).sigmoid()
    assert torch.allclose(found.probabilities, expected, rtol=1e-9)
    assert torch.allclose(la(inputs), expected, rtol=1e-9)
    with pytest.raises(pytest.fail.Exception):
        _ = found.covariance


def test_intervals_need_no_covariance(monkeypatch):
    la, inputs = fitted("regression")
    monkeypatch.setattr(type(la._state.posterior), "covariance", lambda *_: pytest.fail("it was not asked for"))
    found = la.predict(inputs)
    assert (found.interval(0.9).upper > found.interval(0.5).upper).all()


def test_a_prediction_runs_one_pass_and_the_covariance_another():
    la, inputs = fitted("classification")
    passes = []

    class Loader:
        def __iter__(self):
            passes.append(1)
            yield from inputs.split(8)

    found = la.predict(Loader())
    _ = found.probabilities, found.variance
    assert len(passes) == 1
    first = found.covariance
    assert len(passes) == 2 and found.covariance is first
    assert torch.allclose(first, la.functional_covariance(inputs), rtol=1e-12)
    _ = found.mutual_information, found.epistemic, found.aleatoric, found.total
    assert len(passes) == 2


@pytest.mark.parametrize("kind", ["classification", "regression", "multi-label"])
def test_a_one_shot_iterator_gives_everything(kind):
    la, inputs = fitted(kind)
    once, expected = la.predict(iter(inputs.split(8))), la.predict(inputs)
    for name in ("mean", "variance", "covariance", "total", "aleatoric", "epistemic", "mutual_information"):
        assert torch.allclose(getattr(once, name), getattr(expected, name), rtol=1e-9, atol=1e-12), name
    if kind == "regression":
        assert torch.allclose(once.interval(0.8).upper, expected.interval(0.8).upper, rtol=1e-9)
    else:
        assert torch.allclose(once.probabilities, expected.probabilities, rtol=1e-9)
    with pytest.raises(ValueError, match="x is empty"):
        la.predict(iter([]))


def test_one_output_has_its_covariance_at_once():
    la, inputs = fitted("binary", outputs=1)
    found = la.predict(inputs.split(8))
    assert torch.equal(found.covariance[:, 0], found.variance)
    assert torch.allclose(found.total, found.aleatoric + found.epistemic, rtol=1e-12, atol=1e-12)


def test_regression_called_gives_mean_and_covariance_without_noise():
    la, inputs = fitted("regression")
    mean, covariance = la(inputs)
    assert torch.allclose(mean, dense_outputs(la.model, inputs), rtol=1e-12)
    assert torch.equal(covariance, la.functional_covariance(inputs))
