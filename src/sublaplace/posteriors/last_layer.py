r"""Variances of a subspace that is the last linear layer, whose rows :math:`e_c \otimes a` need not be formed.

With the columns :math:`W_c` of :math:`L^{-1}` that belong to output c, the variance is :math:`\|W_c a\|^2`. The
triangular factor :math:`R_c` of :math:`W_c = Q_c R_c` has as few rows as the layer has inputs. The sum of squares is
the same.
"""

import torch
from torch import Tensor

from sublaplace.jacobians.head import HeadBlock
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.projection import Projection, Subset

LARGEST_INVERTED = 1500
"""Dimensions up to which the factors are made; their cost, s³, would be that of predictions for many inputs."""


def heads_of(jacobian: Jacobian, projection: Projection) -> list[HeadBlock] | None:
    """Return the blocks of a last layer if P selects all of their parameters and no other ones; None otherwise."""
    if not isinstance(projection, Subset) or projection.dim > LARGEST_INVERTED:
        return None
    names = projection.whole_parameters
    if names is None or jacobian.forward is not None:
        return None
    blocks = [jacobian.blocks.get(name) for name in names]
    heads = [block for block in blocks if isinstance(block, HeadBlock)]
    return heads if len(heads) == len(blocks) else None


def output_factors(factor: Tensor, heads: list[HeadBlock]) -> Tensor:
    """Return R_c for every output: (C, I, I) in float64, with the inputs of all parameters one after another.

    Args:
        factor: L, lower triangular: (s, s).
        heads: the parameters of the layer, in the order of the subspace.
    """
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    places, start = [], 0
    for head in heads:
        places.append(head.as_maps(torch.arange(start, start + head.size, device=factor.device)))
        start += head.size
    columns = inverse[:, torch.cat(places, dim=1)]  # (s, C, I)
    factors: Tensor = torch.linalg.qr(columns.transpose(0, 1), mode="r").R
    return factors


def output_variances(factors: Tensor, heads: list[HeadBlock]) -> Tensor:
    """Return the variance of every output: (n, C) in float64. Cost: C·I² per input."""
    inputs = torch.cat([head.inputs for head in heads], dim=1).double()
    return torch.einsum("cji,ni->ncj", factors, inputs).square().sum(2)
