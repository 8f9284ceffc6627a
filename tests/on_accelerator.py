"""Everything on the pretended accelerator, equal to the CPU; run by `test_devices.py` in a process of its own.

Tests that are not slow run each member, projector, kind of likelihood and option once, and networks of every kind.
"""

import functools
import itertools

import pytest
import torch
from accelerator import DEVICE, accelerator, moved
from networks import NETWORKS
from sensitive import untouched
from test_devices import COUNT, MEMBERS, REGRESSION, Problem, equal, on_cpu, predicted
from test_laplace import sized
from torch.utils._pytree import tree_flatten, tree_map

from sublaplace import (
    PROJECTORS,
    Bernoulli,
    Captured,
    Categorical,
    Complement,
    Gaussian,
    Perturbed,
    Prediction,
    SubspaceLaplace,
    train,
)
from sublaplace.ood import epistemic_variance

ON_THE_CPU = {"evaluate", "log_marginal_likelihood"}  # whose results are numbers


def quick(names, *chosen):
    """The names as parameters: all but those chosen are slow."""
    assert set(chosen) <= set(names)
    return [
        name
        if name in chosen
        else pytest.param(*(name if isinstance(name, tuple) else (name,)), marks=pytest.mark.slow)
        for name in names
    ]


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


def saved_and_loaded(problem, la, folder):
    la.save(folder / "posterior")
    again = SubspaceLaplace.load(folder / "posterior", problem.model)
    return again(problem.new), again.bounds(problem.new, problem.data).upper


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


@pytest.mark.parametrize(
    ("kind", "weight"),
    quick(list(itertools.product(["kfac", "diagonal"], ["fitted", 0.5])), ("kfac", "fitted"), ("diagonal", 0.5)),
)
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


@pytest.mark.parametrize("name", quick(LIKELIHOODS, "noise per output", "ignored labels", "yes or no"))
def test_every_likelihood_runs_on_an_accelerator(name):
    def result(problem, la):
        prediction: Prediction = la.predict(problem.new, link="mc" if la.noise_std is None else None)
        entropies = prediction.total, prediction.aleatoric, prediction.epistemic, prediction.mutual_information
        ends = prediction.probabilities if prediction.has_probabilities else tuple(prediction.interval(0.8))
        return predicted(problem, la), entropies, ends, la.log_marginal_likelihood(), epistemic_variance(prediction)

    options = {"complement": Complement("kfac", 1.0), "prior_precision": 0.7}
    compared("mlp", LIKELIHOODS[name], result, dim=4, **options)


KINDS = "paper-cnn", "residual-batch-norm", "embedding", "transformer", "tied-weights", "free-parameters", "lstm"
KINDS += "frozen-layer", "keyword-inputs", "conv-groups"


@pytest.mark.parametrize("name", quick(sorted(NETWORKS), *KINDS))
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


CASES = list(itertools.product(OPTIONS, ["regression", "classification"]))


@pytest.mark.parametrize(
    ("name", "likelihood"), quick(CASES, *(case for k, case in enumerate(CASES) if k % 4 in (0, 3)))
)
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


PRIORS = list(itertools.product(["regression", "classification"], ["scalar", "layer"]))


@pytest.mark.parametrize(("likelihood", "structure"), quick(PRIORS, PRIORS[1], PRIORS[2]))
def test_training_runs_on_an_accelerator(likelihood, structure):
    def result(problem, la):
        found = train(problem.model, problem.data, likelihood, epochs=4, prior_structure=structure)
        return found.objective, found.evidence, found.prior_precision, problem.model(problem.new).detach()

    compared("mlp", likelihood, result, **REGRESSION)


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
