"""Fitted posteriors as tensors and numbers, and a fingerprint of the model that they belong to."""

import hashlib
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from sublaplace.certificate import Certificate, Nystroem
from sublaplace.checked_file import SavedFileError
from sublaplace.complement import ComplementedPosterior
from sublaplace.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from sublaplace.parameters import ParameterLayout
from sublaplace.parts import DensePart, DiagonalPart, KroneckerPart, Part
from sublaplace.posterior import Posterior, SubspacePosterior
from sublaplace.precision import BlockPrecision, DensePrecision, DualPrecision
from sublaplace.projection import Basis, Projection, Subset
from sublaplace.residuals import Residuals
from sublaplace.survey import Survey


def posterior_tensors(posterior: Posterior) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A posterior as tensors and numbers."""
    numbers: dict[str, Any] = {"prior_precision": posterior.prior_precision}
    if isinstance(posterior, DensePrecision):
        return {"ggn": posterior.ggn}, {**numbers, "kind": "dense", "scale": posterior.scale}
    if isinstance(posterior, DualPrecision):
        return {"rows": posterior.rows}, {**numbers, "kind": "dual", "scale": posterior.scale}
    if isinstance(posterior, BlockPrecision):
        tensors, parts = _block_tensors(posterior)
        numbers |= {"kind": "blocks", "scale": posterior.scale, "weight": posterior.weight}
        return tensors, {**numbers, "parts": parts}
    if isinstance(posterior, ComplementedPosterior):
        inside, numbers = posterior_tensors(posterior.inside)
        outside, about = posterior_tensors(posterior.outside)
        mixed = {f"mixed.{name}": part for name, part in posterior.mixed.items()}
        tensors = {**inside, **outside, **mixed, "outside_in_subspace": posterior.outside_in_subspace}
        return tensors, {**numbers, "kind": "complement", "outside": about}
    if not isinstance(posterior, SubspacePosterior):
        raise TypeError(f"A posterior of type {type(posterior).__name__} cannot be saved.")
    tensors = {"curvatures": posterior.curvatures, "gram": posterior.gram}
    numbers |= {"kind": "subspace", "scales": posterior.scales}
    return tensors | projection_tensors(posterior.projection), numbers


def posterior_from(
    tensors: dict[str, Tensor], numbers: dict[str, Any], layout: ParameterLayout, dtype: torch.dtype
) -> Posterior:
    """The inverse of `posterior_tensors`."""
    prior, kind = numbers["prior_precision"], numbers["kind"]
    if kind == "dense":
        return DensePrecision(layout, tensors["ggn"], prior, numbers["scale"])
    if kind == "dual":
        return DualPrecision(layout, tensors["rows"], prior, numbers["scale"])
    if kind == "blocks":
        return _blocks_from(tensors, numbers, layout)
    projection = projection_from(tensors, layout, dtype)
    inside = SubspacePosterior(projection, tensors["curvatures"], tensors["gram"], tuple(numbers["scales"]), prior)
    if kind == "subspace":
        return inside
    outside = _blocks_from(tensors, numbers["outside"], layout)
    mixed = {name: tensors[f"mixed.{name}"] for name in layout.names}
    return ComplementedPosterior(inside, outside, mixed, tensors["outside_in_subspace"])


_PARTS: dict[str, type[DiagonalPart] | type[DensePart] | type[KroneckerPart]] = {
    kind.__name__: kind for kind in (DiagonalPart, DensePart, KroneckerPart)
}


def _block_tensors(precision: BlockPrecision) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The fields of all parts: tensors by name, and what else they have."""
    tensors, described = {}, {}
    for name, part in precision.parts.items():
        assert isinstance(part, DiagonalPart | DensePart | KroneckerPart)
        described[name] = {"kind": type(part).__name__}
        for f in fields(part):
            value = getattr(part, f.name)
            if isinstance(value, Tensor):
                tensors[f"part.{f.name}.{name}"] = value
            else:
                described[name][f.name] = value
    return tensors, described


def _blocks_from(tensors: dict[str, Tensor], numbers: dict[str, Any], layout: ParameterLayout) -> BlockPrecision:
    parts: dict[str, Part] = {}
    for name, described in numbers["parts"].items():
        kind = _PARTS[described["kind"]]
        stored = {f.name: tensors.get(f"part.{f.name}.{name}", described.get(f.name)) for f in fields(kind)}
        parts[name] = kind(**stored)
    return BlockPrecision(layout, parts, numbers["prior_precision"], numbers["scale"], numbers["weight"])


def certificate_tensors(certificate: Certificate) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a certificate has beside the posterior's projection."""
    subspace, seen = certificate.subspace, certificate.nystroem
    tensors = {f"seen.{name}": part for name, part in seen.basis.items()}
    tensors |= {"seen_coefficients": seen.coefficients, "seen_factor": seen.factor}
    numbers = {"scales": subspace.scales, "prior_precision": subspace.prior_precision}
    numbers |= {"scale": certificate.scale, "above": certificate.above}
    # The posterior may hold the same tensor, which a file must not hold twice.
    return {**tensors, "certified_curvatures": subspace.curvatures.clone()}, numbers


def certificate_from(
    tensors: dict[str, Tensor], numbers: dict[str, Any], layout: ParameterLayout, dtype: torch.dtype
) -> Certificate:
    """The inverse of `certificate_tensors`, with the tensors of its posterior."""
    projection = projection_from(tensors, layout, dtype)
    curvatures, scales = tensors["certified_curvatures"], tuple(numbers["scales"])
    subspace = SubspacePosterior(projection, curvatures, tensors["gram"], scales, numbers["prior_precision"])
    basis = {name: tensors[f"seen.{name}"] for name in layout.names}
    seen = Nystroem(basis, tensors["seen_coefficients"], tensors["seen_factor"])
    return Certificate(subspace, seen, numbers["scale"], numbers["above"])


def projection_tensors(projection: Projection) -> dict[str, Tensor]:
    """A projection as tensors."""
    if isinstance(projection, Subset):
        return {"indices": projection.indices}
    if not isinstance(projection, Basis):
        raise TypeError(f"A projection of type {type(projection).__name__} cannot be saved; use Basis or Subset.")
    return {f"basis.{name}": part for name, part in projection.vectors.items()}


def projection_from(tensors: dict[str, Tensor], layout: ParameterLayout, dtype: torch.dtype) -> Projection:
    """The inverse of `projection_tensors`."""
    if "indices" in tensors:
        return Subset(layout, tensors["indices"], dtype)
    return Basis(layout, {name: tensors[f"basis.{name}"] for name in layout.names})


def likelihood_numbers(likelihood: Likelihood) -> dict[str, Any]:
    """A likelihood as numbers."""
    if isinstance(likelihood, Gaussian):
        return {"kind": likelihood.kind, "noise_std": likelihood.noise_std}
    if isinstance(likelihood, Categorical | Bernoulli):
        return {"kind": likelihood.kind, "ignore_index": likelihood.ignore_index}
    raise TypeError("Only posteriors with a Gaussian, Categorical or Bernoulli likelihood can be saved.")


def likelihood_from(numbers: dict[str, Any]) -> Likelihood:
    """The inverse of `likelihood_numbers`."""
    if numbers["kind"] == "regression":
        noise = numbers["noise_std"]
        return Gaussian(tuple(noise) if isinstance(noise, list) else noise)
    kinds: dict[str, type[Categorical] | type[Bernoulli]] = {"classification": Categorical, "binary": Bernoulli}
    return kinds[numbers["kind"]](numbers["ignore_index"])


def survey_numbers(survey: Survey) -> dict[str, Any]:
    """A survey as numbers."""
    return {
        "num_data": survey.num_data,
        "num_outputs": survey.num_outputs,
        "likelihood": likelihood_numbers(survey.likelihood),
        "estimated_noise": survey.estimated_noise,
        "residuals": [sums.tolist() for sums in survey.residuals.sums],
        "fixed_log_likelihood": survey.fixed_log_likelihood,
    }


def survey_from(numbers: dict[str, Any]) -> Survey:
    """The inverse of `survey_numbers`."""
    return Survey(
        numbers["num_data"],
        numbers["num_outputs"],
        likelihood_from(numbers["likelihood"]),
        numbers["estimated_noise"],
        Residuals(*(torch.tensor(sums, dtype=torch.float64) for sums in numbers["residuals"])),
        numbers["fixed_log_likelihood"],
    )


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """What identifies a trained model: each parameter's and buffer's name, shape, dtype, need of grad and SHA-256."""
    described = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        value = tensor.detach().cpu().contiguous()
        content = value.reshape(-1).view(torch.uint8) if value.numel() else value.reshape(-1)
        described[name] = [
            list(value.shape),
            str(value.dtype),
            bool(tensor.requires_grad),
            hashlib.sha256(content.numpy().tobytes()).hexdigest(),
        ]
    return described


def require_same_model(saved: dict[str, Any], model: nn.Module) -> None:
    """Raises SavedFileError with what differs between the model of a file and the given one."""
    given = model_fingerprint(model)
    missing, extra = sorted(saved.keys() - given.keys()), sorted(given.keys() - saved.keys())
    if missing or extra:
        raise SavedFileError(
            "The posterior was saved with another model: "
            f"parameters that the given model lacks: {missing[:3] or 'none'}, that the saved one lacked: "
            f"{extra[:3] or 'none'}."
        )
    for place, what in enumerate(("shape", "dtype", "requires_grad flag", "values")):
        for name, entry in saved.items():
            if entry[place] != given[name][place]:
                detail = "" if what == "values" else f": {entry[place]} when saved, {given[name][place]} now"
                raise SavedFileError(f"The posterior was saved with another model: '{name}' has other {what}{detail}.")
