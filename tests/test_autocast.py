"""A user's autocast changes no result: everything runs in the precision of the model, and sums in float64."""

import functools

import pytest
import torch
from networks import make
from test_devices import MEMBERS, Problem, numbers
from torch.utils._pytree import tree_flatten

from sublaplace import Bernoulli, Complement, SubspaceLaplace
from sublaplace.model.prediction import Prediction

OPTIONS = {"dim": 4, "complement": Complement("kfac", "fitted"), "prior_precision": "auto"}


class Float32(Problem):
    """The problem with a float32 model, whose products autocast would round to 11 bits."""

    def __init__(self, likelihood):
        def single(value):
            if isinstance(value, torch.nn.Module):
                return value.float()
            return {key: single(part) for key, part in value.items()} if isinstance(value, dict) else value.float()

        super().__init__("mlp", likelihood, single)
        self.data, self.others = ([(single(x), self.single(y)) for x, y in part] for part in (self.data, self.others))

    @staticmethod
    def single(targets):
        return targets.float() if targets.is_floating_point() else targets


def half():
    return torch.autocast("cpu", torch.float16)


@functools.cache
def fitted(likelihood, within):
    problem = Float32(likelihood)
    if not within:
        return problem, problem.fitted(**OPTIONS)
    with half():
        return problem, problem.fitted(**OPTIONS)


def same(found, expected):
    dtypes = [
        [leaf.dtype for leaf in tree_flatten(each)[0] if isinstance(leaf, torch.Tensor)] for each in (found, expected)
    ]
    assert dtypes[0] == dtypes[1]
    return all(torch.equal(a, b) for a, b in zip(numbers(found), numbers(expected), strict=True))


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize("member", MEMBERS)
def test_every_public_member_is_the_same_under_autocast(member, likelihood):
    expected = MEMBERS[member](*fitted(likelihood, False))
    with half():
        found = MEMBERS[member](*fitted(likelihood, True))
        assert torch.is_autocast_enabled("cpu")
    assert same(found, expected)


LAZY = ["mean", "probabilities", "variance", "covariance", "total", "aleatoric", "epistemic", "mutual_information"]


@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
@pytest.mark.parametrize("likelihood", ["classification", Bernoulli()], ids=["classes", "yes or no"])
@pytest.mark.parametrize("name", LAZY)
def test_what_a_prediction_computes_later_is_the_same_under_autocast(name, likelihood, link):
    if link == "bridge" and likelihood != "classification":
        pytest.skip("refused for yes/no outputs")
    problem, la = fitted(likelihood, False)
    expected = getattr(la.predict(problem.new, link=link), name)
    with half():
        found = getattr(la.predict(problem.new, link=link), name)
    assert same(found, expected)


def test_the_table_has_all_that_a_prediction_computes_later():
    computed = {name for name, value in vars(Prediction).items() if hasattr(value, "__get__") and not callable(value)}
    assert {name for name in computed if not name.startswith("_")} == {*LAZY, "has_probabilities", "class_dim"}


def test_intervals_are_the_same_under_autocast():
    problem, la = fitted("regression", False)
    expected = la.predict(problem.new).interval(0.8)
    with half():
        assert same(tuple(la.predict(problem.new).interval(0.8)), tuple(expected))


def test_the_network_itself_runs_without_autocast():
    seen = []
    model, inputs = make("mlp", 6, torch.float32)
    model[0].register_forward_hook(lambda module, arguments, output: seen.append(output.dtype))
    with half():
        la = SubspaceLaplace.paper(model, "classification", dim=2).fit([(inputs, torch.arange(6) % 2)])
        la(inputs)
    assert set(seen) == {torch.float32}
