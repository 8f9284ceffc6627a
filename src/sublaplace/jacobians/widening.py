"""Arithmetic in float32 for networks with frozen layers in half precision, such as a base under LoRA adapters."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from sublaplace.jacobians.network import Forward
from sublaplace.jacobians.rules import RULES
from sublaplace.model.parameters import HALF_PRECISIONS

_PRODUCTS = frozenset(
    [
        *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm),
        *(torch.addmm, torch.baddbmm, torch.einsum, F.scaled_dot_product_attention),
    ]
)


class InFloat32:
    """A way to call a model in which layers in half precision compute in float32.

    Gradients in half precision would be mostly rounding error. The weights of a call are converted for its duration, so
    no copy of the model is held. Sums and products of single numbers need no conversion: torch promotes them.
    """

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return f(x) in float32."""
        with _Widening():
            outputs: Tensor = _widened(self.forward(model, inputs))
        return outputs


class _Widening(TorchFunctionMode):
    """A mode in which layers and matrix products get float32 arguments in place of half-precision ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        layer = getattr(func, "__module__", None) == "torch.nn.functional"
        if layer or func in _PRODUCTS or func in RULES:
            args, kwargs = tree_map(_widened, (tuple(args), kwargs))
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    """Return a half-precision tensor in float32, a parameter as a parameter; anything else as it is."""
    if not isinstance(value, Tensor) or value.dtype not in HALF_PRECISIONS:
        return value
    if isinstance(value, nn.Parameter):  # a frozen one: those that count are never in half precision
        return nn.Parameter(value.detach().float(), requires_grad=False)
    return value.float()


def in_float32(model: nn.Module, forward: Forward) -> Forward:
    """Return how to call the model: in float32, if some of its frozen layers are in half precision."""
    tensors = [*model.parameters(), *model.buffers()]
    return InFloat32(forward) if any(tensor.dtype in HALF_PRECISIONS for tensor in tensors) else forward
