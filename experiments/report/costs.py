"""The costs of the methods, next to the paper's figures."""

import csv
from pathlib import Path

from experiments.methods import NEEDED_CURVATURE
from experiments.report.document import Table
from experiments.report.numbers import (
    NOTHING,
    Estimate,
    Measurements,
    Published,
    bayesian_parameters,
    number,
    with_error,
)

PAPER_IMAGES = 13_000  # of ImageNet10 in the paper, about
GROWING = (*NEEDED_CURVATURE, "subset-swag")  # projectors whose time grows with the training data


def of_methods(measurements: Measurements) -> Table:
    """Return seconds and memory of P (or of a posterior without P), and seconds of the posterior in the subspace."""
    frame = measurements.rows[~measurements.rows["dataset"].str.contains("/")].dropna(subset=["seconds"])
    rows = []
    groups = list(frame.groupby(["dataset", "method"], sort=False))
    for (dataset, method), group in sorted(groups, key=lambda group: measurements.datasets.index(group[0][0])):
        jobs = group.drop_duplicates("seed")
        memory = Estimate.of(jobs["peak_memory_mb"].tolist())
        fits = group.loc[group["metric"] == "posterior_seconds", "value"].tolist()
        fit = with_error(Estimate.of(fits)) if fits else NOTHING
        seconds = with_error(Estimate.of(jobs["seconds"].tolist()))
        rows.append([dataset, method, str(group["s"].max()), seconds, fit, with_error(memory), str(len(jobs))])
    header = [
        "data set",
        "method",
        "largest s",
        "seconds for P",
        "seconds for the posterior",
        "peak memory, MB",
        "seeds",
    ]
    return Table("Cost, mean over seeds", header, rows, labels=2)


def ratios(measurements: Measurements, published: Published) -> Table:
    """Return the time for P relative to lowrank-kfac: ratios can be compared between machines."""
    frame = measurements.rows.dropna(subset=["seconds"])
    seconds = frame.drop_duplicates(["dataset", "method", "seed"]).groupby(["dataset", "method"])["seconds"].mean()
    datasets = [d for d in measurements.datasets if "/" not in d and (d, "lowrank-kfac") in seconds.index]
    reference = published.quote("compute_time", "imagenet10", "projector_minutes", "lowrank-kfac")
    assert reference is not None
    rows = []
    for projector in published.distinct("compute_time", "projector"):
        cells = [
            f"{seconds[d, projector] / seconds[d, 'lowrank-kfac']:.2g}" if (d, projector) in seconds.index else NOTHING
            for d in datasets
        ]
        minutes = published.quote("compute_time", "imagenet10", "projector_minutes", projector)
        bound = published.quote("compute_time", "imagenet10", "projector_minutes_below", projector)
        paper = number(minutes.mean / reference.mean, 2) if minutes else NOTHING
        if bound:
            paper = f"below {number(bound.mean / reference.mean, 2)}"
        rows.append([projector, *cells, paper])
    return Table("Time for P as a multiple of lowrank-kfac's", ["projector", *datasets, "paper, imagenet10"], rows)


def memory_load(published: Published) -> Table:
    """Return s(p + s) numbers of a low-rank method, from the p of our networks, next to the paper's."""
    table = "memory_load"
    rows = []
    for dataset in published.distinct(table, "dataset"):
        p = bayesian_parameters(dataset)
        for s in published.dims(table, dataset):
            paper = published.quote(table, dataset, "memory_numbers", "lowrank", s)
            assert paper is not None
            ours = float(s * (p + s))
            difference = f"{100 * (ours / paper.mean - 1):+.2f} %".replace("-", "−")
            rows.append([dataset, str(s), f"{ours:.3e}", f"{paper.mean:.3e}", difference])
    return Table("Numbers to be stored, s(p + s)", ["data set", "s", "ours", "paper", "difference"], rows)


def large_fits(path: Path, published: Published) -> Table:
    """Return seconds and memory of ResNets (results/scale.csv), next to the paper's minutes for P on an A100."""
    rows = []
    for row in csv.DictReader(path.open()):
        seconds, images = float(row["projector_seconds"]), int(row["num_data"])
        cells = [f"{row['network']}, {row['projector']}", row["dim"], row["num_subspace_inputs"], row["num_data"]]
        cells += [row["threads"], number(seconds, 0), number(1000 * seconds / images, 0)]
        grows = row["projector"] in GROWING
        cells += [number(seconds / images * PAPER_IMAGES / 60, 0) if grows else NOTHING, _paper_minutes(published, row)]
        cells += [
            number(float(row["posterior_seconds"]), 0) if row["posterior_seconds"] else NOTHING,
            number(float(row["peak_mb"]) / 1024, 2),
        ]
        numbers = int(row["dim"]) * (int(row["parameters"]) + int(row["dim"]))
        cells.append(f"{numbers:.3e}" if row["projector"].startswith("lowrank") else NOTHING)
        rows.append(cells)
    caption = (
        f"Large fits with random weights. The time for {PAPER_IMAGES:,} images is extrapolated where P needs a pass "
        "over them, as if all of it grew with them (the share of X′ does not); the paper's minutes are those of an "
        "A100 for about as many"
    )
    header = ["network, projector", "s", "n", "N", "threads", "seconds for P", "ms an image"]
    header += [f"minutes for {PAPER_IMAGES:,} images", "paper, minutes", "seconds for the posterior", "peak, GB"]
    return Table(caption, [*header, "s(p + s)"], rows)


def _paper_minutes(published: Published, row: dict[str, str]) -> str:
    if row["network"] != "resnet18":
        return NOTHING
    minutes = published.quote("compute_time", "imagenet10", "projector_minutes", row["projector"])
    bound = published.quote("compute_time", "imagenet10", "projector_minutes_below", row["projector"])
    return number(minutes.mean, 0) if minutes else f"below {number(bound.mean, 0)}" if bound else NOTHING
