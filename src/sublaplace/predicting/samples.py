"""Draws from a fitted posterior: of the parameters, of linearised outputs, and of the outputs of networks."""

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from sublaplace.data.batches import input_batches, num_inputs
from sublaplace.data.loaders import with_labels_under
from sublaplace.fitting.fitted import Fitted
from sublaplace.jacobians.general import CallWith
from sublaplace.jacobians.wanted import Wanted
from sublaplace.model.parameters import ParameterLayout
from sublaplace.predicting.arrangement import arranged_draws, require_one_layout
from sublaplace.predicting.predictor import Predictor, requires_grad
from sublaplace.runtime.checks import checked_count
from sublaplace.runtime.memory import require


def deviations(fitted: Fitted, count: int, generator: torch.Generator) -> Tensor:
    """Return draws of the parameters' deviations from θ̂, (count, p), in the units of the linearization."""
    rows, linearization = checked_count(count, "count"), fitted.linearization
    p = linearization.layout.num_parameters
    require(
        3 * 8 * rows * p,
        linearization.device,
        f"A set of {rows:,} draws of {p:,} parameters",
        "Draw fewer at once.",
    )

    def noise(width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64, device=generator.device)

    return fitted.posterior.sample(noise).to(linearization.device, linearization.dtype)


def parameters(fitted: Fitted, count: int, generator: torch.Generator) -> Tensor:
    """Return draws of the parameters, (count, p)."""
    linearization, drawn = fitted.linearization, deviations(fitted, count, generator)
    if linearization.units is not None:
        drawn = drawn * linearization.flat_units(drawn)
    return linearization.layout.flat(linearization.model) + drawn


def linearised_outputs(predictor: Predictor, x: Any, count: int, generator: torch.Generator) -> Tensor:
    """Return draws of the linearised network's outputs; see `SubspaceLaplace.functional_samples`."""
    linearization = predictor.fitted.linearization
    vectors = linearization.layout.unflatten(deviations(predictor.fitted, count, generator))
    with linearization.borrowed():
        parts, layouts = [], set()
        for jacobian in predictor.jacobians(x, wanted=Wanted(products=count)):
            layouts.add(linearization.output_layout)
            parts.append(jacobian.outputs + jacobian.matmul(vectors).permute(2, 0, 1))
    require_one_layout(layouts)
    return arranged_draws(linearization.output_layout, torch.cat(parts, dim=1))


def network_outputs(predictor: Predictor, x: Any, count: int, generator: torch.Generator) -> Tensor:
    """Return the outputs of networks drawn from the posterior; see `SubspaceLaplace.network_samples`."""
    linearization = predictor.fitted.linearization
    layout: ParameterLayout = linearization.layout
    wrapped = CallWith(linearization.model, linearization.forward)
    shapes = {name: p.shape for name, p in layout.parameters(linearization.model).items()}
    drawn = layout.unflatten(parameters(predictor.fitted, count, generator))
    networks = [{f"model.{name}": drawn[name][k].view(shapes[name]) for name in drawn} for k in range(count)]
    parts, layouts = [], set()
    for inputs in input_batches(with_labels_under(predictor.labels_key, x)):
        if not num_inputs(inputs):
            continue
        keeps_graph = requires_grad(inputs)
        given = linearization.network.to_device(inputs, keeps_graph)
        with linearization.borrowed(), torch.set_grad_enabled(keeps_graph):
            parts.append(torch.stack([functional_call(wrapped, network, (given,)) for network in networks]))
        layouts.add(linearization.output_layout)
    if not parts:
        raise ValueError("There are no inputs to predict for: x is empty.")
    require_one_layout(layouts)
    return arranged_draws(linearization.output_layout, torch.cat(parts, dim=1))
