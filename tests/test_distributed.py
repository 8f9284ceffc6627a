"""Fits on several processes: the same posterior as on one, and no waiting for a rank that is gone."""

import functools
import os
import signal
import socket
import tempfile
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from networks import make
from test_laplace import labels
from torch import distributed as group
from torch import multiprocessing
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from sublaplace import Complement, Drawn, Gaussian, SubspaceLaplace
from sublaplace.runtime.distributed import Ranks, Share

PATIENCE = timedelta(seconds=60)  # of every group; a test that hangs ends then
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


def in_group(rank, size, port, folder, timeout, work, *arguments):
    """Runs `work` as one rank and leaves its result, or its error, in a file."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group.init_process_group("gloo", rank=rank, world_size=size, timeout=timeout)
    group.barrier()  # or one that is done at once would be gone before a late one has found it
    try:
        result = work(*arguments)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    torch.save(result, Path(folder) / f"{rank}.pt")


def on_ranks(size, folder, work, *arguments, timeout=PATIENCE):
    """The results of all ranks; None of one that was killed."""
    Path(folder).mkdir(exist_ok=True)
    context = multiprocessing.get_context("fork")
    port = free_port()
    processes = [
        context.Process(target=in_group, args=(rank, size, port, folder, timeout, work, *arguments))
        for rank in range(size)
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


COMPARED = {COUNT * k // 8 for k in range(8)} | {COUNT - 1}  # read by every rank, to see that all have the same data


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


def test_each_rank_reads_its_share_alone_but_for_a_few_items_that_are_compared(tmp_path):
    first, second = on_ranks(2, tmp_path, items_read)
    assert first | second == set(range(COUNT))
    assert first & second == COMPARED


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
    assert read & others == COMPARED


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


OWN_SHARES = [(name, 2) for name in SETTINGS if name != "subset-swag"] + [("lowrank-kfac", 4)]


@pytest.mark.parametrize(("name", "size"), OWN_SHARES)
def test_loaders_that_hold_a_share_each_give_the_posterior_of_a_single_process(name, size, tmp_path):
    settings = {"projector": name} | SETTINGS[name]
    expected = fit_of_own_shares(settings)
    tolerance = 1e-6 if name == "tuned prior" else 1e-8
    for found in on_ranks(size, tmp_path, fit_of_own_shares, settings):
        assert not isinstance(found, str), found
        for key, value in expected.items():
            assert torch.allclose(found[key], value, rtol=tolerance, atol=tolerance / 100), key


def test_a_projector_that_trains_on_all_data_refuses_shares(tmp_path):
    for outcome in on_ranks(2, tmp_path, fit_of_own_shares, {"projector": "subset-swag", "dim": 5}):
        assert "reads all data on every rank" in str(outcome)


def test_a_share_in_a_single_process_is_refused():
    model, inputs, targets = problem("mlp")
    with pytest.raises(ValueError, match="sharded=True has no effect in a single process"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(data_of(inputs, targets), sharded=True)


def sampled(inputs, targets, **options):
    data = TensorDataset(inputs, targets)
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, **options))


def sampled_in_batches(inputs, targets):
    data = TensorDataset(inputs, targets)
    return DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data), 2, drop_last=True))


SAMPLED = {
    "padding": sampled,
    "shuffling": lambda inputs, targets: sampled(inputs, targets, shuffle=True),
    "dropping": lambda inputs, targets: sampled(inputs, targets, drop_last=True),
    "batches": sampled_in_batches,
}


def fit_of_sampled(name, settings, sharded=False):
    model, inputs, targets = problem()
    la = SubspaceLaplace(model, "classification", **{"complement": None, "prior_precision": 1.0} | settings)
    alone = Ranks.current().size == 1
    data = data_of(inputs, targets) if alone else SAMPLED[name](inputs, targets)
    la.fit(data, sharded=sharded and not alone)
    return {"covariance": la.functional_covariance(inputs[:5]), "evidence": la.log_marginal_likelihood().detach()}


SAMPLED_CASES = [
    ("padding", "lowrank-kfac", 2, False),
    ("padding", "full", 4, False),
    ("padding", "kfac outside", 2, True),
]
SAMPLED_CASES += [(name, "lowrank-kfac", 4, False) for name in ("shuffling", "dropping", "batches")]


@pytest.mark.parametrize(("sampler", "name", "size", "sharded"), SAMPLED_CASES)
def test_loaders_with_a_distributed_sampler_give_the_posterior_of_a_single_process(
    sampler, name, size, sharded, tmp_path
):
    settings = {"projector": name} | SETTINGS[name]
    expected = fit_of_sampled(sampler, settings)
    for found in on_ranks(size, tmp_path, fit_of_sampled, sampler, settings, sharded):
        assert not isinstance(found, str), found
        for key, value in expected.items():
            assert torch.allclose(found[key], value, rtol=1e-8, atol=1e-10), key


def test_a_distributed_sampler_without_a_process_group_is_refused():
    model, inputs, targets = problem("mlp")
    sampler = DistributedSampler(inputs, num_replicas=2, rank=0)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=2, sampler=sampler)
    with pytest.raises(ValueError, match="DistributedSampler for 2 ranks, but there is no process group"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(loader)


# Ranks that disagree --------------------------------------------------------------------------------------------------


def of_rank(one, other):
    return one if Ranks.current().rank == 0 else other


def other_halves(model, inputs, targets):
    half = of_rank(slice(0, 12), slice(11, 23))
    return SubspaceLaplace.paper(model, "classification", dim=4), data_of(inputs[half], targets[half])


def other_counts(model, inputs, targets):
    few = of_rank(COUNT, 19)
    return SubspaceLaplace.paper(model, "classification", dim=4), data_of(inputs[:few], targets[:few])


def other_lengths_of_iterables(model, inputs, targets):
    few = of_rank(COUNT, 19)

    class Unsized:
        def __iter__(self):
            return iter(list(zip(inputs[:few].split(2), targets[:few].split(2), strict=True)))

    return SubspaceLaplace.paper(model, "classification", dim=4), Unsized()


def with_another_value(inputs):
    """The inputs with one number that differs on rank 1, between the items that are compared in every data set."""
    changed = inputs.clone()
    changed[4, 0] += of_rank(0.0, 1e-9)
    assert 4 not in COMPARED
    return changed


def other_value_in_memory(model, inputs, targets):
    return SubspaceLaplace.paper(model, "classification", dim=4), data_of(with_another_value(inputs), targets)


def other_value_of_a_part(model, inputs, targets):
    part = Subset(TensorDataset(with_another_value(inputs), targets), range(COUNT - 1))
    return SubspaceLaplace.paper(model, "classification", dim=4), DataLoader(part, batch_size=2)


def other_value_in_a_list(model, inputs, targets):
    batches = list(zip(with_another_value(inputs).split(2), targets.split(2), strict=True))
    return SubspaceLaplace.paper(model, "classification", dim=4), batches


def other_value_of_an_iterable(model, inputs, targets):
    _, batches = other_value_in_a_list(model, inputs, targets)

    class Unsized:
        def __iter__(self):
            return iter(batches)

    return SubspaceLaplace.paper(model, "classification", dim=4), Unsized()


def other_weights(model, inputs, targets):
    weights = torch.full((COUNT,), of_rank(1.0, 2.0))
    data = DataLoader(TensorDataset(inputs, targets, weights), batch_size=2)
    return SubspaceLaplace.paper(model, "classification", dim=4), data


def other_prior(model, inputs, targets):
    la = SubspaceLaplace.paper(model, "classification", dim=4, prior_precision=of_rank(1.0, 2.0))
    return la, data_of(inputs, targets)


def other_dim(model, inputs, targets):
    return SubspaceLaplace.paper(model, "classification", dim=of_rank(4, 5)), data_of(inputs, targets)


def other_model(model, inputs, targets):
    with torch.no_grad():
        model[0].weight += of_rank(0.0, 1e-6)
    return SubspaceLaplace.paper(model, "classification", dim=4), data_of(inputs, targets)


def other_subspace_inputs(model, inputs, targets):
    la = SubspaceLaplace.paper(model, "classification", dim=4, subspace_inputs=inputs[:6] + of_rank(0.0, 0.1))
    return la, data_of(inputs, targets)


DISAGREEMENTS = [
    (other_halves, "training data"),
    (other_counts, "training data"),
    (other_lengths_of_iterables, "number of inputs"),
    (other_value_in_memory, "training data"),
    (other_value_of_a_part, "training data"),
    (other_value_in_a_list, "training data"),
    (other_value_of_an_iterable, "training data"),
    (other_weights, "training data"),
    (other_prior, "settings"),
    (other_dim, "settings"),
    (other_model, "model"),
    (other_subspace_inputs, "subspace_inputs"),
]


def fit_in_disagreement(prepare):
    la, data = prepare(*problem("mlp"))
    la.fit(data)


@pytest.mark.parametrize(("prepare", "subject"), DISAGREEMENTS, ids=lambda value: getattr(value, "__name__", None))
def test_ranks_that_disagree_are_told_before_the_work(prepare, subject, tmp_path):
    for outcome in on_ranks(2, tmp_path, fit_in_disagreement, prepare):
        assert outcome.startswith("ValueError")
        assert subject in outcome
        assert "on rank 1 is not the same as on rank 0" in outcome


def fit_with_other_validation_data():
    model, inputs, targets = problem("mlp")
    others = inputs + of_rank(0.0, 0.1)
    SubspaceLaplace(model, "classification", dim=4).fit(data_of(inputs, targets), data_of(others, targets))


def test_ranks_with_other_validation_data_are_told(tmp_path):
    for outcome in on_ranks(2, tmp_path, fit_with_other_validation_data):
        assert "validation data on rank 1 is not the same" in outcome


def fit_of_the_same_share():
    model, inputs, targets = problem("mlp")
    SubspaceLaplace.paper(model, "classification", dim=4).fit(data_of(inputs, targets), sharded=True)


def test_shares_that_are_all_the_same_are_refused(tmp_path):
    for outcome in on_ranks(2, tmp_path, fit_of_the_same_share):
        assert "some ranks have the same data" in outcome


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


def fit_until_killed_at(collective, place, victim=1):
    """Fit until the victim ends itself before, during or after some collective operation; others return their error."""
    model, inputs, targets = problem("mlp")
    together, seen = Ranks._together, 0

    @contextmanager
    def counted(ranks):
        nonlocal seen
        seen += 1
        due = ranks.rank == victim and seen == collective
        if due and place == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if due and place == "during":
            threading.Timer(1e-4, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with together(ranks):
            yield
        if due:
            os.kill(os.getpid(), signal.SIGKILL)

    Ranks._together = counted  # in this process, which is forked
    SubspaceLaplace(model, "classification", dim=4).fit(data_of(inputs, targets))
    return seen


KILLS = [(0.0, "before", 0), (0.2, "during", 1), (0.4, "after", 0), (0.6, "before", 1), (0.8, "during", 0)]


@pytest.mark.parametrize(("share", "place", "victim"), KILLS)
def test_a_rank_that_is_killed_at_any_collective_operation_ends_the_other(share, place, victim, tmp_path):
    collective = 1 + int(share * collectives_of_a_fit())
    outcomes = on_ranks(2, tmp_path, fit_until_killed_at, collective, place, victim)
    assert outcomes[victim] is None
    assert f"Rank {1 - victim} of 2 cannot go on" in outcomes[1 - victim]


@functools.cache
def collectives_of_a_fit():
    with tempfile.TemporaryDirectory() as folder:
        first, second = on_ranks(2, folder, fit_until_killed_at, None, "never")
    assert first == second >= 20
    return first


def summed_until_killed():
    """Add up 256 MiB; rank 1 is killed while they are under way."""
    ranks, sums = Ranks.current(), Plain(torch.ones(64 * 2**20))
    ranks.gather(None)
    if ranks.rank == 1:
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
    ranks.add_up(sums)


class Plain:
    """One tensor as the sums of a pass."""

    def __init__(self, total):
        self.total = total

    def tensors(self):
        return {"total": self.total}

    def restore(self, tensors):
        self.total = tensors["total"]


def test_a_rank_that_is_killed_within_a_sum_ends_the_others(tmp_path):
    outcomes = on_ranks(2, tmp_path, summed_until_killed)
    assert outcomes[1] is None
    assert "Rank 0 of 2 cannot go on" in outcomes[0]


def fit_beside_a_silent_rank():
    model, inputs, targets = problem("mlp")
    if Ranks.current().rank == 1:
        time.sleep(5)
        os.kill(os.getpid(), signal.SIGKILL)
    SubspaceLaplace.paper(model, "classification", dim=4).fit(data_of(inputs, targets))


def test_a_rank_that_does_not_respond_ends_the_others_after_the_timeout_of_the_group(tmp_path):
    start = time.monotonic()
    outcomes = on_ranks(2, tmp_path, fit_beside_a_silent_rank, timeout=timedelta(seconds=2))
    assert "Rank 0 of 2 cannot go on" in outcomes[0]
    assert "does not respond" in outcomes[0]
    assert time.monotonic() - start < PATIENCE.total_seconds()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_joins_ends_the_others_after_the_timeout_of_the_group(rank, tmp_path):
    """Within torch's own code: `init_process_group` waits for half an hour if it is given no timeout."""
    port, alone = free_port(), multiprocessing.get_context("fork").Process
    process = alone(target=in_group, args=(rank, 2, port, tmp_path, timedelta(seconds=2), fit_until_killed))
    process.start()
    process.join(PATIENCE.total_seconds())
    assert process.exitcode == 1  # not None, of one that hangs
    assert not list(tmp_path.iterdir())


def fit_with(loader_of):
    model, inputs, targets = problem("mlp")
    SubspaceLaplace.paper(model, "classification", dim=4).fit(loader_of(TensorDataset(inputs, targets)))


def shuffling(data):
    return DataLoader(data, batch_size=2, shuffle=True)


def one_batch(data):
    return DataLoader(data, batch_size=100)


@pytest.mark.parametrize(
    ("loader_of", "words"),
    [(shuffling, "shuffle=False"), (one_batch, "fewer batches")],
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


@pytest.mark.parametrize("sharded", [False, True])
def test_the_data_of_a_group_that_has_ended_are_not_read_in_part(sharded, tmp_path):
    for outcome in on_ranks(2, tmp_path, bounds_after_the_group, sharded):
        assert "process group that has ended" in str(outcome)


def test_without_a_group_there_is_one_rank():
    assert Ranks.current() == Ranks(0, 1)
    batches = [(torch.zeros(2, 1), torch.zeros(2)), (torch.zeros(3, 1), torch.zeros(3))]
    with pytest.raises(RuntimeError, match="has ended"):
        list(Share(batches, Ranks(0, 2)))
