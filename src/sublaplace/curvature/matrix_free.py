"""The exact Laplace approximation at any size: Λ is used only through products with vectors.

Every product costs one pass over the data. Linear systems with Λ are solved by block conjugate gradients. A pass costs
about the same for one vector as for many, and a block of r vectors searches a space that grows by r dimensions per
pass. Many right-hand sides together therefore need far fewer passes than one at a time.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sublaplace.curvature.precision import BlockPrecision
from sublaplace.curvature.reduced import reduced_ggn_and_product
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians.jacobian import Jacobians
from sublaplace.model.linalg import Vectors, add_product, combine, cross_gram, gram, gram_diagonal
from sublaplace.projection import Basis
from sublaplace.runtime.memory import require
from sublaplace.runtime.warning import warn

_MOST_PASSES = 200
_PATIENCE = 20  # passes without progress, after which rounding errors are assumed to dominate


class Solution(NamedTuple):
    """The solution x ≈ Λ⁻¹ b for r vectors b."""

    vectors: Vectors
    remainders: Vectors  # b − Λx
    relative_residual: float  # the largest ‖b − Λx‖ / ‖b‖
    passes: int  # over the data


class FullCovariance(NamedTuple):
    """The covariance of the full Laplace approximation, up to a certified error."""

    covariance: Tensor  # (n, C, C), or (nC, nC) jointly over all inputs; float64
    error: float  # upper bound on the largest eigenvalue of (true covariance − covariance), which is ≥ 0
    relative_residual: float
    passes: int


@dataclass(frozen=True)
class MatrixFreePrecision:
    """The precision Λ = GGN + λI, used through products with vectors.

    Cost: `matmul` takes one pass over the data, with K backward passes and 2·K·p·r multiplications per input. `solve`
    takes one pass per iteration. Memory: 7·p·r, and the memory budget for directions of earlier iterations, 2·p·r each.

    Args:
        stream: the training data.
        preconditioner: an invertible approximation of Λ, usually KFAC, which also holds λ.
        tolerance: the largest relative residual ‖b − Λx‖ / ‖b‖.
    """

    stream: CurvatureStream
    preconditioner: BlockPrecision
    tolerance: float = 1e-6

    @property
    def prior_precision(self) -> float:
        """The prior precision λ."""
        return self.preconditioner.prior_precision

    def matmul(self, vectors: Vectors) -> Vectors:
        """Return Λ v for r vectors."""
        basis = Basis(self.stream.linearization.layout, vectors)
        _, product = reduced_ggn_and_product(self.stream, basis)
        for name, part in product.items():
            part.mul_(self.stream.scale).add_(vectors[name], alpha=self.prior_precision)
        return product

    def solve(self, vectors: Vectors) -> Vectors:
        """Return Λ⁻¹ b for r vectors."""
        return self.solution(vectors).vectors

    def solution(self, vectors: Vectors) -> Solution:
        """Solve Λ x = b for r vectors b by block conjugate gradients.

        Every pass multiplies the preconditioned remainders Z by Λ and makes them Λ-orthogonal to earlier directions.
        In exact arithmetic the last block of directions would suffice; as many as fit into the memory budget are used.
        The pass then takes a Λ-orthonormal basis D of Z, without directions at rounding level, and moves x by D (Dᵀr).

        After convergence, one more pass computes the true remainder b − Λx. If rounding has made the updated remainder
        inaccurate, the iteration restarts from the true one. It ends at the tolerance. It also ends, with a warning,
        when a restart does not halve the residual.

        Raises:
            MemoryError: if the vectors do not fit into memory.
        """
        layout = self.stream.linearization.layout
        like = next(iter(vectors.values()))
        count = len(like)
        require(
            6 * count * layout.num_parameters * like.element_size() + self.stream.linearization.policy.peak_bytes,
            like.device,
            f"Solving for {count:,} vectors of {layout.num_parameters:,} parameters",
            "Pass fewer inputs at a time, or choose a smaller dim.",
        )
        lengths = gram_diagonal(vectors).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        x = self.stream.linearization.zero_vectors(count)
        remainder = {name: part.clone() for name, part in vectors.items()}
        passes, before, reached = 0, torch.inf, 1.0
        while self.tolerance < reached < before / 2 and passes < _MOST_PASSES:
            passes += self._descend(x, remainder, lengths)
            product = self.matmul(x)
            passes += 1
            for name, part in remainder.items():
                torch.sub(vectors[name], product.pop(name), out=part)
            before, reached = reached, float((gram_diagonal(remainder).sqrt() / lengths).max())
        if not reached <= self.tolerance:
            warn(
                f"Conjugate gradients ended at a relative residual of {reached:.1e}, above the tolerance "
                f"{self.tolerance:.1e}, after {passes} passes over the data. Use a float64 model, a larger "
                "memory_budget, a larger prior precision, or fewer inputs at a time."
            )
        return Solution(x, remainder, reached, passes)

    def _descend(self, x: Vectors, remainder: Vectors, lengths: Tensor) -> int:
        """Run conjugate gradients until convergence or stagnation, and return the number of passes over the data.

        x and its remainder are updated in place.
        """
        searched: deque[tuple[Vectors, Vectors]] = deque(maxlen=self._remembered(len(lengths)))
        eps = torch.finfo(self.stream.linearization.dtype).eps
        best, since = torch.inf, 0
        for passes in range(_MOST_PASSES):
            reached = float((gram_diagonal(remainder).sqrt() / lengths).max())
            since = 0 if reached < 0.9 * best else since + 1
            best = min(best, reached)
            if reached <= self.tolerance / 2 or since > _PATIENCE:
                return passes
            Z = self.preconditioner.solve({name: part.clone() for name, part in remainder.items()})
            AZ = self.matmul(Z)
            energies = _diagonal_products(Z, AZ)
            for _ in range(2):  # the second round removes the rounding errors of the first
                for directions, products in searched:
                    overlap = cross_gram(AZ, directions)
                    _subtract(Z, overlap, directions)
                    _subtract(AZ, overlap, products)
            mix = _orthonormalising(cross_gram(Z, AZ), energies, eps)
            if not len(mix):
                return passes + 1  # the new directions are at rounding level
            directions, products = combine(mix, Z), combine(mix, AZ)
            searched.append((directions, products))
            step = cross_gram(remainder, directions)
            _subtract(x, -step, directions)
            _subtract(remainder, step, products)
        return _MOST_PASSES

    def _remembered(self, count: int) -> int:
        """Return how many blocks of `count` directions, with their products, fit into the memory budget."""
        linearization = self.stream.linearization
        block = 2 * count * linearization.layout.num_parameters * linearization.dtype.itemsize
        return max(1, linearization.memory_budget // block)

    def full_covariance(self, jacobians: Jacobians) -> FullCovariance:
        """Return a lower bound on J Λ⁻¹ Jᵀ jointly over all inputs, (nC, nC) in float64, with its error.

        With X ≈ Λ⁻¹Jᵀ and R = Jᵀ − ΛX, the covariance is JX + XᵀR + RᵀΛ⁻¹R. The result holds the first two terms. The
        last term lies between 0 and RᵀR/λ, so the error is quadratic in the residual and has a known bound.
        """
        rows = jacobians.linearization.zero_vectors(jacobians.num_rows)
        start = 0
        for jacobian in jacobians:
            stop = start + jacobian.num_inputs * jacobian.num_rows
            for name, block in jacobian.blocks.items():
                rows[name][start:stop] = jacobian.require_finite(block.rows()).flatten(0, 1)
            start = stop
            del jacobian  # frees its memory before the next one is computed
        solution = self.solution(rows)
        for name, part in rows.items():
            part.add_(solution.remainders[name])
        covariance = cross_gram(rows, solution.vectors)
        error = float(torch.linalg.eigvalsh(gram(solution.remainders))[-1]) / self.prior_precision
        return FullCovariance((covariance + covariance.T) / 2, error, solution.relative_residual, solution.passes)


def _subtract(vectors: Vectors, weights: Tensor, others: Vectors) -> None:
    """Subtract weights W from V in place, for weights (r, q) and vectors V (r, p), W (q, p)."""
    for name, part in vectors.items():
        add_product(part, -weights.to(part.dtype), others[name])


def _diagonal_products(vectors: Vectors, others: Vectors) -> Tensor:
    """Return the inner product of each vector with its counterpart: (r,) in float64."""
    parts = [(part.double() * others[name].double()).sum(1) for name, part in vectors.items()]
    return torch.stack(parts).sum(0)


def _orthonormalising(products: Tensor, energies: Tensor, eps: float) -> Tensor:
    """Return T (q, r) with T products Tᵀ = I, for the q ≤ r directions above rounding level.

    `energies` is the diagonal of `products` before the orthogonalisation against earlier directions.
    """
    length = energies.clamp_min(torch.finfo(products.dtype).tiny).rsqrt()
    scaled = products * length * length[:, None]
    values, vectors = torch.linalg.eigh((scaled + scaled.T) / 2)
    kept = values > len(values) * eps
    return (length[:, None] * vectors[:, kept] * values[kept].rsqrt()).T
