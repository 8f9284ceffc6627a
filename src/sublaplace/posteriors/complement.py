"""A posterior that is exact in the subspace and KFAC (or diagonal) outside of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from sublaplace.curvature.precision import BlockPrecision, grouped_by_memory, single
from sublaplace.jacobians.blocks import Block
from sublaplace.jacobians.features import FeatureBlock
from sublaplace.jacobians.head import HeadBlock
from sublaplace.jacobians.jacobian import Jacobian, Jacobians
from sublaplace.jacobians.wanted import Wanted
from sublaplace.model.linalg import Vectors, cross_gram, gram
from sublaplace.model.parameters import ParameterLayout
from sublaplace.posteriors.subspace import SubspacePosterior
from sublaplace.projection import Projection
from sublaplace.runtime.warning import warn

KEPT_BYTES = 2**28
"""Up to this size, Q is kept in the eigenbasis of Ψ_K as well, so that rows are formed only once."""

LARGEST_CANCELLATION = 100.0
"""The largest ratio of a variance of Ψ_K to one of Ψ̃ for which the latter is computed by differences."""


def keeps_basis(num_parameters: int, dim: int, dtype: torch.dtype) -> bool:
    """Return whether Q of this size is kept in the eigenbasis of what stands outside as well."""
    return num_parameters * dim * dtype.itemsize <= KEPT_BYTES


@dataclass(frozen=True)
class ComplementedPosterior:
    r"""N(0, Ψ̃) with Ψ̃ = Q A⁻¹ Qᵀ + (I − Π) Ψ_K (I − Π)ᵀ, Π = Q A⁻¹ (ΛQ)ᵀ and A = QᵀΛQ.

    Q is the projection P, Λ = GGN + λ the exact precision, known by Y = GGN Q alone, and Ψ_K = (K + λ)⁻¹ the KFAC or
    diagonal covariance: the inverse block-BFGS update of Ψ_K. Ψ̃ is positive definite, exact where it was measured
    (Ψ̃ΛQ = Q), Ψ_K at s = 0 and the full covariance at s = p. Predictions have the covariance

        Σ̃ = Σ_P + J_c Ψ_K J_cᵀ,    J_c = J − (J Q) A⁻¹ (ΛQ)ᵀ,

    a sum of squares. Kept are Q and B = Ψ_K^½ ΛQ, the latter in the eigenbasis of Ψ_K: memory 2·p·s, and p·s more for
    Q in this basis if that is at most `KEPT_BYTES`. Cost of a prediction: that of KFAC, and 2·K·p·s multiplications per
    input.
    """

    inside: SubspacePosterior
    outside: BlockPrecision
    mixed: Vectors  # B: (s, size) per parameter
    outside_in_subspace: Tensor  # QᵀKQ, with the likelihood's scale: (s, s)
    turned: Vectors = field(default_factory=dict, repr=False, compare=False)  # what was kept of Q in the eigenbasis
    kind: ClassVar[str] = "complement"

    @classmethod
    def of(cls, inside: SubspacePosterior, outside: BlockPrecision, product: Vectors) -> "ComplementedPosterior":
        """Make it from Y = GGN Q with the likelihood's scales, whose memory it takes.

        Cost: rotations, s·p·(I + O) per layer.
        """
        prior, curvature = inside.prior_precision, torch.zeros_like(inside.gram)
        result = cls(inside, outside, product, curvature)
        for name, part in outside.parts.items():
            eigenvalues, Q = part.eigenvalues(), result.basis_part(name)
            curvature += cross_gram({name: Q * eigenvalues}, {name: Q})  # converted piece by piece
            rotated = part.rotate(product[name]).add_(Q, alpha=prior)
            product[name].copy_(rotated.mul_((eigenvalues + prior).rsqrt()))
        return replace(result, outside_in_subspace=(curvature + curvature.T) / 2)

    @property
    def subspace(self) -> SubspacePosterior:
        """The exact part."""
        return self.inside

    @property
    def projection(self) -> Projection:
        """P."""
        return self.inside.projection

    @property
    def dim(self) -> int:
        return self.inside.dim

    @property
    def prior_precision(self) -> float:
        return self.inside.prior_precision

    @property
    def keeps_basis(self) -> bool:
        """Whether Q may be kept in the eigenbasis of Ψ_K as well, so that rows are formed only once."""
        return keeps_basis(self.outside.layout.num_parameters, self.dim, next(iter(self.mixed.values())).dtype)

    def basis_part(self, name: str) -> Tensor:
        """Return Q of one parameter in the eigenbasis of Ψ_K, (s, size), kept for the next time if it is small."""
        found = self.turned.get(name)
        if found is None:
            found = self.outside.parts[name].rotate(self.projection.part(name)).contiguous()  # as in a file
            if self.keeps_basis:
                self.turned[name] = found
        return found

    @property
    def wanted(self) -> Wanted:
        """All rows of the Jacobian, if there are many outputs those of features."""
        return Wanted(features=True)

    def with_prior(self, prior_precision: float) -> "ComplementedPosterior":
        return self._remixed(self.inside.with_prior(prior_precision), 1.0)

    def with_scales(self, scales: tuple[float, ...]) -> "ComplementedPosterior":
        """Return the posterior under another scale of the likelihood (σ⁻²), which must be a single one."""
        return self.scaled(single(scales) / single(self.inside.scales))

    def scaled(self, factor: float) -> "ComplementedPosterior":
        """Return the posterior with all curvature times a factor, λ as it is."""
        return self._remixed(self.inside.scaled(factor), factor)

    def _remixed(self, inside: SubspacePosterior, factor: float) -> "ComplementedPosterior":
        """Return it under another λ, with curvatures times a factor; Y is recovered from B. Cost: p·s if Q is kept."""
        old, new = self.prior_precision, inside.prior_precision
        eps = torch.finfo(next(iter(self.mixed.values())).dtype).eps
        if old * eps > 1e-3 * new:
            warn(
                f"From λ = {old:.3g} to {new:.3g} the curvature outside of the subspace is lost in rounding; fit again "
                "with the new prior_precision, or use a float64 model."
            )
        outside = self.outside.with_prior(new).scaled(factor)
        mixed = {}
        for name, part in self.outside.parts.items():
            eigenvalues, Q = part.eigenvalues(), self.basis_part(name)
            Y = (self.mixed[name] * (eigenvalues + old).sqrt()).sub_(Q, alpha=old).mul_(factor)
            mixed[name] = Y.add_(Q, alpha=new).mul_((factor * eigenvalues + new).rsqrt())
        return ComplementedPosterior(inside, outside, mixed, factor * self.outside_in_subspace, self.turned)

    def reweighted(self, weight: float) -> "ComplementedPosterior":
        """Return it with another weight of the curvature outside; inside nothing changes. Cost: p·s."""
        prior, outside = self.prior_precision, self.outside.reweighted(weight)
        mixed = {}
        for name, part in self.outside.parts.items():
            ratio = (part.eigenvalues() + prior) / (outside.parts[name].eigenvalues() + prior)
            mixed[name] = self.mixed[name] * ratio.sqrt()
        return replace(
            self,
            outside=outside,
            mixed=mixed,
            outside_in_subspace=self.outside_in_subspace * (weight / self.outside.weight),
        )

    def product(self) -> Vectors:
        """Return Y = GGN Q with the likelihood's scales, in memory of its own: (s, size) per parameter."""
        prior, result = self.prior_precision, {}
        for name, part in self.outside.parts.items():
            whole = part.unwhiten(self.mixed[name] * (part.eigenvalues() + prior), prior)  # ΛQ
            result[name] = whole.sub_(self.projection.part(name), alpha=prior)
        return result

    def product_and_basis(self, name: str, unit: float) -> tuple[Tensor, Tensor]:
        """Return Y / unit and Q of one parameter, as rows in Ψ_K's eigenbasis: (s, size) each."""
        part, prior, Q = self.outside.parts[name], self.prior_precision, self.basis_part(name)
        Y = (self.mixed[name] * (part.eigenvalues() + prior).sqrt()).sub_(Q, alpha=prior).div_(unit)
        return Y, Q

    def truncated(self, dim: int) -> "ComplementedPosterior":
        """Return the posterior that is exact in the leading `dim` dimensions and KFAC in all others."""
        return replace(
            self,
            inside=self.inside.truncated(dim),
            mixed={name: part[:dim] for name, part in self.mixed.items()},
            outside_in_subspace=self.outside_in_subspace[:dim, :dim],
            turned={name: part[:dim] for name, part in self.turned.items()},
        )

    def occam(self) -> "ComplementOccam":
        """Return the Occam term of the evidence."""
        return ComplementOccam(
            self.outside.curvature_eigenvalues(),
            self.outside_in_subspace,
            self.inside.curvature,
            self.inside.gram,
            self.inside.scales,
        )

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the posterior as tensors and numbers, for `restored`."""
        inside, numbers = self.inside.stored()
        outside, about = self.outside.stored()
        mixed = {f"mixed.{name}": part for name, part in self.mixed.items()}
        tensors = {**inside, **outside, **mixed, "outside_in_subspace": self.outside_in_subspace}
        return tensors, {**numbers, "kind": self.kind, "outside": about}

    @classmethod
    def restored(
        cls, tensors: dict[str, Tensor], numbers: dict[str, Any], layout: ParameterLayout, dtype: torch.dtype
    ) -> "ComplementedPosterior":
        """Return what `stored` was called on."""
        inside = SubspacePosterior.restored(tensors, numbers, layout, dtype)
        outside = BlockPrecision.restored(tensors, numbers["outside"], layout, dtype)
        mixed = {name: tensors[f"mixed.{name}"] for name in layout.names}
        return cls(inside, outside, mixed, tensors["outside_in_subspace"])

    def sample(self, noise: Callable[[int], Tensor]) -> Tensor:
        """Return Q L⁻ᵀ ε + (I − Π) z with z ~ N(0, Ψ_K), where (ΛQ)ᵀ z comes from B."""
        s, layout = self.dim, self.outside.layout
        drawn = noise(s + layout.num_parameters)
        outer, measured = [], self.inside.gram.new_zeros(len(drawn), s)
        for name, epsilon in layout.unflatten(drawn[:, s:]).items():
            part, B = self.outside.parts[name], self.mixed[name]
            outer.append(part.sample(epsilon.to(B), self.prior_precision))
            measured += (part.rotate(epsilon.to(B)) @ B.T).double()
        taken_back = torch.cholesky_solve(measured.T, self.inside.factor).T
        coordinates = self.inside.coordinates(drawn[:, :s].to(measured)) - taken_back
        return torch.cat(outer, dim=1) + self.projection.lift(coordinates.to(outer[0]))

    def _outside_rows(self, name: str, jacobian: Jacobian, solved: Tensor) -> Tensor:
        """Return the columns of J_c Ψ_K^½ that belong to one parameter: (n, K, size)."""
        B = self.mixed[name]
        correction = solved.to(B) @ B
        block = jacobian.blocks.get(name)
        if block is None:
            return correction.neg_()
        return self.outside.parts[name].whiten(block, self.prior_precision) - correction

    def _inside_rows(self, jacobian: Jacobian) -> tuple[Tensor, Tensor]:
        """Return J Q L⁻ᵀ and J Q A⁻¹, with L Lᵀ = A: (n, K, s) in float64."""
        return self._solved(self.projection.apply(jacobian))

    def _solved(self, products: Tensor) -> tuple[Tensor, Tensor]:
        """Return J Q L⁻ᵀ and J Q A⁻¹ from J Q."""
        whitened = self.inside.whiten(products)
        flat = whitened.flatten(0, 1).T
        return whitened, torch.linalg.solve_triangular(self.inside.factor.T, flat, upper=True).T.view_as(whitened)

    def outside_covariances(self, jacobian: Jacobian, weights: Sequence[float]) -> Tensor:
        """J_cΨ_KJ_cᵀ for other weights of the curvature outside: (weights, n, K, K) in float64.

        Every weight scales the same rows J_cΨ_K^½, one number a parameter.
        """
        _, solved = self._inside_rows(jacobian)
        n, K, _ = solved.shape
        result = torch.zeros(len(weights), n, K, K, dtype=torch.float64, device=solved.device)
        for name, part in self.outside.parts.items():
            rows = self._outside_rows(name, jacobian, solved)
            eigenvalues = part.eigenvalues()
            for index, weight in enumerate(weights):
                other = eigenvalues * (weight / self.outside.weight)
                scaled = rows * ((eigenvalues + self.prior_precision) / (other + self.prior_precision))
                result[index] += scaled @ rows.transpose(1, 2)
        return result

    @cached_property
    def _gram(self) -> Tensor:
        """G = (ΛQ)ᵀΨ_KΛQ, (s, s) in float64."""
        return gram(self.mixed)

    @cached_property
    def _measured(self) -> Vectors:
        """V = Ψ_KΛQ of the parameters that were asked for, (s, size) each: those of a last layer."""
        return {}

    def _measured_part(self, name: str) -> Tensor:
        """Return V of one parameter, kept for the next time; memory: that of its part of P."""
        if name not in self._measured:
            self._measured[name] = self.outside.parts[name].unwhiten(self.mixed[name], self.prior_precision)
        return self._measured[name]

    def _summed(
        self, blocks: dict[str, Block], zeros: Callable[..., Tensor], rows_of: tuple[int, int], whole: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return JΨ_KJᵀ (n, K, K), or its diagonal (n, K), and JV and JQ (n, K, s), of some parameters.

        Their rows in the eigenbasis are formed once for all three; those of a last layer are not formed. JQ is left at
        0 if Q is not kept in this basis.
        """
        n, K = rows_of
        outside = zeros((n, K, K) if whole else (n, K))
        measured, products = zeros(n, K, self.dim), zeros(n, K, self.dim)
        for name, block in blocks.items():
            part, prior = self.outside.parts[name], self.prior_precision
            if isinstance(block, HeadBlock):
                outside += part.covariance(block, prior) if whole else part.variance(block, prior)
                measured += block.matmul(self._measured_part(name))
                products += block.matmul(self.projection.part(name))
                continue
            rows = part.rotated_rows(block)
            if self.keeps_basis:
                products += rows @ self.basis_part(name).T
            rows = rows * (part.eigenvalues() + prior).rsqrt()
            measured += rows @ self.mixed[name].T
            outside += rows @ rows.transpose(1, 2) if whole else rows.square().sum(2)
        return outside, measured, products

    def _by_differences(self, jacobian: Jacobian, whole: bool) -> Tensor | None:
        """Return Σ̃ = Σ_P + JΨ_KJᵀ − MVᵀJᵀ − JVMᵀ + MGMᵀ with M = JQA⁻¹, or its diagonal, in float64.

        Rows are formed once, and if there are many outputs only those of their features. Differences lose digits in
        float32 where the subspace holds nearly all of a variance: negative ones become 0, and the result is None if
        there are rows of all outputs to use instead.
        """
        zeros, n = jacobian.outputs.new_zeros, jacobian.num_inputs
        features = {name: block for name, block in jacobian.blocks.items() if isinstance(block, FeatureBlock)}
        others = {name: block for name, block in jacobian.blocks.items() if name not in features}
        outside, measured, products = self._summed(others, zeros, (n, jacobian.num_rows), whole)
        if features:
            mix = next(iter(features.values())).mix
            inner = {name: block.inner for name, block in features.items()}
            squares, *pair = self._summed(inner, zeros, (n, mix.shape[1]), whole=True)
            outside += mix @ squares @ mix.T if whole else ((mix @ squares) * mix).sum(2)
            measured, products = (
                of_others + mix @ more for of_others, more in zip((measured, products), pair, strict=True)
            )
        whitened, solved = self._solved(products) if self.keeps_basis else self._inside_rows(jacobian)
        difference = self._difference(outside.double(), measured.double(), solved)
        total = difference + (whitened @ whitened.transpose(1, 2) if whole else whitened.square().sum(2))
        before, after = (values.diagonal(dim1=1, dim2=2) if whole else values for values in (outside, total))
        return total if features or (before <= LARGEST_CANCELLATION * after).all() else None

    def _difference(self, outside: Tensor, measured: Tensor, solved: Tensor) -> Tensor:
        """Return JΨ_KJᵀ − MVᵀJᵀ − JVMᵀ + MGMᵀ from JΨ_KJᵀ, JV and M = JQA⁻¹; of a diagonal its diagonal."""
        if outside.dim() == 2:
            return (outside + ((solved @ self._gram - 2 * measured) * solved).sum(2)).clamp_min(0)
        cross = solved @ measured.transpose(1, 2)
        return outside - cross - cross.transpose(1, 2) + solved @ self._gram @ solved.transpose(1, 2)

    def _covariance(self, jacobian: Jacobian, whole: bool) -> Tensor:
        """Return Σ̃ for each input, (n, K, K), or its diagonal, (n, K)."""
        total = None
        if jacobian.has_features or self.keeps_basis:
            total = self._by_differences(jacobian, whole)
        if total is None:
            whitened, solved = self._inside_rows(jacobian)
            total = whitened @ whitened.transpose(1, 2) if whole else whitened.square().sum(2)
            for name in self.mixed:
                rows = self._outside_rows(name, jacobian, solved)
                total = total + (rows @ rows.transpose(1, 2) if whole else rows.square().sum(2))
        return jacobian.require_finite(total.to(jacobian.outputs.dtype))

    def covariance(self, jacobian: Jacobian) -> Tensor:
        """Return Σ̃ for each input: (n, K, K)."""
        return self._covariance(jacobian, whole=True)

    def variance(self, jacobian: Jacobian) -> Tensor:
        """Return the diagonal of `covariance`: (n, K)."""
        return self._covariance(jacobian, whole=False)

    def joint_covariance(self, jacobians: Jacobians) -> Tensor:
        """Return Σ̃ over all inputs together, (nK, nK), by one pass for each group of parameters whose rows fit."""
        total = self.inside.joint_covariance(jacobians)
        for group in grouped_by_memory(self.outside.layout, jacobians):
            parts: dict[str, list[Tensor]] = {name: [] for name in group}
            for jacobian in jacobians:
                _, solved = self._inside_rows(jacobian)
                for name in group:
                    parts[name].append(self._outside_rows(name, jacobian, solved).flatten(0, 1))
            total = total + gram({name: torch.cat(rows) for name, rows in parts.items()})
        return total


@dataclass(frozen=True)
class ComplementOccam:
    """½ (p ln λ + ln det Ψ̃), with ln det Ψ̃ = ln det Ψ_K + ln det QᵀΨ_K⁻¹Q − ln det QᵀΛQ.

    Cost: s³ and one pass over KFAC's eigenvalues.
    """

    outside_eigenvalues: Tensor
    outside_in_subspace: Tensor  # QᵀKQ
    curvature: Tensor  # QᵀGGN Q
    gram: Tensor
    scales: tuple[float, ...]  # the likelihood's, which are in all of these; several cannot be changed

    def __call__(self, prior_precision: Tensor, scales: Tensor) -> Tensor:
        """Evaluate at λ and the likelihood's scales."""
        ratio = scales.squeeze() / self.scales[0] if len(self.scales) == 1 else 1.0
        outside = (prior_precision / (prior_precision + ratio * self.outside_eigenvalues)).log().sum()
        prior = prior_precision * self.gram
        replaced = torch.logdet(ratio * self.outside_in_subspace + prior)
        measured = torch.logdet(ratio * self.curvature + prior)
        return 0.5 * (outside + replaced - measured)
