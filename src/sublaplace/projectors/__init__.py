"""Projectors: how the subspace is chosen. One file a family; a new one is one function that returns a `Projection`."""

from sublaplace.projectors.low_rank import low_rank
from sublaplace.projectors.subset import largest, last_layer
from sublaplace.projectors.swag import swag_variances

__all__ = ["largest", "last_layer", "low_rank", "swag_variances"]
