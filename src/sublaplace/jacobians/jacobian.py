"""The factored Jacobian of a batch."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sublaplace.jacobians.blocks import Block, OuterBlock, RowBlock
from sublaplace.parameters import ParameterLayout, Vectors


@dataclass(frozen=True)
class Jacobian:
    """J of n inputs with K rows each, as one block a parameter; a parameter without a block has zero rows.

    Row (n, k) is the gradient of uᵀf(x_n) with u the k-th cotangent of input n: an output, or a column of the root of
    the output Hessian. Memory: the factors of the blocks, n·K·(activations of the network), never n·K·p.
    """

    layout: ParameterLayout
    blocks: dict[str, Block]
    outputs: Tensor  # f(x): (n, C)
    num_rows: int  # K
    weights: Tensor | None = None  # how much each input counts in sums over inputs alone: (n,); None: once
    repeats_inputs: bool = False  # whether an earlier Jacobian has other rows of the same inputs

    @property
    def num_inputs(self) -> int:
        return len(self.outputs)

    def require_finite(self, product: Tensor) -> Tensor:
        """`product`, which was made from this Jacobian; an error that names the parameter if it is not finite."""
        # The sum is finite if all numbers are (up to an overflow), and takes a single look at each.
        if torch.isfinite(product.sum()) or torch.isfinite(product).all():
            return product
        for name, block in self.blocks.items():
            if not torch.isfinite(block.rows()).all():
                raise ValueError(non_finite_jacobian(name))
        raise ValueError("A product with the Jacobian overflows; use a float64 model.")

    def matmul(self, vectors: Vectors) -> Tensor:
        """J V for r vectors: (n, K, r)."""
        r = len(next(iter(vectors.values())))
        result = self.outputs.new_zeros(self.num_inputs, self.num_rows, r)
        for name, block in self.blocks.items():
            result += block.matmul(vectors[name])
        return self.require_finite(result)

    def add_transpose_matmul(self, weights: Tensor, into: Vectors) -> None:
        """Adds Jᵀ U to `into`, for U of shape (n, K, r)."""
        for name, block in self.blocks.items():
            block.add_transpose_matmul(weights, into[name])

    def formed(self, count: int) -> "Jacobian":
        """This one for several products with `count` vectors each, which would form the same rows every time.

        Memory: n·K·p at the most, so it is only done where that is a quarter of the vectors' or less.
        """
        if 4 * self.num_inputs * self.num_rows > count:
            return self
        blocks = {
            name: RowBlock(block.rows()) if isinstance(block, OuterBlock) and not block.factors_first(count) else block
            for name, block in self.blocks.items()
        }
        return replace(self, blocks=blocks)

    def columns(self, parts: dict[str, tuple[Tensor, Tensor]], count: int) -> Tensor:
        """The columns of J that `ParameterLayout.split_indices` names: (n, K, count)."""
        result = self.outputs.new_zeros(self.num_inputs, self.num_rows, count)
        for name, (places, indices) in parts.items():
            if name in self.blocks:
                result[:, :, places] = self.blocks[name].columns(indices)
        return self.require_finite(result)

    def dense_rows(self) -> Tensor:
        """All rows, (n·K, p): for small networks and references only."""
        n, K = self.num_inputs, self.num_rows
        parts = [
            self.blocks[name].rows() if name in self.blocks else self.outputs.new_zeros(n, K, size)
            for name, size in self.layout.sizes.items()
        ]
        return self.require_finite(torch.cat(parts, dim=2).flatten(0, 1))


def non_finite_jacobian(name: str) -> str:
    return (
        f"The Jacobian with respect to '{name}' holds NaN or infinity: the network is not differentiable at some "
        "input. Common reasons: a square root or a division at zero, or an overflow in a low precision."
    )


def require_finite_sum(name: str, total: Tensor) -> None:
    """An error that names the parameter, if a sum over its rows is not finite."""
    if not torch.isfinite(total).all():
        raise ValueError(non_finite_jacobian(name))
