"""What users may add: a likelihood and a projector of their own, by object and by name, saved, loaded and resumed."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from dense_reference import (
    dense_ggn,
    dense_jacobian,
    dense_outputs,
    laplace_evidence,
    softmax_hessians,
    subspace_covariance,
)
from networks import make
from test_laplace import close, labels, loader
from torch.distributions import Poisson as TorchPoisson

import sublaplace
from sublaplace import PROJECTORS, Basis, Likelihood, SavedFileError, Subset, SubspaceLaplace
from sublaplace.model.likelihoods.base import LIKELIHOODS

PRIOR = 0.7


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts with the rate exposure · exp f: H = diag(rate)."""

    exposure: float = 1.0
    name: ClassVar[str] = "poisson"

    def rates(self, outputs):
        return self.exposure * outputs.double().exp()

    def log_density(self, outputs, targets):
        rates, counts = self.rates(outputs), targets.double()
        return (counts * rates.log() - rates - (counts + 1).lgamma()).sum(1)

    def hessian_root(self, outputs):
        return torch.diag_embed(self.rates(outputs).sqrt()).to(outputs.dtype)

    def check_targets(self, outputs, targets):
        super().check_targets(outputs, targets)
        if (targets < 0).any():
            raise ValueError("Counts must not be negative.")


@sublaplace.projector("my-largest-gradients", needs_inputs=False, stores_matrix=False)
def largest_gradients(context):
    """The parameters with the largest mean square derivative over the training data."""
    total = torch.zeros(context.linearization.layout.num_parameters, dtype=torch.float64)
    for jacobian in context.stream.jacobians("my pass"):
        total += torch.cat([block.rows().double().square().sum((0, 1)) for block in jacobian.blocks.values()])
    layout = context.linearization.layout
    return Subset(layout, total.argsort(descending=True)[: context.dim], context.linearization.dtype)


@sublaplace.projector("my-random-directions", needs_inputs=False)
def random_directions(context):
    """An orthonormal basis that is drawn with the seed of the fit."""
    layout, dtype = context.linearization.layout, context.linearization.dtype
    generator = torch.Generator().manual_seed(context.seed)
    drawn = torch.randn(layout.num_parameters, context.dim, generator=generator, dtype=torch.float64)
    return Basis(layout, layout.unflatten(torch.linalg.qr(drawn)[0].T.to(dtype)))


OWN = {"my-largest-gradients": largest_gradients, "my-random-directions": random_directions}
EVERY_OWN = pytest.mark.parametrize("name", OWN)

# Entered for the tests of this file alone: others look at all that is registered.
LIKELIHOODS.pop("poisson")
for _name in OWN:
    PROJECTORS.pop(_name)


@pytest.fixture(autouse=True)
def entered(monkeypatch):
    monkeypatch.setitem(LIKELIHOODS, "poisson", Poisson)
    for name, own in OWN.items():
        monkeypatch.setitem(PROJECTORS, name, own)


def counts_problem(n=12):
    model, inputs = make("mlp", n)
    rates = dense_outputs(model, inputs).exp()
    return model, inputs, torch.poisson(rates, generator=torch.Generator().manual_seed(0))


def dense_counts_ggn(model, inputs, exposure=1.0):
    return dense_ggn(model, inputs, torch.diag_embed(exposure * dense_outputs(model, inputs).exp()))


# A likelihood ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [Poisson(), "poisson", Poisson(2.5)], ids=["object", "name", "with a number"])
@pytest.mark.parametrize("projector", ["lowrank-kfac", "full"])
def test_the_covariance_with_an_own_likelihood_equals_brute_force(projector, likelihood):
    model, inputs, targets = counts_problem()
    dim = None if projector == "full" else 5
    la = SubspaceLaplace.paper(model, likelihood, dim, PRIOR, projector=projector).fit(loader(inputs, targets))
    ggn = dense_counts_ggn(model, inputs, 2.5 if likelihood == Poisson(2.5) else 1.0)
    precision = ggn + PRIOR * torch.eye(len(ggn), dtype=torch.float64)
    P = torch.eye(len(ggn), dtype=torch.float64) if projector == "full" else la.projection_matrix()
    expected = subspace_covariance(dense_jacobian(model, inputs), P, precision)
    assert close(la.functional_covariance(inputs, joint=True), expected, 1e-8)
    mean, covariance = la(inputs)
    assert torch.allclose(mean, dense_outputs(model, inputs))
    assert close(covariance, la.functional_covariance(inputs), 1e-12)


def test_the_evidence_with_an_own_likelihood_equals_brute_force():
    model, inputs, targets = counts_problem()
    la = SubspaceLaplace.paper(model, "poisson", 5, PRIOR).fit(loader(inputs, targets))
    fit = TorchPoisson(dense_outputs(model, inputs).exp()).log_prob(targets).sum()
    ggn, P = dense_counts_ggn(model, inputs), la.projection_matrix()
    for prior in (0.01, PRIOR, 30.0):
        expected = float(laplace_evidence(fit, ggn, model, prior, P))
        assert float(la.log_marginal_likelihood(prior)) == pytest.approx(expected, rel=1e-9)
    before = la.log_marginal_likelihood()
    assert la.tuned("evidence").log_marginal_likelihood() > before
    assert SubspaceLaplace.paper(model, "poisson", 5, "evidence").fit(loader(inputs, targets)).prior_precision > 0


def test_an_own_likelihood_goes_with_a_complement_and_more_data():
    model, inputs, targets = counts_problem(20)
    la = SubspaceLaplace(model, "poisson", 4, complement="kfac", prior_precision=PRIOR).fit(loader(inputs, targets))
    inside = SubspaceLaplace.paper(model, "poisson", 4, PRIOR).fit(loader(inputs[:9], targets[:9]))
    assert (la.functional_variance(inputs) > 0).all()
    updated = inside.updated(loader(inputs[9:], targets[9:]))
    projection = inside._subspace().projection
    both = SubspaceLaplace.paper(model, "poisson", 4, PRIOR, projector=lambda _: projection)
    both.fit(loader(inputs, targets))
    assert close(updated.functional_covariance(inputs), both.functional_covariance(inputs), 1e-10)
    assert float(updated.log_marginal_likelihood()) == pytest.approx(float(both.log_marginal_likelihood()))


def test_targets_are_checked_by_an_own_likelihood():
    model, inputs, targets = counts_problem()
    with pytest.raises(ValueError, match="Counts must not be negative"):
        SubspaceLaplace.paper(model, "poisson", 4).fit(loader(inputs, targets - 100))


def test_a_likelihood_without_noise_or_probabilities_says_so():
    model, inputs, targets = counts_problem()
    la = SubspaceLaplace.paper(model, "poisson", 4).fit(loader(inputs, targets))
    assert la.noise_std is None
    with pytest.raises(ValueError, match="'poisson' has no probabilities"):
        _ = la.predict(inputs).probabilities
    with pytest.raises(ValueError, match="'poisson' has no noise"):
        Poisson().with_noise(0.1)


@pytest.mark.parametrize("likelihood", [Poisson(), Poisson(2.5)], ids=["default", "with a number"])
def test_a_posterior_with_an_own_likelihood_is_saved_and_loaded(likelihood, tmp_path):
    model, inputs, targets = counts_problem()
    la = SubspaceLaplace.paper(model, likelihood, 5, PRIOR).fit(loader(inputs, targets))
    la.save(tmp_path / "la.safetensors")
    loaded = SubspaceLaplace.load(tmp_path / "la.safetensors", model)
    assert torch.equal(loaded.functional_covariance(inputs), la.functional_covariance(inputs))
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()
    assert loaded.log_marginal_likelihood(3.0) == la.log_marginal_likelihood(3.0)
    more = loader(inputs + 1, targets)
    assert torch.equal(loaded.updated(more).functional_variance(inputs), la.updated(more).functional_variance(inputs))
    assert repr(loaded) == repr(la) and "poisson" in repr(la)


def test_loading_where_an_own_likelihood_is_not_defined_says_what_to_do(tmp_path, monkeypatch):
    model, inputs, targets = counts_problem()
    SubspaceLaplace.paper(model, "poisson", 5, PRIOR).fit(loader(inputs, targets)).save(tmp_path / "la.safetensors")
    monkeypatch.delitem(LIKELIHOODS, "poisson")
    with pytest.raises(SavedFileError, match=r"'poisson'.*(?i:import|define)"):
        SubspaceLaplace.load(tmp_path / "la.safetensors", model)
    with pytest.raises(ValueError, match="Unknown likelihood 'poisson'"):
        SubspaceLaplace(model, "poisson")


def test_a_likelihood_without_a_name_can_be_fitted_but_not_saved(tmp_path):
    class Nameless(Likelihood):
        def log_density(self, outputs, targets):
            return Poisson().log_density(outputs, targets)

        def hessian_root(self, outputs):
            return Poisson().hessian_root(outputs)

    model, inputs, targets = counts_problem()
    la = SubspaceLaplace.paper(model, Nameless(), 5, PRIOR).fit(loader(inputs, targets))
    named = SubspaceLaplace.paper(model, "poisson", 5, PRIOR).fit(loader(inputs, targets))
    assert torch.equal(la.functional_covariance(inputs), named.functional_covariance(inputs))
    with pytest.raises(TypeError, match=r"Nameless cannot be saved: make it a frozen dataclass with a `name`"):
        la.save(tmp_path / "la.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_likelihood_that_lacks_what_it_must_give_is_refused():
    class Half(Likelihood):
        def log_density(self, outputs, targets):
            return outputs.sum(1)

    with pytest.raises(TypeError, match="hessian_root"):
        Half()


# A projector ----------------------------------------------------------------------------------------------------------


def classification():
    model, inputs = make("paper-cnn", 12)
    return model, inputs, labels(model, inputs)


@EVERY_OWN
def test_an_own_projector_is_the_same_by_object_and_by_name(name):
    model, inputs, targets = classification()
    one, other = (
        SubspaceLaplace.paper(model, "classification", 5, PRIOR, projector=given).fit(loader(inputs, targets))
        for given in (name, OWN[name])
    )
    assert PROJECTORS[name] is OWN[name]
    assert one.dim == 5 and name in repr(one)
    assert torch.equal(one.functional_covariance(inputs), other.functional_covariance(inputs))
    ggn = dense_ggn(model, inputs, softmax_hessians(dense_outputs(model, inputs)))
    precision = ggn + PRIOR * torch.eye(len(ggn), dtype=torch.float64)
    expected = subspace_covariance(dense_jacobian(model, inputs), one.projection_matrix(), precision)
    assert close(one.functional_covariance(inputs, joint=True), expected, 1e-8)


@EVERY_OWN
def test_a_posterior_of_an_own_projector_is_saved_and_loaded_and_can_be_fitted_again(name, tmp_path):
    model, inputs, targets = classification()
    la = SubspaceLaplace.paper(model, "classification", 5, PRIOR, projector=name).fit(loader(inputs, targets))
    la.save(tmp_path / "la.safetensors")
    loaded = SubspaceLaplace.load(tmp_path / "la.safetensors", model)
    assert loaded.projector is OWN[name]
    assert torch.equal(loaded(inputs), la(inputs))
    assert torch.equal(loaded.fit(loader(inputs, targets))(inputs), la(inputs))


def test_where_an_own_projector_is_not_defined_a_loaded_posterior_predicts_all_the_same(tmp_path, monkeypatch):
    model, inputs, targets = classification()
    options = {"dim": 5, "prior_precision": PRIOR, "projector": "my-random-directions"}
    la = SubspaceLaplace.paper(model, "classification", **options).fit(loader(inputs, targets))
    la.save(tmp_path / "la.safetensors")
    monkeypatch.delitem(PROJECTORS, "my-random-directions")
    loaded = SubspaceLaplace.load(tmp_path / "la.safetensors", model)
    assert torch.equal(loaded(inputs), la(inputs))
    with pytest.raises(RuntimeError, match="its projector is not defined here"):
        loaded.fit(loader(inputs, targets))
    with pytest.raises(ValueError, match="Unknown projector 'my-random-directions'"):
        SubspaceLaplace.paper(model, "classification", **options)


def test_what_an_own_projector_does_not_use_is_refused():
    model, inputs, _ = classification()
    with pytest.raises(ValueError, match=r"subspace_inputs has no effect.*'my-random-directions'"):
        SubspaceLaplace.paper(model, "classification", projector="my-random-directions", subspace_inputs=inputs)


@pytest.mark.parametrize("needs_inputs", [True, False])
def test_whether_a_projector_needs_inputs_decides_what_auto_stands_for(needs_inputs):
    own = sublaplace.Projector("my-directions", random_directions.build, needs_inputs=needs_inputs)
    model, inputs, targets = classification()
    la = SubspaceLaplace(model, "classification", 5, projector=own).fit(loader(inputs, targets))
    assert ("my-directions + kfac outside" in repr(la)) is needs_inputs
    assert ("(by leave-one-out" in la.summary()) is needs_inputs
    assert ("(by the evidence of KFAC)" in la.summary()) is not needs_inputs
    model, inputs, targets = counts_problem(40)
    la = SubspaceLaplace(model, "poisson", 5, projector=own).fit(loader(inputs, targets))
    assert (la.complement_weight == 1.0) is needs_inputs
    assert "(by the evidence of KFAC)" in la.summary()


@pytest.mark.parametrize("outside", [None, "auto"])
def test_only_the_span_of_an_own_projection_matters(outside):
    model, inputs, targets = classification()
    mixing = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 3 * torch.eye(5)

    def mixed(context):
        basis = random_directions(context)
        return Basis(basis.layout, {name: mixing @ part for name, part in basis.vectors.items()})

    one, other = (
        SubspaceLaplace(model, "classification", 5, projector=own, complement=outside).fit(
            loader(inputs, targets), loader(inputs + 0.1, targets)
        )
        for own in (lambda context: random_directions(context), mixed)
    )
    assert other.prior_precision == pytest.approx(one.prior_precision, rel=1e-6)
    assert close(other.functional_covariance(inputs), one.functional_covariance(inputs), 1e-6)
    before, after = (
        SubspaceLaplace(model, "classification", 5, projector=own, complement=outside).fit(loader(inputs, targets))
        for own in (lambda context: random_directions(context), mixed)
    )
    assert after.prior_precision == pytest.approx(before.prior_precision, rel=1e-6)


def test_a_projector_that_returns_no_projection_is_refused():
    model, inputs, targets = classification()
    la = SubspaceLaplace.paper(model, "classification", 5, projector=lambda context: torch.eye(5))
    with pytest.raises(TypeError, match=r"must return a projection, a Basis or a Subset, not Tensor"):
        la.fit(loader(inputs, targets))


class Killed(Exception):  # noqa: N818 (it is no error, but a kill)
    pass


class Dying:
    """A loader that fails in a given pass over the data."""

    def __init__(self, batches, last):
        self.batches, self.left = batches, last

    def __iter__(self):
        self.left -= 1
        for batch in self.batches:
            if self.left == 0:
                raise Killed
            yield batch


@EVERY_OWN
def test_a_fit_with_an_own_projector_resumes_from_its_checkpoint(name, tmp_path):
    model, inputs, targets = classification()
    batches = loader(inputs, targets)
    options = {"dim": 5, "prior_precision": PRIOR, "projector": name}
    expected = SubspaceLaplace.paper(model, "classification", **options).fit(batches)
    for last in range(3, 8):
        folder = tmp_path / str(last)
        la = SubspaceLaplace.paper(model, "classification", **options)
        try:
            la.fit(Dying(batches, last), checkpoint=folder)
        except Killed:
            assert folder.exists()
            la = SubspaceLaplace.paper(model, "classification", **options).fit(batches, checkpoint=folder)
        assert torch.equal(la.functional_covariance(inputs), expected.functional_covariance(inputs))
        assert not folder.exists()


def test_a_checkpoint_of_one_own_projector_is_not_that_of_another(tmp_path):
    model, inputs, targets = classification()
    first, second = (SubspaceLaplace.paper(model, "classification", 5, PRIOR, projector=name) for name in OWN)
    with pytest.raises(Killed):
        first.fit(Dying(loader(inputs, targets), 4), checkpoint=tmp_path / "checkpoint")
    with pytest.raises(
        SavedFileError, match=r"belongs to another fit: its projector differs \(my-.* then, my-.* now\)"
    ):
        second.fit(loader(inputs, targets), checkpoint=tmp_path / "checkpoint")


@pytest.mark.parametrize("named", [False, True], ids=["lambda", "def"])
def test_a_checkpoint_with_a_function_that_has_no_registered_name_is_refused(named, tmp_path):
    def plain(context):
        return random_directions(context)

    model, inputs, targets = classification()
    la = SubspaceLaplace.paper(
        model, "classification", 5, projector=plain if named else lambda context: random_directions(context)
    )
    with pytest.raises(ValueError, match=r"needs a projector with a name.*@sublaplace\.projector\('my-name'\)"):
        la.fit(loader(inputs, targets), checkpoint=tmp_path / "checkpoint")
    assert not list(tmp_path.iterdir())
    assert la.fit(loader(inputs, targets)).dim == 5  # without a checkpoint it may be any function


@pytest.fixture
def registry():
    """The table of projectors, put back afterwards."""
    kept = dict(PROJECTORS)
    yield PROJECTORS
    PROJECTORS.clear()
    PROJECTORS.update(kept)


def test_two_different_functions_under_one_name_are_refused(registry):
    def one(context):
        return random_directions(context)

    def other(context):
        return largest_gradients(context)

    made = sublaplace.projector("my-contested")(one)
    with pytest.raises(ValueError, match="There is a projector 'my-contested' already; choose another name"):
        sublaplace.projector("my-contested")(other)
    assert registry["my-contested"] is made
    # The same function once more, as when a notebook's cell is run again.
    assert sublaplace.projector("my-contested")(one) == made


@pytest.mark.parametrize("name", ["lowrank-kfac", "last-layer", "full"])
def test_the_names_of_the_library_cannot_be_taken(name, registry):
    before = registry.get(name)
    with pytest.raises(ValueError, match=f"There is a projector '{name}' already"):
        sublaplace.projector(name)(lambda context: random_directions(context))
    assert registry.get(name) is before


def test_two_anonymous_functions_under_one_name_are_refused_as_well(registry):
    sublaplace.projector("my-lambda")(lambda context: random_directions(context))
    with pytest.raises(ValueError, match="There is a projector 'my-lambda' already"):
        sublaplace.projector("my-lambda")(lambda context: largest_gradients(context))
