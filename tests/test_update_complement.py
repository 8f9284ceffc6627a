"""New data for a posterior with a complement: the posterior of all data with the same P, λ and weight."""

import pytest
import torch
from dense_reference import dense_ggn, dense_jacobian, dense_outputs, softmax_hessians
from networks import make
from sensitive import untouched
from test_laplace import loader
from test_update import FIRST, KINDS, PRIOR, SECOND, close, part, problem

from sublaplace import Bernoulli, Categorical, Complement, Gaussian, SubspaceLaplace
from sublaplace.curvature.operators import DensePart, DiagonalPart, KroneckerPart
from sublaplace.data.batches import select

COMPLEMENTS = {
    "kfac": {"complement": Complement("kfac", weight=1.0)},
    "weighted": {"complement": Complement("kfac", weight=0.3)},
    "diagonal": {"complement": Complement("diagonal", weight=2.0)},
    "kfac alone": {"complement": Complement("kfac", weight=0.3), "projector": None, "dim": None},
    "diagonal alone": {"complement": Complement("diagonal", weight=1.0), "projector": None, "dim": None},
}


def fit(model, likelihood, batches, certify=False, **options):
    options = {"dim": 5, "prior_precision": PRIOR, **options}
    return SubspaceLaplace(model, likelihood, **options).fit(batches, certify=certify)


def fit_on_both(la, likelihood, batches, certify=False, **options):
    """A fit on other data with the P and the weight of `la`."""
    kind = options["complement"].kind if isinstance(options["complement"], Complement) else options["complement"]
    options = {**options, "complement": Complement(kind, weight=la.complement_weight)}
    if la.dim:
        projection = la._subspace().projection
        options = {**options, "projector": lambda _: projection, "dim": la.dim}
    return fit(la.model, likelihood, batches, certify, **options)


def assert_same(found, expected, inputs, tolerance=1e-8):
    assert found.dim == expected.dim and found.prior_precision == expected.prior_precision
    assert found.complement_weight == pytest.approx(expected.complement_weight, rel=1e-12)
    if found.noise_std is not None:
        assert found.noise_std == pytest.approx(expected.noise_std, rel=max(tolerance, 1e-10))
    one, other = (la.functional_covariance(inputs, joint=True) for la in (found, expected))
    assert close(one, other, tolerance)
    one, other = (la.functional_variance(inputs) for la in (found, expected))
    assert close(one, other, tolerance)
    evidence = [float(la.log_marginal_likelihood()) for la in (found, expected)]
    assert evidence[0] == pytest.approx(evidence[1], rel=tolerance)


@pytest.mark.parametrize("outside", COMPLEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_equals_a_fit_on_both_data_sets(kind, outside):
    model, inputs, targets = problem(kind)
    likelihood, options = KINDS[kind]["likelihood"], COMPLEMENTS[outside]
    la = fit(model, likelihood, part(inputs, targets, FIRST), **options)
    updated = la.updated(part(inputs, targets, SECOND))
    assert_same(updated, fit_on_both(la, likelihood, loader(inputs, targets), **options), inputs)
    assert not close(updated.functional_variance(inputs), la.functional_variance(inputs), 1e-2)
    if kind == "estimated noise":
        assert updated.noise_std > 1.2 * la.noise_std


@pytest.mark.parametrize("outside", ["weighted", "kfac alone", "diagonal"])
@pytest.mark.parametrize(
    "name", ["paper-cnn", "conv-groups", "embedding", "tied-weights", "free-parameters", "layer-norm", "attention"]
)
def test_every_kind_of_block_is_joined(name, outside):
    model, inputs, targets = problem("classification", name)
    options = COMPLEMENTS[outside]
    la = fit(model, "classification", part(inputs, targets, FIRST), **options)
    updated = la.updated(part(inputs, targets, SECOND))
    assert_same(updated, fit_on_both(la, "classification", loader(inputs, targets), **options), inputs)


def test_it_is_the_formula_with_the_curvature_of_all_data():
    model, inputs, targets = problem("classification")
    options = COMPLEMENTS["weighted"]
    la = fit(model, "classification", part(inputs, targets, FIRST), **options)
    updated = la.updated(part(inputs, targets, SECOND))
    # Ψ̃ = Q A⁻¹ Qᵀ + (I − Π) Ψ_K (I − Π)ᵀ with the dense GGN of all data.
    outside, layout = updated._state.posterior.outside, updated._layout
    identity = torch.eye(layout.num_parameters, dtype=torch.float64)
    psi = layout.flatten(outside.solve(layout.unflatten(identity.clone()))).T
    precision = dense_ggn(model, inputs, softmax_hessians(dense_outputs(model, inputs))) + PRIOR * identity
    Q = updated.projection_matrix()
    A = Q.T @ precision @ Q
    rest = identity - Q @ torch.linalg.solve(A, Q.T @ precision)
    J = dense_jacobian(model, inputs)
    expected = J @ (Q @ torch.linalg.solve(A, Q.T) + rest @ psi @ rest.T) @ J.T
    assert close(updated.functional_covariance(inputs, joint=True), expected, 1e-8)


def test_a_fitted_weight_is_kept():
    with torch.random.fork_rng():
        model, inputs = make("mlp", 60)
    outputs = dense_outputs(model, inputs)
    targets = outputs + 0.3 * torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).double()
    first = part(inputs, targets, slice(0, 50))
    la = fit(model, Gaussian(0.3), first, complement="kfac", subspace_inputs=inputs[50:])
    assert la.complement_weight != 1.0
    updated = la.updated(part(inputs, targets, slice(50, 60)))
    expected = fit_on_both(la, Gaussian(0.3), loader(inputs, targets), complement="kfac")
    assert_same(updated, expected, inputs)


@pytest.mark.parametrize("outside", ["weighted", "diagonal", "kfac alone"])
@pytest.mark.parametrize("kind", KINDS)
def test_sample_weights_count_in_both_data_sets(kind, outside):
    model, inputs, targets = problem(kind)
    likelihood, options = KINDS[kind]["likelihood"], COMPLEMENTS[outside]
    weights = torch.rand(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.2
    weights[[2, 12]] = 0.0

    def weighted(which):
        return [(inputs[which], targets[which], weights[which])]

    la = fit(model, likelihood, weighted(FIRST), **options)
    updated = la.updated(weighted(SECOND))
    expected = fit_on_both(la, likelihood, weighted(slice(0, 20)), **options)
    assert_same(updated, expected, inputs)
    assert not close(
        updated.functional_variance(inputs), la.updated(part(inputs, targets, SECOND)).functional_variance(inputs), 1e-3
    )


@pytest.mark.parametrize(("kind", "likelihood"), [("classification", Categorical), ("multi-label", Bernoulli)])
def test_ignored_labels_add_nothing(kind, likelihood):
    model, inputs, targets = problem("classification")
    if kind == "multi-label":
        targets = (dense_outputs(model, inputs) > 0).long()
    targets[[1, 4, 11, 15]] = -1
    options = COMPLEMENTS["weighted"]
    la = fit(model, likelihood(ignore_index=-1), part(inputs, targets, FIRST), **options)
    updated = la.updated(part(inputs, targets, SECOND))
    assert_same(updated, fit_on_both(la, likelihood(ignore_index=-1), loader(inputs, targets), **options), inputs)


@pytest.mark.parametrize("outside", ["weighted", "kfac alone"])
def test_several_updates_equal_one(outside):
    model, inputs, targets = problem("estimated noise")
    la = fit(model, "regression", part(inputs, targets, FIRST), **COMPLEMENTS[outside])
    once, thrice = la.updated(part(inputs, targets, SECOND, size=11)), la
    for which in (slice(15, 20), slice(9, 10), slice(10, 15)):
        thrice = thrice.updated(part(inputs, targets, which, size=2))
    assert_same(thrice, once, inputs)


@pytest.mark.parametrize("kind", ["classification", "given noise"])
def test_an_update_commutes_with_another_prior_and_fewer_dimensions(kind):
    model, inputs, targets = problem(kind)
    la = fit(model, KINDS[kind]["likelihood"], part(inputs, targets, FIRST), **COMPLEMENTS["weighted"])
    new = part(inputs, targets, SECOND)
    assert_same(la.with_prior(9.0).updated(new), la.updated(new).with_prior(9.0), inputs)
    assert_same(la.truncated(2).updated(new), la.updated(new).truncated(2), inputs)


def test_a_posterior_with_a_tuned_noise_is_updated_with_it():
    model, inputs, targets = problem("estimated noise")
    la = fit(model, "regression", part(inputs, targets, FIRST), **COMPLEMENTS["weighted"])
    tuned = la.tuned("evidence", noise=True)
    assert tuned.noise_std != la.noise_std
    updated = tuned.updated(part(inputs, targets, SECOND))
    assert updated.noise_std == tuned.noise_std  # no longer an estimate
    projection = la._subspace().projection
    expected = fit(
        model,
        Gaussian(tuned.noise_std),
        loader(inputs, targets),
        projector=lambda _: projection,
        prior_precision=tuned.prior_precision,
        complement=Complement("kfac", weight=0.3),
    )
    assert_same(updated, expected, inputs)


# Certificates


@pytest.mark.parametrize("kind", KINDS)
def test_a_certificate_is_kept_without_reading_the_first_data_again(kind):
    model, inputs, targets = problem(kind)
    likelihood, options = KINDS[kind]["likelihood"], COMPLEMENTS["weighted"]
    reads = []

    class First:
        def __iter__(self):
            for batch in part(inputs, targets, FIRST):
                reads.append(1)
                yield batch

    la = fit(model, likelihood, First(), certify=True, **options)
    reads.clear()
    updated = la.updated(part(inputs, targets, SECOND))
    found = updated.bounds(inputs)
    assert not reads
    expected = fit_on_both(la, likelihood, loader(inputs, targets), certify=True, **options)
    assert close(found.lower, expected.bounds(inputs).lower, 1e-8)
    assert close(found.upper, expected.bounds(inputs).upper, 1e-8)
    assert torch.allclose(updated.captured_share(inputs), expected.captured_share(inputs), rtol=1e-8)
    assert_same(updated, expected, inputs)


def test_bounds_that_were_not_asked_for_at_first_are_of_all_data():
    model, inputs, targets = problem("classification")
    options = COMPLEMENTS["weighted"]
    la = fit(model, "classification", part(inputs, targets, FIRST), **options)
    updated = la.updated(part(inputs, targets, SECOND))
    expected = fit_on_both(la, "classification", loader(inputs, targets), certify=True, **options)
    assert close(updated.bounds(inputs).upper, expected.bounds(inputs).upper, 1e-8)


# One σ per output


def test_one_estimated_noise_for_each_output_is_refused():
    model, inputs, targets = problem("estimated noise")
    for outside in ("weighted", "kfac alone"):
        la = fit(model, Gaussian("per-output"), part(inputs, targets, FIRST), **COMPLEMENTS[outside])
        before = la.functional_covariance(inputs)
        with untouched(model), pytest.raises(ValueError, match=r"σ for each output that is estimated again.*give σ"):
            la.updated(part(inputs, targets, SECOND))
        assert torch.equal(la.functional_covariance(inputs), before)


@pytest.mark.parametrize("outside", ["weighted", "diagonal", "kfac alone"])
def test_one_given_noise_for_each_output_is_not(outside):
    model, inputs, targets = problem("given noise")
    likelihood, options = Gaussian((0.2, 0.6)), COMPLEMENTS[outside]
    la = fit(model, likelihood, part(inputs, targets, FIRST), **options)
    updated = la.updated(part(inputs, targets, SECOND))
    assert_same(updated, fit_on_both(la, likelihood, loader(inputs, targets), **options), inputs)


# What is kept


@pytest.mark.parametrize("outside", ["weighted", "diagonal", "kfac alone"])
def test_neither_the_first_posterior_nor_the_model_changes(outside):
    model, inputs, targets = problem("estimated noise", "layer-norm")
    la = fit(model, "regression", part(inputs, targets, FIRST), **COMPLEMENTS[outside])
    before = la.functional_covariance(inputs), la.log_marginal_likelihood(), la.noise_std, repr(la)
    model.train()
    with untouched(model):
        updated = la.updated(part(inputs, targets, SECOND))
    updated.optimize_prior_precision(tune_noise=True)
    assert torch.equal(la.functional_covariance(inputs), before[0])
    assert (la.log_marginal_likelihood(), la.noise_std, repr(la)) == before[1:]
    assert "N=9)" in repr(la) and "N=20)" in repr(updated)


@pytest.mark.parametrize("outside", ["weighted", "diagonal", "kfac alone", "diagonal alone"])
def test_a_loaded_posterior_is_updated_as_the_saved_one(outside, tmp_path):
    model, inputs, targets = problem("estimated noise")
    la = fit(model, "regression", part(inputs, targets, FIRST), **COMPLEMENTS[outside])
    la.save(tmp_path / "la.safetensors")
    loaded = SubspaceLaplace.load(tmp_path / "la.safetensors", model)
    new = part(inputs, targets, SECOND)
    assert_same(loaded.updated(new), la.updated(new), inputs, 1e-12)


def test_float32_agrees_to_three_digits():
    found = []
    for dtype in (torch.float32, torch.float64):
        model, inputs, targets = problem("classification", dtype=dtype)
        options = {**COMPLEMENTS["weighted"], "projector": "subset-magnitude"}
        la = fit(model, "classification", part(inputs, targets, FIRST), **options)
        found.append(la.updated(part(inputs, targets, SECOND)).functional_variance(inputs).double())
    assert close(*found, 1e-3)


def test_samples_follow_the_updated_posterior():
    model, inputs, targets = problem("given noise")
    la = fit(model, Gaussian(0.4), part(inputs, targets, FIRST), **COMPLEMENTS["weighted"])
    updated = la.updated(part(inputs, targets, SECOND))
    new = select(inputs, slice(0, 2))
    drawn = updated.functional_samples(new, 4000).flatten(1)
    found = torch.cov(drawn.T)
    expected = updated.functional_covariance(new, joint=True)
    assert close(found, expected, 0.12)


# Parts


def kronecker(seed, terms):
    generator = torch.Generator().manual_seed(seed)
    a, g = (torch.randn(1, 6, k, generator=generator, dtype=torch.float64) for k in (3, 2))
    return KroneckerPart.of(a.mT @ a / terms, g.mT @ g, False, terms, torch.float64), a, g


def test_kronecker_factors_are_joined_as_sums_over_all_inputs():
    one, a, g = kronecker(0, 6.0)
    other, more_a, more_g = kronecker(1, 4.0)
    joined = one.joined(other)
    A, G = a.mT @ a + more_a.mT @ more_a, g.mT @ g + more_g.mT @ more_g
    expected = torch.kron(G[0], A[0] / 10.0)
    found = joined.matmul(torch.eye(6, dtype=torch.float64), 0.0)
    assert joined.terms == 10.0
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_a_parameter_that_one_data_set_did_not_use_has_the_curvature_of_the_other():
    unused, used = DiagonalPart(torch.zeros(6, dtype=torch.float64)), kronecker(0, 6.0)[0]
    dense = DensePart.of(torch.eye(6, dtype=torch.float64) * 2, torch.float64)
    for part_ in (used, dense):
        assert torch.equal(unused.joined(part_).eigenvalues(), part_.eigenvalues())
        assert torch.equal(part_.joined(unused).eigenvalues(), part_.eigenvalues())
        with pytest.raises(ValueError, match="used in another way in the new data"):
            part_.joined(DiagonalPart(torch.ones(6, dtype=torch.float64)))
        with pytest.raises(ValueError, match="used in another way in the new data"):
            DiagonalPart(torch.ones(6, dtype=torch.float64)).joined(part_)
