"""What a method is given: the data of one split and the networks trained on them."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.calibration.sets import Task

BATCH_SIZE = 100  # of the loaders that the methods get; none of the methods depends on it


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs (n, …) and their targets: (n, C) numbers or (n,) classes."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: Tensor | slice) -> "Examples":
        return Examples(self.inputs[rows], self.targets[rows])

    def loader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Iterate over the examples in order, in batches."""
        return DataLoader(TensorDataset(self.inputs, self.targets), BATCH_SIZE)


@dataclass(frozen=True, eq=False)
class Problem:
    """One split of a data set. Inputs, and the targets of regression, are standardised on `train`.

    `network` was trained on `train`, which is `fit` and `validation` together. `held_out_network` was trained on `fit`
    alone: methods that use validation data take it. `members` are further networks for an ensemble with `network`, and
    `dropout_network` was trained with dropout; both are empty where no such networks exist. `is_half` says that
    another problem has the same networks and training data, with validation and test data exchanged.
    """

    dataset: str
    split: int
    task: Task
    train: Examples
    fit: Examples
    validation: Examples
    test: Examples
    network: nn.Module
    held_out_network: nn.Module
    members: tuple[nn.Module, ...] = ()
    dropout_network: nn.Module | None = None
    is_half: bool = False
