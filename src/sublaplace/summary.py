"""What was fitted, as text."""

from collections import Counter

from sublaplace.complement import ComplementedPosterior
from sublaplace.fitting import Stage
from sublaplace.jacobians import Linearization
from sublaplace.likelihoods import Gaussian
from sublaplace.memory import readable
from sublaplace.posterior import Posterior, SubspacePosterior
from sublaplace.precision import BlockPrecision
from sublaplace.serialization import posterior_tensors
from sublaplace.survey import Survey


def summary_text(
    title: str,
    posterior: Posterior,
    survey: Survey,
    linearization: Linearization,
    stages: dict[str, Stage],
    kfac_trace_ratios: dict[str, float],
    captured: float | None,
) -> str:
    """Sizes, λ, σ, how parameters are treated, and what each stage of the fit took."""
    layout = linearization.layout
    lines = [
        title,
        _line("parameters p", f"{layout.num_parameters:,} in {len(layout.names)} tensors ({linearization.dtype})"),
        _line("prior precision λ", f"{posterior.prior_precision:.6g}"),
    ]
    if isinstance(survey.likelihood, Gaussian):
        stds = ", ".join(f"{std:.6g}" for std in survey.likelihood.stds)
        lines.append(_line("noise σ", f"{stds}{' (estimated)' if survey.estimated_noise else ''}"))
    lines.append(_line("data N", f"{survey.num_data:,} inputs, {survey.num_outputs} outputs"))
    lines += _structure(posterior)
    if captured is not None:
        lines.append(
            _line("captured share", f"at least {captured:.1%} of the full trace, on subspace inputs (held back if any)")
        )
    if kfac_trace_ratios:
        least, most = (f(kfac_trace_ratios, key=kfac_trace_ratios.__getitem__) for f in (min, max))
        ends = f"{kfac_trace_ratios[least]:.2f} ({least}) to {kfac_trace_ratios[most]:.2f} ({most})"
        lines.append(_line("KFAC trace / exact", f"{ends}, on a few inputs"))
    lines.append(_line("backward passes", f"{linearization.passes:,} through one input"))
    for name, why in linearization.unusual_parameters().items():
        lines.append(_line("general path", f"{name}: {why}"))
    for name, stage in stages.items():
        peak = "" if stage.peak_bytes is None else f", peak memory so far {readable(stage.peak_bytes)}"
        lines.append(_line(name, f"{stage.seconds:.2f} s{peak}"))
    return "\n".join(lines)


def _line(name: str, value: str) -> str:
    return f"  {name:<19}{value}"


def _structure(posterior: Posterior) -> list[str]:
    """The parts that the posterior is made of."""
    tensors, _ = posterior_tensors(posterior)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    lines = []
    if isinstance(posterior, SubspacePosterior | ComplementedPosterior):
        lines.append(_line("dimension s", f"{posterior.dim:,}"))
    outside = posterior.outside if isinstance(posterior, ComplementedPosterior) else posterior
    if isinstance(outside, BlockPrecision):
        kinds = Counter(type(part).__name__.removesuffix("Part").lower() for part in outside.parts.values())
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        lines.append(_line("blocks outside", f"{counted} (one a parameter)"))
        if outside.weight != 1.0:
            lines.append(_line("their weight", f"{outside.weight:g}"))
    return [*lines, _line("memory held", readable(size))]
