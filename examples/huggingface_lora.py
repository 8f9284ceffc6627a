"""From `Trainer` through LoRA adapters to calibrated answers: is a product review positive?

All texts were written by people, and rated by twenty others (Hutto and Gilbert 2014). A small BERT learns whether film
reviews, tweets and editorials are positive: it stands for a model from a hub. LoRA adapters and the head then learn
from 500 rated product reviews, by `Trainer`. The posterior covers what was learned from them. It is fitted with the
trainer's own loaders, whose batches are padded to different lengths. The texts come with a Python package, which pip
downloads once. Prints a table for a long training of the adapters, and one for a short training.
"""

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from sublaplace import SubspaceLaplace, metrics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments.calibration.text_files import rated_snippets

VOCABULARY = 4000
LONGEST = 40  # tokens; longer texts are cut
NUM_TEST, NUM_TRAIN, NUM_VALIDATION = 2000, 500, 100
RANK = 8
TRAININGS = {"long": (15, 2e-3), "short": (10, 1e-3)}  # epochs and learning rate of the adapters
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}

Texts = tuple[list[str], list[int]]
Examples = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="draws of labelled product reviews, and adapters")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    test, pool = split(rated_snippets("amazon"), NUM_TEST, seed=0)
    others = [rated_snippets(name) for name in ("movie", "tweets", "editorials")]
    other = ([text for texts, _ in others for text in texts], [label for _, labels in others for label in labels])
    tokenizer = tokenizer_of(pool[0] + other[0])
    base = base_model(tokenizer, other)
    print(f"the base has learned from {len(other[0]):,} texts; {time.perf_counter() - start:.0f} seconds", flush=True)
    for name, (epochs, learning_rate) in TRAININGS.items():
        runs = [compared(base, tokenizer, pool, test, seed, epochs, learning_rate) for seed in range(arguments.seeds)]
        print(f"\n{name} training: {epochs} epochs at {learning_rate:g}\n\n{table(runs)}\n")
        print(f"{time.perf_counter() - start:.0f} seconds", flush=True)


def split(data: Texts, count: int, seed: int) -> tuple[Texts, Texts]:
    """Return `count` of the texts, drawn at random, and the others."""
    order = np.random.default_rng(seed).permutation(len(data[0]))
    first, rest = (([data[0][i] for i in part], [data[1][i] for i in part]) for part in np.split(order, [count]))
    return first, rest


def tokenizer_of(texts: Sequence[str], size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the word pieces of these texts."""
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer(lowercase=True)
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = list(SPECIAL.values())
    pieces.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=size, special_tokens=special))
    # The training numbers pieces differently every time.
    order = special + sorted(set(pieces.get_vocab()) - set(special))
    pieces.model = models.WordPiece({piece: number for number, piece in enumerate(order)}, unk_token="[UNK]")
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, pieces.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=pieces, model_max_length=LONGEST, **SPECIAL)


def examples(tokenizer: PreTrainedTokenizerFast, data: Texts) -> Examples:
    """Return the texts as tokens, each of its own length, with their labels."""
    tokens = tokenizer(data[0], truncation=True, return_token_type_ids=False)
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(tokens["input_ids"], tokens["attention_mask"], data[1], strict=True)
    ]


def trainer_for(
    model: nn.Module, collator: Any, train: Examples, epochs: float, learning_rate: float, seed: int
) -> Trainer:
    """Return a trainer of the parameters that require grad, which stores nothing."""
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        num_train_epochs=epochs,
        learning_rate=learning_rate,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=100,
        weight_decay=0.01,
        warmup_steps=20,
        seed=seed,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(model=model, args=arguments, data_collator=collator, train_dataset=train)
    trainer.remove_callback(PrinterCallback)
    return trainer


def base_model(
    tokenizer: PreTrainedTokenizerFast, others: Texts, width: int = 64, epochs: float = 3
) -> BertForSequenceClassification:
    """Return a BERT that has learned the ratings of texts that are no product reviews."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=LONGEST,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    trainer_for(model, DataCollatorWithPadding(tokenizer), examples(tokenizer, others), epochs, 1e-3, seed=0).train()
    return model


def adapted(
    base: BertForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    train: Examples,
    epochs: float,
    learning_rate: float,
    seed: int,
) -> Trainer:
    """Return the trainer of LoRA adapters and of the head on a copy of the base, after the training."""
    torch.manual_seed(seed)
    adapters = LoraConfig(task_type="SEQ_CLS", r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model = get_peft_model(copy.deepcopy(base), adapters)
    trainer = trainer_for(model, DataCollatorWithPadding(tokenizer), train, epochs, learning_rate, seed)
    trainer.train()
    return trainer


def compared(
    base: BertForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    pool: Texts,
    test: Texts,
    seed: int,
    epochs: float,
    learning_rate: float,
) -> dict[str, dict[str, float]]:
    """Return the scores of the plain network, of temperature scaling and of the posterior on the test texts."""
    labelled, _ = split(pool, NUM_TRAIN + NUM_VALIDATION, seed=1 + seed)
    train, validation = (examples(tokenizer, part) for part in split(labelled, NUM_TRAIN, seed=0))
    trainer = adapted(base, tokenizer, train, epochs, learning_rate, seed)
    validation_loader = trainer.get_eval_dataloader(validation)
    test_loader = trainer.get_eval_dataloader(examples(tokenizer, test))

    start = time.perf_counter()
    la = SubspaceLaplace(trainer.model, "classification")
    la.fit(trainer.get_train_dataloader(), validation_loader)
    took = time.perf_counter() - start

    labels = torch.cat([batch["labels"] for batch in test_loader])
    prediction = la.predict(test_loader)
    logits = prediction.mean
    chosen = temperature(la.predict(validation_loader).mean, torch.tensor([each["labels"] for each in validation]))
    found = {
        "plain network": scores(logits.softmax(1), labels),
        "temperature scaling": scores((logits / chosen).softmax(1), labels),
        "sublaplace": scores(prediction.probabilities, labels),
    }
    changes = ", ".join(
        f"{name} {found['plain network'][name]:.3f} → {found['sublaplace'][name]:.3f}" for name in ("NLL", "ECE")
    )
    print(f"seed {seed}: {la.num_parameters:,} parameters, fitted in {took:.0f} seconds; {changes}", flush=True)
    return found


def temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature with the smallest NLL on validation data."""
    candidates = [float(value) for value in torch.logspace(-1, 1, 201)]
    return min(candidates, key=lambda value: metrics.nll((logits / value).softmax(1), labels))


def scores(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy and calibration of probabilities (n, C)."""
    return {
        "accuracy": (probabilities.argmax(1) == labels).double().mean().item(),
        "NLL": metrics.nll(probabilities, labels),
        "ECE": metrics.ece(probabilities, labels),
        "Brier": metrics.brier(probabilities, labels),
    }


def table(runs: list[dict[str, dict[str, float]]]) -> str:
    """Return means and standard deviations over the runs, as Markdown."""
    names = list(runs[0]["plain network"])
    lines = [f"| method | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    for method in runs[0]:
        cells = [[run[method][name] for run in runs] for name in names]
        lines.append(f"| {method} | " + " | ".join(f"{np.mean(c):.3f} ± {np.std(c):.3f}" for c in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
