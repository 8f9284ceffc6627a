"""The report of the benchmark: CALIBRATION.md and its picture, from the table of results."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.calibration import cifar
from experiments.calibration.methods import METHODS, Method
from experiments.calibration.picture import draw
from experiments.calibration.published import LABELS, published_scores
from experiments.calibration.registry import all_sets
from experiments.calibration.scores import expected_coverage_error
from experiments.calibration.sets import TABLE_SETS, Task
from experiments.calibration.splits import MOST_TEST_INPUTS, MOST_TRAINING_INPUTS
from experiments.calibration.statistics import (
    Mean,
    common_sets,
    mean_over_sets,
    mean_over_splits,
    mean_ranks,
    values_of,
    worse_sets,
)
from experiments.calibration.table import CalibrationTable, Line

OURS = "ours-validation"
REFERENCES = {
    "plain": "the plain network, which is also trained on the validation data",
    "plain-held-out": "the network that it was fitted to, without a posterior",
}
"""What sublaplace with validation data must not be worse than."""
REPORT, PICTURE = "CALIBRATION.md", "figures/calibration.svg"
CALIBRATION_ERROR: dict[str, str] = {"regression": "coverage_error", "classification": "ece"}

# The columns of the tables: a score, its heading and its digits.
_COLUMNS: dict[str, list[tuple[str, str, int]]] = {
    "regression": [
        ("nll", "NLL", 3),
        ("coverage_error", "coverage off by", 3),
        ("coverage", "coverage", 3),
        ("crps", "CRPS", 4),
        ("rmse", "RMSE", 4),
        ("auroc", "AUROC", 3),
    ],
    "classification": [
        ("nll", "NLL", 3),
        ("ece", "ECE", 4),
        ("ece_perfect", "ECE if perfect", 4),
        ("brier", "Brier", 4),
        ("accuracy", "accuracy", 4),
        ("auroc", "AUROC", 3),
    ],
}


def write_report(table: CalibrationTable, folder: Path) -> None:
    """Write the report and its picture into a folder; lines of methods that have changed since are left out."""
    current = {method.name: method.fingerprint for method in METHODS}
    lines = [line for line in table.lines().values() if current.get(line.method) == line.fingerprint]
    order = {name: k for k, name in enumerate(all_sets())}
    lines.sort(key=lambda line: (order.get(line.dataset, len(order)), line.dataset, line.split))
    parts = [_introduction(), _versions(lines)]
    shown = "report" if any(line.kind == "report" for line in lines) else "development"
    tabular = [line for line in lines if line.dataset in TABLE_SETS]
    if tabular:
        draw([line for line in tabular if line.kind == shown], METHODS, CALIBRATION_ERROR, folder / PICTURE)
        parts.append(f"![NLL and calibration error of all methods on the {shown} sets]({PICTURE})")
    tasks: tuple[Task, ...] = ("regression", "classification")
    for kind, title in (
        ("report", "Report sets"),
        ("strong", "Strong networks"),
        ("development", "Development sets"),
    ):
        of_kind = [line for line in lines if line.kind == kind]
        if of_kind:
            parts.append(f"## {title}\n\n{_KIND_TEXT[kind]}")
        if of_kind and kind == "strong":
            parts.append(_beside_published([line for line in lines if line.dataset in cifar.NETWORKS]))
        for task in tasks:
            of_task = [line for line in of_kind if line.task == task]
            parts += _task_sections(f"{title}, {task}", task, [line for line in of_task if line.dataset in TABLE_SETS])
        for name in dict.fromkeys(line.dataset for line in of_kind if line.dataset not in TABLE_SETS):
            parts.append(_single_set(name, [line for line in of_kind if line.dataset == name]))
    parts.append(_methods())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT).write_text("\n\n".join(part for part in parts if part) + "\n")


_KIND_TEXT = {
    "report": "These sets were named before any result was seen, and no default was chosen on their results. Two "
    "exceptions: the features of spambase, without its labels, served as one of thirteen regression problems while the "
    "defaults for regression were chosen; and the pairwise link was found on CIFAR10's test pictures with the "
    "ResNet20, so CIFAR10 is not unseen. The classification sets had been scored once with the probit link before.",
    "strong": "Residual networks for CIFAR10 that others trained, run with `--kind strong`. No default was chosen on "
    "the results of ResNet32, ResNet44 and ResNet56; temperatures from 1,000 validation pictures were tried on "
    "ResNet32 first, and dropped for halves of the test set because they were noisy. Each cell has NLL / ECE / Brier "
    "score of all 10,000 test pictures; of VaLLA with Monte Carlo, the NLL alone. Methods marked with * saw the labels "
    "of the half of the test set that they were not scored on. Beyond ResNet20, sublaplace predicts a half "
    "from the pass that tunes λ on it for the other, "
    "with variances interpolated in λ, right to 0.4 %. Seconds count shared work for each half. VaLLA's "
    "figures are from the result files of its authors (github.com/Ludvins/Variational-LLA; 100 inducing points, "
    "probit, mean of five seeds).",
    "development": "Defaults were chosen on these sets, so they flatter sublaplace.",
}


def _introduction() -> str:
    return f"""# Calibration on many data sets

`make calibration` runs the benchmark and `python -m experiments.calibration report` writes this page from
`results/calibration.csv`.

- Tabular sets: an MLP with two hidden layers of 100 ReLU units, AdamW (learning rate 3e-3, weight decay 1e-4, cosine
  schedule, batches of 64), 200 epochs for regression and 100 for classification. Inputs and the targets of regression
  are standardised on the training data, and scores are in these units.
- Five random splits, 90 % for training. Large sets are cut to {MOST_TRAINING_INPUTS:,} training and at most
  {MOST_TEST_INPUTS:,} test inputs.
- Methods that use validation data get a tenth of the training data for it. Their network is trained on the other nine
  tenths. All other methods use the network trained on all training data.
- Regression: one σ for all outputs, whatever the method. NLL is per input, joint over the outputs. Coverage is the
  share of test targets inside the 90 % interval (for two outputs, the 90 % ellipse), and "coverage off by" is
  |coverage − 0.9|, averaged over splits and sets. AUROC tells how well the predictive variance finds the tenth of the
  test inputs with the largest absolute errors of the method itself.
- Classification: ECE has 15 bins of the top-class probability. "ECE if perfect" is the mean ECE of a perfectly
  calibrated predictor with the same confidences: chance alone gives that much. AUROC tells how well a low top-class
  probability finds the misclassified inputs.
- ± is the standard error over the splits. Ranks are by NLL, with 95 % bootstrap intervals over the data sets.
- The ECE of a bootstrap resample is biased upwards. "Reflected" is the interval mirrored at the ECE, which takes this
  bias away.
- Seconds are processor time of fit and prediction on one thread, without training. For the ensemble and for dropout
  that leaves out most of the cost."""


def _versions(lines: Sequence[Line]) -> str:
    """Tell which code of sublaplace the results are from: a run may have been resumed after a change."""
    own = [line for line in lines if line.method.startswith(("ours", "paper"))]
    versions = sorted({line.version for line in own})
    if len(versions) > 1:
        counts = [f"{version} ({sum(line.version == version for line in own)} lines)" for version in versions]
        return f"**The results of sublaplace come from several versions of its code: {', '.join(counts)}.**"
    return f"The results of sublaplace come from version {versions[0]}." if versions else ""


def _task_sections(title: str, task: Task, lines: Sequence[Line]) -> list[str]:
    """Make the tables of the tabular sets of one task."""
    nll = values_of(lines, "nll")
    methods = [method for method in METHODS if any(method.name == line.method for line in lines)]
    names = common_sets(nll, [method.name for method in methods])
    if not names:
        return []
    left_out = [name for name in dict.fromkeys(line.dataset for line in lines) if name not in names]
    missing = f" Left out, because a method was not run on all splits: {', '.join(left_out)}." if left_out else ""
    splits = [len(nll[name, methods[0].name]) for name in names]
    number = f"{min(splits)}" if min(splits) == max(splits) else f"{min(splits)} to {max(splits)}"
    count = f"{len(names)} sets, {number} splits each: {', '.join(names)}.{missing}"
    sections = [f"### {title}\n\n{count}\n\n{_mean_table(task, lines, methods, names)}"]
    if task == "regression":
        sizes = [next(line.num_test for line in lines if line.dataset == name) for name in names]
        chance = sum(map(expected_coverage_error, sizes)) / len(sizes)
        sections.append(f"The coverage of a perfectly calibrated method would be off by {chance:.3f}, by chance alone.")
    sections.append(f"NLL by data set:\n\n{_set_table(lines, methods, 'nll', 3)}")
    error = CALIBRATION_ERROR[task]
    heading = next(heading for score, heading, _ in _COLUMNS[task] if score == error)
    sections.append(f"{heading[0].upper()}{heading[1:]}, by data set:\n\n{_set_table(lines, methods, error, 3)}")
    return [*sections, *_losses(nll, names)]


def _mean_table(task: Task, lines: Sequence[Line], methods: Sequence[Method], names: Sequence[str]) -> str:
    columns = _COLUMNS[task]
    scores = {score: values_of(lines, score) for score, _, _ in columns}
    ranks = mean_ranks(scores["nll"], [method.name for method in methods], names)
    seconds = {
        method.name: [line.seconds for line in lines if line.method == method.name and line.dataset in names]
        for method in methods
    }
    rows = []
    for method in methods:
        cells = [_cell(_mean(scores[score], method, names), digits) for score, _, digits in columns]
        rank = ranks[method.name]
        spent = sum(seconds[method.name]) / len(seconds[method.name])
        rows.append([_label(method), *cells, f"{rank.value:.1f} ({rank.low:.1f} to {rank.high:.1f})", f"{spent:.1f}"])
    return _markdown(["", *(heading for _, heading, _ in columns), "rank by NLL", "seconds"], rows)


def _mean(values: dict[tuple[str, str], dict[int, float]], method: Method, names: Sequence[str]) -> Mean:
    """Average over the sets that have the score: without errors there is no AUROC."""
    present = [name for name in names if (name, method.name) in values]
    return mean_over_sets(values, method.name, present) if present else Mean(math.nan, math.nan)


def _set_table(lines: Sequence[Line], methods: Sequence[Method], score: str, digits: int) -> str:
    values = values_of(lines, score)
    names = list(dict.fromkeys(line.dataset for line in lines))
    best = {
        name: min(mean_over_splits(values[name, m.name]).value for m in methods if (name, m.name) in values)
        for name in names
    }
    rows = []
    for method in methods:
        cells = []
        for name in names:
            found = values.get((name, method.name))
            cell = "–" if found is None else _cell(mean_over_splits(found), digits)
            is_best = found is not None and mean_over_splits(found).value == best[name]
            cells.append(f"**{cell}**" if is_best else cell)
        rows.append([_label(method), *cells])
    return _markdown(["", *names], rows)


def _losses(nll: dict[tuple[str, str], dict[int, float]], names: Sequence[str]) -> list[str]:
    """Tell on which sets sublaplace with validation data is worse than a network without a posterior."""
    found = []
    for reference, described in REFERENCES.items():
        if not all((name, method) in nll for name in names for method in (OURS, reference)):
            continue
        worse = worse_sets(nll, names, OURS, reference)
        listed = ", ".join(f"{name} (by {_cell(difference, 4)})" for name, difference in worse.items()) or "none"
        found.append(
            f"Worse in NLL than {described}, by more than two standard errors of the differences over the splits: "
            f"{listed}."
        )
    return found


def _single_set(name: str, lines: Sequence[Line]) -> str:
    """Make the table of a set with its own network: pictures or text."""
    splits = sorted({line.split for line in lines})
    rows = []
    for method in METHODS:
        found = [line for line in lines if line.method == method.name]
        if not found:
            continue
        means = {
            score: mean_over_splits({line.split: line.scores[score] for line in found if score in line.scores})
            for score in ("nll", "ece", "ece_low", "ece_high", "ece_perfect", "brier", "accuracy", "auroc")
        }
        low, high = means["ece_low"].value, means["ece_high"].value
        ece = means["ece"].value
        interval = f"{low:.4f} to {high:.4f}"
        # The ECE of a resample is biased upwards, by about as much as that of the sample; reflecting takes this away.
        reflected = f"{max(0.0, 2 * ece - high):.4f} to {max(0.0, 2 * ece - low):.4f}"
        seconds = sum(line.seconds for line in found) / len(found)
        cells = [
            _cell(means["nll"], 4),
            _cell(means["ece"], 4),
            interval,
            reflected,
            f"{means['ece_perfect'].value:.4f}",
        ]
        cells += [_cell(means[score], 4) for score in ("brier", "accuracy", "auroc")]
        rows.append([_label(method), *cells, f"{seconds:.1f}"])
    headings = ["", "NLL", "ECE", "95 % interval", "reflected", "ECE if perfect"]
    headings += ["Brier", "accuracy", "AUROC", "seconds"]
    note = all_sets()[name].note if name in all_sets() else ""
    count = f"{lines[0].num_test:,} test inputs, {len(splits)} split{'s' if len(splits) > 1 else ''}."
    losses = _losses(values_of(lines, "nll"), [name]) if len(splits) > 1 else []
    return "\n\n".join([f"### {name}", f"{note} {count}", _markdown(headings, rows), *losses])


def _beside_published(lines: Sequence[Line]) -> str:
    """Make the table of the residual networks next to what others published for them."""
    scores = ("nll", "ece", "brier")
    found = {(line.dataset, line.method): [f"{line.scores[score]:.4f}" for score in scores] for line in lines}
    published = published_scores()
    for name in cifar.NETWORKS:
        for other in LABELS:
            found[name, other] = [
                published[name, other, score] for score in scores if (name, other, score) in published
            ]
    labels = {method.name: _label(method) for method in METHODS} | LABELS
    rows = [
        [label, *(" / ".join(found.get((name, method), [])) or "–" for name in cifar.NETWORKS)]
        for method, label in labels.items()
        if any(found.get((name, method)) for name in cifar.NETWORKS)
    ]
    return _markdown(["", *(f"ResNet{each.depth}" for each in cifar.NETWORKS.values())], rows)


def _methods() -> str:
    rows = [[_label(method), f"`{method.name}`", method.definition] for method in METHODS]
    return f"## Methods\n\nMethods marked with * use validation data.\n\n{_markdown(['', 'name', 'definition'], rows)}"


def _label(method: Method) -> str:
    return f"{method.label}{' *' if method.uses_validation else ''}"


def _cell(mean: Mean, digits: int) -> str:
    if math.isnan(mean.value):
        return "–"
    error = "" if math.isnan(mean.error) else f" ± {mean.error:.{digits}f}"
    return f"{mean.value:.{digits}f}{error}".replace("-", "−")


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
