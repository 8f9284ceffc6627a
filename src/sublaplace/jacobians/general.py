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
    keeps_graph: bool = False,
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
        keeps_graph: whether the rows can be differentiated with respect to the inputs.
    """
    if batched:
        rows = _vectorised_rows(model, forward, parameters, inputs, cotangents)
        return rows if keeps_graph else {name: value.detach() for name, value in rows.items()}
    if keeps_graph:
        return _single_rows_with_graph(model, forward, parameters, inputs, cotangents)
    return _single_rows(model, forward, parameters, inputs, cotangents)


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


def _single_rows_with_graph(
    model: nn.Module,
    forward: Forward,
    parameters: dict[str, nn.Parameter],
    inputs: Inputs,
    cotangents: Tensor,
) -> dict[str, Tensor]:
    """Return the rows with their graph; stand-ins of the parameters keep gradients away from the user's model."""
    n, K, _ = cotangents.shape
    wrapped = CallWith(model, forward)
    stand_ins = {f"model.{name}": p.detach().requires_grad_() for name, p in parameters.items()}
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    with torch.enable_grad():
        for i in range(n):
            single = tree_map(lambda t, i=i: t[i : i + 1] if isinstance(t, Tensor) else t, inputs)
            output = functional_call(wrapped, stand_ins, (single,))[0]
            for k in range(K):
                found = torch.autograd.grad(
                    output, list(stand_ins.values()), cotangents[i, k], create_graph=True, materialize_grads=True
                )
                for name, gradient in zip(parameters, found, strict=True):
                    rows[name].append(gradient.flatten())
        return {name: torch.stack(parts).unflatten(0, (n, K)) for name, parts in rows.items()}
