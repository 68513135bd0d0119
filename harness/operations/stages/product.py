"""The product of quantized operands: run on guarded copies, and judged by what its order of summation can give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from narrowgauge.harness.backends.backend import TRUNCATING, Backend
from narrowgauge.harness.backends.results import QUANTIZED_PARTS
from narrowgauge.harness.checks.finding import float_view
from narrowgauge.harness.checks.gemm_bound import check_bounds
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import ProductInputs, laid_out
from narrowgauge.harness.operations.stages.oracle import bounds
from narrowgauge.harness.operations.stages.outcome import Outcome, Product
from narrowgauge.harness.operations.stages.probed_order import ProbedOrder
from narrowgauge.harness.operations.stages.quantized import made_of
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.reference.bounds.bounds import Bounds
from narrowgauge.reference.quantize.layout import linear_scales
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import Summation

Operands = Quantized | Sequence[Quantized]
"""An operand of a product, or the operands of all sections of a grouped product."""


def order_of(backend: Backend, a: Operands, b: Operands) -> Summation:
    """Declarations of the backend about the sums of a product: operands, order, accumulator, subnormal numbers.

    An order of this product replaces the declaration of operands.
    """
    declared, order = backend.declares, backend.gemm_order(a, b)
    return Summation(
        None if order == TRUNCATING else order,
        operands=declared.get("operands") if order in (None, TRUNCATING) else None,
        truncates=TRUNCATING in (order, declared.get("accumulator")),
        flushes=declared.get("subnormals") == "flushed",
    )


def named(q: Quantized, name: str) -> dict[str, torch.Tensor | None]:
    """The tensors of an operand by name, such as `a.codes`; `made_of` is the inverse."""
    return {f"{name}.{part}": getattr(q, part) for part in QUANTIZED_PARTS}


def addends(given: Tensors) -> Tensors:
    """c and bias, if they are among the arguments."""
    return {name: given[name] for name in ("c", "bias") if name in given}


def product_arguments(
    a: Quantized, b: Quantized, inputs: ProductInputs, view: str = "contiguous"
) -> dict[str, torch.Tensor | None]:
    """The arguments of a product by name. `view`: memory of c and bias (`laid_out`)."""
    c, bias = (None if addend is None else laid_out(addend, view) for addend in (inputs.c, inputs.bias))
    return {**named(a, "a"), **named(b, "b"), "c": c, "bias": bias}


def _linear(q: Quantized) -> Quantized:
    """`q` with linear scales, as the bounds and the diagnosis read them."""
    return replace(q, scales=linear_scales(q), swizzled=False) if q.swizzled else q


def judge_product(
    outcome: Outcome,
    a: Quantized,
    b: Quantized,
    inputs: ProductInputs,
    backend: Backend,
    out_dtype: torch.dtype,
    *,
    view: str = "contiguous",
    bands: Sequence[slice] = (),
) -> torch.Tensor:
    """Run and judge gemm of two operands, and return the output (M, N). `view`: memory of c and bias (`laid_out`).
    `bands`: the rows of the output that are judged, and returned; empty: all rows.
    """
    shape = (a.shape[0], b.shape[0])

    orders: list[Summation] = []

    def call(given: Tensors) -> Tensors:
        left, right = made_of(given, a, "a."), made_of(given, b, "b.")
        options = {"out_dtype": out_dtype, **addends(given)}
        output = backend.tensor("gemm", shape, out_dtype, left, right, **options)
        if not orders:  # one call, with operands that are on the device of the backend
            orders.append(order_of(backend, left, right))
        return {"output": output}

    arguments = product_arguments(a, b, inputs, view)
    outputs, protection, outcome.seconds = repeated(backend, inputs.x.device, arguments, call)
    add_protection(outcome, protection)
    (order,) = orders
    operands = _rows_of(_linear(a), bands), _linear(b)
    outputs = {"output": _in_bands(outputs["output"], bands)}
    limits = bounds(*operands, out_dtype=out_dtype, c=inputs.c, bias=inputs.bias, order=order)
    if backend.probes_order and order.order is None:
        addend = inputs.c is not None or inputs.bias is not None
        probed = ProbedOrder.of(backend, a, b, out_dtype, addend=addend)
        narrowed = probed.narrowed(operands, limits, order, out_dtype)
        outcome.notes.append({"cause": "order-probed", "sentence": narrowed.sentence})
        limits, order = narrowed.limits, narrowed.order
    output = outputs["output"]
    add_output(outcome, output, limits)
    outcome.products.append(Product(*operands, inputs.c, inputs.bias, output, limits, order))
    stored = {"a.codes": a.codes, "a.scales": a.scales, "b.codes": b.codes, "b.scales": b.scales}
    outcome.outputs = {**outcome.outputs, **stored, **outputs}
    return output


def note_any_order(outcome: Outcome, backend: Backend, order: Summation) -> None:
    """Say why a grouped product is judged in any order if the backend asks for a probe.

    A library may choose another kernel for a single section, so a probe of one section says nothing about the call.
    """
    if backend.probes_order and order.order is None:
        text = "judged in any order: the products of a grouped GEMM are not probed"
        outcome.notes.append({"cause": "order-probed", "sentence": text})


def _in_bands(tensor: torch.Tensor, bands: Sequence[slice]) -> torch.Tensor:
    return torch.cat([tensor[band] for band in bands]) if bands else tensor


def _rows_of(q: Quantized, bands: Sequence[slice]) -> Quantized:
    """The rows of an operand that lie in the bands. Each row has scales of its own, or the operand has a single one."""
    if not bands:
        return q
    codes, scales = _in_bands(q.codes, bands), q.scales if q.recipe.whole else _in_bands(q.scales, bands)
    return replace(q, codes=codes, scales=scales, shape=(len(codes), q.shape[1]))


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
