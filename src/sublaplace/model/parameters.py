"""The parameters that are Bayesian, and a trained model borrowed without leaving a trace."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from sublaplace.model.linalg import Vectors


@dataclass(frozen=True)
class ParameterLayout:
    """Names and shapes of the parameters that require grad, in ``named_parameters()`` order (θ̂, length p)."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "ParameterLayout":
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
        if not named:
            raise ValueError(
                "The model has no parameter that requires grad, so nothing can be uncertain. "
                "Set requires_grad=True on the parameters that the Laplace approximation shall cover."
            )
        devices = sorted({str(p.device) for _, p in named})
        if len(devices) > 1:
            raise ValueError(f"The parameters lie on several devices ({', '.join(devices)}); move them to one.")
        dtypes = sorted({str(p.dtype) for _, p in named})
        if len(dtypes) > 1:
            raise ValueError(f"The parameters have several dtypes ({', '.join(dtypes)}); convert them to one.")
        for name, p in model.named_parameters():
            if p.is_floating_point() and not torch.isfinite(p).all():
                raise ValueError(f"Parameter '{name}' holds NaN or infinity; the network is not usable.")
        return cls(tuple(n for n, _ in named), tuple(p.shape for _, p in named))

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {name: prod(shape) for name, shape in zip(self.names, self.shapes, strict=True)}

    @cached_property
    def num_parameters(self) -> int:
        return sum(self.sizes.values())

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each parameter stands in the flat vector."""
        result, start = {}, 0
        for name, size in self.sizes.items():
            result[name] = slice(start, start + size)
            start += size
        return result

    def shape(self, name: str) -> torch.Size:
        return self.shapes[self.names.index(name)]

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The model's own parameter objects, tied ones once."""
        by_name = dict(model.named_parameters())
        return {name: by_name[name] for name in self.names}

    def flat(self, model: nn.Module) -> Tensor:
        """θ̂ as one vector (p,)."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters(model).values()])

    def squared_norm(self, model: nn.Module) -> float:
        """Return ‖θ̂‖²."""
        return float(self.flat(model).double().square().sum())

    @staticmethod
    def fingerprint(model: nn.Module) -> tuple[object, ...]:
        """Numbers that tell whether parameters or buffers have changed, or changed places. Cost: reads them once."""
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return tuple((name, t.dtype, tuple(t.shape), *_moments(t.detach().double().flatten())) for name, t in tensors)

    def flatten(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """(count, size) matrices side by side: (count, p)."""
        return torch.cat([vectors[name] for name in self.names], dim=1)

    def unflatten(self, matrix: Tensor) -> Vectors:
        """The inverse of `flatten`; every part is contiguous."""
        return {name: matrix[:, part].contiguous() for name, part in self.slices.items()}

    def zeros(self, count: int, like: Tensor) -> Vectors:
        return {name: like.new_zeros(count, size) for name, size in self.sizes.items()}

    def split_indices(self, indices: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """For each parameter that flat `indices` touch: (positions in `indices`, indices inside the parameter)."""
        result = {}
        for name, part in self.slices.items():
            where = torch.nonzero((indices >= part.start) & (indices < part.stop)).squeeze(1)
            if len(where):
                result[name] = (where, indices[where] - part.start)
        return result


HALF_PRECISIONS = (torch.float16, torch.bfloat16)


def in_working_precision(model: nn.Module) -> nn.Module:
    """The model itself, or a float32 copy of one whose parameters have half precision, with a word about it.

    A Jacobian row is a sum of many products of activations and gradients: with 8 or 11 significant bits it would be
    mostly rounding, and gradients below 6e-8 vanish in float16. Frozen parameters may have any precision.
    """
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    if not dtypes.intersection(HALF_PRECISIONS):
        return model
    size = f"{4 * sum(p.numel() for p in model.parameters()) / 2**20:.1f} MiB"
    warnings.warn(
        f"The model has {', '.join(sorted(map(str, dtypes)))} parameters. Its outputs, Jacobians and curvature are "
        f"computed on a float32 copy ({size}), the s × s algebra in float64, and predictions are float32; the model "
        "itself stays as it is.",
        stacklevel=4,
    )
    return copy.deepcopy(model).float()


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """The model in eval mode with no parameter requiring grad; afterwards everything is as it was.

    Restored on any exit, Ctrl-C included: each module's mode, each parameter's requires_grad flag, and each buffer
    that a forward pass changed.
    """
    modes = [(module, module.training) for module in model.modules()]
    flags = [(p, p.requires_grad) for p in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(b, b._version, b.detach().clone()) for b in model.buffers()]
    try:
        model.eval()
        for p, _ in flags:
            p.requires_grad_(False)
        yield
    finally:
        for module, training in modes:
            module.training = training
        for p, flag in flags:
            p.requires_grad_(flag)
        for module, held in buffers:
            module._buffers.update(held)
        for buffer, version, value in values:
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(value)


def _moments(values: Tensor) -> tuple[float, float, float]:
    """Sums that change with any of the values, and with their order."""
    places = torch.linspace(1, 2, len(values), dtype=values.dtype, device=values.device)
    return float(values.sum()), float(values @ values), float(values @ places)
