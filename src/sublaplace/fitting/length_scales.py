r"""Length scales, prior precisions and noise of a `FourierNetwork` by the evidence.

While δ = 0, the network is linear in its weights. With features F₁ and F₂ of the training inputs, every output is

.. math:: y ~ N(0, K), \quad K = F_1 F_1^T / λ_1 + F_2 F_2^T / λ_2 + 1 1^T + σ² I.

The logarithms of the length scales, of the prior standard deviations λ^(−1/2) and of σ have normal priors, which matter
for few data only. Their mode is searched first. Then the network is trained: the best weights follow from δ in closed
form, so that the MAP of all parameters is a search over δ alone. Both searches use L-BFGS and automatic
differentiation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from sublaplace.model.fourier import FourierNetwork

_CHANGE_PRECISION = 25.0  # λ of δ: length scales by the evidence are known to 20 %
_BIAS_PRECISION = 1.0  # targets have unit variance


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
    mean = log(0.6) + 0.5 * log(dim)
    return _LogNormal(mean, 1.0, mean - 4.0, mean + 4.0)


@dataclass(frozen=True)
class TrainedWithLengthScales:
    """λ of every parameter by name, and σ."""

    prior_precision: dict[str, float]
    noise_std: float


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
        evidence = -self._misfit(factor) - self.targets.shape[1] * factor.diagonal().log().sum()
        return evidence - 0.5 * ((h - self.means) / self._stds).square().sum()

    def objective(self, h: Tensor, change: Tensor) -> Tensor:
        """Return the negative log posterior of the parameters at δ and the best weights for it, up to a constant."""
        _, factor = self._root_and_factor(h, change)
        return self._misfit(factor) + 0.5 * _CHANGE_PRECISION * change.square().sum()

    def weights(self, h: Tensor, change: Tensor) -> Tensor:
        """Return the best W₁, W₂ and b at δ, side by side: (C, number of features)."""
        root, factor = self._root_and_factor(h, change)
        whitened = root.T @ torch.cholesky_solve(self.targets, factor)
        return (whitened * self._units(h)[:, None]).T

    def _misfit(self, factor: Tensor) -> Tensor:
        """Return yᵀK⁻¹y / 2, summed over outputs; it is the smallest ‖y − f‖²/2σ² + Σ λ W²/2."""
        return 0.5 * torch.linalg.solve_triangular(factor, self.targets, upper=False).square().sum()

    def _units(self, h: Tensor) -> Tensor:
        """Return λ^(−1/2) of every feature."""
        _, stds, _ = self.values(h)
        widths = self.network.joint.in_features, self.network.single.in_features
        bias = stds.new_full((1,), _BIAS_PRECISION**-0.5)
        return torch.cat([stds[0].expand(widths[0]), stds[1].expand(widths[1]), bias])

    def _root_and_factor(self, h: Tensor, change: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return F diag(λ^(−1/2)), with a column for b, and the Cholesky factor of K."""
        length_scales, _, noise = self.values(h)
        joint, single = self.network.features(self.inputs, length_scales, change)
        root = torch.cat([joint, single, joint.new_ones(len(joint), 1)], dim=1) * self._units(h)
        identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
        return root, torch.linalg.cholesky(root @ root.T + noise**2 * identity)


def trained_with_length_scales(
    network: FourierNetwork,
    inputs: Tensor,
    targets: Tensor,
    prior_precision: float | None,
    noise_std: float | None,
    max_steps: int,
) -> TrainedWithLengthScales:
    """Train a network to its MAP, with length scales, λ and σ by the evidence.

    First comes the mode of length scales, λ and σ at δ = 0, then the one of all parameters given these. The best
    weights follow from δ in closed form, so that the second search is over δ alone.

    Cost: 2·N²·F + N³/3 for F features, up to 2.5·`max_steps` times; memory N·F.

    Args:
        network: trained in place; its parameters are in float64.
        inputs: (N, d).
        targets: (N, C), with unit variance.
        prior_precision: λ of both weights; None: one each by the evidence.
        noise_std: σ; None: by the evidence.
        max_steps: at most, of L-BFGS, in each of the two searches.
    """
    evidence = Evidence(network, inputs, targets, prior_precision, noise_std)
    h = _minimised(lambda vector: -evidence.log_density(vector), evidence.means, max_steps)
    change = _minimised(lambda vector: evidence.objective(h, vector), torch.zeros_like(network.change), max_steps)
    with torch.no_grad():
        length_scales, stds, noise = evidence.values(h)
        widths = [network.joint.in_features, network.single.in_features, 1]
        joint, single, bias = evidence.weights(h, change).split(widths, 1)
        network.length_scales.copy_(length_scales)
        network.change.copy_(change)
        network.joint.weight.copy_(joint)
        network.single.weight.copy_(single)
        network.joint.bias.copy_(bias.squeeze(1))
        priors = {
            "change": _CHANGE_PRECISION,
            "joint.weight": float(stds[0]) ** -2,
            "joint.bias": _BIAS_PRECISION,
            "single.weight": float(stds[1]) ** -2,
        }
        return TrainedWithLengthScales(priors, float(noise))


def _minimised(function: Callable[[Tensor], Tensor], start: Tensor, max_steps: int) -> Tensor:
    """Return the minimum of a function that L-BFGS finds from a start."""
    vector = start.detach().clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [vector], max_iter=max_steps, history_size=20, tolerance_change=1e-6, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = function(vector)
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    return vector.detach()
