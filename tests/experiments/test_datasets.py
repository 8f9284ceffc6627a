"""The data sets of the experiments: sizes, splits and scales; files that are missing, cut, altered or downloaded."""

import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import colour_images, datasets
from experiments.datasets import DataFileError, SourceFile, Upstream, content

needs_data = pytest.mark.skipif("SUBLAPLACE_DATA" not in os.environ, reason="SUBLAPLACE_DATA names no data folder")

# name: training rows, test rows, shape of an input, outputs
SIZES = {
    "enb": (614, 154, (8,), 2),
    "redwine": (1279, 320, (11,), 1),
    "redwine-standardised": (1279, 320, (11,), 1),
    "california": (16512, 4128, (8,), 1),
    "naval": (9547, 2387, (14,), 2),
    "mnist": (60000, 10000, (1, 28, 28), None),
    "fashionmnist": (60000, 10000, (1, 28, 28), None),
    "cifar10": (50000, 10000, (3, 32, 32), None),
    "imagenet10": (331, 82, (3, 224, 224), None),
}
SAME_DATA = {"imagenet10-efficientnet", "imagenet10-finetuned"}  # as imagenet10, for other networks
TABLES = [name for name, size in SIZES.items() if size[3]]


# The sets themselves


def test_every_set_has_its_sizes_listed() -> None:
    assert set(SIZES) | SAME_DATA == set(datasets.DATASETS)


LONG = {"cifar10"}  # 180 MB to decompress


@needs_data
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in SIZES])
def test_sizes_and_types(name: str) -> None:
    train, test, shape, outputs = SIZES[name]
    data = datasets.load(name)
    assert data.train_inputs.shape == (train, *shape) and data.test_inputs.shape == (test, *shape)
    assert data.train_inputs.dtype == data.test_inputs.dtype == torch.float32
    if outputs:
        assert data.likelihood == "regression"
        assert data.train_targets.shape == (train, outputs) and data.test_targets.shape == (test, outputs)
    else:
        assert data.likelihood == "classification"
        assert data.train_targets.dtype == torch.int64
        assert data.test_targets.bincount().sum() == test and data.train_targets.max() == 9


@needs_data
def test_each_file_of_cifar10_is_read_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is decompressed, and its first pictures stand for those of every file."""
    pixels = colour_images._cifar10_pixels("test_batch")
    assert pixels.shape == (10_000, 32, 32, 3) and pixels.dtype == np.uint8
    channels = pixels.reshape(-1, 3) / 255  # much as in the training pictures, whose mean and deviation are known
    assert channels.mean(0) == pytest.approx(colour_images.CIFAR10_MEAN, abs=0.01)
    assert channels.std(0) == pytest.approx(colour_images.CIFAR10_STD, abs=0.01)
    files = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    firsts = {name: pixels[2 * k : 2 * k + 2] for k, name in enumerate(files)}
    monkeypatch.setattr(colour_images, "_cifar10_pixels", firsts.__getitem__)
    data = datasets.load("cifar10")
    found = colour_images.pixels_of(
        torch.cat([data.train_inputs, data.test_inputs]), colour_images.CIFAR10_MEAN, colour_images.CIFAR10_STD
    )
    assert np.array_equal(found, pixels[:12])
    assert data.train_targets.shape == (50_000,) and data.test_targets.bincount().tolist() == [1000] * 10
    assert data.train_targets.bincount().tolist() == [5000] * 10


@needs_data
@pytest.mark.parametrize("name", TABLES)
def test_training_part_alone_decides_the_scale(name: str) -> None:
    data = datasets.load(name)
    mean, deviation = data.train_inputs.double().mean(0), data.train_inputs.double().std(0, correction=0)
    if name == "redwine":
        assert (mean > 0).all() and mean.max() > 10  # as measured: sulfur dioxide in mg, for example
        return
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-5, rtol=0)
    torch.testing.assert_close(deviation, torch.ones_like(deviation), atol=1e-5, rtol=0)
    assert not torch.allclose(data.test_inputs.double().mean(0), torch.zeros_like(mean), atol=1e-5)


@needs_data
def test_targets_are_scaled_for_naval_alone() -> None:
    naval = datasets.load("naval").train_targets.double()
    torch.testing.assert_close(naval.mean(0), torch.zeros(2).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(naval.std(0, correction=0), torch.ones(2).double(), atol=1e-5, rtol=0)
    wine = datasets.load("redwine")
    grades = torch.cat([wine.train_targets, wine.test_targets]).flatten().long().bincount(minlength=9)
    assert grades.tolist() == [0, 0, 0, 10, 53, 681, 638, 199, 18]  # as its authors count them


@needs_data
def test_california_is_made_as_scikit_learn_makes_it() -> None:
    kept = np.load(Path(os.environ["SUBLAPLACE_DATA"]) / "uci" / "california_housing_sklearn.npz")
    order = np.random.default_rng(42).permutation(20640)
    train = kept["X"][order[:16512]]
    data = datasets.load("california")
    expected = (kept["X"][order[16512:]] - train.mean(0)) / train.std(0)
    np.testing.assert_allclose(data.test_inputs.numpy(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(data.test_targets[:, 0].numpy(), kept["y"][order[16512:]], rtol=1e-6)


@needs_data
def test_variants_of_red_wine_have_the_same_rows() -> None:
    raw, scaled = datasets.load("redwine"), datasets.load("redwine-standardised")
    inputs = raw.train_inputs.double()
    expected = (raw.test_inputs.double() - inputs.mean(0)) / inputs.std(0, correction=0)
    torch.testing.assert_close(scaled.test_inputs.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(raw.test_targets, scaled.test_targets)


@needs_data
@pytest.mark.parametrize("name", ["mnist", "fashionmnist"])
def test_pixels_are_scaled_to_minus_one_to_one(name: str) -> None:
    data = datasets.load(name)
    assert data.train_inputs.min() == -1 and data.train_inputs.max() == 1
    pixels, labels = datasets.images(name, "test")
    assert np.array_equal(datasets.image_pixels(data.test_inputs), pixels)
    assert labels[:5].tolist() == {"mnist": [7, 2, 1, 0, 4], "fashionmnist": [9, 2, 1, 1, 6]}[name]


def test_every_grey_value_survives_the_scaling() -> None:
    pixels = np.resize(np.arange(256, dtype=np.uint8), (1, 28, 28))
    assert np.array_equal(datasets.image_pixels(datasets.image_tensor(pixels)), pixels)


def test_an_unknown_name_is_answered_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"Unknown data set 'iris'.*enb.*fashionmnist"):
        datasets.load("iris")


# Files

CONTENT = b"a;b\n1;2\n"


def source(url: str = "http://127.0.0.1:9/table.csv", data: bytes = CONTENT) -> SourceFile:
    return SourceFile("uci/table.csv", hashlib.sha256(data).hexdigest(), url)


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for downloads, and no data folder."""
    monkeypatch.delenv("SUBLAPLACE_DATA", raising=False)
    monkeypatch.setattr(datasets, "DOWNLOADS", tmp_path / "downloads")
    return tmp_path / "downloads"


@pytest.fixture
def data_folder(tmp_path: Path, downloads: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with the table."""
    folder = tmp_path / "data"
    (folder / "uci").mkdir(parents=True)
    (folder / "uci" / "table.csv").write_bytes(CONTENT)
    monkeypatch.setenv("SUBLAPLACE_DATA", str(folder))
    return folder


def test_a_file_of_the_data_folder_is_used(data_folder: Path) -> None:
    assert content(source()) == CONTENT


@pytest.mark.parametrize("data", [CONTENT[:-3], CONTENT.replace(b"1", b"3"), b""], ids=["cut", "altered", "empty"])
def test_another_file_is_refused(data_folder: Path, data: bytes) -> None:
    path = data_folder / "uci" / "table.csv"
    path.write_bytes(data)
    with pytest.raises(DataFileError, match="cut short or altered") as error:
        content(source())
    assert str(path) in str(error.value) and source().sha256 in str(error.value)
    assert path.read_bytes() == data  # nothing of the user's is touched


def test_a_data_folder_that_does_not_exist_is_named(downloads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLAPLACE_DATA", "/nowhere/at/all")
    with pytest.raises(DataFileError, match="SUBLAPLACE_DATA=/nowhere/at/all is not a folder"):
        content(source())


# Downloads, from a server on this machine


@dataclass
class Home:
    """What the server has, and what it was asked for."""

    address: str
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def home() -> Iterator[Home]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place.asked.append(self.path)
            found = place.files.get(self.path)
            self.send_response(200 if found is not None else 404)
            self.send_header("Content-Length", str(len(found or b"")))
            self.end_headers()
            self.wfile.write(found or b"")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    place = Home(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield place
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_missing_file_is_downloaded_once(downloads: Path, home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    home.files["/table.csv"] = CONTENT
    file = source(f"{home.address}/table.csv")
    assert content(file) == CONTENT == content(file)
    assert home.asked == ["/table.csv"]
    assert (downloads / "uci" / "table.csv").read_bytes() == CONTENT
    assert "100%" in capfd.readouterr().err  # the progress bar


def test_a_file_that_the_data_folder_lacks_is_downloaded(data_folder: Path, home: Home) -> None:
    (data_folder / "uci" / "table.csv").unlink()
    home.files["/table.csv"] = CONTENT
    assert content(source(f"{home.address}/table.csv")) == CONTENT
    assert not (data_folder / "uci" / "table.csv").exists()  # the data folder may be read-only


def test_a_download_with_another_hash_leaves_nothing(downloads: Path, home: Home) -> None:
    home.files["/table.csv"] = CONTENT[:-1]
    with pytest.raises(DataFileError, match=r"could not be downloaded from .*hash"):
        content(source(f"{home.address}/table.csv"))
    assert [path for path in downloads.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("reachable", [True, False], ids=["not there", "no connection"])
def test_a_failed_download_says_what_to_do(downloads: Path, home: Home, reachable: bool) -> None:
    url = f"{home.address}/gone.csv" if reachable else "http://127.0.0.1:9/gone.csv"
    with pytest.raises(DataFileError, match=r"SUBLAPLACE_DATA is not set.*could not be downloaded") as error:
        content(source(url))
    assert url in str(error.value) and str(downloads / "uci") in str(error.value)


def test_a_damaged_download_is_noticed_when_it_is_read_again(downloads: Path, home: Home) -> None:
    home.files["/table.csv"] = CONTENT
    file = source(f"{home.address}/table.csv")
    content(file)
    (downloads / "uci" / "table.csv").write_bytes(CONTENT + b"3;4\n")
    with pytest.raises(DataFileError, match="cut short or altered"):
        content(file)


def test_another_form_is_checked_and_converted(downloads: Path, home: Home) -> None:
    home.files["/table.csv"] = original = CONTENT.replace(b";", b",")
    upstream = Upstream(hashlib.sha256(original).hexdigest(), lambda data: data.replace(b",", b";"))
    file = SourceFile("uci/table.csv", source().sha256, f"{home.address}/table.csv", upstream)
    assert content(file) == CONTENT
    assert [path.name for path in downloads.rglob("*") if path.is_file()] == ["table.csv"]
    wrong = SourceFile("uci/other.csv", source().sha256, file.url, Upstream(upstream.sha256, lambda data: data))
    with pytest.raises(DataFileError, match="cut short or altered"):
        content(wrong)


@needs_data
def test_the_table_of_enb_at_its_home_becomes_ours() -> None:
    """Its home has all floats with two decimals; the SHA-256 of that form is the one that was published for it."""
    header, *lines = content(datasets.ENB).decode().splitlines()
    cells = [line.split(",") for line in lines]
    rows = [[c if k in (5, 7) else f"{float(c):.2f}" for k, c in enumerate(row)] for row in cells]
    original = "\n".join([header, *map(",".join, rows), ""]).encode()
    assert datasets.ENB.upstream is not None
    assert hashlib.sha256(original).hexdigest() == datasets.ENB.upstream.sha256
    assert datasets.ENB.upstream.convert(original) == content(datasets.ENB)
