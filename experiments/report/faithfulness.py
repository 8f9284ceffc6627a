"""Claims of the paper on how close subspaces come to the full posterior."""

import math

from scipy.stats import spearmanr

from experiments.report.checks import OPTIMUM, PAPER_PROJECTORS, our_rank_correlations
from experiments.report.evidence import (
    FIGURE_1,
    LARGE,
    LOW_RANK,
    REGRESSION,
    SUBSETS,
    Case,
    Evidence,
    Finding,
    judged,
    ratio_range,
)
from experiments.report.numbers import SMALL_DIM, bayesian_parameters, counted, number
from experiments.report.tables import Line, reference_dims


def few_dimensions_suffice(evidence: Evidence) -> Finding:
    cases = []
    for dataset in evidence.run(FIGURE_1):
        metric, p = evidence.measurements.divergence(dataset), bayesian_parameters(dataset)
        shares: dict[int, float] = {}  # the optimum's KL as a share of the plain network's
        for s in evidence.grid(dataset, OPTIMUM, metric):
            if means := evidence.means(Line("", dataset, s), (OPTIMUM, "map"), metric):
                shares[s] = means[OPTIMUM] / means["map"]
        few = [s for s in shares if s < 0.01 * p]
        if not few:
            continue
        enough = [s for s, share in shares.items() if share <= 0.01]
        reached = f"1 % at s = {enough[0]}, {number(100 * enough[0] / p, 1)} % of p" if enough else "1 % nowhere"
        at_most = f"{number(100 * shares[few[-1]], 1)} % at s = {few[-1]}"
        cases.append(Case(shares[few[-1]] <= 0.01, f"{dataset} {at_most} ({reached})"))
    rule = "at the last s below 1 % of p the optimum's KL is at most 1 % of the plain network's"
    claim = "The optimum of Theorem 1 is faithful with less than 1 % of the parameters."
    return judged(claim, rule, cases, len(FIGURE_1))


def low_rank_is_close_to_the_optimum(evidence: Evidence) -> Finding:
    shares = {}
    for dataset in evidence.run(FIGURE_1):
        metric = evidence.measurements.divergence(dataset)
        for s in reference_dims(evidence.measurements, dataset)[:1]:
            if means := evidence.means(Line("", dataset, s), (*LOW_RANK, OPTIMUM, "map"), metric):
                best = min(means[m] for m in LOW_RANK)
                shares[dataset, s] = (means["map"] - best) / (means["map"] - means[OPTIMUM])
    texts = [f"{dataset} {number(100 * share, 0)} % at s = {s}" for (dataset, s), share in shares.items()]
    cases = [Case(max(shares.values()) >= 0.9, ", ".join(texts))] if shares else []
    rule = "on some set the better low-rank method closes 90 % of the gap in KL from the plain network to the optimum"
    return judged("Low-rank subspaces are in some cases close to the optimum.", rule, cases)


def low_rank_is_nearer_than_subsets(evidence: Evidence) -> Finding:
    sets = (*(d for d in FIGURE_1 if d != "enb"), "redwine-standardised")
    cases = [case for dataset in sets if (case := _low_rank_case(evidence, dataset))]
    rule = "at every s the smaller KL of lowrank-kfac and lowrank-diagonal is below the smallest of the subsets"
    claim = "Low-rank subspaces are closer to the full posterior than subsets, except on ENB."
    return judged(claim, rule, cases, len(sets))


def enb_is_the_exception(evidence: Evidence) -> Finding:
    ratios = evidence.ratios("enb", LOW_RANK, SUBSETS)
    cases = []
    if ratios:
        nearer = sum(ratio > 1 for ratio in ratios)
        cases.append(Case(nearer > 0, f"a subset closer at {nearer} of {len(ratios)} s"))
        slight = max(ratios) <= 1.1
        cases.append(Case(slight, f"KL of the low-rank methods {ratio_range(ratios)} times that of the subsets"))
    rule = "at some s a subset's KL is the smallest; the low-rank methods' is nowhere more than a tenth above it"
    return judged("On ENB some subsets are slightly closer than low-rank subspaces.", rule, cases)


def _low_rank_case(evidence: Evidence, dataset: str) -> Case | None:
    ratios = evidence.ratios(dataset, LOW_RANK, SUBSETS)
    won = sum(ratio < 1 for ratio in ratios)
    text = f"{dataset}: low-rank closer at {won} of {len(ratios)} s"
    return Case(won == len(ratios), f"{text} (KL {ratio_range(ratios)} times)") if ratios else None


def diagonal_low_rank_beats_diagonal_subset(evidence: Evidence) -> Finding:
    cases = []
    for dataset in FIGURE_1:
        ratios = evidence.ratios(dataset, ["lowrank-diagonal"], ["subset-diagonal"])
        won = sum(ratio < 1 for ratio in ratios)
        if ratios:
            cases.append(Case(won == len(ratios), f"{dataset} {won} of {len(ratios)} s"))
    rule = "its KL is smaller at every s"
    return judged("lowrank-diagonal is strictly better than subset-diagonal.", rule, cases, len(FIGURE_1))


def subset_diagonal_has_no_trace(evidence: Evidence) -> Finding:
    cases = []
    for dataset in evidence.run(REGRESSION):
        grid = evidence.grid(dataset, "subset-diagonal", "log_trace")
        sweep = [evidence.measurements.by_seed(dataset, "subset-diagonal", "log_trace", s).values() for s in grid]
        zero = sum(all(value == -math.inf for value in seeds) for seeds in sweep)
        if grid:
            largest = max(value for seeds in sweep for value in seeds)
            text = f"{dataset} {zero} of {len(grid)} s" + (
                f", else at most e^{number(largest, 1)}" if zero < len(grid) else ""
            )
            cases.append(Case(zero == len(grid), text))
    rule = "the trace of subset-diagonal is zero at every s of the grid, in every seed"
    claim = "On the regression sets subset-diagonal finds nothing but dead parameters."
    return judged(claim, rule, cases, len(REGRESSION))


def trace_orders_as_divergence(evidence: Evidence) -> Finding:
    cases = []
    for dataset in evidence.run(FIGURE_1):
        dims = evidence.grid(dataset, "lowrank-kfac", "log_trace")
        found = [
            rho for s in dims for rho in our_rank_correlations(evidence.measurements, dataset, s, PAPER_PROJECTORS)[0]
        ]
        if found:
            mean, smallest = sum(found) / len(found), min(found)
            cases.append(Case(mean >= 0.9, f"{dataset} {number(mean, 3)} (smallest {number(smallest, 2)})"))
    rule = "Spearman's ρ of KL with −log-trace over the paper's projectors, mean over s and seeds, is at least 0.9"
    return judged("The log-trace orders projectors as the KL divergence does.", rule, cases, len(FIGURE_1))


def method_matters_more_than_dimension(evidence: Evidence) -> Finding:
    cases = []
    for dataset in evidence.run(FIGURE_1):
        metric, dims = evidence.measurements.divergence(dataset), reference_dims(evidence.measurements, dataset)
        found = [evidence.means(Line("", dataset, s), PAPER_PROJECTORS, metric) for s in dims]
        if len(found) == 2 and all(found):
            best, middle = min(found[0].values()), sorted(found[1].values())[len(PAPER_PROJECTORS) // 2]
            text = f"{dataset} {number(best)} at s = {dims[0]} against {number(middle)} at s = {dims[1]}"
            cases.append(Case(best < middle, text))
    rule = (
        "the best of the paper's projectors has a smaller KL at the s nearest to 100 than the middle one of the five "
        "at the largest s"
    )
    claim = "A well chosen method can have more impact than a larger dimension."
    return judged(claim, rule, cases, len(FIGURE_1))


def largest_trace_of_large_networks(evidence: Evidence) -> Finding:
    cases = []
    for dataset in evidence.run(LARGE):
        ratios = _traces_over_the_next(evidence, dataset)
        won = sum(ratio > 1 for ratio in ratios)
        if ratios:
            cases.append(Case(won == len(ratios), f"{dataset} at {won} of {len(ratios)} s"))
    rule = "its trace is the largest of the paper's projectors at every s"
    return judged("On CIFAR10 and ImageNet10 lowrank-kfac has the largest trace.", rule, cases, len(LARGE))


def trace_is_orders_of_magnitude_larger(evidence: Evidence) -> Finding:
    cases = []
    for dataset in evidence.run(LARGE):
        if ratios := _traces_over_the_next(evidence, dataset):
            text = f"{dataset} {ratio_range(ratios)} times that of the next"
            cases.append(Case(min(ratios) >= 10, text))
    rule = "at every s it is at least ten times that of every other of the paper's projectors"
    return judged("There the trace of lowrank-kfac is orders of magnitude larger.", rule, cases, len(LARGE))


def _traces_over_the_next(evidence: Evidence, dataset: str) -> list[float]:
    """Return for every s the trace of lowrank-kfac over the largest trace of the paper's other projectors."""
    found = []
    for s in evidence.grid(dataset, "lowrank-kfac", "log_trace"):
        if means := evidence.means(Line("", dataset, s), PAPER_PROJECTORS, "log_trace"):
            ours = means.pop("lowrank-kfac")
            found.append(math.exp(ours - max(means.values())))
    return found


def small_dimensions_do_not_suffice(evidence: Evidence) -> Finding:
    cases = []
    plain = evidence.mean("redwine", "map", "kl")
    kls = {m: kl for m in (*LOW_RANK, *SUBSETS) if (kl := evidence.mean("redwine", m, "kl", SMALL_DIM)) is not None}
    if plain and kls:
        best = min(kls, key=lambda m: kls[m])
        text = f"{best} has the smallest at s = {SMALL_DIM}, {number(kls[best])}, the plain network {number(plain)}"
        cases.append(Case(kls[best] > 0.1 * plain, text))
    rule = f"on Red Wine every KL at s = {SMALL_DIM} is above a tenth of the plain network's"
    return judged(f"Dimensions up to {SMALL_DIM} do not suffice.", rule, cases)


def subsets_need_thousands(evidence: Evidence) -> Finding:
    cases = []
    plain = evidence.mean("redwine", "map", "kl")
    dims = evidence.measurements.dims("redwine", "subset-diagonal", "kl")
    kls = {s: kl for s in dims if (kl := evidence.mean("redwine", "subset-diagonal", "kl", s)) is not None}
    if plain and kls and max(kls) > 5000:
        below = [s for s, kl in kls.items() if kl < 0.9 * plain]
        where = f"first at s = {below[0]}" if below else f"not up to s = {max(kls)}"
        cases.append(Case(bool(below) and below[0] >= 5000, f"{where} of the dimensions tried"))
    rule = "on Red Wine its KL falls below nine tenths of the plain network's from s = 5000 on only"
    return judged("subset-diagonal improves from about s = 10,000 on only.", rule, cases)


def dead_parameters_favour_subsets(evidence: Evidence) -> Finding:
    dead, advantage = [], []
    texts = []
    for dataset in evidence.run(REGRESSION):
        share = evidence.mean(dataset, "map", "dead_percent")
        metric = evidence.measurements.divergence(dataset)
        for s in reference_dims(evidence.measurements, dataset)[:1]:
            line = Line("", dataset, s)
            low, subset = evidence.means(line, LOW_RANK, metric), evidence.means(line, SUBSETS, metric)
            if share is not None and low and subset:
                ratio = min(low.values()) / min(subset.values())
                dead.append(share)
                advantage.append(ratio)
                texts.append(f"{dataset} {number(share, 1)} % dead, KL ratio {number(ratio)} at s = {s}")
    cases = []
    if len(dead) >= 3:
        rho = float(spearmanr(dead, advantage).statistic)
        where = f"ρ = {number(rho, 2)} over only {counted(len(dead), 'set')}: "
        cases = [Case(rho > 0, where + ", ".join(texts))]
    rule = (
        "Spearman's ρ of the share of dead parameters with the KL of the best low-rank method over that of the "
        "best subset, at the s nearest to 100, is positive"
    )
    return judged("The more parameters are dead, the better subsets are compared with low-rank methods.", rule, cases)
