"""Nothing of the user's model is changed: not by a fit, not by a prediction, and not by an error or an interrupt."""

import math

import pytest
import torch
from networks import make
from sensitive import Sensitive, batches, data, fitted, refused, sensitive, untouched
from test_laplace import labels, loader, sized
from torch import nn

from sublaplace import PROJECTORS, Drawn, SubspaceLaplace, SubspacePosterior


@pytest.mark.parametrize("projector", [*PROJECTORS, "full"])
def test_fitting_and_predicting_leave_the_model_as_it_was(projector):
    model = sensitive()
    with untouched(model):
        la = SubspaceLaplace.paper(model, "classification", **sized(projector, 4)).fit(batches())
        la(data()[0])
        la.predict(batches(), link="mc")
        la.functional_variance(data()[0])
        la.functional_covariance(data()[0], joint=True)


@pytest.mark.parametrize("name", ["lstm", "attention", "free-parameters", "tied-weights", "residual-batch-norm"])
def test_networks_that_take_the_general_path_are_left_as_they_were(name):
    model, inputs = make(name, 6)
    model.train()
    with untouched(model):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(loader(inputs, labels(model, inputs)))(inputs)


def test_a_model_in_training_mode_is_evaluated_in_eval_mode():
    model = sensitive()
    model.train()
    training = fitted(model)(data()[0])
    assert model.training
    assert model.drop.training
    model.eval()
    assert torch.equal(training, fitted(model)(data()[0]))


def test_buffers_that_a_forward_pass_replaces_are_put_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return self.linear(x)

    model = Counting()
    with untouched(model):
        fitted(model)(data()[0])


def test_the_global_random_state_is_not_touched():
    model = sensitive()
    before = torch.get_rng_state()
    la = SubspaceLaplace.paper(model, "classification", dim=4, subspace_inputs=Drawn(5)).fit(batches())
    la(data()[0], link="mc")
    assert torch.equal(before, torch.get_rng_state())


def test_prediction_under_inference_mode_and_no_grad_is_the_same():
    model = sensitive()
    la = fitted(model)
    x = data()[0]
    expected = la(x)
    with torch.no_grad():
        assert torch.equal(la(x), expected)
    with torch.inference_mode():
        assert torch.equal(la(x), expected)
        assert torch.equal(fitted(model)(data()[0]), expected)


class Interrupting:
    """A loader whose batches end in Ctrl-C after `count` batches, over all passes."""

    def __init__(self, source, count):
        self.source, self.count = source, count

    def __iter__(self):
        for batch in self.source:
            if self.count == 0:
                raise KeyboardInterrupt
            self.count -= 1
            yield batch


@pytest.mark.parametrize("count", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("projector", ["lowrank-kfac", "subset-swag"])
def test_an_interrupt_inside_a_batch_leaves_the_model_as_it_was(projector, count):
    model = sensitive()
    la = SubspaceLaplace.paper(model, "classification", projector=projector, dim=4)
    with refused(model, KeyboardInterrupt):
        la.fit(Interrupting(batches(), count))
    with pytest.raises(RuntimeError, match="not fitted"):
        la(data()[0])


class InterruptedForward(Sensitive):
    remaining = math.inf

    def forward(self, x):
        self.remaining -= 1
        if self.remaining < 0:
            raise KeyboardInterrupt
        return super().forward(x)


def interrupted_model():
    model = sensitive()
    model.__class__ = InterruptedForward
    model.remaining = 10**6
    return model


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 12])
def test_an_interrupt_inside_the_forward_pass_of_a_fit_leaves_the_model_as_it_was(count):
    model = interrupted_model()
    la = SubspaceLaplace.paper(model, "classification", dim=4)
    model.remaining = count
    with refused(model, KeyboardInterrupt):
        la.fit(batches())


def test_an_interrupt_inside_the_forward_pass_of_a_prediction_leaves_the_model_as_it_was():
    model = interrupted_model()
    la = fitted(model)
    for member in (la, la.functional_variance, la.leading_traces, lambda x: la.functional_covariance(x, joint=True)):
        model.remaining = 0
        with refused(model, KeyboardInterrupt):
            member(data()[0])


@pytest.mark.parametrize("member", ["covariance", "variance", "traces", "joint_covariance"])
def test_an_interrupt_between_the_chunks_of_a_prediction_leaves_the_model_as_it_was(monkeypatch, member):
    model = sensitive()
    la = fitted(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(SubspacePosterior, member, interrupt)
    call = {
        "covariance": la.functional_covariance,
        "variance": la.functional_variance,
        "traces": la.leading_traces,
        "joint_covariance": lambda x: la.functional_covariance(x, joint=True),
    }[member]
    with refused(model, KeyboardInterrupt):
        call(data()[0])


def test_an_interrupt_inside_a_loader_of_a_prediction_leaves_the_model_as_it_was():
    model = sensitive()
    la = fitted(model)
    with refused(model, KeyboardInterrupt):
        la.predict(Interrupting(batches(), 1))


def test_an_interrupt_inside_a_projector_leaves_the_model_as_it_was():
    def interrupting(context):
        for _ in context.stream.jacobians("some pass"):
            raise KeyboardInterrupt

    model = sensitive()
    la = SubspaceLaplace.paper(model, "classification", projector=interrupting, dim=4)
    with refused(model, KeyboardInterrupt):
        la.fit(batches())


def test_a_fit_that_fails_leaves_the_earlier_one_in_place():
    model = sensitive()
    la = fitted(model)
    before = la(data()[0])
    x, y = data()
    with refused(model, ValueError, "labels"):
        la.fit([(x, y), (x, y + 1)])
    assert torch.equal(la(x), before)
    assert la.dim == 4
