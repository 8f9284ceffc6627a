"""The posteriors that are compared: how each is made."""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from experiments.datasets import Dataset
from experiments.recipes import Recipe
from experiments.sweeps import capped
from sublaplace import (
    PROJECTORS,
    Basis,
    BlockPrecision,
    Categorical,
    ComplementedPosterior,
    DensePrecision,
    DualPrecision,
    Gaussian,
    Jacobians,
    Linearization,
    ProjectorContext,
    Subset,
    SubspacePosterior,
    low_rank,
)
from sublaplace.curvature.reduced import reduced_ggn, reduced_ggn_and_product
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.data.subspace_inputs import perturbed, split
from sublaplace.model.parameters import Vectors
from sublaplace.posteriors.weighting import nearest
from sublaplace.projection import Projection
from sublaplace.projectors.subset import largest
from sublaplace.projectors.swag import swag_variances

NEEDS_EXACT = ("lowrank-ggn", "lowrank-correction")
FEASIBLE = tuple(name for name in PROJECTORS if name not in NEEDS_EXACT)
"""The projectors that do without the exact GGN."""


@dataclass(frozen=True)
class Complemented:
    """A subspace with KFAC outside: the projector, the inputs that it is built from, and what stands outside."""

    projector: str
    inputs: str = "train"  # or "perturbed", or "augmented": both
    complement: str = "kfac"  # or "kfac-fitted": with its weight fitted to the full posterior on held-back inputs

    @property
    def needs_exact(self) -> bool:
        return self.projector in NEEDS_EXACT or self.complement == "kfac-fitted"


COMPLEMENTED = (
    Complemented("lowrank-kfac"),
    Complemented("lowrank-isotropic", complement="kfac-fitted"),
    Complemented("lowrank-ggn", "perturbed"),
    Complemented("lowrank-correction", complement="kfac-fitted"),
    Complemented("lowrank-correction", "augmented", "kfac-fitted"),
)
"""The first is the paper's subspace, the others are candidates for the best one; none needs labels of new data, or the
inputs that it is judged on."""

MOST_INPUTS = 1000  # of those that such a subspace is built from, before noisy ones are added
PERTURBATION = 0.1  # of the standard deviation of each feature

BATCH_SIZE = 1000  # of passes over the data, whose results do not depend on it

BUDGET, LARGE_BUDGET = 2**30, 2**32  # bytes for temporary chunks; with less, large networks run over X′ more often

Exact = DensePrecision | DualPrecision


@dataclass(frozen=True)
class Problem:
    """A trained network and its data in one floating-point type, with the draws of a seed."""

    recipe: Recipe
    dataset: Dataset
    network: nn.Module
    seed: int

    def to(self, dtype: torch.dtype) -> "Problem":
        """The same in another type; itself if it is of that type."""
        if self.dtype == dtype:
            return self
        return replace(self, network=copy.deepcopy(self.network).to(dtype))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.network.parameters()).dtype

    @cached_property
    def noise_std(self) -> float | None:
        """σ: the standard deviation of the training residuals, pooled over the outputs; None for classification."""
        if self.dataset.likelihood == "classification":
            return None
        outputs = outputs_of(self.network, self.dataset.train_inputs)
        return float((self.dataset.train_targets.double() - outputs.double()).std(correction=0))

    @cached_property
    def linearization(self) -> Linearization:
        budget = LARGE_BUDGET if self.recipe.large else BUDGET
        return Linearization(self.network, memory_budget=budget, num_vectors=self.recipe.largest_dim)

    @cached_property
    def context(self) -> ProjectorContext:
        """What projectors are built from, with X′ drawn from the training inputs."""
        likelihood = Categorical() if self.noise_std is None else Gaussian(self.noise_std)
        total = len(self.dataset.train_inputs)
        chosen = drawn(total, self.recipe.num_inputs, self.seed, "subspace inputs")
        return ProjectorContext(
            stream=CurvatureStream(self.linearization, self.loader, likelihood, self.recipe.direction_tolerance),
            subspace_jacobians=self.jacobians(self.dataset.train_inputs[chosen]),
            num_data=total,
            num_outputs=outputs_of(self.network, self.dataset.train_inputs[:1]).shape[1],
            dim=self.recipe.largest_dim,
            prior_precision=self.recipe.prior_precision,
            seed=self.seed,
        )

    @cached_property
    def loader(self) -> list[tuple[Tensor, ...]]:
        """The training data in batches; where only some are used, each has the weight of those that it stands for."""
        inputs, targets = self.dataset.train_inputs, self.dataset.train_targets
        parts = [inputs.to(self.dtype), targets if self.noise_std is None else targets.to(self.dtype)]
        if self.recipe.num_curvature_inputs is not None:
            chosen = drawn(len(inputs), self.recipe.num_curvature_inputs, self.seed, "curvature inputs")
            weights = torch.full((len(chosen),), len(inputs) / len(chosen), dtype=self.dtype)
            parts = [part[chosen] for part in parts] + [weights]
        return list(zip(*(part.split(BATCH_SIZE) for part in parts), strict=True))

    def jacobians(self, inputs: Tensor) -> Jacobians:
        """J of any inputs."""
        return Jacobians(self.linearization, inputs.to(self.dtype))


def drawn(total: int, count: int, seed: int, purpose: str) -> Tensor:
    """The indices of `count` things of `total` (at most all), drawn for a seed and a purpose, ascending."""
    generator = np.random.default_rng([seed, *purpose.encode()])
    return torch.from_numpy(np.sort(generator.permutation(total)[:count]))


def outputs_of(network: nn.Module, inputs: Tensor) -> Tensor:
    """f of many inputs, batch by batch, in the network's type: (n, C)."""
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
    """The KFAC or the diagonal Laplace approximation over all parameters; one pass, the first time."""
    precision = problem.context.kfac() if kind == "kfac" else problem.context.diagonal()
    precision.log_determinant()  # forms the eigenvectors, so that their time is counted here
    return precision


def feasible_projection(name: str, problem: Problem, dim: int) -> Projection:
    """P of at most `dim` dimensions for one of `FEASIBLE`, from `block_curvature` where it needs that."""
    context = replace(problem.context, dim=dim)
    with expected_ranks():
        return _swag(context, problem) if name == "subset-swag" else PROJECTORS[name](context)


def optimal_projection(exact: Exact, jacobians: Jacobians, dim: int) -> Projection:
    """P of Theorem 1 for these Jacobians: those of the test inputs for the baseline, of X′ for lowrank-ggn."""
    with expected_ranks():
        return low_rank(jacobians, exact, dim)


@contextmanager
def expected_ranks() -> Iterator[None]:
    # A rank below the largest s of the grid is no surprise here; the results note it.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="dim=.* is above the numerical rank")
        yield


def _swag(context: ProjectorContext, problem: Problem) -> Projection:
    """subset-swag with the recipe's snapshots and learning rate, and batches as in training."""
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
    """Batches in an order of its own for every run through the data, the same ones for the same seed."""

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
    """The posterior in the subspace, with the exact GGN: one pass over the training data, or that GGN itself."""
    return _reduced(problem, projection, exact, with_product=False)[0]


def _reduced(
    problem: Problem, projection: Projection, exact: Exact | None, with_product: bool
) -> tuple[SubspacePosterior, Vectors]:
    """`reduced_posterior`, and Y = GGN P without the likelihood's scale where it is asked for."""
    stream = problem.context.stream
    product: Vectors = {}
    if isinstance(exact, DensePrecision):
        curvatures, product = _from_dense_ggn(exact, projection)
    elif with_product:
        curvatures, product = reduced_ggn_and_product(stream, projection)
    else:
        curvatures = reduced_ggn(stream, projection)
    scales, prior = stream.likelihood.curvature_scales, problem.context.prior_precision
    return SubspacePosterior(projection, curvatures, projection.gram(), scales, prior), product


def _from_dense_ggn(exact: DensePrecision, projection: Projection) -> tuple[Tensor, Vectors]:
    """What `reduced_ggn_and_product` gives, from the p × p GGN, at s·p² instead of a pass over the data."""
    if isinstance(projection, Subset):
        product = exact.ggn[projection.indices] / exact.scale
        return product[:, projection.indices][None], exact.layout.unflatten(product.to(projection.dtype))
    P = projection.matrix()
    product = P.T.double() @ exact.ggn / exact.scale
    return (product @ P.double())[None], exact.layout.unflatten(product.to(P.dtype))


def complemented_projection(problem: Problem, method: Complemented, dim: int, exact: Exact | None) -> Projection:
    """P of one of `COMPLEMENTED`, from `block_curvature` and the exact Λ where it needs them."""
    inputs, _ = _inputs_and_held_back(problem, method)
    context = replace(problem.context, dim=dim, subspace_jacobians=problem.jacobians(inputs))
    if exact is not None:
        context = replace(context, known_exact={context.prior_precision: exact})
    with expected_ranks():
        return PROJECTORS[method.projector](context)


def _inputs_and_held_back(problem: Problem, method: Complemented) -> tuple[Tensor, Tensor | None]:
    """X′, and the fifth of the training inputs that is held back where the weight of the complement is fitted."""
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
    """For each s the posterior that is exact in s dimensions and KFAC outside.

    One pass over the training data beside that of KFAC; none with the p × p GGN.
    """
    posterior = _complemented(problem, projection, exact)
    posteriors = {s: posterior.truncated(s) for s in capped(list(dims), posterior.dim)}
    _, held_back = _inputs_and_held_back(problem, method)
    if held_back is None:
        return posteriors
    assert exact is not None
    precise = problem.to(torch.float64).jacobians(held_back)
    covariances = torch.cat([exact.covariance(jacobian) for jacobian in precise])
    likelihood, inputs = problem.context.stream.likelihood, problem.jacobians(held_back)
    once = torch.ones(len(held_back), 1)
    fitted = {s: nearest(posterior, covariances, inputs, likelihood, once) for s, posterior in posteriors.items()}
    return {s: posterior for s, posterior in fitted.items() if isinstance(posterior, ComplementedPosterior)}


def _complemented(problem: Problem, projection: Projection, exact: Exact | None) -> ComplementedPosterior:
    if isinstance(projection, Basis):
        projection = replace(projection, vectors={n: part.to(problem.dtype) for n, part in projection.vectors.items()})
    inside, product = _reduced(problem, projection, exact, with_product=True)
    scaled = {name: part * problem.context.stream.scale for name, part in product.items()}
    return ComplementedPosterior.of(inside, problem.context.kfac(), scaled)


def exact_posterior(problem: Problem) -> Exact:
    """The full Laplace approximation, factorised."""
    exact = problem.context.exact()
    exact.log_determinant()  # forms the Cholesky factor, so that its time is counted here
    return exact
