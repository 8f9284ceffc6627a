"""The identities of the method, in float64, on several networks, for classification and regression.

Notation: Σ = J Λ⁻¹ Jᵀ is the covariance of the full Laplace approximation over all outputs of the new inputs, Σ_P its
counterpart in the subspace spanned by P, λ_i the eigenvalues of Σ in descending order.
"""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from dense_reference import dense_ggn, dense_jacobian, dense_outputs, full_covariance, softmax_hessians
from networks import make
from test_laplace import labels, loader, sized
from torch import Tensor, nn

from sublaplace import Basis, SubspaceLaplace, SubspacePosterior
from sublaplace.curvature.exact import exact_ggn
from sublaplace.curvature.reduced import reduced_ggn
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians.jacobian import Jacobians
from sublaplace.jacobians.linearization import Linearization
from sublaplace.metrics import kl_categorical, kl_gaussian
from sublaplace.model.likelihoods.base import Likelihood
from sublaplace.model.likelihoods.categorical import Categorical
from sublaplace.model.likelihoods.gaussian import Gaussian
from sublaplace.model.likelihoods.links import probit

PRIOR = 0.7
NOISE = 0.4
EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Problem:
    model: nn.Module
    batches: list
    new: object
    likelihood: Likelihood
    outputs: Tensor  # of the new inputs
    jacobian: Tensor  # J
    precision: Tensor  # Λ
    covariance: Tensor  # Σ

    def fit(self, projector: str, dim: int, **options) -> SubspaceLaplace:
        la = SubspaceLaplace.paper(
            self.model, self.likelihood, **sized(projector, dim), prior_precision=PRIOR, **options
        )
        return la.fit(self.batches)

    def best(self, dim: int) -> Tensor:
        """Σ_{P*} with P* of Theorem 1: the exact Λ, and X′ the new inputs themselves."""
        return self._best.truncated(dim).functional_covariance(self.new, joint=True)

    @cached_property
    def _best(self) -> SubspaceLaplace:
        return self.fit("lowrank-ggn", 6, subspace_inputs=self.new)

    @cached_property
    def stream(self) -> CurvatureStream:
        return CurvatureStream(Linearization(self.model), self.batches, self.likelihood, tolerance=0.0)

    def posterior(self, projection: Tensor) -> SubspacePosterior:
        """The posterior for any P (p, s), orthonormal or not."""
        layout = self.stream.linearization.layout
        basis = Basis(layout, layout.unflatten(projection.T))
        curvature = reduced_ggn(self.stream, basis)
        return SubspacePosterior(basis, curvature, basis.gram(), self.likelihood.curvature_scales, PRIOR)

    def reduced_covariance(self, projection: Tensor) -> Tensor:
        return self.posterior(projection).joint_covariance(self.jacobians)

    @property
    def jacobians(self) -> Jacobians:
        return Jacobians(self.stream.linearization, self.new)

    @cached_property
    def eigenvalues(self) -> Tensor:
        return descending_eigenvalues(self.covariance)

    @property
    def scale(self) -> float:
        """The largest eigenvalue of Σ, to which rounding is relative."""
        return float(self.eigenvalues[0])


def descending_eigenvalues(matrix: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(matrix).flip(0)


def random_projection(problem: Problem, dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(problem.jacobian.shape[1], dim, generator=generator, dtype=torch.float64)


NETWORKS = ["mlp", "paper-cnn", "embedding", "attention", "tied-weights"]
LIKELIHOODS = {"classification": Categorical(), "regression": Gaussian(NOISE)}
_problems: dict[tuple[str, str], Problem] = {}


@pytest.fixture(params=[(n, k) for n in NETWORKS for k in LIKELIHOODS], ids=lambda pair: f"{pair[0]}-{pair[1]}")
def problem(request):
    if request.param not in _problems:
        name, kind = request.param
        likelihood = LIKELIHOODS[kind]
        model, inputs = make(name, 9)
        _, new = make(name, 4, seed=1)
        outputs = dense_outputs(model, inputs)
        n, C = outputs.shape
        if kind == "classification":
            hessians, targets = softmax_hessians(outputs), labels(model, inputs)
        else:
            hessians, targets = torch.eye(C).double().expand(n, C, C) / NOISE**2, torch.zeros_like(outputs)
        ggn, jacobian = dense_ggn(model, inputs, hessians), dense_jacobian(model, new)
        precision = ggn + PRIOR * torch.eye(len(ggn), dtype=torch.float64)
        _problems[request.param] = Problem(
            model,
            loader(inputs, targets),
            new,
            likelihood,
            dense_outputs(model, new),
            jacobian,
            precision,
            full_covariance(jacobian, precision),
        )
    return _problems[request.param]


TOLERANCE = 1e6 * EPS  # relative to the largest eigenvalue; Λ has condition numbers up to about 1e4 here


def test_theorem_1_the_optimal_subspace_gives_the_leading_eigenvalues_and_vectors(problem):
    values, vectors = torch.linalg.eigh(problem.covariance)
    for s in (1, 4):
        found = problem.fit("lowrank-ggn", s, subspace_inputs=problem.new).functional_covariance(
            problem.new, joint=True
        )
        best = (vectors[:, -s:] * values[-s:]) @ vectors[:, -s:].T
        assert (found - best).abs().max() <= TOLERANCE * problem.scale


def test_theorem_1_the_squared_frobenius_residual_is_the_sum_of_the_squared_eigenvalues_left_out(problem):
    for s in range(1, 7):
        residual = problem.covariance - problem.best(s)
        expected = problem.eigenvalues[s:].square().sum()
        assert abs(residual.square().sum() - expected) <= TOLERANCE * problem.scale**2


def test_only_the_span_of_the_projection_matters(problem):
    P = random_projection(problem, 4)
    Q = random_projection(problem, 4, seed=1)[:4] + 2 * torch.eye(4).double()
    one, other = problem.reduced_covariance(P), problem.reduced_covariance(P @ Q)
    assert (P - P @ Q).abs().max() > 0.1
    assert (one - other).abs().max() <= TOLERANCE * torch.linalg.cond(Q) ** 2 * problem.scale


@pytest.mark.parametrize("projector", ["lowrank-kfac", "lowrank-isotropic", "subset-magnitude", "last-layer"])
def test_the_reduced_covariance_lies_between_zero_and_the_full_one(problem, projector):
    found = problem.fit(projector, 5).functional_covariance(problem.new, joint=True)
    assert descending_eigenvalues(found)[-1] >= -TOLERANCE * problem.scale
    assert descending_eigenvalues(problem.covariance - found)[-1] >= -TOLERANCE * problem.scale
    assert found.trace() > 0


@pytest.mark.parametrize("projector", ["lowrank-kfac", "subset-magnitude"])
def test_covariances_and_traces_grow_with_the_dimension_up_to_those_of_the_full_posterior(problem, projector):
    la = problem.fit(projector, 6)
    traces = la.leading_traces(problem.new)
    assert (traces.diff() >= -TOLERANCE * problem.scale).all()
    assert traces[-1] <= problem.covariance.trace() * (1 + TOLERANCE)
    assert traces[-1] > 0
    smaller = la.truncated(1).functional_covariance(problem.new, joint=True)
    for s in (2, 4, 6):
        larger = la.truncated(s).functional_covariance(problem.new, joint=True)
        assert descending_eigenvalues(larger - smaller)[-1] >= -TOLERANCE * problem.scale
        assert larger.trace() == pytest.approx(float(traces[s - 1]), rel=TOLERANCE, abs=TOLERANCE * problem.scale)
        smaller = larger


def test_eigenvalues_of_any_subspace_of_the_same_rank_are_dominated_by_those_of_the_optimal_one(problem):
    for s in (2, 5):
        best = descending_eigenvalues(problem.best(s))
        assert (best[:s] - problem.eigenvalues[:s]).abs().max() <= TOLERANCE * problem.scale
        for seed in range(2):
            covariance = problem.reduced_covariance(random_projection(problem, s, seed))
            other = descending_eigenvalues(covariance)
            assert (other <= best + TOLERANCE * problem.scale).all()
            assert other[0] > TOLERANCE * problem.scale
            distance = torch.linalg.matrix_norm(problem.covariance - covariance)
            assert distance > torch.linalg.matrix_norm(problem.covariance - problem.best(s))


def test_a_subspace_of_all_parameters_gives_the_full_covariance(problem):
    p = problem.jacobian.shape[1]
    Q, _ = torch.linalg.qr(random_projection(problem, p))
    assert (problem.reduced_covariance(Q) - problem.covariance).abs().max() <= TOLERANCE * problem.scale
    subset = problem.fit("subset-magnitude", p)
    assert subset.dim == p
    found = subset.functional_covariance(problem.new, joint=True)
    assert (found - problem.covariance).abs().max() <= TOLERANCE * problem.scale


def test_a_subspace_that_contains_the_solved_jacobian_gives_the_full_covariance(problem):
    solved = torch.linalg.solve(problem.precision, problem.jacobian.T)
    extended = torch.cat([solved, random_projection(problem, 3)], dim=1)
    span, values, _ = torch.linalg.svd(extended, full_matrices=False)
    P = span[:, values > values[0] * 1e-12]  # J may have dependent rows
    assert (problem.reduced_covariance(P) - problem.covariance).abs().max() <= TOLERANCE * problem.scale


def test_the_full_posterior_of_the_facade_gives_the_full_covariance(problem):
    found = problem.fit("full", 1).functional_covariance(problem.new, joint=True)
    assert (found - problem.covariance).abs().max() <= TOLERANCE * problem.scale


def test_primal_and_dual_forms_of_the_full_covariance_agree(problem):
    p = problem.jacobian.shape[1]
    primal, dual = exact_ggn(problem.stream, p, PRIOR), exact_ggn(problem.stream, 0, PRIOR)
    assert type(primal) is not type(dual)
    one, other = (precision.joint_covariance(problem.jacobians) for precision in (primal, dual))
    assert (one - other).abs().max() <= TOLERANCE * problem.scale
    assert (one - problem.covariance).abs().max() <= TOLERANCE * problem.scale
    assert float(primal.log_determinant()) == pytest.approx(float(dual.log_determinant()), rel=TOLERANCE)


def predictive_divergence(problem: Problem, one: Tensor, other: Tensor) -> float:
    """KL of the predictives: joint Gaussians with noise for regression, probit categoricals for classification."""
    if problem.likelihood.name == "regression":
        noise = NOISE**2 * torch.eye(len(one), dtype=torch.float64)
        return kl_gaussian(one + noise, other + noise)
    shape = problem.outputs.shape
    return kl_categorical(
        probit(problem.outputs, one.diagonal().view(shape)), probit(problem.outputs, other.diagonal().view(shape))
    )


def test_the_divergence_from_the_full_predictive_is_positive_and_zero_where_covariances_agree(problem):
    full = problem.covariance
    assert abs(predictive_divergence(problem, full, full)) <= 1e3 * EPS * len(full)
    whole = problem.fit("subset-magnitude", problem.jacobian.shape[1]).functional_covariance(problem.new, joint=True)
    assert abs(predictive_divergence(problem, full, whole)) <= TOLERANCE
    for s in (1, 3):
        assert predictive_divergence(problem, full, problem.best(s)) > TOLERANCE


@pytest.mark.parametrize("problem", [(name, "regression") for name in NETWORKS], indirect=True, ids=NETWORKS)
def test_the_optimal_subspace_diverges_less_than_a_random_one(problem):
    random = problem.reduced_covariance(random_projection(problem, 3))
    full = problem.covariance
    assert predictive_divergence(problem, full, problem.best(3)) < predictive_divergence(problem, full, random)
