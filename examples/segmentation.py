"""Segmentation with a class at every pixel: uncertainty at borders, and at shapes that the network never saw.

A small convolutional network learns to mark discs with horizontal stripes and squares with vertical ones, in twelve
noisy pictures that this script makes. The posterior is then asked about new pictures, and about triangles with diagonal
stripes. Prints scores and mean uncertainties, and writes a picture to docs/images. Takes about a minute on one core.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from sublaplace import Categorical, SubspaceLaplace
from sublaplace.model.prediction import Prediction

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "segmentation.png"
CLASSES = ("background", "disc", "square")
SIDE = 28
COLOURS = np.array([[0.93, 0.93, 0.93], [0.0, 0.447, 0.698], [0.835, 0.369, 0.0]])  # of Okabe and Ito

Pictures = tuple[Tensor, Tensor]  # (n, 1, SIDE, SIDE), and the class of every pixel, (n, SIDE, SIDE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, default=PICTURE, help="file of the picture")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train, validation, test = (pictures(count, seed) for seed, count in enumerate((12, 30, 30)))
    network = trained_network(train)
    la = fitted(network, train, validation)
    print(la.evaluate(batches(test)))
    unseen = pictures(20, seed=3, shapes=("triangle",))
    for name, value in mean_information(la, test, unseen).items():
        print(f"mutual information, {name}: {value:.4f} nats per pixel")
    draw(la, test, unseen, arguments.picture)
    print(f"Picture in {arguments.picture}.")


def pictures(count: int, seed: int, shapes: tuple[str, ...] = CLASSES[1:]) -> Pictures:
    """Return noisy pictures with one or two shapes each, and the class of every pixel; triangles have none."""
    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    inputs, labels = [], []
    for _ in range(count):
        picture, classes = np.zeros((SIDE, SIDE)), np.zeros((SIDE, SIDE), dtype=np.int64)
        for _ in range(generator.integers(1, 3)):
            shape = shapes[generator.integers(len(shapes))]
            size = generator.uniform(4.0, 6.5)
            down, right = rows - generator.uniform(7, SIDE - 7), columns - generator.uniform(7, SIDE - 7)
            if shape == "disc":
                inside, stripes = down**2 + right**2 < size**2, rows
            elif shape == "square":
                inside, stripes = np.maximum(abs(down), abs(right)) < 0.9 * size, columns
            else:
                inside, stripes = (down < 0.9 * size) & (down > 2 * abs(right) - 1.5 * size), rows + columns
            picture[inside] = np.where(stripes % 4 < 2, 1.0, -1.0)[inside]
            classes[inside] = CLASSES.index(shape) if shape in CLASSES else 0
        inputs.append(picture + 0.4 * generator.standard_normal((SIDE, SIDE)))
        labels.append(classes)
    return torch.tensor(np.stack(inputs), dtype=torch.float32)[:, None], torch.tensor(np.stack(labels))


def batches(data: Pictures, size: int = 50) -> list[Pictures]:
    """Return the pictures in batches."""
    return list(zip(data[0].split(size), data[1].split(size), strict=True))


def trained_network(data: Pictures, epochs: int = 800) -> nn.Module:
    """Return a convolutional network of 4,083 parameters whose outputs see 17 × 17 pixels."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(1, 12, 3, padding=1), nn.ReLU()]
        for dilation in (1, 2, 4):
            layers += [nn.Conv2d(12, 12, 3, padding=dilation, dilation=dilation), nn.ReLU()]
        network = nn.Sequential(*layers, nn.Conv2d(12, len(CLASSES), 1))
        optimizer = torch.optim.Adam(network.parameters(), 3e-3)
        for _ in range(epochs):
            order = torch.randperm(len(data[0]))
            for inputs, labels in batches((data[0][order], data[1][order]), 10):
                optimizer.zero_grad()
                F.cross_entropy(network(inputs), labels).backward()
                optimizer.step()
    return network.eval()


def fitted(network: nn.Module, train: Pictures, validation: Pictures, dim: int = 60) -> SubspaceLaplace:
    """Return the posterior; the classes are in dimension 1 of the outputs (n, 3, 28, 28)."""
    la = SubspaceLaplace(network, Categorical(class_dim=1), dim)
    return la.fit(batches(train), batches(validation))


def mean_information(la: SubspaceLaplace, test: Pictures, unseen: Pictures) -> dict[str, float]:
    """Return the mean mutual information of pixels: far from borders, at borders, and at unseen shapes."""
    inputs, labels = test
    found = la.predict(inputs).mutual_information
    border = at_borders(labels)
    strange = la.predict(unseen[0]).mutual_information
    shapes = F.avg_pool2d(unseen[0].square(), 5, stride=1, padding=2)[:, 0] > 0.7
    return {
        "inside of familiar shapes": float(found[(labels > 0) & ~border].mean()),
        "background": float(found[(labels == 0) & ~border].mean()),
        "borders": float(found[border].mean()),
        "triangles": float(strange[shapes].mean()),
    }


def at_borders(labels: Tensor) -> Tensor:
    """Return which pixels have a neighbour of another class: (n, SIDE, SIDE)."""
    values = labels[:, None].float()
    return (F.max_pool2d(values, 3, 1, 1) != -F.max_pool2d(-values, 3, 1, 1))[:, 0]


def draw(la: SubspaceLaplace, test: Pictures, unseen: Pictures, path: Path) -> None:
    """Draw two familiar pictures and two with triangles: the picture, the classes, and both kinds of uncertainty."""
    chosen = torch.cat([test[0][:2], unseen[0][:2]])
    prediction: Prediction = la.predict(chosen)
    rows = ("familiar", "familiar", "triangles", "triangles")
    columns = ("picture", "most probable class", "aleatoric [nats]", "epistemic [nats]")
    figure = Figure(figsize=(7.6, 8.4), layout="constrained")
    axes = figure.subplots(len(rows), len(columns))
    maps = {2: prediction.aleatoric, 3: prediction.epistemic}
    for i, row in enumerate(rows):
        axes[i, 0].imshow(chosen[i, 0], cmap="gray")
        axes[i, 1].imshow(COLOURS[prediction.probabilities[i].argmax(0).numpy()])
        axes[i, 0].set_ylabel(row)
    for k, values in maps.items():
        for i in range(len(rows)):
            drawn = axes[i, k].imshow(values[i], cmap="magma", vmin=0, vmax=float(values.max()))
        figure.colorbar(drawn, ax=axes[:, k], location="bottom", shrink=0.9)
    for k, title in enumerate(columns):
        axes[0, k].set_title(title)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    markers = [axes[0, 1].plot([], [], "s", color=colour, markeredgecolor="0.5")[0] for colour in COLOURS]
    figure.legend(markers, CLASSES, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
