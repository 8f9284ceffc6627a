"""The two problems of the demonstration: data, a trained network, and candidates for the prior precision."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

from sublaplace import Categorical, Gaussian, Likelihood

BATCH_SIZE = 100
NOISE_STD = 0.15  # of the generated regression targets

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A trained network with everything that a comparison of Laplace approximations needs."""

    name: str
    likelihood: Likelihood
    model: nn.Module
    train: Data
    validation: Data
    test: Data
    network_for: Callable[[Data], nn.Module]  # the network as trained, on other data
    num_drawn: int  # the KL divergence and the trace are taken on this many test inputs
    prior_precisions: tuple[float, ...]  # candidates for λ; validation decides where there are several
    dims: tuple[int, ...]  # the values of s in the sweep; the table shows the last one

    @property
    def loader(self) -> list[Data]:
        """The training data in batches."""
        return in_batches(self.train)

    @property
    def drawn(self) -> Tensor:
        """The test inputs for the KL divergence and the trace."""
        return self.test[0][: self.num_drawn]


def in_batches(data: Data) -> list[Data]:
    """Return a loader of the data; a list is the simplest one that can be read twice."""
    return list(zip(*(part.split(BATCH_SIZE) for part in data), strict=True))


def digits_task(num_train: int = 500, width: int = 24, epochs: int = 100) -> Task:
    """Return a few handwritten digits of 8 × 8 pixels, and a network trained until it is overconfident."""
    pixels, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(pixels) / 16, torch.tensor(labels)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    train, validation, test = (
        (inputs[i], targets[i]) for i in order.split([num_train, 200, len(order) - num_train - 200])
    )

    def network_for(data: Data) -> nn.Module:
        return trained(mlp(64, width, 10, nn.ReLU), data, nn.functional.cross_entropy, epochs, weight_decay=0.0)

    return Task(
        name="digits",
        likelihood=Categorical(),
        model=network_for(train),
        train=train,
        validation=validation,
        test=test,
        network_for=network_for,
        num_drawn=100,
        prior_precisions=(10, 20, 50, 100, 200, 500),
        dims=(1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100),
    )


def gap_task(num_train: int = 150, width: int = 50, epochs: int = 750) -> Task:
    """Return a curve of one input, with training data on both sides of a gap and test data everywhere."""
    generator = torch.Generator().manual_seed(0)
    train, validation, test = (
        curve(count, gap, generator) for count, gap in [(num_train, True), (50, True), (200, False)]
    )
    # The network maximises the posterior under the prior of λ = 1, so the Laplace approximation has no parameter left
    # to choose. The loss is the mean squared error, 2σ²/N times the negative log-likelihood.
    prior_precision = 1.0

    def network_for(data: Data) -> nn.Module:
        weight_decay = prior_precision * 2 * NOISE_STD**2 / len(data[0])
        return trained(mlp(1, width, 1, nn.Tanh), data, nn.functional.mse_loss, epochs, weight_decay)

    model = network_for(train)
    # As in the paper, σ is the standard deviation of the residuals about their mean. Gaussian() would estimate their
    # root mean square.
    with torch.no_grad():
        noise_std = float((train[1] - model(train[0])).std(correction=0))
    return Task(
        name="gap",
        likelihood=Gaussian(noise_std),
        model=model,
        train=train,
        validation=validation,
        test=test,
        network_for=network_for,
        num_drawn=200,
        prior_precisions=(prior_precision,),
        dims=(1, 2, 3, 5, 7, 10, 12, 15, 20),
    )


def curve(count: int, gap: bool, generator: torch.Generator) -> Data:
    """Return noisy values of sin 2x + 0.3x for x in [−3, 3], without the middle third if there is a gap."""
    position = torch.rand(count, 1, generator=generator, dtype=torch.float64)
    inputs = 4 * position - 2 if gap else 6 * position - 3
    if gap:
        inputs += inputs.sign()
    noise = NOISE_STD * torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return inputs, torch.sin(2 * inputs) + 0.3 * inputs + noise


def mlp(inputs: int, width: int, outputs: int, activation: type[nn.Module]) -> nn.Module:
    """Return a network with two hidden layers, in float64: comparisons should show the method, not rounding."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, outputs)
    ).double()


def trained(
    model: nn.Module, data: Data, loss: Callable[[Tensor, Tensor], Tensor], epochs: int, weight_decay: float
) -> nn.Module:
    """Train the model by Adam with a learning rate that falls linearly to zero."""
    inputs, targets = data
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=epochs)
    generator = torch.Generator().manual_seed(0)
    for _ in tqdm(range(epochs), desc="training", leave=False):
        for batch in torch.randperm(len(inputs), generator=generator).split(BATCH_SIZE):
            optimizer.zero_grad()
            loss(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        schedule.step()
    return model.eval()
