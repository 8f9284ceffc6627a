"""The Kronecker-factored GGN (KFAC)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians import Block, EmbeddingBlock, OuterBlock
from sublaplace.jacobians.jacobian import non_finite_jacobian
from sublaplace.parts import DensePart, DiagonalPart, KroneckerPart, Part
from sublaplace.precision import BlockPrecision

DENSE_LIMIT = 1000
"""Parameters without a Kronecker form get their exact dense block up to this size, beyond it the diagonal."""


@dataclass
class _KroneckerSums:
    """Σ a aᵀ, Σ g gᵀ and the number of terms of the first: unnormalised, so that sums of parts add up."""

    inputs: Tensor  # (G, I, I), or its diagonal (G, I) for one-hot inputs
    gradients: Tensor  # (G, O, O)
    positions: int
    transposed: bool

    def part(self, dtype: torch.dtype) -> KroneckerPart:
        moment = self.inputs / self.positions
        if moment.ndim == 2:
            input_values, input_vectors = moment, None
        else:
            input_values, vectors = torch.linalg.eigh(moment)
            input_vectors = vectors.to(dtype)
        output_values, output_vectors = torch.linalg.eigh(self.gradients)
        return KroneckerPart(
            input_values.clamp_min(0).to(dtype),
            input_vectors,
            output_values.clamp_min(0).to(dtype),
            output_vectors.to(dtype),
            self.transposed,
        )


def kronecker_ggn(stream: CurvatureStream, prior_precision: float, reduce: bool = False) -> BlockPrecision:
    r"""Λ with GGN ≈ [Σ_n Σ_t Σ_k g gᵀ] ⊗ [Σ_n Σ_t a aᵀ / (N T)] for every weight, one pass.

    All K directions of the output Hessian's root, nothing sampled; weight and bias apart; the positions t of a layer,
    over all of its calls, are treated as independent (expand), or with `reduce` averaged and summed first (not for
    embeddings). A parameter
    without this form gets its exact dense block, or its diagonal where it has more than 1,000 entries. Exact for
    a linear layer with T = 1 and a single input or constant g.

    Cost: K backward passes an input, and per layer T·I² + K·T·O² multiplications an input; memory Σ (I² + O²).
    """
    dtype = stream.linearization.dtype
    layout = stream.linearization.layout
    kronecker: dict[str, _KroneckerSums] = {}
    dense: dict[str, Tensor] = {}
    for jacobian in stream.jacobians("KFAC", every_input=True, row_by_row=True):
        moments: dict[tuple[object, ...], Tensor] = {}
        for name, block in jacobian.blocks.items():
            if isinstance(block, OuterBlock | EmbeddingBlock) and name not in dense:
                _add_kronecker(kronecker, name, block, jacobian.repeats_inputs, moments, reduce)
            elif name in kronecker:
                raise ValueError(
                    f"Parameter '{name}' is used as a linear map on some inputs and otherwise on others, so it has no "
                    "Kronecker factors. Use a projector without KFAC, such as 'lowrank-diagonal'."
                )
            else:
                _add_dense(dense, name, block)
    parts: dict[str, Part] = {}
    for name, sums in (*((name, held.gradients) for name, held in kronecker.items()), *dense.items()):
        if not torch.isfinite(sums).all():
            raise ValueError(non_finite_jacobian(name))
    for name, size in layout.sizes.items():
        if name in kronecker:
            parts[name] = kronecker[name].part(dtype)
        elif name in dense and dense[name].ndim == 2:
            parts[name] = DensePart.of(dense[name], dtype)
        else:
            unused = torch.zeros(size, device=stream.linearization.device)
            parts[name] = DiagonalPart(dense.get(name, unused).to(dtype))
    return BlockPrecision(layout, parts, prior_precision).scaled(stream.likelihood.curvature_scale)


def _add_kronecker(
    sums: dict[str, _KroneckerSums],
    name: str,
    block: OuterBlock | EmbeddingBlock,
    repeats_inputs: bool,
    moments: dict[tuple[object, ...], Tensor],
    reduce: bool,
) -> None:
    if reduce and isinstance(block, OuterBlock):
        block = block.reduced()
    # A weight and its bias share their gradients, so their second moment is formed once.
    key = block.gradient_key
    if key not in moments or reduce:
        moments[key] = block.gradient_moment()
    if name not in sums:
        transposed = True if isinstance(block, EmbeddingBlock) else block.transposed
        inputs, gradients = block.input_moment().double(), moments[key].double()
        sums[name] = _KroneckerSums(inputs, gradients.clone(), block.num_positions, transposed)
        return
    held = sums[name]
    held.gradients += moments[key]
    if not repeats_inputs:
        held.inputs += block.input_moment()
        held.positions += block.num_positions


def _add_dense(sums: dict[str, Tensor], name: str, block: Block) -> None:
    if block.size <= DENSE_LIMIT:
        rows = block.rows().flatten(0, 1).double()
        addition = rows.T @ rows
    else:
        addition = block.squared_sum().double()
    sums[name] = sums[name] + addition if name in sums else addition
