"""What was fitted, as text."""

from collections import Counter

from sublaplace.fitting.fitted import GIVEN, Fitted
from sublaplace.model.layer_priors import layer_of
from sublaplace.posteriors.protocol import Posterior
from sublaplace.runtime.memory import readable


def summary_text(title: str, fitted: Fitted) -> str:
    """Return sizes, λ, σ, how parameters are treated, and what each stage of the fit took."""
    posterior, survey, linearization = fitted.posterior, fitted.survey, fitted.linearization
    layout = linearization.layout
    how = "given" if fitted.chosen_by == GIVEN else f"by {fitted.chosen_by}"
    lines = [
        title,
        _line("parameters p", f"{layout.num_parameters:,} in {len(layout.names)} tensors ({linearization.dtype})"),
        _line("prior precision λ", f"{posterior.prior_precision:.6g} ({how})"),
    ]
    if fitted.units is not None:
        by_layer = {layer_of(name): posterior.prior_precision / unit**2 for name, unit in fitted.units.items()}
        least, most = (f(by_layer, key=by_layer.__getitem__) for f in (min, max))
        ends = f"{by_layer[least]:.3g} ({least}) to {by_layer[most]:.3g} ({most})"
        lines.append(_line("λ per layer", ends))
    likelihood = survey.likelihood
    if likelihood.has_noise:
        stds = ", ".join(f"{variance**0.5:.6g}" for variance in likelihood.noise_variances)
        lines.append(_line("noise σ", f"{stds}{' (estimated)' if likelihood.noise_estimate else ''}"))
    if likelihood.has_probabilities and "validation" not in fitted.chosen_by:
        lines.append(_line("", "chosen without validation data, which would help: fit(train_loader, val_loader)"))
    outputs = f"{survey.num_outputs} output{'s' if survey.num_outputs != 1 else ''}"
    outputs = outputs if survey.layout is None else survey.layout.described()
    lines.append(_line("data N", f"{survey.num_data:,} inputs, {outputs}"))
    lines += _structure(posterior, fitted.dim_note)
    if fitted.captured is not None:
        share = f"at least {fitted.captured:.1%} of the full trace, on subspace inputs (held back if any)"
        lines.append(_line("captured share", share))
    if ratios := fitted.kfac_trace_ratios:
        least, most = (f(ratios, key=ratios.__getitem__) for f in (min, max))
        ends = f"{ratios[least]:.2f} ({least}) to {ratios[most]:.2f} ({most})"
        lines.append(_line("KFAC trace / exact", f"{ends}, on a few inputs"))
    if fitted.directions:
        lines.append(_line("directions", fitted.directions))
    lines.append(_line("backward passes", f"{linearization.passes:,} through one input"))
    if linearization.forward_passes:
        lines.append(_line("forward mode", f"{linearization.forward_passes:,} products through one input"))
    for name, why in linearization.unusual_parameters().items():
        lines.append(_line("general path", f"{name}: {why}"))
    for name, stage in fitted.stages.items():
        peak = "" if stage.peak_bytes is None else f", peak memory so far {readable(stage.peak_bytes)}"
        lines.append(_line(name, f"{stage.seconds:.2f} s{peak}"))
    return "\n".join(lines)


def _line(name: str, value: str) -> str:
    return f"  {name:<20}{value}"


def _structure(posterior: Posterior, dim_note: str) -> list[str]:
    """Return lines about the parts that the posterior is made of."""
    tensors, _ = posterior.stored()
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    lines = []
    if posterior.subspace is not None:
        lines.append(_line("dimension s", f"{posterior.dim:,}{f' ({dim_note})' if dim_note else ''}"))
    if posterior.outside is not None:
        kinds = Counter(type(part).__name__.removesuffix("Part").lower() for part in posterior.outside.parts.values())
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        title = "blocks outside" if posterior.outside.covers_all else "last layer alone"
        lines.append(_line(title, f"{counted} (one per parameter)"))
        if posterior.outside.weight != 1.0:
            lines.append(_line("their weight", f"{posterior.outside.weight:g}"))
    return [*lines, _line("memory held", readable(size))]
