"""The parameters that the posterior covers, and the precision in which they are used."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from sublaplace.model.linalg import Vectors
from sublaplace.runtime.warning import warn

HALF_PRECISIONS = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ParameterLayout:
    """Names and shapes of the parameters that require grad, in ``named_parameters()`` order (θ̂, length p)."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "ParameterLayout":
        """Return the layout of a model.

        Raises:
            ValueError: if no parameter requires grad, if devices or dtypes differ, if a parameter is not finite, or if
                a tensor was made in inference mode.
        """
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
        if not named:
            raise ValueError(
                "The model has no parameter that requires grad, so the posterior would be empty. "
                "Set requires_grad=True on the parameters that the Laplace approximation should cover."
            )
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_inference():
                raise ValueError(
                    f"'{name}' was made in torch.inference_mode, so it has no gradient. Create or load the model "
                    "outside of it."
                )
        devices = sorted({str(p.device) for _, p in named})
        if len(devices) > 1:
            raise ValueError(
                f"The parameters are on several devices ({', '.join(devices)}); move them to one, or load the model "
                "onto one, as with device_map={'': 0}."
            )
        for name, p in model.named_parameters():
            if p.is_meta:
                raise ValueError(
                    f"Parameter '{name}' has no values: it was offloaded, or it is on the meta device. Load the whole "
                    "model onto one device."
                )
        # Half-precision ones are used in float32, so they may stand beside float32 ones.
        if len({torch.float32 if p.dtype in HALF_PRECISIONS else p.dtype for _, p in named}) > 1:
            dtypes = sorted({str(p.dtype) for _, p in named})
            raise ValueError(f"The parameters have several dtypes ({', '.join(dtypes)}); convert them to one.")
        for name, p in model.named_parameters():
            if p.is_floating_point() and not torch.isfinite(p).all():
                raise ValueError(f"Parameter '{name}' holds NaN or infinity; the network cannot be used.")
        return cls(tuple(n for n, _ in named), tuple(p.shape for _, p in named))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of entries of each parameter."""
        return {name: prod(shape) for name, shape in zip(self.names, self.shapes, strict=True)}

    @cached_property
    def num_parameters(self) -> int:
        """The total number of entries, p."""
        return sum(self.sizes.values())

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The slice of the flat vector that each parameter occupies."""
        result, start = {}, 0
        for name, size in self.sizes.items():
            result[name] = slice(start, start + size)
            start += size
        return result

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter."""
        return self.shapes[self.names.index(name)]

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the model's own parameter objects by name; tied parameters appear once."""
        by_name = dict(model.named_parameters())
        return {name: by_name[name] for name in self.names}

    def flat(self, model: nn.Module) -> Tensor:
        """Return θ̂ as one vector (p,)."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters(model).values()])

    def flatten(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the (count, size) matrices of all parameters: (count, p)."""
        return torch.cat([vectors[name] for name in self.names], dim=1)

    def unflatten(self, matrix: Tensor) -> Vectors:
        """Invert `flatten`; every part is contiguous."""
        return {name: matrix[:, part].contiguous() for name, part in self.slices.items()}

    def zeros(self, count: int, like: Tensor) -> Vectors:
        """Return `count` zero vectors with the dtype and device of `like`."""
        return {name: like.new_zeros(count, size) for name, size in self.sizes.items()}

    def split_indices(self, indices: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Split indices into the flat vector by parameter.

        Returns:
            For each parameter with at least one index: (positions in `indices`, indices inside the parameter).
        """
        result = {}
        for name, part in self.slices.items():
            where = torch.nonzero((indices >= part.start) & (indices < part.stop)).squeeze(1)
            if len(where):
                result[name] = (where, indices[where] - part.start)
        return result


def in_working_precision(model: nn.Module) -> nn.Module:
    """Return the model, or a float32 copy and a warning if its parameters have half precision.

    A Jacobian row is a sum of many products of activations and gradients. With 8 or 11 significant bits the row would
    be mostly rounding error, and in float16 gradients below 6e-8 vanish. Frozen parameters may have any precision: see
    `InFloat32`.
    """
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    if not dtypes.intersection(HALF_PRECISIONS):
        return model
    halves = sorted(str(dtype) for dtype in dtypes.intersection(HALF_PRECISIONS))
    size = f"{4 * sum(p.numel() for p in model.parameters()) / 2**20:.1f} MiB"
    warn(
        f"The model has {', '.join(halves)} parameters. Its outputs, Jacobians and curvature are "
        f"computed on a float32 copy ({size}), and the s × s algebra is in float64. Predictions are float32. The model "
        "itself is not changed."
    )
    return copy.deepcopy(model).float()
