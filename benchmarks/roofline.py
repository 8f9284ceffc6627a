"""Compare our passes over data with their unavoidable parts, on networks of three sizes.

Unavoidable are the forward and backward passes, timed alone on the same chunks, the multiplications that follow,
counted and divided by this machine's best rate, and KFAC's eigendecompositions, timed alone. All of it is measured in
one process. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from cases_ours import curvature_stream
from measure import memory, release_memory
from networks import NETWORKS, build, data_for
from protocol import NUM_THREADS, PRIOR_PRECISION, SUBSPACE_DIMENSION
from torch import Tensor

from sublaplace import Basis, BlockPrecision, CurvatureStream, Jacobian, Linearization, OuterBlock, SubspacePosterior
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.reduced import reduced_ggn
from sublaplace.jacobians.blocks import Block

GROWTH = (1000, 4000, 16000)
"""Inputs of the table that shows how a pass grows with the data."""


def duration(run: Callable[[], Any], repetitions: int) -> float:
    """Return the median of several runs after a warm-up; of one run without a warm-up for none."""
    times = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times)


def best_rate(size: int = 2048) -> float:
    """Return the float32 multiplications per second of a large matrix product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return size**3 / min(duration(lambda: a @ b, 3) for _ in range(3))


def exhausted(jacobians: Iterable[Jacobian]) -> None:
    """Run the passes, and build nothing from them."""
    for _ in jacobians:
        pass


def of_rows(block: Block, num_rows: int, num_inputs: int) -> int:
    """Return the multiplications that form the rows of a block."""
    positions = block.positions if isinstance(block, OuterBlock) else 1
    return num_inputs * num_rows * block.size * (positions if positions > 1 else 0)


def of_products(jacobian: Jacobian, dim: int) -> int:
    """Return the multiplications of J P: those that form the rows, and those with P."""
    n, K = jacobian.num_inputs, jacobian.num_rows
    total = 0
    for block in jacobian.blocks.values():
        factored = isinstance(block, OuterBlock) and block.positions == 1
        total += of_rows(block, K, n) + (n if factored else n * K) * block.size * dim
    return total


def of_moments(jacobian: Jacobian) -> int:
    """Return the multiplications of Σ aaᵀ and Σ ggᵀ, of which half the entries are enough."""
    total = 0
    for block in jacobian.blocks.values():
        if isinstance(block, OuterBlock):
            inputs, gradients, T = block.fan_in, block.fan_out, block.positions * block.groups
            a = 0 if jacobian.repeats_inputs else inputs * (inputs + 1) // 2
            total += jacobian.num_inputs * T * (a + jacobian.num_rows * gradients * (gradients + 1) // 2)
    return total


def of_rotated_rows(jacobian: Jacobian) -> int:
    """Return the multiplications of the rows in KFAC's eigenbasis, each side turned where that costs less."""
    n, K = jacobian.num_inputs, jacobian.num_rows
    total = 0
    for block in jacobian.blocks.values():
        if not isinstance(block, OuterBlock):
            continue
        I, O, T, G = block.fan_in, block.fan_out, block.positions, block.groups
        turned = G * (I**2 * min(T, K * O) + K * O**2 * min(T, I))
        total += n * turned + of_rows(block, K, n)
    return total


def decompositions(precision: BlockPrecision) -> None:
    """Decompose matrices of the sizes of KFAC's factors."""
    sizes = [
        side.shape[1]
        for part in precision.parts.values()
        for side in (getattr(part, "input_values", None), getattr(part, "output_values", None))
        if isinstance(side, Tensor)
    ]
    for size in sizes:
        matrix = torch.rand(size, size, dtype=torch.float64)
        torch.linalg.eigh(matrix @ matrix.T)


def random_basis(linearization: Linearization, dim: int) -> Basis:
    """Return a P for timing alone."""
    like = torch.empty(0, dtype=linearization.dtype)
    vectors = linearization.layout.zeros(dim, like)
    for part in vectors.values():
        part.normal_()
    return Basis(linearization.layout, vectors)


def comparison(case: str, count: int, whole: float, passes: float, rest: dict[str, float]) -> dict[str, Any]:
    """Return one line of the table, in seconds."""
    return {"case": case, "inputs": count, "seconds": whole, "passes": passes, **rest}


def comparisons(network: str, weights: str, counts: tuple[int, int], repetitions: int) -> list[dict[str, Any]]:
    """Compare the reduced posterior and KFAC on some inputs, and predictions on others, with what is unavoidable."""
    model = build(network, weights).eval()
    num_fit, num_predicted = counts
    inputs, targets = data_for(network, max(counts))
    stream = curvature_stream(model, inputs[:num_fit], targets[:num_fit])
    linearization, rate = stream.linearization, best_rate()
    precision = kronecker_ggn(stream, PRIOR_PRECISION)
    projection = random_basis(linearization, SUBSPACE_DIMENSION)
    reduced = reduced_ggn(stream, projection)
    posterior = SubspacePosterior(projection, reduced, projection.gram(), (1.0,), PRIOR_PRECISION)
    new = inputs[:num_predicted]

    def fit(case: str, run: Callable[[], Any], work: Callable[[Jacobian], int], **rest: float) -> dict[str, Any]:
        kind = {"every_input": True, "row_by_row": True, "sampled": True} if case == "KFAC fit" else {}
        visits = _Visits(work)
        stream.accumulate(case, visits, resumable=False, **kind)  # type: ignore[arg-type]
        passes = duration(lambda: stream.accumulate(case, _Visits(), resumable=False, **kind), repetitions)  # type: ignore[arg-type]
        return comparison(
            case, num_fit, duration(run, repetitions), passes, {"multiplications": visits.total / rate, **rest}
        )

    def prediction(
        case: str, variance: Callable[[Jacobian], Tensor], work: Callable[[Jacobian], int]
    ) -> dict[str, Any]:
        total = sum(work(jacobian) for jacobian in linearization.chunks(new))
        passes = duration(lambda: exhausted(linearization.chunks(new)), repetitions)
        whole = duration(lambda: [variance(jacobian) for jacobian in linearization.chunks(new)], repetitions)
        return comparison(case, num_predicted, whole, passes, {"multiplications": total / rate})

    return [
        fit("reduced posterior", lambda: reduced_ggn(stream, projection), lambda j: of_products(j, SUBSPACE_DIMENSION)),
        fit(
            "KFAC fit",
            lambda: kronecker_ggn(stream, PRIOR_PRECISION),
            of_moments,
            decompositions=duration(lambda: decompositions(precision), repetitions),
        ),
        prediction("prediction, subspace", posterior.variance, lambda j: of_products(j, SUBSPACE_DIMENSION)),
        prediction("prediction, KFAC", precision.variance, of_rotated_rows),
    ]


class _Visits:
    """Sums that only count the work on each Jacobian."""

    def __init__(self, work: Callable[[Jacobian], int] = lambda _: 0) -> None:
        self.work, self.total = work, 0

    def add(self, jacobian: Jacobian) -> None:
        self.total += self.work(jacobian)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        raise NotImplementedError("A benchmark is not resumed.")


def growth(network: str, weights: str) -> list[dict[str, Any]]:
    """Return seconds and peak memory of the reduced posterior for more and more data."""
    model = build(network, weights).eval()
    inputs, targets = data_for(network, max(GROWTH))
    found = []
    for count in GROWTH:
        stream: CurvatureStream = curvature_stream(model, inputs[:count], targets[:count])
        projection = random_basis(stream.linearization, SUBSPACE_DIMENSION)
        release_memory()
        before = memory("VmRSS")
        seconds = duration(lambda: reduced_ggn(stream, projection), 0)  # noqa: B023  # called at once
        found.append({"inputs": count, "seconds": seconds, "peak_memory_mb": memory("VmHWM") - before})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=list(NETWORKS), default="paper-cnn")
    parser.add_argument("--weights", choices=["random", "trained"], default="random")
    parser.add_argument("--inputs", type=int, nargs=2, default=(1000, 300), help="of fits, and of predictions")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--growth", action="store_true", help="instead: how the reduced posterior grows with the data")
    given = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    if given.growth:
        found: Any = growth(given.network, given.weights)
    else:
        with torch.no_grad():
            found = comparisons(given.network, given.weights, tuple(given.inputs), given.repetitions)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
