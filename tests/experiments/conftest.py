"""Networks of the experiments with fewer parameters, under names of their own."""

from collections.abc import Iterator
from functools import partial

import pytest

from experiments.networks import NETWORKS, ReusedConvolutionCNN, mlp


@pytest.fixture(scope="session")
def small_networks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETWORKS, "small-mlp", partial(mlp, 8, 2, width=24))
        patch.setitem(NETWORKS, "small-cnn", partial(ReusedConvolutionCNN, channels=6))
        yield
