"""What the stages of a fit hold in memory, from the sizes of a fit and from passes with a few inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from sublaplace.curvature.operators import DENSE_OUTPUTS
from sublaplace.curvature.stream import LARGEST_PORTION
from sublaplace.data.batches import num_inputs, plain, select
from sublaplace.fitting.fitted import Fitted
from sublaplace.fitting.leave_one_out import DIMENSIONS
from sublaplace.fitting.scaling import Sizes
from sublaplace.fitting.validation import POINTS
from sublaplace.jacobians.linearization import Linearization
from sublaplace.jacobians.wanted import ROWS, Wanted
from sublaplace.options import Options
from sublaplace.posteriors.weighting import SUBSAMPLE
from sublaplace.projectors.low_rank import DENSE_ROWS
from sublaplace.runtime.allocations import allocated_bytes
from sublaplace.runtime.memory import default_budget

_MEASURED_INPUTS = 8
_BESIDE = 2**20  # bytes of Python objects, and of freed memory that the allocator keeps
_PANELS = 16 * 2**20  # bytes of the panels that products and decompositions of large matrices work on
_SQUARES_OF_A_SWEEP = 8  # s × s matrices: PᵀΛP in other coordinates, its eigenvectors and what LAPACK needs for them


@dataclass(frozen=True)
class StageMemory:
    """What the stages hold at once, in bytes; see the table of costs in DESIGN.md."""

    forward: int  # a forward pass with a batch of the user's
    data: int  # the drawn training data, and copies of the parameters, one of them in float64
    factors: int  # KFAC's, decomposed
    sums: int  # the same while they are summed and decomposed
    by_row: int  # a chunk of a pass for sums over rows
    chunk: int  # a chunk of a pass for products
    predicted: int  # the same in predictions, whose batches are not joined
    rows: int  # whitened rows of X′, their covariance and its eigenvectors
    vectors: int  # P
    beside: int  # further p × s matrices, of a complement
    left_out: int
    weighted: int
    validated: int
    swept: int  # the algebra of a sweep over λ in s dimensions, and the rows of a batch
    held: int  # the posterior

    @classmethod
    def of(
        cls,
        fitted: Fitted,
        real: Sizes,
        options: Options,
        inputs: Any,
        batch_size: int,
        predict: Callable[[Fitted, Any], Any],
    ) -> "StageMemory":
        """Return what the stages will hold; a few inputs of a rehearsal tell what passes take per input.

        Args:
            fitted: what the rehearsal has fitted.
            real: the sizes of the fit.
            options: what the user decided.
            inputs: the first batch.
            batch_size: of the user's loader.
            predict: predicts for inputs with what was fitted.
        """
        engine = fitted.linearization
        options = options.resolved(fitted.survey.layout is not None)
        item, p, C = engine.dtype.itemsize, real.num_parameters, fitted.survey.num_outputs
        budget = options.resources.memory_budget or default_budget(engine.device)
        inputs = engine.to_device(inputs)
        samples = options.resources.samples(C) or C
        per_input = _bytes(inputs) // num_inputs(inputs)
        alone = options.projector is not None and options.projector.last_layer and options.outside is None
        surveyed = alone and engine.ends_linear()  # the survey makes the curvature
        wanted = Wanted(names=frozenset(engine.last_linear())) if surveyed else ROWS
        shapes = [engine.layout.shape(name) for name in engine.layout.names if wanted.includes((name,))]
        factors = sum(_factor_entries(shape) for shape in shapes)
        largest = max(_sides(shape)[1] for shape in shapes)
        subspace = fitted.posterior.subspace
        s = 0 if subspace is None else subspace.dim
        matrix = p * s * item if options.num_vectors else 0
        posterior = fitted.posterior.stored()[0].values()
        fits_weight = options.outside is not None and options.outside.fits_weight
        drawn = real.subspace_inputs + (SUBSAMPLE if fits_weight or options.leaves_one_out else 0)
        few = select(inputs, slice(0, _MEASURED_INPUTS))
        with engine.borrowed():
            forward = allocated_bytes(lambda: engine.outputs(few)) // num_inputs(few)
            one_row = allocated_bytes(lambda: _first_rows(engine, few, wanted)) // num_inputs(few)
        product = allocated_bytes(lambda: predict(fitted, few)) // num_inputs(few)
        # Without directions to drop, the user's batches are not joined before they are cut into chunks.
        joined = LARGEST_PORTION if fitted.survey.likelihood.drops_directions else 0
        portion = min(real.num_data, max(batch_size, joined))
        by_row = min(portion, engine.chunk_size(inputs, samples, True, wanted=wanted))
        at_once = engine.chunk_size(inputs, C, wanted=fitted.predictive.wanted)
        return cls(
            forward=forward * batch_size,
            data=_BESIDE + per_input * min(real.num_data, drawn) + p * (2 * item + 8),
            factors=factors * item,
            sums=factors * (8 + item) + 3 * 8 * largest**2,
            by_row=0 if surveyed else one_row * by_row,
            chunk=0 if surveyed else product * min(portion, at_once),
            predicted=product * min(batch_size, at_once),
            rows=min(real.rows * p * item, budget)
            + 3 * 8 * min(real.rows, DENSE_ROWS) ** 2
            + _PANELS * (real.rows > 0),
            vectors=matrix,
            beside=(3 if options.outside is not None else 0) * matrix,
            left_out=5 * 8 * real.left_out * C * (DIMENSIONS + 1),
            weighted=3 * 8 * max(real.weighted) * C * p,
            validated=POINTS * 8 * real.validated * C,
            swept=8 * s * (_SQUARES_OF_A_SWEEP * s + 3 * C * batch_size),
            held=sum(tensor.numel() * tensor.element_size() for tensor in posterior),
        )

    def of_stage(self, name: str) -> int:
        """Return the peak of a stage; the reduced posterior's for stages without an entry."""
        return {
            "survey": self.data + self.forward,
            "prior precision": self.data + self.sums + self.by_row,
            "layers' units": self.data + self.sums + self.by_row,
            "complement": self.data + self.sums + self.by_row,
            "last layer": self.data + self.by_row,
            "full posterior": self.held * 4 + self.chunk,
            "projector": self.data + max(self.sums + self.by_row, self.factors + self.rows + self.vectors + self.chunk),
            "complement's weight": self.data + self.held + self.weighted + self.beside,
            "leave-one-out": self.data + self.held + self.left_out + self.chunk,
            "validation": self.data + self.held + self.validated + self.swept + self.predicted,
            "KFAC's traces": self.held + self.chunk,
            "prediction": self.held + self.predicted,
        }.get(name, self.data + self.factors + self.vectors + self.beside + self.chunk)


def _sides(shape: torch.Size) -> tuple[int, int]:
    """Return the outputs and the inputs of a weight."""
    return (shape[0], shape.numel() // max(1, shape[0])) if len(shape) > 1 else (shape.numel(), 1)


def _factor_entries(shape: torch.Size) -> int:
    """Return the entries of a weight's Kronecker factors; that of very many outputs, or of embeddings, is diagonal."""
    outputs, inputs = _sides(shape)
    return inputs**2 + (outputs if outputs > DENSE_OUTPUTS else outputs**2)


def _first_rows(engine: Linearization, inputs: Any, wanted: Wanted) -> None:
    """Run the passes for the first two rows of each input."""
    rows = engine.row_by_row(inputs, wanted=wanted)
    for _, jacobian in zip(range(2), rows, strict=False):
        del jacobian


def _bytes(inputs: Any) -> int:
    leaves = tree_flatten(plain(inputs))[0]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))
