"""GEMM, judged on the kernel's own codes: quantize both operands, then multiply."""

from __future__ import annotations

from contextlib import suppress

import torch

from harness.backend import Backend, Unsupported
from harness.case import Case
from harness.inputs import TORCH_DTYPES, Inputs, Random
from harness.operations.outcome import Outcome
from harness.operations.product import add_output
from harness.operations.quantize import columnwise_subject, rotates_freely, second_half
from harness.operations.repeated import Tensors, repeated, timed
from harness.operations.stages import Subject, quantize_stages
from harness.results import PARTS
from reference import ops as reference
from reference.bounds import bounds
from reference.quantized import Quantized
from reference.recipes import Recipe, recipe

COLUMNWISE = {"tn": "", "nn": "w", "nt": "xw"}
"""Operands that a layout stores the other way round, so that their columnwise halves are multiplied."""


def judge_gemm(case: Case, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge x @ w.T (+ c) (+ bias), x (M, K) and w (N, K).

    The operands are quantized by the backend where it quantizes, and judged so; the product is judged on those very
    codes, so that a wrong code is found once. Where it does not quantize this, it is given the reference's operands.
    """
    assert inputs.w is not None
    outcome = Outcome()
    out_dtype = TORCH_DTYPES[case.dtypes[2]]
    a, b = (
        operand(name, matrix, recipe(rule), inputs.random.get(name), backend, outcome, name in COLUMNWISE[case.layout])
        for name, matrix, rule in zip("xw", (inputs.x, inputs.w), case.recipes, strict=True)
    )
    shape = (a.shape[0], b.shape[0])

    def call(given: Tensors) -> Tensors:
        options = {key: given[key] for key in ("c", "bias") if given[key] is not None}
        left, right = (_taken(q, given, name) for q, name in ((a, "a"), (b, "b")))
        return {"output": backend.tensor("gemm", shape, out_dtype, left, right, out_dtype=out_dtype, **options)}

    given: Tensors = {**_named(a, "a"), **_named(b, "b"), "c": inputs.c, "bias": inputs.bias}
    outputs, protection, outcome.seconds = repeated(backend, inputs.x.device, given, call)
    outcome.stages += protection
    limits, outcome.seconds_reference = timed(
        inputs.x.device, lambda: bounds(a, b, out_dtype=out_dtype, c=inputs.c, bias=inputs.bias)
    )
    output = outputs["output"]
    assert output is not None
    add_output(outcome, output, limits)
    outcome.outputs = {"a.codes": a.codes, "a.scales": a.scales, "b.codes": b.codes, "b.scales": b.scales, **outputs}
    return outcome


def operand(
    name: str,
    matrix: torch.Tensor,
    rule: Recipe,
    random: Random | None,
    backend: Backend,
    outcome: Outcome,
    columnwise: bool = False,
) -> Quantized:
    """`matrix`, quantized along its rows by the backend, its stages judged; by the reference where it does not do that.

    A columnwise operand is the columnwise half of the physical transpose where the backend makes halves. Without
    `quantize_both`, and of a rowwise operand, it is quantize of the matrix.
    """
    free = rotates_freely(backend)
    if columnwise:
        physical = matrix.T.contiguous()
        oracle = reference.quantize_both(physical, rule, rowwise=False, random=random)[1]  # type: ignore[arg-type]
        assert oracle is not None
        with suppress(Unsupported):
            kernel = backend.quantize_both(physical, rule, rowwise=False, random=random)[1]
            assert kernel is not None
            return _judged(
                name, columnwise_subject(matrix, rule, second_half(random), free=free), kernel, oracle, outcome
            )
    oracle = reference.quantize(matrix, rule, random=random)
    try:
        kernel = backend.quantize(matrix, rule, random=random)
    except Unsupported:
        return oracle
    return _judged(name, Subject(matrix, rule, random, free=free), kernel, oracle, outcome)


def _judged(name: str, subject: Subject, kernel: Quantized, oracle: Quantized, outcome: Outcome) -> Quantized:
    stages, judged = quantize_stages(subject, kernel, oracle, prefix=f"{name}.")
    outcome.stages += stages
    outcome.judged.append(judged)
    return judged.kernel


def _named(q: Quantized, name: str) -> Tensors:
    return {f"{name}.{part}": getattr(q, part) for part in PARTS}


def _taken(q: Quantized, given: Tensors, name: str) -> Quantized:
    parts = {part: given[f"{name}.{part}"] for part in PARTS}
    return Quantized(**parts, recipe=q.recipe, shape=q.shape)  # type: ignore[arg-type]
