"""An operation is one folder: no further code names an operation, and no table has operations as keys."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from narrowgauge.harness.cases.operations import OPERATIONS
from tests.paths import ROOT

HOMES = tuple(f"harness/operations/{name.replace('-', '_')}/" for name in OPERATIONS)
"""Folders of the operations."""
SEARCHED = ("harness", "narrowgauge/spec", "narrowgauge/adapt")
"""Other code: `reference` and `native` have the arithmetic of the operations."""
EXEMPT = ("harness/api/", "harness/backends/adapters/", "harness/operations/modules/")
"""Public functions with an operation in their name, libraries with their methods, and what the modules share."""
HOMONYMS = {
    ("narrowgauge/spec/scale_layouts.py", "linear"),
    ("narrowgauge/spec/program.py", "gemm"),
    ("narrowgauge/spec/program.py", "quantize"),
    ("harness/diagnosis/formulas/explain_formula.py", "attention"),
    ("harness/diagnosis/formulas/wrong_forwards.py", "attention"),
}
"""Words of users that mean something else: the layout of scales `linear`, steps of a contract, and the attention of a
transformer layer."""


def named(text: str) -> Iterator[str]:
    """Operations that a file names: string literals, keys among them, and classes of cases in isinstance and match."""
    classes = {cls.__name__ for cls in OPERATIONS.values()}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in OPERATIONS:
            yield node.value
        tested: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            tested = list(ast.walk(node.args[1]))
        elif isinstance(node, ast.MatchClass):
            tested = [node.cls]
        yield from (part.id for part in tested if isinstance(part, ast.Name) and part.id in classes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('TABLE = {"swizzle": 1}', ["swizzle"]),
        ('if case.operation == "gemm-grouped": pass', ["gemm-grouped"]),
        ("isinstance(case, GemmCase | SwizzleCase)", ["GemmCase", "SwizzleCase"]),
        ("match case:\n    case QuantizeCase(): pass", ["QuantizeCase"]),
        ('TABLE = {"swizzled": quantize}', []),
    ],
)
def test_every_form_of_a_name_is_found(text: str, expected: list[str]) -> None:
    assert sorted(named(text)) == sorted(expected)


def test_no_code_outside_of_an_operation_names_it() -> None:
    files = [path for folder in SEARCHED for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {
        (place, name)
        for path in files
        if not (place := path.relative_to(ROOT).as_posix()).startswith((*HOMES, *EXEMPT))
        for name in named(path.read_text(encoding="utf-8"))
    }
    assert found == HOMONYMS


def test_cases_of_operations_import_no_torch() -> None:
    files = [path for home in HOMES if (path := ROOT / home / "case.py").is_file()]
    assert len(files) >= 12
    assert not [path for path in files if "torch" in _imports(path.read_text(encoding="utf-8"))]


def _imports(text: str) -> set[str]:
    nodes = ast.walk(ast.parse(text))
    return {
        name.partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [entry.name for entry in node.names])
    }
