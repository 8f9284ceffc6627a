"""Batches in the forms that users have them: split, checked, joined and indexed."""

from bisect import bisect
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


class Batch(NamedTuple):
    """A batch of training data."""

    inputs: Any
    targets: Tensor
    weights: Tensor | None = None  # how often each input counts, (n,), or each of its positions; None: once each


def batches(loader: Iterable[Any]) -> Iterator[Batch]:
    """Yield every batch that is not empty, split into inputs, targets and weights.

    Raises:
        ValueError: if a batch does not hold one target per input.
    """
    for _, batch in batches_at_places((0, batch) for batch in loader):
        yield batch


def batches_at_places(placed: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Batch]]:
    """Yield what `batches` yields, each with its place in the data."""
    for place, batch in placed:
        parts = split_batch(batch)
        count = num_inputs(parts.inputs)
        if len(parts.targets) != count:
            raise ValueError(f"{len(parts.targets)} targets were given for {count} inputs.")
        if count:
            yield place, parts


def split_batch(batch: Any) -> Batch:
    """Split a batch into inputs, targets and weights.

    Args:
        batch: a pair (inputs, targets), a triple (inputs, targets, weights), or a mapping with the key "labels" and
            optionally "sample_weight". Weights are one per input, or have the shape of the targets.

    Raises:
        ValueError: if the batch has another form, or the weights are not valid.
    """
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise ValueError(
                f"A batch that is a mapping needs the key 'labels'; it has {sorted(batch)}. If the labels have "
                "another key, pass SubspaceLaplace(…, labels_key=…)."
            )
        inputs = {key: value for key, value in batch.items() if key not in ("labels", "sample_weight")}
        return Batch(inputs, batch["labels"], _checked_weights(batch.get("sample_weight"), inputs, batch["labels"]))
    if isinstance(batch, tuple | list) and len(batch) in (2, 3) and _is_array(batch[1]):
        batch = tree_map(lambda leaf: torch.as_tensor(leaf) if _is_array(leaf) else leaf, tuple(batch))
    if isinstance(batch, tuple | list) and len(batch) in (2, 3) and isinstance(batch[1], Tensor):
        return Batch(batch[0], batch[1], _checked_weights(batch[2] if len(batch) == 3 else None, batch[0], batch[1]))
    if isinstance(batch, tuple | list) and len(batch) in (2, 3):
        raise ValueError(
            f"The targets of a batch must be a tensor or an array, not {type(batch[1]).__name__}; convert them with "
            "torch.as_tensor."
        )
    raise ValueError(
        "A batch must be a pair (inputs, targets), a triple (inputs, targets, weights) or a mapping with the key "
        "'labels'. For a model with several inputs, use ((input, input, …), targets)."
    )


def _is_array(value: Any) -> bool:
    """Return whether a value is an array, such as those of NumPy, that is no tensor."""
    return hasattr(value, "__array__") and not isinstance(value, Tensor)


def _checked_weights(weights: Any, inputs: Any, targets: Any) -> Tensor | None:
    """Return weights of the inputs, or of the positions of their targets; a mask of the positions as zeros and ones."""
    if weights is None:
        return None
    n = num_inputs(inputs)
    by_position = isinstance(weights, Tensor) and weights.ndim > 1 and weights.shape == getattr(targets, "shape", None)
    if by_position and weights.dtype == torch.bool:
        weights = weights.to(torch.get_default_dtype())
    # Integers could be weights too, but a third entry of integers is far more often an index or another label.
    if not isinstance(weights, Tensor) or not weights.is_floating_point() or not (by_position or weights.shape == (n,)):
        found = f"{tuple(weights.shape)}, {weights.dtype}" if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(
            "The third part of a batch (inputs, targets, weights) must be floating-point sample weights of shape "
            f"({n},), one per input; it is {found}. For outputs with positions it may be weights, or a mask, of the "
            "targets' shape. If there are no weights, use pairs (inputs, targets)."
        )
    if not torch.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("Sample weights must be finite and not negative.")
    return weights


def input_batches(inputs: Any) -> Iterator[Any]:
    """Yield batches of inputs, without their targets if they have any.

    Args:
        inputs: a tensor or mapping, which is one batch, or a loader of batches.

    Raises:
        TypeError: if `inputs` is none of these, such as a NumPy array.
    """
    if isinstance(inputs, Tensor):
        yield inputs
        return
    if not isinstance(inputs, Iterable) or isinstance(inputs, str) or hasattr(inputs, "__array__"):
        raise TypeError(
            "Inputs must be a tensor with the batch as its first dimension, a mapping or a loader of batches, not "
            f"{type(inputs).__name__}; torch.as_tensor converts an array to a tensor."
        )
    for batch in [inputs] if isinstance(inputs, Mapping) else inputs:
        labelled = "labels" in batch if isinstance(batch, Mapping) else _is_pair_or_weighted(batch)
        yield split_batch(batch).inputs if labelled else batch


def _is_pair_or_weighted(batch: Any) -> bool:
    """Return whether a batch holds targets; a longer tuple holds the arguments of a model with several inputs."""
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        return False
    return len(batch) == 2 or (isinstance(batch[2], Tensor) and batch[2].ndim == 1 and batch[2].is_floating_point())


class Ragged(NamedTuple):
    """Inputs, or batches of training data, of different shapes: parts of one shape each, in order.

    Data collators pad every batch to its own longest sequence, so inputs of several batches have no common shape.
    """

    parts: tuple[Any, ...]


def parts_of(inputs: Any) -> tuple[Any, ...]:
    """Return the parts of one shape each, in order; of inputs that are not ragged, all of them."""
    return inputs.parts if isinstance(inputs, Ragged) else (inputs,)


def join(batches: list[Any]) -> Any:
    """Concatenate batches of inputs, or of training data; those of different shapes become `Ragged`."""
    parts = [plain(part) for batch in batches for part in parts_of(batch)]
    joined = tuple(_concatenated(list(run)) for _, run in groupby(parts, form))
    return joined[0] if len(joined) == 1 else Ragged(joined)


def _concatenated(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *parts)


def by_form(inputs: Any) -> Any:
    """Return the inputs in another order, in which those of one shape stand next to each other."""
    groups: dict[Hashable, list[Any]] = {}
    for part in parts_of(inputs):
        groups.setdefault(form(part), []).append(part)
    return join([part for group in groups.values() for part in group])


def form(inputs: Any) -> Hashable:
    """Return the structure of a batch, and the shape and type of its tensors without the batch dimension."""
    if isinstance(inputs, Tensor):
        return tuple(inputs.shape[1:]), inputs.dtype
    if isinstance(inputs, Mapping):
        return tuple((key, form(inputs[key])) for key in sorted(inputs, key=str))
    if isinstance(inputs, tuple | list):
        return tuple(form(item) for item in inputs)
    return None


def num_inputs(inputs: Any) -> int:
    """Return the batch size, which is the length of the first tensor."""
    if isinstance(inputs, Ragged):
        return sum(map(num_inputs, inputs.parts))
    tensors = [leaf for leaf in tree_flatten(plain(inputs))[0] if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors:
        raise ValueError("A batch of inputs must hold at least one tensor with the batch as its first dimension.")
    return len(tensors[0])


def select(inputs: Any, indices: Any) -> Any:
    """Return the inputs at `indices`, for a tensor or any nesting of tensors."""
    n = num_inputs(inputs)
    if isinstance(inputs, Ragged):
        places = torch.arange(n, device="cpu")[indices.cpu() if isinstance(indices, Tensor) else indices]
        return join(list(_at_places(inputs, places.tolist())) or [select(inputs.parts[0], slice(0, 0))])
    return tree_map(
        lambda leaf: leaf[indices] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == n else leaf,
        plain(inputs),
    )


def _at_places(inputs: Ragged, places: list[int]) -> Iterator[Any]:
    """Yield the inputs at `places`, as many at once as follow one another from the same part."""
    starts = [0, *accumulate(map(num_inputs, inputs.parts))]
    for number, run in groupby(places, lambda place: bisect(starts, place) - 1):
        yield select(inputs.parts[number], torch.tensor([place - starts[number] for place in run], device="cpu"))


def plain(inputs: Any) -> Any:
    """Convert a mapping of another type, such as a tokenizer's batch, to a dict, which pytree functions accept."""
    return dict(inputs) if isinstance(inputs, Mapping) and not isinstance(inputs, dict) else inputs
