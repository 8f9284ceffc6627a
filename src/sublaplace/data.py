"""Data as the user has it: loaders of batches, checked, and the inputs X′ drawn from them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from sublaplace.jacobians.inputs import num_inputs, select


def checked_loader(loader: Any) -> Iterable[Any]:
    """The loader itself, if it can be run through several times; a clear error otherwise."""
    if isinstance(loader, Tensor) or (isinstance(loader, Dataset) and not isinstance(loader, DataLoader)):
        raise TypeError(
            f"fit needs a loader of (inputs, targets) batches, not a {type(loader).__name__}; "
            "wrap the data in torch.utils.data.DataLoader."
        )
    if not isinstance(loader, Iterable):
        raise TypeError(f"fit needs an iterable of (inputs, targets) batches, not {type(loader).__name__}.")
    if iter(loader) is loader:
        raise ValueError(one_shot(""))
    return loader


def one_shot(evidence: str) -> str:
    return (
        f"The loader is a one-shot iterator, but the data is read several times. {evidence} "
        "Give a DataLoader of a data set or a list of (inputs, targets) batches."
    )


def batches(loader: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
    """(inputs, targets) of every batch that holds any."""
    for batch in loader:
        inputs, targets = split_batch(batch)
        if num_inputs(inputs):
            yield inputs, targets


def split_batch(batch: Any) -> tuple[Any, Tensor]:
    """(inputs, targets) of a batch: a pair, or a mapping with its targets under "labels"."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise ValueError(f"A batch that is a mapping needs the key 'labels'; it has {sorted(batch)}.")
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    raise ValueError("A batch must be a pair (inputs, targets) or a mapping with the key 'labels'.")


def input_batches(inputs: Any) -> Iterator[Any]:
    """The inputs of a tensor or mapping (one batch), or of a loader with or without targets."""
    if isinstance(inputs, Tensor | Mapping):
        yield inputs
        return
    for batch in inputs:
        paired = isinstance(batch, tuple | list) and len(batch) == 2
        labelled = isinstance(batch, Mapping) and "labels" in batch
        yield split_batch(batch)[0] if paired or labelled else batch


def join(batches: list[Any]) -> Any:
    """Batches of inputs as one; they must agree in all but their length."""
    if len(batches) == 1:
        return batches[0]
    try:
        return tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *batches)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            "Inputs of different shapes cannot be put into one batch; pad them to one shape or give "
            "subspace_inputs yourself."
        ) from error


class Reservoir:
    """A uniform draw of `size` inputs from a stream of unknown length: those with the smallest random keys.

    Memory: `size` inputs and one batch.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._generator = torch.Generator().manual_seed(seed)
        self._keys = torch.empty(0, dtype=torch.float64)
        self._inputs: Any = None

    def add(self, inputs: Any) -> None:
        keys = torch.rand(num_inputs(inputs), generator=self._generator, dtype=torch.float64)
        if len(self._keys) == self._size:
            better = torch.nonzero(keys < self._keys.max()).squeeze(1)
            if not len(better):
                return
            keys, inputs = keys[better], select(inputs, better)
        keys = torch.cat([self._keys, keys])
        joined = inputs if self._inputs is None else join([self._inputs, inputs])
        chosen = torch.argsort(keys)[: self._size]
        self._keys, self._inputs = keys[chosen], select(joined, chosen)

    @property
    def inputs(self) -> Any:
        return self._inputs
