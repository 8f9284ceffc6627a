"""The pictures of the demonstration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_comparison import OPTIMUM, Comparison, divergence, fitted, predictive
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sublaplace import Complement, SubspaceLaplace, metrics

# Colours of Okabe and Ito, which readers with every kind of colour vision can tell apart.
RED, BLUE, GREEN, PINK, AMBER, SKY = "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
INK, GREY, VIOLET, BROWN = "#333333", "#8C8C8C", "#5D3A9B", "#8C510A"
# As in the paper: low-rank solid, subsets dashed, the optimum dash-dotted.
STYLES: dict[str, dict[str, Any]] = {
    "lowrank-kfac": {"color": RED, "linestyle": "-", "marker": "o", "linewidth": 2.6, "zorder": 4},
    "lowrank-diagonal": {"color": BLUE, "linestyle": "-", "marker": "s"},
    "lowrank-isotropic": {"color": GREEN, "linestyle": "-", "marker": "^"},
    "lowrank-ggn": {"color": PINK, "linestyle": "-", "marker": "v"},
    "lowrank-correction": {"color": BROWN, "linestyle": "-", "marker": "D"},
    "subset-magnitude": {"color": AMBER, "linestyle": "--", "marker": "o"},
    "subset-diagonal": {"color": SKY, "linestyle": "--", "marker": "s"},
    "subset-swag": {"color": GREY, "linestyle": "--", "marker": "^"},
    "last-layer": {"color": VIOLET, "linestyle": "none", "marker": "*", "markersize": 13},
    OPTIMUM: {"color": "black", "linestyle": "-.", "linewidth": 2.0, "zorder": 5},
}
FULL: dict[str, Any] = {"color": INK, "linestyle": ":", "linewidth": 2.0}
PAGE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
}


@rc_context(PAGE)
def draw_bands(comparison: Comparison, path: Path, small: int = 5, large: int = 20) -> None:
    """Draw mean ± 2 standard deviations of lowrank-kfac over a one-dimensional input, beneath the full posterior."""
    grid = torch.linspace(-3.5, 3.5, 351, dtype=torch.float64)[:, None]
    full, from_training = (comparison.posteriors[name] for name in ("full", "lowrank-kfac"))
    whole_range, _ = fitted(comparison.task, "lowrank-kfac", full.prior_precision, subspace_inputs=grid)
    panels = {
        f"s = {small}, subspace from training inputs": from_training.truncated(small),
        f"s = {large}, subspace from training inputs": from_training.truncated(large),
        f"s = {small}, subspace from the whole range": whole_range.truncated(small),
    }
    figure = Figure(figsize=(12.5, 4.3))
    axes = figure.subplots(1, len(panels), sharey=True)
    for ax, (title, la) in zip(axes, panels.items(), strict=True):
        draw_band(ax, la, full, grid)
        ax.scatter(*comparison.task.train, s=9, color=BLUE, label="training data", zorder=3)
        ax.set(title=title, xlabel="input x", xlim=(-3.5, 3.5))
    axes[0].set_ylabel("target y")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path)


def draw_band(ax: Axes, la: SubspaceLaplace, full: SubspaceLaplace, grid: torch.Tensor) -> None:
    """Draw the bands of one posterior, with noise and without, and the outline of the full posterior."""
    prediction = la.predict(grid)
    x, mean = grid[:, 0], prediction.mean[:, 0]
    for covariance, color, label in (
        (prediction.total, "#F9DFCC", "lowrank-kfac ± 2 std, total"),
        (prediction.covariance, "#EFA16B", "lowrank-kfac ± 2 std, epistemic"),
    ):
        width = 2 * covariance[:, 0, 0].sqrt()
        ax.fill_between(x, mean - width, mean + width, color=color, linewidth=0, label=label)
    width = 2 * full.predict(grid).total[:, 0, 0].sqrt()
    ax.plot(x, mean - width, label="full Laplace ± 2 std, total", **FULL)
    ax.plot(x, mean + width, **FULL)
    ax.plot(x, mean, color=INK, linewidth=1.8, label="network")


@rc_context(PAGE)
def draw_certificate(comparison: Comparison, path: Path, dim: int = 15) -> None:
    """Draw bounds of the full posterior over a one-dimensional input, and captured share and divergence against s."""
    task, full = comparison.task, comparison.posteriors["full"]
    largest = comparison.posteriors["lowrank-kfac"].dim
    la = SubspaceLaplace(
        task.model,
        task.likelihood,
        dim=largest,
        complement=Complement("kfac", weight=1.0),
        prior_precision=full.prior_precision,
    ).fit(task.loader, certify=True)
    figure = Figure(figsize=(12.5, 4.8))
    bands, shares, divergences = figure.subplots(1, 3)
    grid = torch.linspace(-3.5, 3.5, 351, dtype=torch.float64)[:, None]
    some = la.truncated(min(dim, la.dim))
    lower, upper = (ends[:, 0, 0].sqrt() for ends in some.bounds(grid))
    x = grid[:, 0]
    bands.fill_between(x, lower, upper, color="#F9DFCC", linewidth=0, label="certified bounds")
    bands.plot(x, lower, color=RED, label="subspace (lower bound)")
    bands.plot(x, some.functional_variance(grid)[:, 0].sqrt(), color=BLUE, label="subspace + KFAC outside")
    bands.plot(x, full.functional_variance(grid)[:, 0].sqrt(), label="full Laplace", **FULL)
    bands.set(title=f"standard deviation, s = {some.dim}", xlabel="input x", ylabel="epistemic standard deviation")
    traces = la.leading_traces(task.drawn)
    full_trace = full.functional_variance(task.drawn).sum()
    dims = torch.arange(1, len(traces) + 1)
    shares.plot(dims, 100 * traces / full_trace, color=RED, linewidth=3, label="captured")
    shares.plot(dims, 100 * la.captured_share(task.drawn), color=INK, linestyle="--", label="guaranteed")
    shares.set(title="share of the full trace", xlabel="dimension s", ylabel="%", xscale="log", ylim=(0, 105))
    reference = predictive(full, task.drawn)
    kfac = SubspaceLaplace(
        task.model,
        task.likelihood,
        projector=None,
        complement=Complement("kfac", weight=1.0),
        prior_precision=full.prior_precision,
    ).fit(task.loader)
    for posterior, style in (
        (comparison.posteriors["lowrank-kfac"], {"color": RED, "label": "subspace"}),
        (la, {"color": BLUE, "label": "subspace + KFAC outside"}),
    ):
        chosen = [s for s in task.dims if s < posterior.dim] + [posterior.dim]
        kl = [divergence(task, reference, predictive(posterior.truncated(s), task.drawn)) for s in chosen]
        divergences.plot(chosen, kl, marker="o", markersize=4, **style)
    kfac_kl = divergence(task, reference, predictive(kfac, task.drawn))
    divergences.axhline(kfac_kl, color=GREEN, linestyle="--", label="KFAC Laplace, no subspace")
    divergences.axhline(comparison.map_kl, color=GREY, linewidth=1, label="map (no uncertainty)")
    divergences.set(title="KL divergence from the full posterior", xlabel="dimension s", xscale="log", yscale="log")
    for ax in (shares, divergences):
        ax.xaxis.set_major_formatter("{x:g}")
    for ax in (bands, shares, divergences):
        ax.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    figure.savefig(path)


@rc_context(PAGE)
def draw_sweeps(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw the KL divergence from the full posterior, and the log-trace, against the dimension of the subspace."""
    figure = Figure(figsize=(12, 4.1 * len(comparisons)))
    axes = figure.subplots(len(comparisons), 2, squeeze=False)
    for (left, right), comparison in zip(axes, comparisons, strict=True):
        for method, sweep in comparison.sweeps.items():
            style = {"markersize": 4.5, "linewidth": 1.6, **STYLES[method]}
            left.plot(sweep.dims, sweep.kl, label=method, **style)
            right.plot(sweep.dims, sweep.log_trace, **style)
        left.axhline(comparison.map_kl, color=GREY, linewidth=1, zorder=0, label="map (no uncertainty)")
        right.axhline(comparison.full_log_trace, **FULL)
        left.plot([], [], label="full", **FULL)  # its divergence is zero, below every logarithmic axis
        left.set(yscale="log", ylabel="KL divergence from the full posterior")
        right.set(ylabel="log-trace of the predictive covariance")
        limit_trace_axis(right, comparison)
        for ax in (left, right):
            p = comparison.posteriors["full"].num_parameters
            ax.set(xscale="log", xlabel="dimension s of the subspace", title=f"{comparison.task.name}, p = {p:,}")
            ax.xaxis.set_major_formatter("{x:g}")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False, labelspacing=0.8)
    figure.savefig(path)


def limit_trace_axis(ax: Axes, comparison: Comparison, depth: float = 9) -> None:
    """Show what is within e^depth of the full posterior's trace, and name the methods that lie below."""
    bottom = comparison.full_log_trace - depth
    ax.set_ylim(bottom, comparison.full_log_trace + 0.06 * depth)
    ends = {method: sweep.log_trace[-1] for method, sweep in comparison.sweeps.items() if sweep.log_trace[-1] < bottom}
    values = {method: "−∞" if end == -np.inf else f"{end:.0f}".replace("-", "−") for method, end in ends.items()}
    note = "\n".join(f"{method} lies below, at {value}" for method, value in values.items())
    ax.text(0.98, 0.03, note, transform=ax.transAxes, ha="right", va="bottom", color=INK)


@rc_context(PAGE)
def draw_reliability(comparison: Comparison, path: Path, bins: int = 10) -> None:
    """Draw accuracy against confidence of the top class, above the number of predictions in each bin."""
    panels = {
        "map": "plain network",
        "lowrank-kfac": f"lowrank-kfac, s = {comparison.posteriors['lowrank-kfac'].dim}",
        "full": f"full Laplace, p = {comparison.posteriors['full'].dim:,}",
    }
    ece = {row.method: row.ece for row in comparison.rows}
    targets = comparison.task.test[1]
    left_edges = np.arange(bins) / bins
    bars: dict[str, Any] = {"width": 1 / bins, "align": "edge", "edgecolor": "white"}
    figure = Figure(figsize=(12, 5.2))
    axes = figure.subplots(2, len(panels), sharex=True, sharey="row", height_ratios=[3, 1])
    for (upper, lower), (method, title) in zip(axes.T, panels.items(), strict=True):
        diagram = metrics.reliability_bins(comparison.predictions[method].probabilities, targets, bins)
        upper.bar(left_edges, diagram.accuracy.numpy(), color="#7FB8D8", label="accuracy in the bin", **bars)
        upper.plot([0, 1], [0, 1], label="perfect calibration", **FULL)
        upper.plot(
            diagram.confidence, diagram.accuracy, "o", color=RED, label="accuracy at the mean confidence", clip_on=False
        )
        upper.text(0.04, 0.93, f"ECE {ece[method]:.3f}", transform=upper.transAxes, fontsize=13)
        upper.set(title=title, ylim=(0, 1.02))
        counts = lower.bar(left_edges, diagram.count.numpy(), color="#BBBBBB", **bars)
        lower.bar_label(counts, [str(n) if n else "" for n in diagram.count.tolist()], fontsize=9)
        lower.set(xlabel="confidence of the top class", yscale="log", xlim=(0, 1), ylim=(0.8, 8 * len(targets)))
    axes[0, 0].set_ylabel("accuracy")
    axes[1, 0].set_ylabel("predictions")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)
