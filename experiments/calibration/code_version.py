"""Which code of sublaplace a result comes from."""

import ast
import hashlib
from functools import cache
from pathlib import Path

import sublaplace


@cache
def code_version() -> str:
    """Return the version and a digest of the code, which comments and docstrings do not change."""
    folder = Path(sublaplace.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(ast.dump(without_docstrings(ast.parse(path.read_text()))).encode())
    return f"{sublaplace.__version__}+{digest.hexdigest()[:8]}"


def without_docstrings(tree: ast.Module) -> ast.Module:
    """Remove all texts that stand alone, docstrings among them, in place."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [line for line in body if not _is_text(line)]
    return tree


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)
