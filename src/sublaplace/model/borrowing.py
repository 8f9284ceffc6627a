"""A context in which a trained model is borrowed, by one thread at a time, and given back as it was."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import torch
from torch import nn

from sublaplace.model.attributes import Attributes
from sublaplace.model.parts import Parts


@dataclass(frozen=True, eq=False)
class _Claim:
    """What one thread uses for a while."""

    thread: int
    keys: frozenset[int]  # ids of modules, parameters and buffers
    ended: "SimpleQueue[None]" = field(default_factory=SimpleQueue)

    def wait(self) -> None:
        """Wait for the end; the caller asks again, since an interrupt may have swallowed the news of it."""
        with suppress(Empty):
            self.ended.get(timeout=0.05)
            self.ended.put(None)  # for other threads that wait


class _Claims:
    """Which thread uses which modules, parameters and buffers.

    An interrupt may come between any two steps of Python code, also in that of `threading.Condition`, and would leave
    its lock taken for good. So claims end by single operations, and these are repeated if they are interrupted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[_Claim, None] = {}

    @contextmanager
    def on(self, objects: list[object]) -> Iterator[None]:
        """Wait until no other thread uses any of the objects, and keep other threads off until the end."""
        claim = _Claim(threading.get_ident(), frozenset(map(id, objects)))
        try:
            while (other := self._conflict(claim)) is not None:
                other.wait()
            yield
        finally:
            try:
                self._end(claim)
            finally:
                self._end(claim)

    def _conflict(self, claim: _Claim) -> _Claim | None:
        """Return a claim of another thread that stands against this one; if there is none, this one holds."""
        with self._lock:
            for other in list(self._held):
                if other.thread != claim.thread and not other.keys.isdisjoint(claim.keys):
                    return other
            self._held[claim] = None
        return None

    def _end(self, claim: _Claim) -> None:
        self._held.pop(claim, None)
        claim.ended.put(None)


_claims = _Claims()
if hasattr(os, "register_at_fork"):  # a forked process has none of its parent's other threads
    os.register_at_fork(after_in_child=_claims.__init__)  # type: ignore[misc]


@contextmanager
def claimed(model: nn.Module) -> Iterator[None]:
    """Wait until no other thread has claimed the model, or a part that it shares with another model.

    The same thread may claim a model several times over. Threads that use the model directly are not kept waiting.
    """
    with _claims.on(Parts.of(model).all):
        yield


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Switch off a user's autocast and inference mode, in which sums would be rounded or gradients missing.

    Gradients stay disabled if they are: without inference mode, torch would enable them.
    """
    gradients = torch.is_grad_enabled()
    if not torch.amp.is_autocast_available(device.type):
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            yield
        return
    before = torch.is_autocast_enabled(device.type)
    try:
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(gradients),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        if torch.is_autocast_enabled(device.type) != before:  # after an interrupt in torch's own code
            torch.set_autocast_enabled(device.type, before)


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and each module back into its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode with no parameter requiring grad, and restore it afterwards.

    Any exit, including Ctrl-C, restores each module's mode, each parameter's requires_grad flag, and each buffer and
    attribute that a forward pass changed. Another thread that borrows the model, or one that shares a part with it,
    waits until then.
    """
    parts = Parts.of(model)
    with _claims.on(parts.all):
        attributes = Attributes(model)
        modes = [(module, module.training) for module in parts.modules.values()]
        flags = [(p, p.requires_grad) for p in parts.parameters.values()]
        buffers = [(module, dict(module._buffers)) for module in parts.modules.values() if module._buffers]
        values = [(b, b._version, b.detach().clone()) for b in parts.buffers.values()]

        gradients = torch.is_grad_enabled()

        def restore() -> None:
            torch._C._set_grad_enabled(gradients)  # which torch leaves as it is after an interrupt in its own code
            for module, training in modes:
                module.training = training
            attributes.restore()
            for p, flag in flags:
                p.requires_grad_(flag)
            for module, held in buffers:
                for name, value in held.items():
                    if module._buffers[name] is not value:
                        module._buffers[name] = value
            for buffer, version, before in values:
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(before)

        try:
            model.eval()
            for p, _ in flags:
                p.requires_grad_(False)
            yield
        finally:
            try:
                restore()
            finally:
                restore()  # again, as the first may have been interrupted
