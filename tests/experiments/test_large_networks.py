"""Networks whose full posterior is out of reach: what is cut, what stands in the table, and what is certified."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments import networks, runs, training
from experiments.colour_images import CIFAR10_MEAN, CIFAR10_STD, pixels_of, scaled
from experiments.datasets import Dataset
from experiments.fits import Fits
from experiments.methods import Problem
from experiments.recipes import RECIPES, TrainingRecipe
from experiments.resnets import RESNET18_FILE, ResNet18, resnet18_of_imagenet
from experiments.results import Results, Row
from experiments.scored_sets import corruptions_of, scored_part, scored_sets
from experiments.scores import predictive_scores
from experiments.seed_run import CERTIFIED, SeedRun
from experiments.sweeps import SubspaceSweep, Sweep, WholeSweep
from experiments.training import trained_network
from sublaplace import SubspaceLaplace, metrics
from sublaplace.jacobians.blocks import OuterBlock

RECIPE = replace(
    RECIPES["cifar10"],
    network="small",
    training=TrainingRecipe(0.01, 3, 0.1, 0.7, batch_size=16, augmentation="cifar10"),
    num_inputs=5,
    largest_dim=30,
    small_dims=(16,),
    swag_snapshots=2,
    corrupted_dims=(8, 16),
    direction_tolerance=1e-8,
    num_curvature_inputs=24,
    num_scored=14,
    num_corrupted=3,
    certified_dims=(10, 30),
    dtype=torch.float64,
)
CORRUPTION = "brightness"


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 7 * 7, 10)
    )


def pictures() -> Dataset:
    """Plain colours, one a class, under noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (80,), generator=generator)
    colours = torch.rand(10, 3, generator=generator)
    pixels = 0.6 * colours[labels][:, None, None] + 0.4 * torch.rand(80, 32, 32, 3, generator=generator)
    images = scaled((255 * pixels).to(torch.uint8).numpy(), CIFAR10_MEAN, CIFAR10_STD)
    return Dataset("cifar10", "classification", images[:60], labels[:60], images[60:], labels[60:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(networks.NETWORKS, "small", small)
        runs.run(RECIPE, pictures(), [0], Results(folder / "results.csv"), folder, [CORRUPTION])
    return folder


@pytest.fixture
def problem(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Problem:
    monkeypatch.setitem(networks.NETWORKS, "small", small)
    dataset, _ = scored_part(RECIPE, pictures())
    return Problem(RECIPE, dataset, trained_network(RECIPE, dataset, 0, folder / "weights"), 0).to(torch.float64)


def rows_of(folder: Path, dataset: str = "cifar10") -> list[Row]:
    return [row for row in Results(folder / "results.csv").rows() if row.dataset == dataset]


def test_nothing_needs_the_exact_curvature(folder: Path) -> None:
    found = {(row.projector, row.complement) for row in rows_of(folder)}
    assert {name for name, complement in found if not complement} == {
        *("lowrank-kfac", "lowrank-diagonal", "lowrank-isotropic"),
        *("subset-magnitude", "subset-diagonal", "subset-swag", "last-layer"),
        *("kfac", "map", "temperature", "certified-lowrank-kfac"),
    }
    assert not {"kl_mean", "relative_error", "dead_percent"} & {row.metric for row in rows_of(folder)}
    assert {"log_trace", "nll", "ece", "brier", "accuracy"} <= {row.metric for row in rows_of(folder)}


def test_what_was_cut_is_noted(folder: Path) -> None:
    (note,) = {row.note for row in rows_of(folder) if row.projector == "subset-magnitude"}
    dropped = "float64; at most 1e-08 of the output Hessians' trace dropped"
    assert note == f"{dropped}; curvature of 24 of 60 training inputs; 14 of 20 test inputs"
    (note,) = {row.note for row in rows_of(folder, f"cifar10-c/{CORRUPTION}") if row.projector == "map"}
    assert note == f"{dropped}; curvature of 24 of 60 training inputs; 3 pictures a severity"
    (note,) = {row.note for row in rows_of(folder) if row.projector == "temperature"}
    assert note == "temperature fitted on 6 other test inputs"


def test_scores_are_those_of_the_facade_with_weighted_inputs(folder: Path, problem: Problem) -> None:
    la = SubspaceLaplace.paper(
        problem.network,
        "classification",
        projector="lowrank-kfac",
        dim=16,
        prior_precision=RECIPE.prior_precision,
        subspace_inputs=problem.context.subspace_jacobians.inputs,
    ).fit(problem.loader)
    assert sum(float(weights.sum()) for _, _, weights in problem.loader) == pytest.approx(60)
    clean, corrupted = sets = scored_sets(RECIPE, problem.dataset, [CORRUPTION])
    run = SeedRun(problem, sets, Results(folder / "other.csv"), folder)
    for test_set in (clean, corrupted):
        rows = [
            row for row in rows_of(folder, test_set.name) if (row.projector, row.complement) == ("lowrank-kfac", "")
        ]
        (found,) = {row.value for row in rows if (row.s, row.metric) == (16, "nll")}
        assert metrics.nll(la.predict(test_set.inputs.double()).probabilities, test_set.targets) == pytest.approx(
            found, rel=1e-6
        )
        (found,) = {row.value for row in rows if (row.s, row.metric) == (16, "log_trace")}
        drawn = la.functional_covariance(run.draw(test_set).double(), joint=True)
        assert metrics.log_trace(drawn) == pytest.approx(found, rel=1e-6)


def test_posteriors_that_share_a_pass_score_as_each_alone(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    (clean,) = scored_sets(RECIPE, problem.dataset, [])
    fits = Fits(problem)
    sweeps: dict[str, Sweep] = {
        name: SubspaceSweep(fits.posterior(name, 16)[0], [8, 16])
        for name in ("lowrank-isotropic", "lowrank-diagonal", "subset-magnitude")
    }
    sweeps["kfac"] = WholeSweep(fits.curvature("kfac")[0], [problem.linearization.layout.num_parameters])
    apart = {name: predictive_scores(problem, clean, {name: sweep})[name] for name, sweep in sweeps.items()}
    formed: list[OuterBlock] = []
    rows = OuterBlock.rows
    monkeypatch.setattr(OuterBlock, "rows", lambda block: formed.append(block) or rows(block))
    together = predictive_scores(problem, clean, sweeps)
    assert len(formed) == len({id(block) for block in formed}) > 0
    for name, scores in apart.items():
        for s, values in scores.items():
            assert together[name][s] == pytest.approx(values, rel=1e-10)


def test_corrupted_pictures_are_some_of_the_scored_ones_at_all_severities(folder: Path) -> None:
    dataset, _ = scored_part(RECIPE, pictures())
    clean, corrupted = scored_sets(RECIPE, dataset, [CORRUPTION])
    assert len(clean.inputs) == 14 and len(corrupted.inputs) == 5 * 3
    assert torch.equal(corrupted.targets, clean.targets[:3].repeat(5))
    brightness = corrupted.inputs.reshape(5, -1).mean(1)
    assert (brightness.diff() > 0).all() and brightness[0] > clean.inputs[:3].mean()
    dims = {row.s for row in rows_of(folder, corrupted.name) if row.projector == "subset-swag"}
    assert dims == {8, 16}


def test_temperature_has_not_seen_what_is_scored() -> None:
    dataset, others = scored_part(RECIPE, pictures())
    assert others is not None and len(others.inputs) == 6
    distances = torch.cdist(others.inputs.flatten(1), dataset.test_inputs.flatten(1))
    assert distances.min() > 1
    whole, nothing = scored_part(replace(RECIPE, num_scored=None), pictures())
    assert nothing is None and len(whole.test_inputs) == 20


def test_the_captured_share_lies_where_it_is_certified(folder: Path, problem: Problem) -> None:
    options = {"prior_precision": RECIPE.prior_precision}
    full = SubspaceLaplace.paper(problem.network, "classification", projector="full", **options).fit(problem.loader)
    X = problem.context.subspace_jacobians.inputs
    la = SubspaceLaplace.paper(
        problem.network, "classification", projector="lowrank-kfac", dim=30, subspace_inputs=X, **options
    )
    la.fit(problem.loader)
    run = SeedRun(problem, scored_sets(RECIPE, problem.dataset, ()), Results(folder / "other.csv"), folder)
    inputs = run.draw(run.test_sets[0]).double()
    whole = full.functional_covariance(inputs).diagonal(dim1=1, dim2=2).sum()
    shares = la.leading_traces(inputs) / whole
    found = {(row.s, row.metric): row.value for row in rows_of(folder) if row.projector == CERTIFIED}
    assert {s for s, _ in found} == {10, 30}
    for s in (10, 30):
        assert 0 < found[s, "captured_at_least"] <= float(shares[s - 1]) <= found[s, "captured_at_most"] <= 1


def test_pixels_come_back() -> None:
    images = pictures().test_inputs
    again = scaled(pixels_of(images, CIFAR10_MEAN, CIFAR10_STD), CIFAR10_MEAN, CIFAR10_STD)
    torch.testing.assert_close(again, images)


def test_only_sets_with_corruptions_have_them() -> None:
    assert len(corruptions_of(RECIPES["cifar10"])) == 7
    assert len(corruptions_of(RECIPES["mnist"])) == 15
    assert corruptions_of(RECIPES["imagenet10"]) == ()


# Training


def test_an_interrupted_training_with_changed_pictures_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(networks.NETWORKS, "small", small)
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    expected = trained_network(RECIPE, pictures(), 0, tmp_path / "through").state_dict()
    real_loss, calls = nn.functional.cross_entropy, []

    def interrupted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) == 10:  # in the third epoch of four batches each
            raise KeyboardInterrupt
        return real_loss(outputs, targets)

    monkeypatch.setattr(training.F, "cross_entropy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained_network(RECIPE, pictures(), 0, tmp_path / "stopped")
    found = trained_network(RECIPE, pictures(), 0, tmp_path / "stopped").state_dict()
    assert len(calls) == 10 + 4
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    plain = replace(RECIPE, training=replace(RECIPE.training, augmentation=""))
    other = trained_network(plain, pictures(), 0, tmp_path / "plain").state_dict()
    assert not torch.equal(other["0.weight"], expected["0.weight"])


# Networks that come trained


def test_a_network_of_no_epochs_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(networks.NETWORKS, "small", small)
    recipe = replace(RECIPE, training=RECIPES["imagenet10-efficientnet"].training)
    network = trained_network(recipe, pictures(), 3, tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        initial = small()
    torch.testing.assert_close(network.state_dict(), initial.state_dict())
    assert not any(tmp_path.iterdir())
    assert [p.requires_grad for p in network.parameters()] == [True, True, False, False, True, True]


def test_weights_of_torchvision_are_taken_but_for_the_last_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RESNET18_FILE, raising=False)
    with pytest.raises(FileNotFoundError, match=f"set {RESNET18_FILE} to torchvision's file"):
        resnet18_of_imagenet()
    theirs = ResNet18(num_outputs=1000)
    path = tmp_path / "resnet18.pth"
    torch.save(theirs.state_dict(), path)
    monkeypatch.setenv(RESNET18_FILE, str(path))
    ours = resnet18_of_imagenet()
    assert ours.fc.weight.shape == (10, 512)
    torch.testing.assert_close(ours.layer4[1].conv2.weight, theirs.layer4[1].conv2.weight)
    torch.save({"fc.weight": theirs.fc.weight, "stem.weight": theirs.conv1.weight}, path)
    with pytest.raises(ValueError, match="is not a ResNet18 of torchvision"):
        resnet18_of_imagenet()
