"""Choose how many inputs to process at once."""

from dataclasses import dataclass

from sublaplace.jacobians.blocks import ROWS_AT_ONCE
from sublaplace.jacobians.plan import Plan
from sublaplace.jacobians.wanted import ROWS, Wanted
from sublaplace.model.parameters import ParameterLayout

_USEFUL_CHUNK = 64 * 2**20  # bytes; larger chunks leave the caches and are not faster
_PASSING_CHUNK = 16 * 2**20  # bytes; the same where only outputs of calls pass by, and no graph keeps them
_FEWEST_INPUTS = 4  # per chunk, even beyond that size: every chunk updates sums as large as the parameters
_USEFUL_ROWS = 256  # per chunk; with fewer rows, reading P is the bottleneck of a product with a large P
_TANGENTS_AT_ONCE = 10  # in forward mode; more leave the caches
_INPUTS_OF_TANGENTS = 10  # per chunk in forward mode: every chunk reads all vectors
_MANY_OUTPUTS = 512  # beyond, directions in the outputs take memory that counts
_COPIES = 3  # of a tangent in activation functions and pooling
_SHARE_OF_VECTORS = 4  # to reach that number, a chunk may use a quarter of the memory of P


@dataclass(frozen=True)
class ChunkPolicy:
    """The size of chunks under a memory budget.

    Args:
        memory_budget: bytes for temporary chunks.
        num_vectors: how many vectors in parameter space are multiplied by a Jacobian at once; s if P is a matrix.
    """

    memory_budget: int = 2**30
    num_vectors: int = 0

    @property
    def peak_bytes(self) -> int:
        """What the chunks of a pass take at the most: half as much again as the budget, and one useful chunk.

        `tests/test_memory.py` compares it with measured peaks.
        """
        return self.memory_budget * 3 // 2 + min(_USEFUL_CHUNK, self.memory_budget)

    def size(
        self,
        plan: Plan,
        layout: ParameterLayout,
        itemsize: int,
        rows: int,
        row_by_row: bool,
        wanted: Wanted = ROWS,
    ) -> int:
        """Return how many inputs to process at once within the memory budget.

        Args:
            plan: the measured size of the network's activations.
            layout: the sizes of the parameters.
            itemsize: bytes per number.
            rows: Jacobian rows per input.
            row_by_row: whether only one row per input is formed at a time.
            wanted: the parameters that count.
        """
        one = self.bytes_per_input(plan, layout, itemsize, rows, row_by_row, wanted)
        useful = max(_PASSING_CHUNK if _passes_by(plan, wanted) else _USEFUL_CHUNK, _FEWEST_INPUTS * one)
        if not row_by_row:
            vectors = self.num_vectors * layout.num_parameters * itemsize
            useful = max(useful, min(-(-_USEFUL_ROWS // max(1, rows)) * one, vectors // _SHARE_OF_VECTORS))
        return max(1, min(self.memory_budget, useful) // one)

    def bytes_per_input(
        self, plan: Plan, layout: ParameterLayout, itemsize: int, rows: int, row_by_row: bool, wanted: Wanted = ROWS
    ) -> int:
        """Return the memory that one input takes; arguments as of `size`."""
        names = [name for name in layout.names if wanted.includes((name,))]
        general = rows * sum(layout.sizes[name] for name in plan.general if name in names)
        sizes = plan.sizes(wanted)
        held = min(rows, 2) if row_by_row else rows  # row by row: the current row and the next row
        formed = 2 * held * max(layout.sizes[name] for name in names)
        if wanted.products is not None:  # which form few rows at once
            formed = min(formed, 2 * ROWS_AT_ONCE // _FEWEST_INPUTS)
        passing = max(_graph(plan, wanted), _passing(plan))
        elements = held * sizes.gradients + formed + passing + general + 2 * sizes.inputs
        if plan.num_outputs > _MANY_OUTPUTS:
            elements += rows * plan.num_outputs  # the directions themselves
        return max(1, elements * itemsize)

    def tangents_at_once(self, plan: Plan, itemsize: int) -> int:
        """Return how many tangents share a pass in forward mode; fewer if those of one input exceed the budget."""
        one = max(1, _COPIES * plan.sizes().activations * itemsize)
        return max(1, min(_TANGENTS_AT_ONCE, self.memory_budget // one))

    def forward_size(self, plan: Plan, itemsize: int, count: int) -> int:
        """Return how many inputs to process at once in forward mode within the memory budget.

        Args:
            plan: the measured size of the network's activations.
            itemsize: bytes per number.
            count: how many vectors the Jacobian is multiplied by; a product of `count` numbers per output is held.
        """
        tangents = _COPIES * plan.sizes().activations * min(count, self.tangents_at_once(plan, itemsize))
        one = max(1, (tangents + 4 * plan.num_outputs * count) * itemsize)
        useful = max(_USEFUL_CHUNK, _INPUTS_OF_TANGENTS * one)
        return max(1, min(self.memory_budget, useful) // one)


def _graph(plan: Plan, wanted: Wanted) -> int:
    """Return the numbers that one input's graph keeps: outputs of calls and of the activation functions after them."""
    return 2 * plan.sizes(wanted).activations


def _passing(plan: Plan) -> int:
    """Return the numbers of one input that a call reads and writes at the most."""
    return 2 * max((call.outputs for call in plan.measured), default=0) // plan.measured_inputs


def _passes_by(plan: Plan, wanted: Wanted) -> bool:
    """Return whether the outputs of most calls are freed at once, because nothing before the last calls is wanted."""
    return _graph(plan, wanted) < _passing(plan)
