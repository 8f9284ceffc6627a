"""The Jacobian of a network in factored form: blocks, the calls they come from, and the engine that makes them."""

from sublaplace.jacobians.blocks import Block, EmbeddingBlock, OuterBlock, RowBlock, SumBlock
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.linearization import Cotangents, Jacobians, Linearization

__all__ = [
    "Block",
    "Cotangents",
    "EmbeddingBlock",
    "Jacobian",
    "Jacobians",
    "Linearization",
    "OuterBlock",
    "RowBlock",
    "SumBlock",
]
