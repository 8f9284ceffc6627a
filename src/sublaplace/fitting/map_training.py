r"""Small networks for tabular data, trained to the maximum a posteriori (MAP) that a Laplace approximation needs.

With the prior N(0, λ⁻¹ I) and N data, θ̂ minimises :math:`\frac1N \sum_i -\ln p(y_i|f_\theta(x_i)) + \frac{λ}{2N}‖θ‖²`,
so λ/N is Adam's (coupled) weight decay. Unless given, λ and the noise σ maximise the evidence of the KFAC approximation
at the current network. They are updated several times in the first half of the training (Immer et al., 2021).
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
"""Lower bound on σ, for targets with unit variance; without it, σ would go to zero if residuals are fitted exactly."""

_ROUNDS = 10  # how often λ and σ are tuned in the first half of the training
_FIRST_NOISE = 0.5  # initial σ, for targets with unit variance


@dataclass(frozen=True)
class Hyperparameters:
    """Given values of λ and σ; None: to be tuned."""

    prior_precision: float | None
    noise_std: float | tuple[float, ...] | None = None


@dataclass(frozen=True)
class Schedule:
    """The length, batch size and initial learning rate of the training."""

    epochs: int
    batch_size: int
    learning_rate: float


@dataclass
class Training:
    """The result of a training: λ, the likelihood with its σ, and the objective after every epoch."""

    prior_precision: float
    likelihood: Likelihood
    objective: list[float] = field(default_factory=list)


class Standardisation(nn.Module):
    """Module that maps x to (x − mean) / scale per column; constant columns have scale 1."""

    mean: Tensor
    scale: Tensor

    def __init__(self, columns: Tensor) -> None:
        super().__init__()
        spread = columns.std(0, correction=0)
        constant = spread <= 10 * torch.finfo(columns.dtype).eps * columns.abs().amax(0)
        self.register_buffer("mean", columns.mean(0))
        self.register_buffer("scale", spread.masked_fill(constant, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the standardised columns of x."""
        return (x - self.mean) / self.scale


class Scaled(nn.Module):
    """Module that multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the factor."""
        return x * self.factor


def mlp(
    inputs: Tensor,
    hidden: Sequence[int],
    num_outputs: int,
    activation: type[nn.Module],
    generator: torch.Generator,
    scaled: bool = False,
) -> nn.Sequential:
    """Return a fully connected network that standardises its inputs, with weights N(0, 1/fan-in) and zero biases.

    Args:
        inputs: the training inputs (n, n_features), which determine the standardisation and the dtype.
        hidden: widths of the hidden layers.
        num_outputs: the number of outputs.
        activation: the activation between layers.
        generator: the source of the weights.
        scaled: whether weights are N(0, 1), and the inputs of each layer divided by √fan-in. It is the same network,
            but a prior N(0, λ⁻¹I) of the weights then suits layers of all widths.
    """
    layers: list[nn.Module] = [Standardisation(inputs)]
    widths = [inputs.shape[1], *hidden, num_outputs]
    for fan_in, fan_out in pairwise(widths):
        # The default initialisation would draw from the global random state.
        linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out, dtype=inputs.dtype, device=inputs.device)
        nn.init.normal_(linear.weight, std=1.0 if scaled else fan_in**-0.5, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [Scaled(fan_in**-0.5)] if scaled else []
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
    """Train the network in place, with Adam and a learning rate that decays to zero along a cosine.

    The second half of the training uses the returned λ and σ, so θ̂ is their MAP. Cost: `epochs` passes over the data,
    and at most ten fits of KFAC if λ or σ is tuned.

    Args:
        network: trained in place.
        likelihood: the likelihood; its σ is replaced.
        inputs: (n, n_features).
        targets: in the form of the likelihood; with unit variance for regression.
        given: λ and σ, or None to tune them.
        schedule: epochs, batch size and learning rate.
        generator: determines the order of the data.
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
        for batch in torch.randperm(N, generator=generator, device="cpu").split(schedule.batch_size):
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
    """Maximise KFAC's evidence at the current network over λ, then over σ, unless they are given."""
    linearization = Linearization(network)
    loader, tolerance = [(inputs, targets)], Resources().tolerance(linearization.dtype)
    with linearization.borrowed():
        survey, _ = survey_of(loader, linearization, result.likelihood, estimate=False)
        kfac = kronecker_ggn(curvature_stream(loader, linearization, survey, tolerance), result.prior_precision)
    evidence = evidence_of(kfac, survey, linearization.squared_norm())
    if given.prior_precision is None:
        result.prior_precision = evidence.best_prior(survey.noise_std)
    if result.likelihood.has_noise and given.noise_std is None:
        prior = torch.tensor(result.prior_precision, dtype=torch.float64, device="cpu")

        def value(log_noise: float) -> float:
            return evidence(prior, torch.tensor(exp(log_noise), dtype=torch.float64, device="cpu")).item()

        result.likelihood = Gaussian(exp(golden_section(value, log(SMALLEST_NOISE), log(2.0), width=1e-3)))
