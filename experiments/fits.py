"""The posteriors of one trained network, with what they cost; what several of them need is made once."""

from dataclasses import dataclass, field, replace

import torch

from experiments.cost import Cost, measured
from experiments.methods import NEEDED_CURVATURE, Problem, block_curvature, feasible_projection, reduced_posterior
from sublaplace import Basis, BlockPrecision, SubspaceLaplace, SubspacePosterior
from sublaplace.projection import Projection


@dataclass(frozen=True)
class Fits:
    """Costs of P include the curvature that it is built from, also where that was at hand."""

    problem: Problem
    _curvature_costs: dict[tuple[str, torch.dtype], Cost] = field(default_factory=dict)
    _leading: dict[str, tuple[SubspacePosterior, Cost]] = field(default_factory=dict)

    def curvature(self, kind: str, problem: Problem | None = None) -> tuple[BlockPrecision, Cost]:
        """The KFAC or diagonal approximation over all parameters; of the same problem in another type, if given."""
        problem = problem or self.problem
        key = kind, problem.dtype
        if key not in self._curvature_costs:
            _, self._curvature_costs[key] = measured(lambda: block_curvature(problem, kind))
        return block_curvature(problem, kind), self._curvature_costs[key]

    def projection(self, name: str, dim: int) -> tuple[Projection, Cost]:
        """P of a feasible projector."""
        needed = NEEDED_CURVATURE.get(name)
        before = self.curvature(needed)[1] if needed else None
        projection, cost = measured(lambda: feasible_projection(name, self.problem, dim))
        return projection, before.then(cost) if before else cost

    def posterior(self, name: str, dim: int) -> tuple[SubspacePosterior, Cost, Cost]:
        """The posterior of a feasible projector, and the costs of P and of the posterior in its span."""
        projection, cost = self.projection(name, dim)
        posterior, fit = measured(lambda: reduced_posterior(self.problem, projection))
        needed = max(self.problem.recipe.corrupted_dims, default=0)
        if 0 < needed <= dim:
            self._leading[name] = posterior if name == "last-layer" else _detached(posterior, needed), cost
        return posterior, cost, fit

    def leading(self, name: str) -> tuple[SubspacePosterior, Cost]:
        """The posterior that corrupted test sets need, a part of an earlier one where there was any, and P's cost."""
        if name not in self._leading:
            self.posterior(name, max(self.problem.recipe.corrupted_dims))
        return self._leading[name]

    def best_prior(self) -> float:
        """λ that maximises the evidence of the KFAC approximation, as the paper chose its λ."""
        la = SubspaceLaplace(
            self.problem.network,
            self.problem.dataset.likelihood,
            projector="subset-magnitude",
            dim=1,
            prior_precision="marglik",
            noise_std=self.problem.noise_std,
            direction_tolerance=self.problem.recipe.direction_tolerance,
        )
        prior = la.fit(self.problem.loader).prior_precision
        assert prior is not None
        return prior


def _detached(posterior: SubspacePosterior, dim: int) -> SubspacePosterior:
    """The posterior in the leading dimensions, without holding on to the memory of the others."""
    leading = posterior.truncated(min(dim, posterior.dim))
    if not isinstance(leading.projection, Basis):
        return leading
    vectors = {name: part.clone() for name, part in leading.projection.vectors.items()}
    return replace(leading, projection=replace(leading.projection, vectors=vectors))
