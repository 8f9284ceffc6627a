"""Subspace Laplace approximations on two small problems: one table in the terminal, four pictures on disk.

The problems are handwritten digits (classification) and a curve with a gap in its training data (regression). Every
projector of the library is compared with the full Laplace approximation, which is feasible here, and with the plain
network. Takes less than a minute.
"""

import argparse
import time
from pathlib import Path

import torch
from demo_comparison import Comparison, Row, compare
from demo_figures import draw_bands, draw_certificate, draw_reliability, draw_sweeps
from demo_tasks import digits_task, gap_task

OUTPUT = Path("demo_output")
COLUMNS = ["data", "projector", "s", "KL to full", "trace %", "NLL", "ECE", "Brier", "coverage", "seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUTPUT, help="folder of the pictures")
    parser.add_argument("--table", type=Path, default=OUTPUT / "table.md", help="file of the table, as Markdown")
    arguments = parser.parse_args()
    # Matrices this small gain nothing from more threads, and with one thread the numbers are the same on every machine.
    torch.set_num_threads(1)

    start = time.perf_counter()
    digits, gap = compare(digits_task()), compare(gap_task())
    table = markdown([*digits.rows, *gap.rows]) + "\n" + notes([digits, gap])
    print(f"\n{table}")

    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.table.parent.mkdir(parents=True, exist_ok=True)
    arguments.table.write_text(table, encoding="utf-8")
    draw_bands(gap, arguments.out / "bands.png")
    draw_sweeps([digits, gap], arguments.out / "sweep.png")
    draw_reliability(digits, arguments.out / "reliability.png")
    draw_certificate(gap, arguments.out / "certificate.png")
    print(f"Pictures in {arguments.out}, table in {arguments.table}; {time.perf_counter() - start:.0f} s in all.")


def markdown(rows: list[Row]) -> str:
    """Return the rows as a Markdown table whose source is also readable in a terminal."""
    cells = [COLUMNS, *map(texts, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = 2  # columns of words, aligned left; columns of numbers are aligned right
    rule = ["-" * width for width in widths[:left]] + ["-" * (width - 1) + ":" for width in widths[left:]]
    lines = []
    for line in [cells[0], rule, *cells[1:]]:
        padded = [text.ljust(width) for text, width in zip(line[:left], widths[:left], strict=True)]
        padded += [text.rjust(width) for text, width in zip(line[left:], widths[left:], strict=True)]
        lines.append(f"| {' | '.join(padded)} |\n")
    return "".join(lines)


def texts(row: Row) -> list[str]:
    """Return the cells of a row, in the order of `COLUMNS`."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

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


def notes(comparisons: list[Comparison]) -> str:
    """Return what a reader of the table needs to know."""
    lines = [
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
        lines.append(
            f"{task.name}: {task.likelihood.name}, {len(task.train[0])} training and {len(task.test[0])} test inputs, "
            f"{full.num_parameters:,} parameters, λ = {full.prior_precision:g}{noise}; "
            f"KL ({pooling}) and trace over {len(task.drawn)} test inputs."
        )
    return "".join(f"- {line}\n" for line in lines)


if __name__ == "__main__":
    main()
