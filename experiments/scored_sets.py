"""The scored data: the test data, or as many of them as time allows, and their corrupted versions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.colour_images import CIFAR10_MEAN, CIFAR10_STD, pixels_of, scaled
from experiments.datasets import Dataset, image_pixels, image_tensor
from experiments.methods import drawn
from experiments.recipes import Recipe

CORRUPTION_SEED = 0  # the corrupted images are one data set, the same for every network


@dataclass(frozen=True)
class TestSet:
    """Test data, under the name of their results."""

    __test__ = False  # despite its name, this is not a test class

    name: str
    inputs: Tensor
    targets: Tensor


def scored_part(recipe: Recipe, dataset: Dataset) -> tuple[Dataset, TestSet | None]:
    """Return the data set with the test data that are scored, and the other test data, if any; equal for every seed."""
    total = len(dataset.test_inputs)
    if recipe.num_scored is None or recipe.num_scored >= total:
        return dataset, None
    chosen = drawn(total, recipe.num_scored, 0, "scored test inputs")
    others = torch.ones(total, dtype=torch.bool).index_fill(0, chosen, False)
    left = TestSet(dataset.name, dataset.test_inputs[others], dataset.test_targets[others])
    return replace(dataset, test_inputs=dataset.test_inputs[chosen], test_targets=dataset.test_targets[chosen]), left


def corruptions_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the corruptions of the test set that belong to a data set."""
    if not recipe.corrupted_dims:
        return ()
    if recipe.dataset == "cifar10":
        from experiments.colour_corruptions import CIFAR10_C

        return CIFAR10_C
    from experiments.corruptions import MNIST_C

    return MNIST_C


def scored_sets(recipe: Recipe, dataset: Dataset, corruptions: Sequence[str]) -> list[TestSet]:
    """Return the test data themselves, then their corrupted versions, or the first of these if not all are scored."""
    part = dataset.cut(0, recipe.num_corrupted or len(dataset.test_inputs))
    names = tqdm(corruptions, "corrupting images", leave=False) if corruptions else ()
    corrupted = [TestSet(f"{dataset.name}-c/{name}", *_corrupted(name, part)) for name in names]
    return [TestSet(dataset.name, dataset.test_inputs, dataset.test_targets), *corrupted]


def _corrupted(name: str, dataset: Dataset) -> tuple[Tensor, Tensor]:
    """Return inputs and targets; colour pictures at all severities, one after the other."""
    if dataset.test_inputs.shape[1] == 1:
        from experiments.corruptions import corrupt

        return image_tensor(corrupt(name, image_pixels(dataset.test_inputs), CORRUPTION_SEED)), dataset.test_targets
    parts = list(_at_all_severities(name, dataset))
    return torch.cat(parts), dataset.test_targets.repeat(len(parts))


def _at_all_severities(name: str, dataset: Dataset) -> Iterator[Tensor]:
    from experiments.colour_corruptions import SEVERITIES, corrupt

    pixels = pixels_of(dataset.test_inputs, CIFAR10_MEAN, CIFAR10_STD)
    for severity in SEVERITIES:
        yield scaled(corrupt(name, severity, pixels, CORRUPTION_SEED), CIFAR10_MEAN, CIFAR10_STD)
