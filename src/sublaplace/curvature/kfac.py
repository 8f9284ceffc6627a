"""The Kronecker-factored GGN (KFAC)."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sublaplace.curvature.operators import DENSE_OUTPUTS, DensePart, DiagonalPart, KroneckerPart, Part
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians.blocks import Block, EmbeddingBlock, OuterBlock
from sublaplace.jacobians.head import CurvedHeadBlock
from sublaplace.jacobians.jacobian import Jacobian, require_finite_sum
from sublaplace.runtime.memory import require

DENSE_LIMIT = 1000
"""Largest size of a parameter without Kronecker factors that gets its dense block; larger ones get the diagonal."""


Factored = OuterBlock | EmbeddingBlock | CurvedHeadBlock
"""Blocks with Kronecker factors."""


@dataclass
class _KroneckerSums:
    """The sums Σ a aᵀ and Σ g gᵀ, and the number of terms of the first; unnormalised, so that parts add up."""

    inputs: Tensor  # (G, I, I), or its diagonal (G, I) for one-hot inputs
    gradients: Tensor  # (G, O, O), or its diagonal (G, O) for very many outputs
    positions: float  # number of terms of Σ a aᵀ, weighted if the inputs are
    transposed: bool

    def part(self, dtype: torch.dtype) -> KroneckerPart:
        moment = self.inputs / self.positions
        return KroneckerPart.of(moment, self.gradients, self.transposed, self.positions, dtype)


@dataclass(frozen=True)
class _LayerSums:
    """The Kronecker factors of every weight, and the dense block or diagonal of all other parameters."""

    reduce: bool
    kronecker: dict[str, _KroneckerSums] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)

    def add(self, jacobian: Jacobian) -> None:
        moments: dict[tuple[object, ...], Tensor] = {}
        for name, block in jacobian.blocks.items():
            if isinstance(block, OuterBlock | EmbeddingBlock) and name not in self.dense:
                self._add_kronecker(name, block, moments, jacobian)
            elif name in self.kronecker:
                raise ValueError(
                    f"Parameter '{name}' is used as a linear map for some inputs but not for others, so it has no "
                    "Kronecker factors. Use a projector without KFAC, such as 'lowrank-diagonal'."
                )
            else:
                self._add_dense(name, block)
        for name, head in jacobian.curved.items():
            self._add_kronecker(name, head, moments, jacobian)

    def _add_kronecker(
        self,
        name: str,
        block: Factored,
        moments: dict[tuple[object, ...], Tensor],
        jacobian: Jacobian,
    ) -> None:
        if name not in self.kronecker:
            _require_room(name, block)
        if self.reduce and isinstance(block, OuterBlock):
            block = block.reduced(jacobian.present)
        # A weight and its bias share their gradients, so the second moment of the gradients is computed once.
        key = block.gradient_key
        if key not in moments or self.reduce:
            moments[key] = block.gradient_squares() if _is_wide(block) else block.gradient_moment()
        counted = jacobian.weights, jacobian.present
        if name not in self.kronecker:
            transposed = True if isinstance(block, EmbeddingBlock) else block.transposed
            inputs, gradients = block.input_moment(*counted).double(), moments[key].double().clone()
            self.kronecker[name] = _KroneckerSums(inputs, gradients, block.num_terms(*counted), transposed)
            return
        held = self.kronecker[name]
        held.gradients += moments[key]
        if not jacobian.repeats_inputs:
            held.inputs += block.input_moment(*counted)
            held.positions += block.num_terms(*counted)

    def _add_dense(self, name: str, block: Block) -> None:
        if block.size <= DENSE_LIMIT:
            rows = block.rows().flatten(0, 1).double()
            addition = rows.T @ rows
        else:
            addition = block.squared_sum().double()
        self.dense[name] = self.dense[name] + addition if name in self.dense else addition

    def tensors(self) -> dict[str, Tensor]:
        result = {f"dense.{name}": total for name, total in self.dense.items()}
        for name, held in self.kronecker.items():
            result |= {f"inputs.{name}": held.inputs, f"gradients.{name}": held.gradients}
            result[f"rest.{name}"] = torch.tensor([held.positions, held.transposed], dtype=torch.float64, device="cpu")
        return result

    def restore(self, tensors: dict[str, Tensor]) -> None:
        for key, value in tensors.items():
            kind, name = key.split(".", 1)
            if kind == "dense":
                self.dense[name] = value
            elif kind == "rest":
                positions, transposed = value.tolist()
                self.kronecker[name] = _KroneckerSums(
                    tensors[f"inputs.{name}"], tensors[f"gradients.{name}"], positions, bool(transposed)
                )


def _require_room(name: str, block: Factored) -> None:
    """Raise MemoryError if the factors of a parameter, such as a large embedding, do not fit into memory."""
    groups, *sides = block.factor_sides
    if _is_wide(block):
        sides = sides[:-1]  # the diagonal of the last one is used
    require(
        3 * 8 * groups * sum(side**2 for side in sides),
        block.device,
        f"The set of Kronecker factors of '{name}' (of {' and '.join(f'{side:,}' for side in sides)} rows)",
        "Freeze this parameter (requires_grad=False), or use a projector without KFAC, such as 'lowrank-diagonal'.",
    )


def _is_wide(block: Factored) -> bool:
    """Return whether a layer has so many outputs that only the diagonal of their factor is kept."""
    return block.factor_sides[-1] > DENSE_OUTPUTS


def kronecker_ggn(stream: CurvatureStream, prior_precision: float, reduce: bool = False) -> BlockPrecision:
    """Return Λ with GGN ≈ [Σ_n Σ_t Σ_k g gᵀ] ⊗ [Σ_n Σ_t a aᵀ / (N T)] for every weight, in one pass over the data.

    All K columns of the output Hessian's root are used, or the stream's m sampled directions per input, which have the
    same second moment: the gradients' factors are then right in the mean. Weight and bias have separate factors. The
    positions t of a layer, over all of its calls, are treated as independent (KFAC-expand). Padded positions do not
    count (see `present_positions`). Of a layer with more than 4,096 outputs, such as a language model's last one, the
    diagonal of Σ g gᵀ is used. A parameter without Kronecker factors gets its exact dense block, or its diagonal if it
    has more than 1,000 entries. The approximation is exact for a linear layer with T = 1 and a single input or constant
    g.

    Cost: K backward passes per input, and T·I² + K·T·O² multiplications per layer and input; memory Σ (I² + O²). If
    the network ends in a linear layer of F features, min(K, F) directions are enough, and all of them count.

    Args:
        stream: the training data.
        prior_precision: λ.
        reduce: whether to average inputs and sum gradients over the positions first (KFAC-reduce); embeddings are
            not affected.

    Raises:
        ValueError: if a parameter is a linear map only for some inputs, or a gradient is not finite.
        MemoryError: if the factors of a parameter do not fit into memory.
    """
    dtype = stream.linearization.dtype
    layout = stream.linearization.layout
    sums = _LayerSums(reduce)
    stream.accumulate("KFAC reduce" if reduce else "KFAC", sums, every_input=True, row_by_row=True, sampled=True)
    for name, total in (*((name, held.gradients) for name, held in sums.kronecker.items()), *sums.dense.items()):
        require_finite_sum(name, total)
    parts: dict[str, Part] = {}
    for name, size in layout.sizes.items():
        if name in sums.kronecker:
            parts[name] = sums.kronecker[name].part(dtype)
        elif name in sums.dense and sums.dense[name].ndim == 2:
            parts[name] = DensePart.of(sums.dense[name], dtype)
        else:
            unused = torch.zeros(size, device=stream.linearization.device)
            parts[name] = DiagonalPart(sums.dense.get(name, unused).to(dtype))
    return BlockPrecision(layout, parts, prior_precision).scaled(stream.scale)


@dataclass
class _Traces:
    """The traces of Σ a aᵀ and Σ g gᵀ per group, and of the exact block, for one weight."""

    inputs: Tensor  # (G,)
    gradients: Tensor  # (G,)
    terms: float
    exact: float

    @classmethod
    def of(cls, block: OuterBlock | EmbeddingBlock, present: Tensor | None) -> "_Traces":
        moment = block.input_moment(None, present)
        inputs = moment.sum(-1) if moment.ndim == 2 else moment.diagonal(dim1=1, dim2=2).sum(-1)
        gradients = block.gradient_squares().sum(-1)
        return cls(inputs, gradients, block.num_terms(None, present), float(block.rows().square().sum()))

    def __add__(self, other: "_Traces") -> "_Traces":
        return _Traces(
            self.inputs + other.inputs,
            self.gradients + other.gradients,
            self.terms + other.terms,
            self.exact + other.exact,
        )


def trace_ratios(jacobians: Iterable[Jacobian]) -> dict[str, float]:
    """Return the trace of each weight's Kronecker-factored block over the trace of its exact block, on these inputs.

    The ratio may be far from 1 if positions are dependent, as in convolutions. Weights whose gradients are zero, up to
    rounding, are left out: the bias of keys in an attention layer is one. Cost: the dense rows of all weights, chunk by
    chunk.
    """
    sums: dict[str, _Traces] = {}
    for jacobian in jacobians:
        for name, block in jacobian.blocks.items():
            if isinstance(block, OuterBlock | EmbeddingBlock):
                traces = _Traces.of(block, jacobian.present)
                sums[name] = sums[name] + traces if name in sums else traces
    approximate = {name: float((t.inputs * t.gradients).sum()) / t.terms for name, t in sums.items()}
    rounding = {name: torch.finfo(t.gradients.dtype).eps * approximate[name] for name, t in sums.items()}
    return {name: approximate[name] / t.exact for name, t in sums.items() if t.exact > rounding[name]}
