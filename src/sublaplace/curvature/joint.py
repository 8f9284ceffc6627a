"""The joint covariance J Λ⁻¹ Jᵀ of many inputs, when the rows of J do not fit into memory but their factors may."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from sublaplace.curvature.operators import Part
from sublaplace.data.batches import num_inputs
from sublaplace.jacobians.blocks import Block, OuterBlock, RowBlock
from sublaplace.jacobians.jacobian import Jacobians
from sublaplace.model.linalg import gram
from sublaplace.runtime.memory import grouped

_ROWS_AT_ONCE = 2**26  # numbers: 256 MiB in float32


def factored_joint_covariance(parts: dict[str, Part], prior_precision: float, jacobians: Jacobians) -> Tensor:
    """Return J Λ⁻¹ Jᵀ for a block-diagonal Λ: (nK, nK) in float64.

    For every parameter, the rows of all inputs are kept, or their factors if these are smaller. The factors have
    T·(I + K·O) entries per input, the rows K·O·I. In the last layers of a convolutional network, the factors are about
    fifty times smaller. Rows are formed from factors for a few outputs of the map at a time. Each group of parameters
    whose blocks fit into the memory budget needs one pass over the inputs.

    Cost: (nK)²·p/2, and one pass over the inputs per group; memory: one and a half times the budget, and (nK)².
    """
    total = torch.zeros(jacobians.num_rows, jacobians.num_rows, dtype=torch.float64, device=jacobians.device)
    # With those of a chunk, they take half of the budget in addition to the blocks.
    at_once = min(_ROWS_AT_ONCE, jacobians.memory_budget // (6 * jacobians.dtype.itemsize))
    for group in _groups(parts, jacobians):
        held: dict[str, list[Block | None]] = {name: [] for name in group}
        counts: list[int] = []
        for jacobian in jacobians:
            for name, blocks in held.items():
                block = jacobian.blocks.get(name)
                blocks.append(None if block is None else _compact(parts[name].turn(block)))
            counts.append(jacobian.num_inputs * jacobian.num_rows)
            del jacobian  # frees its memory before the next one is computed
        for name in group:
            scale = (parts[name].eigenvalues() + prior_precision).rsqrt()
            for columns in _columns(held.pop(name), counts, scale, at_once, jacobians.linearization.keeps_graph):
                total += gram({name: columns})
    if not torch.isfinite(total.diagonal()).all():
        for jacobian in jacobians:
            for name, block in jacobian.blocks.items():
                jacobian.require_finite(parts[name].whiten(block, prior_precision))
    return total


def _groups(parts: dict[str, Part], jacobians: Jacobians) -> list[list[str]]:
    """Split the parameters, in order, into groups whose blocks for all inputs fit into the memory budget."""
    one = next(iter(jacobians.few(1)))
    limit = jacobians.memory_budget // (num_inputs(jacobians.inputs) * jacobians.dtype.itemsize)
    sizes = {name: _num_elements(_compact(one.blocks[name])) if name in one.blocks else 0 for name in parts}
    return grouped(sizes, limit)


def _compact(block: Block) -> Block:
    """Return the block if its factors are smaller than its rows, otherwise a block of its rows."""
    if isinstance(block, OuterBlock) and block.num_elements < block.num_inputs * block.num_rows * block.size:
        return block
    return RowBlock(block.rows())


def _num_elements(block: Block) -> int:
    return block.num_elements if isinstance(block, OuterBlock) else block.rows().numel()


def _columns(
    blocks: list[Block | None], counts: list[int], scale: Tensor, at_once: int, keeps_graph: bool
) -> Iterator[Tensor]:
    """Yield the rows of all inputs times `scale` (size,), about `at_once` numbers at a time: (nK, columns).

    Without a graph, all of them share their memory: new memory for each would be mapped page by page, which takes as
    long as the rows.
    """
    total = sum(counts)
    outer = next((block for block in blocks if isinstance(block, OuterBlock)), None)
    if outer is None:
        yield _joined([None if block is None else block.rows() for block in blocks], counts, scale, None)
        return
    step = min(outer.fan_out, max(1, at_once // (total * outer.groups * outer.fan_in)))
    memory = None if keeps_graph else scale.new_empty(total * step * outer.groups * outer.fan_in)
    for start in range(0, outer.fan_out, step):
        stop = min(start + step, outer.fan_out)
        columns = outer.indices_of_outputs(start, stop)
        rows = (
            None
            if block is None
            else block.of_outputs(start, stop).rows()
            if isinstance(block, OuterBlock)
            else block.rows()[:, :, columns]
            for block in blocks
        )
        yield _joined(rows, counts, scale[columns], memory)


def _joined(rows: Iterable[Tensor | None], counts: list[int], scale: Tensor, memory: Tensor | None) -> Tensor:
    """Return the rows (n, K, columns) of all chunks, times `scale`, in `memory` if it is given.

    A chunk without rows gives zeros.
    """
    flat = (
        scale.new_zeros(count, len(scale)) if part is None else part.flatten(0, 1)
        for part, count in zip(rows, counts, strict=True)
    )
    if memory is None:
        return torch.cat(list(flat)) * scale
    into = memory[: sum(counts) * len(scale)].view(-1, len(scale))
    for place, part in zip(into.split(counts), flat, strict=True):
        torch.mul(part, scale, out=place)
    return into
