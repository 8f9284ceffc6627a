"""The exact GGN of the last linear layer, from its inputs and the network's outputs."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sublaplace.curvature.directions import Roots
from sublaplace.jacobians.blocks import OuterBlock
from sublaplace.jacobians.head import HeadBlock
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.model.likelihoods.base import Likelihood
from sublaplace.model.linalg import mirrored
from sublaplace.model.parameters import ParameterLayout

_NUMBERS_AT_ONCE = 2**22


@dataclass(frozen=True)
class ExactLastLayerSums:
    """The sum Σ_n H_n ⊗ a aᵀ over the inputs a of the layer, in which the bias has the input 1.

    Cost: C²·I²/2 multiplications per input, where the rows of the Jacobian take K·C²·I². Memory: C²·I².
    """

    likelihood: Likelihood
    names: tuple[str, ...]  # of the layer's parameters
    total: Tensor  # the blocks (c, c′) with c′ ≤ c: (C, I, C, I) in float64, with the inputs of all parameters
    transposed: dict[str, bool] = field(default_factory=dict)  # which parameters are stored as (I, C)

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        layout: ParameterLayout,
        names: tuple[str, ...],
        num_outputs: int,
        device: torch.device,
    ) -> "ExactLastLayerSums":
        """Return empty sums."""
        C, I = num_outputs, sum(layout.sizes[name] for name in names) // num_outputs
        return cls(likelihood, names, torch.zeros(C, I, C, I, dtype=torch.float64, device=device))

    def add(self, jacobian: Jacobian) -> None:
        """Add inputs, whose Jacobian may be without rows."""
        parts = []
        for name in self.names:
            block = jacobian.blocks[name]
            assert isinstance(block, OuterBlock)
            self.transposed[name] = block.transposed
            parts.append(HeadBlock.of(block).inputs.double())
        inputs, C = torch.cat(parts, dim=1), len(self.total)
        step = max(1, _NUMBERS_AT_ONCE // (C * max(C, inputs.shape[1])))
        for start in range(0, len(inputs), step):
            some = slice(start, start + step)
            weights = None if jacobian.target_weights is None else jacobian.target_weights[some]
            roots = Roots(self.likelihood, weights)(jacobian.outputs[some]).double()
            self._add(inputs[some], roots.mT @ roots)

    def _add(self, inputs: Tensor, hessians: Tensor) -> None:
        for c in range(len(self.total)):
            weighted = hessians[:, c, : c + 1, None] * inputs[:, None, :]
            self.total[c, :, : c + 1] += (inputs.T @ weighted.flatten(1)).unflatten(1, (c + 1, -1))

    def matrix(self, layout: ParameterLayout) -> Tensor:
        """Return the GGN of the layer without the likelihood's scale, in the order of θ̂: (s, s) in float64."""
        C, I = self.total.shape[:2]
        places, first = torch.arange(C * I, device=self.total.device).view(C, I), 0
        order = []
        for name in self.names:
            own = places[:, first : first + layout.sizes[name] // C]
            order.append((own.T if self.transposed[name] else own).flatten())
            first += own.shape[1]
        indices = torch.cat(order)
        return mirrored(self.total.reshape(C * I, C * I))[indices][:, indices]

    def tensors(self) -> dict[str, Tensor]:
        """Return the sum so far."""
        return {"total": self.total}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on from this sum."""
        self.total.copy_(tensors["total"])
