"""GEMM, judged on the kernel's own codes: quantize both operands, then multiply."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from harness import oracle as reference
from harness.backend import Backend, Unsupported
from harness.case import Case
from harness.inputs import TORCH_DTYPES, Inputs, Random
from harness.operations.black_box import makes_own_bits, seed_torch
from harness.operations.end_to_end import Operand, add_end_to_end
from harness.operations.outcome import Outcome
from harness.operations.product import judge_product
from harness.operations.quantize import columnwise_subject, rotates_freely, second_half
from harness.operations.stages import Subject, quantize_stages
from reference.quantized import Quantized
from reference.recipes import Recipe, recipe

COLUMNWISE = {"tn": "", "nn": "w", "nt": "xw"}
"""Operands that a layout stores the other way round, so that their columnwise halves are multiplied."""


def judge_gemm(case: Case, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge x @ w.T (+ c) (+ bias), x (M, K) and w (N, K).

    The operands are quantized by the backend where it quantizes, and judged so; the product is judged on those very
    codes, so that a wrong code is found once. Where it does not quantize this, it is given the reference's operands.
    End to end, against the reference's own operands, it is measured.
    """
    outcome = Outcome()
    a, b = operands(case, inputs, backend, outcome)
    judge_product(outcome, a.kernel, b.kernel, inputs, backend, TORCH_DTYPES[case.dtypes[2]])
    add_end_to_end(outcome, [(a.own, b.own)])
    return outcome


def operands(case: Case, inputs: Inputs, backend: Backend, outcome: Outcome) -> tuple[Operand, Operand]:
    """x and w of a case, quantized, their stages judged."""
    assert inputs.w is not None
    a, b = (
        operand(
            name, matrix, recipe(rule), backend, outcome,
            random=inputs.random.get(name), scale=inputs.scale.get(name), columnwise=name in COLUMNWISE[case.layout],
        )
        for name, matrix, rule in zip("xw", (inputs.x, inputs.w), case.recipes, strict=True)
    )  # fmt: skip
    return a, b


def operand(
    name: str,
    matrix: torch.Tensor,
    rule: Recipe,
    backend: Backend,
    outcome: Outcome,
    *,
    random: Random | None = None,
    scale: torch.Tensor | None = None,
    columnwise: bool = False,
) -> Operand:
    """`matrix`, quantized along its rows by the backend, its stages judged; by the reference where it does not do that.

    A columnwise operand is the columnwise half of the physical transpose where the backend makes halves. Without
    `quantize_both`, and of a rowwise operand, it is quantize of the matrix.
    """
    free, own = rotates_freely(backend), makes_own_bits(backend, rule)
    if own:
        seed_torch(random)
    if columnwise:
        physical = matrix.T.contiguous()
        oracle = reference.quantize_both(physical, rule, rowwise=False, scale=scale, random=random)[1]  # type: ignore[arg-type]
        assert oracle is not None
        with suppress(Unsupported):
            kernel = backend.quantize_both(physical, rule, rowwise=False, scale=scale, random=random)[1]
            assert kernel is not None
            return _judged(
                name, columnwise_subject(matrix, rule, second_half(random), free=free, own=own), kernel, oracle, outcome
            )
    oracle = reference.quantize(matrix, rule, scale=scale, random=random)
    try:
        kernel = backend.quantize(matrix, rule, scale=scale, random=random)
    except Unsupported:
        return Operand(oracle, oracle)
    return _judged(name, Subject(matrix, rule, random, free=free, own=own), kernel, oracle, outcome)


def _judged(name: str, subject: Subject, kernel: Quantized, oracle: Quantized, outcome: Outcome) -> Operand:
    """The kernel's operand as it stored it, with the numbers of the reference that it does not show."""
    stages, judged = quantize_stages(subject, kernel, oracle, prefix=f"{name}.")
    outcome.stages += stages
    outcome.judged.append(judged)
    shown = replace(kernel, amax=judged.kernel.amax, tensor_scale=judged.kernel.tensor_scale)
    return Operand(shown, oracle)
