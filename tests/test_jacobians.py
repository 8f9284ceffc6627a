import pytest
import torch
import torch.nn.functional as F
from dense_reference import dense_jacobian
from networks import NETWORKS, make
from torch import nn

from sublaplace.jacobians.blocks import OuterBlock, RowBlock
from sublaplace.jacobians.chunks import ChunkPolicy
from sublaplace.jacobians.linearization import Linearization

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NETWORKS)
def test_rows_equal_those_of_plain_differentiation(name, dtype):
    model, inputs = make(name, 5, dtype)
    expected = dense_jacobian(model, inputs)
    rows = Linearization(model).jacobian(inputs).dense_rows()
    assert rows.dtype == dtype
    assert (rows - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


class Branching(nn.Module):
    """Takes one of two layers by a property of all inputs of the batch."""

    def __init__(self):
        super().__init__()
        self.positive = nn.Linear(3, 4)
        self.negative = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        layer = self.positive if x.mean() > 0 else self.negative
        return self.head(layer(x).tanh())


def test_batches_that_take_different_branches_each_get_their_own_jacobian():
    torch.manual_seed(0)
    model = Branching().double()
    linearization = Linearization(model)
    for sign in (1.0, -1.0, 1.0):
        inputs = sign * torch.rand(5, 3, dtype=torch.float64)
        assert torch.allclose(linearization.jacobian(inputs).dense_rows(), dense_jacobian(model, inputs))


def test_a_branch_that_mixes_the_inputs_of_a_batch_is_refused_with_the_layer():
    model = Branching().double()
    inputs = torch.tensor([[1.0] * 3, [1.0] * 3, [-4.0] * 3], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"depend on the other inputs.*") as caught:
        Linearization(model).jacobian(inputs)
    assert "negative.weight" in str(caught.value) or "positive.weight" in str(caught.value)


class Counting(nn.Module):
    """Counts its calls in a buffer and in an attribute, and keeps its last input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.last = None

    def forward(self, x):
        self.calls += 1
        self.last = x
        return self.layer(x).tanh()


def test_a_module_with_side_effects_gets_the_right_jacobian_and_its_buffers_back():
    model = Counting().double()
    inputs = torch.randn(5, 3, dtype=torch.float64)
    linearization = Linearization(model)
    assert torch.allclose(linearization.jacobian(inputs).dense_rows(), dense_jacobian(model, inputs))
    assert model.calls == 0


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x) + torch.randn(len(x), 2, dtype=x.dtype)


def test_randomness_in_eval_mode_is_refused():
    with pytest.raises(ValueError, match="randomness"):
        Linearization(Random().double()).jacobian(torch.randn(5, 3, dtype=torch.float64))


@pytest.mark.parametrize("name", NETWORKS)
def test_row_by_row_gives_the_rows_of_the_whole_jacobian(name):
    model, inputs = make(name, 5)
    linearization = Linearization(model)
    whole = linearization.jacobian(inputs)
    single = list(linearization.row_by_row(inputs))
    assert [jacobian.num_rows for jacobian in single] == [1] * whole.num_rows
    assert [jacobian.repeats_inputs for jacobian in single] == [False] + [True] * (whole.num_rows - 1)
    rows = torch.stack([jacobian.dense_rows() for jacobian in single], dim=1).flatten(0, 1)
    assert torch.allclose(rows, whole.dense_rows(), rtol=1e-12, atol=1e-12)


def test_row_by_row_without_rows_gives_one_jacobian_that_holds_the_inputs():
    model, inputs = make("paper-cnn", 5)
    (jacobian,) = Linearization(model).row_by_row(inputs, torch.zeros(5, 0, 3, dtype=torch.float64))
    assert jacobian.num_rows == 0
    assert not jacobian.repeats_inputs
    assert jacobian.blocks["first.weight"].num_terms() > 0


class NotDifferentiable(nn.Module):
    """The root of the absolute value: its gradient at zero is not a number."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.first(x).abs().sqrt())


PRODUCTS = {
    "matmul": lambda jacobian: jacobian.matmul(jacobian.layout.zeros(1, jacobian.outputs)),
    "columns": lambda jacobian: jacobian.columns(jacobian.layout.split_indices(torch.arange(3)), 3),
    "dense_rows": lambda jacobian: jacobian.dense_rows(),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())
def test_products_with_rows_that_are_not_finite_name_the_parameter(product):
    torch.manual_seed(0)
    inputs = torch.randn(5, 3, dtype=torch.float64)
    inputs[4] = 0  # behind those that are probed
    jacobian = Linearization(NotDifferentiable().double()).jacobian(inputs)
    with pytest.raises(ValueError, match=r"'first\.weight' holds NaN or infinity"):
        product(jacobian)


class Viewed(nn.Module):
    """Works in the usual memory order only: `view` refuses others."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3)
        self.head = nn.Linear(3 * 16, 2)
        self.strides = []

    def forward(self, x):
        x = self.convolution(x)
        self.strides.append(x.stride())
        return self.head(x.view(len(x), -1).tanh())


def test_convolutions_run_channels_last_unless_the_network_cannot():
    torch.manual_seed(0)
    model, inputs = Viewed(), torch.randn(4, 2, 6, 6)
    rows = Linearization(model).jacobian(inputs).dense_rows()
    expected = dense_jacobian(model, inputs)
    assert (rows - expected).abs().max() <= TOLERANCE[torch.float32] * expected.abs().max()
    assert model.strides[0] == (48, 1, 12, 3)  # tried
    assert model.strides[1] == (48, 16, 4, 1)  # and given up


class PooledActivations(nn.Module):
    """ReLU before max pooling in many forms, with equal values, zeros and a second use of the ReLU's output."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 3, 3, padding=1)
        self.head = nn.Linear(3 * 34, 2)

    def forward(self, x):
        x = self.convolution(x)
        y = F.relu(x)
        pooled = [
            F.max_pool2d(y, 2),
            nn.MaxPool2d(3, stride=2, padding=1)(y),
            torch.max_pool2d(torch.relu(x), 2, 2, 0, 1, True),
            F.max_pool2d(input=x.relu(), kernel_size=2, return_indices=True)[0],
            F.max_pool1d(F.relu(x.flatten(2)), 8).unsqueeze(3),
            F.max_pool2d(x, 2),
        ]
        return self.head(torch.cat([p.flatten(2) for p in pooled] + [y.mean((2, 3)).unsqueeze(2)], dim=2).flatten(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_relu_before_max_pooling_gets_the_same_outputs_and_gradients_as_by_plain_differentiation(dtype):
    torch.manual_seed(0)
    model = PooledActivations().to(dtype)
    inputs = torch.randint(-1, 2, (6, 1, 5, 5)).to(dtype)  # many equal values
    inputs[0] = 0
    linearization = Linearization(model)
    expected = dense_jacobian(model, inputs)
    rows = linearization.jacobian(inputs).dense_rows()
    assert (rows - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    assert torch.allclose(linearization.outputs(inputs), model(inputs), rtol=TOLERANCE[dtype])
    assert not linearization.unusual_parameters()


@pytest.mark.parametrize("budget", [1, 10_000, 10**9])
@pytest.mark.parametrize("name", ["paper-cnn", "transformer", "lstm"])
def test_chunks_under_any_budget_give_the_same_rows(name, budget):
    model, inputs = make(name, 7)
    linearization = Linearization(model, chunks=ChunkPolicy(budget))
    chunks = list(linearization.chunks(inputs))
    assert {1: len(chunks) == 7, 10**9: len(chunks) == 1}.get(budget, True)
    rows = torch.cat([chunk.dense_rows() for chunk in chunks])
    assert torch.allclose(rows, dense_jacobian(model, inputs), rtol=1e-10, atol=1e-12)


def test_chunks_beside_a_large_projection_are_larger_within_a_quarter_of_it_and_the_budget():
    model, inputs = nn.Sequential(nn.Linear(3000, 2000), nn.Tanh(), nn.Linear(2000, 10)), torch.randn(5, 3000)
    alone, beside, less = (Linearization(model, chunks=ChunkPolicy(2**40, vectors)) for vectors in (0, 3000, 800))
    assert beside.chunk_size(inputs) == -(-256 // 10)  # 256 rows of ten outputs, and no more
    assert alone.chunk_size(inputs) < less.chunk_size(inputs) < beside.chunk_size(inputs)
    assert beside.chunk_size(inputs, row_by_row=True) == alone.chunk_size(inputs, row_by_row=True)
    assert Linearization(model, chunks=ChunkPolicy(1, 3000)).chunk_size(inputs) == 1
    before = alone.chunk_size(inputs)
    assert alone.chunk_size(inputs, num_vectors=3000) == beside.chunk_size(inputs)
    assert beside.chunk_size(inputs, num_vectors=0) == alone.chunk_size(inputs) == before
    assert [len(chunk.outputs) for chunk in beside.chunks(torch.randn(28, 3000))] == [26, 2]


@pytest.mark.parametrize("formed", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_products_equal_those_of_the_rows(name, formed):
    model, inputs = make(name, 5)
    jacobian = Linearization(model).jacobian(inputs)
    if formed:
        jacobian = jacobian.formed(100)
    rows = dense_jacobian(model, inputs)
    n, K = jacobian.num_inputs, jacobian.num_rows
    layout = jacobian.layout
    generator = torch.Generator().manual_seed(0)
    V = torch.randn(3, layout.num_parameters, generator=generator, dtype=torch.float64)
    U = torch.randn(n, K, 3, generator=generator, dtype=torch.float64)
    assert torch.allclose(jacobian.matmul(layout.unflatten(V)).flatten(0, 1), rows @ V.T, atol=1e-10)
    into = layout.zeros(3, V)
    jacobian.add_transpose_matmul(U, into)
    assert torch.allclose(layout.flatten(into), U.flatten(0, 1).T @ rows, atol=1e-10)
    indices = torch.randperm(layout.num_parameters, generator=generator)[:20]
    columns = jacobian.columns(layout.split_indices(indices), len(indices)).flatten(0, 1)
    assert torch.allclose(columns, rows[:, indices], atol=1e-10)


def test_rows_are_formed_once_for_several_products_where_that_takes_little_memory():
    model, inputs = make("paper-cnn", 3)
    jacobian = Linearization(model).jacobian(inputs)
    rows = jacobian.num_inputs * jacobian.num_rows
    assert jacobian.formed(4 * rows - 1) is jacobian
    formed = jacobian.formed(4 * rows).blocks
    assert any(isinstance(jacobian.blocks[name], OuterBlock) and isinstance(formed[name], RowBlock) for name in formed)


GENERAL_PATH = {"free-parameters", "lstm", "gru"}
"""Networks with parameters that no rule covers."""


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_has_a_rule_where_one_is_expected(name):
    model, inputs = make(name, 4)
    linearization = Linearization(model)
    linearization.jacobian(inputs)
    assert bool(linearization.unusual_parameters()) == (name in GENERAL_PATH)
