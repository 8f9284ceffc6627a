r"""Split-conformal intervals and sets: a guarantee of coverage on top of predicted uncertainties.

The scores of n calibration data, which neither trained nor tuned the network, are compared with those of new data. If
all data are exchangeable, a new target has a score of at most the ⌈(n + 1) · level⌉-th smallest one with a probability
of at least `level`, and at most level + 1/(n + 1) without ties. The guarantee holds for finite n, in the mean over
calibration and new data, whatever the network. Good uncertainties make intervals and sets small, not valid.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from sublaplace.model.likelihoods.links import Interval
from sublaplace.model.prediction import Prediction


@dataclass(frozen=True)
class ConformalIntervals:
    """Intervals m ± q·s with the predicted standard deviation s, noise included, and one factor q per output."""

    factors: Tensor
    """q of each output, (C,), for |y − m|/s; 1.64 at 90 % if predictions were calibrated already."""
    level: float

    @classmethod
    def of(cls, prediction: Prediction, targets: Tensor, level: float = 0.9) -> "ConformalIntervals":
        """Calibrate on a prediction of held-out inputs and their targets.

        The guarantee holds for each output on its own. Cost: O(nC log n).

        Args:
            prediction: of regression.
            targets: (n, C).
            level: the coverage that is guaranteed.

        Raises:
            ValueError: if shapes do not match, or n is too small for the level.
        """
        if targets.shape != prediction.mean.shape:
            raise ValueError(
                f"targets must have the shape of the predicted means, {tuple(prediction.mean.shape)}, not "
                f"{tuple(targets.shape)}."
            )
        center, spread = _center_and_spread(prediction)
        scores = (targets.to(center) - center).abs() / spread
        return cls(_guaranteed_quantile(scores, level), level)

    def interval(self, prediction: Prediction) -> Interval:
        """Return the interval of each target of new inputs: two tensors (n, C)."""
        _, spread = _center_and_spread(prediction)
        half = (self.factors.to(spread.device) * spread).to(prediction.mean.dtype)
        return Interval(prediction.mean - half, prediction.mean + half)


@dataclass(frozen=True)
class ConformalSets:
    """Sets of all classes with a probability of at least a threshold."""

    threshold: float
    level: float

    @classmethod
    def of(cls, prediction: Prediction, targets: Tensor, level: float = 0.9) -> "ConformalSets":
        """Calibrate on a prediction of held-out inputs and their classes.

        The score is 1 − the probability of the true class. Cost: O(n log n).

        Args:
            prediction: of classes.
            targets: class indices (n,).
            level: the coverage that is guaranteed.

        Raises:
            ValueError: if shapes do not match, or n is too small for the level.
        """
        probabilities = _class_probabilities(prediction)
        if targets.shape != (len(probabilities),) or targets.is_floating_point():
            raise ValueError(
                f"targets must be class indices of shape ({len(probabilities)},), not {targets.dtype} of shape "
                f"{tuple(targets.shape)}."
            )
        own = probabilities.gather(1, targets.to(probabilities.device)[:, None])
        return cls(1 - float(_guaranteed_quantile(1 - own, level)), level)

    def contains(self, prediction: Prediction) -> Tensor:
        """Return which classes are in the set of each new input: (n, C), bool. A set may be empty."""
        # Computed as the scores were, so that a score equal to the threshold counts.
        return 1 - _class_probabilities(prediction) <= 1 - self.threshold


def _center_and_spread(prediction: Prediction) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation with the noise, (n, C) in float64."""
    lower, upper = prediction.interval(_ONE_SIGMA)  # raises the right error for classes
    center = prediction.mean.double()
    return center, (upper.double() - lower.double()) / 2


_ONE_SIGMA = 0.682689492137085897  # P(|z| ≤ 1)


def _class_probabilities(prediction: Prediction) -> Tensor:
    """Return probabilities of classes in float64, or raise ValueError for anything else."""
    probabilities = prediction.probabilities.double()  # raises for regression
    if prediction.layout is not None:
        raise ValueError(
            "Sets of classes are for one prediction per input. The positions of an input are not exchangeable, so that "
            "no coverage could be guaranteed for them."
        )
    if ((probabilities.sum(1) - 1).abs() > 1e-4).any():
        raise ValueError("Sets of classes need probabilities that sum to one; yes/no outputs are not classes.")
    return probabilities


def _guaranteed_quantile(scores: Tensor, level: float) -> Tensor:
    """Return the ⌈(n + 1) · level⌉-th smallest score of each column, (n, C) → (C,)."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, but it is {level}.")
    n = len(scores)
    place = ceil((n + 1) * level - 1e-9)  # 10 · 0.9 is a little more than 9 in floating point
    if place > n:
        raise ValueError(
            f"{n} calibration data cannot guarantee a coverage of {level}; at least {ceil(level / (1 - level) - 1e-9)} "
            "are needed."
        )
    if not torch.isfinite(scores).all():
        raise ValueError("Scores hold NaN or infinity: check the targets and the predictions.")
    return scores.kthvalue(place, dim=0).values
