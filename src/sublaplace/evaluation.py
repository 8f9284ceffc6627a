"""The plain network next to the posterior, on data that neither has seen."""

from dataclasses import dataclass, field
from math import sqrt
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from sublaplace import metrics

LEVELS = tuple(k / 20 for k in range(1, 20))
"""Levels of the intervals whose coverage the figure shows."""

COLUMNS = {
    "nll": ("NLL", ".4f"),
    "accuracy": ("accuracy", ".1%"),
    "rmse": ("RMSE", ".4f"),
    "ece": ("ECE", ".4f"),
    "brier": ("Brier", ".4f"),
    "crps": ("CRPS", ".4f"),
    "coverage": ("90 % interval", ".1%"),
}
"""Title and format of every score in the printed table."""


_LARGEST_MARKER = 500.0  # points², the area of a marker for all inputs


@dataclass(frozen=True)
class Judged:
    """The scores of one predictor.

    Args:
        scores: "nll", then "accuracy", "ece" and "brier", or "rmse", "crps" and "coverage" of the 90 % interval.
        log_densities: ln p(y|x) of every input: (n,).
        curve: for classification the mean confidence and the accuracy per bin; for regression the level of intervals
            and their coverage.
        counts: for classification the number of inputs in each bin; None where every point stands for all inputs.
        rejection: the error of the predictions that are kept, if the most uncertain are rejected. For classification
            the share of wrong classes by 1 − the largest probability; for regression the squared error by the variance.
    """

    scores: dict[str, float]
    log_densities: Tensor = field(repr=False)
    curve: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    counts: Tensor | None = field(default=None, repr=False)
    rejection: metrics.RejectionCurve | None = field(default=None, repr=False)


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Scores of the plain network and of the posterior; shown as a table, `plot` draws a figure."""

    plain: Judged
    posterior: Judged
    num_inputs: int  # or positions of inputs, if there are several
    owners: Tensor | None = None  # the input that each position belongs to: (n,); None: every input has one

    @property
    def gain(self) -> tuple[float, float]:
        """The decrease of the NLL by the posterior, and its standard error, in which inputs are independent."""
        difference = self.posterior.log_densities - self.plain.log_densities
        mean, count = float(difference.mean()), len(difference)
        if self.owners is None:
            spread = float(difference.std(correction=1)) if count > 1 else float("nan")
            return mean, spread / sqrt(count)
        _, places = torch.unique(self.owners, return_inverse=True)
        sums = torch.zeros(int(places.max()) + 1, dtype=difference.dtype, device=difference.device)
        sums.index_add_(0, places, difference - mean)
        inputs = len(sums)
        spread = sqrt(float(sums.square().sum()) * inputs / (inputs - 1)) if inputs > 1 else float("nan")
        return mean, spread / count

    def __repr__(self) -> str:
        names = list(self.plain.scores)
        rows = [["", *(COLUMNS[name][0] for name in names)]]
        for title, judged in (("plain network", self.plain), ("posterior", self.posterior)):
            rows.append([title, *(format(judged.scores[name], COLUMNS[name][1]) for name in names)])
        widths = [max(len(row[k]) for row in rows) for k in range(len(names) + 1)]
        lines = [
            "  ".join(
                cell.ljust(width) if k == 0 else cell.rjust(width)
                for k, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        gain, error = self.gain
        verdict = "better" if gain > 2 * error else "worse" if gain < -2 * error else "no clear difference"
        scored = f"{self.num_inputs:,} {'inputs' if self.owners is None else 'positions'}"
        lines.append(f"NLL {-gain:+.4f} ± {error:.4f} on {scored}: {verdict}")
        return "\n".join(lines)

    def plot(self, axes: Any = None) -> Any:
        """Draw reliability (classification) or coverage (regression) of both, and return the axes.

        In a reliability diagram, the area of a marker is proportional to the number of inputs in its bin.

        Args:
            axes: matplotlib axes to draw into; None: new ones.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        if self.posterior.curve is None:
            raise ValueError("This likelihood has neither classes nor intervals, so there is no calibration to draw.")
        axes = given_or_new(axes)
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, label="calibrated")
        for name, judged, color in (("plain network", self.plain, "C1"), ("posterior", self.posterior, "C0")):
            if judged.curve is not None:
                x, y = (part.tolist() for part in judged.curve)
                if judged.counts is None:
                    axes.plot(x, y, "o-", color=color, markersize=3, label=name)
                else:
                    axes.plot(x, y, color=color, linewidth=1, label=name)
                    areas = _LARGEST_MARKER * judged.counts / judged.counts.sum()
                    axes.scatter(x, y, areas.tolist(), color=color, alpha=0.6, linewidths=0)
        classes = "accuracy" in self.plain.scores
        axes.set_xlabel("confidence" if classes else "level of the interval")
        axes.set_ylabel("accuracy" if classes else "share of targets inside")
        title = None if self.posterior.counts is None else "marker area: inputs per bin"
        axes.legend(loc="upper left", title=title, title_fontsize="small")
        return axes

    def plot_rejection(self, axes: Any = None) -> Any:
        """Draw the error of the kept predictions against their share, for both, and return the axes.

        The legend holds the area under each curve (AURC); smaller is better.

        Args:
            axes: matplotlib axes to draw into; None: new ones.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        if self.posterior.rejection is None:
            raise ValueError("This likelihood has neither classes nor intervals, so there are no errors to draw.")
        axes = given_or_new(axes)
        for name, judged, color in (("plain network", self.plain, "C1"), ("posterior", self.posterior, "C0")):
            if judged.rejection is not None:
                kept, risk = judged.rejection.kept, judged.rejection.risk
                axes.plot(kept.tolist(), risk.tolist(), color=color, label=f"{name}, AURC {float(risk.mean()):.3g}")
        classes = "accuracy" in self.plain.scores
        axes.set(xlabel="share of predictions that are kept", xlim=(0, 1), ylim=(0, None))
        axes.set_ylabel("share of wrong classes among them" if classes else "their mean squared error")
        axes.legend(loc="best")
        return axes


def given_or_new(axes: Any, size: tuple[float, float] = (4.5, 4.2)) -> Any:
    """Return the axes, or new ones in a figure of this size.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install 'sublaplace[plot]'.") from error
    return plt.subplots(figsize=size, layout="constrained")[1] if axes is None else axes


@dataclass(frozen=True)
class ClassPart:
    """What scores need to know of a part of the data: everything but its probabilities (n, C)."""

    log_densities: Tensor  # (n,)
    bins: metrics.ReliabilityBins
    brier: float
    wrong: Tensor  # 1 where the most probable class is not the target, (n,) in float64
    uncertainty: Tensor  # 1 less the probability of that class, (n,) in float64

    @classmethod
    def of(cls, probabilities: Tensor, targets: Tensor, log_densities: Tensor) -> "ClassPart":
        """Score probabilities (n, C) of classes."""
        bins = metrics.reliability_bins(probabilities, targets)
        confidence, top = probabilities.max(1)
        wrong = (top != targets).double()
        return cls(log_densities, bins, metrics.brier(probabilities, targets), wrong, 1 - confidence.double())

    @property
    def count(self) -> int:
        """The number of predictions."""
        return int(self.bins.count.sum())


def judged_classes(parts: list[ClassPart]) -> Judged:
    """Score classes, from the parts of the data."""
    count = torch.stack([part.bins.count for part in parts]).sum(0)
    # Empty bins are NaN.
    confidence, accuracy = (
        torch.stack([(getattr(part.bins, name) * part.bins.count).nan_to_num() for part in parts]).sum(0)
        for name in ("confidence", "accuracy")
    )
    total, filled, log_densities = int(count.sum()), count > 0, torch.cat([part.log_densities for part in parts])
    scores = {
        "nll": -float(log_densities.mean()),
        "accuracy": float(accuracy.sum()) / total,
        "ece": float((accuracy - confidence).abs().sum()) / total,
        "brier": sum(part.brier * part.count for part in parts) / total,
    }
    uncertainty = torch.cat([part.uncertainty for part in parts])
    rejection = metrics.rejection_curve(torch.cat([part.wrong for part in parts]), uncertainty)
    curve = ((confidence / count)[filled], (accuracy / count)[filled])
    return Judged(scores, log_densities, curve, count[filled], rejection)


def judged_values(mean: Tensor, variance: Tensor, targets: Tensor, log_densities: Tensor) -> Judged:
    """Score Gaussian predictions with these means and variances, noise included: (n, C)."""
    distances = ((targets - mean).abs() / variance.sqrt()).double()
    inside = [float((distances <= NormalDist().inv_cdf((1 + level) / 2)).double().mean()) for level in LEVELS]
    scores = {
        "nll": -float(log_densities.mean()),
        "rmse": metrics.rmse(mean, targets),
        "crps": metrics.crps(mean, variance, targets),
        "coverage": inside[LEVELS.index(0.9)],
    }
    curve = torch.tensor(LEVELS, device="cpu"), torch.tensor(inside, device="cpu")
    rejection = metrics.rejection_curve((targets - mean).double().square().mean(1), variance.double().sum(1))
    return Judged(scores, log_densities, curve, rejection=rejection)
