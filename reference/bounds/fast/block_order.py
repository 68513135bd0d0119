"""The order "blocks" with a loop of few operations per block, for operands with few roundings.

The plain version is `summation_orders.block_sums`. Both functions need exact float64 sums, and no underflow or
overflow: `float64_exact` of `reference.bounds.summation_orders` checks these conditions.
"""

from __future__ import annotations

import torch

from narrowgauge.reference.bounds.decoded_operands import DecodedOperands
from narrowgauge.reference.bounds.fast.certified_sum import certified_block_error
from narrowgauge.reference.bounds.fast.exactness_certificate import ExactnessCertificate
from narrowgauge.reference.bounds.running_error import PartialSums, empty_sums, error_growth

# Blocks between two checks whether all sums have rounded.
_CHECK_INTERVAL = 8


def power_of_two_block_sums(
    operands: DecodedOperands, certificate: ExactnessCertificate, roundoff: float
) -> PartialSums:
    """The sums of `block_sums`, bit for bit, of blocks of at most `CHUNK` columns whose scales are powers of two.

    `certificate`: of `operands.left` and `operands.right`.
    """
    left, right = operands.left, operands.right
    sizes = left.abs(), right.abs()
    empty = empty_sums(left.shape[0], right.shape[0], left.device)
    total, error, size = (torch.zeros_like(empty.total) for _ in range(3))
    float32_total, float64_total = torch.empty_like(total, dtype=torch.float32), torch.empty_like(total)
    empty_so_far: torch.Tensor | None = torch.ones_like(total, dtype=torch.bool)
    for start in range(0, operands.columns, operands.block_width):
        columns = slice(start, start + operands.block_width)
        x, y = left[:, columns].contiguous(), right[:, columns].contiguous()
        product, magnitude = x @ y.T, torch.mm(sizes[0][:, columns], sizes[1][:, columns].T, out=size)
        block_error = certified_block_error(x, y, roundoff, empty, product, magnitude, certificate.columns(columns))
        if block_error is not None:
            error.add_(block_error)
        total.add_(product)
        rounds = float64_total.copy_(float32_total.copy_(total)) != total
        rounds |= error != 0
        # If the block, or every block before, has no nonzero product, the addition cannot round.
        empty_block = _without_products(x, y)
        if empty_block is not None:
            rounds &= ~empty_block
        if empty_so_far is not None:
            rounds &= ~empty_so_far
            empty_so_far = None if empty_block is None else empty_so_far & empty_block
        error.add_(torch.abs(total, out=size).add_(error).mul_(rounds).mul_(roundoff))
    return PartialSums(total, operands.magnitude, operands.quantum, error)


def exact_blocks_error(operands: DecodedOperands, roundoff: float) -> torch.Tensor:
    """The error of `block_sums` of blocks whose sums cannot round: u·Σ|s| over the sums from the first rounding on.

    Not equal to the recurrence of `block_sums` bit for bit, but its upper bound: the sum is multiplied by (1 + u)^n
    after n blocks.
    """
    left, right = operands.left, operands.right
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float64, device=left.device)
    sizes, size = torch.zeros_like(total), torch.empty_like(total)
    rounded: torch.Tensor | None = torch.zeros_like(total, dtype=torch.bool)
    float32_total = torch.empty_like(total, dtype=torch.float32)
    steps = 0
    for start in range(0, operands.columns, operands.block_width):
        x, y = (operand[:, start : start + operands.block_width] for operand in (left, right))
        total.addmm_(x, y.T)
        torch.abs(total, out=size)
        if rounded is not None:
            rounded |= float32_total.copy_(total) != total
            if steps % _CHECK_INTERVAL == 0 and bool(rounded.all()):
                rounded = None
            else:
                size.mul_(rounded)  # a product is faster than torch.where
        if (empty_block := _without_products(x, y)) is not None:
            size.mul_(~empty_block)
        sizes.add_(size)
        steps += 1
    return sizes.mul_(roundoff * error_growth(steps, roundoff))


def _without_products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """bool (M, N): every product of (M, W) and (N, W) is 0; None if every output has a nonzero product.

    Rows with p and q nonzero elements share a nonzero column if p + q > W.
    """
    width = x.shape[1]
    nonzero_x, nonzero_y = (x != 0).float(), (y != 0).float()
    counts_x, counts_y = nonzero_x.sum(1), nonzero_y.sum(1)
    few_x, few_y = counts_x + counts_y.amin() <= width, counts_y + counts_x.amin() <= width
    if not bool(few_x.any()) or not bool((nonzero_x[few_x] @ nonzero_y[few_y].T == 0).any()):
        return None
    return (nonzero_x @ nonzero_y.T) == 0
