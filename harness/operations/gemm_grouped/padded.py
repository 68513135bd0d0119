"""Grouped GEMM of sections that are padded to the alignment of their recipe: padding must change no result."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.backends.guarded_memory import dense, element_bytes
from narrowgauge.harness.backends.results import QUANTIZED_PARTS, TensorForm, padded_rows
from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.exact import exact_floats
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.gemm.end_to_end import add_end_to_end
from narrowgauge.harness.operations.gemm.product import add_protection, note_any_order, order_of
from narrowgauge.harness.operations.gemm_grouped.case import GroupedGemmCase
from narrowgauge.harness.operations.gemm_grouped.deviations import wrong_padding, wrong_unpadding
from narrowgauge.harness.operations.gemm_grouped.judge import (
    add_grouped_output,
    codes_and_scales,
    grouped_arguments,
    grouped_product,
    judge_w,
    judge_x,
    own_sections,
)
from narrowgauge.harness.operations.quantize_grouped.judge import quantize_grouped
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import float_views
from narrowgauge.harness.operations.stages.repeated import Tensors, present, repeated
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe


def judge_padded(case: GroupedGemmCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge pad_sections of x, quantize_grouped and gemm_grouped of the padded x, and unpad_sections.

    Stages: `padding` (x and zeros, byte for byte); those of quantize on the padded sections; `rows` (codes and scales
    of the rows of x, equal to those that the backend gives without padding); the output of the rows of x, judged by the
    bounds of the unpadded product; `unpadding` (the rows of x and no others); and `unpadded`: the same bits as the
    backend's product of unpadded sections, if the backend declares the same order of summation for both products.
    """
    outcome = Outcome()
    recipe, out_dtype = case.operand_recipes[0], TORCH_DTYPES[case.out]
    sizes = torch.tensor(case.section_sizes, device=inputs.x.device)
    rows = _unpadded_rows(case.section_sizes, recipe, inputs.x.device)
    padded, aligned = _pad(outcome, inputs.x, sizes, recipe, backend)
    x = judge_x(outcome, padded, aligned, case, inputs, backend)
    sections = [operand.kernel for operand in x]
    cut = [_cut(q, size) for q, size in zip(sections, case.section_sizes, strict=True)]
    if recipe.rounding != "stochastic":  # random bits are counted through all rows, padding included
        _judge_rows(outcome, cut, sizes, inputs, backend)
    w = judge_w(outcome, case, inputs, backend)
    matrices = [operand.kernel for operand in w]
    c = inputs.get("c")
    c = None if c is None else reference.pad_sections(c, sizes, recipe)[0]
    shape = (inputs.x.shape[0], case.shape[2])

    def call(given: Tensors) -> Tensors:
        product = grouped_product(given, sections, matrices, backend, out_dtype)
        form = {"output": TensorForm(shape, out_dtype)}
        unpadded = backend.results("unpad_sections", form, product, given["unpadded sizes"], recipe)
        return {"padded output": product, **unpadded}

    arguments = {**grouped_arguments(sections, matrices, c, inputs.get("bias")), "unpadded sizes": sizes}
    outputs, protection, outcome.seconds = repeated(backend, inputs.x.device, arguments, call)
    add_protection(outcome, protection)
    product, output = outputs["padded output"], outputs["output"]
    unpadded = product[rows]
    order = order_of(backend, sections, matrices)
    add_grouped_output(outcome, unpadded, cut, matrices, inputs, order)
    note_any_order(outcome, backend, order)
    right = reference.pad_sections(inputs.x, sizes, recipe)[0]
    own = [operand.own for operand in x] if torch.equal(padded, right) else own_sections(right, aligned, case, inputs)
    pairs = zip(own, case.section_sizes, w, strict=True)
    if not backend.brief:
        add_end_to_end(outcome, [(_cut(a, size), b.own) for a, size, b in pairs])
    outcome.causes["unpadding"] = partial(wrong_unpadding, dense(output), dense(product))
    outcome.stages.append(_same_output("unpadding", output, unpadded, "unpadded outputs"))
    if order.order is not None and order == order_of(backend, cut, matrices):
        with suppress(Unsupported):  # a kernel may refuse sections that are not aligned
            plain = present(grouped_arguments(cut, matrices, inputs.get("c"), inputs.get("bias")))
            alone = grouped_product(plain, cut, matrices, backend, out_dtype)
            outcome.stages.append(_same_output("unpadded", unpadded, alone, "outputs of padded and unpadded sections"))
    outcome.outputs = {"padded": padded, **codes_and_scales(arguments), **outputs}
    return outcome


def _unpadded_rows(sizes: tuple[int, ...], recipe: Recipe, device: torch.device) -> torch.Tensor:
    """Indices of the rows of x among the padded rows, int64 (M,)."""
    starts = [0]
    for aligned in padded_rows(list(sizes), recipe):
        starts.append(starts[-1] + aligned)
    return torch.cat([torch.arange(s, s + n, device=device) for s, n in zip(starts, sizes, strict=False)])


def _pad(
    outcome: Outcome, x: torch.Tensor, sizes: torch.Tensor, recipe: Recipe, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sections that the backend padded, judged, and the right padded sizes."""

    def call(given: Tensors) -> Tensors:
        rows = padded_rows(given["sizes"].tolist(), recipe)  # read before the call: the kernel may change the tensor
        forms = {
            "padded": TensorForm((sum(rows), x.shape[1]), x.dtype),
            "padded sizes": TensorForm((len(rows),), sizes.dtype),
        }
        return backend.results("pad_sections", forms, given["x"], given["sizes"], recipe)

    outputs, protection, _ = repeated(backend, x.device, {"x": x, "sizes": sizes}, call)
    outcome.stages += protection
    padded, aligned = outputs["padded"], outputs["padded sizes"]
    expected, right = reference.pad_sections(x, sizes, recipe)

    def describe(row: int, column: int) -> dict[str, Any]:
        return {"row": row, "column": column, **float_views(expected[row, column], padded[row, column])}

    stage = exact_floats("padding", padded, expected, noun="padded elements", describe=describe)
    stage.compared += right.numel()
    if not torch.equal(aligned, right):
        stage.mismatches += int((aligned != right).sum())
        stage.sentence = f"the padded sizes are {aligned.tolist()}, and have to be {right.tolist()}"
    outcome.stages.append(stage)
    outcome.causes["padding"] = partial(wrong_padding, x, sizes, dense(padded), dense(aligned), recipe)
    return padded, right


def _cut(q: Quantized, rows: int) -> Quantized:
    """The first rows of a section, as they were quantized together with the padding."""
    scales = q.scales if q.recipe.whole else q.scales[: -(-rows // q.recipe.stored_rows)]
    return replace(q, codes=q.codes[:rows], scales=scales, shape=(rows, q.shape[1]))


def _judge_rows(outcome: Outcome, cut: list[Quantized], sizes: torch.Tensor, inputs: Inputs, backend: Backend) -> None:
    """Check that padding changes no codes and scales of the rows of x: zeros raise no amax."""
    with suppress(Unsupported):  # a kernel may refuse sections that are not aligned
        scale = inputs.get("scale.x")
        alone = quantize_grouped(backend, inputs.x, sizes, cut[0].recipe, scale=scale)
        result = StageResult("rows", "exact", 0)
        for number, (one, other) in enumerate(zip(cut, alone, strict=True)):
            _compare_parts(result, number, one, other)
        outcome.stages.append(result)


def _compare_parts(result: StageResult, number: int, padded: Quantized, alone: Quantized) -> None:
    for part in QUANTIZED_PARTS:
        one, other = getattr(padded, part), getattr(alone, part)
        if one is None or other is None:
            continue
        result.compared += one.numel()
        a, b = (element_bytes(t) for t in (one, other))
        different = int((a != b).any(1).sum())
        result.mismatches += different
        if different and not result.sentence:
            of = f"{format_count(different)} of {format_count(one.numel())} {part.replace('_', ' ')}"
            result.sentence = f"{of} of section {number} differ from those of the section without padding"


def _same_output(stage: str, actual: torch.Tensor, expected: torch.Tensor, noun: str) -> StageResult:
    """Compare outputs that must have the same bits."""

    def describe(row: int, column: int) -> dict[str, Any]:
        return {"row": row, "column": column, **float_views(expected[row, column], actual[row, column])}

    return exact_floats(stage, actual, expected, noun=noun, describe=describe)
