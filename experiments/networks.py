"""The networks of the experiments by name; the small ones are defined here."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from experiments.resnets import ResNet18, resnet9, resnet18_of_imagenet


def mlp(num_inputs: int, num_outputs: int, width: int = 128) -> nn.Sequential:
    """Build inputs → width → ReLU → width → ReLU → outputs."""
    return nn.Sequential(
        nn.Linear(num_inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, num_outputs),
    )


class ReusedConvolutionCNN(nn.Module):
    """Two convolution blocks and a linear layer; the second block runs twice with the same weights.

    With 32 channels, as in the paper, p = 12,458.
    """

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.reused = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(9 * channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.reused(self.reused(self.first(images))).flatten(1))


def _efficientnet() -> nn.Module:
    from experiments.efficientnet import IMAGENET10_CLASSES, efficientnet_lite0

    return efficientnet_lite0([each.index for each in IMAGENET10_CLASSES])


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp-8-2": partial(mlp, 8, 2),
    "mlp-11-1": partial(mlp, 11, 1),
    "mlp-8-1": partial(mlp, 8, 1),
    "mlp-14-2": partial(mlp, 14, 2),
    "cnn": ReusedConvolutionCNN,
    "resnet9": resnet9,
    "resnet18": ResNet18,
    "resnet18-imagenet": resnet18_of_imagenet,
    "efficientnet-lite0": _efficientnet,
}


def num_parameters(network: nn.Module) -> int:
    """Return p, the number of parameters that require grad."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
