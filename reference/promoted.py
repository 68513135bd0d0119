"""FP8 with scales of blocks: each block's sum is multiplied by its two scales on the way into the accumulator."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from reference.aligned import aligned_sum, of_elements
from reference.blocks import slabs
from reference.exact import FLOAT64_EXACT, ExactSum, exact_sum, fma
from reference.operands import element_values, scale_values, unit_span
from reference.quantized import Quantized
from reference.summation import Alignment


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
