"""How many inputs are worked on at once."""

from dataclasses import dataclass

from sublaplace.jacobians.plan import Plan
from sublaplace.model.parameters import ParameterLayout

_USEFUL_CHUNK = 64 * 2**20  # bytes; larger chunks leave the caches and are not faster
_FEWEST_INPUTS = 4  # of a chunk even so: sums as large as the parameters are added to once per chunk
_USEFUL_ROWS = 256  # of a chunk; with fewer, a product with a large P is bound by reading P
_SHARE_OF_VECTORS = 4  # for the sake of that, chunks may take as much memory as a quarter of P


@dataclass(frozen=True)
class ChunkPolicy:
    """The size of chunks under a memory budget.

    Args:
        memory_budget: bytes for temporary chunks.
        num_vectors: how many vectors of parameter space Jacobians are multiplied with at once: s, if P is a matrix.
    """

    memory_budget: int = 2**30
    num_vectors: int = 0

    def size(self, plan: Plan, layout: ParameterLayout, itemsize: int, rows: int, row_by_row: bool) -> int:
        """Return how many inputs with `rows` rows each fit into the memory budget at once."""
        general = rows * sum(layout.sizes[name] for name in plan.general)
        held = min(rows, 2) if row_by_row else rows  # row by row: the one in use and the next one
        largest = max(layout.sizes.values())
        graph = 2 * plan.gradient_elements  # outputs of the calls and of the activations after them
        elements = held * (plan.gradient_elements + 2 * largest) + graph + general + 2 * plan.input_elements
        one = max(1, elements * itemsize)
        useful = max(_USEFUL_CHUNK, _FEWEST_INPUTS * one)
        if not row_by_row:
            vectors = self.num_vectors * layout.num_parameters * itemsize
            useful = max(useful, min(-(-_USEFUL_ROWS // max(1, rows)) * one, vectors // _SHARE_OF_VECTORS))
        return max(1, min(self.memory_budget, useful) // one)
