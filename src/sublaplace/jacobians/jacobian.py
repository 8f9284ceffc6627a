"""The factored Jacobian of a batch, and of many inputs chunk by chunk."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from sublaplace.data.batches import num_inputs, select
from sublaplace.jacobians.blocks import Block, OuterBlock, RowBlock
from sublaplace.model.linalg import Vectors
from sublaplace.model.parameters import ParameterLayout


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


class Engine(Protocol):
    """What `Jacobians` asks of a `Linearization`."""

    @property
    def layout(self) -> ParameterLayout: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def memory_budget(self) -> int: ...

    def chunks(self, inputs: Any) -> Iterator[Jacobian]: ...

    def num_outputs(self, inputs: Any) -> int: ...

    def zero_vectors(self, count: int) -> Vectors: ...


@dataclass(frozen=True)
class Jacobians:
    """The Jacobian of a set of inputs (with respect to all outputs), chunk by chunk; may be read repeatedly."""

    linearization: Engine
    inputs: Any
    progress: bool = False

    def __iter__(self) -> Iterator[Jacobian]:
        total = num_inputs(self.inputs)
        with tqdm(total=total, desc="Jacobians", unit="input", disable=not self.progress, leave=False) as bar:
            for jacobian in self.linearization.chunks(self.inputs):
                yield jacobian
                bar.update(jacobian.num_inputs)

    def few(self, count: int) -> "Jacobians":
        """Return those of the first `count` inputs."""
        return replace(self, inputs=select(self.inputs, slice(0, count)))

    @property
    def num_rows(self) -> int:
        """n·C."""
        return num_inputs(self.inputs) * self.linearization.num_outputs(self.inputs)

    @property
    def memory_budget(self) -> int:
        """Bytes for temporary chunks."""
        return self.linearization.memory_budget

    @property
    def dtype(self) -> torch.dtype:
        """The type of the rows."""
        return self.linearization.dtype

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.linearization.device


def non_finite_jacobian(name: str) -> str:
    return (
        f"The Jacobian with respect to '{name}' holds NaN or infinity: the network is not differentiable at some "
        "input. Common reasons: a square root or a division at zero, or an overflow in a low precision."
    )


def require_finite_sum(name: str, total: Tensor) -> None:
    """An error that names the parameter, if a sum over its rows is not finite."""
    if not torch.isfinite(total).all():
        raise ValueError(non_finite_jacobian(name))
