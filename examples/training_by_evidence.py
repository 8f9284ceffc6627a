"""Training with λ by the evidence, next to two fixed λ: the held-out NLL of the plain network and of its posterior.

Networks with 2 × 50 tanh units on two data sets of scikit-learn; means and standard errors over random splits. Prints a
table in Markdown.
"""

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sublaplace import SubspaceLaplace, train

DATA: dict[str, tuple[Callable[..., Any], str]] = {
    "diabetes": (load_diabetes, "regression"),
    "breast cancer": (load_breast_cancer, "classification"),
}
WAYS: dict[str, dict[str, Any]] = {
    "λ = 0.01": {"prior_precision": 0.01},
    "λ = 1": {"prior_precision": 1.0},
    "evidence": {},
    "evidence, one λ per layer": {"prior_structure": "layer"},
}


def splits(name: str, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the training data and the held-out data, standardised by the former."""
    load, likelihood = DATA[name]
    parts = [torch.tensor(part) for part in train_test_split(*load(return_X_y=True), test_size=0.3, random_state=seed)]
    x, x_test = standardised(*parts[:2])
    if likelihood == "classification":
        return TensorDataset(x, parts[2]), TensorDataset(x_test, parts[3])
    y, y_test = standardised(parts[2][:, None], parts[3][:, None])
    return TensorDataset(x, y), TensorDataset(x_test, y_test)


def standardised(train_part: Tensor, test_part: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = train_part.mean(0), train_part.std(0, correction=0)
    return ((train_part - mean) / std).float(), ((test_part - mean) / std).float()


def held_out(name: str, way: str, seed: int, epochs: int = 100) -> tuple[float, float]:
    """Return the NLL of the plain network, and of the posterior with the λ and σ of the training."""
    train_data, test_data = splits(name, seed)
    loader, test_loader = DataLoader(train_data, batch_size=64, shuffle=True), DataLoader(test_data, batch_size=200)
    likelihood = DATA[name][1]
    torch.manual_seed(seed)
    outputs = 1 if likelihood == "regression" else 2
    widths = [train_data.tensors[0].shape[1], 50, 50]
    hidden = [layer for k in (0, 1) for layer in (nn.Linear(widths[k], widths[k + 1]), nn.Tanh())]
    network = nn.Sequential(*hidden, nn.Linear(50, outputs))
    result = train(network, loader, likelihood, epochs=epochs, learning_rate=0.01, seed=seed, **WAYS[way])
    la = SubspaceLaplace(network, result.likelihood, prior_precision=result.prior_precision).fit(loader)
    scores = la.evaluate(test_loader)
    return scores.plain.scores["nll"], scores.posterior.scores["nll"]


def table(seeds: int, epochs: int = 100) -> str:
    lines = ["| data | λ of the training | plain network | posterior |", "|---|---|---:|---:|"]
    for name in DATA:
        for way in WAYS:
            found = torch.tensor([held_out(name, way, seed, epochs) for seed in range(seeds)])
            means, errors = found.mean(0), found.std(0) / seeds**0.5
            cells = (f"{mean:.3f} ± {error:.3f}" for mean, error in zip(means, errors, strict=True))
            lines.append(f"| {name} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    warnings.simplefilter("ignore", UserWarning)
    print(table(parser.parse_args().seeds))
