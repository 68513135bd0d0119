"""Proved bounds of a GEMM: which outputs a correct kernel can give, in any order of summation or in a declared one.

Source: tolerance.md, rule 2, for a float32 accumulator that rounds to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reference.exact import ExactSum, lowest_bit, round_to_odd, two_sum
from reference.gemm import alpha, check_epilogue, check_operands, code_sum, operand
from reference.operands import element_values, promotes, scale_values
from reference.promoted_bounds import promoted_limits
from reference.quantized import Quantized
from reference.schedules import ACCUMULATOR_BITS, FLT_MAX, SMALLEST, UNIT, blocks_error

ORDERS = ("blocks",)
"""What a kernel can declare about the order in which it adds: `reference.schedules`."""
EXACT, DECLARED, ANY_ORDER = 0, 1, 2
# Half an ulp, relative, of the cast that ends a GEMM, and half the smallest subnormal; float32 ends without one.
_CAST = {torch.float32: (0.0, 0.0), torch.bfloat16: (2.0**-8, 2.0**-134), torch.float16: (2.0**-11, 2.0**-25)}


@dataclass
class Bounds:
    """What is right for each output (M, N) of a GEMM. Tensors of the output's dtype unless said otherwise."""

    expected: torch.Tensor
    """The reference's own output: exact sum, rounded at every step of the epilogue."""
    fused: torch.Tensor
    """The same with α·acc and the first addend (c, or a bias without c) rounded once, which is as right."""
    lower: torch.Tensor
    upper: torch.Tensor
    """A correct kernel's output lies in [lower, upper]."""
    exact: torch.Tensor
    """bool: no sum can round, so the output is `expected` or `fused`, bit for bit."""
    zero_sum: torch.Tensor
    """bool: the float32 sum is 0, whose sign depends on the order."""
    undetermined: torch.Tensor
    """bool: α is infinite and the sum's sign is not determined, or a sum overflows in one order and not in another: any
    infinity or NaN is right, besides what is right anyway."""
    centre: torch.Tensor
    """float64: α·S + c + bias, to within 2^-50."""
    budget: torch.Tensor
    """float64: the largest distance from `centre` that all roundings together may cause."""
    tier: torch.Tensor
    """uint8: 0 where no order of summation can round; 1 where the declared order gives the bound, or rounds nowhere; 2
    where it is that of any order."""


def bounds(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    order: str | None = None,
) -> Bounds:
    """Bounds of `gemm(a, b, out_dtype=…, c=…, bias=…)`; raises as `gemm` does, and ValueError for an unknown order.

    `order`: None, any; "blocks", that of `reference.schedules`. A term, or a sum of terms, times scales that are powers
    of two is taken to be exact wherever it has a float32 number, and to round once elsewhere.

    The rule's E is evaluated in float64 and widened by 2^-50 of its terms, sums of magnitudes by K·2^-52, so that the
    evaluation's own rounding can never exclude a right output.
    """
    check_operands(a, b)
    check_epilogue((a.shape[0], b.shape[0]), out_dtype, c, bias)
    if order is not None and order not in ORDERS:
        raise ValueError(f"the order of a sum is {', '.join(map(repr, ORDERS))}, or None for any; not {order!r}")
    if promotes(a.recipe):
        return _promoted(a, b, out_dtype, c, bias, declared=order == "blocks")
    total = code_sum(a, b)
    error, tier, overflow = _accumulation(a, b, total, order)
    exact = (error == 0) & ~overflow

    s = total.high
    factor = alpha(a, b)
    wide = factor.double()
    scaled = wide * s
    reach = wide.abs() * error * (1 + UNIT) + UNIT * scaled.abs() + SMALLEST
    slack = 2.0**-50 * (scaled.abs() + reach)
    lower, upper = scaled - reach - slack, scaled + reach + slack
    # Under an infinite α the sign of the sum is all that matters, and inf - inf must not make it NaN.
    determined = torch.isinf(wide) & (s.abs() > error)
    lower, upper = torch.where(determined, scaled, lower), torch.where(determined, scaled, upper)

    acc = total.to_float32()
    expected = fused = factor * acc
    lower32, upper32 = lower.float(), upper.float()
    centre, budget = scaled, reach + slack
    addends = [t for t in (c, bias) if t is not None]
    for number, addend in enumerate(addends):
        if number == 0:  # the one that may be fused with the product
            fused = round_to_odd(*two_sum(scaled, addend.double().expand_as(scaled))).float()
            lower32, upper32 = _add(lower, upper, addend)
        else:  # monotone, and the same addition that a kernel does
            fused = fused + addend.float()
            lower32, upper32 = lower32 + addend.float(), upper32 + addend.float()
        expected = expected + addend.float()
        centre = centre + addend.double()
        budget = budget + UNIT * centre.abs() + SMALLEST
    return Bounds(
        expected=expected.to(out_dtype),
        fused=fused.to(out_dtype),
        lower=lower32.to(out_dtype),
        upper=upper32.to(out_dtype),
        exact=exact,
        zero_sum=acc == 0,
        undetermined=overflow | (torch.isinf(wide) & (s.abs() <= error) & ~exact),
        centre=centre,
        budget=_cast(centre, budget, out_dtype),
        tier=tier,
    )


def _accumulation(
    a: Quantized, b: Quantized, total: ExactSum, order: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How far an accumulator can be from the sum (E_acc, float64), by which tier, and where it can overflow: (M, N).

    A sum that is not finite because an operand is not is the same in every order.
    """
    left, right = (_finite(operand(q)) for q in (a, b))
    columns = left.shape[1]
    raw = left.abs() @ right.abs().T
    products = (left != 0).float() @ (right != 0).float().T
    unit = torch.outer(lowest_bit(left), lowest_bit(right))
    s = _finite(total.high)
    largest_part = (raw + s.abs()) / 2
    exact = (largest_part <= 2.0**ACCUMULATOR_BITS * unit) & (largest_part <= FLT_MAX)
    magnitude = raw * (1 + columns * 2.0**-52)
    n = products.double()
    error = (n - 1).clamp_(min=0) * UNIT * magnitude
    # Terms that are no multiples of the smallest float32, or sums of them, round; and n·u of that, and of what a tree
    # with such roundings may add in the second order, is not left out.
    subnormal = (unit < SMALLEST) & (raw != 0)
    exact &= ~subnormal
    error = torch.where(subnormal, (error + n * SMALLEST / 2) * (1 + n * UNIT), error)
    overflow = (magnitude + error > FLT_MAX) & ~exact
    settled = exact | (error == 0) | ~torch.isfinite(total.high)
    tier = torch.full_like(exact, ANY_ORDER, dtype=torch.uint8)
    if order is not None and not bool(settled.all()):
        scales = [_finite(scale_values(q)) for q in (a, b)]
        if a.recipe.whole:
            scales = [torch.ones_like(scale) for scale in scales]
        width = min(a.recipe.block[1], max(1, columns))
        codes = [_finite(element_values(q)) for q in (a, b)]
        declared, possible = blocks_error(codes[0], codes[1], scales[0], scales[1], width)
        overflow &= possible
        error = torch.minimum(error, declared)
        tier.fill_(DECLARED)
    return error.masked_fill_(settled, 0.0), tier.masked_fill_(settled & ~overflow, EXACT), overflow


def _promoted(
    a: Quantized,
    b: Quantized,
    out_dtype: torch.dtype,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    declared: bool,
) -> Bounds:
    """Bounds where blocks are scaled on the way: y, then the bias and a cast, then c and another cast, all monotone."""
    limits = promoted_limits(a, b, declared=declared)
    ends = [limits.expected, limits.lower, limits.upper]
    centre = limits.centre
    budget = torch.maximum(limits.upper.double() - centre, centre - limits.lower.double()) + SMALLEST
    if bias is not None:
        ends = [end + bias.float() for end in ends]
        centre = centre + bias.double()
        budget = budget + UNIT * centre.abs() + SMALLEST
    ends = [end.to(out_dtype) for end in ends]
    budget = _cast(centre, budget, out_dtype)
    if c is not None:
        ends = [(end.float() + c.float()).to(out_dtype) for end in ends]
        centre = centre + c.double()
        budget = _cast(centre, budget + UNIT * centre.abs() + SMALLEST, out_dtype)
    expected, lower, upper = ends
    tier = torch.where(limits.exact & limits.any_order, EXACT, DECLARED if declared else ANY_ORDER).to(torch.uint8)
    return Bounds(
        expected=expected,
        fused=expected,
        lower=lower,
        upper=upper,
        exact=limits.exact,
        zero_sum=limits.expected == 0,
        undetermined=limits.overflow,
        centre=centre,
        budget=budget,
        tier=tier,
    )


def _cast(centre: torch.Tensor, budget: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The budget after a cast to the output's dtype."""
    relative, absolute = _CAST[out_dtype]
    return budget * (1 + relative) + relative * centre.abs() + absolute


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _add(lower: torch.Tensor, upper: torch.Tensor, addend: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 ends of [lower, upper] + addend, fused or not, from float64 ends.

    Adding and rounding are monotone; the float64 sum may itself have rounded, hence one step outward. A product that
    overflows before the addition stays infinite, though the sum would not be.
    """
    ends = []
    for end, outward, outer in ((lower, -torch.inf, torch.minimum), (upper, torch.inf, torch.maximum)):
        together = torch.nextafter(end + addend.double(), torch.full_like(end, outward)).float()
        apart = end.float() + addend.float()
        ends.append(outer(together, torch.where(end.float().isinf(), apart, together)))
    return ends[0], ends[1]
