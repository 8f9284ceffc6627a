"""The benchmark: sublaplace beside its peers, on random and on trained weights.

Run ``python benchmarks/run.py`` with Python 3.11 or later. It makes the environment if that is missing, measures
every case in a process of its own, ours and the peers' in turn and in several rounds, prints the ratios
ours / peer, and after a complete run writes RESULTS.md. Other work on the machine distorts the timings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from make_environment import make_environment
from tables import (
    COMPARED_TASKS,
    DISTURBANCE,
    Measurement,
    case_table,
    is_ours,
    milliseconds,
    ratio_table,
    ratios,
    short,
    spread,
    task,
)

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"
NETWORKS = ["peers-cnn", "paper-cnn", "resnet20", "resnet20-100", "bert-lora"]
WEIGHTS = ["random", "trained"]

# Networks that users have, with the weights they are measured with, and the cases measured on them.
USERS_NETWORKS = {"resnet20": ["trained"], "resnet20-100": ["random"], "bert-lora": ["random"]}
USERS_TASKS = {
    "last-layer-fit": 500,
    "last-layer-prediction": 500,
    "default-fit": 100,
    "default-prediction": 100,
    "default-tuning": 100,
}
"""Their tasks, with the number of inputs."""

QUICK_HEADING = "# The cases users have, in short"

# What we aim at: our time over that of the fastest peer, on random and on trained weights. Where it is missed, the
# report says what the time goes into.
AIMS = {
    "kfac-fit": {"random": 1 / 2, "trained": 1 / 4},
    "diagonal-fit": {"random": 2 / 3, "trained": 1 / 3},
    "kfac-prediction": {"random": 1 / 8, "trained": 1 / 8},
    "projector-and-posterior": {"random": 1 / 30, "trained": 1 / 30},
    "last-layer-fit": {"random": 0.8, "trained": 0.8},
    "last-layer-prediction": {"random": 0.8, "trained": 0.8},
}

# Cases whose Jacobians come from jacrev of a batch, at a batch that users usually have: network, ours beside them.
USUAL_BATCH = 25
USUAL_BATCH_INPUTS = 100
USUAL_BATCH_CASES = {
    "laplace-torch/curvlinops/kfac-prediction": ("peers-cnn", "sublaplace/kfac-prediction"),
    "laplace-torch/asdl/kfac-prediction": ("peers-cnn", "sublaplace/kfac-prediction"),
    "authors/subspace-prediction": ("paper-cnn", "sublaplace/subspace-prediction"),
    "authors/projector-and-posterior": ("paper-cnn", "sublaplace/projector-and-posterior"),
}

# Networks of three sizes whose passes are compared with their unavoidable parts, with weights and options.
ROOFLINES = [
    ("paper-cnn", "random", []),
    ("paper-cnn", "trained", []),
    ("resnet20", "trained", ["--inputs", "300", "100"]),
    ("resnet18", "random", ["--inputs", "40", "12", "--repetitions=0"]),
]

PROJECTOR_INPUTS = 1000  # N of the cases that build a projector, whose cost does not grow with N alone

Setting = tuple[str, str]  # network, weights


def measured(python: Path, case: str, **options: str | int) -> Measurement:
    """Measure one case in a fresh process; a process that dies is a result too."""
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    process = subprocess.run([python, "measure.py", case, *arguments], cwd=HERE, capture_output=True, text=True)
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines() or ["no message"]
        return {"error": f"process ended with code {process.returncode}: {lines[-1]}"}
    return json.loads(process.stdout.splitlines()[-1])


def description(python: Path) -> dict[str, Any]:
    process = subprocess.run([python, "describe.py"], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def interleaved(cases: Iterable[str]) -> list[str]:
    """Cases of one task next to each other, ours first, so that a change of load meets them all alike."""
    return sorted(cases, key=lambda case: (task(case), not is_ours(case), case))


def num_inputs(case: str, inputs: int) -> int:
    """How many inputs a case is measured with."""
    return PROJECTOR_INPUTS if "projector" in case else USERS_TASKS.get(task(case), inputs)


def settings_of(networks: list[str], weights: list[str]) -> list[Setting]:
    """Networks with the weights that they are measured with."""
    return [(network, one) for network in networks for one in USERS_NETWORKS.get(network, weights)]


def applies(case: str, network: str) -> bool:
    """Whether a case is measured on a network: users' tasks on users' networks, all others on the small ones."""
    return (task(case) in USERS_TASKS) == (network in USERS_NETWORKS)


def roofline(python: Path, network: str, weights: str, *options: str) -> Any:
    """What `roofline.py` measures, in a process of its own."""
    command = [python, "roofline.py", f"--network={network}", f"--weights={weights}", *options]
    process = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def roofline_lines(python: Path) -> list[str]:
    """Our passes beside their unavoidable parts on three sizes, and their growth with the data."""
    lines = [
        "",
        "## What cannot be avoided (s = 100)",
        "",
        "Passes: forward and backward passes on the same chunks, nothing built from them. Multiplications: those of "
        "the rows, of J P, or of KFAC's factors and rotations, counted, at this machine's best float32 rate. "
        "Decompositions: those of KFAC's factors, alone. All are measured in the same process. "
        "The ratio is that of our time to their sum.",
        "",
        "| network | weights | case | inputs | seconds | passes | multiplications | decompositions | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for network, weights, options in ROOFLINES:
        for one in roofline(python, network, weights, *options):
            parts = [one["passes"], one["multiplications"], one.get("decompositions", 0.0)]
            cells = " | ".join(f"{part:.3f}" for part in parts)
            whole = f"{one['inputs']:,} | {one['seconds']:.3f} | {cells} | {one['seconds'] / sum(parts):.2f}"
            lines.append(f"| {network} | {weights} | {one['case']} | {whole} |")
    lines += ["", "The reduced posterior of paper-cnn, for more and more data:", ""]
    lines += ["| weights | N | seconds | ms an input | peak memory, MB |", "|---|---|---|---|---|"]
    for weights in WEIGHTS:
        for point in roofline(python, "paper-cnn", weights, "--growth"):
            each = 1000 * point["seconds"] / point["inputs"]
            lines.append(
                f"| {weights} | {point['inputs']:,} | {point['seconds']:.2f} | {each:.2f} "
                f"| {point['peak_memory_mb']:.0f} |"
            )
    return lines


def report(
    about: dict[str, Any], results: dict[Setting, dict[str, list[Measurement]]], inputs: int, num_rounds: int
) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in about["machine"].items())
    versions = ", ".join(f"{key} {value}" for key, value in about["versions"].items())
    lines = [
        "# Side by side with the peers",
        "",
        "Written by `python benchmarks/run.py`. Ratios are ours / peer: below 1, sublaplace takes less.",
        "",
        f"- Machine: {machine}.",
        f"- Versions: {versions}.",
        "- Disturbed means that other work took more than "
        f"{DISTURBANCE:.0%} of a core while a case was timed: such times are not to be trusted.",
        f"- {inputs} FashionMNIST inputs ({PROJECTOR_INPUTS} where a projector is built), float32, {num_rounds} rounds "
        "over all cases, each case in a fresh process, "
        "repeated after a warm-up. Time ratios are taken round by round.",
        "- Peak memory is what a case adds to the process after imports and data. Untimed setup counts only as "
        "far as its result lives on.",
        "- Peers run at about the fastest batch size that `sweep_batch_sizes.py` found. Jacobians by jacrev of a batch "
        "(laplace-torch's default, asdl, the paper's code) cost an input the more the larger the batch: what a user "
        f"with batches of {USUAL_BATCH} pays stands in a table of its own.",
        "- `authors` is a re-write of the way of the paper's code (Jacobians by whole-batch jacrev), not that code.",
        "- A case that would take over two minutes is measured on fewer inputs and marked as extrapolated.",
        "- A case that fails stands in the table with its error. Where a peer does not fail, its curvature need "
        "not be right: on a reused convolution curvlinops and asdl count the inputs' factor once a call, and "
        "backpack's KFAC of a convolution is too large by about the number of positions, as its source notes.",
    ]
    for (network, weights), table in results.items():
        lines += ["", f"## {network}, {weights} weights", "", *case_table(table)]
        ratio_lines = ratio_table(table)
        if ratio_lines:
            lines += ["", *ratio_lines]
    return "\n".join(lines) + "\n"


def quick_report(
    about: dict[str, Any], results: dict[Setting, dict[str, list[Measurement]]], num_rounds: int, clock: str
) -> str:
    versions = ", ".join(f"{key} {value}" for key, value in about["versions"].items())
    lines = [
        QUICK_HEADING,
        "",
        "Written by `python benchmarks/run.py --quick --output benchmarks/RESULTS.md`, or `make bench-quick`.",
        "",
        f"- Versions: {versions}. Rounds: {num_rounds}.",
        "- Milliseconds are those of the clock, with two threads."
        if clock == "wall"
        else "- Milliseconds are those of the processor, with one thread: the machine had other work, which still "
        "disturbs them; the spread shows how much.",
        "- resnet20 has published weights and CIFAR10's training pictures. resnet20-100 has a head of 100 classes and "
        "random weights. bert-lora has drawn tokens, and random weights of which LoRA's and the head's are Bayesian.",
        "- Last layer: 500 inputs, λ given; the library's own choice is exact up to 5,000 parameters and Kronecker "
        "factors beyond. Default: 100 inputs; its fit chooses λ by leave-one-out.",
        "- The default posterior has no peer that does the same. laplace-torch's Jacobians of all weights are left "
        "out: for a ResNet20 they would take hours.",
    ]
    for (network, weights), table in results.items():
        lines += ["", f"## {network}, {weights} weights", "", *case_table(table), "", *ratio_table(table)]
    return "\n".join(lines) + "\n"


def write_section(path: Path, text: str) -> None:
    """Write the quick report at the end of a file, in place of an earlier one."""
    before = path.read_text().split(QUICK_HEADING)[0].rstrip("\n") + "\n\n" if path.exists() else ""
    path.write_text(before + text)


def share_lines(python: Path, results: dict[Setting, dict[str, list[Measurement]]]) -> list[str]:
    """For every aim that is missed, what our time goes into, measured in a process of its own."""
    lines: list[str] = []
    for (network, weights), table in results.items():
        finished = {case: rounds for case, rounds in table.items() if "error" not in rounds[-1]}
        for ours in filter(is_ours, finished):
            aim = AIMS.get(task(ours), {}).get(weights)
            beside = [case for case in finished if not is_ours(case) and task(case) in COMPARED_TASKS[task(ours)]]
            if aim is None or not beside:
                continue
            fastest = min(beside, key=lambda case: statistics.median(milliseconds(finished[case])))
            ratio = statistics.median(ratios(finished[ours], finished[fastest]))
            if ratio <= aim:
                continue
            count = finished[ours][0]["inputs"]
            command = [python, "shares.py", ours, f"--network={network}", f"--weights={weights}", f"--inputs={count}"]
            process = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
            shares = json.loads(process.stdout.splitlines()[-1])
            if not lines:
                lines = [
                    "",
                    "## Where the time goes, where we miss our aim",
                    "",
                    "Shares of our time, from a profiled run. Convolutions, pooling and activations are the forward "
                    "and backward passes.",
                    "",
                    f"| network | weights | case | fastest peer | ours / peer | aim | {' | '.join(shares)} |",
                    "|" + "---|" * (6 + len(shares)),
                ]
            cells = " | ".join(f"{share:.0%}" for share in shares.values())
            lines.append(f"| {network} | {weights} | {ours} | {fastest} | {ratio:.2f} | {aim:.2f} | {cells} |")
    return lines


def usual_batch_lines(python: Path, cases: list[str]) -> list[str]:
    """The peers whose cost grows with the batch, at a usual one, and ours beside them on the same inputs."""
    lines = [
        "",
        f"## The same peers with batches of {USUAL_BATCH}, {USUAL_BATCH_INPUTS} inputs, random weights",
        "",
        "| peer | network | ms an input | peak memory, MB | ours, ms an input | time, ours / peer | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, (network, our_case) in USUAL_BATCH_CASES.items():
        if case not in cases or our_case not in cases:
            continue
        ours = measured(python, our_case, network=network, inputs=USUAL_BATCH_INPUTS)
        one = measured(python, case, network=network, inputs=USUAL_BATCH_INPUTS, batch_size=USUAL_BATCH, repetitions=1)
        if "error" in one or "error" in ours:
            lines.append(f"| {case} | {network} | {short(one.get('error') or ours['error'])} | – | – | – | – |")
            continue
        theirs, mine = (statistics.median(milliseconds([each])) for each in (one, ours))
        lines.append(
            f"| {case} | {network} | {theirs:.3g} | {one['peak_memory_mb']:.0f} | {mine:.3g} "
            f"| {mine / theirs:.2g} | {ours['peak_memory_mb'] / one['peak_memory_mb']:.2g} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--inputs", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="the cases users have")
    parser.add_argument(
        "--clock",
        choices=["wall", "processor"],
        default="wall",
        help="with --quick: processor seconds of one thread, for a machine that other work disturbs",
    )
    parser.add_argument("--roofline", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", type=Path, help="where to write the report of an incomplete run")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.networks = [name for name in arguments.networks if name in USERS_NETWORKS]

    python = make_environment()
    settings = settings_of(arguments.networks, arguments.weights)
    if any(weights == "trained" and network not in USERS_NETWORKS for network, weights in settings):
        subprocess.run([python, "networks.py"], cwd=HERE, check=True)
    about = description(python)
    cases = interleaved(case for case in about["cases"] if any(part in case for part in arguments.only))
    results: dict[Setting, dict[str, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for number in range(arguments.rounds):
        for network, weights in settings:
            for case in (case for case in cases if applies(case, network)):
                rounds = results[network, weights][case]
                if rounds and "error" in rounds[-1]:
                    continue
                inputs = num_inputs(case, arguments.inputs)
                one = measured(python, case, network=network, weights=weights, inputs=inputs, clock=arguments.clock)
                rounds.append(one)
                outcome = short(one["error"]) if "error" in one else spread(milliseconds([one])) + " ms an input"
                print(f"round {number + 1}, {network}, {weights}, {case}: {outcome}", flush=True)

    if arguments.quick:
        text = quick_report(about, results, arguments.rounds, arguments.clock)
        print(text)
        if arguments.output:
            write_section(arguments.output, text)
        return
    text = report(about, results, arguments.inputs, arguments.rounds)
    if "random" in arguments.weights:
        text += "\n".join(usual_batch_lines(python, cases)) + "\n"
    text += "".join(line + "\n" for line in share_lines(python, results))
    if arguments.roofline:
        text += "\n".join(roofline_lines(python)) + "\n"
    print(text)
    complete = settings == settings_of(NETWORKS, WEIGHTS) and len(cases) == len(about["cases"])
    output = RESULTS if complete else arguments.output
    if output:
        output.write_text(text)


if __name__ == "__main__":
    main()
