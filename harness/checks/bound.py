"""docs/tolerance.md#gemm: a sum is right where a correct order of summation, or the declared one, can give it."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.chunks import by_rows
from narrowgauge.harness.checks.finding import Describe, Sides, finding, sentence
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.reference.bounds.bounds import Bounds


def bound(stage: str, actual: torch.Tensor, limits: Bounds, *, describe: Describe, figures: bool = True) -> StageResult:
    """Compare a GEMM's output (M, N) with its bounds, those of any order or of the one that the backend declares.

    `within` says which elements are right. Without `figures` nothing is measured that decides nothing.
    """
    right = within(actual, limits)
    result = StageResult(stage, "bound", actual.numel(), figures=_figures(actual, limits) if figures else {})
    if not bool(right.all()):
        wrong = ~right
        distance = _distance(actual, limits).masked_fill_(right, -1)
        result.sentence = f"{sentence(wrong, distance, 'outputs')}; {_tiers(wrong, limits.tier)}"
        result.mismatches, result.max_ulp = int(wrong.sum()), int(distance.amax())
        result.wrong = wrong
        sides = Sides(limits.expected, actual)
        result.finding = finding(stage, "bound", result.sentence, wrong, distance, describe=describe, sides=sides)
    return result


def within(actual: torch.Tensor, limits: Bounds) -> torch.Tensor:
    """Which elements of a GEMM's output (M, N) are right, bool.

    Exact elements are right where they equal the expected or the fused value bit for bit (the sign of a zero sum is
    free): all of tier 0, and those of tier 1 where the declared order rounds nowhere. The others are right where they
    lie in [lower, upper]. NaN is right where NaN is expected.
    """
    (right,) = by_rows(
        _right, actual, limits.expected, limits.fused, limits.zero_sum, limits.lower, limits.upper, limits.centre,
        limits.undetermined, limits.exact,
    )  # fmt: skip
    return right


def _right(
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
    matches = _same(actual, expected, zero_sum) | _same(actual, fused, zero_sum)
    inside = (actual >= lower) & (actual <= upper) & torch.isfinite(centre)
    return (matches | (undetermined & ~torch.isfinite(actual)) | (inside & ~exact),)


def _same(actual: torch.Tensor, expected: torch.Tensor, zero_sum: torch.Tensor) -> torch.Tensor:
    equal = (actual == expected) & ((actual.signbit() == expected.signbit()) | zero_sum)
    return equal | (actual.isnan() & expected.isnan())


def _distance(actual: torch.Tensor, limits: Bounds) -> torch.Tensor:
    """Steps of the output's dtype to the nearest value that is right."""

    def outside(*given: torch.Tensor) -> tuple[torch.Tensor]:
        found, exact, expected, lower, upper = given
        at = ordinal.of_floats(found)
        low, high = (ordinal.of_floats(torch.where(exact, expected, end)) for end in (lower, upper))
        return (torch.maximum(low - at, at - high).clamp_(min=0),)

    return by_rows(outside, actual, limits.exact, limits.expected, limits.lower, limits.upper)[0]


def _tiers(wrong: torch.Tensor, tier: torch.Tensor) -> str:
    """Of which tier the wrong elements are; of the declared order only where there is one."""
    exact, ordered, free = (int((wrong & (tier == number)).sum()) for number in range(3))
    parts = [f"{exact} of them where no order of summation can round"]
    declared = bool((tier == 1).any())
    if declared:
        parts.append(f"{ordered} that the declared order cannot give")
    if free or not declared:
        parts.append(f"{free} outside the proved bound")
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
        used = by_rows(
            lambda found, centre, budget: ((found.double() - centre).abs_().div_(budget),),
            actual, limits.centre, limits.budget,
        )[0][finite]  # fmt: skip
        figures["budget_max"] = float(used.amax())
        # The nearest rank of the 99th percentile; torch.quantile takes no more than 16 million elements.
        rank = max(1, -(-99 * used.numel() // 100))
        # On a GPU one block looks for it: 0.2 s of 12 million, and sorting them takes a hundredth.
        figures["budget_p99"] = float(used.sort().values[rank - 1] if used.is_cuda else used.kthvalue(rank).values)
        bins = used.mul(10).clamp_(max=10).long()
        figures["budget_histogram"] = torch.bincount(bins, minlength=11).tolist()
    inexact, ends = finite & ~limits.exact, (limits.lower, limits.upper)
    if bool(inexact.any()):
        (width,) = by_rows(lambda low, high: (ordinal.of_floats(high) - ordinal.of_floats(low),), *ends)
        width = width[inexact]
        figures["interval_ulps_max"] = int(width.amax())
        figures["interval_ulps_mean"] = float(width.double().mean())
    return figures
