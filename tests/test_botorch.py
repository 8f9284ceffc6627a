"""The BoTorch model: its distributions by brute force, its gradients, and BoTorch's own functions run on it."""

import sys

import pytest
import torch
from test_laplace import loader
from torch import nn

from sublaplace import Categorical, Gaussian, SubspaceLaplace

botorch = pytest.importorskip("botorch")

from botorch.acquisition import (  # noqa: E402
    LogExpectedImprovement,
    PosteriorMean,
    UpperConfidenceBound,
    qExpectedImprovement,
    qKnowledgeGradient,
    qLogNoisyExpectedImprovement,
)
from botorch.acquisition.multi_objective import qExpectedHypervolumeImprovement  # noqa: E402
from botorch.acquisition.objective import ScalarizedPosteriorTransform  # noqa: E402
from botorch.generation import MaxPosteriorSampling  # noqa: E402
from botorch.models.transforms import Log, Normalize, Standardize  # noqa: E402
from botorch.optim import optimize_acqf  # noqa: E402
from botorch.sampling import SobolQMCNormalSampler  # noqa: E402
from botorch.utils.multi_objective.box_decompositions import NondominatedPartitioning  # noqa: E402

from sublaplace.botorch import SubspaceLaplaceModel  # noqa: E402

CUBE = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
SIGMA = 0.2


def points(*shape, seed=0):
    return torch.rand(*shape, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outcomes(X, m):
    return torch.stack([(3 * X).sin().sum(-1), (X[..., 0] - X[..., 1]).square(), X.prod(-1)][:m], dim=-1)


def network(m, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, m)).to(dtype)


def fitted(m=1, dtype=torch.float64, **options):
    X = points(12, seed=3)
    la = SubspaceLaplace(network(m, dtype), Gaussian(SIGMA), prior_precision=0.5, **options)
    return la.fit(loader(X.to(dtype), outcomes(X, m).to(dtype)))


@pytest.fixture(scope="module")
def trained():
    X = points(15)
    return SubspaceLaplaceModel.trained(
        X, 10 + 5 * outcomes(X, 1), hidden_layer_sizes=(20,), noise_std=0.05, max_steps=20
    )


# Distributions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"projector": "full"}, {"projector": "last-layer"}], ids=str)
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("shape", [(1,), (3,), (9,), (4, 1), (4, 3), (2, 3, 2)], ids=str)
def test_the_joint_distribution_of_every_t_batch_is_the_posterior(shape, m, options):
    la = fitted(m, **options)
    X = points(*shape)
    found = SubspaceLaplaceModel(la).posterior(X)
    q = shape[-1]
    assert found.mean.shape == found.variance.shape == (*shape, m)
    assert found.rsample(torch.Size([5])).shape == (5, *shape, m)
    covariances = found.distribution.covariance_matrix.reshape(-1, q * m, q * m)
    for group, mean, covariance in zip(X.reshape(-1, q, 2), found.mean.reshape(-1, q, m), covariances, strict=True):
        expected = la.functional_covariance(group, joint=True)
        assert torch.allclose(mean, la.model(group), rtol=1e-10)
        assert torch.allclose(covariance, expected, rtol=1e-8, atol=1e-10 * float(expected.abs().max()))


def test_noise_is_added_on_the_diagonal():
    model, X = SubspaceLaplaceModel(fitted(2)), points(4, 3)
    plain = model.posterior(X).variance
    assert torch.allclose(model.posterior(X, observation_noise=True).variance, plain + SIGMA**2)
    given = torch.tensor([[0.1, 0.7]], dtype=torch.float64)
    assert torch.allclose(model.posterior(X, observation_noise=given).variance, plain + given)


def test_outputs_can_be_chosen():
    model, X = SubspaceLaplaceModel(fitted(3), Standardize(m=3)), points(4, 2)
    model.outcome_transform.means = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    model.outcome_transform.stdvs = torch.tensor([[3.0, 0.5, 2.0]], dtype=torch.float64)
    model.outcome_transform._stdvs_sq = model.outcome_transform.stdvs**2
    model.outcome_transform._is_trained = torch.tensor(True)
    whole = model.posterior(X)
    for found in (model.posterior(X, output_indices=[2, 0]), model.subset_output([2, 0]).posterior(X)):
        assert torch.allclose(found.mean, whole.mean[..., [2, 0]])
        assert torch.allclose(found.variance, whole.variance[..., [2, 0]])
    assert model.num_outputs == 3 and model.subset_output([1]).num_outputs == 1
    assert torch.allclose(model.subset_output([1]).posterior(X).mean, whole.mean[..., [1]])


def test_transforms_of_inputs_and_outcomes_are_undone():
    X = points(12, seed=3)
    Y = 100 + 20 * outcomes(10 * X - 5, 1)
    wide = SubspaceLaplaceModel.trained(10 * X - 5, Y, input_transform=Normalize(d=2), max_steps=10)
    narrow = SubspaceLaplaceModel.trained(X, Y, max_steps=10)  # it standardises its inputs itself
    new = points(5, 2)
    assert torch.allclose(wide.posterior(10 * new - 5).mean, narrow.posterior(new).mean, rtol=1e-6)
    assert float(wide.posterior(10 * new - 5).mean.mean()) == pytest.approx(float(Y.mean()), rel=0.5)
    positive = SubspaceLaplaceModel.trained(X, Y.exp().clamp(1e-3, 1e3), outcome_transform=Log(), max_steps=10)
    assert (positive.posterior(new).rsample(torch.Size([8])) > 0).all()


def test_posterior_transforms_are_applied():
    model, X = SubspaceLaplaceModel(fitted(2)), points(4, 1)
    weights = torch.tensor([0.3, -2.0], dtype=torch.float64)
    found = model.posterior(X, posterior_transform=ScalarizedPosteriorTransform(weights))
    covariance = model.posterior(X).distribution.covariance_matrix
    assert torch.allclose(found.mean, model.posterior(X).mean @ weights[:, None])
    assert torch.allclose(found.variance.squeeze(), weights @ covariance @ weights)


def test_a_float32_network_answers_in_the_type_of_its_inputs():
    found = SubspaceLaplaceModel(fitted(dtype=torch.float32)).posterior(points(3, 2))
    assert found.mean.dtype == found.variance.dtype == torch.float64


def test_the_default_network_learns_a_function_of_few_points():
    """A third of the points are held out; a straight line has a root mean square error of 0.55 there."""
    X = points(36, seed=11)
    Y = 3 + 2 * torch.stack([(8 * X[:, 0]).sin() + X[:, 1], X[:, 0]], dim=1)
    model = SubspaceLaplaceModel.trained(X[:24].float(), Y[:24].float())
    found = model.posterior(X[24:].unsqueeze(1))
    errors = (found.mean - Y[24:].unsqueeze(1)).squeeze(1)
    assert float(errors.square().mean().sqrt()) < 0.15
    assert float((errors.square() / (found.variance.squeeze(1) + 1e-4)).mean()) < 4


# Conditioning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2])
def test_conditioning_is_the_exact_posterior_of_the_linearised_network(m):
    """By brute force: Λ gains JᵀJ/σ², and θ moves to the mode of the linearised model."""
    la = fitted(m, projector="full")
    new, X = points(3, seed=8), points(5, seed=9)
    Y = outcomes(new, m) + 0.3
    found = SubspaceLaplaceModel(la).condition_on_observations(new, Y).posterior(X)
    parameters = list(la.model.parameters())

    def rows(points_):
        return torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(output, parameters, retain_graph=True)])
                for output in la.model(points_).flatten()
            ]
        )

    J, K = rows(points(12, seed=3)), rows(new)
    precision = J.T @ J / SIGMA**2 + 0.5 * torch.eye(J.shape[1], dtype=torch.float64) + K.T @ K / SIGMA**2
    residual = (Y - la.model(new)).flatten().detach()
    step = torch.linalg.solve(precision, K.T @ residual / SIGMA**2)
    at = rows(X)
    expected = la.model(X).flatten() + at @ step
    assert torch.allclose(found.mean.flatten(), expected, rtol=1e-7)
    covariance = at @ torch.linalg.solve(precision, at.T)
    assert torch.allclose(found.distribution.covariance_matrix, covariance, rtol=1e-6, atol=1e-9)


def test_the_covariance_is_that_of_an_update_where_that_is_exact():
    """With P over all directions that both data sets determine, an update of the subspace is exact."""
    new, X = points(3, seed=8), points(4, seed=9)
    la = fitted(
        dim=15, subspace_inputs=torch.cat([points(12, seed=3), new, X]), projector="lowrank-ggn", complement=None
    )
    outcome = outcomes(new, 1)
    conditioned = SubspaceLaplaceModel(la).condition_on_observations(new, outcome).posterior(X)
    updated = la.updated([(new, outcome)]).functional_covariance(X, joint=True)
    assert torch.allclose(conditioned.distribution.covariance_matrix, updated, rtol=1e-6)


def test_observations_one_after_another_are_those_at_once():
    model, new = SubspaceLaplaceModel(fitted(2)), points(4, seed=8)
    Y, X = outcomes(new, 2), points(3, 2)
    once = model.condition_on_observations(new, Y).posterior(X)
    steps = model.condition_on_observations(new[:1], Y[:1]).condition_on_observations(new[1:], Y[1:]).posterior(X)
    assert torch.allclose(once.mean, steps.mean) and torch.allclose(once.variance, steps.variance)
    assert not torch.allclose(once.mean, model.posterior(X).mean)  # the first model is as it was


def test_fantasies_have_their_own_batch_shape():
    model = SubspaceLaplaceModel(fitted())
    fantasy = model.fantasize(points(3, 2), SobolQMCNormalSampler(torch.Size([4])))
    assert fantasy.batch_shape == (4, 3)
    found = fantasy.posterior(points(4, 3, 1))
    assert found.mean.shape == found.variance.shape == (4, 3, 1, 1)
    assert (found.variance < model.posterior(points(4, 3, 1)).variance).all()


# Gradients, acquisition functions -------------------------------------------------------------------------------------


def test_gradients_of_an_acquisition_function_equal_finite_differences(trained):
    conditioned = trained.condition_on_observations(points(2, seed=4), outcomes(points(2, seed=4), 1))
    for acquisition, q in (
        (LogExpectedImprovement(trained, best_f=14.0), 1),
        (qExpectedImprovement(trained, best_f=12.0, sampler=SobolQMCNormalSampler(torch.Size([16]), seed=0)), 3),
        (UpperConfidenceBound(conditioned, beta=2.0), 1),
        (PosteriorMean(trained.function_sample(3)), 1),
    ):
        X = points(1, q, seed=5).requires_grad_()
        (found,) = torch.autograd.grad(acquisition(X).sum(), X)
        for place in range(X.numel()):
            moved = torch.zeros(X.numel(), dtype=torch.float64)
            moved[place] = 1e-5
            moved = moved.view_as(X)
            with torch.no_grad():
                expected = (acquisition(X + moved) - acquisition(X - moved)).sum() / 2e-5
            assert float(found.flatten()[place]) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)


@pytest.mark.filterwarnings("ignore")  # of BoTorch, about its own functions
@pytest.mark.parametrize(
    ("acquisition", "q"),
    [
        (lambda model: LogExpectedImprovement(model, best_f=14.0), 1),
        (lambda model: UpperConfidenceBound(model, beta=2.0), 1),
        (lambda model: qExpectedImprovement(model, best_f=14.0), 2),
        (lambda model: qLogNoisyExpectedImprovement(model, X_baseline=points(15), prune_baseline=True), 2),
        (lambda model: qKnowledgeGradient(model, num_fantasies=2), 1),
        (lambda model: PosteriorMean(model.function_sample(1)), 1),
    ],
    ids=["LogEI", "UCB", "qEI", "qLogNEI", "qKG", "Thompson"],
)
def test_acquisition_functions_are_optimised_through_gradients(trained, acquisition, q):
    torch.manual_seed(0)
    function = acquisition(trained)
    found, value = optimize_acqf(
        function, CUBE, q=q, num_restarts=2, raw_samples=16, options={"maxiter": 15, "sample_around_best": False}
    )
    assert found.shape == (q, 2) and (found >= 0).all() and (found <= 1).all()
    extended = 2 if isinstance(function, qKnowledgeGradient) else 0
    with torch.no_grad():
        others = function(points(32, q + extended, seed=6))
    assert value >= others.quantile(0.9)


def test_several_objectives_can_be_optimised():
    model = SubspaceLaplaceModel(fitted(2))
    reference = torch.tensor([0.0, -1.0], dtype=torch.float64)
    partitioning = NondominatedPartitioning(reference, outcomes(points(6), 2))
    function = qExpectedHypervolumeImprovement(model, reference, partitioning)
    found, _ = optimize_acqf(function, CUBE, q=2, num_restarts=1, raw_samples=4, options={"maxiter": 3})
    assert found.shape == (2, 2)


def test_a_set_of_candidates_can_be_sampled(trained):
    found = MaxPosteriorSampling(trained)(points(30), num_samples=3)
    assert found.shape == (3, 2)


def test_a_function_sample_is_one_smooth_function_from_the_posterior(trained):
    X = points(4, 3)
    first, again, other = (trained.function_sample(seed) for seed in (1, 1, 2))
    assert torch.equal(first.posterior(X).mean, again.posterior(X).mean)
    assert not torch.allclose(first.posterior(X).mean, other.posterior(X).mean)
    assert torch.allclose(first.posterior(X).mean[2], first.posterior(X[2]).mean)
    draws = torch.stack([trained.function_sample(seed).posterior(X[0]).mean for seed in range(400)])
    found = trained.posterior(X[0].unsqueeze(1))
    spread = found.variance.squeeze(1).sqrt()
    assert ((draws.mean(0) - found.mean.squeeze(1)).abs() < 5 * spread / 20).all()
    assert torch.allclose(draws.std(0), spread, rtol=0.2)


# What is left alone, and what is refused ------------------------------------------------------------------------------


def test_the_network_stays_as_it_is(trained):
    network = trained.laplace.model
    before = {name: value.clone() for name, value in network.state_dict().items()}
    trained.train()
    trained.eval()
    trained.float()
    assert not list(trained.parameters())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    trained.double()


def test_wrong_shapes_are_refused(trained):
    with pytest.raises(ValueError, match=r"X must be of shape \(…, q, 2\)"):
        trained.posterior(torch.rand(4, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="X must be of shape"):
        trained.posterior(torch.rand(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"Y must be of shape \(…, 4, 1\)"):
        trained.condition_on_observations(points(4), torch.rand(4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"train_Y \(n, m\)"):
        SubspaceLaplaceModel.trained(points(4), torch.rand(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="Unknown activation"):
        SubspaceLaplaceModel.trained(points(4), outcomes(points(4), 1), hidden_layer_sizes=(3,), activation="sine")
    with pytest.raises(ValueError, match="activation has no effect"):
        SubspaceLaplaceModel.trained(points(4), outcomes(points(4), 1), activation="tanh")
    with pytest.raises(ValueError, match="has no function samples"):
        trained.condition_on_observations(points(1), outcomes(points(1), 1)).function_sample()
    with pytest.raises(ValueError, match="cannot be conditioned"):
        model = SubspaceLaplaceModel(fitted(2)).subset_output([1])
        model.condition_on_observations(points(1), outcomes(points(1), 1))


def test_a_classifier_is_refused():
    X = points(12)
    la = SubspaceLaplace(network(2), Categorical(), prior_precision=1.0).fit([(X, (X[:, 0] > 0.5).long())])
    with pytest.raises(ValueError, match="needs a likelihood with noise"):
        SubspaceLaplaceModel(la)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "botorch.models.deterministic", None)
    monkeypatch.delitem(sys.modules, "sublaplace.botorch")
    with pytest.raises(ImportError, match=r"pip install 'sublaplace\[botorch\]'"):
        import sublaplace.botorch  # noqa: F401
