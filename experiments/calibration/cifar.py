"""CIFAR10 with residual networks that others trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from safetensors.torch import load

from experiments import colour_images
from experiments.calibration.cifar_resnet import CifarResNet
from experiments.calibration.networks import described
from experiments.calibration.problem import Examples, Problem
from experiments.calibration.sets import Kind
from experiments.datasets import SourceFile, content

NUM_TRAIN = 2000
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
_HOME = "https://github.com/Ludvins/BayesiPy"  # the tensors of its files at commit 0815e90, as safetensors


@dataclass(frozen=True)
class TrainedResNet:
    """A network with its weights, and the kind of its data set."""

    depth: int
    num_parameters: int
    sha256: str
    kind: Kind

    @property
    def weights(self) -> SourceFile:
        return SourceFile(f"cifar10_resnets/resnet{self.depth}.safetensors", self.sha256, _HOME)

    @property
    def note(self) -> str:
        return (
            f"A ResNet{self.depth} ({self.num_parameters:,} parameters) that was trained by others on all training "
            f"pictures; its weights come from BayesiPy. Curvature is that of {NUM_TRAIN:,} training pictures. λ and "
            "temperatures are tuned on one half of the test set and scored on the other, both ways, and the 10,000 "
            "predictions are pooled. Ensembles and dropout would need further training, and laplace-torch's Jacobians "
            "of all weights would take hours."
        )

    def network(self) -> CifarResNet:
        """Build the network with its published weights, in evaluation mode."""
        blocks = (self.depth - 2) // 6
        network = cast(CifarResNet, described(CifarResNet(blocks), "cifar-resnet", blocks=blocks))
        network.load_state_dict(load(content(self.weights)))
        return network.eval()


NETWORKS: dict[str, TrainedResNet] = {
    "cifar10": TrainedResNet(20, 272_474, "b27ef42701f9adf86eae0d580a3d405bf57761a833039598065808924971cc73", "report"),
    "cifar10-resnet32": TrainedResNet(
        32, 466_906, "3092806396caf118722caf8fea0fea4926755f96c727b2f6dee06e7985977610", "strong"
    ),
    "cifar10-resnet44": TrainedResNet(
        44, 661_338, "834db78eeab6366ab4645832d10344cff618185160bc98920cb40396c0205354", "strong"
    ),
    "cifar10-resnet56": TrainedResNet(
        56, 855_770, "89683e76777db4a2b629ad4b9797c56e109e6ac4332e8da69d5569572d4179ee", "strong"
    ),
}
"""The networks by the name of their data set."""


def cifar_problems(splits: Sequence[int], name: str = "cifar10") -> dict[int, list[Problem]]:
    """Return the two halves of the test set, each tuned on the other; there is one split."""
    if list(splits) != [0]:
        raise ValueError("CIFAR10 has one split, because it has one network of each depth.")
    dataset = colour_images.cifar10()
    order = np.random.default_rng(42).permutation(len(dataset.train_inputs))
    drawn = torch.from_numpy(order[:NUM_TRAIN])
    train = Examples(_rescaled(dataset.train_inputs[drawn]), dataset.train_targets[drawn])
    test = Examples(_rescaled(dataset.test_inputs), dataset.test_targets)
    return {0: two_halves(name, train, test, NETWORKS[name].network())}


def two_halves(name: str, train: Examples, test: Examples, network: CifarResNet) -> list[Problem]:
    """Make two problems of one test set: each half is scored once, with the other as validation data."""
    order = torch.from_numpy(np.random.default_rng(43).permutation(len(test)))
    first, second = test[order[: len(order) // 2]], test[order[len(order) // 2 :]]
    return [
        Problem(name, 0, "classification", train, train, validation, scored, network, network, is_half=True)
        for validation, scored in ((first, second), (second, first))
    ]


def _rescaled(images: torch.Tensor) -> torch.Tensor:
    """Scale pictures as these networks want them, from the scale of the paper's networks."""
    return colour_images.scaled(
        colour_images.pixels_of(images, colour_images.CIFAR10_MEAN, colour_images.CIFAR10_STD), MEAN, STD
    )
