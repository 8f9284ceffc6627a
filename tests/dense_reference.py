"""Brute force in float64: every matrix is formed, nothing is clever. What the library is measured against."""

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from sublaplace.data.batches import num_inputs, select
from sublaplace.model.calling import call_model


def double(value):
    """A float64 copy of a model or of (nested) inputs."""
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).double()
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: double(item) for key, item in value.items()}
    return tuple(double(item) for item in value)


def dense_jacobian(model: nn.Module, inputs) -> Tensor:
    """J_X (nC, p): one input and one output after the other."""
    model = double(model).eval()
    inputs = double(inputs)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(num_inputs(inputs)):
        outputs = call_model(model, select(inputs, slice(i, i + 1)))[0]
        for output in outputs:
            gradients = torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True)
            rows.append(
                torch.cat(
                    [
                        torch.zeros(p.numel(), dtype=torch.float64) if g is None else g.flatten()
                        for p, g in zip(parameters, gradients, strict=True)
                    ]
                )
            )
    assert len(names) == len(parameters)
    return torch.stack(rows)


def functional_jacobian(model: nn.Module, inputs) -> Tensor:
    """J_X (nC, p) by `torch.func.jacrev` of the whole batch, a second way to the same numbers."""
    model = double(model).eval()
    inputs = double(inputs)
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def outputs(values):
        if isinstance(inputs, dict):
            result = functional_call(model, values, (), inputs)
        else:
            result = functional_call(model, values, inputs)
        return getattr(result, "logits", result)

    jacobian = jacrev(outputs)(parameters)
    return torch.cat([part.flatten(2) for part in jacobian.values()], dim=2).flatten(0, 1)


def dense_outputs(model: nn.Module, inputs) -> Tensor:
    with torch.no_grad():
        return call_model(double(model).eval(), double(inputs))


def softmax_hessians(outputs: Tensor) -> Tensor:
    """diag φ − φφᵀ for every input: (n, C, C)."""
    probabilities = outputs.double().softmax(-1)
    return torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None, :]


def sigmoid_hessians(outputs: Tensor) -> Tensor:
    """diag φ(1 − φ) of independent yes/no outputs, for every input: (n, C, C)."""
    probabilities = outputs.double().sigmoid()
    return torch.diag_embed(probabilities * (1 - probabilities))


def dense_ggn(model: nn.Module, inputs, hessians: Tensor) -> Tensor:
    """Σ_i J_iᵀ H_i J_i (p, p)."""
    jacobian = dense_jacobian(model, inputs)
    weighted = torch.block_diag(*hessians.double()) @ jacobian
    return jacobian.T @ weighted


def subspace_covariance(jacobian: Tensor, projection: Tensor, precision: Tensor) -> Tensor:
    """J P (Pᵀ Λ P)⁻¹ Pᵀ Jᵀ."""
    reduced = jacobian @ projection
    return reduced @ torch.linalg.solve(projection.T @ precision @ projection, reduced.T)


def full_covariance(jacobian: Tensor, precision: Tensor) -> Tensor:
    """J Λ⁻¹ Jᵀ."""
    return jacobian @ torch.linalg.solve(precision, jacobian.T)


def laplace_evidence(log_likelihood: Tensor, ggn: Tensor, model: nn.Module, prior, projection=None) -> Tensor:
    """ln p(D|θ̂) − ½ λ‖θ̂‖² + ½ ln det(λI) − ½ ln det(QᵀΛQ), by determinants, differentiable in what it is given."""
    prior = torch.as_tensor(prior, dtype=torch.float64)
    squared_norm = sum(float(p.detach().double().square().sum()) for p in model.parameters() if p.requires_grad)
    if projection is not None:
        ggn = projection.T @ ggn @ projection
    s = len(ggn)
    determinant = torch.logdet(ggn + prior * torch.eye(s, dtype=torch.float64))
    return log_likelihood - 0.5 * prior * squared_norm + 0.5 * (s * prior.log() - determinant)


def pairwise_probabilities(outputs: Tensor, variance: Tensor) -> Tensor:
    """The mean-field approximation to the mean of softmax, class by class."""
    n, C = outputs.shape
    found = torch.zeros_like(outputs)
    for i in range(n):
        for k in range(C):
            spreads = [1 + torch.pi / 8 * (variance[i, j] + variance[i, k]) for j in range(C)]
            odds = [torch.exp((outputs[i, j] - outputs[i, k]) / spreads[j].sqrt()) for j in range(C) if j != k]
            found[i, k] = 1 / (1 + sum(odds))
    return found / found.sum(1, keepdim=True)
