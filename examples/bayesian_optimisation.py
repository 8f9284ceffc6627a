"""Bayesian optimisation with a small network: Branin, Hartmann6 and Ackley, beside a Gaussian process.

Every method starts from the same Sobol points, and is trained again on all data at each step. The Gaussian process is
BoTorch's `SingleTaskGP` with its defaults. Acquisition functions and their optimiser are BoTorch's for all methods.

    python examples/bayesian_optimisation.py --output docs/images/bayesian_optimisation.png

needs ``pip install 'sublaplace[botorch,plot]'`` and about twenty minutes on one core; ``--seeds 1 --steps 5`` a minute.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from botorch.acquisition import AcquisitionFunction, LogExpectedImprovement, PosteriorMean
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Ackley, Branin, Hartmann, SyntheticTestFunction
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from sublaplace.botorch import SubspaceLaplaceModel

PROBLEMS: dict[str, tuple[Callable[[], SyntheticTestFunction], int]] = {  # with the number of steps
    "Branin": (lambda: Branin(negate=True), 20),
    "Hartmann6": (lambda: Hartmann(negate=True), 30),
    "Ackley, 4 dimensions": (lambda: Ackley(dim=4, negate=True), 30),
}


def gaussian_process(X: Tensor, Y: Tensor) -> SingleTaskGP:
    model = SingleTaskGP(X, Y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


METHODS: dict[str, Callable[[Tensor, Tensor, int], AcquisitionFunction]] = {
    "Gaussian process, LogEI": lambda X, Y, seed: LogExpectedImprovement(gaussian_process(X, Y), best_f=Y.max()),
    "sublaplace, LogEI": lambda X, Y, seed: LogExpectedImprovement(
        SubspaceLaplaceModel.trained(X, Y, seed=seed), best_f=Y.max()
    ),
    "sublaplace, Thompson": lambda X, Y, seed: PosteriorMean(
        SubspaceLaplaceModel.trained(X, Y, seed=seed).function_sample(1000 * seed + len(X))
    ),
}


def optimised(problem: SyntheticTestFunction, method: str, seed: int, steps: int) -> tuple[list[float], float]:
    """Return the simple regret after the first points and after every step, and process seconds per step."""
    d = problem.dim
    low, high = problem.bounds.double()
    cube = torch.stack([torch.zeros(d, dtype=torch.float64), torch.ones(d, dtype=torch.float64)])
    X = torch.quasirandom.SobolEngine(d, scramble=True, seed=seed).draw(2 * (d + 1), dtype=torch.float64)
    Y = problem(low + (high - low) * X).double().unsqueeze(-1)
    torch.manual_seed(seed)  # of BoTorch's starting points
    regrets, start = [problem.optimal_value - float(Y.max())], time.process_time()
    for _ in range(steps):
        acquisition = METHODS[method](X, Y, seed)
        new, _ = optimize_acqf(
            acquisition, cube, q=1, num_restarts=4, raw_samples=128, options={"maxiter": 50, "batch_limit": 4}
        )
        X = torch.cat([X, new])
        Y = torch.cat([Y, problem(low + (high - low) * new).double().unsqueeze(-1)])
        regrets.append(problem.optimal_value - float(Y.max()))
    return regrets, (time.process_time() - start) / max(steps, 1)


def drawn(results: dict[str, dict[str, list[list[float]]]], path: str) -> None:
    """Draw the median regret of the seeds, and the spread from the least to the largest."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(4.2 * len(results), 3.6), squeeze=False)
    for axis, (name, methods) in zip(axes[0], results.items(), strict=True):
        for color, (method, regrets) in zip(("#444444", "#1f6fb4", "#d1741f"), methods.items(), strict=False):
            values = torch.tensor(regrets).clamp_min(1e-6)
            steps = range(values.shape[1])
            axis.plot(steps, values.median(0).values, color=color, label=method)
            axis.fill_between(steps, values.min(0).values, values.max(0).values, color=color, alpha=0.15, linewidth=0)
        axis.set(title=name, xlabel="step", yscale="log")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("regret of the best value so far")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of every problem; by default 20 or 30")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--output", help="a picture of the regret")
    parser.add_argument("--numbers", help="a JSON file with all regrets")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, list[list[float]]]] = {}
    for name in arguments.problems:
        make, steps = PROBLEMS[name]
        results[name] = {}
        print(name)
        for method in arguments.methods:
            with warnings.catch_warnings(action="ignore"):  # of BoTorch's fits and of few data
                runs = [optimised(make(), method, seed, arguments.steps or steps) for seed in range(arguments.seeds)]
            results[name][method] = [regrets for regrets, _ in runs]
            last = torch.tensor([regrets[-1] for regrets, _ in runs])
            seconds = sum(seconds for _, seconds in runs) / len(runs)
            print(
                f"  {method:24} final regret: median {last.median():.4f}, from {last.min():.4f} to {last.max():.4f};"
                f" {seconds:.2f} process seconds per step",
                flush=True,
            )
            if arguments.numbers:
                Path(arguments.numbers).write_text(json.dumps(results))
    if arguments.output:
        drawn(results, arguments.output)


if __name__ == "__main__":
    main()
