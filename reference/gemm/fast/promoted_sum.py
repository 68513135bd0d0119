"""`promoted_sum` of exact block sums, tile by tile, in few passes over memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from narrowgauge.reference.gemm.operands import multiply_blocks
from narrowgauge.reference.gemm.promotion import BlockScaledOperands
from narrowgauge.reference.gemm.split_k import SplitK
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.exact import add_product, exact_sum
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import FLT_MAX, SMALLEST_SUBNORMAL

_MANTISSA = (1 << 23) - 1
# Tile of the output, (rows, columns). On a CPU a tile of this size stays in cache and touches few new pages, which cost
# 2 µs each. On a GPU a tile has 2^26 outputs: smaller products are slower.
_TILE = {"cpu": (256, 1024)}
_TILE_ELSEWHERE = 1 << 26


def fast_promoted_sum(a: Quantized, b: Quantized, *, slices: int | tuple[int, ...] = 1) -> torch.Tensor:
    """The result of `promoted_sum(a, b, split=SplitK(slices))`, bit for bit: float32 (M, N)."""
    operands = BlockScaledOperands(a, b)
    out = torch.zeros(a.shape[0], b.shape[0], device=a.codes.device)
    chains = list(operands.sliced_blocks(SplitK(slices)))
    folded = scales_fold(operands)
    right_scales = operands.right_scales.T.contiguous()
    height, width = _TILE.get(out.device.type, (max(1, _TILE_ELSEWHERE // max(1, out.shape[1])), out.shape[1]))
    size = min(height, out.shape[0]) * min(width, out.shape[1])
    float32_buffer, float64_buffer = (
        torch.empty(size, dtype=dtype, device=out.device) for dtype in (torch.float32, torch.float64)
    )
    for columns in _ranges(out.shape[1], width):
        right = _panel(operands, 1, columns, folded=folded)
        for rows in _ranges(out.shape[0], height):
            left = _panel(operands, 0, rows, folded=folded)
            tile = out[rows, columns]
            p, exact = (buffer[: tile.numel()].view(tile.shape) for buffer in (float32_buffer, float64_buffer))
            for chain in chains:
                y = tile if chain is chains[0] else torch.zeros_like(tile)
                for block, number in chain:
                    if operands.float64_exact[number]:
                        p.copy_(torch.mm(left[:, block], right[:, block].T, out=exact))
                    else:
                        p.copy_(exact_sum(left[:, block], right[:, block]).to_float32())
                    if folded:
                        y.add_(p)
                    else:
                        p.mul_(operands.left_scales[rows, number : number + 1])
                        add_product(y, p, right_scales[number, columns])
                if y is not tile:
                    tile.add_(y)
    return out


def scales_fold(operands: BlockScaledOperands) -> bool:
    """Whether elements may be multiplied by their scales before the block sum, because no product with a scale rounds.

    Then the scales are powers of two. P is a multiple of the product of the smallest numbers of the two formats, and
    the scaled P has the same bits, from 2^-149 to FLT_MAX.
    """
    if 0 in (operands.left_scales.numel(), operands.right_scales.numel()):
        return False
    scales = operands.left_scales, operands.right_scales
    ends = [end.double() for side in scales for end in torch.aminmax(side)]
    mantissas = [(side.view(torch.int32) & _MANTISSA).any().double() for side in scales]
    least_a, most_a, least_b, most_b, *not_powers = torch.stack(ends + mantissas).tolist()
    quantum = math.prod(fmt.value(1) for fmt in operands.formats)
    largest = math.prod(fmt.max for fmt in operands.formats)
    return (
        not any(not_powers)
        and least_a * least_b > 0
        and quantum * least_a * min(1.0, least_b) >= SMALLEST_SUBNORMAL
        and 2 * operands.width * largest * most_a * max(1.0, most_b) < FLT_MAX
    )


def _panel(operands: BlockScaledOperands, side: int, rows: slice, *, folded: bool) -> torch.Tensor:
    """Elements of some rows of operand 0 or 1, float64 (rows, K); times their scales if `folded`."""
    values = decode(operands.codes[side][rows], operands.formats[side], torch.float64)
    if folded:
        multiply_blocks(values, (operands.left_scales, operands.right_scales)[side][rows], operands.width)
    return values


def _ranges(length: int, step: int) -> Iterator[slice]:
    """Slices of 0 to `length` with `step` numbers."""
    for start in range(0, length, max(1, step)):
        yield slice(start, min(start + step, length))
