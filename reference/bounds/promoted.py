"""Where the float32 sum of FP8 with scales of blocks can lie, in the declared order and in any."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.reference.bounds.certificate import marks
from narrowgauge.reference.bounds.flushing import below_normal, flushed_ends, subnormal
from narrowgauge.reference.bounds.marked import marked_sum
from narrowgauge.reference.bounds.running import empty, tree_sum, widened
from narrowgauge.reference.gemm.promoted import Blocks, promoted_sum
from narrowgauge.reference.numbers.blocks import tiles
from narrowgauge.reference.numbers.exact import fma, lowest_bit
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import ACCUMULATOR_BITS, FLT_MAX, SMALLEST, TINY, Summation

# A term code·code·s_a·s_b takes at most so many roundings besides those of additions, however its factors are applied:
# fl(fl(code·s_a)·fl(code·s_b)), fl(P·fl(s_a·s_b)), fl(fl(P·s_a)·s_b).
_FACTORS = 3


@dataclass
class PromotedLimits:
    """What is right for y of `promoted_sum`, (M, N)."""

    expected: torch.Tensor
    """float32: the reference's own."""
    lower: torch.Tensor
    upper: torch.Tensor
    """float32 ends."""
    exact: torch.Tensor
    """bool: y has to be `expected`, bit for bit."""
    any_order: torch.Tensor
    """bool: where exact, for any order of additions in a block at least; else for the declared one."""
    overflow: torch.Tensor
    """bool: a correct kernel may overflow."""
    centre: torch.Tensor
    """float64: Σ P·s_a·s_b, to within 2^-20 of what its roundings may be."""

    def part(self, rows: slice, others: slice) -> PromotedLimits:
        """Views of those of some outputs."""
        return PromotedLimits(*(each[rows, others] for each in vars(self).values()))


def promoted_limits(a: Quantized, b: Quantized, declared: Summation) -> PromotedLimits:
    """Limits of `promoted_sum(a, b)` in the declared order, or in any order of additions.

    Without a declared order terms code·code·s_a·s_b may be added in any order or tree, and the factors be applied to
    each element, block or partial sum in any association, with at most 3 roundings for a term.
    """
    blocks = Blocks(a, b)
    if declared.order not in (None, "tree") and declared.aligned is None:
        blocks.marks = marks(_finite(blocks.left), _finite(blocks.right), exact=False)
    expected = promoted_sum(a, b, slices=declared.slices, alignment=declared.aligned)
    no = torch.zeros_like(expected, dtype=torch.bool)
    zeros = torch.zeros_like(expected, dtype=torch.float64)
    found = PromotedLimits(expected, expected.clone(), expected.clone(), no, no.clone(), no.clone(), zeros)
    for rows, others in tiles(expected):
        part, some = blocks.part(rows, others), found.part(rows, others)
        if declared.order is None:
            _any(part, some, declared)
        elif declared.aligned is not None and not declared.flushes:
            _simulated(part, some)
        else:
            _declared(part, some, declared)
    return found


def _simulated(blocks: Blocks, found: PromotedLimits) -> None:
    """Every bit is known; it is that of any order where no block's sum is finite."""
    found.exact.fill_(True)
    found.any_order.fill_(True)
    for columns, number in blocks:
        s_a, s_b = blocks.scales(number)
        exact = blocks.sum(columns).high
        found.any_order &= ~exact.isfinite()
        found.centre += exact * s_a.double() * s_b.double()


def _declared(blocks: Blocks, found: PromotedLimits, declared: Summation) -> None:
    """Interval arithmetic through t = fl(P·s_a) and y = fma(t, s_b, y): each rounding is monotone, so it maps ends.

    P lies within the running error bound of the exact sum, and is that where nothing can round; or it is simulated.
    """
    any_order = torch.ones_like(found.expected, dtype=torch.bool)
    overflow = torch.zeros_like(any_order)
    flushed = torch.zeros_like(any_order)
    parts = []
    for some in blocks.sliced(declared.slices):
        lower = upper = torch.zeros_like(found.expected)
        for columns, number in some:
            s_a, s_b = blocks.scales(number)
            exact = blocks.sum(columns).high
            low, high, free = _partial(blocks, columns, exact, declared)
            any_order &= free
            low, high = _ordered(low * s_a, high * s_a)
            vanishes: torch.Tensor | bool = False
            if declared.flushes:
                vanishes = (subnormal(s_a) | subnormal(s_b)) & (exact != 0)
                flushed |= (below_normal(low, high) & (exact != 0)) | vanishes
                low, high = flushed_ends(low, high, vanishes)
            low, high = torch.where(s_b < 0, high, low), torch.where(s_b < 0, low, high)
            lower, upper = fma(low, s_b, lower), fma(high, s_b, upper)
            if declared.flushes:
                flushed |= below_normal(lower, upper) & ((lower != 0) | (upper != 0))
                lower, upper = flushed_ends(lower, upper)
            lower, upper = _open_ended(lower, upper, overflow)
            found.centre += exact * s_a.double() * s_b.double()
        parts.append((lower, upper))
    lower, upper = parts[0] if parts else (found.expected, found.expected)
    for low, high in parts[1:]:
        lower, upper = lower + low, upper + high
        if declared.flushes:
            flushed |= below_normal(lower, upper) & ((lower != 0) | (upper != 0))
            lower, upper = flushed_ends(lower, upper)
        lower, upper = _open_ended(lower, upper, overflow)
    lower, upper = lower.masked_fill(overflow, -torch.inf), upper.masked_fill(overflow, torch.inf)
    found.lower.copy_(lower)
    found.upper.copy_(upper)
    found.exact.copy_(_same(lower, upper) & ~flushed)
    found.any_order.copy_(any_order)
    found.overflow.copy_(overflow)


def _partial(
    blocks: Blocks, columns: slice, exact: torch.Tensor, declared: Summation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The least and the greatest float32 sum of a block, and where that is the same in any order; `exact`, float64.

    Products of codes and their sums are multiples of 2^-32, which no flushing reaches.
    """
    settled = ~exact.isfinite()
    if (model := declared.aligned) is not None:
        p = blocks.aligned(columns, model, exact)
        return p, p, settled
    left, right = (_finite(x[:, columns]) for x in (blocks.left, blocks.right))
    if declared.order == "tree":
        sums = tree_sum(left, right, declared.unit, torch.zeros_like(exact))
    else:
        none = empty(left.shape[0], right.shape[0], left.device)
        shown = None if blocks.marks is None else blocks.marks.columns(columns)
        sums = marked_sum(left, right, declared.unit, none, shown)
    error = widened(sums, left.shape[1], declared.unit)
    low, high = 0.0 - _down(error - exact), _down(exact + error)
    low, high = (torch.where(settled, exact.float(), end) for end in (low, high))
    return low, high, settled | sums.exact()


def _open_ended(lower: torch.Tensor, upper: torch.Tensor, overflow: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends that may have overflowed, noted in `overflow`, become infinite."""
    open_ended = ~_same(lower, upper) & ~(lower.isfinite() & upper.isfinite())
    overflow |= open_ended
    return lower.masked_fill(open_ended, -torch.inf), upper.masked_fill(open_ended, torch.inf)


def _any(blocks: Blocks, found: PromotedLimits, declared: Summation) -> None:
    """S ± ((1 + u)^(n + 2) - 1)·A, n the nonzero terms: n - 1 additions and 3 factors; 0 where nothing can round.

    Roundings of subnormal products, of any part of the factors of a term, are off by 2^-150 each before the rest of the
    factors is applied; where they are flushed, by 2^-126 once, and the sums that the term takes part in by as much.
    """
    centre = found.centre
    magnitude, underflow, terms = (torch.zeros_like(centre) for _ in range(3))
    unit = torch.full_like(centre, torch.inf)
    overflow = torch.zeros_like(centre, dtype=torch.bool)
    special = torch.zeros_like(overflow)
    for columns, number in blocks:
        s_a, s_b = (s.double() for s in blocks.scales(number))
        exact = blocks.sum(columns).high
        left, right = (_finite(x[:, columns]) for x in (blocks.left, blocks.right))
        scale = s_a * s_b
        special |= ~(exact.isfinite() & scale.isfinite())
        centre += exact * scale
        size = (left.abs() @ right.abs().T) * _finite(scale.abs())
        magnitude += size
        terms += ((left != 0).float() @ (right != 0).float().T).double()
        bits = [lowest_bit(x).nan_to_num_(posinf=1.0) for x in (left, right, s_a.unsqueeze(2), s_b.view(-1, 1, 1))]
        here = bits[0].unsqueeze(1) * bits[1] * bits[2] * bits[3].view(-1)
        unit = torch.minimum(unit, here.masked_fill(size == 0, torch.inf))
        # Bounds of any product of some of the factors of a term.
        most = [x.abs().amax(1).clamp(min=1.0) for x in (left, right)]
        largest = torch.outer(*most) * s_a.abs().clamp(min=1.0) * s_b.abs().clamp(min=1.0)
        least = bits[0].clamp(max=1.0).unsqueeze(1) * bits[1].clamp(max=1.0)
        least = least * s_a.abs().clamp(max=1.0) * s_b.abs().clamp(max=1.0)
        width = left.shape[1]
        lost, below = (2 * TINY, TINY * 2.0**24) if declared.flushes else (0.0, TINY)  # 24 bits of such terms cancel
        lost += _FACTORS * SMALLEST / 2
        underflow += torch.where((least < below) & (size != 0), width * lost * largest, 0.0)
        overflow |= width * largest > FLT_MAX
        overflow |= scale.isinf()
    exact_sums = ((magnitude + centre.abs()) / 2 <= 2.0**ACCUMULATOR_BITS * unit) & (underflow == 0)
    magnitude *= 1 + 2.0**-20
    overflow |= magnitude + underflow > FLT_MAX
    exact_sums &= ~overflow
    steps = (terms + (_FACTORS - 1)) * declared.unit
    error = (steps / (1 - steps) * magnitude + underflow * (1 + 2 * steps)) * (1 + 2.0**-20)
    error = error.masked_fill(exact_sums | special, 0.0)
    expected = found.expected
    exact_sums |= special
    found.lower.copy_(torch.where(exact_sums, expected, -_down(error - centre)))
    found.upper.copy_(torch.where(exact_sums, expected, _down(centre + error)))
    exact_sums &= ~overflow
    found.exact.copy_(exact_sums)
    found.any_order.copy_(exact_sums)
    found.overflow.copy_(overflow)


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one == other) & (one.signbit() == other.signbit()) | (one.isnan() & other.isnan())


def _ordered(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.minimum(one, other), torch.maximum(one, other)


def _down(v: torch.Tensor) -> torch.Tensor:
    """The largest float32 that is not above `v`, float64; infinities stay."""
    near = v.float()
    return torch.where(near.double() > v, torch.nextafter(near, torch.full_like(near, -torch.inf)), near)
