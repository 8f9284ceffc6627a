"""The curvature of the last linear layer, summed during a pass that is for something else."""

from dataclasses import dataclass

from torch import Tensor

from sublaplace.curvature.exact_last_layer import ExactLastLayerSums
from sublaplace.curvature.last_layer import KroneckerSums
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.likelihoods.base import Likelihood
from sublaplace.runtime.distributed import Ranks


@dataclass(frozen=True)
class LastLayerSums:
    """The sums of both forms of the curvature, or of the one that is needed.

    Args:
        kronecker: the sums of the Kronecker factors; None: not needed.
        exact: the sum of the exact GGN; None: not needed.
    """

    kronecker: KroneckerSums | None
    exact: ExactLastLayerSums | None

    @classmethod
    def of(
        cls,
        linearization: Linearization,
        likelihood: Likelihood,
        names: tuple[str, ...],
        num_outputs: int,
        kronecker: bool,
        exact: bool,
    ) -> "LastLayerSums":
        """Return empty sums for a layer with the parameters `names`."""
        layout, device = linearization.layout, linearization.device
        return cls(
            KroneckerSums.of(likelihood, names, num_outputs, device) if kronecker else None,
            ExactLastLayerSums.of(likelihood, layout, names, num_outputs, device) if exact else None,
        )

    def add(self, jacobians: list[Jacobian], target_weights: Tensor | None) -> None:
        """Add inputs: Jacobians without rows of the layer, and how much each target counts, (n, 1) or (n, C)."""
        start = 0
        for jacobian in jacobians:
            stop = start + jacobian.num_inputs
            weights = None if target_weights is None else target_weights[start:stop]
            weighted = Jacobian(jacobian.layout, jacobian.blocks, jacobian.outputs, 0, weights)
            for sums in (self.kronecker, self.exact):
                if sums is not None:
                    sums.add(weighted)
            start = stop

    def add_up(self, ranks: Ranks) -> None:
        """Replace the sums on every rank by their total over all ranks."""
        for sums in (self.kronecker, self.exact):
            if sums is not None:
                ranks.add_up(sums)
