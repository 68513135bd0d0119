"""Proved bounds of a GEMM: which outputs a correct kernel can give, whatever its order of summation.

Source: tolerance.md, rule 2, tiers 0 and 2, for a float32 accumulator that rounds to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reference.gemm import alpha, check_epilogue, check_operands, exact_sum, lowest_bit, operand, round_to_odd, two_sum
from reference.quantized import Quantized

UNIT = 2.0**-24
ACCUMULATOR_BITS = 24
SMALLEST = 2.0**-149
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
    """Tier 2: a correct kernel's output lies in [lower, upper]."""
    exact: torch.Tensor
    """bool: tier 0. No order of summation can round, so the output is `expected` or `fused`, bit for bit."""
    zero_sum: torch.Tensor
    """bool: the sum is 0, whose sign depends on the order."""
    undetermined: torch.Tensor
    """bool: α is infinite and the sum's sign is not determined: any infinity or NaN is right."""
    centre: torch.Tensor
    """float64: α·S + c + bias, to within 2^-50."""
    budget: torch.Tensor
    """float64: the largest distance from `centre` that all roundings together may cause."""


def bounds(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Bounds:
    """Bounds of `gemm(a, b, out_dtype=…, c=…, bias=…)`; raises as `gemm` does.

    The rule's E is evaluated in float64 and widened by 2^-50 of its terms, so that the evaluation's own rounding can
    never exclude a right output.
    """
    check_operands(a, b)
    check_epilogue((a.shape[0], b.shape[0]), out_dtype, c, bias)
    left, right = operand(a), operand(b)
    total = exact_sum(left, right)
    magnitude = left.abs() @ right.abs().T
    products = (left != 0).float() @ (right != 0).float().T
    unit = torch.outer(lowest_bit(left), lowest_bit(right))

    s = total.high
    largest_part = (magnitude + s.abs()) / 2
    exact = largest_part <= 2.0**ACCUMULATOR_BITS * unit
    accumulation = ((products.double() - 1).clamp_(min=0) * UNIT * magnitude).masked_fill_(exact, 0.0)

    factor = alpha(a, b)
    wide = factor.double()
    scaled = wide * s
    error = wide.abs() * accumulation * (1 + UNIT) + UNIT * scaled.abs() + SMALLEST
    slack = 2.0**-50 * (scaled.abs() + error)
    lower, upper = scaled - error - slack, scaled + error + slack
    # Under an infinite α the sign of the sum is all that matters, and inf - inf must not make it NaN.
    determined = torch.isinf(wide) & (s.abs() > accumulation)
    lower, upper = torch.where(determined, scaled, lower), torch.where(determined, scaled, upper)

    expected = fused = factor * total.to_float32()
    lower32, upper32 = lower.float(), upper.float()
    centre, budget = scaled, error + slack
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
    relative, absolute = _CAST[out_dtype]
    return Bounds(
        expected=expected.to(out_dtype),
        fused=fused.to(out_dtype),
        lower=lower32.to(out_dtype),
        upper=upper32.to(out_dtype),
        exact=exact,
        zero_sum=s == 0,
        undetermined=torch.isinf(wide) & (s.abs() <= accumulation) & ~exact,
        centre=centre,
        budget=budget * (1 + relative) + relative * centre.abs() + absolute,
    )


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
