"""Tables of measured cases, and of ours over the peers'."""

from __future__ import annotations

import statistics
from typing import Any

DISTURBANCE = 0.1  # cores

# What each of our cases stands beside; the subspace prediction also beside predictions over all weights.
COMPARED_TASKS = {
    "kfac-fit": ["kfac-fit", "kfac-factors"],
    "diagonal-fit": ["diagonal-fit"],
    "kfac-prediction": ["kfac-prediction"],
    "subspace-prediction": ["kfac-prediction", "subspace-prediction"],
    "projector-and-posterior": ["projector-and-posterior"],
    "projector-and-posterior-with-kfac": ["projector-and-posterior-with-kfac"],
    "isotropic-projector-and-posterior": ["isotropic-projector-and-posterior"],
    "last-layer-fit": ["last-layer-fit"],
    "last-layer-prediction": ["last-layer-prediction"],
}

Measurement = dict[str, Any]


def task(case: str) -> str:
    return case.rsplit("/", 1)[1]


def is_ours(case: str) -> bool:
    return case.startswith("sublaplace/")


def milliseconds(rounds: list[Measurement]) -> list[float]:
    """Milliseconds an input, of every repetition of every round."""
    return [1000 * second / one["inputs"] for one in rounds for second in one["seconds"]]


def spread(values: list[float]) -> str:
    return f"{min(values):.3g} – {statistics.median(values):.3g} – {max(values):.3g}"


def ratios(ours: list[Measurement], peers: list[Measurement]) -> list[float]:
    """Ours / peer, from the medians of each round."""
    return [
        statistics.median(one["seconds"]) / statistics.median(other["seconds"])
        for one, other in zip(ours, peers, strict=True)
    ]


def short(message: str, length: int = 160) -> str:
    line = " ".join(message.split()).replace("|", "\\|")
    return line if len(line) <= length else line[:length] + " …"


def case_table(results: dict[str, list[Measurement]]) -> list[str]:
    lines = [
        "| case | batch | ms an input: min – median – max | peak memory, MB | |",
        "|---|---|---|---|---|",
    ]
    for case, rounds in results.items():
        if "error" in rounds[-1]:
            lines.append(f"| {case} | – | – | – | {short(rounds[-1]['error'])} |")
            continue
        memory = statistics.median(one["peak_memory_mb"] for one in rounds)
        notes = [f"extrapolated from {one['measured_inputs']} inputs" for one in rounds if one["extrapolated"]]
        other = max(one["other_cores"] for one in rounds)
        if other > DISTURBANCE:
            notes.append(f"disturbed: up to {other:.1f} cores of other work")
        note = "; ".join(dict.fromkeys(notes))
        batch = rounds[0]["batch_size"] or "own choice"
        lines.append(f"| {case} | {batch} | {spread(milliseconds(rounds))} | {memory:.0f} | {note} |")
    return lines


def ratio_table(results: dict[str, list[Measurement]]) -> list[str]:
    lines = ["| ours | peer | time ours / peer: min – median – max | memory |", "|---|---|---|---|"]
    finished = {case: rounds for case, rounds in results.items() if "error" not in rounds[-1]}
    for ours in finished:
        if not is_ours(ours):
            continue
        for peer in finished:
            if not is_ours(peer) and task(peer) in COMPARED_TASKS.get(task(ours), []):
                memory = statistics.median(
                    one["peak_memory_mb"] / other["peak_memory_mb"]
                    for one, other in zip(finished[ours], finished[peer], strict=True)
                )
                time = spread(ratios(finished[ours], finished[peer]))
                lines.append(f"| {ours} | {peer} | {time} | {memory:.2g} |")
    return lines if len(lines) > 2 else []
