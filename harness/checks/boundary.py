"""docs/tolerance.md#boundary: after sums of free order, a number is right where some value of its interval gives it.

A right element that differs from the reference's own order is excused, and counted. That happens only where the
interval straddles a boundary of rounding, and with errors symmetric about the exact sum to no more than half of such
elements: more of them than chance explains is wrong too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.chunks import by_rows
from narrowgauge.harness.checks.finding import Describe, Sides, finding, sentence, spaced
from narrowgauge.harness.checks.interval import power_of_two
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.checks.statistics.chance import Chance
from narrowgauge.spec.formats import Format


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
    free = torch.zeros_like(actual, dtype=torch.bool)
    return _compare(stage, Sides(expected, actual, fmt), ends, free, sources, noun, describe)


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
    free = nan if free is None else nan | free
    return _compare(stage, Sides(expected, actual), ends, free, sources, noun, describe)


def _compare(
    stage: str,
    sides: Sides,
    ends: tuple[torch.Tensor, torch.Tensor],
    free: torch.Tensor,
    sources: Sources,
    noun: str,
    describe: Describe,
) -> StageResult:
    """Compare two sides with the least and the greatest that is right, but for what is `free`."""
    fmt = sides.fmt

    def value(x: torch.Tensor) -> torch.Tensor:
        """Its ordinal; zeros are equal."""
        return ordinal.of_floats(x) if fmt is None else ordinal.of_codes(x, fmt)

    def signed(x: torch.Tensor) -> torch.Tensor:
        """The same, but −0 is below +0."""
        return ordinal.signed_floats(x) if fmt is None else ordinal.signed_codes(x, fmt)

    def compare(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        anything, actual, expected, lower, upper = given
        at = signed(actual)
        wrong = ~(anything | ((at >= signed(lower)) & (at <= signed(upper))))
        differs = ~wrong & ~anything & (value(actual) != value(expected))
        return wrong, differs, (value(upper) - value(lower) == 1) & ~anything

    def outside(here: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor]:
        actual, lower, upper = map(value, given)
        return (torch.maximum(lower - actual, actual - upper).clamp_(min=0).masked_fill_(~here, -1),)

    def apart(here: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor]:
        actual, expected = map(value, given)
        return ((actual - expected).abs_().masked_fill_(~here, -1),)

    wrong, excused, straddles = by_rows(compare, free, sides.actual, sides.expected, *ends)
    result = StageResult(stage, "boundary", wrong.numel(), excused=int(excused.sum()))
    if bool(wrong.any()):
        (distance,) = by_rows(outside, wrong, sides.actual, *ends)
        result.mismatches, result.max_ulp = int(wrong.sum()), int(distance.amax())
        result.sentence = f"{sentence(wrong, distance, noun)}; no order of summation gives them"
        result.wrong = wrong
        result.finding = finding(stage, "boundary", result.sentence, wrong, distance, describe=describe, sides=sides)
    elif bool((differ := excused & straddles).any()):
        (distance,) = by_rows(apart, excused, sides.actual, sides.expected)
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
