"""Metrics of predictions and of approximate covariances, from tensors to numbers.

All metrics are computed in float64, whatever the dtype of the arguments. If a metric needs the observation noise σ²I,
the caller adds it to the covariance.

Shapes: n inputs, C outputs or classes, d dimensions of a joint Gaussian.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_SUM_TOLERANCE = 1e-4  # covers the rounding of a float32 softmax over many classes, but rejects logits


@dataclass(frozen=True, eq=False)
class ReliabilityBins:
    """Top-class confidence against accuracy in equal-width bins, each field of shape (bins,)."""

    confidence: Tensor
    """Mean top-class probability of the inputs in the bin; NaN if the bin is empty."""
    accuracy: Tensor
    """Fraction of the inputs in the bin whose top class is the target; NaN if the bin is empty."""
    count: Tensor
    """Number of inputs in the bin."""


def kl_gaussian(
    covariance_p: Tensor,
    covariance_q: Tensor,
    mean_p: Tensor | None = None,
    mean_q: Tensor | None = None,
) -> float:
    """Return the Kullback-Leibler divergence KL(N(m_p, S_p) ‖ N(m_q, S_q)) of two joint Gaussians.

    KL = ½ [Tr(S_q⁻¹ S_p) − d + (m_q − m_p)ᵀ S_q⁻¹ (m_q − m_p) + ln det S_q − ln det S_p]. Cost: O(d³).

    Args:
        covariance_p: S_p (d, d).
        covariance_q: S_q (d, d).
        mean_p: m_p (d,); None, for both means: the means are equal.
        mean_q: m_q (d,).

    Raises:
        ValueError: if shapes do not match, a value is not finite or a covariance is not positive definite.
    """
    S_p = _square("covariance_p", covariance_p)
    S_q = _square("covariance_q", covariance_q)
    if S_p.ndim != 2 or S_p.shape != S_q.shape:
        raise ValueError(
            f"covariance_p and covariance_q must be (d, d) matrices of the same size, "
            f"not {tuple(S_p.shape)} and {tuple(S_q.shape)}"
        )
    if (mean_p is None) != (mean_q is None):
        raise ValueError("pass both mean_p and mean_q, or neither")
    L_p = _cholesky("covariance_p", S_p)
    L_q = _cholesky("covariance_q", S_q)
    # L_q⁻¹ L_p is lower triangular, so a strip of columns needs only the rows from its diagonal on.
    width = -(-len(S_p) // 8)
    trace = sum(
        torch.linalg.solve_triangular(L_q[k:, k:], L_p[k:, k : k + width], upper=False).square().sum()
        for k in range(0, len(S_p), width)
    )
    log_determinants = _half_log_determinant(L_q) - _half_log_determinant(L_p)
    divergence = 0.5 * (trace - len(S_p)) + log_determinants
    if mean_p is not None and mean_q is not None:
        m_p, m_q = _finite("mean_p", mean_p), _finite("mean_q", mean_q)
        for name, mean in (("mean_p", m_p), ("mean_q", m_q)):
            if mean.shape != S_p.shape[:1]:
                raise ValueError(f"{name} must have shape ({len(S_p)},), not {tuple(mean.shape)}")
        divergence = divergence + 0.5 * _mahalanobis(m_q - m_p, L_q)
    # Rounding alone can push the divergence of two equal Gaussians below zero.
    return max(0.0, divergence.item())


def kl_categorical(p: Tensor, q: Tensor, reduction: Literal["mean", "sum"] = "mean") -> float:
    """Return the Kullback-Leibler divergence of categorical predictions.

    KL(p ‖ q) = Σ_c p_c ln(p_c / q_c), where 0 ln 0 = 0. q is clipped at the smallest normal float64, which keeps the
    result finite. Cost: O(nC).

    Args:
        p: probabilities (n, C).
        q: probabilities (n, C).
        reduction: "mean" or "sum" over the inputs.

    Raises:
        ValueError: if p or q do not hold probabilities of the same shape.
    """
    P, Q = _probabilities("p", p), _probabilities("q", q)
    if P.shape != Q.shape:
        raise ValueError(f"p and q must have one shape, not {tuple(P.shape)} and {tuple(Q.shape)}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
    # A float32 softmax sums to one only up to 1e-7, which would distort small divergences.
    P, Q = P / P.sum(-1, keepdim=True), Q / Q.sum(-1, keepdim=True)
    terms = torch.xlogy(P, P) - torch.xlogy(P, Q.clamp_min(torch.finfo(Q.dtype).tiny))
    total = max(0.0, terms.sum().item())
    return total / len(P) if reduction == "mean" else total


def log_trace(covariance: Tensor) -> float:
    """Return the logarithm of the total trace, ln Σ_i Tr Σ_i, of covariances (..., C, C); −inf if the trace is zero.

    Cost: O(nC).

    Raises:
        ValueError: if the trace is negative, or a value is not finite.
    """
    trace = _square("covariance", covariance).diagonal(dim1=-2, dim2=-1).sum().item()
    if trace < 0:
        raise ValueError(f"covariance has the negative trace {trace:g}, so it is not a covariance")
    return math.log(trace) if trace > 0 else -math.inf


def relative_error(approximate: Tensor, exact: Tensor) -> float:
    """Return the relative Frobenius error ‖approximate − exact‖_F / ‖exact‖_F over all entries.

    Cost: linear in the number of entries.

    Raises:
        ValueError: if shapes differ, a value is not finite or `exact` is zero everywhere.
    """
    A, E = _finite("approximate", approximate), _finite("exact", exact)
    if A.shape != E.shape:
        raise ValueError(f"approximate and exact must have one shape, not {tuple(A.shape)} and {tuple(E.shape)}")
    norm = torch.linalg.vector_norm(E).item()
    if norm == 0:
        raise ValueError("exact is zero everywhere, so the relative error is undefined")
    return torch.linalg.vector_norm(A - E).item() / norm


def nll(prediction: Tensor, targets: Tensor, covariance: Tensor | None = None) -> float:
    """Return the mean negative log-likelihood −ln p(y|x) of a classification or, with a covariance, of a regression.

    The classification metric is −(1/n) Σ_i ln p_{i,y_i}, which is infinite if a target has probability zero.
    Cost: O(nC). The regression metric is −(1/n) Σ_i ln N(y_i | m_i, S_i). Cost: O(nC³).

    Args:
        prediction: probabilities (n, C) for classification, means m (n, C) for regression.
        targets: class indices (n,) for classification, values y (n, C) for regression.
        covariance: S (n, C, C), the predictive covariance including the noise, for regression only.

    Raises:
        ValueError: if shapes do not match, or a value is not valid.
    """
    if covariance is None:
        probabilities, labels = _classification("prediction", prediction, targets)
        return -probabilities.gather(1, labels[:, None]).log().mean().item()
    residuals, L = _regression("prediction", prediction, covariance, targets)
    constant = 0.5 * residuals.shape[1] * math.log(2 * math.pi)
    return (0.5 * _mahalanobis(residuals, L) + _half_log_determinant(L)).mean().item() + constant


def reliability_bins(probabilities: Tensor, targets: Tensor, bins: int = 19) -> ReliabilityBins:
    """Return the confidence, accuracy and count of top-class predictions in equal-width bins of [0, 1].

    Bin b covers the top-class probabilities in (b/bins, (b+1)/bins]; the first bin includes 0.
    Cost: O(n (C + log bins)).

    Args:
        probabilities: (n, C).
        targets: class indices (n,).
        bins: the number of bins.

    Raises:
        ValueError: if shapes do not match, or a value is not valid.
    """
    P, labels = _classification("probabilities", probabilities, targets)
    if bins < 1:
        raise ValueError(f"bins must be at least 1, not {bins}")
    confidence, top_class = P.max(dim=1)
    inner_edges = torch.linspace(0, 1, bins + 1, dtype=P.dtype, device=P.device)[1:-1]
    bin_of_input = torch.bucketize(confidence, inner_edges)
    count = torch.bincount(bin_of_input, minlength=bins)
    correct = (top_class == labels).to(P.dtype)
    # An empty bin yields 0 / 0 = NaN, as documented.
    return ReliabilityBins(
        confidence=torch.bincount(bin_of_input, confidence, minlength=bins) / count,
        accuracy=torch.bincount(bin_of_input, correct, minlength=bins) / count,
        count=count,
    )


def ece(probabilities: Tensor, targets: Tensor, bins: int = 19) -> float:
    """Return the expected calibration error Σ_b (n_b / n) |accuracy_b − confidence_b| of the top class.

    Cost: O(n (C + log bins)).

    Args:
        probabilities: (n, C).
        targets: class indices (n,).
        bins: the number of bins, as in `reliability_bins`.

    Raises:
        ValueError: if shapes do not match, or a value is not valid.
    """
    diagram = reliability_bins(probabilities, targets, bins)
    gap = (diagram.accuracy - diagram.confidence).abs()
    # Empty bins are NaN and have zero weight.
    return (diagram.count * gap).nansum().item() / len(targets)


def brier(probabilities: Tensor, targets: Tensor) -> float:
    """Return the Brier score (1/n) Σ_i Σ_c (p_ic − [c = y_i])², which lies in [0, 2].

    The score is summed over classes, so for two classes it is twice the score of scikit-learn. Cost: O(nC).

    Args:
        probabilities: (n, C).
        targets: class indices (n,).

    Raises:
        ValueError: if shapes do not match, or a value is not valid.
    """
    P, labels = _classification("probabilities", probabilities, targets)
    one_hot = torch.nn.functional.one_hot(labels, P.shape[1])
    return (P - one_hot).square().sum(dim=1).mean().item()


def coverage(mean: Tensor, covariance: Tensor, targets: Tensor, level: float = 0.9) -> float:
    """Return the fraction of targets inside the `level` ellipsoid of a Gaussian prediction.

    A target is inside if (y − m)ᵀ S⁻¹ (y − m) ≤ q, where q is the `level` quantile of the chi-square distribution with
    C degrees of freedom. Cost: O(nC³).

    Args:
        mean: m (n, C).
        covariance: S (n, C, C), including the noise.
        targets: y (n, C).
        level: the probability of the ellipsoid, strictly between 0 and 1.

    Raises:
        ValueError: if shapes do not match, or a value is not valid.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, not {level}")
    residuals, L = _regression("mean", mean, covariance, targets)
    inside = _mahalanobis(residuals, L) <= _chi_square_quantile(level, residuals.shape[1])
    return inside.double().mean().item()


def accuracy(probabilities: Tensor, targets: Tensor) -> float:
    """Return the share of inputs whose most probable class is the target. Cost: O(nC).

    Args:
        probabilities: (n, C).
        targets: class indices (n,).

    Raises:
        ValueError: if shapes do not match, or a value is not valid.
    """
    P, labels = _classification("probabilities", probabilities, targets)
    return (P.argmax(1) == labels).double().mean().item()


def rmse(mean: Tensor, targets: Tensor) -> float:
    """Return the root mean square error over all inputs and outputs, both (n, C). Cost: O(nC)."""
    if mean.shape != targets.shape or mean.numel() == 0:
        shapes = f"{tuple(mean.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"mean and targets must have one shape (n, C) and not be empty, but they have {shapes}")
    return (_finite("targets", targets) - _finite("mean", mean)).square().mean().sqrt().item()


def crps(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    r"""Return the mean continuous ranked probability score of Gaussian predictions N(m, v), each output on its own.

    For one target it is √v · (z (2Φ(z) − 1) + 2φ(z) − π^(−½)) with z = (y − m)/√v, in the units of the targets; smaller
    is better. Cost: O(nC).

    Args:
        mean: m (n, C).
        variance: v (n, C), including the noise.
        targets: y (n, C).

    Raises:
        ValueError: if shapes do not match, or a variance is not positive.
    """
    if not mean.shape == variance.shape == targets.shape or mean.numel() == 0:
        raise ValueError("mean, variance and targets must have one shape (n, C)")
    spread = _finite("variance", variance)
    if (spread <= 0).any():
        raise ValueError("variance must be positive")
    std = spread.sqrt()
    z = (_finite("targets", targets) - _finite("mean", mean)) / std
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    score = std * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))
    return score.mean().item()


def auroc(scores_positive: Tensor, scores_negative: Tensor) -> float:
    """Return the area under the ROC curve, P(s⁺ > s⁻) + ½ P(s⁺ = s⁻) over all pairs of scores.

    Cost: O(n log n).

    Args:
        scores_positive: s⁺, a vector; infinite scores are allowed.
        scores_negative: s⁻, a vector; infinite scores are allowed.

    Raises:
        ValueError: if a set of scores is empty, not a vector or contains NaN.
    """
    positive = _scores("scores_positive", scores_positive)
    negative = _scores("scores_negative", scores_negative).sort().values
    below = torch.searchsorted(negative, positive)
    not_above = torch.searchsorted(negative, positive, right=True)
    return 0.5 * (below + not_above).double().mean().item() / len(negative)


def fpr_at_recall(scores_positive: Tensor, scores_negative: Tensor, recall: float = 0.95) -> float:
    """Return the false positive rate at the threshold that finds a share of the positives; FPR95 by default.

    The threshold is the largest score t with P(s⁺ ≥ t) ≥ recall, and the rate is P(s⁻ ≥ t). Cost: O(n log n).

    Args:
        scores_positive: s⁺, a vector, such as scores of out-of-distribution inputs.
        scores_negative: s⁻, a vector.
        recall: the share of positives that must be found, in (0, 1].

    Raises:
        ValueError: if a set of scores is empty, not a vector or contains NaN.
    """
    if not 0 < recall <= 1:
        raise ValueError(f"recall must lie in (0, 1], not {recall}")
    positive, negative = _scores("scores_positive", scores_positive), _scores("scores_negative", scores_negative)
    found = math.ceil(recall * len(positive) - 1e-9)  # 0.95 · 20 is a little more than 19 in floating point
    threshold = positive.sort(descending=True).values[found - 1]
    return (negative >= threshold).double().mean().item()


@dataclass(frozen=True, eq=False)
class RejectionCurve:
    """The mean error of the predictions that are kept, if the most uncertain ones are rejected; both (n,)."""

    kept: Tensor
    """Share of predictions that are kept: 1/n, 2/n, …, 1."""
    risk: Tensor
    """Mean error of the kept ones, those with the least uncertainty."""


def rejection_curve(errors: Tensor, uncertainty: Tensor) -> RejectionCurve:
    """Return the mean error of the k most certain predictions, for every k.

    Predictions of equal uncertainty count in the mean over their orders. Cost: O(n log n).

    Args:
        errors: (n,), such as 1 for a wrong class and 0 for a right one, or squared residuals.
        uncertainty: (n,), such as 1 − the largest probability, the entropy or a variance.

    Raises:
        ValueError: if shapes differ, or a value is not finite.
    """
    if errors.ndim != 1 or errors.shape != uncertainty.shape or not len(errors):
        raise ValueError(
            "errors and uncertainty must be non-empty vectors of one length, not "
            f"{tuple(errors.shape)} and {tuple(uncertainty.shape)}"
        )
    values, order = _finite("uncertainty", uncertainty).sort()
    ordered = _finite("errors", errors.double())[order]
    _, group, sizes = torch.unique_consecutive(values, return_inverse=True, return_counts=True)
    means = torch.zeros(len(sizes), dtype=torch.float64, device=ordered.device).index_add_(0, group, ordered) / sizes
    count = torch.arange(1, len(ordered) + 1, dtype=torch.float64, device=ordered.device)
    return RejectionCurve(count / len(ordered), means[group].cumsum(0) / count)


def aurc(errors: Tensor, uncertainty: Tensor) -> float:
    """Return the area under the risk–coverage curve, the mean of `rejection_curve` over all shares; smaller is better.

    Arguments as of `rejection_curve`. Cost: O(n log n).
    """
    return rejection_curve(errors, uncertainty).risk.mean().item()


def _scores(name: str, scores: Tensor) -> Tensor:
    """Return a checked vector of scores in float64; infinite ones are allowed."""
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(f"{name} must be a non-empty vector, not of shape {tuple(scores.shape)}")
    if scores.isnan().any():
        raise ValueError(f"{name} contains NaN")
    return _double(scores)


def _chi_square_quantile(level: float, degrees: int) -> float:
    """Return q with P(χ²_degrees ≤ q) = level, by bisection of the incomplete gamma function to float64 precision."""
    shape = torch.tensor(degrees / 2, dtype=torch.float64, device="cpu")

    def distribution(q: float) -> float:
        return torch.special.gammainc(shape, torch.tensor(q / 2, dtype=torch.float64, device="cpu")).item()

    low, high = 0.0, float(degrees)
    while distribution(high) < level:
        low, high = high, 2 * high
    while True:
        middle = 0.5 * (low + high)
        if not low < middle < high:  # no float is left between them
            return high
        low, high = (middle, high) if distribution(middle) < level else (low, middle)


def _mahalanobis(residuals: Tensor, L: Tensor) -> Tensor:
    """Return the squared distances rᵀ (L Lᵀ)⁻¹ r of residuals r (..., C) for lower triangular L (..., C, C)."""
    return torch.linalg.solve_triangular(L, residuals[..., None], upper=False).square().sum(dim=(-2, -1))


def _half_log_determinant(L: Tensor) -> Tensor:
    """Return ½ ln det(L Lᵀ) for lower triangular L (..., C, C)."""
    return L.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _cholesky(name: str, matrix: Tensor) -> Tensor:
    L, info = torch.linalg.cholesky_ex(matrix)
    if info.any():
        raise ValueError(f"{name} is not positive definite: was the noise σ²I added?")
    return L


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64)


def _finite(name: str, tensor: Tensor) -> Tensor:
    if not tensor.isfinite().all():
        raise ValueError(f"{name} contains NaN or infinity")
    return _double(tensor)


def _square(name: str, covariance: Tensor) -> Tensor:
    if covariance.ndim < 2 or covariance.shape[-1] != covariance.shape[-2]:
        raise ValueError(f"{name} must be square in its last two dimensions, not {tuple(covariance.shape)}")
    return _finite(name, covariance)


def _probabilities(name: str, probabilities: Tensor) -> Tensor:
    if probabilities.ndim != 2 or probabilities.numel() == 0:
        raise ValueError(f"{name} must be a non-empty (n, C) matrix, not {tuple(probabilities.shape)}")
    P = _finite(name, probabilities)
    if (P < 0).any() or ((P.sum(dim=1) - 1).abs() > _SUM_TOLERANCE).any():
        raise ValueError(f"{name} must hold probabilities, which are not negative and sum to one: are they logits?")
    return P


def _classification(name: str, probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return checked float64 probabilities (n, C) and int64 labels (n,) on the same device."""
    P = _probabilities(name, probabilities)
    n, C = P.shape
    if targets.shape != (n,):
        raise ValueError(f"targets must have shape ({n},) to match {name}, not {tuple(targets.shape)}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(f"targets must be integer class indices, not {targets.dtype}")
    labels = targets.to(P.device, torch.int64)
    if labels.min() < 0 or labels.max() >= C:
        raise ValueError(
            f"targets must lie in 0..{C - 1} for {C} classes, "
            f"but range over {labels.min().item()}..{labels.max().item()}"
        )
    return P, labels


def _regression(name: str, mean: Tensor, covariance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return checked residuals (n, C) and Cholesky factors (n, C, C) of the covariances."""
    if mean.ndim != 2 or mean.numel() == 0:
        raise ValueError(f"{name} must be a non-empty (n, C) matrix, not {tuple(mean.shape)}")
    n, C = mean.shape
    # Without these checks, targets (n,) would broadcast against means (n, 1) to a wrong (n, n).
    if targets.shape != (n, C):
        raise ValueError(f"targets must have shape ({n}, {C}) to match {name}, not {tuple(targets.shape)}")
    if covariance.shape != (n, C, C):
        raise ValueError(f"covariance must have shape ({n}, {C}, {C}) to match {name}, not {tuple(covariance.shape)}")
    residuals = _finite("targets", targets) - _finite(name, mean)
    return residuals, _cholesky("covariance", _finite("covariance", covariance))
