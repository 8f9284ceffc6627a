"""The exact precision in two forms that can be inverted: a p × p matrix, or its rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from sublaplace.curvature.operators import inner_products
from sublaplace.curvature.precision import Precision
from sublaplace.jacobians.jacobian import Jacobian, Jacobians
from sublaplace.model.linalg import Vectors, cholesky, symmetric_product
from sublaplace.model.parameters import ParameterLayout


def _dense_rows(jacobians: Jacobians) -> Tensor:
    return torch.cat([jacobian.dense_rows().double() for jacobian in jacobians])


@dataclass(frozen=True)
class DensePrecision(Precision):
    """The exact Λ = GGN + λI as a p × p matrix in float64. Cost: p³/3 per λ; memory 2p²."""

    layout: ParameterLayout
    ggn: Tensor  # (p, p)
    prior_precision: float
    scale: float = 1.0  # of the likelihood, already in the curvature
    kind: ClassVar[str] = "dense"

    @property
    def dim(self) -> int:
        return self.layout.num_parameters

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"ggn": self.ggn}, self._numbers()

    @classmethod
    def restored(
        cls, tensors: dict[str, Tensor], numbers: dict[str, Any], layout: ParameterLayout, dtype: torch.dtype
    ) -> "DensePrecision":
        return cls(layout, tensors["ggn"], numbers["prior_precision"], numbers["scale"])

    def scaled(self, factor: float) -> "DensePrecision":
        return replace(self, ggn=self.ggn * factor, scale=self.scale * factor)

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
class DualPrecision(Precision):
    """The exact Λ = VᵀV + λI by its m < p rows V, in float64. Cost: m²·p/2 + m³/3 per λ; memory m·p + m².

    The inverse follows from the Woodbury identity, Λ⁻¹ = λ⁻¹ (I − Vᵀ (VVᵀ + λI)⁻¹ V).
    """

    layout: ParameterLayout
    rows: Tensor  # V: (m, p)
    prior_precision: float
    scale: float = 1.0  # of the likelihood, already in the curvature
    kind: ClassVar[str] = "dual"

    @property
    def dim(self) -> int:
        return self.layout.num_parameters

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"rows": self.rows}, self._numbers()

    @classmethod
    def restored(
        cls, tensors: dict[str, Tensor], numbers: dict[str, Any], layout: ParameterLayout, dtype: torch.dtype
    ) -> "DualPrecision":
        return cls(layout, tensors["rows"], numbers["prior_precision"], numbers["scale"])

    def scaled(self, factor: float) -> "DualPrecision":
        return replace(self, rows=self.rows * factor**0.5, scale=self.scale * factor)

    @cached_property
    def _factor(self) -> Tensor:
        inner = symmetric_product(self.rows)
        inner.diagonal().add_(self.prior_precision)
        return cholesky(inner, "The dual posterior precision")

    def _solved(self, flat: Tensor) -> Tensor:
        """Return Λ⁻¹ times vectors (r, p)."""
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

    def joint_covariance(self, jacobians: Jacobians) -> Tensor:
        rows = _dense_rows(jacobians)
        cross = torch.linalg.solve_triangular(self._factor, self.rows @ rows.T, upper=False)
        return (symmetric_product(rows) - symmetric_product(cross.T)) / self.prior_precision

    def log_determinant(self) -> Tensor:
        m, p = self.rows.shape
        prior = torch.tensor(self.prior_precision, dtype=torch.float64, device="cpu")
        return 2 * self._factor.diagonal().log().sum() + (p - m) * prior.log()

    def curvature_eigenvalues(self) -> Tensor:
        return torch.linalg.eigvalsh(symmetric_product(self.rows)).clamp_min(0)

    def sample(self, noise: Callable[[int], Tensor]) -> Tensor:
        # Λ⁻¹ (Vᵀ ε₁ + √λ ε₂) has the covariance Λ⁻¹ (VᵀV + λI) Λ⁻¹.
        m, p = self.rows.shape
        drawn = noise(m + p).to(self.rows)
        return self._solved(drawn[:, :m] @ self.rows + self.prior_precision**0.5 * drawn[:, m:])
