"""How far the reduced posterior is from what cannot be avoided, and how it grows with the data.

Unavoidable are the forward and backward passes (timed alone, on the same chunks) and the multiplications of the rows
and
of J P (counted, over this machine's best rate, measured in the same run). Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from cases_ours import curvature_stream
from measure import memory, release_memory
from networks import NETWORKS, build, fashion_mnist
from protocol import NUM_SUBSPACE_INPUTS, NUM_THREADS, PRIOR_PRECISION, SUBSPACE_DIMENSION

from sublaplace import Jacobians, OuterBlock, low_rank
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.reduced import reduced_ggn
from sublaplace.curvature.stream import CurvatureStream


def duration(run: Callable[[], Any], repetitions: int) -> float:
    """The median of several runs after a warm-up."""
    run()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def best_rate(size: int = 2048) -> float:
    """float32 multiplications a second of a large matrix product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return size**3 / min(duration(lambda: a @ b, 3) for _ in range(3))


def passes_alone(stream: CurvatureStream) -> None:
    """Forward and backward passes of the stream, and nothing built from them."""
    for _ in stream.jacobians("passes"):
        pass


def multiplications(stream: CurvatureStream, dim: int) -> int:
    """Of the rows and of J P, over all data."""
    total = 0
    for jacobian in stream.jacobians("counting"):
        rows = jacobian.num_inputs * jacobian.num_rows
        for block in jacobian.blocks.values():
            positions = block.positions if isinstance(block, OuterBlock) else 1
            factored = isinstance(block, OuterBlock) and block.positions == 1
            total += rows * block.size * (0 if factored else positions)
            total += (jacobian.num_inputs if factored else rows) * block.size * dim
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=list(NETWORKS), default="paper-cnn")
    parser.add_argument("--weights", choices=["random", "trained"], default="random")
    parser.add_argument("--inputs", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    network = build(arguments.network, arguments.weights).eval()
    inputs, targets = (tensor[: max(arguments.inputs)].clone() for tensor in fashion_mnist("train"))
    fitted = curvature_stream(network, inputs[:NUM_SUBSPACE_INPUTS], targets[:NUM_SUBSPACE_INPUTS])
    precision = kronecker_ggn(fitted, PRIOR_PRECISION)
    jacobians = Jacobians(fitted.linearization, inputs[:NUM_SUBSPACE_INPUTS])
    projection = low_rank(jacobians, precision, SUBSPACE_DIMENSION)
    first = curvature_stream(network, inputs[: arguments.inputs[0]], targets[: arguments.inputs[0]])
    result: dict[str, Any] = {
        "network": arguments.network,
        "weights": arguments.weights,
        "inputs": arguments.inputs[0],
        "seconds_posterior": duration(lambda: reduced_ggn(first, projection), arguments.repetitions),
        "seconds_passes": duration(lambda: passes_alone(first), arguments.repetitions),
        "seconds_multiplications": multiplications(first, SUBSPACE_DIMENSION) / best_rate(),
        "growth": [],
    }
    for count in arguments.inputs:
        release_memory()
        before = memory("VmRSS")
        stream = curvature_stream(network, inputs[:count], targets[:count])
        start = time.perf_counter()
        reduced_ggn(stream, projection)
        seconds = time.perf_counter() - start
        result["growth"].append({"inputs": count, "seconds": seconds, "peak_memory_mb": memory("VmHWM") - before})
    result["max_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result))


if __name__ == "__main__":
    main()
