"""`tensor_core_sum` by matrix products for sums that lose no bits, and step by step for the remaining sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from narrowgauge.reference.gemm.split_k import SplitK
from narrowgauge.reference.gemm.tensor_core import (
    SMALLEST_ALIGNMENT,
    Factors,
    accumulator_fraction_bits,
    add_aligned,
    power_of_two,
    truncate_to_accumulator,
)
from narrowgauge.reference.numbers.blocks import pad_columns, split_columns
from narrowgauge.reference.numbers.exact import lowest_bit
from narrowgauge.reference.numbers.slabs import slabs
from narrowgauge.spec.summation import FLT_MAX, SMALLEST_SUBNORMAL, Alignment

# Blocks of W columns that are checked together for lost bits.
_CHECKED_BLOCKS = 8
# Largest share of sums with lost bits, in the checked blocks and in a single block, up to which only these sums are
# aligned. For a larger share all sums are aligned.
_FEW, _MANY = 0.05, 0.1
# After a group with a larger share in every block, these many groups are aligned unchecked: their share is large as
# well, as a rule.
_SKIPPED_CHECKS = 32
# Many sums are aligned in float32 if this gives the same bits: factors have at most 12 bits and a magnitude from 2^-40
# to 2^40, so no last bit and no sum is subnormal or infinite; a sum of aligned products has at most 24 bits.
_FLOAT32_FACTOR_BITS, _FLOAT32_FACTORS, _FLOAT32_SUM_BITS = 12, 2.0**40, 24
_FLOAT32_SMALLEST_ALIGNMENT = 2.0**-120
# In float32, sums are aligned for a quarter of a slab at a time, and products for two slabs: they stay in a cache.
_FLOAT32_TENSORS, _PRODUCT_SLABS = 4, 2
# A sum of at most 2^6 eighth powers of powers of two has eight times the exponent of the largest power of two, if the
# quotient is rounded down; so a matrix product finds the largest power. The eighth power of the ratio is not subnormal.
_MATMUL_TERMS, _SMALLEST_RATIO = 1 << 6, 2.0**-124
_EXPONENT_SHIFT, _EXPONENT_BIAS = 52, 1023
# The same in float32: at most 2^5 terms. Each eighth power is multiplied by 2^61, so no product is subnormal.
_FLOAT32_TERMS, _FLOAT32_RATIO, _FLOAT32_EIGHTH = 1 << 5, 2.0**-30, 2.0**61
_FLOAT32_SHIFT, _FLOAT32_EXPONENT_MASK = 23, 0xFF << 23


def fast_tensor_core_sum(
    left: Factors, right: Factors, model: Alignment, exact: torch.Tensor | None, *, split: SplitK | None = None
) -> torch.Tensor:
    """The result of `tensor_core_sum` with the same arguments, bit for bit.

    exact: None if all sums are finite; then it is computed only if a sum may be exact.
    """
    if model.decoded:
        left, right = left.decoded(), right.decoded()
    split, height = split or SplitK(), len(left.values)
    if split.dtype is torch.float32:
        rows = (~_never_truncated(left, right, model)).any(1).nonzero().squeeze(1)
    else:  # exact sums of slices may round
        rows = torch.arange(height, device=left.values.device)
    if exact is None and len(rows) < height:
        exact = left.values @ right.values.T
    out = torch.empty(height, len(right.values), device=left.values.device) if exact is None else exact.float()
    if len(rows):
        out[rows] = _sum_of_slices(left.rows(rows) if len(rows) < len(out) else left, right, model, split)
    sums = out.add_(0.0).double()  # + 0 makes a sum of zeros +0
    return sums if exact is None else sums.where(exact.isfinite(), exact)


class FewOutputs:
    """Sums of a few outputs in many orders of a tensor core. All accumulators of an order take a step at once."""

    def __init__(self, left: Factors, right: Factors, model: Alignment) -> None:
        """(M, K) and (N, K). `model.promoted` is ignored."""
        self.left, self.right = (side.decoded() if model.decoded else side for side in (left, right))
        self.model = model
        self.columns = left.values.shape[1]
        self._accumulators: dict[int, torch.Tensor] = {}

    def sums(self, slices: int, promoted: int | None) -> torch.Tensor:
        """The result of `tensor_core_sum` for finite sums, float32 (M, N)."""
        parts = list(split_columns(self.columns, promoted or self.model.width, slices))
        length = promoted or parts[0].stop
        total = torch.zeros(len(self.left.values), len(self.right.values), device=self.left.values.device)
        for part in parts:
            first, *others = self._of_chunks(length)[:, :, part.start // length : -(-part.stop // length)].unbind(2)
            for other in others:
                first = first + other
            total += first
        return total

    def _of_chunks(self, length: int) -> torch.Tensor:
        """The accumulators of chunks of `length` columns, float32 (M, N, chunks)."""
        if length not in self._accumulators:
            width = self.model.width
            steps = -(-length // width)
            sides = [
                pad_columns(x, steps * width).view(len(x), -1, steps, width)
                for side in (self.left, self.right)
                for x in (side.values, side.powers)
            ]
            x, left_powers, y, right_powers = sides
            accumulator = x.new_zeros(len(x), len(y), x.shape[1])
            for number in range(steps):
                products = x[:, None, :, number] * y[:, :, number]
                largest = (left_powers[:, None, :, number] * right_powers[:, :, number]).amax(3)
                accumulator = add_aligned(products, largest, accumulator, self.model, dim=3)
            self._accumulators[length] = accumulator.float()
        return self._accumulators[length]


def _never_truncated(left: Factors, right: Factors, model: Alignment) -> torch.Tensor:
    """bool (M, N): the simulated sum is the exact sum, because no step truncates a bit.

    Every product and partial sum is a multiple of a power of two, the quantum. The quantum is at least the last bit of
    the alignment to the largest product or sum, and no sum has more bits than the accumulator.
    """
    bits = lowest_bit(left.values), lowest_bit(right.values)
    if left.values.numel() and right.values.numel():
        shares = (side.powers.amax(1) / bit for side, bit in zip((left, right), bits, strict=True))
        if math.prod(float(share.amin()) for share in shares) > 2.0**model.fraction:  # all alignments lose a bit
            return torch.zeros(left.values.shape[0], right.values.shape[0], device=bits[0].device).bool()
    quantum = torch.outer(*bits)
    magnitude = (left.values.abs() @ right.values.abs().T).mul_(1 + 2.0**-20)
    largest = torch.outer(left.powers.amax(1), right.powers.amax(1)) if left.values.shape[1] else magnitude
    in_float32 = (quantum >= SMALLEST_SUBNORMAL) & (magnitude <= FLT_MAX)
    return in_float32.logical_and_(_fits(magnitude, largest, quantum, model))


def _fits(magnitude: torch.Tensor, largest: torch.Tensor, quantum: torch.Tensor, model: Alignment) -> torch.Tensor:
    """bool (M, N): sums up to `magnitude` of products up to `largest`, all multiples of `quantum`, lose no bit."""
    fits = magnitude <= quantum * 2.0 ** (1 + accumulator_fraction_bits(model))
    return fits.logical_and_(torch.maximum(magnitude, largest) <= quantum * 2.0**model.fraction)


@dataclass
class _BlockedFactors:
    """An operand (M, K) in blocks of W columns, with the range of each block."""

    factors: Factors
    width: int
    transposed: torch.Tensor
    """Values (K, M), contiguous: a product of columns is then a product of rows in memory."""
    largest_power: torch.Tensor
    """The largest power of each block, (M, B); 0 if all values are 0."""
    lowest_bit: torch.Tensor
    """The lowest bit of each block, (M, B); infinity if all values are 0."""
    eighth_powers: torch.Tensor
    """Twice the eighth powers of the ratios of powers to the largest power of their block, (M, K)."""
    smallest_ratio: torch.Tensor
    """The smallest nonzero ratio of a power to the largest power of its block; a scalar."""

    @classmethod
    def of(cls, factors: Factors, width: int) -> _BlockedFactors:
        height, columns = factors.values.shape
        values, powers = (pad_columns(x, width).view(height, -1, width) for x in (factors.values, factors.powers))
        largest_power = powers.amax(2)
        ratios = (powers / largest_power.unsqueeze(2)).nan_to_num_(nan=0.0)
        smallest_ratio = ratios.where(ratios != 0, 1.0).amin()
        eighth_powers = ratios.square_().square_().square_().mul_(2.0).view(height, -1)[:, :columns]
        transposed = factors.values.T.contiguous()
        return cls(factors, width, transposed, largest_power, lowest_bit(values), eighth_powers, smallest_ratio)

    def rows(self, rows: slice) -> _BlockedFactors:
        ranges = self.largest_power[rows], self.lowest_bit[rows], self.eighth_powers[rows]
        return _BlockedFactors(
            self.factors.rows(rows), self.width, self.transposed[:, rows], *ranges, self.smallest_ratio
        )

    def product(self, right: _BlockedFactors, columns: slice) -> torch.Tensor:
        """The exact product of the columns with the columns of `right` (N, K): (M, N)."""
        return self.factors.values[:, columns] @ right.factors.values[:, columns].T


def _sum_of_slices(left: Factors, right: Factors, model: Alignment, split: SplitK) -> torch.Tensor:
    """The sum of the slices of K, float32 (M, N)."""
    columns = left.values.shape[1]
    out = torch.zeros(left.values.shape[0], right.values.shape[0], device=left.values.device)
    if columns == 0:
        return out
    x, y = _BlockedFactors.of(left, model.width), _BlockedFactors.of(right, model.width)
    by_matmul = _matmul_finds_largest(x, y)
    state = _State(by_matmul, slice(0))
    if _aligned_in_float32(x, y, model):
        state.float32 = _Float32Factors.of(x), _Float32Factors.of(y)
    for rows in slabs(out):
        part, state.rows = x.rows(rows), rows
        slices = split.columns(columns, model.promoted or model.width)
        out[rows] = split.joined([_promoted_accumulators(part, y, one, model, state) for one in slices])
    return out


@dataclass
class _Float32Factors:
    """The parts of `_BlockedFactors` for `_align_in_float32`, float32."""

    transposed: torch.Tensor
    largest_power: torch.Tensor
    """(B, M), contiguous: a factor with large strides makes a product ten times slower on a CPU."""
    eighth_powers: torch.Tensor
    """Eighth powers of the ratios, times 2^61: (K, M), contiguous."""

    @classmethod
    def of(cls, x: _BlockedFactors) -> _Float32Factors:
        eighth_powers = x.eighth_powers.T.mul(_FLOAT32_EIGHTH / 2).float()
        return cls(x.transposed.float(), x.largest_power.T.float().contiguous(), eighth_powers.contiguous())


def _aligned_in_float32(x: _BlockedFactors, y: _BlockedFactors, model: Alignment) -> bool:
    """Whether `_align_in_float32` gives the sums of these operands."""
    if model.width > _FLOAT32_TERMS or model.fraction + 2 + math.ceil(math.log2(model.width + 1)) > _FLOAT32_SUM_BITS:
        return False
    if bool(x.smallest_ratio * y.smallest_ratio < _FLOAT32_RATIO):
        return False
    for side in (x, y):
        magnitudes = side.factors.values.abs()
        in_range = (magnitudes >= 1 / _FLOAT32_FACTORS) & (magnitudes <= _FLOAT32_FACTORS)
        bits = magnitudes.view(torch.int64) & ((1 << (53 - _FLOAT32_FACTOR_BITS)) - 1)
        if not bool((in_range & (bits == 0) | (magnitudes == 0)).all()):
            return False
    return True


@dataclass
class _State:
    """State that is passed from an accumulator to the next one."""

    by_matmul: bool
    """The result of `_matmul_finds_largest`."""
    rows: slice
    """The rows of the left operand that are summed."""
    unchecked: int = 0
    """The number of groups that are aligned next without a check."""
    float32: tuple[_Float32Factors, _Float32Factors] | None = None
    """All rows of both operands, if their products are aligned in float32."""


def _promoted_accumulators(
    x: _BlockedFactors, y: _BlockedFactors, columns: slice, model: Alignment, state: _State
) -> torch.Tensor:
    """The sum of the accumulators of a slice of K, float32 (M, N)."""
    length = model.promoted or columns.stop - columns.start
    out = torch.zeros(x.largest_power.shape[0], y.largest_power.shape[0], device=x.largest_power.device)
    for start in range(columns.start, columns.stop, length):
        chunk = slice(start, min(start + length, columns.stop))
        out += _accumulator(x, y, chunk, model, state).float()
    return out


def _accumulator(
    x: _BlockedFactors, y: _BlockedFactors, columns: slice, model: Alignment, state: _State
) -> torch.Tensor:
    """A single accumulator, from 0, over some columns.

    Sums without lost bits, in some blocks or in a single block, are a matrix product. The remaining sums are aligned
    step by step. If the remaining sums are many, or the outputs are few, all sums are aligned: this takes the fewest
    operations.
    """
    out = torch.zeros(
        x.largest_power.shape[0], y.largest_power.shape[0], dtype=torch.float64, device=x.largest_power.device
    )
    quantum = torch.full_like(out, torch.inf)
    few_outputs = len(list(slabs(_product_shape(out, model)))) == 1
    step = _CHECKED_BLOCKS * model.width
    checked = columns.start
    for start in range(columns.start, columns.stop, step):
        group = slice(start, min(start + step, columns.stop))
        blocks = [slice(at, min(at + model.width, group.stop)) for at in range(start, group.stop, model.width)]
        if state.unchecked > 0:
            state.unchecked -= 1
            _align_all(x, y, blocks, out, model, state)
            continue
        truncated = _group_may_truncate(x, y, group, slice(checked, group.stop), out, quantum, model)
        checked = group.stop
        if int(truncated.sum()) <= _FEW * truncated.numel():
            out = _align_selected(x, y, blocks, truncated, out, x.product(y, group).add_(out), model)
            continue
        whole = 0
        for block in blocks:
            selected = None if few_outputs else _block_may_truncate(x, y, block, out, model)
            if selected is None or int(selected.sum()) > _MANY * selected.numel():
                _align_all(x, y, [block], out, model, state)
                whole += 1
            else:
                exact = truncate_to_accumulator(x.product(y, block).add_(out), model)
                out = _align_selected(x, y, [block], selected, out, exact, model)
        if whole == len(blocks):
            state.unchecked = _SKIPPED_CHECKS
    return out


def _product_shape(sums: torch.Tensor, model: Alignment) -> torch.Tensor:
    """A tensor without memory with a row of N·W numbers per output row, the size of the products of a block."""
    return sums.new_empty(1, 1).expand(sums.shape[0], sums.shape[1] * model.width)


def _group_may_truncate(
    x: _BlockedFactors,
    y: _BlockedFactors,
    columns: slice,
    new: slice,
    before: torch.Tensor,
    quantum: torch.Tensor,
    model: Alignment,
) -> torch.Tensor:
    """bool (M, N): a product of `columns`, or a partial sum of `before` and these products, may lose bits.

    `quantum` divides the products before the columns `new`, and is updated in place to divide the new products too.
    """
    blocks, new_blocks = (slice(part.start // x.width, -(-part.stop // x.width)) for part in (columns, new))
    new_bits = torch.outer(x.lowest_bit[:, new_blocks].amin(1), y.lowest_bit[:, new_blocks].amin(1))
    torch.minimum(quantum, new_bits, out=quantum)
    left, right = (side.factors.values[:, columns].abs() for side in (x, y))
    magnitude = (left @ right.T).add_(before.abs()).mul_(1 + 2.0**-20)
    largest = torch.outer(x.largest_power[:, blocks].amax(1), y.largest_power[:, blocks].amax(1))
    return _fits(magnitude, largest, quantum, model).logical_not_()


def _block_may_truncate(
    x: _BlockedFactors, y: _BlockedFactors, block: slice, before: torch.Tensor, model: Alignment
) -> torch.Tensor:
    """bool (M, N): a product of the block, or the accumulator `before`, may lose bits by its alignment."""
    number = block.start // x.width
    last_bit = torch.outer(x.largest_power[:, number], y.largest_power[:, number])
    last_bit = torch.maximum(last_bit, power_of_two(before))
    last_bit.mul_(2.0**-model.fraction).clamp_(min=SMALLEST_ALIGNMENT)
    truncated = (before / last_bit).frac_() != 0
    return truncated.logical_or_(torch.outer(x.lowest_bit[:, number], y.lowest_bit[:, number]) < last_bit)


def _align_all(
    x: _BlockedFactors, y: _BlockedFactors, blocks: list[slice], out: torch.Tensor, model: Alignment, state: _State
) -> None:
    """Adds the columns of `blocks` to the accumulators `out` (M, N), in place."""
    if state.float32 is not None:
        _align_in_float32(*state.float32, state.rows, blocks, out, model)
        return
    for block in blocks:
        largest = _largest_products(x, y, block, by_matmul=state.by_matmul)
        for rows in slabs(_product_shape(out, model)):
            products = x.transposed[block, rows].unsqueeze(2) * y.transposed[block].unsqueeze(1)
            out[rows] = add_aligned(products, largest[rows], out[rows], model, dim=0)


def _align_in_float32(
    x: _Float32Factors, y: _Float32Factors, rows: slice, blocks: list[slice], out: torch.Tensor, model: Alignment
) -> None:
    """Adds the columns of `blocks` to the accumulators `out` of some rows of `x`, in place, as `add_aligned` does.

    A product is written, divided and truncated, and added: three passes over products that are in a cache.
    """
    mask = -1 << (_FLOAT32_SHIFT - accumulator_fraction_bits(model))
    products = ones = x.transposed.new_empty(0)
    by_matmul = _sums_by_matmul(out.device)
    for part in slabs(out.new_empty(1, 1).expand(out.shape[0], out.shape[1] * _FLOAT32_TENSORS)):
        here = slice(rows.start + part.start, rows.start + part.stop)
        total = out[part].float()
        sums = torch.empty_like(total)
        for block in blocks:
            last_bit = (total.view(torch.int32) & _FLOAT32_EXPONENT_MASK).view(torch.float32)
            torch.maximum(last_bit, _largest_in_float32(x, y, here, block, model.width), out=last_bit)
            last_bit.mul_(2.0**-model.fraction).clamp_(min=_FLOAT32_SMALLEST_ALIGNMENT)
            left, right = x.transposed[block, here].unsqueeze(2), y.transposed[block].unsqueeze(1)
            for few in slabs(_product_shape(total[:, ::_PRODUCT_SLABS], model)):
                shape = left.shape[0], few.stop - few.start, total.shape[1]
                if products.shape != shape:
                    products, ones = products.new_empty(shape), products.new_ones(1, shape[0])
                torch.mul(left[:, few], right, out=products)
                torch.div(products, last_bit[few], rounding_mode="trunc", out=products)
                if by_matmul:
                    torch.mm(ones, products.view(shape[0], -1), out=sums[few].view(1, -1))
                else:
                    torch.sum(products, 0, out=sums[few])
            total.div_(last_bit, rounding_mode="trunc").add_(sums).mul_(last_bit)
            total.view(torch.int32).bitwise_and_(mask)
        out[part] = total


def _sums_by_matmul(device: torch.device) -> bool:
    """Whether a float32 matrix product with ones sums integers below 2^24 exactly, and faster than `torch.sum`.

    True on a CPU, unless a setting of torch allows float32 matrix products to round their factors.
    """
    library = getattr(torch.backends.mkldnn, "matmul", None)
    rounding = getattr(library, "fp32_precision", "ieee") not in ("none", "ieee")
    return device.type == "cpu" and torch.get_float32_matmul_precision() == "highest" and not rounding


def _largest_in_float32(x: _Float32Factors, y: _Float32Factors, rows: slice, block: slice, width: int) -> torch.Tensor:
    """The largest product of powers of two in a block of columns, as `_largest_products` finds it by a matmul."""
    number = block.start // width
    left, right = x.largest_power[number, rows].unsqueeze(1), y.largest_power[number]
    # The exponent field of the sum is 127 + 122 + 8g to 127 + 122 + 8g + 5 for the largest exponent g; divided by 8 and
    # rounded down 31 + g, which as an exponent field means g − 96.
    sums = x.eighth_powers[block, rows].T @ y.eighth_powers[block]
    sums.view(torch.int32).bitwise_right_shift_(_FLOAT32_SHIFT + 3).bitwise_left_shift_(_FLOAT32_SHIFT)
    return sums.mul_(left * 2.0**96).mul_(right)


def _align_selected(
    x: _BlockedFactors,
    y: _BlockedFactors,
    blocks: list[slice],
    selected: torch.Tensor,
    before: torch.Tensor,
    out: torch.Tensor,
    model: Alignment,
) -> torch.Tensor:
    """`out` (M, N) with the `selected` outputs replaced by the accumulators `before` plus the aligned blocks."""
    at = selected.nonzero()
    for part in slabs(_product_shape(at[:, :1], model)):
        i, j = at[part].T
        sums = before[i, j]
        for block in blocks:
            left, right = x.factors.columns(block), y.factors.columns(block)
            products = left.values.index_select(0, i).mul_(right.values.index_select(0, j))
            powers = left.powers.index_select(0, i).mul_(right.powers.index_select(0, j))
            sums = add_aligned(products, powers.amax(1), sums, model, dim=1)
        out[i, j] = sums
    return out


def _matmul_finds_largest(x: _BlockedFactors, y: _BlockedFactors) -> bool:
    """Whether a matrix product of eighth powers finds the largest product of powers of every block."""
    return x.width <= _MATMUL_TERMS and bool(x.smallest_ratio * y.smallest_ratio >= _SMALLEST_RATIO)


def _largest_products(x: _BlockedFactors, y: _BlockedFactors, block: slice, *, by_matmul: bool) -> torch.Tensor:
    """The largest product of powers of two in the columns `block`: (M, N), 0 if all products are 0.

    `by_matmul`: the result of `_matmul_finds_largest`.
    """
    if not by_matmul:
        powers = x.factors.powers[:, block], y.factors.powers[:, block]
        largest = torch.zeros(
            x.largest_power.shape[0], y.largest_power.shape[0], dtype=torch.float64, device=x.largest_power.device
        )
        for left, right in zip(*(side.T for side in powers), strict=True):
            torch.maximum(largest, torch.outer(left, right), out=largest)
        return largest
    # Let g be the largest exponent. The eighth power has exponent 8g, the sum at most 8g + 6. With the bias and the
    # factor 4 the exponent field is 8(g + 128) + 1 to 8(g + 128) + 7. Divided by 8 and rounded down: g + 128, which as
    # an exponent field means g + 128 − 1023.
    sums = x.eighth_powers[:, block] @ y.eighth_powers[:, block].T
    exponents = (sums.view(torch.int64) >> (_EXPONENT_SHIFT + 3)).bitwise_left_shift_(_EXPONENT_SHIFT)
    number = block.start // x.width
    block_power = torch.outer(x.largest_power[:, number], y.largest_power[:, number])
    return exponents.view(torch.float64).mul_(2.0 ** (_EXPONENT_BIAS - 128)).mul_(block_power)
