"""Subspace Laplace approximations on two small problems: two tables in the terminal, four pictures on disk.

The problems are handwritten digits (classification) and a curve with a gap in its training data (regression). The first
table shows what a practitioner gets: the plain network, the paper's posterior, and the library's default without and
with validation data. The second one compares every projector with the full Laplace approximation, which is feasible
here. Takes about half a minute.
"""

import argparse
import time
from pathlib import Path

import torch
from demo_comparison import Comparison, Row, compare
from demo_figures import draw_bands, draw_certificate, draw_reliability, draw_sweeps
from demo_practice import HELD_OUT, PRACTICE, Choice, practice
from demo_tasks import digits_task, gap_task

OUTPUT = Path("demo_output")
CHOICES = ["data", "method", "NLL", "ECE", "coverage", "s", "λ", "σ", "seconds"]
COLUMNS = ["data", "projector", "s", "KL to full", "trace %", "NLL", "ECE", "Brier", "coverage", "seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUTPUT, help="folder of the pictures")
    parser.add_argument("--table", type=Path, default=OUTPUT / "table.md", help="file of the tables, as Markdown")
    arguments = parser.parse_args()
    # Matrices this small gain nothing from more threads, and with one thread the numbers are the same on every machine.
    torch.set_num_threads(1)

    start = time.perf_counter()
    tasks = [digits_task(), gap_task()]
    choices = [choice for task in tasks for choice in practice(task)]
    digits, gap = comparisons = [compare(task) for task in tasks]
    rows = [row for comparison in comparisons for row in comparison.rows]
    tables = "\n".join(
        [
            markdown([CHOICES, *map(choice_texts, choices)]),
            practice_notes(choices),
            markdown([COLUMNS, *map(texts, rows)]),
            notes(comparisons),
        ]
    )
    print(f"\n{tables}")

    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.table.parent.mkdir(parents=True, exist_ok=True)
    arguments.table.write_text(tables, encoding="utf-8")
    draw_bands(gap, arguments.out / "bands.png")
    draw_sweeps([digits, gap], arguments.out / "sweep.png")
    draw_reliability(digits, arguments.out / "reliability.png")
    draw_certificate(gap, arguments.out / "certificate.png")
    print(f"Pictures in {arguments.out}, tables in {arguments.table}; {time.perf_counter() - start:.0f} s in all.")


def markdown(cells: list[list[str]]) -> str:
    """Return the cells, column titles first, as a Markdown table whose source is also readable in a terminal."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = 2  # columns of words, aligned left; columns of numbers are aligned right
    rule = ["-" * width for width in widths[:left]] + ["-" * (width - 1) + ":" for width in widths[left:]]
    lines = []
    for line in [cells[0], rule, *cells[1:]]:
        padded = [text.ljust(width) for text, width in zip(line[:left], widths[:left], strict=True)]
        padded += [text.rjust(width) for text, width in zip(line[left:], widths[left:], strict=True)]
        lines.append(f"| {' | '.join(padded)} |\n")
    return "".join(lines)


def number(value: float | None, form: str) -> str:
    """Return a number as text, or a dash where it does not exist."""
    return "–" if value is None else format(value, form)


def choice_texts(choice: Choice) -> list[str]:
    """Return the cells of a row, in the order of `CHOICES`."""
    scores = [number(choice.scores.get(name), ".3f") for name in ("nll", "ece", "coverage")]
    return [
        choice.data,
        choice.method,
        *scores,
        number(choice.dim, "d"),
        number(choice.prior_precision, ".3g"),
        number(choice.noise_std, ".3f"),
        number(choice.seconds, ".2f"),
    ]


def texts(row: Row) -> list[str]:
    """Return the cells of a row, in the order of `COLUMNS`."""
    return [
        row.data,
        row.method,
        number(row.dim, "d"),
        number(row.kl, ".0f" if row.kl >= 1000 else ".3g"),
        number(100 * row.captured, ".1f"),
        number(row.nll, ".3f"),
        number(row.ece, ".3f"),
        number(row.brier, ".3f"),
        number(row.coverage, ".3f"),
        number(row.seconds, ".2f"),
    ]


def practice_notes(choices: list[Choice]) -> str:
    """Return what a reader of the first table needs to know."""
    others = ", ".join(
        f"NLL {choice.own_plain['nll']:.3f}, {name} {choice.own_plain[score]:.3f} ({choice.data})"
        for choice in choices
        for name, score in (("ECE", "ece"), ("coverage", "coverage"))
        if choice.method == PRACTICE[-1] and score in choice.own_plain
    )
    lines = [
        "Lower NLL and ECE are better; the 90 % intervals should have coverage 0.9. Seconds are the time of the fit.",
        "paper: `SubspaceLaplace.paper` with λ by the evidence; for regression, σ is the standard deviation of the "
        "training residuals. default: `SubspaceLaplace(model, …).fit(train)`.",
        f"default with validation data: `fit(train, val)`. {100 * HELD_OUT:.0f} % of the training data are held out as "
        "validation data; the network is trained on the rest, so every row uses the same labelled data. Without the "
        f"posterior, this other network scores {others}.",
    ]
    return bulleted(lines)


def notes(comparisons: list[Comparison]) -> str:
    """Return what a reader of the second table needs to know."""
    lines = [
        "Every posterior of this table is a bare subspace with the same λ, so that only the subspaces differ.",
        "KL is the divergence of the predictive from the predictive of the full Laplace approximation. Trace % is the "
        "share of the full predictive variance that the subspace holds. Coverage is the coverage of 90 % intervals. "
        "Seconds are the time of the fit.",
        "lowrankopt-ggn builds its subspace from the test inputs that it is judged on. No subspace of its dimension "
        "holds a larger trace: it is a yardstick, not a method.",
        "lowrank-correction is made for a posterior with KFAC outside the subspace; here there is nothing outside.",
    ]
    for comparison in comparisons:
        task, full = comparison.task, comparison.posteriors["full"]
        pooling = "mean" if full.noise_std is None else "joint"
        noise = "" if full.noise_std is None else f", σ = {full.noise_std:.3f}"
        chosen = f" (best on {len(task.validation[0])} further inputs)" if len(task.prior_precisions) > 1 else ""
        lines.append(
            f"{task.name}: {task.likelihood.name}, {len(task.train[0])} training and {len(task.test[0])} test inputs, "
            f"{full.num_parameters:,} parameters, λ = {full.prior_precision:g}{chosen}{noise}; "
            f"KL ({pooling}) and trace over {len(task.drawn)} test inputs."
        )
    return bulleted(lines)


def bulleted(lines: list[str]) -> str:
    """Return the lines as a Markdown list."""
    return "".join(f"- {line}\n" for line in lines)


if __name__ == "__main__":
    main()
