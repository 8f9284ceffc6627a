"""Everything follows the model's device: a pretended accelerator, CUDA where there is one, another default device."""

import functools
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import make
from sensitive import untouched
from test_laplace import loader, sized
from torch.utils._pytree import tree_flatten, tree_map

from sublaplace import (
    PROJECTORS,
    Complement,
    Drawn,
    SubspaceLaplace,
    train,
)
from sublaplace.sklearn import SubspaceLaplaceRegressor

COUNT = 14
TOLERANCE = 1e-8


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


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


def equal(found, expected, tolerance=TOLERANCE):
    """Whether two results are equal up to rounding; signs and order of dimensions are fixed, as both are one code."""
    found, expected = numbers(found), numbers(expected)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.isfinite(one).all()
        assert float((one - other).abs().max()) <= tolerance * max(1.0, float(other.abs().max()))
    return True


def predicted(problem, la):
    prediction = la.predict(problem.new)
    return la(problem.new), prediction.variance, prediction.covariance


# Every public member --------------------------------------------------------------------------------------------------


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
    "network_samples": lambda problem, la: la.network_samples(problem.new, 3),
    "predict_groups": lambda problem, la: la.predict_groups(problem.new.unflatten(0, (2, 2))),
    "prior_precision": lambda problem, la: la.prior_precision,
    "prior_precisions": lambda problem, la: la.prior_precisions,
    "complement_weight": lambda problem, la: la.complement_weight,
    "noise_std": lambda problem, la: la.noise_std,
    "estimate": lambda problem, la: float(la.estimate(problem.data).num_data),  # its seconds differ
    "dim": lambda problem, la: float(la.dim),
    "num_parameters": lambda problem, la: float(la.num_parameters),
    "num_outputs": lambda problem, la: float(la.num_outputs),
}
OTHERS = {"fit", "paper", "load", "save", "projector", "likelihood", "stages", "summary"}  # in tests of their own


def test_the_table_has_every_public_member():
    assert MEMBERS.keys() | OTHERS == {name for name in dir(SubspaceLaplace) if not name.startswith("_")}


REGRESSION = {"dim": 5, "subspace_inputs": Drawn(8)}


@functools.cache
def on_cpu(likelihood, **options):
    problem = Problem("mlp", likelihood, lambda value: value)
    return problem, problem.fitted(**options)


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_everything_runs_on_a_pretended_accelerator(which):
    """In a process of its own: autograd starts threads for another device, after which a process must not be forked."""
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=short", "-m", which]
    command.append(str(here / "on_accelerator.py"))
    run = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]


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


def test_training_does_not_use_the_default_device():
    found = []
    for device in ("cpu", "meta"):
        problem = Problem("mlp", "regression", lambda value: value)
        with default_device(device):
            found.append(train(problem.model, problem.data, "regression", epochs=4, prior_structure="layer"))
    assert found[0] == found[1]


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
    if member not in (
        "projection_matrix",
        "sample",
        "functional_samples",
        "network_samples",
    ):  # signs and bases may differ
        assert equal(found, expected, 1e-6)


@needs_cuda
@pytest.mark.parametrize("projector", [*PROJECTORS, "full"])
def test_every_projector_runs_on_cuda(projector):
    options = sized(projector, 4) | {"complement": None, "prior_precision": 0.7}
    here, there = (Problem("mlp", "classification", place) for place in (lambda value: value, to_cuda))
    assert equal(predicted(there, there.fitted(**options)), predicted(here, here.fitted(**options)), 1e-6)
