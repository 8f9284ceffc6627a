"""A context in which a trained model is borrowed, by one thread at a time, and given back as it was."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

_ATTEMPTS = 3  # at giving the model back, if Ctrl-C comes meanwhile


class _Claims:
    """Which thread uses which modules, parameters and buffers, and how many times over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owners: dict[int, tuple[int, int]] = {}  # id of the object → thread, count

    @contextmanager
    def on(self, objects: list[object]) -> Iterator[None]:
        """Wait until no other thread uses any of the objects, and keep other threads off until the end."""
        thread, keys = threading.get_ident(), [id(each) for each in objects]
        with self._changed:
            self._changed.wait_for(lambda: all(self._owners.get(key, (thread, 0))[0] == thread for key in keys))
            for key in keys:
                self._owners[key] = thread, self._owners.get(key, (thread, 0))[1] + 1
        try:
            yield
        finally:
            with self._changed:
                for key in keys:
                    count = self._owners.pop(key, (thread, 0))[1] - 1
                    if count > 0:
                        self._owners[key] = thread, count
                self._changed.notify_all()


_claims = _Claims()
if hasattr(os, "register_at_fork"):  # a forked process has none of its parent's other threads
    os.register_at_fork(after_in_child=_claims.__init__)  # type: ignore[misc]


@contextmanager
def claimed(model: nn.Module) -> Iterator[None]:
    """Wait until no other thread has claimed the model, or a part that it shares with another model.

    The same thread may claim a model several times over. Threads that use the model directly are not kept waiting.
    """
    with _claims.on([*model.modules(), *model.parameters(), *model.buffers()]):
        yield


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Switch off a user's autocast and inference mode, in which sums would be rounded or gradients missing."""
    autocast = torch.amp.is_autocast_available(device.type)
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False) if autocast else nullcontext():
        yield


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode with no parameter requiring grad, and restore it afterwards.

    Any exit, including Ctrl-C, restores each module's mode, each parameter's requires_grad flag, and each buffer that a
    forward pass changed. Another thread that borrows the model, or one that shares a part with it, waits until then.
    """
    with claimed(model):
        modes = [(module, module.training) for module in model.modules()]
        flags = [(p, p.requires_grad) for p in model.parameters()]
        buffers = [(module, dict(module._buffers)) for module in model.modules()]
        values = [(b, b._version, b.detach().clone()) for b in model.buffers()]

        def restore() -> None:
            for module, training in modes:
                module.training = training
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
            _completed(restore)


def _completed(restore: Callable[[], None]) -> None:
    """Run a function to its end, again if it is interrupted; the interrupt is raised afterwards."""
    interrupt: BaseException | None = None
    for _ in range(_ATTEMPTS):
        try:
            restore()
            break
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
