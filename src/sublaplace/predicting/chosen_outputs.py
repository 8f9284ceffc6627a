"""Which outputs a prediction is asked for."""

from typing import Any

import torch
from torch import Tensor

from sublaplace.data.batches import num_inputs
from sublaplace.jacobians.forward import ChosenOutputs
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.output_layout import OutputLayout


def checked_outputs(outputs: Any, num_outputs: int, layout: OutputLayout | None) -> Tensor:
    """Return indices of outputs, (k,) or (n, k), or with positions of classes, (k,) or (n, L, k), on the CPU.

    Raises:
        ValueError: if they have another shape, or lie outside of the network's outputs.
    """
    if layout is None or layout.class_axis is None:
        return _checked_indices(outputs, num_outputs)
    given = torch.as_tensor(outputs, device="cpu")
    if given.ndim == 1:
        return _checked_indices(given, layout.num_classes)
    if given.ndim != len(layout.shape) + 1:
        raise ValueError(
            f"outputs must hold classes of shape (k,), or have the shape of the outputs with k classes; it has "
            f"shape {tuple(given.shape)}."
        )
    by_position = given.movedim(layout.class_axis + 1, -1).flatten(1, -2)
    return _checked_indices(by_position.flatten(0, 1), layout.num_classes).view(by_position.shape)


def _checked_indices(outputs: Any, num_outputs: int) -> Tensor:
    """Return indices of outputs, (k,) or (n, k), on the CPU, or raise an error that says what is wrong."""
    chosen = torch.as_tensor(outputs, device="cpu")
    if chosen.ndim not in (1, 2) or not chosen.numel() or chosen.is_floating_point() or chosen.dtype == torch.bool:
        raise ValueError(
            f"outputs must hold indices of shape (k,), or (n, k) with one row per input; it is {chosen.dtype} of shape "
            f"{tuple(chosen.shape)}."
        )
    if int(chosen.min()) < 0 or int(chosen.max()) >= num_outputs:
        low, high = int(chosen.min()), int(chosen.max())
        raise ValueError(f"outputs must lie in 0 … {num_outputs - 1}, but they range from {low} to {high}.")
    return chosen.long()


def chosen_rows(chosen: Tensor, start: int, inputs: Any, linearization: Linearization) -> ChosenOutputs:
    """Return the chosen outputs of some inputs, the first of which stands at place `start` of all."""
    count = num_inputs(inputs)
    if chosen.ndim > 1 and len(chosen) < start + count:
        raise ValueError(f"outputs has {len(chosen)} rows, but there are more inputs; give one row per input.")
    own = chosen.expand(count, -1) if chosen.ndim == 1 else chosen[start : start + count]
    total = linearization.num_outputs(inputs)
    layout = linearization.output_layout
    if layout is not None and layout.class_axis is not None:
        C, L = layout.num_classes, total // layout.num_classes
        if own.ndim == 3 and own.shape[1] != L:
            raise ValueError(f"outputs has {own.shape[1]} positions, but the network's outputs have {L}.")
        own = own[:, None].expand(-1, L, -1) if own.ndim == 2 else own
        own = (own + C * torch.arange(L, device="cpu")[:, None]).flatten(1)
    return ChosenOutputs(own.to(linearization.device))
