"""The picture of the benchmark: NLL and calibration error of all methods, regression beside classification."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.calibration.methods import Method
from experiments.calibration.statistics import Mean, common_sets, mean_over_sets, values_of
from experiments.calibration.table import Line

_OURS, _WITH_VALIDATION, _WITHOUT = "#c0392b", "#2c6fbb", "#8a8a8a"
_HEADINGS = {"nll": "NLL", "coverage_error": "|coverage − 0.9|", "ece": "ECE"}


def draw(lines: Sequence[Line], methods: Sequence[Method], errors: Mapping[str, str], path: Path) -> None:
    """Draw the means over the data sets, with standard errors over the splits; far outliers are written at the edge.

    `errors` names the calibration error of each task.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = [task for task in errors if any(line.task == task for line in lines)]
    with plt.rc_context({"svg.hashsalt": "calibration", "font.size": 9}):
        figure, axes = plt.subplots(len(tasks), 2, figsize=(9.5, 0.5 + 3.1 * len(tasks)), squeeze=False)
        for row, task in zip(axes, tasks, strict=True):
            of_task = [line for line in lines if line.task == task]
            for axis, score in zip(row, ("nll", errors[task]), strict=True):
                _panel(axis, of_task, methods, score)
            row[0].set_title(task, loc="left", fontweight="bold")
            row[1].set_yticklabels([])
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _panel(axis: Any, lines: Sequence[Line], methods: Sequence[Method], score: str) -> None:
    values = values_of(lines, score)
    shown = [method for method in methods if any(line.method == method.name for line in lines)]
    names = common_sets(values, [method.name for method in shown])
    if not names:
        return
    means = [mean_over_sets(values, method.name, names) for method in shown]
    edge = _edge(means)
    for place, (method, mean) in enumerate(zip(reversed(shown), reversed(means), strict=True)):
        colour = _OURS if method.name.startswith("ours") else _WITH_VALIDATION if method.uses_validation else _WITHOUT
        if mean.value > edge:
            axis.text(edge, place, f"{mean.value:.2g} →", ha="right", va="center", color=colour)
        else:
            error = 0.0 if math.isnan(mean.error) else mean.error
            axis.errorbar(mean.value, place, xerr=error, fmt="o", color=colour, capsize=2, markersize=5)
    axis.set_yticks(range(len(shown)), [method.label for method in reversed(shown)])
    axis.set_xlim(right=edge)
    axis.set_ylim(-0.6, len(shown) - 0.4)
    axis.set_xlabel(f"{_HEADINGS[score]} (mean of {len(names)} sets; less is better)")
    axis.grid(axis="x", alpha=0.3)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _edge(means: Sequence[Mean]) -> float:
    """Return the right end of the axis: three times as far from the best method as the median method is."""
    ordered = sorted(mean.value for mean in means)
    best, median = ordered[0], ordered[len(ordered) // 2]
    return min(ordered[-1] + 0.05 * (ordered[-1] - best), best + 3 * (median - best)) + 1e-12
