"""Large networks, whose full posterior is out of reach: traces, and certified shares of the full trace."""

from collections.abc import Sequence

from experiments.recipes import RECIPES
from experiments.report.checks import PAPER_PROJECTORS
from experiments.report.document import Strong, Table
from experiments.report.numbers import NOTHING, Measurements, Published, number, with_error
from experiments.report.tables import NOT_RUN, seeds_of
from experiments.seed_run import CERTIFIED

SETS = ("cifar10", "imagenet10", "imagenet10-efficientnet", "imagenet10-finetuned")
METHODS = (*PAPER_PROJECTORS, "lowrank-isotropic")


def cut(dataset: str, published: Published) -> str:
    """Return what was cut to save time, in parentheses; empty for sets that were run as published."""
    recipe = RECIPES[dataset]
    epochs = published.quote("training", dataset, "epochs")
    cuts = []
    if recipe.large and epochs is not None and recipe.training.epochs < epochs.mean:
        cuts.append(f"{recipe.training.epochs} of the published {epochs.mean:.0f} epochs")
    if recipe.num_scored is not None:
        cuts.append(f"{recipe.num_scored:,} test inputs")
    return f" (ours: {', '.join(cuts)})" if cuts else ""


def traces(measurements: Measurements, dataset: str) -> Table:
    """Return the log-trace for every s, the largest in bold, and the order of the methods."""
    methods = [m for m in METHODS if measurements.dims(dataset, m, "log_trace")]
    rows = []
    for s in sorted({s for m in methods for s in measurements.dims(dataset, m, "log_trace")}):
        found = {m: measurements.estimate(dataset, m, "log_trace", s) for m in methods}
        known = {m: estimate for m, estimate in found.items() if estimate is not None}
        order = sorted(known, key=lambda m: -known[m].mean)
        cells = [Strong(with_error(e)) if order[:1] == [m] else with_error(e) for m, e in found.items()]
        rows.append([str(s), " > ".join(order), *cells, seeds_of(list(found.values()))])
    fixed = {m: measurements.estimate(dataset, m, "log_trace") for m in ("last-layer", "kfac")}
    beside = [f"{m} {with_error(estimate)}" for m, estimate in fixed.items() if estimate is not None]
    missing = [m for m in (*METHODS, *fixed) if m not in methods and fixed.get(m) is None]
    caption = f"{dataset}: log-trace" + (f"; without a choice of s: {', '.join(beside)}" if beside else "")
    caption += f"; {NOT_RUN}: {', '.join(missing)}" if missing else ""
    return Table(caption, ["s", "order", *methods, "seeds"], rows, labels=2)


def certified_shares(measurements: Measurements, datasets: Sequence[str]) -> Table:
    """Return the limits between which the captured share of the full posterior's trace must lie."""
    rows = []
    for dataset in datasets:
        for s in measurements.all_dims(dataset, CERTIFIED):
            least, most = (
                measurements.estimate(dataset, CERTIFIED, f"captured_at_{end}", s) for end in ("least", "most")
            )
            cells = [NOTHING if e is None else f"{number(100 * e.mean)} %" for e in (least, most)]
            rows.append([dataset, str(s), *cells, seeds_of([least, most])])
    caption = "Share of the full posterior's trace that lowrank-kfac captures, on the drawn test inputs"
    return Table(caption, ["data set", "s", "at least", "at most", "seeds"], rows)


def accuracies(measurements: Measurements, datasets: Sequence[str]) -> Table:
    """Return how good the networks are; the cost of their subspaces is in the table of all costs."""
    rows = []
    for dataset in datasets:
        accuracy = measurements.estimate(dataset, "map", "accuracy")
        share = NOTHING if accuracy is None else f"{number(100 * accuracy.mean, 1)} %"
        rows.append([dataset, share, seeds_of([accuracy])])
    return Table("Accuracy of the plain networks", ["data set", "accuracy", "seeds"], rows)
