"""The benchmark of calibration on made-up data: networks, table, scores and statistics, in seconds."""

import gzip
import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from experiments import datasets
from experiments.calibration import halves, sets, statistics, text, text_files
from experiments.calibration.__main__ import RESULTS
from experiments.calibration.baselines import deep_ensemble, plain, temperature_scaling, timed, validated_noise
from experiments.calibration.cifar import NETWORKS, two_halves
from experiments.calibration.cifar_resnet import CifarResNet
from experiments.calibration.methods import METHODS, Method
from experiments.calibration.networks import described, mlp
from experiments.calibration.prediction import Normal, Predicted, Probabilities, pooled
from experiments.calibration.problem import Examples, Problem
from experiments.calibration.published import published_scores
from experiments.calibration.report import write_report
from experiments.calibration.run import run_set
from experiments.calibration.scores import crps, ece_interval, ece_of_perfect, scores_of
from experiments.calibration.sets import TABLE_SETS, TableSet, Task
from experiments.calibration.splits import split_table
from experiments.calibration.stack import StackRecipe, train_stack
from experiments.calibration.table import CalibrationTable, Key, Line
from experiments.calibration.trained import table_problems
from experiments.calibration.training import NetworkRecipe, train_classifier
from sublaplace import SubspaceLaplace, metrics

# Data -----------------------------------------------------------------------------------------------------------------


def toy_set(task: Task, n: int = 60, columns: int = 3) -> TableSet:
    generator = np.random.default_rng(0)
    inputs = generator.normal(3.0, 2.0, (n, columns))
    inputs[:, -1] = 7.0  # a constant column
    numbers = inputs.sum(1, keepdims=True) + generator.normal(size=(n, 1))
    targets = numbers if task == "regression" else (numbers[:, 0] > np.median(numbers)).astype(float)
    return TableSet(f"toy-{task}", "development", task, lambda: (inputs, targets))


def test_sets_are_the_agreed_ones() -> None:
    development = {name for name, each in TABLE_SETS.items() if each.kind == "development"}
    assert development == {
        *("airfoil", "autompg", "concrete", "yacht", "enb", "redwine"),
        *("australian", "german", "vehicle", "satimage", "optdigits", "phoneme", "segment", "wine"),
    }
    assert set(TABLE_SETS) - development == {
        *("parkinsons", "protein", "bike", "sml", "kin40k", "california", "naval", "diabetes"),
        *("spambase", "texture", "penbased", "ring", "breast-cancer", "digits"),
    }


def test_a_file_is_checked_and_its_last_column_is_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = gzip.compress(b"1,2,0\n3,4,1\n")
    (tmp_path / "tabular").mkdir()
    (tmp_path / "tabular" / "tiny.csv.gz").write_bytes(written)
    monkeypatch.setenv("SUBLAPLACE_DATA", str(tmp_path))
    file = datasets.SourceFile("tabular/tiny.csv.gz", hashlib.sha256(written).hexdigest(), "https://example.org")
    inputs, classes = sets._last_column_is_target(file, "classification")
    assert inputs.tolist() == [[1, 2], [3, 4]] and classes.tolist() == [0, 1]
    assert sets._last_column_is_target(file, "regression")[1].tolist() == [[0], [1]]
    with pytest.raises(datasets.DataFileError):
        sets._last_column_is_target(replace(file, sha256="0" * 64), "regression")


def test_scikit_learns_sets_have_their_shapes() -> None:
    shapes = {name: tuple(part.shape for part in TABLE_SETS[name].read()) for name in ("wine", "diabetes", "digits")}
    assert shapes == {
        "wine": ((178, 13), (178,)),
        "diabetes": ((442, 10), (442, 1)),
        "digits": ((1797, 64), (1797,)),
    }


def test_splits_are_standardised_on_their_training_data_and_disjoint() -> None:
    fit, validation, test = split_table(toy_set("regression"), 0)
    assert [len(part) for part in (fit, validation, test)] == [49, 5, 6]
    train = torch.cat([fit.inputs, validation.inputs])
    targets = torch.cat([fit.targets, validation.targets])
    assert train.mean(0).abs().max() < 1e-6 and train[:, :2].std(0, correction=0).sub(1).abs().max() < 1e-6
    assert targets.mean().abs() < 1e-6 and abs(targets.std(correction=0) - 1) < 1e-6
    assert test.inputs[:, 2].abs().max() == 0  # the constant column
    rows = torch.cat([train, test.inputs])
    assert len(rows.unique(dim=0)) == 60
    assert not torch.equal(split_table(toy_set("regression"), 1)[2].inputs, test.inputs)


def test_large_sets_are_cut() -> None:
    fit, validation, test = split_table(toy_set("classification", n=9000), 0)
    assert [len(part) for part in (fit, validation, test)] == [2700, 300, 5000]
    assert fit.targets.dtype == torch.int64


# Training -------------------------------------------------------------------------------------------------------------


def trained_alone(network: nn.Module, examples: Examples, seed: int, recipe: StackRecipe) -> None:
    """Trains one network as any user would."""
    optimizer = torch.optim.AdamW(network.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
    steps = recipe.epochs * math.ceil(len(examples) / recipe.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loss = nn.MSELoss() if examples.targets.is_floating_point() else nn.CrossEntropyLoss()
    for epoch in range(recipe.epochs):
        order = torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(len(examples)))
        for rows in order.split(recipe.batch_size):
            optimizer.zero_grad()
            loss(network(examples.inputs[rows]), examples.targets[rows]).backward()
            optimizer.step()
            schedule.step()


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_a_stack_is_trained_as_each_network_alone(task: Task) -> None:
    recipe = StackRecipe(epochs=4, batch_size=16)
    parts = [split_table(toy_set(task), split)[0] for split in range(3)]
    outputs = 1 if task == "regression" else 2
    networks, seeds = [mlp(3, outputs, width=8).double() for _ in parts], [5, 6, 7]
    alone = [mlp(3, outputs, width=8).double() for _ in parts]
    for one, other in zip(alone, networks, strict=True):
        one.load_state_dict(other.state_dict())
    parts = [Examples(p.inputs.double(), p.targets.double() if outputs == 1 else p.targets) for p in parts]
    train_stack(
        networks, torch.stack([p.inputs for p in parts]), torch.stack([p.targets for p in parts]), seeds, recipe
    )
    for network, single, part, seed in zip(networks, alone, parts, seeds, strict=True):
        trained_alone(single, part, seed, recipe)
        for found, expected in zip(network.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_dropout_of_a_stack_does_not_depend_on_the_other_networks() -> None:
    recipe = StackRecipe(epochs=2, dropout=0.2)
    part = split_table(toy_set("regression"), 0)[0]

    def trained(seeds: Sequence[int]) -> nn.Module:
        torch.manual_seed(0)
        first = mlp(3, 1, dropout=0.2, width=8)
        networks = [first, *(mlp(3, 1, dropout=0.2, width=8) for _ in seeds[1:])]
        shape = (len(seeds), -1, -1)
        train_stack(networks, part.inputs.expand(shape), part.targets.expand(shape), seeds, recipe)
        return first

    for found, expected in zip(trained([3]).parameters(), trained([3, 4]).parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_trained_networks_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.calibration.trained.EPOCHS", {"regression": 1, "classification": 1})
    first = table_problems(toy_set("classification"), [0, 1], tmp_path)
    monkeypatch.setattr("experiments.calibration.trained.train_stack", lambda *_: pytest.fail("trained again"))
    again = table_problems(toy_set("classification"), [1], tmp_path)
    for name in ("network", "held_out_network", "dropout_network"):
        weights = zip(getattr(first[1], name).parameters(), getattr(again[0], name).parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in weights)
    assert len(first[0].members) == 4 and not first[0].network.training


# Methods and table ----------------------------------------------------------------------------------------------------


def toy_problem(task: Task, split: int = 0) -> Problem:
    fit, validation, test = split_table(toy_set(task), split)
    train = Examples(torch.cat([fit.inputs, validation.inputs]), torch.cat([fit.targets, validation.targets]))
    torch.manual_seed(split)
    one, other, member = (mlp(3, 1 if task == "regression" else 2, width=4).eval() for _ in range(3))
    return Problem("toy", split, task, train, fit, validation, test, one, other, (member,))


def test_validation_sets_the_noise_and_the_temperature() -> None:
    problem = toy_problem("regression")
    found = validated_noise(problem)
    assert isinstance(found, Normal)
    residuals = problem.held_out_network(problem.validation.inputs) - problem.validation.targets
    assert found.covariance.flatten().tolist() == pytest.approx([residuals.square().mean().item()] * 6)
    problem = toy_problem("classification")
    scaled = temperature_scaling(replace(problem, test=problem.validation))
    own = plain(replace(problem, network=problem.held_out_network, test=problem.validation))
    assert isinstance(scaled, Probabilities) and isinstance(own, Probabilities)
    targets = problem.validation.targets
    assert metrics.nll(scaled.values, targets) <= metrics.nll(own.values, targets)


def test_the_ensemble_has_the_moments_of_its_mixture() -> None:
    problem = toy_problem("regression")
    found = deep_ensemble(problem)
    assert isinstance(found, Normal)
    a, b = (network(problem.test.inputs).double() for network in (problem.network, *problem.members))
    stds = [
        (network(problem.train.inputs) - problem.train.targets).square().mean().sqrt().item()
        for network in (problem.network, *problem.members)
    ]
    expected = (a - b).square() / 4 + (stds[0] ** 2 + stds[1] ** 2) / 2
    torch.testing.assert_close(found.mean, (a + b) / 2)
    torch.testing.assert_close(found.covariance[:, :, 0], expected, rtol=1e-5, atol=1e-6)


def test_halves_share_their_passes_and_get_what_validation_data_give(monkeypatch: pytest.MonkeyPatch) -> None:
    table_set = toy_set("classification", 200)
    train, _, _ = split_table(table_set, 0)
    examples = [
        Examples(train.inputs[rows], train.targets[rows]) for rows in (slice(60), slice(60, 110), slice(110, 160))
    ]
    torch.manual_seed(0)
    network = mlp(3, 2, width=4).eval()
    train_classifier(network, examples[0], 0, NetworkRecipe(epochs=3))
    make = partial(Problem, "toy", 0, "classification", examples[0], examples[0], is_half=True)
    one = make(examples[1], examples[2], network, network)
    two = make(examples[2], examples[1], network, network)
    passes: list[int] = []
    validation_data = halves.validation_data
    monkeypatch.setattr(halves, "validation_data", lambda *given: passes.append(1) or validation_data(*given))
    for name, options in {
        "ours": {},
        "ours-validation": {},
        "ours-last-layer-validation": {"projector": "last-layer"},
        "ours-subspace-validation": {"complement": None},
        "ours-kfac-validation": {"projector": None, "complement": "kfac"},
    }.items():
        method = next(method for method in METHODS if method.name == name)
        for problem in (one, two):
            la = SubspaceLaplace(network, "classification", **options)
            data = (problem.validation.loader(),) if method.uses_validation else ()
            expected = la.fit(problem.fit.loader(), *data).predict(problem.test.inputs).probabilities
            found, seconds = method.predict(problem)
            assert isinstance(found, Probabilities) and seconds > 0
            torch.testing.assert_close(found.values, expected.double(), rtol=1e-3, atol=1e-4)
            assert found.note == f"λ={la.prior_precision:.3g}"
    assert len(passes) == 2 * 4  # the first two methods share theirs


def test_methods_run_where_they_have_what_they_need() -> None:
    def names(problem: Problem) -> set[str]:
        return {method.name for method in METHODS if method.applies_to(problem)}

    problem = toy_problem("classification")
    strong = names(replace(problem, is_half=True)) - names(problem)
    assert strong == {"ours-last-layer-validation", "ours-subspace-validation", "ours-kfac-validation"}
    assert "temperature" in names(problem) and "noise-validation" not in names(problem)
    assert names(problem) - names(replace(problem, members=())) == {"ensemble"}
    assert names(replace(problem, dropout_network=problem.network)) - names(problem) == {"dropout"}
    described(problem.network, "mlp", num_inputs=3, num_outputs=2, width=4)
    peers = {"last-layer", "all", "last-layer-validation", "all-validation"}
    assert {name for name in names(problem) if "laplace-torch" in name} == {f"laplace-torch-{name}" for name in peers}
    large = described(mlp(3, 2, width=300), "mlp", num_inputs=3, num_outputs=2, width=300)
    assert {name for name in names(replace(problem, network=large)) if "laplace-torch" in name} == {
        "laplace-torch-last-layer",
        "laplace-torch-last-layer-validation",
    }


def counted_method(name: str, calls: list[int], definition: str = "") -> Method:
    def predict(problem: Problem) -> Predicted:
        calls.append(problem.split)
        return plain(problem)

    return Method(name, name, definition, False, timed(predict))


def load_toy(splits: Sequence[int], stop_at: int | None = None) -> dict[int, list[Problem]]:
    if stop_at in splits:
        splits = [split for split in splits if split < stop_at]
    return {split: [toy_problem("regression", split)] for split in splits}


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path, calls = tmp_path / "calibration.csv", list[int]()
    method = counted_method("counted", calls)

    def run(*splits: int, method: Method = method, again: bool = False) -> int:
        return run_set(
            "toy", "development", load_toy, splits, [method], CalibrationTable(path), again, report=lambda _: None
        )

    assert run(0, 1) == 2
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])  # killed while it wrote the last line
    assert run(0, 1, 2) == 2 and calls == [0, 1, 1, 2]
    assert run(0, 1, 2) == 0
    assert run(0, method=counted_method("counted", calls, "another definition")) == 1
    assert run(0, again=True) == 1
    lines = CalibrationTable(path).lines()
    assert len(lines) == 4
    first = lines[Key("toy", 0, "counted", method.fingerprint)]
    assert first.scores.keys() == {"nll", "rmse", "coverage", "coverage_error", "crps", "auroc"}


def test_a_failing_method_does_not_stop_the_others(tmp_path: Path) -> None:
    def fail(problem: Problem) -> tuple[Predicted, float]:
        raise ValueError("no")

    said: list[str] = []
    methods = [Method("bad", "bad", "", False, fail), counted_method("good", [])]
    table = CalibrationTable(tmp_path / "calibration.csv")
    assert run_set("toy", "development", load_toy, [0], methods, table, report=said.append) == 1
    assert "failed, ValueError: no" in said[0]


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="does not start with the columns"):
        CalibrationTable(tmp_path / "other.csv")


# Scores ---------------------------------------------------------------------------------------------------------------


def test_crps_is_the_integral_of_squared_differences() -> None:
    from scipy.stats import norm

    grid = np.linspace(-30, 30, 200_001)
    for mean, std, target in ((0.0, 1.0, 0.3), (2.0, 0.5, -1.0), (-1.0, 3.0, -1.0)):
        squares = (norm.cdf(grid, mean, std) - (grid >= target)) ** 2
        expected = squares.sum() * (grid[1] - grid[0])
        found = crps(*(torch.tensor([number], dtype=torch.float64) for number in (mean, std, target)))
        assert found.item() == pytest.approx(expected, abs=1e-3)


def test_regression_scores() -> None:
    mean = torch.zeros(20, 1, dtype=torch.float64)
    targets = torch.full((20, 1), 0.1, dtype=torch.float64)
    targets[:2] = 5.0
    covariance = torch.ones(20, 1, 1, dtype=torch.float64)
    covariance[0] = 2.0  # one of the two large errors has the largest variance, the other has the same as the rest
    scores = scores_of(Normal(mean, covariance), targets)
    assert scores["coverage"] == 0.9 and scores["coverage_error"] == pytest.approx(0.0)
    assert scores["rmse"] == pytest.approx(math.sqrt((18 * 0.01 + 50) / 20))
    assert scores["auroc"] == pytest.approx(0.75)
    assert scores["nll"] == pytest.approx(
        0.5 * math.log(2 * math.pi) + (18 * 0.005 + 12.5 + 6.25 + 0.5 * math.log(2)) / 20
    )


def test_classification_scores() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [1.0, 0.0]], dtype=torch.float64)
    scores = scores_of(Probabilities(probabilities), torch.tensor([0, 0, 0, 1]))
    assert scores["accuracy"] == 0.5
    assert scores["ece"] == pytest.approx((0.1 + 0.2 + 0.6 + 1.0) / 4)
    assert scores["auroc"] == pytest.approx(0.5)  # of the two errors, one is surest and one is least sure
    assert math.isfinite(scores["nll"])
    right = scores_of(Probabilities(probabilities), torch.tensor([0, 0, 1, 0]))
    assert math.isnan(right["auroc"])


def test_ece_of_a_perfect_predictor_lies_in_the_interval_of_one() -> None:
    generator = np.random.default_rng(1)
    confidence = generator.uniform(0.5, 1, 1000)
    low, high = ece_interval(confidence, generator.random(1000) < confidence)
    perfect = ece_of_perfect(confidence)
    assert 0 < perfect < 0.06 and low < high
    off_low, _ = ece_interval(confidence, generator.random(1000) < confidence - 0.3)
    assert off_low > 0.2 > high


def test_halves_are_pooled() -> None:
    one, other = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
    found = pooled([Probabilities(one, "λ=1"), Probabilities(other, "λ=2")])
    assert isinstance(found, Probabilities)
    assert found.values.tolist() == [[0.25, 0.75], [0.5, 0.5]] and found.note == "λ=1; λ=2"


# Statistics and report ------------------------------------------------------------------------------------------------

MADE_UP = {
    ("a", "x"): {0: 1.0, 1: 3.0},
    ("a", "y"): {0: 2.0, 1: 5.0},
    ("a", "z"): {0: 0.0, 1: 4.0},
    ("b", "x"): {0: 1.0, 1: 1.0},
    ("b", "y"): {0: 3.0, 1: 3.5},
    ("b", "z"): {0: 2.0, 1: 2.0},
    ("c", "x"): {0: 1.0},
}


def test_means_and_standard_errors() -> None:
    assert statistics.mean_over_splits(MADE_UP["a", "x"]) == statistics.Mean(2.0, pytest.approx(1.0))
    assert math.isnan(statistics.mean_over_splits(MADE_UP["c", "x"]).error)
    assert statistics.common_sets(MADE_UP, ["x", "y"]) == ["a", "b"]
    assert statistics.common_sets({**MADE_UP, ("b", "y"): {0: 3.0}}, ["x", "y"]) == ["a"]  # not on the same splits
    found = statistics.mean_over_sets(MADE_UP, "y", ["a", "b"])
    assert found.value == pytest.approx((3.5 + 3.25) / 2)
    assert found.error == pytest.approx(math.sqrt(1.5**2 + 0.25**2) / 2)
    assert statistics.mean_over_sets(MADE_UP, "x", ["a", "b", "c"]).error == pytest.approx(1 / 3)


def test_ranks_share_ties_and_have_a_spread() -> None:
    ranks = statistics.mean_ranks(MADE_UP, ["x", "y", "z"], ["a", "b"])
    assert {method: rank.value for method, rank in ranks.items()} == {"x": 1.25, "y": 3.0, "z": 1.75}
    assert (ranks["y"].low, ranks["y"].high) == (3.0, 3.0)
    assert (ranks["x"].low, ranks["x"].high) == (1.0, 1.5)


def test_worse_means_by_more_than_two_errors_of_the_paired_differences() -> None:
    assert statistics.difference(MADE_UP, "a", "y", "x") == statistics.Mean(1.5, pytest.approx(0.5))
    assert set(statistics.worse_sets(MADE_UP, ["a", "b"], "y", "x")) == {"a", "b"}
    assert set(statistics.worse_sets(MADE_UP, ["a", "b"], "z", "x")) == {"b"}


def test_the_report_shows_what_was_run(tmp_path: Path) -> None:
    table = CalibrationTable(tmp_path / "calibration.csv")
    write = partial(Line, version="0", num_test=10, seconds=1.0)
    for name, kind, task in (("yacht", "development", "regression"), ("digits", "report", "classification")):
        for number, method in enumerate(METHODS):
            for split in range(2):
                if task in method.tasks:
                    value = number / 10 + split / 100
                    names = ("nll", "ece", "brier", "accuracy") if task == "classification" else ("nll", "rmse", "crps")
                    scores = dict.fromkeys((*names, "coverage", "coverage_error", "auroc"), value)
                    table.append(write(name, kind, task, split, method.name, method.fingerprint, scores=scores))
    table.append(write("wine", "development", "classification", 0, "plain", "old", scores={"nll": 77.0}))
    write_report(table, tmp_path)
    written = (tmp_path / "CALIBRATION.md").read_text()
    assert (tmp_path / "figures" / "calibration.svg").stat().st_size > 1000
    assert written.index("## Report sets") < written.index("## Development sets")
    assert "| temperature scaling * | 0.305 ± 0.005 |" in written
    assert (
        "trained on the validation data, by more than two standard errors of the differences over the splits: yacht (by"
        in written
    )
    assert (
        "without a posterior, by more than two standard errors of the differences over the splits: none" not in written
    )
    assert "77" not in written  # a line of another definition of the method


def test_strong_networks_stand_beside_published_scores(tmp_path: Path) -> None:
    table = CalibrationTable(tmp_path / "calibration.csv")
    method = next(method for method in METHODS if method.name == "temperature")
    write = partial(Line, task="classification", split=0, method=method.name, version="0", num_test=10, seconds=1.0)
    for name, kind, nll in (("cifar10", "report", 0.25), ("cifar10-resnet56", "strong", 0.125)):
        scores = dict.fromkeys(("nll", "ece", "ece_low", "ece_high", "ece_perfect", "brier", "accuracy", "auroc"), nll)
        table.append(write(dataset=name, kind=kind, fingerprint=method.fingerprint, scores=scores))
    write_report(table, tmp_path)
    written = (tmp_path / "CALIBRATION.md").read_text()
    own = "| temperature scaling * | 0.2500 / 0.2500 / 0.2500 | – | – | 0.1250 / 0.1250 / 0.1250 |"
    assert own in written and "| VaLLA with Monte Carlo, published | 0.2279 | 0.2112 | 0.1975 | 0.1834 |" in written
    strong = written.index("## Strong networks")
    assert written.index("### cifar10\n") < strong < written.index(own) < written.index("### cifar10-resnet56")


# Pictures and text ----------------------------------------------------------------------------------------------------


def test_the_plain_resnet20_has_its_published_scores() -> None:
    line = CalibrationTable(RESULTS).lines()[Key("cifar10", 0, "plain", METHODS[0].fingerprint)]
    published = {metric: value for (_, method, metric), value in published_scores().items() if method == "plain"}
    assert set(published) == {"nll", "ece", "brier", "accuracy"}
    assert published == {metric: f"{line.scores[metric]:.4f}" for metric in published}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_resnets_have_the_published_sizes(name: str) -> None:
    trained = NETWORKS[name]
    blocks = (trained.depth - 2) // 6
    network = CifarResNet(blocks)
    assert sum(parameter.numel() for parameter in network.parameters()) == trained.num_parameters
    weighted = [module for module in network.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(weighted) == trained.depth + 2  # and the two shortcuts
    assert network.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert {"layer2.0.downsample.0.weight", f"layer3.{blocks - 1}.bn2.bias", "fc.weight"} <= set(network.state_dict())


def test_each_half_of_the_test_set_is_scored_once() -> None:
    examples = Examples(torch.arange(10.0)[:, None], torch.arange(10))
    first, second = two_halves("cifar10", examples, examples, CifarResNet())
    assert torch.equal(first.test.targets, second.validation.targets)
    assert sorted([*first.test.targets.tolist(), *second.test.targets.tolist()]) == list(range(10))


def test_texts_become_tokens() -> None:
    texts, classes = text_files.parsed("1\t2.5\tGood, GOOD fun!\n2\t0.0\tas it was\n3\t-0.1\tNo fun; can't\n")
    assert texts == ["Good, GOOD fun!", "No fun; can't"] and classes == [1, 0]
    words = [text_files.words_of(each) for each in texts]
    assert words == [["good", ",", "good", "fun", "!"], ["no", "fun", ";", "can't"]]
    numbers = text.vocabulary(words)
    assert numbers == {"fun": 4, "good": 5}
    tokens = text.token_numbers(words, numbers)
    assert tokens.shape == (2, text.LENGTH)
    assert tokens[0, :7].tolist() == [text.START, 5, text.UNKNOWN, 5, 4, text.UNKNOWN, text.PADDING]


def test_adapters_and_head_learn_and_the_base_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BASE", text.NetworkRecipe(epochs=1))
    monkeypatch.setattr(text, "ADAPTERS", text.NetworkRecipe(epochs=1))
    monkeypatch.setattr(text, "ENSEMBLE_SIZE", 2)
    texts = ["good fun and more fun", "bad and dull and bad"] * 20
    problem = text.text_problem("toy", texts, [1, 0] * 20, 0, tmp_path, num_train=10)
    assert [len(part) for part in (problem.fit, problem.validation, problem.test)] == [9, 1, 20]
    learned = {name for name, parameter in problem.network.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or name.startswith("head.") for name in learned) and len(learned) == 10
    others = dict(problem.members[0].named_parameters())
    same = {name for name, parameter in problem.network.named_parameters() if torch.equal(parameter, others[name])}
    assert same.isdisjoint({"head.weight"}) and same == set(others) - learned
