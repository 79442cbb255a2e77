"""Functions stay short enough to be read at once."""

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for package in ("ds_seqpar", "hf_integration") for path in (ROOT / package).rglob("*.py"))


def functions():
    """Name -> lines of every function and method, its docstring included."""
    found = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
    return found


def test_functions_are_short():
    lines = functions()
    assert len(lines) > 500
    longest = sorted(lines, key=lines.get)[-10:]
    assert statistics.median(lines.values()) <= 8, longest
    assert statistics.quantiles(lines.values(), n=10)[-1] <= 25, longest
