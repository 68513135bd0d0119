"""The sum of a tensor core, simulated bit for bit: products aligned to the largest of a block, truncated and added."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.reference.gemm.operands import element_values, scale_values
from narrowgauge.reference.numbers.blocks import pad_columns, slabs
from narrowgauge.reference.numbers.exact import lowest_bit
from narrowgauge.spec.formats import FP32, Format
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import ACCUMULATOR_BITS, FLT_MAX, SMALLEST, Alignment

_EXPONENT = 0x7FF << 52
# Of zeros; below every other unit.
_NOTHING = 2.0**-900
# Blocks that are looked at together; and the share of sums that may be cut off, in all of them and in one, up to which
# it is faster to pick those than to look at each block, or to align all. Where it is not, the next so many times it is
# not either, as a rule.
_TOGETHER, _FEW, _MANY, _AGAIN = 8, 0.05, 0.1, 4
# A matmul finds the largest of so many powers of two, as in `reference.bounds.certificate`: the exponent of a sum of at
# most 2^6 8th powers over 8, rounded down, is that of the largest. No 8th power of a ratio of this is subnormal.
_TERMS, _RATIO = 1 << 6, 2.0**-124
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

    Source: docs/tolerance.md#declared-order. An H200 showed what it leaves open: exponents of
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
    within = (kept >= SMALLEST) & (magnitude <= FLT_MAX)
    return within.logical_and_(_kept(magnitude, largest, kept, model))


def _kept(reach: torch.Tensor, largest: torch.Tensor, unit: torch.Tensor, model: Alignment) -> torch.Tensor:
    """bool (M, N): no bit is cut off of multiples of `unit`: of sums up to `reach`, of products of powers `largest`."""
    fits = reach <= unit * 2.0 ** (1 + _accumulator(model))
    return fits.logical_and_(torch.maximum(reach, largest) <= unit * 2.0**model.fraction)


@dataclass
class _Blocks:
    """An operand (M, K) in blocks of W columns."""

    factors: Factors
    width: int
    columns: torch.Tensor
    """Its values, columns first: (K, M), so that sums over columns are sums of rows of memory."""
    most: torch.Tensor
    """The largest power of each block, (M, B); 0 where all are 0."""
    least: torch.Tensor
    """The lowest bit of each block, (M, B); infinity where all are 0."""
    eighths: torch.Tensor
    """Twice the 8th powers of the powers over the largest of their block, (M, K)."""
    least_ratio: torch.Tensor
    """The smallest of the powers over the largest of their block, 0 left out; a scalar."""

    @classmethod
    def of(cls, factors: Factors, width: int) -> _Blocks:
        """The blocks of an operand."""
        height, columns = factors.values.shape
        values, powers = (pad_columns(x, width).view(height, -1, width) for x in (factors.values, factors.powers))
        most = powers.amax(2)
        ratios = (powers / most.unsqueeze(2)).nan_to_num_(nan=0.0)
        least_ratio = ratios.where(ratios != 0, 1.0).amin()
        eighths = ratios.square_().square_().square_().mul_(2.0).view(height, -1)[:, :columns]
        return cls(factors, width, factors.values.T.contiguous(), most, lowest_bit(values), eighths, least_ratio)

    def rows(self, rows: slice) -> _Blocks:
        """Some rows."""
        some = self.most[rows], self.least[rows], self.eighths[rows]
        return _Blocks(self.factors.rows(rows), self.width, self.columns[:, rows], *some, self.least_ratio)

    def product(self, other: _Blocks, columns: slice) -> torch.Tensor:
        """The product of some columns with those of (N, K): (M, N)."""
        return self.factors.values[:, columns] @ other.factors.values[:, columns].T


def _promoted(left: Factors, right: Factors, model: Alignment) -> torch.Tensor:
    """The sum of the accumulators, float32 (M, N)."""
    columns = left.values.shape[1]
    out = torch.zeros(left.values.shape[0], right.values.shape[0], device=left.values.device)
    if columns == 0:
        return out
    whole = model.promoted or columns
    x, y = _Blocks.of(left, model.width), _Blocks.of(right, model.width)
    near = _near(x, y)
    for rows in slabs(out):
        some = x.rows(rows)
        for start in range(0, columns, whole):
            out[rows] += _accumulated(some, y, slice(start, min(start + whole, columns)), model, near=near).float()
    return out


def _accumulated(x: _Blocks, y: _Blocks, columns: slice, model: Alignment, *, near: bool) -> torch.Tensor:
    """One accumulator, from 0 on, over some columns; `near` as of `_largest`.

    Where no bit can be cut off in some blocks, or in one, the sum is a matmul. The rest of the sums are aligned one by
    one; or all are, where the rest are many or all terms of a block few, which takes the fewest steps.
    """
    out = torch.zeros(x.most.shape[0], y.most.shape[0], dtype=torch.float64, device=x.most.device)
    unit = torch.full_like(out, torch.inf)
    small = len(list(slabs(_terms(out, model)))) == 1
    step = _TOGETHER * model.width
    known = look = columns.start
    for start in range(columns.start, columns.stop, step):
        some = slice(start, min(start + step, columns.stop))
        blocks = [slice(at, min(at + model.width, some.stop)) for at in range(start, some.stop, model.width)]
        if start >= look:
            cut = _may_round(x, y, some, slice(known, some.stop), out, unit, model)
            known = some.stop
            if int(cut.sum()) <= _FEW * cut.numel():
                out = _picked(x, y, blocks, cut, out, x.product(y, some).add_(out), model)
                continue
            look = start + _AGAIN * step
        for here in blocks:
            picked = None if small else _may_cut(x, y, here, out, model)
            if picked is None or int(picked.sum()) > _MANY * picked.numel():
                _align(x, y, here, out, model, near=near)
            else:
                out = _picked(x, y, [here], picked, out, _cut(x.product(y, here).add_(out), model), model)
    return out


def _terms(sums: torch.Tensor, model: Alignment) -> torch.Tensor:
    """Something of the size of a block's products for the rows of `sums`, without memory."""
    return sums.new_empty(1, 1).expand(sums.shape[0], sums.shape[1] * model.width)


def _may_round(
    x: _Blocks, y: _Blocks, columns: slice, new: slice, before: torch.Tensor, unit: torch.Tensor, model: Alignment
) -> torch.Tensor:
    """bool (M, N): a product of some blocks, or any sum of them and `before`, may have bits that are cut off.

    They are at most the sum of magnitudes, and multiples of `unit`, which divides what came before the columns `new`,
    and becomes that of both.
    """
    some, others = (slice(part.start // x.width, -(-part.stop // x.width)) for part in (columns, new))
    torch.minimum(unit, torch.outer(x.least[:, others].amin(1), y.least[:, others].amin(1)), out=unit)
    left, right = (side.factors.values[:, columns].abs() for side in (x, y))
    reach = (left @ right.T).add_(before.abs()).mul_(1 + 2.0**-20)
    largest = torch.outer(x.most[:, some].amax(1), y.most[:, some].amax(1))
    return _kept(reach, largest, unit, model).logical_not_()


def _may_cut(x: _Blocks, y: _Blocks, here: slice, before: torch.Tensor, model: Alignment) -> torch.Tensor:
    """bool (M, N): a product of a block, or the accumulator `before`, may have bits that are cut off."""
    number = here.start // x.width
    unit = torch.maximum(torch.outer(x.most[:, number], y.most[:, number]), _power(before))
    unit.mul_(2.0**-model.fraction).clamp_(min=_NOTHING)
    cut = (before / unit).frac_() != 0
    return cut.logical_or_(torch.outer(x.least[:, number], y.least[:, number]) < unit)


def _align(x: _Blocks, y: _Blocks, here: slice, out: torch.Tensor, model: Alignment, *, near: bool) -> None:
    """Adds a block, columns `here`, to the accumulators `out` (M, N)."""
    largest = _largest(x, y, here, near=near)
    for rows in slabs(_terms(out, model)):
        products = x.columns[here, rows].unsqueeze(2) * y.columns[here].unsqueeze(1)
        out[rows] = _aligned(products, largest[rows], out[rows], model, dim=0)


def _picked(
    x: _Blocks,
    y: _Blocks,
    blocks: list[slice],
    cut: torch.Tensor,
    before: torch.Tensor,
    out: torch.Tensor,
    model: Alignment,
) -> torch.Tensor:
    """`out` (M, N), where `cut` the accumulators `before` and some blocks, aligned."""
    at = cut.nonzero()
    for some in slabs(_terms(at[:, :1], model)):
        i, j = at[some].T
        sums = before[i, j]
        for here in blocks:
            left, right = x.factors.part(here), y.factors.part(here)
            products = left.values.index_select(0, i).mul_(right.values.index_select(0, j))
            powers = left.powers.index_select(0, i).mul_(right.powers.index_select(0, j))
            sums = _aligned(products, powers.amax(1), sums, model, dim=1)
        out[i, j] = sums
    return out


def _near(x: _Blocks, y: _Blocks) -> bool:
    """Whether the powers of products of each block are near enough for a matmul to find the largest."""
    return x.width <= _TERMS and bool(x.least_ratio * y.least_ratio >= _RATIO)


def _largest(x: _Blocks, y: _Blocks, here: slice, *, near: bool) -> torch.Tensor:
    """The largest power of two of the products of a block, columns `here`: (M, N), 0 where all are 0.

    `near`: what `_near` says.
    """
    if not near:
        powers = x.factors.powers[:, here], y.factors.powers[:, here]
        found = torch.zeros(x.most.shape[0], y.most.shape[0], dtype=torch.float64, device=x.most.device)
        for left, right in zip(*(side.T for side in powers), strict=True):
            torch.maximum(found, torch.outer(left, right), out=found)
        return found
    # An exponent g becomes 8g, of a sum at most 8g + 6, which with its bias and a factor of 4 is 8(g + 128) + 1 to 7;
    # over 8, rounded down, g + 128, which as an exponent with its bias is g + 128 - 1023.
    sums = x.eighths[:, here] @ y.eighths[:, here].T
    exponents = (sums.view(torch.int64) >> (_FIELD + 3)).bitwise_left_shift_(_FIELD)
    number = here.start // x.width
    most = torch.outer(x.most[:, number], y.most[:, number])
    return exponents.view(torch.float64).mul_(2.0 ** (_BIAS - 128)).mul_(most)


def _aligned(
    products: torch.Tensor, largest: torch.Tensor, before: torch.Tensor, model: Alignment, *, dim: int
) -> torch.Tensor:
    """The accumulators `before` and products of a block, along `dim`, aligned, cut off and added; `products` are lost.

    `largest` is the largest product of powers of two of their factors.
    """
    unit = torch.maximum(largest, _power(before)).mul_(2.0**-model.fraction).clamp_(min=_NOTHING)
    terms = products.div_(unit.unsqueeze(dim), rounding_mode="trunc").sum(dim)
    return _cut(terms.add_(before.div(unit, rounding_mode="trunc")).mul_(unit), model)


def _accumulator(model: Alignment) -> int:
    """Bits behind the point that an accumulator keeps."""
    return min(model.fraction, ACCUMULATOR_BITS - 1)


def _power(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is not above |x|, float64; 0 of 0."""
    return (x.contiguous().view(torch.int64) & _EXPONENT).view(torch.float64)


def _cut(x: torch.Tensor, model: Alignment) -> torch.Tensor:
    """float64 numbers, cut off behind the bits that an accumulator keeps."""
    return (x.view(torch.int64) & ~((1 << (52 - _accumulator(model))) - 1)).view(torch.float64)
