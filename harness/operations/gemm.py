"""GEMM, judged on the kernel's own codes: quantize both operands, then multiply."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.machine.gpu_lock import turn
from narrowgauge.harness.operations.quantize import columnwise_subject, rotates_freely, second_half
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.black_box import makes_own_bits, seed_torch
from narrowgauge.harness.operations.stages.end_to_end import Operand, add_end_to_end
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.product import judge_product
from narrowgauge.harness.operations.stages.quantized import Subject, quantize_stages
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe

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
    asked = [
        Asked(
            name, matrix, find_recipe(rule), random=inputs.random.get(name), scale=inputs.scale.get(name),
            columnwise=name in COLUMNWISE[case.layout],
        )
        for name, matrix, rule in zip("xw", (inputs.x, inputs.w), case.recipes, strict=True)
    ]  # fmt: skip
    a, b = (
        operand(one, kernel, backend, outcome) for one, kernel in zip(asked, quantized(asked, backend), strict=True)
    )
    return a, b


@dataclass
class Asked:
    """An operand of a product: what is quantized along its rows, and how."""

    name: str
    matrix: torch.Tensor
    """(M, K)."""
    recipe: Recipe
    random: Random | None = None
    scale: torch.Tensor | None = None
    columnwise: bool = False
    """Whether it is the columnwise half of the physical transpose, where the backend makes halves. Without
    `quantize_both`, and of a rowwise operand, it is quantize of the matrix."""

    @cached_property
    def physical(self) -> torch.Tensor:
        """The transpose, as it is stored."""
        return self.matrix.T.contiguous()


def quantized(asked: Sequence[Asked], backend: Backend) -> list[tuple[Quantized | None, bool]]:
    """Each as the backend quantizes it, one after the other in one turn, and whether it is a half; None of those that
    it does not quantize."""
    with turn(backend.device.type if backend.device else "cpu"):
        return [_quantized(one, backend) for one in asked]


def _quantized(asked: Asked, backend: Backend) -> tuple[Quantized | None, bool]:
    options: dict[str, Any] = {"scale": asked.scale, "random": asked.random}
    if makes_own_bits(backend, asked.recipe):
        seed_torch(asked.random)
    if asked.columnwise:
        with suppress(Unsupported):
            return backend.quantize_both(asked.physical, asked.recipe, rowwise=False, **options)[1], True
    with suppress(Unsupported):
        return backend.quantize(asked.matrix, asked.recipe, **options), False
    return None, False


def operand(asked: Asked, found: tuple[Quantized | None, bool], backend: Backend, outcome: Outcome) -> Operand:
    """What `quantized` gave of an operand, its stages judged; the reference's own where that is nothing."""
    (kernel, half), rule = found, asked.recipe
    options: dict[str, Any] = {"scale": asked.scale, "random": asked.random}
    free, own = rotates_freely(backend), makes_own_bits(backend, rule)
    if half:
        oracle = reference.quantize_both(asked.physical, rule, rowwise=False, **options)[1]
        assert oracle is not None
        subject = columnwise_subject(asked.matrix, rule, second_half(asked.random), free=free, own=own)
    else:
        oracle = reference.quantize(asked.matrix, rule, **options)
        subject = Subject(asked.matrix, rule, asked.random, free=free, own=own)
    return Operand(oracle, oracle) if kernel is None else _judged(asked.name, subject, kernel, oracle, outcome)


def _judged(name: str, subject: Subject, kernel: Quantized, oracle: Quantized, outcome: Outcome) -> Operand:
    """The kernel's operand as it stored it, with the numbers of the reference that it does not show."""
    stages, judged = quantize_stages(subject, kernel, oracle, prefix=f"{name}.")
    outcome.stages += stages
    outcome.judged.append(judged)
    shown = replace(kernel, amax=judged.kernel.amax, tensor_scale=judged.kernel.tensor_scale)
    return Operand(shown, oracle)
