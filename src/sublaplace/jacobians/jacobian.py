"""The factored Jacobian of a batch, and the Jacobians of many inputs in chunks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sublaplace.data.batches import num_inputs, parts_of, select
from sublaplace.jacobians.blocks import Block, OuterBlock, RowBlock
from sublaplace.jacobians.features import FeatureBlock
from sublaplace.jacobians.head import CurvedHeadBlock
from sublaplace.jacobians.wanted import ROWS, Wanted
from sublaplace.model.linalg import Vectors
from sublaplace.model.parameters import ParameterLayout
from sublaplace.runtime.progress import input_bar

_UNIT_VECTORS_AT_ONCE = 16


@dataclass(frozen=True)
class Jacobian:
    """The Jacobian J of n inputs with K rows each, stored as one block per parameter.

    A parameter without a block has zero rows. Row (n, k) is the gradient of uᵀf(x_n), where u is the k-th cotangent of
    input n: an output, or a column of the root of the output Hessian. Memory: the factors of the blocks,
    n·K·(activations of the network), never n·K·p.

    If only products with vectors are wanted, they may come from forward-mode differentiation (see `forward.py`). The
    blocks are then computed only if they are asked for.
    """

    layout: ParameterLayout
    blocks: Mapping[str, Block]
    outputs: Tensor  # f(x): (n, C)
    num_rows: int  # K
    target_weights: Tensor | None = None  # how much each target counts, (n, 1) or (n, C); None: once
    present: Tensor | None = None  # which positions of the inputs are data, not padding, (n, T); None: all
    repeats_inputs: bool = False  # whether an earlier Jacobian holds other rows of the same inputs
    forward: Callable[[Vectors], Tensor] | None = None  # J V by forward-mode differentiation
    transposed: Callable[[Tensor, Vectors], None] | None = None  # adds Jᵀ U by ordinary backward passes
    curved: Mapping[str, CurvedHeadBlock] = field(default_factory=dict)  # a last layer in sums over all directions

    @property
    def num_inputs(self) -> int:
        """The number of inputs, n."""
        return len(self.outputs)

    @property
    def has_features(self) -> bool:
        """Whether rows come from those of fewer features."""
        return any(isinstance(block, FeatureBlock) for block in self.blocks.values())

    @property
    def weights(self) -> Tensor | None:
        """The weights of the inputs, for sums over inputs rather than rows: (n,); None: 1."""
        return None if self.target_weights is None else self.target_weights.amax(1)

    def require_finite(self, product: Tensor) -> Tensor:
        """Return `product`, which was computed from this Jacobian, if it is finite.

        Raises:
            ValueError: if it is not; the message names the parameter.
        """
        # One sum is the cheapest test; only a sum that is not finite needs a test of every number.
        if torch.isfinite(product.sum()) or torch.isfinite(product).all():
            return product
        for name, block in self.blocks.items():
            if not torch.isfinite(block.rows()).all():
                raise ValueError(non_finite_jacobian(name))
        raise ValueError("A product with the Jacobian overflows; use a float64 model.")

    def matmul(self, vectors: Vectors) -> Tensor:
        """Return J V for r vectors V: (n, K, r). V is zero for parameters that `vectors` does not have."""
        if self.forward is not None:
            return self.require_finite(self.forward(vectors))
        r = len(next(iter(vectors.values())))
        result = self.outputs.new_zeros(self.num_inputs, self.num_rows, r)
        features, mix = None, None  # W is multiplied by the sum over all parameters, once
        for name, block in self.blocks.items():
            if name not in vectors:
                continue
            if isinstance(block, FeatureBlock):
                found, mix = block.inner.matmul(vectors[name]), block.mix
                features = found if features is None else features.add_(found)
            else:
                result += block.matmul(vectors[name])
        if features is not None and mix is not None:
            result += mix @ features
        return self.require_finite(result)

    def add_transpose_matmul(self, weights: Tensor, into: Vectors) -> None:
        """Add Jᵀ U to `into`, for U of shape (n, K, r)."""
        if self.transposed is not None:
            self.transposed(weights, into)
            return
        of_features: Tensor | None = None
        for name, block in self.blocks.items():
            if isinstance(block, FeatureBlock):
                of_features = block.mix.T @ weights if of_features is None else of_features
                block.inner.add_transpose_matmul(of_features, into[name])
            else:
                block.add_transpose_matmul(weights, into[name])

    def formed(self, count: int) -> "Jacobian":
        """Return this Jacobian with rows formed in advance, for several products with `count` vectors each.

        Otherwise every product would form the same rows again. Memory: at most n·K·p, so rows are only formed if that
        is at most a quarter of the memory of the vectors.
        """
        if self.forward is not None or 4 * self.num_inputs * self.num_rows > count:
            return self
        blocks = {
            name: RowBlock(block.rows()) if isinstance(block, OuterBlock) and not block.factors_first(count) else block
            for name, block in self.blocks.items()
        }
        return replace(self, blocks=blocks)

    def scaled(self, factors: dict[str, float]) -> "Jacobian":
        """Return this Jacobian with respect to parameters in other units: each block times its factor."""
        return replace(
            self,
            blocks={name: block.scaled(factors[name]) for name, block in self.blocks.items()},
            curved={name: block.scaled(factors[name]) for name, block in self.curved.items()},
        )

    def columns(self, parts: dict[str, tuple[Tensor, Tensor]], count: int) -> Tensor:
        """Return `count` columns of J: (n, K, count).

        Args:
            parts: the indices of the columns by parameter, from `ParameterLayout.split_indices`.
            count: the number of columns.
        """
        if self.forward is not None:
            return torch.cat([self.matmul(some) for some in self._unit_vectors(parts, count)], dim=2)
        result = self.outputs.new_zeros(self.num_inputs, self.num_rows, count)
        for name, (places, indices) in parts.items():
            if name in self.blocks:
                result[:, :, places] = self.blocks[name].columns(indices)
        return self.require_finite(result)

    def _unit_vectors(self, parts: dict[str, tuple[Tensor, Tensor]], count: int) -> Iterator[Vectors]:
        """Yield the unit vectors of the columns, a few at a time."""
        for start in range(0, count, _UNIT_VECTORS_AT_ONCE):
            size = min(_UNIT_VECTORS_AT_ONCE, count - start)
            vectors = {name: self.outputs.new_zeros(size, self.layout.sizes[name]) for name in parts}
            for name, (places, indices) in parts.items():
                chosen = (places >= start) & (places < start + size)
                vectors[name][places[chosen] - start, indices[chosen]] = 1
            yield vectors

    def dense_rows(self) -> Tensor:
        """Return all rows, (n·K, p), for small networks."""
        n, K = self.num_inputs, self.num_rows
        parts = [
            self.blocks[name].rows() if name in self.blocks else self.outputs.new_zeros(n, K, size)
            for name, size in self.layout.sizes.items()
        ]
        return self.require_finite(torch.cat(parts, dim=2).flatten(0, 1))


class Engine(Protocol):
    """The part of `Linearization` that `Jacobians` uses."""

    @property
    def layout(self) -> ParameterLayout:
        """Names and shapes of the parameters."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""

    @property
    def memory_budget(self) -> int:
        """Bytes for temporary chunks."""

    @property
    def keeps_graph(self) -> bool:
        """Whether Jacobians can be differentiated with respect to the inputs."""

    def chunks(self, inputs: Any, cotangents: Tensor | None = None, wanted: Wanted = ROWS) -> Iterator[Jacobian]:
        """Yield the Jacobians of parts of a large batch, within the memory budget."""

    def num_outputs(self, inputs: Any) -> int:
        """Return the number of outputs, C."""

    def zero_vectors(self, count: int) -> Vectors:
        """Return `count` zero vectors in parameter space."""


@dataclass(frozen=True)
class Jacobians:
    """An iterable over the Jacobians of a set of inputs, in chunks.

    Args:
        linearization: the network.
        inputs: the inputs.
        progress: whether to show a bar.
        wanted: what will be asked of the Jacobians.
        directions: in the outputs, (n, k, C), one row each; None: one row per output. Where the parts of ragged inputs
            have different numbers of outputs, C is the largest.
    """

    linearization: Engine
    inputs: Any
    progress: bool = False
    wanted: Wanted = ROWS
    directions: Tensor | None = None

    def __iter__(self) -> Iterator[Jacobian]:
        total = num_inputs(self.inputs)
        with input_bar(total, "Jacobians", self.progress) as bar:
            for jacobian in self.linearization.chunks(self.inputs, self.directions, self.wanted):
                yield jacobian
                bar.update(jacobian.num_inputs)

    def few(self, count: int) -> "Jacobians":
        """Return the Jacobians of the first `count` inputs."""
        directions = None if self.directions is None else self.directions[:count]
        return replace(self, inputs=select(self.inputs, slice(0, count)), directions=directions)

    def whole(self, count: int) -> "Jacobians":
        """Return the Jacobians of all outputs, for products of them and their transposes with `count` vectors."""
        return replace(self, directions=None, wanted=Wanted(count, transposed=True))

    @property
    def num_rows(self) -> int:
        """The number of rows, n·C or n·k."""
        if self.directions is not None:
            return self.directions.shape[0] * self.directions.shape[1]
        return sum(num_inputs(part) * self.linearization.num_outputs(part) for part in parts_of(self.inputs))

    @property
    def memory_budget(self) -> int:
        """Bytes for temporary chunks."""
        return self.linearization.memory_budget

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self.linearization.dtype

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.linearization.device


def non_finite_jacobian(name: str) -> str:
    """Return the error message for a parameter whose Jacobian is not finite."""
    return (
        f"The Jacobian with respect to '{name}' holds NaN or infinity: the network is not differentiable at some "
        "input. Common causes are a square root or a division at zero, and overflow in low precision."
    )


def require_finite_sum(name: str, total: Tensor) -> None:
    """Raise ValueError, naming the parameter, if `total`, a sum over its rows, is not finite."""
    if not torch.isfinite(total).all():
        raise ValueError(non_finite_jacobian(name))
