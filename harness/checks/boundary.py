"""Rule 3 of tolerance.md: after sums of free order, a number is right where some value of its interval gives it.

A right element that differs from the reference's own order is excused, and counted. That happens only where the
interval straddles a boundary of rounding, and with errors symmetric about the exact sum to no more than half of such
elements: more of them than chance explains is wrong too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.checks import ordinal
from harness.checks.chance import Chance
from harness.checks.interval import power_of_two
from harness.checks.stage import StageResult
from harness.finding import Describe, Sides, finding, sentence, spaced
from reference.formats import Format


@dataclass
class Sources:
    """What the elements of a stage are sums of: only different sources are independent of one another."""

    x: torch.Tensor
    """(M, K), before the rotation."""
    rows: int
    """Rows of `x` that share a source; elements of a stage are the same in all of them."""
    columns: int
    """Columns of `x` that share a source."""


def boundary_codes(
    stage: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    fmt: Format,
    sources: Sources,
    *,
    noun: str,
    describe: Describe,
) -> StageResult:
    """Compare codes (uint8, (M, K), one an element) with those of the least and the greatest value, `ends`."""
    values = [ordinal.of_codes(codes, fmt) for codes in (actual, expected, *ends)]
    signed = [ordinal.signed_codes(codes, fmt) for codes in (actual, *ends)]
    free, sides = torch.zeros_like(actual, dtype=torch.bool), Sides(expected, actual, fmt)
    return _compare(stage, values, signed, free, sources, noun, describe, sides)


def boundary_floats(
    stage: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    sources: Sources,
    *,
    free: torch.Tensor | None = None,
    noun: str,
    describe: Describe,
) -> StageResult:
    """Compare float32 or bfloat16 (M, K) with the least and the greatest value, `ends`. NaN equals NaN.

    `free`, bool: elements that can be anything.
    """
    nan = actual.isnan() & ends[0].isnan() & ends[1].isnan()
    values = [ordinal.of_floats(x) for x in (actual, expected, *ends)]
    signed = [ordinal.signed_floats(x) for x in (actual, *ends)]
    free = nan if free is None else nan | free
    return _compare(stage, values, signed, free, sources, noun, describe, Sides(expected, actual))


def _compare(
    stage: str,
    values: list[torch.Tensor],
    signed: list[torch.Tensor],
    free: torch.Tensor,
    sources: Sources,
    noun: str,
    describe: Describe,
    sides: Sides,
) -> StageResult:
    """`values`, in which zeros are equal: actual, expected and ends. `signed`, in which not: the same but expected."""
    at, low, high = signed
    wrong = ~(free | ((at >= low) & (at <= high)))
    actual, expected, lower, upper = values
    excused = ~wrong & ~free & (actual != expected)
    result = StageResult(stage, "boundary", wrong.numel(), excused=int(excused.sum()))
    if bool(wrong.any()):
        distance = torch.maximum(lower - actual, actual - upper).clamp_(min=0).masked_fill_(~wrong, -1)
        result.mismatches, result.max_ulp = int(wrong.sum()), int(distance.amax())
        result.sentence = f"{sentence(wrong, distance, noun)}; no order of summation gives them"
        result.wrong = wrong
        result.finding = finding(stage, "boundary", result.sentence, wrong, distance, describe=describe, sides=sides)
    elif bool((differ := excused & (straddles := (upper - lower == 1) & ~free)).any()):
        distance = (actual - expected).abs().masked_fill_(~excused, -1)
        result.chances = [_excused(differ, straddles, sources, noun, (excused, distance, describe, sides))]
    return result


def _excused(
    differ: torch.Tensor,
    straddles: torch.Tensor,
    sources: Sources,
    noun: str,
    elements: tuple[torch.Tensor, torch.Tensor, Describe, Sides],
) -> Chance:
    """The test of the number of excused elements, whose interval `straddles` one boundary."""
    count, log_p, total = excuses(differ, straddles, sources)
    text = (
        f"{spaced(count)} of {spaced(total)} {noun} that the order of summation can change are not those of the "
        "reference; errors symmetric about the exact sum change half of them"
    )
    return Chance("excuses", log_p, text, elements)


def excuses(differ: torch.Tensor, straddles: torch.Tensor, sources: Sources) -> tuple[int, float, int]:
    """How many elements differ, log of a bound of the chance of so many, and how many straddle a boundary.

    Those of different sources: sources that are the same up to a power of two count once. Of the N elements whose
    interval straddles one boundary at most half differ on average. By Hoeffding's inequality N/2 + d or more do with a
    probability of at most exp(-2·d²/Σn²), n the elements of one source.
    """
    each = _by_source(straddles, sources).sum(1)
    some = each > 0
    columns = sources.x.shape[1]
    padded = torch.nn.functional.pad(sources.x, (0, -columns % sources.columns, 0, -sources.x.shape[0] % sources.rows))
    tiles = padded.view(-1, sources.rows, padded.shape[1] // sources.columns, sources.columns).transpose(1, 2)
    content = tiles.reshape(-1, sources.rows * sources.columns)[some].double()
    exponent = torch.frexp(content.abs().nan_to_num(nan=0.0, posinf=0.0).amax(1, keepdim=True)).exponent
    _, which = torch.unique(content * power_of_two(-exponent), dim=0, return_inverse=True)
    first = torch.full((len(content),), len(content), device=which.device).scatter_reduce_(
        0, which, torch.arange(len(content), device=which.device), "amin"
    )
    chosen = first[first < len(content)]
    n = each[some][chosen]
    count, total = int(_by_source(differ, sources).sum(1)[some][chosen].sum()), int(n.sum())
    return count, -2 * max(0.0, count - total / 2) ** 2 / float((n.double() ** 2).sum()), total


def _by_source(mask: torch.Tensor, sources: Sources) -> torch.Tensor:
    """A mask of elements, (M, C), as (sources, elements of one): every source has as many columns of it."""
    rows = mask[:: sources.rows]
    across = -(-sources.x.shape[1] // sources.columns)
    width = -(-rows.shape[1] // across)
    return torch.nn.functional.pad(rows, (0, across * width - rows.shape[1])).view(-1, width)
