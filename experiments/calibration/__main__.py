"""The commands: `python -m experiments.calibration run`, then `report`."""

import argparse
import time
from pathlib import Path

import torch

from experiments.calibration.methods import BY_NAME, METHODS
from experiments.calibration.registry import all_sets
from experiments.calibration.run import run_set
from experiments.calibration.table import CalibrationTable

RESULTS = Path(__file__).resolve().parents[2] / "results" / "calibration.csv"


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the arguments name."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.calibration", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run methods on data sets; continues where it was stopped")
    run.add_argument("--sets", nargs="+", default=[], help="only these data sets")
    run.add_argument("--methods", nargs="+", default=[], help="only these methods")
    run.add_argument("--splits", type=int, default=5, help="how many splits")
    run.add_argument("--kind", choices=["development", "report", "strong"], default="development")
    run.add_argument("--again", action="store_true", help="run also what is in the table; the new line counts")
    run.set_defaults(command=_run)
    report = commands.add_parser("report", help="write the tables and the picture from the results")
    report.add_argument("--output", type=Path, default=RESULTS.parent)
    report.set_defaults(command=_report)
    return parser


def _run(options: argparse.Namespace) -> None:
    sets = all_sets()
    if unknown := [name for name in options.sets if name not in sets]:
        raise SystemExit(f"error: unknown data set '{unknown[0]}'; choose of {', '.join(sets)}.")
    if unknown := [name for name in options.methods if name not in BY_NAME]:
        raise SystemExit(f"error: unknown method '{unknown[0]}'; choose of {', '.join(BY_NAME)}.")
    methods = [method for method in METHODS if not options.methods or method.name in options.methods]
    table = CalibrationTable(options.results)
    for name, each in sets.items():
        if each.kind != options.kind or (options.sets and name not in options.sets):
            continue
        start = time.monotonic()
        splits = range(min(options.splits, each.most_splits))
        added = run_set(name, each.kind, each.load, splits, methods, table, options.again, _say)
        _say(f"{name}: {added} lines in {time.monotonic() - start:.0f} s")


def _say(text: str) -> None:
    print(text, flush=True)


def _report(options: argparse.Namespace) -> None:
    from experiments.calibration.report import write_report

    write_report(CalibrationTable(options.results), options.output)


if __name__ == "__main__":
    main()
