"""Models with half precision parameters: computed on a float32 copy, and said so."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sublaplace import SubspaceLaplace

HALVES = [torch.float16, torch.bfloat16]


def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval().to(dtype)


def problem(dtype):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 4, generator=generator).to(dtype)
    return inputs, DataLoader(TensorDataset(inputs, torch.arange(20) % 3), batch_size=8)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_half_precision_model_gives_what_its_float32_copy_gives(dtype):
    inputs, loader = problem(dtype)
    model = network(dtype)
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match=f"{dtype} parameters.*float32 copy"):
        la = SubspaceLaplace.paper(model, "classification", dim=5).fit(loader)
    full_loader = [(x.float(), y) for x, y in loader]
    expected = SubspaceLaplace.paper(copy.deepcopy(model).float(), "classification", dim=5).fit(full_loader)
    assert torch.equal(la(inputs), expected(inputs.float()))
    assert la.predict(inputs).mean.dtype == la.projection_matrix().dtype == la.sample(2).dtype == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.dtype == dtype and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("projector", ["lowrank-kfac", "subset-magnitude"])
def test_a_half_precision_model_is_saved_and_loaded(projector, tmp_path):
    inputs, loader = problem(torch.float16)
    model = network(torch.float16)
    with pytest.warns(UserWarning, match="float32 copy"):
        la = SubspaceLaplace.paper(model, "classification", projector=projector, dim=5).fit(loader)
    la.save(tmp_path / "saved")
    with pytest.warns(UserWarning, match="float32 copy"):
        loaded = SubspaceLaplace.load(tmp_path / "saved", model)
    assert torch.equal(loaded(inputs), la(inputs))


def test_frozen_half_precision_layers_under_float32_ones_are_left_as_they_are(recwarn):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Linear(4, 6).half().requires_grad_(False)
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.body(x.half()).float().tanh())

    inputs, loader = problem(torch.float32)
    la = SubspaceLaplace.paper(Mixed(), "classification", dim=5).fit(loader)
    assert la.num_parameters == 6 * 3 + 3
    assert la(inputs).dtype == torch.float32
    assert not [w for w in recwarn if "float32 copy" in str(w.message)]


@pytest.mark.parametrize("size", [2, 9])
def test_groups_and_drawn_networks_come_from_the_float32_copy(size):
    inputs, loader = problem(torch.float16)
    with pytest.warns(UserWarning, match="float32 copy"):
        la = SubspaceLaplace.paper(network(torch.float16), "classification", dim=5).fit(loader)
    means, covariances = la.predict_groups(inputs[: 2 * size].view(2, size, 4))
    assert means.dtype == covariances.dtype == torch.float32
    assert torch.allclose(means.flatten(0, 1), la.predict(inputs[: 2 * size]).mean, atol=1e-6)
    assert la.network_samples(inputs, 2).dtype == torch.float32
