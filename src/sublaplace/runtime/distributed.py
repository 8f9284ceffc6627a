"""Distributed fits (torchrun): each of k processes reads every k-th batch, and sums over the data are all-reduced.

Every process gets the same loader and ends with the same posterior. It equals the posterior of a single process up to
the rounding of sums in another order. Computations that do not grow with the data (X′, P, all s × s algebra) are
replicated on every process.
"""

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as group
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from sublaplace.data.batches import num_inputs, split_batch
from sublaplace.data.loaders import Chained, Renamed, as_given, probed, shuffles
from sublaplace.runtime.checkpoint import Fingerprint, Sums, fingerprint_of

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

    def require_same(self, facts: dict[str, Any], remedy: str) -> None:
        """Raise ValueError on every rank if the ranks disagree about a fact.

        Args:
            facts: by the subject of the message; what is compared must be small.
            remedy: a sentence that tells the user what to do.
        """
        everybody = self.gather(facts)
        for subject, own in everybody[0].items():
            for rank, other in enumerate(everybody):
                if other[subject] != own:
                    ours, theirs = (str(value)[:60] for value in (own, other[subject]))
                    raise ValueError(
                        f"{subject} on rank {rank} is not the same as on rank 0 ({theirs} there, {ours} on rank 0), so "
                        f"the ranks would end with different posteriors. {remedy}"
                    )

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
        self._length = 0  # inputs of all ranks, as the last reading found
        self._digest: str | None = None  # of all data, as the first reading found, where it comes across all

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in self.placed())

    def _require_group(self) -> None:
        if Ranks.current() != self.ranks:
            raise RuntimeError(
                "These data are shared out over a process group that has ended. Methods that read the training data "
                "again (bounds, captured_share, full_covariance) must be called by all ranks before the group ends."
            )

    def placed(self) -> Iterator[tuple[int, Any]]:
        """Yield each batch of this rank with the number of inputs before it in the whole loader.

        Raises:
            RuntimeError: if the process group has ended.
        """
        self._require_group()
        position = 0
        data = as_given(self.loader)
        if isinstance(data, DataLoader) and isinstance(data.batch_sampler, Iterable):
            share: Iterable[Any] = _with_batches(data, _EveryNth(data.batch_sampler, self.ranks))
            own = iter(self.loader.of(share) if isinstance(self.loader, Renamed) else share)
            for k, indices in enumerate(data.batch_sampler):
                if k % self.ranks.size == self.ranks.rank:
                    yield position, next(own)
                position += len(indices)
            self._length = position
            return
        digest = Fingerprint()
        for k, batch in enumerate(self.loader):
            parts = split_batch(batch)
            if self._digest is None:
                digest.add(tuple(parts))
            if k % self.ranks.size == self.ranks.rank:
                yield position, batch
            position += num_inputs(parts.inputs)
        self._length, self._digest = position, self._digest or digest.text()

    def require_same_reading(self) -> None:
        """Raise ValueError on every rank if the ranks have read different data, as far as they have seen the same."""
        remedy = "Give every rank the same loader; if each holds a share of its own, pass sharded=True."
        facts = {"The number of inputs": self._length, "The digest of the training data": self._digest}
        self.ranks.require_same(facts, remedy)


class OwnShare(Share):
    """A loader that already holds only the data of one rank; the shares follow each other in rank order."""

    def placed(self) -> Iterator[tuple[int, Any]]:
        """Yield each batch with the number of inputs before it in the shares of all ranks."""
        self._require_group()
        counts = self.ranks.gather(sum(num_inputs(split_batch(batch).inputs) for batch in self.loader))
        position = sum(counts[: self.ranks.rank])
        for batch in self.loader:
            yield position, batch
            position += num_inputs(split_batch(batch).inputs)

    def __iter__(self) -> Iterator[Any]:
        self._require_group()
        return iter(self.loader)

    def require_same_reading(self) -> None:
        """Allow shares of any length and content."""

    def require_different(self) -> None:
        """Raise ValueError on every rank if two ranks hold the same data, which would count several times."""
        summaries = self.ranks.gather(_summary(self.loader))
        if len(set(summaries)) < len(summaries):
            raise ValueError(
                "sharded=True says that each rank's loader holds its own share, but some ranks have the same data, "
                "which would count several times. Leave sharded=True out to share out one loader, or give each rank "
                "its own."
            )


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

    A DataLoader with a DistributedSampler is recognised: its data set is shared out without the inputs that the sampler
    repeats to give every rank equally many. All ranks call this together; their data are compared, all that are in
    memory and a few of others.

    Args:
        loader: the batches of the whole data set, the same on every rank.
        sharded: whether the loader already holds only the data of this rank.

    Raises:
        ValueError: if the loader shuffles, if the ranks do not have the same data, or have the same data although
            `sharded` is set, or if `sharded` is set in a single process.
    """
    ranks = Ranks.current()
    sampler = _distributed_sampler(loader)
    if ranks.size == 1:
        if sharded:
            raise ValueError("sharded=True has no effect in a single process; it belongs to a process group.")
        if sampler is not None and sampler.num_replicas > 1:
            raise ValueError(
                f"The loader has a DistributedSampler for {sampler.num_replicas} ranks, but there is no process group, "
                "so the data of the other ranks would be missing. Start the process group before, or use a loader "
                "without this sampler."
            )
        return loader
    if sampler is not None:
        loader = _of_all_data(loader)
    elif sharded:
        share = OwnShare(loader, ranks)
        share.require_different()
        return share
    elif shuffles(loader):
        raise ValueError(
            "The loader shuffles, so the ranks of a process group would not agree on which rank reads which batch. "
            "Use shuffle=False."
        )
    remedy = "If each rank's loader holds a share of its own, pass sharded=True."
    require_same_data(loader, "The training data", f"Give every rank the same, without random augmentation. {remedy}")
    return Share(loader, ranks)


def require_same_data(loader: Iterable[Any], subject: str, remedy: str = "Give every rank the same.") -> None:
    """Raise ValueError on every rank of a process group if the data of the ranks differ; all ranks call it together."""
    ranks = Ranks.current()
    if ranks.size > 1:
        ranks.require_same({subject: _summary(loader)}, remedy)


def _summary(loader: Iterable[Any]) -> tuple[int | None, str]:
    """Return the number of batches, where it is known, and a digest of all data in memory, or of a few of the others.

    Cost: one read of what is in memory, about a second per gigabyte.
    """
    data = as_given(loader)
    held = _in_memory(data)
    return len(data) if isinstance(data, Sized) else None, fingerprint_of(probed(data) if held is None else held)


def _in_memory(data: Any) -> Any:
    """Return all data of a list of batches, or of a loader of a TensorDataset or a part of one; None of others."""
    if isinstance(data, list | tuple):
        return data
    dataset, indices = data.dataset if isinstance(data, DataLoader) else None, []
    while isinstance(dataset, Subset):
        indices.append(list(dataset.indices))
        dataset = dataset.dataset
    return (indices, dataset.tensors) if isinstance(dataset, TensorDataset) else None


def _distributed_sampler(loader: Iterable[Any]) -> "DistributedSampler[Any] | None":
    data = as_given(loader)
    if not isinstance(data, DataLoader):
        return None
    samplers = data.sampler, getattr(data.batch_sampler, "sampler", None)
    return next((each for each in samplers if isinstance(each, DistributedSampler)), None)


def _of_all_data(loader: Iterable[Any]) -> Iterable[Any]:
    """Return the loader with all data of its data set in order, instead of the share that its sampler gives."""
    data = as_given(loader)
    assert isinstance(data, DataLoader)
    size = data.batch_size or getattr(data.batch_sampler, "batch_size", 1)
    batches = BatchSampler(SequentialSampler(data.dataset), size, drop_last=False)  # type: ignore[arg-type]
    whole = _with_batches(data, batches)
    return loader.of(whole) if isinstance(loader, Renamed) else whole


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
    """Return the whole loader, for work that every rank replicates.

    Raises:
        ValueError: if no rank has the whole data.
    """
    if isinstance(loader, OwnShare):
        raise ValueError(
            "This projector reads all data on every rank, but sharded=True gives each rank a share. Pass the same "
            "loader on all ranks, without sharded=True."
        )
    return loader.loader if isinstance(loader, Share) else loader
