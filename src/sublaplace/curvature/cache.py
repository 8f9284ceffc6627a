"""The curvatures of one fit, each computed only once."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from sublaplace.curvature.diagonal import diagonal_ggn
from sublaplace.curvature.exact import exact_bytes, exact_ggn
from sublaplace.curvature.exact_precision import DensePrecision, DualPrecision
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.last_layer import last_layer_ggn
from sublaplace.curvature.last_layer_sums import LastLayerSums
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians.linearization import Linearization
from sublaplace.runtime.distributed import ranks_of
from sublaplace.runtime.memory import fits, require
from sublaplace.runtime.stopwatch import FACTORISATIONS

Exact = DensePrecision | DualPrecision


@dataclass(frozen=True)
class Curvatures:
    """The curvature of the training data in every form; the first request for a form costs one pass over the data."""

    stream: CurvatureStream
    num_data: int  # N
    num_outputs: int  # C
    last_layer_sums: LastLayerSums | None = None  # what an earlier pass over the data has summed
    _blocks: dict[str, BlockPrecision] = field(default_factory=dict)
    _exact: dict[float, Exact] = field(default_factory=dict)  # by λ, because each holds its factorisation

    def kfac(self, prior_precision: float) -> BlockPrecision:
        """Return Λ with the Kronecker-factored GGN."""
        if "kfac" not in self._blocks:
            with self._counted():
                self._blocks["kfac"] = kronecker_ggn(self.stream, prior_precision)
        return self._blocks["kfac"].with_prior(prior_precision)

    def diagonal(self, prior_precision: float) -> BlockPrecision:
        """Return Λ with the diagonal of the GGN."""
        if "diagonal" not in self._blocks:
            with self._counted():
                self._blocks["diagonal"] = diagonal_ggn(self.stream, prior_precision)
        return self._blocks["diagonal"].with_prior(prior_precision)

    def last_layer(self, names: tuple[str, ...], prior_precision: float) -> BlockPrecision:
        """Return Λ of the last linear layer, with the parameters `names`, with the Kronecker-factored GGN."""
        if "last layer" not in self._blocks:
            summed = None if self.last_layer_sums is None else self.last_layer_sums.kronecker
            with self._counted():
                self._blocks["last layer"] = (
                    last_layer_ggn(self.stream, names, self.num_outputs, prior_precision)
                    if summed is None
                    else summed.precision(self.stream.linearization, prior_precision).scaled(self.stream.scale)
                )
        return self._blocks["last layer"].with_prior(prior_precision)

    def exact(self, prior_precision: float) -> Exact:
        """Return the exact Λ.

        Raises:
            MemoryError: if it does not fit into memory.
        """
        if prior_precision not in self._exact:
            rows, p = self._sizes
            require(
                self._exact_bytes,
                self.stream.linearization.device,
                f"The exact GGN of {p:,} parameters",
                "Use a subspace such as projector='lowrank-kfac', less data, or fewer parameters with "
                "requires_grad=True; full_covariance() of a fitted subspace handles a few inputs at any size.",
            )
            with self._counted():
                self._exact[prior_precision] = exact_ggn(self.stream, rows, prior_precision)
        return self._exact[prior_precision]

    def exact_fits(self, prior_precision: float) -> bool:
        """Return whether `exact` fits into memory or is already computed."""
        here = prior_precision in self._exact or fits(self._exact_bytes, self.stream.linearization.device)
        return all(ranks_of(self.stream.loader).gather(here))  # or the ranks would go different ways

    def in_units(self, linearization: Linearization, units: dict[str, float]) -> "Curvatures":
        """Return the curvatures with respect to parameters in other units; what was computed is converted."""
        stream = replace(self.stream, linearization=linearization)
        blocks = {kind: precision.in_units(units) for kind, precision in self._blocks.items()}
        return Curvatures(stream, self.num_data, self.num_outputs, _blocks=blocks)

    def has(self, kind: str) -> bool:
        """Return whether a form, "kfac" or "diagonal", has been computed."""
        return kind in self._blocks

    def _counted(self) -> AbstractContextManager[None]:
        return self.stream.stopwatch.counting(FACTORISATIONS)

    @property
    def _exact_bytes(self) -> int:
        """The peak memory of `exact`, with the chunks of the pass."""
        rows, p = self._sizes
        ranks = ranks_of(self.stream.loader).size
        return exact_bytes(p, rows, ranks) + self.stream.linearization.policy.peak_bytes

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.num_data * self.num_outputs, self.stream.linearization.layout.num_parameters
