"""Cases of operations, and a backend with the reference's methods except for the given methods."""

from collections.abc import Iterable
from typing import Any

import pytest

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from tests.harness.sample_backends import backend

REFERENCE = {name: getattr(reference, name) for name in (
    "quantize", "quantize_both", "quantize_grouped", "dequantize", "transform", "swizzle", "unswizzle", "gemm",
    "gemm_grouped",
)}  # fmt: skip


def quantize_case(recipe: str, *flags: str, shape=(48, 64), inputs="normal", dtype="bf16") -> Case:
    return case_from_labels("quantize", recipe, shape, dtype, inputs, flags)


def grouped_case(recipe: str, *flags: str, shape=(96, 64), inputs="normal") -> Case:
    return case_from_labels("quantize-grouped", recipe, shape, "bf16", inputs, flags)


def gemm_case(recipe: str, *flags: str, shape=(48, 64, 32), inputs="normal", operation="gemm") -> Case:
    return case_from_labels(operation, recipe, shape, "bf16xbf16-fp32", inputs, flags)


def half_long(table: Iterable[str]) -> list[Any]:
    """The names of a table as parameters: every second one is a long test."""
    return [
        name if number % 2 == 0 else pytest.param(name, marks=pytest.mark.long) for number, name in enumerate(table)
    ]


def swizzle_case(inputs="position", shape=(256, 12)) -> Case:
    return case_from_labels("swizzle", "", shape, "", inputs)


def packing_case(layout: str, *flags: str, inputs="position", shape=(33, 9)) -> Case:
    return case_from_labels("pack-scales", "", shape, "", inputs, (layout, *flags))


def run(case, **doors):
    return run_case(case, backend(**doors))


def stages(record):
    return {entry["stage"]: entry for entry in record.stages}


def passes(case, **doors):
    record = run(case, **(doors or REFERENCE))
    assert (record.verdict, record.message) == ("pass", ""), case.id
    return record


def fails(case, stage, **doors):
    record = run(case, **{**REFERENCE, **doors})
    assert (record.verdict, record.stage) == ("fail", stage), (case.id, record.message)
    return record
