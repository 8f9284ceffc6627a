"""A fit that is cut off goes on where it was and ends with the same result, bit for bit."""

import multiprocessing
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sublaplace.curvature.stream
import sublaplace.runtime.checkpoint
from sublaplace import Bernoulli, Gaussian, Resources, SavedFileError, SubspaceLaplace
from sublaplace.runtime import files as checked_file

N = 96
BATCH = 8
BATCHES = N // BATCH
PREAMBLE = 2 + 2 * BATCHES  # one batch twice, to see that the order is fixed; the fingerprint; the survey

FITS = {
    "lowrank-kfac": {},
    "lowrank-kfac with λ tuned": {"prior_precision": "evidence"},
    "lowrank-diagonal": {"projector": "lowrank-diagonal"},
    "lowrank-ggn, dual": {"projector": "lowrank-ggn"},
    "subset-swag": {"projector": "subset-swag"},
    "full": {"projector": "full", "dim": None},
    "regression": {"likelihood": "regression"},
    "regression, a noise for each output": {"likelihood": Gaussian("per-output")},
    "given subspace inputs": {"subspace_inputs": torch.linspace(-1, 1, 10 * 5).view(10, 5)},
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def data(likelihood="classification"):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(N, 5, generator=generator)
    if likelihood == "regression" or isinstance(likelihood, Gaussian):
        return inputs, torch.randn(N, 3, generator=generator)
    return inputs, torch.randint(3, (N,), generator=generator)


class KillingLoader:
    """Batches in a fixed order; the process dies with SIGKILL when the given number of batches has been read."""

    def __init__(self, inputs, targets, lives):
        self.loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)
        self.lives = lives

    def __iter__(self):
        for batch in self.loader:
            self.lives -= 1
            if self.lives < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


def fit(options, folder, result, lives, passes=None):
    options = {"likelihood": "classification", "dim": 6, **options}
    inputs, targets = data(options["likelihood"])
    loader = KillingLoader(inputs, targets, lives)
    la = SubspaceLaplace.paper(network(), **options).fit(loader, checkpoint=folder)
    la.save(result)
    if passes is not None:
        passes.value = la._state.linearization.passes


def in_a_process(*arguments):
    """Runs `fit` in a process of its own; its exit code."""
    process = multiprocessing.get_context("fork").Process(target=fit, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def content(path):
    """All numbers of a saved posterior, as bytes and text."""
    tensors, description = checked_file.read(path, torch.device("cpu"))
    return {name: t.contiguous().numpy().tobytes() for name, t in tensors.items()}, description


@pytest.fixture
def eager_writes(monkeypatch):
    """Everything is put aside at once, so that short fits are cut off between writes."""
    monkeypatch.setattr(sublaplace.runtime.checkpoint, "SECONDS_BETWEEN_WRITES", 0.0)
    monkeypatch.setattr(sublaplace.runtime.checkpoint, "_WRITING_SHARE", float("inf"))
    monkeypatch.setattr(sublaplace.curvature.stream, "LARGEST_PORTION", 2 * BATCH)


@pytest.mark.parametrize("name", FITS)
def test_a_killed_fit_ends_with_the_result_of_an_undisturbed_one_bit_for_bit(name, tmp_path, eager_writes):
    options = FITS[name]
    assert in_a_process(options, tmp_path / "quiet", tmp_path / "expected", 10**9) == 0
    generator = torch.Generator().manual_seed(len(name))
    # Anywhere in the first passes; while the data are read again to go on; anywhere after that; and not at all.
    ranges = [(PREAMBLE, PREAMBLE + BATCHES), (2, PREAMBLE), (PREAMBLE, PREAMBLE + 2 * BATCHES), (10**9, 10**9 + 1)]
    codes = [
        in_a_process(
            options, tmp_path / "kept", tmp_path / "found", int(torch.randint(low, high, (), generator=generator))
        )
        for low, high in ranges
    ]
    assert codes[:2] == [-signal.SIGKILL] * 2
    assert codes[3] == 0
    assert content(tmp_path / "found") == content(tmp_path / "expected")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("write", [0, 1, 2, 4, 7, 9])
def test_a_fit_killed_while_it_writes_goes_on(write, tmp_path, eager_writes, monkeypatch):
    assert in_a_process({}, tmp_path / "quiet", tmp_path / "expected", 10**9) == 0
    replace, count = os.replace, iter(range(10**6))

    def killing(*arguments):
        if next(count) == write:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*arguments)

    with monkeypatch.context() as context:
        context.setattr(os, "replace", killing)
        assert in_a_process({}, tmp_path / "kept", tmp_path / "found", 10**9) == -signal.SIGKILL
    assert in_a_process({}, tmp_path / "kept", tmp_path / "found", 10**9) == 0
    assert content(tmp_path / "found") == content(tmp_path / "expected")


class Stopping:
    """Batches in a fixed order; Ctrl-C after some of them."""

    def __init__(self, loader, lives):
        self.loader, self.lives = loader, lives

    def __iter__(self):
        for batch in self.loader:
            self.lives -= 1
            if self.lives < 0:
                raise KeyboardInterrupt
            yield batch


def passes_after_a_stop(folder, lives):
    """Backward passes of the whole fit and of the one that goes on after Ctrl-C."""
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH)
    la = SubspaceLaplace.paper(
        network().double(), "classification", dim=6, resources=Resources(direction_tolerance=0.0)
    )
    loader = [(x.double(), y) for x, y in loader]
    whole = la.fit(loader)._state.linearization.passes
    with pytest.raises(KeyboardInterrupt):
        la.fit(Stopping(loader, lives), checkpoint=folder)
    return whole, la.fit(loader, checkpoint=folder)._state.linearization.passes


def test_work_that_was_done_is_not_done_again(tmp_path, eager_writes):
    whole, rest = passes_after_a_stop(tmp_path / "kept", PREAMBLE + BATCHES - 1)
    directions = 2  # C − 1
    assert whole - rest == (BATCHES - 1) * BATCH * directions


def test_a_stage_that_was_finished_is_skipped(tmp_path, eager_writes):
    whole, rest = passes_after_a_stop(tmp_path / "kept", PREAMBLE + BATCHES)
    directions = 2
    for_p = N * 3  # all inputs are subspace inputs, with C rows each
    for_the_summary = 16 * directions  # how far KFAC's traces are off, on a few inputs
    assert whole - rest == N * directions + for_p + for_the_summary


def test_without_a_kill_a_checkpoint_changes_nothing(tmp_path):
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH)
    plain = SubspaceLaplace.paper(network(), "classification", dim=6).fit(loader)
    kept = SubspaceLaplace.paper(network(), "classification", dim=6).fit(loader, checkpoint=tmp_path / "checkpoint")
    x = data()[0]
    assert torch.equal(plain.functional_covariance(x), kept.functional_covariance(x))
    assert not list(tmp_path.iterdir())


def test_inputs_of_different_lengths_go_on_bit_for_bit(tmp_path, eager_writes):
    """How many inputs are worked on at once must not depend on what was seen before the stop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), MeanOverPositions(), nn.Linear(4, 3))
    loader = [(torch.randint(0, 5, (24, length)), torch.randint(0, 3, (24,))) for length in (3, 11, 5, 40, 2, 7)]
    options = {"dim": 4, "resources": Resources(memory_budget=10_000), "subspace_inputs": loader[0][0]}
    expected = SubspaceLaplace.paper(model, "classification", **options).fit(loader).projection_matrix()
    for stop in range(14, 26, 2):
        la = SubspaceLaplace.paper(model, "classification", **options)
        with pytest.raises(KeyboardInterrupt):
            la.fit(Stopping(loader, stop), checkpoint=tmp_path / str(stop))
        found = la.fit(loader, checkpoint=tmp_path / str(stop)).projection_matrix()
        assert torch.equal(found, expected), stop


class MeanOverPositions(nn.Module):
    def forward(self, x):
        return x.mean(1)


# What is refused ------------------------------------------------------------------------------------------------------


class Reordered:
    """The same first batch, but others in another order at every reading."""

    def __init__(self, batches):
        self.batches, self.readings = batches, 0

    def __iter__(self):
        self.readings += 1
        k = 1 + self.readings % 2
        yield from [self.batches[0], *self.batches[k:], *self.batches[1:k]]


def test_a_shuffling_loader_is_refused_at_once(tmp_path):
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH, shuffle=True)
    with pytest.raises(ValueError, match=r"same order.*shuffle=False"):
        SubspaceLaplace.paper(network(), "classification", dim=6).fit(loader, checkpoint=tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_a_loader_that_changes_its_order_in_secret_is_refused(tmp_path):
    loader = Reordered(list(DataLoader(TensorDataset(*data()), batch_size=BATCH)))
    with pytest.raises(ValueError, match="same order"):
        SubspaceLaplace.paper(network(), "classification", dim=6).fit(loader, checkpoint=tmp_path / "c")


def stopped(folder, **options):
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH)
    with pytest.raises(KeyboardInterrupt):
        SubspaceLaplace.paper(network(), "classification", dim=6, **options).fit(
            Stopping(loader, 45), checkpoint=folder
        )
    return loader


OTHERS = {
    "dim": ({"dim": 5}, "dim.*6 then, 5 now"),
    "seed": ({"dim": 6, "seed": 1}, "seed"),
    "prior_precision": ({"dim": 6, "prior_precision": 2.0}, "prior_precision"),
    "projector": ({"dim": 6, "projector": "lowrank-diagonal"}, "projector"),
    "likelihood": ({"dim": 6, "likelihood": Bernoulli()}, "likelihood"),
    "noise": ({"dim": 6, "likelihood": Gaussian(0.3)}, "likelihood"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_checkpoint_of_another_fit_is_refused_with_what_differs(name, tmp_path):
    loader = stopped(tmp_path / "c")
    options, message = OTHERS[name]
    with pytest.raises(SavedFileError, match=message):
        SubspaceLaplace.paper(network(), **{"likelihood": "classification", **options}).fit(
            loader, checkpoint=tmp_path / "c"
        )


def test_the_checkpoint_of_a_version_with_another_default_tolerance_is_refused(tmp_path, monkeypatch):
    loader = stopped(tmp_path / "c")
    monkeypatch.setattr("sublaplace.options.DIRECTION_TOLERANCE", 1e-8)
    with pytest.raises(SavedFileError, match=r"default_tolerance.*1e-05 then, 1e-08 now"):
        SubspaceLaplace.paper(network(), "classification", dim=6).fit(loader, checkpoint=tmp_path / "c")


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    loader = stopped(tmp_path / "c")
    other = network()
    with torch.no_grad():
        other[0].bias[0] += 1e-3
    with pytest.raises(SavedFileError, match="model"):
        SubspaceLaplace.paper(other, "classification", dim=6).fit(loader, checkpoint=tmp_path / "c")


@pytest.mark.parametrize("what", ["inputs", "targets", "subspace inputs"])
def test_other_data_are_refused(what, tmp_path):
    inputs, targets = data()
    given = {"subspace_inputs": inputs[:9]} if what == "subspace inputs" else {}
    stopped(tmp_path / "c", **given)
    if what == "inputs":
        inputs[70, 2] += 1
    elif what == "targets":
        targets[70] = (targets[70] + 1) % 3
    else:
        given = {"subspace_inputs": inputs[:8]}
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)
    with pytest.raises(ValueError, match="other data"):
        SubspaceLaplace.paper(network(), "classification", dim=6, **given).fit(loader, checkpoint=tmp_path / "c")


def test_a_damaged_checkpoint_is_refused(tmp_path):
    loader = stopped(tmp_path / "c")
    path = tmp_path / "c" / "projection.safetensors"
    altered = bytearray(path.read_bytes())
    altered[-1] ^= 1
    path.write_bytes(bytes(altered))
    with pytest.raises(SavedFileError, match="altered or cut short"):
        SubspaceLaplace.paper(network(), "classification", dim=6).fit(loader, checkpoint=tmp_path / "c")


def test_a_folder_or_file_that_is_no_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("precious")
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH)
    for place, word in ((tmp_path / "thesis", "not empty"), (tmp_path / "thesis" / "chapter.txt", "is a file")):
        with pytest.raises(SavedFileError, match=word):
            SubspaceLaplace.paper(network(), "classification", dim=6).fit(loader, checkpoint=place)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "precious"
