"""A model that shows whether it was touched: `untouched` compares everything about it that a user could notice."""

from contextlib import contextmanager

import pytest
import torch
from test_laplace import loader
from torch import nn

from sublaplace import SubspaceLaplace


def state(model):
    """Everything about a model that must survive; tensors as (object, value)."""

    def kept(tensor):
        return None if tensor is None else (id(tensor), tensor.detach().clone())

    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "training": {name: module.training for name, module in model.named_modules()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "grad": {name: kept(p.grad) for name, p in model.named_parameters()},
        "parameters": {name: kept(p) for name, p in model.named_parameters()},
        "buffers": {name: kept(b) for name, b in model.named_buffers()},
        "hooks": {name: [list(getattr(module, kind)) for kind in hooks] for name, module in model.named_modules()},
        "tensor hooks": {name: list(p._backward_hooks or ()) for name, p in model.named_parameters()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@contextmanager
def untouched(model):
    """Asserts, also after an error (while its traceback is still alive), that nothing about the model has changed."""
    before = state(model)
    try:
        yield
    finally:
        after = state(model)
        changed = [what for what in before if not same(before[what], after[what])]
        assert not changed, f"changed: {', '.join(changed)}"


@contextmanager
def refused(model, exception, *words):
    """The block raises `exception` with all `words` in its message and leaves the model untouched."""
    with untouched(model), pytest.raises(exception) as caught:
        yield
    missing = [word for word in words if word.lower() not in str(caught.value).lower()]
    assert not missing, f"{missing} not in: {caught.value}"


class Sensitive(nn.Module):
    """A network with everything that could be left behind: modes, flags, gradients, buffers, hooks."""

    def __init__(self, outputs=3):
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(6, 5)
        self.head = nn.Linear(5, outputs)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.head(self.second(self.drop(self.norm(self.first(x)).tanh())).relu())


def sensitive(outputs=3):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Sensitive(outputs).double()
        model(torch.randn(20, 3).double()).sum().backward()
    model.first.weight.requires_grad_(False)
    model.first.bias.grad = None
    model.train()
    model.second.eval()
    model.second.register_forward_hook(lambda module, arguments, output: output)
    model.norm.register_forward_pre_hook(lambda module, arguments: None)
    model.head.weight.register_hook(lambda gradient: gradient)
    return model


def data(n=8, outputs=3):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, torch.arange(n) % outputs


def batches(n=8, outputs=3, size=3):
    return loader(*data(n, outputs), size)


def fitted(model=None, **options):
    return SubspaceLaplace.paper(model or sensitive(), "classification", dim=4, **options).fit(batches())
