"""The residual networks: ResNet9 for CIFAR10, and ResNet18 for ImageNet10 with torchvision's names."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn

RESNET18_FILE = "SUBLAPLACE_RESNET18"
"""The environment variable that names torchvision's file of ResNet18 (resnet18-f37072fd.pth)."""


def _convolution_block(inputs: int, outputs: int, pool: bool = False) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2)) if pool else nn.Sequential(*layers)


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = inputs + self.layers(inputs)
        return result


def resnet9(num_outputs: int = 10) -> nn.Sequential:
    """Build eight convolutions and a linear layer for images of 32 × 32 pixels: p = 668,234."""
    return nn.Sequential(
        _convolution_block(3, 64),
        _convolution_block(64, 128, pool=True),
        Residual(_convolution_block(128, 128), _convolution_block(128, 128)),
        _convolution_block(128, 128, pool=True),
        _convolution_block(128, 64, pool=True),
        Residual(_convolution_block(64, 64), _convolution_block(64, 64)),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(64, num_outputs),
    )


class BasicBlock(nn.Module):
    """Two convolutions and a parallel connection, which is a convolution of width one if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        beside = inputs if self.downsample is None else self.downsample(inputs)
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(inputs)))))
        result: Tensor = self.relu(inner + beside)
        return result


class ResNet18(nn.Module):
    """Seventeen convolutions and a linear layer for images of 224 × 224 pixels: p = 11,181,642 with ten outputs."""

    def __init__(self, num_outputs: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._layer(64, 64, 1)
        self.layer2 = self._layer(64, 128, 2)
        self.layer3 = self._layer(128, 256, 2)
        self.layer4 = self._layer(256, 512, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, num_outputs)

    @staticmethod
    def _layer(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        result: Tensor = self.fc(self.avgpool(hidden).flatten(1))
        return result


def resnet18_of_imagenet() -> ResNet18:
    """Return ResNet18 with torchvision's weights, from `RESNET18_FILE`, and a new last layer for ten classes."""
    path = Path(os.environ.get(RESNET18_FILE, ""))
    if not path.is_file():
        raise FileNotFoundError(
            f"ResNet18's ImageNet weights are not here: set {RESNET18_FILE} to torchvision's file "
            "resnet18-f37072fd.pth (download.pytorch.org/models), or run imagenet10, which trains from scratch."
        )
    network = ResNet18()
    weights = torch.load(path, weights_only=True)
    kept = {name: part for name, part in weights.items() if not name.startswith("fc.")}
    missing, unexpected = network.load_state_dict(kept, strict=False)
    if set(missing) != {"fc.weight", "fc.bias"} or unexpected:
        raise ValueError(
            f"{path} is not a ResNet18 of torchvision: {sorted({*missing, *unexpected})[:5]} do not match."
        )
    return network


def freeze_norms(network: nn.Module) -> nn.Module:
    """Fix the scales and shifts of batch normalisation, which are not Bayesian in the paper."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return network
