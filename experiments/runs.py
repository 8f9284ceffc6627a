"""The experiments: all seeds of a data set, their ensemble, and a tiny run of everything."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from experiments.datasets import Dataset, load
from experiments.methods import Problem, outputs_of
from experiments.recipes import RECIPES, Recipe
from experiments.results import Job, Results
from experiments.scored_sets import TestSet, corruptions_of, scored_part, scored_sets
from experiments.scores import classification_scores, mixture_scores
from experiments.seed_run import ENSEMBLE, SeedRun, rows_of
from experiments.training import trained_network

ENSEMBLE_SIZE = 5


def run(
    recipe: Recipe,
    dataset: Dataset,
    seeds: Sequence[int],
    results: Results,
    computed: Path,
    corruptions: Sequence[str] = (),
    methods: Collection[str] = (),
) -> None:
    """Run the jobs of a data set (or of some methods) that are not in the results yet; missing networks are trained."""
    dataset, unscored = scored_part(recipe, dataset)
    sets = scored_sets(recipe, dataset, corruptions)
    for seed in seeds:
        network = trained_network(recipe, dataset, seed, computed / "weights")
        problem = Problem(recipe, dataset, network, seed).to(recipe.dtype)
        SeedRun(problem, sets, results, computed, unscored, methods).run()
    if len(seeds) >= ENSEMBLE_SIZE and (not methods or ENSEMBLE in methods):
        networks = [trained_network(recipe, dataset, seed, computed / "weights") for seed in seeds[:ENSEMBLE_SIZE]]
        _run_ensemble(recipe, dataset, networks, sets, results)


def _run_ensemble(
    recipe: Recipe, dataset: Dataset, networks: list[nn.Module], sets: list[TestSet], results: Results
) -> None:
    """Average the predictives of all seeds' networks, as a job of seed 0."""
    for test_set in sets:
        job = Job(test_set.name, 0, ENSEMBLE)
        if job in results.done():
            continue
        outputs = torch.stack([outputs_of(network, test_set.inputs).double() for network in networks])
        if dataset.likelihood == "classification":
            scores = classification_scores(outputs.softmax(2).mean(0), test_set.targets)
        else:
            deviations = [Problem(recipe, dataset, network, 0).noise_std for network in networks]
            scores = mixture_scores(outputs, torch.tensor(deviations, dtype=torch.float64), test_set.targets)
        results.add(rows_of(job, {0: scores}, None, f"{len(networks)} networks, one a seed"))


def smoke(results: Results, computed: Path) -> int:
    """Run one tiny configuration of each kind, and return the number of results."""
    enb, mnist = RECIPES["enb"], RECIPES["mnist"]
    tiny_enb = replace(enb, training=replace(enb.training, epochs=20), num_inputs=10, largest_dim=20, swag_snapshots=2)
    run(tiny_enb, load("enb").cut(40, 20), range(ENSEMBLE_SIZE), results, computed)
    tiny = replace(mnist, training=replace(mnist.training, epochs=1), num_inputs=4, largest_dim=30, swag_snapshots=2)
    run(tiny, load("mnist").cut(36, 12), [0], results, computed, corruptions_of(mnist)[:1])
    return len(results.rows())
