"""Active learning on scikit-learn's digits: which images to label next.

Every round trains a network on the images labelled so far, fits the posterior, and labels ten more of the pool: random
ones, those of the largest mutual information (BALD), or the batch whose labels together tell most (BatchBALD). Prints
the accuracy on test images, and writes a picture. Takes some minutes on one core.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

from sublaplace import SubspaceLaplace, active

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "active_learning.png"
FIRST, BATCH, CANDIDATES, TEST = 20, 10, 400, 797
# Colours of Okabe and Ito, which readers with every kind of colour vision can tell apart.
COLOURS = {"random": "#8C8C8C", "BALD": "#D55E00", "BatchBALD": "#0072B2"}

Choice = Callable[[SubspaceLaplace, Tensor, torch.Generator], Tensor]
CHOICES: dict[str, Choice] = {
    "random": lambda la, pool, generator: torch.randperm(len(pool), generator=generator)[:BATCH],
    "BALD": lambda la, pool, generator: active.bald(la, pool, BATCH),
    "BatchBALD": lambda la, pool, generator: active.batch_bald(la, pool, BATCH, draws=50, generator=generator),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        name: torch.tensor([accuracies(name, seed, arguments.rounds) for seed in range(arguments.seeds)])
        for name in CHOICES
    }
    print(table(found))
    draw(found, arguments.picture)


def accuracies(name: str, seed: int, rounds: int) -> list[float]:
    """Return the accuracy on test images before the first round and after each."""
    pixels, digits = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(pixels), generator=generator)
    x, y = (torch.tensor(pixels).float() / 16)[order], torch.tensor(digits)[order]
    test, pool = slice(0, TEST), torch.arange(TEST, len(x))
    chosen, pool = pool[:FIRST], pool[FIRST:]
    result = []
    for number in range(rounds + 1):
        model = trained(x[chosen], y[chosen], seed)
        with torch.no_grad():
            result.append(float((model(x[test]).argmax(1) == y[test]).double().mean()))
        if number < rounds:
            la = SubspaceLaplace(model, "classification", prior_precision=1.0).fit([(x[chosen], y[chosen])])
            pool = pool[torch.randperm(len(pool), generator=generator)]
            new = CHOICES[name](la, x[pool[:CANDIDATES]], generator)
            chosen = torch.cat([chosen, pool[new]])
            pool = pool[~torch.isin(pool, chosen)]
    return result


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """Return a network at its MAP under λ = 1, by the same steps for every choice."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=1 / len(x))
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def table(found: dict[str, Tensor]) -> str:
    """Return the mean accuracies as Markdown, with the standard error over the seeds."""
    rounds = next(iter(found.values())).shape[1]
    shown = sorted({0, rounds // 4, rounds // 2, rounds - 1})
    lines = ["| chosen by | " + " | ".join(f"{FIRST + BATCH * k} labels" for k in shown) + " |"]
    lines.append("|---" * (len(shown) + 1) + "|")
    for name, values in found.items():
        error = values.std(0) / len(values) ** 0.5
        cells = (f"{100 * values[:, k].mean():.1f} ± {100 * error[k]:.1f}" for k in shown)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(found: dict[str, Tensor], path: Path) -> None:
    """Draw the mean accuracy against the number of labels, with the standard error."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in found.items():
        labels = [FIRST + BATCH * k for k in range(values.shape[1])]
        mean, error = 100 * values.mean(0), 100 * values.std(0) / len(values) ** 0.5
        axes.plot(labels, mean, color=COLOURS[name], label=name)
        axes.fill_between(labels, mean - error, mean + error, color=COLOURS[name], alpha=0.2, linewidth=0)
    axes.set(xlabel="labelled images", ylabel="accuracy on test images, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
