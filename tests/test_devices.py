"""Everything follows the model's device: a pretended accelerator, CUDA where there is one, another default device."""

import functools

import numpy as np
import pytest
import torch
from accelerator import DEVICE, Pretended, accelerator, default_device, moved
from networks import NETWORKS, make
from sensitive import untouched
from test_laplace import loader, sized
from torch.utils._pytree import tree_flatten, tree_map

from sublaplace import (
    PROJECTORS,
    Bernoulli,
    Captured,
    Categorical,
    Complement,
    Drawn,
    Gaussian,
    Perturbed,
    Prediction,
    SubspaceLaplace,
)
from sublaplace.ood import epistemic_variance
from sublaplace.sklearn import SubspaceLaplaceRegressor

COUNT = 14
TOLERANCE = 1e-8


def regression(outputs):
    return outputs + 0.3 * torch.sin(torch.arange(outputs.numel(), dtype=outputs.dtype)).view_as(outputs)


def classes(outputs):
    return torch.arange(len(outputs)) % outputs.shape[1]


def binary(outputs):
    return (torch.arange(outputs.numel()) % 2).view_as(outputs).to(outputs.dtype)


TARGETS = {"regression": regression, "classification": classes, "binary": binary}


class Problem:
    """A network with data, on the CPU or on the pretended accelerator."""

    def __init__(self, name, likelihood, place):
        model, self.inputs = make(name, COUNT)
        kind = likelihood if isinstance(likelihood, str) else likelihood.name
        with torch.no_grad():
            outputs = model(**self.inputs).logits if isinstance(self.inputs, dict) else model(self.inputs)
        self.targets = TARGETS[kind](outputs)
        self.model, self.likelihood = place(model), likelihood
        self.data, self.new = loader(self.inputs, self.targets, 5), place(make(name, 4, seed=1)[1])
        _, others = make(name, COUNT, seed=2)
        self.others = loader(others, self.targets, 5)

    def fitted(self, **options):
        with untouched(self.model):
            return SubspaceLaplace(self.model, self.likelihood, **options).fit(self.data)


def numbers(value):
    """The tensors of a result, in float64 on the CPU, and its other numbers."""
    leaves = tree_flatten(value)[0]
    tensors = [leaf.double().cpu() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [*tensors, *(torch.tensor(leaf, dtype=torch.float64) for leaf in leaves if isinstance(leaf, float))]


def plain(value):
    return value.held if isinstance(value, Pretended) else value


def equal(found, expected, tolerance=TOLERANCE):
    """Whether two results are equal up to rounding; signs and order of dimensions are fixed, as both are one code."""
    found, expected = numbers(found), numbers(expected)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.isfinite(one).all()
        assert float((plain(one) - plain(other)).abs().max()) <= tolerance * max(1.0, float(other.abs().max()))
    return True


def on_device(value):
    return all(leaf.device == DEVICE for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor) and leaf.ndim)


def compared(name, likelihood, result, **options):
    """Compares what `result` makes of a fitted posterior on the accelerator and on the CPU, and returns the former."""
    here = Problem(name, likelihood, lambda value: value)
    expected = result(here, here.fitted(**options))
    with accelerator():
        problem = Problem(name, likelihood, moved)
        found = result(problem, problem.fitted(**options))
        assert equal(found, expected)
    return found


def predicted(problem, la):
    prediction = la.predict(problem.new)
    return la(problem.new), prediction.variance, prediction.covariance


# Every public member --------------------------------------------------------------------------------------------------


def saved_and_loaded(problem, la, folder):
    la.save(folder / "posterior")
    again = SubspaceLaplace.load(folder / "posterior", problem.model)
    return again(problem.new), again.bounds(problem.new, problem.data).upper


def in_place(problem, la):
    other = la.with_prior(0.7).optimize_prior_precision("marglik")
    return other.prior_precision, other(problem.new)


MEMBERS = {
    "predict": predicted,
    "functional_variance": lambda problem, la: la.functional_variance(problem.new),
    "functional_covariance": lambda problem, la: (
        la.functional_covariance(problem.new),
        la.functional_covariance(problem.new, joint=True),
    ),
    "evaluate": lambda problem, la: la.evaluate(problem.others).posterior.scores,
    "bounds": lambda problem, la: tuple(la.bounds(problem.new)),
    "captured_share": lambda problem, la: la.captured_share(problem.new),
    "full_covariance": lambda problem, la: la.full_covariance(problem.new).covariance,
    "leading_traces": lambda problem, la: la.leading_traces(problem.new),
    "projection_matrix": lambda problem, la: la.projection_matrix(),
    "truncated": lambda problem, la: la.truncated(2)(problem.new),
    "with_prior": lambda problem, la: la.with_prior(3.0)(problem.new),
    "updated": lambda problem, la: la.updated(problem.others)(problem.new),
    "tuned": lambda problem, la: (la.tuned(problem.others)(problem.new), la.tuned("evidence")(problem.new)),
    "optimize_prior_precision": in_place,
    "log_marginal_likelihood": lambda problem, la: la.log_marginal_likelihood(),
    "sample": lambda problem, la: la.sample(3),
    "functional_samples": lambda problem, la: la.functional_samples(problem.new, 3),
    "prior_precision": lambda problem, la: la.prior_precision,
    "prior_precisions": lambda problem, la: la.prior_precisions,
    "complement_weight": lambda problem, la: la.complement_weight,
    "noise_std": lambda problem, la: la.noise_std,
    "dim": lambda problem, la: float(la.dim),
    "num_parameters": lambda problem, la: float(la.num_parameters),
}
OTHERS = {"fit", "paper", "load", "save", "projector", "stages", "summary"}  # in the other tests of this file


def test_the_table_has_every_public_member():
    assert MEMBERS.keys() | OTHERS == {name for name in dir(SubspaceLaplace) if not name.startswith("_")}


REGRESSION = {"dim": 5, "subspace_inputs": Drawn(8)}
ON_THE_CPU = {"evaluate", "log_marginal_likelihood"}  # whose results are numbers


@functools.cache
def on_cpu(likelihood, **options):
    problem = Problem("mlp", likelihood, lambda value: value)
    return problem, problem.fitted(**options)


@functools.cache
def on_the_accelerator():
    with accelerator():
        problem = Problem("mlp", "regression", moved)
        return problem, problem.fitted(**REGRESSION)


@pytest.mark.parametrize("member", MEMBERS)
def test_every_public_member_runs_on_an_accelerator(member):
    expected = MEMBERS[member](*on_cpu("regression", **REGRESSION))
    problem, la = on_the_accelerator()
    with accelerator(), untouched(problem.model):
        found = MEMBERS[member](problem, la)
        assert equal(found, expected)
    assert member in ON_THE_CPU or on_device(found)


def test_saving_and_loading_keep_the_device(tmp_path):
    def result(problem, la):
        return saved_and_loaded(problem, la, tmp_path)

    assert on_device(compared("mlp", "regression", result, **REGRESSION, complement=None))
    with accelerator():
        problem = Problem("mlp", "regression", moved)
        la = problem.fitted(**REGRESSION)
        assert "accelerator" not in la.summary()
        assert la.stages.keys() >= {"survey", "projector"}


def test_paper_and_checkpoints_run_on_an_accelerator(tmp_path):
    def result(problem, la):
        paper = SubspaceLaplace.paper(problem.model, "classification", dim=4)
        return paper.fit(problem.data, checkpoint=tmp_path / "checkpoint")(problem.new)

    compared("mlp", "classification", result, **REGRESSION, complement=None, prior_precision=1.0)


# Projectors, complements, likelihoods, networks -----------------------------------------------------------------------


@pytest.mark.parametrize("projector", [*PROJECTORS, "full"])
def test_every_projector_runs_on_an_accelerator(projector):
    options = sized(projector, 4) | {"complement": None, "prior_precision": 0.7}
    compared("mlp", "classification", predicted, **options)


@pytest.mark.parametrize("kind", ["kfac", "diagonal"])
@pytest.mark.parametrize("weight", ["fitted", 0.5])
def test_every_complement_runs_on_an_accelerator(kind, weight):
    def result(problem, la):
        return predicted(problem, la), la.complement_weight, la.sample(2), la.updated(problem.others)(problem.new)

    options = {"dim": 4, "prior_precision": 0.7, "complement": Complement(kind, weight)}
    compared("mlp", "regression", result, **options)


LIKELIHOODS = {
    "one noise": Gaussian(),
    "given noise": Gaussian(0.2),
    "noise per output": Gaussian("per-output"),
    "classes": Categorical(),
    "ignored labels": Categorical(ignore_index=1),
    "yes or no": Bernoulli(),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_likelihood_runs_on_an_accelerator(name):
    def result(problem, la):
        prediction: Prediction = la.predict(problem.new, link="mc" if la.noise_std is None else "probit")
        entropies = prediction.total, prediction.aleatoric, prediction.epistemic, prediction.mutual_information
        ends = prediction.probabilities if prediction.has_probabilities else tuple(prediction.interval(0.8))
        return predicted(problem, la), entropies, ends, la.log_marginal_likelihood(), epistemic_variance(prediction)

    options = {"complement": Complement("kfac", 1.0), "prior_precision": 0.7}
    compared("mlp", LIKELIHOODS[name], result, dim=4, **options)


# Recurrent layers have a fused kernel of their own on accelerators; "embedding" creates positions on the CPU itself.
@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - {"lstm", "gru", "embedding"}))
def test_every_network_runs_on_an_accelerator(name):
    compared(name, "classification", predicted, dim=4, complement=None, prior_precision=0.7)


OPTIONS = {
    "captured": {"dim": Captured(0.5, at_most=6), "complement": None, "prior_precision": 0.7},
    "perturbed": {"dim": 4, "subspace_inputs": Perturbed(0.1, count=9), "prior_precision": 0.7},
    "evidence": {"dim": 4, "prior_precision": "evidence", "complement": None},
    "a λ per layer": {"dim": 4, "prior_structure": "layer"},
    "no subspace": {"projector": None, "complement": "kfac", "prior_precision": 0.7},
    "all defaults": {},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_every_option_runs_on_an_accelerator(name, likelihood):
    compared("mlp", likelihood, predicted, **OPTIONS[name])


def test_weights_of_the_data_may_be_anywhere():
    weights = torch.linspace(0.5, 2, COUNT, dtype=torch.float64)

    def result(place):
        problem = Problem("mlp", "regression", place)
        places = [place, lambda value: value, place]
        problem.data = [
            tree_map(each, (*batch, part) if k else batch)
            for k, (each, batch, part) in enumerate(zip(places, problem.data, weights.split(5), strict=True))
        ]
        return predicted(problem, problem.fitted(**REGRESSION))

    expected = result(lambda value: value)
    with accelerator():
        assert equal(result(moved), expected)


# The accelerator itself -----------------------------------------------------------------------------------------------


def test_the_accelerator_refuses_tensors_of_the_cpu():
    with accelerator():
        x = torch.ones(3, device=DEVICE)
        assert torch.equal((x + torch.tensor(2.0)).cpu(), torch.full((3,), 3.0))  # a number
        assert torch.equal(x[torch.tensor([0, 1])].cpu(), torch.ones(2))  # indices
        for mixed in (lambda: x + torch.ones(3), lambda: x @ torch.ones(3), lambda: torch.cat([x, torch.ones(1)])):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(3, generator=torch.Generator(), device=DEVICE)
        with pytest.raises(RuntimeError, match="numpy"):
            x.numpy()


# Another default device -----------------------------------------------------------------------------------------------


@functools.cache
def fitted_on_meta(likelihood):
    problem, _ = on_cpu(likelihood, **REGRESSION, complement=Complement("kfac", "fitted"))
    return problem.fitted(**REGRESSION, complement=Complement("kfac", "fitted"))


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_the_default_device_does_not_matter(member, likelihood):
    problem, la = on_cpu(likelihood, **REGRESSION, complement=Complement("kfac", "fitted"))
    if likelihood == "classification" and member == "noise_std":
        pytest.skip("there is none")
    expected = MEMBERS[member](problem, la)
    with default_device("meta"):  # on which nothing can be computed
        found = MEMBERS[member](problem, fitted_on_meta(likelihood))
    assert equal(found, expected, 0.0)


@pytest.mark.parametrize("projector", [*PROJECTORS, "full"])
def test_projectors_do_not_use_the_default_device(projector):
    problem = Problem("mlp", "classification", lambda value: value)
    options = sized(projector, 4) | {"complement": None, "prior_precision": 0.7}
    expected = predicted(problem, problem.fitted(**options))
    with default_device("meta"):
        assert equal(predicted(problem, problem.fitted(**options)), expected, 0.0)


def test_the_estimators_do_not_use_the_default_device():
    X = np.linspace(-1, 1, 24).reshape(12, 2)
    estimator = SubspaceLaplaceRegressor(hidden_layer_sizes=(4,), max_iter=4, random_state=0)
    expected = estimator.fit(X, X[:, 0]).predict(X)
    with default_device("meta"):
        assert np.array_equal(estimator.fit(X, X[:, 0]).predict(X), expected)


# CUDA -----------------------------------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def to_cuda(value):
    if isinstance(value, torch.nn.Module):
        return value.cuda()
    return tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, value)


@needs_cuda
@pytest.mark.parametrize("member", MEMBERS)
def test_every_public_member_runs_on_cuda(member):
    here, there = (Problem("mlp", "regression", place) for place in (lambda value: value, to_cuda))
    expected, found = (MEMBERS[member](each, each.fitted(**REGRESSION)) for each in (here, there))
    if member not in ("projection_matrix", "sample", "functional_samples"):  # signs and bases may differ
        assert equal(found, expected, 1e-6)


@needs_cuda
@pytest.mark.parametrize("projector", [*PROJECTORS, "full"])
def test_every_projector_runs_on_cuda(projector):
    options = sized(projector, 4) | {"complement": None, "prior_precision": 0.7}
    here, there = (Problem("mlp", "classification", place) for place in (lambda value: value, to_cuda))
    assert equal(predicted(there, there.fitted(**options)), predicted(here, here.fitted(**options)), 1e-6)
