"""Grouped GEMM of sections that are padded to the alignment of their recipe: padding must change no result."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.backends.results import PARTS, padded_rows
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.checks.exact import exact_floats
from narrowgauge.harness.checks.finding import spaced
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.gemm_grouped import (
    add_grouped_output,
    grouped_given,
    grouped_product,
    own_sections,
    quantized_matrices,
    quantized_sections,
)
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.end_to_end import add_end_to_end
from narrowgauge.harness.operations.stages.outcome import Moved, Outcome
from narrowgauge.harness.operations.stages.product import add_protection, order_of
from narrowgauge.harness.operations.stages.quantized import float_views
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe


def judge_padded(case: Case, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge pad_sections of x, quantize_grouped and gemm_grouped of that, and unpad_sections of the product.

    Stages: `padding` (x and zeros, byte for byte); those of quantize on the padded sections; `rows` (codes and scales
    of the rows that are no padding, equal to those that the backend gives x itself); the output of those rows, judged
    by the bounds of the unpadded product; `unpadding` (those rows and no other); and `unpadded`: the same bits as the
    backend's own product of unpadded sections, where it declares one order of both, so that no other bits are right.
    """
    outcome = Outcome()
    rule, out_dtype = find_recipe(case.recipes[0]), TORCH_DTYPES[case.dtypes[2]]
    sizes = torch.tensor(case.sections, device=inputs.x.device)
    rows = _kept(case.sections, rule, inputs.x.device)
    padded, aligned = _pad(outcome, inputs.x, sizes, rule, backend)
    x = quantized_sections(outcome, padded, aligned, case, inputs, backend)
    sections = [one.kernel for one in x]
    cut = [_cut(q, size) for q, size in zip(sections, case.sections, strict=True)]
    if rule.rounding != "stochastic":  # whose random bits are counted through all rows, padding included
        _judge_rows(outcome, cut, sizes, inputs, backend)
    w = quantized_matrices(outcome, case, inputs, backend)
    matrices = [one.kernel for one in w]
    c = None if inputs.c is None else reference.pad_sections(inputs.c, sizes, rule)[0]
    shape = (inputs.x.shape[0], case.shape[2])

    def call(given: Tensors) -> Tensors:
        product = grouped_product(given, sections, matrices, backend, out_dtype)
        output = backend.tensor("unpad_sections", shape, out_dtype, product, given["unpadded sizes"], rule)
        return {"padded output": product, "output": output}

    given = {**grouped_given(sections, matrices, c, inputs.bias), "unpadded sizes": sizes}
    outputs, protection, outcome.seconds = repeated(backend, inputs.x.device, given, call)
    add_protection(outcome, protection)
    product, output = outputs["padded output"], outputs["output"]
    assert product is not None
    kept = product[rows]
    order = order_of(backend, sections, matrices)
    add_grouped_output(outcome, kept, cut, matrices, inputs, order)
    right = reference.pad_sections(inputs.x, sizes, rule)[0]
    own = [one.own for one in x] if torch.equal(padded, right) else own_sections(right, aligned, case, inputs)
    pairs = zip(own, case.sections, w, strict=True)
    add_end_to_end(outcome, [(_cut(a, rows), b.own) for a, rows, b in pairs])
    assert outcome.moved is not None
    outcome.moved.found |= outputs
    outcome.stages.append(_same_output("unpadding", output, kept, "unpadded outputs"))
    if order.order is not None and order == order_of(backend, cut, matrices):
        with suppress(Unsupported):  # a kernel may take aligned sections alone
            alone = grouped_product(
                grouped_given(cut, matrices, inputs.c, inputs.bias), cut, matrices, backend, out_dtype
            )
            outcome.stages.append(_same_output("unpadded", kept, alone, "outputs of padded and unpadded sections"))
    operands = {name: tensor for name, tensor in given.items() if name.endswith((".codes", ".scales"))}
    outcome.outputs = {"padded": padded, **operands, **outputs}
    return outcome


def _kept(sizes: tuple[int, ...], rule: Recipe, device: torch.device) -> torch.Tensor:
    """Numbers of the padded rows that are no padding, int64 (M,)."""
    starts = [0]
    for aligned in padded_rows(list(sizes), rule):
        starts.append(starts[-1] + aligned)
    return torch.cat([torch.arange(s, s + n, device=device) for s, n in zip(starts, sizes, strict=False)])


def _pad(
    outcome: Outcome, x: torch.Tensor, sizes: torch.Tensor, rule: Recipe, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sections that the backend padded, judged; and their sizes, which are the right ones where it gave others."""

    def call(given: Tensors) -> Tensors:
        padded, aligned = backend.pad_sections(given["x"], given["sizes"], rule)  # type: ignore[arg-type]
        return {"padded": padded, "padded sizes": aligned}

    outputs, protection, _ = repeated(backend, x.device, {"x": x, "sizes": sizes}, call)
    outcome.stages += protection
    padded, aligned = outputs["padded"], outputs["padded sizes"]
    assert padded is not None
    assert aligned is not None
    expected, right = reference.pad_sections(x, sizes, rule)

    def describe(row: int, column: int) -> dict[str, Any]:
        return {"row": row, "column": column, **float_views(expected[row, column], padded[row, column])}

    stage = exact_floats("padding", padded, expected, noun="padded elements", describe=describe)
    stage.compared += right.numel()
    if not torch.equal(aligned, right):
        stage.mismatches += int((aligned != right).sum())
        stage.sentence = f"the padded sizes are {aligned.tolist()}, and have to be {right.tolist()}"
    outcome.stages.append(stage)
    outcome.moved = Moved("pad", {"x": x, "sizes": sizes}, outputs, rule)
    return padded, right


def _cut(q: Quantized, rows: int) -> Quantized:
    """The first rows of a section, as they were quantized with the padding behind them."""
    scales = q.scales if q.recipe.whole else q.scales[: -(-rows // q.recipe.stored_rows)]
    return replace(q, codes=q.codes[:rows], scales=scales, shape=(rows, q.shape[1]))


def _judge_rows(outcome: Outcome, cut: list[Quantized], sizes: torch.Tensor, inputs: Inputs, backend: Backend) -> None:
    """Rows that are no padding are quantized as without it: zeros raise no amax, and no row counts for another."""
    with suppress(Unsupported):  # a kernel may take aligned sections alone
        scale = inputs.scale.get("x")
        alone = backend.quantize_grouped(inputs.x, sizes, cut[0].recipe, scale=scale)
        result = StageResult("rows", "exact", 0)
        for number, (one, other) in enumerate(zip(cut, alone, strict=True)):
            _compare_parts(result, number, one, other)
        outcome.stages.append(result)


def _compare_parts(result: StageResult, number: int, padded: Quantized, alone: Quantized) -> None:
    for part in PARTS:
        one, other = getattr(padded, part), getattr(alone, part)
        if one is None or other is None:
            continue
        result.compared += one.numel()
        a, b = (t.contiguous().view(torch.uint8).view(t.numel(), t.element_size()) for t in (one, other))
        different = int((a != b).any(1).sum())
        result.mismatches += different
        if different and not result.sentence:
            of = f"{spaced(different)} of {spaced(one.numel())} {part.replace('_', ' ')}"
            result.sentence = f"{of} of section {number} differ from those of the section without padding"


def _same_output(stage: str, actual: torch.Tensor | None, expected: torch.Tensor, noun: str) -> StageResult:
    """Outputs that must have the same bits."""
    assert actual is not None

    def describe(row: int, column: int) -> dict[str, Any]:
        return {"row": row, "column": column, **float_views(expected[row, column], actual[row, column])}

    return exact_floats(stage, actual, expected, noun=noun, describe=describe)
