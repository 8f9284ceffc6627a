"""The result of probing a network: the batch dimension of each call, and the parameters that need the general path."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sublaplace.jacobians.capture import Call
from sublaplace.jacobians.wanted import ROWS, Wanted

Signature = tuple[tuple[str, tuple[str, ...]], ...]
"""The calls of a forward pass in order, each as (function, names of its parameters)."""


@dataclass(frozen=True)
class BatchAxis:
    """The position of the batch in a call's output: dimension `dim` holds n·`inner` entries.

    Entry i·inner + t belongs to input i; with `position_major`, entry t·n + i does.
    """

    dim: int
    inner: int
    position_major: bool

    def in_front(self, tensor: Tensor, n: int) -> Tensor:
        """Return a view with the batch dimension first: (…, n·inner, …) → (n, …, inner, …)."""
        if self.position_major:
            return tensor.unflatten(self.dim, (-1, n)).movedim(self.dim + 1, 0)
        return tensor.unflatten(self.dim, (n, -1)).movedim(self.dim, 0)


@dataclass(frozen=True)
class Sizes:
    """The size of the work for one input, from the first call with a wanted parameter to the outputs."""

    gradients: int  # entries of the outputs of the wanted calls: per direction
    inputs: int  # entries of the inputs of the wanted calls
    activations: int  # entries of the outputs of all these calls
    forward: int  # multiplications of these calls
    backward: int  # multiplications of a backward pass to the first of them


@dataclass(frozen=True)
class CallSize:
    """The size of one call, summed over the inputs of a batch."""

    names: tuple[str, ...]
    outputs: int
    inputs: int
    multiplications: int


@dataclass
class Plan:
    """The result of probing one sequence of calls."""

    signature: Signature
    axes: list[BatchAxis | None]
    expand: frozenset[int]
    general: dict[str, str]  # parameter → why it needs the general path
    last_linear: tuple[str, ...]
    num_outputs: int  # C
    ends_linear: bool = False  # whether the last linear call's output is the network's output
    num_features: int | None = None  # F, of a last linear layer that uses its weight once
    general_batched: bool = True
    measured: tuple[CallSize, ...] = ()
    measured_inputs: int = 1  # of the batch that was measured
    forward_mode: bool | None = None  # whether forward-mode differentiation is right; None: not tried yet

    def measure(self, calls: list[Call], n: int) -> None:
        """Record the sizes of a batch of n inputs."""
        self.measured_inputs = n
        self.measured = tuple(
            CallSize(call.names, call.output_shape.numel(), call.input_elements, call.multiplications) for call in calls
        )

    def of_last_layer(self, wanted: Wanted) -> "Plan | None":
        """Return the plan of the last linear layer alone, if no other parameter is wanted; None if others are.

        The layer's output is then the network's, and the layer's rows follow from its inputs.
        """
        function_and_names, last = self.signature[-1:], frozenset(self.last_linear)
        alone = (
            wanted.names is not None
            and wanted.names <= last
            and self.ends_linear
            and self.num_features is not None
            and len(self.signature) - 1 not in self.expand
            and frozenset(function_and_names[0][1]) == last
            and last.isdisjoint(self.general)
        )
        return replace(self, signature=function_and_names, axes=self.axes[-1:]) if alone else None

    def sizes(self, wanted: Wanted = ROWS, without_last: bool = False) -> Sizes:
        """Return the size of the work for one input, with the last call or without it."""
        calls = self.measured[:-1] if without_last else self.measured
        chosen = [wanted.includes(call.names) for call in calls]
        first = chosen.index(True) if any(chosen) else len(chosen)
        used, behind = [c for c, w in zip(calls, chosen, strict=True) if w], calls[first:]

        def per_input(total: int) -> int:
            return -(-total // self.measured_inputs)

        return Sizes(
            gradients=per_input(sum(call.outputs for call in used)),
            inputs=per_input(sum(call.inputs for call in used)),
            activations=per_input(sum(call.outputs for call in behind)),
            forward=per_input(sum(call.multiplications for call in behind)),
            backward=per_input(sum(call.multiplications for call in behind[1:])),
        )


def signature(calls: list[Call]) -> Signature:
    """Return the signature of a forward pass."""
    return tuple((call.function, call.names) for call in calls)


def described(calls: list[Call]) -> str:
    """Return the calls as text, for messages."""
    return ", ".join(f"{call.function}({', '.join(call.names)})" for call in calls)


def first_difference(calls: list[Call], others: list[Call]) -> str:
    """Return where two sequences of calls first differ, as the subject of `depends_on_batch`."""
    for call, other in zip(calls, others, strict=False):
        if (call.function, call.names) != (other.function, other.names):
            return f"operations (first at {', '.join(call.names)})"
    return "operations"


def depends_on_batch(what: str) -> str:
    """Return the error message for a network whose outputs or operations (`what`) mix the inputs of a batch."""
    return (
        f"The {what} of an input depend on the other inputs of its batch, so there is no Jacobian per input. "
        "Common causes are batch statistics (a batch norm without running statistics, or dynamic quantisation), a "
        "layer that mixes inputs, and randomness that eval mode does not switch off."
    )


def batch_axis(three: Call, two: Call, tolerance: float) -> BatchAxis | None:
    """Return the batch axis of a call, from its outputs for three and for two inputs; None if there is none."""
    a, b = three.output, two.output
    assert a is not None and b is not None
    if a.ndim != b.ndim:
        return None
    dims = [d for d in range(a.ndim) if a.shape[d] != b.shape[d]]
    if len(dims) != 1 or a.shape[dims[0]] * 2 != b.shape[dims[0]] * 3:
        return None
    inner = a.shape[dims[0]] // 3
    atol = tolerance * float(a.abs().max())
    for position_major in (False, True):
        axis = BatchAxis(dims[0], inner, position_major)
        same = torch.allclose(axis.in_front(a, 3)[:2], axis.in_front(b, 2), rtol=tolerance, atol=atol)
        if same:
            return axis
    return None
