r"""λ, and σ of regression, chosen on validation data in one pass over them.

The posterior's covariance at any λ and σ is V(τ)·c²/scale with τ = λc²/scale, c the factor by which σ changes (see
`sweep.py`). One pass gives V on a grid of τ for every validation input. The predictive density of all of them is then
known at every λ and σ, and its maximum is found without another pass.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp, log, log10
from typing import Any

import torch
from torch import Tensor

from sublaplace.data.batches import batches, num_inputs, select
from sublaplace.fitting.fitted import Fitted
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.jacobians.linearization import Linearization
from sublaplace.jacobians.wanted import Wanted
from sublaplace.model.interpolation import log_interpolation
from sublaplace.model.likelihoods.at_positions import at_positions
from sublaplace.model.likelihoods.base import Likelihood, target_weights
from sublaplace.posteriors.evidence import golden_section
from sublaplace.posteriors.sweep import Sweep, prior_sweep
from sublaplace.runtime.progress import shown
from sublaplace.runtime.stopwatch import FACTORISATIONS, Stopwatch
from sublaplace.runtime.warning import warn

FEWEST_INPUTS = 10
"""Validation inputs below which λ and σ stay as they are."""

DECADES = 5
"""How far from its value before tuning τ is searched, in both directions."""

_PER_DECADE = 2  # points of the grid, between which V is interpolated
POINTS = 2 * DECADES * _PER_DECADE + 1
"""Of the grid, which has λ as it was in its middle."""

_MOST_NOISE = 10**3.5  # the largest factor by which σ may grow; below its training residuals it must not fall

NOISE_PULL, CLASS_PULL = 3.0, 0.3
"""Nats per squared decade that λ (and σ) are pulled towards their values before tuning, with and without noise."""


@dataclass(frozen=True)
class Chosen:
    """What validation data ask for."""

    prior_precision: float  # λ
    noise_factor: float  # c
    num_inputs: int


@dataclass(frozen=True)
class ValidationData:
    """What one pass over validation data gives."""

    likelihood: Likelihood
    unit: float  # the scale that V is in units of
    taus: Tensor  # (L,)
    outputs: Tensor  # (n, C)
    targets: Tensor
    counts: Tensor  # (n,): how much each input counts
    covariances: Tensor  # ln V of variances, (L, n, C), or V of matrices, (L, n, C, C)

    @property
    def total(self) -> float:
        """How much all inputs count."""
        return float(self.counts.sum())

    @property
    def num_inputs(self) -> int:
        """How many inputs count."""
        return int((self.counts > 0).sum())

    def covariance(self, log_tau: float) -> Tensor:
        """Return V at any τ of the range: (n, C), or (n, C, C).

        The interpolation is a polynomial in ln τ, of ln V for variances and of √τ V for matrices. It is right to 0.4
        percent; matrices in the outermost decades are right to four percent.
        """
        near, factors = log_interpolation(self.taus, log_tau)
        around = self.covariances[near]
        factors = factors.to(around.device)
        if around.ndim == 3:
            return torch.tensordot(factors, around, 1).exp()
        roots = (self.taus[near].sqrt() / exp(log_tau / 2)).to(around.device)  # √τ over that of the result
        return torch.tensordot(factors * roots, around, 1)

    def loss(self, log_tau: float) -> float:
        """Return the mean negative log predictive density at the given σ."""
        covariance = self.covariance(log_tau) / self.unit
        densities = self.likelihood.log_predictive(self.outputs, covariance, self.targets)
        return -float((densities * self.counts).sum()) / self.total

    def loss_and_factor(self, log_tau: float, away: float) -> tuple[float, float]:
        """Return the penalised loss at the best factor c of σ, and c: N(f, c²(V/scale + σ²)).

        away: decades of τ from its value before tuning; λ is then away by that less 2 log₁₀ c.
        """
        covariance = self.covariance(log_tau) / self.unit
        C, total = self.outputs.shape[1], self.total
        plain = self.likelihood.log_predictive(self.outputs, covariance, self.targets)
        # ln N(r; 0, c²S) = ln N(r; 0, S) + ½ q (1 − c⁻²) − C ln c with q = rᵀS⁻¹r.
        q = self._distances(covariance)

        def gain(log_c: float) -> float:
            each = plain + 0.5 * q * (1 - exp(-2 * log_c)) - C * log_c
            return (float((each * self.counts).sum()) - _pulled(log_c, away)) / total

        log_c = golden_section(gain, 0.0, log(_MOST_NOISE), width=1e-6)
        return -gain(log_c), exp(log_c)

    def _distances(self, covariance: Tensor) -> Tensor:
        """Return rᵀ(V/scale + σ²)⁻¹r of every input: (n,)."""
        noise = torch.tensor(self.likelihood.noise_variances, dtype=torch.float64, device=self.outputs.device)
        noise = noise.expand(self.outputs.shape[1])
        residuals = self.targets.double() - self.outputs.double()
        if covariance.ndim == 2:
            return (residuals.square() / (covariance + noise)).sum(1)
        return (residuals * torch.linalg.solve(covariance + noise.diag(), residuals)).sum(1)


@dataclass(frozen=True)
class PooledValidation:
    """What one pass over validation data with positions gives: sums over all positions, by point τ of the grid.

    With one σ, and outputs that count on their own, nothing else is needed at any λ and σ.
    """

    likelihood: Likelihood
    unit: float  # the scale that V is in units of
    taus: Tensor  # (L,)
    densities: Tensor  # Σ ln p(y|x) at the given σ: (L,)
    distances: Tensor  # Σ (y − f)² / (V/scale + σ²), for regression: (L,)
    total: float  # how many positions count
    num_inputs: int  # how many inputs have such positions

    def loss(self, log_tau: float) -> float:
        """Return the mean negative log predictive density at the given σ."""
        return -self._at(self.densities, log_tau) / self.total

    def loss_and_factor(self, log_tau: float, away: float) -> tuple[float, float]:
        """Return the penalised loss at the best factor c of σ, and c; see `ValidationData.loss_and_factor`."""
        plain, q = self._at(self.densities, log_tau), self._at(self.distances, log_tau)

        def gain(log_c: float) -> float:
            return (plain + 0.5 * q * (1 - exp(-2 * log_c)) - self.total * log_c - _pulled(log_c, away)) / self.total

        log_c = golden_section(gain, 0.0, log(_MOST_NOISE), width=1e-6)
        return -gain(log_c), exp(log_c)

    def _at(self, sums: Tensor, log_tau: float) -> float:
        near, factors = log_interpolation(self.taus, log_tau)
        return float(sums[near] @ factors.to(sums.device))


def _pulled(log_c: float, away: float) -> float:
    """Return the penalty, in nats, for a factor c of σ and a τ that is `away` decades from its value before."""
    decades = log_c / log(10)
    return NOISE_PULL * (decades**2 + (away - 2 * decades) ** 2)


def _grid(fitted: Fitted) -> Tensor:
    """Return the points τ at which V is taken: (L,)."""
    start = log10(fitted.posterior.prior_precision / fitted.survey.likelihood.single_scale)
    return torch.logspace(start - DECADES, start + DECADES, POINTS, dtype=torch.float64, device="cpu")


def pooled_validation(
    fitted: Fitted, loader: Iterable[Any], stopwatch: Stopwatch, progress: bool = False
) -> PooledValidation:
    """Run one pass over validation data with positions. Cost: one prediction of them, and the densities at 21 points.

    Memory: 21 variances for each output of an input.
    """
    likelihood = fitted.survey.likelihood
    single, unit, taus = likelihood.of_one_position, likelihood.single_scale, _grid(fitted)
    with stopwatch.counting(FACTORISATIONS):
        sweep = prior_sweep(fitted.posterior, taus, fitted.drawn_with)
    total, used = 0.0, 0
    sums = torch.zeros(2, len(taus), dtype=torch.float64, device="cpu")
    for jacobian, targets, counts in _swept(fitted, loader, sweep, len(taus), False, progress):
        rows, labels = likelihood.by_position(jacobian.outputs), likelihood.targets_by_position(targets)
        each = likelihood.counts_by_position(counts, jacobian.outputs)
        total += float(each.sum())
        used += int((counts.amax(1) > 0).sum())
        for k, variances in enumerate(sweep(jacobian, whole=False) / unit):
            spread = likelihood.by_position(variances)
            sums[0, k] += (single.log_predictive(rows, spread, labels) * each).sum().cpu()
            if likelihood.has_noise:
                squares = (labels.double() - rows.double()).square() / (spread + likelihood.noise_variances[0])
                sums[1, k] += (squares[:, 0] * each).sum().cpu()
        del jacobian  # or it would stand in memory beside the next one
    if not total:
        raise ValueError("The validation loader is empty, or nothing in it counts.")
    return PooledValidation(likelihood, unit, taus, sums[0], sums[1], total, used)


def _swept(
    fitted: Fitted, loader: Iterable[Any], sweep: Sweep, num_points: int, whole: bool, progress: bool
) -> Iterator[tuple[Jacobian, Tensor, Tensor]]:
    """Yield the Jacobians of validation data, with targets and how much each of them counts, (n, 1) or (n, K)."""
    likelihood, linearization = fitted.survey.likelihood, fitted.linearization
    with linearization.borrowed():
        for inputs, targets, counts in _counted_batches(likelihood, loader, progress):
            first = 0
            numbers = (sweep.numbers_per_row + num_points) * fitted.survey.num_outputs
            for jacobian in _few_at_once(linearization, inputs, numbers, sweep.wanted(whole)):
                part = slice(first, first + jacobian.num_inputs)
                first = part.stop
                found = targets[part].to(linearization.device)
                likelihood.check_targets(linearization.arranged(jacobian.outputs), found)
                yield jacobian, found, counts[part].to(linearization.device)
                del jacobian  # or it would stand in memory beside the next one


def validation_data(
    fitted: Fitted, loader: Iterable[Any], stopwatch: Stopwatch, progress: bool = False
) -> ValidationData:
    """Run one pass over the validation data. Cost: one prediction of them, and little more."""
    likelihood = fitted.survey.likelihood
    unit, taus = likelihood.single_scale, _grid(fitted)
    whole = fitted.survey.num_outputs > 1 and not likelihood.needs_variances_only
    with stopwatch.counting(FACTORISATIONS):
        sweep = prior_sweep(fitted.posterior, taus, fitted.drawn_with)
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for jacobian, found, counts in _swept(fitted, loader, sweep, 0, whole, progress):
        covariances = sweep(jacobian, whole)
        parts.append((jacobian.outputs, found, counts.amax(1), covariances))
        del jacobian  # or it would stand in memory beside the next one
    if not parts or not any(float(part[2].sum()) for part in parts):
        raise ValueError("The validation loader is empty, or nothing in it counts.")
    outputs, targets, counts = (torch.cat([part[k] for part in parts]) for k in range(3))
    covariances = torch.cat([part[3] for part in parts], dim=1)
    if not whole:  # what every interpolation needs, and so once
        covariances.clamp_min_(torch.finfo(torch.float64).tiny).log_()
    return ValidationData(likelihood, unit, taus, outputs, targets, counts, covariances)


def _few_at_once(
    linearization: Linearization, inputs: Any, numbers_per_input: int, wanted: Wanted
) -> Iterator[Jacobian]:
    """Yield Jacobians of so few inputs that what a sweep keeps of them fits into a quarter of the memory budget."""
    step = max(1, linearization.memory_budget // 4 // (8 * max(1, numbers_per_input)))
    for start in range(0, num_inputs(inputs), step):
        part = linearization.to_device(select(inputs, slice(start, start + step)))
        yield from linearization.chunks(part, wanted=wanted)


def check_first_batch(loader: Iterable[Any], linearization: Linearization, likelihood: Likelihood) -> None:
    """Raise ValueError if the first of the validation data do not fit the model or the likelihood."""
    first = next(batches(loader), None)
    if first is None:
        raise ValueError("The validation loader is empty, or nothing in it counts.")
    outputs = linearization.outputs(first.inputs)
    likelihood = at_positions(likelihood, linearization.output_layout)
    likelihood.check_targets(linearization.arranged(outputs), first.targets.to(linearization.device))


def _counted_batches(
    likelihood: Likelihood, loader: Iterable[Any], progress: bool
) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yield inputs, targets, and how much each target counts: (n, 1) or (n, K)."""
    for inputs, targets, weights in batches(shown(loader, "validation", progress)):
        counts = target_weights(likelihood, targets, weights)
        once = torch.ones(len(targets), 1, dtype=torch.float64, device=targets.device)
        yield inputs, targets, once if counts is None else counts.double()


def chosen_on(
    fitted: Fitted, loader: Iterable[Any], noise: bool, stopwatch: Stopwatch, progress: bool = False
) -> Chosen | None:
    """Return the λ, and with `noise` the factor of σ, of the smallest penalised NLL; None for too few inputs."""
    has_positions = fitted.survey.layout is not None
    read = pooled_validation if has_positions else validation_data
    return chosen_from(read(fitted, loader, stopwatch, progress), noise)


def chosen_from(data: ValidationData | PooledValidation, noise: bool) -> Chosen | None:
    """Return what `chosen_on` does, from the pass over the validation data."""
    count = data.num_inputs
    if count < FEWEST_INPUTS:
        warn(
            f"{count} validation inputs are too few to choose λ by; it stays as it was. Give at least {FEWEST_INPUTS}."
        )
        return None
    total, logs = data.total, data.taus.log().tolist()
    middle = (logs[0] + logs[-1]) / 2

    def away(log_tau: float) -> float:
        return (log_tau - middle) / log(10)

    def loss(log_tau: float) -> float:
        if noise:
            return data.loss_and_factor(log_tau, away(log_tau))[0]
        pull = NOISE_PULL if data.likelihood.has_noise else CLASS_PULL
        return data.loss(log_tau) + pull * away(log_tau) ** 2 / total

    losses = {k: loss(logs[k]) for k in range(0, len(logs), 2)}
    coarse = min(losses, key=losses.__getitem__)
    losses |= {k: loss(logs[k]) for k in (coarse - 1, coarse + 1) if 0 <= k < len(logs)}
    best = min(losses, key=losses.__getitem__)
    if best in (0, len(logs) - 1):
        what = "more uncertainty than this posterior has" if best == 0 else "next to no uncertainty"
        warn(f"The best λ for the validation data lies at an end of its search: they ask for {what}.")
    left, right = logs[max(best - 1, 0)], logs[min(best + 1, len(logs) - 1)]
    log_tau = golden_section(lambda x: -loss(x), left, right, width=1e-2)
    factor = data.loss_and_factor(log_tau, away(log_tau))[1] if noise else 1.0
    return Chosen(exp(log_tau) * data.unit / factor**2, factor, count)
