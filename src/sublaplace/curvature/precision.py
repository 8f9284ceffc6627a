"""Posterior precisions Λ = GGN + λI that can be inverted.

`BlockPrecision` is block-diagonal over the parameters, and each block is diagonal, Kronecker-factored or dense. It
covers the isotropic, diagonal and KFAC approximations. The exact precisions are in `exact_precision.py`. A precision
yields the covariance of outputs, J Λ⁻¹ Jᵀ, and products of Λ⁻¹ with vectors in parameter space.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from sublaplace.curvature.joint import factored_joint_covariance
from sublaplace.curvature.operators import PARTS, DiagonalPart, Part
from sublaplace.jacobians.blocks import Block
from sublaplace.jacobians.features import FeatureBlock
from sublaplace.jacobians.jacobian import Jacobian, Jacobians
from sublaplace.jacobians.wanted import ROWS, Wanted
from sublaplace.model.linalg import Vectors, gram
from sublaplace.model.parameters import ParameterLayout
from sublaplace.runtime.memory import grouped


class Solvable(Protocol):
    """A precision Λ with a method to solve linear systems."""

    def solve(self, vectors: Vectors) -> Vectors:
        """Return Λ⁻¹ v for r vectors; may overwrite the vectors."""


@dataclass(frozen=True)
class EigenvalueOccam:
    """The Occam factor ½ Σ ln(λ / (λ + γ)), from the eigenvalues γ of a curvature. Cost: one read of them."""

    eigenvalues: Tensor  # γ, float64, including `scale`
    scale: float  # of the likelihood, already in the eigenvalues

    def __call__(self, prior_precision: Tensor, scales: Tensor) -> Tensor:
        """Evaluate at λ and another scale of the likelihood; several scales are summed up and cannot be changed."""
        ratio = scales.squeeze() / self.scale if scales.numel() == 1 else 1.0
        return 0.5 * (prior_precision / (prior_precision + ratio * self.eigenvalues)).log().sum()


class Precision(ABC):
    """A precision Λ over all parameters, which projectors and predictions use; it is also a posterior.

    Subclasses are frozen dataclasses with the three fields below.
    """

    layout: ParameterLayout
    prior_precision: float
    scale: float  # of the likelihood, already in the curvature
    kind: ClassVar[str]  # in saved files

    @property
    @abstractmethod
    def dim(self) -> int:
        """The number of dimensions in which the posterior is exact."""

    @property
    def subspace(self) -> None:
        """None, because there is no subspace."""
        return None

    @property
    def outside(self) -> "BlockPrecision | None":
        """The approximation outside of the exact dimensions, or None."""
        return None

    @property
    def wanted(self) -> Wanted:
        """What `covariance` and `variance` ask of a Jacobian: all of its rows."""
        return ROWS

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """Return Λ with the curvature times a factor and the same λ."""

    @abstractmethod
    def solve(self, vectors: Vectors) -> Vectors:
        """Return Λ⁻¹ v for r vectors; may overwrite the vectors."""

    @abstractmethod
    def matmul(self, vectors: Vectors) -> Vectors:
        """Return Λ v for r vectors."""

    @abstractmethod
    def covariance(self, jacobian: Jacobian) -> Tensor:
        """Return J_i Λ⁻¹ J_iᵀ for every input: (n, K, K)."""

    @abstractmethod
    def joint_covariance(self, jacobians: Jacobians) -> Tensor:
        """Return J Λ⁻¹ Jᵀ jointly over all inputs: (nK, nK) in float64."""

    @abstractmethod
    def log_determinant(self) -> Tensor:
        """Return ln det Λ."""

    @abstractmethod
    def curvature_eigenvalues(self) -> Tensor:
        """Return the eigenvalues of the GGN or its approximation, without λ, in float64."""

    @abstractmethod
    def sample(self, noise: Callable[[int], Tensor]) -> Tensor:
        """Return k draws from N(0, Λ⁻¹): (k, p).

        Args:
            noise: a function from m to standard normal draws (k, m).
        """

    @abstractmethod
    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the posterior as tensors and numbers for a file; `restored` inverts it."""

    @classmethod
    @abstractmethod
    def restored(
        cls, tensors: dict[str, Tensor], numbers: dict[str, Any], layout: ParameterLayout, dtype: torch.dtype
    ) -> Self:
        """Restore a posterior from the result of `stored`."""

    def variance(self, jacobian: Jacobian) -> Tensor:
        """Return the diagonals of `covariance`: (n, K)."""
        return self.covariance(jacobian).diagonal(dim1=1, dim2=2)

    def whitened(self, jacobians: Jacobians) -> Vectors | None:
        """Return B = J Λ^(−½) by parameter, or None if it is expensive."""
        return None

    def with_prior(self, prior_precision: float) -> Self:
        """Return Λ with another λ."""
        return replace(self, prior_precision=prior_precision)  # type: ignore[type-var]

    def with_scales(self, scales: tuple[float, ...]) -> Self:
        """Return Λ under another scale of the likelihood (σ⁻²).

        Raises:
            ValueError: if there are several scales.
        """
        return self.scaled(single(scales) / self.scale)

    def truncated(self, dim: int) -> Self:
        """Raise ValueError, because there is no subspace."""
        raise ValueError("A posterior over all parameters has no leading dimensions.")

    def occam(self) -> EigenvalueOccam:
        """Return the Occam factor ½ Σ ln(λ / (λ + γ)) as a function of λ and the likelihood's scales."""
        return EigenvalueOccam(self.curvature_eigenvalues(), self.scale)

    def _numbers(self) -> dict[str, Any]:
        return {"kind": self.kind, "prior_precision": self.prior_precision, "scale": self.scale}


@dataclass(frozen=True)
class BlockPrecision(Precision):
    """A precision Λ that is block-diagonal over the parameters. Memory: its parts, Σ (I² + O²) over layers for KFAC.

    A parameter without a part has no uncertainty, as all parameters before the last layer have none in its posterior.
    """

    layout: ParameterLayout
    parts: dict[str, Part]
    prior_precision: float
    scale: float = 1.0  # of the likelihood, already in the curvature
    weight: float = 1.0  # factor on the measured curvature, already in it
    kind: ClassVar[str] = "blocks"

    @property
    def dim(self) -> int:
        return 0

    @property
    def outside(self) -> "BlockPrecision":
        return self

    @property
    def wanted(self) -> Wanted:
        """All rows with respect to the parameters that have a part."""
        return Wanted(names=None if self.covers_all else frozenset(self.parts), features=True)

    @property
    def covers_all(self) -> bool:
        """Whether every parameter has a part."""
        return len(self.parts) == len(self.layout.names)

    def scaled(self, factor: float) -> "BlockPrecision":
        return replace(
            self, parts={name: part.scaled(factor) for name, part in self.parts.items()}, scale=self.scale * factor
        )

    def reweighted(self, weight: float) -> "BlockPrecision":
        """Return Λ with another weight on the measured curvature and the same scale of the likelihood."""
        return replace(self.scaled(weight / self.weight), scale=self.scale, weight=weight)

    def in_units(self, units: dict[str, float]) -> "BlockPrecision":
        """Return the curvature with respect to parameters in other units, θ = unit · φ."""
        return replace(self, parts={name: part.scaled(units[name] ** 2) for name, part in self.parts.items()})

    def joined(self, more: "BlockPrecision") -> "BlockPrecision":
        """Return the curvature of both data sets together, in units of a scale of 1 and with this one's weight."""
        one, other = (block.scaled(1 / (block.scale * block.weight)) for block in (self, more))
        parts = {name: part.joined(other.parts[name]) for name, part in one.parts.items()}
        return BlockPrecision(self.layout, parts, self.prior_precision).reweighted(self.weight)

    def outside_covariances(self, jacobian: Jacobian, weights: Sequence[float]) -> Tensor:
        """Return J Λ⁻¹ Jᵀ for other weights of the curvature: (weights, n, K, K) in float64."""
        return torch.stack([self.reweighted(weight).covariance(jacobian).double() for weight in weights])

    def solve(self, vectors: Vectors) -> Vectors:
        for name, part in self.parts.items():
            for piece in _few(vectors[name]):
                piece.copy_(part.solve(piece, self.prior_precision))
        return vectors

    def matmul(self, vectors: Vectors) -> Vectors:
        return {name: part.matmul(vectors[name], self.prior_precision) for name, part in self.parts.items()}

    def covariance(self, jacobian: Jacobian) -> Tensor:
        n, K = jacobian.num_inputs, jacobian.num_rows
        result = jacobian.outputs.new_zeros(n, K, K)
        for part, block in self._uses(jacobian):
            result += part.covariance(block, self.prior_precision)
        found = self._of_features(jacobian)
        if found is not None:
            mix, inner = found
            result += mix @ inner @ mix.T
        return result

    def variance(self, jacobian: Jacobian) -> Tensor:
        result = jacobian.outputs.new_zeros(jacobian.num_inputs, jacobian.num_rows)
        for part, block in self._uses(jacobian):
            result += part.variance(block, self.prior_precision)
        found = self._of_features(jacobian)
        if found is not None:
            mix, inner = found
            result += ((mix @ inner) * mix).sum(2)
        return result

    def _uses(self, jacobian: Jacobian) -> Iterator[tuple[Part, Block]]:
        """Yield the parts with their blocks, without those of features."""
        for name, part in self.parts.items():
            block = jacobian.blocks.get(name)
            if block is not None and not isinstance(block, FeatureBlock):
                yield part, block

    def _of_features(self, jacobian: Jacobian) -> tuple[Tensor, Tensor] | None:
        """Return W (C, F) and the covariance of the features, (n, F, F); None if there are no rows of features."""
        total, mix = None, None
        for name, part in self.parts.items():
            block = jacobian.blocks.get(name)
            if isinstance(block, FeatureBlock):
                mix, found = block.mix, part.covariance(block.inner, self.prior_precision)
                total = found if total is None else total.add_(found)
        return None if mix is None or total is None else (mix, total)

    def joint_covariance(self, jacobians: Jacobians) -> Tensor:
        jacobians = replace(jacobians, wanted=replace(self.wanted, features=False))
        rows = self.whitened(jacobians) if self.covers_all else None
        return factored_joint_covariance(self.parts, self.prior_precision, jacobians) if rows is None else gram(rows)

    def whitened(self, jacobians: Jacobians) -> Vectors | None:
        """Return B = J Λ^(−½) with B Bᵀ = J Λ⁻¹ Jᵀ, (nK, size) per parameter; None if it exceeds the memory budget."""
        if len(grouped_by_memory(self.layout, jacobians)) > 1:
            return None
        count, like = jacobians.num_rows, torch.empty(0, dtype=jacobians.dtype, device=jacobians.device)
        rows = self.layout.zeros(count, like)
        start = 0
        for jacobian in jacobians:
            stop = start + jacobian.num_inputs * jacobian.num_rows
            for name, block in jacobian.blocks.items():
                whitened = self.parts[name].whiten(block, self.prior_precision)
                rows[name][start:stop] = jacobian.require_finite(whitened).flatten(0, 1)
            start = stop
            del jacobian  # frees its memory before the next one is computed
        return rows

    def unwhitened(self, vectors: Vectors) -> Vectors:
        """Return Λ^(−½) v with the root of `whitened`, in place, so that Λ⁻¹ Jᵀ u = Λ^(−½) Bᵀ u."""
        for name, part in self.parts.items():
            for piece in _few(vectors[name]):
                piece.copy_(part.unwhiten(piece, self.prior_precision))
        return vectors

    def log_determinant(self) -> Tensor:
        return (self.curvature_eigenvalues() + self.prior_precision).log().sum()

    def curvature_eigenvalues(self) -> Tensor:
        return torch.cat([part.eigenvalues().double() for part in self.parts.values()])

    def sample(self, noise: Callable[[int], Tensor]) -> Tensor:
        drawn = {}
        for name, part in self.parts.items():
            drawn[name] = part.sample(noise(self.layout.sizes[name]).to(part.eigenvalues()), self.prior_precision)
        like = next(iter(drawn.values()))
        return torch.cat(
            [
                drawn[name] if name in drawn else like.new_zeros(len(like), size)
                for name, size in self.layout.sizes.items()
            ],
            dim=1,
        )

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, described = {}, {}
        for name, part in self.parts.items():
            described[name] = {"kind": type(part).__name__}
            for f in fields(part):  # type: ignore[arg-type]
                value = getattr(part, f.name)
                if isinstance(value, Tensor):
                    tensors[f"part.{f.name}.{name}"] = value
                else:
                    described[name][f.name] = value
        return tensors, {**self._numbers(), "weight": self.weight, "parts": described}

    @classmethod
    def restored(
        cls, tensors: dict[str, Tensor], numbers: dict[str, Any], layout: ParameterLayout, dtype: torch.dtype
    ) -> "BlockPrecision":
        parts: dict[str, Part] = {}
        for name, described in numbers["parts"].items():
            kind = PARTS[described["kind"]]
            held = {f.name: tensors.get(f"part.{f.name}.{name}", described.get(f.name)) for f in fields(kind)}
            parts[name] = kind(**held)
        return cls(layout, parts, numbers["prior_precision"], numbers["scale"], numbers["weight"])


def _few(vectors: Tensor) -> tuple[Tensor, ...]:
    """Split vectors (r, size) into views of a few vectors, to limit the memory of intermediate results."""
    return vectors.split(max(1, 2**24 // vectors.shape[1]))


def single(scales: tuple[float, ...]) -> float:
    """Return the only scale.

    Raises:
        ValueError: if there are several scales.
    """
    if len(scales) > 1:
        raise ValueError(
            "The curvature over all parameters is one sum over the outputs, so a noise_std per output "
            "cannot be changed after the fit: fit again with it, or use a subspace projector."
        )
    return scales[0]


def isotropic_precision(layout: ParameterLayout, like: Tensor, prior_precision: float) -> BlockPrecision:
    """Return Λ = λI, the precision without any data, with the dtype and device of `like`."""
    parts: dict[str, Part] = {name: DiagonalPart(like.new_zeros(size)) for name, size in layout.sizes.items()}
    return BlockPrecision(layout, parts, prior_precision)


def grouped_by_memory(layout: ParameterLayout, jacobians: Jacobians) -> list[list[str]]:
    """Split the parameters, in order, into groups whose rows for all inputs fit into the memory budget."""
    limit = jacobians.memory_budget // (jacobians.num_rows * jacobians.dtype.itemsize)
    return grouped(layout.sizes, limit)
