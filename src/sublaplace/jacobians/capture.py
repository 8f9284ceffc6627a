"""Record how a network uses its parameters, at the level of functional calls.

A `Capture` is active during a forward pass and recognises calls that use a parameter in a structured way (see
`rules.py`). It intercepts calls rather than modules, because functional calls, attention projections and tied weights
bypass a module's hooks. Any other use makes the parameter `unusual`, and it takes the general path (`general.py`).
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from sublaplace.jacobians.rules import RULES, BlockBuilder, Use
from sublaplace.jacobians.wanted import ROWS, Wanted


@dataclass
class Call:
    """A recorded call, with everything that the backward pass and the blocks need."""

    function: str
    names: tuple[str, ...]
    source: Tensor
    origin: Tensor | None  # the source in the autograd graph, if it is part of it
    output_shape: torch.Size
    output: Tensor | None
    edge: GradientEdge | None
    builders: tuple[tuple[str, BlockBuilder], ...]
    input_elements: int  # entries of the input in a block; a convolution's patches repeat the input
    multiplications: int


_RELU = {F.relu, torch.relu, Tensor.relu}
_MAX_POOL = {F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, torch.max_pool3d}
_CONVOLUTIONS = {F.conv2d, torch.conv2d}
_LINEAR = {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.addmm}


def _input_elements(use: Use, source: Tensor, output: Tensor) -> int:
    if not use.kernel_points:
        return source.numel()
    return source.shape[1] * use.kernel_points * len(output) * output.shape[2:].numel()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, Tensor):  # the common case, without a call for every number
                found.append(item)
            elif isinstance(item, list | tuple | dict):
                found += _tensors(item)
    return found


def _seen_through(function: types.FunctionType) -> Callable[..., Any]:
    """Return a copy of a composite ``torch.nn.functional`` function whose inner calls reach the active mode.

    The original first checks whether a mode overrides the whole function; in the copy, the check is always false.
    """
    never = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False
    )
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **never}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@dataclass(eq=False)
class Capture(TorchFunctionMode):
    """A recorder of every structured use of the given parameters during one forward pass.

    Args:
        parameters: from the id of a parameter to its name.
        num_inputs: the batch size n.
        expand: the numbers of the calls whose input does not depend on the batch, such as position embeddings. Their
            input gets a batch dimension of size `num_inputs`, which keeps the gradients of different inputs apart.
        keep_outputs: whether to keep the outputs of the calls, for probing.
        channels_last: whether to run two-dimensional convolutions, and the operations after them, in this memory order.
            It halves the time of their backward passes on a CPU.
        wanted: the parameters whose gradients will be asked for. Calls before the first of them stay out of the
            autograd graph, so that backward passes end there.
        keeps_graph: whether the inputs of the calls stay in the autograd graph, so that a Jacobian made of them can be
            differentiated with respect to the network's inputs.
    """

    parameters: Mapping[int, str]
    num_inputs: int
    expand: frozenset[int] = frozenset()
    keep_outputs: bool = False
    channels_last: bool = False
    wanted: Wanted = ROWS
    keeps_graph: bool = False
    calls: list[Call] = field(default_factory=list)
    unusual: dict[str, str] = field(default_factory=dict)  # parameter → the function that used it
    last_linear: tuple[str, ...] = ()  # the parameters of the last linear call; empty if they are frozen
    _rectified: tuple[Tensor, Tensor] | None = None  # the last ReLU's output and input

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors(args) + _tensors(kwargs) if kwargs else _tensors(args)
        used = [t for t in given if id(t) in self.parameters]
        if func in _LINEAR and any(isinstance(t, torch.nn.Parameter) for t in given):
            self.last_linear = tuple(self.parameters[id(t)] for t in used)
        if not used:
            return self._without_parameters(func, args, kwargs)
        rule = RULES.get(func)
        use = rule(args, kwargs) if rule else None
        if use is not None and {id(t) for t in used} == {id(p) for p, _ in use.builders if id(p) in self.parameters}:
            return self._record(getattr(func, "__name__", str(func)), use)
        if isinstance(func, types.FunctionType) and func.__module__ == "torch.nn.functional":
            with self:
                return _seen_through(func)(*args, **kwargs)
        result = func(*args, **kwargs)
        if _tensors(result):
            for tensor in used:
                self.unusual[self.parameters[id(tensor)]] = getattr(func, "__name__", str(func))
        return result

    def _without_parameters(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the call, with max(ReLU(x)) replaced by ReLU(max(x)), which costs less and has equal gradients."""
        if self.channels_last and func in _CONVOLUTIONS and len(args) > 1 and args[1].is_floating_point():
            args = (args[0], args[1].clone(memory_format=torch.channels_last), *args[2:])
        if func in _MAX_POOL and args and self._rectified is not None and args[0] is self._rectified[0]:
            return torch.relu(func(self._rectified[1], *args[1:], **kwargs))
        result = func(*args, **kwargs)
        if func in _RELU and args and not any(kwargs.values()):
            self._rectified = result, args[0]
        return result

    def _record(self, function: str, use: Use) -> Tensor:
        source = use.source
        if len(self.calls) in self.expand:
            whole = source if source.shape[0] == 1 else source.unsqueeze(0)
            source = whole.expand(self.num_inputs, *whole.shape[1:])
        names = tuple(self.parameters[id(p)] for p, _ in use.builders if id(p) in self.parameters)
        in_graph = source.requires_grad or not self.wanted.includes(names)

        def wrap(parameter: Tensor) -> Tensor:
            # The output must be part of the graph to receive a gradient. The gradient of the parameter itself is never
            # requested.
            if not in_graph and torch.is_grad_enabled():
                parameter = parameter.detach().requires_grad_()
            if self.channels_last and use.kernel_points and parameter.ndim == 4:
                # With one channel, the memory order of the original is ambiguous; a clone fixes it.
                return parameter.clone(memory_format=torch.channels_last)
            return parameter

        output = use.replaced(source, wrap)
        self.calls.append(
            Call(
                function=function,
                names=names,
                source=source if self.keeps_graph else source.detach(),
                origin=source if source.requires_grad else None,
                output_shape=output.shape,
                output=output.detach().clone() if self.keep_outputs else None,
                edge=get_gradient_edge(output) if output.requires_grad else None,
                builders=tuple(
                    (self.parameters[id(p)], build) for p, build in use.builders if id(p) in self.parameters
                ),
                input_elements=_input_elements(use, source, output),
                multiplications=use.fan_in * output.numel(),
            )
        )
        return output
