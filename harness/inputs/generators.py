"""The input families: functions from random numbers to a matrix with rows quantized in blocks.

Every value is built exactly, or from one float32 rounding, and then rounded once to the case's dtype.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.spec.formats import E2M1, E4M3, E8M0, Format
from narrowgauge.spec.recipes import Recipe

WHOLE_BLOCK = 128
"""Columns of a block for families of blocks, if the tensor has a single scale."""

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
_QUIET_NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
_STRIDE = 61
"""Step from an element of a block to the next in the list of numbers beside rounding boundaries: a prime."""
_LATTICE = (-6.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Wanted:
    """The matrix to make: `rows` × `columns`, neither 0, quantized along its rows. `role` is x or w of the case."""

    draw: Draw
    rows: int
    columns: int
    dtype: torch.dtype
    role: str
    height: int = 1
    """Rows and columns of a block."""
    width: int = 16
    element: Format = E2M1
    two_levels: bool = True
    """Whether the scales of blocks are small numbers beside one of the tensor, as in NVFP4."""
    largest_scale: float = 448.0
    """Largest scale of a block, if `two_levels`."""
    whole: bool = False
    """Whether the tensor has one scale; blocks are then runs, filled by the family."""

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.rows, self.columns

    @property
    def blocks(self) -> tuple[int, int]:
        """(rows of blocks, blocks of a row), short last ones counted."""
        return -(-self.rows // self.height), -(-self.columns // self.width)

    def exponent(self, low: int, high: int, *, half: tuple[int, int]) -> int:
        """The exponent of the tensor, from low to high; for fp16, with its small range, within `half`."""
        first, last = half if self.dtype == torch.float16 else (low, high)
        return first + self.draw.index(last - first + 1)

    def spread(self, each: torch.Tensor) -> torch.Tensor:
        """A number a block (`blocks`) to the same number for each of its elements (`shape`)."""
        down, across = self.blocks
        wide = each.view(down, 1, across, 1).expand(-1, self.height, -1, self.width)
        return wide.reshape(down * self.height, across * self.width)[: self.rows, : self.columns]

    @property
    def exponents(self) -> tuple[int, int]:
        """The least and the greatest power of two of the dtype, subnormal numbers included."""
        limits = torch.finfo(self.dtype)
        return math.frexp(limits.smallest_normal * limits.eps)[1] - 1, math.frexp(limits.max)[1] - 1


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent, float32, exact: exponents of int32 from -126 to 127."""
    return (exponent.int() + 127).bitwise_left_shift_(23).view(torch.float32)


def _look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, index.reshape(-1)).view(index.shape)


def _grid(want: Wanted) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of rows of blocks, (rows, 1), and of blocks in a row, (1, blocks), int32."""
    rows, blocks = want.blocks
    return torch.arange(rows, dtype=torch.int32).unsqueeze(1), torch.arange(blocks, dtype=torch.int32).unsqueeze(0)


def _pin(want: Wanted, x: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """`x` with a random element of every block replaced by ±magnitude (`blocks`): the block's amax."""
    column = _inside(want.draw.below(want.width, *want.blocks), want.width, want.columns)
    place = column + torch.arange(0, want.columns, want.width)
    if want.height > 1:
        down = want.draw.below(want.height, *want.blocks)
        row = _inside(down.T.contiguous(), want.height, want.rows).T + torch.arange(0, want.rows, want.height).view(
            -1, 1
        )
    else:
        row = torch.arange(want.rows).view(-1, 1)
    pinned = (want.draw.signs(*want.blocks) * magnitude).to(x.dtype)
    x.view(-1)[(row * want.columns + place).flatten()] = pinned.flatten()
    return x


def _inside(place: torch.Tensor, width: int, extent: int) -> torch.Tensor:
    """Places below `width` in blocks along the last dimension, brought into a last block that is shorter."""
    last = extent - width * (place.shape[1] - 1)
    place[:, -1] = place[:, -1] * last // width
    return place


def _put(want: Wanted, x: torch.Tensor, value: float) -> torch.Tensor:
    """`x` with `value` at a random place."""
    x.view(-1)[want.draw.index(x.numel())] = value
    return x


def _normal(want: Wanted) -> torch.Tensor:
    return want.draw.normal(*want.shape, dtype=want.dtype)


def _uniform(want: Wanted) -> torch.Tensor:
    return want.draw.uniform(*want.shape)


def _outliers(want: Wanted) -> torch.Tensor:
    x = want.draw.normal(*want.shape)
    return torch.where(want.draw.one_in(64, *want.shape), x * 100, x)


def _tiles(want: Wanted) -> torch.Tensor:
    # 15 exponents. No two of blocks 1, 2, 4 … 64 rows apart, or 1 to 14 apart in a row, are the same.
    row, block = _grid(want)
    scale = power_of_two((7 * row + 2 * block + want.draw.index(15)) % 15 - 7)
    x = want.draw.normal(*want.shape).clamp_(-3.5, 3.5).mul_(want.spread(scale))
    return _pin(want, x, 4 * scale)


def _e2m1_ties(want: Wanted) -> torch.Tensor:
    # With a tensor amax of 6·2^j and block amaxes of 6·2^(j-m), every scale is 448·2^-m and every encode factor exactly
    # 2^(m-j): midpoints times 2^(j-m) are midpoints when the kernel looks at them. m = 15 is a subnormal scale.
    return _midpoints(want, E2M1, want.exponent(-40, 40, half=(3, 12)), 16)


def _ties(want: Wanted) -> torch.Tensor:
    # A block whose amax is the element's largest number times 2^j has a scale of exactly 2^j, of E8M0 or float32: its
    # midpoints times 2^j are midpoints when the kernel looks at them. fp16 has room only for exponents j with a
    # representable least midpoint, half of the least subnormal number.
    element = want.element
    last = 15 - (math.frexp(element.max)[1] - 1)
    first = element.bias + element.mantissa_bits - 24
    depth = 1 if want.whole else min(16, last - first + 1) if want.dtype == torch.float16 else 16
    return _midpoints(want, element, want.exponent(-40, 40, half=(first + depth - 1, last)), depth)


def _near_ties(want: Wanted) -> torch.Tensor:
    # An encode scale fl(max/amax) that is no power of two, and elements as near to a midpoint over it as the dtype can:
    # in fp32 the product is the midpoint, or beside it, and the last bit of the scale decides.
    exponent = want.exponent(-40, 40, half=(2, 14)) - _some_zero(want, 1 if want.whole else 3)
    amax = ((1.5 + 0.5 * want.draw.uniform(*want.blocks)) * power_of_two(exponent)).to(want.dtype).float()
    if want.whole:
        amax = amax.view(-1)[:1].expand(want.blocks)
    encode = torch.full_like(amax, want.element.max) / amax
    table = torch.tensor(midpoints(want.element))
    kind = want.draw.below(6 * len(table), *want.shape)
    x = _look_up(torch.stack([table, -table]).repeat(3, 1).view(-1), kind) / want.spread(encode)
    ulps = torch.where(x.to(want.dtype) == 0, 0, kind // (2 * len(table)) - 1)  # the least are 0 in fp16
    return _pin(want, _step(x.to(want.dtype), ulps), amax)


def midpoints(element: Format) -> tuple[float, ...]:
    """The numbers halfway between two nonnegative neighbours of a format, subnormal numbers included."""
    values = element.values[: element.max_code + 1]
    return tuple((one + other) / 2 for one, other in itertools.pairwise(values))


def _midpoints(want: Wanted, element: Format, top: int, depth: int) -> torch.Tensor:
    """Half midpoints, a quarter each an ulp above and below, times 2^(top - m) in each block, m below `depth`."""
    scale = power_of_two(top - _some_zero(want, depth))
    table = torch.tensor(midpoints(element))
    kind = want.draw.below(8 * len(table), *want.shape)
    signed = torch.stack([table, -table]).repeat(4, 1).view(-1)
    x = (_look_up(signed, kind) * want.spread(scale)).to(want.dtype)
    ulps = torch.tensor([-1, 0, 0, 1], dtype=torch.int32).repeat_interleave(2 * len(table))
    return _pin(want, _step(x, _look_up(ulps, kind)), element.max * scale)


def _boundaries(want: Wanted) -> torch.Tensor:
    # Block after block takes the next scale: every number of E4M3 up to the largest scale, under a tensor scale of a
    # power of two; or every power of two of the dtype. All scales taken, the next blocks go on with the next numbers.
    element, count = want.element, math.prod(want.blocks)
    if want.two_levels:
        top = 2.0 ** want.exponent(-40, 40, half=(-4, 4))
        scales = torch.tensor([value * top for value in E4M3.values[1:] if 0 < value <= want.largest_scale])
    else:
        lowest, highest = (end - (math.frexp(element.max)[1] - 1) for end in want.exponents)
        exponents = torch.arange(max(lowest, -E8M0.bias), highest + 1)
        scales = torch.ldexp(torch.ones(len(exponents)), exponents)
    start = want.draw.index(len(scales))
    # Blocks count down the columns of blocks, because the last column may have short blocks.
    number = torch.arange(count).view(want.blocks[::-1]).T.contiguous()
    number = torch.zeros_like(number) if want.whole else number
    scale = scales[(number + start) % len(scales)]
    if want.two_levels:
        _put(want, scale, float(scales[-1]))
    points = torch.tensor(element.values[: element.max_code + 1])
    middle = torch.tensor(midpoints(element))
    kinds = torch.cat([points, middle, middle, middle])
    ulps = torch.tensor([0, 0, -1, 1], dtype=torch.int32).repeat_interleave(
        torch.tensor([len(points), *3 * [len(middle)]])
    )
    inside = (torch.arange(want.rows) % want.height * want.width).view(-1, 1) + torch.arange(want.columns) % want.width
    size = want.height * want.width
    turn = number // len(scales)
    kind = (want.spread(turn) * size + inside) * _STRIDE % len(kinds)
    x = (kinds[kind] * want.spread(scale) * want.draw.signs(*want.shape)).to(want.dtype)
    # Above the largest number, a few rules take the next scale: in one turn of 13. A power of two would meet the same
    # numbers again: 16 turns of MXFP8 have 512 elements, and E4M3 505 numbers and midpoints beside each other.
    amax = (element.max * scale).to(want.dtype)
    amax = _step(amax, ((turn % 13 == 12) & (scale < scales[-1])).int())
    return _pin(want, _step(x, torch.where(x == 0, 0, ulps[kind])), amax.float())


def _some_zero(want: Wanted, limit: int) -> torch.Tensor:
    """A number in [0, limit) for every block, 0 for at least one of them."""
    numbers = want.draw.below(limit, *want.blocks)
    numbers.view(-1)[want.draw.index(numbers.numel())] = 0
    return numbers


def _step(x: torch.Tensor, ulps: torch.Tensor) -> torch.Tensor:
    """`x` moved by so many steps of its own dtype, away from zero where positive."""
    kind = _BITS[x.dtype]
    return (x.view(kind) + ulps.to(kind)).view(x.dtype)


def _e4m3_ties(want: Wanted) -> torch.Tensor:
    # 448·48.75/65 = 336 lies halfway between 320 and 352, at every power of two; the roundings of 2688/65 and of 1/6
    # decide. The other blocks lie as near to the odd ties t/2·2^n of E4M3 (t/28 of the tensor's amax) as the dtype can.
    top = want.exponent(-40, 40, half=(0, 9))
    amax = 65 * 2.0**top
    classic = 48.75 * power_of_two(top - want.draw.below(16, *want.blocks))
    odd = 17 + 2 * want.draw.below(8, *want.blocks)
    near = (65 * odd.double() / 28).float() * power_of_two(top - 1 - want.draw.below(16, *want.blocks))
    near = _step(near.to(want.dtype), want.draw.below(3, *want.blocks) - 1).float()
    magnitude = torch.where(want.draw.one_in(2, *want.blocks), classic, near)
    _put(want, magnitude, amax)
    x = (want.draw.uniform(*want.shape) * want.spread(magnitude)).to(want.dtype)
    return _pin(want, x, magnitude)


def _single(want: Wanted) -> torch.Tensor:
    magnitude = (1.5 + 0.5 * want.draw.uniform(*want.blocks)) * power_of_two(want.draw.below(8, *want.blocks) - 4)
    return _pin(want, torch.zeros(want.shape), magnitude)


def _low_rows(want: Wanted) -> torch.Tensor:
    # 10 and 21 have no common divisor: 21 rows have every exponent, and the first three have the ends and the middle.
    scale = power_of_two(8 - 10 * torch.arange(want.rows) % 21)
    return want.draw.normal(*want.shape).mul_(scale.unsqueeze(1))


def _low_columns(want: Wanted) -> torch.Tensor:
    scale = power_of_two(8 - 10 * torch.arange(want.columns) % 21)
    return want.draw.normal(*want.shape).mul_(scale)


def _exponents(want: Wanted) -> torch.Tensor:
    # Row after row every power of two of the dtype, from any of them on; each is the amax of its row.
    lowest, highest = want.exponents
    count = highest - lowest + 1
    exponent = lowest + (want.draw.index(count) + torch.arange(want.rows)) % count
    scale = torch.ldexp(torch.ones(want.rows, 1, dtype=torch.float64), exponent.unsqueeze(1))
    x = want.draw.uniform(*want.shape).mul(scale).to(want.dtype)
    place = want.draw.below(min(want.columns, 1 << 15), want.rows, 1).long()
    return x.scatter_(1, place, (want.draw.signs(want.rows, 1) * scale).to(want.dtype))


def _every_exponent(want: Wanted) -> torch.Tensor:
    # Block after block every exponent of the dtype, subnormal numbers included, with any mantissa; a single exponent if
    # the tensor has a single scale.
    lowest, highest = want.exponents
    count = highest - lowest + 1
    number = torch.zeros(1, dtype=torch.int64) if want.whole else torch.arange(math.prod(want.blocks))
    exponent = lowest + (want.draw.index(count) + number) % count
    bits, mantissa = _BITS[want.dtype], _MANTISSA[want.dtype]
    smallest = math.frexp(torch.finfo(want.dtype).smallest_normal)[1] - 1
    field = (exponent - smallest + 1).clamp_(min=0) << mantissa
    # Below the smallest normal number the leading bit belongs to the mantissa, and the bits behind are random.
    free = (mantissa + (exponent - smallest).clamp(max=0)).clamp_(min=0)
    leading = torch.where(exponent < smallest, 1 << free, 0)
    tail = want.draw.words(len(number)).long() & ((1 << free) - 1)
    amax = (field + leading + tail).to(bits).view(want.dtype)
    return _below(want, amax.expand(math.prod(want.blocks)).view(want.blocks))


def _scale_edges(want: Wanted) -> torch.Tensor:
    # The amax of a block is, up to an ulp, where some rule for the exponent of a scale of E8M0 takes a step: at a power
    # of two (ceil), at the largest number of the element (round up), at 1.75, where the element's mantissa rounds up to
    # 2 (1.9375 of E4M3), and at √2 times the largest number. A quarter of the blocks has the exponents at which scales
    # saturate or become subnormal.
    top = math.frexp(want.element.max)[0] * 2
    carry = 2 - 2.0 ** -(want.element.mantissa_bits + 1)
    near = torch.tensor(sorted({1.0, 1.5, 1.75, 1.875, 1.9375, top, carry, top / math.sqrt(2)}))
    lowest, highest = want.exponents
    lowest += _MANTISSA[want.dtype]  # a normal number
    number = torch.arange(math.prod(want.blocks)).view(want.blocks) + want.draw.index(3 * len(near))
    ends = torch.tensor([lowest, lowest + 1, -119, -118, -112, -111, highest - 1, highest])
    ends = ends[ends >= lowest].int()
    exponent = want.draw.below(highest - lowest + 1, *want.blocks) + lowest
    at_end = _look_up(ends, want.draw.below(len(ends), *want.blocks))
    exponent = torch.where(want.draw.one_in(4, *want.blocks), at_end, exponent)
    if want.whole:
        number, exponent = (first.view(-1)[:1].expand(want.blocks) for first in (number, exponent))
    edge = _look_up(near, number // 3 % len(near))
    magnitude = (edge.to(want.dtype).double() * power_of_two(exponent).double()).to(want.dtype)
    return _below(want, _step(magnitude, number % 3 - 1))


def _below(want: Wanted, magnitude: torch.Tensor) -> torch.Tensor:
    """Uniform numbers, the amax of every block being `magnitude` (`blocks`), of the case's dtype."""
    x = (want.draw.uniform(*want.shape) * want.spread(magnitude.float())).to(want.dtype)
    return _pin(want, x, magnitude.float())


def _normal_times(scale: float) -> Callable[[Wanted], torch.Tensor]:
    return lambda want: want.draw.normal(*want.shape).mul_(scale)


def _huge(want: Wanted) -> torch.Tensor:
    # 2^-6 takes the normal numbers below 2^-19 of the largest fp16, where scales round to 0.
    x = want.draw.normal(*want.shape).mul_(2.0**-6).to(want.dtype)
    return _put(want, x, torch.finfo(want.dtype).max * (1 - 2 * want.draw.index(2)))


def _subnormal(want: Wanted) -> torch.Tensor:
    kind, mantissa = _BITS[want.dtype], _MANTISSA[want.dtype]
    words = want.draw.words(*want.shape)
    shift = want.spread(want.draw.below(mantissa, *want.blocks))
    magnitude = (words & ((1 << mantissa) - 1)).bitwise_right_shift_(shift).to(kind)
    x = torch.where(words < 0, magnitude | torch.iinfo(kind).min, magnitude).view(want.dtype)
    limits = torch.finfo(want.dtype)
    return _put(want, x, limits.smallest_normal * (1 - limits.eps))


def _zeros(want: Wanted) -> torch.Tensor:
    return torch.zeros(want.shape)


def _zero_rows(want: Wanted) -> torch.Tensor:
    # Zeros fill a row of 16, the second of three bands of 16 rows (whole tiles), and every fourth block.
    row, block = _grid(want)
    band = row * want.height // max(16, want.height)
    zero = (row % 16 == 5) | (band % 3 == 1) | ((row + block) % 4 == 3)
    return torch.where(want.spread(zero), 0.0, want.draw.normal(*want.shape))


def _negative_zeros(want: Wanted) -> torch.Tensor:
    return torch.full(want.shape, -0.0)


def _nan(want: Wanted) -> torch.Tensor:
    kind = _BITS[want.dtype]
    x = want.draw.normal(*want.shape).to(want.dtype)
    bad = want.draw.one_in(256, *want.shape)
    bad[0, 0] = True
    rows, blocks = want.blocks
    if rows * blocks > 1:  # a whole block, unless it is the only one
        row, block = divmod(1 + want.draw.index(rows * blocks - 1), blocks)
        rows_of, columns_of = (slice(n * size, (n + 1) * size) for n, size in ((row, want.height), (block, want.width)))
        bad[rows_of, columns_of] = True
    # NaN of both signs: the code of a NaN has none.
    nan = torch.tensor([_QUIET_NAN[want.dtype], _QUIET_NAN[want.dtype] - 2 ** (8 * want.dtype.itemsize - 1)]).to(kind)
    return torch.where(bad, _look_up(nan, want.draw.below(2, *want.shape)), x.view(kind)).view(want.dtype)


def _inf(want: Wanted) -> torch.Tensor:
    x = want.draw.normal(*want.shape)
    # With an element in 512, no tile of FP8 would be finite.
    often = max(512, 2 * want.height * want.width)
    x = torch.where(want.draw.one_in(often, *want.shape), torch.copysign(torch.full_like(x, torch.inf), x), x)
    flat = x.view(-1)
    place = want.draw.index(flat.numel())
    flat[place] = torch.inf
    flat[place - flat.numel() // 2] = -torch.inf  # half the tensor away; the same place where there is only one
    return x


def _position(want: Wanted) -> torch.Tensor:
    return _nvfp4_position(want) if want.two_levels else _code_position(want)


def _rising(want: Wanted) -> torch.Tensor:
    # 1024 magnitudes from 1/16 on, so that an amax says which elements it has seen.
    count = want.rows * want.columns
    step = (torch.arange(count) * 1024 // count).view(want.shape)
    return want.draw.signs(*want.shape) * power_of_two(step // 128 - 4) * (1 + step % 128 / 128)


def _nvfp4_position(want: Wanted) -> torch.Tensor:
    # A block holds all 16 codes, turned by `turn`; its scale is one of the 113 largest of E4M3. The two are different
    # for any two blocks of a 128×128 tile, and the scales alone for blocks 1 to 112 rows or 1 to 8 columns apart. x and
    # w turn differently, or many of their products would be zero. The factors were found by trying all.
    row, block = _grid(want)
    scale_code = 0x7E - (5 * row + 17 * block) % 113
    scale = power_of_two((scale_code >> 3) - 7) * (1 + (scale_code & 7) / 8)
    turn = row + (5 if want.role == "x" else 8) * block
    code = (want.spread(turn) + torch.arange(7, 7 + want.columns, dtype=torch.int32)) & 15
    value = _look_up(torch.tensor(E2M1.values), code)
    # The first block has scale 448 and begins with a 6, so that the tensor's encode factor is a power of two.
    return value * want.spread(scale) * 2.0 ** (want.draw.index(4) - 8)


def _code_position(want: Wanted) -> torch.Tensor:
    # Row after row the element's finite codes in turn, with a different first code in every row; an element of a block,
    # at a moving place, is the largest number, which gives the intended power of two as the scale. Scales are different
    # for blocks 1 to 8 rows or columns apart.
    row, block = _grid(want)
    finite = torch.tensor([v for v in want.element.values if math.isfinite(v)])
    last = 15 - (math.frexp(want.element.max)[1] - 1)
    first = want.element.bias + want.element.mantissa_bits - 25
    count, lowest = (last - first + 1, first) if want.dtype == torch.float16 else (113, -56)
    while math.gcd(count, 5 * 17) > 1:
        count -= 1
    number = (torch.zeros_like(row) + torch.zeros_like(block)) if want.whole else 5 * row + 17 * block
    scale = power_of_two(number % count + lowest)
    turn = (37 if want.role == "x" else 41) * torch.arange(want.rows, dtype=torch.int32).unsqueeze(1)
    code = (turn + torch.arange(want.columns, dtype=torch.int32)) % len(finite)
    x = _look_up(finite, code) * want.spread(scale)
    place = _inside(((3 * row + 5 * block) % want.width).int(), want.width, want.columns)
    place = place + torch.arange(0, want.columns, want.width)
    down = _inside(((7 * row + block) % want.height).T.contiguous(), want.height, want.rows).T
    rows = down + torch.arange(0, want.rows, want.height).view(-1, 1)
    x.view(-1)[(rows * want.columns + place).flatten()] = (want.element.max * scale).flatten()
    return x


def _spread(want: Wanted) -> torch.Tensor:
    # Every second block on average has two largest elements of equal magnitude, which cancel in half of a rotation's
    # sums: the effect of the order of summation on the small elements is left.
    low, high = (-14, 10) if want.dtype == torch.float16 else (-30, 30)
    exponent = want.draw.below(high - low + 1, *want.shape) + low
    x = want.draw.normal(*want.shape).clamp_(-4, 4).mul_(power_of_two(exponent)).to(want.dtype)
    twins = want.draw.one_in(2, *want.blocks)
    for _ in range(2):
        pinned = _pin(want, x.clone(), torch.full(want.blocks, 4.0 * 2.0**high))
        x = torch.where(want.spread(twins), pinned, x)
    return x


def _lattice(want: Wanted) -> torch.Tensor:
    # Every block's largest element is the format's largest number over a power of two, 6 of E2M1 and 7 of E4M3, so that
    # scales are equal and integers have codes.
    peak = 4 * 2 * math.frexp(want.element.max)[0]
    x = _look_up(torch.tensor(_LATTICE), want.draw.below(len(_LATTICE), *want.shape))
    return _pin(want, x, torch.full(want.blocks, peak)).mul_(2.0 ** (want.draw.index(4) - 3))


def _rounding(want: Wanted) -> torch.Tensor:
    return want.draw.normal(*want.shape).mul_(want.spread(power_of_two(want.draw.below(13, *want.blocks) - 6)))


def _positive(want: Wanted) -> torch.Tensor:
    return want.draw.normal(*want.shape).abs_()


def _cancelling(want: Wanted) -> torch.Tensor:
    # x is [p, p] and w is [q, -q] with a few elements of the second q halved; whole blocks, so that both halves have
    # the same scales. The rest of K, less than two blocks, is small.
    x = _rounding(want)
    half = want.columns // (2 * want.width) * want.width
    first = x[:, :half]
    if want.role == "w":
        first = torch.where(want.draw.one_in(32, want.rows, half), 0.5, 1.0).mul_(first).neg_()
    x[:, half : 2 * half] = first
    x[:, 2 * half :] *= 2.0**-6
    return x


def _placed_amax(exponent: int, place: str) -> Callable[[Wanted], torch.Tensor]:
    """Numbers below 2^exponent, and at one place the amax of the tensor, 1.5 to 2 times as large.

    The amax of a block is alternately its first and its last element. An exponent that the dtype lacks becomes the
    nearest one; at the largest exponent, the amax is the largest number.
    """

    def make(want: Wanted) -> torch.Tensor:
        lowest, highest = want.exponents
        top = min(max(exponent, lowest + 1), highest)
        scale = math.ldexp(1.0, top - 1)
        x = want.draw.uniform(*want.shape).mul_(scale)
        row, block = _grid(want)
        first = block * want.width
        last = (first + want.width).clamp(max=want.columns) - 1
        column = torch.where((row + block) % 2 == 0, first, last)
        amax = want.draw.signs(*want.blocks) * (1.0 + 0.5 * want.draw.uniform(*want.blocks).abs()) * scale
        x.view(-1)[(row * want.height * want.columns + column).flatten().long()] = amax.flatten()
        x = x.to(want.dtype)
        largest = 2 * scale * (1.5 + want.draw.index(64) / 128)
        row_end = (want.rows // 2 + 1) * want.columns - 1
        at = {"first": 0, "row-end": row_end, "last": x.numel() - 1}[place]
        x.view(-1)[at] = torch.finfo(want.dtype).max if top == highest else largest
        return x

    return make


def _half_edges(want: Wanted) -> torch.Tensor:
    # Products with K >= 128 are ±(4094 + n/2)·16, n from 0 to 6, or half of that: 65504, numbers below the tie at
    # 65520, the tie, and numbers above it. p, 6 of E2M1 and 7 of E4M3, is the largest element. The last of each 16
    # elements is 1 in x, and in w at most 4; the remaining elements are p or 0.
    if want.columns < 128:
        return _lattice(want).mul_(64.0)
    peak = int(4 * 2 * math.frexp(want.element.max)[0])
    count = 4068 // peak**2
    column, row = torch.arange(want.columns), torch.arange(want.rows)
    slots = range(15, 128, 16)
    number = column - column // 16
    x = torch.where(number < count, peak, 0).float().repeat(want.rows, 1)
    x[:, 15::16] = 0.0
    if want.role == "x":
        x[:, slots] = 1.0
        return x * torch.where(row % 3 == 2, 2.0, 4.0).unsqueeze(1)
    rest = (4094 - count * peak**2) + (row % 7) / 2
    for place in slots:
        part = rest.clamp(max=4.0) if place == slots[-1] else rest.clamp(max=4.0).floor()
        x[:, place] = part
        rest = rest - part
    return x * torch.where(row // 7 % 2 == 1, -4.0, 4.0).unsqueeze(1)


def _ladder(want: Wanted) -> torch.Tensor:
    # 10 and 27 have no common divisor: 27 rows have every rung, and neighbours are far apart.
    first, step = (-18, 1) if want.dtype == torch.float16 else (-39, 3)
    scale = power_of_two(first + step * (10 * torch.arange(want.rows) % 27))
    return want.draw.normal(*want.shape).mul_(scale.unsqueeze(1))


def _negative(want: Wanted) -> torch.Tensor:
    return want.draw.normal(*want.shape).abs_().neg_()


def _offset(want: Wanted) -> torch.Tensor:
    row = torch.arange(want.rows).unsqueeze(1)
    mean = power_of_two(3 + row % 4) * torch.where(row // 4 % 2 == 1, -1.0, 1.0)
    return want.draw.normal(*want.shape).add_(mean)


def _far_mean(want: Wanted) -> torch.Tensor:
    # In fp32 the square of the mean takes the whole mantissa. In fp16 and bf16 the deviation is about an ulp.
    mean = 2.0 ** min(_MANTISSA[want.dtype] + 1, 12)
    return want.draw.normal(*want.shape).add_(
        mean * torch.where(torch.arange(want.rows) % 2 == 1, -1.0, 1.0).view(-1, 1)
    )


def _codes(want: Wanted) -> torch.Tensor:
    # The bits are read by `given_codes`: every scale byte in turn, random codes, and exponents of the amax at which a
    # factor or alpha is subnormal, ordinary or infinite. Only one row in eight has NaN and infinite codes: the
    # remaining outputs are numbers.
    low, high = want.draw.below(256, *want.shape), want.draw.below(256, *want.shape)
    finite = torch.tensor([math.isfinite(value) for value in want.element.values])
    special = ~_look_up(finite, low & (len(finite) - 1)) & (torch.arange(want.rows) % 8 != 3).unsqueeze(1)
    low = torch.where(special, 1, low)
    row, block = _grid(want)
    number = want.draw.index(256) + row * block.shape[1] + block
    high[:: want.height, :: want.width] = number.to(high.dtype) & 255
    if want.columns > 1:
        exponents = torch.tensor([0, 7, 67, 75, 127, 134, 190, 247], dtype=high.dtype)
        high[:, 1] = _look_up(exponents, want.draw.index(8) + torch.arange(want.rows) & 7)
    words = (high << 24 | low << 16).int()
    if want.dtype == torch.float32:
        return (words | want.draw.below(1 << 15, *want.shape)).view(torch.float32)
    return (words >> 16).to(torch.int16).view(want.dtype)


GENERATORS: dict[str, Callable[[Wanted], torch.Tensor]] = {
    "normal": _normal,
    "uniform": _uniform,
    "outliers": _outliers,
    "tiles": _tiles,
    "e2m1-ties": _e2m1_ties,
    "e4m3-ties": _e4m3_ties,
    "ties": _ties,
    "near-ties": _near_ties,
    "scale-edges": _scale_edges,
    "every-exponent": _every_exponent,
    "boundaries": _boundaries,
    "normal-1e-28": _normal_times(1e-28),
    "normal-1e-3": _normal_times(1e-3),
    "normal-1e3": _normal_times(1e3),
    "single": _single,
    "low-rows": _low_rows,
    "low-columns": _low_columns,
    "exponents": _exponents,
    "huge": _huge,
    "subnormal": _subnormal,
    "zeros": _zeros,
    "zero-rows": _zero_rows,
    "negative-zeros": _negative_zeros,
    "nan": _nan,
    "inf": _inf,
    "position": _position,
    "rising": _rising,
    "spread": _spread,
    "lattice": _lattice,
    "rounding": _rounding,
    "positive": _positive,
    "cancelling": _cancelling,
    "amax-2m126-first": _placed_amax(-126, "first"),
    "amax-2m120-row-end": _placed_amax(-120, "row-end"),
    "amax-2m56-last": _placed_amax(-56, "last"),
    "amax-2p50-first": _placed_amax(50, "first"),
    "amax-2p61-row-end": _placed_amax(61, "row-end"),
    "amax-2p120-last": _placed_amax(120, "last"),
    "amax-largest-first": _placed_amax(127, "first"),
    "half-edges": _half_edges,
    "ladder": _ladder,
    "negative": _negative,
    "offset": _offset,
    "far-mean": _far_mean,
    "peaked": _normal,
    "beyond-exp": _normal,
    "special-addends": _normal,
    "codes": _codes,
}


def generate(
    family: str, draw: Draw, shape: tuple[int, int], dtype: torch.dtype, role: str, recipe: Recipe
) -> torch.Tensor:
    """The matrix (M, K) of a family in `dtype` (float32, bfloat16, float16), contiguous, for a recipe's blocks along K.

    Tiles of NVFP4 are taken for blocks of a row, which their scales are stored as.
    """
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)
    two_levels = recipe.scale is E4M3
    height, width = (1, WHOLE_BLOCK) if recipe.spans_k else recipe.block
    return GENERATORS[family](
        Wanted(
            draw,
            *shape,
            dtype,
            role,
            1 if two_levels else height,
            width,
            recipe.element,
            two_levels,
            recipe.scale_max,
            recipe.spans_k,
        )
    ).to(dtype)
