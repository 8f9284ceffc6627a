"""A trained network and its Jacobian: the engine that everything else runs on."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sublaplace.data.batches import num_inputs, select
from sublaplace.jacobians.capture import Capture
from sublaplace.jacobians.chunks import ChunkPolicy
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.network import Forward, Network
from sublaplace.jacobians.passes import Cotangents, ForwardPass
from sublaplace.jacobians.plan import Plan, Signature, described, signature
from sublaplace.jacobians.probing import probed
from sublaplace.model.calling import call_model
from sublaplace.model.linalg import Vectors
from sublaplace.model.parameters import ParameterLayout
from sublaplace.runtime.memory import on_disk

_LARGEST_KEPT_BLOCK = 2**25 - 2**13  # bytes, just below glibc's limit


class Linearization:
    """f(x) ≈ f(x; θ̂) + J (θ − θ̂), with J in factored form (see `blocks.py`).

    The first batch is probed (see `probing.py`), and again whenever the network runs another sequence of calls. A
    parameter that is used in a way without structure goes through the general path of `general.py`. So every module
    gives the right answer, and only what is unusual is slower. A Jacobian costs one forward and K backward passes.

    Args:
        model: the trained network, which is borrowed while it is used and left as it was.
        forward: how the model is called.
        chunks: how many inputs are worked on at once.
        scratch_folder: where vectors of parameter space are kept; None: in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward = call_model,
        chunks: ChunkPolicy | None = None,
        scratch_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.network = Network(model, forward)
        self.policy = chunks or ChunkPolicy()
        self.scratch_folder = scratch_folder
        self.passes = 0  # backward passes through one input, counted
        self._plans: dict[Signature, Plan] = {}
        self._current: Plan | None = None  # of the last pass
        # glibc gives freed blocks back to the system, and takes a page fault for every page when the next chunk needs
        # them again, until a large one has been freed; from then on it keeps twice that size.
        torch.empty(_LARGEST_KEPT_BLOCK, dtype=torch.uint8)

    @property
    def model(self) -> nn.Module:
        """The trained network."""
        return self.network.model

    @property
    def forward(self) -> Forward:
        """How it is called."""
        return self.network.forward

    @property
    def layout(self) -> ParameterLayout:
        """Names and shapes of its parameters."""
        return self.network.layout

    @property
    def dtype(self) -> torch.dtype:
        """The type of its parameters."""
        return self.network.dtype

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return self.network.device

    @property
    def memory_budget(self) -> int:
        """Bytes for temporary chunks."""
        return self.policy.memory_budget

    def zero_vectors(self, count: int) -> Vectors:
        """Return zeros of parameter space, (count, size) per parameter, in memory or in the scratch folder."""
        if self.scratch_folder is None:
            return self.layout.zeros(count, torch.empty(0, dtype=self.dtype, device=self.device))
        sizes = self.layout.sizes.items()
        return {name: on_disk(count * size, self.dtype, self.scratch_folder).view(count, size) for name, size in sizes}

    def borrowed(self) -> AbstractContextManager[None]:
        """Put the model into eval mode, and back afterwards; may be nested."""
        return self.network.borrowed()

    def to_device(self, inputs: Any) -> Any:
        """Move inputs to the model's device; half-precision ones get the model's type."""
        return self.network.to_device(inputs)

    def outputs(self, inputs: Any) -> Tensor:
        """Return f(x), (n, C), without a graph."""
        with self.borrowed(), torch.no_grad():
            return self.network.watched(self.to_device(inputs))[1]

    def jacobian(self, inputs: Any, cotangents: Cotangents | None = None) -> Jacobian:
        """Return J of a batch; row (n, k) belongs to cotangents[n, k] (n, K, C), by default to output k.

        Cotangents may also be given as a function of the outputs, which saves a forward pass.
        """
        run = self._forward_pass(inputs, cotangents)
        return run.jacobian(range(run.num_rows))

    def row_by_row(self, inputs: Any, cotangents: Cotangents | None = None) -> Iterator[Jacobian]:
        """Yield the rows of `jacobian` one after another, as K Jacobians with one row per input (none if K = 0).

        For what only adds up over the rows: the memory of one row's gradients serves them all.
        """
        run = self._forward_pass(inputs, cotangents)
        for k in range(max(1, run.num_rows)):
            yield run.jacobian(range(k, min(k + 1, run.num_rows)))

    def chunks(self, inputs: Any, cotangents: Cotangents | None = None) -> Iterator[Jacobian]:
        """Yield the Jacobians of parts of a large batch (of all outputs, or `cotangents`), within the memory budget."""
        self.look_at(inputs)
        step = self.chunk_size(inputs)
        for start in range(0, num_inputs(inputs), step):
            yield self.jacobian(select(inputs, slice(start, start + step)), cotangents)

    def look_at(self, inputs: Any) -> None:
        """Find out how much memory inputs of this shape need, by a forward pass of three of them."""
        with self.borrowed():
            self._captured(self.to_device(select(inputs, slice(0, 3))))

    def chunk_size(
        self, inputs: Any, rows: int | None = None, row_by_row: bool = False, num_vectors: int | None = None
    ) -> int:
        """Return how many inputs with `rows` rows each (default: one per output) fit into the memory budget at once.

        By what is known from the last look or pass; `inputs` are looked at if there was none. `num_vectors`: of
        parameter space that these Jacobians are multiplied with; None: as in the policy.
        """
        if self._current is None:
            self.look_at(inputs)
        plan = self._current
        assert plan is not None
        policy = self.policy if num_vectors is None else replace(self.policy, num_vectors=num_vectors)
        rows = plan.num_outputs if rows is None else rows
        return policy.size(plan, self.layout, self.dtype.itemsize, rows, row_by_row)

    def num_outputs(self, inputs: Any) -> int:
        """Return C."""
        return self.outputs(select(inputs, slice(0, 1))).shape[1]

    def unusual_parameters(self) -> dict[str, str]:
        """Return the parameters that took the general path, with the reason."""
        return {name: why for plan in self._plans.values() for name, why in plan.general.items()}

    def last_linear(self) -> tuple[str, ...]:
        """Return the parameters of the last linear call of the network; none if it is frozen."""
        plan = next(iter(self._plans.values()), None)
        return plan.last_linear if plan else ()

    def _captured(self, inputs: Any) -> tuple[Plan, Capture, Tensor]:
        """Run one forward pass with the calls recorded; an unknown sequence of calls is probed first."""
        plan = self._current
        for _ in range(3):
            with torch.enable_grad():
                capture, outputs = self.network.watched(inputs, expand=plan.expand if plan else frozenset())
            known = self._plans.get(signature(capture.calls))
            if known is None:
                plan = probed(self.network, inputs, self._jacobian_of)
                self._plans[plan.signature] = plan
                continue
            if plan is None or known.expand != plan.expand:
                plan = known
                continue
            plan = known
            plan.measure(capture.calls, num_inputs(inputs))
            self._current = plan
            return plan, capture, outputs
        raise RuntimeError(
            "The network does not run the same operations twice on the same inputs, so its Jacobian is not defined. "
            f"The parametrised calls of the last pass were: {described(capture.calls)}."
        )

    def _jacobian_of(self, plan: Plan, capture: Capture, inputs: Any, outputs: Tensor, cotangents: Tensor) -> Jacobian:
        run = ForwardPass.of(self.network, plan, capture, inputs, outputs, cotangents)
        return run.jacobian(range(run.num_rows))

    def _forward_pass(self, inputs: Any, cotangents: Cotangents | None) -> ForwardPass:
        with self.borrowed():
            inputs = self.to_device(inputs)
            plan, capture, outputs = self._captured(inputs)
            run = ForwardPass.of(self.network, plan, capture, inputs, outputs, cotangents)
            self.passes += run.cotangents.shape[0] * run.cotangents.shape[1]
        return run
