"""One contract for every precision, every projector and every likelihood: a new one is one more row in a table."""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from dense_reference import dense_jacobian, dense_outputs
from networks import make
from sensitive import untouched
from test_laplace import labels, loader, sized
from torch.autograd.functional import hessian
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal

from sublaplace import (
    PROJECTORS,
    Categorical,
    ChunkPolicy,
    Drawn,
    Gaussian,
    SubspaceLaplace,
    isotropic_precision,
    low_rank,
)
from sublaplace.curvature.diagonal import diagonal_ggn
from sublaplace.curvature.exact import exact_ggn
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians.jacobian import Jacobians
from sublaplace.jacobians.linearization import Linearization
from sublaplace.projection import Basis, Subset

PRIOR = 0.7
TOLERANCE = {torch.float64: 1e5 * torch.finfo(torch.float64).eps, torch.float32: 1e3 * torch.finfo(torch.float32).eps}


def close(value, expected, tolerance, scale=None):
    assert value.shape == expected.shape
    scale = float(expected.abs().max()) if scale is None else scale
    return float((value.double() - expected.double()).abs().max()) <= tolerance * scale


# Precisions -----------------------------------------------------------------------------------------------------------


def isotropic(stream, prior):
    linearization = stream.linearization
    return isotropic_precision(linearization.layout, torch.empty(0, dtype=linearization.dtype), prior)


PRECISIONS = {
    "isotropic": isotropic,
    "diagonal": diagonal_ggn,
    "kfac": kronecker_ggn,
    "kfac-reduce": lambda stream, prior: kronecker_ggn(stream, prior, reduce=True),
    "dense": lambda stream, prior: exact_ggn(stream, stream.linearization.layout.num_parameters, prior),
    "dual": lambda stream, prior: exact_ggn(stream, 0, prior),
}
NETWORKS = ["mlp", "paper-cnn", "conv-groups", "embedding", "tied-weights", "attention", "free-parameters"]


@dataclass(frozen=True)
class Case:
    """A precision with a Jacobian of new inputs, and both as dense matrices."""

    precision: object
    jacobians: Jacobians
    matrix: torch.Tensor  # Λ, from `matmul` with the identity
    rows: torch.Tensor  # J
    tolerance: float

    @cached_property
    def covariance(self):
        return self.rows @ torch.linalg.solve(self.matrix, self.rows.T)

    @cached_property
    def blocks(self):
        """The diagonal blocks of `covariance`, one an input: (n, C, C)."""
        C = self.jacobians.linearization.num_outputs(self.jacobians.inputs)
        whole = self.covariance
        return torch.stack([whole[i : i + C, i : i + C] for i in range(0, len(whole), C)])

    def dense(self, precision):
        layout = precision.layout
        identity = torch.eye(layout.num_parameters, dtype=self.jacobians.dtype)
        return layout.flatten(precision.matmul(layout.unflatten(identity))).double()


_streams = {}


def stream_of(name, dtype):
    if (name, dtype) not in _streams:
        model, inputs = make(name, 7, dtype)
        stream = CurvatureStream(Linearization(model), loader(inputs, labels(model, inputs)), Categorical(), 0.0)
        _, new = make(name, 3, dtype, seed=1)
        _streams[name, dtype] = stream, new, dense_jacobian(model, new)
    return _streams[name, dtype]


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request):
    return request.param


def case_of(network, dtype, precision):
    stream, new, rows = stream_of(network, dtype)
    precision = PRECISIONS[precision](stream, PRIOR)
    layout = precision.layout
    identity = layout.unflatten(torch.eye(layout.num_parameters, dtype=dtype))
    matrix = layout.flatten(precision.matmul(identity)).double()
    return Case(precision, Jacobians(stream.linearization, new), matrix, rows, TOLERANCE[dtype])


COMBINATIONS = [(network, torch.float64, precision) for network in NETWORKS for precision in PRECISIONS]
COMBINATIONS += [
    (network, torch.float32, precision) for network in ("mlp", "paper-cnn", "embedding") for precision in PRECISIONS
]


@pytest.fixture(params=COMBINATIONS, ids=lambda c: f"{c[0]}-{str(c[1])[6:]}-{c[2]}", scope="module")
def case(request):
    return case_of(*request.param)


def test_every_precision_is_symmetric_and_no_less_than_its_prior(case):
    assert close(case.matrix, case.matrix.T, case.tolerance)
    values = torch.linalg.eigvalsh(case.matrix)
    assert values[0] >= PRIOR - case.tolerance * values[-1]
    assert case.precision.prior_precision == PRIOR


def test_solve_is_the_inverse_of_matmul(case):
    layout = case.precision.layout
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(4, layout.num_parameters, generator=generator, dtype=torch.float64).to(case.jacobians.dtype)
    solved = case.precision.solve(layout.unflatten(flat))
    assert all(part.dtype == case.jacobians.dtype for part in solved.values())
    condition = float(torch.linalg.cond(case.matrix))
    assert close(layout.flatten(case.precision.matmul(solved)), flat, case.tolerance * condition)
    assert close(layout.flatten(solved), torch.linalg.solve(case.matrix, flat.double().T).T, case.tolerance * condition)


def test_covariance_is_that_of_the_dense_matrix(case):
    found = torch.cat([case.precision.covariance(jacobian) for jacobian in case.jacobians])
    assert found.dtype == case.jacobians.dtype
    assert close(found, case.blocks, 10 * case.tolerance)


def test_variance_is_the_diagonal_of_covariance(case):
    found = torch.cat([case.precision.variance(jacobian) for jacobian in case.jacobians])
    assert found.dtype == case.jacobians.dtype
    assert close(found, case.blocks.diagonal(dim1=1, dim2=2), 10 * case.tolerance)


def test_joint_covariance_is_that_of_the_dense_matrix_with_covariance_on_its_diagonal(case):
    found = case.precision.joint_covariance(case.jacobians)
    assert found.dtype == torch.float64
    assert close(found, case.covariance, 10 * case.tolerance)
    single = torch.cat([case.precision.covariance(jacobian) for jacobian in case.jacobians])
    C = single.shape[1]
    blocks = torch.stack([found[i : i + C, i : i + C] for i in range(0, len(found), C)])
    assert close(blocks, single, 10 * case.tolerance)


def test_log_determinant_is_that_of_the_dense_matrix(case):
    found = case.precision.log_determinant()
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float(torch.logdet(case.matrix)), rel=10 * case.tolerance, abs=1e-6)


def test_another_prior_is_added_exactly(case):
    other = case.precision.with_prior(2.5)
    assert other.prior_precision == 2.5
    assert case.precision.prior_precision == PRIOR
    scale = float(case.matrix.abs().max())
    expected = case.matrix + (2.5 - PRIOR) * torch.eye(len(case.matrix), dtype=torch.float64)
    assert close(case.dense(other), expected, case.tolerance, scale)
    changed = torch.cat([other.covariance(jacobian) for jacobian in case.jacobians])
    joint = case.rows @ torch.linalg.solve(expected, case.rows.T)
    C = changed.shape[1]
    assert close(changed[0], joint[:C, :C], 10 * case.tolerance, float(joint.abs().max()))


def test_scaling_multiplies_the_curvature_and_leaves_the_prior(case):
    prior = PRIOR * torch.eye(len(case.matrix), dtype=torch.float64)
    found = case.dense(case.precision.scaled(3.0))
    assert close(found - prior, 3.0 * (case.matrix - prior), case.tolerance, float(case.matrix.abs().max()))


@pytest.mark.parametrize("name", PRECISIONS)
def test_covariances_do_not_depend_on_the_memory_budget(name):
    stream, new, _ = stream_of("paper-cnn", torch.float64)
    precision = PRECISIONS[name](stream, PRIOR)
    expected = precision.joint_covariance(Jacobians(stream.linearization, new))
    small = Linearization(stream.linearization.model, chunks=ChunkPolicy(1))
    jacobians = Jacobians(small, new)
    assert [jacobian.num_inputs for jacobian in jacobians] == [1, 1, 1]
    assert close(precision.joint_covariance(jacobians), expected, TOLERANCE[torch.float64])


@pytest.mark.parametrize("name", ["isotropic", "diagonal", "kfac", "kfac-reduce"])
@pytest.mark.parametrize("network", NETWORKS)
def test_whitened_rows_give_the_covariance_and_turn_back_into_solved_jacobians(network, name):
    case = case_of(network, torch.float64, name)
    layout = case.precision.layout
    rows = case.precision.whitened(case.jacobians)
    flat = layout.flatten(rows)
    assert close(flat @ flat.T, case.covariance, 10 * case.tolerance)
    solved = layout.flatten(case.precision.unwhitened(rows))
    assert close(solved, torch.linalg.solve(case.matrix, case.rows.T).T, 100 * case.tolerance)


@pytest.mark.parametrize("name", ["diagonal", "kfac"])
def test_a_subspace_does_not_depend_on_whether_the_whitened_rows_fit_into_memory(name):
    stream, new, _ = stream_of("paper-cnn", torch.float64)
    precision = PRECISIONS[name](stream, PRIOR)
    small = Jacobians(Linearization(stream.linearization.model, chunks=ChunkPolicy(1)), new)
    assert precision.whitened(small) is None
    one, other = (low_rank(j, precision, 5).matrix() for j in (Jacobians(stream.linearization, new), small))
    assert close((one.T @ other).abs(), torch.eye(5), 1e-8)


# Projectors -----------------------------------------------------------------------------------------------------------

LOW_RANK = [name for name in PROJECTORS if name.startswith("lowrank")]
SUBSETS = [name for name in PROJECTORS if name.startswith("subset")]


def fit(name, projector, dim=6, dtype=torch.float64, **options):
    model, inputs = make(name, 8, dtype)
    la = SubspaceLaplace.paper(model, "classification", **sized(projector, dim), prior_precision=PRIOR, **options)
    return la.fit(loader(inputs, labels(model, inputs))), inputs


def test_every_projector_belongs_to_a_family():
    assert set(PROJECTORS) == {*LOW_RANK, *SUBSETS, "last-layer"}


@pytest.mark.parametrize("projector", PROJECTORS)
@pytest.mark.parametrize("network", ["paper-cnn", "embedding"])
def test_every_projection_has_orthonormal_columns(network, projector, dtype):
    la, _ = fit(network, projector, dtype=dtype)
    P = la.projection_matrix()
    assert P.dtype == dtype
    assert P.shape == (la.num_parameters, la.dim)
    tolerance = 100 * torch.finfo(dtype).eps
    assert close(P.double().T @ P.double(), torch.eye(la.dim).double(), tolerance)
    if projector != "last-layer":
        assert la.dim == 6


@pytest.mark.parametrize("projector", [*LOW_RANK, *SUBSETS])
@pytest.mark.parametrize("network", ["mlp", "embedding"])
def test_a_truncated_projector_equals_one_that_was_fitted_smaller(network, projector):
    large, inputs = fit(network, projector, dim=6)
    small, _ = fit(network, projector, dim=3)
    found, expected = (la.functional_covariance(inputs, joint=True) for la in (large.truncated(3), small))
    assert close(found, expected, 1e-8)
    P, Q = large.projection_matrix()[:, :3], small.projection_matrix()
    assert torch.allclose(torch.linalg.svdvals(P.T @ Q), torch.ones(3).double(), atol=1e-8)


@pytest.mark.parametrize("projector", [*SUBSETS, "last-layer"])
def test_a_subset_is_stored_as_its_indices(projector):
    la, _ = fit("paper-cnn", projector)
    projection = la._subspace().projection
    assert isinstance(projection, Subset)
    assert projection.indices.shape == (la.dim,)
    assert not projection.indices.is_floating_point()
    assert len(projection.indices.unique()) == la.dim
    expected = torch.zeros(la.num_parameters, la.dim, dtype=torch.float64)
    expected[projection.indices, torch.arange(la.dim)] = 1
    assert torch.equal(la.projection_matrix(), expected)


@pytest.mark.parametrize("projector", LOW_RANK)
def test_a_low_rank_projection_is_stored_by_parameter(projector):
    la, _ = fit("paper-cnn", projector)
    projection = la._subspace().projection
    assert isinstance(projection, Basis)
    assert {name: part.shape for name, part in projection.vectors.items()} == {
        name: (6, size) for name, size in la._layout.sizes.items()
    }


@pytest.mark.parametrize("projector", PROJECTORS)
def test_every_projector_is_deterministic_for_a_seed(projector):
    drawn = {"subspace_inputs": Drawn(4)} if PROJECTORS[projector].needs_inputs else {}
    (first, _), (second, _) = (fit("mlp", projector, dim=4, seed=3, **drawn) for _ in range(2))
    assert torch.equal(first.projection_matrix(), second.projection_matrix())


@pytest.mark.parametrize("projector", LOW_RANK)
def test_another_seed_draws_other_subspace_inputs(projector):
    (first, _), (second, _) = (fit("mlp", projector, dim=4, subspace_inputs=Drawn(3), seed=seed) for seed in (0, 1))
    assert torch.linalg.svdvals(first.projection_matrix().T @ second.projection_matrix())[-1] < 0.999


@pytest.mark.parametrize("projector", PROJECTORS)
def test_every_projector_leaves_the_model_untouched(projector):
    model, inputs = make("residual-batch-norm", 8)
    model.train()
    batches = loader(inputs, labels(model, inputs))
    with untouched(model):
        SubspaceLaplace.paper(model, "classification", **sized(projector, 4)).fit(batches)


@pytest.mark.parametrize("projector", [*SUBSETS, "last-layer"])
def test_a_projector_that_is_not_built_from_inputs_refuses_them(projector):
    model, inputs = make("mlp", 8)
    for given in (Drawn(4), inputs):
        with pytest.raises(ValueError, match=f"subspace_inputs has no effect: projector='{projector}'"):
            SubspaceLaplace.paper(model, "classification", **sized(projector, 4), subspace_inputs=given)


def test_a_projector_with_a_dimension_of_its_own_refuses_another():
    model, _ = make("mlp", 8)
    own = [name for name in PROJECTORS if PROJECTORS[name].own_dim]
    assert own == ["last-layer"]
    for projector in [*own, "full"]:
        with pytest.raises(ValueError, match=f"dim has no effect: projector='{projector}'"):
            SubspaceLaplace.paper(model, "classification", projector=projector, dim=4)


def test_subset_magnitude_takes_the_largest_parameters():
    la, _ = fit("paper-cnn", "subset-magnitude", dim=7)
    theta = torch.cat([p.detach().flatten() for p in la.model.parameters()]).abs()
    assert la._subspace().projection.indices.tolist() == theta.argsort(descending=True)[:7].tolist()


def test_subset_diagonal_takes_dead_parameters_first_by_lowest_index():
    model, inputs = make("mlp", 8)
    with torch.no_grad():
        model[2].weight[3].zero_()
        model[2].bias[3] = -1.0  # a ReLU that is never on
    dead = (dense_jacobian(model, inputs).abs().sum(0) == 0).nonzero().squeeze(1).tolist()
    assert len(dead) >= 9  # its 6 weights and bias, and 2 weights behind it
    la = SubspaceLaplace.paper(
        model, "classification", projector="subset-diagonal", dim=len(dead) + 1, prior_precision=PRIOR
    )
    la.fit(loader(inputs, labels(model, inputs)))
    assert la._subspace().projection.indices[:-1].tolist() == dead
    assert not la.truncated(len(dead)).functional_variance(inputs).any()
    assert la.functional_variance(inputs).any()


def test_a_projector_of_the_user_is_a_function():
    def first_parameters(context):
        assert context.num_data == 8
        assert context.num_outputs == 2
        return Subset(context.linearization.layout, torch.arange(context.dim), context.linearization.dtype)

    la, _ = fit("mlp", first_parameters, dim=5)
    assert torch.equal(la.projection_matrix(), torch.eye(la.num_parameters, 5).double())


# Likelihoods ----------------------------------------------------------------------------------------------------------


def labels_like(outputs):
    return torch.arange(len(outputs)) % outputs.shape[1]


def values_like(outputs):
    return torch.randn(outputs.shape, generator=torch.Generator().manual_seed(3), dtype=outputs.dtype)


LIKELIHOODS = {
    "gaussian": (Gaussian(), values_like, lambda f: Normal(f, 1.0)),
    "gaussian with noise": (Gaussian(0.3), values_like, lambda f: Normal(f, 0.3)),
    "categorical": (Categorical(), labels_like, lambda f: TorchCategorical(logits=f)),
}


@pytest.fixture(params=LIKELIHOODS.values(), ids=LIKELIHOODS.keys())
def likelihood_case(request):
    return request.param


def some_outputs(C, n=5):
    return 2 * torch.randn(n, C, generator=torch.Generator().manual_seed(C), dtype=torch.float64)


@pytest.mark.parametrize("C", [2, 3, 10, 65])
def test_the_root_gives_the_hessian_of_the_negative_log_density(likelihood_case, C):
    likelihood, targets_like, _ = likelihood_case
    outputs = some_outputs(C)
    targets = targets_like(outputs)
    R = likelihood.hessian_root(outputs)
    assert R.shape[0] == 5 and R.shape[2] == C
    found = likelihood.curvature_scales[0] * R.transpose(1, 2) @ R
    for i in range(5):
        expected = hessian(
            lambda f, i=i: -likelihood.log_density(f[None], targets[i : i + 1]).sum(), outputs[i], vectorize=True
        )
        assert close(found[i], expected, 1e3 * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("C", [2, 3, 65])
def test_rows_of_the_hessian_root_come_in_descending_length(likelihood_case, C):
    lengths = likelihood_case[0].hessian_root(some_outputs(C)).square().sum(2)
    assert (lengths.diff(dim=1) <= 1e-15).all()


@pytest.mark.parametrize("C", [2, 7])
def test_the_log_density_is_that_of_torch(likelihood_case, C, dtype):
    likelihood, targets_like, distribution = likelihood_case
    outputs = some_outputs(C).to(dtype)
    targets = targets_like(outputs)
    found = likelihood.log_density(outputs, targets)
    expected = distribution(outputs.double()).log_prob(targets)
    expected = expected.sum(1) if expected.ndim == 2 else expected
    assert found.dtype == torch.float64
    assert close(found, expected, 100 * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("C", [2, 3, 65])
def test_the_hessian_root_has_the_dtype_of_the_outputs(likelihood_case, C, dtype):
    assert likelihood_case[0].hessian_root(some_outputs(C).to(dtype)).dtype == dtype


def test_good_targets_pass_the_check(likelihood_case):
    likelihood, targets_like, _ = likelihood_case
    outputs = some_outputs(4)
    likelihood.check_targets(outputs, targets_like(outputs))


def test_every_likelihood_fits_through_the_facade(likelihood_case):
    likelihood, targets_like, _ = likelihood_case
    model, inputs = make("mlp", 8)
    outputs = dense_outputs(model, inputs)
    la = SubspaceLaplace.paper(model, likelihood, dim=4).fit(loader(inputs, targets_like(outputs)))
    prediction = la.predict(inputs)
    assert torch.allclose(prediction.mean, outputs)
    assert prediction.has_probabilities == (likelihood.name == "classification")
    n, C = outputs.shape
    if likelihood.name == "regression":
        with pytest.raises(ValueError, match="'regression' has no probabilities"):
            _ = prediction.probabilities
        assert prediction.total.shape == (n, C, C)
        assert torch.allclose(prediction.total, prediction.covariance + la.noise_std**2 * torch.eye(C).double())
        assert prediction.interval(0.9).lower.shape == (n, C)
    else:
        assert torch.allclose(prediction.probabilities.sum(1), torch.ones(n).double())
        assert prediction.total.shape == (n,)
        with pytest.raises(ValueError, match="no interval"):
            prediction.interval(0.9)
