"""The methods that need no library: the plain network, temperature scaling, deep ensembles, dropout."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from experiments.calibration.prediction import Normal, Predicted, Probabilities, with_noise
from experiments.calibration.problem import Examples, Problem

DROPOUT_DRAWS = 50


def timed(method: Callable[[Problem], Predicted]) -> Callable[[Problem], tuple[Predicted, float]]:
    """Add the seconds of processor time that a method takes."""

    def measured(problem: Problem) -> tuple[Predicted, float]:
        start = time.process_time()
        predicted = method(problem)
        return predicted, time.process_time() - start

    return measured


@torch.no_grad()
def outputs_of(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return the outputs (n, C) of a network in float64, in batches."""
    return torch.cat([network(batch) for batch in inputs.split(500)]).double()


def residual_std(network: nn.Module, examples: Examples) -> float:
    """Return the root mean square of the residuals, pooled over the outputs."""
    return _root_mean_square(outputs_of(network, examples.inputs), examples.targets)


def plain(problem: Problem) -> Predicted:
    """Predict with the network alone; σ of regression comes from the training residuals."""
    outputs = outputs_of(problem.network, problem.test.inputs)
    if problem.task == "classification":
        return Probabilities(outputs.softmax(1))
    return _constant_noise(outputs, residual_std(problem.network, problem.train))


def plain_held_out(problem: Problem) -> Predicted:
    """Predict with the network of `plain`, but trained on what the methods with validation data leave for training."""
    return plain(replace(problem, network=problem.held_out_network, train=problem.fit))


def validated_noise(problem: Problem) -> Predicted:
    """Predict with the network alone, σ from the residuals on the validation data."""
    outputs = outputs_of(problem.held_out_network, problem.test.inputs)
    return _constant_noise(outputs, residual_std(problem.held_out_network, problem.validation))


def temperature_scaling(problem: Problem) -> Predicted:
    """Predict softmax(f / T), T with the least NLL on the validation data."""
    validation = outputs_of(problem.held_out_network, problem.validation.inputs)

    def nll(log_temperature: float) -> float:
        scaled = validation / torch.tensor(log_temperature).exp()
        return float(nn.functional.cross_entropy(scaled, problem.validation.targets))

    found = minimize_scalar(nll, bounds=(-5, 5), method="bounded", options={"xatol": 1e-6})
    temperature = torch.tensor(found.x).exp()
    outputs = outputs_of(problem.held_out_network, problem.test.inputs)
    return Probabilities((outputs / temperature).softmax(1), f"T={float(temperature):.3g}")


def deep_ensemble(problem: Problem) -> Predicted:
    """Predict the mean of the members' probabilities, or the Gaussian with the moments of their mixture."""
    networks = (problem.network, *problem.members)
    outputs = torch.stack([outputs_of(network, problem.test.inputs) for network in networks])
    if problem.task == "classification":
        return Probabilities(outputs.softmax(2).mean(0))
    variances = [residual_std(network, problem.train) ** 2 for network in networks]
    return with_noise(outputs.mean(0), _spread(outputs), (sum(variances) / len(variances)) ** 0.5)


def monte_carlo_dropout(problem: Problem) -> Predicted:
    """Predict as the ensemble does, with one network and units dropped at random."""
    assert problem.dropout_network is not None
    outputs = _dropped_outputs(problem.dropout_network, problem.test.inputs)
    if problem.task == "classification":
        return Probabilities(outputs.softmax(2).mean(0))
    training = _dropped_outputs(problem.dropout_network, problem.train.inputs).mean(0)
    return with_noise(outputs.mean(0), _spread(outputs), _root_mean_square(training, problem.train.targets))


def _dropped_outputs(network: nn.Module, inputs: Tensor) -> Tensor:
    """Draw outputs (draws, n, C) with dropout on; the network is left in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        try:
            return torch.stack([outputs_of(network, inputs) for _ in range(DROPOUT_DRAWS)])
        finally:
            network.eval()


def _constant_noise(outputs: Tensor, noise_std: float) -> Normal:
    n, C = outputs.shape
    return with_noise(outputs, torch.zeros(n, C, C), noise_std, f"σ={noise_std:.3g}")


def _spread(outputs: Tensor) -> Tensor:
    """Return the covariance (n, C, C) of outputs (k, n, C) over the first axis."""
    centred = (outputs - outputs.mean(0)).permute(1, 2, 0)
    return centred @ centred.mT / len(outputs)


def _root_mean_square(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs - targets).square().mean().sqrt())
