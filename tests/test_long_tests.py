"""The list of long tests names tests that exist, and is chosen from core-seconds."""

import ast
from functools import cache

from tests.long_tests import chosen, long_tests
from tests.paths import ROOT


@cache
def functions_of(file: str) -> frozenset[str]:
    """Names of the functions and methods of a file of tests."""
    path = ROOT / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_long_test_exists() -> None:
    tests = {line.partition("[")[0] for line in long_tests()}
    assert [t for t in sorted(tests) if t.rpartition("::")[2] not in functions_of(t.partition("::")[0])] == []


def test_long_tests_are_chosen_by_their_core_seconds() -> None:
    seconds = {
        "a::short": 0.05, "a::only": 0.4, "a::long": 1.1, "a::mixed[x]": 0.05, "a::mixed[y]": 0.2, "a::alike[x]": 0.4,
        "a::alike[y]": 0.3,
        **{f"a::many[{n}]": 0.03 + n / 1000 for n in range(10)},
    }  # fmt: skip
    left = [f"a::many[{n}]" for n in range(6, 10)]
    assert chosen(seconds) == sorted(["a::alike[x]", "a::long", "a::mixed[y]", *left])
