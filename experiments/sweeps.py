"""Covariances of a posterior for every dimension s at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sublaplace import ComplementedPosterior, Jacobian, Jacobians, SubspacePosterior
from sublaplace.posteriors.protocol import Posterior

UnderPriors = Callable[[Jacobian], Iterator[tuple[tuple[int, float], Tensor]]]
"""From a Jacobian to pairs of (s, λ) and the covariance of every input."""


class Sweep(Protocol):
    """Covariances of outputs for each of `dims`, in float64, from one product with the Jacobian."""

    @property
    def dims(self) -> list[int]: ...

    def covariances(self, jacobian: Jacobian) -> Iterator[Tensor]:
        """Return for each s the covariance of every input: (n, C, C)."""

    def joint_covariances(self, jacobians: Jacobians) -> Iterator[Tensor]:
        """Return for each s the covariance over all inputs together: (nC, nC)."""

    def under(self, pairs: Sequence[tuple[int, float]]) -> "UnderPriors":
        """Return for each of some pairs of s and λ the covariance of every input, with the same P: (n, C, C)."""


@dataclass(frozen=True)
class SubspaceSweep:
    """Σ_{P_s} = W[:s]ᵀ W[:s] for ascending s, each added to the one before."""

    posterior: SubspacePosterior
    dims: list[int]

    def covariances(self, jacobian: Jacobian) -> Iterator[Tensor]:
        return self._cumulative(self.posterior.whitened(jacobian))

    def joint_covariances(self, jacobians: Jacobians) -> Iterator[Tensor]:
        return self._cumulative(torch.cat([self.posterior.whitened(part).flatten(0, 1) for part in jacobians]))

    def under(self, pairs: Sequence[tuple[int, float]]) -> "UnderPriors":
        largest_posterior = self.posterior.truncated(max(s for s, _ in pairs))
        factors = {prior: largest_posterior.with_prior(prior).factor for _, prior in pairs}

        def covariances(jacobian: Jacobian) -> Iterator[tuple[tuple[int, float], Tensor]]:
            rows = largest_posterior.projection.apply(jacobian).double()
            for prior, factor in factors.items():
                W = torch.linalg.solve_triangular(factor, rows.flatten(0, 1).T, upper=False).T.view_as(rows)
                for s in (s for s, other in pairs if other == prior):
                    yield (s, prior), W[..., :s] @ W[..., :s].transpose(1, 2)

        return covariances

    def _cumulative(self, W: Tensor) -> Iterator[Tensor]:
        total, start = torch.zeros((), dtype=W.dtype), 0
        for s in self.dims:
            part = W[..., start:s]
            total = total + part @ part.transpose(-1, -2)
            start = s
            yield total


@dataclass(frozen=True)
class ComplementSweep:
    """For each s a posterior that is exact in s dimensions and KFAC in all others."""

    posteriors: dict[int, ComplementedPosterior]

    @property
    def dims(self) -> list[int]:
        return list(self.posteriors)

    def covariances(self, jacobian: Jacobian) -> Iterator[Tensor]:
        for posterior in self.posteriors.values():
            yield posterior.covariance(jacobian).double()

    def joint_covariances(self, jacobians: Jacobians) -> Iterator[Tensor]:
        for posterior in self.posteriors.values():
            yield posterior.joint_covariance(jacobians)

    def under(self, pairs: Sequence[tuple[int, float]]) -> "UnderPriors":
        return _covariances_of({(s, prior): self.posteriors[s].with_prior(prior) for s, prior in pairs})


@dataclass(frozen=True)
class WholeSweep:
    """A posterior over all p parameters: one entry, s = p."""

    posterior: Posterior
    dims: list[int]

    def covariances(self, jacobian: Jacobian) -> Iterator[Tensor]:
        yield self.posterior.covariance(jacobian).double()

    def joint_covariances(self, jacobians: Jacobians) -> Iterator[Tensor]:
        yield self.posterior.joint_covariance(jacobians)

    def under(self, pairs: Sequence[tuple[int, float]]) -> "UnderPriors":
        return _covariances_of({(s, prior): self.posterior.with_prior(prior) for s, prior in pairs})


@dataclass(frozen=True)
class CertainSweep:
    """The plain network: no covariance, s = 0."""

    dims: list[int]

    def covariances(self, jacobian: Jacobian) -> Iterator[Tensor]:
        n, C = jacobian.outputs.shape
        yield torch.zeros(n, C, C, dtype=torch.float64)

    def joint_covariances(self, jacobians: Jacobians) -> Iterator[Tensor]:
        yield torch.zeros(jacobians.num_rows, jacobians.num_rows, dtype=torch.float64)

    def under(self, pairs: Sequence[tuple[int, float]]) -> "UnderPriors":
        raise ValueError("The plain network has no λ.")


def _covariances_of(posteriors: Mapping[tuple[int, float], Posterior]) -> UnderPriors:
    def covariances(jacobian: Jacobian) -> Iterator[tuple[tuple[int, float], Tensor]]:
        for key, posterior in posteriors.items():
            yield key, posterior.covariance(jacobian).double()

    return covariances


def capped(dims: list[int], rank: int) -> list[int]:
    """Return the grid of dimensions up to the rank that was found; the rank replaces larger dimensions."""
    return sorted({min(s, rank) for s in dims})
