"""The result of probing a network: the batch dimension of each call, and the parameters that need the general path."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sublaplace.jacobians.capture import Call

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


@dataclass
class Plan:
    """The result of probing one sequence of calls."""

    signature: Signature
    axes: list[BatchAxis | None]
    expand: frozenset[int]
    general: dict[str, str]  # parameter → why it needs the general path
    last_linear: tuple[str, ...]
    num_outputs: int  # C
    general_batched: bool = True
    gradient_elements: int = 0  # per input and direction
    input_elements: int = 0  # per input
    multiplications: int = 0  # of one forward pass, per input
    forward_mode: bool | None = None  # whether forward-mode differentiation is right; None: not tried yet

    def measure(self, calls: list[Call], n: int) -> None:
        """Record the memory that one input of this batch needs."""
        self.gradient_elements = -(-sum(call.output_shape.numel() for call in calls) // n)
        self.input_elements = -(-sum(call.input_elements for call in calls) // n)
        self.multiplications = -(-sum(call.multiplications for call in calls) // n)


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
        "Common causes are batch statistics (a batch norm without running statistics), a layer that mixes inputs, and "
        "randomness that eval mode does not switch off."
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
