"""Bounds of the promoted sums of FP8 with block scales, in a declared order or in any order.

Source: docs/tolerance.md#fp8-with-block-scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.reference.bounds.factor_sums import factor_bounds
from narrowgauge.reference.bounds.fast.certified_sum import certified_sum
from narrowgauge.reference.bounds.fast.exactness_certificate import ExactnessCertificate, exactness_certificate
from narrowgauge.reference.bounds.flushing import extended_to_zero, is_subnormal, may_flush
from narrowgauge.reference.bounds.running_error import empty_sums, tree_sum, with_evaluation_error
from narrowgauge.reference.gemm.fast.promoted_sum import fast_promoted_sum
from narrowgauge.reference.gemm.promotion import BlockScaledOperands, promoted_sum
from narrowgauge.reference.gemm.split_k import SplitK, join
from narrowgauge.reference.numbers.exact import float32_ends, fma, lowest_bit
from narrowgauge.reference.numbers.slabs import tiles
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import ACCUMULATOR_BITS, FLT_MAX, SMALLEST_NORMAL, SMALLEST_SUBNORMAL, Summation

# Largest number of roundings of a term code·code·s_a·s_b besides the roundings of additions, for any association of
# the factors: fl(fl(code·s_a)·fl(code·s_b)), fl(P·fl(s_a·s_b)), fl(fl(P·s_a)·s_b).
_FACTOR_ROUNDINGS = 3


@dataclass
class SumBounds:
    """Accepted values of y, the sums (M, N) before the epilogue: `promoted_sum`, or the sums of decoded operands."""

    expected: torch.Tensor
    """float32: y of the reference."""
    lower: torch.Tensor
    upper: torch.Tensor
    """float32: ends of the accepted interval."""
    exact: torch.Tensor
    """bool: y must equal `expected` bit for bit."""
    any_order: torch.Tensor
    """bool: the block sums are the same in any order of additions, so `exact` does not depend on a declared order."""
    overflow: torch.Tensor
    """bool: a correct kernel may overflow."""
    centre: torch.Tensor
    """float64: the sum without roundings, with an error of at most 2^-20 of the error by roundings."""

    def tile(self, rows: slice, columns: slice) -> SumBounds:
        """Views of a tile of the outputs."""
        return SumBounds(*(values[rows, columns] for values in vars(self).values()))


def promotion_bounds(a: Quantized, b: Quantized, declared: Summation, split: SplitK) -> SumBounds:
    """Bounds of `promoted_sum(a, b)` in the declared order with its slices `split`, or in any order of additions.

    Without a declared order the terms code·code·s_a·s_b may be added in any tree. The factors may be applied to
    elements, blocks or partial sums in any association, with at most 3 roundings of a term.
    """
    operands = BlockScaledOperands(a, b)
    certificate = None
    if declared.order not in (None, "tree") and declared.aligned is None and declared.fraction is None:
        certificate = exactness_certificate(_finite(operands.left), _finite(operands.right), exact=False)
    if declared.aligned is None and not split.tree:
        expected = fast_promoted_sum(a, b, slices=split.slices)
    else:
        expected = promoted_sum(a, b, split=split, alignment=declared.aligned)
    no = torch.zeros_like(expected, dtype=torch.bool)
    centre = torch.zeros_like(expected, dtype=torch.float64)
    bounds = SumBounds(expected, expected.clone(), expected.clone(), no, no.clone(), no.clone(), centre)
    for rows, columns in tiles(expected):
        part, tile = operands.tile(rows, columns), bounds.tile(rows, columns)
        if declared.order is None:
            _set_any_order(part, tile, declared)
        elif declared.aligned is not None and not declared.flushes:
            _set_simulated(part, tile)
        else:
            part_certificate = None if certificate is None else certificate.part(rows, columns)
            _set_declared_order(part, tile, declared, split, part_certificate)
    return bounds


def _set_simulated(operands: BlockScaledOperands, bounds: SumBounds) -> None:
    """Sets the bounds of a simulated order, whose bits are all known.

    An output is the same in any order only if no block sum is finite.
    """
    bounds.exact.fill_(True)
    bounds.any_order.fill_(True)
    for columns, number in operands:
        s_a, s_b = operands.scales(number)
        exact = operands.block_sum(columns).high
        bounds.any_order &= ~exact.isfinite()
        bounds.centre += exact * s_a.double() * s_b.double()


_Ends = tuple[torch.Tensor, torch.Tensor]


def _set_declared_order(
    operands: BlockScaledOperands,
    bounds: SumBounds,
    declared: Summation,
    split: SplitK,
    certificate: ExactnessCertificate | None,
) -> None:
    """Sets the bounds of a declared order, by interval arithmetic through t = fl(P·s_a) and y = fma(t, s_b, y).

    The running error bound gives an interval of the block sum P, or the simulation gives P. Both roundings are
    monotone, so each maps the ends of an interval to the ends of the result.
    """
    any_order = torch.ones_like(bounds.expected, dtype=torch.bool)
    overflow = torch.zeros_like(any_order)
    flushed = torch.zeros_like(any_order)
    slice_ends = []
    for blocks in operands.sliced_blocks(split):
        lower = upper = torch.zeros_like(bounds.expected)
        for columns, number in blocks:
            s_a, s_b = operands.scales(number)
            exact = operands.block_sum(columns).high
            low, high, same_in_any_order = _block_interval(operands, columns, exact, declared, certificate)
            any_order &= same_in_any_order
            low, high = _ordered(low * s_a, high * s_a)
            scale_flushes: torch.Tensor | bool = False
            if declared.flushes:
                scale_flushes = (is_subnormal(s_a) | is_subnormal(s_b)) & (exact != 0)
                flushed |= (may_flush(low, high) & (exact != 0)) | scale_flushes
                low, high = extended_to_zero(low, high, scale_flushes)
            low, high = torch.where(s_b < 0, high, low), torch.where(s_b < 0, low, high)
            lower, upper = fma(low, s_b, lower), fma(high, s_b, upper)
            if declared.flushes:
                flushed |= may_flush(lower, upper) & ((lower != 0) | (upper != 0))
                lower, upper = extended_to_zero(lower, upper)
            lower, upper = _open_on_overflow(lower, upper, overflow)
            bounds.centre += exact * s_a.double() * s_b.double()
        slice_ends.append((lower, upper))

    def added(x: _Ends, y: _Ends) -> _Ends:
        nonlocal flushed
        lower, upper = ((x[k].to(split.dtype) + y[k].to(split.dtype)).float() for k in (0, 1))
        if declared.flushes:
            flushed = flushed | may_flush(lower, upper) & ((lower != 0) | (upper != 0))
            lower, upper = extended_to_zero(lower, upper)
        return _open_on_overflow(lower, upper, overflow)

    slice_ends = slice_ends or [(bounds.expected, bounds.expected)]
    lower, upper = join(slice_ends, added, tree=split.tree)
    lower, upper = lower.masked_fill(overflow, -torch.inf), upper.masked_fill(overflow, torch.inf)
    bounds.lower.copy_(lower)
    bounds.upper.copy_(upper)
    bounds.exact.copy_(_same(lower, upper) & ~flushed)
    bounds.any_order.copy_(any_order)
    bounds.overflow.copy_(overflow)


def _block_interval(
    operands: BlockScaledOperands,
    columns: slice,
    exact: torch.Tensor,
    declared: Summation,
    certificate: ExactnessCertificate | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The least and the greatest float32 sum of a block, and bool: the sum is the same in any order.

    `exact`, float64: the IEEE sum. Products of elements and their sums are multiples of 2^-32, too large to be flushed.
    """
    not_finite = ~exact.isfinite()
    if (model := declared.aligned) is not None:
        p = operands.tensor_core_block_sum(columns, model, exact)
        return p, p, not_finite
    left, right = (_finite(elements[:, columns]) for elements in (operands.left, operands.right))
    if declared.fraction is not None:
        factors = operands.factors(columns)
        error, sure, _ = factor_bounds(*factors, exact, *declared.fraction, joined=False)
        low, high = float32_ends(exact - error, exact + error)
        low, high = (torch.where(not_finite, exact.float(), end) for end in (low, high))
        return low, high, not_finite | sure
    if declared.order == "tree":
        sums = tree_sum(left, right, declared.roundoff, torch.zeros_like(exact))
    else:
        empty = empty_sums(left.shape[0], right.shape[0], left.device)
        part = None if certificate is None else certificate.columns(columns)
        sums = certified_sum(left, right, declared.roundoff, empty, part)
    error = with_evaluation_error(sums, left.shape[1], declared.roundoff)
    low, high = float32_ends(exact - error, exact + error)
    low, high = (torch.where(not_finite, exact.float(), end) for end in (low, high))
    return low, high, not_finite | sums.exact()


def _open_on_overflow(
    lower: torch.Tensor, upper: torch.Tensor, overflow: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ends, infinite if an end of an interval overflowed; such outputs are marked in `overflow`."""
    overflowed = ~_same(lower, upper) & ~(lower.isfinite() & upper.isfinite())
    overflow |= overflowed
    return lower.masked_fill(overflowed, -torch.inf), upper.masked_fill(overflowed, torch.inf)


def _set_any_order(operands: BlockScaledOperands, bounds: SumBounds, declared: Summation) -> None:
    """Sets the bounds of any order: S ± ((1 + u)^(n + 2) − 1)·A, or S if no addition or factor can round.

    n nonzero terms have n − 1 additions and 3 factor roundings. A rounding of a subnormal product of some factors of a
    term is off by at most 2^-150, before the remaining factors are applied. With flushing a term is off by 2^-126
    once, and so are the sums that contain the term.
    """
    centre = bounds.centre
    magnitude, underflow, terms = (torch.zeros_like(centre) for _ in range(3))
    quantum = torch.full_like(centre, torch.inf)
    overflow = torch.zeros_like(centre, dtype=torch.bool)
    not_finite = torch.zeros_like(overflow)
    for columns, number in operands:
        s_a, s_b = (s.double() for s in operands.scales(number))
        exact = operands.block_sum(columns).high
        left, right = (_finite(elements[:, columns]) for elements in (operands.left, operands.right))
        scale = s_a * s_b
        not_finite |= ~(exact.isfinite() & scale.isfinite())
        centre += exact * scale
        size = (left.abs() @ right.abs().T) * _finite(scale.abs())
        magnitude += size
        terms += ((left != 0).float() @ (right != 0).float().T).double()
        factors = (left, right, s_a.unsqueeze(2), s_b.view(-1, 1, 1))
        bits = [lowest_bit(factor).nan_to_num_(posinf=1.0) for factor in factors]
        block_quantum = bits[0].unsqueeze(1) * bits[1] * bits[2] * bits[3].view(-1)
        quantum = torch.minimum(quantum, block_quantum.masked_fill(size == 0, torch.inf))
        # Bounds of any product of some of the factors of a term.
        most = [x.abs().amax(1).clamp(min=1.0) for x in (left, right)]
        largest = torch.outer(*most) * s_a.abs().clamp(min=1.0) * s_b.abs().clamp(min=1.0)
        least = bits[0].clamp(max=1.0).unsqueeze(1) * bits[1].clamp(max=1.0)
        least = least * s_a.abs().clamp(max=1.0) * s_b.abs().clamp(max=1.0)
        width = left.shape[1]
        # With flushing, terms with 24 bits can cancel to a subnormal sum.
        lost, threshold = (
            (2 * SMALLEST_NORMAL, SMALLEST_NORMAL * 2.0**24) if declared.flushes else (0.0, SMALLEST_NORMAL)
        )
        lost += _FACTOR_ROUNDINGS * SMALLEST_SUBNORMAL / 2
        underflow += torch.where((least < threshold) & (size != 0), width * lost * largest, 0.0)
        overflow |= width * largest > FLT_MAX
        overflow |= scale.isinf()
    exact_sums = ((magnitude + centre.abs()) / 2 <= 2.0**ACCUMULATOR_BITS * quantum) & (underflow == 0)
    magnitude *= 1 + 2.0**-20
    overflow |= magnitude + underflow > FLT_MAX
    exact_sums &= ~overflow
    relative = (terms + (_FACTOR_ROUNDINGS - 1)) * declared.roundoff
    error = (relative / (1 - relative) * magnitude + underflow * (1 + 2 * relative)) * (1 + 2.0**-20)
    error = error.masked_fill(exact_sums | not_finite, 0.0)
    expected = bounds.expected
    exact_sums |= not_finite
    lower, upper = float32_ends(centre - error, centre + error)
    bounds.lower.copy_(torch.where(exact_sums, expected, lower))
    bounds.upper.copy_(torch.where(exact_sums, expected, upper))
    exact_sums &= ~overflow
    bounds.exact.copy_(exact_sums)
    bounds.any_order.copy_(exact_sums)
    bounds.overflow.copy_(overflow)


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x == y) & (x.signbit() == y.signbit()) | (x.isnan() & y.isnan())


def _ordered(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.minimum(x, y), torch.maximum(x, y)
