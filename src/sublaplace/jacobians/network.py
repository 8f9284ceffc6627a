"""A trained network with its parameters by name, and forward passes whose calls are recorded."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from sublaplace.data.batches import num_inputs, plain
from sublaplace.jacobians.capture import Capture
from sublaplace.model.borrowing import borrowed, full_precision
from sublaplace.model.linalg import Vectors
from sublaplace.model.parameters import HALF_PRECISIONS, ParameterLayout

Forward = Callable[[nn.Module, Any], Tensor]


class Network:
    """A model, how it is called, and its parameters that require grad."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        self.model, self.forward = model, forward
        self.layout = ParameterLayout.of(model)
        self._find_parameters()
        self._borrower: int | None = None  # the thread that has borrowed the model
        # Only oneDNN convolutions gain from this memory order, and they run in float32 on a CPU.
        self._channels_last = self.device.type == "cpu" and self.dtype == torch.float32

    def _find_parameters(self) -> None:
        """Look up the parameter objects, which a user may have replaced by equal ones since."""
        self.parameters = self.layout.parameters(self.model)
        self._names = {id(p): name for name, p in self.parameters.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return next(iter(self.parameters.values())).dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.parameters.values())).device

    @property
    def tolerance(self) -> float:
        """The largest allowed difference between two computations of the same numbers, relative to the largest one."""
        return 1e-3 if self.dtype.itemsize < 8 else 1e-8

    @property
    def is_borrowed(self) -> bool:
        """Whether this thread has borrowed the model."""
        return self._borrower == threading.get_ident()

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Put the model into eval mode and restore it afterwards; contexts may be nested, and other threads wait."""
        if self.is_borrowed:
            yield
            return
        with borrowed(self.model), full_precision(self.device):
            self._find_parameters()
            self._borrower = threading.get_ident()
            try:
                yield
            finally:
                self._borrower = None
                _end_captures()

    def to_device(self, inputs: Any, keeps_graph: bool = False) -> Any:
        """Move inputs to the model's device, and convert half-precision inputs to the model's dtype.

        Args:
            inputs: the batch.
            keeps_graph: whether inputs that require grad stay in their autograd graph.
        """

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf = leaf.to(self.device, self.dtype if leaf.dtype in HALF_PRECISIONS else leaf.dtype)
            if leaf.is_inference():
                return leaf.clone()
            return leaf if keeps_graph else leaf.detach()

        return tree_map(move, plain(inputs))

    def watched(self, inputs: Any, only: Collection[str] | None = None, **options: Any) -> tuple[Capture, Tensor]:
        """Run one forward pass and record its calls.

        Args:
            inputs: the batch.
            only: the parameters whose calls are recorded; None: all.
            **options: passed on to `Capture`.

        Returns:
            The capture and the outputs (n, C).

        Raises:
            ValueError: if the outputs are not of shape (n, C), or if inputs or outputs are not finite.
        """
        names = self._names
        if only is not None:
            names = {id(self.parameters[name]): name for name in only}
        capture = Capture(names, num_inputs(inputs), channels_last=self._channels_last, **options)
        try:
            with capture:
                return capture, self._checked(self.forward(self.model, inputs), inputs)
        except RuntimeError as error:
            if not self._channels_last:
                self._require_same_type(inputs, error)
                raise
            self._channels_last = False  # the network needs the default order, perhaps for a view
            return self.watched(inputs, only, **options)

    def _require_same_type(self, inputs: Any, error: RuntimeError) -> None:
        """Raise ValueError if a forward pass failed with inputs of another floating-point type than the model's."""
        leaves = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        other = next((leaf.dtype for leaf in leaves if leaf.dtype != self.dtype), None)
        if other is not None:
            message = f"The inputs are {other}, but the model is {self.dtype}; convert them with x.to({self.dtype})."
            raise ValueError(message) from error

    def _checked(self, outputs: Any, inputs: Any) -> Tensor:
        n = num_inputs(inputs)
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != n:
            raise ValueError(_wrong_shape(outputs, n))
        if not torch.isfinite(outputs).all() or _has_non_finite(inputs):
            raise ValueError(self._non_finite(inputs))
        return outputs

    def _non_finite(self, inputs: Any) -> str:
        """Return an error message that says where NaN or infinity first appears: the inputs or a layer."""
        if _has_non_finite(inputs):
            return "The inputs hold NaN or infinity."
        capture = Capture(self._names, num_inputs(inputs), keep_outputs=True)
        with torch.no_grad(), capture:
            self.forward(self.model, inputs)
        for call in capture.calls:
            if call.output is not None and not torch.isfinite(call.output).all():
                return f"The output of '{call.function}' with {', '.join(call.names)} holds NaN or infinity."
        return "The network's outputs hold NaN or infinity, although no layer with parameters does."

    def plain_gradients(self, inputs: Any, u: Tensor) -> dict[str, Tensor]:
        """Return Jᵀu by one ordinary backward pass, for u (n, C): (size,) per parameter."""
        into = {name: p.new_zeros(1, p.numel()) for name, p in self.parameters.items()}
        self.add_gradients(inputs, u.unsqueeze(1), into)
        return {name: part[0] for name, part in into.items()}

    def add_gradients(
        self, inputs: Any, cotangents: Tensor, into: Vectors, units: Mapping[str, float] | None = None
    ) -> None:
        """Add Jᵀu to `into` for r cotangents u, (n, r, C), by one ordinary backward pass each.

        Args:
            inputs: the batch.
            cotangents: u.
            into: (r, size) per parameter.
            units: of the parameters; None: 1.

        Raises:
            ValueError: if the network cannot be differentiated.
        """
        names = list(into)
        parameters = [self.parameters[name] for name in names]
        for p in parameters:
            p.requires_grad_()
        try:
            with torch.enable_grad():
                outputs = self.forward(self.model, inputs)
            if not outputs.requires_grad:
                raise ValueError(
                    "The outputs have no gradient with respect to the parameters: the forward pass runs under "
                    "torch.no_grad or torch.inference_mode, or it detaches its result. Remove that from the model, or "
                    "give a function without it as forward=…."
                )
            for k, u in enumerate(cotangents.unbind(1)):
                more = k + 1 < cotangents.shape[1]
                found = torch.autograd.grad(outputs, parameters, u, retain_graph=more, allow_unused=True)
                for name, gradient in zip(names, found, strict=True):
                    if gradient is not None:
                        dense = gradient.to_dense().flatten()
                        into[name][k].add_(dense, alpha=1.0 if units is None else units[name])
        except RuntimeError as error:
            raise ValueError(f"The network cannot be differentiated with respect to its parameters: {error}") from error
        finally:
            for p in parameters:
                p.requires_grad_(False)


def _wrong_shape(outputs: Any, n: int) -> str:
    """Return an error message that says what the model returned, and how to go on."""
    found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    message = f"The model must map a batch of {n} inputs to outputs of shape ({n}, C), but it returned {found}. "
    positions = isinstance(outputs, Tensor) and (
        (outputs.ndim > 2 and len(outputs) == n) or (outputs.ndim == 2 and n and len(outputs) % n == 0)
    )
    if not positions:
        return message + "Wrap it in a module that returns a tensor of this shape."
    return message + (
        "These look like outputs at several positions of an input. Three ways to go on: for a class at every position, "
        f"name the dimension of the classes in outputs ({n}, …), as in likelihood=Categorical(class_dim=1); wrap the "
        "model in a module that returns the output at one position, or a mean over them; or make every position an "
        "input of its own."
    )


def _end_captures() -> None:
    """Take recorders off torch's stack of modes, where an interrupt in torch's own code may have left one."""
    while (depth := torch._C._len_torch_function_stack()) and isinstance(
        torch._C._get_function_stack_at(depth - 1), Capture
    ):
        torch._C._pop_torch_function_stack()


def _has_non_finite(inputs: Any) -> bool:
    leaves = (leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return any(not torch.isfinite(leaf).all() for leaf in leaves)
