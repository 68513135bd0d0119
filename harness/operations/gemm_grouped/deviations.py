"""Known mistakes of pad_sections and unpad_sections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.harness.operations.stages.outcome import Limit
from narrowgauge.harness.operations.stages.possible_cause import Cause
from narrowgauge.spec.recipes import Recipe


@dataclass(frozen=True)
class Padding:
    """Sections of x (M, K) that are padded for a recipe."""

    x: torch.Tensor
    sizes: list[int]
    """Rows of the sections."""
    recipe: Recipe
    padded: torch.Tensor
    """The padded rows of the kernel."""

    @property
    def padded_sizes(self) -> list[int]:
        """Rows of the padded sections."""
        return [_round_up(size, self.recipe.row_alignment) for size in self.sizes]

    @property
    def starts(self) -> list[int]:
        """First row of each padded section."""
        return [sum(self.padded_sizes[:number]) for number in range(len(self.sizes))]

    def placed(self, padded: torch.Tensor, *, behind_padding: bool = False) -> torch.Tensor:
        """`padded` with the rows of each section before its padding, or behind it."""
        sections = zip(torch.split(self.x, self.sizes), self.starts, self.padded_sizes, strict=True)
        for section, start, rows in sections:
            first = start + rows - len(section) if behind_padding else start
            padded[first : first + len(section)] = section
        return padded

    def first_rows_zeroed(self) -> torch.Tensor:
        """Correct rows, but zeros in the first row of each section but the first."""
        padded = self.placed(torch.zeros_like(self.padded))
        padded[[start for start in self.starts[1:] if start < len(padded)]] = 0
        return padded


SIZES: Deviation[Padding] = Deviation(
    "alignment:{}", "sections are padded to multiples of {0}, not of {1[1]}", "padded sizes",
    lambda rows, p: [_round_up(size, rows[0]) for size in p.sizes],
    lambda p: {str(rows): (rows, p.recipe.row_alignment) for rows in (1, 8, 16, 32, 64, 128, 256)},
)  # fmt: skip
"""Wrong sizes of padded sections."""
PADDINGS: tuple[Deviation[Padding], ...] = (
    Deviation("padding-not-zeroed", "rows of the padding are not 0", "padded", lambda p: p.placed(p.padded.clone())),
    Deviation("sections-not-padded", "sections lie one behind the other, and all the padding behind them", "padded",
              lambda p: torch.cat([p.x, torch.zeros_like(p.padded[len(p.x) :])])),
    Deviation("padding-wrong-section", "the first row of a section is taken for one of the section before: padding",
              "padded", lambda p: p.first_rows_zeroed()),
    Deviation("padding-before-rows", "the padding of a section lies before its rows", "padded",
              lambda p: p.placed(torch.zeros_like(p.padded), behind_padding=True)),
)  # fmt: skip
"""Wrong padded rows."""
FIRST_ROWS: Deviation[torch.Tensor] = Deviation(
    "unpadding-first-rows", "the first rows are kept, those of the padding among them", "unpadded"
)


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
    padding, kernel_sizes = Padding(x, rows_of_sections.tolist(), recipe, padded), padded_rows.tolist()
    wrong_sizes = kernel_sizes != padding.padded_sizes
    for row in SIZES.rows(padding) if wrong_sizes else rows_of(PADDINGS, padding):
        result = row.result(padding)
        if result == kernel_sizes if wrong_sizes else equal_bits(result, padded):
            yield row.cause, row.sentence


def _round_up(size: int, rows: int) -> int:
    return -(-size // rows) * rows


def wrong_unpadding(output: torch.Tensor, padded: torch.Tensor, _: StageResult, __: Limit) -> Iterator[Cause]:
    """Mistakes that give the output (M, N) from the padded output."""
    if equal_bits(output, padded[: len(output)]):
        yield FIRST_ROWS.cause, FIRST_ROWS.sentence
