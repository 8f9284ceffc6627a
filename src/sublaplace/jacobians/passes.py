"""Jacobian rows, by backward passes from one recorded forward pass."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from sublaplace.jacobians.blocks import Block, OuterBlock, RowBlock, summed
from sublaplace.jacobians.capture import Call, Capture
from sublaplace.jacobians.features import FeatureBlock
from sublaplace.jacobians.general import general_rows
from sublaplace.jacobians.head import CurvedHeadBlock, HeadBlock
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.network import Network
from sublaplace.jacobians.plan import BatchAxis, Plan
from sublaplace.jacobians.wanted import ROWS, Wanted
from sublaplace.model.parameters import ParameterLayout

Cotangents = Tensor | Callable[[Tensor], Tensor]
"""Directions (n, K, C) in the outputs, or a function that returns them for given outputs."""


class OutputHessians(Protocol):
    """The Hessians H of n inputs' outputs, seen from the features before a last linear layer."""

    def __call__(self, outputs: Tensor, weight: Tensor) -> Tensor:
        """Return roots of Wᵀ H W for W (C, F), rows as directions in the features: (n, K, F)."""

    def hessian_sum(self, outputs: Tensor) -> Tensor:
        """Return Σ_n H: (C, C) in float64."""

    def hessian_diagonals(self, outputs: Tensor) -> Tensor:
        """Return the diagonals of H: (n, C)."""


@dataclass(frozen=True)
class ForwardPass:
    """A recorded forward pass, whose backward passes yield Jacobian rows, in order.

    The gradients at the outputs of a last linear layer are the cotangents themselves and need no backward pass.
    """

    layout: ParameterLayout
    outputs: Tensor  # with their autograd graph
    cotangents: Tensor  # (n, K, C)
    calls: list[tuple[Call, BatchAxis, Tensor]]  # with the call's input, batch dimension first
    general: dict[str, Tensor]  # rows from the general path: (n, K, size)
    every_output: bool  # whether there is one row per output, in their order
    keeps_graph: bool = False  # whether rows can be differentiated with respect to the inputs

    @classmethod
    def of(
        cls,
        network: Network,
        plan: Plan,
        capture: Capture,
        inputs: Any,
        outputs: Tensor,
        cotangents: Cotangents | None,
        wanted: Wanted = ROWS,
        keeps_graph: bool = False,
    ) -> "ForwardPass":
        """Prepare the backward passes for `cotangents`; None: one per output."""
        n, C = outputs.shape
        every_output = cotangents is None
        if cotangents is None:
            cotangents = torch.eye(C, dtype=outputs.dtype, device=outputs.device).expand(n, C, C)
        elif not isinstance(cotangents, Tensor):
            cotangents = cotangents(outputs.detach())
        cotangents = cotangents.to(outputs.dtype)
        chosen = {name: network.parameters[name] for name in plan.general if wanted.includes((name,))}
        general = {}
        if chosen:
            batched = plan.general_batched
            general = general_rows(network.model, network.forward, chosen, inputs, cotangents, batched, keeps_graph)
        calls = _with_sources(zip(capture.calls, plan.axes, strict=True), plan, wanted, n)
        return cls(network.layout, outputs, cotangents, calls, general, every_output, keeps_graph)

    @cached_property
    def _are_last(self) -> list[bool]:
        """For every call, whether its output is the output of the network."""
        if not self.outputs.requires_grad:
            return [False] * len(self.calls)
        edge = get_gradient_edge(self.outputs)
        return [call.edge == edge for call, _, _ in self.calls]

    @cached_property
    def _last_names(self) -> set[str]:
        """The parameters of such calls."""
        pairs = zip(self.calls, self._are_last, strict=True)
        return {name for (call, _, _), is_last in pairs if is_last for name in call.names}

    @property
    def num_passes(self) -> int:
        """The number of backward passes, counted per input."""
        if all(self._are_last) and not self.general:
            return 0
        return len(self.outputs) * self.num_rows

    @classmethod
    def of_features(
        cls,
        network: Network,
        plan: Plan,
        capture: Capture,
        outputs: Tensor,
        wanted: Wanted,
        keeps_graph: bool = False,
    ) -> "FeaturePass | None":
        """Prepare F backward passes for the rows of all outputs; None if the network has no such form.

        The last call must be a linear map with a weight among the parameters, and no parameter take the general path.
        """
        last = capture.calls[-1]
        if plan.general or last.origin is None or last.edge != get_gradient_edge(outputs):
            return None
        weight = next((name for name in last.names if network.parameters[name].ndim == 2), None)
        if weight is None or last.source.ndim != 2:
            return None
        n, features = last.source.shape
        W = network.parameters[weight].detach()
        W = W if W.shape == (outputs.shape[1], features) and last.function == "linear" else W.T
        units = torch.eye(features, dtype=outputs.dtype, device=outputs.device).expand(n, features, features)
        calls = _with_sources(zip(capture.calls[:-1], plan.axes[:-1], strict=True), plan, wanted, n)
        body = cls(network.layout, last.origin, units, calls, {}, False, keeps_graph)
        axis = plan.axes[-1]
        assert axis is not None
        last_calls = [(last, axis, axis.in_front(last.source, n))]
        head = cls(network.layout, outputs, units[:, :0, :1], last_calls, {}, True, keeps_graph)
        return FeaturePass(body, head, W, wanted)

    @property
    def num_rows(self) -> int:
        """The number of rows per input, K."""
        return self.cotangents.shape[1]

    def jacobian(self, rows: range) -> Jacobian:
        """Run one backward pass for each of the rows and return their Jacobian."""
        blocks = self._blocks(rows)
        ordered = {name: blocks[name] for name in self.layout.names if name in blocks}
        return Jacobian(self.layout, ordered, self.values, len(rows), repeats_inputs=rows.start > 0)

    @property
    def values(self) -> Tensor:
        """The outputs, without their graph unless it is kept."""
        return self.outputs if self.keeps_graph else self.outputs.detach()

    def _blocks(self, rows: range) -> dict[str, Block]:
        gathered: list[list[Tensor]] = [[] for _ in self.calls]
        for k in rows:
            for parts, gradient in zip(gathered, self._gradients(k), strict=True):
                parts.append(gradient)
        found: dict[str, list[Block]] = {
            name: [RowBlock(value[:, rows.start : rows.stop])] for name, value in self.general.items()
        }
        with torch.inference_mode(False), torch.set_grad_enabled(self.keeps_graph):
            for (call, axis, source), parts in zip(self.calls, gathered, strict=True):
                in_front = tuple(axis.in_front(gradient, len(self.outputs)) for gradient in parts)
                for name, build in call.builders:
                    if name not in self.general:
                        found.setdefault(name, []).append(build(source, in_front))
            return {name: self._joined(name, blocks, len(rows)) for name, blocks in found.items()}

    def _joined(self, name: str, blocks: list[Block], num_rows: int) -> Block:
        """Return one block for all uses of a parameter; the last layer has its own form if nothing else uses it."""
        block = summed(blocks)
        whole = self.every_output and num_rows == self.num_rows and len(blocks) == 1
        if whole and name in self._last_names and isinstance(block, OuterBlock) and block.is_single:
            return HeadBlock.of(block)
        return block

    def _gradients(self, k: int) -> list[Tensor]:
        """Return the gradients at the outputs of the calls, for row k of every input; the last row frees the graph."""
        pairs = list(zip(self.calls, self._are_last, strict=True))
        edges = [call.edge for (call, _, _), is_last in pairs if call.edge is not None and not is_last]
        found: Iterator[Tensor | None] = iter(())
        if edges and self.outputs.requires_grad:
            with torch.inference_mode(False):
                found = iter(
                    torch.autograd.grad(
                        self.outputs,
                        edges,
                        self.cotangents[:, k],
                        retain_graph=self.keeps_graph or k + 1 < self.num_rows,
                        create_graph=self.keeps_graph,
                        allow_unused=True,
                    )
                )
        gradients = []
        for (call, _, _), is_last in pairs:
            gradient = self.cotangents[:, k] if is_last else next(found, None)
            gradients.append(self.outputs.new_zeros(call.output_shape) if gradient is None else gradient)
        return gradients


def _with_sources(
    calls: Iterable[tuple[Call, BatchAxis | None]], plan: Plan, wanted: Wanted, n: int
) -> list[tuple[Call, BatchAxis, Tensor]]:
    """Return the calls whose gradients are wanted, each with its input, batch dimension first."""
    return [
        (call, axis, axis.in_front(call.source, n))
        for call, axis in calls
        if axis is not None
        and call.edge is not None
        and wanted.includes(call.names)
        and not set(call.names) <= set(plan.general)
    ]


@dataclass(frozen=True)
class FeaturePass:
    """A recorded forward pass whose F features yield the rows of all C outputs."""

    body: ForwardPass  # from the features
    head: ForwardPass  # of the last layer alone
    weight: Tensor  # W: (C, F)
    wanted: Wanted

    @property
    def num_passes(self) -> int:
        """The number of backward passes, counted per input."""
        return self.body.num_passes

    def along(self, hessians: OutputHessians) -> "FeaturePass":
        """Return the pass along all directions of the output Hessians, at most F backward passes."""
        return replace(self, body=replace(self.body, cotangents=hessians(self.head.outputs.detach(), self.weight)))

    def row_by_row(self, hessians: OutputHessians) -> Iterator[Jacobian]:
        """Yield Jacobians with one row per input, for sums over all directions; the first holds the last layer."""
        outputs = self.head.outputs.detach()
        total, diagonals = hessians.hessian_sum(outputs), hessians.hessian_diagonals(outputs)
        ((call, _, source),) = self.head.calls
        built = ((name, build(source, ())) for name, build in call.builders if self.wanted.includes((name,)))
        curved = {name: CurvedHeadBlock.of(b, total, diagonals) for name, b in built if isinstance(b, OuterBlock)}
        K = self.body.num_rows
        for k in range(max(1, K)):
            jacobian = self.body.jacobian(range(k, min(k + 1, K)))
            yield replace(jacobian, outputs=outputs, curved={} if k else curved)

    def jacobian(self) -> Jacobian:
        """Run one backward pass per feature and return the Jacobian of all outputs."""
        C = self.head.outputs.shape[1]
        found: dict[str, list[Block]] = {
            name: [FeatureBlock(block, self.weight)]
            for name, block in self.body.jacobian(range(self.body.num_rows)).blocks.items()
        }
        ((call, _, source),) = self.head.calls
        for name, build in call.builders:
            block = build(source, ())
            if self.wanted.includes((name,)) and isinstance(block, OuterBlock):
                found.setdefault(name, []).append(HeadBlock.of(block))
        blocks = {name: summed(found[name]) for name in self.body.layout.names if name in found}
        return Jacobian(self.body.layout, blocks, self.head.values, C)
