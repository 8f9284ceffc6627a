"""The package is built in layers: a module imports from its own layer and from those below it alone, without cycles."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import sublaplace

ROOT = Path(sublaplace.__file__).parent
LAYERS = [
    "data",
    "runtime",
    "model",
    "jacobians",
    "projection",
    "curvature",
    "projectors",
    "posteriors",
    "options",
    "arguments",
    "metrics",
    "conformal",
    "evaluation",
    "fitting",
    "predicting",
    "former_names",
    "laplace",
    "ood",
    "active",
    "plot",
    "sklearn",
    "botorch",
    "after_training",
    "lightning",
    "transformers",
]
"""From the bottom upwards; each is a folder or a single module."""


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}


def under_type_checking(tree):
    """The imports that only type checkers read."""
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }


def imported(name, source, for_types=True):
    """The modules of this package that a source imports, wherever in it the import stands."""
    tree = ast.parse(source)
    skipped = set() if for_types else under_type_checking(tree)
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if name in PACKAGES else name.split(".")[:-1]
                start = package[: len(package) - node.level + 1]
                base = ".".join([*start, node.module] if node.module else start)
            for alias in node.names:
                inner = f"{base}.{alias.name}"  # a module, or a name in one
                found.add(inner if inner in FILES else base)
    return {other for other in found if other.split(".")[0] == "sublaplace"}


def layer_of(name):
    return name.split(".")[1]


MODULES = sorted(FILES.keys() - {"sublaplace"})


def test_every_module_belongs_to_a_layer():
    assert {layer_of(name) for name in MODULES} == set(LAYERS)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_its_own_layer_and_those_below(name):
    others = imported(name, FILES[name].read_text())
    unknown = others - FILES.keys()
    assert not unknown, f"{name} imports {unknown}, which does not exist"
    assert "sublaplace" not in others, f"{name} imports from the package's front door"
    allowed = LAYERS[: LAYERS.index(layer_of(name)) + 1]
    wrong = sorted(other for other in others if layer_of(other) not in allowed)
    assert not wrong, f"{name} imports from above: {', '.join(wrong)}"


@pytest.mark.parametrize("for_types", [False, True], ids=["when run", "for type checkers too"])
def test_no_module_imports_itself_by_way_of_others(for_types):
    graph = {name: imported(name, path.read_text(), for_types) - {name} for name, path in FILES.items()}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a cycle: {' → '.join(error.args[1])}")
    assert set(order) == FILES.keys()


def test_the_folders_of_layers_hold_no_code_of_their_own():
    for name in PACKAGES - {"sublaplace"}:
        body = ast.parse(FILES[name].read_text()).body
        # A docstring is no code.
        assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body), name


def test_imports_are_found_in_all_their_spellings():
    for source, expected in (
        ("import sublaplace.model.linalg", "sublaplace.model.linalg"),
        ("from sublaplace.model import linalg", "sublaplace.model.linalg"),
        ("from sublaplace.model.linalg import gram", "sublaplace.model.linalg"),
        ("from .linalg import gram", "sublaplace.model.linalg"),
        ("from . import linalg", "sublaplace.model.linalg"),
        ("from ..data.batches import select", "sublaplace.data.batches"),
        ("def f():\n    from sublaplace import SubspaceLaplace", "sublaplace"),
        ("if TYPE_CHECKING:\n    from sublaplace.laplace import SubspaceLaplace", "sublaplace.laplace"),
    ):
        assert imported("sublaplace.model.residuals", source) == {expected}, source
    hidden = "if TYPE_CHECKING:\n    from sublaplace.laplace import SubspaceLaplace"
    assert not imported("sublaplace.model.residuals", hidden, for_types=False)
