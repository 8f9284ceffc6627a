"""Regression with a σ for each output: against brute force, and against one σ where all are equal."""

import math

import numpy as np
import pytest
import torch
from dense_reference import (
    dense_ggn,
    dense_jacobian,
    dense_outputs,
    full_covariance,
    laplace_evidence,
    subspace_covariance,
)
from networks import make
from test_curvature import brute_force_kfac, dense_block
from test_laplace import loader, sized
from test_prior import same_basis, squared_norm, stationary_prior
from torch.distributions import MultivariateNormal, Normal

from sublaplace import Basis, Complement, DensePrecision, DualPrecision, Gaussian, Subset, SubspaceLaplace
from sublaplace.curvature.diagonal import diagonal_ggn
from sublaplace.curvature.exact import exact_ggn
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.reduced import reduced_ggn
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.fitting import validation
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.residuals import Residuals

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
PRIOR = 0.7
STDS = (0.3, 1.1, 0.05, 0.6)  # far apart, so that mixing them up shows
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def problem(name="mlp", n=12, dtype=torch.float64, seed=0):
    """A network and targets whose residuals have another mean and spread in each output."""
    model, inputs = make(name, n, dtype, seed)
    outputs = dense_outputs(model, inputs)
    noise = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    C = outputs.shape[1]
    spread, shift = torch.tensor([0.4, 1.3, 0.1, 0.7])[:C], torch.tensor([0.3, -1.0, 0.2, 0.0])[:C]
    return model, inputs, (outputs + shift + spread * noise).to(dtype)


def stds_of(model, inputs):
    return STDS[: dense_outputs(model, inputs).shape[1]]


def fitted(
    name="mlp", n=12, dtype=torch.float64, noise="given", size=6, projector="lowrank-kfac", prior_precision=PRIOR
):
    model, inputs, targets = problem(name, n, dtype)
    noise_std = stds_of(model, inputs) if isinstance(noise, str) and noise == "given" else noise
    la = SubspaceLaplace.paper(model, Gaussian(noise_std), prior_precision=prior_precision, **sized(projector, 6))
    return la.fit(loader(inputs, targets, size)), inputs, targets


def hessians(outputs, stds):
    variances = torch.as_tensor(stds, dtype=torch.float64) ** 2
    return torch.diag(1 / variances).expand(len(outputs), -1, -1)


def precision_matrix(model, inputs, stds, prior=PRIOR):
    ggn = dense_ggn(model, inputs, hessians(dense_outputs(model, inputs), stds))
    return ggn + prior * torch.eye(len(ggn), dtype=torch.float64)


def dense_evidence(model, inputs, targets, prior, stds, projection=None):
    """Differentiable in λ and in σ (C,)."""
    outputs = dense_outputs(model, inputs)
    stds = torch.as_tensor(stds, dtype=torch.float64)
    C = outputs.shape[1]
    jacobian = dense_jacobian(model, inputs).view(len(outputs), C, -1)
    ggn = sum(jacobian[:, c].T @ jacobian[:, c] / stds[c] ** 2 for c in range(C))
    fit = Normal(outputs, stds).log_prob(targets.double()).sum()
    return laplace_evidence(fit, ggn, model, prior, projection)


def close(value, expected, tolerance):
    assert value.shape == expected.shape
    return (value.double() - expected.double()).abs().max() <= tolerance * expected.abs().max()


# σ itself -------------------------------------------------------------------------------------------------------------


@EVERY_DTYPE
@pytest.mark.parametrize("size", [5, 12])
def test_the_estimated_noise_of_each_output_is_the_root_mean_square_of_its_residuals(size, dtype):
    la, inputs, targets = fitted(dtype=dtype, noise="per-output", size=size, projector="subset-magnitude")
    residuals = targets.double() - dense_outputs(la.model, inputs)
    assert isinstance(la.noise_std, tuple)
    relative = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    assert la.noise_std == pytest.approx(residuals.square().mean(0).sqrt().tolist(), rel=relative)


def test_the_pooled_noise_is_another_one():
    la, inputs, targets = fitted(noise=None)
    residuals = targets - dense_outputs(la.model, inputs)
    assert la.noise_std == pytest.approx(float(residuals.square().mean().sqrt()), rel=1e-12)
    assert la.noise_std != pytest.approx(fitted(noise="per-output")[0].noise_std[0], rel=0.1)


def test_the_noise_is_not_known_before_it_is_estimated():
    model, *_ = problem()
    assert SubspaceLaplace.paper(model, Gaussian("per-output")).noise_std is None
    assert SubspaceLaplace.paper(model, Gaussian([0.3, 1.1])).noise_std == (0.3, 1.1)


@pytest.mark.parametrize(
    "given",
    [
        [0.5, 2.0],
        (0.5, 2.0),
        torch.tensor([0.5, 2.0]),
        torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True),
        np.array([0.5, 2.0]),
    ],
    ids=["list", "tuple", "tensor", "tensor with grad", "array"],
)
def test_the_noise_may_be_given_in_every_usual_form(given):
    model, inputs, targets = problem()
    la = SubspaceLaplace.paper(model, Gaussian(given), dim=4).fit(loader(inputs, targets, 6))
    assert la.noise_std == (0.5, 2.0)
    expected = SubspaceLaplace.paper(model, Gaussian((0.5, 2.0)), dim=4).fit(loader(inputs, targets, 6))
    assert torch.equal(la.predict(inputs).total, expected.predict(inputs).total)


@pytest.mark.parametrize("projector", ["lowrank-kfac", "lowrank-diagonal", "lowrank-ggn", "full"])
def test_equal_noises_are_the_same_as_one(projector):
    several, inputs, _ = fitted(noise=[0.4, 0.4], projector=projector)
    one, *_ = fitted(noise=0.4, projector=projector)
    assert close(several.functional_covariance(inputs), one.functional_covariance(inputs), 1e-8)
    assert close(several.predict(inputs).total, one.predict(inputs).total, 1e-8)
    for prior in (0.01, PRIOR, 30.0):
        evidence = float(one.log_marginal_likelihood(prior))
        assert float(several.log_marginal_likelihood(prior)) == pytest.approx(evidence, rel=1e-9)


def test_one_noise_in_a_list_is_one_for_all_outputs():
    listed, inputs, _ = fitted(noise=[0.4])
    one, *_ = fitted(noise=0.4)
    assert listed.noise_std == (0.4,)
    assert torch.equal(listed.predict(inputs).total, one.predict(inputs).total)
    tuned = listed.optimize_prior_precision(tune_noise=True).noise_std
    assert tuned == pytest.approx((one.optimize_prior_precision(tune_noise=True).noise_std,), rel=1e-6)


def test_all_noises_are_shown():
    la, *_ = fitted(noise="per-output")
    for std in la.noise_std:
        assert f"{std:.4g}" in repr(la)
        assert f"{std:.6g}" in la.summary()
    assert "(estimated)" in la.summary()
    assert "(estimated)" not in fitted()[0].summary()


# Curvature ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "embedding", "tied-weights", "layer-norm"])
def test_every_curvature_equals_brute_force(name):
    model, inputs, targets = problem(name, 5)
    stds = stds_of(model, inputs)
    C = len(stds)
    source = CurvatureStream(Linearization(model), loader(inputs, targets), Gaussian(stds), 1e-8)
    ggn = dense_ggn(model, inputs, hessians(targets, stds))
    layout = source.linearization.layout
    p = layout.num_parameters
    diagonal = torch.cat([part.diagonal for part in diagonal_ggn(source, PRIOR).parts.values()])
    assert close(diagonal, ggn.diagonal(), 1e-10)
    primal, dual = exact_ggn(source, p, PRIOR), exact_ggn(source, p - 1, PRIOR)
    assert isinstance(primal, DensePrecision) and isinstance(dual, DualPrecision)
    assert close(primal.ggn, ggn, 1e-10)
    assert close(dual.rows.T @ dual.rows, ggn, 1e-10)
    kfac = kronecker_ggn(source, PRIOR)
    blocks = brute_force_kfac(model, inputs, hessians(targets, stds)) if name in ("mlp", "embedding") else {}
    for parameter, block in blocks.items():
        assert close(dense_block(kfac, parameter), block, 1e-10), parameter
    P = torch.randn(p, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    indices = torch.randperm(p, generator=torch.Generator().manual_seed(0))[:6]
    rows = dense_jacobian(model, inputs).view(5, C, p)
    for projection, columns in (
        (Basis(layout, layout.unflatten(P.T)), rows @ P),
        (Subset(layout, indices, torch.float64), rows[:, :, indices]),
    ):
        # One matrix an output, without its σ⁻².
        expected = torch.stack([columns[:, c].T @ columns[:, c] for c in range(C)])
        assert close(reduced_ggn(source, projection), expected, 1e-10)


# The posterior --------------------------------------------------------------------------------------------------------


@EVERY_DTYPE
@pytest.mark.parametrize("noise", ["given", "per-output"])
@pytest.mark.parametrize("name", ["tied-weights", "keyword-inputs"])
def test_covariance_in_the_subspace_and_the_total_one_equal_brute_force(name, noise, dtype):
    la, inputs, _ = fitted(name, 8, dtype, noise)
    model, outputs = la.model, dense_outputs(la.model, inputs)
    P, (n, C) = la.projection_matrix().double(), outputs.shape
    expected = subspace_covariance(dense_jacobian(model, inputs), P, precision_matrix(model, inputs, la.noise_std))
    blocks = torch.stack([expected[i : i + C, i : i + C] for i in range(0, n * C, C)])
    assert close(la.functional_covariance(inputs, joint=True), expected, TOLERANCE[dtype])
    assert close(la.functional_variance(inputs), blocks.diagonal(dim1=1, dim2=2), TOLERANCE[dtype])
    prediction = la.predict(inputs)
    assert close(prediction.covariance, blocks, TOLERANCE[dtype])
    total = blocks + torch.diag(torch.tensor(la.noise_std, dtype=torch.float64) ** 2)
    assert prediction.total.dtype == dtype
    assert close(prediction.total, total, TOLERANCE[dtype])


@pytest.mark.parametrize("projector", ["lowrank-diagonal", "lowrank-isotropic", "lowrank-ggn", "subset-diagonal"])
def test_other_projectors_are_exact_in_their_subspaces(projector):
    la, inputs, _ = fitted("paper-cnn", 8, projector=projector)
    precision = precision_matrix(la.model, inputs, la.noise_std)
    expected = subspace_covariance(dense_jacobian(la.model, inputs), la.projection_matrix(), precision)
    found = la.functional_covariance(inputs, joint=True)
    assert (found - expected).abs().max() <= 1e-8 * max(float(expected.abs().max()), 1e-12)


FORMS = pytest.mark.parametrize(("n", "form"), [(6, DualPrecision), (60, DensePrecision)])


@FORMS
def test_the_full_posterior_equals_brute_force(n, form):
    la, inputs, targets = fitted(n=n, projector="full")
    assert isinstance(la._state.posterior, form)
    expected = full_covariance(dense_jacobian(la.model, inputs[:4]), precision_matrix(la.model, inputs, la.noise_std))
    assert close(la.functional_covariance(inputs[:4], joint=True), expected, 1e-8)
    for prior in (1e-3, PRIOR, 50.0):
        evidence = float(dense_evidence(la.model, inputs, targets, prior, la.noise_std))
        assert float(la.log_marginal_likelihood(prior)) == pytest.approx(evidence, rel=1e-9)
    P = torch.eye(la.num_parameters, dtype=torch.float64)
    ggn = precision_matrix(la.model, inputs, la.noise_std, 0.0)
    best = stationary_prior(torch.linalg.eigvalsh(P.T @ ggn @ P).clamp_min(0), squared_norm(la.model))
    assert la.optimize_prior_precision().prior_precision == pytest.approx(best, rel=1e-5)


@FORMS
def test_the_full_posterior_refuses_other_noises_and_stays_as_it_is(n, form):
    la, inputs, _ = fitted(n=n, projector="full")
    assert isinstance(la._state.posterior, form)
    before = la.predict(inputs).total
    with pytest.raises(ValueError, match=r"cannot be changed after the fit: fit again with it, or use a subspace"):
        la.log_marginal_likelihood(noise_std=torch.tensor([0.5, 0.6]))
    assert la.noise_std == STDS[:2] and la.prior_precision == PRIOR
    assert torch.equal(la.predict(inputs).total, before)


@pytest.mark.parametrize("options", [{"complement": "kfac", "dim": 6}, {"complement": None, "projector": "full"}])
def test_where_outputs_share_their_curvature_the_evidence_tunes_a_common_factor(options):
    model, inputs, targets = problem(n=40)
    given = stds_of(model, inputs)

    def at(prior, factor):
        scaled = Gaussian(tuple(factor * std for std in given))
        again = SubspaceLaplace(model, scaled, prior_precision=prior, **options)
        return again.fit(loader(inputs, targets, 10))

    if options["complement"]:  # a fitted weight would differ between the fits
        options = options | {"complement": Complement("kfac", weight=1.0)}
    la = at(PRIOR, 1.0)
    tuned = la.tuned("evidence", noise=True)
    factor = tuned.noise_std[0] / given[0]
    assert tuned.noise_std == pytest.approx([factor * std for std in given])
    assert abs(factor - 1) > 0.1
    assert "common factor" in tuned.summary()
    # With a complement P depends on λ and σ; the evidence of the posterior at hand does not need it again.
    if options["complement"] is None:
        best = float(at(tuned.prior_precision, factor).log_marginal_likelihood())
        for prior, c in ((1.1, 1.0), (0.9, 1.0), (1.0, 1.1), (1.0, 0.9)):
            assert float(at(prior * tuned.prior_precision, c * factor).log_marginal_likelihood()) < best
    evidence = float(tuned.log_marginal_likelihood())
    for prior, c in ((1.2, 1.0), (0.8, 1.0), (1.0, 1.1), (1.0, 0.9), (1.1, 1.1)):
        other = la._with(la._state.with_noise_factor(c * factor)).with_prior(prior * tuned.prior_precision)
        assert float(other.log_marginal_likelihood()) < evidence


def test_the_log_predictive_is_that_of_a_gaussian_with_both_uncertainties():
    generator = torch.Generator().manual_seed(0)
    roots, f, y = (torch.randn(7, *shape, generator=generator).double() for shape in ((4, 4), (4,), (4,)))
    covariance = roots @ roots.transpose(1, 2)
    expected = [
        MultivariateNormal(f[i], covariance[i] + torch.diag(torch.tensor(STDS).double() ** 2)).log_prob(y[i])
        for i in range(7)
    ]
    assert torch.allclose(Gaussian(STDS).log_predictive(f, covariance, y), torch.stack(expected), rtol=1e-5)
    likelihood = [Normal(f[i], torch.tensor(STDS, dtype=torch.float64)).log_prob(y[i]).sum() for i in range(7)]
    assert torch.allclose(Gaussian(STDS).log_density(f, y), torch.stack(likelihood), rtol=1e-12)


def test_validation_finds_the_prior_of_the_greatest_density():
    model, inputs, targets = problem(n=30)
    la = SubspaceLaplace.paper(model, Gaussian("per-output"), dim=8).fit(loader(inputs, targets, 6))
    _, new, wanted = problem(n=25, seed=7)
    wanted = dense_outputs(model, new) + 2 * (wanted - dense_outputs(model, new))

    def density(prior):
        prediction = la.with_prior(prior).predict(new)
        return float(MultivariateNormal(prediction.mean, prediction.total).log_prob(wanted).mean())

    before, certain = la.prior_precision, [(new, wanted, torch.full((25,), 1e6).double())]
    assert la.tuned(certain, noise=False).noise_std == la.noise_std
    densities = [density(10 ** (k / 2)) for k in range(-8, 9)]  # within five decades of λ before
    found = la.tuned(certain, noise=False).prior_precision
    assert before == 1.0
    assert density(found) >= max(densities) - 1e-4
    assert max(densities) > min(densities) + 0.01
    # With few data λ is pulled towards its value before.
    pulled = la.optimize_prior_precision("validation", val_loader=loader(new, wanted, size=9)).prior_precision

    def score(prior):
        return density(prior) - validation.NOISE_PULL * math.log10(prior / before) ** 2 / 25

    assert score(pulled) >= max(score(10 ** (k / 4)) for k in range(-16, 17)) - 1e-4
    assert abs(math.log10(pulled)) < abs(math.log10(found))


# The evidence ---------------------------------------------------------------------------------------------------------


@EVERY_DTYPE
@pytest.mark.parametrize("projector", ["lowrank-kfac", "last-layer"])
@pytest.mark.parametrize("noise", ["given", "per-output"])
def test_the_evidence_in_a_subspace_equals_brute_force_at_every_noise(noise, projector, dtype):
    la, inputs, targets = fitted(noise=noise, projector=projector, dtype=dtype)
    P, before = la.projection_matrix().double(), la.noise_std
    relative = {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]
    for prior, stds in ((1e-3, None), (PRIOR, (0.2, 0.9)), (50.0, [2.0, 0.1])):
        expected = dense_evidence(la.model, inputs, targets, prior, before if stds is None else stds, P)
        given = None if stds is None else torch.tensor(stds, dtype=torch.float64)
        assert float(la.log_marginal_likelihood(prior, given)) == pytest.approx(float(expected), rel=relative)
    assert la.noise_std == before and la.prior_precision == PRIOR


def test_another_noise_gives_the_evidence_of_a_fit_with_it():
    la, inputs, targets = fitted("paper-cnn")
    again = SubspaceLaplace.paper(
        la.model, Gaussian((0.9, 0.2, 0.4)), projector=same_basis(la), dim=6, prior_precision=PRIOR
    )
    again.fit(loader(inputs, targets, 6))
    found = la.log_marginal_likelihood(noise_std=torch.tensor([0.9, 0.2, 0.4], dtype=torch.float64))
    assert float(found) == pytest.approx(float(again.log_marginal_likelihood()), rel=1e-9)


def test_the_evidence_has_the_derivatives_of_brute_force_in_every_noise():
    la, inputs, targets = fitted("paper-cnn", 8)
    hyper = [
        torch.tensor(0.3, dtype=torch.float64, requires_grad=True),
        torch.tensor([0.6, 0.2, 1.5], dtype=torch.float64, requires_grad=True),
    ]
    assert torch.autograd.gradcheck(lambda *values: la.log_marginal_likelihood(*values), hyper)
    found = torch.autograd.grad(la.log_marginal_likelihood(*hyper), hyper)
    dense = dense_evidence(la.model, inputs, targets, *hyper, projection=la.projection_matrix())
    expected = torch.autograd.grad(dense, hyper)
    for value, reference in zip(found, expected, strict=True):
        assert value.shape == reference.shape
        assert torch.allclose(value, reference, rtol=1e-8)


@pytest.mark.parametrize("noise", ["given", "per-output"])
def test_tuned_noises_are_stationary_and_give_the_posterior_of_a_fit_with_them(noise):
    la, inputs, targets = fitted(noise=noise, n=20)
    before, old, relative = la.noise_std, la.log_marginal_likelihood(), la.with_prior(PRIOR)
    predicted = la.predict(inputs).total
    assert la.optimize_prior_precision("marglik", tune_noise=True) is la
    assert isinstance(la.noise_std, tuple) and len(la.noise_std) == 2
    assert all(now != pytest.approx(then, rel=1e-3) for now, then in zip(la.noise_std, before, strict=True))
    best = la.log_marginal_likelihood()
    assert best > old
    logs = torch.tensor([la.prior_precision, *la.noise_std], dtype=torch.float64).log().requires_grad_()
    evidence = dense_evidence(la.model, inputs, targets, logs[0].exp(), logs[1:].exp(), la.projection_matrix())
    assert evidence.item() == pytest.approx(float(best), rel=1e-9)
    assert torch.autograd.grad(evidence, logs)[0].abs().max() < 1e-4
    for prior in (0.1, 1.0, 10.0):
        for first in (0.2, 0.5, 1.2):
            for second in (0.2, 0.5, 1.2):
                noises = torch.tensor([first, second], dtype=torch.float64)
                assert la.log_marginal_likelihood(prior, noises) <= best
    fresh = SubspaceLaplace.paper(
        la.model, Gaussian(la.noise_std), projector=same_basis(la), dim=6, prior_precision=la.prior_precision
    ).fit(loader(inputs, targets))
    assert close(la.predict(inputs).total, fresh.predict(inputs).total, 1e-10)
    assert close(la.functional_covariance(inputs), fresh.functional_covariance(inputs), 1e-10)
    assert relative.noise_std == before
    assert torch.equal(relative.predict(inputs).total, predicted)
    # What was tuned is no estimate any more.
    assert la.updated(loader(inputs + 1, targets, 6)).noise_std == la.noise_std


def test_fitting_with_the_evidence_takes_the_prior_of_the_greatest_kfac_evidence():
    la, inputs, _ = fitted(prior_precision="evidence", noise="per-output")
    blocks = brute_force_kfac(la.model, inputs, hessians(dense_outputs(la.model, inputs), la.noise_std))
    eigenvalues = torch.cat([torch.linalg.eigvalsh(block).clamp_min(0) for block in blocks.values()])
    assert la.prior_precision == pytest.approx(stationary_prior(eigenvalues, squared_norm(la.model)), rel=1e-5)


# Relatives of a posterior ---------------------------------------------------------------------------------------------


def test_truncation_and_another_prior_need_no_data():
    la, inputs, _ = fitted()
    jacobian = dense_jacobian(la.model, inputs)
    expected = subspace_covariance(
        jacobian, la.projection_matrix()[:, :3], precision_matrix(la.model, inputs, la.noise_std, 5.0)
    )
    assert close(la.truncated(3).with_prior(5.0).functional_covariance(inputs, joint=True), expected, 1e-8)


@EVERY_DTYPE
@pytest.mark.parametrize("noise", ["given", "per-output"])
def test_an_update_equals_a_fit_on_both_data_sets_in_the_same_subspace(noise, dtype):
    model, inputs, targets = problem(n=20, dtype=dtype)
    noise_std = STDS[:2] if noise == "given" else noise
    likelihood, options = Gaussian(noise_std), {"dim": 5, "prior_precision": PRIOR}
    la = SubspaceLaplace.paper(model, likelihood, **options).fit(loader(inputs[:9], targets[:9]))
    before = la.noise_std
    updated = la.updated(loader(inputs[9:], targets[9:]))
    both = SubspaceLaplace.paper(model, likelihood, projector=same_basis(la), **options).fit(loader(inputs, targets, 6))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}[dtype]
    assert updated.noise_std == pytest.approx(both.noise_std, rel=tolerance)
    assert (updated.noise_std == before) == (noise == "given") and la.noise_std == before
    assert close(updated.predict(inputs).total, both.predict(inputs).total, tolerance)
    assert close(updated.functional_covariance(inputs), both.functional_covariance(inputs), tolerance)
    evidence = float(both.log_marginal_likelihood())
    assert float(updated.log_marginal_likelihood()) == pytest.approx(evidence, rel=tolerance)


@pytest.mark.parametrize("noise", ["given", "per-output"])
@pytest.mark.parametrize("projector", ["lowrank-kfac", "full"])
def test_a_loaded_posterior_is_the_same_and_goes_on_the_same_way(projector, noise, tmp_path):
    la, inputs, targets = fitted(noise=noise, projector=projector)
    la.save(tmp_path / "la.safetensors")
    loaded = SubspaceLaplace.load(tmp_path / "la.safetensors", la.model)
    assert loaded.noise_std == la.noise_std and repr(loaded) == repr(la)
    assert torch.equal(loaded.predict(inputs).total, la.predict(inputs).total)
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()
    if projector == "full":
        return
    other = torch.tensor([0.5, 0.6], dtype=torch.float64)
    assert loaded.log_marginal_likelihood(2.0, other) == la.log_marginal_likelihood(2.0, other)
    more = loader(inputs + 1, targets, 6)
    assert loaded.updated(more).noise_std == la.updated(more).noise_std
    assert torch.equal(loaded.updated(more).predict(inputs).total, la.updated(more).predict(inputs).total)


def test_residuals_joined_from_parts_are_those_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    values = 1e6 + torch.randn(50, 4, generator=generator, dtype=torch.float64) * torch.tensor(STDS)
    whole, parts = Residuals.of(values), Residuals.none(4)
    for start in range(0, 50, 7):
        parts = parts.joined(Residuals.of(values[start : start + 7]))
    # A mean far from zero: squares summed as they are would have lost these digits.
    assert (parts.spread / parts.count).sqrt().tolist() == pytest.approx(values.std(0, correction=0).tolist(), rel=1e-8)
    pooled = parts.pooled()
    assert float((pooled.spread / pooled.count).sqrt()) == pytest.approx(float(values.std(correction=0)), rel=1e-8)
    assert parts.root_mean_squares() == pytest.approx(values.square().mean(0).sqrt().tolist(), rel=1e-12)
    assert parts.root_mean_square() == pytest.approx(float(values.square().mean().sqrt()), rel=1e-12)
    for one, other in zip(parts.sums, whole.sums, strict=True):
        assert torch.allclose(one, other, rtol=1e-8)
    stds = torch.tensor(STDS, dtype=torch.float64)
    expected = float(Normal(torch.zeros(4).double(), stds).log_prob(values).sum())
    assert float(parts.log_likelihood(stds)) == pytest.approx(expected, rel=1e-10)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "error", "message"),
    [
        ([], ValueError, "holds no number"),
        ([0.3, 0.0], ValueError, r"positive and finite, but it is 0\.0"),
        ([0.3, -1.0], ValueError, "positive and finite"),
        ([0.3, math.nan], ValueError, "positive and finite"),
        (torch.tensor([0.3, math.inf]), ValueError, "positive and finite"),
        ([0.3, "a"], TypeError, "noise_std must be one positive number, not 'a'"),
        ([[0.3, 0.4]], TypeError, "noise_std must be one positive number"),
        ("per output", ValueError, "Unknown noise_std 'per output'; .*'per-output'"),
    ],
)
def test_impossible_noises_are_refused_at_once(noise, error, message):
    model, *_ = problem()
    with pytest.raises(error, match=message):
        SubspaceLaplace.paper(model, Gaussian(noise))


@pytest.mark.parametrize("count", [3, 5])
def test_noises_of_another_number_than_the_outputs_are_refused(count):
    model, inputs, targets = problem()
    la = SubspaceLaplace.paper(model, Gaussian([0.3] * count))
    with pytest.raises(ValueError, match=rf"holds {count} numbers, but the model has 2 outputs"):
        la.fit(loader(inputs, targets, 6))


def test_the_evidence_wants_as_many_noises_as_there_were():
    several, *_ = fitted()
    with pytest.raises(ValueError, match="holds 3 numbers, but the posterior was fitted with 2"):
        several.log_marginal_likelihood(noise_std=torch.tensor([0.1, 0.2, 0.3]))
    with pytest.raises(ValueError, match="holds 1 numbers, but the posterior was fitted with 2"):
        several.log_marginal_likelihood(noise_std=0.4)
    one, *_ = fitted(noise=0.4)
    with pytest.raises(ValueError, match="holds 2 numbers, but the posterior was fitted with 1"):
        one.log_marginal_likelihood(noise_std=torch.tensor([0.1, 0.2]))
    with pytest.raises(ValueError, match="positive and finite"):
        several.log_marginal_likelihood(noise_std=torch.tensor([0.1, -0.2]))


def test_a_constant_residual_is_noise_and_none_at_all_is_not():
    model, inputs, targets = problem()
    with torch.no_grad():
        model[4].weight[1] = 0  # the second output is its bias
        targets[:, 1] = model[4].bias[1] + 0.5
    shifted = SubspaceLaplace.paper(model, Gaussian("per-output"), dim=3).fit(loader(inputs, targets, 6))
    assert shifted.noise_std[1] == pytest.approx(0.5, rel=1e-12)
    with torch.no_grad():
        targets[:, 1] = model[4].bias[1]
    with pytest.raises(ValueError, match=r"residuals are all zero.*give noise_std, as in Gaussian\(0\.1\)"):
        SubspaceLaplace.paper(model, Gaussian("per-output"), dim=3).fit(loader(inputs, targets, 6))
    pooled = SubspaceLaplace.paper(model, "regression", dim=3).fit(loader(inputs, targets, 6))
    assert pooled.noise_std > 0


def test_an_output_that_fits_up_to_rounding_gives_no_noise():
    model, inputs = make("mlp", 12)
    generator = torch.Generator().manual_seed(0)
    targets = dense_outputs(model, inputs)
    targets[:, 0] += 0.3 * torch.randn(12, generator=generator, dtype=torch.float64)
    targets[:, 1:] *= 1 + 1e-16 * torch.randn(12, 1, generator=generator, dtype=torch.float64)
    with pytest.raises(ValueError, match="give noise_std"):
        SubspaceLaplace.paper(model, Gaussian("per-output"), dim=3).fit(loader(inputs, targets))
