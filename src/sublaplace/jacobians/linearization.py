"""A trained network and its Jacobian: the engine that all other modules use."""

import copy
import os
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from sublaplace.data.batches import Ragged, form, num_inputs, parts_of, select
from sublaplace.data.padding import present_positions
from sublaplace.jacobians.capture import Capture
from sublaplace.jacobians.chunks import ChunkPolicy
from sublaplace.jacobians.costs import cost_by_features, cost_by_rows, cost_forward, cost_of_formed_rows
from sublaplace.jacobians.forward import ChosenOutputs, Directions, LazyBlocks, forward_mode_works, forward_products
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.network import Forward, Network
from sublaplace.jacobians.passes import Cotangents, ForwardPass, OutputHessians
from sublaplace.jacobians.plan import Plan, Signature, described, signature
from sublaplace.jacobians.probing import probed
from sublaplace.jacobians.wanted import ROWS, Wanted
from sublaplace.model.calling import call_model
from sublaplace.model.linalg import Vectors
from sublaplace.model.output_layout import FlatOutputs, OutputLayout
from sublaplace.model.parameters import ParameterLayout
from sublaplace.runtime.memory import on_disk, require

_LARGEST_KEPT_BLOCK = 2**25 - 2**13  # bytes, just below glibc's limit


class Linearization:
    """The linearised network f(x) ≈ f(x; θ̂) + J (θ − θ̂), with J in factored form (see `blocks.py`).

    The network is probed on the first batch, and again whenever it runs a new sequence of calls (see `probing.py`). A
    parameter without structured use takes the general path of `general.py`. Every module therefore gets a correct
    Jacobian, and only unusual parameters are slower. Cost: one forward and K backward passes per input.

    Args:
        model: the trained network; it is put into eval mode while in use and restored afterwards.
        forward: how the model is called.
        chunks: how many inputs are processed at once.
        scratch_folder: where vectors in parameter space are stored; None: in memory.
        units: the length of a unit of each parameter, θ = unit · φ. Jacobians are those with respect to φ, whose prior
            N(0, λ⁻¹I) is N(0, unit²/λ) for θ. None: 1.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward = call_model,
        chunks: ChunkPolicy | None = None,
        scratch_folder: str | os.PathLike[str] | None = None,
        units: dict[str, float] | None = None,
    ) -> None:
        self.network = Network(model, forward)
        self.policy = chunks or ChunkPolicy()
        self.scratch_folder = scratch_folder
        self.units = units
        self.keeps_graph = False  # whether Jacobians can be differentiated with respect to the inputs
        self.passes = 0  # number of backward passes so far, counted per input
        self.forward_passes = 0  # number of Jacobian–vector products so far, counted per input
        self._grouped: dict[int, Linearization] = {}
        self._plans: dict[Signature, Plan] = {}
        self._current: Plan | None = None  # of the last pass
        self._form: Hashable = None  # of the inputs of that pass
        # glibc returns freed blocks to the system, so every chunk would cause a page fault per page. After one large
        # block has been freed, glibc keeps up to twice its size.
        torch.empty(_LARGEST_KEPT_BLOCK, dtype=torch.uint8, device="cpu")

    @property
    def model(self) -> nn.Module:
        """The trained network."""
        return self.network.model

    @property
    def forward(self) -> Forward:
        """How the model is called."""
        return self.network.forward

    @property
    def output_layout(self) -> OutputLayout | None:
        """The arrangement of the outputs in the last pass; None: they are (n, C)."""
        forward = self.network.forward
        return forward.layout if isinstance(forward, FlatOutputs) else None

    def output_layouts(self, inputs: Any) -> set[OutputLayout | None]:
        """Return the arrangements of the outputs, of which there may be several where inputs have different shapes."""
        found = set()
        for part in parts_of(inputs):
            self.num_outputs(part)
            found.add(self.output_layout)
        return found

    def arranged(self, outputs: Tensor) -> Tensor:
        """Return outputs (n, K) of the last pass in the network's arrangement: (n, …)."""
        layout = self.output_layout
        return outputs if layout is None else layout.arranged(outputs)

    @property
    def layout(self) -> ParameterLayout:
        """Names and shapes of the parameters."""
        return self.network.layout

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.network.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.network.device

    @property
    def memory_budget(self) -> int:
        """Bytes for temporary chunks."""
        return self.policy.memory_budget

    def zero_vectors(self, count: int) -> Vectors:
        """Return `count` zero vectors in parameter space, in memory or in the scratch folder."""
        if self.scratch_folder is None:
            return self.layout.zeros(count, torch.empty(0, dtype=self.dtype, device=self.device))
        sizes = self.layout.sizes.items()
        return {name: on_disk(count * size, self.dtype, self.scratch_folder).view(count, size) for name, size in sizes}

    def borrowed(self) -> AbstractContextManager[None]:
        """Put the model into eval mode and restore it afterwards; contexts may be nested."""
        return self.network.borrowed()

    def to_device(self, inputs: Any) -> Any:
        """Move inputs to the model's device, and convert half-precision inputs to the model's dtype."""
        return self.network.to_device(inputs, self.keeps_graph)

    def outputs(self, inputs: Any) -> Tensor:
        """Return f(x) without an autograd graph: (n, C)."""
        with self.borrowed(), torch.no_grad():
            return self.network.watched(self.to_device(inputs), only=())[1]

    def last_layer(self, inputs: Any) -> list[Jacobian] | None:
        """Return Jacobians without rows, which hold the inputs of the last linear layer and the outputs, in chunks.

        None if the network does not end in such a layer, or uses its parameters elsewhere. Cost: one forward pass.
        """
        wanted = Wanted(names=frozenset(self.last_linear()))
        step = self.chunk_size(inputs, 1, wanted=wanted)
        found = []
        for start in range(0, num_inputs(inputs), step):
            part = self.to_device(select(inputs, slice(start, start + step)))
            with self.borrowed():
                passed = self._last_layer_captured(part, wanted)
            if passed is None:
                return None
            plan, capture, outputs = passed
            none = outputs.new_zeros(len(outputs), 0, outputs.shape[1])
            run = ForwardPass.of(self.network, plan, capture, part, outputs, none, wanted)
            found.append(self._completed(run.jacobian(range(0)), part))
        return found

    def jacobian(self, inputs: Any, cotangents: Cotangents | None = None, wanted: Wanted = ROWS) -> Jacobian:
        """Return the Jacobian of a batch.

        Args:
            inputs: the batch.
            cotangents: (n, K, C), the directions of the rows; None: one row per output. A function from the outputs to
                the cotangents saves a forward pass.
            wanted: the parameters that count; backward passes end at the first call that uses one of them.
        """
        if cotangents is None and self.uses_features(inputs, wanted):
            found = self._by_features(inputs, wanted)
            if found is not None:
                return self._completed(found, inputs)
        run = self._forward_pass(inputs, cotangents, wanted)
        return self._completed(run.jacobian(range(run.num_rows)), inputs)

    def uses_features(self, inputs: Any, wanted: Wanted) -> bool:
        """Return whether the rows of all outputs come from half as many features, or fewer."""
        plan = self._plan(inputs)
        few = plan.num_features is not None and 2 * plan.num_features <= plan.num_outputs
        return wanted.features and few and not plan.general

    def _by_features(self, inputs: Any, wanted: Wanted) -> Jacobian | None:
        with self.borrowed():
            plan, capture, outputs = self._captured(self.to_device(inputs), wanted)
            run = ForwardPass.of_features(self.network, plan, capture, outputs, wanted, self.keeps_graph)
            if run is None:
                return None
            self.passes += run.num_passes
            return run.jacobian()

    def row_by_row(
        self, inputs: Any, cotangents: Cotangents | None = None, wanted: Wanted = ROWS
    ) -> Iterator[Jacobian]:
        """Yield K Jacobians with one row per input, which together hold the rows of `jacobian`.

        Sums over rows need only the memory of one row's gradients this way. If K = 0, yield one Jacobian without rows.
        """
        run = self._forward_pass(inputs, cotangents, wanted)
        for k in range(max(1, run.num_rows)):
            yield self._completed(run.jacobian(range(k, min(k + 1, run.num_rows))), inputs)

    def along_hessians(self, inputs: Any, hessians: OutputHessians) -> Iterator[Jacobian] | None:
        """Return Jacobians with one row per input, for sums over all directions of the output Hessians.

        If the network ends in f = Wφ + b, at most F rows hold as much as all C − 1; see `curved` for the last layer.
        None if it does not end so.
        """
        with self.borrowed():
            plan, capture, outputs = self._captured(self.to_device(inputs))
            run = ForwardPass.of_features(self.network, plan, capture, outputs, ROWS)
            if run is None:
                return None
            run = run.along(hessians)
            self.passes += run.num_passes
        return (self._completed(jacobian, inputs) for jacobian in run.row_by_row(hessians))

    def num_features(self) -> int | None:
        """Return F if the network ends in one linear layer of F features, and all parameters have a rule.

        None if there was no pass yet.
        """
        plan = self._current
        return None if plan is None or plan.general else plan.num_features

    def num_outputs_seen(self) -> int | None:
        """Return the number of outputs in the last pass, C; None if there was no pass yet."""
        return None if self._current is None else self._current.num_outputs

    def _completed(self, jacobian: Jacobian, inputs: Any) -> Jacobian:
        """Return the Jacobian in these units, with the positions that are padding."""
        jacobian = replace(jacobian, present=present_positions(inputs))
        return jacobian if self.units is None else jacobian.scaled(self.units)

    def with_units(self, units: dict[str, float]) -> "Linearization":
        """Return the same network with parameters in other units; what was learned about it is shared."""
        other = copy.copy(self)
        other.units = units
        other._grouped = {}
        return other

    def differentiable(self) -> "Linearization":
        """Return the same network with Jacobians that can be differentiated with respect to the inputs.

        Activations and gradients of every call stay in the autograd graph. Rows come from backward passes alone.
        """
        other = copy.copy(self)
        other.keeps_graph = True
        return other

    def grouped(self, size: int) -> "Linearization":
        """Return the network that maps groups of inputs, (b, size, …), to the outputs of all of them, (b, size·C).

        The covariance of a group's outputs is then one of a single input. Cost: size·C rows per group.
        """
        if size not in self._grouped:
            forward = self.forward

            def of_groups(model: nn.Module, groups: Tensor) -> Tensor:
                return forward(model, groups.flatten(0, 1)).reshape(len(groups), -1)

            self._grouped[size] = Linearization(
                self.model, of_groups, self.policy, scratch_folder=self.scratch_folder, units=self.units
            )
        made = self._grouped[size]
        return made.differentiable() if self.keeps_graph else made

    def flat_parameters(self) -> Tensor:
        """Return θ̂ in these units, as one vector: (p,)."""
        flat = self.layout.flat(self.model)
        return flat if self.units is None else flat / self.flat_units(flat)

    def flat_units(self, like: Tensor) -> Tensor:
        """Return the unit of every single parameter, in the type and on the device of `like`: (p,)."""
        units = self.units or {}
        return torch.cat([like.new_full((size,), units.get(name, 1.0)) for name, size in self.layout.sizes.items()])

    def squared_norm(self) -> float:
        """Return ‖θ̂‖² in these units."""
        return float(self.flat_parameters().double().square().sum())

    def chunks(self, inputs: Any, cotangents: Cotangents | None = None, wanted: Wanted = ROWS) -> Iterator[Jacobian]:
        """Yield the Jacobians of parts of a large batch, within the memory budget.

        Args:
            inputs: the batch; the parts of `Ragged` inputs follow one another.
            cotangents: as in `jacobian`, for the whole batch, or chosen outputs. Of inputs with fewer outputs than
                others, (n, K, C) holds zeros or anything else for those that they lack.
            wanted: what will be asked of the Jacobians. Products with vectors use forward mode if it costs less.
        """
        if isinstance(inputs, Ragged):
            start = 0
            for few in inputs.parts:
                stop = start + num_inputs(few)
                yield from self.chunks(few, None if cotangents is None else _of_inputs(cotangents, start, stop), wanted)
                start = stop
            return
        self.look_at(inputs)
        plan = self._plan(inputs)
        rows = plan.num_outputs
        if self.uses_features(inputs, wanted) and plan.num_features is not None:
            rows = plan.num_features
        chosen = cotangents if isinstance(cotangents, ChosenOutputs) else None
        if chosen is not None:
            rows = chosen.places.shape[1]
        elif isinstance(cotangents, Tensor):
            rows = cotangents.shape[1]
        elif cotangents is None and wanted.products is not None and self.prefers_products(inputs, rows, wanted):
            step = self.products_chunk_size(inputs, wanted)
            for start in range(0, num_inputs(inputs), step):
                yield self.products_jacobian(select(inputs, slice(start, start + step)), wanted)
            return
        forward = chosen is not None and self.prefers_forward(inputs, rows, wanted)
        step = self.forward_chunk_size(inputs, wanted) if forward else self.chunk_size(inputs, rows, wanted=wanted)
        for start in range(0, num_inputs(inputs), step):
            part = select(inputs, slice(start, start + step))
            if chosen is not None:
                few = chosen.part(start, start + step)
                yield self.forward_jacobian(part, few) if forward else self.jacobian(part, few, wanted)
            else:
                own = cotangents
                if isinstance(cotangents, Tensor):
                    own = cotangents[start : start + step, :, : plan.num_outputs]
                yield self.jacobian(part, own, wanted)

    # Products with vectors --------------------------------------------------------------------------------------------

    def prefers_products(self, inputs: Any, rows: int, wanted: Wanted) -> bool:
        """Return whether products with vectors cost less by features or forward mode than by `rows` backward passes."""
        if self.prefers_features(inputs, rows, wanted):
            return True
        # Features may be next where forward mode turns out not to work.
        return self.prefers_forward(inputs, rows, wanted) or self.prefers_features(inputs, rows, wanted)

    def prefers_features(self, inputs: Any, rows: int, wanted: Wanted) -> bool:
        """Return whether rows of features give products with vectors for less than `rows` rows, or forward mode."""
        plan = self._plan(inputs)
        features = plan.num_features
        before_last = any(wanted.includes((name,)) for name in self.layout.names if name not in plan.last_linear)
        if wanted.products is None or features is None or features >= rows or plan.general or not before_last:
            return False
        by_features = self._cost_by_features(plan, wanted)
        by_rows = cost_by_rows(plan.sizes(wanted), self._num_parameters(wanted), rows, wanted)
        forward = plan.forward_mode is False or cost_forward(plan.sizes(wanted), wanted) > by_features
        return forward and by_features < by_rows

    def _cost_by_features(self, plan: Plan, wanted: Wanted) -> int:
        assert plan.num_features is not None
        last = sum(self.layout.sizes[name] for name in plan.last_linear if wanted.includes((name,)))
        body, before = plan.sizes(wanted, without_last=True), self._num_parameters(wanted) - last
        return cost_by_features(body, before, plan.num_features, plan.num_outputs, wanted)

    def saves_by_forward_mode(self, inputs: Any, vectors: int, rows_times: int, factor: float) -> bool:
        """Return whether forward mode takes less than rows that are formed, multiplied, and squared.

        The rows are those of the outputs, or of fewer features before the last layer.

        Args:
            inputs: some inputs.
            vectors: how many Jacobian–vector products there are.
            rows_times: how many vectors the rows are multiplied by.
            factor: how many times less forward mode must take.
        """
        plan, rows, size = self._plan(inputs), self.num_outputs(inputs), self.layout.num_parameters
        sizes = plan.sizes()
        if self.uses_features(inputs, Wanted(features=True)) and plan.num_features is not None:
            rows, size = plan.num_features, size - sum(self.layout.sizes[name] for name in plan.last_linear)
        by_rows = cost_of_formed_rows(sizes, size, rows, rows_times)
        wanted = Wanted(vectors)
        return factor * cost_forward(sizes, wanted) < by_rows and self.forward_mode_works(inputs)

    def _num_parameters(self, wanted: Wanted) -> int:
        return sum(size for name, size in self.layout.sizes.items() if wanted.includes((name,)))

    def products_chunk_size(self, inputs: Any, wanted: Wanted) -> int:
        """Return how many inputs to process at once in `products_jacobian`."""
        plan = self._plan(inputs)
        if self.prefers_features(inputs, plan.num_outputs, wanted):
            fitting = self.policy.forward_size(plan, self.dtype.itemsize, wanted.products or 1)
            return min(fitting, self.chunk_size(inputs, plan.num_features, wanted=wanted))
        return self.forward_chunk_size(inputs, wanted)

    def products_jacobian(self, inputs: Any, wanted: Wanted, directions: Directions | None = None) -> Jacobian:
        """Return a Jacobian for products with vectors alone, by features or forward mode, whichever costs less.

        Args:
            inputs: the batch.
            wanted: the number of vectors.
            directions: of the rows; None: one row per output.
        """
        if self.prefers_features(inputs, self._plan(inputs).num_outputs, wanted):
            found = self._by_features(inputs, wanted)
            if found is not None:
                rows = self._completed(found, inputs)
                return rows if directions is None else self._directed(rows, inputs, directions)
        if self.prefers_forward(inputs, self._plan(inputs).num_outputs, wanted):
            return self.forward_jacobian(inputs, directions)
        return self.jacobian(inputs, directions, wanted)

    def _directed(self, rows: Jacobian, inputs: Any, directions: Directions) -> Jacobian:
        """Return the Jacobian along directions, from the rows of all outputs."""
        outputs = rows.outputs

        def products(vectors: Vectors) -> Tensor:
            return directions.times(outputs, rows.matmul(vectors))

        def transposed(weights: Tensor, into: Vectors) -> None:
            rows.add_transpose_matmul(directions.combined(outputs, weights.transpose(1, 2)).transpose(1, 2), into)

        blocks = LazyBlocks(lambda: self.jacobian(inputs, directions).blocks)
        return Jacobian(self.layout, blocks, outputs, outputs.shape[1], forward=products, transposed=transposed)

    # Forward mode -----------------------------------------------------------------------------------------------------

    def prefers_forward(self, inputs: Any, rows: int, wanted: Wanted) -> bool:
        """Return whether forward mode works and costs less than `rows` backward passes per input (see `costs`)."""
        plan = self._plan(inputs)
        if self.keeps_graph or wanted.products is None or plan.forward_mode is False:
            return False
        sizes = plan.sizes(wanted)
        if cost_forward(sizes, wanted) >= cost_by_rows(sizes, self._num_parameters(wanted), rows, wanted):
            return False
        return self.forward_mode_works(inputs)

    def forward_mode_works(self, inputs: Any) -> bool:
        """Return whether forward mode is right for this network. The first answer compares it on three inputs."""
        plan = self._plan(inputs)
        if plan.forward_mode is None:
            with self.borrowed():
                few = select(inputs, torch.arange(3, device="cpu") % num_inputs(inputs))
                plan.forward_mode = forward_mode_works(self.network, self.to_device(few))
        return plan.forward_mode

    def forward_chunk_size(self, inputs: Any, wanted: Wanted) -> int:
        """Return how many inputs to process at once in forward mode, within the memory budget."""
        return self.policy.forward_size(self._plan(inputs), self.dtype.itemsize, wanted.products or 1)

    def forward_jacobian(self, inputs: Any, directions: Directions | None = None) -> Jacobian:
        """Return a Jacobian whose products with vectors come from forward mode (see `forward_products`).

        Args:
            inputs: the batch.
            directions: of the rows; None: one row per output.
        """
        inputs = self.to_device(inputs)
        outputs = self.outputs(inputs)
        at_once = self.policy.tangents_at_once(self._plan(inputs), self.dtype.itemsize)

        def forward(vectors: Vectors) -> Tensor:
            if self.units is not None:
                vectors = {name: part * self.units[name] for name, part in vectors.items()}
            with self.borrowed():
                products = forward_products(self.network, inputs, vectors, at_once)
            self.forward_passes += len(outputs) * products.shape[2]
            return products if directions is None else directions.times(outputs, products)

        def transposed(weights: Tensor, into: Vectors) -> None:
            cotangents = weights.transpose(1, 2)
            if directions is not None:
                cotangents = directions.combined(outputs, cotangents)
            with self.borrowed():
                self.network.add_gradients(inputs, cotangents, into, self.units)
            self.passes += len(outputs) * cotangents.shape[1]

        blocks = LazyBlocks(lambda: self.jacobian(inputs, directions).blocks)
        rows = directions.places.shape[1] if isinstance(directions, ChosenOutputs) else outputs.shape[1]
        return Jacobian(self.layout, blocks, outputs, rows, forward=forward, transposed=transposed)

    # Sizes ------------------------------------------------------------------------------------------------------------

    def look_at(self, inputs: Any) -> None:
        """Measure how much memory inputs of this shape need, by a forward pass with three of them if it is new."""
        few = self.to_device(select(inputs, slice(0, 3)))
        if self._current is None or form(few) != self._form:
            with self.borrowed():
                self._captured(few)

    def chunk_size(
        self,
        inputs: Any,
        rows: int | None = None,
        row_by_row: bool = False,
        num_vectors: int | None = None,
        wanted: Wanted = ROWS,
    ) -> int:
        """Return how many inputs to process at once within the memory budget.

        The answer uses the measurements of the last `look_at` or pass.

        Args:
            inputs: measured if there was no pass before.
            rows: rows per input; None: one per output.
            row_by_row: whether only one row per input is formed at a time.
            num_vectors: how many vectors in parameter space are multiplied by the Jacobians; None: as in the policy.
            wanted: the parameters that count.
        """
        plan = self._plan(inputs)
        policy = self.policy if num_vectors is None else replace(self.policy, num_vectors=num_vectors)
        rows = plan.num_outputs if rows is None else rows
        arguments = (plan, self.layout, self.dtype.itemsize, rows, row_by_row, wanted)
        one = policy.bytes_per_input(*arguments)
        if rows > 1 and not row_by_row and one > policy.memory_budget:
            require(
                one,
                self.device,
                f"The set of {rows:,} Jacobian rows of one input with {plan.num_outputs:,} outputs",
                "Products with P take forward mode instead of rows: use a subspace without a complement "
                "(complement=None). Or use fewer positions or outputs per input, such as "
                "functional_variance(x, outputs=…), or sampled directions, Resources(curvature_samples=10).",
            )
        return policy.size(*arguments)

    def chunk_bytes(self, inputs: Any, count: int, rows: int, row_by_row: bool = False, wanted: Wanted = ROWS) -> int:
        """Return the memory of the largest chunk of a pass over `count` inputs; other arguments as of `chunk_size`."""
        plan = self._plan(inputs)
        one = self.policy.bytes_per_input(plan, self.layout, self.dtype.itemsize, rows, row_by_row, wanted)
        return one * min(count, self.chunk_size(inputs, rows, row_by_row, wanted=wanted))

    def _plan(self, inputs: Any) -> Plan:
        """Return the plan of the last pass; if there was none, that of these inputs."""
        if self._current is None:
            self.look_at(inputs)
        assert self._current is not None
        return self._current

    def needs_no_pass(self, wanted: Wanted) -> bool:
        """Return whether the rows need no backward pass, because the wanted parameters are those of the last layer."""
        plan = self._current
        return plan is not None and wanted.names is not None and not plan.sizes(wanted).backward

    def num_outputs(self, inputs: Any) -> int:
        """Return the number of outputs, C."""
        return self.outputs(select(inputs, slice(0, 1))).shape[1]

    def unusual_parameters(self) -> dict[str, str]:
        """Return the parameters that took the general path, each with the reason."""
        return {name: why for plan in self._plans.values() for name, why in plan.general.items()}

    def last_linear(self) -> tuple[str, ...]:
        """Return the parameters of the network's last linear call; empty if they are frozen."""
        plan = next(iter(self._plans.values()), None)
        return plan.last_linear if plan else ()

    def ends_linear(self) -> bool:
        """Return whether the output of the last linear call is the network's output, for all inputs so far."""
        return bool(self._plans) and all(plan.ends_linear for plan in self._plans.values())

    def _captured(self, inputs: Any, wanted: Wanted = ROWS) -> tuple[Plan, Capture, Tensor]:
        """Run one forward pass and record its calls; an unknown sequence of calls is probed first."""
        plan = self._current
        if self.keeps_graph:
            wanted = ROWS  # outputs depend on the inputs through all calls
        for _ in range(3):
            # Fused attention has no second derivative.
            kernels = sdpa_kernel(SDPBackend.MATH) if self.keeps_graph else nullcontext()
            with torch.enable_grad(), kernels:
                expand = plan.expand if plan else frozenset()
                capture, outputs = self.network.watched(
                    inputs, expand=expand, wanted=wanted, keeps_graph=self.keeps_graph
                )
            known = self._plans.get(signature(capture.calls))
            if known is None:
                plan = probed(self.network, self.network.to_device(inputs), self._jacobian_of)
                self._plans[plan.signature] = plan
                continue
            if plan is None or known.expand != plan.expand:
                plan = known
                continue
            plan = known
            missed = capture.unusual.keys() - plan.general.keys()
            if missed:  # in a branch that no probed input took
                plan.general |= {name: capture.unusual[name] for name in missed}
                plan.general_batched = False
            plan.measure(capture.calls, num_inputs(inputs))
            plan.num_outputs = outputs.shape[1]  # sequences of another length have others
            self._current, self._form = plan, form(inputs)
            return plan, capture, outputs
        raise RuntimeError(
            "The network does not repeat the same operations on the same inputs, so its Jacobian is not defined. "
            f"The calls with parameters in the last pass were: {described(capture.calls)}."
        )

    def _last_layer_captured(self, inputs: Any, wanted: Wanted) -> tuple[Plan, Capture, Tensor] | None:
        """Run one forward pass and record the last linear layer alone; None if more is wanted.

        What comes before that layer is not recorded, so that its calls cost no more than they do by themselves. None
        as well if the layer was used otherwise than when the network was probed.
        """
        plan = None if self._current is None or self.keeps_graph else self._current.of_last_layer(wanted)
        if plan is None:
            return None
        with torch.enable_grad():
            capture, outputs = self.network.watched(inputs, only=plan.last_linear, wanted=wanted)
        same = signature(capture.calls) == plan.signature and not capture.unusual
        if not same or capture.calls[0].edge != get_gradient_edge(outputs):
            return None
        return plan, capture, outputs

    def _jacobian_of(self, plan: Plan, capture: Capture, inputs: Any, outputs: Tensor, cotangents: Tensor) -> Jacobian:
        run = ForwardPass.of(self.network, plan, capture, inputs, outputs, cotangents)
        return run.jacobian(range(run.num_rows))

    def _forward_pass(self, inputs: Any, cotangents: Cotangents | None, wanted: Wanted) -> ForwardPass:
        with self.borrowed():
            inputs = self.to_device(inputs)
            recorded = self._last_layer_captured(inputs, wanted) or self._captured(inputs, wanted)
            plan, capture, outputs = recorded
            run = ForwardPass.of(self.network, plan, capture, inputs, outputs, cotangents, wanted, self.keeps_graph)
            self.passes += run.num_passes
        return run


def _of_inputs(cotangents: Cotangents, start: int, stop: int) -> Cotangents:
    """Return the directions of some of the inputs; a function from outputs to directions is the same for all."""
    if isinstance(cotangents, ChosenOutputs):
        return cotangents.part(start, stop)
    return cotangents[start:stop] if isinstance(cotangents, Tensor) else cotangents
