"""Proved bounds of a GEMM: the outputs of correct kernels, in any order of summation or in a declared order.

Source: docs/tolerance.md#gemm, for float32 accumulators. `spec.summation` lists the declarations of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.reference.bounds.decoded_first import DTYPES, decoded, decoded_bounds, tensor_factor
from narrowgauge.reference.bounds.decoded_operands import DecodedOperands
from narrowgauge.reference.bounds.factor_sums import factor_bounds
from narrowgauge.reference.bounds.flushing import alpha_may_flush, extended_to_zero, is_subnormal, may_flush
from narrowgauge.reference.bounds.promotion_bounds import SumBounds, promotion_bounds
from narrowgauge.reference.bounds.running_error import error_growth
from narrowgauge.reference.bounds.summation_orders import declared_error
from narrowgauge.reference.gemm.fast.exact_sum import fast_exact_sum
from narrowgauge.reference.gemm.fast.tensor_core_sum import fast_tensor_core_sum
from narrowgauge.reference.gemm.gemm import alpha, check_operands
from narrowgauge.reference.gemm.operands import element_values, format_span, operand, promotes, scale_values
from narrowgauge.reference.gemm.split_k import SplitK
from narrowgauge.reference.gemm.tensor_core import factors_of_operand
from narrowgauge.reference.numbers.exact import ExactSum, float32_ends, lowest_bit, round_to_odd, two_sum
from narrowgauge.spec.arguments import check_epilogue
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import (
    ACCUMULATOR_BITS,
    FLT_MAX,
    SMALLEST_NORMAL,
    SMALLEST_SUBNORMAL,
    UNIT,
    Summation,
    summation,
)

EXACT, DECLARED, ANY_ORDER = 0, 1, 2
"""Tiers of an output."""
# Roundoff of the cast at the end of a GEMM, and half the smallest subnormal number; a float32 output has no cast.
_CAST = {torch.float32: (0.0, 0.0), torch.bfloat16: (2.0**-8, 2.0**-134), torch.float16: (2.0**-11, 2.0**-25)}
_ADDITION = UNIT, SMALLEST_SUBNORMAL
"""Roundoff of the addition of c or the bias, in the same form."""


@dataclass
class Bounds:
    """The accepted outputs (M, N) of a GEMM. Tensors have the output's dtype unless another dtype is named."""

    expected: torch.Tensor
    """Output of the reference: the exact sum, rounded at every step of the epilogue."""
    fused: torch.Tensor
    """Equally correct output: α·acc and the first addend (c, or a bias without c) are rounded once, as by an FMA."""
    decoded: torch.Tensor
    """Output of a kernel that decodes the operands to float32 first, where an element times its E8M0 scale overflows;
    else `expected`. Correct if all outputs that differ from `expected` have this value."""
    lower: torch.Tensor
    upper: torch.Tensor
    """A correct kernel's output lies in [lower, upper]."""
    exact: torch.Tensor
    """bool: the sum cannot round, or all its roundings are known. The output is `expected` or `fused` bit for bit."""
    zero_sum: torch.Tensor
    """bool: the float32 sum is 0, with a sign that depends on the order."""
    undetermined: torch.Tensor
    """bool: α is infinite and the sign of the sum is unknown, or overflow depends on the order. Any infinity or NaN is
    accepted too."""
    centre: torch.Tensor
    """float64: α·S + c + bias, with a relative error of at most 2^-50."""
    budget: torch.Tensor
    """float64: the largest distance from `centre` that all roundings together can cause."""
    tier: torch.Tensor
    """uint8: `EXACT` if no order of summation can round; `DECLARED` if the declared order gives the bound, cannot
    round, or is simulated; `ANY_ORDER` for the bound of any order."""


def bounds(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    order: Summation | str | None = None,
    joined_in: torch.dtype | None = None,
) -> Bounds:
    """Bounds of `gemm(a, b, out_dtype=…, c=…, bias=…)`: operands (M, K) and (N, K) to outputs (M, N).

    `order`: the declared summation, or its name; None: any order, rounding to nearest. A term, or a block sum, times
    scales that are powers of two is exact if the product is a float32 number, and otherwise rounds once.

    `joined_in`: dtype of the sums of slices of K if the order ends with "-out"; None: `out_dtype`.

    With declared operands the bounds are those of `decoded_bounds`: the sums of decoded operands, in any order.

    The error E_acc is evaluated in float64 and widened by 2^-50 of its terms, and sums of magnitudes by K·2^-52. So the
    rounding of this evaluation never excludes a correct output.

    Raises the errors of `gemm`, and ValueError for an unknown order or, with a truncating accumulator or declared
    operands, for K above 2^22.
    """
    check_operands(a, b)
    check_epilogue((a.shape[0], b.shape[0]), out_dtype, c, bias)
    declared = summation(order)
    if declared.truncates or declared.operands is not None:
        _check_columns(a.shape[1])
    if declared.operands is not None:
        dtype = DTYPES[declared.operands]
        x, w = (decoded(q, tensor_factor(q), dtype, flushes=declared.flushes) for q in (a, b))
        return _bounds_of_sums(decoded_bounds(x, w, declared), a, out_dtype, c, bias, declared)
    split = SplitK.of(declared, joined_in or out_dtype)
    if promotes(a.recipe):
        return _bounds_of_sums(promotion_bounds(a, b, declared, split), a, out_dtype, c, bias, declared)
    left, right = operand(a), operand(b)
    total = fast_exact_sum(a, b, left, right)
    if (model := declared.aligned) is not None:
        factors = factors_of_operand(a), factors_of_operand(b)
        simulated = fast_tensor_core_sum(*factors, model, total.high, split=split)
        total = ExactSum(simulated, None)
        tier = torch.full_like(total.high, DECLARED, dtype=torch.uint8)
        error, overflow = torch.zeros_like(total.high), torch.zeros_like(tier, dtype=torch.bool)
    else:
        error, tier, overflow = _accumulation(a, b, _finite(left), _finite(right), total, declared)
    exact = (error == 0) & ~overflow

    s = total.high
    factor = alpha(a, b)
    factor64 = factor.double()
    by_rows = a.recipe.alpha == "s_a*s_b" and not (a.recipe.whole and b.recipe.whole)
    rows_overflow = torch.zeros_like(exact)
    if by_rows:
        factor64 = a.scales.double() * b.scales.double().T
    scaled = factor64 * s
    radius = factor64.abs() * error * (1 + UNIT) + UNIT * scaled.abs() + SMALLEST_SUBNORMAL
    if by_rows:
        radius, scales_round, rows_overflow = _scales_of_rows(a, b, s, error, declared)
        exact &= ~scales_round & ~rows_overflow
        tier = tier.masked_fill(~exact & (tier == EXACT), ANY_ORDER if declared.order is None else DECLARED)
    slack = 2.0**-50 * (scaled.abs() + radius)
    lower, upper = scaled - radius - slack, scaled + radius + slack
    # With an infinite α only the sign of the sum matters; inf - inf must not make the ends NaN.
    determined = torch.isinf(factor64) & (s.abs() > error)
    lower, upper = torch.where(determined, scaled, lower), torch.where(determined, scaled, upper)
    infinite_or_flushed = torch.zeros_like(exact)
    if declared.flushes:
        alpha_flushes = alpha_may_flush(a, b)
        infinite_or_flushed = alpha_flushes & torch.isinf(s)
        exact &= ~(may_flush(lower, upper) | alpha_flushes) | (s == 0)
        lower, upper = extended_to_zero(lower, upper, alpha_flushes)
        radius = radius + SMALLEST_NORMAL + scaled.abs() * alpha_flushes

    acc = total.to_float32()
    expected = fused = factor * acc
    centre, budget = scaled, radius + slack
    addends = [t.float() for t in (c, bias) if t is not None]
    decoded_sum = _overflowing_sum(left, right) if declared.order is None else None
    if not addends:
        lower32, upper32 = float32_ends(lower, upper)
    for number, addend in enumerate(addends):
        low, high = extended_to_zero(addend, addend) if declared.flushes else (addend, addend)
        if number == 0:  # the addition that may be fused with the multiplication by α
            fused = round_to_odd(*two_sum(scaled, addend.double().expand_as(scaled))).float()
            lower32, upper32 = _add_first(lower, low, -torch.inf), _add_first(upper, high, torch.inf)
        else:  # monotone, and the addition of a kernel
            fused = fused + addend
            lower32, upper32 = lower32 + low, upper32 + high
        expected = expected + addend
        centre = centre + addend.double()
        budget = _budget_after_rounding(centre, budget, _ADDITION)
        if declared.flushes:
            zero = (expected == 0) & (fused == 0)
            exact &= ~(may_flush(lower32, upper32) & ~zero | is_subnormal(addend))
            lower32, upper32 = extended_to_zero(lower32, upper32)
            budget = budget + 2 * SMALLEST_NORMAL
    if declared.flushes:
        tier = tier.masked_fill(~exact & (tier == EXACT), ANY_ORDER if declared.order is None else DECLARED)
    expected = expected.to(out_dtype)
    decoded_output = expected
    if decoded_sum is not None:
        overflowed = sum(addends, decoded_sum)
        decoded_output = torch.where(decoded_sum.isfinite(), expected, overflowed.to(out_dtype))
    return Bounds(
        expected=expected,
        fused=fused.to(out_dtype),
        decoded=decoded_output,
        lower=lower32.to(out_dtype),
        upper=upper32.to(out_dtype),
        exact=exact,
        zero_sum=acc == 0,
        undetermined=overflow
        | rows_overflow
        | infinite_or_flushed
        | (torch.isinf(factor64) & (s.abs() <= error) & ~exact),
        centre=centre,
        budget=_budget_after_rounding(centre, budget, _CAST[out_dtype]),
        tier=tier,
    )


def _overflowing_sum(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """Float32 sum (M, N) of operands as float32 numbers: infinite or NaN in rows with a number that overflows, else 0.

    None if no number overflows: element times E8M0 scale is then the same number in float32. An E8M0 scale is at most
    2^127, so 448·2^127 is infinite in float32.
    """
    over = [((x.abs() > FLT_MAX) & x.isfinite()) for x in (left, right)]
    if not any(bool(x.any()) for x in over):
        return None
    total = left.float().double() @ right.float().double().T
    return torch.where(over[0].any(1, keepdim=True) | over[1].any(1), total, 0.0).float()


def _scales_of_rows(
    a: Quantized, b: Quantized, s: torch.Tensor, error: torch.Tensor, declared: Summation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 scales of rows: the radius (float64) around s_a·s_b·S, and bool: a product rounds, a product overflows.

    Let S be the exact sum and acc the sum of the kernel, |acc − S| ≤ E. A kernel forms (acc·s_a)·s_b, (acc·s_b)·s_a or
    acc·(s_a·s_b). Both products round, p = t·(1 + δ) + η with |δ| ≤ u and |η| ≤ 2^-150 (2^-126 with flushing), and the
    η of the first is multiplied by the last factor f: s_b, s_a or acc. So the result is within
    s_a·s_b·E·(1 + u)² + ((1 + u)² − 1)·s_a·s_b·|S| + |η|·(f·(1 + u) + 1) of s_a·s_b·S. No product rounds if both scales
    are powers of two, the sum is exact, and all products are normal numbers.
    """
    s_a, s_b = a.scales.double(), b.scales.double().T
    scale = (s_a * s_b).abs()
    size = _finite(s).abs() + error
    products = (size * s_a.abs(), size * s_b.abs(), scale.expand_as(size), size * scale)
    last = torch.maximum(torch.maximum(s_a.abs(), s_b.abs()).expand_as(size), size)
    lost = SMALLEST_NORMAL if declared.flushes else SMALLEST_SUBNORMAL
    growth = (1 + UNIT) ** 2
    radius = scale * error * growth + (growth - 1) * scale * size + lost * (last * (1 + UNIT) + 1)
    power_of_two = [torch.frexp(_finite(t)).mantissa.abs() == 0.5 for t in (s_a, s_b)]
    normal = torch.stack([(product >= SMALLEST_NORMAL) | (size == 0) for product in products]).all(0)
    overflows = torch.stack([product * (1 + 4 * UNIT) > FLT_MAX for product in products[:3]]).any(0)
    rounds = ~(power_of_two[0] & power_of_two[1] & normal) & s.isfinite()
    return radius, rounds, overflows | s_a.isinf() | s_b.isinf()


def _accumulation(
    a: Quantized, b: Quantized, left: torch.Tensor, right: torch.Tensor, total: ExactSum, declared: Summation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """E_acc of docs/tolerance.md#gemm (float64), the tier (uint8), and bool: the sum can overflow; (M, N) each.

    `left` and `right`: operands as numbers, with 0 for infinities and NaN. `total`: their exact sum. A sum with an
    infinite or NaN operand is the same in every order.
    """
    if declared.fraction is not None:
        both = factors_of_operand(a), factors_of_operand(b)
        error, sure, overflow = factor_bounds(*both, total.high, *declared.fraction, joined=False)
        return error, torch.where(sure & ~overflow, EXACT, DECLARED).to(torch.uint8), overflow
    columns = left.shape[1]
    raw_magnitude = left.abs() @ right.abs().T
    quantum = torch.outer(lowest_bit(left), lowest_bit(right))
    s = _finite(total.high)
    largest_part = (raw_magnitude + s.abs()) / 2
    # Terms that are no multiples of the smallest float32 number round before the sum, and so may their sums. Below the
    # bound includes n of these roundings, and their second-order growth in a tree of additions.
    underflows = (quantum < declared.smallest_term) & (raw_magnitude != 0)
    exact = (largest_part <= 2.0**ACCUMULATOR_BITS * quantum) & (largest_part <= FLT_MAX) & ~underflows
    if bool(exact.all()):
        return torch.zeros_like(raw_magnitude), torch.full_like(exact, EXACT, dtype=torch.uint8), ~exact
    magnitude = raw_magnitude * (1 + columns * 2.0**-52)
    n = ((left != 0).float() @ (right != 0).float().T).double()
    error = (n - 1).clamp_(min=0) * declared.roundoff * magnitude
    if declared.truncates:
        error /= 1 - (n - 1).clamp_(min=0) * declared.roundoff
    error = torch.where(
        underflows, (error + n * declared.underflow_error) * error_growth(columns, declared.roundoff), error
    )
    overflow = (magnitude + error > FLT_MAX) & ~exact
    settled = exact | (error == 0) | ~torch.isfinite(total.high)
    tier = torch.full_like(exact, ANY_ORDER, dtype=torch.uint8)
    if declared.order is not None and not bool(settled.all()):
        whole = a.recipe.spans_k
        scales = [_finite(scale_values(q)) for q in (a, b)]
        width = min(a.recipe.block[1], max(1, columns))
        operands = DecodedOperands(
            left,
            right,
            elements=(_finite(element_values(a)), _finite(element_values(b))),
            scales=(torch.ones_like(scales[0]), torch.ones_like(scales[1])) if whole else (scales[0], scales[1]),
            block_width=width,
            slice_step=1 if whole else width,
            element_span=format_span(a.recipe.element) * format_span(b.recipe.element),
            magnitude=raw_magnitude,
            quantum=quantum,
        )
        order_error, order_overflow = declared_error(operands, declared, settled, overflows=bool(overflow.any()))
        overflow &= order_overflow
        error = torch.minimum(error, order_error)
        tier.fill_(DECLARED)
    return error.masked_fill_(settled, 0.0), tier.masked_fill_(settled & ~overflow, EXACT), overflow


def _check_columns(columns: int) -> None:
    if columns * 2 * UNIT > 0.5:
        raise ValueError(
            f"an accumulator that truncates, and operands that are decoded first, have a bound for K up to {2**22}, "
            f"not {columns}"
        )


def _bounds_of_sums(
    sums: SumBounds,
    a: Quantized,
    out_dtype: torch.dtype,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    declared: Summation,
) -> Bounds:
    """Bounds of an epilogue without α: the addends and casts of sums y. Each step is monotone.

    FP8 with block scales: the bias and a cast, then c and a second cast. Else c, the bias and a cast.
    """
    expected, lower, upper, exact = sums.expected, sums.lower, sums.upper, sums.exact
    centre = sums.centre
    budget = torch.maximum(sums.upper.double() - centre, centre - sums.lower.double()) + SMALLEST_SUBNORMAL
    if promotes(a.recipe):
        steps = [(t.float(), out_dtype) for t in (bias, c) if t is not None]
        cast_first = bias is None
    else:
        addends = [t.float() for t in (c, bias) if t is not None]
        steps = [(t, torch.float32) for t in addends[:-1]] + [(t, out_dtype) for t in addends[-1:]]
        cast_first = not addends
    if cast_first:
        expected, lower, upper = (end.to(out_dtype) for end in (expected, lower, upper))
        budget = _budget_after_rounding(centre, budget, _CAST[out_dtype])
    for addend, dtype in steps:
        low, high = extended_to_zero(addend, addend) if declared.flushes else (addend, addend)
        expected, lower, upper = expected.float() + addend, lower.float() + low, upper.float() + high
        centre = centre + addend.double()
        budget = _budget_after_rounding(centre, budget, _ADDITION)
        if declared.flushes:
            exact = exact & ~(may_flush(lower, upper) & (expected != 0) | is_subnormal(addend))
            lower, upper = extended_to_zero(lower, upper)
            budget = budget + 2 * SMALLEST_NORMAL
        expected, lower, upper = (end.to(dtype) for end in (expected, lower, upper))
        budget = _budget_after_rounding(centre, budget, _CAST[dtype])
    tier = DECLARED if declared.order is not None else ANY_ORDER
    return Bounds(
        expected=expected,
        fused=expected,
        decoded=expected,
        lower=lower,
        upper=upper,
        exact=exact,
        zero_sum=sums.expected == 0,
        undetermined=sums.overflow,
        centre=centre,
        budget=budget,
        tier=torch.where(exact & sums.any_order, EXACT, tier).to(torch.uint8),
    )


def _budget_after_rounding(centre: torch.Tensor, budget: torch.Tensor, errors: tuple[float, float]) -> torch.Tensor:
    """Largest distance from `centre` of a number within `budget` of `centre`, rounded. The number may be larger than
    `centre` by the budget. `errors`: largest relative error of the rounding, and largest absolute error near 0."""
    relative, absolute = errors
    return budget * (1 + relative) + relative * centre.abs() + absolute


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _add_first(end: torch.Tensor, addend: torch.Tensor, outward: float) -> torch.Tensor:
    """The float32 end of the interval plus the first addend, fused or unfused, from a float64 end.

    `outward`: infinity for the upper end, −infinity for the lower end. Addition and rounding are monotone. The float64
    sum may have rounded, so it moves outward to the next float64 number. A product that overflows before the addition
    stays infinite, even if the fused sum is finite.
    """
    outer = torch.maximum if outward > 0 else torch.minimum
    fused = torch.nextafter(end + addend.double(), torch.full_like(end, outward)).float()
    unfused = end.float() + addend
    return outer(fused, torch.where(end.float().isinf(), unfused, fused))
