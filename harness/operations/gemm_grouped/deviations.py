"""Known mistakes of pad_sections and unpad_sections."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.outcome import Limit
from narrowgauge.harness.operations.stages.possible_cause import Cause
from narrowgauge.reference.quantize.sections import pad_sections
from narrowgauge.spec.recipes import Recipe

_ALIGNMENTS = (1, 8, 16, 32, 64, 128, 256)


def wrong_padding(
    x: torch.Tensor,
    rows_of_sections: torch.Tensor,
    padded: torch.Tensor,
    padded_rows: torch.Tensor,
    recipe: Recipe,
    _: StageResult,
    __: Limit,
) -> Iterator[Cause]:
    """Mistakes that give the padded rows, or the padded sizes, of sections of x (M, K)."""
    sizes, kernel_sizes = rows_of_sections.tolist(), padded_rows.tolist()
    padded_sizes = [_round_up(size, recipe.row_alignment) for size in sizes]
    if kernel_sizes != padded_sizes:
        for rows in _ALIGNMENTS:
            if kernel_sizes == [_round_up(size, rows) for size in sizes]:
                yield f"alignment:{rows}", f"sections are padded to multiples of {rows}, not of {recipe.row_alignment}"
        return
    sections, starts = torch.split(x, sizes), [sum(padded_sizes[:number]) for number in range(len(padded_sizes))]
    rows_first, padding_first = torch.zeros_like(padded), torch.zeros_like(padded)
    rows_first[: len(x)] = x
    for section, start, rows in zip(sections, starts, padded_sizes, strict=True):
        padding_first[start + rows - len(section) : start + rows] = section
    if all(equal_bits(padded[start : start + len(part)], part) for start, part in zip(starts, sections, strict=True)):
        yield "padding-not-zeroed", "rows of the padding are not 0"
    if equal_bits(rows_first, padded):
        yield "sections-not-padded", "sections lie one behind the other, and all the padding behind them"
    padded_from_section_before = pad_sections(x, rows_of_sections, recipe)[0]
    padded_from_section_before[[start for start in starts[1:] if start < len(padded_from_section_before)]] = 0
    if equal_bits(padded_from_section_before, padded):
        yield "padding-wrong-section", "the first row of a section is taken for one of the section before: padding"
    if equal_bits(padding_first, padded):
        yield "padding-before-rows", "the padding of a section lies before its rows"


def _round_up(size: int, rows: int) -> int:
    return -(-size // rows) * rows


def wrong_unpadding(output: torch.Tensor, padded: torch.Tensor, _: StageResult, __: Limit) -> Iterator[Cause]:
    """Mistakes that give the output (M, N) from the padded output."""
    if equal_bits(output, padded[: len(output)]):
        yield "unpadding-first-rows", "the first rows are kept, those of the padding among them"
