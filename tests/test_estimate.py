"""What a fit will cost: counts and structure. No test depends on timings."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from sublaplace import Estimate, SubspaceLaplace
from sublaplace.data.loaders import num_data
from sublaplace.fitting.fitted import Stage
from sublaplace.fitting.scaling import Rates, Sizes, scaled_stage
from sublaplace.runtime.stopwatch import Stopwatch


def network(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def classes(count, seed=0, batch_size=20):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(3, (count,), generator=generator)), batch_size)


def values(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :1] + torch.randn(count, 1, generator=generator)), 20)


SIZES = Sizes(100, 50, 60, (40, 80), 30, 150, 1000)
RATES = Rates(1e-12, 1e-11)


def posterior(kind):
    if kind == "paper":
        return SubspaceLaplace.paper(network(), "classification", 5)
    if kind == "default":
        return SubspaceLaplace(network(), "classification", 5)
    return SubspaceLaplace(network(), "classification", projector=kind)


@pytest.mark.parametrize("kind", ["default", "paper", "last-layer", "full"])
def test_an_estimate_names_the_stages_of_the_fit(kind):
    la = posterior(kind)
    estimate = la.estimate(classes(60))
    assert estimate.num_data == 60
    la.fit(classes(60))
    assert set(estimate.stages) == set(la.stages)
    assert all(stage.seconds >= 0 and stage.peak_bytes > 0 for stage in estimate.stages.values())
    assert estimate.seconds == sum(stage.seconds for stage in estimate.stages.values())
    assert estimate.prediction.seconds > 0


def test_regression_with_validation_data_has_a_row_for_each():
    la = SubspaceLaplace(network(1), "regression", 5)
    estimate = la.estimate(values(80), values(40, seed=1))
    assert {"complement's weight", "validation"} <= set(estimate.stages)
    text = str(estimate)
    for name in [*estimate.stages, "prediction per input", "80 inputs"]:
        assert name in text


def test_batches_that_are_mappings():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, features):
            return self.inner(features)

    batches = [{"features": x, "targets": y} for x, y in classes(60)]
    la = SubspaceLaplace(Named(), "classification", 5, labels_key="targets")
    assert la.estimate(batches).num_data == 60


def test_given_subspace_inputs_and_weights():
    data = [(x, y, torch.ones(len(x))) for x, y in classes(60)]
    la = SubspaceLaplace(network(), "classification", 5, subspace_inputs=torch.randn(30, 4))
    assert "projector" in la.estimate(data).stages


def test_neither_the_model_nor_the_posterior_changes():
    model = network().train()
    before = copy.deepcopy(model.state_dict())
    la = SubspaceLaplace(model, "classification", 5)
    data = list(classes(60))  # a DataLoader draws a seed whenever it is read
    state = torch.get_rng_state()
    la.estimate(data)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match="not fitted"):
        la(torch.randn(2, 4))


def test_a_fitted_posterior_stays_fitted():
    la = SubspaceLaplace(network(), "classification", 5)
    la.fit(classes(60))
    x = torch.randn(5, 4)
    before = la(x)
    la.estimate(classes(40, seed=1))
    assert torch.equal(before, la(x))


def test_an_estimate_is_frozen():
    estimate = SubspaceLaplace(network(), "classification", 5).estimate(classes(40))
    assert isinstance(estimate, Estimate)
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimate.num_data = 3


def test_only_the_first_batches_are_read():
    class Counting(torch.utils.data.Dataset):
        read = 0

        def __len__(self):
            return 1_000_000

        def __getitem__(self, index):
            Counting.read += 1
            generator = torch.Generator().manual_seed(index)
            return torch.randn(4, generator=generator), index % 3

    la = SubspaceLaplace(network(), "classification", 5)
    estimate = la.estimate(DataLoader(Counting(), 20))
    assert estimate.num_data == 1_000_000
    assert Counting.read <= 3 * estimate.num_rehearsed + 100
    assert estimate.num_rehearsed < 1_000_000


# How stages grow ------------------------------------------------------------------------------------------------------


def test_passes_grow_with_the_data_and_factorisations_stay():
    stage = Stage(10.0, None, in_passes=6.0, in_factorisations=3.0)
    for name in ("prior precision", "reduced posterior"):
        doubled = scaled_stage(name, stage, SIZES, dataclasses.replace(SIZES, num_data=200), RATES)
        assert doubled == pytest.approx(2 * 6.0 + 3.0 + 1.0)


def test_the_same_sizes_give_the_same_seconds():
    stage = Stage(10.0, None, in_passes=6.0, in_factorisations=3.0)
    for name in ("prior precision", "projector", "reduced posterior", "complement's weight", "leave-one-out"):
        assert scaled_stage(name, stage, SIZES, SIZES, RATES) == pytest.approx(10.0), name


def test_tuning_and_leave_one_out_grow_with_their_own_inputs():
    stage = Stage(1.0, None)
    more = dataclasses.replace(SIZES, validated=90, left_out=120)
    assert scaled_stage("validation", stage, SIZES, more, RATES) == pytest.approx(3.0)
    assert scaled_stage("leave-one-out", stage, SIZES, more, RATES) == pytest.approx(2.0)
    algebra = Stage(1.0, None, in_factorisations=0.7)  # which is the same for any number of validation inputs
    assert scaled_stage("validation", algebra, SIZES, more, RATES) == pytest.approx(0.7 + 3 * 0.3)


def test_the_gram_matrix_of_subspace_inputs_grows_with_their_square():
    rates = Rates(1e-6, 0.0)
    gram = rates.gram(150, 1000)
    more = dataclasses.replace(SIZES, subspace_inputs=100, rows=300)
    seconds = scaled_stage("projector", Stage(2 * gram, None), SIZES, more, rates)
    assert seconds == pytest.approx(2 * gram + 4 * gram)


def test_work_inside_other_work_counts_once(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr("sublaplace.runtime.stopwatch.time.perf_counter", lambda: next(now))
    watch = Stopwatch()
    with watch.counting("outer"), watch.counting("inner"):
        pass
    assert watch.seconds == {"outer": 1.0 + 4.0, "inner": 2.0}


def test_a_fit_says_how_much_of_a_stage_were_passes():
    la = SubspaceLaplace(network(), "classification", 5)
    la.fit(classes(60))
    for name in ("prior precision", "reduced posterior"):
        stage = la.stages[name]
        assert 0 < stage.in_passes <= stage.seconds
    assert la.stages["prior precision"].in_factorisations > 0
    assert la.stages["leave-one-out"].in_passes == 0
    validation = la.tuned(classes(60, seed=1)).stages["validation"]
    assert 0 < validation.in_factorisations < validation.seconds


# The number of data ---------------------------------------------------------------------------------------------------


def test_data_are_counted_by_the_sampler_or_by_reading():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.randn(4), 1)] * 23)

    data = TensorDataset(torch.randn(23, 4), torch.zeros(23))
    assert num_data(DataLoader(data, 5)) == 23
    assert num_data(DataLoader(data, 5, drop_last=True)) == 20
    assert num_data(DataLoader(data, sampler=torch.utils.data.SubsetRandomSampler(range(7)))) == 7
    assert num_data(DataLoader(Stream(), 5)) == 23
    assert num_data([(torch.randn(3, 4), torch.zeros(3)), (torch.randn(2, 4), torch.zeros(2))]) == 5


# Bad input ------------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused():
    la = SubspaceLaplace(network(), "classification", 5)
    with pytest.raises(ValueError, match="empty"):
        la.estimate([])
    with pytest.raises(ValueError, match="one-shot"):
        la.estimate(iter(classes(20)))
    with pytest.raises(TypeError, match="DataLoader"):
        la.estimate(torch.randn(3, 4))
    with pytest.raises(ValueError, match="validation loader is empty"):
        la.estimate(classes(20), [])
    with pytest.raises(ValueError, match="training data"):
        data = classes(20)
        la.estimate(data, data)
    with pytest.raises(ValueError, match="has no effect"):
        SubspaceLaplace.paper(network(), "classification", 5).estimate(classes(20), classes(20, seed=1))
