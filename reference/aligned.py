"""The sum of a tensor core, simulated bit for bit: products aligned to the largest of a block, truncated and added."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reference.blocks import pad_columns, slabs
from reference.exact import lowest_bit
from reference.formats import FP32, Format
from reference.operands import element_values, scale_values
from reference.quantized import Quantized
from reference.summation import ACCUMULATOR_BITS, FLT_MAX, SMALLEST, Alignment

_EXPONENT = 0x7FF << 52
# Of zeros; below every other unit.
_NOTHING = 2.0**-900
# The share of sums that are cut off from which on it is faster to align all of them than to pick those, and blocks
# after which it is asked anew.
_MANY, _LOOK = 0.1, 8
# A matmul finds the largest of so many powers of two as `reference.certificate` does: the exponent of a sum of at most
# 2^7 8th powers over 8, rounded down, is that of the largest. No 8th power of a ratio of this is subnormal.
_TERMS, _RATIO = 1 << 7, 2.0**-124
_FIELD, _BIAS = 52, 1023


@dataclass
class Factors:
    """An operand (M, K) as a tensor core sees it, float64, finite."""

    values: torch.Tensor
    powers: torch.Tensor
    """The power of two of each, that of the smallest normal number of its format where it is below; 0 of 0."""

    def part(self, columns: slice) -> Factors:
        """Some columns."""
        return Factors(self.values[:, columns], self.powers[:, columns])

    def rows(self, rows: slice | torch.Tensor) -> Factors:
        """Some rows."""
        return Factors(self.values[rows], self.powers[rows])

    def decoded(self) -> Factors:
        """The same as normal numbers of a format whose exponents reach that far."""
        return Factors(self.values, _power(self.values))


def of_elements(values: torch.Tensor, fmt: Format) -> Factors:
    """Elements of a format, without scales; what is not finite is 0."""
    finite = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return Factors(finite, _power(finite).clamp_(min=2.0 ** (1 - fmt.bias)).mul_(finite != 0))


def of_operand(q: Quantized) -> Factors:
    """Elements with the scales of their blocks; float32 scales are left out."""
    found = of_elements(element_values(q), q.recipe.element)
    if q.recipe.scale is FP32:
        return found
    scales = scale_values(q).nan_to_num(nan=0.0).repeat_interleave(q.recipe.block[1], 1)[:, : q.shape[1]]
    return Factors(found.values * scales, found.powers * _power(scales))


def aligned_sum(left: Factors, right: Factors, model: Alignment, exact: torch.Tensor) -> torch.Tensor:
    """Σ_k left[i, k]·right[j, k] as a tensor core adds it: (M, K) and (N, K) to (M, N), float64, float32 numbers.

    `model.width` products, which are exact, and the accumulator are aligned to the largest exponent among them, that of
    a product being the sum of its factors', and are cut off behind `model.fraction` bits. They are added without a
    rounding, and the sum is cut off behind as many bits, or float32's. With `model.promoted` the accumulator begins
    anew with 0 after so many columns, and each is added to a float32 sum, rounded to nearest. With `model.decoded` no
    factor is subnormal: elements and scales were multiplied to numbers of a wider format. Factors are 0 or from
    2^-200 to 2^200. Where `exact` (M, N), the sum of IEEE 754, is not finite, that is the result.

    Source: tolerance.md, rule 2, tier 1, "a model of the hardware". An H200 showed what it leaves open: exponents of
    products are not normalised, subnormal factors have that of the smallest normal one, and sums keep no more bits than
    terms. With F = 13 and W = 32 all bits of torch._scaled_mm of E4M3, and of E5M2 by E4M3, are these; without
    `use_fast_accum` with P = 128.
    """
    if model.decoded:
        left, right = left.decoded(), right.decoded()
    out = exact.float()
    cut = (~_never_cut(left, right, model)).any(1).nonzero().squeeze(1)
    if len(cut):
        out[cut] = _promoted(left.rows(cut), right, model)
    return out.add_(0.0).double().where(exact.isfinite(), exact)  # a sum of zeros is +0


def _never_cut(left: Factors, right: Factors, model: Alignment) -> torch.Tensor:
    """bool (M, N): the sum is the exact one, since nothing is cut off.

    Every term and sum of terms is a multiple of one power of two, which is not below the last bit that is kept beside
    the largest of them, and has no more bits than an accumulator.
    """
    kept = torch.outer(lowest_bit(left.values), lowest_bit(right.values))
    magnitude = (left.values.abs() @ right.values.abs().T).mul_(1 + 2.0**-20)
    largest = torch.outer(left.powers.amax(1), right.powers.amax(1)) if left.values.shape[1] else magnitude
    fits = magnitude <= kept * 2.0 ** (1 + _accumulator(model))
    within = (kept >= SMALLEST) & (magnitude <= FLT_MAX)
    return fits & within & (torch.maximum(largest, magnitude) <= kept * 2.0**model.fraction)


def _promoted(left: Factors, right: Factors, model: Alignment) -> torch.Tensor:
    """The sum of the accumulators, float32 (M, N)."""
    columns = left.values.shape[1]
    out = torch.zeros(left.values.shape[0], right.values.shape[0], device=left.values.device)
    whole = model.promoted or max(1, columns)
    near = _near(left.powers, right.powers, model.width)
    for rows in slabs(out):
        some = left.rows(rows)
        for start in range(0, columns, whole):
            here = slice(start, start + whole)
            out[rows] += _accumulated(some.part(here), right.part(here), model, near).float()
    return out


def _accumulated(left: Factors, right: Factors, model: Alignment, near: bool) -> torch.Tensor:
    """One accumulator, from 0 on, over all columns; `near` as `_near` has it.

    Where products of a block have no bit below the last that is kept beside the largest that one could be, nor has the
    accumulator, the sum is exact, and a matmul. The rest are aligned one by one; or all are, where the rest are many or
    all terms of a block few, which takes the fewest steps.
    """
    height, columns = left.values.shape
    out = torch.zeros(height, right.values.shape[0], dtype=torch.float64, device=left.values.device)
    look = 0
    for start in range(0, columns, model.width):
        x, y = (factors.part(slice(start, start + model.width)) for factors in (left, right))
        parts = list(slabs(out.new_empty(1, 1).expand(height, out.shape[1] * x.values.shape[1])))
        cut = _may_cut(x, y, out, model) if len(parts) > 1 and start >= look else None
        if cut is not None and int(cut.sum()) > _MANY * cut.numel():
            cut, look = None, start + _LOOK * model.width
        if cut is None:
            largest = _largest(x, y, near=near)
            # Columns first: their sums are those of rows of memory.
            left_values, right_values = (factors.values.T.contiguous() for factors in (x, y))
            for rows in parts:
                products = left_values[:, rows].unsqueeze(2) * right_values.unsqueeze(1)
                out[rows] = _aligned(products, largest[rows], out[rows], model, dim=0)
            continue
        total = _cut((x.values @ y.values.T).add_(out), model)
        at = cut.nonzero()
        for some in slabs(out.new_empty(1, 1).expand(len(at), x.values.shape[1])):
            i, j = at[some].T
            products, powers = (
                each.index_select(0, i).mul_(other.index_select(0, j))
                for each, other in ((x.values, y.values), (x.powers, y.powers))
            )
            total[i, j] = _aligned(products, powers.amax(1), out[i, j], model, dim=1)
        out = total
    return out


def _may_cut(x: Factors, y: Factors, before: torch.Tensor, model: Alignment) -> torch.Tensor:
    """bool (M, N): a product of the block, or the accumulator `before`, may have bits that are cut off."""
    unit = torch.maximum(torch.outer(x.powers.amax(1), y.powers.amax(1)), _power(before))
    unit.mul_(2.0**-model.fraction).clamp_(min=_NOTHING)
    cut = (before / unit).frac_() != 0
    return cut.logical_or_(torch.outer(lowest_bit(x.values), lowest_bit(y.values)) < unit)


def _near(left: torch.Tensor, right: torch.Tensor, width: int) -> bool:
    """Whether the powers of all products of a block (M, W) by (N, W) are near enough for a matmul to compare them."""
    if width > _TERMS:
        return False
    return bool(_ratio(left, width) * _ratio(right, width) >= _RATIO)


def _ratio(powers: torch.Tensor, width: int) -> torch.Tensor:
    """The smallest power in a row of a block over the largest, 0 left out; a scalar."""
    least = [powers.new_ones(1)]
    for rows in slabs(powers):
        each = pad_columns(powers[rows], width).view(-1, width)
        most = each.amax(1, keepdim=True)
        least.append(each.where(each != 0, most).div_(most).nan_to_num_(nan=1.0).amin().view(1))
    return torch.cat(least).amin()


def _largest(x: Factors, y: Factors, *, near: bool) -> torch.Tensor:
    """The largest power of two of the products of a block (M, W) by (N, W): (M, N), 0 where there is none."""
    if not near:
        found = torch.zeros_like(torch.outer(x.powers[:, 0], y.powers[:, 0]))
        for left, right in zip(x.powers.T, y.powers.T, strict=True):
            torch.maximum(found, torch.outer(left, right), out=found)
        return found
    most = [powers.amax(1) for powers in (x.powers, y.powers)]
    left, right = (
        powers.div(each.unsqueeze(1)).nan_to_num_(nan=0.0).square_().square_().square_()
        for powers, each in zip((x.powers, y.powers), most, strict=True)
    )
    # The exponent of 2^(8g + 1) to 2^(8g + 8), and its bias, over 8 is g + 128; as an exponent that is g + 128 - 1023.
    sums = left.mul_(2.0) @ right.T
    exponents = (sums.view(torch.int64) >> (_FIELD + 3)).bitwise_left_shift_(_FIELD)
    return exponents.view(torch.float64).mul_(2.0 ** (_BIAS - 128)).mul_(torch.outer(*most))


def _aligned(
    products: torch.Tensor, largest: torch.Tensor, before: torch.Tensor, model: Alignment, *, dim: int
) -> torch.Tensor:
    """The accumulators `before` and products of a block, along `dim`, aligned, cut off and added; `products` are lost.

    `largest` is the largest product of powers of two of their factors.
    """
    unit = torch.maximum(largest, _power(before)).mul_(2.0**-model.fraction).clamp_(min=_NOTHING)
    terms = products.div_(unit.unsqueeze(dim), rounding_mode="trunc")
    return _cut(terms.sum(dim).add_((before / unit).trunc_()).mul_(unit), model)


def _accumulator(model: Alignment) -> int:
    """Bits behind the point that an accumulator keeps."""
    return min(model.fraction, ACCUMULATOR_BITS - 1)


def _power(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is not above |x|, float64; 0 of 0."""
    return (x.contiguous().view(torch.int64) & _EXPONENT).view(torch.float64)


def _cut(x: torch.Tensor, model: Alignment) -> torch.Tensor:
    """float64 numbers, cut off behind the bits that an accumulator keeps."""
    return (x.view(torch.int64) & ~((1 << (52 - _accumulator(model))) - 1)).view(torch.float64)
