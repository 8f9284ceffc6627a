r"""Posterior precisions Λ = GGN + λI in the forms that can be inverted.

`BlockPrecision` is block-diagonal over the parameters, each block diagonal, Kronecker-factored or dense; the
isotropic, the diagonal and the KFAC approximation are of this form. `DensePrecision` and `DualPrecision` are exact: the
p × p matrix, or the N·C × p rows V of Λ = VᵀV + λI where those are fewer. All give the covariance of outputs, J Λ⁻¹ Jᵀ,
and Λ⁻¹ times vectors of parameter space.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from sublaplace.jacobians import Jacobian, Jacobians
from sublaplace.joint import factored_joint_covariance
from sublaplace.linalg import cholesky, gram, symmetric_product
from sublaplace.memory import grouped
from sublaplace.parameters import ParameterLayout, Vectors
from sublaplace.parts import DiagonalPart, Part, inner_products


class Solvable(Protocol):
    """Λ, as far as it can be divided by."""

    def solve(self, vectors: Vectors) -> Vectors:
        """Λ⁻¹ v for r vectors, whose memory may be used for the result."""


class Precision(Solvable, Protocol):
    """Λ, as far as projectors and predictions need it."""

    @property
    def prior_precision(self) -> float: ...

    def matmul(self, vectors: Vectors) -> Vectors:
        """Λ v for r vectors."""

    def covariance(self, jacobian: Jacobian) -> Tensor:
        """J_i Λ⁻¹ J_iᵀ for every input: (n, K, K)."""

    def variance(self, jacobian: Jacobian) -> Tensor:
        """The diagonals of `covariance`: (n, K)."""

    def joint_covariance(self, jacobians: Jacobians) -> Tensor:
        """J Λ⁻¹ Jᵀ over all inputs together: (nK, nK), float64."""

    def log_determinant(self) -> Tensor:
        """ln det Λ."""

    def curvature_eigenvalues(self) -> Tensor:
        """The eigenvalues of the GGN (approximation), without λ: float64."""

    def sample(self, noise: Callable[[int], Tensor]) -> Tensor:
        """Draws from N(0, Λ⁻¹), (k, p), from standard normal draws: `noise(m)` gives (k, m)."""


@dataclass(frozen=True)
class BlockPrecision:
    """Λ block-diagonal over the parameters. Memory: that of its parts, at most Σ (I² + O²) over the layers."""

    layout: ParameterLayout
    parts: dict[str, Part]
    prior_precision: float
    scale: float = 1.0  # of the likelihood, already in the curvature
    weight: float = 1.0  # of the curvature against what was measured, already in it

    def with_prior(self, prior_precision: float) -> "BlockPrecision":
        return replace(self, prior_precision=prior_precision)

    def scaled(self, factor: float) -> "BlockPrecision":
        """The curvature times a factor, λ as it is."""
        return replace(
            self, parts={name: part.scaled(factor) for name, part in self.parts.items()}, scale=self.scale * factor
        )

    def reweighted(self, weight: float) -> "BlockPrecision":
        """The curvature as it was measured times another weight, the likelihood's scale as it is."""
        return replace(self.scaled(weight / self.weight), scale=self.scale, weight=weight)

    def with_scales(self, scales: tuple[float, ...]) -> "BlockPrecision":
        """The curvature under another scale of the likelihood (σ⁻²), which must be a single one."""
        return self.scaled(single(scales) / self.scale)

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
        for name, block in jacobian.blocks.items():
            result += self.parts[name].covariance(block, self.prior_precision)
        return result

    def variance(self, jacobian: Jacobian) -> Tensor:
        result = jacobian.outputs.new_zeros(jacobian.num_inputs, jacobian.num_rows)
        for name, block in jacobian.blocks.items():
            result += self.parts[name].variance(block, self.prior_precision)
        return result

    def joint_covariance(self, jacobians: Jacobians) -> Tensor:
        rows = self.whitened(jacobians)
        return factored_joint_covariance(self.parts, self.prior_precision, jacobians) if rows is None else gram(rows)

    def whitened(self, jacobians: Jacobians) -> Vectors | None:
        """B = J Λ^(−½) with B Bᵀ = J Λ⁻¹ Jᵀ, (nK, size) for each parameter; None if it exceeds the memory budget."""
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
            del jacobian  # or it would stand in memory beside the next one
        return rows

    def unwhitened(self, vectors: Vectors) -> Vectors:
        """Λ^(−½) v, with the root that `whitened` uses: Λ⁻¹ Jᵀ u = Λ^(−½) Bᵀ u. In the memory of the vectors."""
        for name, part in self.parts.items():
            for piece in _few(vectors[name]):
                piece.copy_(part.unwhiten(piece, self.prior_precision))
        return vectors

    def log_determinant(self) -> Tensor:
        return (self.curvature_eigenvalues() + self.prior_precision).log().sum()

    def curvature_eigenvalues(self) -> Tensor:
        return torch.cat([part.eigenvalues().double() for part in self.parts.values()])

    def sample(self, noise: Callable[[int], Tensor]) -> Tensor:
        return torch.cat(
            [
                self.parts[name].sample(noise(size).to(self.parts[name].eigenvalues()), self.prior_precision)
                for name, size in self.layout.sizes.items()
            ],
            dim=1,
        )


def _few(vectors: Tensor) -> tuple[Tensor, ...]:
    """Views of a few vectors (r, size) each, so that what is computed from them stays small."""
    return vectors.split(max(1, 2**24 // vectors.shape[1]))


def single(scales: tuple[float, ...]) -> float:
    """The only scale; an error that says why there must not be several."""
    if len(scales) > 1:
        raise ValueError(
            "The curvature over all parameters is kept as one sum over the outputs, so a noise_std for each output "
            "cannot be changed after the fit: fit again with it, or use a subspace projector."
        )
    return scales[0]


def isotropic_precision(layout: ParameterLayout, like: Tensor, prior_precision: float) -> BlockPrecision:
    """Λ = λI: no data at all."""
    parts: dict[str, Part] = {name: DiagonalPart(like.new_zeros(size)) for name, size in layout.sizes.items()}
    return BlockPrecision(layout, parts, prior_precision)


def grouped_by_memory(layout: ParameterLayout, jacobians: Jacobians) -> list[list[str]]:
    """Parameters, in order, in groups whose rows for all inputs fit into the memory budget together."""
    limit = jacobians.memory_budget // (jacobians.num_rows * jacobians.dtype.itemsize)
    return grouped(layout.sizes, limit)


def _dense_rows(jacobians: Jacobians) -> Tensor:
    return torch.cat([jacobian.dense_rows().double() for jacobian in jacobians])


@dataclass(frozen=True)
class DensePrecision:
    """The exact Λ = GGN + λI as a p × p matrix, float64. Memory: 2p² numbers; p³/3 for each λ."""

    layout: ParameterLayout
    ggn: Tensor  # (p, p)
    prior_precision: float
    scale: float = 1.0  # of the likelihood, already in the curvature

    def with_prior(self, prior_precision: float) -> "DensePrecision":
        return replace(self, prior_precision=prior_precision)

    def scaled(self, factor: float) -> "DensePrecision":
        """The curvature times a factor, λ as it is."""
        return replace(self, ggn=self.ggn * factor, scale=self.scale * factor)

    def with_scales(self, scales: tuple[float, ...]) -> "DensePrecision":
        """The curvature under another scale of the likelihood (σ⁻²), which must be a single one."""
        return self.scaled(single(scales) / self.scale)

    @cached_property
    def _factor(self) -> Tensor:
        precision = self.ggn.clone()
        precision.diagonal().add_(self.prior_precision)
        return cholesky(precision, "The posterior precision")

    def solve(self, vectors: Vectors) -> Vectors:
        flat = self.layout.flatten(vectors)
        solved = torch.cholesky_solve(flat.double().T, self._factor).T
        return self.layout.unflatten(solved.to(flat.dtype))

    def matmul(self, vectors: Vectors) -> Vectors:
        flat = self.layout.flatten(vectors)
        product = flat.double() @ self.ggn + self.prior_precision * flat.double()
        return self.layout.unflatten(product.to(flat.dtype))

    def _whitened(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self._factor, rows.double().T, upper=False)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        whitened = self._whitened(jacobian.dense_rows()).T
        rows = whitened.reshape(jacobian.num_inputs, jacobian.num_rows, -1)
        return inner_products(rows).to(jacobian.outputs.dtype)

    def variance(self, jacobian: Jacobian) -> Tensor:
        return self.covariance(jacobian).diagonal(dim1=1, dim2=2)

    def joint_covariance(self, jacobians: Jacobians) -> Tensor:
        return symmetric_product(self._whitened(_dense_rows(jacobians)).T)

    def log_determinant(self) -> Tensor:
        return 2 * self._factor.diagonal().log().sum()

    def curvature_eigenvalues(self) -> Tensor:
        return torch.linalg.eigvalsh(self.ggn).clamp_min(0)

    def sample(self, noise: Callable[[int], Tensor]) -> Tensor:
        epsilon = noise(self.layout.num_parameters).to(self.ggn)
        return torch.linalg.solve_triangular(self._factor.T, epsilon.T, upper=True).T


@dataclass(frozen=True)
class DualPrecision:
    """The exact Λ = VᵀV + λI by its m rows V, for m < p, float64. Memory: m·p + m² numbers; m³/3 for each λ.

    Λ⁻¹ = λ⁻¹ (I − Vᵀ (VVᵀ + λI)⁻¹ V), the Woodbury identity.
    """

    layout: ParameterLayout
    rows: Tensor  # V: (m, p)
    prior_precision: float
    scale: float = 1.0  # of the likelihood, already in the curvature

    def with_prior(self, prior_precision: float) -> "DualPrecision":
        return replace(self, prior_precision=prior_precision)

    def scaled(self, factor: float) -> "DualPrecision":
        """The curvature times a factor, λ as it is."""
        return replace(self, rows=self.rows * factor**0.5, scale=self.scale * factor)

    def with_scales(self, scales: tuple[float, ...]) -> "DualPrecision":
        """The curvature under another scale of the likelihood (σ⁻²), which must be a single one."""
        return self.scaled(single(scales) / self.scale)

    @cached_property
    def _factor(self) -> Tensor:
        inner = symmetric_product(self.rows)
        inner.diagonal().add_(self.prior_precision)
        return cholesky(inner, "The dual posterior precision")

    def _solved(self, flat: Tensor) -> Tensor:
        """Λ⁻¹ times rows (r, p)."""
        correction = torch.cholesky_solve(self.rows @ flat.T, self._factor).T @ self.rows
        return (flat - correction) / self.prior_precision

    def solve(self, vectors: Vectors) -> Vectors:
        flat = self.layout.flatten(vectors)
        return self.layout.unflatten(self._solved(flat.double()).to(flat.dtype))

    def matmul(self, vectors: Vectors) -> Vectors:
        flat = self.layout.flatten(vectors).double()
        product = (flat @ self.rows.T) @ self.rows + self.prior_precision * flat
        return self.layout.unflatten(product.to(next(iter(vectors.values())).dtype))

    def covariance(self, jacobian: Jacobian) -> Tensor:
        rows = jacobian.dense_rows().double()
        shape = (jacobian.num_inputs, jacobian.num_rows, -1)
        cross = torch.linalg.solve_triangular(self._factor, self.rows @ rows.T, upper=False).T
        difference = inner_products(rows.view(shape)) - inner_products(cross.reshape(shape))
        return (difference / self.prior_precision).to(jacobian.outputs.dtype)

    def variance(self, jacobian: Jacobian) -> Tensor:
        return self.covariance(jacobian).diagonal(dim1=1, dim2=2)

    def joint_covariance(self, jacobians: Jacobians) -> Tensor:
        rows = _dense_rows(jacobians)
        cross = torch.linalg.solve_triangular(self._factor, self.rows @ rows.T, upper=False)
        return (symmetric_product(rows) - symmetric_product(cross.T)) / self.prior_precision

    def log_determinant(self) -> Tensor:
        m, p = self.rows.shape
        prior = torch.tensor(self.prior_precision, dtype=torch.float64)
        return 2 * self._factor.diagonal().log().sum() + (p - m) * prior.log()

    def curvature_eigenvalues(self) -> Tensor:
        return torch.linalg.eigvalsh(symmetric_product(self.rows)).clamp_min(0)

    def sample(self, noise: Callable[[int], Tensor]) -> Tensor:
        # Λ⁻¹ (Vᵀ ε₁ + √λ ε₂) has the covariance Λ⁻¹ (VᵀV + λI) Λ⁻¹.
        m, p = self.rows.shape
        drawn = noise(m + p).to(self.rows)
        return self._solved(drawn[:, :m] @ self.rows + self.prior_precision**0.5 * drawn[:, m:])
