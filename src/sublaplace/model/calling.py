"""Call a model with a batch of inputs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def call_model(model: nn.Module, inputs: Any) -> Tensor:
    """Return f(x) for a tensor, a tuple of arguments or a mapping of keyword arguments.

    If the result has the attribute ``logits``, as the outputs of Hugging Face models do, return that attribute.
    """
    if isinstance(inputs, Mapping):
        result = model(**inputs)
    elif isinstance(inputs, tuple | list):
        result = model(*inputs)
    else:
        result = model(inputs)
    return result.logits if hasattr(result, "logits") else result
