"""Running methods on data sets: what is in the table already is not computed again."""

from collections.abc import Callable, Iterable, Sequence

import torch

from experiments.calibration.code_version import code_version
from experiments.calibration.methods import Method
from experiments.calibration.prediction import pooled
from experiments.calibration.problem import Problem
from experiments.calibration.registry import Load
from experiments.calibration.scores import scores_of
from experiments.calibration.sets import Kind
from experiments.calibration.table import CalibrationTable, Key, Line


def run_set(
    name: str,
    kind: Kind,
    load: Load,
    splits: Sequence[int],
    methods: Iterable[Method],
    table: CalibrationTable,
    again: bool = False,
    report: Callable[[str], None] = print,
) -> int:
    """Run the methods on the splits of a data set and return how many lines were added.

    A method that fails is reported and left out, so that the others go on.
    """
    done = set() if again else set(table.lines())
    methods = list(methods)
    open_splits = [k for k in splits if any(Key(name, k, each.name, each.fingerprint) not in done for each in methods)]
    if not open_splits:
        return 0
    added = 0
    for split, problems in load(open_splits).items():
        for method in methods:
            key = Key(name, split, method.name, method.fingerprint)
            if key in done or not all(method.applies_to(problem) for problem in problems):
                continue
            try:
                line = _line(key, kind, method, problems)
            except Exception as error:
                report(f"{name} {split} {method.name}: failed, {type(error).__name__}: {error}")
                continue
            table.append(line)
            added += 1
            report(f"{name} {split} {method.name}: NLL {line.scores['nll']:.4f}, {line.seconds:.1f} s, {line.note}")
    return added


def _line(key: Key, kind: Kind, method: Method, problems: Sequence[Problem]) -> Line:
    answers = [method.predict(problem) for problem in problems]
    predicted = pooled([answer[0] for answer in answers])
    targets = torch.cat([problem.test.targets for problem in problems])
    return Line(
        dataset=key.dataset,
        kind=kind,
        task=problems[0].task,
        split=key.split,
        method=method.name,
        fingerprint=method.fingerprint,
        version=code_version(),
        scores=scores_of(predicted, targets),
        num_test=len(targets),
        seconds=sum(answer[1] for answer in answers),
        note=predicted.note,
    )
