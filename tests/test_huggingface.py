"""Small Hugging Face models made from a configuration: dict inputs, attention masks, `.logits`, LoRA adapters."""

import copy

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
    la, longer = (fitted(model, given) for given in (inputs, padded(inputs, 9)))
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


# As they are used -----------------------------------------------------------------------------------------------------


def trainer_of(model, texts: int = 40):
    """A trainer with texts of different lengths, and a tokenizer whose collator pads them."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("accelerate")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(k): k for k in range(20)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0")
    generator = torch.Generator().manual_seed(0)
    data = [
        {"input_ids": torch.randint(1, 20, (2 + k % 7,), generator=generator).tolist(), "labels": k % 3}
        for k in range(texts)
    ]
    arguments = transformers.TrainingArguments(
        output_dir="unused",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        num_train_epochs=1,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        remove_unused_columns=False,
    )
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=data[: texts // 2],
        eval_dataset=data[texts // 2 :],
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )


@pytest.mark.filterwarnings("ignore:.*λ")
def test_the_loaders_of_a_trainer_serve_a_fit(tmp_path):
    trainer = trainer_of(made(lora_bert).float())
    trainer.train()
    loader, held_out = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
    assert len({batch["input_ids"].shape[1] for batch in held_out}) > 1
    orders = [[each["labels"].tolist() for each in loader] for _ in range(2)]
    assert orders[0] != orders[1]  # it shuffles
    la = SubspaceLaplace(trainer.model, "classification", 4).fit(loader, held_out)
    assert la.evaluate(held_out).num_inputs == 20
    one_by_one = torch.cat([la(each) for each in held_out])  # batches of a type of their own, with labels
    assert torch.allclose(la(held_out), one_by_one, atol=1e-6)
    with pytest.raises(ValueError, match="same batches in the same order"):
        la.fit(loader, checkpoint=tmp_path / "fit")


def halved(model, chosen):
    """A copy in which the parameters that `chosen` names have half precision."""
    result = copy.deepcopy(model).float()
    for name, parameter in result.named_parameters():
        if chosen(name, parameter):
            parameter.data = parameter.data.half()
    return result


def test_a_frozen_base_in_half_precision_computes_in_float32(recwarn):
    model = halved(made(lora_bert), lambda name, parameter: not parameter.requires_grad)
    inputs, new = batch(6), batch(3, seed=1)
    la, expected = fitted(model, inputs), fitted(copy.deepcopy(model).float(), inputs)
    assert close(la.functional_variance(new), expected.functional_variance(new).double(), 1e-5)
    assert close(la(new), expected(new).double(), 1e-6) and la(new).dtype == torch.float32
    dtypes = {parameter.dtype for parameter in model.parameters()}
    assert dtypes == {torch.float16, torch.float32} and not recwarn.list  # nothing is copied


def test_adapters_of_different_precision_count_in_float32():
    model = halved(made(lora_bert), lambda name, parameter: not parameter.requires_grad or "lora_A" in name)
    inputs, new = batch(6), batch(3, seed=1)
    with pytest.warns(UserWarning, match=r"torch.float16 parameters.*float32 copy"):
        la = fitted(model, inputs)
    assert close(la(new), fitted(copy.deepcopy(model).float(), inputs)(new).double(), 1e-6)


def test_gradient_checkpointing_changes_nothing():
    model = made(lora_bert)
    inputs, new = batch(6), batch(3, seed=1)
    expected = fitted(model, inputs)
    other = copy.deepcopy(model).train()
    other.gradient_checkpointing_enable()
    other.enable_input_require_grads()
    assert close(fitted(other, inputs).functional_covariance(new), expected.functional_covariance(new), 1e-10)
    assert other.training


def test_multiple_choice_has_an_output_per_choice_and_padding_changes_nothing():
    model = made(lambda: transformers.BertForMultipleChoice(bert().config))
    choices = [{key: part[k : k + 4] for key, part in batch(24).items()} for k in range(0, 24, 4)]
    inputs = {key: torch.stack([each[key] for each in choices]) for key in choices[0]}  # (6, 4, 6)
    longer = {key: torch.nn.functional.pad(value, (0, 3)) for key, value in inputs.items()}
    assert close(Linearization(model).jacobian(inputs).dense_rows(), dense_jacobian(model, inputs), 1e-10)
    la, other = fitted(model, inputs), fitted(model, longer)
    assert la(inputs).shape == (6, 4)
    assert close(other.functional_covariance(longer), la.functional_covariance(inputs), 1e-8)


class Int8Linear(torch.nn.Module):
    """A frozen linear layer whose weight is held in eight bits, and in full precision during a call only."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        scales = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scales", scales)
        self.register_buffer("levels", (layer.weight.detach() / scales).round().to(torch.int8))
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.levels.to(x.dtype) * self.scales, self.bias)


def frozen_linear_layers(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and not any(p.requires_grad for p in child.parameters()):
                yield module, name, child


def test_a_base_with_weights_in_eight_bits_is_differentiated_through():
    model = made(lora_bert)
    for module, name, layer in frozen_linear_layers(model):
        setattr(module, name, Int8Linear(layer))
    inputs, new = batch(6), batch(3, seed=1)
    la = fitted(model, inputs)
    covariance = subspace_covariance(
        dense_jacobian(model, new), la.projection_matrix(), precision_matrix(model, inputs)
    )
    assert close(la.functional_covariance(new, joint=True), covariance, 1e-8)


@pytest.mark.filterwarnings("ignore")  # torch announces the end of its own quantisation
def test_dynamic_quantisation_is_refused_since_inputs_share_a_scale():
    model = made(lora_bert).float()
    layers = {id(layer) for _, _, layer in frozen_linear_layers(model)}
    named = {
        name: torch.ao.quantization.default_dynamic_qconfig for name, m in model.named_modules() if id(m) in layers
    }
    quantised = torch.ao.quantization.quantize_dynamic(model, named, dtype=torch.qint8)
    with pytest.raises(ValueError, match="dynamic quantisation"):
        SubspaceLaplace.paper(quantised, "classification", 5).fit([batch(6) | {"labels": torch.arange(6) % 3}])


def test_adapters_on_several_devices_are_refused_with_a_remedy():
    model = made(lora_bert)
    first = next(module for name, module in model.named_modules() if name.endswith("lora_A.default"))
    first.to("meta")
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\).*device_map"):
        SubspaceLaplace(model, "classification", 5)


def test_offloaded_weights_are_refused():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(made(lora_bert), execution_device="cpu")
    with pytest.raises(ValueError, match="offloaded"):
        SubspaceLaplace(model, "classification", 5)
