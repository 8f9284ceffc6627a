"""The context that a projector gets."""

from dataclasses import dataclass

from sublaplace.curvature.cache import Curvatures, Exact
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians.jacobian import Jacobians
from sublaplace.jacobians.linearization import Linearization


@dataclass(frozen=True)
class ProjectorContext:
    """The network, the training data, the inputs X′ and all settings that precede P.

    A projector is a function from this context to a `Projection` with at most `dim` dimensions.
    """

    curvatures: Curvatures  # of the training data
    subspace_jacobians: Jacobians  # J of X′; of many outputs a sketch, from which `whole` leads to all rows
    dim: int  # s
    prior_precision: float  # λ
    seed: int

    @property
    def stream(self) -> CurvatureStream:
        """The training data, as passes over the rows of the GGN's root."""
        return self.curvatures.stream

    @property
    def linearization(self) -> Linearization:
        """The network and its Jacobian."""
        return self.stream.linearization

    @property
    def num_data(self) -> int:
        """The number of training inputs, N."""
        return self.curvatures.num_data

    @property
    def num_outputs(self) -> int:
        """The number of outputs, C."""
        return self.curvatures.num_outputs

    def kfac(self) -> BlockPrecision:
        """Return Λ with the Kronecker-factored GGN."""
        return self.curvatures.kfac(self.prior_precision)

    def diagonal(self) -> BlockPrecision:
        """Return Λ with the diagonal of the GGN."""
        return self.curvatures.diagonal(self.prior_precision)

    def exact(self) -> Exact:
        """Return the exact Λ.

        Raises:
            MemoryError: if it does not fit into memory.
        """
        return self.curvatures.exact(self.prior_precision)

    def exact_fits(self) -> bool:
        """Return whether `exact` fits into memory."""
        return self.curvatures.exact_fits(self.prior_precision)
