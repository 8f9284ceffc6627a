import pytest
import torch
from dense_reference import dense_jacobian
from networks import NETWORKS, make

from sublaplace.jacobians import Linearization

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NETWORKS)
def test_rows_equal_those_of_plain_differentiation(name, dtype):
    model, inputs = make(name, 5, dtype)
    expected = dense_jacobian(model, inputs)
    rows = Linearization(model).jacobian(inputs).dense_rows()
    assert rows.dtype == dtype
    assert (rows - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
