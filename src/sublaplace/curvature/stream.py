"""Passes over the data that yield the rows of V, where VᵀV is the GGN up to the likelihood's scales."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sublaplace.curvature.directions import FeatureRoots, Roots, SampledRoots
from sublaplace.curvature.operators import DENSE_OUTPUTS
from sublaplace.data.batches import Batch, batches_at_places, form, join, num_inputs, select
from sublaplace.data.loaders import one_shot, other_data
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.linearization import Linearization
from sublaplace.jacobians.passes import Cotangents
from sublaplace.jacobians.wanted import ROWS, Wanted
from sublaplace.model.likelihoods.base import (
    Likelihood,
    longest_first,
    significant,
    significant_lengths,
    target_weights,
)
from sublaplace.runtime.checkpoint import Checkpoint, Fingerprint, Sums, other_order
from sublaplace.runtime.distributed import placed, ranks_of
from sublaplace.runtime.memory import require
from sublaplace.runtime.progress import shown
from sublaplace.runtime.stopwatch import PASSES, Stopwatch

LARGEST_PORTION = 2048
"""Inputs that are sorted by their number of directions."""

_SMALL_GROUP = 32  # smallest group of inputs; smaller groups are padded rather than run separately
_COUNTED_BY_LENGTHS = 64  # outputs beyond which the directions of a few inputs are counted without forming them
_MOST_OF_ROOTS = 2**25  # numbers in the roots of the output Hessians that are held at once, n·K·C
_MOST_OF_BLOCKS = 2**23  # the same for outputs with positions, whose roots are made from blocks, and copied


class JacobianSums(Sums, Protocol):
    """Sums over the Jacobians of all inputs."""

    def add(self, jacobian: Jacobian) -> None:
        """Add the rows of a Jacobian to the sums."""


@dataclass(frozen=True)
class _Portion:
    """Inputs that are processed together: one batch, or several batches joined."""

    inputs: Any
    weights: Tensor | None  # of each target: (n, 1) or (n, C)
    places: Tensor  # of the inputs in the data: (n,)
    num_batches: int = 1

    def part(self, start: int, stop: int) -> "_Portion":
        """Return some of the inputs."""
        some = slice(start, stop)
        weights = None if self.weights is None else self.weights[some]
        return _Portion(select(self.inputs, some), weights, self.places[some], 0)


@dataclass(frozen=True)
class _Pass:
    """What a pass over the data yields; see `CurvatureStream.accumulate`."""

    every_input: bool = False
    scaled: bool = True
    row_by_row: bool = False
    wanted: Wanted = ROWS
    without_rows: bool = False
    sampled: bool = False

    @property
    def sums_rows(self) -> bool:
        """Whether only sums over an input's rows are asked for, of which the order and the number do not matter."""
        return self.row_by_row and self.sampled


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
        samples: m, how many sampled directions per input KFAC and the diagonal use (see `directions.py`); None: all.
        seed: of the sampled directions.
        stopwatch: counts the seconds of passes.
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
    samples: int | None = None
    seed: int = 0
    stopwatch: Stopwatch = field(default_factory=Stopwatch, repr=False, compare=False)

    @property
    def scale(self) -> float:
        """The factor between VᵀV with scaled rows and the GGN: the likelihood's scale if there is only one, else 1."""
        scales = self.likelihood.curvature_scales
        return scales[0] if len(scales) == 1 else 1.0

    @property
    def used_samples(self) -> int | None:
        """m, or None where all directions are used: they cost no more if there are only m features."""
        enough = self._features is not None and self.samples is not None and self._features <= self.samples
        return None if enough else self.samples

    @property
    def _features(self) -> int | None:
        """F, if all directions of an input can be seen from F features, and Σ H (C, C) is small enough to be kept."""
        many = (self.linearization.num_outputs_seen() or 0) > DENSE_OUTPUTS
        return self.linearization.num_features() if len(self.likelihood.curvature_scales) == 1 and not many else None

    def jacobians(self, what: str) -> Iterator[Jacobian]:
        """Yield the scaled rows of all inputs that have any, in one pass over the data, for custom projectors.

        Args:
            what: the label of the progress bar.
        """
        for portion in self._portions(what, 0):
            yield from self._jacobians(portion, _Pass())

    def accumulate(
        self,
        what: str,
        sums: JacobianSums,
        every_input: bool = False,
        scaled: bool = True,
        row_by_row: bool = False,
        resumable: bool = True,
        over_ranks: bool = True,
        wanted: Wanted = ROWS,
        without_rows: bool = False,
        sampled: bool = False,
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
            wanted: what the sums ask of each Jacobian. Products with vectors use forward mode where it costs less;
                no direction is dropped then.
            without_rows: whether to yield Jacobians with K = 0, which hold outputs, weights and the inputs of calls.
            sampled: whether the sums may use the stream's sampled directions.

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
        kind = _Pass(every_input, scaled, row_by_row, wanted, without_rows, sampled)
        with self.stopwatch.counting(PASSES):
            for portion in self._portions(what, done):
                for jacobian in self._jacobians(portion, kind):
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
        return portions if self.keeps_all_directions else _buffered(portions)

    @property
    def keeps_all_directions(self) -> bool:
        """Whether no direction of an output Hessian is dropped."""
        # If every row has its own scale, the rows must keep their order.
        several = len(self.likelihood.curvature_scales) > 1
        return self.tolerance == 0 or several or not self.likelihood.drops_directions

    def _batches(self, what: str, skip: int) -> Iterator[_Portion]:
        """Yield the batches after the first `skip`, and check the number of inputs.

        A loader that yields no inputs the second time wraps a one-shot iterator.
        """
        seen = 0
        digest = Fingerprint()
        # Only sampled directions need places, for which every rank has to count the inputs of the others.
        data = ((0, batch) for batch in self.loader) if self.samples is None else placed(self.loader)
        for k, (place, batch) in enumerate(batches_at_places(shown(data, what, self.progress))):
            seen += num_inputs(batch.inputs)
            if self.fingerprint is not None:
                digest.add(tuple(batch))
            if k >= skip:
                yield self._portion(place, batch)
        seen = sum(ranks_of(self.loader).gather(seen))
        if self.num_data is not None and seen != self.num_data:
            evidence = f"It gave {self.num_data} inputs at first and {seen} when read again."
            raise ValueError(other_data(evidence) if seen else one_shot(evidence))
        if self.fingerprint not in (None, digest.text()):
            raise ValueError(other_order("It gave other batches when it was read again."))

    def _portion(self, place: int, batch: Batch) -> _Portion:
        device = self.linearization.device
        weights = None if batch.weights is None else batch.weights.to(device)
        places = place + torch.arange(num_inputs(batch.inputs), device="cpu")
        return _Portion(batch.inputs, target_weights(self.likelihood, batch.targets.to(device), weights), places)

    def _jacobians(self, portion: _Portion, kind: _Pass) -> Iterator[Jacobian]:
        portion = replace(portion, inputs=self.linearization.to_device(portion.inputs))
        inputs = portion.inputs
        self.linearization.look_at(inputs)
        if kind.without_rows or (kind.sampled and self.used_samples is not None):
            return self._chunks(portion, kind)
        counts, most = self._few_counts(inputs)
        features = self._features if kind.sums_rows else None
        if features is not None and features * len(counts) < int(counts.sum()):
            return self._along_hessians(portion, kind, features)
        if self.linearization.prefers_products(inputs, -(-int(counts.sum()) // len(counts)), kind.wanted):
            return self._products(portion, kind)
        # Counting the directions of every input is wasted if the first ones need all of them, or if they cost nothing.
        if self.keeps_all_directions or int(counts.min()) == most or self.linearization.needs_no_pass(kind.wanted):
            return self._chunks(portion, kind)
        return self._grouped_pieces(portion, kind)

    def _few_counts(self, inputs: Any) -> tuple[Tensor, int]:
        """Return how many directions the first inputs need, (few,), and how many there are at most."""
        outputs = self._outputs(select(inputs, slice(0, _SMALL_GROUP)))
        few = outputs[: self._roots_at_once(outputs.shape[1])]
        if self.keeps_all_directions or not len(few):
            return torch.full((1,), outputs.shape[1], device="cpu"), outputs.shape[1]
        if outputs.shape[1] > _COUNTED_BY_LENGTHS:
            lengths = self.likelihood.root(few).squared_lengths()
            return significant_lengths(lengths, self.tolerance), lengths.shape[1]
        roots = self.likelihood.hessian_root(few)
        return significant(roots, self.tolerance), roots.shape[1]

    def _roots_at_once(self, num_outputs: int) -> int:
        """Return for how many inputs the roots of the output Hessians may be formed at once."""
        has_positions = self.likelihood.of_one_position is not self.likelihood
        return (_MOST_OF_BLOCKS if has_positions else _MOST_OF_ROOTS) // num_outputs**2

    def _products(self, portion: _Portion, kind: _Pass) -> Iterator[Jacobian]:
        """Yield Jacobians whose products with vectors come from features or forward mode, with all directions."""
        step = self.linearization.products_chunk_size(portion.inputs, kind.wanted)
        for start in range(0, num_inputs(portion.inputs), step):
            part = portion.part(start, start + step)
            roots = Roots(self.likelihood, part.weights, kind.scaled)
            yield self.linearization.products_jacobian(part.inputs, kind.wanted, roots)

    def _chunks(self, portion: _Portion, kind: _Pass) -> Iterator[Jacobian]:
        """Yield the Jacobians of a batch with all directions, sampled ones or none."""
        samples = self.used_samples if kind.sampled else None
        rows = 1 if kind.without_rows else samples
        step = self.linearization.chunk_size(portion.inputs, rows, kind.row_by_row, self.num_vectors, kind.wanted)
        for start in range(0, num_inputs(portion.inputs), step):
            part = portion.part(start, start + step)
            roots = Roots(self.likelihood, part.weights, kind.scaled)
            directions: Cotangents = roots
            if kind.without_rows:
                directions = _no_rows
            elif samples is not None:
                directions = SampledRoots(roots, samples, part.places, self.seed)
            yield from self._weighted(part.inputs, directions, part.weights, kind)

    def _along_hessians(self, portion: _Portion, kind: _Pass, features: int) -> Iterator[Jacobian]:
        """Yield Jacobians of one row per input whose sums are those of all directions, with at most F rows."""
        step = self.linearization.chunk_size(portion.inputs, features, kind.row_by_row, self.num_vectors, kind.wanted)
        for start in range(0, num_inputs(portion.inputs), step):
            part = portion.part(start, start + step)
            roots = Roots(self.likelihood, part.weights, kind.scaled)
            found = self.linearization.along_hessians(part.inputs, FeatureRoots(roots, self.tolerance))
            if found is None:  # such as a last layer whose weight is frozen
                yield from self._weighted(part.inputs, roots, part.weights, kind)
                continue
            for jacobian in found:
                yield replace(jacobian, target_weights=part.weights)

    def _weighted(self, inputs: Any, cotangents: Cotangents, weights: Tensor | None, kind: _Pass) -> Iterator[Jacobian]:
        """Yield the Jacobian of a chunk, whole or row by row, with its weights."""
        if kind.row_by_row:
            for jacobian in self.linearization.row_by_row(inputs, cotangents, kind.wanted):
                yield replace(jacobian, target_weights=weights)
        else:
            yield replace(self.linearization.jacobian(inputs, cotangents, kind.wanted), target_weights=weights)

    def _grouped_pieces(self, portion: _Portion, kind: _Pass) -> Iterator[Jacobian]:
        """Yield the Jacobians of a buffer, piece by piece if there are many outputs."""
        outputs = self._outputs(portion.inputs)
        K = outputs.shape[1]
        step = max(1, self._roots_at_once(K))
        if step == 1:
            require(
                3 * K**2 * outputs.element_size(),
                outputs.device,
                f"The root of the output Hessian of one input with {K:,} outputs",
                "Use fewer positions or outputs per input, or a network whose operations have forward mode, which does "
                "without it.",
            )
        for start in range(0, len(outputs), step):
            stop = start + step
            yield from self._grouped(portion.part(start, stop), outputs[start:stop], kind)

    def _grouped(self, portion: _Portion, outputs: Tensor, kind: _Pass) -> Iterator[Jacobian]:
        """Yield the Jacobians of a piece, with inputs sorted by their number of directions."""
        inputs, weights = portion.inputs, portion.weights
        cotangents = Roots(self.likelihood, weights)(outputs)
        if weights is not None and weights.shape[1] > 1:
            cotangents = longest_first(cotangents)  # ignored targets make some of them zero
        counts = significant(cotangents, self.tolerance)
        counts, order = counts.sort(stable=True)
        start = 0 if kind.every_input else int((counts == 0).sum())
        while start < len(order):
            end_of_equal = int((counts <= counts[start]).sum())
            stop = min(len(order), max(end_of_equal, start + _SMALL_GROUP))
            most = int(counts[stop - 1])
            size = self.linearization.chunk_size(inputs, most, kind.row_by_row, self.num_vectors, kind.wanted)
            stop = min(stop, start + size)
            rows = int(counts[stop - 1])
            chosen = order[start:stop]
            needed = torch.arange(rows, device=counts.device) < counts[start:stop, None]
            kept = cotangents[chosen, :rows] * needed[:, :, None]
            yield from self._weighted(select(inputs, chosen), kept, None if weights is None else weights[chosen], kind)
            start = stop

    def _outputs(self, inputs: Any) -> Tensor:
        n = num_inputs(inputs)
        step = max(64, self.linearization.chunk_size(inputs, 1, num_vectors=self.num_vectors))
        return torch.cat([self.linearization.outputs(select(inputs, slice(i, i + step))) for i in range(0, n, step)])


def _no_rows(outputs: Tensor) -> Tensor:
    """Return no directions at all: (n, 0, C)."""
    return outputs.new_zeros(len(outputs), 0, outputs.shape[1])


def _buffered(portions: Iterable[_Portion]) -> Iterator[_Portion]:
    """Join batches of the same shape to portions of about `LARGEST_PORTION` inputs."""
    held: list[_Portion] = []
    for portion in portions:
        full = sum(num_inputs(p.inputs) for p in held) + num_inputs(portion.inputs) > LARGEST_PORTION
        if held and (full or form(held[0].inputs) != form(portion.inputs)):
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
    places = torch.cat([portion.places for portion in portions])
    return _Portion(join([portion.inputs for portion in portions]), weights, places, len(portions))
