r"""λ for classification without validation data: leave-one-out of the linearised network, refitted at every λ.

At θ̂ the residuals of the training data are nearly zero, so a leave-one-out formula there says nothing: its best λ is
infinite. But θ̂ is not the mode of the posterior under λ. Let the linearised network move to that mode inside
span{θ̂, P}, f(μ) = f + Rμ with R = JQ and Q an orthonormal basis of [θ̂, P], under the prior N(0, λ⁻¹I) of all of θ:

    μ_λ = argmin −Σ_i ln p(y_i | f_i + R_i μ) + λ/2 ‖μ + Qᵀθ̂‖² .

There the residuals are what this λ leaves, and taking input i out is exact to first order: with A = Σ RᵀHR + λI and
Σ_i = R_i A⁻¹ R_iᵀ,

    Σ_i′ = (I − Σ_i H_i)⁻¹ Σ_i,    f_i′ = f_i + R_i μ_λ − Σ_i′ ∇ ln p(y_i | f_i + R_i μ_λ) .

λ minimises −Σ_i ln p(y_i | N(f_i′, Σ_i′)). Predictions stay at θ̂. θ̂ must be a column of Q: along it the prior shrinks
the outputs, and without it λ comes out ten times too large.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sublaplace.curvature.directions import Roots
from sublaplace.data.batches import Batch, Ragged, parts_of
from sublaplace.jacobians.linearization import Linearization
from sublaplace.jacobians.wanted import Wanted
from sublaplace.model.likelihoods.base import Likelihood, target_weights
from sublaplace.model.linalg import cholesky, filled_up
from sublaplace.projection import Projection
from sublaplace.runtime.warning import warn

LOG_PRIORS = tuple(6 - k / 2 for k in range(19))
"""log₁₀ λ of the search, falling: each mode starts at the one before. A parabola refines the best one."""

OUTSIDE_FACTOR = 10**0.75
"""λ over its leave-one-out value where KFAC stands outside of the subspace."""

FAR = 10.0
"""How much larger λ may become, so that training data are not predicted worse than left-out ones, without a warning."""

DIMENSIONS = 30
"""Leading dimensions of the subspace in which the network is refitted; more give nearly the same λ."""

_MOST_ROWS, _FEWEST_INPUTS, _MOST_INPUTS = 3000, 150, 1000  # of the data that stand for all of them
_MOST_ROWS_OF_POSITIONS, _FEWEST_WITH_POSITIONS = 50_000, 32  # the same for outputs with positions
_COPIES = 5  # arrays of rows that are held at once
_MOST_STEPS = 30  # of Newton's method


def num_left_out(num_outputs: int) -> int:
    """Return how many inputs the search looks at: at most 1,000, and fewer where there are many outputs."""
    return min(_MOST_INPUTS, max(_FEWEST_INPUTS, _MOST_ROWS // num_outputs))


def num_with_positions(num_outputs: int, memory_budget: int) -> int | None:
    """Return how many inputs with positions, K outputs each, the search looks at; None if 32 do not fit into memory.

    The positions of an input tell more than one output does, so 50,000 rows, or 32 inputs, are enough.
    """
    count = min(num_left_out(num_outputs), max(_FEWEST_WITH_POSITIONS, _MOST_ROWS_OF_POSITIONS // num_outputs))
    fitting = memory_budget // (_COPIES * 8 * num_outputs * (DIMENSIONS + 1))
    return min(count, fitting) if fitting >= _FEWEST_WITH_POSITIONS else None


@dataclass(frozen=True)
class LinearisedData:
    """Training data as the linearised network sees them in span Q; everything float64."""

    likelihood: Likelihood
    outputs: Tensor  # f: (n, C)
    rows: Tensor  # R: (n, C, s)
    targets: Tensor  # with a row for each position, if the outputs have positions
    counts: Tensor  # how much each target counts: (n, 1) or (n, C)
    own: Tensor  # how much of it is taken out, at most 1: an input may stand for several others
    centre: Tensor  # Qᵀθ̂: (s,)

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        linearization: Linearization,
        projection: Projection,
        data: Batch | Ragged,
        num_data: int,
    ) -> "LinearisedData":
        """Take the rows of some data, which stand for all `num_data` that count. Cost: one prediction of them.

        Inputs with fewer positions than others get more of them, which do not count.
        """
        layout = linearization.layout
        theta = linearization.flat_parameters().double()
        inside = torch.cat(
            [projection.part(name).double() @ theta[part, None] for name, part in layout.slices.items()], dim=1
        ).sum(1)  # Pᵀθ̂
        # With PᵀP = LLᵀ, the columns of P L⁻ᵀ are orthonormal, also where a user's projector does not make them so.
        factor = cholesky(projection.gram(), "The Gram matrix of the projection")
        inside = torch.linalg.solve_triangular(factor, inside[:, None], upper=False)[:, 0]
        squared, eps = theta.square().sum(), torch.finfo(linearization.dtype).eps
        rest = (squared - inside.square().sum()).clamp_min(0).sqrt()
        outside = bool(rest.square() > 100 * eps * squared)  # otherwise θ̂ lies in the subspace, up to rounding
        vectors = layout.unflatten(theta[None].to(linearization.dtype))
        outputs, rows, targets, counts = [], [], [], []
        for part in parts_of(data):
            for jacobian in linearization.chunks(part.inputs, wanted=Wanted(products=projection.dim + 1)):
                reduced = projection.apply(jacobian).double().mT
                reduced = torch.linalg.solve_triangular(factor, reduced, upper=False).mT
                outputs.append(jacobian.outputs.double())
                if outside:
                    along = (jacobian.matmul(vectors).double() - reduced @ inside[:, None]) / rest
                    reduced = torch.cat([along, reduced], dim=2)
                rows.append(reduced)
                del jacobian  # or it would stand in memory beside the next one
            n, found = len(part.targets), part.targets.to(linearization.device)
            weights = None if part.weights is None else part.weights.to(linearization.device)
            each = target_weights(likelihood, found, weights)
            if each is None:
                each = torch.ones(n, 1, dtype=torch.float64, device=linearization.device)
            if isinstance(data, Ragged):  # where outputs are added, they must not count
                each = each.expand(n, outputs[-1].shape[1])
            counts.append(each)
            targets.append(likelihood.targets_by_position(found).unflatten(0, (n, -1)))
        centre = torch.cat([rest[None], inside]) if outside else inside
        every, labels = filled_up(counts), filled_up(targets).flatten(0, 1)
        share, own = num_data / len(every), every.clamp_max(1)
        return cls(likelihood, filled_up(outputs), filled_up(rows), labels, every * share, own, centre)

    def loss(self, mu: Tensor, prior_precision: float) -> float:
        """Return −ln p(D|μ) + λ/2 ‖μ + Qᵀθ̂‖²."""
        densities = self._densities(self.outputs + self.rows @ mu) * self._counts
        return float(prior_precision / 2 * (mu + self.centre).square().sum() - densities.sum())

    def _densities(self, outputs: Tensor) -> Tensor:
        """Return ln p(y|f) of every input, or of each of its positions: (n·L,)."""
        likelihood = self.likelihood
        return likelihood.of_one_position.log_density(likelihood.by_position(outputs), self.targets)

    @property
    def _counts(self) -> Tensor:
        return self.likelihood.counts_by_position(self.counts, self.outputs)

    def state(self, mu: Tensor, prior_precision: float) -> "_State":
        """Return the gradients and the precision at μ. Cost: n·C·s²."""
        moved = self.outputs + self.rows @ mu
        with torch.enable_grad():
            leaf = moved.detach().requires_grad_()
            (gradients,) = torch.autograd.grad(self._densities(leaf).sum(), leaf)
        seen = self._curvature_rows(moved, self.counts).flatten(0, 1)
        A = seen.T @ seen
        A.diagonal().add_(prior_precision)
        return _State(mu, moved, gradients, A)

    def _curvature_rows(self, outputs: Tensor, counts: Tensor) -> Tensor:
        """Return B with BᵀB = RᵀHR for each input, H times the counts of its targets: (n, K, s)."""
        return Roots(self.likelihood, counts).times(outputs, self.rows) * self.likelihood.single_scale**0.5

    def refitted(self, prior_precision: float, start: Tensor | None = None) -> "_State":
        """Return the mode under λ, by Newton's method with halved steps."""
        mu = torch.zeros_like(self.centre) if start is None else start
        current, value = self.state(mu, prior_precision), self.loss(mu, prior_precision)
        for _ in range(_MOST_STEPS):
            pulled = torch.einsum("ncs,nc->s", self.rows, current.gradients * self.counts)
            direction = torch.linalg.solve(current.precision, prior_precision * (mu + self.centre) - pulled)
            step = 1.0
            while step > 1e-3 and self.loss(mu - step * direction, prior_precision) > value:
                step /= 2
            lower = self.loss(mu - step * direction, prior_precision)
            if not value - lower >= 1e-7 * (1 + abs(value)):
                break
            mu, value = mu - step * direction, lower
            current = self.state(mu, prior_precision)
        return current

    def left_out(self, state: "_State") -> float:
        """Return the mean NLL of every input as if it had not been among the data. Cost: n·C·s², and n·min(C, s)³.

        Without input i, A becomes A − BᵀB with its curvature BᵀB. If there are fewer outputs than dimensions,
        Woodbury's identity gives the inverse, A⁻¹ + A⁻¹Bᵀ(I − BA⁻¹Bᵀ)⁻¹BA⁻¹.
        """
        B, pull = self._curvature_rows(state.outputs, self.own), state.gradients * self.own
        if self.rows.shape[1] > self.rows.shape[2]:
            solved = torch.linalg.solve(state.precision - B.transpose(1, 2) @ B, self.rows.transpose(1, 2))
        else:
            inverse = torch.linalg.inv(state.precision)
            measured = B @ inverse
            identity = torch.eye(B.shape[1], dtype=torch.float64, device=B.device)
            removed = torch.linalg.solve(identity - measured @ B.transpose(1, 2), measured @ self.rows.transpose(1, 2))
            solved = inverse @ self.rows.transpose(1, 2) + measured.transpose(1, 2) @ removed
        shifted = state.outputs - (self.rows @ (solved @ pull[..., None]))[..., 0]
        variance = (self.rows * solved.transpose(1, 2)).sum(2).clamp_min(0)
        return self._loss_at(shifted, variance)

    def kept(self, variance: Tensor) -> float:
        """Return the mean NLL of the inputs with the network as it is and these variances (n, C)."""
        return self._loss_at(self.outputs, variance)

    def _loss_at(self, outputs: Tensor, variance: Tensor) -> float:
        likelihood, weights = self.likelihood, self._counts
        spread = variance if likelihood.needs_variances_only else variance.diag_embed()
        rows, spread = likelihood.by_position(outputs), likelihood.by_position(spread)
        densities = likelihood.of_one_position.log_predictive(rows, spread, self.targets)
        return -float((densities * weights).sum() / weights.sum())


@dataclass(frozen=True)
class _State:
    """The linearised network at some μ."""

    coordinates: Tensor  # μ: (s,)
    outputs: Tensor  # f + Rμ: (n, C)
    gradients: Tensor  # ∇ ln p(y|f): (n, C)
    precision: Tensor  # A: (s, s)


def prior_by_leave_one_out(data: LinearisedData, variances: Tensor | None = None, at_end: bool = True) -> float:
    """Return the λ of the smallest leave-one-out NLL, refined by a parabola. Cost: about 100 Newton steps.

    With KFAC outside of the subspace, λ is `OUTSIDE_FACTOR` times as large, and so large that the posterior predicts
    these training inputs no worse than left-out ones. In large networks the variance outside exceeds the subspace's by
    far, and a small λ would drown every output in it. Where λ grows by more than a factor of ten (`FAR`), leave-one-out
    says little about it, and a warning asks for validation data.

    Args:
        data: the training data in span Q.
        variances: of the posterior with what stands outside, at every λ of `LOG_PRIORS`, (λ, n, C); None: nothing is
            outside.
        at_end: warn if λ lies at an end of the search.
    """
    losses: list[float] = []
    start = None
    for log_prior in LOG_PRIORS:
        state = data.refitted(10.0**log_prior, start)
        start = state.coordinates
        losses.append(data.left_out(state))
    prior, ended = _least(losses)
    if variances is not None:
        prior *= OUTSIDE_FACTOR
        kept = [data.kept(variance) for variance in variances]
        least = _least_below(kept, min(losses))
        if least > FAR * prior and at_end:
            ended = False
            warn(
                "The training data say little about λ for this network: it was chosen so that they are predicted no "
                "worse than left-out ones. Validation data would tell more: fit(train_loader, val_loader)."
            )
        prior = max(prior, least)
    if ended and at_end:
        warn(
            f"The best λ by leave-one-out lies at an end of its search, {prior:.3g}; validation data would tell more: "
            "fit(train_loader, val_loader)."
        )
    return prior


def _least_below(losses: list[float], limit: float) -> float:
    """Return the smallest λ of the grid above which no loss exceeds the limit; at most the largest."""
    count = next((k for k, loss in enumerate(losses) if not loss <= limit), len(losses))  # λ falls along the grid
    return float(10.0 ** LOG_PRIORS[max(count - 1, 0)])


def _least(losses: list[float]) -> tuple[float, bool]:
    """Return the λ of the smallest loss on the grid `LOG_PRIORS`, refined by a parabola, and whether it is an end."""
    values = torch.tensor(losses, dtype=torch.float64, device="cpu").nan_to_num(nan=torch.inf)
    best = int(values.argmin())
    if best in (0, len(losses) - 1):
        return float(10.0 ** LOG_PRIORS[best]), True
    left, middle, right = values[best - 1 : best + 2].tolist()
    shift = 0.5 * (left - right) / max(left - 2 * middle + right, torch.finfo(torch.float64).tiny)
    spacing = LOG_PRIORS[1] - LOG_PRIORS[0]
    return float(10.0 ** (LOG_PRIORS[best] + spacing * min(max(shift, -1.0), 1.0))), False
