"""A pretended accelerator: tensors that report another device than the CPU, and refuse to be mixed with tensors on it.

A tensor of the accelerator holds a CPU tensor and hands every operation on to it. As on a real device, an operation
with a CPU tensor of one or more dimensions fails; numbers, copies and indices aside.
"""

import functools
from contextlib import contextmanager

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class _Module(_DummyBackendModule):
    """Says that there is no such device, so that no other code takes it as the accelerator of this machine."""

    def is_available(self):
        return False

    def device_count(self):
        return 0

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


_setup_privateuseone_for_python_backend("pretended", _Module())
DEVICE = torch.device("pretended", 0)
aten = torch.ops.aten
_CROSSING = {aten._to_copy.default, aten.copy_.default, aten.index.Tensor, aten.index_put_.default}
_CROSSING |= {aten.index_put.default, aten._index_put_impl_.default, aten._unsafe_index.Tensor}


class Pretended(torch.Tensor):
    """A tensor of the accelerator."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held):
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        wrapper.held = held
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatched(func, args, kwargs or {})

    def __repr__(self):
        return f"Pretended({self.held!r})"


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatched(func, args, kwargs or {})


_CONSTANTS = {torch.Tensor.tolist, torch.Tensor.new_tensor, torch.tensor, torch.as_tensor}


class _Constants(TorchFunctionMode):
    """`torch.tensor`, its relatives and `tolist` copy numbers without an operation that could be seen."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _CONSTANTS:
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if func is torch.Tensor.tolist and isinstance(args[0], Pretended):
            return args[0].held.tolist()
        if func is torch.Tensor.new_tensor and isinstance(args[0], Pretended):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs).to(DEVICE)
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == DEVICE.type:
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


# Recurrent cells are fused on every device but the CPU, whose tensors have no such kernel: here they are.


def _lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    gates = sum(part for part in (input_gates, hidden_gates, input_bias, hidden_bias) if part is not None)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, 1)
    by_cell = torch.zeros_like(cy) if grad_cy is None else grad_cy
    by_output = torch.zeros_like(cy)
    if grad_hy is not None:
        by_cell = by_cell + grad_hy * o * (1 - cy.tanh() ** 2)
        by_output = grad_hy * cy.tanh() * o * (1 - o)
    parts = by_cell * g * i * (1 - i), by_cell * cx * f * (1 - f), by_cell * i * (1 - g**2), by_output
    gates = torch.cat(parts, 1)
    return gates, by_cell * f, gates.sum(0) if has_bias else gates.new_empty(0)


def _gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    left = input_gates if input_bias is None else input_gates + input_bias
    right = hidden_gates if hidden_bias is None else hidden_gates + hidden_bias
    (ir, iz, i), (hr, hz, h) = left.chunk(3, 1), right.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (i + r * h).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, h], 1)


def _gru_cell_backward(grad_hy, workspace, has_bias):
    r, z, n, hx, h = workspace.chunk(5, 1)
    by_new = grad_hy * (1 - z) * (1 - n**2)
    by_reset, by_update = by_new * h * r * (1 - r), grad_hy * (hx - n) * z * (1 - z)
    left, right = torch.cat([by_reset, by_update, by_new], 1), torch.cat([by_reset, by_update, by_new * r], 1)
    biases = (left.sum(0), right.sum(0)) if has_bias else (left.new_empty(0), left.new_empty(0))
    return left, right, grad_hy * z, *biases


_FUSED = {
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}


@contextmanager
def accelerator():
    """Within it, tensors can be created on, and moved to, the accelerator."""
    with _Operations(), _Constants():
        yield


class _Operation:
    """What `dispatched` asks of an operation, found out once."""

    def __init__(self, func):
        self.run = _FUSED.get(func, func)
        self.may_cross = func in _CROSSING
        self.changes_shape = torch.Tag.inplace_view in func.tags
        returns = func._schema.returns
        writes = bool(returns) and returns[0].alias_info is not None and returns[0].alias_info.is_write
        self.returns_one = len(returns) == 1
        self.written = [
            (place, argument.name)
            for place, argument in enumerate(func._schema.arguments)
            if writes and argument.alias_info is not None and argument.alias_info.is_write
        ]


_operation = functools.cache(_Operation)


def dispatched(func, args, kwargs):
    """Run an operation on the held tensors, and wrap what it returns if it belongs on the accelerator."""
    tensors = _tensors(kwargs.values(), _tensors(args, []))
    inside = [tensor for tensor in tensors if type(tensor) is Pretended]
    asked = kwargs.get("device")
    wraps = bool(inside) if asked is None else torch.device(asked).type == DEVICE.type
    if asked is not None and wraps:
        kwargs = kwargs | {"device": torch.device("cpu")}
    if not inside and not wraps:
        return func(*args, **kwargs)
    operation = _operation(func)
    if inside and not operation.may_cross and any(type(each) is not Pretended and each.ndim for each in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} found {DEVICE} and cpu.")
    if kwargs.get("generator") is not None and wraps:
        raise RuntimeError(f"Expected a generator for {DEVICE}, but {func} found one for the CPU.")
    result = operation.run(*map(_held, args), **{name: _held(value) for name, value in kwargs.items()})
    if inside and asked is not None and not wraps:
        # A copy to the CPU that needs no conversion would be the held tensor itself.
        return result.clone() if result is inside[0].held else result
    if inside and operation.changes_shape:  # such as transpose_: the wrapper takes the new shape as well
        with no_dispatch():
            func(*args, **kwargs)
    if operation.written:  # the argument that it writes to is what it returns
        found = [kwargs[name] if name in kwargs else args[place] for place, name in operation.written]
        return found[0] if operation.returns_one else tuple(found)
    return _wrapped(result)


# Arguments and results of operations are tensors, numbers, and lists or tuples of these.


def _tensors(values, found):
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _tensors(value, found)
    return found


def _held(value):
    if type(value) is Pretended:
        return value.held
    return [_held(each) for each in value] if isinstance(value, (list, tuple)) else value


def _wrapped(value):
    if isinstance(value, torch.Tensor):
        return Pretended(value)
    return type(value)(map(_wrapped, value)) if type(value) in (list, tuple) else value


def moved(value):
    """The tensors of a nesting, or of a model, on the accelerator."""
    if isinstance(value, nn.Module):
        return _moved_model(value)
    return tree_map(lambda leaf: leaf.to(DEVICE) if isinstance(leaf, torch.Tensor) else leaf, value)


def _moved_model(model):
    """Move a model in place; unlike `Module.to` with tensors of another class, this keeps tied parameters tied."""
    known = {id(p): nn.Parameter(p.detach().to(DEVICE), p.requires_grad) for p in model.parameters()}
    for module in model.modules():
        module._parameters.update({name: known[id(p)] for name, p in module._parameters.items() if p is not None})
        module._buffers.update({name: b.to(DEVICE) for name, b in module._buffers.items() if b is not None})
    return model
