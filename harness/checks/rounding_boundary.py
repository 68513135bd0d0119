"""Check of results whose order of summation is free, docs/tolerance.md#boundary.

An element is correct if any value of its interval rounds to the element. A correct element that differs from the
reference's order is excused and counted. An element can be excused only if its interval straddles a rounding boundary.
If errors are symmetric about the exact sum, at most half of these elements differ on average. The check therefore also
fails if more elements are excused than chance explains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.distance import Comparison, format_count, measure
from narrowgauge.harness.checks.finding import Describe, make_finding, sentence
from narrowgauge.harness.checks.rotation_interval import power_of_two
from narrowgauge.harness.checks.row_chunks import map_row_chunks
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.checks.statistics.statistical_tests import StatisticalTest
from narrowgauge.spec.formats import Format


@dataclass
class Sources:
    """Blocks of inputs that the elements of a stage sum. Only elements of different sources are independent."""

    x: torch.Tensor
    """Inputs (M, K) before the rotation."""
    rows: int
    """Rows of `x` in a source. The elements of the stage are equal in all these rows."""
    columns: int
    """Columns of `x` in a source."""


def boundary_codes(
    stage: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    fmt: Format,
    sources: Sources | None,
    *,
    noun: str,
    describe: Describe,
) -> StageResult:
    """Compare codes (uint8 (M, K), a byte for each element) with `ends`, codes of the smallest and largest value."""
    free = torch.zeros_like(actual, dtype=torch.bool)
    return _compare(stage, Comparison(expected, actual, fmt), ends, free, sources, noun, describe)


def boundary_floats(
    stage: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    sources: Sources | None,
    *,
    free: torch.Tensor | None = None,
    noun: str,
    describe: Describe,
) -> StageResult:
    """Compare float32 or bfloat16 numbers (M, K) with `ends`: the smallest and the largest value. NaN equals NaN.

    `free`, bool (M, K): elements for which every value is correct.
    """
    nan = actual.isnan() & ends[0].isnan() & ends[1].isnan()
    free = nan if free is None else nan | free
    return _compare(stage, Comparison(expected, actual), ends, free, sources, noun, describe)


def _compare(
    stage: str,
    comparison: Comparison,
    ends: tuple[torch.Tensor, torch.Tensor],
    free: torch.Tensor,
    sources: Sources | None,
    noun: str,
    describe: Describe,
) -> StageResult:
    """Compare the actual result with the smallest and the largest correct value, except for `free` elements.

    Without `sources` any number of elements may be excused.
    """
    fmt = comparison.fmt

    def ordinals(x: torch.Tensor) -> torch.Tensor:
        """Ordinals in which +0 and −0 are equal."""
        return ordinal.float_ordinals(x) if fmt is None else ordinal.code_ordinals(x, fmt)

    def signed_ordinals(x: torch.Tensor) -> torch.Tensor:
        """Ordinals in which −0 is below +0."""
        return ordinal.signed_float_ordinals(x) if fmt is None else ordinal.signed_code_ordinals(x, fmt)

    def compare(*rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        free, actual, expected, lower, upper = rows
        position = signed_ordinals(actual)
        wrong = ~(free | ((position >= signed_ordinals(lower)) & (position <= signed_ordinals(upper))))
        differs = ~wrong & ~free & (ordinals(actual) != ordinals(expected))
        return wrong, differs, (ordinals(upper) - ordinals(lower) == 1) & ~free

    def distance_to_ends(wrong_rows: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor]:
        actual, lower, upper = map(ordinals, rows)
        return (torch.maximum(lower - actual, actual - upper).clamp_(min=0).masked_fill_(~wrong_rows, -1),)

    def distance_to_expected(excused_rows: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor]:
        actual, expected = map(ordinals, rows)
        return ((actual - expected).abs_().masked_fill_(~excused_rows, -1),)

    wrong, excused, straddling = map_row_chunks(compare, free, comparison.actual, comparison.expected, *ends)
    result = StageResult(stage, "boundary", wrong.numel(), excused=int(excused.sum()))
    if fmt is None:
        infinite = (ends[0].isinf() | ends[1].isinf()) & (ends[0] != ends[1])
        result.unbounded = int(infinite.sum())
    if bool(wrong.any()):
        (distance,) = map_row_chunks(distance_to_ends, wrong, comparison.actual, *ends)
        result.mismatches, result.max_ulp = int(wrong.sum()), int(distance.amax())
        distances = measure(wrong, distance, comparison)
        result.sentence = f"{sentence(wrong, distances, noun)}; no order of summation gives them"
        result.wrong_elements = wrong
        result.finding = make_finding(
            stage, "boundary", result.sentence, wrong, distances, describe=describe, comparison=comparison
        )
    elif sources is not None and bool((changed := excused & straddling).any()):
        (distance,) = map_row_chunks(distance_to_expected, excused, comparison.actual, comparison.expected)
        result.tests = [_excuse_test(changed, straddling, sources, noun, (excused, distance, describe, comparison))]
    return result


def _excuse_test(
    changed: torch.Tensor,
    straddling: torch.Tensor,
    sources: Sources,
    noun: str,
    elements: tuple[torch.Tensor, torch.Tensor, Describe, Comparison],
) -> StatisticalTest:
    """Statistical test of the number of excused elements: `changed` among `straddling`, masks (M, C)."""
    count, log_p, total = excuse_bound(changed, straddling, sources)
    text = (
        f"{format_count(count)} of {format_count(total)} {noun} that the order of summation can change are not those "
        "of the reference; errors symmetric about the exact sum change half of them"
    )
    return StatisticalTest("excuses", log_p, text, elements)


def excuse_bound(changed: torch.Tensor, straddling: torch.Tensor, sources: Sources) -> tuple[int, float, int]:
    """Number of changed elements, log of a bound of the probability of so many, and number of straddling elements.

    Equal sources, up to a power of two, are counted once. Among N elements whose interval straddles a single boundary,
    at most half differ on average. By Hoeffding's inequality, N/2 + d or more elements differ with a probability of at
    most exp(-2·d²/Σn²), with n the number of elements of a source.
    """
    per_source = _group_by_source(straddling, sources).sum(1)
    has_straddling = per_source > 0
    columns = sources.x.shape[1]
    padded = torch.nn.functional.pad(sources.x, (0, -columns % sources.columns, 0, -sources.x.shape[0] % sources.rows))
    tiles = padded.view(-1, sources.rows, padded.shape[1] // sources.columns, sources.columns).transpose(1, 2)
    tiles = tiles.reshape(-1, sources.rows * sources.columns)[has_straddling].double()
    exponent = torch.frexp(tiles.abs().nan_to_num(nan=0.0, posinf=0.0).amax(1, keepdim=True)).exponent
    _, group = torch.unique(tiles * power_of_two(-exponent), dim=0, return_inverse=True)
    first = torch.full((len(tiles),), len(tiles), device=group.device).scatter_reduce_(
        0, group, torch.arange(len(tiles), device=group.device), "amin"
    )
    representatives = first[first < len(tiles)]
    counts = per_source[has_straddling][representatives]
    count = int(_group_by_source(changed, sources).sum(1)[has_straddling][representatives].sum())
    total = int(counts.sum())
    return count, -2 * max(0.0, count - total / 2) ** 2 / float((counts.double() ** 2).sum()), total


def _group_by_source(mask: torch.Tensor, sources: Sources) -> torch.Tensor:
    """The mask (M, C) as (sources, elements of a source). Every source has the same number of columns."""
    rows = mask[:: sources.rows]
    across = -(-sources.x.shape[1] // sources.columns)
    width = -(-rows.shape[1] // across)
    return torch.nn.functional.pad(rows, (0, across * width - rows.shape[1])).view(-1, width)
