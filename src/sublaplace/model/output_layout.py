"""Outputs at several positions of an input, such as the tokens of a sequence or the pixels of a picture.

The engine sees flat outputs (n, K). Those of a network with positions are flattened with the classes of a position next
to each other, K = L·C for L positions and C classes, and results get the network's own arrangement back.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from sublaplace.data.batches import num_inputs
from sublaplace.data.padding import present_positions


@dataclass(frozen=True)
class OutputLayout:
    """The arrangement of the outputs of one input."""

    shape: tuple[int, ...]  # as the network returns them, without the batch
    class_axis: int | None  # the axis of `shape` with the classes; None: every entry is an output of its own

    @classmethod
    def of(cls, shape: tuple[int, ...], class_dim: int | None) -> "OutputLayout":
        """Return the layout of outputs (n, …).

        Raises:
            ValueError: if `class_dim` is not one of their dimensions behind the batch.
        """
        if class_dim is None:
            return cls(tuple(shape[1:]), None)
        dim = class_dim if class_dim >= 0 else class_dim + len(shape)
        if not 1 <= dim < len(shape):
            raise ValueError(
                f"class_dim={class_dim} is out of range: the model returns outputs of shape {tuple(shape)}. Dimension "
                f"0 is the batch, so the classes are at one of 1 … {len(shape) - 1}."
            )
        return cls(tuple(shape[1:]), dim - 1)

    @property
    def num_outputs(self) -> int:
        """The number of outputs, K = L·C."""
        return prod(self.shape)

    @property
    def num_classes(self) -> int:
        """The number of outputs of a position, C; 1 if every entry is an output of its own."""
        return 1 if self.class_axis is None else self.shape[self.class_axis]

    @property
    def positions(self) -> tuple[int, ...]:
        """The shape of the positions, such as (T,) or (H, W); of all entries without an axis of classes."""
        if self.class_axis is None:
            return self.shape
        return self.shape[: self.class_axis] + self.shape[self.class_axis + 1 :]

    def with_classes(self, count: int) -> "OutputLayout":
        """Return the layout with another number of classes, as for chosen ones."""
        assert self.class_axis is not None
        before, behind = self.shape[: self.class_axis], self.shape[self.class_axis + 1 :]
        return replace(self, shape=(*before, count, *behind))

    def flat(self, outputs: Tensor) -> Tensor:
        """Return outputs (n, …) as the engine sees them: (n, K)."""
        return (outputs if self.class_axis is None else outputs.movedim(self.class_axis + 1, -1)).flatten(1)

    def arranged(self, flat: Tensor, dim: int = 1) -> Tensor:
        """Return flat outputs (n, K) in the network's arrangement, (n, …); K stands at dimension `dim`."""
        if self.class_axis is None:
            return flat.unflatten(dim, self.shape)
        split = flat.unflatten(dim, (*self.positions, self.num_classes))
        return split.movedim(dim + len(self.positions), dim + self.class_axis)

    def matrix(self, flat: Tensor) -> Tensor:
        """Return matrices over the outputs, (n, K, K), in the network's arrangement on both sides: (n, …, …)."""
        return self.arranged(self.arranged(flat, 2), 1)

    def map_of(self, values: Tensor) -> Tensor:
        """Return one number per position, (n·L,), as maps: (n, …), without the axis of classes."""
        return values.unflatten(0, (-1, *self.positions))

    def described(self) -> str:
        """Return the arrangement as text, for people."""
        places = " × ".join(f"{side:,}" for side in self.positions)
        return f"{places} outputs" if self.class_axis is None else f"{places} positions of {self.num_classes:,} classes"


class FlatOutputs:
    """A way to call the model that returns flat outputs (n, K), and remembers their arrangement.

    Outputs at padded positions are constants: they have no gradient, so that padding changes nothing.

    Args:
        forward: how the user calls it.
        class_dim: where the classes are; None: every entry is an output of its own.
    """

    def __init__(self, forward: Callable[[nn.Module, Any], Tensor], class_dim: int | None) -> None:
        self.forward, self.class_dim = forward, class_dim
        self.layout: OutputLayout | None = None  # in the last call; None: the outputs were flat

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return f(x); what is not of shape (n, …) stays as it is, for others to refuse."""
        outputs = self.forward(model, inputs)
        if not isinstance(outputs, Tensor) or outputs.ndim < 2 or len(outputs) != num_inputs(inputs):
            return outputs
        layout = OutputLayout.of(tuple(outputs.shape), self.class_dim)
        self.layout = None if outputs.ndim == 2 else layout
        return outputs if self.layout is None else _constant_in_padding(layout.flat(outputs), inputs, layout)


def _constant_in_padding(flat: Tensor, inputs: Any, layout: OutputLayout) -> Tensor:
    """Return outputs (n, K), without gradients at the positions that are padding, as far as is known."""
    present = present_positions(inputs)
    if present is None or layout.positions[:1] != present.shape[1:]:
        return flat
    each = present.repeat_interleave(layout.num_outputs // present.shape[1], dim=1)
    return torch.where(each, flat, flat.detach())
