"""FP8 with block scales: each block sum is multiplied by its two float32 scales on the way into the accumulator.

Source: docs/numerics.md#fp8-with-float32-scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import cached_property

import torch

from narrowgauge.reference.gemm.fast.code_ranges import float64_exact_blocks
from narrowgauge.reference.gemm.fast.tensor_core_sum import fast_tensor_core_sum
from narrowgauge.reference.gemm.operands import scale_values
from narrowgauge.reference.gemm.split_k import SplitK
from narrowgauge.reference.gemm.tensor_core import Factors, factors_of_elements
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.exact import ExactSum, exact_sum, fma
from narrowgauge.reference.numbers.slabs import slabs
from narrowgauge.reference.quantize.layout import rowwise_codes
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import Alignment


class BlockScaledOperands:
    """Two operands (M, K) and (N, K) with block scales; an iterator over their blocks along K.

    Iterating gives (columns, number) of every block, in order of K.
    """

    def __init__(self, a: Quantized, b: Quantized) -> None:
        self.codes = rowwise_codes(a), rowwise_codes(b)
        self.left_scales, self.right_scales = scale_values(a).float(), scale_values(b).float()
        """float32 (M, B) and (N, B)."""
        self.formats = a.recipe.element, b.recipe.element
        self.width = a.recipe.block[1]
        """Columns of a block."""
        self.columns = a.shape[1]
        """K."""
        self.float64_exact = float64_exact_blocks(self.codes, self.formats, self.width)
        """For every block: whether a float64 product of the elements is exact."""

    @cached_property
    def left(self) -> torch.Tensor:
        """Elements of the first operand, without scales: float64 (M, K)."""
        return decode(self.codes[0], self.formats[0], torch.float64)

    @cached_property
    def right(self) -> torch.Tensor:
        """Elements of the second operand, without scales: float64 (N, K)."""
        return decode(self.codes[1], self.formats[1], torch.float64)

    def sliced_blocks(self, split: SplitK) -> Iterator[list[tuple[slice, int]]]:
        """(columns, number) of the blocks in each nonempty slice of K, of whole blocks."""
        for part in split.columns(self.columns, self.width) if self.columns else ():
            starts = range(part.start, part.stop, self.width)
            yield [(slice(start, start + self.width), start // self.width) for start in starts]

    def __iter__(self) -> Iterator[tuple[slice, int]]:
        for blocks in self.sliced_blocks(SplitK()):
            yield from blocks

    def tile(self, left_rows: slice, right_rows: slice) -> BlockScaledOperands:
        """The operands of a tile of the output."""
        part = copy(self)
        part.left, part.right = self.left[left_rows], self.right[right_rows]
        part.left_scales, part.right_scales = self.left_scales[left_rows], self.right_scales[right_rows]
        return part

    def scales(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of a block, float32: (M, 1) and (N,)."""
        return self.left_scales[:, number : number + 1], self.right_scales[:, number]

    def block_sum(self, columns: slice) -> ExactSum:
        """The exact sum of the products of elements in a block: (M, N)."""
        left, right = self.left[:, columns], self.right[:, columns]
        if self.float64_exact[columns.start // self.width]:
            return ExactSum(left @ right.T, None)
        return exact_sum(left, right)

    def tensor_core_block_sum(self, columns: slice, model: Alignment, exact: torch.Tensor) -> torch.Tensor:
        """The block sum of a simulated tensor core, float32 (M, N). `exact`: the IEEE sum, float64."""
        return fast_tensor_core_sum(*self.factors(columns), model, exact).float()

    def factors(self, columns: slice) -> tuple[Factors, Factors]:
        """The elements of a block as factors of a tensor core."""
        left, right = self.left[:, columns], self.right[:, columns]
        return factors_of_elements(left, self.formats[0]), factors_of_elements(right, self.formats[1])


def promoted_sum(
    a: Quantized, b: Quantized, *, split: SplitK | None = None, alignment: Alignment | None = None
) -> torch.Tensor:
    """y = fma(fl(P·s_a), s_b, y) from y = 0 over the blocks in order of K, float32 (M, N).

    P is the block sum, rounded once to float32, or the block sum of the tensor core `alignment`. With several slices
    of whole blocks, each slice has its own y, and `split` joins the results.
    """
    operands, split = BlockScaledOperands(a, b), split or SplitK()
    out = torch.zeros(a.shape[0], b.shape[0], device=a.codes.device)
    for rows in slabs(out):
        part = operands.tile(rows, slice(None))
        sums = []
        for chain in operands.sliced_blocks(split):
            y = torch.zeros_like(out[rows])
            for columns, number in chain:
                s_a, s_b = part.scales(number)
                exact = part.block_sum(columns)
                if alignment is None:
                    p = exact.to_float32()
                else:
                    p = part.tensor_core_block_sum(columns, alignment, exact.high)
                y = fma(p * s_a, s_b, y)
            sums.append(y)
        if sums:
            out[rows] = split.joined(sums)
    return out
