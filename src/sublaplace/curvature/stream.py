"""Passes over data as Jacobians of the rows of V, where VᵀV is the GGN (up to the likelihood's scales)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from sublaplace.data.batches import Batch, batches, join, num_inputs, select
from sublaplace.data.loaders import one_shot
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.linearization import Linearization
from sublaplace.jacobians.passes import Cotangents
from sublaplace.model.likelihoods.base import Likelihood, longest_first, significant, target_weights
from sublaplace.runtime.checkpoint import Checkpoint, Fingerprint, Sums, other_order
from sublaplace.runtime.distributed import ranks_of

_BUFFER = 2048  # inputs among which those with equally many directions are put together
_SMALL_GROUP = 32  # inputs below which unequal ones are padded rather than run apart


class JacobianSums(Sums, Protocol):
    """Sums over the Jacobians of all inputs."""

    def add(self, jacobian: Jacobian) -> None: ...


@dataclass(frozen=True)
class _Portion:
    """Inputs that are worked on together: a batch, or several put together."""

    inputs: Any
    weights: Tensor | None  # how much each target counts: (n, 1) or (n, C)
    num_batches: int = 1


@dataclass(frozen=True)
class CurvatureStream:
    """The rows R_iᵀ J_i of all training inputs, chunk by chunk; `accumulate` is one pass over the data.

    Directions of the output Hessians that together make up less than `tolerance` of their trace are dropped: for a
    trained classifier most of them, and with each goes a backward pass. Inputs with equally many directions are put
    together in a buffer of about 2,000, so that little is wasted on padding; an extra forward pass finds their
    number. With a checkpoint, a pass that was cut off goes on after the last batch whose sums were put aside.
    """

    linearization: Linearization
    loader: Iterable[Any]
    likelihood: Likelihood
    tolerance: float = 1e-8
    progress: bool = False
    num_data: int | None = None  # how many inputs a pass must give; None: not checked
    checkpoint: Checkpoint | None = None
    fingerprint: str | None = None  # of the data, where there is a checkpoint
    num_vectors: int | None = None  # that the Jacobians are multiplied with at once; None: as the linearization says

    @property
    def scale(self) -> float:
        """The factor between the curvature of `scaled` rows and the GGN: that of the likelihood if it has only one."""
        scales = self.likelihood.curvature_scales
        return scales[0] if len(scales) == 1 else 1.0

    def jacobians(self, what: str) -> Iterator[Jacobian]:
        """One pass over the data: the scaled rows of all inputs that have any, for sums of a projector's own."""
        for portion in self._portions(what, 0):
            yield from self._jacobians(portion, every_input=False, scaled=True, row_by_row=False)

    def accumulate(
        self,
        what: str,
        sums: JacobianSums,
        every_input: bool = False,
        scaled: bool = True,
        row_by_row: bool = False,
        resumable: bool = True,
        over_ranks: bool = True,
    ) -> None:
        """Adds the Jacobians of all inputs to `sums`; in a process group those that all ranks have read.

        every_input: also those without any direction (KFAC's input factors need them), with K = 0. scaled: several
        scales of the likelihood, one a row, are multiplied into the rows (a single one never is). row_by_row: as
        Jacobians of one row an input, for sums over rows (see `Linearization.row_by_row`). over_ranks: false for
        those of this rank alone.
        """
        checkpoint = self.checkpoint if resumable else None
        done = 0
        if checkpoint is not None and (found := checkpoint.read(what)):
            tensors, numbers = found
            sums.restore(tensors)
            if numbers["complete"]:
                return
            done = numbers["batches"]
        for portion in self._portions(what, done):
            for jacobian in self._jacobians(portion, every_input, scaled, row_by_row):
                sums.add(jacobian)
                del jacobian  # or it would stand in memory beside the next one
            done += portion.num_batches
            if checkpoint is not None and checkpoint.due():
                checkpoint.write(what, sums.tensors(), {"batches": done, "complete": False})
        if over_ranks:
            ranks_of(self.loader).add_up(sums)
        if checkpoint is not None:
            checkpoint.write(what, sums.tensors(), {"batches": done, "complete": True})

    def _portions(self, what: str, skip: int) -> Iterator[_Portion]:
        portions = self._batches(what, skip)
        return portions if self._keeps_all_directions else _buffered(portions)

    @property
    def _keeps_all_directions(self) -> bool:
        # Where rows have scales of their own, they must keep their places.
        several = len(self.likelihood.curvature_scales) > 1
        return self.tolerance == 0 or several or not self.likelihood.drops_directions

    def _batches(self, what: str, skip: int) -> Iterator[_Portion]:
        """The batches after the first `skip`, counted: a loader that gives less the second time is a one-shot iterator
        in disguise."""
        seen = 0
        digest = Fingerprint()
        for k, batch in enumerate(batches(tqdm(self.loader, desc=what, disable=not self.progress, leave=False))):
            seen += num_inputs(batch.inputs)
            if self.fingerprint is not None:
                digest.add(tuple(batch))
            if k >= skip:
                yield self._portion(batch)
        seen = sum(ranks_of(self.loader).gather(seen))
        if self.num_data is not None and seen != self.num_data:
            raise ValueError(one_shot(f"It gave {self.num_data} inputs at first and {seen} when read again."))
        if self.fingerprint not in (None, digest.text()):
            raise ValueError(other_order("It gave other batches when it was read again."))

    def _portion(self, batch: Batch) -> _Portion:
        device = self.linearization.device
        weights = None if batch.weights is None else batch.weights.to(device)
        return _Portion(batch.inputs, target_weights(self.likelihood, batch.targets.to(device), weights))

    def _jacobians(self, portion: _Portion, every_input: bool, scaled: bool, row_by_row: bool) -> Iterator[Jacobian]:
        portion = replace(portion, inputs=self.linearization.to_device(portion.inputs))
        self.linearization.look_at(portion.inputs)
        if self._keeps_all_directions or self._needs_all(portion.inputs):
            return self._chunks(portion, scaled, row_by_row)
        return self._grouped(portion, every_input, row_by_row)

    def _needs_all(self, inputs: Any) -> bool:
        """Whether the first inputs need all of their directions; counting those of the others is then wasted."""
        cotangents = self.likelihood.hessian_root(self._outputs(select(inputs, slice(0, _SMALL_GROUP))))
        return int(significant(cotangents, self.tolerance).min()) == cotangents.shape[1]

    def _chunks(self, portion: _Portion, scaled: bool, row_by_row: bool) -> Iterator[Jacobian]:
        """The Jacobians of a batch with all directions."""
        step = self.linearization.chunk_size(portion.inputs, None, row_by_row, self.num_vectors)
        for start in range(0, num_inputs(portion.inputs), step):
            part = slice(start, start + step)
            weights = None if portion.weights is None else portion.weights[part]

            def root(outputs: Tensor, weights: Tensor | None = weights) -> Tensor:
                return self._root(outputs, weights, scaled)

            yield from self._weighted(select(portion.inputs, part), root, weights, row_by_row)

    def _weighted(
        self, inputs: Any, cotangents: Cotangents, weights: Tensor | None, row_by_row: bool
    ) -> Iterator[Jacobian]:
        """The Jacobian of a chunk, whole or row by row, with how much each input counts: the most that any of its
        targets does."""
        of_inputs = None if weights is None else weights.amax(1)
        if row_by_row:
            for jacobian in self.linearization.row_by_row(inputs, cotangents):
                yield replace(jacobian, weights=of_inputs)
        else:
            yield replace(self.linearization.jacobian(inputs, cotangents), weights=of_inputs)

    def _root(self, outputs: Tensor, weights: Tensor | None, scaled: bool = True) -> Tensor:
        """The columns of R, as rows, with what multiplies them: (n, K, C)."""
        rows = self.likelihood.hessian_root(outputs)
        scales = self.likelihood.curvature_scales
        if scaled and len(scales) > 1:
            rows = rows * torch.tensor(scales, dtype=rows.dtype, device=rows.device).sqrt()[:, None]
        return rows if weights is None else rows * weights.sqrt().to(rows.dtype)[:, None, :]

    def _grouped(self, portion: _Portion, every_input: bool, row_by_row: bool) -> Iterator[Jacobian]:
        """The Jacobians of a buffer, inputs ordered by how many directions they need."""
        inputs, weights = portion.inputs, portion.weights
        cotangents = self._root(self._outputs(inputs), weights)
        if weights is not None and weights.shape[1] > 1:
            cotangents = longest_first(cotangents)  # ignored targets have made some of them zero
        counts = significant(cotangents, self.tolerance)
        counts, order = counts.sort(stable=True)
        start = 0 if every_input else int((counts == 0).sum())
        while start < len(order):
            end_of_equal = int((counts <= counts[start]).sum())
            stop = min(len(order), max(end_of_equal, start + _SMALL_GROUP))
            size = self.linearization.chunk_size(inputs, int(counts[stop - 1]), row_by_row, self.num_vectors)
            stop = min(stop, start + size)
            rows = int(counts[stop - 1])
            chosen = order[start:stop]
            needed = torch.arange(rows, device=counts.device) < counts[start:stop, None]
            kept = cotangents[chosen, :rows] * needed[:, :, None]
            yield from self._weighted(
                select(inputs, chosen), kept, None if weights is None else weights[chosen], row_by_row
            )
            start = stop

    def _outputs(self, inputs: Any) -> Tensor:
        n = num_inputs(inputs)
        step = max(64, self.linearization.chunk_size(inputs, 1, num_vectors=self.num_vectors))
        return torch.cat([self.linearization.outputs(select(inputs, slice(i, i + step))) for i in range(0, n, step)])


def _buffered(portions: Iterable[_Portion]) -> Iterator[_Portion]:
    """Batches put together to about `_BUFFER` inputs where their shapes allow it."""
    held: list[_Portion] = []
    for portion in portions:
        full = sum(num_inputs(p.inputs) for p in held) + num_inputs(portion.inputs) > _BUFFER
        if held and (full or not _same_form(held[0].inputs, portion.inputs)):
            yield _joined(held)
            held = []
        held.append(portion)
    if held:
        yield _joined(held)


def _joined(portions: list[_Portion]) -> _Portion:
    given = [portion.weights for portion in portions if portion.weights is not None]
    weights = None
    if given:
        once = [given[0].new_ones(num_inputs(p.inputs), given[0].shape[1]) for p in portions]
        weights = torch.cat([o if p.weights is None else p.weights for o, p in zip(once, portions, strict=True)])
    return _Portion(join([portion.inputs for portion in portions]), weights, len(portions))


def _same_form(one: Any, other: Any) -> bool:
    def form(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape[1:]), value.dtype
        if isinstance(value, dict):
            return {key: form(item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return [form(item) for item in value]
        return None

    return bool(form(one) == form(other))
