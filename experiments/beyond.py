"""Beyond the paper: the same subspaces with KFAC outside of them, and other ways to build the subspace.

Every candidate is practical: it needs neither labels of new data nor the inputs that it is judged on. Its divergence
from the full Laplace approximation is taken on the same draw of test inputs, and against the same reference, as that of
the paper's methods.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.datasets import Dataset
from experiments.methods import Exact, Problem, capped, exact_posterior, expected_ranks, measured
from experiments.recipes import Recipe
from experiments.results import Job, Results
from experiments.runs import SeedRun, approximation_scores, predictive_scores, rows_of, test_sets
from experiments.training import trained_network
from sublaplace import PROJECTORS, ComplementedPosterior, Jacobian, Jacobians, SubspacePosterior, low_rank
from sublaplace.curvature import reduced_ggn_and_product
from sublaplace.fitting import perturbed
from sublaplace.projection import Projection

COMPLEMENT = "kfac"
DIMS = [100, 400]
PERTURBATION = 0.1  # of the standard deviation of each feature
CANDIDATES = (
    ("lowrank-kfac", "train"),
    ("lowrank-isotropic", "train"),
    ("lowrank-ggn", "train"),
    ("lowrank-ggn", "perturbed"),
)
"""Projectors and the inputs that they are built from; lowrank-ggn, which needs the exact GGN, for regression only."""


@dataclass(frozen=True)
class ComplementSweep:
    """A posterior that is exact in the leading s dimensions and KFAC in all others, for each s."""

    posterior: ComplementedPosterior
    dims: list[int]

    def covariances(self, jacobian: Jacobian) -> Iterator[Tensor]:
        for s in self.dims:
            yield self.posterior.truncated(s).covariance(jacobian).double()

    def joint_covariances(self, jacobians: Jacobians) -> Iterator[Tensor]:
        for s in self.dims:
            yield self.posterior.truncated(s).joint_covariance(jacobians)


def run(recipe: Recipe, dataset: Dataset, seeds: Sequence[int], results: Results, cache: Path) -> None:
    """All candidates that are not in the results yet, for seeds whose full Laplace approximation is known."""
    (test_set,) = test_sets(dataset, ())
    for seed in seeds:
        network = trained_network(recipe, dataset, seed, cache / "weights")
        problem = Problem(recipe, dataset, network, seed).to(recipe.dtype)
        reference = SeedRun(problem, [test_set], results, cache).reference(test_set)
        if reference is None:
            raise SystemExit(f"error: {recipe.dataset}, seed {seed}: do `python -m experiments run` first.")
        done = results.done()
        left = [
            (name, inputs)
            for name, inputs in CANDIDATES
            if Job(recipe.dataset, seed, name, inputs, COMPLEMENT) not in done
            and (name != "lowrank-ggn" or problem.noise_std is not None)
        ]
        exact: Exact | None = None
        for name, inputs in tqdm(left, f"{recipe.dataset} seed {seed}, KFAC outside"):
            if name == "lowrank-ggn" and exact is None:
                exact = exact_posterior(problem.to(torch.float64))
            build = _Candidate(problem.to(torch.float64) if exact is not None else problem, name, inputs, exact)
            posterior, cost = measured(build.posterior)
            sweep = ComplementSweep(posterior, capped(DIMS, posterior.dim))
            drawn = SeedRun(build.problem, [test_set], results, cache).draw(test_set)
            scores = approximation_scores(build.problem, drawn, sweep, reference)
            for s, values in predictive_scores(build.problem, test_set, {name: sweep})[name].items():
                scores[s] |= values
            job = Job(recipe.dataset, seed, name, inputs, COMPLEMENT)
            results.add(rows_of(job, scores, cost, str(build.problem.dtype).removeprefix("torch.")))


@dataclass(frozen=True)
class _Candidate:
    problem: Problem
    name: str
    inputs: str
    exact: Exact | None

    def posterior(self) -> ComplementedPosterior:
        """P, then the posterior in its span and KFAC outside: one more pass over the training data."""
        context = self.problem.context
        projection = self._projection()
        curvatures, product = reduced_ggn_and_product(context.stream, projection)
        inside = SubspacePosterior(
            projection,
            curvatures,
            projection.gram(),
            context.stream.likelihood.curvature_scales,
            context.prior_precision,
        )
        scaled = {name: part * context.stream.scale for name, part in product.items()}
        return ComplementedPosterior.of(inside, context.kfac(), scaled)

    def _projection(self) -> Projection:
        context = replace(self.problem.context, dim=max(DIMS))
        jacobians = context.subspace_jacobians
        if self.inputs == "perturbed":
            jacobians = replace(jacobians, inputs=perturbed(jacobians.inputs, PERTURBATION, self.problem.seed))
        with expected_ranks():
            if self.exact is not None:
                return low_rank(jacobians, self.exact, context.dim)
            return PROJECTORS[self.name](replace(context, subspace_jacobians=jacobians))
