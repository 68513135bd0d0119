"""Where the float32 sum of FP8 with scales of blocks can lie, in the declared order and in any."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reference.blocks import slabs
from reference.exact import fma, lowest_bit
from reference.promoted import Blocks, promoted_sum
from reference.quantized import Quantized
from reference.schedules import ACCUMULATOR_BITS, FLT_MAX, SMALLEST, UNIT, running_sum, widened

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


def promoted_limits(a: Quantized, b: Quantized, *, declared: bool) -> PromotedLimits:
    """Limits of `promoted_sum(a, b)` in the order "blocks" (`declared`), or in any order of additions.

    Without a declaration terms code·code·s_a·s_b may be added in any order or tree, and the factors be applied to each
    element, block or partial sum in any association, with at most 3 roundings for a term.
    """
    blocks = Blocks(a, b)
    expected = promoted_sum(a, b)
    no = torch.zeros_like(expected, dtype=torch.bool)
    zeros = torch.zeros_like(expected, dtype=torch.float64)
    found = PromotedLimits(expected, expected.clone(), expected.clone(), no, no.clone(), no.clone(), zeros)
    for rows in slabs(expected):
        (_declared if declared else _any)(blocks, rows, found)
    return found


def _declared(blocks: Blocks, rows: slice, found: PromotedLimits) -> None:
    """Interval arithmetic through t = fl(P·s_a) and y = fma(t, s_b, y): each rounding is monotone, so it maps ends.

    P, in the order of K, lies within the running error bound of the exact sum, and is that where nothing can round.
    """
    lower = upper = torch.zeros_like(found.expected[rows])
    any_order = torch.ones_like(lower, dtype=torch.bool)
    overflow = torch.zeros_like(any_order)
    for columns, number in blocks:
        s_a, s_b = blocks.scales(rows, number)
        exact = blocks.sum(rows, columns).high
        left, right = (_finite(x[:, columns]) for x in (blocks.left[rows], blocks.right))
        sums = running_sum(left, right)
        error = widened(sums, left.shape[1])
        any_order &= (error == 0) | ~exact.isfinite()
        low, high = 0.0 - _down(error - exact), _down(exact + error)
        low, high = (torch.where(exact.isfinite(), end, exact.float()) for end in (low, high))
        low, high = _ordered(low * s_a, high * s_a)
        low, high = torch.where(s_b < 0, high, low), torch.where(s_b < 0, low, high)
        lower, upper = fma(low, s_b, lower), fma(high, s_b, upper)
        open_ended = ~_same(lower, upper) & ~(lower.isfinite() & upper.isfinite())
        overflow |= open_ended
        lower, upper = lower.masked_fill(open_ended, -torch.inf), upper.masked_fill(open_ended, torch.inf)
        found.centre[rows] += exact * s_a.double() * s_b.double()
    lower, upper = lower.masked_fill(overflow, -torch.inf), upper.masked_fill(overflow, torch.inf)
    found.lower[rows], found.upper[rows] = lower, upper
    found.exact[rows], found.any_order[rows], found.overflow[rows] = _same(lower, upper), any_order, overflow


def _any(blocks: Blocks, rows: slice, found: PromotedLimits) -> None:
    """S ± ((1 + u)^(n + 2) - 1)·A, n the nonzero terms: n - 1 additions and 3 factors; 0 where nothing can round.

    Roundings of subnormal products, of any part of the factors of a term, are off by 2^-150 each before the rest of the
    factors is applied.
    """
    centre = found.centre[rows]
    magnitude, underflow, terms = (torch.zeros_like(centre) for _ in range(3))
    unit = torch.full_like(centre, torch.inf)
    overflow = torch.zeros_like(centre, dtype=torch.bool)
    special = torch.zeros_like(overflow)
    for columns, number in blocks:
        s_a, s_b = (s.double() for s in blocks.scales(rows, number))
        exact = blocks.sum(rows, columns).high
        left, right = (_finite(x[:, columns]) for x in (blocks.left[rows], blocks.right))
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
        underflow += torch.where((least < 2.0**-126) & (size != 0), _FACTORS * width * SMALLEST / 2 * largest, 0.0)
        overflow |= width * largest > FLT_MAX
        overflow |= scale.isinf()
    exact_sums = ((magnitude + centre.abs()) / 2 <= 2.0**ACCUMULATOR_BITS * unit) & (underflow == 0)
    magnitude *= 1 + 2.0**-20
    overflow |= magnitude + underflow > FLT_MAX
    exact_sums &= ~overflow
    steps = (terms + (_FACTORS - 1)) * UNIT
    error = (steps / (1 - steps) * magnitude + underflow * (1 + 2 * steps)) * (1 + 2.0**-20)
    error = error.masked_fill(exact_sums | special, 0.0)
    expected = found.expected[rows]
    exact_sums |= special
    found.lower[rows] = torch.where(exact_sums, expected, -_down(error - centre))
    found.upper[rows] = torch.where(exact_sums, expected, _down(centre + error))
    exact_sums &= ~overflow
    found.exact[rows], found.any_order[rows], found.overflow[rows] = exact_sums, exact_sums, overflow


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
