"""The product of quantized operands: run on guarded copies, and judged by what its order of summation can give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from narrowgauge.harness.backends.backend import TRUNCATING, Backend
from narrowgauge.harness.backends.results import QUANTIZED_PARTS
from narrowgauge.harness.checks.finding import float_view
from narrowgauge.harness.checks.gemm_bound import check_bounds
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import ProductInputs
from narrowgauge.harness.operations.stages.oracle import bounds
from narrowgauge.harness.operations.stages.outcome import Outcome, Product
from narrowgauge.harness.operations.stages.quantized import made_of
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.reference.bounds.bounds import Bounds
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import Summation

Operands = Quantized | Sequence[Quantized]
"""An operand of a product, or the operands of all sections of a grouped product."""


def order_of(backend: Backend, a: Operands, b: Operands) -> Summation:
    """Declarations of the backend about the sums of a product: order, accumulator, subnormal numbers."""
    declared, order = backend.declares, backend.gemm_order(a, b)
    return Summation(
        None if order == TRUNCATING else order,
        truncates=TRUNCATING in (order, declared.get("accumulator")),
        flushes=declared.get("subnormals") == "flushed",
    )


def named(q: Quantized, name: str) -> dict[str, torch.Tensor | None]:
    """The tensors of an operand by name, such as `a.codes`; `made_of` is the inverse."""
    return {f"{name}.{part}": getattr(q, part) for part in QUANTIZED_PARTS}


def addends(given: Tensors) -> Tensors:
    """c and bias, if they are among the arguments."""
    return {name: given[name] for name in ("c", "bias") if name in given}


def product_arguments(a: Quantized, b: Quantized, inputs: ProductInputs) -> dict[str, torch.Tensor | None]:
    """The arguments of a product by name."""
    return {**named(a, "a"), **named(b, "b"), "c": inputs.c, "bias": inputs.bias}


def judge_product(
    outcome: Outcome, a: Quantized, b: Quantized, inputs: ProductInputs, backend: Backend, out_dtype: torch.dtype
) -> torch.Tensor:
    """Run and judge gemm of two operands, and return the output (M, N)."""
    shape = (a.shape[0], b.shape[0])

    orders: list[Summation] = []

    def call(given: Tensors) -> Tensors:
        left, right = made_of(given, a, "a."), made_of(given, b, "b.")
        options = {"out_dtype": out_dtype, **addends(given)}
        output = backend.tensor("gemm", shape, out_dtype, left, right, **options)
        if not orders:  # one call, with operands that are on the device of the backend
            orders.append(order_of(backend, left, right))
        return {"output": output}

    outputs, protection, outcome.seconds = repeated(backend, inputs.x.device, product_arguments(a, b, inputs), call)
    add_protection(outcome, protection)
    (order,) = orders
    limits = bounds(a, b, out_dtype=out_dtype, c=inputs.c, bias=inputs.bias, order=order)
    output = outputs["output"]
    add_output(outcome, output, limits)
    outcome.products.append(Product(a, b, inputs.c, inputs.bias, output, limits, order))
    operands = {"a.codes": a.codes, "a.scales": a.scales, "b.codes": b.codes, "b.scales": b.scales}
    outcome.outputs = {**outcome.outputs, **operands, **outputs}
    return output


def add_protection(outcome: Outcome, protection: list[StageResult]) -> None:
    """Keep the stages `memory` and `repeat` of a run, joined with those of an earlier run."""
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

    return check_bounds(name, output, limits, describe=describe, figures=figures)
