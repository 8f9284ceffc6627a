"""Which positions of a batch of sequences are data, and which are padding."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def present_positions(inputs: Any) -> Tensor | None:
    """Return which positions of each input are data rather than padding, (n, T); None if all are, as far as is known.

    Tokenizers put a mask of ones and zeros under "attention_mask": (n, T), or (n, choices, T) for multiple choice,
    whose positions are those of all choices. Those of an encoder and of a decoder may be equally many, and cannot be
    told apart: all of them count.
    """
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if (
        not isinstance(mask, Tensor)
        or mask.ndim not in (2, 3)
        or any(str(key).startswith("decoder_") for key in inputs)
    ):
        return None
    present = mask.flatten(1) != 0
    return None if present.all() else present
