r"""Small networks for tables of numbers, trained to the maximum a posteriori that a Laplace approximation starts from.

With the prior N(0, λ⁻¹ I) and N data, θ̂ minimises :math:`\frac1N \sum_i -\ln p(y_i|f_\theta(x_i)) + \frac{λ}{2N}‖θ‖²`,
so λ/N is Adam's (coupled) weight decay. λ and the noise σ, where they are not given, follow the evidence of the KFAC
approximation at the network of the moment, a few times in the first half of the training (Immer et al., 2021).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log

import torch
from torch import Tensor, nn

from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.fitting.steps import curvature_stream
from sublaplace.fitting.survey import survey_of
from sublaplace.fitting.tuning import evidence_of
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.likelihoods.base import Likelihood
from sublaplace.model.likelihoods.gaussian import Gaussian
from sublaplace.options import Resources
from sublaplace.posteriors.evidence import golden_section

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}

SMALLEST_NOISE = 1e-3
"""Of targets with unit variance: below it residuals are fitted exactly, and σ would have no limit."""

_ROUNDS = 10  # so often are λ and σ tuned, in the first half of the training
_FIRST_NOISE = 0.5  # of targets with unit variance, before the first round is over


@dataclass(frozen=True)
class Hyperparameters:
    """λ and σ; a value of None is to be tuned."""

    prior_precision: float | None
    noise_std: float | tuple[float, ...] | None = None


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a network is trained."""

    epochs: int
    batch_size: int
    learning_rate: float


@dataclass
class Training:
    """What came of a training: λ, the likelihood with its σ, and the objective after every epoch."""

    prior_precision: float
    likelihood: Likelihood
    objective: list[float] = field(default_factory=list)


class Standardisation(nn.Module):
    """(x − mean) / scale, column by column, with a scale of one for constant columns."""

    mean: Tensor
    scale: Tensor

    def __init__(self, columns: Tensor) -> None:
        super().__init__()
        spread = columns.std(0, correction=0)
        constant = spread <= 10 * torch.finfo(columns.dtype).eps * columns.abs().amax(0)
        self.register_buffer("mean", columns.mean(0))
        self.register_buffer("scale", spread.masked_fill(constant, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale


def mlp(
    inputs: Tensor, hidden: Sequence[int], num_outputs: int, activation: type[nn.Module], generator: torch.Generator
) -> nn.Sequential:
    """A fully connected network that standardises its inputs as those of training; weights N(0, 1/fan-in), biases 0."""
    layers: list[nn.Module] = [Standardisation(inputs)]
    widths = [inputs.shape[1], *hidden, num_outputs]
    for fan_in, fan_out in pairwise(widths):
        # Not initialised by torch, which would draw from the global random state.
        linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out, dtype=inputs.dtype)
        nn.init.normal_(linear.weight, std=fan_in**-0.5, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])


def train(
    network: nn.Module,
    likelihood: Likelihood,
    inputs: Tensor,
    targets: Tensor,
    given: Hyperparameters,
    schedule: Schedule,
    generator: torch.Generator,
) -> Training:
    """Trains the network in place, with Adam and a learning rate that falls to zero along a cosine.

    The second half of the training sees λ and σ as they are returned, so θ̂ belongs to them. Targets of regression have
    unit variance. Cost: `epochs` passes over the data, and at most ten fits of KFAC where something is tuned.
    """
    N, epochs = len(inputs), schedule.epochs
    result = Training(given.prior_precision or 1.0, likelihood)
    if likelihood.has_noise:
        result.likelihood = Gaussian(given.noise_std or _FIRST_NOISE)
    tunes = given.prior_precision is None or (likelihood.has_noise and given.noise_std is None)
    tuned_at = {epochs * part // (2 * _ROUNDS) for part in range(1, _ROUNDS + 1)} - {0} if tunes else set()
    optimizer = torch.optim.Adam(
        network.parameters(), schedule.learning_rate, weight_decay=result.prior_precision / N, fused=True
    )
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        if epoch in tuned_at:
            _tune(result, network, inputs, targets, given)
            optimizer.param_groups[0]["weight_decay"] = result.prior_precision / N
        total = 0.0
        for batch in torch.randperm(N, generator=generator).split(schedule.batch_size):
            optimizer.zero_grad()
            loss = -result.likelihood.log_density(network(inputs[batch]), targets[batch]).mean()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        cosine.step()
        squared_norm = sum(parameter.detach().square().sum().item() for parameter in network.parameters())
        result.objective.append((total + 0.5 * result.prior_precision * squared_norm) / N)
    return result


def _tune(result: Training, network: nn.Module, inputs: Tensor, targets: Tensor, given: Hyperparameters) -> None:
    """Move λ, then σ, as far as they are not given, to the maximum of the evidence of KFAC at the present network."""
    linearization = Linearization(network)
    loader, tolerance = [(inputs, targets)], Resources().tolerance(linearization.dtype)
    with linearization.borrowed():
        survey, _ = survey_of(loader, linearization, result.likelihood, estimate=False)
        kfac = kronecker_ggn(curvature_stream(loader, linearization, survey, tolerance), result.prior_precision)
    evidence = evidence_of(kfac, survey, linearization.layout.squared_norm(network))
    if given.prior_precision is None:
        result.prior_precision = evidence.best_prior(survey.noise_std)
    if result.likelihood.has_noise and given.noise_std is None:
        prior = torch.tensor(result.prior_precision, dtype=torch.float64)

        def value(log_noise: float) -> float:
            return evidence(prior, torch.tensor(exp(log_noise), dtype=torch.float64)).item()

        result.likelihood = Gaussian(exp(golden_section(value, log(SMALLEST_NOISE), log(2.0), width=1e-3)))
