"""The figures: lines against s in the paper's line styles and in colours that the colour-blind can tell apart."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.typing import LineStyleType

from experiments.report.document import Figure
from experiments.report.numbers import WITHOUT_DIMENSION, Measurements

# Okabe and Ito's palette, without its yellow, which is too pale on white.
BLACK, GREY = "#000000", "#757575"
ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
SOLID: LineStyleType = "-"
DASHED: LineStyleType = (0, (4, 2))
DASH_DOTTED: LineStyleType = "-."
DOTTED: LineStyleType = ":"
SMALLEST_SHARE = 1e-4  # of the largest divergence, or trace; below it lines leave the panel


@dataclass(frozen=True)
class Style:
    colour: str
    line: LineStyleType
    marker: str


# Low-rank methods are solid, subsets dashed, the optimum dash-dotted and the full posterior dotted, as in the paper.
STYLES = {
    "lowrank-kfac": Style(VERMILLION, SOLID, "o"),
    "lowrank-diagonal": Style(BLUE, SOLID, "s"),
    "lowrank-isotropic": Style(SKY, SOLID, "^"),
    "lowrank-ggn": Style(GREEN, SOLID, "D"),
    "subset-magnitude": Style(ORANGE, DASHED, "v"),
    "subset-diagonal": Style(BLUE, DASHED, "x"),
    "subset-swag": Style(PURPLE, DASHED, "P"),
    "last-layer": Style(GREY, SOLID, "*"),
    "lowrankopt-ggn": Style(BLACK, DASH_DOTTED, ""),
    "full": Style(BLACK, DOTTED, ""),
    "map": Style(GREY, SOLID, ""),
}


@dataclass(frozen=True)
class Panel:
    """One plot of a figure: a metric against s."""

    metric: str
    label: str
    logarithmic: bool = False


def legend(methods: Sequence[str]) -> Figure:
    """Draw the key to all figures."""
    drawing = Drawing(figsize=(4.4, 0.24 * ((len(methods) + 1) // 2) + 0.2))
    handles = [
        Line2D([], [], color=style.colour, linestyle=style.line, marker=style.marker, label=name)
        for name, style in STYLES.items()
        if name in methods
    ]
    drawing.legend(handles=handles, ncols=2, loc="center", frameon=False, fontsize=9, handlelength=3.2)
    return Figure("legend", "Key: " + ", ".join(str(handle.get_label()) for handle in handles), _svg(drawing, "legend"))


def against_dimension(
    measurements: Measurements,
    dataset: str,
    panels: Sequence[Panel],
    methods: Sequence[str],
    dims: Callable[[int], bool],
    name: str,
    title: str,
) -> Figure:
    """Draw metrics of one data set against the s that `dims` accepts, a panel per metric; bands are standard errors."""
    drawing = Drawing(figsize=(3.6, 0.5 + 2.3 * len(panels)), layout="constrained")
    axes = drawing.subplots(len(panels), squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        for method in methods:
            _draw(axis, measurements, dataset, panel.metric, method, dims)
        axis.set_ylabel(panel.label)
        axis.grid(alpha=0.25)
        if panel.logarithmic:
            axis.set_yscale("log")
            bottom, top = axis.get_ylim()
            axis.set_ylim(max(bottom, SMALLEST_SHARE * top), top)
        elif panel.metric == "log_trace":
            _, top = axis.get_ylim()
            axis.set_ylim(_lowest_shown(axis, top + np.log(SMALLEST_SHARE)), top)
    axes[0].set_title(title)
    axes[-1].set_xlabel("s")
    alt = f"{' and '.join(panel.label for panel in panels)} of {dataset} against s for {', '.join(methods)}"
    return Figure(name, alt, _svg(drawing, name))


def _lowest_shown(axis: Axes, floor: float) -> float:
    """Return the lower end of an axis: the minimum of the curves that rise above `floor`, or slightly below `floor`."""
    bottom, top = axis.get_ylim()
    curves = [np.asarray(line.get_ydata(), dtype=float) for line in axis.get_lines()]
    rising = [curve.min() for curve in curves if curve.max() > floor]
    return max(bottom, min([floor, *rising]) - 0.05 * (top - floor), floor - 0.5 * (top - floor))


def _draw(
    axis: Axes, measurements: Measurements, dataset: str, metric: str, method: str, accepted: Callable[[int], bool]
) -> None:
    style = STYLES[method]
    if method in ("full", "map"):
        estimate = measurements.estimate(dataset, method, metric)
        if estimate is not None and np.isfinite(estimate.mean) and (metric, method) not in _TRIVIAL:
            axis.axhline(estimate.mean, color=style.colour, linestyle=style.line, linewidth=1.2)
        return
    if method in WITHOUT_DIMENSION:
        rows = measurements.rows
        dims = sorted(set(rows.loc[(rows["dataset"] == dataset) & (rows["method"] == method), "s"]))
    else:
        dims = measurements.dims(dataset, method, metric)
    points = [(s, measurements.estimate(dataset, method, metric, s)) for s in dims if accepted(s)]
    shown = [(s, estimate) for s, estimate in points if estimate is not None and np.isfinite(estimate.mean)]
    if not shown:
        return
    s = np.array([point[0] for point in shown])
    mean = np.array([point[1].mean for point in shown])
    error = np.array([point[1].standard_error or 0.0 for point in shown])
    axis.plot(s, mean, color=style.colour, linestyle=style.line, marker=style.marker, markersize=4, linewidth=1.4)
    axis.fill_between(s, mean - error, mean + error, color=style.colour, alpha=0.2, linewidth=0)


_TRIVIAL = {("kl", "full"), ("kl_mean", "full"), ("log_trace", "map")}  # zero, zero and minus infinity by definition


def heat_map(path: Path, dataset: str) -> Figure:
    """Draw |∂f/∂θ| of test inputs (rows) for groups of parameters, the most sensitive first; below it, the mean."""
    with np.load(path) as arrays:
        mean, values = arrays["sensitivity"], arrays["heat_map"]
    floor = values[values > 0].min() if (values > 0).any() else 1.0
    drawing = Drawing(figsize=(4.6, 4.0), layout="constrained")
    top, bottom = drawing.subplots(2, height_ratios=(3, 2))
    image = top.imshow(
        np.log10(np.maximum(values, floor)),
        aspect="auto",
        cmap="cividis",
        extent=(0, len(mean), len(values), 0),
        interpolation="nearest",
    )
    drawing.colorbar(image, ax=top, label="log₁₀ sensitivity")
    top.set_title(dataset)
    top.set_ylabel("test input")
    bottom.plot(np.arange(1, len(mean) + 1), mean, color=BLUE)
    bottom.set_yscale("log")
    bottom.set_xlim(0, len(mean))
    bottom.set_xlabel("parameter, sorted")
    bottom.set_ylabel("mean sensitivity")
    bottom.grid(alpha=0.25)
    name = f"dead-parameters-{dataset}"
    return Figure(name, f"Sensitivity of every parameter on test inputs of {dataset}", _svg(drawing, name))


def _svg(drawing: Drawing, name: str) -> bytes:
    """Return the same bytes for the same figure: without a date, and with identifiers that depend only on its name."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        drawing.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
