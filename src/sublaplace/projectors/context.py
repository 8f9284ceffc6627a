"""What a projector may use."""

from collections.abc import Callable
from dataclasses import dataclass, field

from sublaplace.curvature import CurvatureStream, diagonal_ggn, exact_ggn, kronecker_ggn
from sublaplace.curvature.ggn import exact_bytes
from sublaplace.jacobians import Jacobians, Linearization
from sublaplace.memory import fits, require
from sublaplace.precision import BlockPrecision, DensePrecision, DualPrecision
from sublaplace.projection import Projection


@dataclass(frozen=True)
class ProjectorContext:
    """The network, the training data and the inputs X′, with everything that has been decided before P is built.

    A projector is a function from this context to a `Projection` of dimension `dim`.
    """

    stream: CurvatureStream  # one pass over the training data
    subspace_jacobians: Jacobians  # J of X′
    num_data: int  # N
    num_outputs: int  # C
    dim: int  # s
    prior_precision: float  # λ
    seed: int
    known: dict[str, BlockPrecision] = field(default_factory=dict)  # precisions that were needed before
    known_exact: dict[float, DensePrecision | DualPrecision] = field(default_factory=dict)  # the exact one, by λ

    @property
    def linearization(self) -> Linearization:
        return self.stream.linearization

    def kfac(self) -> BlockPrecision:
        """Λ with the Kronecker-factored GGN: one pass over the data, the first time."""
        if "kfac" not in self.known:
            self.known["kfac"] = kronecker_ggn(self.stream, self.prior_precision)
        return self.known["kfac"].with_prior(self.prior_precision)

    def diagonal(self) -> BlockPrecision:
        """Λ with the diagonal of the GGN: one pass over the data, the first time."""
        if "diagonal" not in self.known:
            self.known["diagonal"] = diagonal_ggn(self.stream, self.prior_precision)
        return self.known["diagonal"].with_prior(self.prior_precision)

    def exact(self) -> DensePrecision | DualPrecision:
        """The exact Λ, where it fits into memory: one pass over the data, the first time."""
        if self.prior_precision in self.known_exact:
            return self.known_exact[self.prior_precision]
        rows, p = self.num_data * self.num_outputs, self.linearization.layout.num_parameters
        require(
            exact_bytes(p, rows),
            self.linearization.device,
            f"The exact GGN of {p:,} parameters",
            "Use a subspace such as projector='lowrank-kfac', fewer data, or leave fewer parameters with "
            "requires_grad=True; full_covariance() of a fitted subspace gives that of a few inputs at any size.",
        )
        self.known_exact[self.prior_precision] = exact_ggn(self.stream, rows, self.prior_precision)
        return self.known_exact[self.prior_precision]

    def exact_fits(self) -> bool:
        """Whether there is memory for `exact`."""
        rows, p = self.num_data * self.num_outputs, self.linearization.layout.num_parameters
        return self.prior_precision in self.known_exact or fits(exact_bytes(p, rows), self.linearization.device)


Projector = Callable[[ProjectorContext], Projection]
