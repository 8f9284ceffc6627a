"""Products of a Jacobian with vectors by forward-mode differentiation, without any of its rows."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from sublaplace.jacobians.blocks import Block
from sublaplace.jacobians.general import CallWith
from sublaplace.jacobians.network import Network
from sublaplace.model.linalg import Vectors


class Directions(Protocol):
    """Directions U (n, K, C) in the outputs that need not be formed for a product with them."""

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return U for given outputs."""

    def times(self, outputs: Tensor, products: Tensor) -> Tensor:
        """Return U M for M (n, C, r), or V M for any V with VᵀV = UᵀU: (n, ·, r)."""

    def combined(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return Z U, or Z V with the V of `times`, for Z (n, r, ·): (n, r, C)."""


@dataclass(frozen=True)
class ChosenOutputs:
    """The unit vectors of a few outputs of each input, as directions."""

    places: Tensor  # (n, k)

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return the unit vectors, (n, k, C)."""
        rows = outputs.new_zeros(*self.places.shape, outputs.shape[1])
        return rows.scatter_(2, self.places.unsqueeze(2), 1.0)

    def times(self, outputs: Tensor, products: Tensor) -> Tensor:
        """Return the chosen rows of M (n, C, r)."""
        return products.gather(1, self.places.unsqueeze(2).expand(-1, -1, products.shape[2]))

    def combined(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return Z (n, r, k) at the places of the chosen outputs, (n, r, C)."""
        rows = outputs.new_zeros(*weights.shape[:2], outputs.shape[1])
        return rows.scatter_add_(2, self.places.unsqueeze(1).expand(weights.shape), weights)

    def part(self, start: int, stop: int) -> "ChosenOutputs":
        """Return the directions of some of the inputs."""
        return ChosenOutputs(self.places[start:stop])


class _ForwardMode(TorchFunctionMode):
    """A mode that gives calls the derivatives which backward passes give them.

    Padding rows of embeddings get none. In the presence of any mode, attention and transformer layers avoid their fused
    paths, which have no forward mode.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.embedding:
            given = dict(zip(("input", "weight", "padding_idx"), args, strict=False)) | (kwargs or {})
            if given.get("padding_idx") is not None:
                padding = given["input"] == given["padding_idx"] % len(given["weight"])
                return torch.where(padding.unsqueeze(-1), result.detach(), result)
        return result


def forward_products(network: Network, inputs: Any, vectors: Vectors, at_once: int) -> Tensor:
    """Return J V for r vectors: (n, C, r).

    The parameters move along a few vectors at a time, and one forward pass carries the inputs' tangents along. Inputs
    need no separate treatment: an output depends on the parameters and on its own input alone. Cost: about 2·r forward
    passes; memory: `at_once` times the activations.

    Args:
        network: the network; inputs are on its device.
        inputs: the batch.
        vectors: V, by parameter; a parameter that is missing does not move.
        at_once: how many vectors share a pass.
    """
    wrapped = CallWith(network.model, network.forward)
    values = {f"model.{name}": network.parameters[name].detach() for name in vectors}

    def product(tangents: dict[str, Tensor]) -> Tensor:
        result: Tensor = jvp(lambda given: functional_call(wrapped, given, (inputs,)), (values,), (tangents,))[1]
        return result

    count = len(next(iter(vectors.values())))
    parts = []
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _ForwardMode(), warnings.catch_warnings(action="ignore"):
        for start in range(0, count, at_once):
            tangents = {
                f"model.{name}": part[start : start + at_once].unflatten(1, network.parameters[name].shape)
                if network.parameters[name].ndim
                else part[start : start + at_once].squeeze(1)
                for name, part in vectors.items()
            }
            parts.append(vmap(product)(tangents).movedim(0, 2))
    return torch.cat(parts, dim=2)


def forward_mode_works(network: Network, inputs: Any) -> bool:
    """Return whether forward mode runs for this network, and agrees with an ordinary backward pass.

    uᵀ(J V) is compared with (Jᵀu)ᵀV for a random u and random V, in which every parameter has about the same share.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(
            network.device, network.dtype
        )

    with torch.no_grad():
        outputs = network.forward(network.model, inputs)
    u = drawn(*outputs.shape)
    gradients = network.plain_gradients(inputs, u)
    lengths = {name: float(gradient.norm()) for name, gradient in gradients.items()}
    least = 1e-2 * max(lengths.values())
    if not least:
        return False
    vectors = {name: drawn(2, g.numel()) / max(lengths[name], least) for name, g in gradients.items()}
    expected = torch.stack([vectors[name] @ g for name, g in gradients.items()]).sum(0)
    try:
        found = torch.einsum("ncr,nc->r", forward_products(network, inputs, vectors, 2), u)
    except Exception:  # operations without forward mode or a batching rule raise errors of many kinds
        return False
    return float((found - expected).abs().max()) <= network.tolerance * len(gradients) ** 0.5


class LazyBlocks(Mapping[str, Block]):
    """The blocks of a Jacobian, by backward passes that run only if a block is asked for."""

    def __init__(self, make: Callable[[], Mapping[str, Block]]) -> None:
        self._make = make

    @cached_property
    def _blocks(self) -> Mapping[str, Block]:
        return self._make()

    def __getitem__(self, name: str) -> Block:
        return self._blocks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)
