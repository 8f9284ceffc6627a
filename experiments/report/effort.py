"""Claims of the paper on the cost of projectors, and on the choice of the prior."""

from experiments.report.checks import PAPER_PROJECTORS
from experiments.report.evidence import ALL_SETS, Case, Evidence, Finding, judged
from experiments.report.numbers import number, with_error


def projectors_cost_alike(evidence: Evidence) -> Finding:
    frame = evidence.measurements.rows.dropna(subset=["seconds"])
    jobs = frame.drop_duplicates(["dataset", "method", "seed"])
    seconds = jobs.groupby(["dataset", "method"])["seconds"].mean()
    cases = []
    for dataset in evidence.run(ALL_SETS):
        times = {m: float(seconds[dataset, m]) for m in PAPER_PROJECTORS if (dataset, m) in seconds.index}
        others = [t for m, t in times.items() if m != "subset-magnitude"]
        if "subset-magnitude" in times and len(others) > 1:
            alike = max(others) <= 5 * min(others) and times["subset-magnitude"] <= min(others)
            text = f"{dataset} {number(min(others))} to {number(max(others))} s, subset-magnitude"
            cases.append(Case(alike, f"{text} {number(times['subset-magnitude'])} s"))
    rule = (
        "subset-magnitude left aside, the slowest of the paper's projectors takes at most 5 times as long as the "
        "fastest; and subset-magnitude takes less than that one"
    )
    claim = "All projectors cost about the same but subset-magnitude, which costs least."
    return judged(claim, rule, cases, len(ALL_SETS))


def prior_precisions_agree(evidence: Evidence) -> Finding:
    cases = []
    for dataset in evidence.run(ALL_SETS):
        ours = evidence.measurements.estimate(dataset, "kfac", "prior_precision")
        paper = evidence.published.quote("prior_precision", dataset, "prior_precision")
        if ours is not None and paper is not None:
            ratio = ours.mean / paper.mean
            cases.append(Case(0.8 <= ratio <= 1.25, f"{dataset} {with_error(ours)} (paper {number(paper.mean, 1)})"))
    rule = "our optimum is within 25 % of the paper's"
    claim = "The evidence of the KFAC posterior gives the paper's prior precisions."
    return judged(claim, rule, cases, len(ALL_SETS))
