"""Check of GEMM outputs against proved bounds, docs/tolerance.md#gemm.

An output is correct if a correct order of summation, or the declared order, can give it.
"""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.distance import Comparison, format_count, measure
from narrowgauge.harness.checks.finding import Describe, make_finding, sentence
from narrowgauge.harness.checks.row_chunks import map_row_chunks
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.reference.bounds.bounds import Bounds


def check_bounds(
    stage: str, actual: torch.Tensor, limits: Bounds, *, describe: Describe, figures: bool = True
) -> StageResult:
    """Compare a GEMM's output (M, N) with its bounds, for any order or for the order that the backend declares.

    The mask of correct elements is `within_bounds(actual, limits)`. With `figures=False` the function only judges and
    measures no figures.
    """
    correct = within_bounds(actual, limits)
    result = StageResult(stage, "bound", actual.numel(), figures=_figures(actual, limits) if figures else {})
    if figures:
        infinite = (limits.lower.isinf() | limits.upper.isinf()) & (limits.lower != limits.upper)
        result.unbounded = int((limits.undetermined | infinite & ~limits.exact).sum())
    if not bool(correct.all()):
        wrong = ~correct
        distance = _distance_to_bounds(actual, limits).masked_fill_(correct, -1)
        comparison = Comparison(limits.expected, actual)
        distances = measure(wrong, distance, comparison)
        result.sentence = f"{sentence(wrong, distances, 'outputs')}; {_count_by_tier(wrong, limits.tier)}"
        result.mismatches, result.max_ulp = int(wrong.sum()), int(distance.amax())
        result.wrong_elements = wrong
        result.finding = make_finding(
            stage, "bound", result.sentence, wrong, distances, describe=describe, comparison=comparison
        )
    return result


def within_bounds(actual: torch.Tensor, limits: Bounds) -> torch.Tensor:
    """bool mask of the correct elements of a GEMM's output (M, N).

    Exact elements are all elements of tier 0, and elements of tier 1 that the declared order sums without rounding. An
    exact element is correct if it equals the expected or the fused value bit for bit; the sign of a zero sum is free.
    All further elements are correct inside [lower, upper]. NaN is correct if NaN is expected.

    A kernel may decode operands to float32 first. Then every output that overflows so has the value of `decoded`.
    """
    (correct,) = map_row_chunks(
        _within_rows, actual, limits.expected, limits.fused, limits.zero_sum, limits.lower, limits.upper, limits.centre,
        limits.undetermined, limits.exact,
    )  # fmt: skip
    if limits.decoded is limits.expected or bool(correct.all()):
        return correct
    overflows = ~_equal_or_nan(limits.decoded, limits.expected, limits.zero_sum)
    as_decoded = _equal_or_nan(actual, limits.decoded, limits.zero_sum) | (limits.undetermined & ~actual.isfinite())
    decoded_first = torch.where(overflows, as_decoded, correct)
    return decoded_first if bool(decoded_first.all()) else correct


def _within_rows(
    actual: torch.Tensor,
    expected: torch.Tensor,
    fused: torch.Tensor,
    zero_sum: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    centre: torch.Tensor,
    undetermined: torch.Tensor,
    exact: torch.Tensor,
) -> tuple[torch.Tensor]:
    matches = _equal_or_nan(actual, expected, zero_sum) | _equal_or_nan(actual, fused, zero_sum)
    inside = (actual >= lower) & (actual <= upper) & torch.isfinite(centre)
    return (matches | (undetermined & ~torch.isfinite(actual)) | (inside & ~exact),)


def _equal_or_nan(actual: torch.Tensor, expected: torch.Tensor, zero_sum: torch.Tensor) -> torch.Tensor:
    equal = (actual == expected) & ((actual.signbit() == expected.signbit()) | zero_sum)
    return equal | (actual.isnan() & expected.isnan())


def _distance_to_bounds(actual: torch.Tensor, limits: Bounds) -> torch.Tensor:
    """Steps of the output's dtype to the nearest correct value, int64 (M, N)."""

    def distance_of_rows(*rows: torch.Tensor) -> tuple[torch.Tensor]:
        actual, exact, expected, lower, upper = rows
        position = ordinal.float_ordinals(actual)
        low, high = (ordinal.float_ordinals(torch.where(exact, expected, end)) for end in (lower, upper))
        return (torch.maximum(low - position, position - high).clamp_(min=0),)

    return map_row_chunks(distance_of_rows, actual, limits.exact, limits.expected, limits.lower, limits.upper)[0]


def _count_by_tier(wrong: torch.Tensor, tier: torch.Tensor) -> str:
    """Numbers of wrong elements by tier, as a sentence."""
    reasons = (
        "where no order of summation can round", "that the declared order cannot give", "outside the proved bound"
    )  # fmt: skip
    counts = [int((wrong & (tier == number)).sum()) for number in range(3)]
    parts = [f"{format_count(count)} of them {reason}" for count, reason in zip(counts, reasons, strict=True) if count]
    return ", ".join(parts)


def _figures(actual: torch.Tensor, limits: Bounds) -> dict[str, Any]:
    if actual.numel() == 0:
        return {}
    figures: dict[str, Any] = {
        name: int((limits.tier == tier).sum()) / actual.numel()
        for tier, name in enumerate(("exact_share", "ordered_share"))
    }
    finite = torch.isfinite(limits.centre) & torch.isfinite(actual) & torch.isfinite(limits.budget)
    if bool(finite.any()):
        used = map_row_chunks(
            lambda actual, centre, budget: ((actual.double() - centre).abs_().div_(budget),),
            actual, limits.centre, limits.budget,
        )[0][finite]  # fmt: skip
        figures["budget_max"] = float(used.amax())
        # Nearest rank of the 99th percentile: torch.quantile accepts at most 16 million elements.
        rank = max(1, -(-99 * used.numel() // 100))
        # kthvalue runs in a single block on a GPU: 0.2 s for 12 million elements. Sorting takes a hundredth of it.
        figures["budget_p99"] = float(used.sort().values[rank - 1] if used.is_cuda else used.kthvalue(rank).values)
        bins = used.mul(10).clamp_(max=10).long()
        figures["budget_histogram"] = torch.bincount(bins, minlength=11).tolist()
    inexact, ends = finite & ~limits.exact, (limits.lower, limits.upper)
    if bool(inexact.any()):
        (width,) = map_row_chunks(
            lambda low, high: (ordinal.float_ordinals(high) - ordinal.float_ordinals(low),), *ends
        )
        width = width[inexact]
        figures["interval_ulps_max"] = int(width.amax())
        figures["interval_ulps_mean"] = float(width.double().mean())
    return figures
