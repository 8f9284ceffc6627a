"""Which claims of the paper hold here: each is judged by a stated rule, and the sentence gives the numbers."""

from collections import Counter
from collections.abc import Sequence

from experiments.report import effort, faithfulness, predictions
from experiments.report.checks import FEASIBLE
from experiments.report.evidence import Evidence, Finding
from experiments.report.numbers import Estimate, Measurements, Published, counted, with_error
from experiments.report.tables import NOT_RUN, Line, agreement, reference_dims


def findings(measurements: Measurements, published: Published, largest: dict[str, float]) -> list[Finding]:
    """Return all findings, in the order of the paper. `largest` is the end of the grid of s of each set."""
    evidence = Evidence(measurements, published, largest)
    return [
        faithfulness.few_dimensions_suffice(evidence),
        faithfulness.low_rank_is_close_to_the_optimum(evidence),
        faithfulness.low_rank_is_nearer_than_subsets(evidence),
        faithfulness.enb_is_the_exception(evidence),
        faithfulness.diagonal_low_rank_beats_diagonal_subset(evidence),
        faithfulness.subset_diagonal_has_no_trace(evidence),
        faithfulness.trace_orders_as_divergence(evidence),
        faithfulness.method_matters_more_than_dimension(evidence),
        predictions.best_scores(evidence, "fashionmnist", "FashionMNIST"),
        predictions.best_scores(evidence, "cifar10", "CIFAR10"),
        predictions.best_scores(evidence, "imagenet10", "ImageNet10"),
        faithfulness.largest_trace_of_large_networks(evidence),
        faithfulness.trace_is_orders_of_magnitude_larger(evidence),
        predictions.regression_likelihoods_agree(evidence),
        predictions.corrupted_approximation(evidence),
        predictions.corrupted_scores(evidence),
        predictions.corrupted_colour_scores(evidence),
        predictions.subset_diagonal_is_the_plain_network(evidence),
        predictions.full_posterior_is_not_best(evidence),
        faithfulness.small_dimensions_do_not_suffice(evidence),
        faithfulness.subsets_need_thousands(evidence),
        faithfulness.dead_parameters_favour_subsets(evidence),
        effort.projectors_cost_alike(evidence),
        effort.prior_precisions_agree(evidence),
    ]


def summary(found: Sequence[Finding], measurements: Measurements) -> str:
    """Return how many claims hold, and how many seeds the numbers are from."""
    counts = Counter(finding.verdict for finding in found)
    verdicts = [f"{verdict}: {counts[verdict]}" for verdict in ("holds", "holds in part", "does not hold", NOT_RUN)]
    seeds = [f"{d} {measurements.seeds_of_methods(d)}" for d in measurements.datasets if "/" not in d]
    return (
        f"{counted(len(found), 'claim')} of the paper ({', '.join(verdicts)}). "
        f"Seeds of the methods: {', '.join(seeds)}. Where methods are compared, only seeds and "
        "dimensions that all of them have count."
    )


def beside_baselines(measurements: Measurements, dataset: str) -> str | None:
    """Return the NLL of all methods of a set in one sentence, the best first; None if too little was run."""
    scores: dict[str, Estimate] = {}
    for method in (*FEASIBLE, "map", "temperature", "ensemble", "last-layer", "kfac", "full"):
        for s in reference_dims(measurements, dataset)[:1]:
            estimate = measurements.estimate(dataset, method, "nll", s)
            if estimate is not None:
                scores[method] = estimate
    if len(scores) < 2:
        return None
    order = sorted(scores, key=lambda m: scores[m].mean)
    s = reference_dims(measurements, dataset)[0]
    listed = ", ".join(f"{m} {with_error(scores[m])}" for m in order)
    missing = "" if "ensemble" in scores else f" ({NOT_RUN}: ensemble)"
    return f"{dataset}, NLL from best to worst (subspaces of s = {s}): {listed}{missing}"


def agreement_sentences(
    measurements: Measurements, published: Published, parts: Sequence[tuple[str, str, Sequence[Line]]]
) -> list[str]:
    """Return for each table of the paper how many of its cells agree with ours."""
    sentences = []
    for name, table, lines in parts:
        found = [
            a for m in published.distinct(table, "metric") if (a := agreement(measurements, published, table, m, lines))
        ]
        tested, within = sum(a.tested for a in found), sum(a.within for a in found)
        if tested:
            sentences.append(
                f"{name}: {within} of {counted(tested, 'cell')} within two standard errors of the paper's."
            )
        else:
            sentences.append(f"{name}: {NOT_RUN}.")
    return sentences
