"""Jacobian rows for parameters that no rule covers, by automatic differentiation of these parameters alone."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils._pytree import tree_map

Inputs = object  # a tensor, or a tuple, list or mapping of tensors, with the batch dimension first
Forward = Callable[[nn.Module, object], Tensor]


def general_rows(
    model: nn.Module,
    forward: Forward,
    parameters: dict[str, nn.Parameter],
    inputs: Inputs,
    cotangents: Tensor,
    batched: bool,
) -> dict[str, Tensor]:
    """Return ∂(uᵀf(x_n))/∂θ for u = cotangents[n, k]: (n, K, size) for each of `parameters`.

    Args:
        model: the network.
        forward: how the model is called.
        parameters: the parameters to differentiate, by name.
        inputs: the batch.
        cotangents: directions in the outputs, (n, K, C).
        batched: whether one vectorised pass (`torch.func`) handles all inputs. Otherwise, inputs run one at a time,
            which works for any module and costs n·K small backward passes.
    """
    rows = _vectorised_rows if batched else _single_rows
    return rows(model, forward, parameters, inputs, cotangents)


def _vectorised_rows(
    model: nn.Module,
    forward: Forward,
    parameters: dict[str, nn.Parameter],
    inputs: Inputs,
    cotangents: Tensor,
) -> dict[str, Tensor]:
    wrapped = CallWith(model, forward)

    def projected(values: dict[str, Tensor], single: Inputs, directions: Tensor) -> Tensor:
        batch = tree_map(lambda t: t.unsqueeze(0) if isinstance(t, Tensor) else t, single)
        named = {f"model.{name}": value for name, value in values.items()}
        return directions @ functional_call(wrapped, named, (batch,))[0]

    values = {name: p.detach() for name, p in parameters.items()}
    with warnings.catch_warnings(action="ignore"):  # vmap warns about operations without a fast batching rule
        rows = vmap(jacrev(projected), in_dims=(None, 0, 0))(values, inputs, cotangents)
    return {name: value.flatten(2) for name, value in rows.items()}


class CallWith(nn.Module):
    """A module that calls the model through the user's forward function, as `functional_call` needs it."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, inputs: Inputs) -> Tensor:
        """Return f(x)."""
        return self._forward(self.model, inputs)


def _single_rows(
    model: nn.Module,
    forward: Forward,
    parameters: dict[str, nn.Parameter],
    inputs: Inputs,
    cotangents: Tensor,
) -> dict[str, Tensor]:
    n, K, _ = cotangents.shape
    rows = {name: cotangents.new_zeros(n, K, p.numel()) for name, p in parameters.items()}
    for p in parameters.values():
        p.requires_grad_()
    try:
        for i in range(n):
            single = tree_map(lambda t, i=i: t[i : i + 1] if isinstance(t, Tensor) else t, inputs)
            with torch.enable_grad():
                output = forward(model, single)[0]
            if not output.requires_grad:
                continue
            for k in range(K):
                gradients = torch.autograd.grad(
                    output,
                    list(parameters.values()),
                    cotangents[i, k].to(output.dtype),
                    retain_graph=k + 1 < K,
                    allow_unused=True,
                )
                for name, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        rows[name][i, k] = gradient.to_dense().flatten()
    finally:
        for p in parameters.values():
            p.requires_grad_(False)
    return rows
