"""Time and peak memory of each peer at growing batch sizes: the source of BATCH_SIZES in cases_peers.py.

A case's sweep ends early once a batch size takes twice the best time so far.
"""

from __future__ import annotations

import argparse
import math
import statistics

from make_environment import make_environment
from run import NETWORKS, WEIGHTS, description, measured, milliseconds, short

BATCH_SIZES = [1, 2, 5, 10, 25, 50, 100]
NUM_INPUTS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--network", choices=NETWORKS, default=NETWORKS[0])
    parser.add_argument("--weights", choices=WEIGHTS, default=WEIGHTS[0])
    arguments = parser.parse_args()
    python = make_environment()
    for case in description(python)["cases"]:
        if case.startswith("sublaplace/") or not any(part in case for part in arguments.only):
            continue
        best = math.inf
        for batch_size in BATCH_SIZES:
            one = measured(
                python,
                case,
                network=arguments.network,
                weights=arguments.weights,
                inputs=NUM_INPUTS,
                batch_size=batch_size,
            )
            if "error" in one:
                print(f"{case}, batch {batch_size}: {short(one['error'])}", flush=True)
                break
            time = statistics.median(milliseconds([one]))
            memory = one["peak_memory_mb"]
            print(f"{case}, batch {batch_size}: {time:.3g} ms an input, {memory:.0f} MB", flush=True)
            best = min(best, time)
            if time > 2 * best:
                break


if __name__ == "__main__":
    main()
