"""Loaders of batches as users have them: checked, renamed and chained."""

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from sublaplace.data.batches import batches, num_inputs


def checked_loader(loader: Any, name: str = "fit", once: bool = False) -> Iterable[Any]:
    """Return the loader if it can be read as often as needed.

    Args:
        loader: what the user passed.
        name: the method that was called, for the message.
        once: the data are read once only.

    Raises:
        TypeError: if it is no iterable of batches.
        ValueError: if it is a one-shot iterator.
    """
    if isinstance(loader, Tensor) or (isinstance(loader, Dataset) and not isinstance(loader, DataLoader)):
        raise TypeError(
            f"{name} needs a loader of (inputs, targets) batches, not a {type(loader).__name__}; "
            "wrap the data in torch.utils.data.DataLoader."
        )
    if not isinstance(loader, Iterable):
        raise TypeError(f"{name} needs an iterable of (inputs, targets) batches, not {type(loader).__name__}.")
    if isinstance(loader, tuple) and len(loader) == 2 and all(isinstance(part, Tensor) for part in loader):
        raise ValueError(f"{name} needs a loader of batches, not one batch; give [(inputs, targets)].")
    if not once and iter(loader) is loader:
        raise ValueError(one_shot(""))
    return loader


def one_shot(evidence: str) -> str:
    """Say that a loader cannot be read again, and what to use instead."""
    return (
        f"The loader is a one-shot iterator, but the data is read several times. {f'{evidence} ' if evidence else ''}"
        "Give a DataLoader of a data set or a list of (inputs, targets) batches."
    )


_PROBED = 8  # items that tell whether two readings, or two loaders, agree


def probed(loader: Any) -> Any:
    """Return a few of the data, for comparison: all of a tensor or mapping, items spread over a data set, or batches.

    A map-style data set is read directly, without starting the workers of its loader.
    """
    data = as_given(loader)
    if isinstance(data, Tensor | Mapping):
        return data
    if isinstance(data, DataLoader) and has_items(data):
        items = [data.dataset[index] for index in _spread(len(data.dataset))]  # type: ignore[arg-type]
        return [data.collate_fn([item]) for item in items]
    if isinstance(data, list | tuple):
        return [data[index] for index in _spread(len(data))]
    return next(iter(data), None)


def _spread(count: int) -> list[int]:
    """Return a few positions among `count`, the first and the last among them."""
    return sorted({count * k // _PROBED for k in range(_PROBED)} | {count - 1}) if count else []


_INTEGER_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def has_items(loader: Iterable[Any]) -> bool:
    """Tell whether a loader's data set can be read item by item, at 0 … n − 1; a user's own sampler may have keys."""
    data = as_given(loader)
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return False
    if type(data.batch_sampler) is not BatchSampler or not isinstance(data.batch_sampler.sampler, _INTEGER_SAMPLERS):
        return False
    return hasattr(data.dataset, "__getitem__") and isinstance(data.dataset, Sized)


def other_data(evidence: str) -> str:
    """Say that a loader gives other data when it is read again."""
    return (
        f"The data are read several times, and the loader must give the same every time. {evidence} Give a DataLoader "
        "of a fixed data set or a list of batches."
    )


def shuffles(loader: Iterable[Any]) -> bool:
    """Tell whether the user's loader draws its order at random, as far as its sampler shows."""
    loader = as_given(loader)
    sampler = getattr(loader, "sampler", None) if isinstance(loader, DataLoader) else None
    return isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)


def as_given(loader: Iterable[Any]) -> Iterable[Any]:
    """Return the user's own loader, without our wrapper around it."""
    return loader.loader if isinstance(loader, Renamed) else loader


def with_labels_under(labels_key: str, data: Any) -> Any:
    """Return a batch or a loader whose mappings hold their targets under "labels" instead of `labels_key`.

    Another entry named "labels" is left out. Tensors and tuples stay as they are.
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
    """A loader of mappings whose targets are under another key than "labels"; may be read repeatedly."""

    def __init__(self, loader: Iterable[Any], labels_key: str) -> None:
        self.loader, self._labels_key = loader, labels_key

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield _renamed(batch, self._labels_key)

    def of(self, loader: Iterable[Any]) -> "Renamed":
        """Return the same view of another loader."""
        return Renamed(loader, self._labels_key)


def num_data(loader: Iterable[Any]) -> int:
    """Return how many inputs a loader gives, from its sampler where it has one, otherwise by reading all batches."""
    data = as_given(loader)
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset) and data.batch_size is not None:
        count = len(data.sampler)  # type: ignore[arg-type]
        return count - count % data.batch_size if data.drop_last else count
    return sum(num_inputs(batch.inputs) for batch in batches(loader))


class Chained:
    """Several loaders as one, which may be read repeatedly."""

    def __init__(self, loaders: tuple[Iterable[Any], ...]) -> None:
        self.loaders = loaders

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            yield from loader
