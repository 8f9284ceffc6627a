"""A pass over the data that gives the network's outputs, and the curvature of its last layer beside them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sublaplace.curvature.last_layer_sums import LastLayerSums
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.linearization import Linearization
from sublaplace.runtime.distributed import Ranks


class LastLayerPass:
    """The network's outputs, and sums over the inputs of its last layer from the same forward passes.

    Args:
        linearization: the network, probed before the first outputs are asked for.
        begun: from C to empty sums; None where none are needed, or where the last layer has none.
    """

    def __init__(self, linearization: Linearization, begun: Callable[[int], LastLayerSums | None]) -> None:
        self.sums: LastLayerSums | None = None
        self._linearization, self._begun, self._first = linearization, begun, True
        self._passed: list[Jacobian] | None = None

    def outputs(self, inputs: Any) -> Tensor:
        """Return f(x) of a batch: (n, C)."""
        if self._first:
            self.sums, self._first = self._begun(self._linearization.num_outputs_seen() or 0), False
        self._passed = None if self.sums is None else self._linearization.last_layer(inputs)
        if self._passed is None:
            self.sums = None  # a pass of its own makes them
            return self._linearization.outputs(inputs)
        return torch.cat([jacobian.outputs for jacobian in self._passed])

    def add(self, target_weights: Tensor | None) -> None:
        """Add the last batch to the sums; the weights say how much each target counts, (n, 1) or (n, C)."""
        if self.sums is not None and self._passed is not None:
            self.sums.add(self._passed, target_weights)
            self._passed = None

    def finish(self, ranks: Ranks) -> None:
        """Add up the sums of all ranks, if every rank has them."""
        if not all(ranks.gather(self.sums is not None)):
            self.sums = None
        if self.sums is not None:
            self.sums.add_up(ranks)
