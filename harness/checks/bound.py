"""Rule 2 of tolerance.md: a sum is right where a correct order of summation, or the declared one, can give it."""

from __future__ import annotations

from typing import Any

import torch

from harness.checks import ordinal
from harness.checks.stage import StageResult
from harness.finding import Describe, Sides, finding, sentence
from reference.bounds import Bounds


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
    matches = _same(actual, limits.expected, limits.zero_sum) | _same(actual, limits.fused, limits.zero_sum)
    inside = (actual >= limits.lower) & (actual <= limits.upper) & torch.isfinite(limits.centre)
    excused = limits.undetermined & ~torch.isfinite(actual)
    return matches | excused | (inside & ~limits.exact)


def _same(actual: torch.Tensor, expected: torch.Tensor, zero_sum: torch.Tensor) -> torch.Tensor:
    equal = (actual == expected) & ((actual.signbit() == expected.signbit()) | zero_sum)
    return equal | (actual.isnan() & expected.isnan())


def _distance(actual: torch.Tensor, limits: Bounds) -> torch.Tensor:
    """Steps of the output's dtype to the nearest value that is right."""
    at = ordinal.of_floats(actual)
    lower = torch.where(limits.exact, limits.expected, limits.lower)
    upper = torch.where(limits.exact, limits.expected, limits.upper)
    return torch.maximum(ordinal.of_floats(lower) - at, at - ordinal.of_floats(upper)).clamp_(min=0)


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
        name: float((limits.tier == tier).double().mean()) for tier, name in enumerate(("exact_share", "ordered_share"))
    }
    finite = torch.isfinite(limits.centre) & torch.isfinite(actual) & torch.isfinite(limits.budget)
    if bool(finite.any()):
        used = ((actual.double() - limits.centre).abs() / limits.budget)[finite]
        figures["budget_max"] = float(used.amax())
        # The nearest rank of the 99th percentile; torch.quantile takes no more than 16 million elements.
        figures["budget_p99"] = float(used.kthvalue(max(1, -(-99 * used.numel() // 100))).values)
        bins = used.mul(10).clamp_(max=10).long()
        figures["budget_histogram"] = torch.bincount(bins, minlength=11).tolist()
    inexact = finite & ~limits.exact
    if bool(inexact.any()):
        width = (ordinal.of_floats(limits.upper) - ordinal.of_floats(limits.lower))[inexact]
        figures["interval_ulps_max"] = int(width.amax())
        figures["interval_ulps_mean"] = float(width.double().mean())
    return figures
