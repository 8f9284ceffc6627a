"""Bounds between which the full Laplace approximation must lie, from products with the subspace alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sublaplace.curvature.operators import inner_products
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.model.likelihoods.links import Interval
from sublaplace.model.linalg import Vectors, cholesky, combine, gram
from sublaplace.model.parameters import ParameterLayout
from sublaplace.posteriors.subspace import SubspacePosterior


@dataclass(frozen=True)
class Bounds:
    """Covariances (n, C, C) with lower ≼ that of the full Laplace approximation ≼ upper."""

    lower: Tensor
    upper: Tensor
    probabilities: Interval | None = None  # of classification, (n, C) each, by the likelihood's link

    def __iter__(self) -> Iterator[Tensor]:
        """Allow ``lower, upper = la.bounds(x)``."""
        return iter((self.lower, self.upper))


@dataclass(frozen=True)
class Nystroem:
    r"""The part of the GGN that its products with the subspace have seen: Y (QᵀY)⁻¹ Yᵀ ≼ GGN, with Y = GGN Q.

    With S = QᵀY + δ = L Lᵀ it is ZᵀZ for the rows Z = L⁻¹Yᵀ, which are kept as Z = C U with an orthonormal basis U:
    bounds are then sums of squares, whatever the ratio of the GGN's eigenvalues to λ. A little δ keeps the bound
    (Y (S + δ)⁻¹ Yᵀ ≼ Y S⁻¹ Yᵀ), and so does leaving out singular vectors of Z that are rounding. Memory: p·s.
    """

    basis: Vectors  # U: (r, size) a parameter, r ≤ s
    coefficients: Tensor  # C: (s, r) in float64
    factor: Tensor  # L: (s, s) in float64

    @classmethod
    def of(cls, product: Vectors, curvature: Tensor) -> "Nystroem":
        """From Yᵀ, (s, size) a parameter, whose memory U takes, and QᵀY, (s, s). Cost: 4·p·s² (of multiplications)."""
        eps = torch.finfo(next(iter(product.values())).dtype).eps
        S = curvature.clone()
        S.diagonal().add_(len(S) * eps * float(S.diagonal().max().clamp_min(torch.finfo(torch.float64).tiny)))
        L = cholesky(S, "The curvature in the subspace QᵀGGN Q")
        values, vectors = torch.linalg.eigh(gram(product, L))
        kept = values > len(S) * torch.finfo(torch.float64).eps * values[-1].clamp_min(0)
        lengths, vectors = values[kept].sqrt(), vectors[:, kept]
        turn = torch.linalg.solve_triangular(L.T, vectors / lengths, upper=True).T  # of Yᵀ, L⁻¹ included
        basis, C = combine(turn, product), vectors * lengths
        for _ in range(2 if len(turn) else 0):  # singular vectors of small values are not yet orthonormal
            root = cholesky(gram(basis), "The Gram matrix of what the subspace has seen of the curvature")
            identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
            basis = combine(torch.linalg.solve_triangular(root, identity, upper=False), basis)
            C = C @ root
        return cls(basis, C, L)

    def product(self, dim: int) -> Vectors:
        """Yᵀ of the leading dimensions, in memory of its own."""
        weights = self.factor[:dim, :dim] @ self.coefficients[:dim]
        return {name: weights.to(part) @ part for name, part in self.basis.items()}


@dataclass(frozen=True)
class Certificate:
    r"""Lower and upper bound of the full Laplace approximation's covariance, from Q and Y = GGN Q.

    Below, Σ_P = J Q (QᵀΛQ)⁻¹ QᵀJᵀ (Lemma 2 of the paper). Above, since the GGN is at least what `Nystroem` keeps of it,
    N = Uᵀ CᵀC U with the orthonormal rows of U,

        Σ ≼ J (N + λ)⁻¹ Jᵀ = λ⁻¹ (J − J Uᵀ U)(J − J Uᵀ U)ᵀ + J Uᵀ (CᵀC + λ)⁻¹ U Jᵀ.

    No direction of the output Hessians may be dropped in the pass that makes Y: a smaller GGN would lift the lower
    bound. Memory: p·s beside Q. Cost of a bound: three times the products of a prediction, and the rows of J.
    """

    subspace: SubspacePosterior
    nystroem: Nystroem  # of at least as many dimensions; without a single scale of the likelihood
    scale: float  # that one; 1 where there are several
    above: int  # how many dimensions the upper bound uses, which may be more than the subspace has left

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what the certificate has beside the posterior's projection, as tensors and numbers."""
        seen = self.nystroem
        tensors = {f"seen.{name}": part for name, part in seen.basis.items()}
        tensors |= {"seen_coefficients": seen.coefficients, "seen_factor": seen.factor}
        # The posterior may hold the same tensor, which a file must not hold twice.
        tensors["certified_curvatures"] = self.subspace.curvatures.clone()
        numbers = {"scales": self.subspace.scales, "prior_precision": self.subspace.prior_precision}
        return tensors, {**numbers, "scale": self.scale, "above": self.above}

    @classmethod
    def restored(
        cls, tensors: dict[str, Tensor], numbers: dict[str, Any], layout: ParameterLayout, dtype: torch.dtype
    ) -> "Certificate":
        """Return what `stored` was called on, from its tensors and those of its posterior."""
        curvatures = {"curvatures": tensors["certified_curvatures"]}
        subspace = SubspacePosterior.restored({**tensors, **curvatures}, numbers, layout, dtype)
        basis = {name: tensors[f"seen.{name}"] for name in layout.names}
        seen = Nystroem(basis, tensors["seen_coefficients"], tensors["seen_factor"])
        return cls(subspace, seen, numbers["scale"], numbers["above"])

    @classmethod
    def of(cls, subspace: SubspacePosterior, product: Vectors, scale: float) -> "Certificate":
        """From Yᵀ without a single scale of the likelihood, (s, size) a parameter, which is overwritten."""
        return cls(subspace, Nystroem.of(product, subspace.curvature / scale), scale, subspace.dim)

    @property
    def product(self) -> Vectors:
        """Yᵀ of the subspace, without a single scale of the likelihood."""
        return self.nystroem.product(self.subspace.dim)

    def with_prior(self, prior_precision: float) -> "Certificate":
        return replace(self, subspace=self.subspace.with_prior(prior_precision))

    def with_scale(self, scale: float) -> "Certificate":
        return replace(self, subspace=self.subspace.with_scales((scale,)), scale=scale)

    def truncated(self, dim: int) -> "Certificate":
        """Of the leading `dim` dimensions: a wider one."""
        return replace(self, subspace=self.subspace.truncated(dim), above=dim)

    def of_leading(self, dim: int) -> "Certificate":
        """For the leading `dim` dimensions, with the upper bound that all of them give."""
        return replace(self, subspace=self.subspace.truncated(dim))

    @cached_property
    def _inner_factor(self) -> Tensor:
        """The Cholesky factor of CᵀC + λ, for the dimensions that the upper bound uses: (r, r)."""
        C = self.nystroem.coefficients[: self.above]
        inner = self.scale * (C.T @ C)
        inner.diagonal().add_(self.subspace.prior_precision)
        return cholesky(inner, "The inner matrix of the upper bound")

    def _roots(self, jacobian: Jacobian) -> Iterator[Tensor]:
        """Parts A, (n, K, m) in float64 each, whose Σ A Aᵀ is the upper bound."""
        basis = self.nystroem.basis
        seen = jacobian.matmul(basis)
        flat = seen.double().flatten(0, 1).T
        yield torch.linalg.solve_triangular(self._inner_factor, flat, upper=False).T.view_as(seen)
        for name, part in basis.items():
            rest = seen @ part
            if name in jacobian.blocks:
                rest = jacobian.blocks[name].rows() - rest
            yield rest.double() / self.subspace.prior_precision**0.5

    def lower(self, jacobian: Jacobian) -> Tensor:
        """(n, K, K), float64."""
        return inner_products(self.subspace.whitened(jacobian))

    def upper(self, jacobian: Jacobian) -> Tensor:
        """(n, K, K), float64."""
        n, K = jacobian.num_inputs, jacobian.num_rows
        total = torch.zeros(n, K, K, dtype=torch.float64, device=jacobian.outputs.device)
        for root in self._roots(jacobian):
            total += inner_products(root)
        return total

    def traces(self, jacobian: Jacobian) -> tuple[Tensor, Tensor]:
        """Tr Σ_P for every leading s, and the least trace of the upper bound, summed over the inputs: (s,), ()."""
        above = torch.zeros((), dtype=torch.float64, device=jacobian.outputs.device)
        for root in self._roots(jacobian):
            above += root.square().sum()
        return self.subspace.traces(jacobian), above

    def captured(self, jacobians: Iterable[Jacobian]) -> Tensor:
        """Tr Σ_P over the upper bound of Tr Σ, for every leading dimension: (s,) in float64; 1 where both are zero."""
        below, above = (torch.stack(part).sum(0) for part in zip(*map(self.traces, jacobians), strict=True))
        return below / above if above else torch.ones_like(below)
