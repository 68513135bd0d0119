"""FP8 with scales of blocks: each block's sum is multiplied by its two scales on the way into the accumulator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from functools import cached_property

import torch

from narrowgauge.reference.bounds.certificate import Marks
from narrowgauge.reference.gemm.aligned import aligned_sum, of_elements
from narrowgauge.reference.gemm.operands import code_ends, multiply_blocks, scale_values, unit_span
from narrowgauge.reference.numbers.blocks import slabs
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.exact import FLOAT64_EXACT, ExactSum, add_product, exact_sum, fma
from narrowgauge.reference.quantize.layout import rowwise_codes
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import FLT_MAX, SMALLEST, Alignment

_MANTISSA = (1 << 23) - 1
# Outputs that are computed at a time, (rows, columns). A tile of this size stays in cache, and takes little memory that
# is new to the process, which costs 2 µs a page. On a GPU 2^26 outputs: products of fewer are slower.
_TILE = {"cpu": (256, 1024)}
_TILE_ELSEWHERE = 1 << 26


class Blocks:
    """The blocks of K of two operands (M, K) and (N, K): what their codes and scales stand for."""

    def __init__(self, a: Quantized, b: Quantized) -> None:
        self._codes = rowwise_codes(a), rowwise_codes(b)
        self.left_scales, self.right_scales = scale_values(a).float(), scale_values(b).float()
        self.formats = a.recipe.element, b.recipe.element
        self.width = a.recipe.block[1]
        self.columns = a.shape[1]
        self.proved = self._proved()
        self.folded = False
        self.marks: Marks | None = None
        """Those of the codes, where somebody needs them."""

    @cached_property
    def left(self) -> torch.Tensor:
        """What the codes of the first operand stand for, without scales: float64 (M, K)."""
        return decode(self._codes[0], self.formats[0], torch.float64)

    @cached_property
    def right(self) -> torch.Tensor:
        """The same of the second: float64 (N, K)."""
        return decode(self._codes[1], self.formats[1], torch.float64)

    def panel(self, side: int, rows: slice) -> torch.Tensor:
        """The same of some rows of operand 0 or 1, float64 (rows, K), times their scales where these were folded."""
        values = decode(self._codes[side][rows], self.formats[side], torch.float64)
        if self.folded:
            multiply_blocks(values, (self.left_scales, self.right_scales)[side][rows], self.width)
        return values

    def _proved(self) -> list[bool]:
        """Of every block, whether a float64 matmul of codes is exact: so many of the largest products are below 2^53.

        In units of a power of two that divides all: of the formats, or where those are too wide of the codes at hand.
        """
        number, limit = -(-self.columns // self.width), FLOAT64_EXACT / self.width
        if math.prod(map(unit_span, self.formats)) < limit or 0 in (len(self._codes[0]), *self._codes[1].shape):
            return [True] * number
        spans = torch.ones(number, dtype=torch.float64, device=self._codes[0].device)
        for codes, fmt in zip(self._codes, self.formats, strict=True):
            magnitudes = codes & (fmt.sign_code - 1)
            # Of each column the largest code and the smallest but 0, which wraps around less 1. Bytes are compared fast
            # by columns, not along rows.
            ends = torch.stack([magnitudes.amax(0), (magnitudes - 1).amin(0) + 1])
            ends = torch.nn.functional.pad(ends, (0, -self.columns % self.width)).view(2, number, self.width)
            most, unit = code_ends(ends.transpose(0, 1).flatten(1), fmt)
            spans *= most / unit
        found: list[bool] = (spans < limit).tolist()
        return found

    def sliced(self, slices: int) -> Iterator[list[tuple[slice, int]]]:
        """Columns and number of every block, in order of K, in that many slices of whole blocks, none of them empty."""
        blocks = [
            (slice(start, start + self.width), number)
            for number, start in enumerate(range(0, self.columns, self.width))
        ]
        each = max(1, -(-len(blocks) // slices))
        for first in range(0, len(blocks), each):
            yield blocks[first : first + each]

    def __iter__(self) -> Iterator[tuple[slice, int]]:
        """Columns and number of every block, in order of K."""
        for some in self.sliced(1):
            yield from some

    def part(self, rows: slice, others: slice) -> Blocks:
        """Those of some rows of the two, without panels."""
        found = copy(self)
        found.left, found.right = self.left[rows], self.right[others]
        found.left_scales, found.right_scales = self.left_scales[rows], self.right_scales[others]
        found.marks = None if self.marks is None else self.marks.part(rows, others)
        return found

    def sum(self, columns: slice) -> ExactSum:
        """Σ of the products of codes in a block, exactly: (M, N)."""
        left, right = self.left[:, columns], self.right[:, columns]
        return ExactSum(left @ right.T, None) if self.proved[columns.start // self.width] else exact_sum(left, right)

    def round_sum(
        self, panels: tuple[torch.Tensor, torch.Tensor], columns: slice, near: torch.Tensor, room: torch.Tensor
    ) -> None:
        """The same of two panels, rounded once into `near`, float32 (rows, outputs); `room` is as much of float64."""
        left, right = (panel[:, columns] for panel in panels)
        if self.proved[columns.start // self.width]:
            near.copy_(torch.mm(left, right.T, out=room))
        else:
            near.copy_(exact_sum(left, right).to_float32())

    def aligned(self, columns: slice, model: Alignment, exact: torch.Tensor) -> torch.Tensor:
        """The same as a tensor core adds it, float32, `exact` being that of IEEE 754 in float64."""
        left, right = self.left[:, columns], self.right[:, columns]
        factors = of_elements(left, self.formats[0]), of_elements(right, self.formats[1])
        return aligned_sum(*factors, model, exact).float()

    def fold(self) -> bool:
        """Multiplies panels by their scales from now on, where no product with one can then round in `promoted_sum`.

        Those are powers of two, P is a multiple of the product of the smallest numbers of the two formats, and what it
        is scaled to has as many bits, from 2^-149 to FLT_MAX. Says whether it does.
        """
        if 0 in (self.left_scales.numel(), self.right_scales.numel()):
            return False
        scales = self.left_scales, self.right_scales
        ends = [end.double() for each in scales for end in torch.aminmax(each)]
        cut = [(each.view(torch.int32) & _MANTISSA).any().double() for each in scales]
        least_a, most_a, least_b, most_b, *others = torch.stack(ends + cut).tolist()
        unit, largest = math.prod(fmt.value(1) for fmt in self.formats), math.prod(fmt.max for fmt in self.formats)
        self.folded = (
            not any(others)
            and least_a * least_b > 0
            and unit * least_a * min(1.0, least_b) >= SMALLEST
            and 2 * self.width * largest * most_a * max(1.0, most_b) < FLT_MAX
        )
        return self.folded

    def scales(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of a block, float32: (M, 1) and (N,)."""
        return self.left_scales[:, number : number + 1], self.right_scales[:, number]


def promoted_sum(a: Quantized, b: Quantized, *, slices: int = 1, alignment: Alignment | None = None) -> torch.Tensor:
    """y = fma(fl(P·s_a), s_b, y) over the blocks of K in order, from 0, P a block's sum rounded once: float32 (M, N).

    Of `slices` of K, of whole blocks, each has a y of its own, and they are added in order. With an `alignment` P is
    what that tensor core gives. Source: docs/numerics.md#fp8-with-float32-scales.
    """
    blocks = Blocks(a, b)
    out = torch.zeros(a.shape[0], b.shape[0], device=a.codes.device)
    chains = list(blocks.sliced(slices))
    if alignment is None:
        _add_exact(blocks, chains, out)
    else:
        _add_aligned(blocks, chains, out, alignment)
    return out


def _add_exact(blocks: Blocks, chains: list[list[tuple[slice, int]]], out: torch.Tensor) -> None:
    """Adds the y of every chain to `out`, float32 (M, N) of zeros, tile by tile."""
    folded = blocks.fold()
    right_scales = blocks.right_scales.T.contiguous()
    height, width = _TILE.get(out.device.type, (max(1, _TILE_ELSEWHERE // max(1, out.shape[1])), out.shape[1]))
    size = min(height, out.shape[0]) * min(width, out.shape[1])
    near, exact = (torch.empty(size, dtype=dtype, device=out.device) for dtype in (torch.float32, torch.float64))
    for columns in _cut(out.shape[1], width):
        right = blocks.panel(1, columns)
        for rows in _cut(out.shape[0], height):
            left = blocks.panel(0, rows)
            here = out[rows, columns]
            p, room = (x[: here.numel()].view(here.shape) for x in (near, exact))
            for chain in chains:
                y = here if chain is chains[0] else torch.zeros_like(here)
                for block, number in chain:
                    blocks.round_sum((left, right), block, p, room)
                    if folded:
                        y.add_(p)
                    else:
                        p.mul_(blocks.left_scales[rows, number : number + 1])
                        add_product(y, p, right_scales[number, columns])
                if y is not here:
                    here.add_(y)


def _add_aligned(
    blocks: Blocks, chains: list[list[tuple[slice, int]]], out: torch.Tensor, alignment: Alignment
) -> None:
    """The same with the sums of blocks that a tensor core gives."""
    for rows in slabs(out):
        here, some = out[rows], blocks.part(rows, slice(None))
        for chain in chains:
            y = torch.zeros_like(here)
            for block, number in chain:
                s_a, s_b = some.scales(number)
                p = some.aligned(block, alignment, some.sum(block).high)
                y = fma(p * s_a, s_b, y)
            if chain is chains[0]:
                here.copy_(y)
            else:
                here.add_(y)


def _cut(length: int, step: int) -> Iterator[slice]:
    """0 to `length`, `step` at a time."""
    for start in range(0, length, max(1, step)):
        yield slice(start, min(start + step, length))
