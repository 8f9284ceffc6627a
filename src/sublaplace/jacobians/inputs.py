"""Batches of inputs of any nesting, and how a model is called with them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map


def call_model(model: nn.Module, inputs: Any) -> Tensor:
    """f(x) for a tensor, a tuple of arguments or a mapping of keywords; takes ``.logits`` of a result that has them."""
    if isinstance(inputs, Mapping):
        result = model(**inputs)
    elif isinstance(inputs, tuple | list):
        result = model(*inputs)
    else:
        result = model(inputs)
    return result.logits if hasattr(result, "logits") else result


def num_inputs(inputs: Any) -> int:
    """The batch size: the length of the first tensor."""
    tensors = [leaf for leaf in tree_flatten(plain(inputs))[0] if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors:
        raise ValueError("A batch of inputs must hold at least one tensor with the batch as its first dimension.")
    return len(tensors[0])


def select(inputs: Any, indices: Any) -> Any:
    """The inputs at `indices`, for a tensor or any nesting of tensors."""
    n = num_inputs(inputs)
    return tree_map(
        lambda leaf: leaf[indices] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == n else leaf,
        plain(inputs),
    )


def plain(inputs: Any) -> Any:
    """Mappings of foreign types (a tokenizer's batch) as dicts, which tree functions understand."""
    return dict(inputs) if isinstance(inputs, Mapping) and not isinstance(inputs, dict) else inputs
