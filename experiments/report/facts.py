"""Facts about the networks next to the paper's: dead parameters, prior precision, ranks; and the names of both."""

import math

from experiments.report.checks import OPTIMUM
from experiments.report.document import Table
from experiments.report.numbers import NOTHING, Measurements, Published, number, signed, with_error
from experiments.report.tables import NOT_RUN, difference_cell, difference_of, seeds_of


def dead_parameters(measurements: Measurements, published: Published) -> Table:
    """Return the percentage of parameters to which no output is sensitive; ± as in the paper, standard deviations."""
    rows = []
    for dataset in published.distinct("dead_parameters", "dataset"):
        paper = published.quote("dead_parameters", dataset, "dead_percent")
        spread = published.quote("dead_parameters", dataset, "dead_percent_standard_deviation")
        assert paper is not None and spread is not None
        ours = measurements.estimate(dataset, "map", "dead_percent")
        cells = [NOTHING, f"{paper.mean:.0f} ± {spread.mean:.0f}", NOTHING, NOT_RUN]
        if ours is not None:
            deviation = (ours.standard_error or 0.0) * math.sqrt(ours.seeds)
            mean = number(ours.mean, 1)
            cells[0] = f"{mean} ± {number(deviation, 1)}" if ours.seeds > 1 else mean
            cells[2:] = [signed(ours.mean - paper.mean, 1), str(ours.seeds)]
        rows.append([dataset, *cells])
    header = ["data set", "ours, %", "paper, %", "difference", "seeds"]
    return Table("Dead parameters: mean ± standard deviation over seeds", header, rows)


def prior_precisions(measurements: Measurements, published: Published) -> Table:
    """Return λ at the maximum of the KFAC evidence."""
    rows = []
    for dataset in published.distinct("prior_precision", "dataset"):
        paper = published.quote("prior_precision", dataset, "prior_precision")
        code = published.quote("authors_code", dataset, "prior_precision")
        ours = measurements.estimate(dataset, "kfac", "prior_precision")
        difference = difference_of(ours, paper)
        cells = [with_error(ours), with_error(paper, 1), number(code.mean if code else None)]
        rows.append([dataset, *cells, difference_cell(difference, 1), seeds_of([ours])])
    header = ["data set", "ours", "paper", "authors' code", "difference", "seeds"]
    return Table("Prior precision λ that maximises the evidence of the KFAC posterior", header, rows)


def ranks(measurements: Measurements, published: Published) -> Table:
    """Return the rank that limits the low-rank methods, or a lower bound of it if the grid ends before it."""
    methods = ("lowrank-kfac", "lowrank-diagonal", "lowrank-isotropic", "lowrank-ggn", OPTIMUM)
    frame = measurements.rows
    rows = []
    for dataset in published.distinct("authors_code", "dataset"):
        cells = []
        for method in methods:
            part = frame[(frame["dataset"] == dataset) & (frame["method"] == method)]
            largest = part.groupby("seed")["s"].max()
            ends = sorted({int(s) for s in (largest.min(), largest.max())}) if len(part) else []
            limited = part["note"].str.contains("rank").any() if len(part) else False
            text = " to ".join(map(str, ends))
            cells.append(NOTHING if not ends else f"{text}, rank" if limited else f"at least {text}")
        paper = published.quote("authors_code", dataset, "largest_s")
        rows.append([dataset, *cells, number(paper.mean if paper else None, 0)])
    caption = (
        "Rank that limits the dimension of the low-rank methods, over seeds: at least the end of our grid, or the rank "
        "found. The authors ended their grids of ENB, Red Wine and Naval at the rank that they found"
    )
    return Table(caption, ["data set", *methods, "authors' grid"], rows)


def names(published: Published) -> Table:
    rows = [[row.kind, row.paper, row.ours] for row in published.names.itertuples()]
    return Table("Names of the paper and ours", ["kind", "paper", "ours"], rows, labels=3)
