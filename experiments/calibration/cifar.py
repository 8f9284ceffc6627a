"""CIFAR10 with a ResNet20 that others trained."""

from collections.abc import Sequence

import numpy as np
import torch
from safetensors.torch import load

from experiments import colour_images
from experiments.calibration.cifar_resnet import CifarResNet
from experiments.calibration.networks import described
from experiments.calibration.problem import Examples, Problem
from experiments.datasets import SourceFile, content

NUM_TRAIN = 2000
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
WEIGHTS = SourceFile(
    "cifar10_resnets/resnet20.safetensors",
    "b27ef42701f9adf86eae0d580a3d405bf57761a833039598065808924971cc73",
    "https://github.com/Ludvins/BayesiPy",  # the tensors of its file at commit 0815e90, as safetensors
)
NOTE = (
    "A ResNet20 (272,474 parameters) that was trained by others on all training pictures; its weights come from "
    f"BayesiPy. Curvature is that of {NUM_TRAIN:,} training pictures. λ and temperatures are tuned on one half of the "
    "test set and scored on the other, both ways, and the 10,000 predictions are pooled. Ensembles and dropout would "
    "need further training, and laplace-torch's Jacobians of all weights would take hours."
)


def cifar_problems(splits: Sequence[int]) -> dict[int, list[Problem]]:
    """Return the two halves of the test set, each tuned on the other; there is one split."""
    if list(splits) != [0]:
        raise ValueError("CIFAR10 has one split, because it has one network.")
    dataset = colour_images.cifar10()
    order = np.random.default_rng(42).permutation(len(dataset.train_inputs))
    drawn = torch.from_numpy(order[:NUM_TRAIN])
    train = Examples(_rescaled(dataset.train_inputs[drawn]), dataset.train_targets[drawn])
    test = Examples(_rescaled(dataset.test_inputs), dataset.test_targets)
    return {0: halves(train, test, resnet20())}


def halves(train: Examples, test: Examples, network: CifarResNet) -> list[Problem]:
    """Make two problems of one test set: each half is scored once, with the other as validation data."""
    order = torch.from_numpy(np.random.default_rng(43).permutation(len(test)))
    first, second = test[order[: len(order) // 2]], test[order[len(order) // 2 :]]
    return [
        Problem("cifar10", 0, "classification", train, train, validation, scored, network, network)
        for validation, scored in ((first, second), (second, first))
    ]


def resnet20() -> CifarResNet:
    """Build the network with its published weights, in evaluation mode."""
    network = CifarResNet()
    network.load_state_dict(load(content(WEIGHTS)))
    described(network, "resnet20")
    return network.eval()


def _rescaled(images: torch.Tensor) -> torch.Tensor:
    """Scale pictures as this network wants them, from the scale of the paper's networks."""
    return colour_images.scaled(
        colour_images.pixels_of(images, colour_images.CIFAR10_MEAN, colour_images.CIFAR10_STD), MEAN, STD
    )
