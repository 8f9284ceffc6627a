"""X′, the inputs that P is built from: given ones as one batch, noise, and a part that is held back."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from sublaplace.arguments import AUTO, FITTED, PERTURBED
from sublaplace.data import input_batches, join
from sublaplace.jacobians.inputs import num_inputs, select


def joined_inputs(x: Any, what: str) -> Any:
    """All inputs of a tensor, mapping or loader as one batch."""
    parts = list(input_batches(x))
    if not any(num_inputs(inputs) for inputs in parts):
        raise ValueError(f"There are no inputs: {what} is empty.")
    return join(parts)


def perturbed(inputs: Any, scale: float, seed: int) -> Any:
    """Inputs plus noise of `scale` times the spread of every feature over them: x + scale·(x′ − x″)/√2.

    x′ and x″ are drawn from the inputs, so that the noise has their covariance: features that go together in the data
    are moved together, and inputs do not leave the flat that the data lie in.
    """
    generator, n = torch.Generator().manual_seed(seed), num_inputs(inputs)
    first, second = (torch.randint(n, (n,), generator=generator) for _ in range(2))
    if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_flatten(inputs)[0]):
        raise ValueError(f"subspace_inputs='{PERTURBED}' needs floating-point inputs; integers cannot be perturbed.")

    def noisy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.ndim or len(leaf) != n:
            return leaf
        return leaf + scale * (leaf[first] - leaf[second]) / 2**0.5

    return tree_map(noisy, inputs)


def split(inputs: Any) -> tuple[Any, Any]:
    """X′ without its last fifth, and that fifth, which is held back to measure what the rest captures."""
    n = num_inputs(inputs)
    if n < 2:
        raise ValueError(
            f"dim='{AUTO}' and complement_weight='{FITTED}' hold back a fifth of the subspace inputs, so at least two "
            "are needed."
        )
    kept = n - max(1, n // 5)
    return select(inputs, slice(0, kept)), select(inputs, slice(kept, n))
