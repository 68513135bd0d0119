"""Quantization of intervals: the amaxes, scales and codes of correct kernels, by the steps of `reference.quantize`.

Every result is judged given the kernel's own result before: scales given its amax, codes given its scales. The hidden
amax of a block lies between two ends; the scale must be the scale of one of the numbers between, and these numbers
alone count for the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from narrowgauge.reference.contracts.accepted import BITS, Ends, Part, different, is_nan_of, judge_range, order_of
from narrowgauge.reference.contracts.changed_steps import Scaled
from narrowgauge.reference.contracts.estimates import sorted_places
from narrowgauge.reference.contracts.interval import Interval, hull
from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.reference.quantize.layout import elements, linear_scales
from narrowgauge.reference.quantize.scaling import (
    block_scales,
    element_factors,
    over_elements,
    per_row,
    scale_elements,
    tensor_scale,
)
from narrowgauge.reference.quantize.steps import block_amaxes, encode_elements, row_amax
from narrowgauge.spec.formats import E4M3, E8M0, FP32
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.summation import SMALLEST_NORMAL

_MONOTONE = ("nearest-even", "nearest-toward-zero", "nearest-away", "stochastic")
"""Roundings that increase with their argument; stochastic rounding increases for a given random byte."""
_FEW = 64
"""Largest number of amaxes between two ends for a trial of all."""
_TINY = 2.0**-96
"""Blocks with a smaller amax may have subnormal numbers on the way to their scales and codes: a recipe divides an amax
by at most 57344·256, and no reciprocal of these numbers is subnormal."""


def problem(recipe: Recipe) -> str | None:
    """Why a quantization by this recipe cannot be a step of a contract, or None."""
    if recipe.rounding not in _MONOTONE:
        return f"recipe {recipe} rounds {recipe.rounding}; quantize in a contract rounds to nearest, or by random bits"
    if recipe.candidates != "6":
        return f"recipe {recipe} chooses between two scales; quantize in a contract takes a rule with one scale"
    if recipe.delayed is not None:
        return f"recipe {recipe} has a history of amaxes; quantize in a contract takes fp8-static and the scale"
    return None


def judge_quantized(
    y: Ends, kernel: Quantized, scale: torch.Tensor | None, *, statistics: Ends | None = None,
    rounding: Scaled | None = None, flushes: bool = False, random: torch.Tensor | None = None,
) -> Iterator[tuple[str, Part]]:  # fmt: skip
    """The accepted results of the quantization of `y` (M, K), rotated if the recipe rotates, and the kernel's results.

    `statistics`: a second matrix for the amaxes of the scales; `rounding`: a function of the scaled elements before
    their rounding. No correct kernel has either; both explain wrong bytes. `flushes`: subnormal numbers may be flushed:
    the scale and the codes of a block with a tiny amax are free. `random`: words, int32 (M, ⌈K/4⌉), of a recipe with
    stochastic rounding.

    `scale`: float32 (1,), the given scale of a recipe without an amax. Results by name, in order:
    amax, scales, codes; a recipe with a given scale has codes alone. Raises ValueError for a recipe with a `problem`,
    and for a kernel that hides an amax with more than 64 possible numbers.
    """
    wrong = problem(kernel.recipe)
    if wrong is None and (kernel.recipe.rounding == "stochastic") > (random is not None):
        wrong = f"recipe {kernel.recipe} rounds stochastically, and no random bits are given"
    if wrong is not None:
        raise ValueError(wrong)
    random = random if kernel.recipe.rounding == "stochastic" else None
    blocks = _block_amaxes(y if statistics is None else statistics, kernel.recipe)
    uncertain = kernel.recipe.nan == "propagate" and y.nan is not None and bool((y.nan & ~y.never).any())
    kernels = [kernel] if uncertain else _with_amax(kernel, blocks, y.low.dtype)
    tried = (list(_parts(y, one, scale, blocks, statistics, _Rounding(rounding, random))) for one in kernels)
    best = min(tried, key=lambda parts: sum(int(part.wrong.count_nonzero()) for _, part in parts))
    free = _flushed_blocks(blocks[1], scale) if flushes else None
    for name, part in best:
        if name != "amax" or kernel.amax is not None:
            yield name, part if free is None or name == "amax" else _without(part, free, name, kernel.recipe)


def _flushed_blocks(amax: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor | None:
    """The blocks with numbers that a kernel may flush on the way to scales and codes. None: no block.

    A given scale that is subnormal, or has a subnormal reciprocal, stands for the amaxes.
    """
    if scale is None:
        found = (amax > 0) & (amax < _TINY)
    else:
        size = scale.abs().view(1, 1)
        found = ((size > 0) & (size < SMALLEST_NORMAL)) | ((size > 1 / SMALLEST_NORMAL) & size.isfinite())
    return found if bool(found.any()) else None


def _without(part: Part, free: torch.Tensor, name: str, recipe: Recipe) -> Part:
    """The scales or the codes; in the blocks `free` every value is accepted."""
    if name == "codes":
        row, column = (torch.arange(size, device=free.device) for size in part.actual.shape)
        at = _blocks_of(row, column, recipe)
        free = free[at[0]][:, at[1]]
    free = free.expand_as(part.actual)

    def again(places: torch.Tensor, ends: Ends) -> Part:
        assert part.again is not None
        found = part.again(places, ends)
        return replace(found, wrong=found.wrong & ~free.flatten()[places])

    return replace(
        part, wrong=part.wrong & ~free, determined=min(part.determined, int((~free).count_nonzero())),
        undetermined=max(part.undetermined, int(free.count_nonzero())), again=None if part.again is None else again,
    )  # fmt: skip


def _with_amax(kernel: Quantized, blocks: list[torch.Tensor], dtype: torch.dtype) -> Iterator[Quantized]:
    """The kernel's results, once per possible hidden amax: a number for the tensor, which has to explain all scales and
    codes. `_judge_amax` judges a shown amax, and a hidden amax with too many possible numbers."""
    recipe = kernel.recipe
    low, high = (_amaxes(end, recipe) for end in blocks)
    hidden = recipe.tensor_scale not in ("none", "given") and kernel.amax is None
    grid = _Grid(dtype)
    if not hidden or recipe.granularity != "tensor" or _same(low, high):
        yield kernel
        return
    first, last = int(grid.number(low)), int(grid.number(high))
    if last - first >= _FEW:
        yield kernel
        return
    for number in range(first, last + 1):
        yield replace(kernel, amax=grid.amax(torch.full_like(low, number, dtype=torch.int64)))


def _parts(
    y: Ends, kernel: Quantized, scale: torch.Tensor | None, blocks: list[torch.Tensor], statistics: Ends | None,
    rounding: _Rounding,
) -> Iterator[tuple[str, Part]]:  # fmt: skip
    """The results of `judge_quantized`. `blocks`: the least and the greatest amax of each block."""
    recipe, dtype = kernel.recipe, y.low.dtype
    low = blocks[0]
    uncertain = None if y.nan is None else y.nan & ~y.never
    free = None if uncertain is None or not bool(uncertain.any()) else block_amaxes(uncertain.float(), recipe) != 0
    tensor = scale
    if recipe.tensor_scale not in ("none", "given"):
        yield from _judge_amax(blocks, kernel, free if recipe.nan == "propagate" else None)
        amax = _amaxes(low, recipe) if kernel.amax is None else kernel.amax
        tensor = tensor_scale(amax, recipe, dtype)
    scales, own = linear_scales(kernel), blocks
    if recipe.block_scale != "given" and not (recipe.whole and tensor is not None):
        of_amaxes = dtype if statistics is None else statistics.low.dtype
        part, own = _judge_scales(blocks, tensor, recipe, of_amaxes, scales, free)
        yield "scales", part
    elif recipe.block_scale != "given":
        expected = block_scales(low, tensor, recipe, dtype)
        yield "scales", judge_range(scales, expected, expected, fmt=recipe.scale)
    bounded = statistics is None or statistics is y
    yield "codes", _judge_codes(y, kernel, scales, tensor, own, rounding, bounded=bounded)


def _block_amaxes(y: Ends, recipe: Recipe) -> list[torch.Tensor]:
    """The least and the greatest amax per block. An element with a possible NaN may be left out of an amax."""
    if y.uncertain is None:
        amax = block_amaxes(y.low, recipe)
        return [amax, amax]
    low, high = (end.flatten()[y.uncertain] for end in (y.low, y.high))
    left_out = (low <= 0) & (high >= 0)
    if y.nan is not None:
        left_out |= y.nan.flatten()[y.uncertain] & ~low.isnan()
    numbers = y.low.clone(memory_format=torch.contiguous_format)
    amaxes, magnitudes = [], (low.abs(), high.abs())
    for sizes in (torch.minimum(*magnitudes).masked_fill_(left_out, 0.0), torch.maximum(*magnitudes)):
        numbers.view(-1)[y.uncertain] = sizes
        amaxes.append(block_amaxes(numbers, recipe))
    return amaxes


# ---- hidden quantizations --------------------------------------------------------------------------------------------


def hidden_values(
    y: Ends, recipe: Recipe, scale: torch.Tensor | None, line: int, *, statistics: Ends | None = None,
    flushes: bool = False,
) -> Interval:  # fmt: skip
    """Codes times scales (M, K), exact, of a hidden quantization of `y`: the ends over all scales of the amaxes of a
    block and all codes under these scales.

    `scale`, `statistics`, `flushes`: as of `judge_quantized`. Raises ValueError, with the line of the contract, for a
    recipe with an amax of the tensor, and as `problem` says.
    """
    wrong = problem(recipe) or (
        f"recipe {recipe} has an amax of the tensor" if recipe.tensor_scale not in ("none", "given") else None
    )
    if wrong is None and (recipe.rounding == "stochastic" or recipe.zero_points):
        wrong = f"recipe {recipe} has random bits or zero points"
    if wrong is not None:
        raise ValueError(
            f"the quantization of line {line} is hidden, and several numbers are right for an element of its operand; "
            f"{wrong}: let the kernel return the quantization"
        )
    blocks = _block_amaxes(y if statistics is None else statistics, recipe)
    rows, dtype = y.low.shape[0], y.low.dtype
    scales = [block_scales(amax, scale, recipe, dtype if statistics is None else torch.float32) for amax in blocks]
    stored = [s.double() if recipe.scale is FP32 else decode(s, recipe.scale, torch.float64) for s in scales]
    if recipe.scale is E8M0 or recipe.scale_rounding in ("up", "down"):
        # Between two neighbouring powers of two lies no scale, and both have codes of their own.
        apart = stored[1] > 2 * stored[0]
        factors_of = [[value, torch.where(apart, other, value)] for value, other in (stored, stored[::-1])]
    else:
        factors_of = [stored, stored]
    values: list[torch.Tensor] = []
    for s, amax, by in zip(scales, blocks, factors_of, strict=True):
        for moved in (-1, 0, 1) if recipe.approximate else (0,):
            own = per_row(_factors(s, scale, recipe, dtype, amax, moved), recipe, rows)
            for end in (y.low,) if y.point else (y.low, y.high):
                codes = element_codes(scale_elements(end, own, scale, recipe), recipe)
                numbers = decode(codes, recipe.element, torch.float64)
                values += [over_elements(numbers, per_row(one, recipe, rows), recipe, torch.mul) for one in by]
        if _same(*blocks):
            break
    found = hull([Interval(value, value) for value in values])
    if len(values) == 1:
        return found
    low, high = found.low, found.high
    nan = None if y.nan is None else y.nan & ~y.never
    row, column = (torch.arange(size, device=low.device) for size in low.shape)
    at = _blocks_of(row, column, recipe)
    free = _flushed_blocks(blocks[1], scale) if flushes else None
    if nan is not None and bool(nan.any()):
        maybe = block_amaxes(nan.float(), recipe) != 0
        free = maybe if free is None else free | maybe
    if free is not None:
        wide = (blocks[1].double() * 2)[at[0]][:, at[1]].expand_as(low)
        some = free[at[0]][:, at[1]].expand_as(low)
        low, high = torch.where(some, -wide, low), torch.where(some, wide, high)
    return Interval(low, high, nan)


# ---- amax and scales -------------------------------------------------------------------------------------------------


def _amaxes(blocks: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    return tensor_amax(blocks) if recipe.granularity == "tensor" else row_amax(blocks)


def _judge_amax(blocks: list[torch.Tensor], kernel: Quantized, free: torch.Tensor | None) -> Iterator[tuple[str, Part]]:
    """The amax of the tensor or of each row, if the kernel shows it. `free`: blocks whose amax may be NaN."""
    low, high = (_amaxes(end, kernel.recipe) for end in blocks)
    if kernel.amax is not None:
        nan = None if free is None else _amaxes(free.float(), kernel.recipe) != 0
        yield "amax", judge_range(kernel.amax, low, low if _same(low, high) else high, nan)
    elif free is not None or not _same(low, high):
        raise ValueError(
            f"the amax of the tensor is hidden, from {float(low.min())} to {float(high.max())}: let the kernel return "
            f"the amax that recipe {kernel.recipe} scales with"
        )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two float32 tensors have equal bits."""
    return a is b or torch.equal(a.view(torch.int32), b.view(torch.int32))


@dataclass
class _Candidates:
    """Scales of the possible amaxes of a block, and the amaxes with the kernel's scale, as numbers of a grid."""

    wanted: torch.Tensor
    """The kernel's scales, as numbers in the order of their values."""
    bottom: torch.Tensor
    top: torch.Tensor
    """The least and the greatest amax with the kernel's scale; `bottom` > `top` without such an amax."""
    lower: torch.Tensor
    upper: torch.Tensor
    """The least and the greatest amax of the block."""

    def add(self, here: torch.Tensor, number: torch.Tensor, orders: Sequence[torch.Tensor]) -> None:
        """Add the amax `number`, which is possible `here`, and the `orders` of its least and greatest scale."""
        same = here & (orders[0] <= self.wanted) & (self.wanted <= orders[1])
        self.bottom = torch.where(same, torch.minimum(self.bottom, number), self.bottom)
        self.top = torch.where(same, torch.maximum(self.top, number), self.top)
        self.lower = torch.where(here, torch.minimum(self.lower, number), self.lower)
        self.upper = torch.where(here, torch.maximum(self.upper, number), self.upper)


def _judge_scales(
    blocks: list[torch.Tensor], tensor: torch.Tensor | None, recipe: Recipe, dtype: torch.dtype, scales: torch.Tensor,
    free: torch.Tensor | None,
) -> tuple[Part, list[torch.Tensor]]:  # fmt: skip
    """The scales, and the least and the greatest amax of each block with the scale of the kernel.

    Few amaxes between the ends are all tried. Of many, an increasing rule needs the ends alone, and the
    amaxes with the kernel's scale are found by halving. A rule for zero blocks replaces the scales of the least amaxes
    by a single number, and increases behind these amaxes; halving finds the last of these amaxes. Amaxes of 0, infinity
    and NaN are tried by themselves. `free`: blocks that may hold NaN. With an approximate 1/6 an amax has a least and a
    greatest scale.
    """
    approximate = recipe.approximate and recipe.scale is E4M3
    least_greatest = (-1, 1) if approximate else (0,)

    def rule(amax: torch.Tensor, moved: int = 0) -> torch.Tensor:
        return block_scales(amax, tensor, recipe, dtype, moved)

    low, high = blocks
    if _same(low, high) and free is None:
        expected = [rule(low, moved) for moved in least_greatest]
        return judge_range(scales, expected[0], expected[-1], fmt=recipe.scale), blocks
    grid, never = _Grid(dtype), low.isnan() & high.isnan()
    least, most = grid.number(low), grid.number(high)
    far = torch.full_like(least, 1 << 40)
    found = _Candidates(order_of(scales, recipe.scale).long(), far, -far, far, -far)

    def order_at(number: torch.Tensor, moved: int) -> torch.Tensor:
        return order_of(rule(grid.amax(number.clamp(0, grid.largest + 1)), moved), recipe.scale).long()

    def orders_at(number: torch.Tensor) -> list[torch.Tensor]:
        orders = [order_at(number, moved) for moved in least_greatest]
        return [orders[0], orders[-1]]

    first, last = least.clamp(min=1), most.clamp(max=grid.largest)
    span = int((last - first).max()) if first.numel() else 0
    tried = (first + step for step in range(span + 1))
    if span > _FEW:
        start = first
        if recipe.zero_block != "keep":
            plain = replace(recipe, zero_block="keep")

            def rises(number: torch.Tensor) -> torch.Tensor:
                amax = grid.amax(number.clamp(0, grid.largest + 1))
                return (block_scales(amax, tensor, plain, dtype) == rule(amax)).long()

            start = _first_with(rises, first, last, torch.ones_like(first))
        edges = torch.minimum(start, last), torch.maximum(start - 1, first)
        begin = _first_with(lambda number: order_at(number, least_greatest[-1]), start, last, found.wanted)
        end = _first_with(lambda number: order_at(number, least_greatest[0]), start, last, found.wanted + 1) - 1
        tried = (number for number in (first, last, *edges, begin, end))
    for number in tried:
        found.add((first <= number) & (number <= last) & ~never, number, orders_at(number))
    for special in (0, grid.largest + 1):  # amax 0, and infinity
        number = torch.full_like(least, special)
        found.add((least <= special) & (special <= most) & ~never, number, orders_at(number))
    nan = rule(torch.full_like(low, torch.nan))
    maybe = never if free is None or recipe.nan != "propagate" else never | free
    fits = found.bottom <= found.top
    fits = torch.where(maybe, fits | ~different(scales, nan, recipe.scale), fits)
    # No amax has the kernel's scale: its codes are judged with all amaxes.
    bottom = torch.where(fits & ~maybe, found.bottom, least).clamp(0, grid.largest + 1)
    top = torch.where(fits & ~maybe, found.top, most).clamp(0, grid.largest + 1)
    ends = [
        torch.where(never, nan, rule(grid.amax(end.clamp(0, grid.largest + 1)), moved))
        for end, moved in ((found.lower, least_greatest[0]), (found.upper, least_greatest[-1]))
    ]
    several = (most > least) | approximate
    if recipe.zero_block == "keep":  # a rule that increases: equal scales of the ends are those of all amaxes
        several &= (least == 0) | (most > grid.largest) | different(ends[0], ends[1], recipe.scale)
    range_ = judge_range(scales, ends[0], ends[1], fmt=recipe.scale)
    part = replace(range_, wrong=~fits, determined=scales.numel() - int((several | maybe).count_nonzero()))
    return part, [torch.where(never, low, grid.amax(bottom)), torch.where(never, high, grid.amax(top))]


def _first_with(
    order_at: Callable[[torch.Tensor], torch.Tensor], first: torch.Tensor, last: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """The first number in a span with an order of at least `wanted`, of an increasing rule; else the number behind the
    span."""
    low, high = first, last + 1
    while bool((low < high).any()):
        middle = (low + high) >> 1
        reached, searching = order_at(middle) >= wanted, low < high
        low, high = (
            torch.where(searching & ~reached, middle + 1, low),
            torch.where(searching & reached, middle, high),
        )
    return low


class _Grid:
    """The non-negative numbers of a dtype by their numbers: 0 is 0, infinity the last."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.largest = int(order_of(torch.tensor([torch.finfo(dtype).max], dtype=dtype), None))

    def number(self, amax: torch.Tensor) -> torch.Tensor:
        """The number of each amax; 0 for NaN."""
        return order_of(amax.nan_to_num(0.0, torch.inf).to(self._dtype), None).long()

    def amax(self, number: torch.Tensor) -> torch.Tensor:
        """The amax with each number, float32."""
        return number.to(BITS[self._dtype]).view(self._dtype).float()


# ---- codes -----------------------------------------------------------------------------------------------------------


def _judge_codes(
    y: Ends, kernel: Quantized, scales: torch.Tensor, tensor: torch.Tensor | None, own: list[torch.Tensor],
    rounding: _Rounding, *, bounded: bool = True,
) -> Part:  # fmt: skip
    """The codes given the kernel's scales, of numbers that are no larger than the amaxes with these scales.

    `bounded`: whether the amaxes are those of the numbers.
    """
    recipe, columns = kernel.recipe, kernel.shape[1]
    lower = elements(
        encode_elements(y.low, scales, tensor, recipe, rounding.random, blocks=own[1], rounding=rounding.before),
        columns, recipe,
    )  # fmt: skip
    actual = elements(kernel.codes.T.contiguous() if kernel.transposed else kernel.codes, columns, recipe)
    uncertain = _uncertain(y, own, recipe)
    if uncertain is None or not uncertain.numel():
        return judge_range(actual, lower, lower, fmt=recipe.element)
    # Elements with a single number are compared directly; the remaining elements are encoded once more.
    given = _Elements(recipe, scales, tensor, own, columns, y.low.dtype, rounding, bounded, actual)
    low, high = (end.flatten()[uncertain] for end in (y.low, y.high))
    part = given.judged(uncertain, Ends(low, high, None if y.nan is None else y.nan.flatten()[uncertain]))
    row, column = uncertain // columns, uncertain % columns
    lower[row, column] = actual[row, column]  # these are judged already, and equal results are compared faster
    wrong, upper = different(actual, lower, recipe.element), lower.clone()
    lower[row, column], upper[row, column], wrong[row, column] = part.lower, part.upper, part.wrong
    determined = actual.numel() - len(row) + part.determined
    return replace(
        part, actual=actual, lower=lower, upper=upper, wrong=wrong, determined=determined, again=given.judged
    )


def _uncertain(y: Ends, own: list[torch.Tensor], recipe: Recipe) -> torch.Tensor | None:
    """Numbers of the elements with more than one number, or with more than one factor. None: no element."""
    found = y.uncertain
    if recipe.approximate:
        return torch.arange(y.low.numel(), device=y.low.device)
    if recipe.element_scale == "x*(max/amax)" and not _same(*own):
        rows, columns = (torch.arange(size, device=y.low.device) for size in y.low.shape)
        block_row, block = _blocks_of(rows, columns, recipe)
        several = (own[0] != own[1])[block_row]
        at = several.any(1).nonzero()[:, 0]
        row, column = several[at][:, block].expand(-1, len(columns)).nonzero(as_tuple=True)
        factors = at[row] * len(columns) + column
        found = factors if found is None else sorted_places([found, factors])
    return found


def _blocks_of(row: torch.Tensor, column: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of the scales of elements."""
    if recipe.whole:
        return torch.zeros_like(row), torch.zeros_like(column)
    return row // recipe.stored_rows, torch.zeros_like(column) if recipe.spans_k else column // recipe.block[1]


@dataclass(frozen=True)
class _Rounding:
    """The rounding of scaled elements to codes, beside that of the recipe."""

    before: Scaled | None = None
    """A function of the scaled elements before they are rounded."""
    random: torch.Tensor | None = None
    """The words of stochastic rounding, int32 (M, ⌈K/4⌉)."""

    def bytes_of(self, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor | None:
        """The random bytes of single elements, uint8 (N, 1)."""
        if self.random is None:
            return None
        return self.random.contiguous().view(torch.uint8)[row, column].unsqueeze(1)


@dataclass(frozen=True)
class _Elements:
    """Single elements with the scales of their blocks: the steps 6 and 7 of `reference.quantize.steps`."""

    recipe: Recipe
    scales: torch.Tensor
    tensor: torch.Tensor | None
    own: list[torch.Tensor]
    """The least and the greatest amax of each block with the scale of the kernel."""
    columns: int
    dtype: torch.dtype
    rounding: _Rounding
    bounded: bool
    actual: torch.Tensor
    """The kernel's codes (M, K)."""

    def judged(self, places: torch.Tensor, y: Ends) -> Part:
        """The codes of elements with these numbers, int64 (N,), and ends (N,)."""
        recipe, row, column = self.recipe, places // self.columns, places % self.columns
        random = self.rounding.bytes_of(row, column)
        at = _blocks_of(row, column, recipe)
        scales, amax = self.scales[at], [end[at] for end in self.own]
        tensor = self.tensor if self.tensor is None or len(self.tensor) == 1 else self.tensor[row]
        low, high = y.low, y.high
        own_nan = recipe.element.nan_code
        coding = recipe if own_nan in (None, recipe.nan_code) else replace(recipe, nan_code=own_nan)  # type: ignore[arg-type]

        def codes(x: torch.Tensor, amax: torch.Tensor, moved: int = 0) -> torch.Tensor:
            factors = _factors(scales.unsqueeze(1), tensor, recipe, self.dtype, amax.unsqueeze(1), moved)
            scaled = scale_elements(x.unsqueeze(1), factors, tensor, recipe)
            scaled = scaled if self.rounding.before is None else self.rounding.before(scaled, recipe.element)
            return element_codes(scaled, coding, random)[:, 0]

        if self.bounded and not recipe.whole and recipe.block_scale != "given":
            most = amax[1].nan_to_num(torch.inf, torch.inf).to(low.dtype)
            low, high = (torch.where(end.abs() > most, most.copysign(end), end) for end in (low, high))
        least, greatest = codes(low, amax[1], -1), codes(high, amax[0], 1)
        if recipe.element_scale == "x*(max/amax)" or recipe.approximate:
            # The factor falls as the amax grows: the least result of a negative number has the least amax.
            least = torch.where(low < 0, codes(low, amax[0], 1), least)
            greatest = torch.where(high < 0, codes(high, amax[1], -1), greatest)
        if recipe.block_scale == "given":  # it may be negative, and then the greatest number has the least code
            falls = order_of(least, recipe.element) > order_of(greatest, recipe.element)
            least, greatest = torch.where(falls, greatest, least), torch.where(falls, least, greatest)
        nan, spans = y.nan, (low < 0) & (high > 0)
        if bool(spans.any()):  # 0 may give NaN between two numbers, as 0·(1/0)
            zero = is_nan_of(codes(torch.zeros_like(low), amax[1]), recipe.element) & spans
            nan = zero if nan is None else nan | zero
        if coding is not recipe:
            ends = [is_nan_of(end, recipe.element) for end in (least, greatest)]
            both, either = ends[0] & ends[1], ends[0] | ends[1]
            least, greatest = torch.where(ends[0], greatest, least), torch.where(ends[1], least, greatest)
            least, greatest = (end.masked_fill(both, recipe.nan_code) for end in (least, greatest))
            nan = either & ~both if nan is None else (nan | either) & ~both
        if nan is not None and recipe.nan_code != own_nan:
            # NaN gives a code of a number: one more code of the range.
            least, greatest, nan = _with_code(least, greatest, nan & ~low.isnan(), recipe)
        return judge_range(self.actual[row, column], least, greatest, nan, recipe.element)


def _factors(
    scales: torch.Tensor, tensor: torch.Tensor | None, recipe: Recipe, dtype: torch.dtype, amax: torch.Tensor,
    moved: int,
) -> torch.Tensor:  # fmt: skip
    """`element_factors`, in an approximate recipe with reciprocals that make it larger (`moved` 1) or smaller (−1)."""
    factors = element_factors(scales, tensor, recipe, dtype, amax)
    if not (recipe.approximate and moved):
        return factors
    if recipe.scale is E4M3:
        assert tensor is not None
        stored, enc = decode(scales, recipe.scale), tensor.unsqueeze(1)
        of_product = recipe.element_scale == "x*r(s*r(enc))"
        near = _near(1 / (stored * _near(1 / enc, -moved) if of_product else stored), moved)
        return torch.where(stored == 0, factors, near if of_product else near * enc)
    if recipe.element_scale == "x*(max/amax)":
        return _near(1 / amax.clamp(min=recipe.smallest_amax), moved) * recipe.element.max
    return _near(factors, moved)


def _near(reciprocal: torch.Tensor, moved: int) -> torch.Tensor:
    """A reciprocal that is 1 ulp larger (`moved` 1) or smaller (−1), 0 and infinity as they are. A subnormal reciprocal
    may be flushed."""
    end = torch.copysign(torch.full_like(reciprocal, torch.inf if moved > 0 else 0.0), reciprocal)
    near = torch.where(reciprocal.isfinite() & (reciprocal != 0), torch.nextafter(reciprocal, end), reciprocal)
    flushed = (near.abs() < SMALLEST_NORMAL) & (moved < 0)
    return torch.where(flushed, torch.zeros_like(near).copysign(near), near)


def _with_code(
    least: torch.Tensor, greatest: torch.Tensor, nan: torch.Tensor, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The range with the code of NaN where an element may be NaN."""
    code = torch.full_like(least, recipe.nan_code)
    low, high, own = (order_of(end, recipe.element) for end in (least, greatest, code))
    return torch.where(nan & (own < low), code, least), torch.where(nan & (own > high), code, greatest), None
