"""The reference of all posteriors, the covariance of the full Laplace approximation, kept on disk."""

import json
import os
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from experiments.recipes import Recipe


def kept(computed: Path, recipe: Recipe, test_set: str, seed: int) -> Tensor | None:
    """Return Σ for the drawn inputs of a test set, (nC, nC), if it was computed before with this recipe."""
    path = _path(computed, test_set, seed)
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        return file.get_tensor("covariance") if file.metadata() == _facts(recipe) else None


def keep(covariance: Tensor, computed: Path, recipe: Recipe, test_set: str, seed: int) -> None:
    """Write Σ so that the file is complete at any moment."""
    path = _path(computed, test_set, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"covariance": covariance.contiguous()}, path.with_suffix(".partial"), _facts(recipe))
    os.replace(path.with_suffix(".partial"), path)


def _path(computed: Path, test_set: str, seed: int) -> Path:
    return computed / "references" / f"{test_set.replace('/', '-')}-{seed}.safetensors"


def _facts(recipe: Recipe) -> dict[str, str]:
    return {"facts": json.dumps((recipe.training_fingerprint(), recipe.prior_precision, recipe.num_inputs))}
