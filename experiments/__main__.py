"""The command line of the experiments: ``python -m experiments list | train | run | scale | report``."""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from experiments import datasets
from experiments.networks import NETWORKS, num_parameters
from experiments.recipes import RECIPES, Recipe
from experiments.training import WEIGHTS, held_out, is_trained, trained_network

COMPUTED = WEIGHTS.parent
RESULTS = Path(__file__).resolve().parent.parent / "results" / "results.csv"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        options.command(options)
    except datasets.DataFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on from here.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description="The paper's experiments.")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "1")))
    commands = parser.add_subparsers(required=True)

    listing = commands.add_parser("list", help="data sets, networks, and what has been done")
    listing.add_argument("--results", type=Path, default=RESULTS)
    listing.set_defaults(command=_list)

    train = commands.add_parser("train", help="train networks; those that are trained are left alone")
    _add_what(train, nargs="+")
    train.add_argument("--held-out", action="store_true", help="without the data that the temperature is fitted on")
    train.set_defaults(command=_train)

    run = commands.add_parser("run", help="run the experiments; what is in the results is not done again")
    _add_what(run, nargs="*")
    run.add_argument("--results", type=Path, default=RESULTS)
    run.add_argument("--methods", nargs="+", default=(), help="only these, by their names in the results")
    run.add_argument("--smoke", action="store_true", help="tiny cuts of two data sets, into a temporary file")
    run.set_defaults(command=_run)

    scale = commands.add_parser("scale", help="seconds and memory of large networks; give --threads before it")
    scale.add_argument("case", nargs="*", help="of results/scale.csv; all if none is named")
    scale.set_defaults(command=_scale)

    report = commands.add_parser("report", help="tables and figures from the results")
    report.add_argument("--results", type=Path, default=RESULTS)
    report.add_argument("--output", type=Path, default=RESULTS.parent)
    report.set_defaults(command=_report)
    return parser


def _add_what(parser: argparse.ArgumentParser, nargs: str) -> None:
    parser.add_argument("dataset", nargs=nargs, help=f"of {', '.join(RECIPES)}; or all", metavar="dataset")
    parser.add_argument("--seeds", type=int, help="how many (default: 5, of large networks 1)")
    parser.add_argument("--first-seed", type=int, default=0)


def _checked_names(options: argparse.Namespace) -> list[str]:
    everything = [name for name, recipe in RECIPES.items() if recipe.num_seeds]
    names = everything if options.dataset == ["all"] else list(options.dataset)
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise SystemExit(f"error: unknown data set '{unknown[0]}'; choose of {', '.join(RECIPES)}, or all.")
    return names


def _seeds(options: argparse.Namespace, recipe: Recipe) -> range:
    count = max(recipe.num_seeds, 1) if options.seeds is None else options.seeds
    return range(options.first_seed, options.first_seed + count)


def _list(options: argparse.Namespace) -> None:
    from experiments.results import Results

    done = Results(options.results).done() if options.results.exists() else set()
    columns = f"{'p':>10}  {'n':>5}  {'s up to':>7}  {'λ':>6}"
    print(f"{'data set':<25}{'network':<20}{columns}  trained seeds    jobs done")
    for name, recipe in RECIPES.items():
        seeds = range(10) if recipe.training.epochs else range(1)
        trained = [str(seed) for seed in seeds if is_trained(recipe, seed)]
        jobs = sum(job.dataset == name or job.dataset.startswith(f"{name}-c/") for job in done)
        facts = f"{name:<25}{recipe.network:<20}{_size(recipe):>10}  {recipe.num_inputs:>5}  {recipe.largest_dim:>7}"
        print(f"{facts}  {recipe.prior_precision:>6}  {' '.join(trained) or '–':<15}  {jobs}")


def _size(recipe: Recipe) -> str:
    """Return p as text, or a dash if the network cannot be built: some need files or packages that may be missing."""
    try:
        return f"{num_parameters(NETWORKS[recipe.network]()):,}"
    except (FileNotFoundError, ImportError):
        return "–"


def _train(options: argparse.Namespace) -> None:
    for name in _checked_names(options):
        recipe, dataset = RECIPES[name], datasets.load(name)
        if options.held_out:
            dataset, _, _ = held_out(dataset)
            recipe = replace(recipe, dataset=dataset.name)
        for seed in _seeds(options, recipe):
            trained_network(recipe, dataset, seed)


def _run(options: argparse.Namespace) -> None:
    from experiments import runs, seed_run
    from experiments.results import Results
    from experiments.scored_sets import corruptions_of

    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            count = runs.smoke(Results(Path(folder) / "results.csv"), Path(folder))
            print(f"{count} results, thrown away: the experiments run.")
        return
    if not options.dataset:
        raise SystemExit("error: name the data sets to run, or give --smoke.")
    if unknown := [method for method in options.methods if method not in seed_run.METHODS]:
        raise SystemExit(f"error: unknown method '{unknown[0]}'; choose of {', '.join(seed_run.METHODS)}.")
    for name in _checked_names(options):
        recipe, results = RECIPES[name], Results(options.results)
        seeds, corruptions = _seeds(options, recipe), corruptions_of(recipe)
        runs.run(recipe, datasets.load(name), seeds, results, COMPUTED, corruptions, options.methods)


def _scale(options: argparse.Namespace) -> None:
    from experiments import scale

    scale.run(options.case, options.threads)


def _report(options: argparse.Namespace) -> None:
    from experiments.report import write_report

    write_report(options.results, options.output)


if __name__ == "__main__":
    sys.exit(main())
