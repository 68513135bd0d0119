"""docs/tolerance.md#exact: byte for byte. Signed zeros count, a NaN equals any NaN."""

from __future__ import annotations

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.chunks import by_rows
from narrowgauge.harness.checks.finding import Describe, Sides, finding, sentence
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.spec.formats import Format


def exact_codes(
    stage: str, actual: torch.Tensor, expected: torch.Tensor, fmt: Format, *, noun: str, describe: Describe
) -> StageResult:
    """Compare codes (uint8, (M, K), one an element). `noun` and `describe` serve the finding."""
    compared = expected.numel()
    if torch.equal(actual, expected):
        return StageResult(stage, "exact", compared)
    return _wrong(stage, actual != expected, noun, describe, Sides(expected, actual, fmt))


def exact_floats(
    stage: str, actual: torch.Tensor, expected: torch.Tensor, *, noun: str, describe: Describe
) -> StageResult:
    """Compare float32, bfloat16 or float16 tensors of one shape and dtype, (M, N) or (1,)."""
    integer = ordinal.INTEGER[expected.dtype]
    a, e = actual.contiguous().view(integer), expected.contiguous().view(integer)
    compared = expected.numel()
    if torch.equal(a, e):
        return StageResult(stage, "exact", compared)
    (wrong,) = by_rows(lambda x, y, i, j: ((i != j) & ~(x.isnan() & y.isnan()),), actual, expected, a, e)
    if not wrong.any():
        return StageResult(stage, "exact", compared)
    return _wrong(stage, wrong, noun, describe, Sides(expected, actual))


def _wrong(stage: str, wrong: torch.Tensor, noun: str, describe: Describe, sides: Sides) -> StageResult:
    def far(here: torch.Tensor, *two: torch.Tensor) -> tuple[torch.Tensor]:
        actual, expected = (ordinal.of_floats(x) if sides.fmt is None else ordinal.of_codes(x, sides.fmt) for x in two)
        return ((actual - expected).abs_().masked_fill_(~here, -1),)

    (distance,) = by_rows(far, wrong, sides.actual, sides.expected)
    text = sentence(wrong, distance, noun)
    return StageResult(
        stage, "exact", wrong.numel(), int(wrong.sum()), int(distance.amax()), text,
        finding(stage, "exact", text, wrong, distance, describe=describe, sides=sides), wrong=wrong,
    )  # fmt: skip
