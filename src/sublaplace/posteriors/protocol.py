"""What predictions, the evidence, files and summaries ask of a posterior."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from sublaplace.curvature.precision import BlockPrecision
from sublaplace.jacobians.jacobian import Jacobian, Jacobians
from sublaplace.jacobians.wanted import Wanted

if TYPE_CHECKING:
    from sublaplace.posteriors.subspace import SubspacePosterior


class Occam(Protocol):
    """½ Σ ln(λ / (λ + γ)), the price of the parameters that the data determine, as a function of λ and σ⁻²."""

    def __call__(self, prior_precision: Tensor, scales: Tensor) -> Tensor: ...


class Posterior(Protocol):
    """N(θ̂, Ψ): `SubspacePosterior`, `ComplementedPosterior`, and every precision of `curvature/`."""

    @property
    def prior_precision(self) -> float:
        """λ."""

    @property
    def dim(self) -> int:
        """The number of dimensions in which the posterior is exact."""

    @property
    def subspace(self) -> "SubspacePosterior | None":
        """The exact part in a subspace; None where there is no subspace."""

    @property
    def outside(self) -> BlockPrecision | None:
        """The approximation that holds outside of the exact dimensions, if any."""

    @property
    def wanted(self) -> Wanted:
        """What `covariance` and `variance` ask of a Jacobian."""

    def with_prior(self, prior_precision: float) -> "Posterior":
        """Return the posterior under another λ."""

    def with_scales(self, scales: tuple[float, ...]) -> "Posterior":
        """Return the posterior under other scales of the likelihood's curvature (σ⁻²)."""

    def scaled(self, factor: float) -> "Posterior":
        """Return the posterior with all curvature times a factor, λ as it is."""

    def truncated(self, dim: int) -> "Posterior":
        """Return the posterior that is exact in the leading `dim` dimensions of its subspace."""

    def sample(self, noise: Callable[[int], Tensor]) -> Tensor:
        """Return draws of θ − θ̂, (k, p), from standard normal draws: `noise(m)` gives (k, m)."""

    def covariance(self, jacobian: Jacobian) -> Tensor:
        """Return Σ for each input: (n, K, K)."""

    def variance(self, jacobian: Jacobian) -> Tensor:
        """Return its diagonal: (n, K)."""

    def joint_covariance(self, jacobians: Jacobians) -> Tensor:
        """Return Σ over all inputs together: (nK, nK), float64."""

    def occam(self) -> Occam:
        """Return the Occam term of the evidence."""

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the posterior as tensors and numbers, one of which is its "kind"."""
