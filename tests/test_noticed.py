"""Mistakes that would go unnoticed: each is told, by a warning or an error."""

import warnings

import numpy as np
import pytest
import torch
from networks import make
from sensitive import batches, data, fitted
from test_laplace import labels, loader
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sublaplace import SubspaceLaplace


def paper(model, likelihood="classification", **options):
    return SubspaceLaplace.paper(model, likelihood, dim=4, **options)


def problem():
    model, inputs = make("mlp", 12, torch.float32)
    return model, inputs, labels(model, inputs)


def test_probabilities_in_place_of_logits_are_noticed():
    model, inputs, targets = problem()
    with pytest.warns(UserWarning, match=r"look like probabilities.*[Ll]ogits are expected"):
        paper(nn.Sequential(model, nn.Softmax(1))).fit(loader(inputs, targets))
    with warnings.catch_warnings(action="error"):
        paper(model).fit(loader(inputs, targets))
        paper(nn.Sequential(model, nn.LogSoftmax(1))).fit(loader(inputs, targets))  # whose softmax is the same


@pytest.mark.parametrize("module", [nn.Dropout(0.1), nn.BatchNorm1d(3)], ids=["dropout", "batch-norm"])
def test_training_mode_is_noticed_where_it_changes_outputs(module):
    model, inputs, targets = problem()
    whole = nn.Sequential(module, model).train()
    with pytest.warns(UserWarning, match=r"training mode.*posterior is that of its evaluation mode.*model\.eval\(\)"):
        paper(whole).fit(loader(inputs, targets))
    assert all(module.training for module in whole.modules())
    with warnings.catch_warnings(action="error"):
        paper(whole.eval()).fit(loader(inputs, targets))
        paper(model.train()).fit(loader(inputs, targets))  # gives the same outputs in both modes
        paper(nn.Sequential(nn.Dropout(0.0), model).train()).fit(loader(inputs, targets))


class Augmented(Dataset):
    def __init__(self, inputs, targets, noise):
        self.inputs, self.targets, self.noise = inputs, targets, noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + self.noise * torch.randn(3), self.targets[index]


@pytest.mark.parametrize("shuffle", [False, True])
def test_random_augmentation_is_noticed(shuffle):
    model, inputs, targets = problem()
    with pytest.warns(UserWarning, match=r"differ from one reading to the next.*Switch the augmentation off"):
        paper(model).fit(DataLoader(Augmented(inputs, targets, 0.1), batch_size=4, shuffle=shuffle))
    with warnings.catch_warnings(action="error"):
        paper(model).fit(DataLoader(Augmented(inputs, targets, 0.0), batch_size=4, shuffle=shuffle))


class Keyed(Dataset):
    """Items by name, which a sampler of the user's own knows."""

    def __init__(self, inputs, targets):
        self.items = {f"item {k}": pair for k, pair in enumerate(zip(inputs, targets, strict=True))}

    def __len__(self):
        return len(self.items)

    def __getitem__(self, key):
        return self.items[key]


@pytest.mark.parametrize("sampler", ["sampler", "batch_sampler"])
def test_data_sets_with_keys_of_their_own_are_not_read_by_number(sampler):
    model, inputs, targets = problem()
    keyed = Keyed(inputs, targets)
    order = {"sampler": list(keyed.items), "batch_sampler": [list(keyed.items)]}[sampler]
    paper(model).fit(DataLoader(keyed, **{sampler: order}))


def test_arrays_are_batches_as_well():
    model, inputs, targets = problem()
    expected = paper(model).fit(loader(inputs, targets)).functional_variance(inputs)
    arrays = [(x.numpy(), y.numpy()) for x, y in loader(inputs, targets)]
    assert torch.equal(paper(model).fit(arrays).functional_variance(inputs), expected)


def test_targets_of_another_type_are_named():
    model, inputs, targets = problem()
    with pytest.raises(ValueError, match=r"targets of a batch must be a tensor or an array, not list.*as_tensor"):
        paper(model).fit([(inputs, targets.tolist())])
    assert np.asarray(targets.tolist()).shape == (12,)


class Shrinking:
    """Gives fewer batches every time it is read."""

    def __init__(self, parts, step):
        self.parts, self.step = parts, step

    def __iter__(self):
        parts, self.parts = self.parts, self.parts[: len(self.parts) - self.step]
        yield from parts


def test_a_loader_whose_size_changes_is_told_so():
    model, inputs, targets = problem()
    with pytest.raises(
        ValueError, match=r"same every time. It gave 12 inputs at first and 9 when read again"
    ) as caught:
        paper(model).fit(Shrinking(loader(inputs, targets), 1))
    assert "one-shot" not in str(caught.value)
    with pytest.raises(ValueError, match="one-shot iterator"):
        paper(model).fit(Shrinking(loader(inputs, targets), 4))


def test_a_prior_precision_beyond_single_precision_is_refused():
    model, inputs, targets = problem()
    with pytest.raises(ValueError, match=r"1e-31 is too small.*at least 1e-30.*float64"):
        paper(model, prior_precision=1e-31)
    la = paper(model).fit(loader(inputs, targets))
    with pytest.raises(ValueError, match="too small"):
        la.with_prior(1e-40)
    double = fitted().with_prior(1e-31)
    assert torch.isfinite(double.functional_variance(data()[0])).all()


def test_options_of_a_prediction_without_effect_are_refused():
    la, x = fitted(), data()[0]
    with pytest.raises(ValueError, match="samples=10 has no effect with link='probit'"):
        la.predict(x, samples=10)
    assert la.predict(x, link="mc", samples=10).samples == 10
    model, inputs = make("mlp", 8)
    regression = paper(model, "regression").fit([(inputs, inputs[:, :2].sin())])
    with pytest.raises(ValueError, match="link='mc' has no effect"):
        regression.predict(inputs, link="mc")
    with pytest.raises(ValueError, match="link='probit' has no effect"):
        regression(inputs, link="probit")


def test_small_data_sets_and_plain_fits_stay_silent():
    with warnings.catch_warnings(action="error"):
        la = paper(nn.Linear(3, 3).double()).fit(batches())
        la(data()[0])
        inputs, targets = data()
        paper(nn.Linear(3, 3).double()).fit(DataLoader(TensorDataset(inputs, targets), batch_size=3, shuffle=True))
