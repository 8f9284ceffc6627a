"""The paper's networks: their sizes, and the convolution that is used twice."""

import pytest
import torch
import torch.nn.functional as F

from experiments.networks import NETWORKS, ReusedConvolutionCNN, mlp, num_parameters
from experiments.recipes import RECIPES

COUNTS = {
    "enb": 17_922,
    "redwine": 18_177,
    "redwine-standardised": 18_177,
    "california": 17_793,
    "naval": 18_690,
    "mnist": 12_458,
    "fashionmnist": 12_458,
    "cifar10": 668_234,
    "imagenet10": 11_181_642,
}
FROM_ELSEWHERE = {"imagenet10-efficientnet", "imagenet10-finetuned"}  # their weights are not always here


def test_every_recipe_has_its_count_listed() -> None:
    assert set(COUNTS) == set(RECIPES) - FROM_ELSEWHERE


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert num_parameters(NETWORKS[RECIPES[name].network]()) == COUNTS[name]


def test_frozen_parameters_are_not_counted() -> None:
    network = mlp(3, 2, width=4)
    network[0].requires_grad_(False)
    assert num_parameters(network) == 4 * 4 + 4 + 4 * 2 + 2


def test_second_block_of_the_cnn_runs_twice() -> None:
    network = ReusedConvolutionCNN().eval()
    images = torch.randn(3, 1, 28, 28)
    first, reused = network.first[0], network.reused[0]
    hidden = F.max_pool2d(F.conv2d(images, first.weight, first.bias, padding=1).relu(), 2)
    for _ in range(2):
        hidden = F.max_pool2d(F.conv2d(hidden, reused.weight, reused.bias, padding=1).relu(), 2)
    assert hidden.shape == (3, 32, 3, 3)
    torch.testing.assert_close(network(images), F.linear(hidden.flatten(1), network.head.weight, network.head.bias))
