"""Rule 1 of tolerance.md: byte for byte. Signed zeros count, a NaN equals any NaN."""

from __future__ import annotations

import torch

from harness.checks import ordinal
from harness.checks.stage import StageResult
from harness.finding import Describe, Sides, finding, sentence
from reference.formats import Format


def exact_codes(
    stage: str, actual: torch.Tensor, expected: torch.Tensor, fmt: Format, *, noun: str, describe: Describe
) -> StageResult:
    """Compare codes (uint8, (M, K), one an element). `noun` and `describe` serve the finding."""
    compared = expected.numel()
    if torch.equal(actual, expected):
        return StageResult(stage, "exact", compared)
    distance = ordinal.of_codes(actual, fmt) - ordinal.of_codes(expected, fmt)
    return _wrong(stage, actual != expected, distance, noun, describe, Sides(expected, actual, fmt))


def exact_floats(
    stage: str, actual: torch.Tensor, expected: torch.Tensor, *, noun: str, describe: Describe
) -> StageResult:
    """Compare float32, bfloat16 or float16 tensors of one shape and dtype, (M, N) or (1,)."""
    integer = ordinal.INTEGER[expected.dtype]
    a, e = actual.contiguous().view(integer), expected.contiguous().view(integer)
    compared = expected.numel()
    if torch.equal(a, e):
        return StageResult(stage, "exact", compared)
    wrong = (a != e) & ~(actual.isnan() & expected.isnan())
    if not wrong.any():
        return StageResult(stage, "exact", compared)
    distance = ordinal.of_floats(actual) - ordinal.of_floats(expected)
    return _wrong(stage, wrong, distance, noun, describe, Sides(expected, actual))


def _wrong(
    stage: str, wrong: torch.Tensor, distance: torch.Tensor, noun: str, describe: Describe, sides: Sides
) -> StageResult:
    distance = distance.abs().masked_fill_(~wrong, -1)
    text = sentence(wrong, distance, noun)
    return StageResult(
        stage, "exact", wrong.numel(), int(wrong.sum()), int(distance.amax()), text,
        finding(stage, "exact", text, wrong, distance, describe=describe, sides=sides), wrong=wrong,
    )  # fmt: skip
