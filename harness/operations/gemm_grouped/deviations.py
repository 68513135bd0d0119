"""Known mistakes of pad_sections and unpad_sections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.harness.operations.stages.oracle import bounds
from narrowgauge.harness.operations.stages.outcome import Limit
from narrowgauge.harness.operations.stages.possible_cause import Cause
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.summation import Summation


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
        """`padded` with the rows of the sections before their padding, or behind."""
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


Pair = tuple[Quantized, Quantized]
"""A section, or rows of a section, and the matrix taken by a kernel."""


def _rows(q: Quantized, rows: slice) -> Quantized:
    """Rows of a section. A scale belongs to a row, or to the whole section."""
    scales = q.scales if q.recipe.whole else q.scales[rows]
    return replace(q, codes=q.codes[rows], scales=scales, shape=(len(q.codes[rows]), q.shape[1]))


def _of_next(pairs: Sequence[Pair], step: int) -> list[Pair]:
    """Each section is multiplied by the matrix of the wrong expert."""
    return [(a, pairs[(number + step) % len(pairs)][1]) for number, (a, _) in enumerate(pairs)]


def _border(pairs: Sequence[Pair], *, first: bool) -> list[Pair]:
    """The first row of a section with the matrix of the expert before, or the last row with that of the next one."""
    found = list[Pair]()
    for number, (a, b) in enumerate(pairs):
        other = pairs[(number - 1 if first else number + 1) % len(pairs)][1]
        at = min(1, a.shape[0]) if first else max(0, a.shape[0] - 1)
        parts = (_rows(a, slice(0, at)), _rows(a, slice(at, None)))
        found += zip(parts, (other, b) if first else (b, other), strict=True)
    return found


def _past_empty(pairs: Sequence[Pair]) -> list[Pair]:
    """Sections with rows take the matrices in order, as if no expert were empty."""
    full = [a for a, _ in pairs if a.shape[0]]
    return [(a, b) for a, (_, b) in zip(full, pairs, strict=False)]


def _scales_of(pairs: Sequence[Pair], step: int) -> list[Pair]:
    """Each section is multiplied by its matrix with the block scales of the wrong expert."""
    matrices = [b for _, b in pairs]
    scales = [matrices[(number + step) % len(pairs)].scales for number in range(len(pairs))]
    return [(a, replace(b, scales=other)) for (a, b), other in zip(pairs, scales, strict=True)]


def _scales_of_rows(pairs: Sequence[Pair]) -> list[Pair]:
    """Every row with the scales of the next row of its section."""
    return [(replace(a, scales=a.scales.roll(-1, 0)), b) for a, b in pairs]


ARRANGEMENTS: tuple[Deviation[Sequence[Pair]], ...] = (
    Deviation("matrix-of-next-expert", "each expert takes the matrix of the next one", "output",
              lambda p: _of_next(p, 1)),
    Deviation("matrix-of-previous-expert", "each expert takes the matrix of the one before", "output",
              lambda p: _of_next(p, -1)),
    Deviation("matrix-of-first-expert", "every expert takes the matrix of expert 0", "output",
              lambda p: [(a, p[0][1]) for a, _ in p]),
    Deviation("first-row-of-previous-expert", "the first row of a section takes the matrix of the expert before",
              "output", lambda p: _border(p, first=True)),
    Deviation("last-row-of-next-expert", "the last row of a section takes the matrix of the next expert", "output",
              lambda p: _border(p, first=False)),
    Deviation("empty-experts-skipped", "matrices are taken in order, as if no expert were empty", "output",
              _past_empty),
    Deviation("scales-of-next-expert", "a matrix has the block scales of the next one", "output",
              lambda p: _scales_of(p, 1)),
    Deviation("scales-of-previous-expert", "a matrix has the block scales of the one before", "output",
              lambda p: _scales_of(p, -1)),
    Deviation("scales-of-next-row", "a row has the scales of the next row of its section", "output",
              _scales_of_rows),
)  # fmt: skip
"""Wrong matrices and scales of rows of experts in a buffer."""


def wrong_arrangement(
    sections: Sequence[Quantized], matrices: Sequence[Quantized], output: torch.Tensor, order: Summation,
    _: StageResult, limit: Limit,
) -> Iterator[Cause]:  # fmt: skip
    """Mistakes that give the output (M, N) of the rows of all sections."""
    pairs = list(zip(sections, matrices, strict=True))
    for row in rows_of(ARRANGEMENTS, pairs):
        changed = row.result(pairs)
        work = output.numel() * matrices[0].shape[1] / 32
        if limit.may_try(work) and _fits(changed, output, order):
            yield row.cause, row.sentence


def _fits(pairs: Sequence[Pair], output: torch.Tensor, order: Summation) -> bool:
    """Whether outputs lie within the bounds of these products, joined along the rows."""
    start = 0
    for a, b in pairs:
        rows = output[start : start + a.shape[0]]
        start += a.shape[0]
        if len(rows) and not bool(within_bounds(rows, bounds(a, b, out_dtype=output.dtype, order=order)).all()):
            return False
    return True
