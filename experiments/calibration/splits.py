"""How a table becomes training, validation and test data."""

import numpy as np
import torch

from experiments.calibration.problem import Examples
from experiments.calibration.sets import Table, TableSet

MOST_TRAINING_INPUTS = 3000
MOST_TEST_INPUTS = 5000


def split_table(table_set: TableSet, split: int) -> tuple[Examples, Examples, Examples]:
    """Draw one split: the nine tenths of the training data that are fitted, the validation tenth, the test data.

    A tenth of a set is test data. A large set gives `MOST_TRAINING_INPUTS` training inputs, and of the others at most
    `MOST_TEST_INPUTS` test inputs. Scales are those of all training data.
    """
    inputs, targets = table_set.read()
    order = np.random.default_rng([42, split]).permutation(len(inputs))
    num_train = min(len(inputs) - len(inputs) // 10, MOST_TRAINING_INPUTS)
    train, test = order[:num_train], order[num_train : num_train + MOST_TEST_INPUTS]
    inputs = _standardised(inputs, train)
    if table_set.task == "regression":
        targets = _standardised(targets, train)
    dtype = torch.float32 if table_set.task == "regression" else torch.int64

    def examples(rows: np.typing.NDArray[np.int64]) -> Examples:
        return Examples(torch.tensor(inputs[rows], dtype=torch.float32), torch.tensor(targets[rows], dtype=dtype))

    num_fit = num_train - num_train // 10
    return examples(train[:num_fit]), examples(train[num_fit:]), examples(test)


def joined(first: Examples, second: Examples) -> Examples:
    """Put two sets of examples together."""
    return Examples(torch.cat([first.inputs, second.inputs]), torch.cat([first.targets, second.targets]))


def _standardised(table: Table, train: np.typing.NDArray[np.int64]) -> Table:
    scale = table[train].std(0)
    # A column may be constant on the training data alone; it then stays near zero on the others too.
    return (table - table[train].mean(0)) / np.where(scale > 1e-12 * np.abs(table[train]).max(0), scale, 1.0)
