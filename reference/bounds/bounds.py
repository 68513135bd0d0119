"""Proved bounds of a GEMM: which outputs a correct kernel can give, in any order of summation or in a declared one.

Source: docs/tolerance.md#gemm, for float32 accumulators; `spec.summation` has what a kernel can declare of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.reference.bounds.flushing import alpha_vanishes, below_normal, flushed_ends, subnormal
from narrowgauge.reference.bounds.promoted import promoted_limits
from narrowgauge.reference.bounds.running import growth
from narrowgauge.reference.bounds.schedules import Terms, declared_error
from narrowgauge.reference.gemm.aligned import aligned_sum, of_operand
from narrowgauge.reference.gemm.gemm import alpha, check_operands, operand, product_sum
from narrowgauge.reference.gemm.operands import element_values, promotes, scale_values, unit_span
from narrowgauge.reference.numbers.exact import ExactSum, lowest_bit, round_to_odd, two_sum
from narrowgauge.spec.arguments import check_epilogue
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import ACCUMULATOR_BITS, FLT_MAX, SMALLEST, TINY, UNIT, Summation, summation

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
    """bool: no sum can round, or all its roundings are known, so the output is `expected` or `fused`, bit for bit."""
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
    """uint8: 0 where no order of summation can round; 1 where the declared order gives the bound, or rounds nowhere, or
    is simulated; 2 where it is that of any order."""


def bounds(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    order: Summation | str | None = None,
) -> Bounds:
    """Bounds of `gemm(a, b, out_dtype=…, c=…, bias=…)`; raises as `gemm` does, and ValueError for an unknown order,
    or for more columns than an accumulator that truncates has a bound for.

    `order`: what is declared of the sums, or its name. A term, or a sum of terms, times scales that are powers of two
    is taken to be exact wherever it has a float32 number, and to round once elsewhere.

    The rule's E is evaluated in float64 and widened by 2^-50 of its terms, sums of magnitudes by K·2^-52, so that the
    evaluation's own rounding can never exclude a right output.
    """
    check_operands(a, b)
    check_epilogue((a.shape[0], b.shape[0]), out_dtype, c, bias)
    declared = summation(order)
    if declared.truncates:
        _check_terms(a.shape[1])
    if promotes(a.recipe):
        return _promoted(a, b, out_dtype, c, bias, declared)
    left, right = operand(a), operand(b)
    total = product_sum(a, b, left, right)
    if (model := declared.aligned) is not None:
        total = ExactSum(aligned_sum(of_operand(a), of_operand(b), model, total.high), None)
        tier = torch.full_like(total.high, DECLARED, dtype=torch.uint8)
        error, overflow = torch.zeros_like(total.high), torch.zeros_like(tier, dtype=torch.bool)
    else:
        error, tier, overflow = _accumulation(a, b, _finite(left), _finite(right), total, declared)
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
    infinite_vanishes = torch.zeros_like(exact)
    if declared.flushes:
        vanishes = alpha_vanishes(a, b)
        infinite_vanishes = vanishes & torch.isinf(s)
        exact &= ~(below_normal(lower, upper) | vanishes) | (s == 0)
        lower, upper = flushed_ends(lower, upper, vanishes)
        reach = reach + TINY + scaled.abs() * vanishes

    acc = total.to_float32()
    expected = fused = factor * acc
    lower32, upper32 = lower.float(), upper.float()
    centre, budget = scaled, reach + slack
    addends = [t.float() for t in (c, bias) if t is not None]
    for number, addend in enumerate(addends):
        low, high = flushed_ends(addend, addend) if declared.flushes else (addend, addend)
        if number == 0:  # the one that may be fused with the product
            fused = round_to_odd(*two_sum(scaled, addend.double().expand_as(scaled))).float()
            lower32, upper32 = _add(lower, low, -torch.inf), _add(upper, high, torch.inf)
        else:  # monotone, and the same addition that a kernel does
            fused = fused + addend
            lower32, upper32 = lower32 + low, upper32 + high
        expected = expected + addend
        centre = centre + addend.double()
        budget = budget + UNIT * centre.abs() + SMALLEST
        if declared.flushes:
            nothing = (expected == 0) & (fused == 0)
            exact &= ~(below_normal(lower32, upper32) & ~nothing | subnormal(addend))
            lower32, upper32 = flushed_ends(lower32, upper32)
            budget = budget + 2 * TINY
    if declared.flushes:
        tier = tier.masked_fill(~exact & (tier == EXACT), ANY_ORDER if declared.order is None else DECLARED)
    return Bounds(
        expected=expected.to(out_dtype),
        fused=fused.to(out_dtype),
        lower=lower32.to(out_dtype),
        upper=upper32.to(out_dtype),
        exact=exact,
        zero_sum=acc == 0,
        undetermined=overflow | infinite_vanishes | (torch.isinf(wide) & (s.abs() <= error) & ~exact),
        centre=centre,
        budget=_cast(centre, budget, out_dtype),
        tier=tier,
    )


def _accumulation(
    a: Quantized, b: Quantized, left: torch.Tensor, right: torch.Tensor, total: ExactSum, declared: Summation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How far an accumulator can be from the sum (E_acc, float64), by which tier, and where it can overflow: (M, N).

    `left` and `right` are the two operands as numbers, 0 where they are not finite, `total` their sum. A sum that is
    not finite because an operand is not is the same in every order.
    """
    columns = left.shape[1]
    raw = left.abs() @ right.abs().T
    unit = torch.outer(lowest_bit(left), lowest_bit(right))
    s = _finite(total.high)
    largest_part = (raw + s.abs()) / 2
    # Terms that are no multiples of the smallest float32, or sums of them, round; and n·u of that, and of what a tree
    # with such roundings may add in the second order, is not left out.
    underflows = (unit < declared.normal) & (raw != 0)
    exact = (largest_part <= 2.0**ACCUMULATOR_BITS * unit) & (largest_part <= FLT_MAX) & ~underflows
    if bool(exact.all()):
        return torch.zeros_like(raw), torch.full_like(exact, EXACT, dtype=torch.uint8), ~exact
    magnitude = raw * (1 + columns * 2.0**-52)
    n = ((left != 0).float() @ (right != 0).float().T).double()
    error = (n - 1).clamp_(min=0) * declared.unit * magnitude
    if declared.truncates:
        error /= 1 - (n - 1).clamp_(min=0) * declared.unit
    error = torch.where(underflows, (error + n * declared.underflow) * growth(columns, declared.unit), error)
    overflow = (magnitude + error > FLT_MAX) & ~exact
    settled = exact | (error == 0) | ~torch.isfinite(total.high)
    tier = torch.full_like(exact, ANY_ORDER, dtype=torch.uint8)
    if declared.order is not None and not bool(settled.all()):
        whole = a.recipe.whole
        scales = [_finite(scale_values(q)) for q in (a, b)]
        width = min(a.recipe.block[1], max(1, columns))
        terms = Terms(
            left, right,
            codes=(_finite(element_values(a)), _finite(element_values(b))),
            scales=(torch.ones_like(scales[0]), torch.ones_like(scales[1])) if whole else (scales[0], scales[1]),
            width=width, cut=1 if whole else width,
            span=unit_span(a.recipe.element) * unit_span(b.recipe.element),
            magnitude=raw, unit=unit,
        )  # fmt: skip
        ordered, possible = declared_error(terms, declared, settled, overflows=bool(overflow.any()))
        overflow &= possible
        error = torch.minimum(error, ordered)
        tier.fill_(DECLARED)
    return error.masked_fill_(settled, 0.0), tier.masked_fill_(settled & ~overflow, EXACT), overflow


def _check_terms(columns: int) -> None:
    if columns * 2 * UNIT > 0.5:
        raise ValueError(f"an accumulator that truncates has a bound for K up to {2**22}, not {columns}")


def _promoted(
    a: Quantized,
    b: Quantized,
    out_dtype: torch.dtype,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    declared: Summation,
) -> Bounds:
    """Bounds where blocks are scaled on the way: y, then the bias and a cast, then c and another cast, all monotone."""
    limits = promoted_limits(a, b, declared)
    expected, lower, upper, exact = limits.expected, limits.lower, limits.upper, limits.exact
    centre = limits.centre
    budget = torch.maximum(limits.upper.double() - centre, centre - limits.lower.double()) + SMALLEST
    steps = [(t.float(), out_dtype) for t in (bias, c) if t is not None]
    if bias is None:
        expected, lower, upper = (end.to(out_dtype) for end in (expected, lower, upper))
        budget = _cast(centre, budget, out_dtype)
    for addend, dtype in steps:
        low, high = flushed_ends(addend, addend) if declared.flushes else (addend, addend)
        expected, lower, upper = expected.float() + addend, lower.float() + low, upper.float() + high
        centre = centre + addend.double()
        budget = budget + UNIT * centre.abs() + SMALLEST
        if declared.flushes:
            exact = exact & ~(below_normal(lower, upper) & (expected != 0) | subnormal(addend))
            lower, upper = flushed_ends(lower, upper)
            budget = budget + 2 * TINY
        expected, lower, upper = (end.to(dtype) for end in (expected, lower, upper))
        budget = _cast(centre, budget, dtype)
    known = DECLARED if declared.order is not None else ANY_ORDER
    return Bounds(
        expected=expected,
        fused=expected,
        lower=lower,
        upper=upper,
        exact=exact,
        zero_sum=limits.expected == 0,
        undetermined=limits.overflow,
        centre=centre,
        budget=budget,
        tier=torch.where(exact & limits.any_order, EXACT, known).to(torch.uint8),
    )


def _cast(centre: torch.Tensor, budget: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The budget after a cast to the output's dtype."""
    relative, absolute = _CAST[out_dtype]
    return budget * (1 + relative) + relative * centre.abs() + absolute


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _add(end: torch.Tensor, addend: torch.Tensor, outward: float) -> torch.Tensor:
    """The float32 end on the side `outward` of [lower, upper] + addend, fused or not, from a float64 end.

    Adding and rounding are monotone; the float64 sum may itself have rounded, hence one step outward. A product that
    overflows before the addition stays infinite, though the sum would not be.
    """
    outer = torch.maximum if outward > 0 else torch.minimum
    together = torch.nextafter(end + addend.double(), torch.full_like(end, outward)).float()
    apart = end.float() + addend
    return outer(together, torch.where(end.float().isinf(), apart, together))
