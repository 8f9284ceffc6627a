"""Curvature against brute force: the dense GGN, the formula of KFAC written as loops, and curvlinops."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dense_reference import dense_ggn, dense_jacobian, dense_outputs, softmax_hessians
from networks import NETWORKS, make
from safetensors.torch import load_file
from test_jacobians import NotDifferentiable
from test_laplace import labels, loader
from torch import nn

from sublaplace.curvature.diagonal import diagonal_ggn
from sublaplace.curvature.exact import exact_ggn
from sublaplace.curvature.exact_precision import DensePrecision, DualPrecision
from sublaplace.curvature.kfac import kronecker_ggn, trace_ratios
from sublaplace.curvature.operators import DensePart, DiagonalPart, KroneckerPart
from sublaplace.curvature.reduced import reduced_ggn
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.data.batches import num_inputs, select
from sublaplace.jacobians.chunks import ChunkPolicy
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.likelihoods.categorical import Categorical
from sublaplace.model.likelihoods.gaussian import Gaussian
from sublaplace.projection import Basis, Subset
from sublaplace.projectors.swag import swag_variances

FIXTURE = Path(__file__).parent / "fixtures" / "kfac_curvlinops.safetensors"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
PRIOR = 0.7
NOISE = 0.4


def stream(model, inputs, likelihood=None, size=3, tolerance=0.0):
    likelihood = likelihood or Categorical()
    outputs = dense_outputs(model, inputs)
    targets = labels(model, inputs) if isinstance(likelihood, Categorical) else torch.zeros_like(outputs)
    return CurvatureStream(Linearization(model), loader(inputs, targets, size), likelihood, tolerance)


def ggn_of(model, inputs, likelihood=None):
    outputs = dense_outputs(model, inputs)
    if isinstance(likelihood, Gaussian):
        identity = torch.eye(outputs.shape[1], dtype=torch.float64) / likelihood.noise_std**2
        return dense_ggn(model, inputs, identity.expand(len(outputs), -1, -1))
    return dense_ggn(model, inputs, softmax_hessians(outputs))


def close(value, expected, tolerance=TOLERANCE[torch.float64]):
    assert value.shape == expected.shape
    return (value.double() - expected).abs().max() <= tolerance * expected.abs().max()


def dense_block(precision, name):
    """A parameter's block of the GGN approximation, without λ."""
    size = precision.layout.sizes[name]
    like = next(iter(precision.parts.values())).eigenvalues()
    return precision.parts[name].matmul(torch.eye(size).to(like), 0.0)


def exact_block(ggn, precision, name):
    part = precision.layout.slices[name]
    return ggn[part, part]


def patches(module, x):
    """What a convolution sees at each position, (groups, I, T), by convolving with unit kernels."""
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(module.kernel_size)]
    seen = []
    for channels in x.chunk(module.groups, dim=1):
        points = channels.shape[1] * module.weight[0, 0].numel()
        kernels = torch.eye(points).to(x).view(points, channels.shape[1], *module.kernel_size)
        seen.append(function(channels, kernels, None, module.stride, module.padding, module.dilation)[0].flatten(1))
    return torch.stack(seen)


def inputs_and_gradients(module, x, gradient):
    """a (G, I, T) and g (G, O, T) of one call with one input."""
    if isinstance(module, nn.Linear):
        return x.reshape(-1, x.shape[-1]).T[None], gradient.reshape(-1, gradient.shape[-1]).T[None]
    if isinstance(module, nn.Embedding):
        one_hot = F.one_hot(x.flatten(), module.num_embeddings).to(gradient)
        gradient = gradient.reshape(-1, gradient.shape[-1])
        if module.padding_idx is not None:
            gradient = gradient * (x.flatten() != module.padding_idx)[:, None]
        return one_hot.T[None], gradient.T[None]
    return patches(module, x), gradient[0].flatten(1).unflatten(0, (module.groups, -1))


def brute_force_kfac(model, inputs, hessians, reduce=False):
    """[Σ_n Σ_t Σ_c g gᵀ] ⊗ [Σ_n Σ_t a aᵀ / (N T)] for the weight and bias of every module, call by call."""
    model = copy.deepcopy(model).eval()
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    model.requires_grad_()  # so that every call is part of the graph
    calls = []

    def record(module, arguments, output):
        calls.append((module, arguments[0].detach(), output))

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            module.register_forward_hook(record)
    A, G, count, stored_as_table = {}, {}, {}, {}

    def add(name, a, g_of_directions, table):
        if reduce and not table:
            a, g_of_directions = a.mean(2, keepdim=True), [g.sum(2, keepdim=True) for g in g_of_directions]
        for t in range(a.shape[2]):
            A[name] = A.get(name, 0) + torch.stack([torch.outer(v, v) for v in a[:, :, t]])
            for g in g_of_directions:
                G[name] = G.get(name, 0) + torch.stack([torch.outer(v, v) for v in g[:, :, t]])
        count[name] = count.get(name, 0) + a.shape[2]
        stored_as_table[name] = table

    for i, hessian in enumerate(hessians):
        calls.clear()
        single = select(inputs, slice(i, i + 1))
        output = model(**single) if isinstance(single, dict) else model(single)
        values, vectors = torch.linalg.eigh(hessian)
        directions = (vectors * values.clamp_min(0).sqrt()).T
        gradients = [torch.autograd.grad(output[0], [y for *_, y in calls], u, retain_graph=True) for u in directions]
        by_parameter = {}
        for k, (module, x, _) in enumerate(calls):
            pairs = [inputs_and_gradients(module, x, gradient[k]) for gradient in gradients]
            a, g = pairs[0][0], [pair[1] for pair in pairs]
            table = isinstance(module, nn.Embedding)
            by_parameter.setdefault(names.get(id(module.weight)), []).append((a, g, table))
            if getattr(module, "bias", None) is not None:
                ones = torch.ones_like(a[:1, :1])
                whole = [part.flatten(0, 1)[None] for part in g]
                by_parameter.setdefault(names.get(id(module.bias)), []).append((ones, whole, False))
        for name, uses in by_parameter.items():
            if name is not None:
                # All positions of all calls of an input side by side; "reduce" averages over them.
                joined = [torch.cat(parts, dim=2) for parts in zip(*(g for _, g, _ in uses), strict=True)]
                add(name, torch.cat([a for a, _, _ in uses], dim=2), joined, uses[0][2])
    blocks = {}
    for name in A:
        pairs = zip(G[name], A[name] / count[name], strict=True)
        pieces = [torch.kron(a, g) if stored_as_table[name] else torch.kron(g, a) for g, a in pairs]
        blocks[name] = torch.block_diag(*pieces)
    return blocks


# The diagonal and the exact GGN ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(NOISE)], ids=lambda value: value.name)
@pytest.mark.parametrize("name", NETWORKS)
def test_diagonal_equals_that_of_the_dense_ggn(name, likelihood):
    model, inputs = make(name, 7)
    precision = diagonal_ggn(stream(model, inputs, likelihood), PRIOR)
    found = torch.cat([part.diagonal for part in precision.parts.values()])
    assert close(found, ggn_of(model, inputs, likelihood).diagonal())


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(NOISE)], ids=lambda value: value.name)
@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "transformer"])
def test_exact_ggn_is_dense_where_rows_are_many_and_dual_where_they_are_few(name, likelihood):
    model, inputs = make(name, 5)
    source = stream(model, inputs, likelihood)
    p = source.linearization.layout.num_parameters
    primal, dual = exact_ggn(source, p, PRIOR), exact_ggn(source, p - 1, PRIOR)
    assert isinstance(primal, DensePrecision)
    assert isinstance(dual, DualPrecision)
    expected = ggn_of(model, inputs, likelihood)
    assert close(primal.ggn, expected)
    assert close(dual.rows.T @ dual.rows, expected)


@pytest.mark.parametrize("wide", [1, 10**6], ids=["outer products", "rows"])
@pytest.mark.parametrize("name", NETWORKS)
def test_exact_ggn_is_whole_where_it_has_several_panels_and_outer_products(name, wide, monkeypatch):
    monkeypatch.setattr("sublaplace.curvature.exact._PANEL", 7)
    monkeypatch.setattr("sublaplace.curvature.exact._WIDE", wide)
    model, inputs = make(name, 5)
    assert close(exact_ggn(stream(model, inputs), 10**6, PRIOR).ggn, ggn_of(model, inputs))


def test_exact_ggn_of_a_saturated_classifier_is_zero_in_dual_form():
    model, inputs = make("mlp", 6, torch.float32)
    with torch.no_grad():
        model[4].weight.mul_(1e8)
        model[4].bias.add_(torch.tensor([1e8, -1e8]))
    precision = exact_ggn(stream(model, inputs, tolerance=1e-8), 12, PRIOR)
    assert precision.log_determinant() == pytest.approx(precision.layout.num_parameters * torch.tensor(PRIOR).log())


# KFAC -----------------------------------------------------------------------------------------------------------------

MODULES_ONLY = ["mlp", "paper-cnn", "residual-batch-norm", "conv-groups", "conv1d", "conv3d", "embedding"]
MODULES_ONLY += ["flattening", "frozen-layer", "layer-norm"]


@pytest.mark.parametrize("reduce", [False, True], ids=["expand", "reduce"])
@pytest.mark.parametrize("name", MODULES_ONLY)
def test_kfac_equals_the_formula_written_as_loops(name, reduce):
    model, inputs = make(name, 4)
    precision = kronecker_ggn(stream(model, inputs), PRIOR, reduce=reduce)
    expected = brute_force_kfac(model, inputs, softmax_hessians(dense_outputs(model, inputs)), reduce)
    assert expected
    for parameter, block in expected.items():
        assert isinstance(precision.parts[parameter], KroneckerPart), parameter
        assert close(dense_block(precision, parameter), block), parameter


class PooledAndSkipped(nn.Module):
    """Gradients that share memory: those of a sum over positions are one tensor, expanded."""

    def __init__(self):
        super().__init__()
        self.each = nn.Linear(3, 4)
        self.skip = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head((self.each(x).sum(1) + self.skip(x[:, 0])).tanh())


class JoinedPositions(nn.Module):
    """Gradients that share memory: those of joined parts are views of the whole one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.others = nn.Linear(3, 4)
        self.all = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        joined = torch.cat([self.first(x[:, :1]), self.others(x[:, 1:])], dim=1)
        return self.head((joined + self.all(x)).tanh().mean(1))


@pytest.mark.parametrize("build", [PooledAndSkipped, JoinedPositions])
def test_kfac_is_right_where_gradients_of_different_layers_share_memory(build):
    torch.manual_seed(0)
    model, inputs = build().double(), torch.randn(5, 4, 3, dtype=torch.float64)
    precision = kronecker_ggn(stream(model, inputs, size=5), PRIOR)
    expected = brute_force_kfac(model, inputs, softmax_hessians(dense_outputs(model, inputs)))
    assert set(expected) == set(precision.layout.names)
    for parameter, block in expected.items():
        assert close(dense_block(precision, parameter), block), parameter


class TwoTables(nn.Module):
    """Embeddings of different widths, and a factor that makes the outputs certain."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Embedding(4, 5)
        self.narrow = nn.Embedding(4, 3)
        self.head = nn.Linear(8, 2)

    def forward(self, ids):
        return 1e5 * self.head(torch.cat([self.wide(ids), self.narrow(ids)], dim=-1).tanh().mean(1))


def test_kfac_of_several_tables_where_all_directions_of_a_batch_are_dropped():
    torch.manual_seed(0)
    model, inputs = TwoTables().double(), torch.randint(0, 4, (6, 3))
    precision = kronecker_ggn(stream(model, inputs, tolerance=1e-8), PRIOR)
    for name, width in (("wide.weight", 5), ("narrow.weight", 3)):
        part = precision.parts[name]
        assert part.output_values.shape == (1, width)
        assert not part.output_values.any()
        assert close(part.input_values[0], torch.bincount(inputs.flatten(), minlength=4).double() / inputs.numel())


@pytest.mark.parametrize("parameter", ["block.weight", "block.bias"])
def test_kfac_of_a_reused_convolution_averages_over_the_positions_of_both_calls(parameter):
    model, inputs = make("paper-cnn", 4)
    precision = kronecker_ggn(stream(model, inputs), PRIOR)
    # 4 × 4 positions of the first call and 2 × 2 of the second.
    assert Linearization(model).jacobian(inputs).blocks[parameter].positions == 20
    expected = brute_force_kfac(model, inputs, softmax_hessians(dense_outputs(model, inputs)))[parameter]
    assert close(dense_block(precision, parameter), expected)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(NOISE)], ids=lambda value: value.name)
def test_kfac_is_exact_for_linear_layers_with_a_single_input(likelihood):
    model, inputs = make("mlp", 1)
    precision = kronecker_ggn(stream(model, inputs, likelihood), PRIOR)
    ggn = ggn_of(model, inputs, likelihood)
    for name in precision.layout.names:
        assert close(dense_block(precision, name), exact_block(ggn, precision, name)), name


def test_kfac_is_exact_for_a_linear_layer_with_constant_gradients():
    model, inputs = make("mlp", 9)
    likelihood = Gaussian(NOISE)
    precision = kronecker_ggn(stream(model, inputs, likelihood), PRIOR)
    ggn = ggn_of(model, inputs, likelihood)
    for name in ("4.weight", "4.bias"):
        assert close(dense_block(precision, name), exact_block(ggn, precision, name)), name


@pytest.mark.parametrize("name", ["mlp", "conv-groups", "embedding", "attention"])
def test_kfac_of_biases_used_once_an_input_is_exact(name):
    model, inputs = make(name, 6)
    precision = kronecker_ggn(stream(model, inputs), PRIOR)
    last_bias = precision.layout.names[-1]
    assert last_bias.endswith("bias")
    expected = exact_block(ggn_of(model, inputs), precision, last_bias)
    assert close(dense_block(precision, last_bias), expected)


def test_kfac_equals_that_of_curvlinops():
    tensors = load_file(FIXTURE)
    network = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).double()
    network.load_state_dict({name[6:]: value for name, value in tensors.items() if name.startswith("model.")})
    precision = kronecker_ggn(stream(network, tensors["inputs"], size=5), PRIOR)
    blocks = {name[6:]: value for name, value in tensors.items() if name.startswith("block.")}
    assert set(blocks) == set(precision.layout.names)
    for name, block in blocks.items():
        assert close(dense_block(precision, name), block), name


def test_a_grouped_convolution_has_one_kronecker_block_a_group():
    model, inputs = make("conv-groups", 5)
    precision = kronecker_ggn(stream(model, inputs), PRIOR)
    for name, groups in (("3.weight", 2), ("5.weight", 4)):
        part = precision.parts[name]
        assert isinstance(part, KroneckerPart)
        assert len(part.input_values) == len(part.output_values) == groups
        block, size = dense_block(precision, name), precision.layout.sizes[name] // groups
        for g in range(groups):
            outside = block[g * size : (g + 1) * size].clone()
            outside[:, g * size : (g + 1) * size] = 0
            assert not outside.any()


def test_input_factor_of_an_embedding_is_diagonal_and_kept_so():
    model, inputs = make("embedding", 6)
    part = kronecker_ggn(stream(model, inputs), PRIOR).parts["tokens.weight"]
    assert isinstance(part, KroneckerPart)
    assert part.input_vectors is None
    assert close(part.input_values[0], torch.bincount(inputs.flatten(), minlength=7).double() / inputs.numel())


EXACT_BLOCKS = {
    "layer-norm": ["1.weight", "1.bias", "3.weight"],
    "residual-batch-norm": ["norm.weight", "norm2.bias"],
    "tied-weights": ["embedding.weight"],
    "free-parameters": ["scale", "shift", "sliced"],
    "lstm": ["cell.weight_ih_l0", "cell.bias_hh_l0"],
}


@pytest.mark.parametrize("name", EXACT_BLOCKS)
def test_parameters_without_a_kronecker_form_get_their_exact_block(name):
    model, inputs = make(name, 6)
    precision = kronecker_ggn(stream(model, inputs), PRIOR)
    ggn = ggn_of(model, inputs)
    for parameter in EXACT_BLOCKS[name]:
        assert isinstance(precision.parts[parameter], DensePart), parameter
        assert close(dense_block(precision, parameter), exact_block(ggn, precision, parameter)), parameter


class Scaled(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, size, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return (x * self.scale).unflatten(1, (2, -1)).mean(2)


@pytest.mark.parametrize(("size", "kind"), [(1000, DensePart), (1002, DiagonalPart)])
def test_large_parameters_without_a_kronecker_form_get_their_diagonal(size, kind):
    torch.manual_seed(0)
    model, inputs = Scaled(size), torch.randn(2, size, dtype=torch.float64)
    precision = kronecker_ggn(stream(model, inputs), PRIOR)
    assert isinstance(precision.parts["scale"], kind)
    expected = ggn_of(model, inputs)[:size, :size]
    if kind is DiagonalPart:
        expected = expected.diagonal().diag()
    assert close(dense_block(precision, "scale"), expected)
    assert not dense_block(precision, "unused").any()


@pytest.mark.parametrize("reduce", [False, True], ids=["expand", "reduce"])
@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "embedding", "attention"])
def test_kfac_does_not_depend_on_the_batch_size(name, reduce):
    model, inputs = make(name, 7)
    whole = kronecker_ggn(stream(model, inputs, size=7), PRIOR, reduce=reduce)
    for size in (1, 3):
        parts = kronecker_ggn(stream(model, inputs, size=size), PRIOR, reduce=reduce)
        for parameter in whole.layout.names:
            assert close(dense_block(parts, parameter), dense_block(whole, parameter)), parameter


@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "embedding"])
def test_kfac_does_not_depend_on_the_memory_budget(name):
    model, inputs = make(name, 7)
    whole = kronecker_ggn(stream(model, inputs, size=7), PRIOR)
    small = stream(model, inputs, size=7)
    small = replace(small, linearization=Linearization(model, chunks=ChunkPolicy(1)))
    assert small.linearization.chunk_size(inputs) == 1
    parts = kronecker_ggn(small, PRIOR)
    for parameter in whole.layout.names:
        assert close(dense_block(parts, parameter), dense_block(whole, parameter)), parameter


@pytest.mark.parametrize("size", [1, 3, 40])
def test_kfac_keeps_the_input_factors_of_inputs_whose_directions_are_all_dropped(size):
    model, inputs = make("mlp", 40)
    with torch.no_grad():
        model[4].weight.mul_(100)  # most inputs are certain
    exact = kronecker_ggn(stream(model, inputs, size=size), PRIOR)
    quick = kronecker_ggn(stream(model, inputs, size=size, tolerance=1e-4), PRIOR)
    for parameter in exact.layout.names:
        assert close(quick.parts[parameter].input_values, exact.parts[parameter].input_values), parameter
        assert close(dense_block(quick, parameter), dense_block(exact, parameter), 1e-3), parameter


@dataclass
class RowCounts:
    found: set

    def add(self, jacobian):
        self.found.add(jacobian.num_rows)


def test_kfac_counts_every_input_once_whatever_its_number_of_directions():
    model, inputs = make("paper-cnn", 150)
    with torch.no_grad():
        model.head.weight.mul_(100)
    quick = stream(model, inputs, size=150, tolerance=1e-3)
    counts = RowCounts(set())
    quick.accumulate("counting", counts, every_input=True)
    assert counts.found == {0, 2}
    found, exact = kronecker_ggn(quick, PRIOR), kronecker_ggn(stream(model, inputs), PRIOR)
    for parameter in exact.layout.names:
        assert close(found.parts[parameter].input_values, exact.parts[parameter].input_values), parameter


@pytest.mark.parametrize("curvature", [kronecker_ggn, diagonal_ggn])
def test_curvature_that_is_not_finite_names_the_parameter(curvature):
    torch.manual_seed(0)
    model, inputs = NotDifferentiable().double(), torch.randn(5, 3, dtype=torch.float64)
    inputs[4] = 0  # behind those that are probed
    with pytest.raises(ValueError, match=r"'first\.weight' holds NaN or infinity"):
        curvature(stream(model, inputs, size=5), PRIOR)


# The GGN in a subspace ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(NOISE)], ids=lambda value: value.name)
@pytest.mark.parametrize("name", NETWORKS)
def test_reduced_ggn_equals_the_projected_dense_one_without_its_scale(name, likelihood):
    model, inputs = make(name, 5)
    source = stream(model, inputs, likelihood)
    layout = source.linearization.layout
    p = layout.num_parameters
    generator = torch.Generator().manual_seed(0)
    P = torch.randn(p, 4, generator=generator, dtype=torch.float64)
    ggn = ggn_of(model, inputs, likelihood) / likelihood.curvature_scales[0]
    (found,) = reduced_ggn(source, Basis(layout, layout.unflatten(P.T)))
    assert found.dtype == torch.float64
    assert close(found, P.T @ ggn @ P)
    indices = torch.randperm(p, generator=generator)[:6]
    expected = ggn[indices][:, indices]
    (found,) = reduced_ggn(source, Subset(layout, indices, torch.float64))
    assert (found - expected).abs().max() <= TOLERANCE[torch.float64] * ggn.abs().max()


@pytest.mark.parametrize("name", ["mlp", "paper-cnn"])
def test_dropping_directions_changes_the_trace_of_the_output_hessians_by_no_more_than_the_tolerance(name):
    model, inputs = make(name, 30)
    source = stream(model, inputs, tolerance=0.05, size=4)
    linearization = source.linearization
    layout, jacobian = linearization.layout, dense_jacobian(model, inputs)
    # For the last bias J is the identity: its block of the GGN is the sum of the output Hessians.
    last = layout.slices[layout.names[-1]]
    C = last.stop - last.start
    assert close(jacobian[:, last].view(-1, C, C), torch.eye(C).double().expand(num_inputs(inputs), C, C))
    total = float(softmax_hessians(dense_outputs(model, inputs)).diagonal(dim1=1, dim2=2).sum())
    dense = exact_ggn(source, layout.num_parameters, 1.0)
    found = float(dense.ggn[last, last].trace())
    assert (1 - 0.05) * total <= found < total


# SWAG -----------------------------------------------------------------------------------------------------------------


def test_swag_variances_equal_a_hand_written_loop_and_leave_the_model_alone():
    model, inputs = make("frozen-layer", 8)
    targets = labels(model, inputs)
    batches = loader(inputs, targets)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = swag_variances(Linearization(model), batches, Categorical(), snapshots=5, learning_rate=0.02)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())

    other = copy.deepcopy(model)
    trained = [p for p in other.parameters() if p.requires_grad]
    velocity = [torch.zeros_like(p) for p in trained]
    snapshots = []
    for _ in range(5):
        for x, y in batches:
            gradients = torch.autograd.grad(F.cross_entropy(other(x), y), trained)
            with torch.no_grad():
                for p, g, v in zip(trained, gradients, velocity, strict=True):
                    v.mul_(0.9).add_(g + 3e-4 * p)
                    p.sub_(0.02 * v)
        snapshots.append(torch.cat([p.detach().flatten() for p in trained]))
    assert close(found, torch.stack(snapshots).var(0, correction=0), 1e-8)


def test_swag_that_diverges_says_so():
    model, inputs = make("mlp", 8)
    targets = dense_outputs(model, inputs) + 1
    with pytest.raises(ValueError, match=r"diverged.*learning_rate=1e\+20.*smaller"):
        swag_variances(Linearization(model), loader(inputs, targets), Gaussian(), learning_rate=1e20)


# How far KFAC is off --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [6, 4])
@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "conv-groups", "embedding"])
def test_trace_ratios_are_those_of_the_factored_and_the_exact_blocks(name, size):
    model, inputs = make(name, 6)
    source = stream(model, inputs)
    factored, ggn = kronecker_ggn(source, PRIOR), ggn_of(model, inputs, Categorical())
    parts = [select(inputs, slice(start, start + size)) for start in range(0, 6, size)]
    found = trace_ratios(source.linearization.jacobian(part, Categorical().hessian_root) for part in parts)
    layout = source.linearization.layout
    assert found
    for parameter, ratio in found.items():
        exact = ggn.diagonal()[layout.slices[parameter]].sum()
        assert ratio == pytest.approx(float(factored.parts[parameter].eigenvalues().sum() / exact), rel=1e-8)
