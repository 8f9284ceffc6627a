"""Several threads: every result is right, and the model is as it was, also if a thread is interrupted."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from networks import make
from sensitive import Sensitive, batches, data, fitted, sensitive, untouched
from test_laplace import labels, loader
from torch import nn

from sublaplace import SubspaceLaplace
from sublaplace.model.borrowing import borrowed, claimed

THREADS = 4


def in_threads(*calls):
    """Runs the calls at the same time, and returns their results."""
    start = threading.Barrier(len(calls))

    def run(call):
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def repeatedly(call, count=10):
    return lambda: [call() for _ in range(count)]


def test_predictions_from_several_threads_are_right():
    model, (x, _) = sensitive(), data()
    la = fitted(model)
    expected = la(x)
    with untouched(model):
        for found in in_threads(*[repeatedly(lambda: la(x))] * THREADS):
            assert all(torch.equal(each, expected) for each in found)


def test_several_posteriors_of_one_model_are_used_and_fitted_at_the_same_time():
    model, (x, _) = sensitive(), data()
    first, second = fitted(model), SubspaceLaplace.paper(model, "classification", projector="full").fit(batches())
    expected = first(x), second(x)
    with untouched(model):
        ours, theirs, again, refitted = in_threads(
            repeatedly(lambda: first(x)),
            repeatedly(lambda: second(x)),
            repeatedly(lambda: first.functional_variance(x)),
            repeatedly(lambda: fitted(model)(x), 3),
        )
    assert all(torch.equal(each, expected[0]) for each in (*ours, *refitted))
    assert all(torch.equal(each, expected[1]) for each in theirs)
    assert all(torch.equal(each, again[0]) for each in again)


class Headed(nn.Module):
    def __init__(self, body, outputs):
        super().__init__()
        self.body, self.head = body, nn.Linear(3, outputs, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.body(x))


def test_models_that_share_a_part_wait_for_each_other():
    body, (x, _) = sensitive(), data()
    models = [Headed(body, 2), Headed(body, 3)]
    posteriors = [
        SubspaceLaplace.paper(model, "classification", dim=4).fit(batches(outputs=2 + k))
        for k, model in enumerate(models)
    ]
    expected = [la(x) for la in posteriors]
    with untouched(models[0]), untouched(models[1]):
        for k, found in enumerate(in_threads(*(repeatedly(lambda la=la: la(x)) for la in posteriors))):
            assert all(torch.equal(each, expected[k]) for each in found)


def test_models_that_share_a_parameter_alone_wait_for_each_other():
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    order = []

    def hold():
        with borrowed(one):
            held.set()
            time.sleep(0.05)
            order.append("first")

    held = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with borrowed(other):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert one.weight.requires_grad


def test_models_without_a_common_part_do_not_wait():
    with borrowed(nn.Linear(2, 2)), ThreadPoolExecutor(1) as pool:
        other = nn.Linear(2, 2)

        def use():
            with borrowed(other):
                return True

        assert pool.submit(use).result(timeout=10)


def test_contexts_may_be_nested_in_one_thread():
    model = sensitive()
    with untouched(model), claimed(model), borrowed(model), borrowed(model):
        assert not model.norm.training


# Not an attribute of the model: one that changes after the fit is refused.
VICTIMS: set[int] = set()


class Interrupted(Sensitive):
    """Raises Ctrl-C in the forward pass of one thread."""

    def forward(self, x):
        if threading.get_ident() in VICTIMS:
            raise KeyboardInterrupt
        return super().forward(x)


def test_an_interrupted_thread_lets_the_others_go_on():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, (x, _) = Interrupted().double(), data()
    la = fitted(model)
    expected = la(x)

    def interrupted():
        VICTIMS.add(threading.get_ident())
        with pytest.raises(KeyboardInterrupt):
            la(x)
        VICTIMS.clear()

    with untouched(model):
        _, found = in_threads(interrupted, repeatedly(lambda: la(x)))
    assert all(torch.equal(each, expected) for each in found)


def test_ctrl_c_while_the_model_is_given_back_leaves_nothing_behind(monkeypatch):
    model, calls = sensitive(), []
    requires_grad_ = torch.Tensor.requires_grad_

    def interrupting(tensor, flag=True):
        calls.append(flag)
        if calls.count(True) == 2:
            calls.append(True)
            raise KeyboardInterrupt
        return requires_grad_(tensor, flag)

    with untouched(model):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), borrowed(model):
            patch.setattr(torch.Tensor, "requires_grad_", interrupting)
        monkeypatch.undo()
    with ThreadPoolExecutor(1) as pool:  # the claim has ended as well
        assert pool.submit(fitted, model).result(timeout=20)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_threads_that_it_does_not_have():
    model, released = nn.Linear(2, 2), threading.Event()
    held = threading.Event()

    def hold():
        with borrowed(model):
            held.set()
            released.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        with claimed(model):
            os._exit(7)
    released.set()
    thread.join()
    deadline = time.monotonic() + 20
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(found[1]) == 7


def test_lazy_results_may_be_read_by_another_thread():
    model, inputs = make("mlp", 12)
    la = SubspaceLaplace.paper(model, "classification", dim=4).fit(loader(inputs, labels(model, inputs)))
    prediction, expected = la.predict(inputs), la.functional_covariance(inputs)
    for found in in_threads(*[lambda: prediction.covariance] * THREADS):
        assert torch.equal(found, expected)
