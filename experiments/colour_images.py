"""CIFAR10 and ImageNet10 as tensors."""

import csv
import io
import lzma
import zipfile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.datasets import Dataset, SourceFile, content

_CIFAR10_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
_CIFAR10_DIGESTS = {
    "data_batch_1.delta.npy.xz": "1389c2a89e7a89852b39d7029a8837c079fd2ed312645b86cea71a2f3fd9573a",
    "data_batch_2.delta.npy.xz": "5eb4b42ea104642c68401e73dd2c726e331dc10d8a3396eed45230829d253cbe",
    "data_batch_3.delta.npy.xz": "ff78350615e1cad2fbbf8a4b172f24fd200de25d2c0679384a7a00ab8fcaa206",
    "data_batch_4.delta.npy.xz": "1ab586603130bbff4309e97973e9deb94d310083b192428e1ea0f91732f30201",
    "data_batch_5.delta.npy.xz": "661839f4a6998412ef5060d016e2b8c5dfc6ce2b51c25ff99d12337466698c2e",
    "labels.npz": "2adcb621b226054b45ea498e5151b50747ee667e75829c059844e7b78f6b5196",
    "test_batch.delta.npy.xz": "641aef4c7b8ebb1b05094d1086b7ce996878cd5964344c9d4d1aa3a3c5d88a82",
}
CIFAR10 = {name: SourceFile(f"cifar10/{name}", digest, _CIFAR10_HOME) for name, digest in _CIFAR10_DIGESTS.items()}
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

IMAGENET10 = SourceFile(
    "imagenet10/imagenet10.zip",
    "b11d28474dc919e535bc9685a344e82c3a9427d84963ce6f82966d9fefdbaf9d",
    "https://github.com/torchlurk/dataviz-project",
)
IMAGENET10_INDEX = SourceFile(
    "imagenet10/index.csv",
    "cd51edc43e3421128c1d35a9b987da08f4c1549927d2008bcb2e6cd056c1d268",
    "https://github.com/torchlurk/dataviz-project",
)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def scaled(pixels: NDArray[np.uint8], mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return pixels (n, H, W, 3) as inputs of the networks: (n, 3, H, W), channels scaled to mean 0 and deviation 1."""
    images = torch.tensor(pixels).permute(0, 3, 1, 2).float() / 255
    return (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def pixels_of(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.uint8]:
    """Invert `scaled`: (n, 3, H, W) back to pixels (n, H, W, 3)."""
    values = images * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
    return (values * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def cifar10() -> Dataset:
    """Load 50,000 training and 10,000 test images of 32 × 32 pixels."""
    labels = np.load(io.BytesIO(content(CIFAR10["labels.npz"])))
    train = np.concatenate([_cifar10_pixels(f"data_batch_{number}") for number in range(1, 6)])
    return Dataset(
        "cifar10",
        "classification",
        scaled(train, CIFAR10_MEAN, CIFAR10_STD),
        torch.tensor(labels["y_train"]).long(),
        scaled(_cifar10_pixels("test_batch"), CIFAR10_MEAN, CIFAR10_STD),
        torch.tensor(labels["y_test"]).long(),
    )


def _cifar10_pixels(batch: str) -> NDArray[np.uint8]:
    """Return pixels (10000, 32, 32, 3).

    The files hold the planes G, R − G and B − G, differenced along both axes, modulo 256.
    """
    with lzma.open(io.BytesIO(content(CIFAR10[f"{batch}.delta.npy.xz"]))) as file:
        differences = np.lib.format.read_array(file, allow_pickle=False)
    planes = differences.cumsum(-1, dtype=np.uint8).cumsum(-2, dtype=np.uint8)
    return np.stack([planes[1] + planes[0], planes[0], planes[2] + planes[0]], axis=-1)


def imagenet10() -> Dataset:
    """Load 331 training crops and 82 validation images of ten classes, 224 × 224 pixels."""
    index = list(csv.DictReader(io.StringIO(content(IMAGENET10_INDEX).decode("ascii"))))
    classes = sorted({row["wnid"] for row in index})
    with zipfile.ZipFile(io.BytesIO(content(IMAGENET10))) as archive:
        parts = [_imagenet10_part(archive, index, classes, folder) for folder in ("train_crop224/", "val/")]
    (train, train_labels), (test, test_labels) = parts
    return Dataset("imagenet10", "classification", train, train_labels, test, test_labels)


def _imagenet10_part(
    archive: zipfile.ZipFile, index: list[dict[str, str]], classes: list[str], folder: str
) -> tuple[Tensor, Tensor]:
    """Load the centres of a folder's images; the shorter side of uncropped images is first resized to 256 pixels."""
    from PIL import Image

    pixels, labels = [], []
    for row in index:
        if row["path"].startswith(folder):
            image = Image.open(io.BytesIO(archive.read(row["path"]))).convert("RGB")
            if image.size != (224, 224):
                factor = 256 / min(image.size)
                image = image.resize(
                    (round(image.width * factor), round(image.height * factor)), Image.Resampling.BILINEAR
                )
            left, top = (image.width - 224) // 2, (image.height - 224) // 2
            pixels.append(np.asarray(image.crop((left, top, left + 224, top + 224))))
            labels.append(classes.index(row["wnid"]))
    return scaled(np.stack(pixels), IMAGENET_MEAN, IMAGENET_STD), torch.tensor(labels)
