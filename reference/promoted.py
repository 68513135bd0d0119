"""FP8 with scales of blocks: each block's sum is multiplied by its two scales on the way into the accumulator."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from reference.aligned import aligned_sum, of_elements
from reference.blocks import slabs
from reference.exact import FLOAT64_EXACT, ExactSum, exact_sum, fma
from reference.operands import element_values, multiply_blocks, scale_values, unit_span
from reference.quantized import Quantized
from reference.summation import FLT_MAX, SMALLEST, Alignment

_MANTISSA = (1 << 23) - 1
_WIDE = {"cpu": 1024}
"""Columns of outputs that are computed at a time: as high as wide they take a third less time than all columns."""


class Blocks:
    """The blocks of K of two operands (M, K) and (N, K): what their codes and scales stand for."""

    def __init__(self, a: Quantized, b: Quantized) -> None:
        self.left, self.right = element_values(a), element_values(b)
        self.left_scales, self.right_scales = scale_values(a).float(), scale_values(b).float()
        self.formats = a.recipe.element, b.recipe.element
        self.width = a.recipe.block[1]
        self.proved = self.width * unit_span(a.recipe.element) * unit_span(b.recipe.element) < FLOAT64_EXACT

    def sliced(self, slices: int) -> Iterator[list[tuple[slice, int]]]:
        """Columns and number of every block, in order of K, in that many slices of whole blocks, none of them empty."""
        blocks = [
            (slice(start, start + self.width), number)
            for number, start in enumerate(range(0, self.left.shape[1], self.width))
        ]
        each = max(1, -(-len(blocks) // slices))
        for first in range(0, len(blocks), each):
            yield blocks[first : first + each]

    def __iter__(self) -> Iterator[tuple[slice, int]]:
        """Columns and number of every block, in order of K."""
        for some in self.sliced(1):
            yield from some

    def sum(self, rows: slice, columns: slice) -> ExactSum:
        """Σ of the products of codes in a block, exactly: (rows, N)."""
        left, right = self.left[rows, columns], self.right[:, columns]
        return ExactSum(left @ right.T, None) if self.proved else exact_sum(left, right)

    def aligned(self, rows: slice, columns: slice, model: Alignment, exact: torch.Tensor) -> torch.Tensor:
        """The same as a tensor core adds it, float32, `exact` being that of IEEE 754 in float64."""
        left, right = self.left[rows, columns], self.right[:, columns]
        factors = of_elements(left, self.formats[0]), of_elements(right, self.formats[1])
        return aligned_sum(*factors, model, exact).float()

    def fold(self) -> bool:
        """Multiplies the operands by their scales where no product with one can then round in `promoted_sum`.

        Those are powers of two, P is a multiple of the product of the smallest numbers of the two formats, and what it
        is scaled to has as many bits, from 2^-149 to FLT_MAX. Says whether it did.
        """
        if not self.proved or 0 in (self.left_scales.numel(), self.right_scales.numel()):
            return False
        scales = self.left_scales, self.right_scales
        ends = [end.double() for each in scales for end in torch.aminmax(each)]
        cut = [(each.view(torch.int32) & _MANTISSA).any().double() for each in scales]
        least_a, most_a, least_b, most_b, *others = torch.stack(ends + cut).tolist()
        unit, largest = math.prod(fmt.value(1) for fmt in self.formats), math.prod(fmt.max for fmt in self.formats)
        if (
            any(others)
            or not least_a * least_b > 0
            or unit * least_a * min(1.0, least_b) < SMALLEST
            or not 2 * self.width * largest * most_a * max(1.0, most_b) < FLT_MAX
        ):
            return False
        for side, each in ((self.left, self.left_scales), (self.right, self.right_scales)):
            multiply_blocks(side, each, self.width)
        return True

    def scales(self, rows: slice, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of a block, float32: (rows, 1) and (N,)."""
        return self.left_scales[rows, number : number + 1], self.right_scales[:, number]


def promoted_sum(a: Quantized, b: Quantized, *, slices: int = 1, alignment: Alignment | None = None) -> torch.Tensor:
    """y = fma(fl(P·s_a), s_b, y) over the blocks of K in order, from 0, P a block's sum rounded once: float32 (M, N).

    Of `slices` of K, of whole blocks, each has a y of its own, and they are added in order. With an `alignment` P is
    what that tensor core gives. Source: numerics.md, "FP8 with float32 scales".
    """
    blocks = Blocks(a, b)
    out = torch.zeros(a.shape[0], b.shape[0], device=a.codes.device)
    if alignment is None and blocks.fold():
        for some in blocks.sliced(slices):
            out += _folded_sum(blocks, some)
        return out
    for rows in slabs(out):
        for first, some in enumerate(blocks.sliced(slices)):
            y = torch.zeros_like(out[rows])
            for columns, number in some:
                s_a, s_b = blocks.scales(rows, number)
                exact = blocks.sum(rows, columns)
                p = exact.to_float32()
                if alignment is not None:
                    p = blocks.aligned(rows, columns, alignment, exact.high)
                y = fma(p * s_a, s_b, y)
            out[rows] = y if first == 0 else out[rows] + y
    return out


def _folded_sum(blocks: Blocks, some: list[tuple[slice, int]]) -> torch.Tensor:
    """y over some blocks of operands that were folded: the float32 sum of float32 sums, float32 (M, N)."""
    out = torch.zeros(blocks.left.shape[0], blocks.right.shape[0], device=blocks.left.device)
    wide = _WIDE.get(out.device.type, max(1, out.shape[1]))
    for start in range(0, out.shape[1], wide):
        here, right = out[:, start : start + wide], blocks.right[start : start + wide]
        for rows in slabs(here):
            y, left = here[rows], blocks.left[rows]
            exact, near = torch.empty_like(y, dtype=torch.float64), torch.empty_like(y)
            for columns, _ in some:
                torch.mm(left[:, columns], right[:, columns].T, out=exact)
                y.add_(near.copy_(exact))
    return out
