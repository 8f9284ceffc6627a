"""The posteriors that are compared, and how each is made from the steps of a fit."""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn

from experiments.datasets import Dataset
from experiments.recipes import Recipe
from experiments.sweeps import capped
from experiments.weighting import nearest_power
from sublaplace import (
    PROJECTORS,
    Basis,
    BlockPrecision,
    Categorical,
    ChunkPolicy,
    ComplementedPosterior,
    Curvatures,
    CurvatureStream,
    DensePrecision,
    DualPrecision,
    Gaussian,
    Jacobians,
    Likelihood,
    Linearization,
    ProjectorContext,
    SubspacePosterior,
    low_rank,
)
from sublaplace.data.subspace_inputs import perturbed, split
from sublaplace.fitting import steps
from sublaplace.projection import Projection
from sublaplace.projectors.subset import largest
from sublaplace.projectors.swag import swag_variances

FEASIBLE = tuple(name for name, projector in PROJECTORS.items() if not projector.needs_exact)
"""The projectors that do without the exact GGN."""


@dataclass(frozen=True)
class Complemented:
    """A subspace with KFAC outside.

    Args:
        projector: the name of the projector.
        inputs: what P is built from: "train", "perturbed", or "augmented", which is both.
        complement: "kfac", or "kfac-fitted", whose weight is fitted to the full posterior on held-back inputs.
    """

    projector: str
    inputs: str = "train"
    complement: str = "kfac"

    @property
    def needs_exact(self) -> bool:
        """Whether the exact GGN is needed, for P or for the weight."""
        return PROJECTORS[self.projector].needs_exact or self.complement == "kfac-fitted"


COMPLEMENTED = (
    Complemented("lowrank-kfac"),
    Complemented("lowrank-isotropic", complement="kfac-fitted"),
    Complemented("lowrank-ggn", "perturbed"),
    Complemented("lowrank-correction", complement="kfac-fitted"),
    Complemented("lowrank-correction", "augmented", "kfac-fitted"),
)
"""The paper's subspace first, then the candidates for a better one.

None of them needs labels of new data or the inputs that it is judged on.
"""

MOST_INPUTS = 1000  # inputs of such a subspace, before noisy ones are added
PERTURBATION = 0.1  # of the standard deviation of each feature

BATCH_SIZE = 1000  # of passes over the data, whose results do not depend on it

BUDGET, LARGE_BUDGET = 2**30, 2**32  # bytes for temporary chunks; a smaller one costs large networks more runs over X′

Exact = DensePrecision | DualPrecision


@dataclass(frozen=True)
class Problem:
    """A trained network and its data in one floating-point type, with the draws of a seed."""

    recipe: Recipe
    dataset: Dataset
    network: nn.Module
    seed: int

    def to(self, dtype: torch.dtype) -> "Problem":
        """Return the same problem in another type, or itself if it is of that type."""
        if self.dtype == dtype:
            return self
        return replace(self, network=copy.deepcopy(self.network).to(dtype))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the network's parameters."""
        return next(self.network.parameters()).dtype

    @cached_property
    def noise_std(self) -> float | None:
        """σ as in the paper, None for classification.

        It is the standard deviation of the training residuals about their mean, pooled over the outputs. The library
        estimates a root mean square instead, so σ is always given to it.
        """
        if self.dataset.likelihood == "classification":
            return None
        outputs = outputs_of(self.network, self.dataset.train_inputs)
        return float((self.dataset.train_targets.double() - outputs.double()).std(correction=0))

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, with σ."""
        return Categorical() if self.noise_std is None else Gaussian(self.noise_std)

    @cached_property
    def linearization(self) -> Linearization:
        """The network and its Jacobian."""
        budget = LARGE_BUDGET if self.recipe.large else BUDGET
        return Linearization(self.network, chunks=ChunkPolicy(budget, self.recipe.largest_dim))

    @cached_property
    def context(self) -> ProjectorContext:
        """What projectors are built from, with X′ drawn from the training inputs."""
        stream = CurvatureStream(self.linearization, self.loader, self.likelihood, self.recipe.direction_tolerance)
        inputs = self.dataset.train_inputs
        num_outputs = outputs_of(self.network, inputs[:1]).shape[1]
        chosen = drawn(len(inputs), self.recipe.num_inputs, self.seed, "subspace inputs")
        return ProjectorContext(
            curvatures=Curvatures(stream, len(inputs), num_outputs),
            subspace_jacobians=self.jacobians(inputs[chosen]),
            dim=self.recipe.largest_dim,
            prior_precision=self.recipe.prior_precision,
            seed=self.seed,
        )

    @cached_property
    def loader(self) -> list[tuple[Tensor, ...]]:
        """The training data in batches.

        Where only some inputs are used, each has the weight of the inputs that it stands for.
        """
        inputs, targets = self.dataset.train_inputs, self.dataset.train_targets
        parts = [inputs.to(self.dtype), targets if self.noise_std is None else targets.to(self.dtype)]
        if self.recipe.num_curvature_inputs is not None:
            chosen = drawn(len(inputs), self.recipe.num_curvature_inputs, self.seed, "curvature inputs")
            weights = torch.full((len(chosen),), len(inputs) / len(chosen), dtype=self.dtype)
            parts = [part[chosen] for part in parts] + [weights]
        return list(zip(*(part.split(BATCH_SIZE) for part in parts), strict=True))

    def jacobians(self, inputs: Tensor) -> Jacobians:
        """Return J of any inputs."""
        return Jacobians(self.linearization, inputs.to(self.dtype))


def drawn(total: int, count: int, seed: int, purpose: str) -> Tensor:
    """Return `count` ascending indices below `total` (at most all), drawn for a seed and a purpose."""
    generator = np.random.default_rng([seed, *purpose.encode()])
    return torch.from_numpy(np.sort(generator.permutation(total)[:count]))


def outputs_of(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return f of many inputs, batch by batch, in the network's type: (n, C)."""
    dtype = next(network.parameters()).dtype
    with torch.no_grad():
        return torch.cat([network(part.to(dtype)) for part in inputs.split(BATCH_SIZE)])


# Posteriors -----------------------------------------------------------------------------------------------------------


NEEDED_CURVATURE = {
    "lowrank-kfac": "kfac",
    "lowrank-correction": "kfac",
    "lowrank-diagonal": "diagonal",
    "subset-diagonal": "diagonal",
}
"""The curvature over all parameters that a projector is built from, if any."""


def block_curvature(problem: Problem, kind: str) -> BlockPrecision:
    """Return the KFAC or the diagonal Laplace approximation over all parameters; one pass, the first time."""
    precision = problem.context.kfac() if kind == "kfac" else problem.context.diagonal()
    precision.log_determinant()  # forms the eigenvectors, so that their time is counted here
    return precision


def feasible_projection(name: str, problem: Problem, dim: int) -> Projection:
    """Return P of at most `dim` dimensions for one of `FEASIBLE`, from `block_curvature` where it needs that."""
    projector = PROJECTORS[name]
    if name == "subset-swag":
        projector = replace(projector, build=partial(_swag, problem))
    with expected_ranks():
        return steps.built_projection(projector, replace(problem.context, dim=dim))


def optimal_projection(exact: Exact, jacobians: Jacobians, dim: int) -> Projection:
    """Return P of Theorem 1 for these Jacobians: of the test inputs for the baseline, of X′ for lowrank-ggn."""
    with expected_ranks():
        return low_rank(jacobians, exact, dim)


@contextmanager
def expected_ranks() -> Iterator[None]:
    """Silence warnings about a rank below the largest s of the grid, which the results note."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="dim=.* is above the numerical rank")
        yield


def _swag(problem: Problem, context: ProjectorContext) -> Projection:
    """Build subset-swag with the recipe's snapshots and learning rate, and batches as in training."""
    inputs, targets = (torch.cat(parts) for parts in list(zip(*problem.loader, strict=True))[:2])
    loader = ShuffledBatches(inputs, targets, problem.recipe.training.batch_size, context.seed)
    scores = swag_variances(
        context.linearization,
        loader,
        context.stream.likelihood,
        problem.recipe.swag_snapshots,
        problem.recipe.swag_learning_rate,
    )
    return largest(context.linearization, scores, context.dim)


@dataclass
class ShuffledBatches:
    """Batches in a new order for every run through the data; the same seed gives the same orders."""

    inputs: Tensor
    targets: Tensor
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.inputs), generator=self._generator).split(self.batch_size):
            yield self.inputs[rows], self.targets[rows]


def reduced_posterior(problem: Problem, projection: Projection, exact: Exact | None = None) -> SubspacePosterior:
    """Return the exact posterior in the subspace: one pass over the training data, or none with the p × p GGN."""
    if isinstance(exact, DensePrecision):
        return steps.dense_posterior_and_product(exact, projection)[0]
    return steps.subspace_posterior(problem.context.stream, projection, problem.context.prior_precision)


def complemented_projection(problem: Problem, method: Complemented, dim: int) -> Projection:
    """Return P of one of `COMPLEMENTED`; what it needs of KFAC and the exact Λ is made once for each problem."""
    inputs, _ = _inputs_and_held_back(problem, method)
    context = replace(problem.context, dim=dim, subspace_jacobians=problem.jacobians(inputs))
    with expected_ranks():
        return steps.built_projection(PROJECTORS[method.projector], context)


def _inputs_and_held_back(problem: Problem, method: Complemented) -> tuple[Tensor, Tensor | None]:
    """Return X′, and the fifth of it that is held back where the weight of the complement is fitted."""
    inputs, held_back = problem.context.subspace_jacobians.inputs[:MOST_INPUTS], None
    if method.complement == "kfac-fitted":
        inputs, held_back = split(inputs)
    if method.inputs != "train":
        noisy = perturbed(inputs, PERTURBATION, problem.seed)
        inputs = noisy if method.inputs == "perturbed" else torch.cat([inputs, noisy])
    return inputs, held_back


def complemented_posteriors(
    problem: Problem, method: Complemented, projection: Projection, dims: Sequence[int], exact: Exact | None
) -> dict[int, ComplementedPosterior]:
    """Return for each s the posterior that is exact in s dimensions and KFAC outside.

    Cost: one pass over the training data besides the one for KFAC; none with the p × p GGN.
    """
    posterior = _complemented(problem, projection, exact)
    posteriors = {s: posterior.truncated(s) for s in capped(list(dims), posterior.dim)}
    _, held_back = _inputs_and_held_back(problem, method)
    if held_back is None:
        return posteriors
    assert exact is not None
    precise = problem.to(torch.float64).jacobians(held_back)
    covariances = torch.cat([exact.covariance(jacobian) for jacobian in precise])
    inputs, likelihood = problem.jacobians(held_back), problem.likelihood
    return {s: nearest_power(posterior, covariances, inputs, likelihood) for s, posterior in posteriors.items()}


def _complemented(problem: Problem, projection: Projection, exact: Exact | None) -> ComplementedPosterior:
    if isinstance(projection, Basis):
        projection = replace(projection, vectors={n: part.to(problem.dtype) for n, part in projection.vectors.items()})
    context = problem.context
    if isinstance(exact, DensePrecision):
        inside, product = steps.dense_posterior_and_product(exact, projection)
    else:
        inside, product = steps.subspace_posterior_and_product(context.stream, projection, context.prior_precision)
    return steps.complemented_posterior(inside, context.kfac(), product, context.stream.scale)


def exact_posterior(problem: Problem) -> Exact:
    """Return the full Laplace approximation, factorised."""
    exact = problem.context.exact()
    exact.log_determinant()  # forms the Cholesky factor, so that its time is counted here
    return exact
