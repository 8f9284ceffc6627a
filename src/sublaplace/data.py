"""Data as the user has it: loaders of batches, checked, and the inputs X′ drawn from them."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

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


class Batch(NamedTuple):
    """Some training data."""

    inputs: Any
    targets: Tensor
    weights: Tensor | None = None  # how often each input counts: (n,); None: once


def batches(loader: Iterable[Any]) -> Iterator[Batch]:
    """Every batch that holds any inputs."""
    for batch in loader:
        parts = split_batch(batch)
        if num_inputs(parts.inputs):
            yield parts


def split_batch(batch: Any) -> Batch:
    """A pair or triple (inputs, targets[, weights]), or a mapping with "labels" and perhaps "sample_weight"."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise ValueError(
                f"A batch that is a mapping needs the key 'labels'; it has {sorted(batch)}. Where the labels have "
                "another name, say so with SubspaceLaplace(…, labels_key=…)."
            )
        inputs = {key: value for key, value in batch.items() if key not in ("labels", "sample_weight")}
        return Batch(inputs, batch["labels"], _checked_weights(batch.get("sample_weight"), inputs))
    if isinstance(batch, tuple | list) and len(batch) in (2, 3) and isinstance(batch[1], Tensor):
        return Batch(batch[0], batch[1], _checked_weights(batch[2] if len(batch) == 3 else None, batch[0]))
    raise ValueError(
        "A batch must be a pair (inputs, targets), a triple (inputs, targets, weights) or a mapping with the key "
        "'labels'. Several inputs of one model: ((input, input, …), targets)."
    )


def _checked_weights(weights: Any, inputs: Any) -> Tensor | None:
    if weights is None:
        return None
    n = num_inputs(inputs)
    # Integers would be weights as well, but a third entry of integers is far more often an index or another label.
    if not isinstance(weights, Tensor) or weights.shape != (n,) or not weights.is_floating_point():
        found = f"{tuple(weights.shape)}, {weights.dtype}" if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(
            f"The third part of a batch (inputs, targets, weights) must be floating-point sample weights of shape "
            f"({n},), one for each input; it is {found}. Without weights give pairs (inputs, targets)."
        )
    if not torch.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("Sample weights must be finite and not negative.")
    return weights


def input_batches(inputs: Any) -> Iterator[Any]:
    """The inputs of a tensor or mapping (one batch), or of a loader; without their targets, if there are any."""
    if isinstance(inputs, Tensor):
        yield inputs
        return
    if not isinstance(inputs, Iterable) or isinstance(inputs, str) or hasattr(inputs, "__array__"):
        raise TypeError(
            "Inputs must be a tensor with the batch as its first dimension, a mapping or a loader of batches, not "
            f"{type(inputs).__name__}; torch.as_tensor makes a tensor of an array."
        )
    for batch in [inputs] if isinstance(inputs, Mapping) else inputs:
        labelled = "labels" in batch if isinstance(batch, Mapping) else _is_pair_or_weighted(batch)
        yield split_batch(batch).inputs if labelled else batch


def _is_pair_or_weighted(batch: Any) -> bool:
    """Whether a batch to be predicted comes with targets; a longer tuple holds several inputs of one model."""
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        return False
    return len(batch) == 2 or (isinstance(batch[2], Tensor) and batch[2].ndim == 1 and batch[2].is_floating_point())


def batch_at(loader: Iterable[Any], positions: list[int]) -> Batch:
    """The inputs at these places of the stream of all inputs, in the order given, with their targets and weights."""
    found: dict[int, Batch] = {}
    wanted, start = set(positions), 0
    for batch in batches(loader):
        stop = start + num_inputs(batch.inputs)
        for position in wanted.intersection(range(start, stop)):
            one = slice(position - start, position - start + 1)
            weight = torch.ones(1) if batch.weights is None else batch.weights[one]
            found[position] = Batch(select(batch.inputs, one), batch.targets[one], weight)
        start = stop
    inputs, targets, weights = zip(*(found[position] for position in positions), strict=True)
    return Batch(join(list(inputs)), torch.cat(targets), torch.cat(weights))


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


def with_labels_under(labels_key: str, data: Any) -> Any:
    """A batch or a loader whose mappings hold their targets under `labels_key`, as one that has them under "labels".

    What a mapping holds under "labels" besides is left out; tensors and tuples stay as they are.
    """
    if labels_key == "labels" or isinstance(data, Tensor):
        return data
    return _renamed(data, labels_key) if isinstance(data, Mapping) else Renamed(data, labels_key)


def _renamed(batch: Any, labels_key: str) -> Any:
    if not isinstance(batch, Mapping):
        return batch
    renamed = {key: value for key, value in batch.items() if key not in (labels_key, "labels")}
    return renamed | {"labels": batch[labels_key]} if labels_key in batch else renamed


class Renamed:
    """A loader of mappings whose targets are under another key than "labels"; may be run through repeatedly."""

    def __init__(self, loader: Iterable[Any], labels_key: str) -> None:
        self.loader, self._labels_key = loader, labels_key

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield _renamed(batch, self._labels_key)

    def of(self, loader: Iterable[Any]) -> "Renamed":
        """The same for another loader."""
        return Renamed(loader, self._labels_key)


class Chained:
    """Several loaders as one, which may be run through repeatedly."""

    def __init__(self, loaders: tuple[Iterable[Any], ...]) -> None:
        self.loaders = loaders

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            yield from loader


class Reservoir:
    """A uniform draw of `size` inputs from a stream of unknown length: those with the smallest random keys.

    Memory: `size` inputs and one batch.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._generator = torch.Generator().manual_seed(seed)
        self._keys = torch.empty(0, dtype=torch.float64)
        self._positions = torch.empty(0, dtype=torch.long)
        self._seen = 0
        self._inputs: Any = None
        self._counts = torch.empty(0)

    def add(self, inputs: Any, position: int, counts: Tensor | None = None) -> None:
        """Draws from more inputs, which stand at `position` of the stream; only from those that count, if it is given
        how much each of their targets does, (n, 1) or (n, C). The keys of inputs that others have seen are drawn too,
        so that they do not matter."""
        n = num_inputs(inputs)
        torch.rand(position - self._seen, generator=self._generator, dtype=torch.float64)
        self._seen = position
        keys = torch.rand(n, generator=self._generator, dtype=torch.float64)
        candidates = keys < (self._keys.max() if len(self._keys) == self._size else torch.inf)
        if counts is None:
            counts = torch.ones(n, 1)
        counts = counts.detach().cpu()
        candidates &= counts.amax(1) > 0
        chosen = torch.nonzero(candidates).squeeze(1)
        positions = self._seen + chosen
        self._seen += n
        if not len(chosen):
            return
        keys, inputs = torch.cat([self._keys, keys[chosen]]), select(inputs, chosen)
        joined = inputs if self._inputs is None else join([self._inputs, inputs])
        counts = counts[chosen] if self._inputs is None else _below([self._counts, counts[chosen]])
        best = torch.argsort(keys)[: self._size]
        self._keys, self._inputs, self._counts = keys[best], select(joined, best), counts[best]
        self._positions = torch.cat([self._positions, positions])[best]

    def joined(self, others: list["Reservoir"]) -> "Reservoir":
        """The draw from the inputs of several streams, which have seen different places of one."""
        result = copy.copy(self)
        filled = [other for other in others if other._inputs is not None]
        keys = torch.cat([other._keys for other in filled])
        best = torch.argsort(keys)[: self._size]
        result._keys = keys[best]
        result._positions = torch.cat([other._positions for other in filled])[best]
        result._inputs = select(join([other._inputs for other in filled]), best)
        result._counts = _below([other._counts for other in filled])[best]
        return result

    @property
    def inputs(self) -> Any:
        return self._inputs

    @property
    def counts(self) -> Tensor:
        """How much each target of the drawn inputs counts in the data: (size, 1) or (size, C)."""
        return self._counts

    @property
    def positions(self) -> list[int]:
        """Where the drawn inputs stand in the stream."""
        return [int(position) for position in self._positions]


def _below(counts: list[Tensor]) -> Tensor:
    """Counts of inputs (n, 1) and of single targets (n, C) as one matrix."""
    width = max(part.shape[1] for part in counts)
    return torch.cat([part.expand(-1, width) for part in counts])
