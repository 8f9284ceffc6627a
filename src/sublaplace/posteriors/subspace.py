"""The exact posterior in a subspace."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from sublaplace.curvature.precision import EigenvalueOccam
from sublaplace.jacobians.jacobian import Jacobian, Jacobians
from sublaplace.jacobians.wanted import Wanted
from sublaplace.model.linalg import cholesky, symmetric_product
from sublaplace.model.parameters import ParameterLayout
from sublaplace.posteriors.last_layer import heads_of, output_factors, output_variances
from sublaplace.projection import Projection, projection_from


@dataclass(frozen=True)
class SubspacePosterior:
    r"""μ ~ N(0, (PᵀΛP)⁻¹) with PᵀΛP = Σ_g scale_g · PᵀGGN_g P + λ PᵀP (Lemma 1): all of it s × s and float64.

    There is one g, or one for each output of a regression with a σ of its own.

    One Cholesky factor L of PᵀΛP serves every leading dimension: with W = L⁻¹ (J P)ᵀ, Σ_{P_s} = W[:s]ᵀ W[:s].
    Another λ or noise costs s³/3 and no pass over data.
    """

    projection: Projection
    curvatures: Tensor  # PᵀGGN_g P without the likelihood's scales: (G, s, s)
    gram: Tensor  # PᵀP: (s, s)
    scales: tuple[float, ...]
    prior_precision: float
    kind: ClassVar[str] = "subspace"

    @property
    def dim(self) -> int:
        """The dimension s."""
        return len(self.gram)

    @property
    def rank(self) -> int:
        """That of covariances: s."""
        return self.dim

    @property
    def subspace(self) -> "SubspacePosterior":
        """Itself."""
        return self

    @property
    def outside(self) -> None:
        """Nothing is left outside."""
        return None

    @property
    def wanted(self) -> Wanted:
        """Products of the Jacobian with P alone, with respect to the parameters that P moves."""
        return Wanted(self.dim, names=self.projection.support)

    @property
    def unit(self) -> float:
        """The likelihood's scale, if it has a single one; 1 otherwise."""
        return self.scales[0] if len(self.scales) == 1 else 1.0

    @cached_property
    def curvature(self) -> Tensor:
        """PᵀGGN P with the likelihood's scales: (s, s)."""
        return torch.tensordot(self.curvatures.new_tensor(self.scales), self.curvatures, dims=1)

    @cached_property
    def factor(self) -> Tensor:
        """L with L Lᵀ = PᵀΛP."""
        return cholesky(self.curvature + self.prior_precision * self.gram, "The reduced precision PᵀΛP")

    @cached_property
    def _output_factors(self) -> list[Tensor]:
        """What the variances of a last layer need, from the first prediction on (see `output_factors`)."""
        return []

    def with_prior(self, prior_precision: float) -> "SubspacePosterior":
        return replace(self, prior_precision=prior_precision)

    def with_scales(self, scales: tuple[float, ...]) -> "SubspacePosterior":
        return replace(self, scales=scales)

    def scaled(self, factor: float) -> "SubspacePosterior":
        """Return the posterior with all curvature times a factor, λ as it is."""
        return self.with_scales(tuple(scale * factor for scale in self.scales))

    def truncated(self, dim: int) -> "SubspacePosterior":
        """Return the posterior in the leading `dim` dimensions."""
        return replace(
            self,
            projection=self.projection.leading(dim),
            curvatures=self.curvatures[:, :dim, :dim],
            gram=self.gram[:dim, :dim],
        )

    def curvature_eigenvalues(self) -> Tensor:
        root = cholesky(self.gram, "The Gram matrix of P")
        half = torch.linalg.solve_triangular(root, self.curvature, upper=False)
        whole = torch.linalg.solve_triangular(root, half.T, upper=False)
        return torch.linalg.eigvalsh((whole + whole.T) / 2).clamp_min(0)

    def occam(self) -> "EigenvalueOccam | PerOutputOccam":
        """Return the Occam term of the evidence; directions outside of the subspace contribute nothing."""
        if len(self.scales) == 1:
            return EigenvalueOccam(self.curvature_eigenvalues(), self.scales[0])
        return PerOutputOccam(self.curvatures, self.gram)

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the posterior as tensors and numbers, for `restored`."""
        tensors = {"curvatures": self.curvatures, "gram": self.gram, **self.projection.tensors()}
        return tensors, {"kind": self.kind, "prior_precision": self.prior_precision, "scales": self.scales}

    @classmethod
    def restored(
        cls, tensors: dict[str, Tensor], numbers: dict[str, Any], layout: ParameterLayout, dtype: torch.dtype
    ) -> "SubspacePosterior":
        """Return what `stored` was called on."""
        projection = projection_from(tensors, layout, dtype)
        scales = tuple(numbers["scales"])
        return cls(projection, tensors["curvatures"], tensors["gram"], scales, numbers["prior_precision"])

    def sample(self, noise: Callable[[int], Tensor]) -> Tensor:
        return self.projection.lift(self.coordinates(noise(self.dim)))

    def coordinates(self, noise: Tensor) -> Tensor:
        """Return μ = L⁻ᵀ ε for ε (k, s)."""
        return torch.linalg.solve_triangular(self.factor.T, noise.double().T, upper=True).T

    def whitened(self, jacobian: Jacobian) -> Tensor:
        """Return Wᵀ = J P L⁻ᵀ, (n, K, s) in float64; its leading part belongs to the leading dimensions.

        Cost: n·K·s².
        """
        return self.whiten(self.projection.apply(jacobian))

    def whiten(self, products: Tensor) -> Tensor:
        """Return J P L⁻ᵀ in float64 from products J P of shape (n, K, s)."""
        n, K, s = products.shape
        solved = torch.linalg.solve_triangular(self.factor, products.reshape(n * K, s).double().T, upper=False)
        return solved.T.reshape(n, K, s)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        """Return Σ_P for each input: (n, K, K)."""
        W = self.whitened(jacobian)
        return (W @ W.transpose(1, 2)).to(jacobian.outputs.dtype)

    def variance(self, jacobian: Jacobian) -> Tensor:
        """Return the diagonal of `covariance`: (n, K)."""
        heads = heads_of(jacobian, self.projection)
        if heads:
            if not self._output_factors:
                self._output_factors.append(output_factors(self.factor, heads))
            return output_variances(self._output_factors[0], heads).to(jacobian.outputs.dtype)
        return self.whitened(jacobian).square().sum(2).to(jacobian.outputs.dtype)

    def joint_covariance(self, jacobians: Jacobians) -> Tensor:
        """Return Σ_P over all inputs together: (nK, nK)."""
        products = replace(jacobians, wanted=self.wanted)
        return symmetric_product(torch.cat([self.whitened(jacobian).flatten(0, 1) for jacobian in products]))

    def traces(self, jacobian: Jacobian) -> Tensor:
        """Return Tr Σ_{P_s} for every leading s: (s,)."""
        return self.whitened(jacobian).square().sum((0, 1)).cumsum(0)


@dataclass(frozen=True)
class PerOutputOccam:
    """½ (ln det λPᵀP − ln det PᵀΛP), by the matrices of a subspace with one scale per output. Cost: s³ for each σ."""

    curvatures: Tensor  # (C, s, s)
    gram: Tensor  # (s, s)

    def __call__(self, prior_precision: Tensor, scales: Tensor) -> Tensor:
        """Evaluate at λ and the likelihood's scales."""
        prior = prior_precision * self.gram
        precision = prior + torch.tensordot(scales.expand(len(self.curvatures)), self.curvatures, dims=1)
        return 0.5 * (torch.logdet(prior) - torch.logdet(precision))
