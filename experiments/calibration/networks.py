"""The networks that the benchmark trains, by name, so that another process can build them too."""

from collections.abc import Callable
from typing import Any

from torch import nn

from experiments.calibration.cifar_resnet import CifarResNet
from experiments.calibration.text_network import adapted_classifier

WIDTH = 100


def mlp(num_inputs: int, num_outputs: int, dropout: float = 0.0, width: int = WIDTH) -> nn.Sequential:
    """Build inputs → width → ReLU → width → ReLU → outputs, with dropout after each ReLU if its rate is not 0."""

    def hidden(inputs: int) -> list[nn.Module]:
        layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
        return [*layers, nn.Dropout(dropout)] if dropout else layers

    return nn.Sequential(*hidden(num_inputs), *hidden(width), nn.Linear(width, num_outputs))


def cnn(num_outputs: int = 10, dropout: float = 0.0) -> nn.Sequential:
    """Build two convolutions and a linear layer for images of 28 × 28 pixels: p = 20,490 with ten outputs."""
    layers: list[nn.Module] = [
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []), nn.Linear(1568, num_outputs))


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "cifar-resnet": CifarResNet,
    "text": adapted_classifier,
}


def described(network: nn.Module, builder: str, **sizes: Any) -> nn.Module:
    """Note on a network how it was built, for `description`."""
    network.built_by = (builder, sizes)  # type: ignore[assignment]
    return network


def description(network: nn.Module) -> tuple[str, dict[str, Any]] | None:
    """Tell how a network was built, or None if only this process can build it."""
    return getattr(network, "built_by", None)
