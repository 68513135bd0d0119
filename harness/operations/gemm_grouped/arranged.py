"""Grouped GEMM of rows of experts in a buffer (`spec.modules.routing.Grouping`): rows of no expert must not matter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.results import TensorForm
from narrowgauge.harness.checks.exact import exact_floats
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.gemm.end_to_end import add_end_to_end
from narrowgauge.harness.operations.gemm.product import add_protection, named, note_any_order, order_of
from narrowgauge.harness.operations.gemm_grouped.case import GroupedGemmCase
from narrowgauge.harness.operations.gemm_grouped.deviations import wrong_arrangement
from narrowgauge.harness.operations.gemm_grouped.judge import add_grouped_output, codes_and_scales, judge_w, judge_x
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import float_views, made_of
from narrowgauge.harness.operations.stages.repeated import Tensors, present, repeated
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.formats import FP32, Format
from narrowgauge.spec.modules.routing import ALIGNMENT, Arrangement, Grouping, arrange
from narrowgauge.spec.quantized import BatchedQuantized, Quantized, joined_sections

_FILLINGS = ("NaN", "zero", "largest")
"""What rows of no expert hold. The first run, which is judged, has the first."""


def judge_arranged(case: GroupedGemmCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge gemm_masked or gemm_contiguous of the sections of x in a buffer.

    Stages: those of the operands; the output of the rows of x, by the bounds of the sections; and `padding`: the same
    bytes if rows of no expert hold zeros or the largest numbers in place of NaN.
    """
    outcome = Outcome()
    sizes = torch.tensor(case.section_sizes, device=inputs.x.device)
    x, w = judge_x(outcome, inputs.x, sizes, case, inputs, backend), judge_w(outcome, case, inputs, backend)
    sections, matrices = [operand.kernel for operand in x], [operand.kernel for operand in w]
    buffer = _Buffer.of(case, sections)
    rows = torch.tensor(buffer.place.rows, dtype=torch.int64, device=inputs.x.device)
    call = partial(_call, buffer, matrices, backend, case)
    arguments = buffer.arguments(_FILLINGS[0], matrices)
    unwritten = torch.ones(buffer.place.height, dtype=torch.bool, device=inputs.x.device)
    unwritten[rows] = False
    free = {"output": unwritten.unsqueeze(1).expand(-1, case.shape[2])}
    outputs, protection, outcome.seconds = repeated(backend, inputs.x.device, arguments, call, free=free)
    add_protection(outcome, protection)
    output = outputs["output"][rows]
    order = order_of(backend, buffer.expected_sections(), matrices)
    add_grouped_output(outcome, output, sections, matrices, inputs, order)
    outcome.causes["output"] = partial(wrong_arrangement, sections, matrices, output, order)
    note_any_order(outcome, backend, order)
    if not backend.brief:
        add_end_to_end(outcome, [(a.own, b.own) for a, b in zip(x, w, strict=True)])
    if buffer.grouping != "sorted-ids":
        others = (call(present(buffer.arguments(filling, matrices)))["output"][rows] for filling in _FILLINGS[1:])
        outcome.stages.append(_same_rows(output, dict(zip(_FILLINGS[1:], others, strict=True))))
    outcome.outputs = {**codes_and_scales(arguments), **outputs}
    return outcome


@dataclass(frozen=True)
class _Buffer:
    """The sections of x in the buffer that a kernel gets."""

    sections: list[Quantized]
    place: Arrangement
    grouping: Grouping
    experts: int

    @staticmethod
    def of(case: GroupedGemmCase, sections: list[Quantized]) -> _Buffer:
        sizes, count = case.section_sizes, sum(case.section_sizes)
        step = next((step for step in (7, 5, 3) if math.gcd(step, count) == 1), 1)
        order = [(step * row + 1) % count for row in range(count)]
        grouping = cast("Grouping", case.grouping)
        return _Buffer(sections, arrange(grouping, sizes, case.alignment, order), grouping, len(sizes))

    @property
    def expected_m(self) -> int:
        """Rows of an expert on average, rounded up."""
        return -(-len(self.place.rows) // self.experts)

    def expected_sections(self) -> list[Quantized]:
        """The sections, and a last section with the remaining rows of the buffer, whose number decides the kernel."""
        known = self.experts * self.expected_m if self.grouping == "masked" else self.place.height
        first, more = self.sections[0], known - len(self.place.rows)
        parts = {"codes": first.codes.new_zeros(more, first.codes.shape[1])}
        if not first.recipe.whole:
            parts["scales"] = first.scales.new_zeros(more, first.scales.shape[1])
        return [*self.sections, replace(first, shape=(more, first.shape[1]), **parts)]  # type: ignore[arg-type]

    def arguments(self, filling: str, matrices: list[Quantized]) -> dict[str, torch.Tensor | None]:
        """The arguments of a product by name."""
        recipe, joined = self.sections[0].recipe, joined_sections(self.sections)
        device, formats = joined["codes"].device, {"codes": recipe.element, "scales": recipe.scale}
        found: dict[str, torch.Tensor | None] = {"a.amax": joined.get("amax"), "a.scales": joined["scales"]}
        found["a.tensor_scale"] = joined.get("tensor_scale")
        for part, fmt in formats.items():
            if part == "codes" or not recipe.whole:
                rows = joined[part]
                buffer = rows.new_full((self.place.height, rows.shape[1]), _filled(fmt, filling))
                buffer[self.place.rows] = rows
                found[f"a.{part}"] = buffer
        found["index"] = torch.tensor(self.place.index, dtype=torch.int32, device=device)
        if self.place.experts or self.grouping == "sorted-ids":
            found["experts"] = torch.tensor(self.place.experts, dtype=torch.int32, device=device)
        for number, matrix in enumerate(matrices):
            found |= named(matrix, f"b{number}")
        return found

    def operand(self, given: Tensors) -> Quantized | BatchedQuantized:
        """The operand a, of the arguments."""
        recipe, columns = self.sections[0].recipe, self.sections[0].shape[1]
        parts: dict[str, Any] = {part: given.get(f"a.{part}") for part in ("codes", "scales", "amax", "tensor_scale")}
        if self.grouping != "masked":
            return Quantized(**parts, recipe=recipe, shape=(self.place.height, columns))
        for name, part in parts.items():
            parts[name] = None if part is None else part.unflatten(0, (self.experts, -1))
        return BatchedQuantized(
            recipe=recipe, shape=(self.experts, self.place.height // self.experts, columns), **parts
        )


def _filled(fmt: Format, filling: str) -> float:
    """What a row of no expert holds: a number, or a code in every nibble of a byte."""
    if fmt is FP32:
        return {"NaN": math.nan, "zero": 0.0, "largest": torch.finfo(torch.float32).max}[filling]
    largest = fmt.max_code if fmt.bits > 4 else fmt.max_code * 0x11
    nan = fmt.nan_code if fmt.bits == 8 else None
    return {"NaN": largest if nan is None else nan, "zero": 0, "largest": largest}[filling]


def _call(
    buffer: _Buffer, matrices: list[Quantized], backend: Backend, case: GroupedGemmCase, given: Tensors
) -> Tensors:
    """The output (rows of the buffer, N)."""
    b = [made_of(given, q, f"b{number}.") for number, q in enumerate(matrices)]
    dtype, columns, place = TORCH_DTYPES[case.out], case.shape[2], buffer.place
    options: dict[str, Any] = {"out_dtype": dtype}
    if buffer.grouping == "masked":
        form = {"output": TensorForm((buffer.experts, place.height // buffer.experts, columns), dtype)}
        options["expected_m"] = buffer.expected_m
        found = backend.results("gemm_masked", form, buffer.operand(given), b, given["index"], **options)
        return {"output": found["output"].flatten(0, 1)}
    if buffer.grouping != "contiguous":
        options["grouping"] = buffer.grouping
    if case.alignment != ALIGNMENT:
        options["alignment"] = case.alignment
    if "experts" in given:
        options["experts"] = given["experts"]
    form = {"output": TensorForm((place.height, columns), dtype)}
    return backend.results("gemm_contiguous", form, buffer.operand(given), b, given["index"], **options)


def _same_rows(output: torch.Tensor, others: Mapping[str, torch.Tensor]) -> StageResult:
    """Compare the outputs of the rows of experts, with changed numbers in the rows of no expert."""
    result = StageResult("padding", "exact", 0)
    for filling, other in others.items():

        def describe(row: int, column: int, other: torch.Tensor = other) -> dict[str, Any]:
            return {"row": row, "column": column, **float_views(output[row, column], other[row, column])}

        noun = f"outputs beside rows of {filling} and of NaN"
        result.add(exact_floats("padding", other, output, noun=noun, describe=describe))
    return result
