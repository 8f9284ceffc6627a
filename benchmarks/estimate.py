"""How right `SubspaceLaplace.estimate` is: estimated and measured fits of six networks, from 10 k to 11 M parameters.

Run ``python benchmarks/estimate.py``, with the data of the experiments. Each network is estimated in one fresh process
and fitted in another, with one thread, after the fit of a tiny network. Seconds are processor seconds by default, which
other work on the machine disturbs least. Peak memory is what the process takes in addition to imports, network and
data.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import memory, release_memory
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from networks import BertLike, VisionTransformer, fashion_mnist, peers_cnn, resnet20  # noqa: E402

from experiments.resnets import BasicBlock  # noqa: E402
from sublaplace import SubspaceLaplace  # noqa: E402


@dataclass(frozen=True)
class Problem:
    """A network, its likelihood, its data and how many of them there are."""

    network: Callable[[], nn.Module]
    likelihood: str
    data: Callable[[int], tuple[Any, Tensor]]
    num_data: int
    num_validation: int
    batch_size: int = 100


def mlp() -> nn.Module:
    """A network for tables: p = 10,261."""
    return nn.Sequential(nn.Linear(20, 100), nn.Tanh(), nn.Linear(100, 80), nn.Tanh(), nn.Linear(80, 1))


def table(count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 20)
    return inputs, inputs[:, :1].sin() + 0.1 * torch.randn(count, 1)


class SmallResNet18(nn.Module):
    """ResNet18 for small pictures: p = 11,173,962, without the first pooling."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        blocks = [block for i, o, stride in widths for block in (BasicBlock(i, o, stride), BasicBlock(o, o, 1))]
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.body, self.head = nn.Sequential(*blocks), nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.body(self.stem(images)).mean((2, 3))
        result: Tensor = self.head(hidden)
        return result


def pictures(side: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda count: (torch.randn(count, 3, side, side), torch.randint(10, (count,)))


def fashion(count: int) -> tuple[Tensor, Tensor]:
    inputs, labels = fashion_mnist("train")
    return inputs[:count].clone(), labels[:count].clone()


def sentences(count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1, 1000, (count, 32)), torch.randint(4, (count,))


PROBLEMS = {
    "MLP for a table, regression": Problem(mlp, "regression", table, 4000, 1000),
    "CNN, FashionMNIST": Problem(peers_cnn, "classification", fashion, 1000, 300),
    "BERT-like with LoRA": Problem(BertLike, "classification", sentences, 1000, 300),
    "ViT-like": Problem(VisionTransformer, "classification", pictures(32), 400, 100),
    "ResNet20": Problem(resnet20, "classification", pictures(32), 200, 50),
    "ResNet18, 8 × 8 pictures": Problem(SmallResNet18, "classification", pictures(8), 100, 0, 50),
}
POSTERIORS: dict[str, Callable[[nn.Module, str], SubspaceLaplace]] = {
    "default": lambda network, likelihood: SubspaceLaplace(network, likelihood),
    "paper's": lambda network, likelihood: SubspaceLaplace.paper(network, likelihood),
    "last layer": lambda network, likelihood: SubspaceLaplace(network, likelihood, projector="last-layer"),
}


def loaders(problem: Problem, posterior: str) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
    """Return the training data, and validation data where λ is tuned on them."""
    total = problem.num_data + problem.num_validation
    inputs, targets = problem.data(total)
    N, size = problem.num_data, problem.batch_size
    train = DataLoader(TensorDataset(inputs[:N], targets[:N]), size)
    if posterior == "paper's" or not problem.num_validation:
        return train, None
    return train, DataLoader(TensorDataset(inputs[N:], targets[N:]), size)


def warm_up() -> None:
    """Fit a tiny network, so that what torch loads at first use is not counted."""
    inputs, targets = torch.randn(40, 3), torch.randint(3, (40,))
    loader = DataLoader(TensorDataset(inputs, targets), 20)
    SubspaceLaplace(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), "classification", 5).fit(loader)


def one(name: str, posterior: str, what: str) -> dict[str, Any]:
    """Estimate or fit in this process."""
    torch.manual_seed(0)
    problem = PROBLEMS[name]
    network = problem.network().eval()
    train, validation = loaders(problem, posterior)
    la = POSTERIORS[posterior](network, problem.likelihood)
    warm_up()
    release_memory()
    before, start = memory("VmRSS"), time.perf_counter()
    if what == "estimate":
        found = la.estimate(train, validation)
        return {
            "took": time.perf_counter() - start,
            "seconds": found.seconds,
            "memory": found.peak_bytes / 2**20,
            "prediction": found.prediction.seconds,
            "stages": {stage: values.seconds for stage, values in found.stages.items()},
        }
    la.fit(train, validation)
    seconds, peak = time.perf_counter() - start, memory("VmHWM") - before
    x = next(iter(train))[0]
    la(x)
    start = time.perf_counter()
    la(x)
    each = (time.perf_counter() - start) / len(x)
    stages = {stage: values.seconds for stage, values in la.stages.items()}
    return {"seconds": seconds, "memory": peak, "prediction": each, "stages": stages, "p": la.num_parameters}


def measured(name: str, posterior: str, what: str, clock: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", __file__, "--one", name, posterior, what, "--clock", clock]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{what} of {name}, {posterior}: {process.stderr.strip().splitlines()[-1]}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="networks whose name contains one of these")
    parser.add_argument("--posteriors", nargs="+", choices=list(POSTERIORS), default=list(POSTERIORS))
    parser.add_argument("--clock", choices=["processor", "wall"], default="processor")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.clock == "processor":
        time.perf_counter = time.process_time  # which the stages of a fit are timed by, too
    if arguments.one:
        print(json.dumps(one(*arguments.one)))
        return
    print(
        "| network | p | N | posterior | fit, s | measured / estimated | peak memory, MB | measured / estimated "
        "| prediction, ms per input | measured / estimated | estimate took, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in PROBLEMS:
        if not any(part in name for part in arguments.only):
            continue
        for posterior in arguments.posteriors:
            guess, fit = (measured(name, posterior, what, arguments.clock) for what in ("estimate", "fit"))
            print(json.dumps({"network": name, "posterior": posterior, "estimate": guess, "fit": fit}), file=sys.stderr)
            ratios = {key: fit[key] / guess[key] for key in ("seconds", "memory", "prediction")}
            print(
                f"| {name} | {fit['p']:,} | {PROBLEMS[name].num_data:,} | {posterior} "
                f"| {fit['seconds']:.3g} | {ratios['seconds']:.2f} | {fit['memory']:.0f} | {ratios['memory']:.2f} "
                f"| {1000 * fit['prediction']:.3g} | {ratios['prediction']:.2f} | {guess['took']:.3g} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
