"""Bounds between which the full Laplace approximation lies, against brute force on every network."""

import copy

import pytest
import torch
from dense_reference import dense_outputs, full_covariance, pairwise_probabilities
from networks import make, pairs
from test_complement import KINDS, PRIOR, Problem, close
from test_laplace import labels, loader

from sublaplace import (
    Bernoulli,
    Captured,
    Categorical,
    Complement,
    Drawn,
    Gaussian,
    Perturbed,
    Resources,
    SubspaceLaplace,
    low_rank,
)
from sublaplace.data.subspace_inputs import perturbed
from sublaplace.model.likelihoods.links import pairwise_interval, probit, probit_interval, sigmoid_interval


def blocks(joint, count):
    """The (C, C) blocks of a joint covariance."""
    C = len(joint) // count
    return torch.stack([joint[i * C : (i + 1) * C, i * C : (i + 1) * C] for i in range(count)])


def least_eigenvalue(matrices):
    return float(torch.linalg.eigvalsh(matrices).min())


@pytest.mark.parametrize(("name", "kind"), pairs(KINDS))
def test_the_full_covariance_lies_between_the_bounds(name, kind):
    problem = Problem(name, kind)
    la = problem.fit(dim=8)
    full = blocks(full_covariance(problem.jacobian, problem.precision), 4)
    trace = float(full.diagonal(dim1=1, dim2=2).sum(1).max())
    lower, upper = la.bounds(problem.new)
    assert least_eigenvalue(full - lower) >= -1e-9 * trace
    assert least_eigenvalue(upper - full) >= -1e-9 * trace
    assert close(lower, la.functional_covariance(problem.new))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "transformer"])
def test_the_upper_bound_is_that_of_the_formula_and_tightens_with_the_dimension(name, kind):
    problem = Problem(name, kind)
    la = problem.fit(dim=8)
    last, matrix = None, la.projection_matrix()
    for dim in range(1, la.dim + 1):
        bounds = la.truncated(dim).bounds(problem.new)
        lower, upper = bounds
        Q = matrix[:, :dim]
        Y = problem.ggn @ Q
        nystroem = Y @ torch.linalg.pinv(Q.T @ Y) @ Y.T + PRIOR * torch.eye(len(Q)).double()
        expected = blocks(full_covariance(problem.jacobian, nystroem), 4)
        assert close(upper, expected, 1e-7)
        if last is not None:
            scale = float(last.upper.diagonal(dim1=1, dim2=2).sum())
            assert least_eigenvalue(lower - last.lower) >= -1e-9 * scale
            assert least_eigenvalue(last.upper - upper) >= -1e-9 * scale
        last = bounds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "lstm"])
def test_the_captured_share_is_guaranteed_and_grows(name, kind):
    problem = Problem(name, kind)
    la = problem.fit(dim=8, certify=True)
    shares = la.captured_share(problem.new)
    full = float(full_covariance(problem.jacobian, problem.precision).trace())
    true_shares = la.leading_traces(problem.new) / full
    assert shares.shape == (la.dim,)
    assert (shares > 0).all() and (shares <= true_shares * (1 + 1e-9)).all()
    assert (shares[1:] >= shares[:-1]).all()
    upper = la.bounds(problem.new).upper.diagonal(dim1=1, dim2=2).sum()
    assert torch.allclose(shares, la.leading_traces(problem.new) / upper, rtol=1e-9)


def test_inputs_without_any_gradient_leave_nothing_to_capture():
    """A linear model without a bias: at x = 0 no parameter has an influence."""
    model = torch.nn.Linear(3, 2, bias=False, dtype=torch.float64)
    x = torch.randn(20, 3, dtype=torch.float64)
    la = SubspaceLaplace.paper(model, Gaussian(0.5), dim=2).fit([(x, x[:, :2])])
    zeros = torch.zeros(4, 3, dtype=torch.float64)
    assert float(la.bounds(zeros).upper.abs().max()) == 0
    assert torch.equal(la.captured_share(zeros), torch.ones(2, dtype=torch.float64))
    assert float(la.captured_share(torch.cat([zeros, x]))[-1]) < 1


def test_where_the_subspace_holds_all_of_the_curvature_both_bounds_are_the_full_covariance():
    """With span Q ⊇ span GGN and the directions of J, nothing is left open."""
    problem = Problem("mlp", "classification")
    p = len(problem.ggn)
    la = problem.fit(projector="subset-magnitude", dim=p)
    full = blocks(full_covariance(problem.jacobian, problem.precision), 4)
    lower, upper = la.bounds(problem.new)
    assert close(lower, full)
    assert close(upper, full, 1e-6)
    assert float(la.captured_share(problem.new)[-1]) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_certificate_made_later_equals_one_made_with_the_fit(kind):
    problem = Problem("paper-cnn", kind)
    late, early = problem.fit(), problem.fit(certify=True)
    for found, expected in zip(late.bounds(problem.new), early.bounds(problem.new), strict=True):
        assert close(found, expected, 1e-12)
    assert torch.allclose(late.captured_share(problem.new), early.captured_share(problem.new), rtol=1e-12)


def test_nothing_is_dropped_for_a_certificate():
    """With a tolerance of a half the posterior sees too little curvature; its bounds must not."""
    problem = Problem("paper-cnn", "classification")
    full = blocks(full_covariance(problem.jacobian, problem.precision), 4)
    trace = float(full.diagonal(dim1=1, dim2=2).sum(1).max())
    resources = Resources(direction_tolerance=0.5)
    for certify in (True, False):
        la = problem.fit(resources=resources, dim=8, certify=certify)
        assert least_eigenvalue(full - la.bounds(problem.new).lower) >= -1e-9 * trace
        assert least_eigenvalue(la.bounds(problem.new).upper - full) >= -1e-9 * trace
    dropped = problem.fit(resources=resources, dim=8).functional_covariance(problem.new)
    assert least_eigenvalue(full - dropped) < -1e-6 * trace, "the test needs a tolerance that does harm"


@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "transformer"])
def test_float32_bounds_hold_to_four_digits(name):
    exact, rough = Problem(name, "classification"), Problem(name, "classification", torch.float32)
    full = blocks(full_covariance(exact.jacobian, exact.precision), 4)
    trace = float(full.diagonal(dim1=1, dim2=2).sum(1).max())
    lower, upper = rough.fit(dim=8).bounds(rough.new)
    assert lower.dtype == upper.dtype == torch.float32
    assert least_eigenvalue(full - lower.double()) >= -1e-4 * trace
    assert least_eigenvalue(upper.double() - full) >= -1e-4 * trace


def test_bounds_follow_another_prior_and_tuned_noise():
    problem = Problem("mlp", "regression")
    la = problem.fit(certify=True)
    other = la.with_prior(3.0)
    precision = problem.ggn + 3.0 * torch.eye(len(problem.ggn)).double()
    full = blocks(full_covariance(problem.jacobian, precision), 4)
    lower, upper = other.bounds(problem.new)
    trace = float(full.diagonal(dim1=1, dim2=2).sum(1).max())
    assert least_eigenvalue(full - lower) >= -1e-9 * trace
    assert least_eigenvalue(upper - full) >= -1e-9 * trace
    la.optimize_prior_precision(tune_noise=True)
    late = SubspaceLaplace.paper(
        problem.model,
        Gaussian(la.noise_std),
        projector=lambda _: la._subspace().projection,
        dim=5,
        prior_precision=la.prior_precision,
    ).fit(problem.batches)
    for found, expected in zip(la.bounds(problem.new), late.bounds(problem.new), strict=True):
        assert close(found, expected)


def test_bounds_after_an_update_are_those_of_all_data():
    problem = Problem("mlp", "classification")
    half = len(problem.batches) // 2
    for certified in (True, False):
        first = SubspaceLaplace.paper(problem.model, "classification", dim=5, prior_precision=PRIOR).fit(
            problem.batches[:half], certify=certified
        )
        updated = first.updated(problem.batches[half:])
        P = first._subspace().projection
        whole = problem.fit(projector=lambda _, P=P: P)
        for found, expected in zip(updated.bounds(problem.new), whole.bounds(problem.new), strict=True):
            assert close(found, expected)


def test_a_certificate_is_saved_where_there_is_one(tmp_path):
    problem = Problem("mlp", "classification")
    la = problem.fit(certify=True)
    la.save(tmp_path / "with")
    loaded = SubspaceLaplace.load(tmp_path / "with", problem.model)
    for found, expected in zip(loaded.bounds(problem.new), la.bounds(problem.new), strict=True):
        assert torch.equal(found, expected)
    problem.fit().save(tmp_path / "without")
    with pytest.raises(RuntimeError, match="certify=True before saving"):
        SubspaceLaplace.load(tmp_path / "without", problem.model).bounds(problem.new)
    late = SubspaceLaplace.load(tmp_path / "without", problem.model).bounds(problem.new, problem.batches)
    for found, expected in zip(late, la.bounds(problem.new), strict=True):
        assert close(found, expected, 1e-12)


def test_bounds_are_a_pair_with_names():
    problem = Problem("mlp", "regression")
    bounds = problem.fit().bounds(problem.new)
    lower, upper = bounds
    assert lower is bounds.lower and upper is bounds.upper
    assert bounds.probabilities is None


# Probabilities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("link", "reference"), [("pairwise", pairwise_probabilities), ("probit", probit)])
def test_the_probability_of_the_full_approximation_lies_in_its_interval(link, reference):
    problem = Problem("paper-cnn", "classification")
    bounds = problem.fit(dim=8, likelihood=Categorical(link=link)).bounds(problem.new)
    full = blocks(full_covariance(problem.jacobian, problem.precision), 4)
    probabilities = reference(dense_outputs(problem.model, problem.new), full.diagonal(dim1=1, dim2=2))
    lower, upper = bounds.probabilities
    assert (lower <= probabilities + 1e-12).all() and (probabilities <= upper + 1e-12).all()
    assert (upper > lower).all()


@pytest.mark.parametrize("interval", [probit_interval, sigmoid_interval])
def test_the_ends_of_an_interval_are_the_extremes_of_the_corners(interval):
    generator = torch.Generator().manual_seed(0)
    outputs = 3 * torch.randn(6, 3, generator=generator).double()
    lower = torch.rand(6, 3, generator=generator).double()
    upper = lower + 5 * torch.rand(6, 3, generator=generator).double()
    tried = []
    for corner in range(2**3):
        chosen = torch.tensor([(corner >> k) & 1 for k in range(3)], dtype=torch.bool)
        variance = torch.where(chosen, upper, lower)
        scaled = outputs / (1 + torch.pi / 8 * variance).sqrt()
        tried.append(scaled.softmax(1) if interval is probit_interval else scaled.sigmoid())
    found = interval(outputs, lower, upper)
    assert torch.allclose(found.lower, torch.stack(tried).amin(0))
    assert torch.allclose(found.upper, torch.stack(tried).amax(0))


def test_pairwise_probabilities_lie_in_their_interval_at_every_variance_inside():
    generator = torch.Generator().manual_seed(0)
    outputs = 3 * torch.randn(6, 3, generator=generator).double()
    lower = torch.rand(6, 3, generator=generator).double()
    upper = lower + 5 * torch.rand(6, 3, generator=generator).double()
    found = pairwise_interval(outputs, lower, upper)
    assert (found.upper < 1).all() and (found.lower > 0).all()
    for _ in range(200):
        variance = lower + (upper - lower) * torch.rand(6, 3, generator=generator).double().round(decimals=1)
        probabilities = pairwise_probabilities(outputs, variance)
        assert (found.lower <= probabilities + 1e-12).all() and (probabilities <= found.upper + 1e-12).all()
    many = torch.randn(2, 1001, generator=generator).double()
    ends = pairwise_interval(many, many.square(), 2 * many.square())
    assert all(map(torch.equal, ends, probit_interval(many, many.square(), 2 * many.square())))


def test_yes_no_outputs_have_intervals_as_well():
    model, inputs = make("mlp", 10)
    answers = (dense_outputs(model, inputs) > 0).double()
    la = SubspaceLaplace.paper(model, Bernoulli(), dim=4).fit(loader(inputs, answers, 5))
    lower, upper = la.bounds(inputs).probabilities
    found = la(inputs)
    assert (lower <= found + 1e-12).all() and (found <= upper + 1e-12).all()


# The dimension that chooses itself ------------------------------------------------------------------------------------


def problem_with_a_share():
    model, inputs = make("mlp", 60)
    return model, inputs, loader(inputs, labels(model, inputs), 20)


@pytest.mark.parametrize("target", [0.2, 0.5, 0.8])
def test_the_smallest_dimension_is_taken_that_guarantees_the_share_on_held_back_inputs(target):
    model, inputs, batches = problem_with_a_share()
    la = SubspaceLaplace.paper(
        model, "classification", dim=Captured(target, at_most=30), prior_precision=PRIOR, subspace_inputs=inputs
    ).fit(batches)
    held_back, kept = inputs[48:], inputs[:48]
    whole = SubspaceLaplace.paper(model, "classification", dim=30, prior_precision=PRIOR, subspace_inputs=kept).fit(
        batches
    )
    shares = whole.captured_share(held_back)
    expected = int((shares < target).sum()) + 1
    assert 1 <= expected < whole.dim, "the test needs a share that is reached, but not at once"
    assert la.dim == expected
    assert torch.allclose(la.functional_covariance(inputs), whole.truncated(expected).functional_covariance(inputs))
    # What was guaranteed when it chose still is: the upper bound is that of all dimensions that were tried.
    assert (
        float(la.captured_share(held_back)[-1]) == pytest.approx(float(shares[expected - 1]))
        and shares[expected - 1] >= target
    )
    assert torch.allclose(la.bounds(inputs).upper, whole.bounds(inputs).upper)


def test_a_share_that_is_not_reached_is_warned_about():
    model, _, batches = problem_with_a_share()
    la = SubspaceLaplace.paper(model, "classification", dim=Captured(0.99, at_most=3), prior_precision=0.01)
    with pytest.warns(UserWarning, match=r"99%.*3 dimensions guarantee \d+%.*at_most"):
        la.fit(batches)
    assert la.dim == 3


def test_a_captured_share_works_with_a_complement():
    model, inputs, batches = problem_with_a_share()
    la = SubspaceLaplace(
        model, "classification", dim=Captured(0.3, at_most=20), complement=Complement("kfac", weight=1.0)
    ).fit(batches)
    assert 0 < la.dim <= 20
    assert la.functional_variance(inputs).min() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": "automatic"}, r"integer or Captured\("),
        ({"dim": 0.5}, r"integer or Captured\("),
        ({"dim": Captured(0.5), "projector": "subset-magnitude"}, "low-rank"),
        ({"dim": Captured(0.5), "projector": "last-layer"}, "dim has no effect.*last-layer"),
        ({"dim": Captured(0.5), "projector": "full"}, "dim has no effect.*full"),
        ({"subspace_inputs": "noisy"}, "Unknown subspace_inputs 'noisy'"),
        ({"subspace_inputs": Perturbed(-1.0)}, "scale must be positive"),
        ({"subspace_inputs": Perturbed(0.0)}, "scale must be positive"),
        ({"subspace_inputs": Perturbed(0.1, count=0)}, "count must be a positive integer"),
        ({"subspace_inputs": Drawn(0)}, "count must be a positive integer"),
    ],
)
def test_bad_settings_are_refused(options, message):
    model, _ = make("mlp", 3)
    with pytest.raises((ValueError, TypeError), match=message):
        SubspaceLaplace.paper(model, "classification", **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0,), "share.*between 0 and 1"),
        ((0,), "share must be positive"),
        ((-0.5,), "share must be positive"),
        ((float("nan"),), "share must be positive"),
        (("half",), "share must be one positive number"),
        ((0.5, 0), "at_most must be a positive integer"),
        ((0.5, 2.5), "at_most must be a positive integer"),
    ],
)
def test_a_share_without_meaning_is_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Captured(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": "auto"}, r"dim=Captured\("),
        ({"captured": 0.5}, r"'captured'.*dim=Captured\("),
        ({"max_dim": 30}, r"'max_dim'.*dim=Captured\("),
        ({"certified": True}, r"'certified'.*fit\(train_loader, certify=True\)"),
        ({"subspace_inputs": "perturbed"}, r"Perturbed\("),
        ({"perturbation": 0.2}, r"'perturbation'.*subspace_inputs=Perturbed\("),
        ({"num_subspace_inputs": 20}, r"'num_subspace_inputs'.*subspace_inputs=Drawn\("),
    ],
)
def test_former_spellings_are_refused_with_the_new_ones(options, message):
    model, _ = make("mlp", 3)
    with pytest.raises((ValueError, TypeError), match=message):
        SubspaceLaplace.paper(model, "classification", **options)


# Perturbed inputs -----------------------------------------------------------------------------------------------------


def test_perturbed_inputs_are_training_inputs_with_noise_of_the_given_size():
    model, _, batches = problem_with_a_share()
    seen = []

    def watching(context):
        seen.append(context.subspace_jacobians.inputs)
        return low_rank(context.subspace_jacobians, context.kfac(), context.dim)

    for options in ({}, {"subspace_inputs": Perturbed(0.2)}):
        SubspaceLaplace.paper(model, "classification", projector=watching, dim=4, **options).fit(batches)
    plain, noisy = seen
    ratio = (noisy - plain) / plain.std(0, correction=0)
    assert plain.shape == noisy.shape
    assert float(ratio.std()) == pytest.approx(0.2, rel=0.2)
    assert abs(float(ratio.mean())) < 0.05


def test_perturbed_inputs_stay_in_the_flat_of_the_data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(50, 2, generator=generator) @ torch.randn(2, 5, generator=generator)
    noisy = perturbed(inputs, 0.3, 0)
    assert torch.linalg.matrix_rank(noisy - inputs, atol=1e-4) == 2
    assert float((noisy - inputs).std()) == pytest.approx(0.3 * float(inputs.std()), rel=0.2)


def test_integers_cannot_be_perturbed():
    model, inputs = make("embedding", 8)
    la = SubspaceLaplace.paper(model, "classification", dim=3, subspace_inputs=Perturbed())
    with pytest.raises(ValueError, match="integers cannot be perturbed"):
        la.fit(loader(inputs, labels(model, inputs), 4))


# Small λ and float32 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-3), (torch.float64, 1e-4)])
def test_bounds_hold_where_the_curvature_is_far_above_the_prior(dtype, most, prior):
    """A regression with little noise: eigenvalues of the GGN up to 1e9 λ, and a subspace of nearly all directions."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)
    model = torch.nn.Sequential(*layers).double()
    inputs = torch.randn(40, 4, generator=generator).double()
    targets = torch.randn(40, 2, generator=generator).double()
    full = SubspaceLaplace.paper(model, Gaussian(0.1), prior_precision=prior, projector="full").fit([(inputs, targets)])
    new = torch.randn(7, 4, generator=generator).double()
    covariance = full.functional_covariance(new)
    scale = covariance.diagonal(dim1=1, dim2=2).sum(1)[:, None]
    rough = copy.deepcopy(model).to(dtype)
    for dim in (20, 80):
        la = SubspaceLaplace.paper(rough, Gaussian(0.1), dim=dim, prior_precision=prior)
        la.fit([(inputs.to(dtype), targets.to(dtype))])
        lower, upper = la.bounds(new.to(dtype))
        assert (torch.linalg.eigvalsh(covariance - lower.double()) >= -most * scale).all()
        assert (torch.linalg.eigvalsh(upper.double() - covariance) >= -most * scale).all()
        share = float(la.captured_share(new.to(dtype))[-1])
        assert 0 < share <= float(la.leading_traces(new.to(dtype))[-1]) / float(scale.sum()) * (1 + most)
