"""Large networks, whose full posterior is out of reach: traces, and what of the full one is certain."""

from collections.abc import Sequence

from experiments.report.checks import PAPER_PROJECTORS
from experiments.report.document import Strong, Table
from experiments.report.numbers import NOTHING, Measurements, number, with_error
from experiments.report.tables import seeds_of
from experiments.runs import CERTIFIED

SETS = ("cifar10", "imagenet10", "imagenet10-efficientnet", "imagenet10-finetuned")
METHODS = (*PAPER_PROJECTORS, "lowrank-isotropic")


def traces(measurements: Measurements, dataset: str) -> Table:
    """log-trace for every s, the largest in bold, and the order of the methods."""
    methods = [m for m in METHODS if measurements.dims(dataset, m, "log_trace")]
    rows = []
    for s in sorted({s for m in methods for s in measurements.dims(dataset, m, "log_trace")}):
        found = {m: measurements.estimate(dataset, m, "log_trace", s) for m in methods}
        known = {m: estimate for m, estimate in found.items() if estimate is not None}
        order = sorted(known, key=lambda m: -known[m].mean)
        cells = [Strong(with_error(e)) if order[:1] == [m] else with_error(e) for m, e in found.items()]
        rows.append([str(s), *cells, " > ".join(order), seeds_of(list(found.values()))])
    return Table(f"{dataset}: log-trace", ["s", *methods, "order", "seeds"], rows)


def certified_shares(measurements: Measurements, datasets: Sequence[str]) -> Table:
    """Between which limits the captured share of the full posterior's trace must lie."""
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


def facts(measurements: Measurements, datasets: Sequence[str]) -> Table:
    """Accuracy of the networks, and what their largest subspaces cost."""
    rows = []
    frame = measurements.rows.dropna(subset=["seconds"])
    for dataset in datasets:
        accuracy = measurements.estimate(dataset, "map", "accuracy")
        jobs = frame[(frame["dataset"] == dataset) & frame["method"].isin((*METHODS, "last-layer", "kfac"))]
        for method in dict.fromkeys(jobs["method"]):
            job = jobs[jobs["method"] == method]
            posterior = job.loc[job["metric"] == "posterior_seconds", "value"]
            rows.append(
                [
                    dataset,
                    NOTHING if accuracy is None else f"{number(100 * accuracy.mean, 1)} %",
                    method,
                    str(int(job["s"].max())),
                    number(job["seconds"].mean(), 0),
                    number(posterior.mean() if len(posterior) else None, 0),
                    number(job["peak_memory_mb"].mean(), 0),
                ]
            )
    header = ["data set", "accuracy", "method", "s", "projector, s", "posterior, s", "peak memory, MB"]
    caption = "Processor seconds and memory of the projector (of the posterior for kfac) and of the posterior in it"
    return Table(caption, header, rows, labels=3)
