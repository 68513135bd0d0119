"""The layout of block scales that tensor cores read, there and back."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.backends.results import TensorForm
from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.finding import make_finding
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import padding
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.harness.operations.swizzle.case import SwizzleCase
from narrowgauge.harness.operations.swizzle.deviations import wrong_layouts, wrong_reads
from narrowgauge.spec.scale_layouts import LAYOUTS, TILES


def judge_swizzle(case: SwizzleCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge swizzle of the bytes (R, C), padding included, and unswizzle of the result where there is one."""
    scales, shape = inputs.x, (inputs.x.shape[0], inputs.x.shape[1])
    padded = LAYOUTS[TILES].padded_shape(shape)

    def call(given: Tensors) -> Tensors:
        outputs = backend.results("swizzle", {"swizzled": TensorForm(padded, torch.uint8)}, given["scales"])
        with suppress(Unsupported):  # swizzle is judged without unswizzle too
            form = {"linear": TensorForm(shape, torch.uint8)}
            outputs |= backend.results("unswizzle", form, outputs["swizzled"], shape)
        return outputs

    outputs, protection, seconds = repeated(backend, scales.device, {"scales": scales}, call)
    swizzled = outputs["swizzled"]
    outcome = Outcome(protection, outputs, seconds=seconds)
    outcome.causes["layout"] = partial(wrong_layouts, scales, dense(swizzled))
    outcome.stages.append(_layout(swizzled, scales))
    if (linear := outputs.get("linear")) is not None:
        outcome.causes["unswizzle"] = partial(wrong_reads, dense(swizzled), dense(linear))
        outcome.stages.append(_bytes("unswizzle", linear, reference.unswizzle(swizzled, shape)))
    return outcome


def _layout(swizzled: torch.Tensor, scales: torch.Tensor) -> StageResult:
    """Every byte where it belongs, seen in the linear order, and zeros in the padding."""
    linear = reference.unswizzle(swizzled, (scales.shape[0], scales.shape[1]))
    result = _bytes("layout", linear, scales)
    wrong, sentence = padding(swizzled, linear, TILES)
    result.compared = swizzled.numel()
    result.mismatches += wrong
    result.sentence = result.sentence or sentence
    return result


def _bytes(stage: str, actual: torch.Tensor, expected: torch.Tensor) -> StageResult:
    result = StageResult(stage, "exact", expected.numel())
    wrong = actual != expected
    if not bool(wrong.any()):
        return result

    def describe(row: int, column: int) -> dict[str, Any]:
        return {
            "row": row, "column": column, "tile": f"({row // 128}, {column // 4})",
            "expected": int(expected[row, column]), "actual": int(actual[row, column]),
        }  # fmt: skip

    result.mismatches = int(wrong.sum())
    rows, columns = wrong.nonzero(as_tuple=True)
    where = f"the first at row {int(rows[0])}, column {int(columns[0])}"
    count = f"{format_count(result.mismatches)} of {format_count(result.compared)} bytes"
    result.sentence = f"{count} are not in their place, {where}"
    result.wrong_elements = wrong
    result.finding = make_finding(stage, "exact", result.sentence, wrong, None, describe=describe)
    return result
