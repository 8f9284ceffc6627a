"""Projectors that select single parameters."""

import torch
from torch import Tensor

from sublaplace.curvature.operators import DiagonalPart
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.jacobians.linearization import Linearization
from sublaplace.projection import Subset


def largest(linearization: Linearization, scores: Tensor, dim: int) -> Subset:
    """Select the `dim` parameters with the largest scores (p,); ties go to the lowest index. Cost: O(p log p)."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return Subset(linearization.layout, order[:dim], linearization.dtype)


def diagonal_variances(precision: BlockPrecision) -> Tensor:
    """Return the posterior variances of the diagonal Laplace approximation, (p,); largest for inactive parameters."""
    variances = []
    for part in precision.parts.values():
        assert isinstance(part, DiagonalPart)
        variances.append(1 / (part.diagonal.double() + precision.prior_precision))
    return torch.cat(variances)


def last_layer(linearization: Linearization, shape: tuple[int, ...]) -> Subset:
    """Select all parameters of the network's last linear layer, in order.

    Args:
        linearization: the network.
        shape: of the outputs of an input, (C,) or with positions; the layer must have as many outputs as one side.

    Raises:
        ValueError: if the network does not end in a linear layer whose parameters require grad.
    """
    names = linearization.last_linear()
    layout = linearization.layout
    if not names or set(shape).isdisjoint(layout.shape(names[0])):
        raise ValueError(
            "projector='last-layer' needs a network that ends in a linear layer whose parameters require grad; "
            "none was found. Use 'subset-magnitude' or a low-rank projector."
        )
    indices = [
        torch.arange(layout.slices[n].start, layout.slices[n].stop, device="cpu")
        for n in sorted(names, key=layout.names.index)
    ]
    return Subset(layout, torch.cat(indices).to(linearization.device), linearization.dtype)
