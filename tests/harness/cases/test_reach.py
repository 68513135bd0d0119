"""What the committed cases reach: every argument of every method, and sizes beyond the limits of grids and indices."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from narrowgauge.harness.backends import backend as protocol
from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.case import Case, select
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.cases.keys import keys_of
from narrowgauge.harness.cases.operations import all_methods
from narrowgauge.harness.operations.gemm.case import GemmCase, ProductCase
from narrowgauge.harness.operations.modules.case import ModuleCase
from narrowgauge.harness.running.runner import run_case
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe
from tests.matrix import all_cases, quick_cases
from tests.paths import CASES

FUNCTIONS = [name for name in all_methods() if inspect.isfunction(getattr(reference, name, None))]
ALL, QUICK = all_cases(), quick_cases()
TABLES = [case for case in ALL if not case.file.endswith("pairs.toml")]
"""Cases of tables: a recipe in them has all families and shapes, and a case of a pair is alone."""


def keywords(method: str) -> set[str]:
    """The keywords of a method in the signatures of the reference and of the kernels, and in the two lists of methods
    for authors of backends."""
    signatures = (inspect.signature(getattr(ops, method)) for ops in (reference, native))
    # A backend is asked for a layout by `swizzled`, the other word of `scales`.
    found = {name for s in signatures for name, p in s.parameters.items() if p.kind is p.KEYWORD_ONLY} - {"scales"}
    page = (CASES.parent / "docs" / "backends.md").read_text(encoding="utf-8")
    for text in (protocol.__doc__ or "", page):
        (listed,) = re.findall(rf"{method}\(([^)]*)\)", text)[:1]
        _, _, named = listed.partition("*, ")
        found |= {part.partition("=")[0].strip() for part in named.split(",") if part}
    return found


class Recorder:
    """The reference as a backend. Records the keywords that every method is called with."""

    def __init__(self) -> None:
        self.passed: defaultdict[str, set[str]] = defaultdict(set)
        self.backend = SimpleNamespace(**{name: self._recorded(name) for name in FUNCTIONS})

    def _recorded(self, name: str) -> Any:
        function = getattr(reference, name)

        @functools.wraps(function)
        def recorded(*arguments: Any, **options: Any) -> Any:
            self.passed[name] |= options.keys()
            return function(*arguments, **options)

        return recorded


def kinds(case: Case) -> list[tuple[object, ...]]:
    """Properties that decide the keywords of a case: operation, usage, and each option or property of its recipe. A
    grouping decides the method."""
    recipes = [find_recipe(name) for name in (*case.recipe_names, getattr(case, "out_recipe", None)) if name]
    options = [choice for recipe in recipes for choice in (recipe.tensor_scale, recipe.rounding)]
    optional = (key for key in keys_of(type(case)) if not key.required and key.name not in ("view", "layout"))
    changed = ((key, getattr(case, key.field)) for key in optional)
    options += [
        f"{key.name} {value if key.name == 'grouping' else ''}" for key, value in changed if value != key.default
    ]
    return [(case.operation, getattr(case, "usage", ""), option) for option in options]


def test_every_keyword_of_every_method_is_passed_by_a_quick_case() -> None:
    smallest: dict[tuple[object, ...], Case] = {}
    others = (case for case in QUICK if not isinstance(case, ModuleCase | ContractCase))
    for case in sorted(others, key=lambda case: case.work, reverse=True):
        smallest |= dict.fromkeys(kinds(case), case) if case.work else {}
    recorder = Recorder()
    backend = Backend.local("recorder", recorder.backend)
    for case in dict.fromkeys(smallest.values()):
        # The number of calls decides no keyword.
        record = run_case(replace(case, repeats=min(case.repeats, 8)), backend)
        assert record.verdict == "pass", (case.id, record.message)
    missing = {name: keywords(name) - recorder.passed[name] for name in FUNCTIONS}
    assert not {name: options for name, options in missing.items() if options}


SIDES = {
    "quantize": "MK", "transform": "MK", "quantize-grouped": "MK", "swizzle": "RC", "update-scale": "HN", "gemm": "MKN",
    "gemm-grouped": "MKN", "gemm-quantized": "MKN",
}  # fmt: skip
"""Sides of the shapes of each operation."""
PATHS = (4096, 8192, 16384)
"""Sizes from which on kernels take a different path."""
GRID = 65535
"""Blocks of threads in the second and third direction of a grid."""
TILE = 128
"""Rows or columns of the largest usual tile of a block of threads."""


def largest(cases: list[Case], operation: str, side: int) -> int:
    """The largest size of a side, among shapes with as many sizes as the operation has sides."""
    shapes = (case.shape for case in cases if case.operation == operation and all(case.shape))
    return max(shape[side] for shape in shapes if len(shape) == len(SIDES[operation]))


@pytest.mark.parametrize(("operation", "side"), [(name, n) for name, sides in SIDES.items() for n in range(len(sides))])
def test_every_side_exceeds_the_limits_of_paths_and_grids(operation: str, side: int) -> None:
    assert largest(QUICK, operation, side) > max(PATHS)
    # K of a product is no side of a grid: its blocks of 16 elements are counted.
    blocks = 16 if SIDES[operation] == "MKN" and side == 1 else TILE
    assert largest(ALL, operation, side) > GRID * blocks


def test_quick_cases_exceed_the_blocks_of_a_grid() -> None:
    for operation, side in (("quantize", 0), ("quantize", 1), ("gemm", 0), ("gemm", 2), ("quantize-grouped", 0)):
        assert largest(QUICK, operation, side) > GRID


@pytest.mark.parametrize("operation", ["gemm", "gemm-quantized"])
@pytest.mark.parametrize("side", [0, 2])
def test_a_single_row_or_column_has_every_epilogue(operation: str, side: int) -> None:
    thin = [case for case in QUICK if isinstance(case, GemmCase) and case.operation == operation]
    thin = [case for case in thin if case.shape[side] == 1 and case.shape[2 - side] > 1]
    assert {(case.accumulate, case.bias) for case in thin} == {(c, b) for c in (False, True) for b in (False, True)}


def test_products_have_every_memory_layout() -> None:
    products = [case for case in QUICK if isinstance(case, ProductCase) and case.operation == "gemm"]
    flags = {flag for case in products for flag in case.flags}
    assert {"pitched", "offset-2", "offset-4", "offset-8", "swizzled", "same"} <= flags
    swizzled = [case.shape for case in products if "swizzled" in case.flags]
    assert max(rows for rows, _, _ in swizzled) > 4096 < max(columns for _, _, columns in swizzled)


ALIGNED: list[tuple[str, Callable[[Any], Any]]] = [
    *(
        (name, part)
        for name in ("quantize", "transform")
        for part in (
            lambda case: (case.recipe_label, case.inputs),
            lambda case: (case.recipe_label, case.dtype),
            lambda case: (case.inputs, case.dtype),
        )
    ),
    ("quantize-grouped", lambda case: case.recipe_label),
    ("gemm", lambda case: case.recipe_label),
    ("gemm", lambda case: (case.recipe, case.inputs)),
    ("gemm-grouped", lambda case: case.recipe_label),
    ("gemm-quantized", lambda case: case.recipe_label),
]
"""An operation, and a part of its cases that the quick tier of a GPU has on multiples of 128: many kernels take no
others. A CPU has every recipe and every family."""


def not_aligned(operation: str, part: Callable[[Any], Any], device: str) -> list[Any]:
    """What the quick tier of a device has on multiples of 128 in no case of a table."""
    cases = [case for case in select(TABLES, tier="quick", device=device) if case.operation == operation]
    return sorted({part(case) for case in cases} - {part(case) for case in cases if is_aligned(case)})


@pytest.mark.parametrize(("operation", "part"), ALIGNED)
def test_every_recipe_and_family_has_aligned_shapes(operation: str, part: Callable[[Any], Any]) -> None:
    assert not_aligned(operation, part, "cuda") == []


@pytest.mark.parametrize("operation", sorted({operation for operation, _ in ALIGNED}))
def test_a_cpu_has_each_recipe_and_family_aligned(operation: str) -> None:
    assert not_aligned(operation, lambda case: case.recipe_label, "cpu") == []
    if operation in ("quantize", "transform"):
        assert not_aligned(operation, lambda case: case.inputs, "cpu") == []


def test_every_recipe_has_shapes_of_models_in_quick_on_a_gpu() -> None:
    quick = set(select(TABLES, tier="quick"))
    shapes = {(128, 7168), (1, 7168, 2048), (16, 7168, 2048), (128, 7168, 2048)}
    more = [case for case in select(TABLES, tier="quick", device="cuda") if case not in quick and case.shape in shapes]
    assert {case.shape for case in more} == shapes
    assert len(more) <= 150  # they take a GPU half a minute
    for operation in ("quantize", "gemm"):
        names, models = (
            {name for case in cases if case.operation == operation for name in case.recipe_names if "@" not in name}
            for cases in (quick, more)
        )
        assert sorted(names - models) == []


def is_aligned(case: Case) -> bool:
    """Whether the extents of a matrix, or N and K of a product, are multiples of 128. Kernels often take any M."""
    sizes = case.shape[1:] if isinstance(case, ProductCase) else (math.prod(case.shape[:-1]), case.shape[-1])
    return all(size and size % 128 == 0 for size in sizes)
