"""Steps behind a quantization: the values of codes and scales, and products of two quantized matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.bounds.decoded_operands import DecodedOperands
from narrowgauge.reference.bounds.factor_sums import factor_bounds
from narrowgauge.reference.bounds.summation_orders import declared_error
from narrowgauge.reference.contracts.accepted import Ends, different
from narrowgauge.reference.contracts.casts import nearest
from narrowgauge.reference.contracts.interval import Interval, add, exactly, flushed, hull, multiply
from narrowgauge.reference.gemm.fast.tensor_core_sum import fast_tensor_core_sum
from narrowgauge.reference.gemm.operands import element_values, multiply_blocks, operand, promotes, scale_values
from narrowgauge.reference.gemm.split_k import SplitK
from narrowgauge.reference.gemm.tensor_core import Factors, factors_of_operand, power_of_two
from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.numbers.exact import float32_ends, fma, lowest_bit
from narrowgauge.reference.quantize.dequantize import dequantize
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.reference.quantize.scaling import block_scales, tensor_scale, used_tensor_scale
from narrowgauge.reference.quantize.steps import block_amaxes, encode_elements
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.program import PROMOTIONS
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.summation import FLT_MAX, SMALLEST_NORMAL, UNIT, Summation, summation


def quantized(
    y: Ends, recipe: str, scale: torch.Tensor | None, line: int, random: torch.Tensor | None = None
) -> Quantized:
    """The quantization of a matrix (M, K) that a kernel hides, rotated already.

    Raises ValueError unless all numbers of the elements have the same quantization: the kernel has to show it.
    """
    free = y.nan is not None and bool((y.nan & ~y.never).any())
    found = None if free else _of_all_numbers(y, find_recipe(recipe), scale, random)
    if found is None:
        raise ValueError(
            f"the quantization of line {line} is hidden, and several numbers are right for an element of its operand; "
            "let the kernel return the quantization"
        )
    return found


def _of_all_numbers(
    y: Ends, recipe: Recipe, scale: torch.Tensor | None, random: torch.Tensor | None
) -> Quantized | None:
    """The quantization of every matrix between the ends; None if there are several.

    Scales rise with the magnitudes, and codes under a scale with the numbers: if the least and the largest magnitudes
    have the same scales and codes, so have all between them. 4over6 chooses scales in another way.
    """
    if not bool(different(y.low, y.high, None).any()):
        return of_rotated(y.low, recipe, scale, random)
    negative = y.low.signbit()
    if recipe.candidates != "6" or bool((negative != y.high.signbit()).any()):
        return None
    least, largest = torch.where(negative, y.high, y.low), torch.where(negative, y.low, y.high)
    found, other = (of_rotated(x, recipe, scale, random) for x in (least, largest))
    pairs = [(found.codes, other.codes), (found.scales, other.scales)]
    if found.amax is not None and other.amax is not None:
        pairs.append((found.amax, other.amax))
    return found if all(torch.equal(a, b) for a, b in pairs) else None


def of_rotated(y: torch.Tensor, recipe: Recipe, scale: torch.Tensor | None, random: torch.Tensor | None) -> Quantized:
    """`quantize` of a matrix (M, K) that is rotated already, if the recipe rotates."""
    return replace(quantize(y, recipe.rowwise, scale=scale, random=random), recipe=recipe)


def of_statistics(y: torch.Tensor, statistics: torch.Tensor, recipe: Recipe, random: torch.Tensor | None) -> Quantized:
    """`quantize` of a matrix (M, K) with the scales of a second matrix."""
    blocks = block_amaxes(statistics, recipe)
    amax = None if recipe.tensor_scale == "none" else tensor_amax(blocks)
    tensor = None if amax is None else tensor_scale(amax, recipe, y.dtype)
    scales = block_scales(blocks, tensor, recipe, statistics.dtype)
    codes = encode_elements(y, scales, tensor, recipe, random, blocks=blocks)
    return Quantized(codes, scales, amax, recipe, (y.shape[0], y.shape[1]), tensor)


def values_of(q: Quantized, dtype: torch.dtype, *, flushes: bool = False) -> Interval:
    """The values (M, K) of codes and scales, rounded to a dtype once: docs/numerics.md#nvfp4, Dequantize.

    `flushes`: a scale of the tensor or of a block, or their product, may be subnormal and become 0. The value is then
    below 2^-126 times the largest code and, of two scales, the largest block scale.
    """
    values = exactly(dequantize(q, dtype))
    two_levels = q.recipe.tensor_scale != "none" and q.recipe.scale is not FP32
    largest = q.recipe.scale.max if two_levels else 1.0
    return flushed(values, SMALLEST_NORMAL * q.recipe.element.max * largest) if flushes else values


def exact_values(q: Quantized) -> Interval:
    """Codes times scales (M, K), unrounded, of a recipe with a single level of scales."""
    exact = multiply_blocks(
        element_values(q), scale_values(q), q.recipe.block[1] if not q.recipe.spans_k else q.shape[1]
    )
    return Interval(exact, exact)


def rounded_values(values: Interval, dtype: torch.dtype) -> Interval:
    """The numbers rounded to a dtype."""
    low, high = (nearest(end, dtype).double() for end in (values.low, values.high))
    return Interval(low, high, values.nan)


def product(a: Quantized, b: Quantized, order: str | None) -> Interval:
    """The numbers (M, N) that a kernel may hold for the product of (M, K) and (N, K), with a factor for their scales.

    The sum has any order, or the declared one (`spec.summation`). The factor may be fused with a later addition, so the
    number before its rounding is possible too. Source: docs/tolerance.md#gemm.
    """
    limits = bounds(a, b, out_dtype=torch.float32, order=order)
    lower, upper = (torch.where(limits.exact, limits.expected, end).double() for end in (limits.lower, limits.upper))
    radius = torch.where(limits.exact, 0.0, limits.budget)
    low, high = torch.fmin(lower, limits.centre - radius), torch.fmax(upper, limits.centre + radius)
    zero = limits.zero_sum & limits.exact  # with the sign of any order
    low, high = torch.where(zero, -0.0, low), torch.where(zero, 0.0, high)
    low, high = low.masked_fill(limits.undetermined, -torch.inf), high.masked_fill(limits.undetermined, torch.inf)
    nan = limits.expected.isnan() & ~limits.undetermined
    low, high = low.masked_fill(nan, torch.nan), high.masked_fill(nan, torch.nan)
    return Interval(low, high, limits.undetermined | nan)


Fewest = tuple[int, int] | None
"""Fraction bits and products of a step of the tensor cores that keep the fewest bits; None: int32 sums."""
NARROW = (13, 32)
"""Of 8-bit elements: Ada and Hopper (docs/tolerance.md#declared-order). Others keep more."""
WIDE = (24, 8)
"""Of 16-bit numbers: Ampere and Ada."""
_INT32_MAX = 2.0**31 - 1
_FACTOR_ROUNDINGS = 4
"""Roundings of a factor made of an amax, as fl(fl(amax·fl(1/6))·fl(1/448)), or 1/fl(d/amax), and of its constants."""


def decoded(
    q: Quantized, dtype: torch.dtype | None, scale: torch.dtype | None = None, *, apart: bool = False
) -> Interval:
    """Element times the scale of its block (N, K), rounded once to `dtype`; None: exact.

    A scale that spans K is left out. `scale`: dtype to which the scales of blocks are rounded first. `apart`: the
    product of zero point and scale is rounded to `dtype` before it is subtracted.
    """
    if q.recipe.spans_k:
        exact = element_values(q)
    else:
        scales = scale_values(q)
        if scale is not None:
            scales = nearest(scales, scale).double()
        width, zeros = q.recipe.block[1], q.zeros
        if apart and dtype is not None and zeros is not None:
            exact = multiply_blocks(element_values(replace(q, zeros=torch.zeros_like(zeros))), scales, width)
            shift = nearest(scales * zeros, dtype).double()
            exact -= shift.repeat_interleave(width, 1)[:, : q.shape[1]]
        else:
            exact = multiply_blocks(element_values(q), scales, width)
    found = exact if dtype is None else nearest(exact, dtype).double()
    return Interval(found, found, bits=24)


def factor(q: Quantized, shape: tuple[int, ...]) -> Interval:
    """The factor of a quantization beside the scales of blocks: the scales of rows, the scale of the tensor, or 1.

    A factor made of an amax has several formulas. All formulas give the same power of two if amax/d is a power of two;
    else the factor lies within 4 roundings of amax/d.
    """
    if q.recipe.spans_k:
        return exactly(q.scales.reshape(shape))
    if q.recipe.alpha == "1":
        return exactly(torch.ones(shape, device=q.codes.device))
    if q.recipe.alpha == "a_dec*b_dec":
        return exactly(used_tensor_scale(q).reshape(shape))
    if q.recipe.alpha == "1/(a_enc*b_enc)":
        exact = 1 / used_tensor_scale(q).double()
    else:
        exact = q.required_amax.double() / q.recipe.max_product
    exact = exact.reshape(shape)
    error = torch.where(torch.frexp(exact).mantissa == 0.5, 0.0, _FACTOR_ROUNDINGS * UNIT * (1 + 2.0**-20) * exact)
    low, high = exact - error, exact + error
    return Interval(low, low if bool((error == 0).all()) else high)


def factors(x: Interval, dtype: str, q: Quantized | None) -> Factors:
    """An operand of a product with the exponents aligned by a tensor core; infinities and NaN are replaced by 0.

    `dtype`: that of the numbers. `q`: the quantization of unrounded numbers, whose elements have exponents of their
    own.
    """
    if q is not None:
        return factors_of_operand(q)
    finite = x.low.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    least = torch.finfo(getattr(torch, dtype, torch.float32)).tiny
    return Factors(finite, power_of_two(finite).clamp_(min=least).mul_(finite != 0))


def fewest_bits(codes: Sequence[Quantized | None]) -> Fewest:
    """The tensor cores with the fewest bits for two operands: quantizations whose elements are multiplied, or None of
    16-bit numbers."""
    elements = [q.recipe for q in codes if q is not None]
    if len(elements) < len(codes) or any(recipe.element.bits > 8 for recipe in elements):
        return WIDE
    return None if all(recipe.integer for recipe in elements) else NARROW


def _int32_sums(left: Factors, right: Factors, total: torch.Tensor) -> Interval:
    """Exact sums, converted to float32 or not. A sum that may exceed int32 is free."""
    rounded = total.float().double()
    low, high = torch.minimum(total, rounded), torch.maximum(total, rounded)
    overflow = left.values.abs() @ right.values.abs().T > _INT32_MAX
    low, high = low.masked_fill(overflow, -torch.inf), high.masked_fill(overflow, torch.inf)
    return Interval(low, high, overflow)


def product_of_numbers(
    numbers: tuple[Interval, Interval], operands: tuple[Factors, Factors], order: str | None, *, fewest: Fewest
) -> Interval:
    """The numbers (M, N) that a kernel may hold for the sums of products of two matrices of known numbers.

    `fewest`: `fewest_bits` of the operands, for sums of no declared order, which stacks of matrices may have too.
    Source: docs/tolerance.md#products-of-known-numbers.
    """
    total = numbers[0].low @ numbers[1].low.mT
    declared = summation(order)
    if (model := declared.aligned) is not None:
        sums = fast_tensor_core_sum(*operands, model, total, split=SplitK.of(declared, torch.float32))
        return exactly(sums.float())
    if order is None and fewest is None:
        return _int32_sums(*operands, total)
    if order is None or declared.fraction is not None:
        model_ = declared.fraction or fewest or WIDE
        error, known, overflow = factor_bounds(*operands, total, *model_, joined=order is None)
    else:
        error, known, overflow = _in_order(operands, total, declared)
    # A kernel that decodes to float32 first has infinities in place of 448·2^127 and its like.
    beyond = [(operand.values.abs() > FLT_MAX).any(-1) for operand in operands]
    overflow = (overflow | beyond[0].unsqueeze(-1) | beyond[1].unsqueeze(-2)) & total.isfinite()
    known = known & ~overflow
    lower, upper = (end.double() for end in float32_ends(total - error, total + error))
    low, high = (torch.where(known, total, end) for end in (lower, upper))
    zero = known & (total == 0)  # with the sign of any order
    low, high = torch.where(zero, -0.0, low), torch.where(zero, 0.0, high)
    low, high = low.masked_fill(overflow, -torch.inf), high.masked_fill(overflow, torch.inf)
    return Interval(low, high, overflow | total.isnan())


def _in_order(
    operands: tuple[Factors, Factors], total: torch.Tensor, declared: Summation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(error, exact, overflow) of float32 sums in an order of `declared_error`, where all of K is one block."""
    left, right = (operand.values for operand in operands)
    error, known, overflow = factor_bounds(*operands, total, *WIDE)
    decoded = DecodedOperands(
        left, right, elements=(left, right), scales=(torch.ones_like(left[:, :1]), torch.ones_like(right[:, :1])),
        block_width=max(1, left.shape[1]), slice_step=1,
        element_span=float("inf"),
        magnitude=left.abs() @ right.abs().T, quantum=torch.outer(lowest_bit(left), lowest_bit(right)),
    )  # fmt: skip
    order_error, order_overflow = declared_error(decoded, declared, known, overflows=bool(overflow.any()))
    known = known | (order_error == 0)
    order_error = order_error + left.shape[1] * 2.0**-52 * decoded.magnitude
    return torch.minimum(error, order_error).masked_fill_(known, 0.0), known, overflow & order_overflow


def promoted(
    pair: tuple[Interval | Quantized, Interval | Quantized], operands: tuple[Factors, Factors], *, fewest: Fewest,
    order: str | None, promotion: str | None = None,
) -> Interval:  # fmt: skip
    """The numbers (M, N) of y, to which the sum P of each block is added with the float32 scales of the block.

    `operands`: elements, with the scales that are no float32 numbers. The sum of a block has the declared order.
    Without a declared promotion the products and the addition round or not, in either association.
    Source: docs/tolerance.md#fp8-with-block-scales.
    """
    blocked = [q if isinstance(q, Quantized) and promotes(q.recipe) else None for q in pair]
    width = next(q.recipe.block[1] for q in blocked if q is not None)
    scales = [None if q is None else scale_values(q).float() for q in blocked]
    numbers = [operand(x) if isinstance(x, Quantized) else x.low for x in pair]
    columns = operands[0].values.shape[1]
    zero = torch.zeros(operands[0].values.shape[0], operands[1].values.shape[0], device=operands[0].values.device)
    y = exactly(zero)
    for number, start in enumerate(range(0, columns, width)):
        some = slice(start, min(start + width, columns))
        left, right = (operand.columns(some) for operand in operands)
        values = _columns(numbers[0], some), _columns(numbers[1], some)
        part = product_of_numbers(values, (left, right), order, fewest=fewest)
        s_a, s_b = (
            torch.ones(()) if s is None else s[:, number].view((-1, 1) if side == 0 else (1, -1))
            for side, s in enumerate(scales)
        )
        forms = PROMOTIONS if promotion is None else (promotion,)
        y = hull([_promoted_once(y, part, s_a, s_b, form, fused=promotion is not None) for form in forms])
    return y


def _columns(x: torch.Tensor, columns: slice) -> Interval:
    some = x[:, columns]
    return Interval(some, some)


def _promoted_once(
    y: Interval, part: Interval, s_a: torch.Tensor, s_b: torch.Tensor, form: str, *, fused: bool
) -> Interval:
    """y after the sum of a block: a fused addition, whose rounding is monotone at both ends, or any roundings."""
    if not fused:
        one, other = (exactly(s.expand(part.shape)) for s in (s_a, s_b))
        product = multiply(multiply(part, one), other) if form == "sum-first" else multiply(part, multiply(one, other))
        return add(product, y)
    low, high = part.low.float(), part.high.float()
    first, second = (s_a, s_b) if form == "sum-first" else (torch.ones_like(s_a), s_a * s_b)
    low, high = (torch.where(first < 0, b, a) * first for a, b in ((low, high), (high, low)))
    second = second.expand_as(low)
    low, high = (torch.where(second < 0, b, a) for a, b in ((low, high), (high, low)))
    low, high = (fma(end, second, of.float()).double() for end, of in ((low, y.low), (high, y.high)))
    never = low.isnan() & high.isnan() & ~(part.low.isinf() | y.low.isinf()) | part.never | y.never
    free = (low.isnan() | high.isnan()) & ~never
    low, high = low.masked_fill(free, -torch.inf), high.masked_fill(free, torch.inf)
    return Interval(low, high, part.may_be_nan | y.may_be_nan | never | free)
