"""FP8 with scales of blocks: each block's sum is multiplied by its two scales on the way into the accumulator."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from reference.blocks import slabs
from reference.exact import FLOAT64_EXACT, ExactSum, exact_sum, fma
from reference.operands import element_values, scale_values, unit_span
from reference.quantized import Quantized


class Blocks:
    """The blocks of K of two operands (M, K) and (N, K): what their codes and scales stand for."""

    def __init__(self, a: Quantized, b: Quantized) -> None:
        self.left, self.right = element_values(a), element_values(b)
        self.left_scales, self.right_scales = scale_values(a).float(), scale_values(b).float()
        self.width = a.recipe.block[1]
        self.proved = self.width * unit_span(a.recipe.element) * unit_span(b.recipe.element) < FLOAT64_EXACT

    def __iter__(self) -> Iterator[tuple[slice, int]]:
        """Columns and number of every block, in order of K."""
        for number, start in enumerate(range(0, self.left.shape[1], self.width)):
            yield slice(start, start + self.width), number

    def sum(self, rows: slice, columns: slice) -> ExactSum:
        """Σ of the products of codes in a block, exactly: (rows, N)."""
        left, right = self.left[rows, columns], self.right[:, columns]
        return ExactSum(left @ right.T, None) if self.proved else exact_sum(left, right)

    def scales(self, rows: slice, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of a block, float32: (rows, 1) and (N,)."""
        return self.left_scales[rows, number : number + 1], self.right_scales[:, number]


def promoted_sum(a: Quantized, b: Quantized) -> torch.Tensor:
    """y = fma(fl(P·s_a), s_b, y) over the blocks of K in order, from 0, P a block's sum rounded once: float32 (M, N).

    Source: numerics.md, "FP8 with float32 scales".
    """
    blocks = Blocks(a, b)
    out = torch.zeros(a.shape[0], b.shape[0], device=a.codes.device)
    for rows in slabs(out):
        y = out[rows]
        for columns, number in blocks:
            s_a, s_b = blocks.scales(rows, number)
            y = fma(blocks.sum(rows, columns).to_float32() * s_a, s_b, y)
        out[rows] = y
    return out
