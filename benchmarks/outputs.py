"""How time and memory grow with the number of outputs: heads of 10, 100 and 1,000 classes on the same bodies.

Run ``python benchmarks/outputs.py``. Every case runs in a process of its own, once per round. The table shows medians
over the rounds, with the smallest and the largest value, and ratios to the same case with 10 classes of the same
round. Weights are random, so that no direction is dropped. laplace-torch runs in the peers' environment, which
``benchmarks/make_environment.py`` makes; ``--peers`` includes it. Linux only (memory from /proc).
"""

from __future__ import annotations

import argparse
import json
import os
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
PEERS = ("laplace-torch last layer KFAC", "laplace-torch all weights KFAC")
QUANTITIES = ("fit", "prediction", "tuning", "memory")


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


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(case: str, body: str, num_outputs: int, num_inputs: int, dim: int, threads: int) -> dict[str, float]:
    """Seconds of fit, prediction and tuning of one case, and its peak memory without P and the parameters, in MB."""
    import torch

    torch.set_num_threads(threads)
    model, shape = network(body, num_outputs)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_inputs, *shape, generator=generator)
    labels = torch.randint(0, num_outputs, (num_inputs,), generator=generator)
    batches = [(inputs[i : i + 100], labels[i : i + 100]) for i in range(0, num_inputs, 100)]
    few = batches[: max(1, len(batches) // 10)]
    parameters = sum(p.numel() for p in model.parameters())
    before = memory("VmRSS")
    if case in PEERS:
        from laplace import Laplace
        from torch.utils.data import DataLoader, TensorDataset

        subset = "last_layer" if "last layer" in case else "all"
        loader = DataLoader(TensorDataset(inputs, labels), 100)
        la = Laplace(model, "classification", subset, "kron", prior_precision=PRIOR_PRECISION)
        fit = seconds(lambda: la.fit(loader))
        prediction = seconds(lambda: [la(x) for x, _ in few])
        return {"fit": fit, "prediction": prediction, "memory": memory("VmHWM") - before}
    from sublaplace import Resources, SubspaceLaplace

    resources = Resources(curvature_samples="all") if "all directions" in case else None
    options: dict[str, Any] = {"prior_precision": PRIOR_PRECISION, "resources": resources}
    if case == "last layer":
        ours = SubspaceLaplace(model, "classification", projector="last-layer", **options)
    elif case == "paper":
        ours = SubspaceLaplace.paper(model, "classification", dim, **options)
    else:
        ours = SubspaceLaplace(model, "classification", dim, **options)
    fit = seconds(lambda: ours.fit(batches))
    prediction = seconds(lambda: [ours(x) for x, _ in few])
    tuning = seconds(lambda: ours.tuned(few))
    vectors = {"paper": 1, "last layer": 0}.get(case, 2)
    kept = (vectors * dim + 1) * parameters * 4 / 2**20
    return {"fit": fit, "prediction": prediction, "tuning": tuning, "memory": memory("VmHWM") - before - kept}


def run_apart(python: Path | str, arguments: list[str], limit: float) -> dict[str, float] | str:
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
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


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
    parser.add_argument("--case", nargs=6, help="for the processes of the cases")
    given = parser.parse_args()
    if given.case:
        case, body, *numbers = given.case
        print(json.dumps(measure(case, body, *map(int, numbers))))
        return
    peers = HERE / ".venv-peers" / "bin" / "python"
    cases = [(sys.executable, case) for case in given.cases]
    if given.peers:
        cases += [(str(peers), case) for case in PEERS]
    results: dict[tuple[str, str, int], list[dict[str, float]]] = {}
    failures: dict[tuple[str, str, int], str] = {}
    for _ in range(given.rounds):
        for body in given.bodies:
            for python, case in cases:
                for head in given.heads:
                    numbers = [str(n) for n in (head, given.inputs, given.dim, given.threads)]
                    found = run_apart(python, [case, body, *numbers], given.limit)
                    if isinstance(found, str):
                        failures[body, case, head] = found
                    else:
                        results.setdefault((body, case, head), []).append(found)
                    print(body, case, head, found, file=sys.stderr, flush=True)
    print("| body | case | classes | quantity | median (range) | over the smallest head, in each round |")
    print("|---|---|---|---|---|---|")
    for (body, case, head), rounds in results.items():
        least = results.get((body, case, given.heads[0]), [])
        for quantity in QUANTITIES:
            if quantity in rounds[0]:
                values = [found[quantity] for found in rounds]
                pairs = zip(values, [found[quantity] for found in least], strict=False)
                ratios = [value / other for value, other in pairs if other > 0]
                unit = "MB" if quantity == "memory" else "s"
                compared = spread(ratios) if ratios else "–"
                print(f"| {body} | {case} | {head:,} | {quantity} | {spread(values)} {unit} | {compared} |")
    for (body, case, head), why in failures.items():
        print(f"| {body} | {case} | {head:,} | failed | {why} | – |")


if __name__ == "__main__":
    main()
