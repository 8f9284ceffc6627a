"""Bounds between which the full Laplace approximation must lie, from products with the subspace alone."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sublaplace.jacobians import Jacobian
from sublaplace.linalg import cholesky, gram
from sublaplace.parameters import Vectors
from sublaplace.parts import inner_products
from sublaplace.posterior import SubspacePosterior
from sublaplace.predictive import Interval


class Bounds(Interval):
    """Covariances (n, C, C) with lower ≼ that of the full Laplace approximation ≼ upper.

    probabilities: for classification the interval of each probability (n, C) by the probit link; else None.
    """

    probabilities: Interval | None = None


@dataclass(frozen=True)
class Certificate:
    r"""Lower and upper bound of the full Laplace approximation's covariance, from Q and Y = GGN Q.

    Below, Σ_P = J Q (QᵀΛQ)⁻¹ QᵀJᵀ (Lemma 2 of the paper). Above, since GGN ≽ Y (QᵀY)⁻¹ Yᵀ (Nyström), by Woodbury's
    identity with S = QᵀY = L Lᵀ and Z = Y L⁻ᵀ

        Σ ≼ λ⁻¹ (J Jᵀ − J Z (λI + ZᵀZ)⁻¹ Zᵀ Jᵀ).

    A little is added to the diagonal of S, which keeps the bound (Y (S + δ)⁻¹ Yᵀ ≼ Y S⁻¹ Yᵀ). No direction of the
    output Hessians may be dropped in the pass that makes Y: a smaller GGN would lift the lower bound. Memory: p·s for
    Y. Cost of a bound: the squared rows of J, and twice the products of a prediction.
    """

    subspace: SubspacePosterior
    product: Vectors  # Y without a single scale of the likelihood: (s, size) a parameter
    scale: float  # that one; 1 where there are several

    def with_prior(self, prior_precision: float) -> "Certificate":
        return replace(self, subspace=self.subspace.with_prior(prior_precision))

    def with_scale(self, scale: float) -> "Certificate":
        return replace(self, subspace=self.subspace.with_scales((scale,)), scale=scale)

    def truncated(self, dim: int) -> "Certificate":
        """Of the leading `dim` dimensions: a wider one."""
        product = {name: part[:dim] for name, part in self.product.items()}
        return replace(self, subspace=self.subspace.truncated(dim), product=product)

    @cached_property
    def _factor(self) -> Tensor:
        """L with L Lᵀ = QᵀY + δ, with the scale: (s, s) in float64."""
        S = self.subspace.curvature.clone()
        eps = torch.finfo(next(iter(self.product.values())).dtype).eps
        S.diagonal().add_(len(S) * eps * float(S.diagonal().max().clamp_min(torch.finfo(torch.float64).tiny)))
        return cholesky(S, "The curvature in the subspace QᵀGGN Q")

    @cached_property
    def _inner_factor(self) -> Tensor:
        """The Cholesky factor of λI + ZᵀZ: (s, s)."""
        # As a sum of squares: from YᵀY, a nearly singular L would leave nothing but rounding.
        inner = self.scale**2 * gram(self.product, self._factor)
        inner.diagonal().add_(self.subspace.prior_precision)
        return cholesky(inner, "The inner matrix of the upper bound")

    def _measured(self, jacobian: Jacobian) -> Tensor:
        """J Z (λI + ZᵀZ)^(−½), (n, K, s) in float64: what the products have seen of J."""
        rows = self.scale * jacobian.matmul(self.product).double()
        whitened = torch.linalg.solve_triangular(self._factor, rows.flatten(0, 1).T, upper=False)
        return torch.linalg.solve_triangular(self._inner_factor, whitened, upper=False).T.view_as(rows)

    def lower(self, jacobian: Jacobian) -> Tensor:
        """(n, K, K), float64."""
        return inner_products(self.subspace.whitened(jacobian))

    def upper(self, jacobian: Jacobian) -> Tensor:
        """(n, K, K), float64."""
        n, K = jacobian.num_inputs, jacobian.num_rows
        squares = torch.zeros(n, K, K, dtype=torch.float64, device=jacobian.outputs.device)
        for block in jacobian.blocks.values():
            squares += inner_products(block.rows().double())
        return (squares - inner_products(self._measured(jacobian))) / self.subspace.prior_precision

    def traces(self, jacobian: Jacobian) -> tuple[Tensor, Tensor]:
        """Tr Σ_P for every leading s, and the least trace of the upper bound, summed over the inputs: (s,), ()."""
        below = self.subspace.traces(jacobian)
        above = jacobian.squared_norms().double().sum() - self._measured(jacobian).square().sum()
        return below, above / self.subspace.prior_precision
