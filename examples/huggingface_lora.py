"""A Hugging Face transformer with LoRA adapters, from training to calibrated probabilities.

A tiny BERT made from a configuration (nothing is downloaded) learns the topic of short sentences that this script makes
up. First it learns five topics with all of its weights, then three of them with LoRA adapters and a new head, from few
sentences. The Laplace approximation takes the parameters with requires_grad=True: here the adapters and the head.
Prints one table. Takes about a minute.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from sublaplace import SubspaceLaplace, metrics

TOPICS = {
    "weather": ["rain", "wind", "storm", "sun", "cloud", "snow", "frost", "heat"],
    "music": ["song", "choir", "drum", "piano", "melody", "concert", "violin", "opera"],
    "food": ["bread", "soup", "cheese", "apple", "dinner", "spice", "oven", "salad"],
    "sport": ["match", "goal", "team", "race", "coach", "ball", "medal", "stadium"],
    "travel": ["train", "hotel", "map", "airport", "ticket", "island", "road", "museum"],
}
FILLERS = ["the", "a", "was", "we", "saw", "very", "good", "bad", "today", "yesterday", "again", "with", "and"]
FILLERS += ["had", "some", "new", "old", "long"]
WORDS = ["[PAD]", "[CLS]", *FILLERS, *(word for words in TOPICS.values() for word in words)]
LENGTH = 10  # tokens of the longest sentence, with [CLS]

Batch = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="training sets and networks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = [compared(seed) for seed in range(arguments.seeds)]
    print(table(runs))


def sentences(topics: list[str], count: int, generator: np.random.Generator) -> Batch:
    """Return tokens, attention mask and topics; a third of the words is of the topic, an eighth of any topic."""
    ids, masks, labels = [], [], []
    for _ in range(count):
        label = int(generator.integers(len(topics)))
        words = ["[CLS]"]
        for _ in range(generator.integers(4, LENGTH)):
            draw = generator.random()
            if draw < 1 / 3:
                words.append(generator.choice(TOPICS[topics[label]]))
            elif draw < 1 / 3 + 1 / 8:
                words.append(generator.choice(TOPICS[topics[generator.integers(len(topics))]]))
            else:
                words.append(generator.choice(FILLERS))
        padding = LENGTH - len(words)
        ids.append([WORDS.index(word) for word in words] + [0] * padding)
        masks.append([1] * len(words) + [0] * padding)
        labels.append(label)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks), "topic": torch.tensor(labels)}


def batches(data: Batch, size: int = 32) -> list[Batch]:
    """Return a loader: a list of dict batches, as a data collator makes them."""
    count = len(data["topic"])
    return [{key: value[i : i + size] for key, value in data.items()} for i in range(0, count, size)]


def bert(num_labels: int) -> BertForSequenceClassification:
    """Return a tiny BERT with random weights."""
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=num_labels,
    )
    return BertForSequenceClassification(config)


def train(model: nn.Module, data: Batch, epochs: int, learning_rate: float) -> None:
    """Train the parameters that require grad, by Adam."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, learning_rate)
    model.train()
    for _ in range(epochs):
        for batch in batches(data):
            optimizer.zero_grad()
            F.cross_entropy(logits(model, batch), batch["topic"]).backward()
            optimizer.step()
    model.eval()


def logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's outputs (n, C)."""
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def adapted(seed: int, num_base: int, num_train: int, epochs: int) -> tuple[nn.Module, Batch]:
    """Return a pre-trained model with trained adapters, and the adapters' training data."""
    generator = np.random.default_rng(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        base = bert(num_labels=5)
        train(base, sentences(list(TOPICS), num_base, generator), epochs=5, learning_rate=1e-3)
        base.num_labels = 3
        base.classifier = nn.Linear(32, 3)
        model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"]))
        data = sentences(["food", "sport", "travel"], num_train, generator)
        train(model, data, epochs, learning_rate=5e-3)
    return model, data


def num_parameters(model: nn.Module) -> int:
    """Return how many parameters there are, frozen ones included."""
    return sum(parameter.numel() for parameter in model.parameters())


def compared(
    seed: int, num_base: int = 1000, num_train: int = 100, num_test: int = 1000, epochs: int = 60
) -> dict[str, dict[str, float]]:
    """Return the scores of the plain model and of its Laplace approximation on new sentences."""
    model, data = adapted(seed, num_base, num_train, epochs)
    la = SubspaceLaplace.paper(model, "classification", dim=100, prior_precision="evidence", labels_key="topic")
    la.fit(batches(data))
    print(f"{la.num_parameters:,} of {num_parameters(model):,} parameters, λ = {la.prior_precision:.2g}")
    test = sentences(["food", "sport", "travel"], num_test, np.random.default_rng(1000 + seed))
    with torch.no_grad():
        plain = logits(model, test).softmax(1)
    return {"plain network": scores(plain, test["topic"]), "subspace Laplace": scores(la(test), test["topic"])}


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
