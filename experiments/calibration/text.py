"""Film reviews with a small transformer: a base that is trained from scratch, and LoRA adapters on top of it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.networks import described
from experiments.calibration.problem import Examples, Problem
from experiments.calibration.splits import MOST_TEST_INPUTS, MOST_TRAINING_INPUTS, joined
from experiments.calibration.text_files import SOURCE, rated_snippets, words_of
from experiments.calibration.text_network import (
    LENGTH,
    PADDING,
    RANK,
    WIDTH,
    TextClassifier,
    base_classifier,
    with_adapters,
)
from experiments.calibration.trained import CACHE, ENSEMBLE_SIZE
from experiments.calibration.training import (
    NetworkRecipe,
    described_recipe,
    kept_network,
    train_classifier,
)

UNKNOWN, MASK, START = 1, 2, 3  # after PADDING
UNLABELLED = -100
LEAST_COUNT = 2  # a rarer word is unknown
MASKED_SHARE = 0.15
BASE = NetworkRecipe(epochs=8, learning_rate=2e-3, weight_decay=1e-2, warm=0.1)
ADAPTERS = NetworkRecipe(epochs=10, learning_rate=3e-3, weight_decay=1e-4)
NOTE = (
    f"{SOURCE}; the class is the sign of the mean rating. The base is a BERT with two layers of width {WIDTH}, trained "
    "from scratch on the texts that are neither test nor validation data. It learns to fill in masked words, and the "
    "classes of those texts that are not training data of the adapters either. It is then frozen. LoRA adapters of "
    f"rank {RANK} and a new linear head are trained on {MOST_TRAINING_INPUTS:,} labelled texts, and the posterior is "
    "over them alone. The ensemble shares the base. Dropout is BERT's own, at rate 0.1."
)


def text_problems(splits: Sequence[int], folder: Path = CACHE) -> dict[int, list[Problem]]:
    """Return splits of the film reviews with their networks, which are trained if they are not on disk."""
    texts, labels = rated_snippets()
    return {split: [text_problem("movie-reviews", texts, labels, split, folder)] for split in splits}


def text_problem(
    name: str,
    texts: Sequence[str],
    labels: Sequence[int],
    split: int,
    folder: Path,
    num_train: int = MOST_TRAINING_INPUTS,
) -> Problem:
    """Draw one split: test data first, then training data; the base reads all that is neither test nor validation."""
    order = np.random.default_rng([42, split]).permutation(len(texts))
    num_test = min(MOST_TEST_INPUTS, len(texts) // 2)
    words = [words_of(text) for text in texts]
    test_rows, train_rows = order[:num_test], order[num_test : num_test + num_train]
    fit_rows, validation_rows = np.split(train_rows, [len(train_rows) - len(train_rows) // 10])
    other_rows = order[num_test + len(train_rows) :]
    read_rows = np.concatenate([fit_rows, other_rows])
    numbers = vocabulary(words[row] for row in read_rows)

    def examples(rows: np.typing.NDArray[np.int64]) -> Examples:
        return Examples(
            token_numbers([words[row] for row in rows], numbers), torch.tensor([labels[row] for row in rows])
        )

    fit, validation, test = examples(fit_rows), examples(validation_rows), examples(test_rows)
    train = joined(fit, validation)
    read = examples(read_rows)
    read.targets[: len(fit_rows)] = UNLABELLED
    base = kept_network(
        folder / f"{name}-{split}-base.safetensors",
        lambda: base_classifier(len(numbers) + 4),
        lambda network: train_base(network, read, split, BASE),
        split,
        described_recipe(BASE, len(numbers), len(read), WIDTH, LENGTH, MASKED_SHARE),
    )

    def adapted(which: str, learned: Examples, member: int = 0) -> nn.Module:
        seed = 100 * split + member
        return kept_network(
            folder / f"{name}-{split}-{which}.safetensors",
            lambda: described(with_adapters(base), "text", num_tokens=len(numbers) + 4),
            lambda network: train_classifier(network, learned, seed, ADAPTERS),
            seed,
            described_recipe(ADAPTERS, described_recipe(BASE), len(numbers), len(learned), RANK),
        )

    first = adapted("member-0", train)
    return Problem(
        dataset=name,
        split=split,
        task="classification",
        train=train,
        fit=fit,
        validation=validation,
        test=test,
        network=first,
        held_out_network=adapted("held-out", fit),
        members=tuple(adapted(f"member-{k}", train, k) for k in range(1, ENSEMBLE_SIZE)),
        dropout_network=first,
    )


def vocabulary(texts: Any) -> dict[str, int]:
    """Number the words that occur at least `LEAST_COUNT` times, from the first number after the special tokens."""
    counts = Counter(word for text in texts for word in text)
    known = sorted(word for word, count in counts.items() if count >= LEAST_COUNT)
    return {word: number for number, word in enumerate(known, start=4)}


def token_numbers(texts: Sequence[Sequence[str]], numbers: dict[str, int]) -> Tensor:
    """Return the tokens of texts (n, LENGTH): a start, the words, padding; long texts are cut."""
    tokens = torch.full((len(texts), LENGTH), PADDING)
    for row, words in zip(tokens, texts, strict=True):
        found = [START, *(numbers.get(word, UNKNOWN) for word in words)][:LENGTH]
        row[: len(found)] = torch.tensor(found)
    return tokens


def train_base(network: nn.Module, examples: Examples, seed: int, recipe: NetworkRecipe) -> None:
    """Train a BERT to fill in masked words, and to classify the texts that are labelled.

    The weights of the embedding serve as outputs for words.
    """
    assert isinstance(network, TextClassifier)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
    num_steps, step = recipe.epochs * -(-len(examples) // recipe.batch_size), 0
    network.train()
    for _ in range(recipe.epochs):
        for rows in torch.randperm(len(examples), generator=generator).split(recipe.batch_size):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate_at(step, num_steps)
            tokens, classes = examples.inputs[rows], examples.targets[rows]
            tokens = tokens[:, : int((tokens != PADDING).sum(1).max())]
            masked = (torch.rand(tokens.shape, generator=generator) < MASKED_SHARE) & (tokens > START)
            hidden = network.hidden(tokens.masked_fill(masked, MASK))
            words = hidden[masked] @ cast(Any, network.body).embeddings.word_embeddings.weight.T
            loss = F.cross_entropy(words, tokens[masked], reduction="sum") / max(1, int(masked.sum()))
            labelled, logits = classes != UNLABELLED, network.classes(hidden, tokens)
            loss = loss + F.cross_entropy(logits[labelled], classes[labelled], reduction="sum") / len(rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
