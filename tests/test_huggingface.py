"""Small Hugging Face models made from a configuration: dict inputs, attention masks, `.logits`, LoRA adapters."""

import pytest
import torch
from dense_reference import dense_jacobian, dense_outputs
from test_laplace import PRIOR, close, labels, loader, precision_matrix, subspace_covariance

from sublaplace import Linearization, SubspaceLaplace

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def bert():
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=10,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=10, num_labels=3, pad_token_id=0
    )
    return transformers.GPT2ForSequenceClassification(config)


def batch(n: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 20, (n, 6), generator=generator)
    lengths = torch.randint(3, 7, (n, 1), generator=generator)
    mask = (torch.arange(6) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def made(build):
    """The model in float64, with the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double().eval()


def with_lora(model, targets: list[str]):
    """The model with adapters whose second factor is not zero, as after training."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, fan_in_fan_out=targets == ["c_attn"])
        )
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return adapted.double().eval()


def lora_bert():
    return with_lora(bert(), ["query", "value"])


def lora_gpt2():
    return with_lora(gpt2(), ["c_attn"])


def padded(inputs: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    return {key: torch.nn.functional.pad(value, (0, length - value.shape[1]), value=0) for key, value in inputs.items()}


def fitted(model, inputs, **options) -> SubspaceLaplace:
    la = SubspaceLaplace.paper(model, "classification", dim=5, prior_precision=PRIOR, **options)
    return la.fit(loader(inputs, labels(model, inputs)))


@pytest.mark.parametrize("build", [bert, gpt2, lora_bert, lora_gpt2])
def test_jacobian_and_covariance_equal_brute_force(build):
    model = made(build)
    inputs, new = batch(6), batch(3, seed=1)
    linearization = Linearization(model)
    expected = dense_jacobian(model, new)
    assert close(linearization.jacobian(new).dense_rows(), expected, 1e-10)
    assert linearization.unusual_parameters() == {}
    la = fitted(model, inputs)
    covariance = subspace_covariance(expected, la.projection_matrix(), precision_matrix(model, inputs))
    assert close(la.functional_covariance(new, joint=True), covariance, 1e-8)


# Two layers, rank 2: BERT adapts query and value (8 → 8 each), GPT-2 its joint map to query, key and value (8 → 24).
@pytest.mark.parametrize(("build", "count"), [(lora_bert, 2 * 2 * 2 * (8 + 8)), (lora_gpt2, 2 * 2 * (8 + 24))])
def test_only_the_adapters_count(build, count):
    model = made(build)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    inputs = batch(6)
    la = fitted(model, inputs)
    assert la.num_parameters == count
    assert la.projection_matrix().shape == (count, 5)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
    assert all("lora_" in name for name, required in flags.items() if required)


@pytest.mark.parametrize("build", [bert, gpt2, lora_bert, lora_gpt2])
def test_padding_changes_nothing_as_long_as_the_mask_says_so(build):
    model = made(build)
    inputs, new = batch(6), batch(3, seed=1)
    # KFAC's factors average over padded positions as well, so its subspace is another one; the diagonal GGN's is not.
    la, longer = (fitted(model, given, projector="lowrank-diagonal") for given in (inputs, padded(inputs, 9)))
    expected = la.functional_covariance(new)
    assert close(longer.functional_covariance(padded(new, 8)), expected, 1e-8)
    assert close(longer(padded(new, 8)), la(new), 1e-10)


def test_without_the_mask_padding_would_change_the_covariance():
    model = made(bert)
    new = batch(3, seed=1)
    la = fitted(model, batch(6))
    unmasked = padded(new, 8) | {"attention_mask": torch.ones(3, 8, dtype=torch.long)}
    assert not close(la.functional_covariance(unmasked), la.functional_covariance(new), 1e-6)


def test_labels_may_lie_under_any_key():
    model = made(bert)
    inputs, new = batch(6), batch(3, seed=1)
    targets = labels(model, inputs)
    expected = fitted(model, inputs)

    def named(key: str) -> list[dict[str, torch.Tensor]]:
        return [part | {key: found} for part, found in loader(inputs, targets)]

    usual = SubspaceLaplace.paper(model, "classification", dim=5, prior_precision=PRIOR).fit(named("labels"))
    la = SubspaceLaplace.paper(
        model, "classification", dim=5, prior_precision=PRIOR, subspace_inputs=named("topic"), labels_key="topic"
    ).fit(named("topic"))
    assert torch.equal(usual(new), expected(new))
    assert close(la(new), expected(new), 1e-12)
    # Labels in what is predicted are left out, in a batch and in a loader.
    assert torch.equal(la(new | {"topic": torch.arange(3)}), la(new))
    assert close(la(named("topic")), expected(inputs), 1e-12)
    assert close(
        la.functional_covariance(named("topic"), joint=True), expected.functional_covariance(inputs, True), 1e-8
    )
    better = la.optimize_prior_precision(
        "validation", val_loader=2 * named("topic")
    )  # 12 inputs; fewer than 10 leave λ as it is
    assert better.prior_precision != PRIOR
    assert close(
        la.updated(named("topic")).leading_traces(new),
        expected.optimize_prior_precision("validation", val_loader=2 * loader(inputs, targets))
        .updated(loader(inputs, targets))
        .leading_traces(new),
        1e-8,
    )


def test_a_batch_without_the_named_key_is_refused_with_what_it_has():
    model = made(bert)
    with pytest.raises(ValueError, match=r"'attention_mask', 'input_ids'.*labels_key"):
        SubspaceLaplace.paper(model, "classification", dim=5, labels_key="topic").fit(
            [batch(6) | {"label": torch.arange(6)}]
        )


def test_a_classification_head_trained_beside_the_adapters_counts_as_well():
    def with_head():
        config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
        return peft.get_peft_model(bert(), config)

    model = made(with_head)
    inputs = batch(6)
    la = fitted(model, inputs)
    assert la.num_parameters == 2 * 2 * 2 * (8 + 8) + 3 * 8 + 3
    expected = subspace_covariance(
        dense_jacobian(model, inputs), la.projection_matrix(), precision_matrix(model, inputs)
    )
    assert close(la.functional_covariance(inputs, joint=True), expected, 1e-8)
    assert close(la.predict(inputs).mean, dense_outputs(model, inputs), 1e-12)
