"""Where the time of one of our cases goes, by kind of operation. Prints one line of JSON.

Times are those of the operations themselves (without what they call), from torch's profiler, which slows small
operations down: shares are to be trusted to a few percent.
"""

from __future__ import annotations

import argparse
import json

import torch
from cases_ours import CASES
from networks import NETWORKS, build, fashion_mnist
from protocol import NUM_THREADS
from torch.profiler import ProfilerActivity, profile, record_function

WHOLE = "case"

# Kind of operation → parts of the names of its operations; the first kind that fits counts.
KINDS = {
    "convolutions": ("convolution",),
    "pooling and activations": ("max_pool", "threshold", "relu", "clamp_min", "fill_", "zero_"),
    "decompositions": ("eigh", "cholesky", "triangular"),
    "matrix products": ("mm", "matmul"),
    "copies": ("copy_", "cat", "clone"),
}
REST = "small operations and Python"


def kind(name: str) -> str:
    return next((one for one, parts in KINDS.items() if any(part in name for part in parts)), REST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--network", choices=list(NETWORKS), default="peers-cnn")
    parser.add_argument("--weights", choices=["random", "trained"], default="random")
    parser.add_argument("--inputs", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    inputs, targets = (tensor[: arguments.inputs].clone() for tensor in fashion_mnist("train"))
    run = CASES[arguments.case](build(arguments.network, arguments.weights).eval(), inputs, targets)
    run()
    with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function(WHOLE):
        run()
    times = dict.fromkeys([*KINDS, REST], 0.0)
    for event in profiled.key_averages():
        times[kind(event.key)] += event.self_cpu_time_total
    total = sum(times.values())
    print(json.dumps({one: time / total for one, time in times.items()}))


if __name__ == "__main__":
    main()
