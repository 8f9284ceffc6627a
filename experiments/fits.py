"""The posteriors of one trained network with their costs; shared parts are computed once."""

from dataclasses import dataclass, field, replace

import torch

from experiments.cost import Cost, measured
from experiments.methods import (
    NEEDED_CURVATURE,
    Exact,
    Problem,
    block_curvature,
    exact_posterior,
    feasible_projection,
    reduced_posterior,
)
from sublaplace import PROJECTORS, Basis, BlockPrecision, DensePrecision, SubspacePosterior
from sublaplace.fitting.survey import survey_of
from sublaplace.fitting.tuning import prior_by_evidence
from sublaplace.projection import Projection


@dataclass
class Fits:
    """The posteriors of one problem.

    The cost of P includes the curvature that P is built from, even if it was computed before.
    """

    problem: Problem
    dense: DensePrecision | None = None  # if it may replace passes over the data
    _curvatures: dict[tuple[str, torch.dtype], tuple[BlockPrecision, Cost]] = field(default_factory=dict)
    _leading: dict[str, tuple[SubspacePosterior, Cost]] = field(default_factory=dict)

    def curvature(self, kind: str, problem: Problem | None = None) -> tuple[BlockPrecision, Cost]:
        """Return the KFAC or diagonal approximation over all parameters, and its cost.

        Args:
            kind: "kfac" or "diagonal".
            problem: the same problem in another type; None: as it is.
        """
        problem = problem or self.problem
        key = kind, problem.dtype
        if key not in self._curvatures:
            self._curvatures[key] = measured(lambda: block_curvature(problem, kind))
        return self._curvatures[key]

    def exact(self, problem: Problem) -> tuple[Exact, Cost]:
        """Return the full posterior of the same problem in float64, and its cost."""
        exact, cost = measured(lambda: exact_posterior(problem))
        # The first seed measures what passes over the data cost; for the others, the p × p GGN replaces them.
        self.dense = exact if isinstance(exact, DensePrecision) and problem.seed else None
        return exact, cost

    def projection(self, name: str, dim: int) -> tuple[Projection, Cost]:
        """Return P of a feasible projector, and its cost."""
        needed = NEEDED_CURVATURE.get(name)
        before = self.curvature(needed)[1] if needed else None
        projection, cost = measured(lambda: feasible_projection(name, self.problem, dim))
        return projection, before.then(cost) if before else cost

    def posterior(self, name: str, dim: int) -> tuple[SubspacePosterior, Cost, Cost | None]:
        """Return the posterior of a feasible projector, the cost of P, and the cost of the posterior given P.

        The last is None where the posterior took no pass over the data.
        """
        projection, cost = self.projection(name, dim)
        posterior, fit = measured(lambda: reduced_posterior(self.problem, projection, self.dense))
        needed = max(self.problem.recipe.corrupted_dims, default=0)
        if 0 < needed <= dim:
            self._leading[name] = posterior if PROJECTORS[name].own_dim else _detached(posterior, needed), cost
        return posterior, cost, fit if self.dense is None else None

    def leading(self, name: str) -> tuple[SubspacePosterior, Cost]:
        """Return the posterior for corrupted test sets, a part of an earlier one if there was any, and P's cost."""
        if name not in self._leading:
            self.posterior(name, max(self.problem.recipe.corrupted_dims))
        return self._leading[name]

    def best_prior(self) -> float:
        """Return the λ that maximises the evidence of the KFAC approximation, as the paper chose its λ."""
        self.curvature("kfac")
        context = self.problem.context
        survey, _ = survey_of(self.problem.loader, context.linearization, self.problem.likelihood)
        return prior_by_evidence(context.curvatures, survey)


def _detached(posterior: SubspacePosterior, dim: int) -> SubspacePosterior:
    """Return the posterior in the leading dimensions, without keeping the memory of the others."""
    leading = posterior.truncated(min(dim, posterior.dim))
    if not isinstance(leading.projection, Basis):
        return leading
    vectors = {name: part.clone() for name, part in leading.projection.vectors.items()}
    return replace(leading, projection=replace(leading.projection, vectors=vectors))
