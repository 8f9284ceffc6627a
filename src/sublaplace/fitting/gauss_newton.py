r"""The MAP of a small network with few data, by Gauss–Newton steps with damping (Levenberg–Marquardt).

With residuals r = y − f(θ) and their Jacobian J (N·C rows), a step δ minimises the objective of the network linearised
at θ, :math:`‖r − Jδ‖²/2σ² + ‖θ + δ‖²λ/2 + ‖δ‖²μ/2`. The damping μ falls after steps that lower the true objective, and
rises otherwise. The N·C × N·C form of the normal equations needs no p × p matrix.

λ and σ maximise the evidence of the linearised network, for which y − f + Jθ ~ N(0, JJᵀ/λ + σ²).
"""

from dataclasses import dataclass
from functools import partial
from math import exp, log

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from sublaplace.posteriors.evidence import golden_section

_DAMPING_FACTOR = 5.0
_ATTEMPTS = 12  # to find a damping that lowers the objective
_ROUNDS = 4  # of training and tuning
_PRIOR_RANGE = log(1e-2), log(1e3)
_NOISE_RANGE = log(1e-3), log(1.0)  # for targets with unit variance
_SWEEPS = 3  # over λ and σ


@dataclass(frozen=True)
class Trained:
    """λ and σ of a training, and the objective after each step."""

    prior_precision: float
    noise_std: float
    objective: list[float]


class _Network:
    """A network as a function of one vector of parameters."""

    def __init__(self, network: nn.Module, inputs: Tensor) -> None:
        self.network, self.inputs = network, inputs
        self.parameters = dict(network.named_parameters())

    @property
    def vector(self) -> Tensor:
        """θ: (p,)."""
        return torch.cat([p.detach().flatten() for p in self.parameters.values()])

    def __call__(self, vector: Tensor) -> Tensor:
        """Return all outputs in one vector: (N·C,)."""
        parts = vector.split([p.numel() for p in self.parameters.values()])
        values = {name: part.view_as(p) for part, (name, p) in zip(parts, self.parameters.items(), strict=True)}
        outputs: Tensor = functional_call(self.network, values, (self.inputs,))
        return outputs.flatten()

    def store(self, vector: Tensor) -> None:
        """Write θ into the network."""
        with torch.no_grad():
            for part, p in zip(
                vector.split([p.numel() for p in self.parameters.values()]), self.parameters.values(), strict=True
            ):
                p.copy_(part.view_as(p))


def trained_by_gauss_newton(
    network: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    prior_precision: float | None,
    noise_std: float | None,
    max_steps: int,
) -> Trained:
    """Train the network in place to its MAP under N(0, λ⁻¹I) and noise σ, for regression with few data.

    Cost: (N·C)²·p + (N·C)³/3 per step; memory 2·N·C·p.

    Args:
        network: trained in place, with parameters in float64 for small σ.
        inputs: (N, d).
        targets: (N, C), with unit variance.
        prior_precision: λ; None: tuned by the evidence, several times.
        noise_std: σ; None: tuned in the same way.
        max_steps: at most, over all rounds.
    """
    tunes = prior_precision is None or noise_std is None
    prior, noise = prior_precision or 1.0, noise_std or 0.1
    function, y = _Network(network, inputs), targets.flatten()
    theta, objective = function.vector, []
    rounds = _ROUNDS if tunes else 1
    for number in range(rounds):
        theta, found = _descended(function, y, theta, prior, noise, max_steps // rounds)
        objective += found
        if tunes and number + 1 < rounds:
            J = jacrev(function)(theta)
            prior, noise = _tuned(J, y - function(theta) + J @ theta, prior, noise, prior_precision, noise_std)
    function.store(theta)
    return Trained(prior, noise, objective)


def _descended(
    function: _Network, y: Tensor, theta: Tensor, prior: float, noise: float, max_steps: int
) -> tuple[Tensor, list[float]]:
    """Return θ after damped Gauss–Newton steps, and the objective after each; each one lowers it."""

    def value(vector: Tensor) -> float:
        return float((y - function(vector)).square().sum() / (2 * noise**2) + 0.5 * prior * vector.square().sum())

    damping, current, objective = 1.0, value(theta), []
    for _ in range(max_steps):
        J, before = jacrev(function)(theta), current
        products = J @ J.T
        gradient = J.T @ (y - function(theta)) / noise**2 - prior * theta
        for _ in range(_ATTEMPTS):
            total = prior + damping
            inner = products + noise**2 * total * torch.eye(len(y), dtype=y.dtype, device=y.device)
            step = (gradient - J.T @ torch.linalg.solve(inner, J @ gradient)) / total
            new = value(theta + step)
            if new < current:
                theta, current, damping = theta + step, new, damping / _DAMPING_FACTOR
                break
            damping *= _DAMPING_FACTOR
        if before - current <= 1e-6 * before:
            break
        objective.append(current)
    return theta, objective


def _tuned(
    J: Tensor, y: Tensor, prior: float, noise: float, given_prior: float | None, given_noise: float | None
) -> tuple[float, float]:
    """Return the λ and σ that maximise the density of y ~ N(0, JJᵀ/λ + σ²), one after the other, unless given."""
    values, vectors = torch.linalg.eigh(J @ J.T)
    values, squares = values.clamp_min(0), (vectors.T @ y).square()

    def evidence(log_prior: float, log_noise: float) -> float:
        variances = values / exp(log_prior) + exp(2 * log_noise)
        return -0.5 * float((squares / variances + variances.log()).sum())

    log_prior, log_noise = log(prior), log(noise)
    for _ in range(_SWEEPS):
        if given_prior is None:
            log_prior = golden_section(partial(evidence, log_noise=log_noise), *_PRIOR_RANGE, width=1e-2)
        if given_noise is None:
            log_noise = golden_section(partial(evidence, log_prior), *_NOISE_RANGE, width=1e-2)
    return exp(log_prior), exp(log_noise)
