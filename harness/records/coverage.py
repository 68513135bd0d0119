"""Coverage of a run: operations, input families, dtypes, shapes, pairs and triples of options."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.inputs.pairs import sets_of_all
from narrowgauge.harness.inputs.reached import joined
from narrowgauge.harness.records.record import elements_compared

_LEAST = 0.5
"""Share of cases, or of values of a row, below which the coverage has a warning."""
_WIDTH = 80
_RECIPES = 4
"""Largest number of recipes with a coverage of numbers in the lines."""
_NAME = 11
"""Columns of a row's name."""


def lines(cases: Iterable[Case], records: Iterable[dict[str, Any]]) -> list[str]:
    """Lines of at most 80 characters on the part of `cases` that has compared elements; empty without cases.

    `cases`: the selected cases, also those that the backend's constraints exclude. The row of operations counts all
    cases. The further rows count the cases of every operation and recipe with at least one compared element: a backend
    without a GEMM has no GEMM's input families to miss. The last line is a warning if less than half is covered.
    """
    of_compared = [record for record in records if elements_compared(record)]
    compared = {record["case"] for record in of_compared}
    known = {case.id: case for case in cases}
    ran = [case for name, case in known.items() if name in compared]
    kinds = {(case.operation, case.recipe_label) for case in ran}
    of_kinds = [case for case in known.values() if (case.operation, case.recipe_label) in kinds]
    if not ran:
        return []
    written = [f"coverage: {len(ran)} of the {len(of_kinds)} cases of these operations and recipes were compared"]
    low = ["cases"] if len(ran) < _LEAST * len(of_kinds) else []
    rows: list[tuple[str, Sequence[Case], Callable[[Case], Iterable[str]]]] = [
        ("operations", list(known.values()), lambda case: [case.operation]),
        ("inputs", of_kinds, lambda case: [case.inputs]),
        ("dtypes", of_kinds, _dtypes),
        ("shapes", of_kinds, shape_classes),
    ]
    for name, selected, values_of in rows:
        values = dict.fromkeys(value for case in selected for value in values_of(case))
        if not values:
            continue
        done = {value for case in ran for value in values_of(case)}
        missing = [value for value in values if value not in done]
        covered = ", ".join(value for value in values if value in done)
        sentence = f"{len(done)} of {len(values)}: {covered}" + (f"; not {', '.join(missing)}" if missing else "")
        written += textwrap.wrap(
            f"{name:<{_NAME}}{sentence}", _WIDTH, subsequent_indent=" " * _NAME, break_on_hyphens=False
        )
        if len(done) < _LEAST * len(values):
            low.append(name)
    full = any(case.tier == "full" for case in ran)
    for name, size, words in [("options", 2, "pairs of values of two keys")] + [("", 3, "triples of values")] * full:
        counts = [len(sets_of_all(some, size)) for some in (ran, of_kinds)]
        written.append(f"{name:<{_NAME}}{counts[0]} of {counts[1]} {words}")
    products = [case for case in ran if case.is_product]
    if products and not any(case.has_exact_sums for case in products):
        sentence = f"{'sums':<{_NAME}}none of {len(products)} products is exact in any order: add the family lattice"
        written += textwrap.wrap(sentence, _WIDTH, subsequent_indent=" " * _NAME)
    numbers = joined((record["recipe"], record["numbers"]) for record in of_compared)
    if numbers:
        shares = [
            f"{recipe} {each.percent}" for recipe, each in sorted(numbers.items(), key=lambda pair: pair[1].share)
        ]
        sentence = f"of the pairs of a scale and a side of a rounding boundary: {', '.join(shares[:_RECIPES])}"
        sentence += f"; {len(shares) - _RECIPES} more recipes up to {shares[-1]}" if len(shares) > _RECIPES else ""
        written += textwrap.wrap(f"{'numbers':<{_NAME}}{sentence}", _WIDTH, subsequent_indent=" " * _NAME)
    if low:
        written += textwrap.wrap(f"warning: less than half of the {' and of the '.join(low)} ran", _WIDTH)
    return written


def shape_classes(case: Case) -> list[str]:
    """Names of the classes of a case's shape: its divisibility, and for matrices and products long K and few rows."""
    if 0 in case.shape:
        return ["empty"]
    matrix, product = hasattr(case, "usage"), hasattr(case, "out")
    sizes = (math.prod(case.shape[:-1]), case.shape[-1]) if matrix else case.shape
    step = next((step for step in (128, 16) if not any(size % step for size in sizes)), 0)
    classes = [f"multiples of {step}" if step else "tails"]
    if matrix or product:
        rows, columns = sizes[:2]
        if columns >= 4096:
            classes.append("K from 4096")
        if rows <= 128 and columns >= 1024:
            classes.append("M to 128 with K from 1024")
    return classes


def _dtypes(case: Case) -> list[str]:
    return [getattr(case, name) for name in ("dtype", "x", "w", "out") if hasattr(case, name)]
