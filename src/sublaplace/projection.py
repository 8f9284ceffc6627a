"""The subspace θ = θ̂ + P μ: a basis held by parameter, or a choice of single parameters."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.model.linalg import Vectors, gram
from sublaplace.model.parameters import ParameterLayout


class Projection(Protocol):
    """P (p, s), as far as posteriors need it. Its columns are orthonormal, leading ones first."""

    @property
    def dim(self) -> int: ...

    def apply(self, jacobian: Jacobian) -> Tensor:
        """J P: (n, K, s)."""

    def gram(self) -> Tensor:
        """PᵀP: (s, s) in float64; the identity up to the rounding of P."""

    def leading(self, dim: int) -> "Projection":
        """The first `dim` columns."""

    def matrix(self) -> Tensor:
        """P itself: (p, s)."""

    def lift(self, coordinates: Tensor) -> Tensor:
        """P μ for coordinates (k, s): (k, p)."""

    def part(self, name: str) -> Tensor:
        """The columns of P as far as they belong to one parameter, as rows: (s, size)."""

    def tensors(self) -> dict[str, Tensor]:
        """P as a file keeps it, for `projection_from`."""


@dataclass(frozen=True)
class Basis:
    """Any orthonormal P, stored once: for each parameter the (s, size) part of Pᵀ. Memory: p·s."""

    layout: ParameterLayout
    vectors: Vectors

    @property
    def dim(self) -> int:
        return len(next(iter(self.vectors.values())))

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
    """Unit vectors of chosen parameters, as indices into θ̂. Memory: s."""

    layout: ParameterLayout
    indices: Tensor  # (s,)
    dtype: torch.dtype

    @property
    def dim(self) -> int:
        return len(self.indices)

    @cached_property
    def _parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        return self.layout.split_indices(self.indices)

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
    """Return the projection of `Projection.tensors`."""
    if "indices" in tensors:
        return Subset(layout, tensors["indices"], dtype)
    return Basis(layout, {name: tensors[f"basis.{name}"] for name in layout.names})
