"""The examples on tiny networks and few inputs."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import active_learning
import huggingface_lora
import next_token
import out_of_distribution
import segmentation
import sklearn_comparison
import training_by_evidence


def test_the_huggingface_example_scores_the_plain_network_and_the_posterior(capsys, monkeypatch):
    monkeypatch.setattr(huggingface_lora, "NUM_TRAIN", 40)
    monkeypatch.setattr(huggingface_lora, "NUM_VALIDATION", 20)
    words = ["a", "truly", "good", "bad", "film", "dull", "play", "and", "moving", "story", "cast", "the"]
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(words, generator.integers(3, 12))) for _ in range(150)]
    data = (texts, [int("good" in text) for text in texts])
    test, pool = huggingface_lora.split(data, 50, seed=0)
    assert len(test[0]) == 50 and len(pool[0]) == 100 and not set(test[0]) & set(pool[0])
    tokenizer = huggingface_lora.tokenizer_of(pool[0], size=60)
    lengths = {len(each["input_ids"]) for each in huggingface_lora.examples(tokenizer, pool)}
    assert len(lengths) > 5  # every text has its own length
    base = huggingface_lora.base_model(tokenizer, test, width=16, epochs=1)
    run = huggingface_lora.compared(base, tokenizer, pool, test, seed=0, epochs=2, learning_rate=1e-3)
    # Adapters of four maps 16 → 16, of 16 → 64 and 64 → 16 in two layers, of the pooler, and a head of 2 · 17.
    count = huggingface_lora.RANK * (2 * (4 * 32 + 2 * 80) + 32) + 2 * 17
    assert f"{count:,} parameters" in capsys.readouterr().out
    assert len({scores["NLL"] for scores in run.values()}) == 3
    assert huggingface_lora.table([run, run]).count("± 0.000") == 3 * 4


def test_the_huggingface_example_finds_the_best_temperature():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 2, generator=generator)
    labels = torch.multinomial((logits / 2).softmax(1), 1, generator=generator).squeeze(1)
    assert huggingface_lora.temperature(logits, labels) == pytest.approx(2, rel=0.1)


@pytest.mark.slow
def test_the_comparison_with_gaussian_processes_has_all_methods():
    found = sklearn_comparison.comparison(seeds=1, max_iter=3, num_train=110)
    assert len(found) == 2 * 5
    for data in ("diabetes", "digits"):
        plain, *posteriors = (
            next(runs[0] for (name, method), runs in found.items() if name == data and method.startswith(kind))
            for kind in ("plain", "bare", "λ from the training", "λ from a held-out")
        )
        assert all(scores["NLL"] != plain["NLL"] for scores in posteriors)
    assert sklearn_comparison.markdown(found).count("\n| di") == 10


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.slow
def test_the_example_of_training_compares_every_way():
    lines = training_by_evidence.table(seeds=2, epochs=2).splitlines()
    assert len(lines) == 2 + 2 * 4
    assert all(len(re.findall(r"\d\.\d{3} ± \d\.\d{3}", line)) == 2 for line in lines[2:])
    plain, posterior = training_by_evidence.held_out("diabetes", "evidence", seed=0, epochs=20)
    assert plain < 1.3 and posterior < 1.3  # 1.42 without a network


def test_the_example_of_unfamiliar_images_scores_and_draws(tmp_path):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(40, 1, 28, 28, generator=generator)
    data = TensorDataset(inputs, torch.arange(40) % 10)
    network = out_of_distribution.trained_network(data, seed=0, epochs=1)
    scores = out_of_distribution.all_scores(network, data, inputs[:10], 20 * inputs[10:25], dim=5)
    assert {(len(familiar), len(unfamiliar)) for familiar, unfamiliar in scores.values()} == {(10, 15)}
    familiar, unfamiliar = scores["subspace + KFAC outside, variance"]
    assert unfamiliar.min() > familiar.max()  # twenty times as bright
    out_of_distribution.draw(scores, tmp_path / "scores.png")
    assert (tmp_path / "scores.png").stat().st_size > 10_000
    assert out_of_distribution.table({"variance": [0.5, 1.0]}).endswith("| variance | 0.750 ± 0.250 |")
    assert sum(parameter.numel() for parameter in network.parameters()) == 9_402


def test_the_example_of_active_learning_labels_more_images_and_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(active_learning, "CANDIDATES", 15)
    found = {
        name: torch.tensor([active_learning.accuracies(name, seed, rounds=1) for seed in (0, 1)])
        for name in active_learning.CHOICES
    }
    firsts = torch.stack([values[:, 0] for values in found.values()])
    assert (firsts == firsts[0]).all()  # all choices start from the same images
    assert all((values > 0.2).all() for values in found.values())
    assert active_learning.table(found).count("±") == 2 * 3
    active_learning.draw(found, tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 5_000


@pytest.mark.filterwarnings("ignore")  # of BoTorch's fits
def test_the_example_of_bayesian_optimisation_runs_every_method(tmp_path):
    pytest.importorskip("botorch")
    import bayesian_optimisation

    make, _ = bayesian_optimisation.PROBLEMS["Branin"]
    regrets = {name: [bayesian_optimisation.optimised(make(), name, 0, 2)[0]] for name in bayesian_optimisation.METHODS}
    for (values,) in regrets.values():
        assert len(values) == 3 and values[0] >= values[1] >= values[2] > -1e-5
    assert len({values[0][0] for values in regrets.values()}) == 1  # all methods start from the same points
    bayesian_optimisation.drawn({"Branin": regrets}, str(tmp_path / "regret.png"))
    assert (tmp_path / "regret.png").stat().st_size > 5_000


def test_the_segmentation_example_knows_borders_and_draws(tmp_path):
    train, other = segmentation.pictures(12, seed=0), segmentation.pictures(12, seed=1)
    network = segmentation.trained_network(train, epochs=2)
    assert sum(parameter.numel() for parameter in network.parameters()) == 4_083
    la = segmentation.fitted(network, train, other, dim=3)
    assert la(other[0]).shape == (12, 3, 28, 28)
    unseen = segmentation.pictures(3, seed=2, shapes=("triangle",))
    assert not unseen[1].any()
    found = segmentation.mean_information(la, other, unseen)
    assert min(found.values()) >= 0 and len(found) == 4
    squares = torch.zeros(1, 28, 28, dtype=torch.long)
    squares[0, 5:10, 5:10] = 2
    assert int(segmentation.at_borders(squares).sum()) == 7 * 7 - 3 * 3
    segmentation.draw(la, other, unseen, tmp_path / "pictures.png")
    assert (tmp_path / "pictures.png").stat().st_size > 10_000


def test_the_example_of_next_tokens_predicts_words(capsys, monkeypatch):
    monkeypatch.setattr(next_token, "VOCABULARY", 300)
    words, sequences = next_token.text_of("the cat saw the dog, and the dog saw the cat. " * 12)
    assert words[0] == "the" and sequences.shape[1] == 17
    network = next_token.trained_network(sequences, epochs=2, width=8)
    la = next_token.fitted(network, sequences[:8], sequences[-12:], dim=3)
    next_token.show(la, words, sequences[:1])
    assert capsys.readouterr().out.count("; true: ") == 4
    assert set(next_token.mean_information(la, sequences[:2], len(words))) == {
        "held-out text",
        "words in random order",
        "unused tokens",
    }
    assert 0.1 < next_token.peak_gigabytes() < 100
