"""Claims of the paper on how well subspaces predict."""

import math
from collections.abc import Sequence

from experiments.report.checks import PAPER_PROJECTORS
from experiments.report.evidence import LOW_RANK, REGRESSION, TABLE_1, Case, Evidence, Finding, judged
from experiments.report.numbers import counted, number, with_error
from experiments.report.tables import lines_of, reference_dims, title


def best_scores(evidence: Evidence, dataset: str, name: str) -> Finding:
    lines = lines_of(evidence.published, TABLE_1, dataset)
    cases = []
    for metric in ("nll", "ece", "brier"):
        tally = evidence.tally(TABLE_1, lines, metric, LOW_RANK)
        if tally.total:
            alone = evidence.tally(TABLE_1, lines, metric, ["lowrank-kfac"])
            first = next(line for line in lines if evidence.means(line, ("lowrank-kfac", "map"), metric))
            means = evidence.means(first, ("lowrank-kfac", "map"), metric)
            example = f"{number(means['lowrank-kfac'])} against {number(means['map'])} at {first.label}"
            text = f"{title(metric)} {tally.text('s')}, of these lowrank-kfac {alone.won}, its {example}"
            cases.append(Case(tally.won == tally.total, text))
    rule = (
        "at every s of the table a low-rank method has the smallest score of all projectors and the plain network, "
        "to the printed digits; for comparison lowrank-kfac and the plain network at the first s"
    )
    return judged(f"On {name} low-rank methods have the best NLL, ECE and Brier score.", rule, cases)


def regression_likelihoods_agree(evidence: Evidence) -> Finding:
    cases = []
    for dataset in evidence.run(REGRESSION):
        for s in evidence.grid(dataset, "lowrank-kfac", "nll")[-1:]:
            found = evidence.measurements.common(dataset, (*PAPER_PROJECTORS, "map"), "nll", s)
            estimates = [e for e in found.values() if e.standard_error is not None]
            if not estimates:
                continue
            low, high = min(estimates, key=lambda e: e.mean), max(estimates, key=lambda e: e.mean)
            spread = math.hypot(low.standard_error or 0, high.standard_error or 0)
            text = f"{dataset} {with_error(low)} to {with_error(high)} at s = {s}"
            cases.append(Case(high.mean - low.mean <= 2 * spread, text))
    rule = (
        "at the largest s the smallest and the largest NLL, the plain network's among them, are at most two "
        "standard errors apart"
    )
    return judged("On the regression sets the NLL is the same for all methods.", rule, cases, len(REGRESSION))


def corrupted_approximation(evidence: Evidence) -> Finding:
    cases = _corrupted_cases(evidence, "mnist_c_approximation_quality", ("kl_mean", "log_trace"), ["lowrank-kfac"], 1.0)
    rule = "it has the smallest KL and the largest trace on every corruption"
    return judged("On corrupted MNIST lowrank-kfac is nearest to the full posterior.", rule, cases)


def corrupted_scores(evidence: Evidence) -> Finding:
    cases = _corrupted_cases(evidence, "mnist_c_uq_eval", ("nll", "ece", "brier"), LOW_RANK, 0.5)
    rule = "a low-rank method has the best score on more than half of the corruptions, the plain network included"
    return judged("On corrupted MNIST low-rank methods have the best scores in the majority of cases.", rule, cases)


def corrupted_colour_scores(evidence: Evidence) -> Finding:
    cases = _corrupted_cases(evidence, "ood_extended", ("nll", "ece", "brier"), ["lowrank-kfac"], 1.0)
    rule = "it has the best score at every s and corruption, the plain network included"
    return judged("On corrupted CIFAR10 lowrank-kfac has the best scores.", rule, cases)


def _corrupted_cases(
    evidence: Evidence, table: str, metrics: Sequence[str], methods: Sequence[str], share: float
) -> list[Case]:
    """Whether the methods are best on all lines of a table, or on more than a share of them, for each metric."""
    tallies = [(m, evidence.tally(table, lines_of(evidence.published, table), m, methods)) for m in metrics]
    return [
        Case(t.won == t.total if share == 1 else t.won > share * t.total, f"{title(m)} {t.text('line')}")
        for m, t in tallies
        if t.total
    ]


def subset_diagonal_is_the_plain_network(evidence: Evidence) -> Finding:
    cases = []
    for metric in ("nll", "ece", "brier"):
        pairs = [
            (means["subset-diagonal"], means["map"])
            for line in lines_of(evidence.published, "ood_extended")
            if (means := evidence.means(line, ("subset-diagonal", "map"), metric))
        ]
        if pairs:
            most = max(abs(a - b) for a, b in pairs)
            text = f"{title(metric)} apart by at most {number(most, 4)} on {counted(len(pairs), 'line')}"
            cases.append(Case(most < 0.0005, text))
    rule = "their scores are the same to three digits at every s and corruption"
    claim = "On corrupted CIFAR10 subset-diagonal cannot be told from the plain network."
    return judged(claim, rule, cases)


def full_posterior_is_not_best(evidence: Evidence) -> Finding:
    cases = []
    for dataset in evidence.run(("mnist", "fashionmnist")):
        for s in reference_dims(evidence.measurements, dataset)[:1]:
            if found := evidence.measurements.common(dataset, ("full", "lowrank-kfac"), "nll", s):
                full, subspace = found["full"], found["lowrank-kfac"]
                text = f"{dataset} full {with_error(full)}, lowrank-kfac {with_error(subspace)} at s = {s}"
                cases.append(Case(full.mean > subspace.mean, text))
    rule = "its NLL on the clean test set is above that of lowrank-kfac at the s nearest to 100"
    return judged("The full posterior itself need not have the best scores.", rule, cases, expected=2)
