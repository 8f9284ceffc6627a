"""Sequences padded to different lengths: the same posterior as with one length, at every stage of a fit."""

import pytest
import torch
from test_huggingface import bert, gpt2, lora_bert, lora_gpt2, made, padded
from test_laplace import PRIOR, close
from torch import nn

from sublaplace import Categorical, Complement, Drawn, Linearization, Perturbed, Resources, SubspaceLaplace
from sublaplace.data.batches import Batch, Ragged, by_form, join, num_inputs, parts_of, select
from sublaplace.data.padding import present_positions
from sublaplace.jacobians.blocks import EmbeddingBlock, OuterBlock
from sublaplace.model.linalg import filled_up
from sublaplace.runtime.checkpoint import Checkpoint

LONGEST = 9
IGNORED = -100


def sentences(n: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Sentences of which the longest has `length` tokens, as a collator pads them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 20, (n, length), generator=generator)
    lengths = torch.randint(2, length + 1, (n, 1), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids[:, 0] % 3}


def dynamic(count: int = 5, n: int = 5, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Batches of which some have different lengths."""
    return [sentences(n, 4 + (3 * k) % 4, 100 * seed + k) for k in range(count)]


def to_one_length(loader: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    kept = ("input_ids", "attention_mask")
    return [padded({key: batch[key] for key in kept}, LONGEST) | {"labels": batch["labels"]} for batch in loader]


def without_labels(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


SETTINGS = {
    "default": {},
    "validation": {"validated": True},
    "paper": {"prior_precision": PRIOR, "complement": None},
    "layers": {"prior_structure": "layer", "prior_precision": "evidence"},
    "weight": {"complement": "kfac", "prior_precision": PRIOR},
}
LONG = [(lora_bert, "layers"), (lora_bert, "weight"), (bert, "paper"), (gpt2, "paper")]
CASES = [(lora_bert, "default"), (lora_bert, "validation"), (lora_bert, "paper"), (lora_gpt2, "paper")]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in LONG]


@pytest.mark.parametrize(("build", "setting"), CASES)
@pytest.mark.filterwarnings("ignore:.*λ")  # little is learned from a few made-up sentences
def test_dynamic_padding_gives_the_posterior_of_one_length(build, setting):
    model, new = made(build), without_labels(sentences(4, 6, seed=99))
    options = dict(SETTINGS[setting])
    validated = options.pop("validated", False)

    def fitted(pad):
        la = SubspaceLaplace(model, "classification", 6, **options)
        return la.fit(pad(dynamic()), pad(dynamic(seed=1)) if validated else None)

    one, other = fitted(lambda loader: loader), fitted(to_one_length)
    assert one.prior_precision == pytest.approx(other.prior_precision, rel=1e-5)
    assert close(one.functional_covariance(new), other.functional_covariance(padded(new, LONGEST)), 1e-6)
    more, again = one.updated(dynamic(3, seed=2)), other.updated(to_one_length(dynamic(3, seed=2)))
    assert close(more.functional_variance(new), again.functional_variance(new), 1e-6)
    assert one.evaluate(dynamic(seed=3)).posterior.scores == pytest.approx(
        other.evaluate(to_one_length(dynamic(seed=3))).posterior.scores, rel=1e-6
    )


def test_batches_of_different_lengths_are_predicted_like_each_of_them():
    la = SubspaceLaplace.paper(made(lora_bert), "classification", 6, subspace_inputs=dynamic()).fit(dynamic())
    drawn = SubspaceLaplace.paper(made(lora_bert), "classification", 6, subspace_inputs=Drawn(40)).fit(dynamic())
    few = dynamic(3, n=2)
    assert close(la.functional_variance(few), torch.cat([la.functional_variance(batch) for batch in few]), 1e-12)
    assert close(la.functional_variance(few), drawn.functional_variance(few), 1e-6)  # both have all inputs
    joint = la.functional_covariance(few, joint=True)
    assert close(joint.diagonal(), la.functional_variance(few).flatten(), 1e-10)
    assert close(joint, la.functional_covariance(to_one_length(few), joint=True), 1e-10)


def test_an_interrupted_fit_of_different_lengths_goes_on(tmp_path, monkeypatch):
    model, new = made(lora_bert), without_labels(sentences(4, 6, seed=99))
    options = {"prior_precision": PRIOR, "complement": "kfac"}
    expected = SubspaceLaplace(model, "classification", 6, **options).fit(dynamic())
    write = Checkpoint.write

    def interrupted(self, what, *rest):
        write(self, what, *rest)
        if what == "projection":
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SubspaceLaplace(model, "classification", 6, **options).fit(dynamic(), checkpoint=tmp_path / "fit")
    monkeypatch.setattr(Checkpoint, "write", write)
    resumed = SubspaceLaplace(model, "classification", 6, **options).fit(dynamic(), checkpoint=tmp_path / "fit")
    assert torch.equal(resumed.functional_variance(new), expected.functional_variance(new))


class Pooled(nn.Module):
    """A network for pictures of any size."""

    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv2d(1, 3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.features(x).tanh().mean((2, 3)))


def test_pictures_of_different_sizes_need_no_common_one():
    torch.manual_seed(0)
    model = Pooled().double()
    loader = [(torch.randn(9, 1, 5 + k % 3, 6).double(), torch.arange(9) % 2) for k in range(6)]
    la = SubspaceLaplace(model, "classification", 4, prior_precision=PRIOR, complement="kfac").fit(loader)
    assert la([x for x, _ in loader]).shape == (54, 2)
    with pytest.raises(ValueError, match=r"Perturbed\(…\) needs inputs of one shape"):
        SubspaceLaplace(model, "classification", 4, subspace_inputs=Perturbed(0.1)).fit(loader)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [bert, lora_gpt2])
def test_no_gradient_reaches_a_padded_position(build, attention):
    model, new = made(build), without_labels(sentences(6, 8, seed=5))
    model.set_attn_implementation(attention)
    absent = new["attention_mask"] == 0
    blocks = Linearization(model).jacobian(new).blocks.values()
    gradients = [block.gradients for block in blocks if isinstance(block, OuterBlock) and block.positions == 8]
    assert absent.any() and len(gradients) > 3
    for each in gradients:  # (n, K, G, O, T)
        assert each.any() and not each.movedim(4, 1)[absent].any()


# Outputs at every position --------------------------------------------------------------------------------------------


def labelled_tokens(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    return [
        batch | {"labels": torch.where(batch["attention_mask"] == 1, batch["input_ids"] % 3, IGNORED)}
        for batch in dynamic(seed=seed)
    ]


def tokens_to_one_length(loader: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    def longer(labels):
        return nn.functional.pad(labels, (0, LONGEST - labels.shape[1]), value=IGNORED)

    return [batch | {"labels": longer(batch["labels"])} for batch in to_one_length(loader)]


@pytest.mark.parametrize(
    "complement",
    [
        pytest.param(None, id="subspace"),
        pytest.param(Complement("kfac", weight=1.0), id="kfac", marks=pytest.mark.slow),
    ],
)
def test_tokens_of_padded_sentences_have_the_posterior_of_one_length(token_classifier, complement):
    likelihood = Categorical(class_dim=-1, ignore_index=IGNORED)
    one, other = (
        SubspaceLaplace(token_classifier, likelihood, 6, complement=complement).fit(pad(labelled_tokens()))
        for pad in (lambda loader: loader, tokens_to_one_length)
    )
    new = without_labels(sentences(4, 6, seed=99))
    assert one.prior_precision == pytest.approx(other.prior_precision, rel=1e-4)
    mask = new["attention_mask"].bool()
    variances = one.functional_variance(new)
    assert close(variances[mask], other.functional_variance(padded(new, LONGEST))[:, :6][mask], 1e-5)
    assert not variances[~mask].any()
    tuned = one.tuned(labelled_tokens(seed=1))
    assert tuned.prior_precision == pytest.approx(
        other.tuned(tokens_to_one_length(labelled_tokens(seed=1))).prior_precision, rel=1e-4
    )
    assert tuned.evaluate(labelled_tokens(seed=2)).num_inputs == sum(
        int(batch["attention_mask"].sum()) for batch in labelled_tokens(seed=2)
    )
    with pytest.raises(ValueError, match="outputs of different shapes"):
        one.functional_covariance([without_labels(batch) for batch in dynamic(2)], joint=True)


@pytest.fixture
def token_classifier():
    transformers = pytest.importorskip("transformers")
    config = bert().config
    config.num_labels = 3
    return made(lambda: transformers.BertForTokenClassification(config))


def test_many_positions_are_sketched_whatever_their_number(token_classifier):
    likelihood = Categorical(class_dim=-1, ignore_index=IGNORED)
    loader = [sentences(5, length, seed=length) for length in (10, 8, 9, 10)]  # up to 30 outputs
    loader = [b | {"labels": torch.where(b["attention_mask"] == 1, b["input_ids"] % 3, IGNORED)} for b in loader]
    wide = Resources(curvature_samples=3)
    la = SubspaceLaplace(token_classifier, likelihood, 4, prior_precision=PRIOR, resources=wide).fit(loader)
    exact = SubspaceLaplace(token_classifier, likelihood, 4, prior_precision=PRIOR).fit(loader)
    assert "random combinations" in la.summary() and "random combinations" not in exact.summary()
    new = without_labels(sentences(4, 6, seed=99))
    traces = [float(each.leading_traces(new)[-1]) for each in (la, exact)]
    assert traces[0] == pytest.approx(traces[1], rel=0.1)


# Parts ----------------------------------------------------------------------------------------------------------------


def test_inputs_of_different_shapes_are_parts_in_their_order():
    first, second, third = torch.arange(6.0).view(3, 2), torch.arange(9.0).view(3, 3) + 10, torch.arange(4.0).view(2, 2)
    ragged = join([first, second, third])
    assert isinstance(ragged, Ragged) and num_inputs(ragged) == 8
    rows = [*first, *second, *third]
    order = [6, 3, 4, 0, 7]
    found = [row for part in parts_of(select(ragged, torch.tensor(order))) for row in part]
    assert all(torch.equal(row, rows[place]) for row, place in zip(found, order, strict=True))
    assert torch.equal(select(ragged, slice(0, 2)), first[:2])  # of one shape: no parts
    assert num_inputs(select(ragged, slice(0, 0))) == 0
    assert [part.tolist() for part in by_form(ragged).parts] == [torch.cat([first, third]).tolist(), second.tolist()]
    assert torch.equal(join([first, third]), torch.cat([first, third]))


def test_batches_of_training_data_are_joined_whole():
    batches = [Batch({"x": torch.ones(2, width)}, torch.arange(2), torch.ones(2)) for width in (3, 4, 3)]
    ragged = join(batches)
    assert [tuple(part.inputs["x"].shape) for part in ragged.parts] == [(2, 3), (2, 4), (2, 3)]
    assert select(ragged, torch.tensor([5, 0])).targets.tolist() == [1, 0]


def test_tensors_of_different_widths_are_filled_up_with_zeros():
    found = filled_up([torch.ones(1, 2, 2), torch.ones(2, 3, 2)])
    assert found.sum((1, 2)).tolist() == [4, 6, 6] and found.shape == (3, 3, 2)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}, [[True, True, False], [True, False, False]]),
        ({"attention_mask": torch.tensor([[[1, 1], [1, 0]]])}, [[True, True, True, False]]),
        ({"attention_mask": torch.ones(2, 3)}, None),
        ({"attention_mask": torch.zeros(2, 1, 3, 3)}, None),
        ({"attention_mask": torch.zeros(2, 3), "decoder_input_ids": torch.ones(2, 3)}, None),
        ({"input_ids": torch.ones(2, 3)}, None),
        (torch.zeros(2, 3), None),
    ],
)
def test_padding_is_what_the_attention_mask_leaves_out(inputs, expected):
    found = present_positions(inputs)
    assert (None if found is None else found.tolist()) == expected


def test_input_moments_leave_padded_positions_out():
    torch.manual_seed(0)
    a, g, present = torch.randn(3, 1, 4, 5).double(), torch.randn(3, 2, 1, 2, 5).double(), torch.rand(3, 5) > 0.4
    weights = torch.tensor([1.0, 0.5, 2.0]).double()
    block = OuterBlock.of(a, g)
    kept = [(a[n, 0, :, t], weights[n]) for n in range(3) for t in range(5) if present[n, t]]
    assert close(block.input_moment(weights, present)[0], sum(w * torch.outer(x, x) for x, w in kept), 1e-12)
    assert block.num_terms(weights, present) == pytest.approx(float(sum(w for _, w in kept)))
    means = torch.stack([a[n, 0][:, present[n]].mean(1) for n in range(3)])
    assert close(block.reduced(present).inputs[:, 0, :, 0], means, 1e-12)
    # Calls with other positions than the inputs count all of theirs.
    assert close(block.input_moment(weights, present[:, :3]), block.input_moment(weights), 1e-12)
    indices = torch.randint(0, 6, (3, 5))
    table = EmbeddingBlock(indices, torch.randn(3, 2, 5, 4).double(), 6)
    counts = [
        float(sum(w for n, w in enumerate(weights) for t in range(5) if present[n, t] and indices[n, t] == k))
        for k in range(6)
    ]
    assert table.input_moment(weights, present)[0].tolist() == pytest.approx(counts)
    assert table.num_terms(None, present) == int(present.sum())
