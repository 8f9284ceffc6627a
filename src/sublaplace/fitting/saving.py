"""Fitted posteriors in files, and a fingerprint of the model that they belong to."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from sublaplace.curvature.exact_precision import DensePrecision, DualPrecision
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.model.fingerprint import described_modules
from sublaplace.model.parameters import ParameterLayout
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.posteriors.protocol import Posterior
from sublaplace.posteriors.subspace import SubspacePosterior
from sublaplace.runtime.files import SavedFileError

POSTERIORS = {
    cls.kind: cls for cls in (SubspacePosterior, ComplementedPosterior, BlockPrecision, DensePrecision, DualPrecision)
}
"""By the kind that files name."""


def posterior_from(
    tensors: dict[str, Tensor], numbers: dict[str, Any], layout: ParameterLayout, dtype: torch.dtype
) -> Posterior:
    """Return the posterior of `Posterior.stored`."""
    return POSTERIORS[numbers["kind"]].restored(tensors, numbers, layout, dtype)


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return what identifies a trained model.

    That is the name, shape, dtype, need of grad and SHA-256 of each parameter and buffer. Cost: reads them once.
    """
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


def require_same_model(saved: dict[str, Any], modules: dict[str, str], model: nn.Module) -> None:
    """Raise SavedFileError with what differs between the model of a file and the given one.

    Args:
        saved: the `model_fingerprint` of the file.
        modules: what each module was, see `described_modules`.
        model: the given model.
    """
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
    now = described_modules(model)
    for name in [*modules, *now]:
        if modules.get(name) != now.get(name):
            raise SavedFileError(
                f"The posterior was saved with another model: the module '{name}' was "
                f"{modules.get(name, 'missing')} when saved and is {now.get(name, 'missing')} now."
            )
