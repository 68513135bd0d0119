"""Accumulators narrower than float32, and wrong promotion of block sums to the float32 accumulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from narrowgauge.harness.diagnosis.gemm.gemm_parts import EPILOGUE, Ends, GemmParts, correct_epilogue, ordered_ends
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.reference.gemm.operands import operand, scale_values
from narrowgauge.reference.gemm.promotion import BlockScaledOperands
from narrowgauge.reference.numbers.exact import fma
from narrowgauge.spec.quantized import Quantized

_STEPS = (1, 16, 32, 64, 128)
_MAX_STEPS = 4096
"""Largest number of accumulation steps that are simulated."""


@dataclass(frozen=True)
class Accumulator:
    """A narrow accumulator: sums of `step` columns of K are exact, and the accumulator is rounded after each sum."""

    row: Deviation[torch.Tensor]
    step: int
    inside_block: bool
    """For FP8 with block scales: whether the block sum is narrow, or the promoted sum over all blocks."""
    fused: bool = False
    """For FP8 with block scales: whether a block sum is promoted by an FMA."""

    def sums(self, parts: GemmParts) -> torch.Tensor | None:
        """Final accumulators, float32 (M, N). None if the accumulator does not apply or has too many steps."""
        if parts.left.shape[1] // self.step > _MAX_STEPS:
            return None
        if parts.promotes:
            return self._accumulate_promoted(parts)
        if self.inside_block or self.fused:
            return None
        left, right = (operand(q).float() for q in (parts.left, parts.right))
        return self._accumulate(left, right, torch.zeros(parts.output.shape, device=left.device))

    def _accumulate(self, left: torch.Tensor, right: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        columns = left.shape[1]
        wide_operands = None if self.step == 1 else (left.double(), right.double())
        for start in range(0, columns, self.step):
            if wide_operands is None:  # products are exact in float32
                y = self.row.result(torch.addr(y, left[:, start], right[:, start]))
            else:
                left_step, right_step = (wide[:, start : start + self.step] for wide in wide_operands)
                y = self.row.result(y + (left_step @ right_step.T).float())
        return y

    def _accumulate_promoted(self, parts: GemmParts) -> torch.Tensor | None:
        blocks = BlockScaledOperands(parts.left, parts.right)
        if not self.inside_block and self.step != blocks.width:
            return None
        y = torch.zeros(parts.output.shape, device=parts.left.codes.device)
        for columns, number in blocks:
            s_a, s_b = blocks.scales(number)
            if self.inside_block:
                left, right = blocks.left[:, columns].float(), blocks.right[:, columns].float()
                y = self._promoted(y, self._accumulate(left, right, torch.zeros_like(y)), s_a, s_b)
            else:
                y = self.row.result(self._promoted(y, blocks.block_sum(columns).to_float32(), s_a, s_b))
        return y

    def _promoted(self, y: torch.Tensor, block_sum: torch.Tensor, s_a: torch.Tensor, s_b: torch.Tensor) -> torch.Tensor:
        """y plus a block sum times its scales."""
        if self.fused:
            return fma(block_sum * s_a, s_b.expand_as(y).contiguous(), y)
        return y + block_sum * s_a * s_b


def accumulators(width: int) -> Iterator[Accumulator]:
    """Narrow accumulators for operands with blocks of `width` columns, the most plausible first."""
    steps = sorted(set(_STEPS) | ({width} if width <= max(_STEPS) else set()))
    width_step = [step for step in steps if step == width]
    for step in [*width_step, *(step for step in steps if step != width)]:
        interval = "each product" if step == 1 else f"every {step} columns of K"
        for row in NARROW:
            for inside_block in (False, True):
                for fused in (False, True):
                    yield Accumulator(row.bound(interval), step, inside_block, fused)


def _cut_to_14_bits(y: torch.Tensor) -> torch.Tensor:
    return (y.view(torch.int32) & -(1 << 10)).view(torch.float32)


NARROW: tuple[Deviation[torch.Tensor], ...] = (
    Deviation("accumulator-bf16", "sums are rounded to bf16 after {}", "accumulator", lambda y: y.bfloat16().float()),
    Deviation("accumulator-fp16", "sums are rounded to fp16 after {}", "accumulator", lambda y: y.half().float()),
    Deviation("accumulator-14-bits", "sums are cut to 14 bits of mantissa after {}", "accumulator", _cut_to_14_bits),
)  # fmt: skip
"""Narrow accumulators: functions that round float32 numbers to fewer bits."""


def _rescaled_sums(parts: GemmParts, ends: Ends) -> list[Ends]:
    """y = (y + P)·(s_a·s_b) for every block. It is monotone in y and P, because scales are not negative."""
    if not parts.promotes or parts.tensor_factors is not None:
        return []
    low = high = torch.zeros_like(ends[0])
    left, right = (scale_values(q).float() for q in (parts.left, parts.right))
    for number, start in enumerate(range(0, parts.left.shape[1], parts.left.recipe.block[1])):
        p = replace(parts, left=_single_block(parts.left, start), right=_single_block(parts.right, start)).sums()
        scale = left[:, number : number + 1] * right[:, number]
        low, high = ordered_ends((low + p.lower) * scale, (high + p.upper) * scale)
    return correct_epilogue(parts, (low, high))


def _single_block(q: Quantized, start: int) -> Quantized:
    """The block that begins at column `start`, with a scale of 1."""
    codes = q.codes[:, start : start + q.recipe.block[1]]
    ones = torch.ones(len(codes), 1, device=codes.device)
    return replace(q, codes=codes, scales=ones, shape=(len(codes), codes.shape[1]))


SCALES_OF_SUM: Deviation[GemmParts] = Deviation(
    "scales-of-sum", "the scales of a block multiply all that is summed so far", EPILOGUE, _rescaled_sums
)
"""A wrong promotion of block sums with float32 scales."""
