"""The evidence against brute force and against laplace-torch, and the λ and σ that maximise it."""

import warnings
from itertools import pairwise
from math import exp, log, log10
from pathlib import Path

import pytest
import torch
from dense_reference import dense_ggn, dense_jacobian, dense_outputs, softmax_hessians, subspace_covariance
from networks import make
from safetensors.torch import load_file
from test_laplace import labels, loader, sized
from torch import nn
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal

from sublaplace import (
    Basis,
    Categorical,
    Complement,
    DensePrecision,
    DualPrecision,
    Gaussian,
    Subset,
    SubspaceLaplace,
    metrics,
)
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.precision import EigenvalueOccam
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.fitting import validation
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.residuals import Residuals
from sublaplace.posteriors.evidence import Evidence

FIXTURE = Path(__file__).parent / "fixtures" / "laplace_torch_marglik.safetensors"
KINDS = ["classification", "given noise", "estimated noise"]
PRIOR, NOISE = 0.7, 0.4


def likelihood_of(kind):
    if kind == "classification":
        return {"likelihood": "classification"}
    return {"likelihood": Gaussian(NOISE) if kind == "given noise" else "regression"}


def problem(kind, n=12, name="mlp", dtype=torch.float64, seed=0):
    """A network, its inputs and targets that do not fit perfectly."""
    model, inputs = make(name, n, dtype, seed)
    if kind == "classification":
        return model, inputs, labels(model, inputs)
    generator = torch.Generator().manual_seed(seed + 1)
    outputs = dense_outputs(model, inputs)
    noise = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    return model, inputs, (outputs + 0.3 + 0.5 * noise).to(dtype)


def fitted(kind, n=12, name="mlp", prior=PRIOR, projector="lowrank-kfac", dim=6):
    model, inputs, targets = problem(kind, n, name)
    la = SubspaceLaplace.paper(model, **likelihood_of(kind), prior_precision=prior, **sized(projector, dim))
    return la.fit(loader(inputs, targets, size=max(5, n // 3))), inputs, targets


def squared_norm(model):
    return sum(float(p.detach().double().square().sum()) for p in model.parameters() if p.requires_grad)


def unit_ggn(model, inputs, kind):
    """The GGN without σ."""
    outputs = dense_outputs(model, inputs)
    n, C = outputs.shape
    hessians = softmax_hessians(outputs) if kind == "classification" else torch.eye(C).double().expand(n, C, C)
    return dense_ggn(model, inputs, hessians)


def dense_evidence(model, inputs, targets, kind, prior, noise=1.0, projection=None):
    """ln p(D|θ̂) − ½ λ‖θ̂‖² + ½ ln det(λI) − ½ ln det(QᵀΛQ), by determinants of dense matrices."""
    outputs = dense_outputs(model, inputs)
    prior, noise = torch.as_tensor(prior, dtype=torch.float64), torch.as_tensor(noise, dtype=torch.float64)
    ggn = unit_ggn(model, inputs, kind)
    if kind == "classification":
        fit = TorchCategorical(logits=outputs).log_prob(targets).sum()
    else:
        fit = Normal(outputs, noise).log_prob(targets.double()).sum()
        ggn = ggn / noise**2
    if projection is not None:
        ggn = projection.T @ ggn @ projection
    s = len(ggn)
    determinant = torch.logdet(ggn + prior * torch.eye(s, dtype=torch.float64))
    return fit - 0.5 * prior * squared_norm(model) + 0.5 * (s * prior.log() - determinant)


def stationary_prior(eigenvalues, norm):
    """The only root of λ‖θ̂‖² = Σ γ/(λ + γ), where the evidence has its maximum, by bisection over ln λ."""
    low, high = log(1e-12), log(1e12)
    for _ in range(200):
        middle = (low + high) / 2
        rises = exp(middle) * norm < float((eigenvalues / (eigenvalues + exp(middle))).sum())
        low, high = (middle, high) if rises else (low, middle)
    return exp(low)


def same_basis(la):
    """A projector that returns the P of another fit."""
    projection = la._subspace().projection
    return lambda context: projection


def close(value, expected, tolerance):
    return (value - expected).abs().max() <= tolerance * expected.abs().max()


# The value ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "form"), [(6, DualPrecision), (60, DensePrecision)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_evidence_of_the_full_posterior_equals_brute_force(kind, n, form):
    la, inputs, targets = fitted(kind, n, projector="full")
    assert isinstance(la._state.posterior, form)
    noise = la.noise_std or 1.0
    found = la.log_marginal_likelihood()
    assert found.dtype == torch.float64 and found.shape == ()
    assert float(found) == pytest.approx(
        float(dense_evidence(la.model, inputs, targets, kind, PRIOR, noise)), rel=1e-10
    )
    for prior in (1e-3, 0.2, 50.0):
        expected = dense_evidence(la.model, inputs, targets, kind, prior, noise)
        assert float(la.log_marginal_likelihood(prior)) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("projector", ["lowrank-kfac", "subset-magnitude", "last-layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_evidence_in_a_subspace_equals_brute_force(kind, projector):
    la, inputs, targets = fitted(kind, projector=projector)
    P, noise = la.projection_matrix(), la.noise_std or 1.0
    for prior in (1e-3, PRIOR, 50.0):
        expected = dense_evidence(la.model, inputs, targets, kind, prior, noise, P)
        assert float(la.log_marginal_likelihood(prior)) == pytest.approx(float(expected), rel=1e-9)
    assert la.log_marginal_likelihood() == la.log_marginal_likelihood(PRIOR, la.noise_std or 1.0)


@pytest.mark.parametrize("name", ["paper-cnn", "tied-weights", "frozen-layer", "attention"])
def test_the_evidence_of_other_networks_equals_brute_force(name):
    la, inputs, targets = fitted("classification", 8, name)
    expected = dense_evidence(la.model, inputs, targets, "classification", PRIOR, projection=la.projection_matrix())
    assert float(la.log_marginal_likelihood()) == pytest.approx(float(expected), rel=1e-9)


def test_the_evidence_of_a_float32_network_equals_brute_force_to_its_precision():
    model, inputs, targets = problem("given noise", dtype=torch.float32)
    la = SubspaceLaplace.paper(model, Gaussian(NOISE), dim=6, prior_precision=PRIOR)
    la.fit(loader(inputs, targets))
    expected = dense_evidence(model, inputs, targets, "given noise", PRIOR, NOISE, la.projection_matrix().double())
    found = la.log_marginal_likelihood()
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("kind", ["given noise", "estimated noise"])
@pytest.mark.parametrize("projector", ["full", "lowrank-kfac"])
def test_another_noise_gives_the_evidence_of_a_fit_with_it(kind, projector):
    la, inputs, targets = fitted(kind, projector=projector)
    before = la.noise_std
    P = None if projector == "full" else la.projection_matrix()
    for noise in (0.05, 2.0):
        expected = float(dense_evidence(la.model, inputs, targets, kind, PRIOR, noise, P))
        assert float(la.log_marginal_likelihood(noise_std=noise)) == pytest.approx(expected, rel=1e-9)
        again = SubspaceLaplace.paper(
            la.model,
            Gaussian(noise),
            **sized(projector if P is None else same_basis(la), 6),
            prior_precision=PRIOR,
        ).fit(loader(inputs, targets))
        assert float(again.log_marginal_likelihood()) == pytest.approx(expected, rel=1e-9)
    assert la.noise_std == before and la.prior_precision == PRIOR


@pytest.mark.parametrize("kind", KINDS)
def test_the_evidence_with_as_many_dimensions_as_parameters_is_the_full_one(kind):
    full, inputs, targets = fitted(kind, projector="full")
    p = full.num_parameters
    rotation, _ = torch.linalg.qr(torch.randn(p, p, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    layout = full._layout
    everything = [Basis(layout, layout.unflatten(rotation)), Subset(layout, torch.arange(p).flip(0), torch.float64)]
    for projection in everything:
        la = SubspaceLaplace.paper(
            full.model, **likelihood_of(kind), projector=lambda _, P=projection: P, dim=p, prior_precision=PRIOR
        ).fit(loader(inputs, targets))
        assert la.dim == p
        for prior in (0.01, PRIOR, 30.0):
            expected = float(full.log_marginal_likelihood(prior))
            assert float(la.log_marginal_likelihood(prior)) == pytest.approx(expected, rel=1e-9)


def test_a_larger_subspace_has_a_smaller_occam_factor():
    la, *_ = fitted("classification", dim=8)
    values = [float(la.truncated(s).log_marginal_likelihood()) for s in range(1, la.dim + 1)]
    assert all(larger < smaller for smaller, larger in pairwise(values))


# Its derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projector", ["full", "lowrank-kfac"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_evidence_has_the_derivatives_of_brute_force(kind, projector):
    la, inputs, targets = fitted(kind, projector=projector)
    P = None if projector == "full" else la.projection_matrix()
    hyper = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.3, 0.6)]
    if kind == "classification":
        hyper = hyper[:1]
    assert torch.autograd.gradcheck(lambda *values: la.log_marginal_likelihood(*values), hyper)
    found = torch.autograd.grad(la.log_marginal_likelihood(*hyper), hyper)
    expected = torch.autograd.grad(dense_evidence(la.model, inputs, targets, kind, *hyper, projection=P), hyper)
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-8)


def test_the_evidence_can_be_climbed_by_gradients():
    la, *_ = fitted("estimated noise")
    hyper = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([hyper], max_iter=50, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def loss():
        optimizer.zero_grad()
        value = -la.log_marginal_likelihood(*hyper.exp())
        value.backward()
        return value

    optimizer.step(loss)
    la.optimize_prior_precision(tune_noise=True)
    assert hyper.detach().exp().tolist() == pytest.approx([la.prior_precision, la.noise_std], rel=1e-4)


# Its maximum ----------------------------------------------------------------------------------------------------------


def some_evidence(norm, noisy, seed=0):
    generator = torch.Generator().manual_seed(seed)
    eigenvalues = torch.cat([10 ** (6 * torch.rand(20, generator=generator).double() - 3), torch.zeros(5).double()])
    residuals = Residuals.of(0.1 + 0.5 * torch.randn(200, 1, generator=generator, dtype=torch.float64))
    fit = residuals.log_likelihood if noisy else lambda _: torch.tensor(-40.0, dtype=torch.float64)
    return Evidence(fit, EigenvalueOccam(eigenvalues, 1.0), norm, None if noisy else (1.0,))


def derivatives(evidence, prior, noise):
    """In ln λ and ln σ."""
    logs = torch.tensor([prior, noise], dtype=torch.float64).log().requires_grad_()
    return torch.autograd.grad(evidence(*logs.exp()), logs)[0]


def tensors(*values):
    return (torch.tensor(value, dtype=torch.float64) for value in values)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("norm", [1e-3, 1.0, 37.0, 1e4])
def test_the_best_prior_is_stationary_and_beats_a_fine_grid(norm, noisy):
    evidence, noise = some_evidence(norm, noisy), 0.4
    best = evidence.best_prior(noise)
    assert 1e-7 < best < 1e9
    assert abs(float(derivatives(evidence, best, noise)[0])) < 1e-5
    scale = noise**-2 if noisy else 1.0
    assert best == pytest.approx(stationary_prior(scale * evidence.occam.eigenvalues, norm), rel=1e-5)
    highest = max(float(evidence(*tensors(prior, noise))) for prior in torch.logspace(-8, 10, 1001).tolist())
    assert float(evidence(*tensors(best, noise))) >= highest - 1e-9


def test_the_best_prior_stays_inside_of_its_bounds_where_there_is_no_maximum():
    grows = Evidence(lambda _: torch.tensor(0.0).double(), EigenvalueOccam(torch.ones(3).double(), 1.0), 0.0, (1.0,))
    assert grows.best_prior(1.0, high=1e4) == pytest.approx(1e4, rel=1e-4)
    falls = Evidence(lambda _: torch.tensor(0.0).double(), EigenvalueOccam(torch.zeros(3).double(), 1.0), 2.0, (1.0,))
    assert falls.best_prior(1.0, low=1e-4) == pytest.approx(1e-4, rel=1e-4)


@pytest.mark.parametrize("start", [1e-3, 0.5, 1e3])
@pytest.mark.parametrize("norm", [0.1, 30.0])
def test_the_best_prior_and_noise_are_stationary_and_beat_a_grid(norm, start):
    evidence = some_evidence(norm, noisy=True)
    prior, noise = evidence.best_prior_and_noise(start)
    assert derivatives(evidence, prior, noise).abs().max() < 1e-4
    highest = max(
        float(evidence(*tensors(some_prior, some_noise)))
        for some_prior in torch.logspace(-3, 4, 22).tolist()
        for some_noise in torch.logspace(-2, 1, 25).tolist()
    )
    assert float(evidence(*tensors(prior, noise))) >= highest - 1e-9


def test_without_noise_only_the_prior_is_tuned():
    evidence = some_evidence(2.0, noisy=False)
    assert evidence.best_prior_and_noise(0.4) == (evidence.best_prior(0.4), 0.4)


# The KFAC evidence, before P is built ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "paper-cnn"])
@pytest.mark.parametrize("kind", KINDS)
def test_fitting_with_the_evidence_takes_the_prior_of_the_greatest_kfac_evidence(kind, name):
    model, inputs, targets = problem(kind, 12, name)
    batches = loader(inputs, targets, size=5)
    la = SubspaceLaplace.paper(model, **likelihood_of(kind), dim=5, prior_precision="evidence")
    assert la.prior_precision is None
    assert la.fit(batches) is la
    likelihood = Categorical() if kind == "classification" else Gaussian(la.noise_std)
    kfac = kronecker_ggn(CurvatureStream(Linearization(model), batches, likelihood, 0.0), 1.0)
    identity = torch.eye(la.num_parameters, dtype=torch.float64)
    matrix = kfac.layout.flatten(kfac.matmul(kfac.layout.unflatten(identity))) - identity
    eigenvalues = torch.linalg.eigvalsh((matrix + matrix.T) / 2).clamp_min(0)
    assert la.prior_precision == pytest.approx(stationary_prior(eigenvalues, squared_norm(model)), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_fitting_with_the_evidence_builds_the_subspace_at_the_prior_it_found(kind, dtype):
    model, inputs, targets = problem(kind, 12, "paper-cnn", dtype)
    batches = loader(inputs, targets, size=5)

    def fit(prior):
        return SubspaceLaplace.paper(model, **likelihood_of(kind), dim=5, prior_precision=prior).fit(batches)

    la = fit("evidence")
    same, other = fit(la.prior_precision), fit(100 * la.prior_precision)
    assert la.noise_std == same.noise_std and la.prior_precision == same.prior_precision
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    assert close(
        la.projection_matrix() @ la.projection_matrix().T,
        same.projection_matrix() @ same.projection_matrix().T,
        tolerance,
    )
    assert not close(
        la.projection_matrix() @ la.projection_matrix().T, other.projection_matrix() @ other.projection_matrix().T, 1e-2
    )
    assert close(la.functional_covariance(inputs), same.functional_covariance(inputs), tolerance)


def test_the_full_posterior_can_be_fitted_at_the_prior_of_kfac_too():
    full, *_ = fitted("classification", prior="evidence", projector="full")
    low_rank, *_ = fitted("classification", prior="evidence")
    assert full.prior_precision == pytest.approx(low_rank.prior_precision, rel=1e-12)


def test_fitting_other_data_with_the_evidence_tunes_the_prior_anew():
    la, *_ = fitted("estimated noise", prior="evidence")
    first = la.prior_precision
    inputs, targets = 3 * make("mlp", 40, seed=5)[1], problem("estimated noise", 40)[2]
    la.fit(loader(inputs, targets))
    assert la.prior_precision != first
    again = SubspaceLaplace.paper(la.model, "regression", dim=6, prior_precision="evidence").fit(
        loader(inputs, targets)
    )
    assert la.prior_precision == again.prior_precision


# After the fit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projector", ["full", "lowrank-kfac", "subset-diagonal"])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizing_by_marglik_changes_la_and_returns_it(kind, projector):
    la, inputs, _ = fitted(kind, projector=projector, dim=20)
    old, relative = la.log_marginal_likelihood(), la.with_prior(PRIOR)
    P = torch.eye(la.num_parameters, dtype=torch.float64) if projector == "full" else la.projection_matrix()
    noise = la.noise_std
    assert la.optimize_prior_precision("marglik") is la
    ggn = unit_ggn(la.model, inputs, kind) * (noise or 1.0) ** -2
    best = stationary_prior(torch.linalg.eigvalsh(P.T @ ggn @ P).clamp_min(0), squared_norm(la.model))
    assert la.prior_precision == pytest.approx(best, rel=1e-5)
    assert la.noise_std == noise
    assert la.log_marginal_likelihood() > old
    precision = ggn + la.prior_precision * torch.eye(len(ggn), dtype=torch.float64)
    expected = subspace_covariance(dense_jacobian(la.model, inputs), P, precision)
    assert close(la.functional_covariance(inputs, joint=True), expected, 1e-8)
    if projector != "full":
        assert torch.equal(la.projection_matrix(), P)
    assert relative.prior_precision == PRIOR
    assert relative.log_marginal_likelihood() == old


def test_marglik_is_the_default_and_does_not_depend_on_the_prior_it_starts_from():
    la, *_ = fitted("classification")
    other = la.with_prior(1e4)
    assert la.optimize_prior_precision().prior_precision == pytest.approx(
        other.optimize_prior_precision("marglik").prior_precision, rel=1e-6
    )


@pytest.mark.parametrize("by", ["evidence", "validation"])
def test_tuning_gives_a_new_posterior_and_every_spelling_gives_the_same(by):
    la, inputs, targets = validation_problem("classification", "lowrank-kfac")
    val_loader = None if by == "evidence" else loader(inputs, targets, size=5)
    before = la.functional_covariance(inputs)
    tuned = la.tuned("evidence" if by == "evidence" else val_loader)
    assert tuned is not la and tuned.prior_precision != PRIOR
    assert la.prior_precision == PRIOR and torch.equal(la.functional_covariance(inputs), before)
    for method in ("marglik", "evidence") if by == "evidence" else ("validation", "gridsearch"):
        other = la.with_prior(PRIOR)
        assert other.optimize_prior_precision(method, val_loader=val_loader) is other
        assert other.prior_precision == tuned.prior_precision
        assert torch.equal(other.functional_covariance(inputs), tuned.functional_covariance(inputs))


def test_a_fit_with_validation_data_is_tuned_on_them():
    la, inputs, targets = fitted("classification", 30)
    _, new = make("mlp", 25, seed=7)
    val_loader = loader(new, labels(la.model, new), size=5)
    both = SubspaceLaplace.paper(la.model, "classification", dim=6, prior_precision="auto")
    assert both.fit(loader(inputs, targets, size=10), val_loader) is both
    assert "(by the NLL of 25 validation inputs)" in both.summary()
    # A λ that is given stands against them.
    with pytest.raises(ValueError, match=r"val_loader has no effect: prior_precision=0\.7.*Leave prior_precision out"):
        la.fit(loader(inputs, targets, size=10), val_loader)
    assert la.prior_precision == PRIOR


def test_an_unknown_way_to_tune_is_refused_with_those_that_exist():
    la, *_ = fitted("classification")
    with pytest.raises(ValueError, match=r"Unknown way to tune, 'marglik'; choose 'evidence' or .* validation data"):
        la.tuned("marglik")


@pytest.mark.parametrize("projector", ["lowrank-kfac", "dual", "primal"])
@pytest.mark.parametrize("kind", ["given noise", "estimated noise"])
def test_tuned_noise_gives_the_posterior_of_a_fit_with_it(kind, projector):
    subspace = projector == "lowrank-kfac"
    la, inputs, targets = fitted(kind, 60 if projector == "primal" else 12, projector=projector if subspace else "full")
    before, old = la.noise_std, la.log_marginal_likelihood()
    relative, predicted = la.with_prior(PRIOR), la.predict(inputs).total
    assert la.optimize_prior_precision("marglik", tune_noise=True) is la
    assert la.noise_std != pytest.approx(before, rel=1e-3)
    assert la.log_marginal_likelihood() > old
    fresh = SubspaceLaplace.paper(
        la.model,
        Gaussian(la.noise_std),
        **sized(same_basis(la) if subspace else "full", 6),
        prior_precision=la.prior_precision,
    ).fit(loader(inputs, targets))
    assert close(la.functional_covariance(inputs, joint=True), fresh.functional_covariance(inputs, joint=True), 1e-10)
    assert close(la.predict(inputs).total, fresh.predict(inputs).total, 1e-10)
    assert float(la.log_marginal_likelihood()) == pytest.approx(float(fresh.log_marginal_likelihood()), rel=1e-10)
    assert relative.noise_std == before
    assert torch.equal(relative.predict(inputs).total, predicted)


def test_the_noise_of_classification_cannot_be_tuned():
    la, *_ = fitted("classification")
    with pytest.raises(ValueError, match="'classification' has no noise σ to tune"):
        la.optimize_prior_precision(tune_noise=True)
    assert la.noise_std is None and la.prior_precision == PRIOR
    assert la.optimize_prior_precision().prior_precision != PRIOR


def validation_problem(kind, projector):
    """A fit that is far too certain at a large λ and far too uncertain at a small one, and other data."""
    model, inputs, targets = problem(kind, 30)
    with torch.no_grad():
        model[4].weight *= 8  # confident where it is wrong
    la = SubspaceLaplace.paper(model, **likelihood_of(kind), **sized(projector, 8), prior_precision=PRIOR)
    la.fit(loader(inputs, targets))
    _, new = make("mlp", 25, seed=7)
    if kind == "classification":
        return la, new, labels(model, new)
    noise = torch.randn(25, 2, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return la, new, dense_outputs(model, new) + 2 * noise


def validation_nll(la, inputs, targets):
    prediction = la.predict(inputs)
    if prediction.has_probabilities:
        return metrics.nll(prediction.probabilities, targets)
    return metrics.nll(prediction.mean, targets, prediction.total)


@pytest.mark.parametrize("projector", ["full", "lowrank-kfac"])
@pytest.mark.parametrize("kind", KINDS)
def test_validation_finds_a_prior_of_small_nll(kind, projector):
    la, inputs, targets = validation_problem(kind, projector)
    noise = la.noise_std
    assert la.optimize_prior_precision("validation", val_loader=loader(inputs, targets, size=4)) is la
    assert la.prior_precision != PRIOR and la.noise_std == noise
    pull = validation.CLASS_PULL if kind == "classification" else validation.NOISE_PULL

    def score(prior):
        """The mean NLL, and the pull towards λ before."""
        plain = validation_nll(la.with_prior(prior), inputs, targets)
        return plain + pull * log10(prior / PRIOR) ** 2 / len(inputs)

    found = score(la.prior_precision)
    others = [score(prior) for prior in (1e-3, 1.0, 1e3)]
    assert found <= min(others) + 1e-4  # variances are interpolated between the points of a grid
    assert found < max(others) - 0.01  # they are not all the same
    assert found <= min(score(PRIOR * 10 ** (k / 2)) for k in range(-10, 11)) + 1e-4
    assert validation_nll(la, inputs, targets) < validation_nll(la.with_prior(PRIOR), inputs, targets)


@pytest.mark.parametrize(
    ("prior", "offset", "message"), [(1e10, 100.0, "more uncertainty"), (1e-8, 0.0, "next to no uncertainty")]
)
def test_a_prior_at_the_end_of_the_search_is_said_to_be_one(prior, offset, message):
    torch.manual_seed(0)
    inputs = torch.randn(400, 3, dtype=torch.float64)
    model = torch.nn.Linear(3, 1, bias=False).double()
    outputs = model(inputs).detach()
    # Small inputs hardly determine the parameters: the variance is that of the prior at every λ of the search.
    few = 1e-9 * inputs[:40]
    la = SubspaceLaplace.paper(model, Gaussian(0.1), 2, prior).fit(loader(few, model(few).detach(), size=10))
    with pytest.warns(UserWarning, match=f"end of its search: they ask for {message}"):
        la.optimize_prior_precision("validation", val_loader=loader(inputs, outputs + offset, size=100))


def test_validation_does_not_depend_on_the_batches():
    la, inputs, targets = validation_problem("classification", "lowrank-kfac")
    one, other = (la.tuned(loader(inputs, targets, size=size)).prior_precision for size in (4, 25))
    assert one == pytest.approx(other, rel=1e-6)


def test_validation_depends_on_the_prior_before_the_less_the_more_data_there_are():
    la, inputs, targets = validation_problem("given noise", "lowrank-kfac")
    starts = la.with_prior(0.01), la.with_prior(30.0)

    def apart(weight):
        """Decades between what is found from two λ before."""
        batches = [(inputs, targets, torch.full((25,), weight).double())]
        one, other = (start.tuned(batches, noise=False).prior_precision for start in starts)
        return abs(log10(one / other))

    distances = [apart(weight) for weight in (1e-6, 1.0, 1e6)]
    assert distances[0] == pytest.approx(log10(30.0 / 0.01), rel=1e-3)
    assert distances[0] > distances[1] > distances[2]


def test_too_few_validation_data_leave_the_prior_as_it_was():
    la, inputs, targets = validation_problem("classification", "lowrank-kfac")
    with pytest.warns(UserWarning, match="9 validation inputs are too few.*at least 10"):
        la.optimize_prior_precision("validation", val_loader=loader(inputs[:9], targets[:9]))
    assert la.prior_precision == PRIOR


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "validation"}, "val_loader"),
        ({"method": "validation", "val_loader": []}, "empty"),
        ({"method": "validation", "val_loader": iter([])}, "empty"),
        ({"method": "gridsearch"}, "val_loader"),
        ({"method": "marglik", "val_loader": []}, "val_loader has no effect with method='marglik'"),
        ({"method": "grid"}, "Unknown method 'grid'; choose 'marglik' or 'validation'"),
        ({"method": None}, "Unknown method"),
    ],
)
def test_what_cannot_be_optimized_is_an_error_that_changes_nothing(options, message):
    la, inputs, _ = fitted("classification")
    covariance = la.functional_covariance(inputs)
    with pytest.raises(ValueError, match=message):
        la.optimize_prior_precision(**options)
    assert la.prior_precision == PRIOR
    assert torch.equal(la.functional_covariance(inputs), covariance)


def test_validation_data_may_come_from_an_iterator_since_they_are_read_once():
    la, inputs, targets = fitted("classification")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, other = la.tuned(iter(loader(inputs, targets))), la.tuned(loader(inputs, targets))
    assert one.prior_precision == other.prior_precision


def test_validation_labels_out_of_range_are_refused():
    la, inputs, targets = fitted("classification")
    with pytest.raises(ValueError, match="Labels must lie in"):
        la.optimize_prior_precision("validation", val_loader=loader(inputs, targets + 2))
    assert la.prior_precision == PRIOR


@pytest.mark.parametrize("method", ["marglik", "validation"])
def test_before_fit_there_is_neither_evidence_nor_anything_to_optimize(method):
    model, inputs, targets = problem("classification")
    la = SubspaceLaplace.paper(model, "classification", prior_precision="evidence")
    val_loader = loader(inputs, targets) if method == "validation" else None
    with pytest.raises(RuntimeError, match="not fitted"):
        la.optimize_prior_precision(method, val_loader=val_loader)
    with pytest.raises(RuntimeError, match="not fitted"):
        la.log_marginal_likelihood()


@pytest.mark.parametrize("prior", [0.0, -1.0, float("nan"), float("inf")])
def test_there_is_no_evidence_of_an_impossible_prior(prior):
    la, *_ = fitted("classification")
    with pytest.raises(ValueError, match="positive and finite"):
        la.log_marginal_likelihood(prior)


@pytest.mark.parametrize("noise", [0.0, -1.0, float("nan"), float("inf")])
def test_there_is_no_evidence_of_an_impossible_noise(noise):
    la, *_ = fitted("given noise")
    with pytest.raises(ValueError, match="positive and finite"):
        la.log_marginal_likelihood(noise_std=noise)


@pytest.mark.parametrize("member", ["log_marginal_likelihood", "optimize_prior_precision"])
def test_there_is_no_evidence_of_a_model_that_has_changed_since(member):
    la, *_ = fitted("classification")
    with torch.no_grad():
        la.model[0].weight *= 2
    with pytest.raises(RuntimeError, match="changed since fit"):
        getattr(la, member)()
    assert la.prior_precision == PRIOR


# laplace-torch --------------------------------------------------------------------------------------------------------


def reference(kind):
    """The network that laplace-torch was given, its values, and our full posterior of the same data."""
    start = f"{kind}."
    held = {name.removeprefix(start): value for name, value in load_file(FIXTURE).items() if name.startswith(start)}
    if kind == "classification":
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    else:
        model = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 2))
    model = model.double()
    model.load_state_dict({name.removeprefix("model."): v for name, v in held.items() if name.startswith("model.")})
    likelihood = Gaussian(float(held["sigma_noise"])) if kind == "regression" else kind
    la = SubspaceLaplace.paper(model, likelihood, projector="full")
    return held, la.fit(loader(held["inputs"], held["targets"], size=16))


@pytest.mark.parametrize(
    ("kind", "form"), [("classification", DensePrecision), ("regression", DualPrecision)], ids=lambda v: str(v)
)
def test_the_evidence_is_that_of_laplace_torch(kind, form):
    # Whole values are compared, constants included: laplace-torch counts ½ Σ(y − f)²/σ² + N·C·ln(σ√(2π)) for regression
    # and Σ JᵀJ/σ² for its Hessian, which are our conventions too.
    held, la = reference(kind)
    assert isinstance(la._state.posterior, form)
    found = torch.stack([la.log_marginal_likelihood(prior) for prior in held["prior_precisions"]])
    assert torch.allclose(found, held["log_marglik"], rtol=1e-8, atol=0)
    assert float(la.log_marginal_likelihood(held["best_prior"])) == pytest.approx(float(held["best_log_marglik"]))


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_best_prior_is_that_of_laplace_torch(kind):
    held, la = reference(kind)
    la.optimize_prior_precision("marglik")
    assert la.prior_precision == pytest.approx(float(held["best_prior"]), rel=1e-5)  # its function, by golden sections
    assert la.prior_precision == pytest.approx(float(held["adam_prior"]), rel=0.01)  # its own optimiser
    assert float(la.log_marginal_likelihood()) >= float(held["best_log_marglik"]) - 1e-9


def test_a_tuned_noise_survives_an_update():
    la, inputs, targets = fitted("regression")
    la.optimize_prior_precision("marglik", tune_noise=True)
    tuned = la.noise_std
    assert la.updated(loader(inputs + 1, targets)).noise_std == tuned


def test_validation_data_tune_the_noise_where_they_are_asked_to():
    la, inputs, targets = validation_problem("estimated noise", "lowrank-kfac")
    before, data = la.noise_std, loader(inputs, targets)
    alone, both = la.tuned(data, noise=False), la.tuned(data)
    assert alone.noise_std == la.noise_std == before
    assert both.noise_std > before  # these data are noisier than those of the fit
    assert validation_nll(both, inputs, targets) < validation_nll(alone, inputs, targets)
    la.optimize_prior_precision("validation", val_loader=data, tune_noise=True)
    assert (la.noise_std, la.prior_precision) == (both.noise_std, both.prior_precision)
    assert close(la.functional_covariance(inputs), both.functional_covariance(inputs), 1e-12)


def test_validation_data_of_classification_have_no_noise_to_tune():
    la, inputs, targets = fitted("classification")
    with pytest.raises(ValueError, match="'classification' has no noise σ to tune"):
        la.optimize_prior_precision("validation", val_loader=loader(inputs, targets), tune_noise=True)
    assert la.prior_precision == PRIOR


def test_one_noise_in_a_tuple_is_that_noise_with_a_complement():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    data = [(torch.randn(30, 3).double(), torch.randn(30, 1).double())]
    options = {"dim": 6, "complement": Complement("kfac", weight=1.0)}
    one, listed = (SubspaceLaplace(model, Gaussian(s), **options).fit(data) for s in (0.5, [0.5]))
    for noise in (0.5, 1.5):
        values = [float(la.log_marginal_likelihood(noise_std=noise)) for la in (one, listed)]
        assert values[0] == pytest.approx(values[1], rel=1e-12)
