"""The jobs of one trained network: every posterior on every test set, written job by job."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from experiments import references
from experiments.cost import Cost, measured
from experiments.fits import Fits
from experiments.methods import (
    COMPLEMENTED,
    FEASIBLE,
    NEEDED_CURVATURE,
    Complemented,
    Exact,
    Problem,
    complemented_posteriors,
    complemented_projection,
    drawn,
    optimal_projection,
    outputs_of,
    reduced_posterior,
)
from experiments.recipes import Recipe
from experiments.results import Job, Results, Row
from experiments.scored_sets import TestSet
from experiments.scores import (
    Scores,
    approximation_scores,
    best_temperature,
    classification_scores,
    own_prior_scores,
    predictive_scores,
)
from experiments.sensitivity import HEAT_MAP_SHAPE, dead_percent, keep_heat_map, sensitivities
from experiments.sweeps import CertainSweep, ComplementSweep, SubspaceSweep, Sweep, WholeSweep, capped
from experiments.training import held_out, trained_network
from sublaplace import PROJECTORS, Jacobians, SubspaceLaplace, SubspacePosterior

# Names of methods in addition to the library's projectors.
OPTIMUM = "lowrankopt-ggn"  # lowrank-ggn built from the very inputs that it is judged on: Theorem 1
FULL, KFAC, MAP, TEMPERATURE, ENSEMBLE = "full", "kfac", "map", "temperature", "ensemble"
CERTIFIED = "certified-lowrank-kfac"  # the certified share of the full trace that lowrank-kfac captures
EXACT = (FULL, "lowrank-ggn", OPTIMUM)
METHODS = tuple(dict.fromkeys((*EXACT, *PROJECTORS, KFAC, MAP, TEMPERATURE, ENSEMBLE, CERTIFIED)))

OWN_PRIOR = (
    (KFAC, ""),
    ("lowrank-kfac", ""),
    (OPTIMUM, ""),
    ("lowrank-correction", "kfac-fitted"),
)
"""Projectors and complements that are also judged at their own λ."""
PRIOR_FACTORS = [10 ** (k / 2) for k in range(-6, 7)]  # of the paper's λ


@dataclass(frozen=True)
class SeedRun:
    """The jobs of one trained network.

    Jobs that need the exact GGN come first. They compute the reference of all others, the covariance of the full
    Laplace approximation for the drawn test inputs. It is kept on disk, so a resumed run need not compute it again. A
    large network has no such reference: its posteriors are compared by their trace alone.
    """

    problem: Problem
    test_sets: list[TestSet]
    results: Results
    computed: Path
    unscored: TestSet | None = None  # test data that are not scored, where there are any
    methods: Collection[str] = ()  # by their names in the results; empty: all

    @property
    def recipe(self) -> Recipe:
        return self.problem.recipe

    @cached_property
    def _fits(self) -> Fits:
        return Fits(self.problem)

    def run(self) -> None:
        done = self.results.done()
        left = [job for job in self._jobs() if job not in done]
        with tqdm(total=len(left), desc=f"{self.recipe.dataset} seed {self.problem.seed}") as progress:
            todo = _Todo(left, progress)
            if not self.recipe.large:
                self._exact_jobs(todo)
            self._single_jobs(todo)
            self._corrupted_jobs(todo)

    def _jobs(self) -> list[Job]:
        main, *corrupted = (test_set.name for test_set in self.test_sets)
        large = self.recipe.large
        plain = (KFAC, MAP, TEMPERATURE) if self._has_temperature else (KFAC, MAP)
        jobs = [self._job(main, name) for name in (*(() if large else EXACT), *FEASIBLE, *plain)]
        jobs += [self._complemented_job(method) for method in COMPLEMENTED if not (large and method.needs_exact)]
        if self.recipe.certified_dims:
            jobs.append(self._job(main, CERTIFIED))
        full = () if large else (FULL,)
        jobs += [self._job(name, method) for name in corrupted for method in (*full, *FEASIBLE, *plain)]
        return [job for job in jobs if not self.methods or job.projector in self.methods]

    @property
    def _has_temperature(self) -> bool:
        """Whether there are data to fit a temperature on: a large network has no twin, to save time."""
        return self.problem.noise_std is None and (not self.recipe.large or self.unscored is not None)

    def _job(self, dataset: str, name: str) -> Job:
        from_inputs = name in PROJECTORS and PROJECTORS[name].needs_inputs
        inputs = "test" if name == OPTIMUM else "train" if from_inputs else ""
        return Job(dataset, self.problem.seed, name, inputs)

    def _complemented_job(self, method: Complemented) -> Job:
        main = self.test_sets[0].name
        return Job(main, self.problem.seed, method.projector, method.inputs, method.complement)

    # With the exact GGN

    def _exact_jobs(self, todo: "_Todo") -> None:
        main, *corrupted = self.test_sets
        wanted = [name for name in EXACT if todo.has(self._job(main.name, name))]
        missing = [s for s in self.test_sets if todo.on(s.name) and self.reference(s) is None]
        traces = [s for s in corrupted if todo.has(self._job(s.name, FULL))]
        complemented = self._complemented_left(todo, needs_exact=True)
        if not (wanted or missing or traces or complemented):
            return
        problem = self.problem.to(torch.float64)
        todo.say("exact GGN")
        exact, cost = self._fits.exact(problem)
        whole = WholeSweep(exact, [problem.linearization.layout.num_parameters])
        for test_set in missing:
            (joint,) = whole.joint_covariances(problem.jacobians(self.draw(test_set)))
            references.keep(joint, self.computed, self.recipe, test_set.name, self.problem.seed)
        for name in wanted:
            todo.say(name)
            if name == FULL:
                self._finish(todo, self._job(main.name, name), main, problem, whole, cost)
            else:
                inputs = self.draw(main) if name == OPTIMUM else problem.context.subspace_jacobians.inputs
                self._low_rank_job(todo, name, main, problem, exact, problem.jacobians(inputs), cost)
        for method in complemented:
            self._complement(todo, method, problem, exact, cost)
        for test_set in traces:
            scores = {whole.dims[0]: self._approximation(test_set, problem, whole)[whole.dims[0]]}
            self._write(todo, {self._job(test_set.name, FULL): scores}, cost, self._note(problem))

    def _low_rank_job(
        self,
        todo: "_Todo",
        name: str,
        test_set: TestSet,
        problem: Problem,
        exact: Exact,
        jacobians: Jacobians,
        cost_of_exact: Cost,
    ) -> None:
        """Run the job with P from the exact GGN and the given inputs; its cost includes the cost of the exact GGN."""
        dims = self.recipe.dims(name)
        projection, cost = measured(lambda: optimal_projection(exact, jacobians, max(dims)))
        sweep = _sweep_of(name, reduced_posterior(problem, projection, exact), dims)
        self._finish(todo, self._job(test_set.name, name), test_set, problem, sweep, cost_of_exact.then(cost))

    def _complemented_left(self, todo: "_Todo", needs_exact: bool) -> list[Complemented]:
        methods = [method for method in COMPLEMENTED if method.needs_exact == needs_exact]
        return [method for method in methods if todo.has(self._complemented_job(method))]

    def _complement(
        self,
        todo: "_Todo",
        method: Complemented,
        problem: Problem,
        exact: Exact | None,
        cost_of_exact: Cost | None,
    ) -> None:
        """Run the job with KFAC outside of the subspace. P has the problem's dtype, everything else the recipe's."""
        todo.say(f"{method.projector} from {method.inputs} inputs, {method.complement} outside")
        dims = self.recipe.compared_dims
        cost = self._fits.curvature(KFAC)[1]  # outside; P may share it, and then it counts once
        if needed := NEEDED_CURVATURE.get(method.projector):
            cost = self._fits.curvature(needed, problem)[1]
        projection, more = measured(lambda: complemented_projection(problem, method, max(dims)))
        posteriors, fit = measured(lambda: complemented_posteriors(self.problem, method, projection, dims, exact))
        sweep = ComplementSweep(posteriors)
        cost = (cost if cost_of_exact is None else cost_of_exact.then(cost)).then(more)
        weights = {s: {"complement_weight": posterior.outside.weight} for s, posterior in posteriors.items()}
        job = self._complemented_job(method)
        fit_of_pass = fit if exact is None else None  # otherwise the GGN exists already, and no pass shows its cost
        self._finish(todo, job, self.test_sets[0], self.problem, sweep, cost, fit_of_pass, of_dims=weights)

    def reference(self, test_set: TestSet) -> Tensor | None:
        """Return Σ of the full Laplace approximation for the drawn inputs, (nC, nC), if it was computed before."""
        return references.kept(self.computed, self.recipe, test_set.name, self.problem.seed)

    # One posterior after the other

    def _single_jobs(self, todo: "_Todo") -> None:
        main = self.test_sets[0]
        for name in FEASIBLE:
            if todo.has(self._job(main.name, name)):
                todo.say(name)
                dims = self.recipe.dims(name)
                posterior, cost, fit = self._fits.posterior(name, max(dims))
                sweep = _sweep_of(name, posterior, dims)
                self._finish(todo, self._job(main.name, name), main, self.problem, sweep, cost, fit)
        for method in self._complemented_left(todo, needs_exact=False):
            self._complement(todo, method, self.problem, self._fits.dense, None)
        if todo.has(self._job(main.name, KFAC)):
            todo.say(KFAC)
            kfac, cost = self._fits.curvature(KFAC)
            whole = WholeSweep(kfac, [self.problem.linearization.layout.num_parameters])
            extra = {"prior_precision": self._fits.best_prior()}
            self._finish(todo, self._job(main.name, KFAC), main, self.problem, whole, cost, extra=extra)
        if todo.has(self._job(main.name, MAP)):
            todo.say(MAP)
            facts = self._facts_of_the_network()
            self._finish(todo, self._job(main.name, MAP), main, self.problem, CertainSweep([0]), extra=facts)
        if todo.has(self._job(main.name, TEMPERATURE)):
            todo.say(TEMPERATURE)
            self._temperature(todo, main)
        if todo.has(self._job(main.name, CERTIFIED)):
            todo.say(CERTIFIED)
            self._certified(todo, main)

    def _facts_of_the_network(self) -> Scores:
        """Return the share of dead parameters, σ and the error of regression, the accuracy of classification."""
        inputs, targets = self.problem.dataset.test_inputs, self.problem.dataset.test_targets
        outputs = outputs_of(self.problem.network, inputs)
        facts = {} if self.recipe.large else {"dead_percent": dead_percent(self.problem)}
        if self.recipe.maps_sensitivity and self.problem.seed == 0:
            path = self.results.path.parent / f"dead_parameters-{self.recipe.dataset}.npz"
            keep_heat_map(path, sensitivities(self.problem, inputs[: HEAT_MAP_SHAPE[0]]))
        if self.problem.noise_std is None:
            return facts | {"accuracy": (outputs.argmax(1) == targets).double().mean().item()}
        error = (outputs - targets).double().square().mean().sqrt().item()
        return facts | {"noise_std": self.problem.noise_std, "rmse": error}

    def _temperature(self, todo: "_Todo", test_set: TestSet) -> None:
        """Score outputs divided by a temperature, fitted on data that neither the network nor the score has seen."""
        temperature, note = self._fitted_temperature
        probabilities = (outputs_of(self.problem.network, test_set.inputs).double() / temperature).softmax(1)
        scores = classification_scores(probabilities, test_set.targets) | {"temperature": temperature}
        self._write(todo, {self._job(test_set.name, TEMPERATURE): {0: scores}}, None, note)

    @cached_property
    def _fitted_temperature(self) -> tuple[float, str]:
        """The temperature, and what it was fitted on: test data that are not scored, or training data of a twin."""
        if self.unscored is not None:
            outputs = outputs_of(self.problem.network, self.unscored.inputs).double()
            note = f"temperature fitted on {len(outputs):,} other test inputs"
            return best_temperature(outputs, self.unscored.targets), note
        rest, inputs, targets = held_out(self.problem.dataset)
        twin = trained_network(replace(self.recipe, dataset=rest.name), rest, 0, self.computed / "weights")
        note = "temperature fitted on held-out training data, with a network of seed 0 trained on the rest"
        return best_temperature(outputs_of(twin, inputs).double(), targets), note

    def _certified(self, todo: "_Todo", test_set: TestSet) -> None:
        """Record the share of the full trace that lowrank-kfac captures, as limits from below and above.

        Both are of the drawn inputs. Σ of the full posterior lies between the bounds, so Tr Σ_s over the trace of the
        upper bound is a lower limit. Tr Σ is no less than the trace at the largest s, so the ratio of these two traces
        is an upper limit.
        """
        *_, largest = dims = self.recipe.certified_dims
        projection, cost = self._fits.projection("lowrank-kfac", largest)
        la = SubspaceLaplace.paper(
            self.problem.network,
            self.problem.likelihood,
            projector=lambda _: projection,
            dim=largest,
            prior_precision=self.recipe.prior_precision,
        ).fit(self.problem.loader, certify=True)
        inputs = self.draw(test_set).to(self.problem.dtype)
        shares, traces = la.captured_share(inputs), la.leading_traces(inputs)
        scores = {
            s: {
                "captured_at_least": float(shares[s - 1]),
                "captured_at_most": float(traces[s - 1] / traces[-1]),
            }
            for s in capped(list(dims), len(traces))
        }
        note = f"{self._note(self.problem)}; nothing dropped for the bounds"
        self._write(todo, {self._job(test_set.name, CERTIFIED): scores}, cost, note)

    # Corrupted test sets: all posteriors on the same Jacobians

    def _corrupted_jobs(self, todo: "_Todo") -> None:
        corrupted = [s for s in self.test_sets[1:] if todo.on(s.name)]
        if not corrupted:
            return
        wanted = {name for s in corrupted for name in (*FEASIBLE, KFAC, MAP) if todo.has(self._job(s.name, name))}
        sweeps: dict[str, Sweep] = {MAP: CertainSweep([0])}
        costs: dict[str, Cost | None] = {MAP: None}
        for name in FEASIBLE:
            if name in wanted:
                todo.say(f"{name} for corrupted inputs")
                posterior, costs[name] = self._fits.leading(name)
                sweeps[name] = _sweep_of(name, posterior, list(self.recipe.corrupted_dims))
        if KFAC in wanted:
            kfac, costs[KFAC] = self._fits.curvature(KFAC)
            sweeps[KFAC] = WholeSweep(kfac, [self.problem.linearization.layout.num_parameters])
        for test_set in corrupted:
            todo.say(test_set.name)
            if todo.has(self._job(test_set.name, TEMPERATURE)):
                self._temperature(todo, test_set)
            left = {name: s for name, s in sweeps.items() if todo.has(self._job(test_set.name, name))}
            for name, scores in self._scores(test_set, self.problem, left).items():
                job = self._job(test_set.name, name)
                self._write(todo, {job: scores}, costs[name], self._note(self.problem, corrupted=True))

    # Scores and rows

    def draw(self, test_set: TestSet) -> Tensor:
        """Return the test inputs on which posteriors are compared with the full one; equal for every corruption."""
        return test_set.inputs[self._places_of_draw(test_set)]

    def _places_of_draw(self, test_set: TestSet) -> Tensor:
        return drawn(len(test_set.inputs), self.recipe.num_inputs, self.problem.seed, "test inputs")

    def _approximation(self, test_set: TestSet, problem: Problem, sweep: Sweep) -> dict[int, Scores]:
        reference = self.reference(test_set)
        assert reference is not None, "the exact jobs leave a reference"
        return approximation_scores(problem, self.draw(test_set), sweep, reference)

    def _scores(self, test_set: TestSet, problem: Problem, sweeps: dict[str, Sweep]) -> dict[str, dict[int, Scores]]:
        """Return all scores of posteriors on a test set; without the full posterior (large networks) only the trace."""
        if self.recipe.large:
            return predictive_scores(problem, test_set, sweeps, traced=self._places_of_draw(test_set))
        predictive = predictive_scores(problem, test_set, sweeps)
        near = {name: self._approximation(test_set, problem, sweep) for name, sweep in sweeps.items()}
        return {name: {s: near[name][s] | predictive[name][s] for s in sweep.dims} for name, sweep in sweeps.items()}

    def _finish(
        self,
        todo: "_Todo",
        job: Job,
        test_set: TestSet,
        problem: Problem,
        sweep: Sweep,
        cost: Cost | None = None,
        fit: Cost | None = None,
        extra: Scores | None = None,
        of_dims: dict[int, Scores] | None = None,
    ) -> None:
        """Score a posterior and write its rows, with other numbers: `extra` do not depend on s, `of_dims` do."""
        name = job.projector
        scores = self._scores(test_set, problem, {name: sweep})[name]
        if (name, job.complement) in OWN_PRIOR and not self.recipe.large:
            compared = {min(s, sweep.dims[-1]) for s in self.recipe.compared_dims}  # the rank may be lower
            dims = sweep.dims if name == KFAC else sorted(compared.intersection(sweep.dims))
            priors = [self.recipe.prior_precision * factor for factor in PRIOR_FACTORS]
            for s, values in own_prior_scores(problem, test_set, sweep, dims, priors).items() if dims else ():
                scores[s] |= values
        for s, values in (of_dims or {}).items():
            scores[s] |= values
        scores[sweep.dims[-1]] |= (extra or {}) | ({"posterior_seconds": fit.seconds} if fit else {})
        note = self._note(problem)
        grid = self.recipe.compared_dims if job.complement else self.recipe.dims(name)
        if sweep.dims != grid and name.startswith("lowrank"):
            note += f"; s up to the rank {sweep.dims[-1]}"
        if name == "subset-swag":
            note += f"; SWAG with learning rate {self.recipe.swag_learning_rate}"
        self._write(todo, {job: scores}, cost, note)

    def _note(self, problem: Problem, corrupted: bool = False) -> str:
        """Return the floating-point type, and what was cut."""
        note = str(problem.dtype).removeprefix("torch.")
        if self.recipe.large:
            note += f"; at most {self.recipe.direction_tolerance:g} of the output Hessians' trace dropped"
        if (count := self.recipe.num_curvature_inputs) is not None:
            note += f"; curvature of {count:,} of {len(problem.dataset.train_inputs):,} training inputs"
        if corrupted and (count := self.recipe.num_corrupted) is not None:
            note += f"; {count:,} pictures a severity"
        elif self.unscored is not None:
            scored = len(problem.dataset.test_inputs)
            note += f"; {scored:,} of {scored + len(self.unscored.inputs):,} test inputs"
        return note

    def _write(self, todo: "_Todo", jobs: dict[Job, dict[int, Scores]], cost: Cost | None, note: str) -> None:
        rows = [row for job, scores in jobs.items() for row in rows_of(job, scores, cost, note)]
        self.results.add(rows)
        todo.finished(jobs)


@dataclass
class _Todo:
    """The remaining jobs, and the bar that shows them."""

    jobs: list[Job]
    progress: "tqdm[Any]"

    def has(self, job: Job) -> bool:
        return job in self.jobs

    def on(self, dataset: str) -> bool:
        return any(job.dataset == dataset for job in self.jobs)

    def say(self, what: str) -> None:
        self.progress.set_postfix_str(what)

    def finished(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self.jobs.remove(job)
            self.progress.update()


def _sweep_of(name: str, posterior: SubspacePosterior, dims: list[int]) -> SubspaceSweep:
    """Return the sweep over all s up to the rank that was found; a projector with a dimension of its own has one s."""
    own_dim = name in PROJECTORS and PROJECTORS[name].own_dim
    return SubspaceSweep(posterior, [posterior.dim] if own_dim else capped(dims, posterior.dim))


def rows_of(job: Job, scores: dict[int, Scores], cost: Cost | None, note: str) -> list[Row]:
    return [
        Row(
            job.dataset,
            job.seed,
            job.projector,
            s,
            metric,
            value,
            job.inputs,
            job.complement,
            cost.seconds if cost else None,
            cost.peak_memory_mb if cost else None,
            note,
        )
        for s, values in scores.items()
        for metric, value in values.items()
    ]
