"""Rules for the contribution of a functional call with a parameter to the Jacobian.

A rule takes the arguments of a call and returns a `Use`, or None if it does not recognise the structure of the call. To
support another operation, write a rule and add it to `RULES`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sublaplace.jacobians.blocks import Block, EmbeddingBlock, OuterBlock, OuterUse, RowBlock

Gradients = tuple[Tensor, ...]
"""Gradients at a call's output: K tensors (n, …), one per row, with the batch dimension first."""

BlockBuilder = Callable[[Tensor, Gradients], Block]
"""A function from a call's input (n, …) and the gradients at its output to the block of a parameter."""


@dataclass(frozen=True)
class Use:
    """A recognised call: its input, and how each of its parameters contributes to the Jacobian."""

    source: Tensor
    replaced: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]  # runs the call: (source, wrap parameters)
    builders: tuple[tuple[Tensor, BlockBuilder], ...]
    kernel_points: int = 0  # of a convolution
    fan_in: int = 1  # multiplications per entry of the output


def _outer(inputs: Tensor, gradients: Gradients, outputs: int, transposed: bool = False) -> OuterBlock:
    return OuterBlock((OuterUse(inputs, gradients, outputs),), len(gradients), transposed)


def _bias(source: Tensor, gradients: Gradients, outputs: int) -> OuterBlock:
    """Return the block of a bias, a map whose input is 1 at every position; `gradients` are K tensors (n, 1, O, T)."""
    n, positions = len(source), gradients[0].shape[3] if gradients else 1
    use = OuterUse(source.new_ones(1).expand(n, 1, 1, positions), gradients, outputs, is_bias=True)
    return OuterBlock((use,), len(gradients))


def _positions(gradient: Tensor) -> Tensor:
    """Flatten all positions into one dimension: (n, …, O) → (n, 1, O, T)."""
    return gradient.flatten(1, -2).transpose(-1, -2).unsqueeze(1)


def _linear_weight(weight: Tensor, transposed: bool) -> BlockBuilder:
    def build(source: Tensor, gradients: Gradients) -> Block:
        a = source.flatten(1, -2).transpose(1, 2).unsqueeze(1)
        return _outer(a, tuple(map(_positions, gradients)), weight.shape[1 if transposed else 0], transposed)

    return build


def _linear_bias(bias: Tensor | None) -> BlockBuilder:
    def build(source: Tensor, gradients: Gradients) -> Block:
        return _bias(source, tuple(map(_positions, gradients)), 0 if bias is None else len(bias))

    return build


def _stacked(gradients: Gradients, source: Tensor, width: int) -> Tensor:
    """Stack gradients to (n, K, …, width), also for K = 0."""
    if gradients:
        return torch.stack(gradients, dim=1)
    return torch.empty(len(source), 0, *source.shape[1:], width, device=source.device)


def rows_of(source: Tensor, rows: Gradients, size: int) -> RowBlock:
    """Return the block of K tensors (n, size), also for K = 0."""
    return RowBlock(torch.stack(rows, dim=1) if rows else source.new_empty(len(source), 0, size))


def _linear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Use | None:
    source, weight, bias = _bind(("input", "weight", "bias"), (None, None, None), args, kwargs)
    return Use(
        source,
        lambda x, wrap: F.linear(x, wrap(weight), None if bias is None else wrap(bias)),
        _known((weight, _linear_weight(weight, False)), (bias, _linear_bias(bias))),
        fan_in=weight.shape[1],
    )


def _matmul(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Use | None:
    source, weight = args[:2]
    if kwargs or len(args) != 2 or not isinstance(weight, Tensor) or weight.ndim != 2 or source.ndim < 2:
        return None
    builders = _known((weight, _linear_weight(weight, True)))
    return Use(source, lambda x, wrap: x @ wrap(weight), builders, fan_in=weight.shape[0])


def _addmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Use | None:
    if kwargs or len(args) != 3:
        return None
    bias, source, weight = args
    if bias.ndim != 1:
        return None
    return Use(
        source,
        lambda x, wrap: torch.addmm(wrap(bias), x, wrap(weight)),
        _known((weight, _linear_weight(weight, True)), (bias, _linear_bias(bias))),
        fan_in=weight.shape[0],
    )


def _patches(source: Tensor, kernel: torch.Size, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """Return the patches of a convolution: (n, channels, *spatial) → (n, channels, kernel points, positions).

    In memory, inputs and positions are adjacent dimensions, so that sums over both are one matrix product.
    """
    d = len(kernel)
    stride, dilation = _per_dimension(stride, d), _per_dimension(dilation, d)
    if padding == "same":
        total = [dil * (k - 1) for dil, k in zip(dilation, kernel, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    elif padding == "valid":
        sides = [(0, 0)] * d
    else:
        sides = [(side, side) for side in _per_dimension(padding, d)]
    if any(side != (0, 0) for side in sides):
        source = F.pad(source, [side for pair in reversed(sides) for side in pair])
    reach = [dil * (k - 1) + 1 for dil, k in zip(dilation, kernel, strict=True)]
    steps = [(size - r) // s + 1 for size, r, s in zip(source.shape[2:], reach, stride, strict=True)]
    source = source.contiguous()
    strides = source.stride()
    windows = source.as_strided(
        (*source.shape[:2], *kernel, *steps),
        (
            *strides[:2],
            *(st * dil for st, dil in zip(strides[2:], dilation, strict=True)),
            *(st * s for st, s in zip(strides[2:], stride, strict=True)),
        ),
        source.storage_offset(),
    )
    inputs_inside = windows.movedim(0, 1 + d).reshape(source.shape[1], kernel.numel(), len(source), -1)
    return inputs_inside.movedim(2, 0)


def _per_dimension(value: Any, dimensions: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dimensions if len(values) == 1 else values


def _convolution(function: Callable[..., Tensor], spatial: int) -> Callable[..., Use | None]:
    def rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Use | None:
        source, weight, bias, stride, padding, dilation, groups = _bind(
            ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
            (None, None, None, 1, 0, 1, 1),
            args,
            kwargs,
        )
        if source.ndim != spatial + 2:
            return None

        def grouped(gradient: Tensor, parts: int) -> Tensor:
            """Reshape (n, M, O, *spatial) → (n, G, O/G, positions); M inputs of the call belong to one input x."""
            n, inner, outputs = gradient.shape[:3]
            if inner > 1:
                gradient = gradient.flatten(3).transpose(1, 2)
            return gradient.reshape(n, parts, outputs // parts, -1)

        @lru_cache(maxsize=1)
        def seen(x: Tensor) -> Tensor:
            """Return the inputs a (n, G, I, T), computed once for all rows."""
            n, inner = x.shape[:2]
            a = _patches(x.flatten(0, 1), weight.shape[2:], stride, padding, dilation)
            a = a.unflatten(0, (n, inner)).permute(0, 2, 3, 1, 4).flatten(3)  # (n, channels, kernel, positions)
            return a.unflatten(1, (groups, -1)).flatten(2, 3)

        def build_weight(x: Tensor, gradients: Gradients) -> Block:
            g = tuple(grouped(gradient, groups) for gradient in gradients)
            return _outer(seen(x), g, len(weight) // groups)

        def build_bias(x: Tensor, gradients: Gradients) -> Block:
            return _bias(x, tuple(grouped(gradient, 1) for gradient in gradients), len(weight))

        return Use(
            source,
            lambda x, wrap: function(
                x, wrap(weight), None if bias is None else wrap(bias), stride, padding, dilation, groups
            ),
            _known((weight, build_weight), (bias, build_bias)),
            kernel_points=weight.shape[2:].numel(),
            fan_in=weight.shape[1:].numel(),
        )

    return rule


def _embedding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Use | None:
    source, weight, padding_idx, max_norm, _, by_frequency, sparse = _bind(
        ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
        (None, None, None, None, 2.0, False, False),
        args,
        kwargs,
    )
    if max_norm is not None or by_frequency or sparse:
        return None

    def build(x: Tensor, gradients: Gradients) -> Block:
        indices, g = x.flatten(1), _stacked(gradients, x, weight.shape[1]).flatten(2, -2)
        if padding_idx is not None:
            padding = padding_idx % len(weight)
            g = g * (indices != padding)[:, None, :, None]
        return EmbeddingBlock(indices, g, len(weight))

    return Use(source, lambda x, wrap: F.embedding(x, wrap(weight), padding_idx), _known((weight, build)))


def _norm(function: Callable[..., Tensor], trailing: bool) -> Callable[..., Use | None]:
    """Return the rule for a layer, RMS, group, instance or batch norm: y = γ x̂ + β.

    x̂ is the result of the same call without scale and shift.
    """

    def rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Use | None:
        signature = _NORM_ARGUMENTS[function]
        values = dict(zip(signature, args, strict=False)) | kwargs
        if values.get("training") or values.get("use_input_stats") is False:
            return None
        weight, bias, source = values.get("weight"), values.get("bias"), values["input"]
        keep = len(values["normalized_shape"]) if trailing else 0
        size = next((parameter.numel() for parameter in (weight, bias) if parameter is not None), 0)

        def reduce(g: Tensor) -> Tensor:
            """Sum (n, …) over all dimensions that the parameter does not have: (n, size)."""
            # Unless `trailing`, the channels come after the batch: (n, M, channels, *spatial).
            dims = tuple(range(1, g.ndim - keep)) if trailing else (1, *range(3, g.ndim))
            return (g.sum(dims) if dims else g).flatten(1)

        @lru_cache(maxsize=1)
        def normalised(x: Tensor) -> Tensor:
            """Return x̂, computed once for all rows."""
            plain = {**values, "input": x.flatten(0, 1), "weight": None}
            if "bias" in signature:
                plain["bias"] = None
            return function(**plain).unflatten(0, x.shape[:2])

        def build_scale(x: Tensor, gradients: Gradients) -> Block:
            return rows_of(x, tuple(reduce(g * normalised(x)) for g in gradients), size)

        def build_shift(x: Tensor, gradients: Gradients) -> Block:
            return rows_of(x, tuple(map(reduce, gradients)), size)

        def run(x: Tensor, wrap: Callable[[Tensor], Tensor]) -> Tensor:
            wrapped = {k: wrap(v) for k, v in (("weight", weight), ("bias", bias)) if v is not None}
            return function(**{**values, "input": x, **wrapped})

        return Use(source, run, _known((weight, build_scale), (bias, build_shift)))

    return rule


_NORM_ARGUMENTS: dict[Callable[..., Tensor], tuple[str, ...]] = {
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    F.batch_norm: (*("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),),
    F.instance_norm: (
        *("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    ),
}


def _elementwise(
    function: Callable[..., Tensor], coefficient: Callable[[int, Tensor], Tensor | float]
) -> Callable[..., Use | None]:
    """Return the rule for a broadcast sum or product, where ∂y/∂θ is `coefficient(position of θ, other operand)`."""

    def rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Use | None:
        if kwargs or len(args) != 2 or not all(isinstance(arg, Tensor) for arg in args):
            return None
        place = 0 if isinstance(args[0], torch.nn.Parameter) else 1
        parameter, other = args[place], args[1 - place]
        if isinstance(other, torch.nn.Parameter):
            return None
        if torch.broadcast_shapes(parameter.shape, other.shape) != other.shape:
            return None

        def reduce(gradient: Tensor) -> Tensor:
            aligned = (1,) * (gradient.ndim - 1 - parameter.ndim) + tuple(parameter.shape)
            dims = [1 + d for d, size in enumerate(aligned) if size == 1]
            return (gradient.sum(dims, keepdim=True) if dims else gradient).flatten(1)

        def build(x: Tensor, gradients: Gradients) -> Block:
            factor = coefficient(place, x)
            return rows_of(x, tuple(reduce(g * factor) for g in gradients), parameter.numel())

        def run(x: Tensor, wrap: Callable[[Tensor], Tensor]) -> Tensor:
            return function(wrap(parameter), x) if place == 0 else function(x, wrap(parameter))

        return Use(other, run, ((parameter, build),))

    return rule


_add = _elementwise(torch.add, lambda place, x: 1.0)
_sub = _elementwise(torch.sub, lambda place, x: 1.0 if place == 0 else -1.0)
_mul = _elementwise(torch.mul, lambda place, x: x)

RULES: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Use | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.addmm: _addmm,
    torch.conv1d: _convolution(torch.conv1d, 1),
    torch.conv2d: _convolution(torch.conv2d, 2),
    torch.conv3d: _convolution(torch.conv3d, 3),
    F.embedding: _embedding,
    F.layer_norm: _norm(F.layer_norm, trailing=True),
    F.rms_norm: _norm(F.rms_norm, trailing=True),
    F.group_norm: _norm(F.group_norm, trailing=False),
    F.batch_norm: _norm(F.batch_norm, trailing=False),
    F.instance_norm: _norm(F.instance_norm, trailing=False),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _add),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__), _sub),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _mul),
}


def _bind(
    names: tuple[str, ...], defaults: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Return the arguments of a call in the order of `names`, with defaults for missing ones."""
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name, default) for name, default in zip(names, defaults, strict=True)]


def _known(*pairs: tuple[Tensor | None, BlockBuilder]) -> tuple[tuple[Tensor, BlockBuilder], ...]:
    return tuple((parameter, build) for parameter, build in pairs if parameter is not None)
