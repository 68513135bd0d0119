"""A layout of block scales, there and back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.guard import POISON
from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.backends.results import TensorForm
from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.finding import make_finding
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.pack_scales.case import ScaleLayoutCase
from narrowgauge.harness.operations.pack_scales.deviations import (
    mantissas_in_words,
    wrong_layouts,
    wrong_reads,
)
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.harness.operations.stages.table import Place, Table, neighbours, place_in
from narrowgauge.spec.arguments import SIGN_AND_MANTISSA
from narrowgauge.spec.scale_layouts import Packing


def judge_layout(case: ScaleLayoutCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge the method that packs scales, padding included, and the method that unpacks the result, if
    present."""
    packing, (pack, unpack) = case.packing, case.all_methods()
    first, second, *rest = case.stage_names()
    scales, arguments = inputs.x.view(packing.shape), case.packing_arguments
    sizes = None if packing.sections is None else torch.tensor(packing.sections, device=scales.device)
    free = packing.cells("any") | packing.cells("absent")
    runs: list[Tensors] = []

    def call(given: Tensors) -> Tensors:
        options = {"sections": given["sections"]} if "sections" in given else {}
        outputs = backend.results(
            pack, {"swizzled": TensorForm(packing.packed_shape, torch.uint8)}, given["scales"], *arguments, **options
        )
        with suppress(Unsupported):  # a backend may pack only
            form = {"linear": TensorForm(packing.shape, torch.uint8)}
            outputs |= backend.results(unpack, form, outputs["swizzled"], packing.shape, *arguments, **options)
        return outputs

    given = {"scales": scales, "sections": sizes}
    if scales.dtype == torch.float32 and bool((scales.view(torch.int32) & SIGN_AND_MANTISSA).any()):
        return _refusal(case, scales, partial(repeated, backend, scales.device, given, call, free={"swizzled": free}))
    outputs, protection, seconds = repeated(
        backend, scales.device, given, call, free={"swizzled": free}, runs=runs
    )  # fmt: skip
    if scales.dtype == torch.float32:
        scales = scales.view(torch.int32).bitwise_right_shift(23).to(torch.uint8)
    packed = dense(outputs["swizzled"])
    outcome = Outcome(protection, outputs, seconds=seconds, packing=packing)
    outcome.causes[first] = partial(wrong_layouts, packing, scales, packed)
    linear = packing.unpack(packed)
    stage = _bytes(first, linear, scales, packing)
    padding = _padding(packing, [dense(run["swizzled"]) for run in runs[:2]])
    if rest:
        outcome.causes[padding.stage] = partial(wrong_layouts, packing, scales, packed)
    else:
        stage.compared = packed.numel()
        stage.mismatches += padding.mismatches
        stage.sentence = stage.sentence or padding.sentence
    outcome.stages.append(stage)
    if (found := outputs.get("linear")) is not None:
        outcome.causes[second] = partial(wrong_reads, packing, packed, dense(found))
        outcome.stages.append(_bytes(second, found, linear, packing))
    if rest and padding.compared:
        outcome.stages.append(padding)
    return outcome


def _refusal(case: ScaleLayoutCase, scales: torch.Tensor, run: Callable[[], Any]) -> Outcome:
    """The outcome for scales that the layout refuses: a kernel raises ValueError or TypeError."""
    packing = case.packing
    stage = StageResult(case.stage_names()[0], "exact", 1)
    try:
        outputs, protection, seconds = run()
    except BackendError as error:
        if not any(f"raised {name}" in str(error) for name in ("ValueError", "TypeError")):
            raise
        return Outcome([stage])
    stage.mismatches, stage.sentence = 1, "scales that are no powers of two are packed, and not refused"
    outcome = Outcome([*protection, stage], outputs, seconds=seconds)
    outcome.causes[stage.stage] = partial(mantissas_in_words, packing, scales, dense(outputs["swizzled"]))
    return outcome


def _padding(packing: Packing, runs: list[torch.Tensor]) -> StageResult:
    """Cells of padding of a run and of a second run with another poison: 0, or not written. The memory of a kernel is
    known to be poisoned if some of these cells hold the poison of both runs."""
    result = StageResult("padding", "exact", 0)
    zeros, absent = packing.cells("0"), packing.cells("absent")
    result.compared = int(zeros.sum())
    result.mismatches = int((runs[0].cpu()[zeros] != 0).sum())
    if result.mismatches:
        of = f"{format_count(result.mismatches)} of {format_count(result.compared)}"
        result.sentence = f"{of} padding bytes are not 0"
    if len(runs) > 1 and bool(absent.any()):
        untouched = (runs[0].cpu()[absent] == POISON[0]) & (runs[1].cpu()[absent] == POISON[1])
        if bool(untouched.any()):
            result.compared += untouched.numel()
            written = int((~untouched).sum())
            result.mismatches += written
            if written and not result.sentence:
                of = f"{format_count(written)} of {format_count(untouched.numel())}"
                result.sentence = f"{of} bytes of absent cells are written"
    return result


def _bytes(stage: str, actual: torch.Tensor, expected: torch.Tensor, packing: Packing) -> StageResult:
    actual, expected = (tensor.flatten(0, -2) for tensor in (actual, expected))
    result = StageResult(stage, "exact", expected.numel())
    wrong = actual != expected
    if not bool(wrong.any()):
        return result
    height, width = packing.layout.tile

    def describe(row: int, column: int) -> dict[str, Any]:
        return {
            "row": row, "column": column, "tile": f"({row // height}, {column // width})",
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


def layout_table(inputs: Inputs, outcome: Outcome, place: Place | None) -> Table | None:
    """The row of a byte, and the bytes that are read back from its layout."""
    if outcome.packing is None or not inputs.x.numel():
        return None
    first = next((stage.stage for stage in outcome.stages if stage.finding is not None), "")
    row, column = place_in(outcome, first, place, inputs.x.shape)
    linear = outcome.packing.unpack(outcome.outputs["swizzled"]).view(inputs.x.shape)
    scales = inputs.x if inputs.x.dtype == torch.uint8 else inputs.x.view(torch.int32) >> 23
    table = Table(f"row {row}", ("column", "byte", "read back"))
    for neighbour in neighbours(row, column, scales):
        expected, actual = (f"0x{int(t[neighbour]):02X}" for t in (scales, linear))
        table.add_row(str(neighbour[1]), expected, actual, style="" if expected == actual else "bold red")
    return table
