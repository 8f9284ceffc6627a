"""Yes/no outputs: the likelihood against torch's own, its posterior against brute force and against two classes."""

import math

import pytest
import torch
import torch.nn.functional as F
from dense_reference import (
    dense_ggn,
    dense_jacobian,
    dense_outputs,
    full_covariance,
    laplace_evidence,
    sigmoid_hessians,
    subspace_covariance,
)
from networks import make, mlp
from test_curvature import brute_force_kfac, dense_block
from test_laplace import loader, sized
from test_prior import same_basis, squared_norm, stationary_prior
from torch import nn
from torch.autograd.functional import hessian
from torch.distributions import Bernoulli as TorchBernoulli

from sublaplace import PROJECTORS, Basis, Bernoulli, DensePrecision, DualPrecision, Resources, Subset, SubspaceLaplace
from sublaplace.curvature.diagonal import diagonal_ggn
from sublaplace.curvature.exact import exact_ggn
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.reduced import reduced_ggn
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.data.batches import select
from sublaplace.fitting.validation import CLASS_PULL
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.likelihoods.base import significant
from sublaplace.model.likelihoods.links import Covariance
from sublaplace.options import DIRECTION_TOLERANCE
from sublaplace.projectors.swag import swag_variances

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
EPS = torch.finfo(torch.float64).eps
PRIOR = 0.7


def answers(shape, seed=0):
    """Zeros and ones, as integers."""
    return torch.randint(0, 2, tuple(shape), generator=torch.Generator().manual_seed(seed))


def logits(n, C, scale=2.0, seed=0):
    return scale * torch.randn(n, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(name="mlp", n=8, dtype=torch.float64):
    model, inputs = make(name, n, dtype)
    return model, inputs, answers(dense_outputs(model, inputs).shape)


def fitted(name="mlp", n=12, dtype=torch.float64, projector="lowrank-kfac", **options):
    model, inputs, targets = problem(name, n, dtype)
    la = SubspaceLaplace.paper(model, "multi-label", **sized(projector, 5), **{"prior_precision": PRIOR} | options)
    return la.fit(loader(inputs, targets, size=6)), inputs, targets


def stream(model, inputs, tolerance=0.0, size=3):
    targets = answers(dense_outputs(model, inputs).shape)
    return CurvatureStream(Linearization(model), loader(inputs, targets, size), Bernoulli(), tolerance)


def ggn_of(model, inputs):
    return dense_ggn(model, inputs, sigmoid_hessians(dense_outputs(model, inputs)))


def precision_matrix(model, inputs, prior=PRIOR):
    ggn = ggn_of(model, inputs)
    return ggn + prior * torch.eye(len(ggn), dtype=torch.float64)


def dense_evidence(model, inputs, targets, prior, projection=None):
    fit = TorchBernoulli(logits=dense_outputs(model, inputs)).log_prob(targets.double()).sum()
    return laplace_evidence(fit, ggn_of(model, inputs), model, prior, projection)


def close(value, expected, tolerance):
    assert value.shape == expected.shape
    return (value.double() - expected.double()).abs().max() <= tolerance * expected.abs().max()


# The likelihood -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("C", [1, 2, 5])
def test_the_hessian_root_is_a_root_of_the_second_derivative_of_the_loss(C):
    outputs, targets = logits(6, C), answers((6, C)).double()
    R = Bernoulli().hessian_root(outputs)
    assert R.shape == (6, C, C)
    for f, y, found in zip(outputs, targets, R.transpose(1, 2) @ R, strict=True):
        expected = hessian(lambda f, y=y: F.binary_cross_entropy_with_logits(f, y, reduction="sum"), f)
        assert torch.allclose(found, expected, rtol=1e-10, atol=10 * EPS)


def test_rows_of_the_hessian_root_stand_longest_first_so_that_the_last_ones_can_be_dropped():
    lengths = Bernoulli().hessian_root(logits(20, 4)).square().sum(2)
    assert (lengths[:, :-1] >= lengths[:, 1:]).all()
    outputs = torch.tensor([[60.0, 0.0, -60.0], [0.0, 60.0, 1.0]], dtype=torch.float64)
    assert significant(Bernoulli().hessian_root(outputs), 1e-8).tolist() == [1, 2]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_hessian_root_of_confident_outputs_keep_their_digits(dtype, sign):
    outputs = torch.tensor([[20.0], [50.0], [80.0]], dtype=dtype)
    found = Bernoulli().hessian_root(sign * outputs)
    assert found.dtype == dtype
    assert torch.allclose(found.double()[:, 0], (-outputs.double() / 2).exp(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("convert", [torch.Tensor.bool, torch.Tensor.long, torch.Tensor.double, torch.Tensor.float])
def test_the_log_density_is_torchs_for_targets_of_every_kind(convert):
    outputs, targets = logits(7, 3, scale=20), answers((7, 3))
    found = Bernoulli().log_density(outputs, convert(targets))
    assert found.dtype == torch.float64
    expected = TorchBernoulli(logits=outputs).log_prob(targets.double()).sum(1)
    assert torch.allclose(found, expected, rtol=1e-12, atol=EPS)
    assert torch.allclose(Bernoulli().training_losses(outputs, convert(targets)), -expected / 3, rtol=1e-12, atol=EPS)


def test_targets_of_one_output_may_be_a_vector():
    outputs, targets = logits(7, 1), answers((7,))
    likelihood, covariance = Bernoulli(), torch.full((7, 1, 1), 0.4, dtype=torch.float64)
    likelihood.check_targets(outputs, targets)
    for values in (targets, targets[:, None]):
        expected = TorchBernoulli(logits=outputs[:, 0]).log_prob(targets.double())
        assert torch.allclose(likelihood.log_density(outputs, values), expected, rtol=1e-12)
        assert torch.equal(
            likelihood.log_predictive(outputs, covariance, values),
            likelihood.log_predictive(outputs, covariance, targets[:, None]),
        )


def test_log_densities_of_certain_outputs_do_not_overflow():
    outputs = torch.tensor([[1e4], [-1e4]], dtype=torch.float64)
    assert Bernoulli().log_density(outputs, torch.tensor([0, 1])).tolist() == [-1e4, -1e4]
    assert Bernoulli().log_density(outputs, torch.tensor([1, 0])).tolist() == [0, 0]


# Predictions ----------------------------------------------------------------------------------------------------------


def random_covariances(n, C, scale=3.0, seed=1):
    roots = torch.randn(n, C, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scale * roots @ roots.transpose(1, 2)


def integrated(function, mean, variance, steps=20001, reach=12.0):
    """E function(f) for f ~ N(mean, variance), by the trapezoidal rule."""
    z = torch.linspace(-reach, reach, steps, dtype=torch.float64)
    density = (-(z**2) / 2).exp() / math.sqrt(2 * math.pi)
    return torch.trapezoid(function(mean[..., None] + variance.sqrt()[..., None] * z) * density, z)


def predicted(outputs, covariance, link, samples=1000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    uncertainty = Covariance(covariance.diagonal(dim1=1, dim2=2), lambda: covariance)
    return Bernoulli().probabilities(outputs, uncertainty, link, samples, generator)


def test_probit_probabilities_are_the_formula_for_each_output_and_near_the_integral():
    outputs, covariance = logits(6, 3), random_covariances(6, 3)
    found = predicted(outputs, covariance, "probit")
    for i in range(6):
        for c in range(3):
            scale = math.sqrt(1 + math.pi * float(covariance[i, c, c]) / 8)
            expected = 1 / (1 + math.exp(-float(outputs[i, c]) / scale))
            assert float(found[i, c]) == pytest.approx(expected, rel=1e-12)
    exact = integrated(torch.sigmoid, outputs, covariance.diagonal(dim1=1, dim2=2))
    assert (found - exact).abs().max() < 0.02  # what the approximation is known for
    assert not torch.allclose(exact, outputs.sigmoid(), atol=0.1)


def test_monte_carlo_probabilities_come_to_the_integral_as_samples_grow():
    outputs, covariance = logits(6, 3), random_covariances(6, 3)
    variance = covariance.diagonal(dim1=1, dim2=2)
    exact = integrated(torch.sigmoid, outputs, variance)
    spread = integrated(lambda f: f.sigmoid().square(), outputs, variance) - exact.square()
    for samples in (100, 3200):
        found = predicted(outputs, covariance, "mc", samples)
        assert ((found - exact).abs() <= 5 * (spread / samples).sqrt()).all()
        assert not torch.equal(found, predicted(outputs, covariance, "mc", samples, seed=1))


def test_the_log_predictive_is_that_of_the_probit_probabilities():
    outputs, covariance, targets = logits(6, 3), random_covariances(6, 3), answers((6, 3))
    yes = predicted(outputs, covariance, "probit")
    expected = torch.where(targets == 1, yes, 1 - yes).log().sum(1)
    found = Bernoulli().log_predictive(outputs, covariance, targets)
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=1e-10)


def test_yes_or_no_outputs_are_predicted_by_probit_and_samples_but_not_by_the_bridge():
    la, inputs, _ = fitted()
    probabilities = la(inputs)
    variance = la.functional_variance(inputs)
    expected = (dense_outputs(la.model, inputs) / (1 + math.pi / 8 * variance).sqrt()).sigmoid()
    assert close(probabilities, expected, 1e-10)
    prediction = la.predict(inputs)
    assert torch.equal(prediction.probabilities, probabilities)
    assert close(prediction.mean, dense_outputs(la.model, inputs), 1e-12)
    assert close(prediction.covariance, la.functional_covariance(inputs), 1e-12)
    assert prediction.total.shape == prediction.epistemic.shape == prediction.aleatoric.shape == (len(inputs),)
    with pytest.raises(ValueError, match="no interval; use probabilities"):
        prediction.interval(0.9)
    exact = integrated(torch.sigmoid, dense_outputs(la.model, inputs), variance)
    sampled = la.predict(inputs, link="mc", samples=1500).probabilities
    assert (sampled - exact).abs().max() < 0.05
    assert torch.equal(sampled, la.predict(inputs, link="mc", samples=1500).probabilities)
    with pytest.raises(ValueError, match=r"no link 'bridge'; choose 'probit' or 'mc'"):
        la(inputs, link="bridge")
    with pytest.raises(ValueError, match=r"Unknown link 'logit'"):
        la(inputs, link="logit")
    assert torch.equal(la(inputs), probabilities)


def test_without_uncertainty_every_link_gives_the_plain_network():
    la, inputs, _ = fitted(prior_precision=1e12)
    for link in ("probit", "mc"):
        assert torch.allclose(la(inputs, link=link), dense_outputs(la.model, inputs).sigmoid(), atol=1e-5)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (answers((8,)), r"shape \(8,\), the model's outputs \(8, 2\); they must agree"),
        (answers((8, 1)), r"shape \(8, 1\), the model's outputs \(8, 2\)"),
        (answers((8, 2)) + 1, "must be 0 or 1, but there is 2.*ignore_index"),
        (answers((8, 2)) - 100, "must be 0 or 1, but there is -(99|100)"),
        (torch.full((8, 2), 0.5), r"must be 0 or 1, but there is 0\.5"),
        (torch.full((8, 2), float("nan")), "must be 0 or 1, but there is nan"),
    ],
)
def test_targets_that_are_no_answers_are_refused(targets, message):
    model, inputs = make("mlp", 8)
    la = SubspaceLaplace.paper(model, "binary", dim=3)
    with pytest.raises(ValueError, match=message):
        la.fit(loader(inputs, targets, size=8))
    with pytest.raises(RuntimeError, match="not fitted"):
        la(inputs)


def test_a_vector_of_targets_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"shape \(5,\), the model's outputs \(6, 1\)"):
        Bernoulli().check_targets(logits(6, 1), answers((5,)))


def test_yes_or_no_outputs_have_no_noise():
    model, _ = make("mlp", 1)
    for noise in (0.3, [0.3, 0.4], "per-output"):
        with pytest.raises(TypeError, match=r"'noise_std'.*Gaussian\(0\.1\)"):
            SubspaceLaplace.paper(model, "binary", noise_std=noise)
        with pytest.raises(ValueError, match="'binary' has no noise"):
            Bernoulli().with_noise(noise)
    la, inputs, targets = fitted()
    assert la.noise_std is None
    with pytest.raises(ValueError, match="noise"):
        la.tuned(loader(inputs, targets), noise=True)


def test_classification_with_a_single_output_points_to_the_binary_likelihood():
    with pytest.raises(ValueError, match="likelihood='binary'"):
        SubspaceLaplace.paper(mlp(outputs=1), "classification").fit(loader(torch.randn(4, 3), torch.zeros(4).long()))


# Curvature ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["residual-batch-norm", "embedding", "attention"])
def test_every_curvature_equals_brute_force(name):
    model, inputs = make(name, 5)
    source, ggn = stream(model, inputs), ggn_of(model, inputs)
    layout = source.linearization.layout
    p = layout.num_parameters
    diagonal = torch.cat([part.diagonal for part in diagonal_ggn(source, PRIOR).parts.values()])
    assert close(diagonal, ggn.diagonal(), 1e-10)
    primal, dual = exact_ggn(source, p, PRIOR), exact_ggn(source, p - 1, PRIOR)
    assert isinstance(primal, DensePrecision) and isinstance(dual, DualPrecision)
    assert close(primal.ggn, ggn, 1e-10)
    assert close(dual.rows.T @ dual.rows, ggn, 1e-10)
    P = torch.randn(p, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (found,) = reduced_ggn(source, Basis(layout, layout.unflatten(P.T)))
    assert close(found, P.T @ ggn @ P, 1e-10)


@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "embedding"])
def test_kfac_equals_the_formula_written_as_loops(name):
    model, inputs = make(name, 4)
    precision = kronecker_ggn(stream(model, inputs), PRIOR)
    expected = brute_force_kfac(model, inputs, sigmoid_hessians(dense_outputs(model, inputs)))
    assert set(expected) == set(precision.layout.names)
    for parameter, block in expected.items():
        assert close(dense_block(precision, parameter), block, 1e-10), parameter


def confident(dtype, n=100):
    """A network most of whose answers are certain, and its inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6)).to(dtype)
    with torch.no_grad():
        model[2].weight *= 300
    return model, torch.randn(n, 4, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dropped_directions_change_little_and_save_passes(dtype):
    model, inputs = confident(dtype)
    batches = loader(inputs, answers((100, 6)), size=50)

    def fit(**options):
        la = SubspaceLaplace.paper(model, "multi-label", dim=20, **options).fit(batches)
        return la, la._state.linearization.passes

    (exact, every), (quick, fewer), (default, by_default) = (
        fit(resources=Resources(direction_tolerance=0.0)),
        fit(resources=Resources(direction_tolerance=DIRECTION_TOLERANCE)),
        fit(),
    )
    assert fewer < 0.8 * every
    assert by_default == {torch.float64: every, torch.float32: fewer}[dtype]
    assert close(quick.functional_variance(inputs), exact.functional_variance(inputs), 1e-3)
    reference = subspace_covariance(
        dense_jacobian(model, inputs[:5]), exact.projection_matrix().double(), precision_matrix(model, inputs, 1.0)
    )
    assert close(exact.functional_covariance(inputs[:5], joint=True), reference, TOLERANCE[dtype])
    said = "those dropped hold at most 1e-05 of each output Hessian's trace"
    assert (said in default.summary()) == (dtype == torch.float32)


# The posterior --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["paper-cnn", "embedding", "keyword-inputs"])
def test_covariance_in_the_subspace_equals_brute_force(name, dtype):
    model, inputs, targets = problem(name, 8, dtype)
    _, new = make(name, 4, dtype, seed=1)
    la = SubspaceLaplace.paper(model, "multi-label", dim=5, prior_precision=PRIOR).fit(loader(inputs, targets, 6))
    expected = subspace_covariance(
        dense_jacobian(model, new), la.projection_matrix().double(), precision_matrix(model, inputs)
    )
    assert close(la.functional_covariance(new, joint=True), expected, TOLERANCE[dtype])
    C = la(new).shape[1]
    blocks = torch.stack([expected[i : i + C, i : i + C] for i in range(0, 4 * C, C)])
    assert close(la.functional_covariance(new), blocks, TOLERANCE[dtype])
    assert close(la.functional_variance(new), blocks.diagonal(dim1=1, dim2=2), TOLERANCE[dtype])


@pytest.mark.parametrize("projector", PROJECTORS)
def test_every_projector_is_exact_in_its_subspace(projector):
    la, inputs, _ = fitted(projector=projector)
    expected = subspace_covariance(
        dense_jacobian(la.model, inputs), la.projection_matrix(), precision_matrix(la.model, inputs)
    )
    found = la.functional_covariance(inputs, joint=True)
    assert (found - expected).abs().max() <= 1e-8 * max(float(expected.abs().max()), 1e-12)


@pytest.mark.parametrize(("n", "form"), [(6, DualPrecision), (60, DensePrecision)])
def test_the_full_posterior_and_its_evidence_equal_brute_force(n, form):
    la, inputs, targets = fitted(n=n, projector="full")
    assert isinstance(la._state.posterior, form)
    new = inputs[:4]
    expected = full_covariance(dense_jacobian(la.model, new), precision_matrix(la.model, inputs))
    assert close(la.functional_covariance(new, joint=True), expected, 1e-8)
    for prior in (1e-3, PRIOR, 50.0):
        evidence = float(dense_evidence(la.model, inputs, targets, prior))
        assert float(la.log_marginal_likelihood(prior)) == pytest.approx(evidence, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("projector", ["lowrank-kfac", "last-layer"])
def test_the_evidence_in_a_subspace_equals_brute_force(projector, dtype):
    la, inputs, targets = fitted(projector=projector, dtype=dtype)
    P, relative = la.projection_matrix().double(), {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]
    for prior in (1e-3, PRIOR, 50.0):
        expected = float(dense_evidence(la.model, inputs, targets, prior, P))
        assert float(la.log_marginal_likelihood(prior)) == pytest.approx(expected, rel=relative)


def test_the_evidence_does_not_know_a_noise_and_is_differentiable_in_the_prior():
    la, inputs, targets = fitted()
    prior = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(la.log_marginal_likelihood(prior), prior)
    (expected,) = torch.autograd.grad(dense_evidence(la.model, inputs, targets, prior, la.projection_matrix()), prior)
    assert float(found) == pytest.approx(float(expected), rel=1e-9)
    assert la.log_marginal_likelihood(0.3, 5.0) == la.log_marginal_likelihood(0.3)


@pytest.mark.parametrize("projector", ["full", "lowrank-kfac"])
def test_marglik_finds_the_prior_where_the_evidence_is_stationary(projector):
    la, inputs, _ = fitted(projector=projector)
    ggn = ggn_of(la.model, inputs)
    if projector != "full":
        ggn = la.projection_matrix().T @ ggn @ la.projection_matrix()
    best = stationary_prior(torch.linalg.eigvalsh(ggn).clamp_min(0), squared_norm(la.model))
    assert la.optimize_prior_precision("marglik").prior_precision == pytest.approx(best, rel=1e-5)


def test_fitting_with_the_evidence_takes_the_prior_of_the_greatest_kfac_evidence():
    la, inputs, _ = fitted(prior_precision="evidence")
    blocks = brute_force_kfac(la.model, inputs, sigmoid_hessians(dense_outputs(la.model, inputs)))
    eigenvalues = torch.cat([torch.linalg.eigvalsh(block).clamp_min(0) for block in blocks.values()])
    assert la.prior_precision == pytest.approx(stationary_prior(eigenvalues, squared_norm(la.model)), rel=1e-5)


def test_validation_finds_the_prior_of_the_least_loss():
    model, inputs, targets = problem(n=30)
    with torch.no_grad():
        model[4].weight *= 30
    la = SubspaceLaplace.paper(model, "binary", dim=30, prior_precision=PRIOR).fit(loader(inputs, targets, size=30))
    _, new = make("mlp", 25, seed=7)
    # The answers are far less certain than the network says.
    wanted = torch.bernoulli((dense_outputs(model, new) / 3).sigmoid(), generator=torch.Generator().manual_seed(0))

    def loss(prior, pull=CLASS_PULL):
        """The NLL of an input, and what pulls λ towards its value before."""
        nll = F.binary_cross_entropy(la.with_prior(prior)(new), wanted, reduction="sum") / len(new)
        return float(nll) + pull * math.log10(prior / PRIOR) ** 2 / len(new)

    la.optimize_prior_precision("validation", val_loader=loader(new, wanted, size=9))
    priors = [PRIOR * 10 ** (k / 2) for k in range(-9, 10)]
    losses = [loss(prior) for prior in priors]
    assert loss(la.prior_precision) <= min(losses) + 1e-6
    assert loss(la.prior_precision, pull=0) <= loss(PRIOR, pull=0)
    plain = [loss(prior, pull=0) for prior in priors]
    assert min(plain) < min(plain[0], plain[-1]) - 0.01  # neither a tiny nor a huge λ is best


def test_swag_follows_the_usual_loss():
    model, inputs, targets = problem()
    found = swag_variances(Linearization(model), [(inputs, targets)], Bernoulli(), snapshots=3, learning_rate=0.02)
    other = make("mlp", 8)[0]
    velocity = [torch.zeros_like(p) for p in other.parameters()]
    snapshots = []
    for _ in range(3):
        loss = F.binary_cross_entropy_with_logits(other(inputs), targets.double())
        gradients = torch.autograd.grad(loss, list(other.parameters()))
        with torch.no_grad():
            for p, g, v in zip(other.parameters(), gradients, velocity, strict=True):
                v.mul_(0.9).add_(g + 3e-4 * p)
                p.sub_(0.02 * v)
        snapshots.append(torch.cat([p.detach().flatten() for p in other.parameters()]))
    assert close(found, torch.stack(snapshots).var(0, correction=0), 1e-8)


def test_an_update_equals_a_fit_on_both_data_sets_in_the_same_subspace():
    model, inputs, targets = problem(n=20)
    first, second = slice(0, 9), slice(9, 20)
    la = SubspaceLaplace.paper(model, "binary", dim=5).fit(loader(inputs[first], targets[first]))
    updated = la.updated(loader(inputs[second], targets[second]))
    both = SubspaceLaplace.paper(model, "binary", projector=same_basis(la), dim=5).fit(loader(inputs, targets, 6))
    assert close(updated(inputs), both(inputs), 1e-10)
    assert not close(la(inputs), both(inputs), 1e-3)
    evidence = float(both.log_marginal_likelihood())
    assert float(updated.log_marginal_likelihood()) == pytest.approx(evidence, rel=1e-10)


@pytest.mark.parametrize("ignore_index", [None, -100])
@pytest.mark.parametrize("projector", ["lowrank-kfac", "full"])
def test_a_loaded_posterior_is_the_same_and_knows_which_labels_do_not_count(projector, ignore_index, tmp_path):
    model, inputs, targets = problem()
    la = SubspaceLaplace.paper(model, Bernoulli(ignore_index), **sized(projector, 4)).fit(loader(inputs, targets, 6))
    la.save(tmp_path / "la.safetensors")
    loaded = SubspaceLaplace.load(tmp_path / "la.safetensors", model)
    assert torch.equal(loaded(inputs), la(inputs))
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()
    assert loaded._state.survey.likelihood == Bernoulli(ignore_index)
    assert repr(loaded) == repr(la)


def test_both_names_and_the_object_are_the_same_likelihood():
    posteriors = [fitted()[0]]
    model, inputs, targets = problem(n=12)
    for likelihood in ("binary", Bernoulli()):
        la = SubspaceLaplace.paper(model, likelihood, dim=5, prior_precision=PRIOR)
        posteriors.append(la.fit(loader(inputs, targets, size=6)))
    for la in posteriors:
        assert torch.equal(la(inputs), posteriors[0](inputs))
        assert "binary" in repr(la)


# One yes/no output and two classes ------------------------------------------------------------------------------------


class TwoClasses(nn.Module):
    """The classes no and yes from one output f: with the logits (0, f), or (−f/2, f/2)."""

    def __init__(self, single, symmetric):
        super().__init__()
        self.single, self.symmetric = single, symmetric

    def forward(self, x):
        f = self.single(x)
        return torch.cat([-f / 2, f / 2] if self.symmetric else [torch.zeros_like(f), f], dim=1)


def pair(symmetric, dtype, projector, n=20, scale=1.0, **options):
    """The same network with one yes/no output and with two classes, both fitted."""
    torch.manual_seed(0)
    single = mlp(outputs=1).to(dtype)
    with torch.no_grad():
        single[4].weight.mul_(scale)
    inputs, targets = torch.randn(n, 3, dtype=dtype), answers((n,))
    both = TwoClasses(single, symmetric)

    def fit(model, likelihood):
        la = SubspaceLaplace.paper(model, likelihood, **sized(projector, 6), **{"prior_precision": PRIOR} | options)
        return la.fit(loader(inputs, targets, size=10))

    return fit(single, "binary"), fit(both, "classification"), inputs


def margin_variance(la, inputs):
    """Var(f_yes − f_no)."""
    margin = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    return margin @ la.functional_covariance(inputs).double() @ margin


ONE_AND_TWO = pytest.mark.parametrize("symmetric", [False, True], ids=["(0, f)", "(-f/2, f/2)"])


@ONE_AND_TWO
@pytest.mark.parametrize(
    ("projector", "dtype"),
    [
        ("lowrank-kfac", torch.float64),
        ("lowrank-kfac", torch.float32),
        ("lowrank-diagonal", torch.float64),
        ("lowrank-ggn", torch.float64),
        ("subset-diagonal", torch.float64),
        ("full", torch.float32),
    ],
)
def test_one_output_has_the_posterior_of_two_classes(projector, dtype, symmetric):
    one, two, inputs = pair(symmetric, dtype, projector)
    assert one.dim == two.dim
    assert close(margin_variance(two, inputs), one.functional_variance(inputs)[:, 0], TOLERANCE[dtype])
    relative = {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]
    for prior in (0.01, PRIOR, 30.0):
        evidence = float(two.log_marginal_likelihood(prior))
        assert float(one.log_marginal_likelihood(prior)) == pytest.approx(evidence, rel=relative)


@ONE_AND_TWO
def test_one_output_has_the_curvature_of_two_classes(symmetric):
    one, two, _ = pair(symmetric, torch.float64, "full", n=70)
    assert isinstance(one._state.posterior, DensePrecision) and isinstance(two._state.posterior, DensePrecision)
    assert close(one._state.posterior.ggn, two._state.posterior.ggn, 1e-12)


@ONE_AND_TWO
def test_one_output_has_the_posterior_of_two_classes_where_directions_are_dropped(symmetric):
    one, two, inputs = pair(symmetric, torch.float32, "lowrank-kfac", n=60, scale=300)
    passes = one._state.linearization.passes
    exact, _, _ = pair(
        symmetric, torch.float32, "lowrank-kfac", n=60, scale=300, resources=Resources(direction_tolerance=0.0)
    )
    assert passes < exact._state.linearization.passes
    assert close(margin_variance(two, inputs), one.functional_variance(inputs)[:, 0], TOLERANCE[torch.float32])
    assert close(one.functional_variance(inputs), exact.functional_variance(inputs), TOLERANCE[torch.float32])


def test_one_output_has_the_probabilities_of_two_classes_of_which_one_is_fixed():
    one, two, inputs = pair(False, torch.float64, "lowrank-kfac")
    assert close(one(inputs)[:, 0], two(inputs)[:, 1], 1e-8)
    sampled = (la.predict(inputs, link="mc", samples=1500).probabilities[:, -1] for la in (one, two))
    first, second = sampled
    assert (first - second).abs().max() < 0.05


@ONE_AND_TWO
def test_the_prior_of_the_greatest_evidence_is_the_same_for_one_output_and_two_classes(symmetric):
    one, two, _ = pair(symmetric, torch.float64, "lowrank-kfac", prior_precision="evidence")
    assert one.prior_precision == pytest.approx(two.prior_precision, rel=1e-6)


def test_outputs_that_share_nothing_have_the_posteriors_of_networks_of_their_own():
    torch.manual_seed(0)
    parts = [mlp(outputs=1).double() for _ in range(3)]
    inputs, targets = torch.randn(15, 3, dtype=torch.float64), answers((15, 3))

    class SideBySide(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(parts)

        def forward(self, x):
            return torch.cat([part(x) for part in self.parts], dim=1)

    def fit(model, wanted):
        return SubspaceLaplace.paper(model, "binary", projector="full", prior_precision=PRIOR).fit(
            loader(inputs, wanted)
        )

    whole = fit(SideBySide(), targets)
    single = [fit(part, targets[:, c]) for c, part in enumerate(parts)]
    covariance = whole.functional_covariance(inputs)
    assert close(covariance, torch.diag_embed(torch.cat([la.functional_variance(inputs) for la in single], 1)), 1e-10)
    total = sum(float(la.log_marginal_likelihood()) for la in single)
    assert float(whole.log_marginal_likelihood()) == pytest.approx(total, rel=1e-10)


def test_a_subset_and_a_basis_of_unit_vectors_have_the_same_posterior():
    model, inputs, targets = problem()
    layout = Linearization(model).layout
    indices = torch.tensor([40, 3, 70, 11])
    units = torch.eye(layout.num_parameters, dtype=torch.float64)[indices]
    both = (Subset(layout, indices, torch.float64), Basis(layout, layout.unflatten(units)))
    first, second = (
        SubspaceLaplace.paper(model, "binary", projector=lambda _, P=P: P, dim=4).fit(loader(inputs, targets, 6))
        for P in both
    )
    assert close(first(select(inputs, slice(0, 4))), second(select(inputs, slice(0, 4))), 1e-12)
