"""Sequences padded to different lengths: the same posterior as with one length, at every stage of a fit."""

import pytest
import torch
from dense_reference import dense_jacobian
from test_huggingface import bert, gpt2, lora_bert, lora_gpt2, made, padded
from test_laplace import PRIOR, close, precision_matrix, subspace_covariance
from torch import nn

from sublaplace import Categorical, Complement, Drawn, Perturbed, SubspaceLaplace
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.data.batches import Ragged, by_form, join, num_inputs, parts_of, select
from sublaplace.data.padding import present_positions
from sublaplace.fitting.steps import curvature_stream
from sublaplace.fitting.survey import survey_of
from sublaplace.jacobians.linearization import Linearization

LONGEST = 9


def sentences(n: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Sentences of which the longest has `length` tokens, as a collator pads them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 20, (n, length), generator=generator)
    lengths = torch.randint(2, length + 1, (n, 1), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.randint(0, 3, (n,), generator=generator)}


def dynamic(count: int = 8, n: int = 5, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Batches whose lengths differ, some of them equal."""
    return [sentences(n, 4 + (3 * k) % 4, 100 * seed + k) for k in range(count)]


def to_one_length(loader: list[dict[str, torch.Tensor]], length: int = LONGEST) -> list[dict[str, torch.Tensor]]:
    kept = ("input_ids", "attention_mask")
    return [padded({key: batch[key] for key in kept}, length) | {"labels": batch["labels"]} for batch in loader]


SETTINGS = {
    "default": {},
    "validation": {"validated": True},
    "paper": {"prior_precision": PRIOR, "complement": None},
    "evidence": {"prior_precision": "evidence", "complement": "kfac"},
    "layer": {"prior_structure": "layer"},
    "correction": {"projector": "lowrank-correction", "complement": Complement("kfac", weight=1.0)},
}


@pytest.mark.parametrize("build", [bert, gpt2, lora_bert, lora_gpt2])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore")  # of λ at the end of its search, and of few data
def test_dynamic_padding_gives_the_posterior_of_one_length(build, setting):
    if build is not lora_bert and setting not in ("default", "paper"):
        pytest.skip("the other settings are tried with one network")
    model, new = made(build), sentences(4, 6, seed=99)
    del new["labels"]
    options = dict(SETTINGS[setting])
    validated = options.pop("validated", False)

    def fitted(pad):
        la = SubspaceLaplace(model, "classification", 6, **options)
        return la.fit(pad(dynamic()), pad(dynamic(seed=1)) if validated else None)

    one, other = fitted(lambda loader: loader), fitted(to_one_length)
    assert one.prior_precision == pytest.approx(other.prior_precision, rel=1e-5)
    assert close(one.functional_covariance(new), other.functional_covariance(padded(new, LONGEST)), 1e-6)
    assert close(one(new), other(new), 1e-7)
    more = [one.updated(dynamic(3, seed=2)), other.updated(to_one_length(dynamic(3, seed=2)))]
    assert close(more[0].functional_variance(new), more[1].functional_variance(new), 1e-6)
    assert one.evaluate(dynamic(seed=3)).posterior.scores == pytest.approx(
        other.evaluate(to_one_length(dynamic(seed=3))).posterior.scores, rel=1e-6
    )
