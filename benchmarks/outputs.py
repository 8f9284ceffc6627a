"""How time and memory grow with the number of outputs: heads of 10, 100 and 1,000 classes on the same bodies.

Run ``python benchmarks/outputs.py``. Every case runs in a process of its own, once per round. The table shows medians
over the rounds, with the smallest and the largest value, and ratios to the same case with 10 classes of the same
round. Times are those of the process, over all of its threads. Weights are random, so that no direction is dropped.

laplace-torch runs in the peers' environment, which ``benchmarks/make_environment.py`` makes; ``--peers`` includes it.
It runs at each of several batch sizes, and each quantity counts at its best one. Stages that fail are shown with the
reason. A second table compares it with ours, in each round. Linux only (memory from /proc).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
HEADS = (10, 100, 1000)
PRIOR_PRECISION = 1.0
OURS = ("paper", "default", "default, all directions", "last layer")
PEERS = (
    "laplace-torch last layer KFAC",
    "laplace-torch all weights KFAC",
    "laplace-torch all weights KFAC, sampled Fisher",
)
COMPARED = {PEERS[0]: "last layer", PEERS[1]: "default, all directions", PEERS[2]: "default"}
"""Which of ours each peer is compared with."""

BATCH_SIZES = (1, 10, 100)
"""Of the peers; ours choose their own chunks within batches of 100."""

QUANTITIES = ("fit", "prediction", "tuning", "memory")
Measured = dict[str, float | str]
"""Numbers by quantity; the error message of one that failed."""


def network(name: str, num_outputs: int) -> tuple[Any, tuple[int, ...]]:
    """The body with a head of `num_outputs`, and the shape of its inputs."""
    import torch
    from torch import nn

    sys.path.insert(0, str(HERE.parent))
    from experiments.calibration.cifar_resnet import CifarResNet

    torch.manual_seed(0)
    if name == "resnet20":
        return CifarResNet(num_outputs=num_outputs).eval(), (3, 32, 32)
    blocks = [(nn.Conv2d(a, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)) for a in (1, 32, 32)]
    layers = [layer for block in blocks for layer in block]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, num_outputs)), (1, 28, 28)


def memory(field: str) -> float:
    """VmRSS (resident memory now) or VmHWM (its peak) of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def seconds(run: Callable[[], Any]) -> float | str:
    """Seconds of the process over all threads, or why there are none."""
    start = time.process_time()
    try:
        run()
    except Exception as error:  # a peer may fail in any way; the table shows how
        return f"{type(error).__name__}: {error}".splitlines()[0][:80]
    return time.process_time() - start


def measure(
    case: str, body: str, num_outputs: int, num_inputs: int, dim: int, threads: int, batch_size: int, memory_limit: int
) -> Measured:
    """Seconds of fit, prediction and tuning of one case, and its peak memory without P and the parameters, in MB."""
    import torch

    resource.setrlimit(resource.RLIMIT_DATA, (memory_limit * 2**20, memory_limit * 2**20))
    torch.set_num_threads(threads)
    one = torch.ones(1, requires_grad=True)
    torch.autograd.grad(one * 2, one, torch.ones(1))  # torch imports parts of itself at the first such call
    model, shape = network(body, num_outputs)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_inputs, *shape, generator=generator)
    labels = torch.randint(0, num_outputs, (num_inputs,), generator=generator)
    batches = [(inputs[i : i + batch_size], labels[i : i + batch_size]) for i in range(0, num_inputs, batch_size)]
    num_few = max(10, num_inputs // 10)
    few = [(x[: num_few - i * batch_size], y[: num_few - i * batch_size]) for i, (x, y) in enumerate(batches)]
    few = [(x, y) for x, y in few[: -(-num_few // batch_size)] if len(x)]
    parameters = sum(p.numel() for p in model.parameters())
    before = memory("VmRSS")
    if case in PEERS:
        from laplace import Laplace
        from laplace.curvature import CurvlinopsGGN
        from torch.utils.data import DataLoader, TensorDataset

        subset = "last_layer" if "last layer" in case else "all"
        sampled = {"backend": CurvlinopsGGN, "backend_kwargs": {"stochastic": True}} if "sampled" in case else {}
        loader = DataLoader(TensorDataset(inputs, labels), batch_size)
        la = Laplace(model, "classification", subset, "kron", prior_precision=PRIOR_PRECISION, **sampled)
        found: Measured = {"fit": seconds(lambda: la.fit(loader))}
        if not isinstance(found["fit"], str):
            found["prediction"] = seconds(lambda: [la(x) for x, _ in few])
        return found | {"memory": memory("VmHWM") - before}
    from sublaplace import Resources, SubspaceLaplace

    resources = Resources(curvature_samples="all") if "all directions" in case else None
    options: dict[str, Any] = {"prior_precision": PRIOR_PRECISION, "resources": resources}
    if case == "last layer":
        ours = SubspaceLaplace(model, "classification", projector="last-layer", **options)
    elif case == "paper":
        ours = SubspaceLaplace.paper(model, "classification", dim, **options)
    else:
        ours = SubspaceLaplace(model, "classification", dim, **options)
    times = {
        "fit": seconds(lambda: ours.fit(batches)),
        "prediction": seconds(lambda: [ours(x) for x, _ in few]),
        "tuning": seconds(lambda: ours.tuned(few)),
    }
    vectors = {"paper": 1, "last layer": 0}.get(case, 2)
    kept = (vectors * dim + 1) * parameters * 4 / 2**20
    return times | {"memory": memory("VmHWM") - before - kept}


def run_apart(python: Path | str, arguments: list[str], limit: float) -> Measured | str:
    """The result of one case from a process of its own, or why there is none."""
    paths = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]))
    command = [str(python), str(Path(__file__).resolve()), "--case", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env=os.environ | {"PYTHONPATH": paths}, check=False
        )
    except subprocess.TimeoutExpired:
        return f"more than {limit:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["failed"])[-1][:80]
    found: Measured = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def at_its_best(python: str, arguments: list[str], sizes: tuple[int, ...], memory_limit: int, limit: float) -> Measured:
    """Each quantity of one case at the batch size that suits it best; an error message if all sizes failed."""
    best: Measured = {}
    for size in sizes:
        found = run_apart(python, [*arguments, str(size), str(memory_limit)], limit)
        for quantity, value in ({"fit": found} if isinstance(found, str) else found).items():
            known = best.get(quantity)
            if known is None or isinstance(known, str):
                best[quantity] = value if known is None or not isinstance(value, str) else known
            elif not isinstance(value, str):
                best[quantity] = min(known, value)
    return best


def spread(values: list[float]) -> str:
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inputs", type=int, default=1000, help="training inputs; a tenth of them are predicted")
    parser.add_argument("--dim", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bodies", nargs="+", default=["cnn", "resnet20"])
    parser.add_argument("--heads", nargs="+", type=int, default=list(HEADS))
    parser.add_argument("--cases", nargs="+", default=list(OURS))
    parser.add_argument("--peers", action="store_true", help="laplace-torch as well")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which a case is given up")
    parser.add_argument("--peer-python", default=str(HERE / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--memory-limit", type=int, default=10_000, help="MB of data a case may hold")
    parser.add_argument("--case", nargs=8, help="for the processes of the cases")
    given = parser.parse_args()
    if given.case:
        case, body, *numbers = given.case
        print(json.dumps(measure(case, body, *map(int, numbers))))
        return
    cases = [(sys.executable, case, (100,)) for case in given.cases]
    if given.peers:
        cases += [(given.peer_python, case, BATCH_SIZES) for case in PEERS]
    results: dict[tuple[str, str, int], list[Measured]] = {}
    for _ in range(given.rounds):
        for body in given.bodies:
            for python, case, sizes in cases:
                for head in given.heads:
                    numbers = [str(n) for n in (head, given.inputs, given.dim, given.threads)]
                    found = at_its_best(python, [case, body, *numbers], sizes, given.memory_limit, given.limit)
                    results.setdefault((body, case, head), []).append(found)
                    print(body, case, head, found, file=sys.stderr, flush=True)
    print("| body | case | classes | quantity | median (range) | over the smallest head, in each round |")
    print("|---|---|---|---|---|---|")
    for (body, case, head), rounds in results.items():
        for quantity in QUANTITIES:
            row = f"| {body} | {case} | {head:,} | {quantity} |"
            values, failed = _numbers(rounds, quantity)
            if values:
                unit = "MB" if quantity == "memory" else "s"
                ratios = _ratios(rounds, results.get((body, case, given.heads[0]), []), quantity)
                print(f"{row} {spread(values)} {unit} | {ratios} |")
            for why in failed:
                print(f"{row} failed: {why} | – |")
    if given.peers:
        print("\n| body | peer | ours | classes | quantity | ours over the peer, in each round |")
        print("|---|---|---|---|---|---|")
        for (body, case, head), rounds in results.items():
            own = results.get((body, COMPARED.get(case, ""), head))
            for quantity in ("fit", "prediction", "memory") if own else ():
                ratios = _ratios(own or [], rounds, quantity)
                print(f"| {body} | {case} | {COMPARED[case]} | {head:,} | {quantity} | {ratios} |")


def _numbers(rounds: list[Measured], quantity: str) -> tuple[list[float], set[str]]:
    """The values of a quantity in all rounds, and the reasons where there is none."""
    found = [each[quantity] for each in rounds if quantity in each]
    return [value for value in found if not isinstance(value, str)], {v for v in found if isinstance(v, str)}


def _ratios(rounds: list[Measured], others: list[Measured], quantity: str) -> str:
    """The ratios of a quantity to that of another case, round by round."""
    pairs = [(one.get(quantity), other.get(quantity)) for one, other in zip(rounds, others, strict=False)]
    ratios = [one / other for one, other in pairs if isinstance(one, float) and isinstance(other, float) and other > 0]
    return spread(ratios) if ratios else "–"


if __name__ == "__main__":
    main()
