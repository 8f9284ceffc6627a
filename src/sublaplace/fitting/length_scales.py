r"""Length scales, prior precisions and noise of a `FourierNetwork` by the evidence.

While δ = 0, the network is linear in its weights. With features F₁ and F₂ of the training inputs, every output is

.. math:: y ~ N(0, K), \quad K = F_1 F_1^T / λ_1 + F_2 F_2^T / λ_2 + 1 1^T + σ² I.

The logarithms of the length scales, of the prior standard deviations λ^(−1/2) and of σ have normal priors, which matter
for few data only. L-BFGS finds the mode, with gradients by automatic differentiation.
"""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from sublaplace.model.fourier import FourierNetwork

_CHANGE_PRECISION = 4.0  # λ of δ: the evidence knows a length scale up to a factor of about 1.5
_BIAS_PRECISION = 1.0  # targets have unit variance
_MAX_ITERATIONS = 60


@dataclass(frozen=True)
class _LogNormal:
    """The prior of a positive number by the mean and standard deviation of its logarithm, and bounds of that."""

    mean: float
    std: float
    low: float
    high: float

    def at(self, value: float | None) -> "_LogNormal":
        """Return the prior of a number that is given, if it is."""
        return self if value is None else _LogNormal(log(value), self.std, log(value), log(value))


_NOISE = _LogNormal(-4.0, 2.0, log(1e-3), 0.0)
_WEIGHT_STD = _LogNormal(0.0, 2.0, -4.0, 4.0)


def _length_scale(dim: int) -> _LogNormal:
    """Return the prior of ℓ for inputs of unit variance: distances grow with √d."""
    mean = log(0.3) + 0.5 * log(dim)
    return _LogNormal(mean, 1.0, mean - 4.0, mean + 4.0)


@dataclass(frozen=True)
class Tuned:
    """λ of every parameter by name, σ, and the logarithm of evidence times prior, up to a constant."""

    prior_precision: dict[str, float]
    noise_std: float
    log_density: float


class Evidence:
    """The evidence of a network with δ = 0 as a function of one vector h: ln ℓ (d), ln λ₁^(−1/2), ln λ₂^(−1/2), ln σ.

    Args:
        network: gives the features.
        inputs: (N, d).
        targets: (N, C), with unit variance.
        prior_precision: λ₁ = λ₂; None: as h says.
        noise_std: σ; None: as h says.
    """

    def __init__(
        self,
        network: FourierNetwork,
        inputs: Tensor,
        targets: Tensor,
        prior_precision: float | None = None,
        noise_std: float | None = None,
    ) -> None:
        self.network, self.inputs, self.targets = network, inputs, targets
        d = inputs.shape[1]
        weight_std = _WEIGHT_STD.at(None if prior_precision is None else prior_precision**-0.5)
        priors = [_length_scale(d)] * d + [weight_std] * 2 + [_NOISE.at(noise_std)]
        rows = [(prior.mean, prior.std, prior.low, prior.high) for prior in priors]
        self.means, self._stds, self._low, self._high = inputs.new_tensor(rows).T

    def values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ℓ (d,), both λ^(−1/2) (2,) and σ, within their bounds."""
        values = torch.maximum(torch.minimum(h, self._high), self._low).exp()
        return values[:-3], values[-3:-1], values[-1]

    def log_density(self, h: Tensor) -> Tensor:
        """Return the logarithm of the evidence times the prior at h, up to a constant."""
        _, factor = self._root_and_factor(h)
        halves = torch.linalg.solve_triangular(factor, self.targets, upper=False)
        evidence = -0.5 * halves.square().sum() - self.targets.shape[1] * factor.diagonal().log().sum()
        return evidence - 0.5 * ((h - self.means) / self._stds).square().sum()

    def weights(self, h: Tensor) -> Tensor:
        """Return the modes of W₁, W₂ and b at h, side by side: (C, number of features)."""
        root, factor = self._root_and_factor(h)
        whitened = root.T @ torch.cholesky_solve(self.targets, factor)
        return (whitened * self._units(h)[:, None]).T

    def _units(self, h: Tensor) -> Tensor:
        """Return λ^(−1/2) of every feature."""
        _, stds, _ = self.values(h)
        widths = self.network.joint.in_features, self.network.single.in_features
        bias = stds.new_full((1,), _BIAS_PRECISION**-0.5)
        return torch.cat([stds[0].expand(widths[0]), stds[1].expand(widths[1]), bias])

    def _root_and_factor(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return F diag(λ^(−1/2)), with a column for b, and the Cholesky factor of K."""
        length_scales, _, noise = self.values(h)
        joint, single = self.network.features(self.inputs, length_scales)
        root = torch.cat([joint, single, joint.new_ones(len(joint), 1)], dim=1) * self._units(h)
        identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
        return root, torch.linalg.cholesky(root @ root.T + noise**2 * identity)


def tuned_by_evidence(
    network: FourierNetwork,
    inputs: Tensor,
    targets: Tensor,
    prior_precision: float | None,
    noise_std: float | None,
) -> Tuned:
    """Set length scales and weights of a network to their modes, and return λ and σ.

    Cost: N²·F + N³/3 for F features, about 100 times; memory N·F.

    Args:
        network: changed in place; its parameters are in float64.
        inputs: (N, d).
        targets: (N, C), with unit variance.
        prior_precision: λ of both weights; None: one each by the evidence.
        noise_std: σ; None: by the evidence.
    """
    evidence = Evidence(network, inputs, targets, prior_precision, noise_std)
    h = evidence.means.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [h], max_iter=_MAX_ITERATIONS, history_size=20, tolerance_change=1e-6, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -evidence.log_density(h)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    with torch.no_grad():
        length_scales, stds, noise = evidence.values(h)
        joint, single, bias = evidence.weights(h).split([network.joint.in_features, network.single.in_features, 1], 1)
        network.length_scales.copy_(length_scales)
        network.change.zero_()
        network.joint.weight.copy_(joint)
        network.single.weight.copy_(single)
        network.joint.bias.copy_(bias.squeeze(1))
        priors = {
            "change": _CHANGE_PRECISION,
            "joint.weight": float(stds[0]) ** -2,
            "joint.bias": _BIAS_PRECISION,
            "single.weight": float(stds[1]) ** -2,
        }
        return Tuned(priors, float(noise), float(evidence.log_density(h)))
