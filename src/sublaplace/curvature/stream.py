"""Passes over the data that yield the rows of V, where VᵀV is the GGN up to the likelihood's scales."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sublaplace.data.batches import Batch, batches, join, num_inputs, select
from sublaplace.data.loaders import one_shot, other_data
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.linearization import Linearization
from sublaplace.jacobians.passes import Cotangents
from sublaplace.model.likelihoods.base import Likelihood, longest_first, significant, target_weights
from sublaplace.runtime.checkpoint import Checkpoint, Fingerprint, Sums, other_order
from sublaplace.runtime.distributed import ranks_of
from sublaplace.runtime.progress import shown

_BUFFER = 2048  # inputs that are sorted by their number of directions
_SMALL_GROUP = 32  # smallest group of inputs; smaller groups are padded rather than run separately


class JacobianSums(Sums, Protocol):
    """Sums over the Jacobians of all inputs."""

    def add(self, jacobian: Jacobian) -> None:
        """Add the rows of a Jacobian to the sums."""


@dataclass(frozen=True)
class _Portion:
    """Inputs that are processed together: one batch, or several batches joined."""

    inputs: Any
    weights: Tensor | None  # of each target: (n, 1) or (n, C)
    num_batches: int = 1


@dataclass(frozen=True)
class CurvatureStream:
    """The rows R_iᵀ J_i of all training inputs, in chunks; `accumulate` is one pass over the data.

    Directions of an output Hessian that together hold less than `tolerance` of its trace are dropped. Each dropped
    direction saves a backward pass, and for a trained classifier most directions are dropped. An extra forward pass
    counts the directions per input. Inputs with equally many directions are grouped within a buffer of about 2,000
    inputs, which limits padding. With a checkpoint, an interrupted pass resumes after the last stored batch.

    Args:
        linearization: the network and its Jacobian.
        loader: the training data.
        likelihood: the likelihood, whose output Hessian is R_i R_iᵀ up to its scales.
        tolerance: the share of the trace that may be dropped per input.
        progress: whether to show progress bars.
        num_data: how many inputs every pass must yield; None: not checked.
        checkpoint: where interrupted passes are stored.
        fingerprint: the digest of the data, checked in every pass; None: not checked.
        num_vectors: how many vectors are multiplied by the Jacobians at once; None: as in the linearization's policy.
    """

    linearization: Linearization
    loader: Iterable[Any]
    likelihood: Likelihood
    tolerance: float = 1e-8
    progress: bool = False
    num_data: int | None = None
    checkpoint: Checkpoint | None = None
    fingerprint: str | None = None
    num_vectors: int | None = None

    @property
    def scale(self) -> float:
        """The factor between VᵀV with scaled rows and the GGN: the likelihood's scale if there is only one, else 1."""
        scales = self.likelihood.curvature_scales
        return scales[0] if len(scales) == 1 else 1.0

    def jacobians(self, what: str) -> Iterator[Jacobian]:
        """Yield the scaled rows of all inputs that have any, in one pass over the data, for custom projectors.

        Args:
            what: the label of the progress bar.
        """
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
        """Add the Jacobians of all inputs to `sums`, in one pass over the data.

        Args:
            what: the name of the pass, for the progress bar and the checkpoint.
            sums: updated in place.
            every_input: whether to include inputs without any direction, with K = 0; KFAC's input factors need them.
            scaled: whether to multiply the rows by the square roots of several scales of the likelihood, one per row.
                A single scale is never included.
            row_by_row: whether to add Jacobians with one row per input (see `Linearization.row_by_row`).
            resumable: whether to store the sums in the checkpoint.
            over_ranks: whether to add up the sums of all ranks of a process group.

        Raises:
            ValueError: if the loader yields other data than in the pass before.
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
                del jacobian  # frees its memory before the next one is computed
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
        # If every row has its own scale, the rows must keep their order.
        several = len(self.likelihood.curvature_scales) > 1
        return self.tolerance == 0 or several or not self.likelihood.drops_directions

    def _batches(self, what: str, skip: int) -> Iterator[_Portion]:
        """Yield the batches after the first `skip`, and check the number of inputs.

        A loader that yields no inputs the second time wraps a one-shot iterator.
        """
        seen = 0
        digest = Fingerprint()
        for k, batch in enumerate(batches(shown(self.loader, what, self.progress))):
            seen += num_inputs(batch.inputs)
            if self.fingerprint is not None:
                digest.add(tuple(batch))
            if k >= skip:
                yield self._portion(batch)
        seen = sum(ranks_of(self.loader).gather(seen))
        if self.num_data is not None and seen != self.num_data:
            evidence = f"It gave {self.num_data} inputs at first and {seen} when read again."
            raise ValueError(other_data(evidence) if seen else one_shot(evidence))
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
        """Return whether the first inputs need all directions; counting directions per input is then wasted."""
        cotangents = self.likelihood.hessian_root(self._outputs(select(inputs, slice(0, _SMALL_GROUP))))
        return int(significant(cotangents, self.tolerance).min()) == cotangents.shape[1]

    def _chunks(self, portion: _Portion, scaled: bool, row_by_row: bool) -> Iterator[Jacobian]:
        """Yield the Jacobians of a batch with all directions."""
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
        """Yield the Jacobian of a chunk, whole or row by row, with the largest target weight of each input."""
        of_inputs = None if weights is None else weights.amax(1)
        if row_by_row:
            for jacobian in self.linearization.row_by_row(inputs, cotangents):
                yield replace(jacobian, weights=of_inputs)
        else:
            yield replace(self.linearization.jacobian(inputs, cotangents), weights=of_inputs)

    def _root(self, outputs: Tensor, weights: Tensor | None, scaled: bool = True) -> Tensor:
        """Return the columns of R, as rows, times the square roots of scales and weights: (n, K, C)."""
        rows = self.likelihood.hessian_root(outputs)
        scales = self.likelihood.curvature_scales
        if scaled and len(scales) > 1:
            rows = rows * torch.tensor(scales, dtype=rows.dtype, device=rows.device).sqrt()[:, None]
        return rows if weights is None else rows * weights.sqrt().to(rows.dtype)[:, None, :]

    def _grouped(self, portion: _Portion, every_input: bool, row_by_row: bool) -> Iterator[Jacobian]:
        """Yield the Jacobians of a buffer, with inputs sorted by their number of directions."""
        inputs, weights = portion.inputs, portion.weights
        cotangents = self._root(self._outputs(inputs), weights)
        if weights is not None and weights.shape[1] > 1:
            cotangents = longest_first(cotangents)  # ignored targets make some of them zero
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
    """Join batches of the same shape to portions of about `_BUFFER` inputs."""
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
