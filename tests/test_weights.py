"""Sample weights and ignored labels: weight 2 is an input given twice, weight 0 or an ignored label one left out."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from dense_reference import (
    dense_ggn,
    dense_jacobian,
    dense_outputs,
    laplace_evidence,
    sigmoid_hessians,
    softmax_hessians,
    subspace_covariance,
)
from networks import make
from test_curvature import brute_force_kfac, dense_block
from test_laplace import labels, loader, sized
from test_prior import same_basis
from torch import nn

from sublaplace import PROJECTORS, Basis, Bernoulli, Categorical, Drawn, Gaussian, Resources, Subset, SubspaceLaplace
from sublaplace.curvature.diagonal import diagonal_ggn
from sublaplace.curvature.exact import exact_ggn
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.reduced import reduced_ggn
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.data.batches import num_inputs, select
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.residuals import Residuals
from sublaplace.projectors.swag import swag_variances

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
PRIOR = 0.7
STDS = (0.3, 1.1, 0.6, 0.8)
COUNTS = (2, 0, 1, 3, 1, 2, 0, 1, 2, 1, 0, 3)  # how often each input counts
KINDS = ["classification", "binary", "one noise", "a noise each"]


def likelihood_of(kind, num_outputs):
    noises = {"one noise": 0.4, "a noise each": STDS[:num_outputs]}
    return {"classification": Categorical(), "binary": Bernoulli()}.get(kind) or Gaussian(noises[kind])


def problem(kind="classification", name="mlp", n=12, dtype=torch.float64, seed=0):
    """A network, inputs, and targets that do not fit perfectly."""
    model, inputs = make(name, n, dtype, seed)
    if kind == "classification":
        return model, inputs, labels(model, inputs)
    outputs = dense_outputs(model, inputs)
    drawn = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    if kind == "binary":
        return model, inputs, (drawn > 0).long()
    scales = torch.tensor([0.4, 1.3, 0.7, 0.2])[: outputs.shape[1]]
    return model, inputs, (outputs + 0.3 + scales * drawn).to(dtype)


def counts(n=12):
    return torch.tensor(COUNTS).repeat(n // 12 + 1)[:n]


def weighted(inputs, targets, weights, size=6):
    """Batches with weights."""
    return [(x, y, weights[i * size : (i + 1) * size]) for i, (x, y) in enumerate(loader(inputs, targets, size))]


def repeated(inputs, targets, times, size=6):
    """The same batches with each input as often as it counts; batches may be left empty."""
    result = []
    for i, (x, y) in enumerate(loader(inputs, targets, size)):
        index = torch.arange(len(y)).repeat_interleave(times[i * size : (i + 1) * size])
        result.append((select(x, index), y[index]))
    return result


def stream(model, batches, likelihood, tolerance=0.0):
    return CurvatureStream(Linearization(model), batches, likelihood, tolerance)


def close(value, expected, tolerance):
    assert value.shape == expected.shape
    return (value.double() - expected.double()).abs().max() <= tolerance * expected.abs().max()


def probes(layout, dtype=torch.float64):
    """Some vectors of parameter space, by which matrices are compared."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, layout.num_parameters, generator=generator, dtype=torch.float64).to(dtype)


def applied(precision, dtype):
    """The curvature of a precision, without λ, times the probes."""
    layout = precision.layout
    V = probes(layout, dtype)
    return layout.flatten(precision.matmul(layout.unflatten(V))).double() - PRIOR * V.double()


def some_projections(layout, dtype):
    p = layout.num_parameters
    indices = torch.randperm(p, generator=torch.Generator().manual_seed(0))[: p // 2]
    return [Basis(layout, layout.unflatten(probes(layout, dtype))), Subset(layout, indices, dtype)]


def curvatures(source):
    """Everything that a pass over the data can give, by name."""
    layout, dtype = source.linearization.layout, source.linearization.dtype
    p = layout.num_parameters
    basis, subset = some_projections(layout, dtype)
    return {
        "KFAC": applied(kronecker_ggn(source, PRIOR), dtype),
        "KFAC reduce": applied(kronecker_ggn(source, PRIOR, reduce=True), dtype),
        "diagonal": applied(diagonal_ggn(source, PRIOR), dtype),
        "primal": applied(exact_ggn(source, p, PRIOR), dtype),
        "dual": applied(exact_ggn(source, p - 1, PRIOR), dtype),
        "in a basis": reduced_ggn(source, basis),
        "in a subset": reduced_ggn(source, subset),
    }


def assert_same_curvatures(one, other, tolerance):
    found, expected = curvatures(one), curvatures(replace(other, linearization=one.linearization))
    for name, matrix in expected.items():
        assert matrix.abs().max() > 0
        assert close(found[name], matrix, tolerance), name


# Curvature with weights -----------------------------------------------------------------------------------------------

MANY_NETWORKS = ["paper-cnn", "embedding", "attention", "tied-weights"]


@pytest.mark.parametrize("name", MANY_NETWORKS)
def test_an_input_of_weight_two_counts_like_the_input_given_twice(name):
    model, inputs, targets = problem(name=name)
    assert_same_curvatures(
        stream(model, weighted(inputs, targets, counts().double()), Categorical()),
        stream(model, repeated(inputs, targets, counts()), Categorical()),
        1e-10,
    )


EXACT_AND_QUICK = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 0.0), (torch.float32, 1e-8)])


@EXACT_AND_QUICK
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_repetitions_under_every_likelihood_and_tolerance(kind, tolerance, dtype):
    model, inputs, targets = problem(kind, dtype=dtype)
    likelihood = likelihood_of(kind, 2)
    assert_same_curvatures(
        stream(model, weighted(inputs, targets, counts().to(dtype)), likelihood, tolerance),
        stream(model, repeated(inputs, targets, counts()), likelihood, tolerance),
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize(("name", "kind"), [*(("mlp", kind) for kind in KINDS), ("embedding", "classification")])
def test_weights_that_are_no_integers_equal_brute_force(name, kind):
    model, inputs, targets = problem(kind, name)
    outputs = dense_outputs(model, inputs)
    C = outputs.shape[1]
    likelihood = likelihood_of(kind, C)
    weights = torch.rand(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3
    hessians = {"classification": softmax_hessians, "binary": sigmoid_hessians}.get(
        kind, lambda f: torch.diag(likelihood.variances(f) ** -1).expand(len(f), C, C)
    )(outputs)
    ggn = dense_ggn(model, inputs, weights[:, None, None] * hessians)
    source = stream(model, weighted(inputs, targets, weights), likelihood)
    found, V = curvatures(source), probes(source.linearization.layout)
    assert close(found["primal"], V @ ggn, 1e-10)
    assert close(found["dual"], V @ ggn, 1e-10)
    assert close(found["diagonal"], V * ggn.diagonal(), 1e-10)
    scales = torch.tensor(likelihood.curvature_scales, dtype=torch.float64)
    assert close(torch.tensordot(scales, found["in a basis"], dims=1), V @ ggn @ V.T, 1e-10)


@pytest.mark.parametrize("reduce", [False, True], ids=["expand", "reduce"])
@pytest.mark.parametrize("name", ["paper-cnn", "embedding"])
def test_a_common_factor_of_the_weights_is_one_of_the_curvature(name, reduce):
    model, inputs, targets = problem(name=name)
    weights = torch.rand(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3
    one, other = (
        kronecker_ggn(stream(model, weighted(inputs, targets, factor * weights), Categorical()), PRIOR, reduce)
        for factor in (1.0, 2.5)
    )
    for parameter in one.layout.names:
        assert close(dense_block(other, parameter), 2.5 * dense_block(one, parameter), 1e-10), parameter
        # The input factors are means: only the ratios of the weights count.
        assert close(other.parts[parameter].input_values, one.parts[parameter].input_values, 1e-10), parameter


@EXACT_AND_QUICK
@pytest.mark.parametrize("kind", ["binary", "a noise each"])
def test_batches_with_and_without_weights_may_be_mixed(kind, tolerance, dtype):
    model, inputs, targets = problem(kind, dtype=dtype)
    likelihood = likelihood_of(kind, 2)
    times = torch.cat([torch.ones(4), counts()[4:8], torch.ones(4)]).long()
    batches = weighted(inputs, targets, times.to(dtype), size=4)
    mixed = [batch[:2] if i in (0, 2) else batch for i, batch in enumerate(batches)]
    assert_same_curvatures(
        stream(model, mixed, likelihood, tolerance),
        stream(model, repeated(inputs, targets, times), likelihood, tolerance),
        TOLERANCE[dtype],
    )


def confident(dtype, outputs=6, n=120):
    """A network most of whose answers are certain, and its inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).to(dtype)
    with torch.no_grad():
        model[2].weight *= 300
    return model, torch.randn(n, 4, dtype=dtype)


@pytest.mark.parametrize(("kind", "dtype"), [("classification", torch.float32), ("binary", torch.float64)])
def test_weights_are_repetitions_where_most_directions_are_dropped(kind, dtype):
    model, inputs = confident(dtype)
    targets = torch.arange(120) % 6 if kind == "classification" else (torch.arange(720) % 5 == 0).long().view(120, 6)
    likelihood = likelihood_of(kind, 6)
    batches = weighted(inputs, targets, counts(120).to(dtype), size=40)
    quick, exact = stream(model, batches, likelihood, 1e-8), stream(model, batches, likelihood)
    assert_same_curvatures(quick, stream(model, repeated(inputs, targets, counts(120), 40), likelihood, 1e-8), 1e-4)
    found, expected = curvatures(quick), curvatures(exact)
    for name, matrix in expected.items():
        assert close(found[name], matrix, 1e-4), name
    # `quick` has been run through three times, `exact` once.
    assert quick.linearization.passes / 3 < 0.8 * exact.linearization.passes


def test_weights_in_a_mapping_are_those_of_a_triple():
    model, inputs, targets = problem(name="keyword-inputs")
    weights = counts().double()
    triples = weighted(inputs, targets, weights, size=4)
    mappings = [{**x, "labels": y, "sample_weight": w} for x, y, w in triples]
    mixed = [mappings[0], triples[1], mappings[2]]
    expected = curvatures(stream(model, triples, Categorical()))
    for batches in (mappings, mixed):
        found = curvatures(stream(model, batches, Categorical()))
        for name, matrix in expected.items():
            assert torch.equal(found[name], matrix), name
    plain = [{key: value for key, value in batch.items() if key != "sample_weight"} for batch in mappings]
    assert not close(curvatures(stream(model, plain, Categorical()))["primal"], expected["primal"], 0.1)
    la = SubspaceLaplace.paper(model, "classification", dim=3).fit(mappings)
    assert torch.equal(la(mappings), la(triples))
    assert torch.allclose(la(mappings), la(inputs))


# The posterior with weights -------------------------------------------------------------------------------------------


def options_of(kind, num_outputs=2, estimated=False):
    if kind in ("classification", "binary"):
        return {"likelihood": kind}
    if estimated:
        return {"likelihood": Gaussian({"one noise": None, "a noise each": "per-output"}[kind])}
    return {"likelihood": likelihood_of(kind, num_outputs)}


def assert_same_posterior(one, other, inputs, tolerance):
    if other.noise_std is not None:
        assert one.noise_std == pytest.approx(other.noise_std, rel=tolerance)
    assert one.prior_precision == pytest.approx(other.prior_precision, rel=1e-5)
    assert close(one.functional_covariance(inputs), other.functional_covariance(inputs), tolerance)
    evidence = float(other.log_marginal_likelihood())
    assert float(one.log_marginal_likelihood()) == pytest.approx(evidence, rel=tolerance)


WHOLE = [("lowrank-kfac", kind, torch.float32) for kind in KINDS]
WHOLE += [(name, "a noise each", torch.float64) for name in ("lowrank-kfac", "lowrank-ggn", "subset-diagonal")]
WHOLE += [("full", kind, torch.float64) for kind in KINDS]


@pytest.mark.parametrize(("projector", "kind", "dtype"), WHOLE)
def test_the_whole_posterior_is_that_of_repeated_inputs(projector, kind, dtype):
    model, inputs, targets = problem(kind, dtype=dtype)
    given = sized(projector, 4) | {"prior_precision": PRIOR}
    if projector.startswith("lowrank"):
        given["subspace_inputs"] = inputs
    options = options_of(kind, estimated=True) | given
    one = SubspaceLaplace.paper(model, **options).fit(weighted(inputs, targets, counts().to(dtype)))
    other = SubspaceLaplace.paper(model, **options).fit(repeated(inputs, targets, counts()))
    assert_same_posterior(one, other, inputs, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_the_evidence_with_weights_equals_brute_force(kind):
    model, inputs, targets = problem(kind)
    outputs, likelihood = dense_outputs(model, inputs), likelihood_of(kind, 2)
    weights = torch.rand(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3
    la = SubspaceLaplace.paper(model, likelihood, dim=5, prior_precision=PRIOR).fit(weighted(inputs, targets, weights))
    if kind == "classification":
        each, hessians = -F.cross_entropy(outputs, targets, reduction="none"), softmax_hessians(outputs)
    elif kind == "binary":
        each = -F.binary_cross_entropy_with_logits(outputs, targets.double(), reduction="none").sum(1)
        hessians = sigmoid_hessians(outputs)
    else:
        stds = torch.tensor(likelihood.stds, dtype=torch.float64).expand(2)
        each = torch.distributions.Normal(outputs, stds).log_prob(targets).sum(1)
        hessians = torch.diag(stds**-2).expand(12, 2, 2)
    ggn = dense_ggn(model, inputs, weights[:, None, None] * hessians)
    for prior in (1e-3, PRIOR, 50.0):
        expected = laplace_evidence((weights * each).sum(), ggn, model, prior, la.projection_matrix())
        assert float(la.log_marginal_likelihood(prior)) == pytest.approx(float(expected), rel=1e-9)
    precision = ggn + PRIOR * torch.eye(len(ggn), dtype=torch.float64)
    covariance = subspace_covariance(dense_jacobian(model, inputs), la.projection_matrix(), precision)
    assert close(la.functional_covariance(inputs, joint=True), covariance, 1e-8)


@pytest.mark.parametrize("kind", ["classification", "a noise each"])
def test_the_evidence_with_weights_is_that_of_repeated_inputs(kind):
    model, inputs, targets = problem(kind)
    options = options_of(kind) | {"dim": 4, "prior_precision": "evidence", "subspace_inputs": inputs}
    one = SubspaceLaplace.paper(model, **options).fit(weighted(inputs, targets, counts().double()))
    other = SubspaceLaplace.paper(model, **options).fit(repeated(inputs, targets, counts()))
    assert_same_posterior(one, other, inputs, 1e-5)
    plain = SubspaceLaplace.paper(model, **options).fit(loader(inputs, targets, 6))
    assert plain.prior_precision != pytest.approx(one.prior_precision, rel=1e-3)


@pytest.mark.parametrize("size", [1, 4, 12])
def test_estimated_noises_are_the_weighted_root_mean_squares_of_the_residuals(size):
    model, inputs, targets = problem("a noise each")
    residuals = targets - dense_outputs(model, inputs)
    weights = torch.rand(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3
    weights[4:8] = 0  # a whole batch of four
    variances = weights @ residuals.square() / weights.sum()
    batches = weighted(inputs, targets, weights, size)
    each = SubspaceLaplace.paper(model, Gaussian("per-output"), projector="subset-magnitude", dim=3).fit(batches)
    assert each.noise_std == pytest.approx(variances.sqrt().tolist(), rel=1e-10)
    pooled = SubspaceLaplace.paper(model, "regression", projector="subset-magnitude", dim=3).fit(batches)
    assert pooled.noise_std == pytest.approx(float(variances.mean().sqrt()), rel=1e-10)


def test_residuals_that_all_have_weight_zero_change_nothing():
    values = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    some, none = Residuals.of(values), Residuals.of(values + 3, torch.zeros(5))
    for joined in (some.joined(none), none.joined(some), Residuals.none(2).joined(none).joined(some)):
        for found, expected in zip(joined.sums, some.sums, strict=True):
            assert torch.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["classification", "binary", "a noise each"])
def test_validation_with_weights_is_that_of_repeated_inputs(kind):
    model, inputs, targets = problem(kind, n=36)
    with torch.no_grad():
        model[4].weight *= 30  # confident, so that λ matters
    la = SubspaceLaplace.paper(model, **options_of(kind), dim=20, prior_precision=PRIOR)
    la.fit(loader(inputs, targets, 36))
    _, new, _ = problem(kind, n=24, seed=7)
    outputs = dense_outputs(model, new)
    if kind == "classification":
        wanted, wrong = outputs.argmax(1), 1 - outputs.argmax(1)
    elif kind == "binary":
        wanted, wrong = (outputs > 0).long(), (outputs < 0).long()
    else:
        wanted, wrong = outputs + 0.05, outputs + 1
    first = torch.arange(24) < 12
    targets = torch.where(first if wanted.ndim == 1 else first[:, None], wanted, wrong)
    times = torch.where(first, 3, torch.arange(24) % 3 == 0)  # mostly those that the network has right

    def best(batches):
        other = la.with_prior(PRIOR)  # `la` keeps its λ
        return other.optimize_prior_precision("validation", val_loader=batches).prior_precision

    found = best(weighted(new, targets, times.double(), 8))
    assert found == pytest.approx(best(repeated(new, targets, times, 8)), rel=1e-12)
    assert found != pytest.approx(best(loader(new, targets, 8)), rel=1e-3)


def test_validation_data_of_which_nothing_counts_are_refused():
    model, inputs, targets = problem()
    la = SubspaceLaplace.paper(model, "classification", dim=3).fit(loader(inputs, targets))
    with pytest.raises(ValueError, match="nothing in it counts"):
        la.optimize_prior_precision("validation", val_loader=weighted(inputs, targets, torch.zeros(12)))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("classification", torch.float32), ("binary", torch.float64), ("a noise each", torch.float64)],
)
def test_an_update_with_weights_equals_one_with_repeated_inputs(kind, dtype):
    model, inputs, targets = problem(kind, dtype=dtype)
    options = options_of(kind, estimated=True) | {"dim": 4, "prior_precision": PRIOR}
    la = SubspaceLaplace.paper(model, **options).fit(loader(inputs, targets, 6))
    _, new, wanted = problem(kind, seed=3, dtype=dtype)
    one = la.updated(weighted(new, wanted, counts().to(dtype)))
    other = la.updated(repeated(new, wanted, counts()))
    assert_same_posterior(one, other, inputs, TOLERANCE[dtype])
    both = SubspaceLaplace.paper(model, **options | {"projector": same_basis(la)})
    both.fit(loader(inputs, targets, 6) + weighted(new, wanted, counts().to(dtype)))
    assert_same_posterior(one, both, inputs, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["binary", "a noise each"])
def test_swag_with_weights_is_that_of_batches_with_repeated_inputs(kind):
    model, inputs, targets = problem(kind)
    likelihood, linearization = likelihood_of(kind, 2), Linearization(model)

    def variances(batches):
        return swag_variances(linearization, batches, likelihood, snapshots=3, learning_rate=0.02)

    found = variances(weighted(inputs, targets, counts().double()))
    # The loss of a batch is the mean over what counts in it, so the batches must be the same.
    assert close(found, variances(repeated(inputs, targets, counts())), 1e-8)
    assert not close(found, variances(loader(inputs, targets, 6)), 1e-2)


def test_swag_is_finite_where_nothing_counts_in_a_batch():
    model, inputs, targets = problem()
    weights = counts().double()
    weights[4:8] = 0
    batches = weighted(inputs, targets, weights, size=4)
    found = swag_variances(Linearization(model), batches, Categorical(), snapshots=3)
    assert torch.isfinite(found).all() and found.max() > 0


# X′ -------------------------------------------------------------------------------------------------------------------


def drawn_inputs(model, likelihood, batches, size=None, seed=0):
    """X′ of a fit."""
    seen = []

    def projector(context):
        seen.append(context.subspace_jacobians.inputs)
        return PROJECTORS["subset-magnitude"](context)

    SubspaceLaplace.paper(model, likelihood, projector=projector, dim=2, subspace_inputs=Drawn(size), seed=seed).fit(
        batches
    )
    return seen[0]


def rows(inputs):
    return {tuple(row) for row in inputs.tolist()}


def ignoring(kind):
    """Batches of which some inputs do not count, the likelihood, and the inputs that do."""
    model, inputs, targets = problem("binary" if kind == "missing answers" else "classification", n=40)
    counted = counts(40) > 0
    if kind == "weights":
        return model, Categorical(), weighted(inputs, targets, counts(40).double()), inputs[counted]
    targets[~counted] = -100
    if kind == "missing answers":
        targets[counted.nonzero()[::2], 0] = -100  # partly missing: these count
        return model, Bernoulli(-100), loader(inputs, targets, 7), inputs[counted]
    return model, Categorical(-100), loader(inputs, targets, 7), inputs[counted]


@pytest.mark.parametrize("kind", ["weights", "ignored labels", "missing answers"])
def test_subspace_inputs_are_drawn_only_from_inputs_that_count(kind):
    model, likelihood, batches, counting = ignoring(kind)
    assert rows(drawn_inputs(model, likelihood, batches)) == rows(counting)
    seen = set()
    for seed in range(6):
        drawn = drawn_inputs(model, likelihood, batches, size=8, seed=seed)
        assert len(rows(drawn)) == 8
        seen |= rows(drawn)
    assert seen <= rows(counting)
    assert len(seen) > 0.6 * len(rows(counting))  # any of them may be drawn


@pytest.mark.parametrize("kind", ["weights", "ignored labels"])
def test_a_fit_of_which_nothing_counts_is_refused(kind):
    model, inputs, targets = problem()
    if kind == "weights":
        la, batches = SubspaceLaplace.paper(model, "classification"), weighted(inputs, targets, torch.zeros(12))
    else:
        la = SubspaceLaplace.paper(model, Categorical(ignore_index=-100))
        batches = loader(inputs, torch.full((12,), -100))
    with pytest.raises(ValueError, match="No training input counts"):
        la.fit(batches)


@pytest.mark.parametrize("given", [True, False], ids=["inputs given", "full"])
def test_a_fit_of_which_nothing_counts_is_refused_where_no_input_is_drawn(given):
    model, inputs, targets = problem()
    own = {"dim": 3, "subspace_inputs": inputs} if given else {"projector": "full", "prior_precision": "evidence"}
    la = SubspaceLaplace.paper(model, "classification", **own)
    with pytest.raises(ValueError, match="No training input counts"):
        la.fit(weighted(inputs, targets, torch.zeros(12)))


# Bad weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(12).long(), r"floating-point sample weights of shape \(12,\).*torch.int64.*pairs"),
        (torch.ones(12, 1), r"sample weights of shape \(12,\), one per input; it is \(12, 1\)"),
        (torch.ones(11), r"it is \(11,\)"),
        ([1.0] * 12, "it is list"),
        (-torch.ones(12), "finite and not negative"),
        (torch.full((12,), float("nan")), "finite and not negative"),
        (torch.full((12,), float("inf")), "finite and not negative"),
    ],
    ids=["integers", "a column", "too few", "a list", "negative", "nan", "infinite"],
)
@pytest.mark.parametrize("form", ["triple", "mapping"])
def test_what_cannot_be_weights_is_refused(form, weights, message):
    name = "keyword-inputs" if form == "mapping" else "mlp"
    model, inputs, targets = problem(name=name)
    batch = (inputs, targets, weights)
    if form == "mapping":
        batch = {**inputs, "labels": targets, "sample_weight": weights}
    with pytest.raises(ValueError, match=message):
        SubspaceLaplace.paper(model, "classification", dim=3).fit([batch])


# Labels that do not count ---------------------------------------------------------------------------------------------


@EXACT_AND_QUICK
@pytest.mark.parametrize("kind", ["classification", "binary"])
def test_ignored_labels_are_inputs_left_out(kind, tolerance, dtype):
    model, inputs, targets = problem(kind, dtype=dtype)
    kept = repeated(inputs, targets, (counts() > 0).long())
    plain = likelihood_of(kind, 2)
    ignoring = type(plain)(ignore_index=-100)
    some = targets.clone()
    some[counts() == 0] = -100
    assert_same_curvatures(
        stream(model, loader(inputs, some, 6), ignoring, tolerance),
        stream(model, kept, plain, tolerance),
        TOLERANCE[dtype],
    )
    options = {"dim": 4, "prior_precision": PRIOR}
    one = SubspaceLaplace.paper(model, ignoring, **options).fit(loader(inputs, some, 6))
    assert_same_posterior(one, SubspaceLaplace.paper(model, plain, **options).fit(kept), inputs, TOLERANCE[dtype])


@EXACT_AND_QUICK
def test_ignored_labels_and_weights_go_together(tolerance, dtype):
    model, inputs, targets = problem(dtype=dtype)
    some, times = targets.clone(), counts()
    some[3:6] = -1
    left = times.clone()
    left[3:6] = 0
    batches = weighted(inputs, some, times.to(dtype), size=4)
    batches[2] = batches[2][:2]  # the last batch without weights
    left[8:] = 1
    assert_same_curvatures(
        stream(model, batches, Categorical(ignore_index=-1), tolerance),
        stream(model, repeated(inputs, targets, left), Categorical(), tolerance),
        TOLERANCE[dtype],
    )


def missing_answers(outputs=3, n=12, dtype=torch.float64):
    """A network with answers of which some are missing: output by output, and all of three inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)
    with torch.no_grad():
        model[2].weight *= 4
    inputs = torch.randn(n, 3, dtype=dtype)
    targets = torch.randint(0, 2, (n, outputs))
    targets[torch.rand(n, outputs) < 0.4] = -1
    targets[:3] = -1
    return model, inputs, targets


def assert_missing_answers_are_left_out(dtype, tolerance):
    model, inputs, targets = missing_answers(dtype=dtype)
    known = targets != -1
    assert 0 < known[3:].double().mean() < 1
    hessians = sigmoid_hessians(dense_outputs(model, inputs)) * known[:, :, None]
    source = stream(model, loader(inputs, targets, 6), Bernoulli(ignore_index=-1), tolerance)
    found, ggn = curvatures(source), dense_ggn(model, inputs, hessians)
    V = probes(source.linearization.layout, dtype).double()
    assert close(found["primal"], V @ ggn, TOLERANCE[dtype])
    assert close(found["dual"], V @ ggn, TOLERANCE[dtype])
    assert close(found["diagonal"], V * ggn.diagonal(), TOLERANCE[dtype])
    assert close(found["in a basis"][0], V @ ggn @ V.T, TOLERANCE[dtype])
    # An input counts once in the input factors, if any of its answers is known.
    counting = known.any(1)
    blocks = brute_force_kfac(model.double(), inputs[counting].double(), hessians[counting])
    assert close(found["KFAC"], V @ torch.block_diag(*blocks.values()), TOLERANCE[dtype])


@EVERY_DTYPE
def test_missing_answers_are_left_out_output_by_output(dtype):
    assert_missing_answers_are_left_out(dtype, tolerance=0.0)


@EVERY_DTYPE
def test_missing_answers_are_left_out_where_directions_may_be_dropped(dtype):
    assert_missing_answers_are_left_out(dtype, tolerance=1e-8)


@pytest.mark.parametrize(
    ("direction_tolerance", "dtype"),
    [(None, torch.float64), (None, torch.float32), (0.0, torch.float32)],
)
def test_the_posterior_and_evidence_with_missing_answers_equal_brute_force(direction_tolerance, dtype):
    model, inputs, targets = missing_answers(dtype=dtype)
    la = SubspaceLaplace.paper(
        model, Bernoulli(-1), dim=5, prior_precision=PRIOR, resources=Resources(direction_tolerance=direction_tolerance)
    ).fit(loader(inputs, targets, 6))
    outputs, known, P = dense_outputs(model, inputs), targets != -1, la.projection_matrix().double()
    each = F.logsigmoid(torch.where(targets == 1, outputs, -outputs))
    ggn = dense_ggn(model, inputs, sigmoid_hessians(outputs) * known[:, :, None])
    precision = ggn + PRIOR * torch.eye(len(ggn), dtype=torch.float64)
    covariance = subspace_covariance(dense_jacobian(model, inputs), P, precision)
    assert close(la.functional_covariance(inputs, joint=True), covariance, TOLERANCE[dtype])
    expected = laplace_evidence(each[known].sum(), ggn, model, PRIOR, P)
    relative = {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]
    assert float(la.log_marginal_likelihood()) == pytest.approx(float(expected), rel=relative)


@pytest.mark.parametrize("targets_as", [torch.Tensor.long, torch.Tensor.double])
def test_ignored_targets_add_nothing_to_any_likelihood(targets_as):
    outputs = 3 * torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covariance = torch.eye(3, dtype=torch.float64).expand(6, 3, 3)
    answers = torch.tensor([[0, 1, 1]] * 6)
    answers[1, 2] = answers[4, 0] = -100
    answers[5] = -100
    known = (answers != -100).double()
    likelihood, answers_given = Bernoulli(ignore_index=-100), targets_as(answers)
    likelihood.check_targets(outputs, answers_given)
    assert likelihood.counted(answers_given).tolist() == known.bool().tolist()
    each = F.logsigmoid(torch.where(answers == 1, outputs, -outputs))
    assert torch.allclose(likelihood.log_density(outputs, answers_given), (each * known).sum(1), rtol=1e-12)
    predictive = F.logsigmoid(torch.where(answers == 1, outputs, -outputs) / (1 + torch.pi / 8) ** 0.5)
    found = likelihood.log_predictive(outputs, covariance, answers_given)
    assert torch.allclose(found, (predictive * known).sum(1), rtol=1e-12)
    assert found[5] == 0
    with pytest.raises(ValueError, match="must be 0 or 1, but there is -1"):
        likelihood.check_targets(outputs, answers_given + 99 * (answers == -100))


def test_ignored_classes_add_nothing_to_any_likelihood():
    outputs = 3 * torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covariance = torch.eye(3, dtype=torch.float64).expand(6, 3, 3)
    targets = torch.tensor([0, -100, 2, 1, -100, 2])
    known, likelihood = targets != -100, Categorical(ignore_index=-100)
    likelihood.check_targets(outputs, targets)
    assert likelihood.counted(targets)[:, 0].tolist() == known.tolist()
    for member in ("log_density", "log_predictive"):
        arguments = (outputs,) if member == "log_density" else (outputs, covariance)
        found = getattr(likelihood, member)(*arguments, targets)
        plain = getattr(Categorical(), member)(*(value[known] for value in arguments), targets[known])
        assert torch.allclose(found[known], plain, rtol=1e-12)
        assert not found[~known].any()
    loss = F.cross_entropy(outputs, targets, ignore_index=-100, reduction="none")
    assert torch.allclose(likelihood.training_losses(outputs, targets), loss, rtol=1e-12)


def test_ignored_labels_of_certain_outputs_add_nothing_to_the_log_predictive():
    outputs = torch.tensor([[0.0, 2000.0], [1.0, 0.0]], dtype=torch.float64)
    covariance = torch.zeros(2, 2, 2, dtype=torch.float64)
    found = Categorical(ignore_index=-100).log_predictive(outputs, covariance, torch.tensor([-100, 0]))
    assert found[0] == 0
    assert torch.isfinite(found[1])


@pytest.mark.parametrize(
    ("likelihood", "label"), [(Categorical(), -100), (Categorical(-100), -1), (Categorical(-100), 2)]
)
def test_labels_that_are_neither_a_class_nor_ignored_are_refused(likelihood, label):
    model, inputs, targets = problem()
    targets[3] = label
    with pytest.raises(ValueError, match=r"Labels must lie in 0 … 1, but they range from"):
        SubspaceLaplace.paper(model, likelihood, dim=3).fit(loader(inputs, targets))


def test_without_an_ignored_label_the_error_says_how_to_have_one():
    with pytest.raises(ValueError, match="ignore_index"):
        Categorical().check_targets(torch.zeros(2, 3), torch.tensor([0, -100]))


def test_validation_and_swag_leave_ignored_labels_out():
    model, inputs, targets = problem()
    with torch.no_grad():
        model[4].weight *= 30
    some, times = targets.clone(), (counts() > 0).long()
    some[times == 0] = -100
    batches, kept = loader(inputs, some, 6), repeated(inputs, targets, times)
    la = SubspaceLaplace.paper(model, Categorical(-100), dim=8).fit(batches)
    one, two, plain = (la.tuned(2 * data).prior_precision for data in (batches, kept, loader(inputs, targets, 6)))
    assert one == pytest.approx(two, rel=1e-9)
    assert one != pytest.approx(plain, rel=1e-3)
    linearization = Linearization(model)
    one, two, plain = (
        swag_variances(linearization, data, Categorical(-100), snapshots=3)
        for data in (batches, kept, loader(inputs, targets, 6))
    )
    assert close(one, two, 1e-8)
    assert not close(one, plain, 1e-2)


def test_ignoring_a_label_that_does_not_occur_changes_nothing():
    model, inputs, targets = problem(n=9)
    plain = SubspaceLaplace.paper(model, Categorical(), dim=4).fit(loader(inputs, targets))
    ignoring = SubspaceLaplace.paper(model, Categorical(-100), dim=4).fit(loader(inputs, targets))
    assert close(ignoring(inputs), plain(inputs), 1e-12)
    assert num_inputs(inputs) == 9 and "N=9" in repr(ignoring)


def test_a_loaded_classification_knows_which_labels_do_not_count(tmp_path):
    model, inputs, targets = problem()
    targets[5] = -100
    la = SubspaceLaplace.paper(model, Categorical(-100), dim=4).fit(loader(inputs, targets))
    la.save(tmp_path / "la.safetensors")
    loaded = SubspaceLaplace.load(tmp_path / "la.safetensors", model)
    assert torch.equal(loaded(inputs), la(inputs))
    more = loader(inputs, targets)
    assert torch.equal(loaded.updated(more)(inputs), la.updated(more)(inputs))
