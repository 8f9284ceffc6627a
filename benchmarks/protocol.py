"""What every benchmark case agrees on: its interface, the problem size and the number of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# A case is set up, untimed, with a network of its own, inputs and targets. What it returns is timed.
Setup = Callable[[nn.Module, Tensor, Tensor], Callable[[], Any]]

NUM_THREADS = 2
PRIOR_PRECISION = 32.69  # the paper's λ for FashionMNIST
NUM_SUBSPACE_INPUTS = 100  # n, the inputs X′ that P is built from
SUBSPACE_DIMENSION = 100  # s
NUM_FIT_INPUTS = 100  # inputs of an untimed fit which only prepares a timed prediction
