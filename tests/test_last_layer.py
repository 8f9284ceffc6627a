"""The last linear layer in its own form, and backward passes that end where nothing more is wanted."""

import pytest
import torch
from dense_reference import dense_jacobian, dense_outputs, sigmoid_hessians, softmax_hessians
from networks import make
from torch import nn

from sublaplace import Bernoulli, Categorical, Gaussian, Subset, SubspaceLaplace
from sublaplace.curvature import last_layer
from sublaplace.fitting import steps
from sublaplace.jacobians.blocks import OuterBlock
from sublaplace.jacobians.head import HeadBlock
from sublaplace.jacobians.linearization import Linearization
from sublaplace.jacobians.wanted import Wanted
from sublaplace.posteriors import last_layer as last_layer_variances
from sublaplace.posteriors import subspace

C, F, N = 4, 5, 20


class Counted(torch.autograd.Function):
    """The hyperbolic tangent; counts its backward passes."""

    passes = 0

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    def backward(context, gradient):
        Counted.passes += 1
        return gradient * (1 - context.saved_tensors[0].square())


class Network(nn.Module):
    def __init__(self, transposed=False):
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.second = nn.Linear(6, F)
        self.head = nn.Linear(F, C)
        self.matrix = nn.Parameter(torch.randn(F, C)) if transposed else None

    def forward(self, x):
        x = self.second(Counted.apply(self.first(x))).tanh()
        return self.head(x) if self.matrix is None else x @ self.matrix


def network(transposed=False):
    torch.manual_seed(0)
    return Network(transposed).double()


def data(n=N, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, C, (n,), generator=generator)


def batches(inputs, targets, *more, size=7):
    return [tuple(part[i : i + size] for part in (inputs, targets, *more)) for i in range(0, len(inputs), size)]


def head_places(model):
    """Which entries of θ̂ belong to the last layer."""
    last = ("head.weight", "head.bias")
    return torch.cat([torch.full((p.numel(),), name in last) for name, p in model.named_parameters()])


@pytest.mark.parametrize("transposed", [False, True])
def test_a_head_block_has_the_products_of_its_rows(transposed):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    head = HeadBlock(randn(6, F), C, transposed)
    outer = head.outer()
    rows = outer.rows()
    vectors, weights = randn(3, C * F), randn(6, C, 3)
    assert torch.equal(head.rows(), rows)
    assert torch.allclose(head.matmul(vectors), rows @ vectors.T)
    into, expected = torch.zeros(3, C * F, dtype=torch.float64), torch.zeros(3, C * F, dtype=torch.float64)
    head.add_transpose_matmul(weights, into)
    outer.add_transpose_matmul(weights, expected)
    assert torch.allclose(into, expected)
    assert torch.allclose(head.squared_sum(), rows.square().sum((0, 1)))
    indices = torch.randperm(C * F, generator=generator)[:7]
    assert torch.equal(head.columns(indices), rows[:, :, indices])
    assert torch.equal(head.scaled(2.0).rows(), 2 * rows)
    scores = randn(C * F).square()
    assert torch.allclose(head.variances(scores), (rows.square() * scores).sum(2))


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_the_last_layer_need_no_backward_pass(transposed):
    model, (inputs, _) = network(transposed), data()
    names = frozenset(["matrix"] if transposed else ["head.weight", "head.bias"])
    linearization = Linearization(model)
    linearization.jacobian(inputs)  # probes the network
    Counted.passes = before = 0
    jacobian = linearization.jacobian(inputs, wanted=Wanted(names=names))
    assert Counted.passes == before and set(jacobian.blocks) == names
    assert all(isinstance(block, HeadBlock) for block in jacobian.blocks.values())
    whole = linearization.jacobian(inputs)
    assert Counted.passes == C
    assert torch.allclose(whole.dense_rows(), dense_jacobian(model, inputs), atol=1e-12)
    for name in names:
        assert torch.allclose(jacobian.blocks[name].rows(), whole.blocks[name].rows(), atol=1e-12)


def test_backward_passes_end_at_the_first_wanted_layer():
    model, (inputs, _) = network(), data()
    linearization = Linearization(model)
    linearization.jacobian(inputs)
    Counted.passes = 0
    jacobian = linearization.jacobian(inputs, wanted=Wanted(names=frozenset(["second.weight"])))
    assert Counted.passes == 0
    expected = linearization.jacobian(inputs).blocks["second.weight"].rows()
    assert torch.allclose(jacobian.blocks["second.weight"].rows(), expected, atol=1e-12)


def test_a_scaled_output_is_not_taken_for_that_of_the_last_layer():
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return self.inner(x) / 2

    model, (inputs, labels) = Tempered(), data()
    la = SubspaceLaplace.paper(model, "classification", projector="last-layer").fit(batches(inputs, labels))
    assert not la._state.linearization.ends_linear()
    rows = dense_jacobian(model, inputs)[:, head_places(model.inner)]
    hessians = softmax_hessians(dense_outputs(model, inputs))
    precision = rows.T @ torch.block_diag(*hessians) @ rows + torch.eye(rows.shape[1], dtype=torch.float64)
    expected = rows @ torch.linalg.solve(precision, rows.T)
    assert torch.allclose(la.functional_covariance(inputs, joint=True), expected, atol=1e-10)


@pytest.mark.parametrize("prior", [0.4, "evidence", "auto"])
def test_fit_prediction_and_prior_of_the_last_layer_need_no_backward_pass(prior):
    model, (inputs, labels) = network(), data()
    la = SubspaceLaplace(model, "classification", projector="last-layer", prior_precision=prior)
    Counted.passes = 0
    la.fit(batches(inputs, labels))
    probing = Counted.passes
    la(data(30)[0])
    la.tuned(batches(*data(30, seed=2)))
    assert Counted.passes == probing and la._state.linearization.passes == 0
    assert la.dim == C * (F + 1)


LIKELIHOODS = {
    "classification": (Categorical(), lambda labels: labels, softmax_hessians),
    "ignored": (Categorical(ignore_index=3), lambda labels: labels, softmax_hessians),
    "multi-label": (Bernoulli(), lambda labels: nn.functional.one_hot(labels, C), sigmoid_hessians),
    "missing labels": (
        Bernoulli(ignore_index=-1),
        lambda labels: nn.functional.one_hot(labels, C) - nn.functional.one_hot((labels + 1) % C, C),
        sigmoid_hessians,
    ),
    "regression": (
        Gaussian(0.5),
        lambda labels: nn.functional.one_hot(labels, C).double(),
        lambda outputs: torch.eye(C, dtype=torch.float64).expand(len(outputs), C, C) / 0.25,
    ),
}


def kronecker_reference(model, inputs, hessians, weights, x, prior, diagonal=False):
    """J (ΣH ⊗ Σaaᵀ/N + λ)⁻¹ Jᵀ of weight and bias, by brute force."""
    places = head_places(model)
    rows = dense_jacobian(model, x)[:, places]
    features = model.second(model.first(inputs).tanh()).tanh().detach()
    of_inputs = weights.amax(1)
    roots = weights.sqrt()
    H = (roots[:, :, None] * hessians * roots[:, None, :]).sum(0)
    H = H.diagonal().diag() if diagonal else H
    A = (features * of_inputs[:, None]).T @ features / of_inputs.sum()
    ggn = torch.block_diag(torch.kron(H, A), H)
    precision = ggn + prior * torch.eye(len(ggn), dtype=torch.float64)
    return rows @ torch.linalg.solve(precision, rows.T)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_large_last_layer_has_kronecker_factors_with_an_exact_prior(name, diagonal, monkeypatch):
    monkeypatch.setattr(steps, "LARGEST_EXACT_LAST_LAYER", 1)
    if diagonal:
        monkeypatch.setattr(last_layer, "DENSE_OUTPUTS", 1)
    likelihood, targets_of, hessians_of = LIKELIHOODS[name]
    model, (inputs, labels) = network(), data()
    targets, weights = targets_of(labels), torch.rand(N, generator=torch.Generator().manual_seed(3)).double()
    la = SubspaceLaplace.paper(model, likelihood, prior_precision=0.3, projector="last-layer")
    la.fit(batches(inputs, targets, weights))
    assert la._state.linearization.passes == 0
    assert "last layer alone" in la.summary()
    counted = likelihood.counted(targets)
    each = weights[:, None] if counted is None else weights[:, None] * counted
    x = data(6, seed=5)[0]
    hessians = hessians_of(dense_outputs(model, inputs))
    expected = kronecker_reference(model, inputs, hessians, each, x, 0.3, diagonal)
    joint = la.functional_covariance(x, joint=True)
    assert torch.allclose(joint, expected, rtol=1e-9, atol=1e-12)
    blocks = torch.stack([expected[i : i + C, i : i + C] for i in range(0, 6 * C, C)])
    assert torch.allclose(la.functional_covariance(x), blocks, rtol=1e-9, atol=1e-12)
    assert torch.allclose(la.functional_variance(x).flatten(), expected.diagonal(), rtol=1e-9, atol=1e-12)


@pytest.fixture
def kronecker(monkeypatch):
    monkeypatch.setattr(steps, "LARGEST_EXACT_LAST_LAYER", 1)
    model, (inputs, labels) = network(), data()
    return SubspaceLaplace.paper(model, "classification", prior_precision=0.3, projector="last-layer"), inputs, labels


def test_a_kronecker_factored_last_layer_is_saved_updated_sampled_and_tuned(kronecker, tmp_path):
    la, inputs, labels = kronecker
    whole = SubspaceLaplace.paper(la.model, "classification", prior_precision=0.3, projector="last-layer")
    whole.fit(batches(inputs, labels))
    la.fit(batches(inputs[:9], labels[:9]))
    grown = la.updated(batches(inputs[9:], labels[9:]))
    x = data(6, seed=5)[0]
    assert torch.allclose(grown.functional_covariance(x), whole.functional_covariance(x), rtol=1e-9, atol=1e-12)
    grown.save(tmp_path / "la.safetensors")
    again = SubspaceLaplace.load(tmp_path / "la.safetensors", la.model)
    assert torch.allclose(again.functional_covariance(x), grown.functional_covariance(x), rtol=1e-12)
    drawn = again.sample(500)
    places = head_places(la.model)
    theta = torch.cat([p.detach().flatten() for p in la.model.parameters()])
    assert torch.equal(drawn[:, ~places], theta[~places].expand(500, -1))
    assert (drawn[:, places].std(0) > 0).all()
    held_out = batches(*data(40, seed=6))
    tuned = whole.tuned(held_out)
    for prior in (tuned.prior_precision * 0.8, tuned.prior_precision * 1.25):
        assert (
            tuned.evaluate(held_out).posterior.scores["nll"]
            <= whole.with_prior(prior).evaluate(held_out).posterior.scores["nll"] + 0.3 / 40
        )


def test_a_tied_last_layer_without_factors_of_its_own_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(steps, "LARGEST_EXACT_LAST_LAYER", 1)
    model, inputs = make("tied-weights", 8)
    la = SubspaceLaplace.paper(model, "classification", projector="last-layer")
    with pytest.raises(ValueError, match=r"'embedding\.weight' .* used in other ways.*lowrank-kfac"):
        la.fit([(inputs, torch.arange(8) % 4)])


def test_the_blocks_of_a_last_layer_with_positions_keep_their_gradients():
    """A convolution whose outputs are the network's is no last linear layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, C, 3), nn.Flatten()).double()
    jacobian = Linearization(model).jacobian(torch.randn(5, 2, 3, dtype=torch.float64))
    assert isinstance(jacobian.blocks["0.weight"], OuterBlock)


class Sizes(list):
    """Numbers of inputs; no setting of the network that holds it."""


class Passed(nn.Module):
    """A network that remembers how many inputs each forward pass had; `inner` ends in the last layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.sizes = inner, Sizes()

    def forward(self, x):
        self.sizes.append(len(x))
        return self.inner(x)


@pytest.mark.parametrize("largest", [5000, 1])
@pytest.mark.parametrize("prior", [0.4, "evidence"])
def test_a_fit_of_the_last_layer_runs_each_training_input_through_the_network_once(prior, largest, monkeypatch):
    monkeypatch.setattr(steps, "LARGEST_EXACT_LAST_LAYER", largest)
    model, (inputs, labels) = Passed(network()), data()
    la = SubspaceLaplace(model, "classification", projector="last-layer", prior_precision=prior)
    read = []

    class Loader:
        def __iter__(self):
            for batch in batches(inputs, labels, size=5):
                read.append(len(batch[0]))
                yield batch

    la.fit(Loader())
    assert sum(size for size in model.sizes if size > 3) == N  # the network is probed with three inputs and fewer
    assert sum(read) == N
    model.sizes.clear()
    la(data(30)[0])
    la.functional_variance(data(9)[0])
    assert model.sizes == [30, 9]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_exact_last_layer_is_that_of_brute_force(name, transposed):
    likelihood, targets_of, hessians_of = LIKELIHOODS[name]
    model, (inputs, labels) = network(transposed), data()
    targets, weights = targets_of(labels), torch.rand(N, generator=torch.Generator().manual_seed(3)).double()
    la = SubspaceLaplace.paper(model, likelihood, prior_precision=0.3, projector="last-layer")
    la.fit(batches(inputs, targets, weights))
    names = ("matrix",) if transposed else ("head.weight", "head.bias")
    places = torch.cat([torch.full((p.numel(),), key in names) for key, p in model.named_parameters()])
    rows = dense_jacobian(model, inputs)[:, places]
    counted = likelihood.counted(targets)
    each = weights[:, None].expand(N, C) if counted is None else weights[:, None] * counted
    roots = each.sqrt().expand(N, C)
    H = roots[:, :, None] * hessians_of(dense_outputs(model, inputs)) * roots[:, None, :]
    precision = rows.T @ torch.block_diag(*H) @ rows + 0.3 * torch.eye(rows.shape[1], dtype=torch.float64)
    x = data(6, seed=5)[0]
    own = dense_jacobian(model, x)[:, places]
    expected = own @ torch.linalg.solve(precision, own.T)
    assert torch.allclose(la.functional_covariance(x, joint=True), expected, rtol=1e-9, atol=1e-12)


def test_a_last_layer_that_some_inputs_use_otherwise_takes_a_pass_of_its_own():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            outputs = self.inner(x)
            return outputs / 2 if (x[:, 0] > 9).any() else outputs

    model, (inputs, labels) = Passed(Sometimes()), data()
    inputs[10:, 0] = 10.0
    la = SubspaceLaplace.paper(model, "classification", projector="last-layer")
    la.fit(batches(inputs, labels, size=10))
    assert sum(size for size in model.sizes if size > 3) > N
    scale = torch.where(inputs[:, :1] > 9, 0.5, 1.0).double()
    rows = dense_jacobian(model.inner.inner, inputs)[:, head_places(model.inner.inner)] * scale.repeat_interleave(C, 0)
    hessians = softmax_hessians(dense_outputs(model.inner.inner, inputs) * scale)
    precision = rows.T @ torch.block_diag(*hessians) @ rows + torch.eye(rows.shape[1], dtype=torch.float64)
    expected = rows @ torch.linalg.solve(precision, rows.T)
    found = torch.cat([la.functional_variance(part).flatten() for part in inputs.split(10)])
    assert torch.allclose(found, expected.diagonal(), atol=1e-10)


def test_the_two_ways_to_sum_up_a_last_layer_agree(tmp_path):
    """A checkpoint makes the curvature in a pass of its own."""
    model, (inputs, labels) = network(), data()
    made = SubspaceLaplace(model, "classification", projector="last-layer")
    apart = SubspaceLaplace(model, "classification", projector="last-layer")
    made.fit(batches(inputs, labels))
    apart.fit(batches(inputs, labels), checkpoint=tmp_path)
    assert made.prior_precision == pytest.approx(apart.prior_precision, rel=1e-9)
    x = data(6, seed=5)[0]
    assert torch.allclose(made.functional_covariance(x), apart.functional_covariance(x), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("transposed", [False, True])
def test_variances_of_a_last_layer_are_the_diagonals_of_its_covariances(transposed, monkeypatch):
    model, (inputs, labels) = network(transposed), data()
    la = SubspaceLaplace.paper(model, "classification", projector="last-layer").fit(batches(inputs, labels))
    x = data(6, seed=5)[0]
    expected = la.functional_covariance(x).diagonal(dim1=1, dim2=2)
    called = []
    factors = last_layer_variances.output_factors
    monkeypatch.setattr(subspace, "output_factors", lambda *args: called.append(1) or factors(*args))
    assert torch.allclose(la.functional_variance(x), expected, rtol=1e-12)
    la.functional_variance(x)
    assert len(called) == 1
    again = la.with_prior(7.0)
    expected = again.functional_covariance(x).diagonal(dim1=1, dim2=2)
    assert torch.allclose(again.functional_variance(x), expected, rtol=1e-12)


def test_a_part_of_a_last_layer_has_rows_of_its_own():
    model, (inputs, labels) = network(), data()

    def half(context):
        layout = context.linearization.layout
        start = layout.slices["head.weight"].start
        return Subset(layout, torch.arange(start, start + 9), context.linearization.dtype)

    la = SubspaceLaplace.paper(model, "classification", 9, projector=half).fit(batches(inputs, labels))
    x = data(6, seed=5)[0]
    expected = la.functional_covariance(x).diagonal(dim1=1, dim2=2)
    assert torch.allclose(la.functional_variance(x), expected, rtol=1e-12)
