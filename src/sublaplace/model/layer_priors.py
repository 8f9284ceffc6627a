"""Several prior precisions, one for each parameter, as units in which a single λ serves all.

In units u = √(λ/λ_k), the parameter θ_k = u φ_k with prior N(0, λ_k⁻¹) has φ_k ~ N(0, λ⁻¹).
"""

from collections.abc import Iterable
from math import exp, log

from sublaplace.model.parameters import ParameterLayout

PriorPrecision = float | dict[str, float]
"""λ: one number, or one for each parameter by name."""


def layer_of(name: str) -> str:
    """Return the module that a parameter belongs to."""
    return name.rpartition(".")[0]


def reference_prior(prior_precision: PriorPrecision) -> float:
    """Return the single λ that stands for all: their geometric mean, in which every layer counts once."""
    if not isinstance(prior_precision, dict):
        return prior_precision
    layers: dict[str, list[float]] = {}
    for name, prior in prior_precision.items():
        layers.setdefault(layer_of(name), []).append(log(prior))
    return exp(_mean(_mean(logs) for logs in layers.values()))


def _mean(numbers: Iterable[float]) -> float:
    values = list(numbers)
    return sum(values) / len(values)


def units_of(prior_precision: dict[str, float], layout: ParameterLayout) -> dict[str, float]:
    """Return the units of the parameters, in which each has the prior precision `reference_prior`.

    Raises:
        ValueError: if the names are not those of the parameters.
    """
    missing = [name for name in layout.names if name not in prior_precision]
    unknown = [name for name in prior_precision if name not in layout.names]
    if missing or unknown:
        raise ValueError(
            "prior_precision must hold one λ for each parameter that requires grad, by the name in "
            f"model.named_parameters(); missing: {missing[:3] or 'none'}, unknown: {unknown[:3] or 'none'}."
        )
    reference = reference_prior(prior_precision)
    return {name: (reference / prior_precision[name]) ** 0.5 for name in layout.names}
