"""What is asked for before a large allocation is no less than what it takes: measured peaks on three sizes each."""

import importlib
import itertools
import multiprocessing
import pkgutil
from pathlib import Path

import pytest
import torch
from torch import nn

import sublaplace
from sublaplace import Complement, Resources, SubspaceLaplace
from sublaplace.runtime import memory
from sublaplace.runtime.allocations import allocated_bytes

MIB = 2**20
BUDGET = 96 * MIB
SMALL = 24 * MIB  # what the libraries themselves take when first used
NEEDS_EXTRA = {"sublaplace.botorch", "sublaplace.lightning"}  # and make no estimates of their own
MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(sublaplace.__path__, "sublaplace.")
    if info.name not in NEEDS_EXTRA
]
CLEAR = Path("/proc/self/clear_refs")


def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def peak_and_estimates(prepare):
    """The peak of a process, and its checks before allocations: (subject, bytes asked for, bytes held then)."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def run():
        work, asked, require = prepare(), [], memory.require
        torch.set_num_threads(1)

        def recorded(needed, device, what, remedy):
            asked.append((what, needed, resident("VmRSS")))
            require(needed, device, what, remedy)

        for module in MODULES:
            if getattr(module, "require", None) is require:
                module.require = recorded
        CLEAR.write_text("5")  # from here on the peak is measured
        work()
        sender.send((resident("VmHWM"), asked))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    result = receiver.recv() if receiver.poll(120) else None
    process.join()
    return result


def network(width):
    torch.manual_seed(0)
    layers = nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    return nn.Sequential(*layers)


def data(count, regression=False):
    inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :3].sin() if regression else torch.arange(count) % 3
    return list(zip(inputs.split(100), targets.split(100), strict=True))


def fit(width, count, likelihood="classification", **options):
    def prepare():
        la = SubspaceLaplace(
            network(width), likelihood, prior_precision=1.0, resources=Resources(memory_budget=BUDGET), **options
        )
        loader = data(count, likelihood == "regression")
        return lambda: la.fit(loader)

    return prepare


class Residual(nn.Module):
    """Two convolutions beside the identity or, with another number of channels, a convolution."""

    def __init__(self, before, after):
        super().__init__()
        stride = 1 if before == after else 2
        self.first, self.norm = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.second, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.beside = nn.Identity() if stride == 1 else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        return (self.norm2(self.second(self.norm(self.first(x)).relu())) + self.beside(x)).relu()


def resnet20():
    torch.manual_seed(0)
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Residual(before, after) for before, after in itertools.pairwise(widths)]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    ).eval()


def fit_of_resnet20(count, **options):
    def prepare():
        la = SubspaceLaplace(
            resnet20(), "classification", prior_precision=1.0, resources=Resources(memory_budget=BUDGET), **options
        )
        pictures = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        la.fit([(pictures[:1], torch.zeros(1, dtype=torch.long))] * 2)  # the libraries' own memory
        loader = list(zip(pictures.split(20), (torch.arange(count) % 10).split(20), strict=True))
        return lambda: la.fit(loader)

    return prepare


def after_fit(width, call, **options):
    def prepare():
        la = SubspaceLaplace.paper(
            network(width), "classification", 10, resources=Resources(memory_budget=BUDGET), **options
        ).fit(data(100))
        return lambda: call(la)

    return prepare


KFAC = Complement("kfac", 1.0)
FITTED = Complement("kfac", "fitted")
CASES = {
    "the dense GGN": ("The exact GGN", [fit(w, 1200, projector="full", complement=None) for w in (20, 28, 36)]),
    "the GGN by its rows": ("The exact GGN", [fit(w, 300, projector="full", complement=None) for w in (40, 60, 80)]),
    "a subspace": ("A projection", [fit(w, 100, dim=100, complement=None) for w in (100, 160, 240)]),
    "a complement": ("A projection", [fit(w, 100, dim=100, complement=KFAC) for w in (100, 160, 240)]),
    "a fitted weight": (
        "A projection",
        [fit(w, 200, "regression", dim=60, complement=FITTED) for w in (100, 200, 300)],
    ),
    "the GGN of a ResNet20": ("The exact GGN", [fit_of_resnet20(50, projector="full", complement=None)]),
    "a subspace of a ResNet20": ("A projection", [fit_of_resnet20(16, dim=16, complement=None)]),
    "the last layer of a ResNet20": ("A posterior", [fit_of_resnet20(40, projector="last-layer", complement=None)]),
    "a joint covariance": (
        "A joint covariance",
        [
            after_fit(20, lambda la, n=n: la.functional_covariance(torch.zeros(n, 20), joint=True))
            for n in (500, 1000, 1500)
        ],
    ),
    "draws": ("A set of", [after_fit(w, lambda la: la.sample(200)) for w in (100, 150, 250)]),
    "solving": ("Solving", [after_fit(w, lambda la: la.full_covariance(torch.ones(8, 20))) for w in (40, 60, 80)]),
}


def quick(name, size):
    """Whether it is the middle one of three sizes, or takes a second."""
    return size == 1 or name == "the last layer of a ResNet20"


SIZES = [
    pytest.param(name, size, marks=() if quick(name, size) else pytest.mark.slow)
    for name, (_, sizes) in CASES.items()
    for size in range(len(sizes))
]


@pytest.mark.skipif(not CLEAR.exists(), reason="needs the peak of a process, which Linux tells")
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_no_estimate_is_below_the_measured_peak(name, size):
    subject, sizes = CASES[name]
    peak, asked = peak_and_estimates(sizes[size])
    found = [(needed, held) for what, needed, held in asked if what.startswith(subject)]
    assert found
    needed, held = found[0]
    print(f"{name}: peak {(peak - held) / MIB:.0f} MiB, estimate {needed / MIB:.0f} MiB")
    assert peak - held <= needed + SMALL


def test_the_limit_of_a_container_counts(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 50000\n")
    assert memory._container_bytes(tmp_path) == 150_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container_bytes(tmp_path) is None


def test_the_smaller_of_system_and_container_is_free(monkeypatch):
    monkeypatch.setattr(memory, "_container_bytes", lambda: 1234)
    assert memory.available_bytes(torch.device("cpu")) == 1234
    monkeypatch.setattr(memory, "_system_bytes", lambda: 1000)
    assert memory.available_bytes(torch.device("cpu")) == 1000


def test_allocations_are_counted_until_they_are_freed():
    x = torch.randn(1000, 100)
    size = x.numel() * x.element_size()

    def one_after_another():
        for _ in range(5):
            x + 1

    def held():
        return [x + k for k in range(5)]

    assert allocated_bytes(one_after_another) <= 2 * size
    assert allocated_bytes(held) == 5 * size
    assert allocated_bytes(lambda: x.view(100, 1000).add_(0)) == 0  # memory that was there before
