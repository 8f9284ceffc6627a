"""Fits on several processes: the same posterior as on one, and no waiting for a rank that is gone."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from networks import make
from test_laplace import labels
from torch import distributed as group
from torch import multiprocessing
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from sublaplace import Complement, Drawn, Gaussian, SubspaceLaplace
from sublaplace.runtime.distributed import Ranks, Share

COUNT = 23  # inputs, in batches of 2: ranks do not get equally many


def problem(name="paper-cnn", dtype=torch.float64):
    model, inputs = make(name, COUNT, dtype)
    return model, inputs, labels(model, inputs)


def data_of(inputs, targets):
    return DataLoader(TensorDataset(inputs, targets), batch_size=2)


KFAC = Complement("kfac", weight=1.0)
SETTINGS = {
    "lowrank-kfac": {"dim": 6, "subspace_inputs": Drawn(7)},
    "lowrank-diagonal": {"dim": 6, "subspace_inputs": Drawn(7)},
    "lowrank-ggn": {"dim": 6, "subspace_inputs": Drawn(7)},
    "full": {},
    "subset-diagonal": {"dim": 6},
    "subset-swag": {"dim": 6},
    "last-layer": {},
    "kfac outside": {"projector": "lowrank-kfac", "dim": 6, "subspace_inputs": Drawn(7), "complement": KFAC},
    "tuned prior": {"projector": "lowrank-kfac", "dim": 6, "subspace_inputs": Drawn(7), "prior_precision": "evidence"},
}


def results(settings):
    """What a fit with these settings gives, in this process or this group."""
    model, inputs, targets = problem()
    la = SubspaceLaplace(model, "classification", **{"complement": None, "prior_precision": 1.0} | settings)
    la.fit(data_of(inputs, targets))
    found = {
        "covariance": la.functional_covariance(inputs[:5]),
        "evidence": la.log_marginal_likelihood().detach(),
        "prior": torch.tensor(la.prior_precision),
    }
    if "projector" in settings and settings["projector"].startswith("lowrank") and "complement" not in settings:
        found["captured"] = la.captured_share(inputs[:5])
        found["projector"] = la.projection_matrix() @ la.projection_matrix().T
        found["updated"] = la.updated(data_of(inputs[:9] + 0.1, targets[:9])).functional_covariance(inputs[:5])
    return found


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def in_group(rank, size, port, folder, work, *arguments):
    """Runs `work` as one rank and leaves its result, or its error, in a file."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group.init_process_group("gloo", rank=rank, world_size=size)
    group.barrier()  # or one that is done at once would be gone before a late one has found it
    try:
        result = work(*arguments)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    torch.save(result, Path(folder) / f"{rank}.pt")


def on_ranks(size, folder, work, *arguments):
    """The results of all ranks; None of one that was killed."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    processes = [
        context.Process(target=in_group, args=(rank, size, port, folder, work, *arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    paths = [Path(folder) / f"{rank}.pt" for rank in range(size)]
    return [torch.load(path, weights_only=True) if path.exists() else None for path in paths]


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in SETTINGS), ("lowrank-kfac", 4), ("full", 4)])
def test_every_rank_gets_the_posterior_of_a_single_process(name, size, tmp_path):
    settings = {"projector": name} | SETTINGS[name]
    expected = results(settings)
    tolerance = 1e-6 if name == "tuned prior" else 1e-8  # a maximum is found to the root of rounding
    for found in on_ranks(size, tmp_path, results, settings):
        assert not isinstance(found, str), found
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.allclose(found[key], value, rtol=tolerance, atol=tolerance / 100), key


def regression_with_estimated_noise():
    model, inputs = make("mlp", COUNT)
    targets = torch.sin(inputs[:, :2]).double()
    la = SubspaceLaplace.paper(model, Gaussian("per-output"), dim=4).fit(data_of(inputs, targets))
    return torch.tensor(la.noise_std), la.functional_covariance(inputs)


def test_noise_is_estimated_from_the_residuals_of_all_ranks(tmp_path):
    expected = regression_with_estimated_noise()
    for found in on_ranks(2, tmp_path, regression_with_estimated_noise):
        assert not isinstance(found, str), found
        assert torch.allclose(found[0], expected[0])
        assert torch.allclose(found[1], expected[1])


class Watched(Dataset):
    """A data set that remembers which of its items were read."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets, self.read = inputs, targets, set()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.read.add(index)
        return self.inputs[index], self.targets[index]


def items_read():
    model, inputs, targets = problem("mlp")
    watched = Watched(inputs, targets)
    SubspaceLaplace.paper(model, "classification", dim=4).fit(DataLoader(watched, batch_size=3))
    return watched.read


def test_each_rank_reads_its_share_alone(tmp_path):
    first, second = on_ranks(2, tmp_path, items_read)
    assert first | second == set(range(COUNT))
    assert not first & second


class Mappings(Watched):
    """Items that are mappings, with the labels under a key of their own."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return {"x": inputs, "kind": target}


def fit_of_mappings():
    model, inputs, targets = problem("mlp")
    watched = Mappings(inputs, targets)
    la = SubspaceLaplace.paper(
        model, "classification", dim=4, labels_key="kind", forward=lambda network, batch: network(batch["x"])
    )
    return la.fit(DataLoader(watched, batch_size=3)).functional_covariance({"x": inputs}), watched.read


def test_mappings_with_labels_under_another_key_are_shared_out_as_well(tmp_path):
    expected, everything = fit_of_mappings()
    (first, read), (second, others) = on_ranks(2, tmp_path, fit_of_mappings)
    assert torch.allclose(first, expected)
    assert torch.allclose(second, expected)
    assert read | others == everything
    assert not read & others


def fit_of_a_list():
    model, inputs, targets = problem("mlp")
    batches = list(zip(inputs.split(4), targets.split(4), strict=True))
    return SubspaceLaplace.paper(model, "classification", dim=4).fit(batches).functional_covariance(inputs)


def test_a_list_of_batches_is_shared_out_as_well(tmp_path):
    expected = fit_of_a_list()
    for found in on_ranks(3, tmp_path, fit_of_a_list):
        assert torch.allclose(found, expected)


def own_share(inputs, targets):
    """The data of this rank alone, which is unlike that of the others in size."""
    ranks = Ranks.current()
    bounds = [COUNT * rank * (rank + 1) // (ranks.size * (ranks.size + 1)) for rank in range(ranks.size + 1)]
    own = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
    return data_of(inputs[own], targets[own])


def fit_of_own_shares(settings):
    model, inputs, targets = problem()
    la = SubspaceLaplace(model, "classification", **{"complement": None, "prior_precision": 1.0} | settings)
    alone = Ranks.current().size == 1
    la.fit(data_of(inputs, targets) if alone else own_share(inputs, targets), sharded=not alone)
    return {"covariance": la.functional_covariance(inputs[:5]), "evidence": la.log_marginal_likelihood().detach()}


OWN_SHARES = [(name, 2) for name in SETTINGS if name != "subset-swag"] + [("lowrank-kfac", 3)]
SWAG_FAULT = "with sharded=True, subset-swag trains on the first rank's share alone"


@pytest.mark.parametrize(
    ("name", "size"),
    [*OWN_SHARES, pytest.param("subset-swag", 2, marks=pytest.mark.xfail(reason=SWAG_FAULT, strict=True))],
)
def test_loaders_that_hold_a_share_each_give_the_posterior_of_a_single_process(name, size, tmp_path):
    settings = {"projector": name} | SETTINGS[name]
    expected = fit_of_own_shares(settings)
    tolerance = 1e-6 if name == "tuned prior" else 1e-8
    for found in on_ranks(size, tmp_path, fit_of_own_shares, settings):
        assert not isinstance(found, str), found
        for key, value in expected.items():
            assert torch.allclose(found[key], value, rtol=tolerance, atol=tolerance / 100), key


def test_a_share_in_a_single_process_is_refused():
    model, inputs, targets = problem("mlp")
    with pytest.raises(ValueError, match="sharded=True has no effect in a single process"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(data_of(inputs, targets), sharded=True)


# What goes wrong ------------------------------------------------------------------------------------------------------


class Deadly(Dataset):
    """A data set that kills the process of one rank when it reads some item for the second time."""

    def __init__(self, inputs, targets, fatal):
        self.inputs, self.targets, self.fatal, self.seen = inputs, targets, fatal, 0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if index == self.fatal:
            self.seen += 1
            if self.seen == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.inputs[index], self.targets[index]


def fit_until_killed():
    model, inputs, targets = problem("mlp")
    start = time.monotonic()
    try:
        SubspaceLaplace.paper(model, "classification", dim=4).fit(DataLoader(Deadly(inputs, targets, 2), batch_size=2))
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_is_killed_ends_the_others_with_a_message(size, tmp_path):
    outcomes = on_ranks(size, tmp_path, fit_until_killed)
    assert outcomes[1] is None  # item 2 is in the second batch, that of rank 1
    for rank, outcome in enumerate(outcomes):
        if rank != 1:
            assert f"Rank {rank} of {size} cannot go on" in outcome[0]


def fit_with(loader_of):
    model, inputs, targets = problem("mlp")
    SubspaceLaplace.paper(model, "classification", dim=4).fit(loader_of(TensorDataset(inputs, targets)))


def shuffling(data):
    return DataLoader(data, batch_size=2, shuffle=True)


def sampling(data):
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data))


def one_batch(data):
    return DataLoader(data, batch_size=100)


@pytest.mark.parametrize(
    ("loader_of", "words"),
    [(shuffling, "shuffle=False"), (sampling, "DistributedSampler"), (one_batch, "fewer batches")],
)
def test_loaders_that_cannot_be_shared_out_are_refused(loader_of, words, tmp_path):
    for outcome in on_ranks(2, tmp_path, fit_with, loader_of):
        assert outcome.startswith("ValueError")
        assert words in outcome


def fit_with_checkpoint(folder):
    model, inputs, targets = problem("mlp")
    SubspaceLaplace.paper(model, "classification", dim=4).fit(data_of(inputs, targets), checkpoint=folder)


def test_a_checkpoint_in_a_group_is_refused(tmp_path):
    for outcome in on_ranks(2, tmp_path, fit_with_checkpoint, tmp_path / "checkpoint"):
        assert "single process" in outcome


def bounds_after_the_group(sharded):
    model, inputs, targets = problem("mlp")
    data = own_share(inputs, targets) if sharded else data_of(inputs, targets)
    la = SubspaceLaplace.paper(model, "classification", dim=4).fit(data, sharded=sharded)
    group.destroy_process_group()
    la(inputs)  # predictions need nobody else
    la.bounds(inputs)


ENDED_FAULT = "after sharded=True, reading data of an ended group gives torch's error, not ours"


@pytest.mark.parametrize(
    "sharded", [False, pytest.param(True, marks=pytest.mark.xfail(reason=ENDED_FAULT, strict=True))]
)
def test_the_data_of_a_group_that_has_ended_are_not_read_in_part(sharded, tmp_path):
    for outcome in on_ranks(2, tmp_path, bounds_after_the_group, sharded):
        assert "process group that has ended" in str(outcome)


def test_without_a_group_there_is_one_rank():
    assert Ranks.current() == Ranks(0, 1)
    batches = [(torch.zeros(2, 1), torch.zeros(2)), (torch.zeros(3, 1), torch.zeros(3))]
    with pytest.raises(RuntimeError, match="has ended"):
        list(Share(batches, Ranks(0, 2)))
