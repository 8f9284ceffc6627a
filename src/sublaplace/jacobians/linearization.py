"""A trained network and its Jacobian: the engine that everything else runs on."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from tqdm import tqdm

from sublaplace.jacobians.blocks import Block, RowBlock, summed
from sublaplace.jacobians.capture import Call, Capture
from sublaplace.jacobians.general import general_rows
from sublaplace.jacobians.inputs import call_model, num_inputs, plain, select
from sublaplace.jacobians.jacobian import Jacobian, non_finite_jacobian
from sublaplace.jacobians.plan import (
    BatchAxis,
    Plan,
    Signature,
    batch_axis,
    depends_on_batch,
    described,
    first_difference,
    signature,
)
from sublaplace.memory import on_disk
from sublaplace.parameters import HALF_PRECISIONS, ParameterLayout, Vectors, borrowed

_USEFUL_CHUNK = 64 * 2**20  # bytes; larger chunks leave the caches and are not faster
_FEWEST_INPUTS = 4  # of a chunk even so: sums as large as the parameters are added to once a chunk
_USEFUL_ROWS = 256  # of a chunk; with fewer, a product with a large P is bound by reading P
_SHARE_OF_VECTORS = 4  # for the sake of that, chunks may take as much memory as a quarter of P
_PROBED_ROWS = 2  # of the Jacobian that a new kind of input is tried with
_LARGEST_KEPT_BLOCK = 2**25 - 2**13  # bytes, just below glibc's limit

Cotangents = Tensor | Callable[[Tensor], Tensor]


@dataclass
class Linearization:
    """f(x) ≈ f(x; θ̂) + J (θ − θ̂), with J in factored form (see `blocks.py`).

    The first batch is probed: two small forward passes find where the inputs of the batch stand in every call, and the
    gradient of each parameter is compared with plain automatic differentiation. What does not agree, or is used in a
    way without structure, goes through the general path of `general.py`; so every module gives the right answer
    and only what is unusual is slower. `Jacobian` costs one forward and K backward passes a batch.
    """

    model: nn.Module
    forward: Callable[[nn.Module, Any], Tensor] = call_model
    memory_budget: int = 2**30
    scratch_folder: str | os.PathLike[str] | None = None  # where vectors of parameter space are kept; None: in memory
    num_vectors: int = 0  # of parameter space that Jacobians are multiplied with, all at once: s, if P is a matrix
    layout: ParameterLayout = field(init=False)
    passes: int = field(init=False, default=0)  # backward passes through one input, counted
    _plans: dict[Signature, Plan] = field(init=False, default_factory=dict)
    _current: Plan | None = field(init=False, default=None)  # of the last pass
    _borrowed: int = field(init=False, default=0)
    _channels_last: bool = field(init=False)

    def __post_init__(self) -> None:
        self.layout = ParameterLayout.of(self.model)
        self._parameters = self.layout.parameters(self.model)
        self._names = {id(p): name for name, p in self._parameters.items()}
        # glibc gives freed blocks back to the system, and takes a page fault for every page when the next chunk needs
        # them again, until a large one has been freed; from then on it keeps twice that size.
        torch.empty(_LARGEST_KEPT_BLOCK, dtype=torch.uint8)
        # oneDNN's convolutions, which are the ones that gain from this order, are those of float32 on a CPU.
        self._channels_last = self.device.type == "cpu" and self.dtype == torch.float32

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._parameters.values())).dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def zero_vectors(self, count: int) -> Vectors:
        """Zeros of parameter space, (count, size) a parameter, in memory or in the scratch folder."""
        if self.scratch_folder is None:
            return self.layout.zeros(count, torch.empty(0, dtype=self.dtype, device=self.device))
        sizes = self.layout.sizes.items()
        return {name: on_disk(count * size, self.dtype, self.scratch_folder).view(count, size) for name, size in sizes}

    @property
    def _tolerance(self) -> float:
        """How far two ways to the same number may lie apart, relative to the largest."""
        return 1e-3 if self.dtype.itemsize < 8 else 1e-8

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """The model in eval mode, put back afterwards; may be nested."""
        if self._borrowed:
            yield
            return
        self._borrowed += 1
        try:
            with borrowed(self.model), torch.inference_mode(False), torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            self._borrowed -= 1

    @contextmanager
    def beside(self, num_vectors: int) -> Iterator[None]:
        """While Jacobians are multiplied with so many vectors: their chunks are large enough for that."""
        before, self.num_vectors = self.num_vectors, num_vectors
        try:
            yield
        finally:
            self.num_vectors = before

    def to_device(self, inputs: Any) -> Any:
        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf = leaf.to(self.device, self.dtype if leaf.dtype in HALF_PRECISIONS else leaf.dtype)
            return leaf.clone() if leaf.is_inference() else leaf.detach()

        return tree_map(move, plain(inputs))

    def outputs(self, inputs: Any) -> Tensor:
        """f(x): (n, C), without a graph."""
        with self.borrowed(), torch.no_grad():
            return self._watched(self.to_device(inputs))[1]

    def jacobian(self, inputs: Any, cotangents: Cotangents | None = None) -> Jacobian:
        """J of a batch; row (n, k) belongs to cotangents[n, k] (n, K, C), by default to output k.

        Cotangents may also be given as a function of the outputs, which saves a forward pass.
        """
        run = self._forward_pass(inputs, cotangents)
        return self._rows(run, range(run.num_rows))

    def row_by_row(self, inputs: Any, cotangents: Cotangents | None = None) -> Iterator[Jacobian]:
        """The rows of `jacobian` one after another, as K Jacobians with one row an input (with none if K = 0).

        For what only adds up over the rows: the memory of one row's gradients serves them all.
        """
        run = self._forward_pass(inputs, cotangents)
        for k in range(max(1, run.num_rows)):
            yield self._rows(run, range(k, min(k + 1, run.num_rows)))

    def chunks(self, inputs: Any, cotangents: Cotangents | None = None) -> Iterator[Jacobian]:
        """The Jacobians of parts of a large batch (of all outputs, or `cotangents`), each within the memory budget."""
        self.look_at(inputs)
        step = self.chunk_size(inputs)
        for start in range(0, num_inputs(inputs), step):
            yield self.jacobian(select(inputs, slice(start, start + step)), cotangents)

    def look_at(self, inputs: Any) -> None:
        """Finds out how much memory inputs of this shape need, by a forward pass of three of them."""
        with self.borrowed():
            self._captured(self.to_device(select(inputs, slice(0, 3))))

    def chunk_size(self, inputs: Any, rows: int | None = None, row_by_row: bool = False) -> int:
        """How many inputs with `rows` rows each (default: one an output) fit into the memory budget at once.

        By what is known from the last look or pass; `inputs` are looked at if there was none.
        """
        if self._current is None:
            self.look_at(inputs)
        plan = self._current
        assert plan is not None
        rows = plan.num_outputs if rows is None else rows
        general = rows * sum(self.layout.sizes[name] for name in plan.general)
        held = min(rows, 2) if row_by_row else rows  # row by row: the one in use and the next one
        largest = max(self.layout.sizes.values())
        graph = 2 * plan.gradient_elements  # outputs of the calls and of the activations after them
        elements = held * (plan.gradient_elements + 2 * largest) + graph + general + 2 * plan.input_elements
        one = max(1, elements * self.dtype.itemsize)
        useful = max(_USEFUL_CHUNK, _FEWEST_INPUTS * one)
        if not row_by_row:
            vectors = self.num_vectors * self.layout.num_parameters * self.dtype.itemsize
            useful = max(useful, min(-(-_USEFUL_ROWS // max(1, rows)) * one, vectors // _SHARE_OF_VECTORS))
        return max(1, min(self.memory_budget, useful) // one)

    def num_outputs(self, inputs: Any) -> int:
        """C."""
        return self.outputs(select(inputs, slice(0, 1))).shape[1]

    def unusual_parameters(self) -> dict[str, str]:
        """The parameters that took the general path, with the reason."""
        return {name: why for plan in self._plans.values() for name, why in plan.general.items()}

    def last_linear(self) -> tuple[str, ...]:
        """The parameters of the last linear call of the network; none if it is frozen."""
        plan = next(iter(self._plans.values()), None)
        return plan.last_linear if plan else ()

    def _captured(self, inputs: Any) -> tuple[Plan, Capture, Tensor]:
        """One forward pass with the calls recorded; an unknown sequence of calls is probed first."""
        n = num_inputs(inputs)
        plan = self._current
        for _ in range(3):
            with torch.enable_grad():
                capture, outputs = self._watched(inputs, expand=plan.expand if plan else frozenset())
            known = self._plans.get(signature(capture.calls))
            if known is None:
                plan = self._probe(inputs)
                continue
            if plan is None or known.expand != plan.expand:
                plan = known
                continue
            plan = known
            plan.measure(capture.calls, n)
            self._current = plan
            return plan, capture, outputs
        raise RuntimeError(
            "The network does not run the same operations twice on the same inputs, so its Jacobian is not defined. "
            f"The parametrised calls of the last pass were: {described(capture.calls)}."
        )

    def _watched(self, inputs: Any, **options: Any) -> tuple[Capture, Tensor]:
        """One forward pass with the calls recorded."""
        capture = Capture(self._names, num_inputs(inputs), channels_last=self._channels_last, **options)
        try:
            with capture:
                return capture, self._checked(self.forward(self.model, inputs), inputs)
        except RuntimeError:
            if not self._channels_last:
                raise
            self._channels_last = False  # the network wants the usual order, for a view perhaps
            return self._watched(inputs, **options)

    def _checked(self, outputs: Any, inputs: Any) -> Tensor:
        n = num_inputs(inputs)
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != n:
            shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ValueError(
                f"The model must map a batch of {n} inputs to outputs of shape ({n}, C), but it gave {shape}. "
                "Wrap it in a module that returns such a tensor."
            )
        if not torch.isfinite(outputs).all() or _has_non_finite(inputs):
            raise ValueError(self._non_finite(inputs))
        return outputs

    def _non_finite(self, inputs: Any) -> str:
        """Where NaN or infinity first appears: the inputs or a layer."""
        if _has_non_finite(inputs):
            return "The inputs hold NaN or infinity."
        capture = Capture(self._names, num_inputs(inputs), keep_outputs=True)
        with torch.no_grad(), capture:
            self.forward(self.model, inputs)
        for call in capture.calls:
            if call.output is not None and not torch.isfinite(call.output).all():
                return f"The output of '{call.function}' with {', '.join(call.names)} holds NaN or infinity."
        return "The network's outputs hold NaN or infinity, though no parametrised layer does."

    def _probe(self, inputs: Any) -> Plan:
        """Finds the batch axis of every call and checks every gradient, on three inputs (see the class)."""
        n = num_inputs(inputs)
        three = select(inputs, torch.arange(3, device=self.device) % n)
        two = select(three, slice(0, 2))
        first, outputs = self._probing_pass(three)
        second, fewer = self._probing_pass(two)
        if signature(first.calls) != signature(second.calls):
            raise ValueError(depends_on_batch(first_difference(first.calls, second.calls)))
        tolerance = self._tolerance
        _, later = self._probing_pass(select(three, slice(1, 3)))
        for part, alone in ((outputs[:2], fewer), (outputs[1:], later)):
            if not torch.allclose(part, alone, rtol=tolerance, atol=tolerance * float(outputs.abs().max())):
                raise ValueError(depends_on_batch("outputs"))
        axes = [batch_axis(a, b, tolerance) for a, b in zip(first.calls, second.calls, strict=True)]
        plan = Plan(axes, frozenset(), dict(first.unusual), first.last_linear, outputs.shape[1])
        unbatched = frozenset(
            k
            for k, (call, other) in enumerate(zip(first.calls, second.calls, strict=True))
            if call.output_shape == other.output_shape
        )
        if unbatched:
            self._expand(plan, unbatched, three, two, outputs, tolerance)
        for axis, call in zip(plan.axes, first.calls, strict=True):
            if axis is None:
                plan.general |= {name: f"no batch dimension in '{call.function}'" for name in call.names}
        plan.measure(first.calls, 3)
        self._plans[signature(first.calls)] = plan
        self._verify(plan, three, outputs.shape[1])
        return plan

    def _probing_pass(self, inputs: Any, expand: frozenset[int] = frozenset()) -> tuple[Capture, Tensor]:
        with torch.no_grad():
            return self._watched(inputs, expand=expand, keep_outputs=True)

    def _expand(
        self, plan: Plan, unbatched: frozenset[int], three: Any, two: Any, outputs: Tensor, tolerance: float
    ) -> None:
        """Gives the calls that do not depend on the batch a batch dimension, if the outputs stay the same."""
        try:
            first, again = self._probing_pass(three, unbatched)
            second, _ = self._probing_pass(two, unbatched)
        except (RuntimeError, ValueError, IndexError):
            return
        if len(first.calls) != len(plan.axes) or not torch.allclose(again, outputs, rtol=tolerance, atol=tolerance):
            return
        plan.expand = unbatched
        plan.axes = [batch_axis(a, b, tolerance) for a, b in zip(first.calls, second.calls, strict=True)]

    def _verify(self, plan: Plan, inputs: Any, num_outputs: int) -> None:
        """Compares Jᵀu for a random u with automatic differentiation; what differs takes the general path.

        u is a sum of a few random rows, so that networks of many outputs need no more memory than others.
        """
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(3, min(num_outputs, _PROBED_ROWS), num_outputs, generator=generator, dtype=torch.float64)
        rows = rows.to(self.device, self.dtype)
        u = rows.sum(1)
        expected = self._plain_gradients(inputs, u)
        for name, value in expected.items():
            if not torch.isfinite(value).all():
                raise ValueError(non_finite_jacobian(name))
        if plan.general:
            plan.general_batched = self._general_batched(plan, inputs, u, expected)
        jacobian = self.jacobian(inputs, rows)
        weights = rows.new_ones(*rows.shape[:2], 1)
        scale = max(float(value.abs().max()) for value in expected.values())
        missed: dict[str, str] = {}
        for name, value in expected.items():
            block = jacobian.blocks.get(name)
            found = torch.zeros_like(value)
            if block is not None:
                block.add_transpose_matmul(weights, found[None])
            limit = self._tolerance * (float(value.abs().max()) + 1e-2 * scale)
            if float((found - value).abs().max()) > limit:
                if name in plan.general:
                    raise RuntimeError(
                        f"The gradient of parameter '{name}' differs between two ways of automatic differentiation; "
                        "the network is not a function of its inputs and parameters alone."
                    )
                missed[name] = "its gradient is not that of the calls that were seen"
        if missed:
            plan.general |= missed
            plan.general_batched = self._general_batched(plan, inputs, u, expected)

    def _plain_gradients(self, inputs: Any, u: Tensor) -> dict[str, Tensor]:
        """Jᵀu by one ordinary backward pass."""
        parameters = list(self._parameters.values())
        for p in parameters:
            p.requires_grad_()
        try:
            with torch.enable_grad():
                outputs = self.forward(self.model, inputs)
            gradients = torch.autograd.grad(outputs, parameters, u, allow_unused=True)
        finally:
            for p in parameters:
                p.requires_grad_(False)
        return {
            name: torch.zeros_like(p).flatten() if g is None else g.flatten()
            for (name, p), g in zip(self._parameters.items(), gradients, strict=True)
        }

    def _general_batched(self, plan: Plan, inputs: Any, u: Tensor, expected: dict[str, Tensor]) -> bool:
        """Whether the vectorised general path works for this network and gives the right gradients."""
        chosen = {name: self._parameters[name] for name in plan.general}
        try:
            rows = general_rows(self.model, self.forward, chosen, inputs, u.unsqueeze(1), batched=True)
        except Exception:  # vmap raises whatever the network's operations raise; the plain loop handles them all
            return False
        tolerance = self._tolerance
        return all(
            torch.allclose(
                rows[name].sum((0, 1)),
                expected[name],
                rtol=tolerance,
                atol=tolerance * float(expected[name].abs().max()),
            )
            for name in chosen
        )

    def _forward_pass(self, inputs: Any, cotangents: Cotangents | None) -> "_ForwardPass":
        with self.borrowed():
            inputs = self.to_device(inputs)
            plan, capture, outputs = self._captured(inputs)
            n, C = outputs.shape
            if cotangents is None:
                cotangents = torch.eye(C, dtype=outputs.dtype, device=outputs.device).expand(n, C, C)
            elif not isinstance(cotangents, Tensor):
                cotangents = cotangents(outputs.detach())
            chosen = {name: self._parameters[name] for name in plan.general}
            general = {}
            if chosen:
                general = general_rows(self.model, self.forward, chosen, inputs, cotangents, plan.general_batched)
            self.passes += cotangents.shape[0] * cotangents.shape[1]
        calls = [
            (call, axis, axis.in_front(call.source, n))
            for call, axis in zip(capture.calls, plan.axes, strict=True)
            if axis is not None and call.edge is not None and not set(call.names) <= set(plan.general)
        ]
        return _ForwardPass(outputs, cotangents.to(outputs.dtype), calls, general)

    def _rows(self, run: "_ForwardPass", rows: range) -> Jacobian:
        blocks = run.blocks(rows)
        ordered = {name: blocks[name] for name in self.layout.names if name in blocks}
        return Jacobian(self.layout, ordered, run.outputs.detach(), len(rows), repeats_inputs=rows.start > 0)


def _has_non_finite(inputs: Any) -> bool:
    leaves = (leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return any(not torch.isfinite(leaf).all() for leaf in leaves)


@dataclass(frozen=True)
class _ForwardPass:
    """A forward pass from which rows of the Jacobian are taken by backward passes, in order."""

    outputs: Tensor  # with their graph
    cotangents: Tensor  # (n, K, C)
    calls: list[tuple[Call, BatchAxis, Tensor]]  # with the call's input, the batch in front
    general: dict[str, Tensor]  # rows that are known already: (n, K, size)

    @property
    def num_rows(self) -> int:
        return self.cotangents.shape[1]

    def blocks(self, rows: range) -> dict[str, Block]:
        """One backward pass for each of the rows, then the blocks of every parameter."""
        gathered: list[list[Tensor]] = [[] for _ in self.calls]
        for k in rows:
            for parts, gradient in zip(gathered, self._gradients(k), strict=True):
                parts.append(gradient)
        found: dict[str, list[Block]] = {
            name: [RowBlock(value[:, rows.start : rows.stop].detach())] for name, value in self.general.items()
        }
        with torch.no_grad(), torch.inference_mode(False):
            for (call, axis, source), parts in zip(self.calls, gathered, strict=True):
                in_front = tuple(axis.in_front(gradient, len(self.outputs)) for gradient in parts)
                for name, build in call.builders:
                    if name not in self.general:
                        found.setdefault(name, []).append(build(source, in_front))
            return {name: summed(blocks) for name, blocks in found.items()}

    def _gradients(self, k: int) -> list[Tensor]:
        """The gradients of row k of every input at the outputs of the calls; the last row frees the graph."""
        edges = [call.edge for call, _, _ in self.calls if call.edge is not None]
        if not edges or not self.outputs.requires_grad:
            return [self.outputs.new_zeros(call.output_shape) for call, _, _ in self.calls]
        with torch.inference_mode(False):
            gradients = torch.autograd.grad(
                self.outputs, edges, self.cotangents[:, k], retain_graph=k + 1 < self.num_rows, allow_unused=True
            )
        return [
            self.outputs.new_zeros(call.output_shape) if gradient is None else gradient
            for gradient, (call, _, _) in zip(gradients, self.calls, strict=True)
        ]


@dataclass(frozen=True)
class Jacobians:
    """The Jacobian of a set of inputs (with respect to all outputs), chunk by chunk; may be run through repeatedly."""

    linearization: Linearization
    inputs: Any
    progress: bool = False

    def __iter__(self) -> Iterator[Jacobian]:
        total = num_inputs(self.inputs)
        with tqdm(total=total, desc="Jacobians", unit="input", disable=not self.progress, leave=False) as bar:
            for jacobian in self.linearization.chunks(self.inputs):
                yield jacobian
                bar.update(jacobian.num_inputs)

    @property
    def num_rows(self) -> int:
        """n·C."""
        return num_inputs(self.inputs) * self.linearization.num_outputs(self.inputs)

    @property
    def memory_budget(self) -> int:
        return self.linearization.memory_budget

    @property
    def dtype(self) -> torch.dtype:
        return self.linearization.dtype

    @property
    def device(self) -> torch.device:
        return self.linearization.device
