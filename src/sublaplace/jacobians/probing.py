"""Determine how a network handles a batch, and check every gradient against plain automatic differentiation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from sublaplace.data.batches import num_inputs, select
from sublaplace.jacobians.capture import Capture
from sublaplace.jacobians.general import general_rows
from sublaplace.jacobians.jacobian import Jacobian, non_finite_jacobian
from sublaplace.jacobians.network import Network
from sublaplace.jacobians.plan import Plan, batch_axis, depends_on_batch, described, first_difference, signature

_PROBED_ROWS = 2  # rows of the Jacobian that checks a new sequence of calls


JacobianOf = Callable[[Plan, Capture, Any, Tensor, Tensor], Jacobian]
"""A function that computes a Jacobian from a recorded pass: (plan, capture, inputs, outputs, cotangents)."""


def probed(network: Network, inputs: Any, jacobian_of: JacobianOf) -> Plan:
    """Return the plan for inputs of this form, from the first three of them.

    Forward passes with three and with two inputs reveal the batch dimension of each call's output. Then Jᵀu for a
    random u is compared with an ordinary backward pass. A parameter whose gradients differ takes the general path.

    Raises:
        ValueError: if the outputs of an input depend on the other inputs, or a gradient is not finite.
        RuntimeError: if two ways of automatic differentiation disagree.
    """
    n = num_inputs(inputs)
    three = select(inputs, torch.arange(3, device=network.device) % n)
    two = select(three, slice(0, 2))
    first, outputs = _probing_pass(network, three)
    second, fewer = _probing_pass(network, two)
    if signature(first.calls) != signature(second.calls):
        raise ValueError(depends_on_batch(first_difference(first.calls, second.calls)))
    tolerance = network.tolerance
    _, later = _probing_pass(network, select(three, slice(1, 3)))
    for part, alone in ((outputs[:2], fewer), (outputs[1:], later)):
        if not torch.allclose(part, alone, rtol=tolerance, atol=tolerance * float(outputs.abs().max())):
            raise ValueError(depends_on_batch("outputs"))
    with torch.no_grad():
        plain = network.forward(network.model, three)
    if not torch.allclose(outputs, plain, rtol=tolerance, atol=tolerance * float(plain.abs().max())):
        raise RuntimeError(
            "The network gives other outputs when its calls are recorded. A rule for one of its operations changes "
            f"what it computes; the recorded calls are: {described(first.calls)}."
        )
    axes = [batch_axis(a, b, tolerance) for a, b in zip(first.calls, second.calls, strict=True)]
    plan = Plan(signature(first.calls), axes, frozenset(), dict(first.unusual), first.last_linear, outputs.shape[1])
    unbatched = frozenset(
        k
        for k, (call, other) in enumerate(zip(first.calls, second.calls, strict=True))
        if call.output_shape == other.output_shape
    )
    if unbatched:
        _expand(network, plan, unbatched, three, two, outputs)
    for axis, call in zip(plan.axes, first.calls, strict=True):
        if axis is None:
            plan.general |= {name: f"no batch dimension in '{call.function}'" for name in call.names}
    plan.measure(first.calls, 3)
    _verify(network, plan, three, jacobian_of)
    return plan


def _probing_pass(network: Network, inputs: Any, expand: frozenset[int] = frozenset()) -> tuple[Capture, Tensor]:
    with torch.no_grad():
        return network.watched(inputs, expand=expand, keep_outputs=True)


def _expand(network: Network, plan: Plan, unbatched: frozenset[int], three: Any, two: Any, outputs: Tensor) -> None:
    """Add a batch dimension to the calls that do not depend on the batch, if the outputs stay the same."""
    tolerance = network.tolerance
    try:
        first, again = _probing_pass(network, three, unbatched)
        second, _ = _probing_pass(network, two, unbatched)
    except (RuntimeError, ValueError, IndexError):
        return
    if len(first.calls) != len(plan.axes) or not torch.allclose(again, outputs, rtol=tolerance, atol=tolerance):
        return
    plan.expand = unbatched
    plan.axes = [batch_axis(a, b, tolerance) for a, b in zip(first.calls, second.calls, strict=True)]


def _verify(network: Network, plan: Plan, inputs: Any, jacobian_of: JacobianOf) -> None:
    """Compare Jᵀu for a random u with automatic differentiation; parameters that differ take the general path.

    u is a sum of a few random rows, so that networks with many outputs need no more memory than others.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (3, min(plan.num_outputs, _PROBED_ROWS), plan.num_outputs)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(network.device, network.dtype)
    u = rows.sum(1)
    expected = network.plain_gradients(inputs, u)
    for name, value in expected.items():
        if not torch.isfinite(value).all():
            raise ValueError(non_finite_jacobian(name))
    if plan.general:
        plan.general_batched = _general_batched(network, plan, inputs, u, expected)
    try:
        found = _recorded_gradients(network, plan, inputs, rows, jacobian_of)
    except RuntimeError as error:  # some calls run otherwise in the backward pass, or in another precision
        plan.general |= {name: f"its recorded calls cannot be differentiated: {error}" for name in expected}
        plan.general_batched = _general_batched(network, plan, inputs, u, expected)
        found = _recorded_gradients(network, plan, inputs, rows, jacobian_of)
    scale = max(float(value.abs().max()) for value in expected.values())
    missed: dict[str, str] = {}
    for name, value in expected.items():
        limit = network.tolerance * (float(value.abs().max()) + 1e-2 * scale)
        if float((found[name] - value).abs().max()) > limit:
            if name in plan.general:
                raise RuntimeError(
                    f"The gradient of parameter '{name}' differs between two ways of automatic differentiation; "
                    "the network is not a function of its inputs and parameters alone."
                )
            missed[name] = "its gradient differs from the gradient of the recorded calls"
    if missed:
        plan.general |= missed
        plan.general_batched = _general_batched(network, plan, inputs, u, expected)


def _recorded_gradients(
    network: Network, plan: Plan, inputs: Any, rows: Tensor, jacobian_of: JacobianOf
) -> dict[str, Tensor]:
    """Return Jᵀu for the sum u of rows (n, K, C), as the plan says: (size,) per parameter."""
    with torch.enable_grad():
        capture, outputs = network.watched(inputs, expand=plan.expand)
    last = next((call for call in reversed(capture.calls) if set(call.names) == set(plan.last_linear)), None)
    plan.ends_linear = last is not None and outputs.requires_grad and last.edge == get_gradient_edge(outputs)
    if plan.ends_linear and last is not None and last.source.ndim == 2:
        used_again = any(call is not last and not set(call.names).isdisjoint(last.names) for call in capture.calls)
        plan.num_features = None if used_again else last.source.shape[1]
    jacobian = jacobian_of(plan, capture, inputs, outputs, rows)
    weights = rows.new_ones(*rows.shape[:2], 1)
    found = {name: p.new_zeros(p.numel()) for name, p in network.parameters.items()}
    for name, block in jacobian.blocks.items():
        block.add_transpose_matmul(weights, found[name][None])
    return found


def _general_batched(network: Network, plan: Plan, inputs: Any, u: Tensor, expected: dict[str, Tensor]) -> bool:
    """Return whether the vectorised general path runs for this network and returns the right gradients."""
    chosen = {name: network.parameters[name] for name in plan.general}
    try:
        rows = general_rows(network.model, network.forward, chosen, inputs, u.unsqueeze(1), batched=True)
    except Exception:  # vmap raises whatever the network's operations raise; the plain loop handles them all
        return False
    return all(
        torch.allclose(
            rows[name].sum((0, 1)),
            expected[name],
            rtol=network.tolerance,
            atol=network.tolerance * float(expected[name].abs().max()),
        )
        for name in chosen
    )
