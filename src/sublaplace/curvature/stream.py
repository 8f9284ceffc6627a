"""One pass over data as Jacobians of the rows of V, where VᵀV is the GGN (up to the likelihood's scale)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sublaplace.data import batches, join, one_shot
from sublaplace.jacobians import Jacobian, Linearization
from sublaplace.jacobians.inputs import num_inputs, select
from sublaplace.likelihoods import Gaussian, Likelihood, significant

_BUFFER = 2048  # inputs among which those with equally many directions are put together
_SMALL_GROUP = 32  # inputs below which unequal ones are padded rather than run apart


@dataclass(frozen=True)
class CurvatureStream:
    """The rows R_iᵀ J_i of all training inputs, chunk by chunk; each iteration is one pass over the data.

    Directions of the output Hessians that together make up less than `tolerance` of their trace are dropped: for a
    trained classifier most of them, and with each goes a backward pass. Inputs with equally many directions are put
    together in a buffer of about 2,000, so that little is wasted on padding; an extra forward pass finds their
    number. `every_input` keeps inputs without any direction (KFAC's input factors need them), with K = 0; with
    `row_by_row` a chunk comes as Jacobians of one row an input (see `Linearization.row_by_row`).
    """

    linearization: Linearization
    loader: Iterable[Any]
    likelihood: Likelihood
    tolerance: float = 1e-8
    progress: bool = False
    num_data: int | None = None  # how many inputs a pass must give; None: not checked

    def jacobians(self, what: str, every_input: bool = False, row_by_row: bool = False) -> Iterator[Jacobian]:
        inputs_of = (inputs for inputs, _ in self._batches(what))
        if self.tolerance == 0 or isinstance(self.likelihood, Gaussian):
            for inputs in inputs_of:
                moved = self.linearization.to_device(inputs)
                yield from self.linearization.chunks(moved, self.likelihood.cotangents, row_by_row)
            return
        for inputs in _buffered(inputs_of):
            moved = self.linearization.to_device(inputs)
            if self._needs_all(moved):
                yield from self.linearization.chunks(moved, self.likelihood.cotangents, row_by_row)
            else:
                yield from self._grouped(moved, every_input, row_by_row)

    def _batches(self, what: str) -> Iterator[tuple[Any, Tensor]]:
        """The batches, counted: a loader that gives less the second time is a one-shot iterator in disguise."""
        seen = 0
        for inputs, targets in batches(tqdm(self.loader, desc=what, disable=not self.progress, leave=False)):
            seen += num_inputs(inputs)
            yield inputs, targets
        if self.num_data is not None and seen != self.num_data:
            raise ValueError(one_shot(f"It gave {self.num_data} inputs at first and {seen} when read again."))

    def _needs_all(self, inputs: Any) -> bool:
        """Whether the first inputs need all of their directions; counting those of the others is then wasted."""
        cotangents = self.likelihood.cotangents(self._outputs(select(inputs, slice(0, _SMALL_GROUP))))
        return int(significant(cotangents, self.tolerance).min()) == cotangents.shape[1]

    def _grouped(self, inputs: Any, every_input: bool, row_by_row: bool) -> Iterator[Jacobian]:
        """The Jacobians of a buffer, inputs ordered by how many directions they need."""
        cotangents = self.likelihood.cotangents(self._outputs(inputs))
        counts = significant(cotangents, self.tolerance)
        counts, order = counts.sort(stable=True)
        start = 0 if every_input else int((counts == 0).sum())
        while start < len(order):
            end_of_equal = int((counts <= counts[start]).sum())
            stop = min(len(order), max(end_of_equal, start + _SMALL_GROUP))
            stop = min(stop, start + self.linearization.chunk_size(inputs, int(counts[stop - 1]), row_by_row))
            rows = int(counts[stop - 1])
            needed = torch.arange(rows, device=counts.device) < counts[start:stop, None]
            kept = cotangents[order[start:stop], :rows] * needed[:, :, None]
            yield from self.linearization.chunks(select(inputs, order[start:stop]), kept, row_by_row)
            start = stop

    def _outputs(self, inputs: Any) -> Tensor:
        n = num_inputs(inputs)
        step = max(64, self.linearization.chunk_size(inputs, 1))
        return torch.cat([self.linearization.outputs(select(inputs, slice(i, i + step))) for i in range(0, n, step)])


def _buffered(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches put together to about `_BUFFER` inputs where their shapes allow it."""
    held: list[Any] = []
    for inputs in batches:
        if held and sum(map(num_inputs, held)) + num_inputs(inputs) > _BUFFER:
            yield join(held)
            held = []
        if held and not _same_form(held[0], inputs):
            yield join(held)
            held = []
        held.append(inputs)
    if held:
        yield join(held)


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
