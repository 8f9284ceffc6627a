"""λ and σ on validation data: against a search over dense predictions in float64, and what is refused."""

from math import log, log10, pi

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from dense_reference import (
    dense_ggn,
    dense_jacobian,
    dense_outputs,
    pairwise_probabilities,
    sigmoid_hessians,
    softmax_hessians,
)
from networks import make, mlp
from sensitive import untouched
from test_laplace import loader
from torch.distributions import MultivariateNormal
from torch.utils.data import DataLoader, Subset, TensorDataset

from sublaplace import Bernoulli, Categorical, Complement, Gaussian, Resources, SubspaceLaplace
from sublaplace.data.batches import select
from sublaplace.fitting import validation

TRAIN, VAL = slice(0, 40), slice(40, 100)
OPTIONS = {"dim": 6, "complement": None}
NOISY = {"regression", "one output", "per-output", "given"}
LIKELIHOODS = {
    "classification": "classification",
    "binary": "binary",
    "multi-label": "multi-label",
    "regression": "regression",
    "one output": "regression",
    "per-output": Gaussian("per-output"),
    "given": Gaussian(0.4),
}


class Data:
    """A network, training and validation data, and what a dense computation needs of them."""

    def __init__(self, kind, name="mlp"):
        self.kind, self.likelihood = kind, LIKELIHOODS[kind]
        self.model, self.inputs = make(name, 100)
        generator = torch.Generator().manual_seed(3)
        if kind in ("one output", "binary"):
            with torch.random.fork_rng():
                torch.manual_seed(2)
                self.model = mlp(outputs=1).double()
        with torch.no_grad():
            for parameter in list(self.model.parameters())[-2:]:
                parameter.mul_(8)  # outputs that differ
        self.outputs = dense_outputs(self.model, self.inputs)
        drawn = torch.randn(self.outputs.shape, generator=generator, dtype=torch.float64)
        if kind in NOISY:
            scale = torch.linspace(0.2, 0.5, self.outputs.shape[1]).double()
            drawn[VAL] *= 2.5  # the network fits its training data better
            self.targets = self.outputs + scale * drawn
        elif kind == "classification":
            self.targets = (self.outputs / 3 + drawn).argmax(1)
            self.targets[TRAIN] = self.outputs[TRAIN].argmax(1)
        else:
            self.targets = (self.outputs / 3 + drawn > 0).long()
            self.targets[TRAIN] = (self.outputs[TRAIN] > 0).long()

    def part(self, which, size=16):
        return loader(select(self.inputs, which), self.targets[which], size)

    @property
    def train(self):
        return self.part(TRAIN)

    @property
    def val(self):
        return self.part(VAL)

    def laplace(self, **options):
        return SubspaceLaplace(self.model, self.likelihood, **{**OPTIONS, **options})

    def hessians(self, noise):
        outputs = self.outputs[TRAIN]
        if self.kind == "classification":
            return softmax_hessians(outputs)
        if self.kind in ("binary", "multi-label"):
            return sigmoid_hessians(outputs)
        C = outputs.shape[1]
        variances = torch.tensor(noise, dtype=torch.float64).square().expand(C)
        return (1 / variances).diag().expand(len(outputs), C, C)

    def log_densities(self, covariance, noise, which=VAL):
        """ln p(y|x, D) of every validation input, as it is written in the method."""
        outputs, targets = self.outputs[which], self.targets[which]
        variances = covariance.diagonal(dim1=1, dim2=2)
        if self.kind == "classification":
            return pairwise_probabilities(outputs, variances).log().gather(1, targets[:, None])[:, 0]
        if self.kind in ("binary", "multi-label"):
            logits = outputs / (1 + pi / 8 * variances).sqrt()
            return -F.binary_cross_entropy_with_logits(logits, targets.double(), reduction="none").sum(1)
        C = outputs.shape[1]
        total = covariance + torch.tensor(noise, dtype=torch.float64).square().expand(C).diag()
        return MultivariateNormal(outputs, total).log_prob(targets)


def scaled(noise, factor):
    return tuple(std * factor for std in noise) if isinstance(noise, tuple) else noise and noise * factor


def brute_force(data, before, tune_noise, counts=None):
    """The penalised NLL as a function of (log₁₀ λ, log₁₀ c), with every matrix formed."""
    P = before.projection_matrix()
    G = P.T @ dense_ggn(data.model, select(data.inputs, TRAIN), data.hessians(before.noise_std)) @ P
    n, C = data.outputs[VAL].shape
    rows = (dense_jacobian(data.model, select(data.inputs, VAL)) @ P).view(n, C, -1)
    counts = torch.ones(n).double() if counts is None else counts
    start = log10(before.prior_precision)
    pull = validation.NOISE_PULL if data.kind in NOISY else validation.CLASS_PULL

    def loss(point):
        log_prior, log_factor = float(point[0]), max(float(point[1]), 0.0) if tune_noise else 0.0
        precision = G / 10 ** (2 * log_factor) + 10**log_prior * torch.eye(len(G)).double()
        covariance = rows @ torch.linalg.solve(precision, rows.transpose(1, 2))
        densities = data.log_densities(covariance, scaled(before.noise_std, 10**log_factor))
        penalty = pull * ((log_prior - start) ** 2 + (log_factor**2 if tune_noise else 0))
        return float(penalty - (densities * counts).sum()) / float(counts.sum())

    return loss


def best_of(loss, before, tune_noise):
    """The smallest loss over a grid, refined by a search without derivatives."""
    priors = log10(before.prior_precision) + np.linspace(-4.8, 4.8, 49)
    factors = np.linspace(0, 2, 21) if tune_noise else [0.0]
    start = min(((a, b) for a in priors for b in factors), key=loss)
    found = scipy.optimize.minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-12})
    return found.x[0], max(found.x[1], 0.0) if tune_noise else 0.0, found.fun


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_choice_is_that_of_a_search_over_dense_predictions(kind):
    data = Data(kind)
    before = data.laplace().fit(data.train)
    after = data.laplace().fit(data.train, data.val)
    tune_noise = kind in NOISY - {"given"}
    loss = brute_force(data, before, tune_noise)
    log_prior, log_factor, least = best_of(loss, before, tune_noise)
    chosen_factor = log10(np.mean(after.noise_std) / np.mean(before.noise_std)) if kind in NOISY else 0.0
    assert loss((log10(after.prior_precision), chosen_factor)) <= least + 5e-5
    assert log10(after.prior_precision) == pytest.approx(log_prior, abs=0.06)
    assert loss((log10(before.prior_precision), 0.0)) > least + 2e-4  # so that there was something to find
    if kind in NOISY:
        expected = scaled(before.noise_std, 10**log_factor)
        assert after.noise_std == pytest.approx(expected, rel=0.02)
        assert bool(log_factor > 0.05) is tune_noise


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("options", [{}, {"projector": None, "dim": None}])
@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "embedding"])
def test_with_a_complement_it_is_that_of_a_search_over_other_priors(name, options, kind):
    data = Data(kind, name)
    options = {"complement": Complement("kfac", weight=0.5), **options}
    before = data.laplace(**options).fit(data.train)
    after = before.tuned(data.val)
    new = select(data.inputs, VAL)
    start = log10(before.prior_precision)
    pull = validation.NOISE_PULL if kind in NOISY else validation.CLASS_PULL

    def loss(log_prior, log_factor):
        state = before._state.with_noise_factor(10**log_factor) if log_factor else before._state
        other = before._with(state.with_prior(10**log_prior))
        densities = data.log_densities(other.functional_covariance(new), other.noise_std)
        return float(pull * ((log_prior - start) ** 2 + log_factor**2) - densities.sum()) / len(densities)

    log_factor = log10(after.noise_std / before.noise_std) if kind in NOISY else 0.0
    found = loss(log10(after.prior_precision), log_factor)
    around = [
        loss(log10(after.prior_precision) + a, log_factor + b)
        for a in (-1.0, -0.3, -0.1, 0.1, 0.3, 1.0)
        for b in ((-0.05, 0.0, 0.05) if kind in NOISY and log_factor > 0.05 else (0.0,))
    ]
    assert found <= min(around) + 1e-4
    assert found < loss(start, 0.0)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_full_posterior_is_tuned_as_well(kind):
    data = Data(kind)
    data.likelihood = Gaussian(0.4) if kind == "regression" else "classification"
    data.kind = "given" if kind == "regression" else kind
    before = data.laplace(projector="full", dim=None).fit(data.train)
    after = before.tuned(data.val)
    loss_at = {
        shift: -float(
            data.log_densities(
                before.with_prior(after.prior_precision * 10**shift).functional_covariance(data.inputs[VAL]),
                before.noise_std,
            ).sum()
        )
        + (validation.NOISE_PULL if kind == "regression" else validation.CLASS_PULL)
        * (log10(after.prior_precision / before.prior_precision) + shift) ** 2
        for shift in (-1, -0.2, 0, 0.2, 1)
    }
    assert loss_at[0] == min(loss_at.values())


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_tuning_after_the_fit_gives_the_same_and_keeps_the_first(kind):
    data = Data(kind)
    before = data.laplace().fit(data.train)
    prior, noise = before.prior_precision, before.noise_std
    later, at_once = before.tuned(data.val), data.laplace().fit(data.train, data.val)
    assert later.prior_precision == at_once.prior_precision and later.noise_std == at_once.noise_std
    new = data.inputs[VAL]
    assert torch.equal(later.functional_covariance(new), at_once.functional_covariance(new))
    assert (before.prior_precision, before.noise_std) == (prior, noise)
    assert later.prior_precision != prior
    assert "60 validation inputs" in later.summary() and "validation inputs" not in before.summary()
    assert (", with σ" in later.summary()) is (kind in NOISY - {"given"})


def test_a_tuned_posterior_is_that_of_a_fit_with_what_was_found():
    data = Data("regression")
    after = data.laplace().fit(data.train, data.val)
    P = after._subspace().projection
    again = SubspaceLaplace(
        data.model,
        Gaussian(after.noise_std),
        6,
        projector=lambda _: P,
        complement=None,
        prior_precision=after.prior_precision,
    ).fit(data.train)
    new = data.inputs[VAL]
    found, expected = after.functional_covariance(new), again.functional_covariance(new)
    assert (found - expected).abs().max() <= 1e-9 * expected.abs().max()


class Counting:
    """Batches that count how often they are read."""

    def __init__(self, batches):
        self.batches, self.reads = batches, 0

    def __iter__(self):
        for k, batch in enumerate(self.batches):
            self.reads += k == 0
            yield batch


@pytest.mark.parametrize("complement", [None, "auto"])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_validation_data_are_read_once_after_a_look_at_their_first_batch(kind, complement):
    data = Data(kind)
    train, val = Counting(data.train), Counting(data.val)
    la = data.laplace(complement=complement).fit(train, val)
    assert val.reads == 2
    train.reads = val.reads = 0
    la.tuned(val)
    assert (train.reads, val.reads) == (0, 1)


def test_bad_validation_data_are_found_before_the_training_data_are_read():
    data = Data("classification")
    train = Counting(data.train)
    with pytest.raises(ValueError, match="Labels must lie in"):
        data.laplace().fit(train, [(data.inputs[VAL], with_first(data.targets[VAL], 5))])
    assert train.reads == 0


def test_a_small_memory_budget_gives_the_same():
    data = Data("regression")
    found = data.laplace().fit(data.train, data.val)
    little = data.laplace(resources=Resources(memory_budget=20_000)).fit(data.train, data.val)
    assert little.prior_precision == pytest.approx(found.prior_precision, rel=1e-6)
    assert little.noise_std == pytest.approx(found.noise_std, rel=1e-6)


# Weights and ignored labels


@pytest.mark.parametrize("kind", ["classification", "regression", "per-output"])
def test_an_input_of_weight_two_counts_like_one_given_twice(kind):
    data = Data(kind)
    la = data.laplace().fit(data.train)
    weights = torch.ones(60).double()
    weights[10:30], weights[30:40] = 2, 0
    kept = torch.cat([torch.arange(0, 30), torch.arange(10, 30), torch.arange(40, 60)]) + 40
    found = la.tuned([(data.inputs[VAL], data.targets[VAL], weights)])
    expected = la.tuned([(data.inputs[kept], data.targets[kept])])
    assert found.prior_precision == pytest.approx(expected.prior_precision, rel=1e-6)
    if kind in NOISY:
        assert found.noise_std == pytest.approx(expected.noise_std, rel=1e-6)
    plain = la.tuned(data.val).prior_precision
    assert abs(found.prior_precision / plain - 1) > 1e-3


@pytest.mark.parametrize(("kind", "likelihood"), [("classification", Categorical), ("binary", Bernoulli)])
def test_ignored_labels_are_as_if_they_were_not_there(kind, likelihood):
    data = Data(kind)
    la = SubspaceLaplace(data.model, likelihood(ignore_index=-7), **OPTIONS).fit(data.train)
    targets = data.targets[VAL].clone()
    targets[20:] = -7
    found = la.tuned(loader(data.inputs[VAL], targets, 16))
    expected = la.tuned(loader(data.inputs[VAL][:20], targets[:20], 16))
    assert found.prior_precision == pytest.approx(expected.prior_precision, rel=1e-9)
    assert found.prior_precision != pytest.approx(la.tuned(data.val).prior_precision, rel=1e-3)


def test_single_ignored_labels_of_several_add_nothing():
    data = Data("multi-label")
    la = SubspaceLaplace(data.model, Bernoulli(ignore_index=-1), **OPTIONS).fit(data.train)
    targets = data.targets[VAL].clone()
    targets[:, 1] = -1
    after = la.tuned([(data.inputs[VAL], targets)])
    single = Data("multi-label")
    loss = brute_force(single, la, False)
    single.log_densities = lambda covariance, noise: (
        -F.binary_cross_entropy_with_logits(
            (data.outputs[VAL] / (1 + pi / 8 * covariance.diagonal(dim1=1, dim2=2)).sqrt())[:, 0],
            targets[:, 0].double(),
            reduction="none",
        )
    )
    assert log10(after.prior_precision) == pytest.approx(best_of(loss, la, False)[0], abs=0.06)


def test_an_iterator_that_can_be_read_once_is_enough():
    data = Data("regression")
    la = data.laplace().fit(data.train)
    found, expected = la.tuned(iter(data.val)), la.tuned(data.val)
    assert (found.prior_precision, found.noise_std) == (expected.prior_precision, expected.noise_std)


# Few, none, wrong


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_fewer_than_ten_inputs_leave_everything_as_it_was_and_warn(kind):
    data = Data(kind)
    before = data.laplace().fit(data.train)
    with pytest.warns(UserWarning, match="9 validation inputs are too few to choose λ by; it stays as it was"):
        after = before.tuned(data.part(slice(40, 49)))
    assert after.prior_precision == before.prior_precision and after.noise_std == before.noise_std
    assert "validation inputs" not in after.summary()
    assert before.tuned(data.part(slice(40, 50))).prior_precision != before.prior_precision


def test_inputs_that_do_not_count_are_not_enough_either():
    data = Data("classification")
    la = SubspaceLaplace(data.model, Categorical(ignore_index=-7), **OPTIONS).fit(data.train)
    targets = data.targets[VAL].clone()
    targets[9:] = -7
    with pytest.warns(UserWarning, match="9 validation inputs are too few"):
        assert la.tuned([(data.inputs[VAL], targets)]).prior_precision == la.prior_precision
    weights = torch.zeros(60).double()
    weights[:9] = 1
    with pytest.warns(UserWarning, match="9 validation inputs are too few"):
        assert la.tuned([(data.inputs[VAL], data.targets[VAL], weights)]).prior_precision == la.prior_precision


def test_data_without_anything_that_counts_are_refused():
    data = Data("classification")
    la = SubspaceLaplace(data.model, Categorical(ignore_index=-7), **OPTIONS).fit(data.train)
    ignored = [(data.inputs[VAL], torch.full((60,), -7))]
    weightless = [(data.inputs[VAL], data.targets[VAL], torch.zeros(60).double())]
    for val in ([], [(data.inputs[:0], data.targets[:0])], ignored, weightless):
        with untouched(data.model), pytest.raises(ValueError, match="validation loader is empty, or nothing in it"):
            la.tuned(val)


def with_first(values, value):
    changed = values.clone()
    changed[0] = value
    return changed


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("classification", lambda x, y: (x, with_first(y, 5)), "Labels must lie in 0 … 1"),
        ("classification", lambda x, y: (x, with_first(y, -1)), "Labels must lie in 0 … 1"),
        ("classification", lambda x, y: (x, y.double()), "integer labels"),
        ("classification", lambda x, y: (x, y[:-1]), "59 (labels|targets) were given for 60 inputs"),
        ("classification", lambda x, y: (x, torch.cat([y, y[:1]])), "61 (labels|targets) were given for 60 inputs"),
        ("classification", lambda x, y: (with_first(x, float("nan")), y), "NaN"),
        ("regression", lambda x, y: (x, with_first(y, float("nan"))), "NaN or infinity"),
        ("regression", lambda x, y: (with_first(x, float("inf")), y), "NaN|infinit|finite"),
        ("regression", lambda x, y: (x, y[:, :1]), r"Targets have shape \(60, 1\)"),
        ("regression", lambda x, y: (x, y.long()), "floating-point targets"),
        ("binary", lambda x, y: (x, with_first(y, 2)), "must be 0 or 1"),
    ],
)
def test_bad_validation_data_are_refused_and_nothing_is_lost(kind, changed, message):
    data = Data(kind)
    la = data.laplace()
    with untouched(data.model), pytest.raises(ValueError, match=message):
        la.fit(data.train, [changed(data.inputs[VAL], data.targets[VAL])])
    with pytest.raises(RuntimeError, match="fit"):
        la.predict(data.inputs[VAL])
    la.fit(data.train)
    prior = la.prior_precision
    with untouched(data.model), pytest.raises(ValueError, match=message):
        la.fit(data.train, [changed(data.inputs[VAL], data.targets[VAL])])
    assert la.prior_precision == prior


def test_inputs_of_another_shape_are_refused():
    data = Data("classification")
    la = data.laplace().fit(data.train)
    with untouched(data.model), pytest.raises((ValueError, RuntimeError)):
        la.tuned([(data.inputs[VAL][:, :2], data.targets[VAL])])


def test_the_training_data_are_refused():
    data = Data("classification")
    dataset = TensorDataset(data.inputs, data.targets)
    one, other = DataLoader(dataset, 20), DataLoader(dataset, 10, shuffle=True)
    for val in (one, other):
        with untouched(data.model), pytest.raises(ValueError, match="val_loader gives the training data"):
            data.laplace().fit(one, val)
    with pytest.raises(ValueError, match="val_loader gives the training data"):
        data.laplace().fit(train := data.train, train)
    halves = Subset(dataset, range(40)), Subset(dataset, range(40, 100))
    la = data.laplace().fit(*(DataLoader(half, 20) for half in halves))
    assert la.prior_precision == pytest.approx(data.laplace().fit(data.train, data.val).prior_precision, rel=1e-6)


@pytest.mark.parametrize("prior", [1.0, "evidence"])
def test_validation_data_beside_a_prior_that_is_given_are_refused(prior):
    data = Data("classification")
    val = Counting(data.val)
    with pytest.raises(ValueError, match="val_loader has no effect: prior_precision="):
        data.laplace(prior_precision=prior).fit(data.train, val)
    assert val.reads == 0


def test_what_is_no_loader_is_refused():
    data = Data("classification")
    train = Counting(data.train)
    with pytest.raises(TypeError, match="val_loader needs"):
        data.laplace().fit(train, data.inputs[VAL])
    with pytest.raises(ValueError, match="not one batch"):
        data.laplace().fit(train, (data.inputs[VAL], data.targets[VAL]))
    assert train.reads == 0  # it is said at once
    with pytest.raises(ValueError, match="no noise σ to tune"):
        data.laplace().fit(data.train).tuned(data.val, noise=True)


@pytest.mark.parametrize(("prior", "what"), [(1e-8, "next to no uncertainty"), (1e6, "more uncertainty than this")])
def test_a_prior_at_an_end_of_its_search_warns(prior, what):
    data = Data("classification")
    la = data.laplace(prior_precision=prior).fit(data.train)
    with pytest.warns(UserWarning, match=f"lies at an end of its search: they ask for {what}"):
        after = la.tuned([(data.inputs[VAL], data.targets[VAL], torch.full((60,), 1e4))])
    assert abs(log10(after.prior_precision / prior)) == pytest.approx(validation.DECADES, abs=0.2)


# σ


@pytest.mark.parametrize("kind", ["regression", "one output", "per-output"])
def test_the_noise_does_not_fall_below_the_training_residuals(kind):
    data = Data(kind)
    data.targets[VAL] = data.outputs[VAL] + 0.01 * (data.targets[VAL] - data.outputs[VAL])
    before, after = data.laplace().fit(data.train), data.laplace().fit(data.train, data.val)
    residuals = data.targets[TRAIN] - data.outputs[TRAIN]
    expected = residuals.square().mean(0 if kind == "per-output" else None).sqrt().tolist()
    assert before.noise_std == pytest.approx(tuple(expected) if kind == "per-output" else expected, rel=1e-12)
    assert after.noise_std == pytest.approx(before.noise_std, rel=1e-5)
    assert np.all(np.asarray(after.noise_std) >= np.asarray(before.noise_std))
    assert after.prior_precision > before.prior_precision  # less uncertainty can only come from λ


def test_one_noise_for_each_output_is_tuned_by_a_common_factor():
    data = Data("per-output")
    before, after = data.laplace().fit(data.train), data.laplace().fit(data.train, data.val)
    ratios = np.asarray(after.noise_std) / np.asarray(before.noise_std)
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-12) and ratios[0] > 1.1


def test_a_noise_that_was_given_stays_unless_it_is_asked_for():
    data = Data("given")
    la = data.laplace().fit(data.train, data.val)
    assert la.noise_std == 0.4
    before = data.laplace().fit(data.train)
    assert before.tuned(data.val, noise=True).noise_std > 0.44
    estimated = Data("regression").laplace().fit(data.train)
    assert estimated.tuned(data.val, noise=False).noise_std == estimated.noise_std


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_nothing_of_the_model_changes(kind):
    data = Data(kind)
    data.model.train()
    with untouched(data.model):
        la = data.laplace(complement="auto").fit(data.train, data.val)
        la.tuned(data.val)


@pytest.mark.parametrize("whole", [False, True])
def test_variances_between_the_points_of_the_grid_are_right(whole):
    """Of the hardest case, a single eigenvalue, and of three."""
    generator = torch.Generator().manual_seed(0)
    eigenvalues = torch.tensor([[1.0, 1.0, 1.0], [1e-3, 1.0, 1e3]], dtype=torch.float64)
    rows = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64)

    def covariance(tau):
        matrices = (rows / (eigenvalues + tau)[:, None, :]) @ rows.transpose(1, 2)
        return matrices if whole else matrices.diagonal(dim1=1, dim2=2)

    count = 10 * validation._PER_DECADE + 1
    taus = torch.logspace(-5, 5, count, dtype=torch.float64)
    none = torch.zeros(2, 2, dtype=torch.float64)
    known = torch.stack([covariance(float(tau)) for tau in taus])
    data = validation.ValidationData(
        Gaussian(1.0), 1.0, taus, none, none, torch.ones(2), known if whole else known.log()
    )
    for log_tau in torch.linspace(-4.9, 4.9, 99).tolist():
        expected = covariance(10**log_tau)
        found, share = data.covariance(log_tau * log(10)), 4e-3 if abs(log_tau) <= 4 or not whole else 0.04
        assert (found - expected).abs().max() <= share * expected.abs().max()
    for tau in taus[[0, 7, -1]].tolist():
        torch.testing.assert_close(data.covariance(log(tau)), covariance(tau), rtol=1e-9, atol=0)
