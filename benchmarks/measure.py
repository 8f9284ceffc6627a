"""Measure one case in this process and print the result as one line of JSON. Linux only (memory from /proc).

A probe on a few inputs warms up and foretells the duration. A case that would take longer than MAXIMUM_SECONDS
is measured on the probe's inputs only; its seconds are scaled to all inputs, and the result is marked as
extrapolated. That is done only where the cost is proportional to the inputs, so never with a projector.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from networks import NETWORKS, build, data_for
from protocol import NUM_SUBSPACE_INPUTS, NUM_THREADS, Setup
from torch import Tensor, nn

MAXIMUM_SECONDS = 120.0
REPETITION_SECONDS = 6.0  # repeat until this much time is used up, or the repetitions asked for are done
MEMORY_LIMIT = 16 * 2**30  # bytes of address space: running out of memory is then an error, not a crash


def find_case(name: str, batch_size: int | None) -> tuple[Setup, int | None]:
    """The setup and the batch size of the named case; ours choose their own, which is not known here."""
    if name.startswith("sublaplace/"):
        import cases_ours

        return cases_ours.CASES[name], None
    import cases_peers

    if batch_size is None:
        return cases_peers.CASES[name], cases_peers.BATCH_SIZES[name]
    return cases_peers.cases(defaultdict(lambda: batch_size))[name], batch_size


def memory(field: str) -> float:
    """VmRSS (resident memory now) or VmHWM (its peak) of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def release_memory() -> None:
    """Return freed memory to the system and let the peak start anew from what is left."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def busy_seconds() -> float:
    """Processor seconds of the whole machine since it started, all cores together."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
"""What seconds are; those of the processor, with one thread, are for machines that other work disturbs."""


def duration(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def measure(
    setup: Setup,
    network: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    repetitions: int,
    proportional: bool,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Seconds of each repetition for all inputs, cores that other work took meanwhile, and added peak memory."""
    release_memory()
    baseline = memory("VmRSS")

    def prepared(count: int) -> Callable[[], Any]:
        return setup(copy.deepcopy(network), inputs[:count], targets[:count])

    probe_size = min(NUM_SUBSPACE_INPUTS, len(inputs))
    probe = prepared(probe_size)
    foretold = duration(probe, clock) / probe_size * len(inputs)
    del probe
    extrapolated = proportional and foretold > MAXIMUM_SECONDS
    count = probe_size if extrapolated else len(inputs)
    run = prepared(count)
    release_memory()
    if foretold < REPETITION_SECONDS:
        run()
    others = busy_seconds() - time.process_time()
    start = time.perf_counter()
    seconds: list[float] = []
    while not seconds or (len(seconds) < repetitions and sum(seconds) < REPETITION_SECONDS):
        seconds.append(duration(run, clock) / count * len(inputs))
    others = busy_seconds() - time.process_time() - others
    return {
        "seconds": seconds,
        "other_cores": max(others, 0.0) / (time.perf_counter() - start),
        "extrapolated": extrapolated,
        "measured_inputs": count,
        "peak_memory_mb": memory("VmHWM") - baseline,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--network", choices=list(NETWORKS), default="peers-cnn")
    parser.add_argument("--weights", choices=["random", "trained"], default="random")
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--batch-size", type=int, help="instead of the peer's best")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    arguments = parser.parse_args()

    torch.set_num_threads(1 if arguments.clock == "processor" else NUM_THREADS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    network = build(arguments.network, arguments.weights).eval()
    inputs, targets = data_for(arguments.network, arguments.inputs)
    result = vars(arguments)
    try:
        setup, result["batch_size"] = find_case(arguments.case, arguments.batch_size)
        proportional = not any(part in arguments.case for part in ("projector", "default", "tuning"))
        result |= measure(setup, network, inputs, targets, arguments.repetitions, proportional, CLOCKS[arguments.clock])
    except Exception as error:  # a peer's refusal is a result too, whatever its type
        result["error"] = f"{type(error).__name__}: {error}"
    json.dump(result, sys.stdout)
    print()


if __name__ == "__main__":
    main()
