"""The metrics against loops, scipy and scikit-learn, and their invariances."""

import itertools
import math
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sublaplace import metrics

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 6)
few = settings(max_examples=30)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def covariances(*batch: int, size: int, seed: int) -> Tensor:
    root = normal(*batch, size, size, seed=seed)
    return root @ root.mT + 0.1 * torch.eye(size, dtype=torch.float64)


def classification(n: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    probabilities = torch.softmax(2 * normal(n, classes, seed=seed), dim=1)
    return probabilities, torch.randint(classes, (n,), generator=generator(seed + 1))


def permutation(n: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=generator(seed))


# Gaussian divergence


def test_kl_gaussian_of_scalars_is_the_textbook_formula() -> None:
    (m_p, v_p), (m_q, v_q) = (0.3, 2.0), (-0.5, 0.7)
    expected = 0.5 * (v_p / v_q - 1 + (m_q - m_p) ** 2 / v_q + math.log(v_q / v_p))
    actual = metrics.kl_gaussian(torch.tensor([[v_p]]), torch.tensor([[v_q]]), torch.tensor([m_p]), torch.tensor([m_q]))
    assert actual == pytest.approx(expected, rel=1e-6)


@few
@given(seed=seeds, size=sizes)
def test_kl_gaussian_agrees_with_torch_distributions(seed: int, size: int) -> None:
    S_p, S_q = covariances(size=size, seed=seed), covariances(size=size, seed=seed + 1)
    m_p, m_q = normal(size, seed=seed + 2), normal(size, seed=seed + 3)
    p = torch.distributions.MultivariateNormal(m_p, S_p)
    q = torch.distributions.MultivariateNormal(m_q, S_q)
    expected = torch.distributions.kl_divergence(p, q).item()
    assert metrics.kl_gaussian(S_p, S_q, m_p, m_q) == pytest.approx(expected, rel=1e-8, abs=1e-12)


@few
@given(seed=seeds, size=sizes)
def test_kl_gaussian_is_positive_and_zero_only_for_equal_gaussians(seed: int, size: int) -> None:
    S, mean = covariances(size=size, seed=seed), normal(size, seed=seed + 1)
    assert metrics.kl_gaussian(S, S) <= 1e-12 * size
    assert metrics.kl_gaussian(S, S, mean, mean) <= 1e-12 * size
    assert metrics.kl_gaussian(S, 2 * S) == pytest.approx(0.5 * size * (math.log(2) - 0.5))
    assert metrics.kl_gaussian(S, S, mean, mean + 1) > 1e-6


@few
@given(seed=seeds, size=sizes)
def test_kl_gaussian_does_not_depend_on_the_basis(seed: int, size: int) -> None:
    S_p, S_q = covariances(size=size, seed=seed), covariances(size=size, seed=seed + 1)
    order = permutation(size, seed)
    permuted = metrics.kl_gaussian(S_p[order][:, order], S_q[order][:, order])
    assert permuted == pytest.approx(metrics.kl_gaussian(S_p, S_q), rel=1e-9, abs=1e-12)


def test_kl_gaussian_is_evaluated_in_float64_for_float32_input() -> None:
    # ½(ε − ln(1 + ε)) ≈ ε²/4 per dimension: below the resolution of float32 beside the trace term d = 50.
    epsilon = 2.0**-10
    identity = torch.eye(50)
    expected = 0.5 * 50 * (epsilon - math.log1p(epsilon))
    assert metrics.kl_gaussian((1 + epsilon) * identity, identity) == pytest.approx(expected, rel=1e-6)


# Categorical divergence


@few
@given(seed=seeds, n=sizes, classes=st.integers(2, 5))
def test_kl_categorical_agrees_with_scipy(seed: int, n: int, classes: int) -> None:
    (p, _), (q, _) = classification(n, classes, seed), classification(n, classes, seed + 1)
    per_input = scipy.stats.entropy(p.numpy(), q.numpy(), axis=1)
    assert metrics.kl_categorical(p, q) == pytest.approx(per_input.mean())
    assert metrics.kl_categorical(p, q, reduction="sum") == pytest.approx(per_input.sum())


@few
@given(seed=seeds, n=sizes, classes=st.integers(2, 5))
def test_kl_categorical_is_positive_invariant_and_zero_when_equal(seed: int, n: int, classes: int) -> None:
    (p, _), (q, _) = classification(n, classes, seed), classification(n, classes, seed + 1)
    value = metrics.kl_categorical(p, q)
    assert value > 0
    assert 0 <= metrics.kl_categorical(p, p) <= 1e-15
    rows, columns = permutation(n, seed), permutation(classes, seed)
    assert metrics.kl_categorical(p[rows][:, columns], q[rows][:, columns]) == pytest.approx(value)


def test_kl_categorical_takes_zero_times_log_zero_as_zero() -> None:
    p, q = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.5, 0.5, 0.0]])
    assert metrics.kl_categorical(p, q) == pytest.approx(math.log(2))


def test_kl_categorical_stays_finite_where_q_is_zero() -> None:
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    tiny = torch.finfo(torch.float64).tiny
    assert metrics.kl_categorical(p, q) == pytest.approx(math.log(0.5) - 0.5 * math.log(tiny))


def test_kl_categorical_ignores_the_normalisation_error_of_float32() -> None:
    p = torch.full((1, 4), 0.25)
    assert metrics.kl_categorical(p, p * (1 - 1e-6)) < 1e-15


# Covariance sizes


def test_log_trace_sums_a_batch_and_matches_a_joint_matrix() -> None:
    batch = covariances(4, size=3, seed=0)
    total = sum(batch[i, c, c].item() for i in range(4) for c in range(3))
    assert metrics.log_trace(batch) == pytest.approx(math.log(total))
    assert metrics.log_trace(torch.block_diag(*batch)) == pytest.approx(math.log(total))


def test_log_trace_of_zero_is_minus_infinity() -> None:
    assert metrics.log_trace(torch.zeros(2, 3, 3)) == -math.inf


@few
@given(seed=seeds, n=sizes, size=sizes)
def test_relative_error_is_the_joint_frobenius_ratio(seed: int, n: int, size: int) -> None:
    exact, approximate = covariances(n, size=size, seed=seed), covariances(n, size=size, seed=seed + 1)
    expected = np.linalg.norm((approximate - exact).numpy().ravel()) / np.linalg.norm(exact.numpy().ravel())
    assert metrics.relative_error(approximate, exact) == pytest.approx(expected)
    assert metrics.relative_error(exact, exact) == 0
    assert metrics.relative_error(torch.zeros_like(exact), exact) == pytest.approx(1)
    assert metrics.relative_error(3 * approximate, 3 * exact) == pytest.approx(expected)


# Proper scores


@few
@given(seed=seeds, n=sizes, classes=st.integers(2, 5))
def test_nll_of_a_classification_agrees_with_scikit_learn(seed: int, n: int, classes: int) -> None:
    probabilities, targets = classification(n, classes, seed)
    expected = sklearn.metrics.log_loss(targets.numpy(), probabilities.numpy(), labels=range(classes))
    assert metrics.nll(probabilities, targets) == pytest.approx(expected)


def test_nll_is_infinite_where_the_truth_was_excluded() -> None:
    assert metrics.nll(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([1, 0])) == math.inf


@few
@given(seed=seeds, n=sizes, size=sizes)
def test_nll_of_a_regression_agrees_with_scipy(seed: int, n: int, size: int) -> None:
    mean, targets = normal(n, size, seed=seed), normal(n, size, seed=seed + 1)
    covariance = covariances(n, size=size, seed=seed + 2)
    log_densities = [
        scipy.stats.multivariate_normal(mean[i].numpy(), covariance[i].numpy()).logpdf(targets[i].numpy())
        for i in range(n)
    ]
    assert metrics.nll(mean, targets, covariance=covariance) == pytest.approx(-np.mean(log_densities))


@few
@given(seed=seeds, n=sizes, classes=st.integers(2, 5))
def test_brier_is_the_mean_over_data_of_the_sum_over_classes(seed: int, n: int, classes: int) -> None:
    probabilities, targets = classification(n, classes, seed)
    expected = 0.0
    for p, y in zip(probabilities.tolist(), targets.tolist(), strict=True):
        expected += sum((p[c] - (c == y)) ** 2 for c in range(classes)) / n
    assert metrics.brier(probabilities, targets) == pytest.approx(expected)


def test_brier_reaches_both_ends_of_its_range() -> None:
    certain = torch.eye(3)
    assert metrics.brier(certain, torch.tensor([0, 1, 2])) == 0
    assert metrics.brier(certain, torch.tensor([1, 2, 0])) == 2


# Calibration


def looped_ece(probabilities: Tensor, targets: Tensor, bins: int) -> float:
    error = 0.0
    for b in range(bins):
        members = [
            (max(p), p.index(max(p)) == y)
            for p, y in zip(probabilities.tolist(), targets.tolist(), strict=True)
            if b / bins < max(p) <= (b + 1) / bins
        ]
        if members:
            gap = np.mean([hit for _, hit in members]) - np.mean([confidence for confidence, _ in members])
            error += len(members) / len(targets) * abs(gap)
    return error


@few
@given(seed=seeds, n=st.integers(1, 60), classes=st.integers(2, 5), bins=st.integers(1, 25))
def test_ece_agrees_with_a_loop_over_bins(seed: int, n: int, classes: int, bins: int) -> None:
    probabilities, targets = classification(n, classes, seed)
    assert metrics.ece(probabilities, targets, bins) == pytest.approx(looped_ece(probabilities, targets, bins))


@few
@given(seed=seeds, n=st.integers(1, 60), classes=st.integers(2, 5))
def test_ece_lies_in_the_unit_interval_and_ignores_order(seed: int, n: int, classes: int) -> None:
    probabilities, targets = classification(n, classes, seed)
    value = metrics.ece(probabilities, targets)
    assert 0 <= value <= 1
    rows, columns = permutation(n, seed), permutation(classes, seed)
    relabelled = columns.argsort()[targets]
    assert metrics.ece(probabilities[rows][:, columns], relabelled[rows]) == pytest.approx(value)


def test_ece_reaches_both_ends_of_its_range() -> None:
    certain = torch.eye(2)
    assert metrics.ece(certain, torch.tensor([0, 1])) == 0
    assert metrics.ece(certain, torch.tensor([1, 0])) == 1


def test_ece_has_19_bins_unless_told_otherwise() -> None:
    # 0.53 and 0.57 share a bin of width 1/19, but not one of width 1/20: errors of opposite sign then cancel.
    probabilities = torch.tensor([[0.53, 0.47], [0.57, 0.43]])
    targets = torch.tensor([0, 1])
    assert metrics.ece(probabilities, targets) == pytest.approx(0.05, abs=1e-6)
    assert metrics.ece(probabilities, targets, bins=20) == pytest.approx(0.52, abs=1e-6)


def test_reliability_bins_are_closed_on_the_right_and_nan_where_empty() -> None:
    probabilities = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.25, 0.75], [1.0, 0.0]])
    bins = metrics.reliability_bins(probabilities, torch.tensor([0, 0, 0, 1]), bins=4)
    assert bins.count.tolist() == [0, 1, 2, 1]
    assert bins.confidence[1:].tolist() == [0.5, 0.75, 1.0]
    assert bins.accuracy[1:].tolist() == [1.0, 0.5, 0.0]
    assert bins.confidence[0].isnan() and bins.accuracy[0].isnan()


@pytest.mark.parametrize("degrees", [1, 2, 3, 8, 10, 100])
@pytest.mark.parametrize("level", [1e-6, 0.05, 0.5, 0.9, 0.99, 0.999999])
def test_chi_square_quantile_agrees_with_scipy(degrees: int, level: float) -> None:
    expected = scipy.stats.chi2(degrees).ppf(level)
    assert metrics._chi_square_quantile(level, degrees) == pytest.approx(expected, rel=1e-9)


@few
@given(seed=seeds, n=st.integers(1, 40), size=sizes, level=st.floats(0.05, 0.95))
def test_coverage_agrees_with_a_loop(seed: int, n: int, size: int, level: float) -> None:
    mean, covariance = normal(n, size, seed=seed), covariances(n, size=size, seed=seed + 1)
    targets = mean + normal(n, size, seed=seed + 2)
    radius = scipy.stats.chi2(size).ppf(level)
    inside = 0
    for m, S, y in zip(mean.numpy(), covariance.numpy(), targets.numpy(), strict=True):
        inside += (y - m) @ np.linalg.inv(S) @ (y - m) <= radius
    assert metrics.coverage(mean, covariance, targets, level) == pytest.approx(inside / n)


def test_coverage_of_the_true_distribution_is_the_level() -> None:
    n, size = 20_000, 3
    covariance = covariances(n, size=size, seed=0)
    targets = (torch.linalg.cholesky(covariance) @ normal(n, size, 1, seed=1)).squeeze(-1)
    # Four standard errors of a binomial share.
    assert metrics.coverage(torch.zeros(n, size), covariance, targets) == pytest.approx(0.9, abs=0.0085)


# Accuracy, and errors in the units of the targets


@few
@given(seed=seeds, n=st.integers(1, 40), classes=st.integers(2, 6))
def test_accuracy_agrees_with_scikit_learn(seed: int, n: int, classes: int) -> None:
    probabilities, targets = classification(n, classes, seed)
    expected = sklearn.metrics.accuracy_score(targets.numpy(), probabilities.argmax(1).numpy())
    assert metrics.accuracy(probabilities, targets) == pytest.approx(expected, abs=1e-12)


def test_accuracy_reaches_both_ends_of_its_range() -> None:
    assert metrics.accuracy(torch.eye(3), torch.tensor([0, 1, 2])) == 1
    assert metrics.accuracy(torch.eye(3), torch.tensor([1, 2, 0])) == 0


@few
@given(seed=seeds, n=st.integers(1, 40), size=sizes)
def test_rmse_agrees_with_a_loop(seed: int, n: int, size: int) -> None:
    mean, targets = normal(n, size, seed=seed), normal(n, size, seed=seed + 1)
    squares = [float(y - m) ** 2 for y, m in zip(targets.flatten(), mean.flatten(), strict=True)]
    assert metrics.rmse(mean, targets) == pytest.approx(math.sqrt(sum(squares) / len(squares)), rel=1e-12)
    assert metrics.rmse(targets, targets) == 0


@few
@given(seed=seeds, shift=st.floats(-6, 6), std=st.floats(0.05, 4))
def test_crps_is_the_integral_of_the_squared_difference_of_distribution_functions(
    seed: int, shift: float, std: float
) -> None:
    """∫ (F(x) − 1[x ≥ y])² dx, on either side of the target."""
    mean = float(normal(1, seed=seed))
    target = mean + shift * std
    edges = sorted({mean - 12 * std, target, mean + 12 * std})
    expected = 0.0
    for left, right in itertools.pairwise(edges):
        x = np.linspace(left, right, 20_001)
        step = 1.0 if (left + right) / 2 > target else 0.0
        expected += float(scipy.integrate.trapezoid((scipy.stats.norm.cdf(x, mean, std) - step) ** 2, x))
    actual = metrics.crps(*(torch.tensor([[value]], dtype=torch.float64) for value in (mean, std**2, target)))
    assert actual == pytest.approx(expected, rel=1e-5)


@few
@given(seed=seeds, n=st.integers(1, 20), size=sizes)
def test_crps_is_a_mean_over_inputs_and_outputs_in_the_units_of_the_targets(seed: int, n: int, size: int) -> None:
    mean, targets = normal(n, size, seed=seed), normal(n, size, seed=seed + 1)
    variance = normal(n, size, seed=seed + 2).exp()
    value = metrics.crps(mean, variance, targets)
    single = [
        metrics.crps(m.view(1, 1), v.view(1, 1), y.view(1, 1))
        for m, v, y in zip(mean.flatten(), variance.flatten(), targets.flatten(), strict=True)
    ]
    assert value == pytest.approx(sum(single) / len(single), rel=1e-9)
    assert metrics.crps(3 * mean + 2, 9 * variance, 3 * targets + 2) == pytest.approx(3 * value, rel=1e-9)
    # With next to no variance it is the mean absolute error.
    certain = metrics.crps(mean, torch.full_like(variance, 1e-16), targets)
    assert certain == pytest.approx(float((mean - targets).abs().mean()), rel=1e-6)


def test_crps_is_smallest_for_the_true_distribution() -> None:
    targets = 0.3 + 1.7 * normal(20_000, 1, seed=0)
    one = torch.ones_like(targets)
    true = metrics.crps(0.3 * one, 1.7**2 * one, targets)
    for mean, std in ((0.3, 1.0), (0.3, 3.0), (1.0, 1.7), (-0.5, 1.7)):
        assert metrics.crps(mean * one, std**2 * one, targets) > true + 0.01
    assert true == pytest.approx(1.7 / math.sqrt(math.pi), rel=0.02)


# Ranking


@few
@given(
    positive=st.lists(st.integers(-4, 4), min_size=1, max_size=30),
    negative=st.lists(st.integers(-4, 4), min_size=1, max_size=30),
)
def test_auroc_with_ties_agrees_with_scikit_learn(positive: list[int], negative: list[int]) -> None:
    labels = [1] * len(positive) + [0] * len(negative)
    expected = sklearn.metrics.roc_auc_score(labels, positive + negative)
    actual = metrics.auroc(torch.tensor(positive), torch.tensor(negative))
    assert actual == pytest.approx(expected)
    assert metrics.auroc(torch.tensor(negative), torch.tensor(positive)) == pytest.approx(1 - expected)


@few
@given(seed=seeds, n=st.integers(1, 30), m=st.integers(1, 30))
def test_auroc_depends_on_the_ranks_alone(seed: int, n: int, m: int) -> None:
    positive, negative = normal(n, seed=seed), normal(m, seed=seed + 1)
    value = metrics.auroc(positive, negative)
    assert metrics.auroc(positive.exp()[permutation(n, seed)], negative.exp()) == pytest.approx(value)


def test_auroc_ranks_infinite_scores() -> None:
    assert metrics.auroc(torch.tensor([0.0, math.inf]), torch.tensor([-math.inf])) == 1


# Bad input

half = torch.full((2, 2), 0.5)
labels = torch.tensor([0, 1])
eye = torch.eye(2)
singular = torch.ones(2, 2)
nan = torch.tensor([[math.nan, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.kl_gaussian(eye, torch.eye(3)), r"covariance_p and covariance_q .* \(3, 3\)"),
        (lambda: metrics.kl_gaussian(torch.ones(2, 3), eye), r"covariance_p must be square .* \(2, 3\)"),
        (lambda: metrics.kl_gaussian(eye[None], eye[None]), r"\(d, d\)"),
        (lambda: metrics.kl_gaussian(eye, eye, mean_p=torch.zeros(2)), "both mean_p and mean_q"),
        (lambda: metrics.kl_gaussian(eye, eye, torch.zeros(2), torch.zeros(3)), r"mean_q .*\(2,\).*\(3,\)"),
        (lambda: metrics.kl_gaussian(eye, singular), "covariance_q is not positive definite"),
        (lambda: metrics.kl_gaussian(nan, eye), "covariance_p contains NaN"),
        (lambda: metrics.kl_categorical(half, torch.ones(1, 2) / 2), r"one shape.*\(2, 2\).*\(1, 2\)"),
        (lambda: metrics.kl_categorical(half, 4 * half), "q must hold probabilities"),
        (lambda: metrics.kl_categorical(torch.tensor([[1.5, -0.5]]), half[:1]), "p must hold probabilities"),
        (lambda: metrics.kl_categorical(half, half, reduction="none"), "'mean' or 'sum'"),
        (lambda: metrics.log_trace(-eye), "negative trace"),
        (lambda: metrics.log_trace(torch.ones(3)), "square"),
        (lambda: metrics.relative_error(eye, torch.ones(2)), "one shape"),
        (lambda: metrics.relative_error(eye, torch.zeros(2, 2)), "zero everywhere"),
        (lambda: metrics.nll(half, torch.tensor([0, 2])), r"0\.\.1 for 2 classes, but range over 0\.\.2"),
        (lambda: metrics.nll(half, torch.tensor([-1, 0])), r"range over -1\.\.0"),
        (lambda: metrics.nll(half, torch.tensor([0.0, 1.0])), "integer class indices"),
        (lambda: metrics.nll(half, torch.tensor([0])), r"targets must have shape \(2,\)"),
        (lambda: metrics.nll(half[:0], labels[:0]), "non-empty"),
        (lambda: metrics.nll(half, half, covariance=eye), r"covariance must have shape \(2, 2, 2\)"),
        (lambda: metrics.nll(half[:, :1], labels, eye[:, :1, None]), r"targets must have shape \(2, 1\)"),
        (lambda: metrics.nll(half, half, torch.stack([eye, singular])), "not positive definite"),
        (lambda: metrics.ece(half, labels, bins=0), "bins must be at least 1"),
        (lambda: metrics.brier(5 * half, labels), "are they logits"),
        (lambda: metrics.accuracy(5 * half, labels), "are they logits"),
        (lambda: metrics.accuracy(half, labels[:1]), r"targets must have shape \(2,\)"),
        (lambda: metrics.rmse(half, labels), r"one shape.*\(2, 2\) and \(2,\)"),
        (lambda: metrics.rmse(half[:0], half[:0]), "not be empty"),
        (lambda: metrics.rmse(half, nan), "targets contains NaN"),
        (lambda: metrics.crps(half, half, half[:1]), "one shape"),
        (lambda: metrics.crps(half, 0 * half, half), "variance must be positive"),
        (lambda: metrics.crps(half, nan, half), "variance contains NaN"),
        (
            lambda: metrics.coverage(half, torch.stack([eye, eye]), half, level=1.0),
            "strictly between 0 and 1",
        ),
        (lambda: metrics.coverage(half, torch.stack([eye, eye]), nan), "targets contains NaN"),
        (
            lambda: metrics.auroc(torch.tensor([]), torch.ones(1)),
            "scores_positive must be a non-empty vector",
        ),
        (lambda: metrics.auroc(torch.ones(1), torch.tensor([math.nan])), "scores_negative contains NaN"),
    ],
)
def test_bad_input_is_named_in_the_error(call: Callable[[], float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@few
@given(seed=seeds, n=sizes)
def test_arguments_are_neither_changed_nor_differentiated(seed: int, n: int) -> None:
    probabilities, targets = classification(n, 3, seed)
    probabilities = probabilities.float().requires_grad_()
    before = probabilities.detach().clone()
    for score in (metrics.nll, metrics.ece, metrics.brier, metrics.accuracy):
        assert isinstance(score(probabilities, targets), float)
    assert torch.equal(probabilities, before)


# Rejection and false positives ----------------------------------------------------------------------------------------


def test_the_rejection_curve_is_the_mean_error_of_the_most_certain():
    errors = torch.tensor([1.0, 0.0, 0.0, 1.0])
    curve = metrics.rejection_curve(errors, torch.tensor([0.9, 0.1, 0.2, 0.3]))
    assert curve.kept.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert curve.risk.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 2])
    assert metrics.aurc(errors, torch.tensor([0.9, 0.1, 0.2, 0.3])) == pytest.approx((1 / 3 + 1 / 2) / 4)


def test_equal_uncertainties_count_in_the_mean_over_their_orders():
    generator = torch.Generator().manual_seed(0)
    errors = torch.rand(6, generator=generator, dtype=torch.float64)
    uncertainty = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0, 2.0])
    orders = []
    for first in permutations((1, 2, 3)):
        for last in permutations((4, 5)):
            order = errors[[0, *first, *last]]
            orders.append(order.cumsum(0) / torch.arange(1, 7))
    assert torch.allclose(metrics.rejection_curve(errors, uncertainty).risk, torch.stack(orders).mean(0))
    assert metrics.aurc(errors, torch.zeros(6)) == pytest.approx(float(errors.mean()))


def test_the_best_order_of_rejection_has_the_least_area():
    errors = torch.rand(50, generator=torch.Generator().manual_seed(0))
    best, worst = metrics.aurc(errors, errors), metrics.aurc(errors, -errors)
    other = metrics.aurc(errors, torch.rand(50, generator=torch.Generator().manual_seed(1)))
    assert best < other < worst


@pytest.mark.parametrize(
    ("errors", "uncertainty"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(0), torch.zeros(0)),
        (torch.zeros(2), torch.tensor([0.0, torch.nan])),
    ],
)
def test_a_rejection_curve_of_bad_input_is_refused(errors, uncertainty):
    with pytest.raises(ValueError, match=r"errors and uncertainty|contains NaN"):
        metrics.rejection_curve(errors, uncertainty)


def test_false_positives_are_counted_at_the_threshold_of_the_recall():
    positive, negative = torch.arange(1.0, 21.0), torch.tensor([0.0, 1.5, 2.0, 30.0])
    # 19 of 20 positives are at least 2.
    assert metrics.fpr_at_recall(positive, negative) == 0.5
    assert metrics.fpr_at_recall(positive, negative, recall=1.0) == 0.75
    assert metrics.fpr_at_recall(positive + 100, negative) == 0.0


def test_false_positives_agree_with_a_roc_curve():
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(0)
    positive = torch.randint(0, 30, (200,), generator=generator).double() + 5
    negative = torch.randint(0, 30, (300,), generator=generator).double()
    labels = torch.cat([torch.ones(200), torch.zeros(300)])
    rates, found, _ = sklearn_metrics.roc_curve(labels, torch.cat([positive, negative]), drop_intermediate=False)
    expected = min(rate for rate, recall in zip(rates, found, strict=True) if recall >= 0.95)
    assert metrics.fpr_at_recall(positive, negative) == pytest.approx(expected)


def test_a_recall_outside_of_its_range_is_refused():
    for recall in (0.0, 1.5):
        with pytest.raises(ValueError, match="recall must lie in"):
            metrics.fpr_at_recall(torch.ones(2), torch.zeros(2), recall)
