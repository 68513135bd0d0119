"""Diagnosis of fused outputs: a GEMM that quantizes its output before the output is rounded to its dtype."""

from __future__ import annotations

from dataclasses import replace

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.gemm.epilogues import before_last_cast
from narrowgauge.harness.diagnosis.gemm.gemm_parts import Ends, GemmParts, split_products
from narrowgauge.harness.diagnosis.quantize.deviation import Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix, kernel_matrix
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import Subject
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.spec.formats import FP32, Format

_PREFIX = "fused."
NOT_CAST: Deviation[GemmParts] = Deviation(
    "fused-output-not-cast", "outputs are quantized in float32, not rounded to {} before", "output"
)


def explain_fused_output(outcome: Outcome, wrong_stage: StageResult) -> list[Explanation]:
    """The explanation that float32 sums are quantized, if all stages of the fused matrix fit it.

    If no order of summation can round a sum, its bytes must be equal. Otherwise the bytes must lie between the results
    for both ends of the sum.
    """
    matrix = next((kernel_matrix(judged) for judged in outcome.judged if judged.prefix == _PREFIX), None)
    if not wrong_stage.stage.startswith(_PREFIX) or matrix is None or matrix.subject.recipe.transform:
        return []
    (parts,) = split_products(outcome.products, None)
    if not any(_all_stages_fit(matrix, ends) for ends in before_last_cast(parts, parts.sums().ends)):
        return []
    return [Explanation.of(NOT_CAST.bound(str(parts.dtype).removeprefix("torch.")), wrong_stage.stage)]


def _all_stages_fit(matrix: KernelMatrix, ends: Ends) -> bool:
    """Whether every stage of the kernel fits outputs between `ends`, given the kernel's result of the stage before."""
    low, high = ends
    smallest = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs()))
    magnitudes = (smallest, torch.maximum(low.abs(), high.abs()))
    recipe, stages = matrix.subject.recipe, matrix.kernel_stages
    for stage, fmt in (("amax", FP32), ("scales", recipe.scale)):
        if stage not in stages:
            continue
        low_result, high_result = (_replayed_stage(matrix, magnitude, stage) for magnitude in magnitudes)
        if not _between(stages[stage], low_result, high_result, fmt):
            return False
    if "tensor scale" in stages and not equal_bits(
        stages["tensor scale"], Replay(matrix).compute_stage("tensor scale")
    ):
        return False
    columns = matrix.subject.matrix.shape[1]
    stored = stages["codes"], _replayed_stage(matrix, low, "codes"), _replayed_stage(matrix, high, "codes")
    codes, low_codes, high_codes = (elements(packed, columns, recipe) for packed in stored)
    return _between(codes, low_codes, high_codes, recipe.element)


def _replayed_stage(matrix: KernelMatrix, x: torch.Tensor, stage: str) -> torch.Tensor:
    return Replay(replace(matrix, subject=Subject(x, matrix.subject.recipe))).compute_stage(stage)


def _between(actual: torch.Tensor, low: torch.Tensor, high: torch.Tensor, fmt: Format) -> bool:
    """Whether all codes, or numbers, equal their ends if both ends are equal, and lie between different ends."""
    value, first, second = (numbers if fmt is FP32 else decode(numbers, fmt) for numbers in (actual, low, high))
    # A stored inverse of a scale falls with the amax: the second end can be the smaller one.
    smallest, largest = torch.minimum(first, second), torch.maximum(first, second)
    equal = (actual == low) | (value.isnan() & smallest.isnan())
    inside = (value >= smallest) & (value <= largest)
    return bool(torch.where((low == high) | smallest.isnan(), equal, inside).all())
