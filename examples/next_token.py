"""Next-token prediction with uncertainty: a tiny GPT-2 with the whole vocabulary of 50,257 tokens.

The network is made from a configuration (nothing is downloaded) and learns a page of the Python reference, which comes
with Python, shortly. Every position of a sequence predicts the next word, so one input has 16 · 50,257 outputs. The
posterior is fitted to the same text. It is asked about held-out text, words in random order and tokens of no word.
Prints the most probable words with the deviations of their logits, and the peak memory. Takes minutes on one core.
"""

import argparse
import re
import resource
import sys
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from sublaplace import Categorical, Drawn, Resources, SubspaceLaplace

VOCABULARY = 50_257  # of GPT-2; the words of the text are its first ones
LENGTH = 16  # tokens that the network sees
PADDING = -100  # label of positions that do not count

Tokens = dict[str, Tensor]
Batch = tuple[Tokens, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=10, help="dimension of the subspace")
    parser.add_argument("--sequences", type=int, default=40, help="training sequences of the fit")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    words, sequences = text_of(topics["types"])
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(0))
    train, validation, test = sequences[order].split([len(sequences) - 24, 12, 12])
    network = trained_network(train)
    la = fitted(network, train[: arguments.sequences], validation, arguments.dim)
    print(la.summary())
    print(la.evaluate(batches(test)))
    show(la, words, test[:1])
    for name, value in mean_information(la, test[:4], len(words)).items():
        print(f"mutual information, {name}: {value:.4f} nats per token")
    print(f"peak memory of the process: {peak_gigabytes():.2f} GB")


def text_of(text: str) -> tuple[list[str], Tensor]:
    """Return the words of a text, most frequent first, and its tokens in sequences of 17."""
    found = re.findall(r"[a-z]+|[.,;:]", text.lower())
    words = sorted(set(found), key=lambda word: (-found.count(word), word))
    places = {word: place for place, word in enumerate(words)}
    tokens = torch.tensor([places[word] for word in found])
    return words, tokens.unfold(0, LENGTH + 1, LENGTH).contiguous()


def batches(sequences: Tensor, size: int = 4) -> list[Batch]:
    """Return the tokens as inputs and, moved by one, as labels."""
    return [({"input_ids": part[:, :-1]}, part[:, 1:]) for part in sequences.split(size)]


def trained_network(sequences: Tensor, epochs: int = 20, width: int = 32) -> nn.Module:
    """Return a GPT-2 with two layers, trained with AdamW; its last layer shares the weights of the embedding."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"n_embd": width, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
        network = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))
        optimizer = torch.optim.AdamW(network.parameters(), 5e-3)
        for _ in range(epochs):
            for inputs, labels in batches(sequences[torch.randperm(len(sequences))], 16):
                optimizer.zero_grad()
                F.cross_entropy(network(**inputs).logits.flatten(0, 1), labels.flatten()).backward()
                optimizer.step()
    return network.eval()


def fitted(network: nn.Module, train: Tensor, validation: Tensor, dim: int) -> SubspaceLaplace:
    """Return the posterior; the classes are the last dimension of the outputs (n, 16, 50,257)."""
    la = SubspaceLaplace(
        network,
        Categorical(ignore_index=PADDING, class_dim=-1),
        dim,
        subspace_inputs=Drawn(20),
        resources=Resources(memory_budget=2**28),
    )
    return la.fit(batches(train), batches(validation))


def show(la: SubspaceLaplace, words: list[str], sequence: Tensor, count: int = 3) -> None:
    """Print the most probable next words at the last positions of a sequence, with deviations of their logits."""
    ((inputs, labels),) = batches(sequence)
    top = la.predict(inputs).top(count)
    for place in range(LENGTH - 4, LENGTH):
        before = " ".join(words[token] for token in inputs["input_ids"][0, place - 3 : place + 1])
        found = ", ".join(
            f"{words[token] if token < len(words) else '(none)'} {probability:.2f} (± {variance**0.5:.2f})"
            for token, probability, variance in zip(
                top.classes[0, place].tolist(),
                top.probabilities[0, place].tolist(),
                top.variance[0, place].tolist(),
                strict=True,
            )
        )
        print(f"… {before} → {found}; true: {words[labels[0, place]]}")


def mean_information(la: SubspaceLaplace, sequences: Tensor, num_words: int) -> dict[str, float]:
    """Return the mean mutual information at held-out text, and at words of it in random order."""
    generator = torch.Generator().manual_seed(1)
    shuffled = sequences.flatten()[torch.randperm(sequences.numel(), generator=generator)].view(sequences.shape)
    unused = torch.randint(num_words, VOCABULARY, sequences.shape, generator=generator)
    found = {}
    for name, tokens in (("held-out text", sequences), ("words in random order", shuffled), ("unused tokens", unused)):
        each = [la.predict(inputs).mutual_information for inputs, _ in batches(tokens)]  # a few sequences at a time
        found[name] = float(torch.cat(each).mean())
    return found


def peak_gigabytes() -> float:
    """Return the largest memory that this process has used."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e9 / 1024)


if __name__ == "__main__":
    main()
