"""X′, the inputs that the subspace is built from: drawn from the training data, perturbed, or given."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from sublaplace.data.batches import (
    Batch,
    Ragged,
    batches,
    input_batches,
    join,
    num_inputs,
    parts_of,
    select,
)


@dataclass(frozen=True)
class Drawn:
    """Subspace inputs drawn uniformly from the training data.

    Args:
        count: how many; None: max(100, 2s/C), at most all.
    """

    count: int | None = None

    def number(self, dim: int, num_outputs: int) -> int:
        """Return how many inputs to draw for a subspace of dimension `dim` and C outputs."""
        return self.count or max(100, ceil(2 * dim / num_outputs))

    def varied(self, inputs: Any, seed: int) -> Any:
        """Return the drawn inputs as they are used: unchanged."""
        return inputs


@dataclass(frozen=True)
class Perturbed:
    """Subspace inputs drawn from the training data, with noise: they lie around the data instead of on them.

    Args:
        scale: the size of the noise, relative to the spread of each feature.
        count: how many; None: max(100, 2s/C), at most all.
    """

    scale: float = 0.1
    count: int | None = None

    def number(self, dim: int, num_outputs: int) -> int:
        """Return how many inputs to draw for a subspace of dimension `dim` and C outputs."""
        return Drawn(self.count).number(dim, num_outputs)

    def varied(self, inputs: Any, seed: int) -> Any:
        """Return the drawn inputs with noise."""
        return perturbed(inputs, self.scale, seed)


@dataclass(frozen=True, eq=False)
class Given:
    """Subspace inputs that the user passed: a tensor, a batch or a loader; labels are not needed."""

    inputs: Any

    def varied(self, inputs: Any, seed: int) -> Any:
        """Return the inputs as they are used: unchanged."""
        return inputs


SubspaceInputs = Drawn | Perturbed | Given


def joined_inputs(x: Any, what: str) -> Any:
    """Return all inputs of a tensor, mapping or loader as one batch, which is `Ragged` if their shapes differ."""
    parts = [inputs for inputs in input_batches(x) if num_inputs(inputs)]
    if not parts:
        raise ValueError(f"There are no inputs: {what} is empty.")
    return join(parts)


def inputs_of(drawn: Batch | Ragged) -> Any:
    """Return the inputs of training data without their targets and weights."""
    return join([part.inputs for part in parts_of(drawn)])


def perturbed(inputs: Any, scale: float, seed: int) -> Any:
    """Add noise of `scale` times the spread of every feature: x + scale·(x′ − x″)/√2.

    x′ and x″ are drawn from the inputs, so the noise has their covariance: features that vary together in the data are
    moved together, and inputs stay in the affine space that the data span.
    """
    if isinstance(inputs, Ragged):
        raise ValueError(
            "subspace_inputs=Perturbed(…) needs inputs of one shape; those of the loader's batches differ."
        )
    generator, n = torch.Generator().manual_seed(seed), num_inputs(inputs)
    first, second = (torch.randint(n, (n,), generator=generator, device="cpu") for _ in range(2))
    if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_flatten(inputs)[0]):
        raise ValueError("subspace_inputs=Perturbed(…) needs floating-point inputs; integers cannot be perturbed.")

    def noisy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.ndim or len(leaf) != n:
            return leaf
        return leaf + scale * (leaf[first] - leaf[second]) / 2**0.5

    return tree_map(noisy, inputs)


def split(inputs: Any) -> tuple[Any, Any]:
    """Split X′ into all but its last fifth, and that fifth, which is held back to judge the subspace."""
    n = num_inputs(inputs)
    if n < 2:
        raise ValueError(
            "dim=Captured(…) and a fitted complement weight hold back a fifth of the subspace inputs, so at least two "
            "are needed."
        )
    kept = n - max(1, n // 5)
    return select(inputs, slice(0, kept)), select(inputs, slice(kept, n))


def batch_at(loader: Iterable[Any], positions: list[int]) -> Batch | Ragged:
    """Return the inputs at these places of the stream, in the order given, with their targets and weights."""
    found: dict[int, Batch] = {}
    wanted, start = set(positions), 0
    for batch in batches(loader):
        stop = start + num_inputs(batch.inputs)
        for position in wanted.intersection(range(start, stop)):
            one = slice(position - start, position - start + 1)
            weight = torch.ones(1, device="cpu") if batch.weights is None else batch.weights[one].cpu()
            found[position] = Batch(select(batch.inputs, one), batch.targets[one], weight)
        start = stop
    joined: Batch | Ragged = join([found[position] for position in positions])
    return joined


class Reservoir:
    """A uniform draw of `size` inputs from a stream of unknown length: those with the smallest random keys.

    A larger draw with the same seed begins with the smaller one. Memory: `size` inputs and one batch.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._generator = torch.Generator().manual_seed(seed)
        self._keys = torch.empty(0, dtype=torch.float64, device="cpu")
        self._positions = torch.empty(0, dtype=torch.long, device="cpu")
        self._seen = 0
        self._drawn: Batch | Ragged | None = None  # in the order of the stream

    def add(self, batch: Batch, position: int, counts: Tensor | None = None) -> None:
        """Draw from more inputs, which stand at `position` of the stream.

        `counts`, (n, 1) or (n, C), says how much each target counts; inputs that do not count are not drawn. The keys
        of inputs that other ranks have seen are drawn too, so that the draw does not depend on the number of ranks.
        """
        n = num_inputs(batch.inputs)
        torch.rand(position - self._seen, generator=self._generator, dtype=torch.float64, device="cpu")
        self._seen = position
        keys = torch.rand(n, generator=self._generator, dtype=torch.float64, device="cpu")
        candidates = keys < (self._keys.max() if len(self._keys) == self._size else torch.inf)
        if counts is not None:
            candidates &= counts.detach().cpu().amax(1) > 0
        chosen = torch.nonzero(candidates).squeeze(1)
        positions = self._seen + chosen
        self._seen += n
        if not len(chosen):
            return
        weights = torch.ones(n, device="cpu") if batch.weights is None else batch.weights.cpu()
        new = select(batch._replace(weights=weights), chosen)
        self._keep(
            torch.cat([self._keys, keys[chosen]]),
            torch.cat([self._positions, positions]),
            new if self._drawn is None else join([self._drawn, new]),
        )

    def _keep(self, keys: Tensor, positions: Tensor, drawn: Batch | Ragged) -> None:
        """Keep the inputs with the smallest keys."""
        best = torch.argsort(keys)[: self._size].sort().values
        self._keys, self._positions, self._drawn = keys[best], positions[best], select(drawn, best)

    def joined(self, others: list["Reservoir"]) -> "Reservoir":
        """Return the draw from several streams, which have seen different places of one."""
        result = copy.copy(self)
        filled = [other for other in others if other._drawn is not None]
        result._keep(
            torch.cat([other._keys for other in filled]),
            torch.cat([other._positions for other in filled]),
            join([other._drawn for other in filled]),
        )
        return result

    @property
    def batch(self) -> Batch | Ragged:
        """The drawn inputs with their targets and weights, in the order of their keys."""
        if self._drawn is None:
            raise ValueError("Nothing has been drawn.")
        drawn: Batch | Ragged = select(self._drawn, torch.argsort(self._keys))
        return drawn

    @property
    def positions(self) -> list[int]:
        """Where the drawn inputs stand in the stream."""
        return [int(position) for position in self._positions[torch.argsort(self._keys)]]
