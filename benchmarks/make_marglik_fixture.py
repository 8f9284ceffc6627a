"""Compute the marginal likelihood of two small networks with laplace-torch, as a reference for the unit tests.

Run ``python benchmarks/make_marglik_fixture.py`` in the environment of the peers. Both networks are trained briefly, in
float64: ``classifier()`` on 60 inputs of 3 classes and ``regressor()`` on 24 inputs with 2 targets. Everything is
``Laplace(subset_of_weights="all", hessian_structure="full")`` with a scalar prior precision; the regressor has a fixed
σ of 0.3. The fixture, tests/fixtures/laplace_torch_marglik.safetensors, holds for each of the two (``classification.``
and ``regression.`` in front)

* ``model.<parameter>``, ``inputs``, ``targets``, and ``sigma_noise`` of the regression,
* ``prior_precisions`` and ``log_marglik``: its ``log_marginal_likelihood`` at each of them,
* ``best_prior``: where that function is largest, by golden sections over ln λ, and ``best_log_marglik`` there,
* ``adam_prior``: what its own ``optimize_prior_precision(method="marglik")`` arrives at.

Conventions, read from laplace-torch 0.3: it halves the summed squared error and the Hessian of it (``factor = 0.5``),
multiplies both by ``_H_factor = 1/σ²`` and subtracts N·C·ln(σ√(2π)). So its log likelihood is Σ ln N(y | f, σ²) with
the normalising constant and its Hessian is Σ JᵀJ/σ², and nothing needs to be converted.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FIXTURE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "laplace_torch_marglik.safetensors"
SIGMA = 0.3
PRIORS = [1e-3, 1e-2, 0.1, 0.5, 1.0, 3.0, 10.0, 100.0, 1e4]


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def regressor() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 2))


def train(network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor) -> None:
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02, weight_decay=1e-3)
    for _ in range(150):
        optimizer.zero_grad()
        loss(network(inputs), targets).backward()
        optimizer.step()


def maximum(function: Callable[[float], float], left: float, right: float) -> float:
    """Where a function with a single maximum in [left, right] has it, by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    inner, outer = right - ratio * (right - left), left + ratio * (right - left)
    low, high = function(inner), function(outer)
    while right - left > 1e-9:
        if low > high:
            right, outer, high = outer, inner, low
            inner = right - ratio * (right - left)
            low = function(inner)
        else:
            left, inner, low = inner, outer, high
            outer = left + ratio * (right - left)
            high = function(outer)
    return (left + right) / 2


def marglik(network: nn.Module, likelihood: str, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Values and maxima of laplace-torch's log marginal likelihood."""
    from laplace import Laplace

    options = {"sigma_noise": SIGMA} if likelihood == "regression" else {}
    la = Laplace(network, likelihood, subset_of_weights="all", hessian_structure="full", **options)
    la.fit(DataLoader(TensorDataset(inputs, targets), batch_size=16))

    def value(prior: float) -> float:
        return la.log_marginal_likelihood(prior_precision=torch.tensor([prior])).item()

    best = math.exp(maximum(lambda log_prior: value(math.exp(log_prior)), math.log(1e-6), math.log(1e6)))
    result = {
        "prior_precisions": torch.tensor(PRIORS),
        "log_marglik": torch.tensor([value(prior) for prior in PRIORS]),
        "best_prior": torch.tensor(best),
        "best_log_marglik": torch.tensor(value(best)),
    }
    la.optimize_prior_precision(pred_type="glm", method="marglik", n_steps=2000, lr=0.05, prior_structure="scalar")
    return result | {"adam_prior": la.prior_precision.squeeze()}


def main() -> None:
    warnings.filterwarnings("ignore", message="By default `link_approx` is `probit`")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # its backend forms an identity matrix of the default dtype
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    labels = (x @ torch.randn(4, 3) + 0.5 * torch.randn(60, 3)).argmax(1)
    z = 2 * torch.randn(24, 2)
    values = torch.stack([z[:, 0].sin() + z[:, 1], (z[:, 0] * z[:, 1]).tanh()], dim=1) + SIGMA * torch.randn(24, 2)
    cases = {
        "classification": (classifier(), nn.CrossEntropyLoss(), x, labels),
        "regression": (regressor(), nn.MSELoss(), z, values),
    }
    tensors = {"regression.sigma_noise": torch.tensor(SIGMA)}
    for likelihood, (network, loss, inputs, targets) in cases.items():
        train(network, loss, inputs, targets)
        found = marglik(network, likelihood, inputs, targets) | {"inputs": inputs, "targets": targets}
        found |= {f"model.{name}": parameter for name, parameter in network.named_parameters()}
        tensors |= {f"{likelihood}.{name}": value.detach().clone() for name, value in found.items()}
        print(likelihood, {k: found[k].tolist() for k in ("log_marglik", "best_prior", "adam_prior")}, file=sys.stderr)
    FIXTURE.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, FIXTURE, metadata={"laplace-torch": version("laplace-torch"), "torch": torch.__version__})
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size / 1024:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
