"""Scales of both operands that are multiplied first, so that their product can leave float32."""

from __future__ import annotations

import torch

from narrowgauge.harness.diagnosis.gemm.gemm_parts import (
    EPILOGUE,
    Ends,
    GemmParts,
    correct_epilogue,
    select_columns,
)
from narrowgauge.harness.diagnosis.gemm.partial_sums import slice_sums
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.reference.gemm.operands import element_values
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.spec.formats import E8M0
from narrowgauge.spec.summation import UNIT


def _outputs(parts: GemmParts, _: Ends) -> list[Ends]:
    """Ends of the outputs if each block is multiplied by 2^(ea + eb) in float32. None if all these powers are finite
    and positive."""
    if parts.left.recipe.scale is not E8M0 or parts.tensor_factors is not None or not parts.left.shape[1]:
        return []
    width = parts.left.recipe.block[1]
    left, right = (decode(q.scales, E8M0, torch.float64) for q in (parts.left, parts.right))
    low, high, size = (torch.zeros_like(parts.output, dtype=torch.float64) for _ in range(3))
    leaves = False
    for number, (block_low, block_high) in enumerate(slice_sums(parts, width)):
        scale = (left[:, number, None] * right[None, :, number]).float()
        infinite, zero = scale.isinf(), scale == 0
        leaves |= bool((infinite | zero).any())
        columns = slice(number * width, min((number + 1) * width, parts.left.shape[1]))
        a, b = (element_values(select_columns(q, columns)) for q in (parts.left, parts.right))
        product = a @ b.T
        # 0 times infinity is NaN.
        special = torch.where(infinite, product * torch.inf, product * 0.0)
        low += torch.where(infinite | zero, special, block_low.double())
        high += torch.where(infinite | zero, special, block_high.double())
        size += torch.where(infinite | zero, 0.0, torch.maximum(block_low.abs(), block_high.abs()).double())
    if not leaves:
        return []
    # Every addition of two blocks rounds to float32. Additions do not underflow.
    error = left.shape[1] * 2 * UNIT * size
    return correct_epilogue(parts, ((low - error).float(), (high + error).float()))


SCALES_MULTIPLIED_FIRST: Deviation[GemmParts] = Deviation(
    "scales-multiplied-first",
    "the scales of both operands are multiplied first, in float32, where products are 0 or infinite", EPILOGUE,
    _outputs,
)  # fmt: skip
