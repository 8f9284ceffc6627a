"""The subspace θ = θ̂ + P μ: a basis stored by parameter, or a subset of single parameters."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.model.linalg import Vectors, gram
from sublaplace.model.parameters import ParameterLayout


class Projection(Protocol):
    """The projection P (p, s). Its columns are orthonormal and ordered by importance."""

    @property
    def dim(self) -> int:
        """The dimension s of the subspace."""

    @property
    def support(self) -> frozenset[str] | None:
        """The parameters that P moves; None: all."""

    def apply(self, jacobian: Jacobian) -> Tensor:
        """Return J P: (n, K, s)."""

    def gram(self) -> Tensor:
        """Return PᵀP, the identity up to the rounding of P: (s, s) in float64."""

    def leading(self, dim: int) -> "Projection":
        """Return the projection to the first `dim` columns."""

    def matrix(self) -> Tensor:
        """Return P as a dense matrix: (p, s)."""

    def lift(self, coordinates: Tensor) -> Tensor:
        """Return P μ for coordinates (k, s): (k, p)."""

    def part(self, name: str) -> Tensor:
        """Return the rows of P that belong to one parameter, transposed: (s, size)."""

    def tensors(self) -> dict[str, Tensor]:
        """Return P as tensors for a file; `projection_from` restores it."""


@dataclass(frozen=True)
class Basis:
    """A dense orthonormal P, stored as the (s, size) part of Pᵀ for each parameter. Memory: p·s."""

    layout: ParameterLayout
    vectors: Vectors

    @property
    def dim(self) -> int:
        return len(next(iter(self.vectors.values())))

    @property
    def support(self) -> None:
        return None

    def apply(self, jacobian: Jacobian) -> Tensor:
        return jacobian.matmul(self.vectors)

    def gram(self) -> Tensor:
        return gram(self.vectors)

    def leading(self, dim: int) -> "Basis":
        return Basis(self.layout, {name: part[:dim] for name, part in self.vectors.items()})

    def matrix(self) -> Tensor:
        return self.layout.flatten(self.vectors).T

    def part(self, name: str) -> Tensor:
        return self.vectors[name]

    def tensors(self) -> dict[str, Tensor]:
        return {f"basis.{name}": part for name, part in self.vectors.items()}

    def lift(self, coordinates: Tensor) -> Tensor:
        return self.layout.flatten({name: coordinates.to(part) @ part for name, part in self.vectors.items()})


@dataclass(frozen=True)
class Subset:
    """A subset of single parameters, stored as indices into θ̂. Memory: s.

    Raises:
        ValueError: if the indices are not one row of different integers in [0, p).
    """

    layout: ParameterLayout
    indices: Tensor  # (s,)
    dtype: torch.dtype

    def __post_init__(self) -> None:
        found, p = self.indices, self.layout.num_parameters
        if not isinstance(found, Tensor) or found.dtype != torch.int64 or found.ndim != 1 or not len(found):
            what = f"{tuple(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"The indices of a Subset must be a tensor of shape (s,) and type int64, not {what}.")
        if int(found.min()) < 0 or int(found.max()) >= p:
            raise ValueError(
                f"The indices of a Subset must lie in 0 … {p - 1}, the places of the {p} parameters; they are in "
                f"{int(found.min())} … {int(found.max())}."
            )
        if len(found.unique()) < len(found):
            raise ValueError("The indices of a Subset must differ from each other.")

    @property
    def dim(self) -> int:
        return len(self.indices)

    @cached_property
    def _parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        return self.layout.split_indices(self.indices)

    @cached_property
    def whole_parameters(self) -> tuple[str, ...] | None:
        """The parameters of which every entry is selected, in order; None if other entries are selected as well."""
        slices = self.layout.slices
        names = tuple(name for name in self.layout.names if name in self._parts)
        every = torch.cat([torch.arange(slices[name].start, slices[name].stop, device="cpu") for name in names])
        return names if torch.equal(self.indices.cpu(), every) else None

    @property
    def support(self) -> frozenset[str]:
        return frozenset(self._parts)

    def apply(self, jacobian: Jacobian) -> Tensor:
        return jacobian.columns(self._parts, self.dim)

    def gram(self) -> Tensor:
        return torch.eye(self.dim, dtype=torch.float64, device=self.indices.device)

    def leading(self, dim: int) -> "Subset":
        return Subset(self.layout, self.indices[:dim], self.dtype)

    def matrix(self) -> Tensor:
        identity = torch.eye(self.dim, dtype=self.dtype, device=self.indices.device)
        return self.lift(identity).T

    def part(self, name: str) -> Tensor:
        result = torch.zeros(self.dim, self.layout.sizes[name], dtype=self.dtype, device=self.indices.device)
        if name in self._parts:
            places, inside = self._parts[name]
            result[places, inside] = 1
        return result

    def tensors(self) -> dict[str, Tensor]:
        return {"indices": self.indices}

    def lift(self, coordinates: Tensor) -> Tensor:
        result = coordinates.new_zeros(len(coordinates), self.layout.num_parameters)
        result[:, self.indices] = coordinates
        return result


def projection_from(tensors: dict[str, Tensor], layout: ParameterLayout, dtype: torch.dtype) -> Projection:
    """Restore the projection that `Projection.tensors` stored.

    Args:
        tensors: the stored tensors.
        layout: the parameters of the model.
        dtype: the dtype of the model, for a `Subset`.
    """
    if "indices" in tensors:
        return Subset(layout, tensors["indices"], dtype)
    return Basis(layout, {name: tensors[f"basis.{name}"] for name in layout.names})
