"""Time and peak memory of each peer at several batch sizes: the source of BATCH_SIZES in cases_peers.py."""

from __future__ import annotations

import argparse
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
                outcome = short(one["error"])
            else:
                outcome = f"{statistics.median(milliseconds([one])):.3g} ms, {one['peak_memory_mb']:.0f} MB"
            print(f"{case}, batch {batch_size}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
