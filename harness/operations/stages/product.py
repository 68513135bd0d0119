"""The product of quantized operands: run on guarded copies, and judged by what its order of summation can give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from narrowgauge.harness.backends.backend import TRUNCATING, Backend
from narrowgauge.harness.backends.results import PARTS
from narrowgauge.harness.checks.bound import bound
from narrowgauge.harness.checks.finding import float_view
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.stages.oracle import bounds
from narrowgauge.harness.operations.stages.outcome import Outcome, Product
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.reference.bounds.bounds import Bounds
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import Summation

Operands = Quantized | Sequence[Quantized]
"""One side of a product, or that of every section of a grouped one."""


def order_of(backend: Backend, a: Operands, b: Operands) -> Summation:
    """What the backend declares of the sums of a product: their order, their accumulator, subnormal numbers."""
    declared, order = backend.declares, backend.gemm_order(a, b)
    return Summation(
        None if order == TRUNCATING else order,
        truncates=TRUNCATING in (order, declared.get("accumulator")),
        flushes=declared.get("subnormals") == "flushed",
    )


def named(q: Quantized, name: str) -> Tensors:
    """What of an operand is bytes, under its name."""
    return {f"{name}.{part}": getattr(q, part) for part in PARTS}


def taken(q: Quantized, given: Tensors, name: str) -> Quantized:
    """The operand `q`, made of the tensors that `named` gave."""
    parts = {part: given[f"{name}.{part}"] for part in PARTS}
    return Quantized(**parts, recipe=q.recipe, shape=q.shape, transposed=q.transposed)  # type: ignore[arg-type]


def addends(given: Tensors) -> dict[str, torch.Tensor]:
    """c and bias, those that there are."""
    return {key: tensor for key in ("c", "bias") if (tensor := given[key]) is not None}


def operands_given(a: Quantized, b: Quantized, inputs: Inputs) -> Tensors:
    """What a product is given, by name."""
    return {**named(a, "a"), **named(b, "b"), "c": inputs.c, "bias": inputs.bias}


def judge_product(
    outcome: Outcome, a: Quantized, b: Quantized, inputs: Inputs, backend: Backend, out_dtype: torch.dtype
) -> torch.Tensor:
    """Run and judge gemm of two operands; gives the output (M, N)."""
    shape = (a.shape[0], b.shape[0])

    orders: list[Summation] = []

    def call(given: Tensors) -> Tensors:
        left, right = taken(a, given, "a"), taken(b, given, "b")
        options = {"out_dtype": out_dtype, **addends(given)}
        output = backend.tensor("gemm", shape, out_dtype, left, right, **options)
        if not orders:  # once, where they are already
            orders.append(order_of(backend, left, right))
        return {"output": output}

    outputs, protection, outcome.seconds = repeated(backend, inputs.x.device, operands_given(a, b, inputs), call)
    add_protection(outcome, protection)
    (order,) = orders
    limits = bounds(a, b, out_dtype=out_dtype, c=inputs.c, bias=inputs.bias, order=order)
    output = outputs["output"]
    assert output is not None
    add_output(outcome, output, limits)
    outcome.products.append(Product(a, b, inputs.c, inputs.bias, output, limits, order))
    kept = {f"{name}.{part}": getattr(q, part) for name, q in (("a", a), ("b", b)) for part in ("codes", "scales")}
    outcome.outputs = {**outcome.outputs, **kept, **outputs}
    return output


def add_protection(outcome: Outcome, protection: list[StageResult]) -> None:
    """Keep the stages `memory` and `repeat` of a run: as one with those of the run before it."""
    known = {stage.stage: stage for stage in outcome.stages}
    for stage in protection:
        if stage.stage in known:
            known[stage.stage].add(stage)
        else:
            outcome.stages.append(stage)


def rule_at(limits: Bounds, here: tuple[int, int]) -> str:
    """How an output is judged: `exact`, by the `order` that is declared, or by the `bound` of any order."""
    if int(limits.tier[here]) == 1:
        return "order"
    return "exact" if bool(limits.exact[here]) else "bound"


def add_output(outcome: Outcome, output: torch.Tensor, limits: Bounds) -> None:
    """Judge the output (M, N) and keep it."""
    outcome.stages.append(output_stage("output", output, limits))
    outcome.actual, outcome.expected, outcome.limits = output, limits.expected, limits


def output_stage(name: str, output: torch.Tensor, limits: Bounds, *, figures: bool = True) -> StageResult:
    """Judge an output (M, N) by its bounds, as the stage of that name; `figures` as of `bound`."""

    def describe(row: int, column: int) -> dict[str, Any]:
        here = (row, column)
        parts = {
            "expected": limits.expected[here], "lower": limits.lower[here], "upper": limits.upper[here],
            "actual": output[here],
        }  # fmt: skip
        found: dict[str, Any] = {"row": row, "column": column, "tile": f"({row // 128}, {column // 128})"}
        for part, value in parts.items():
            found[part], found[f"{part}_bits"] = float_view(value)
        found["rule"] = rule_at(limits, here)
        return found

    return bound(name, output, limits, describe=describe, figures=figures)
