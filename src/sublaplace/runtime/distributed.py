"""Distributed fits (torchrun): each of k processes reads every k-th batch, and sums over the data are all-reduced.

Every process gets the same loader and ends with the same posterior. It equals the posterior of a single process up to
the rounding of sums in another order. Computations that do not grow with the data (X′, P, all s × s algebra) are
replicated on every process.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as group
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

from sublaplace.data.batches import num_inputs, split_batch
from sublaplace.data.loaders import Chained, Renamed, as_given, shuffles
from sublaplace.runtime.checkpoint import Sums

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the size of its process group; rank 0 of 1 without a group."""

    rank: int
    size: int

    @classmethod
    def current(cls) -> "Ranks":
        """Return the ranks of the default process group."""
        if group.is_available() and group.is_initialized():
            return cls(group.get_rank(), group.get_world_size())
        return cls(0, 1)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        gathered: list[Value | None] = [None] * self.size
        with self._together():
            group.all_gather_object(gathered, value)
        return gathered  # type: ignore[return-value]

    def add_up(self, sums: Sums) -> None:
        """Replace the sums on every rank by their total over all ranks. Communication: twice the size of the sums."""
        if self.size == 1:
            return
        own = sums.tensors()
        forms: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for known in self.gather({name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}):
            forms |= known
        device = self._device(own)
        total = {}
        for name, (shape, dtype) in sorted(forms.items()):
            # A rank has no sum for a parameter that none of its inputs used.
            tensor = own[name].contiguous() if name in own else torch.zeros(shape, dtype=dtype, device=device)
            with self._together():
                group.all_reduce(tensor)
            total[name] = tensor
        sums.restore(total)

    def joined_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks, concatenated in rank order."""
        return rows if self.size == 1 else torch.cat([part.to(rows) for part in self.gather(rows.cpu())])

    def same(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors of every rank with the tensors of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                with self._together():
                    group.broadcast(tensor, 0)

    def _device(self, tensors: dict[str, Tensor]) -> torch.device:
        first = next(iter(tensors.values()), None)
        return torch.device("cpu") if first is None else first.device

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {self.rank} of {self.size} cannot go on: another rank has stopped or does not respond. The "
                "output of the rank that stopped first shows the cause; restart all ranks."
            ) from error


class Share:
    """The batches of a loader that belong to one rank: every k-th batch, for k ranks.

    The batches of other ranks are not read if the loader is a DataLoader with a batch sampler.
    """

    def __init__(self, loader: Iterable[Any], ranks: Ranks) -> None:
        self.loader, self.ranks = loader, ranks

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in self.placed())

    def placed(self) -> Iterator[tuple[int, Any]]:
        """Yield each batch of this rank with the number of inputs before it in the whole loader.

        Raises:
            RuntimeError: if the process group has ended.
        """
        if Ranks.current() != self.ranks:
            raise RuntimeError(
                "These data are shared out over a process group that has ended. Methods that read the training data "
                "again (bounds, captured, full_covariance) must be called by all ranks before the group ends."
            )
        position = 0
        data = as_given(self.loader)
        if isinstance(data, DataLoader) and isinstance(data.batch_sampler, Iterable):
            share: Iterable[Any] = _with_batches(data, _EveryNth(data.batch_sampler, self.ranks))
            own = iter(self.loader.of(share) if isinstance(self.loader, Renamed) else share)
            for k, indices in enumerate(data.batch_sampler):
                if k % self.ranks.size == self.ranks.rank:
                    yield position, next(own)
                position += len(indices)
            return
        for k, batch in enumerate(self.loader):
            if k % self.ranks.size == self.ranks.rank:
                yield position, batch
            position += num_inputs(split_batch(batch).inputs)


class OwnShare(Share):
    """A loader that already holds only the data of one rank; the shares follow each other in rank order."""

    def placed(self) -> Iterator[tuple[int, Any]]:
        """Yield each batch with the number of inputs before it in the shares of all ranks."""
        counts = self.ranks.gather(sum(num_inputs(split_batch(batch).inputs) for batch in self.loader))
        position = sum(counts[: self.ranks.rank])
        for batch in self.loader:
            yield position, batch
            position += num_inputs(split_batch(batch).inputs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class _EveryNth(Sampler[list[int]]):
    """A sampler of one rank's batches of indices."""

    def __init__(self, batches: Iterable[list[int]], ranks: Ranks) -> None:
        self._batches, self._ranks = batches, ranks

    def __iter__(self) -> Iterator[list[int]]:
        for k, indices in enumerate(self._batches):
            if k % self._ranks.size == self._ranks.rank:
                yield indices


def _with_batches(loader: "DataLoader[Any]", batches: Sampler[list[int]]) -> "DataLoader[Any]":
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def shared_out(loader: Iterable[Any], sharded: bool = False) -> Iterable[Any]:
    """Return the share of this rank, or the loader itself in a single process.

    Args:
        loader: the batches of the whole data set, the same on every rank.
        sharded: whether the loader already holds only the data of this rank.

    Raises:
        ValueError: if the loader shuffles or has a DistributedSampler, or if `sharded` is set in a single process.
    """
    ranks = Ranks.current()
    if ranks.size == 1:
        if sharded:
            raise ValueError("sharded=True has no effect in a single process; it belongs to a process group.")
        return loader
    if sharded:
        return OwnShare(loader, ranks)
    data = as_given(loader)
    sampler = getattr(data, "sampler", None) if isinstance(data, DataLoader) else None
    if isinstance(sampler, DistributedSampler):
        raise ValueError(
            "The loader has a DistributedSampler, which repeats inputs to give every rank equally many. Pass the same "
            "loader without a DistributedSampler on all ranks: fit shares out its batches."
        )
    if shuffles(loader):
        raise ValueError(
            "The loader shuffles, so the ranks of a process group would not agree on which rank reads which batch. "
            "Use shuffle=False."
        )
    return Share(loader, ranks)


def ranks_of(loader: Iterable[Any]) -> Ranks:
    """Return the ranks over which a loader is shared out."""
    if isinstance(loader, Chained):
        return ranks_of(loader.loaders[0])
    return loader.ranks if isinstance(loader, Share) else Ranks(0, 1)


def placed(loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield each batch of a share or a loader with the number of inputs before it."""
    if isinstance(loader, Share):
        yield from loader.placed()
        return
    position = 0
    for batch in loader:
        yield position, batch
        position += num_inputs(split_batch(batch).inputs)


def unshared(loader: Iterable[Any]) -> Iterable[Any]:
    """Return the whole loader, for work that every rank replicates."""
    return loader.loader if isinstance(loader, Share) else loader
