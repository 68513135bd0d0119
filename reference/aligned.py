"""The sum of a tensor core, simulated bit for bit: products aligned to the largest of a block, truncated and added."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reference.blocks import slabs
from reference.exact import lowest_bit
from reference.formats import FP32, Format
from reference.operands import element_values, scale_values
from reference.quantized import Quantized
from reference.summation import ACCUMULATOR_BITS, FLT_MAX, SMALLEST, Alignment

_EXPONENT = 0x7FF << 52
# Of zeros; below every other unit.
_NOTHING = 2.0**-900
# The share of sums that are cut off from which on it is faster to align all of them than to pick those.
_MANY = 0.2


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
    for rows in slabs(out):
        some = left.rows(rows)
        for start in range(0, columns, whole):
            here = slice(start, start + whole)
            out[rows] += _accumulated(some.part(here), right.part(here), model).float()
    return out


def _accumulated(left: Factors, right: Factors, model: Alignment) -> torch.Tensor:
    """One accumulator, from 0 on, over all columns.

    Where products of a block have no bit below the last that is kept beside the largest that one could be, nor has the
    accumulator, the sum is exact, and a matmul. The rest are aligned one by one; or all are, where the rest are many or
    all terms of a block few, which takes the fewest steps.
    """
    height, columns = left.values.shape
    out = torch.zeros(height, right.values.shape[0], dtype=torch.float64, device=left.values.device)
    for start in range(0, columns, model.width):
        x, y = (factors.part(slice(start, start + model.width)) for factors in (left, right))
        parts = list(slabs(out.new_empty(1, 1).expand(height, out.shape[1] * x.values.shape[1])))
        cut = _may_cut(x, y, out, model) if len(parts) > 1 else None
        if cut is None or int(cut.sum()) > _MANY * cut.numel():
            for rows in parts:
                each = Factors(x.values[rows].unsqueeze(1), x.powers[rows].unsqueeze(1))
                out[rows] = _aligned(each, y, out[rows], model)
            continue
        total = _cut((x.values @ y.values.T).add_(out), model)
        at = cut.nonzero()
        for some in slabs(out.new_empty(1, 1).expand(len(at), x.values.shape[1])):
            i, j = at[some].T
            total[i, j] = _aligned(x.rows(i), y.rows(j), out[i, j], model)
        out = total
    return out


def _may_cut(x: Factors, y: Factors, before: torch.Tensor, model: Alignment) -> torch.Tensor:
    """bool (M, N): a product of the block, or the accumulator `before`, may have bits that are cut off."""
    unit = torch.maximum(torch.outer(x.powers.amax(1), y.powers.amax(1)), _power(before))
    unit.mul_(2.0**-model.fraction).clamp_(min=_NOTHING)
    cut = (before / unit).frac_() != 0
    return cut.logical_or_(torch.outer(lowest_bit(x.values), lowest_bit(y.values)) < unit)


def _aligned(x: Factors, y: Factors, before: torch.Tensor, model: Alignment) -> torch.Tensor:
    """The accumulators `before` and the products of a block, of factors (…, W), aligned, cut off and added."""
    largest = (x.powers * y.powers).amax(-1)
    unit = torch.maximum(largest, _power(before)).mul_(2.0**-model.fraction).clamp_(min=_NOTHING)
    terms = (x.values * y.values).div_(unit.unsqueeze(-1)).trunc_()
    return _cut(terms.sum(-1).add_((before / unit).trunc_()).mul_(unit), model)


def _accumulator(model: Alignment) -> int:
    """Bits behind the point that an accumulator keeps."""
    return min(model.fraction, ACCUMULATOR_BITS - 1)


def _power(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is not above |x|, float64; 0 of 0."""
    return (x.contiguous().view(torch.int64) & _EXPONENT).view(torch.float64)


def _cut(x: torch.Tensor, model: Alignment) -> torch.Tensor:
    """float64 numbers, cut off behind the bits that an accumulator keeps."""
    return (x.view(torch.int64) & ~((1 << (52 - _accumulator(model))) - 1)).view(torch.float64)
