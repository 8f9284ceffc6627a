"""Files: errors of our own that say what to do, nothing changed about a file but its content, and no fit lost."""

import errno
import multiprocessing
import os
import resource
import signal
import stat
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from sensitive import batches, data, fitted, sensitive, untouched

import sublaplace.runtime.checkpoint
from sublaplace import Resources, SavedFileError, SubspaceLaplace
from sublaplace.runtime import files


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


# Where it is written --------------------------------------------------------------------------------------------------


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model, (x, _) = sensitive(), data()
    la = fitted(model)
    la.save("~/posterior")
    assert torch.equal(SubspaceLaplace.load("~/posterior", model)(x), la(x))
    SubspaceLaplace.paper(model, "classification", dim=4).fit(batches(), checkpoint="~/checkpoint")
    (tmp_path / "scratch").mkdir()
    SubspaceLaplace.paper(model, "classification", dim=4, resources=Resources(scratch_folder="~/scratch"))
    assert {path.name for path in tmp_path.iterdir()} == {"posterior", "scratch"}


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_new_file_has_the_mode_that_the_user_asked_for(mask, tmp_path):
    before = os.umask(mask)
    try:
        fitted().save(tmp_path / "posterior")
    finally:
        os.umask(before)
    assert mode(tmp_path / "posterior") == 0o666 & ~mask


def test_overwriting_keeps_the_mode(tmp_path):
    la, path = fitted(), tmp_path / "posterior"
    la.save(path)
    path.chmod(0o640)
    la.save(path)
    assert mode(path) == 0o640


def test_overwriting_a_link_writes_what_it_points_to(tmp_path):
    la, path, link = fitted(), tmp_path / "there" / "posterior", tmp_path / "link"
    path.parent.mkdir()
    path.write_text("an older file")
    link.symlink_to(path)
    la.save(link)
    assert link.is_symlink()
    assert not path.is_symlink()
    files.read(path, torch.device("cpu"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "there"]


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(SavedFileError, match=r"cannot be written.*folder .*/missing does not exist.*[Cc]reate it"):
        fitted().save(tmp_path / "missing" / "posterior")


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    with pytest.raises(SavedFileError, match="is a folder"):
        fitted().save(tmp_path)
    assert not list(tmp_path.iterdir())


REASONS = {errno.ENOSPC: "disk is full", errno.EROFS: "read-only", errno.EACCES: "permission", errno.EIO: "I/O|output"}


def failing(number):
    """A writer that fails as that of safetensors does, after it has written a part of the file."""

    def write(tensors, path, metadata=None):
        Path(path).write_bytes(b"some")
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")

    return write


@pytest.mark.parametrize("number", REASONS)
def test_errors_of_the_disk_are_told_in_our_words(number, tmp_path, monkeypatch):
    la, path = fitted(), tmp_path / "posterior"
    la.save(path)
    before = path.read_bytes()
    monkeypatch.setattr(files, "save_file", failing(number))
    with pytest.raises(SavedFileError, match=f"posterior cannot be written: .*({REASONS[number]})") as caught:
        la.save(path)
    assert ".tmp" not in str(caught.value)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["posterior"]


def test_a_file_that_may_not_be_read_is_told_in_our_words(tmp_path, monkeypatch):
    fitted().save(tmp_path / "posterior")

    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(SavedFileError, match=r"posterior cannot be read: .*permission"):
        files.read(tmp_path / "posterior", torch.device("cpu"))


def in_little_room(work, *arguments):
    """Runs `work` in a process of its own that cannot write files larger than 3,000 bytes."""

    def run(sender):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        try:
            sender.send(work(*arguments))
        except BaseException as error:
            sender.send(error)

    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=run, args=(sender,))
    process.start()
    result = receiver.recv() if receiver.poll(60) else None
    process.join()
    return result


def test_a_save_without_enough_room_leaves_the_old_file(tmp_path):
    la, path = fitted(), tmp_path / "posterior"
    la.save(path)
    before = path.read_bytes()
    error = in_little_room(la.save, path)
    assert isinstance(error, SavedFileError)
    assert "cannot be written" in str(error)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["posterior"]


# Checkpoints ----------------------------------------------------------------------------------------------------------


def fit_with_warnings(folder):
    """Fit with a checkpoint; return predictions, and the warnings but for the one of the network's training mode."""
    model, (x, _) = sensitive(), data()
    with untouched(model), pytest.warns(UserWarning) as caught:
        la = SubspaceLaplace.paper(model, "classification", dim=4).fit(batches(), checkpoint=folder)
    return la(x).tolist(), [str(warning.message) for warning in caught if "training mode" not in str(warning.message)]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(sublaplace.runtime.checkpoint, "SECONDS_BETWEEN_WRITES", 0.0)


def test_a_fit_goes_on_without_its_checkpoint_where_the_disk_is_full(tmp_path, monkeypatch, impatient):
    expected = fitted()(data()[0])
    monkeypatch.setattr(files, "save_file", failing(errno.ENOSPC))
    found, messages = fit_with_warnings(tmp_path / "checkpoint")
    assert found == expected.tolist()
    assert len(messages) == 1
    assert "The fit goes on without a checkpoint" in messages[0]
    assert "disk is full" in messages[0]


def test_a_fit_goes_on_without_its_checkpoint_where_files_may_not_grow(tmp_path, impatient):
    expected = fitted()(data()[0])
    found, messages = in_little_room(fit_with_warnings, tmp_path / "checkpoint")
    assert found == expected.tolist()
    assert len(messages) == 1


def test_a_checkpoint_that_cannot_be_removed_costs_no_fit(tmp_path, monkeypatch):
    expected = fitted()(data()[0])

    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rmdir", denied)
    found, messages = fit_with_warnings(tmp_path / "checkpoint")
    assert found == expected.tolist()
    assert "cannot be removed" in messages[0]


@pytest.mark.parametrize("deleted", range(5))
def test_a_fit_killed_while_it_removes_its_checkpoint_can_be_repeated(deleted, tmp_path, monkeypatch):
    expected, unlink, count = fitted()(data()[0]), Path.unlink, iter(range(100))

    def interrupted(path, missing_ok=False):
        if path.parent.name == "checkpoint" and not path.name.endswith(".tmp") and next(count) == deleted:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    model = sensitive()
    la = SubspaceLaplace.paper(model, "classification", dim=4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", interrupted)
        la.fit(batches(), checkpoint=tmp_path / "checkpoint")
    assert torch.equal(la.fit(batches(), checkpoint=tmp_path / "checkpoint")(data()[0]), expected)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_told_before_the_fit(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SavedFileError, match="cannot be written"):
        SubspaceLaplace.paper(sensitive(), "classification", dim=4).fit(batches(), checkpoint=tmp_path / "file" / "a")


def test_a_scratch_folder_without_room_is_told_before_anything_is_lost(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    model = sensitive()
    with untouched(model), pytest.raises(MemoryError, match=f"{tmp_path.name}.*disk is full"):
        SubspaceLaplace.paper(model, "classification", dim=4, resources=Resources(scratch_folder=tmp_path)).fit(
            batches()
        )
