"""How a model is called with a batch of inputs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def call_model(model: nn.Module, inputs: Any) -> Tensor:
    """f(x) for a tensor, a tuple of arguments or a mapping of keywords; takes ``.logits`` of a result that has them."""
    if isinstance(inputs, Mapping):
        result = model(**inputs)
    elif isinstance(inputs, tuple | list):
        result = model(*inputs)
    else:
        result = model(inputs)
    return result.logits if hasattr(result, "logits") else result
