"""New data without a new fit: the posterior of all data in the subspace of the first."""

import pytest
import torch
from dense_reference import dense_ggn, dense_jacobian, dense_outputs, softmax_hessians, subspace_covariance
from networks import make
from sensitive import untouched
from test_laplace import labels, loader, sized

from sublaplace import Gaussian, SubspaceLaplace
from sublaplace.data.batches import select

PRIOR = 0.7
KINDS = {
    "classification": {"likelihood": "classification"},
    "given noise": {"likelihood": Gaussian(0.4)},
    "estimated noise": {"likelihood": "regression"},
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
FIRST, SECOND = slice(0, 9), slice(9, 20)


def problem(kind, name="mlp", dtype=torch.float64):
    model, inputs = make(name, 20, dtype)
    if kind == "classification":
        return model, inputs, labels(model, inputs)
    outputs = dense_outputs(model, inputs)
    noise = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    noise[SECOND] = 2 * noise[SECOND] + 0.5  # the second part is noisier, and off
    return model, inputs, (outputs + 0.3 * noise).to(dtype)


def part(inputs, targets, which, size=4):
    return loader(select(inputs, which), targets[which], size)


def fit(model, kind, batches, projector="lowrank-kfac", **options):
    la = SubspaceLaplace.paper(model, **KINDS[kind], **sized(projector, 5), prior_precision=PRIOR, **options)
    return la.fit(batches)


def fit_on_both(la, kind, batches):
    """A fit on other data with the P of `la`."""
    projection = la._subspace().projection
    return fit(la.model, kind, batches, lambda context: projection)


def close(value, expected, tolerance):
    return value.shape == expected.shape and (value - expected).abs().max() <= tolerance * expected.abs().max()


def assert_same_posterior(found, expected, inputs, tolerance):
    assert torch.equal(found.projection_matrix(), expected.projection_matrix())
    assert found.prior_precision == expected.prior_precision
    if found.noise_std is not None:
        assert found.noise_std == pytest.approx(expected.noise_std, rel=tolerance)
    assert close(
        found.functional_covariance(inputs, joint=True), expected.functional_covariance(inputs, joint=True), tolerance
    )
    prediction, reference = found.predict(inputs), expected.predict(inputs)
    assert close(prediction.total, reference.total, tolerance)
    if prediction.has_probabilities:
        assert close(prediction.probabilities, reference.probabilities, tolerance)
    assert float(found.log_marginal_likelihood()) == pytest.approx(
        float(expected.log_marginal_likelihood()), rel=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("projector", ["lowrank-kfac", "subset-magnitude", "last-layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_equals_a_fit_on_both_data_sets_in_the_same_subspace(kind, projector, dtype):
    model, inputs, targets = problem(kind, dtype=dtype)
    la = fit(model, kind, part(inputs, targets, FIRST), projector)
    updated = la.updated(part(inputs, targets, SECOND))
    assert_same_posterior(updated, fit_on_both(la, kind, loader(inputs, targets)), inputs, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["paper-cnn", "tied-weights", "attention", "keyword-inputs"])
def test_an_update_of_other_networks_equals_brute_force(name):
    model, inputs, targets = problem("classification", name)
    la = fit(model, "classification", part(inputs, targets, FIRST))
    updated = la.updated(part(inputs, targets, SECOND))
    precision = dense_ggn(model, inputs, softmax_hessians(dense_outputs(model, inputs)))
    precision += PRIOR * torch.eye(len(precision), dtype=torch.float64)
    expected = subspace_covariance(dense_jacobian(model, inputs), la.projection_matrix(), precision)
    assert close(updated.functional_covariance(inputs, joint=True), expected, 1e-8)


def test_an_estimated_noise_is_estimated_anew_from_all_residuals():
    model, inputs, targets = problem("estimated noise")
    la = fit(model, "estimated noise", part(inputs, targets, FIRST))
    updated = la.updated(part(inputs, targets, SECOND))
    residuals = targets - dense_outputs(model, inputs)
    assert la.noise_std == pytest.approx(float(residuals[FIRST].square().mean().sqrt()), rel=1e-12)
    assert updated.noise_std == pytest.approx(float(residuals.square().mean().sqrt()), rel=1e-12)
    assert updated.noise_std > 1.2 * la.noise_std


def test_a_given_noise_stays_as_it_is():
    model, inputs, targets = problem("given noise")
    la = fit(model, "given noise", part(inputs, targets, FIRST))
    assert la.updated(part(inputs, targets, SECOND)).noise_std == la.noise_std == 0.4


@pytest.mark.parametrize("kind", KINDS)
def test_several_updates_equal_one(kind):
    model, inputs, targets = problem(kind)
    la = fit(model, kind, part(inputs, targets, FIRST))
    once = la.updated(part(inputs, targets, SECOND))
    thrice = la
    for which in (slice(15, 20), slice(9, 10), slice(10, 15)):
        thrice = thrice.updated(part(inputs, targets, which))
    assert_same_posterior(thrice, once, inputs, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_keeps_a_prior_that_was_changed_after_the_fit(kind):
    model, inputs, targets = problem(kind)
    la = fit(model, kind, part(inputs, targets, FIRST))
    other = la.with_prior(9.0).updated(part(inputs, targets, SECOND))
    assert other.prior_precision == 9.0
    assert_same_posterior(other, la.updated(part(inputs, targets, SECOND)).with_prior(9.0), inputs, 1e-12)
    tuned = la.optimize_prior_precision().prior_precision
    assert la.updated(part(inputs, targets, SECOND)).prior_precision == tuned


def test_updates_and_truncation_commute():
    model, inputs, targets = problem("classification")
    la = fit(model, "classification", part(inputs, targets, FIRST))
    new = part(inputs, targets, SECOND)
    assert_same_posterior(la.truncated(3).updated(new), la.updated(new).truncated(3), inputs, 1e-10)


@pytest.mark.parametrize("kind", ["classification", "given noise"])
def test_more_data_leave_less_variance(kind):
    model, inputs, targets = problem(kind)
    la = fit(model, kind, part(inputs, targets, FIRST))
    updated = la.updated(part(inputs, targets, SECOND))
    shrinkage = la.functional_covariance(inputs, joint=True) - updated.functional_covariance(inputs, joint=True)
    values = torch.linalg.eigvalsh(shrinkage)
    assert values[0] > -1e-12 * values[-1]
    assert (updated.functional_variance(inputs) < la.functional_variance(inputs)).all()


def test_an_update_counts_the_data_of_both():
    model, inputs, targets = problem("classification")
    la = fit(model, "classification", part(inputs, targets, FIRST))
    updated = la.updated(part(inputs, targets, SECOND))
    assert "N=9)" in repr(la) and "N=20)" in repr(updated)
    assert "20 inputs" in updated.summary()


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_changes_neither_the_posterior_it_starts_from_nor_the_model(kind):
    model, inputs, targets = problem(kind, "layer-norm" if kind == "classification" else "mlp")
    la = fit(model, kind, part(inputs, targets, FIRST))
    before = la.functional_covariance(inputs), la.log_marginal_likelihood(), la.noise_std, repr(la)
    model.train()
    with untouched(model):
        updated = la.updated(part(inputs, targets, SECOND))
    updated.optimize_prior_precision(tune_noise=kind != "classification")
    assert updated is not la
    assert torch.equal(la.functional_covariance(inputs), before[0])
    assert (la.log_marginal_likelihood(), la.noise_std, repr(la)) == before[1:]


def test_batches_of_any_size_give_the_same_update():
    model, inputs, targets = problem("estimated noise")
    la = fit(model, "estimated noise", part(inputs, targets, FIRST))
    whole = la.updated(part(inputs, targets, SECOND, size=11))
    single = la.updated(part(inputs, targets, SECOND, size=1))
    assert_same_posterior(single, whole, inputs, 1e-10)


# Errors ---------------------------------------------------------------------------------------------------------------


class Forgetful:
    """Gives its batches in the first pass only, but looks like a loader."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        batches, self.batches = self.batches, []
        yield from batches


BAD_LOADERS = {
    "empty": (lambda inputs, targets: [], "empty"),
    "of empty batches": (lambda inputs, targets: [(inputs[:0], targets[:0])], "empty"),
    "one-shot": (lambda inputs, targets: iter(loader(inputs, targets)), "one-shot"),
    "generator": (lambda inputs, targets: (batch for batch in loader(inputs, targets)), "one-shot"),
    "forgetful": (lambda inputs, targets: Forgetful(loader(inputs, targets)), "one-shot"),
    "labels out of range": (lambda inputs, targets: loader(inputs, targets + 5), "Labels must lie in"),
    "no targets": (lambda inputs, targets: [inputs], "must be a pair"),
}


@pytest.mark.parametrize("bad", BAD_LOADERS)
def test_a_bad_loader_is_refused_and_nothing_is_changed(bad):
    model, inputs, targets = problem("classification")
    la = fit(model, "classification", part(inputs, targets, FIRST))
    before = la.functional_covariance(inputs)
    make_loader, message = BAD_LOADERS[bad]
    with untouched(model), pytest.raises(ValueError, match=message):
        la.updated(make_loader(inputs[SECOND], targets[SECOND]))
    assert torch.equal(la.functional_covariance(inputs), before)
    assert_same_posterior(
        la.updated(part(inputs, targets, SECOND)),
        fit_on_both(la, "classification", loader(inputs, targets)),
        inputs,
        1e-10,
    )


@pytest.mark.parametrize("bad", [3, None, torch.zeros(4, 3)], ids=["number", "nothing", "tensor"])
def test_what_is_no_loader_is_refused(bad):
    model, inputs, targets = problem("classification")
    la = fit(model, "classification", part(inputs, targets, FIRST))
    with pytest.raises(TypeError, match="batches"):
        la.updated(bad)


def test_targets_of_regression_that_are_not_finite_are_refused():
    model, inputs, targets = problem("given noise")
    la = fit(model, "given noise", part(inputs, targets, FIRST))
    with pytest.raises(ValueError, match="NaN"):
        la.updated(loader(inputs[SECOND], targets[SECOND] * float("nan")))


def test_the_full_posterior_cannot_be_updated_and_says_so():
    model, inputs, targets = problem("classification")
    la = fit(model, "classification", part(inputs, targets, FIRST), "full")
    with pytest.raises(ValueError, match="'full' has no subspace"):
        la.updated(part(inputs, targets, SECOND))


def test_an_update_before_fit_is_refused():
    model, inputs, targets = problem("classification")
    with pytest.raises(RuntimeError, match="not fitted"):
        SubspaceLaplace.paper(model, "classification").updated(part(inputs, targets, SECOND))


def test_an_update_of_a_model_that_has_changed_since_is_refused():
    model, inputs, targets = problem("classification")
    la = fit(model, "classification", part(inputs, targets, FIRST))
    with torch.no_grad():
        model[0].bias += 1
    with pytest.raises(RuntimeError, match="changed since fit"):
        la.updated(part(inputs, targets, SECOND))
