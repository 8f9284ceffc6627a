"""Scores that others published for the same networks, as they printed them."""

import csv
from pathlib import Path

VALLA = Path(__file__).resolve().parents[1] / "published" / "others" / "valla.csv"
LABELS = {
    "valla": "VaLLA, published",
    "valla-monte-carlo": "VaLLA with Monte Carlo, published",
}
"""The methods of the file that have rows of their own in the report."""


def published_scores() -> dict[tuple[str, str, str], str]:
    """Read the published scores by data set, method and metric, with the digits of their source."""
    with open(VALLA, newline="") as file:
        return {(row["dataset"], row["method"], row["metric"]): row["value"] for row in csv.DictReader(file)}
