"""Training: the schedule, one step by hand, and weights that are the same whether or not training was interrupted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from experiments import training
from experiments.datasets import Dataset
from experiments.recipes import RECIPES, Recipe, TrainingRecipe
from experiments.training import held_out, initial_network, is_trained, trained_network

RECIPE = Recipe("toy", "mlp-8-2", TrainingRecipe(0.01, 6, 0.2, 0.5, batch_size=16), 10, 10, 1.0)


def toy(count: int = 40) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 8, generator=generator)
    targets = inputs[:, :2] + 0.1 * torch.randn(count, 2, generator=generator)
    return Dataset("toy", "regression", inputs, targets, inputs[:5], targets[:5])


def weights(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


# The schedule


def test_schedule_rises_stays_and_falls() -> None:
    recipe = TrainingRecipe(2.0, 1, 0.2, 0.5, batch_size=1)
    rates = [recipe.learning_rate_at(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(2e-4)
    assert rates[10] == pytest.approx(2 * (1e-4 + (1 - 1e-4) / 2))
    assert rates[20:51] == pytest.approx([2.0] * 31)
    assert rates[75] == pytest.approx(1.0)
    assert rates[99] == pytest.approx(0.04)


def test_schedule_without_a_plateau_has_its_top_where_the_two_meet() -> None:
    recipe = RECIPES["redwine"].training
    rates = [recipe.learning_rate_at(step, 300) for step in range(300)]
    assert rates.index(max(rates)) == 90 and rates[90] == pytest.approx(0.0004 * 1279 / 256)


def test_rates_of_tables_grow_with_the_batch() -> None:
    assert RECIPES["enb"].training.learning_rate == pytest.approx(0.004 * 614 / 256)
    assert RECIPES["naval"].training.learning_rate == pytest.approx(0.0004 * 1000 / 256)
    assert RECIPES["fashionmnist"].training.learning_rate == 0.002


# The steps


@pytest.mark.parametrize("size", [1.0, 1e4], ids=["short gradient", "clipped gradient"])
def test_first_step_is_that_of_adam_with_l2_and_clipping(tmp_path: Path, size: float) -> None:
    """Adam's first step is α g/(|g| + ε): with the clipped gradient of the mean squared error plus weight decay."""
    data = toy(16)
    data = replace(data, train_targets=data.train_targets * size)
    recipe = replace(RECIPE, training=TrainingRecipe(0.01, 1, 0.0, 1.0, batch_size=16, weight_decay=0.1))
    network = initial_network("mlp-8-2", seed=3)
    nn.functional.mse_loss(network(data.train_inputs), data.train_targets).backward()
    before = weights(network)
    gradient = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
    gradient = gradient / max(1.0, gradient.norm().item()) + 0.1 * before
    moved = weights(trained_network(recipe, data, 3, tmp_path)) - before
    torch.testing.assert_close(moved, -0.01 * gradient / (gradient.abs() + 1e-8), atol=2e-5, rtol=1e-3)


def test_all_batches_of_an_epoch_are_seen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def spy(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(targets)
        return (outputs - targets).square().mean()

    monkeypatch.setattr(training.F, "mse_loss", spy)
    data = toy()
    trained_network(RECIPE, data, 0, tmp_path)
    assert [len(part) for part in seen[:3]] == [16, 16, 8] and len(seen) == 6 * 3
    epochs = [torch.cat(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    for epoch in epochs:
        assert torch.equal(epoch.sort(0).values, data.train_targets.sort(0).values)
    assert not torch.equal(epochs[0], epochs[1])


def test_classification_uses_cross_entropy(tmp_path: Path) -> None:
    data = toy(64)
    labels = (data.train_inputs[:, 0] > 0).long()
    data = replace(data, likelihood="classification", train_targets=labels)
    recipe = replace(RECIPE, training=replace(RECIPE.training, epochs=60))
    network = trained_network(recipe, data, 0, tmp_path)
    assert (network(data.train_inputs).argmax(1) == labels).double().mean() > 0.95


def test_a_training_that_diverges_stops(tmp_path: Path) -> None:
    data = replace(toy(), train_targets=torch.full((40, 2), float("inf")))
    with pytest.raises(RuntimeError, match="toy, seed 0, diverged in epoch 0"):
        trained_network(RECIPE, data, 0, tmp_path)
    assert not is_trained(RECIPE, 0, tmp_path)


# Seeds, interruptions and what is kept


def test_same_seed_same_weights_and_global_randomness_untouched(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = trained_network(RECIPE, toy(), 1, tmp_path / "a")
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(weights(first), weights(trained_network(RECIPE, toy(), 1, tmp_path / "b")))
    assert not torch.equal(weights(first), weights(trained_network(RECIPE, toy(), 2, tmp_path / "a")))
    assert not first.training


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = weights(trained_network(RECIPE, toy(), 0, tmp_path / "through"))
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    real_loss, calls = nn.functional.mse_loss, []

    def interrupted(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(None)
        if len(calls) == 11:  # in the middle of the fourth epoch
            raise KeyboardInterrupt
        return real_loss(outputs, targets)

    monkeypatch.setattr(training.F, "mse_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained_network(RECIPE, toy(), 0, tmp_path / "stopped")
    assert not is_trained(RECIPE, 0, tmp_path / "stopped")
    assert torch.equal(weights(trained_network(RECIPE, toy(), 0, tmp_path / "stopped")), expected)
    assert len(calls) == 11 + 9  # three epochs of three batches were left
    assert [path.name for path in (tmp_path / "stopped").iterdir()] == ["toy-0.safetensors"]


def test_weights_are_kept_until_the_recipe_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = weights(trained_network(RECIPE, toy(), 0, tmp_path))
    other = replace(RECIPE, training=replace(RECIPE.training, epochs=2))
    same = replace(RECIPE, prior_precision=5.0, largest_dim=3)
    assert is_trained(RECIPE, 0, tmp_path) and is_trained(same, 0, tmp_path) and not is_trained(other, 0, tmp_path)

    def fail(*_: object) -> None:
        raise AssertionError("trained again")

    with monkeypatch.context() as patched:
        patched.setattr(training, "_train", fail)
        assert torch.equal(weights(trained_network(same, toy(), 0, tmp_path)), kept)
        with pytest.raises(AssertionError, match="trained again"):
            trained_network(other, toy(), 0, tmp_path)
    assert not torch.equal(weights(trained_network(other, toy(), 0, tmp_path)), kept)


def test_a_checkpoint_of_another_recipe_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    with monkeypatch.context() as patched:
        patched.setattr(training, "save_file", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            trained_network(RECIPE, toy(), 0, tmp_path)
    assert (tmp_path / "toy-0.checkpoint").exists()
    other = replace(RECIPE, training=replace(RECIPE.training, learning_rate=0.02))
    found = weights(trained_network(other, toy(), 0, tmp_path))
    assert torch.equal(found, weights(trained_network(other, toy(), 0, tmp_path / "fresh")))


def test_held_out_data_are_a_twelfth_that_the_rest_lacks() -> None:
    rest, inputs, targets = held_out(toy())
    assert len(inputs) == len(targets) == 3 and len(rest.train_inputs) == 37 and rest.name == "toy-held-out"
    together = torch.cat([rest.train_inputs, inputs])
    assert torch.equal(together.sort(0).values, toy().train_inputs.sort(0).values)
    matches = (rest.train_inputs[:, None] == inputs).all(2)
    assert not matches.any()
    # Inputs and targets stay together.
    assert (targets - inputs[:, :2]).abs().max() < 1
