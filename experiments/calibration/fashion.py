"""FashionMNIST with a small CNN."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from experiments import datasets
from experiments.calibration.networks import cnn, described
from experiments.calibration.problem import Examples, Problem
from experiments.calibration.splits import joined
from experiments.calibration.trained import CACHE, DROPOUT, ENSEMBLE_SIZE
from experiments.calibration.training import NetworkRecipe, described_recipe, kept_network, train_classifier

NUM_TRAIN, NUM_TEST = 5000, 5000
RECIPE = NetworkRecipe(epochs=15)
NOTE = (
    f"A CNN with two convolutions (20,490 parameters), trained for {RECIPE.epochs} epochs on {NUM_TRAIN:,} pictures "
    f"drawn from the training set and scored on {NUM_TEST:,} drawn from the test set."
)


def fashion_problems(splits: Sequence[int], folder: Path = CACHE) -> dict[int, list[Problem]]:
    """Return draws of the pictures with their networks, which are trained if they are not on disk."""
    dataset = datasets.load("fashionmnist")
    train = Examples(dataset.train_inputs, dataset.train_targets)
    test = Examples(dataset.test_inputs, dataset.test_targets)
    return {split: [_problem(train, test, split, folder)] for split in splits}


def _problem(all_train: Examples, all_test: Examples, split: int, folder: Path) -> Problem:
    generator = np.random.default_rng([42, split])
    train = all_train[torch.from_numpy(generator.permutation(len(all_train))[:NUM_TRAIN])]
    test = all_test[torch.from_numpy(generator.permutation(len(all_test))[:NUM_TEST])]
    num_fit = len(train) - len(train) // 10
    fit, validation = train[:num_fit], train[num_fit:]

    def network(name: str, examples: Examples, member: int = 0, dropout: float = 0.0) -> nn.Module:
        seed = 100 * split + member
        return kept_network(
            folder / f"fashionmnist-{split}-{name}.safetensors",
            lambda: described(cnn(dropout=dropout), "cnn", dropout=dropout),
            lambda built: train_classifier(built, examples, seed, RECIPE),
            seed,
            described_recipe(RECIPE, len(examples), dropout),
        )

    return Problem(
        dataset="fashionmnist",
        split=split,
        task="classification",
        train=joined(fit, validation),
        fit=fit,
        validation=validation,
        test=test,
        network=network("member-0", train),
        held_out_network=network("held-out", fit),
        members=tuple(network(f"member-{k}", train, k) for k in range(1, ENSEMBLE_SIZE)),
        dropout_network=network("dropout", train, dropout=DROPOUT),
    )
