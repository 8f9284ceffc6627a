"""The modules, parameters and buffers of a model, found in one walk."""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Parts:
    """The modules, parameters and buffers of a model, each once, by the names that torch gives them.

    Every method of a module that yields them walks through all modules again, which takes longer than small batches.
    """

    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> "Parts":
        """Return the parts of a model."""
        modules = dict(model.named_modules())
        parameters: dict[str, nn.Parameter] = {}
        buffers: dict[str, Tensor] = {}
        seen: set[int] = set()
        for prefix, module in modules.items():
            start = f"{prefix}." if prefix else ""
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    parameters[start + key] = parameter
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    buffers[start + key] = buffer
        return cls(modules, parameters, buffers)

    @property
    def all(self) -> list[object]:
        """All of them."""
        return [*self.modules.values(), *self.parameters.values(), *self.buffers.values()]
