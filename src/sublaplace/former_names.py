"""Spellings of version 0.1 that went, each with the one that took its place."""

from typing import Any

_ARGUMENTS = {
    "noise_std": "the likelihood: Gaussian(0.1), Gaussian('per-output'), or 'regression', which estimates σ",
    "sigma_noise": "the likelihood: Gaussian(0.1), Gaussian('per-output'), or 'regression', which estimates σ",
    "num_subspace_inputs": "subspace_inputs=Drawn(200)",
    "perturbation": "subspace_inputs=Perturbed(0.1)",
    "complement_weight": "complement=Complement('kfac', weight=1.0); complement='kfac' fits the weight",
    "captured": "dim=Captured(0.5, at_most=500)",
    "max_dim": "dim=Captured(0.5, at_most=500)",
    "certified": "fit(train_loader, certify=True)",
    "memory_budget": "resources=Resources(memory_budget=…)",
    "scratch_folder": "resources=Resources(scratch_folder=…)",
    "direction_tolerance": "resources=Resources(direction_tolerance=…)",
}

_MEMBERS = {
    "truncate": "truncated(dim)",
    "update": "updated(loader), which returns a new object",
    "captured": "captured_share(x)",
    "trace": "leading_traces(x)",
    "projection": "projection_matrix()",
}


def refuse_arguments(positional: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Raise TypeError for arguments that do not exist, naming the new spelling of former ones."""
    if positional:
        raise TypeError(
            "SubspaceLaplace takes the model, the likelihood and dim in this order; all other arguments need their "
            f"names, as in projector='lowrank-kfac', prior_precision=1.0. Without a name there is {positional[0]!r}."
        )
    for name in given:
        if name in _ARGUMENTS:
            raise TypeError(f"The argument '{name}' of version 0.1 went; its place is {_ARGUMENTS[name]}.")
        raise TypeError(f"SubspaceLaplace has no argument '{name}'.")


def refuse_member(name: str) -> None:
    """Raise AttributeError for a former member, naming its new spelling."""
    if name in _MEMBERS:
        raise AttributeError(f"'{name}' of version 0.1 is now {_MEMBERS[name]}.")
