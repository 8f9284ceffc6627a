"""What a fit will cost: a rehearsal on a few inputs, each stage of which is scaled to all data by how it grows."""

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from torch import nn

from sublaplace.data.batches import Batch, batches, num_inputs, select
from sublaplace.data.loaders import num_data
from sublaplace.data.subspace_inputs import Given, joined_inputs
from sublaplace.fitting.fit import fit, new_linearization
from sublaplace.fitting.fitted import Fitted
from sublaplace.fitting.leave_one_out import num_left_out, num_with_positions
from sublaplace.fitting.scaling import Rates, Sizes, least_seconds, scaled_stage
from sublaplace.fitting.stage_memory import StageMemory
from sublaplace.fitting.tuning import tuned_on
from sublaplace.jacobians.linearization import Linearization
from sublaplace.jacobians.network import Forward
from sublaplace.options import Options
from sublaplace.posteriors.weighting import SUBSAMPLE
from sublaplace.projectors.subspace_iteration import sketched_rows
from sublaplace.runtime.memory import readable

_LONG_ENOUGH = 4.0  # seconds of a rehearsal; shorter ones are repeated with more inputs
_MARGIN = 1.3  # rows of X′ in a rehearsal over s; a fifth of them may be held back
_MOST_ROWS_AT_FIRST, _MOST_INPUTS_AT_FIRST, _FEWEST_INPUTS = 1600, 16, 4
_FEWEST_WEIGHTED = 48  # inputs with which the weight of a complement is fitted at all
_SMALLEST_BUDGET = 2**28  # bytes of a rehearsal, whose budget shrinks with X′


@dataclass(frozen=True)
class StageEstimate:
    """What one stage will take."""

    seconds: float
    peak_bytes: int  # in addition to what the process holds before the fit


@dataclass(frozen=True)
class Estimate:
    """What a fit will take, by stage as `summary` names them, and predictions afterwards; prints as a table."""

    stages: dict[str, StageEstimate]
    prediction: StageEstimate  # seconds per input
    num_data: int  # N
    num_rehearsed: int  # inputs that the estimate was made from

    @property
    def seconds(self) -> float:
        """The seconds of the whole fit."""
        return sum(stage.seconds for stage in self.stages.values())

    @property
    def peak_bytes(self) -> int:
        """The peak memory of the fit, in addition to what the process holds before it."""
        return max(stage.peak_bytes for stage in self.stages.values())

    def __str__(self) -> str:
        rows = [(name, f"{stage.seconds:.3g} s", readable(stage.peak_bytes)) for name, stage in self.stages.items()]
        rows.append(("fit", f"{self.seconds:.3g} s", readable(self.peak_bytes)))
        each = f"{1000 * self.prediction.seconds:.3g} ms"
        rows.append(("prediction per input", each, readable(self.prediction.peak_bytes)))
        head = f"Estimate for {self.num_data:,} inputs, from {self.num_rehearsed:,} of them"
        lines = [f"  {name:<22}{seconds:>12}{memory:>14}" for name, seconds, memory in rows]
        return "\n".join([head, f"  {'stage':<22}{'seconds':>12}{'peak memory':>14}", *lines])


@dataclass(frozen=True)
class Estimator:
    """A fit that is to be estimated.

    Args:
        options: what the user decided.
        model: the network.
        forward: how it is called.
        loader: the training data.
        val_loader: validation data, if there are any.
        predict: predicts for inputs with what was fitted.
    """

    options: Options
    model: nn.Module
    forward: Forward
    loader: Iterable[Any]
    val_loader: Iterable[Any] | None
    predict: Callable[[Fitted, Any], Any]

    def estimate(self) -> Estimate:
        """Rehearse the fit on a few inputs, with more of them if that is quick, and scale its stages.

        Raises:
            ValueError: if the training or the validation data are empty or do not fit the model.
        """
        N = num_data(self.loader)
        if not N:
            raise ValueError("The loader is empty: there is nothing to fit.")
        validated = 0 if self.val_loader is None else num_data(self.val_loader)
        if self.val_loader is not None and not validated:
            raise ValueError("The validation loader is empty, or nothing in it counts.")
        engine = new_linearization(self.options, self.model, self.forward, self.options.resources.memory_budget)
        first = next(batches(self.loader))
        with engine.borrowed():
            num_outputs = engine.num_outputs(engine.to_device(first.inputs))
        positions = engine.output_layout is not None
        real = self._sizes(engine, num_outputs, positions, N, validated)
        count = min(N, self._fewest(engine, num_outputs, N))
        rehearsal = self._rehearsed(engine, num_outputs, positions, real, count)
        taken = rehearsal.seconds
        if taken < _LONG_ENOUGH and count < N:
            count = min(N, int(count * max(2.0, _LONG_ENOUGH / max(taken, 1e-3))))
            rehearsal = self._rehearsed(engine, num_outputs, positions, real, count)
        return self._scaled(rehearsal, real)

    def _fewest(self, engine: Linearization, num_outputs: int, N: int) -> int:
        """Return how many inputs a rehearsal needs, so that P has its full rank and the same algorithms are used."""
        options, p = self.options.resolved(engine.output_layout is not None), engine.layout.num_parameters
        fewest = max(_FEWEST_INPUTS, min(_MOST_INPUTS_AT_FIRST, _MOST_ROWS_AT_FIRST // num_outputs))
        if options.needs_inputs:
            fewest = max(fewest, ceil(_MARGIN * min(options.largest_dim, p) / num_outputs))
        exact = options.projector is not None and (options.projector.needs_exact or not options.projector.reduces)
        if exact and N * num_outputs >= p:  # fewer rows than parameters take another way
            fewest = max(fewest, ceil(p / num_outputs))
        if options.outside is not None and options.outside.fits_weight:
            fewest = max(fewest, _FEWEST_WEIGHTED)
        return fewest

    def _sizes(
        self, engine: Linearization, num_outputs: int, positions: bool, N: int, validated: int, most: int | None = None
    ) -> Sizes:
        """Return the sizes of a fit to N inputs; `most` limits X′ in a rehearsal."""
        options, source, n = self.options.resolved(positions), self.options.subspace_inputs, 0
        if options.needs_inputs and isinstance(source, Given):
            n = num_inputs(joined_inputs(source.inputs, "subspace_inputs"))
            n = n if most is None else min(n, most)
        elif options.needs_inputs:
            n = min(N, source.number(options.largest_dim, num_outputs))  # type: ignore[union-attr]
        left_out: int | None = num_left_out(num_outputs)
        if positions:
            left_out = num_with_positions(num_outputs, engine.memory_budget)
        kept = n - max(1, n // 5) if options.holds_back else n
        row_bytes = 3 * 8 * engine.layout.num_parameters * num_outputs
        weighted = min(N - (n - kept), SUBSAMPLE, engine.memory_budget // row_bytes)
        return Sizes(
            num_data=N,
            subspace_inputs=n,
            left_out=min(N, left_out or 0),
            weighted=(weighted,) if weighted >= 0.93 * N else (weighted // 2, weighted),
            validated=validated,
            rows=kept * self._rows(options, num_outputs, max(1, kept), engine),
            num_parameters=engine.layout.num_parameters,
        )

    @staticmethod
    def _rows(options: Options, num_outputs: int, n: int, engine: Linearization) -> int:
        """Return the Jacobian rows per input of X′: all outputs, or random combinations of many."""
        rows = sketched_rows(options.largest_dim, n, engine.layout.num_parameters * engine.dtype.itemsize)
        return num_outputs if options.resources.samples(num_outputs) is None or 2 * rows >= num_outputs else rows

    def _rehearsed(
        self, engine: Linearization, num_outputs: int, positions: bool, real: Sizes, count: int
    ) -> "_Rehearsal":
        """Run the fit, the tuning and a prediction with `count` inputs."""
        data, reading, batch_size = _first(self.loader, count)
        others = [] if self.val_loader is None else _first(self.val_loader, count)[0]
        sizes = self._sizes(engine, num_outputs, positions, _total(data), _total(others), count)
        options, budget = self._shortened(count), engine.memory_budget
        if sizes.subspace_inputs < real.subspace_inputs:  # rows of X′ take the same share of it
            budget = max(_SMALLEST_BUDGET, budget * sizes.subspace_inputs // real.subspace_inputs)
            budget = min(budget, engine.memory_budget)
        options = replace(options, resources=replace(options.resources, memory_budget=budget))
        loader = _as_loader(data)
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about the few data of the rehearsal
            fitted = fit(options, loader, self.model, self.forward, False, bool(others), None, False)
            if others:
                fitted = tuned_on(fitted, _as_loader(others))
            taken = time.perf_counter() - start
            self.predict(fitted, data[0].inputs)  # what it keeps for the next time is made
            predicting = least_seconds(lambda: self.predict(fitted, data[0].inputs)) / num_inputs(data[0].inputs)
        return _Rehearsal(fitted, options, sizes, data[0].inputs, taken, predicting, reading, batch_size)

    def _shortened(self, count: int) -> Options:
        """Return the options of a rehearsal, with at most `count` of the subspace inputs that were given."""
        source = self.options.subspace_inputs
        if not isinstance(source, Given):
            return self.options
        return replace(
            self.options,
            subspace_inputs=Given(select(joined_inputs(source.inputs, "subspace_inputs"), slice(0, count))),
        )

    def _scaled(self, rehearsal: "_Rehearsal", real: Sizes) -> Estimate:
        rates = Rates.measured(rehearsal.fitted.linearization.device)
        fitted, inputs = rehearsal.fitted, rehearsal.inputs
        memory = StageMemory.of(fitted, real, self.options, inputs, rehearsal.batch_size, self.predict)
        stages = {}
        for name, stage in rehearsal.fitted.stages.items():
            seconds = scaled_stage(name, stage, rehearsal.sizes, real, rates)
            if name == "survey" or (stage.in_passes and name != "complement's weight"):
                seconds += rehearsal.reading * real.num_data
            if name == "validation":
                seconds += rehearsal.reading * real.validated
            stages[name] = StageEstimate(seconds, memory.of_stage(name))
        prediction = StageEstimate(rehearsal.prediction, memory.of_stage("prediction"))
        return Estimate(stages, prediction, real.num_data, rehearsal.sizes.num_data)


@dataclass(frozen=True)
class _Rehearsal:
    """What a rehearsal gives."""

    fitted: Fitted
    options: Options
    sizes: Sizes
    inputs: Any  # of the first batch
    seconds: float  # of the fit and the tuning
    prediction: float  # seconds per input
    reading: float  # seconds per input
    batch_size: int  # of the user's loader


def _first(loader: Iterable[Any], count: int) -> tuple[list[Batch], float, int]:
    """Return batches with the first `count` inputs of a loader, seconds of reading per input, and the largest batch."""
    parts: list[Batch] = []
    left, read, largest, start = count, 0, 0, time.perf_counter()
    for batch in batches(loader):
        n = num_inputs(batch.inputs)
        some = slice(0, min(left, n))
        weights = None if batch.weights is None else batch.weights[some]
        parts.append(Batch(select(batch.inputs, some), batch.targets[some], weights))
        left, read, largest = left - n, read + n, max(largest, n)
        if left <= 0:
            break
    return parts, (time.perf_counter() - start) / read, largest


def _total(parts: list[Batch]) -> int:
    return sum(num_inputs(part.inputs) for part in parts)


def _as_loader(parts: list[Batch]) -> list[tuple[Any, ...]]:
    """Return batches as users give them, without weights where there are none."""
    return [tuple(part if part.weights is not None else part[:2]) for part in parts]
