"""The Kronecker-factored GGN of the last linear layer, from forward passes alone."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sublaplace.curvature.operators import DENSE_OUTPUTS, KroneckerPart, Part
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians.blocks import OuterBlock
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.linearization import Linearization
from sublaplace.jacobians.wanted import Wanted
from sublaplace.model.likelihoods.base import Likelihood


@dataclass
class _Moments:
    """Σ w a aᵀ and the number of its terms, for one parameter."""

    inputs: Tensor  # (1, I, I)
    terms: float
    transposed: bool


@dataclass(frozen=True)
class KroneckerSums:
    """The sums of the Kronecker factors: Σ H of the outputs, and Σ w a aᵀ for each parameter of the layer."""

    likelihood: Likelihood
    names: tuple[str, ...]
    hessians: Tensor  # Σ H: (C, C), or its diagonal (C,)
    moments: dict[str, _Moments] = field(default_factory=dict)

    @classmethod
    def of(
        cls, likelihood: Likelihood, names: tuple[str, ...], num_outputs: int, device: torch.device
    ) -> "KroneckerSums":
        """Return empty sums."""
        shape = (num_outputs,) if num_outputs > DENSE_OUTPUTS else (num_outputs, num_outputs)
        return cls(likelihood, names, torch.zeros(shape, dtype=torch.float64, device=device))

    def precision(self, linearization: Linearization, prior_precision: float) -> BlockPrecision:
        """Return Λ of the last linear layer, without the likelihood's scale."""
        parts: dict[str, Part] = {}
        for name in linearization.layout.names:
            if name in self.moments:
                held = self.moments[name]
                moment, hessians = held.inputs / held.terms, self.hessians[None]
                parts[name] = KroneckerPart.of(moment, hessians, held.transposed, held.terms, linearization.dtype)
        return BlockPrecision(linearization.layout, parts, prior_precision)

    def add(self, jacobian: Jacobian) -> None:
        """Add inputs, whose Jacobian may be without rows."""
        weights = jacobian.target_weights
        self.hessians.add_(self.likelihood.hessian_sum(jacobian.outputs, weights, self.hessians.ndim == 1))
        for name in self.names:
            block = jacobian.blocks[name]
            if not isinstance(block, OuterBlock) or not block.is_single:
                raise ValueError(
                    f"'{name}' belongs to the last linear layer, but it is used in other ways as well, so it has no "
                    "Kronecker factors. Use projector='lowrank-kfac'."
                )
            moment, terms = block.input_moment(jacobian.weights).double(), block.num_terms(jacobian.weights)
            if name in self.moments:
                self.moments[name].inputs += moment
                self.moments[name].terms += terms
            else:
                self.moments[name] = _Moments(moment, terms, block.transposed)

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums so far."""
        result = {"hessians": self.hessians}
        for name, held in self.moments.items():
            result[f"inputs.{name}"] = held.inputs
            result[f"rest.{name}"] = torch.tensor([held.terms, held.transposed], dtype=torch.float64, device="cpu")
        return result

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on from these sums."""
        self.hessians.copy_(tensors["hessians"])
        for name in self.names:
            if f"inputs.{name}" in tensors:
                terms, transposed = tensors[f"rest.{name}"].tolist()
                self.moments[name] = _Moments(tensors[f"inputs.{name}"], terms, bool(transposed))


def last_layer_ggn(
    stream: CurvatureStream, names: tuple[str, ...], num_outputs: int, prior_precision: float
) -> BlockPrecision:
    """Return Λ of the last linear layer with GGN ≈ [Σ_n H_n] ⊗ [Σ_n a aᵀ / N], in one pass over the data.

    The gradients at the outputs are the roots of the output Hessians, so that no backward pass is needed and all
    directions count. The covariance of outputs is Q_B diag(w) Q_Bᵀ with w_c = Σ_j (Q_Aᵀa)_j² / (a_j b_c + λ), for
    the eigenvalues a, b of the factors; λ is exact. Beyond 4,096 outputs, the diagonal of Σ H takes its place.

    Cost: one forward pass, I² and C² multiplications per input; memory I² + C².

    Args:
        stream: the training data.
        names: the parameters of the last linear layer.
        num_outputs: C.
        prior_precision: λ.

    Raises:
        ValueError: if a parameter of the layer is used elsewhere, too.
    """
    linearization = stream.linearization
    sums = KroneckerSums.of(stream.likelihood, names, num_outputs, linearization.device)
    stream.accumulate("last layer", sums, wanted=Wanted(names=frozenset(names)), without_rows=True)
    return sums.precision(linearization, prior_precision).scaled(stream.scale)
