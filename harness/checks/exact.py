"""Check for equal bytes, docs/tolerance.md#exact. +0 and −0 differ; a NaN equals every NaN."""

from __future__ import annotations

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.bit_equality import different_bits
from narrowgauge.harness.checks.distance import Comparison, measure
from narrowgauge.harness.checks.finding import Describe, make_finding, sentence
from narrowgauge.harness.checks.row_chunks import map_row_chunks
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.spec.formats import Format


def exact_codes(
    stage: str, actual: torch.Tensor, expected: torch.Tensor, fmt: Format, *, noun: str, describe: Describe
) -> StageResult:
    """Compare codes (uint8 (M, K), a byte for each element). The finding uses `noun` and `describe`."""
    compared = expected.numel()
    if torch.equal(actual, expected):
        return StageResult(stage, "exact", compared)
    return _failed(stage, actual != expected, noun, describe, Comparison(expected, actual, fmt))


def exact_floats(
    stage: str, actual: torch.Tensor, expected: torch.Tensor, *, noun: str, describe: Describe
) -> StageResult:
    """Compare float32, bfloat16 or float16 tensors of equal shape, (M, N) or (1,), and equal dtype."""
    integer = ordinal.INTEGER_DTYPE[expected.dtype]
    compared = expected.numel()
    if torch.equal(actual.contiguous().view(integer), expected.contiguous().view(integer)):
        return StageResult(stage, "exact", compared)
    (wrong,) = map_row_chunks(lambda *rows: (different_bits(*rows),), actual, expected)
    if not wrong.any():
        return StageResult(stage, "exact", compared)
    return _failed(stage, wrong, noun, describe, Comparison(expected, actual))


def exact_integers(
    stage: str, actual: torch.Tensor, expected: torch.Tensor, *, noun: str, describe: Describe
) -> StageResult:
    """Compare integer tensors (M, N) of equal shape and dtype."""
    wrong = actual != expected
    if not bool(wrong.any()):
        return StageResult(stage, "exact", wrong.numel())
    distance = (actual.long() - expected.long()).abs_().masked_fill_(~wrong, -1)
    distances = measure(wrong, distance, None)
    text = sentence(wrong, distances, noun)
    finding = make_finding(stage, "exact", text, wrong, distances, describe=describe)
    return StageResult(
        stage, "exact", wrong.numel(), int(wrong.count_nonzero()), int(distance.amax()), text, finding,
        wrong_elements=wrong,
    )  # fmt: skip


def _failed(stage: str, wrong: torch.Tensor, noun: str, describe: Describe, comparison: Comparison) -> StageResult:
    def distance_of_rows(wrong_rows: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor]:
        actual, expected = (
            ordinal.float_ordinals(x) if comparison.fmt is None else ordinal.code_ordinals(x, comparison.fmt)
            for x in rows
        )
        return ((actual - expected).abs_().masked_fill_(~wrong_rows, -1),)

    (distance,) = map_row_chunks(distance_of_rows, wrong, comparison.actual, comparison.expected)
    distances = measure(wrong, distance, comparison)
    text = sentence(wrong, distances, noun)
    finding = make_finding(stage, "exact", text, wrong, distances, describe=describe, comparison=comparison)
    return StageResult(
        stage,
        "exact",
        wrong.numel(),
        int(wrong.count_nonzero()),
        int(distance.amax()),
        text,
        finding,
        wrong_elements=wrong,
    )
