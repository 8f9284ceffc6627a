"""Out-of-distribution inputs found by their uncertainty: a network for FashionMNIST is shown the digits of MNIST.

Trains a small CNN on clothes, fits subspace Laplace approximations, and tells clothes from digits by the uncertainty
alone. Prints a table of AUROCs, and writes a picture of the scores to docs/images. Takes a few minutes on one core.
The data come from the folder that SUBLAPLACE_DATA names, or are downloaded.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments.datasets import image_tensor, images
from sublaplace import Complement, SubspaceLaplace, metrics
from sublaplace.ood import epistemic_variance, predictive_entropy

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "out_of_distribution.png"
# Colours of Okabe and Ito, which readers with every kind of colour vision can tell apart.
BLUE, RED = "#0072B2", "#D55E00"
PLAIN = "plain network, entropy"
# What is outside the subspace of each posterior.
POSTERIORS = {"subspace": None, "subspace + KFAC outside": Complement("kfac", weight=1.0)}

Scores = dict[str, tuple[Tensor, Tensor]]  # of familiar and of unfamiliar inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="networks")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="file of the picture")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train = TensorDataset(*first_images("fashionmnist", "train", 10_000))
    clothes, labels = first_images("fashionmnist", "test", 2_000)
    digits, _ = first_images("mnist", "test", 2_000)
    aurocs: dict[str, list[float]] = {}
    for seed in range(arguments.seeds):
        network = trained_network(train, seed)
        accuracy = (network(clothes).argmax(1) == labels).double().mean().item()
        print(f"network {seed}: accuracy {accuracy:.3f}", file=sys.stderr)
        scores = all_scores(network, train, clothes, digits)
        for name, (familiar, unfamiliar) in scores.items():
            aurocs.setdefault(name, []).append(metrics.auroc(unfamiliar, familiar))
    print(table(aurocs))
    draw(scores, arguments.picture)
    print(f"Picture of the last network's scores in {arguments.picture}.")


def first_images(name: str, split: str, count: int) -> tuple[Tensor, Tensor]:
    """Return the first images (n, 1, 28, 28), scaled to [−1, 1], and their labels (n,)."""
    pixels, labels = images(name, split)
    return image_tensor(pixels[:count]), torch.tensor(labels[:count]).long()


def trained_network(data: TensorDataset, seed: int, epochs: int = 8) -> nn.Module:
    """Return a CNN with 9,402 parameters, trained with Adam."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Flatten(),
            nn.Linear(256, 10),
        )
        optimizer = torch.optim.Adam(network.parameters(), 2e-3)
        loader = DataLoader(data, batch_size=64, shuffle=True)
        for _ in range(epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.cross_entropy(network(inputs), targets).backward()
                optimizer.step()
    return network.eval()


def all_scores(
    network: nn.Module, train: TensorDataset, familiar: Tensor, unfamiliar: Tensor, dim: int = 100
) -> Scores:
    """Return every score of both sets of inputs; the higher, the less familiar."""
    with torch.no_grad():
        result = {PLAIN: tuple(plain_entropy(network(inputs)) for inputs in (familiar, unfamiliar))}
    for name, complement in POSTERIORS.items():
        la = SubspaceLaplace(
            network,
            "classification",
            dim=dim,
            complement=complement,
            prior_precision="evidence",
        )
        la.fit(DataLoader(train, batch_size=500))
        predictions = [la.predict(inputs) for inputs in (familiar, unfamiliar)]
        result[f"{name}, entropy"] = tuple(map(predictive_entropy, predictions))
        result[f"{name}, variance"] = tuple(map(epistemic_variance, predictions))
    return result


def plain_entropy(outputs: Tensor) -> Tensor:
    """Return the entropy of the softmax, without any uncertainty of the model."""
    return torch.special.entr(outputs.double().softmax(1)).sum(1)


def table(aurocs: dict[str, list[float]]) -> str:
    """Return means and standard deviations over the networks, as Markdown."""
    lines = ["| score | AUROC |", "| --- | ---: |"]
    lines += [f"| {name} | {np.mean(values):.3f} ± {np.std(values):.3f} |" for name, values in aurocs.items()]
    return "\n".join(lines)


def draw(scores: Scores, path: Path) -> None:
    """Draw histograms of some of the scores."""
    chosen = {
        PLAIN: "entropy / nats",
        "subspace, entropy": "entropy / nats",
        "subspace, variance": "mean variance of the logits",
        "subspace + KFAC outside, variance": "mean variance of the logits",
    }
    figure = Figure(figsize=(14, 3.8), layout="constrained", dpi=150)
    for ax, (name, unit) in zip(figure.subplots(1, len(chosen)), chosen.items(), strict=True):
        familiar, unfamiliar = (part.numpy() for part in scores[name])
        edges = np.linspace(0, max(familiar.max(), unfamiliar.max()), 41)
        for part, color, style, label in (
            (familiar, BLUE, "-", "new images of FashionMNIST (trained on)"),
            (unfamiliar, RED, "--", "MNIST (nothing like it seen)"),
        ):
            ax.hist(part, edges, histtype="stepfilled", color=color, alpha=0.25)
            ax.hist(part, edges, histtype="step", color=color, linestyle=style, linewidth=1.8, label=label)
        auroc = metrics.auroc(*(part for part in reversed(scores[name])))
        ax.set(title=f"{name}\nAUROC {auroc:.3f}", xlabel=unit)
        ax.spines[["top", "right"]].set_visible(False)
        if name == PLAIN:
            ax.set_ylabel("test images")
            handles = ax.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main()
