"""Steps of wrong kernels, in no contract: functions of intervals, roundings and stored results.

The harness puts them in place of a step of a contract to explain wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from narrowgauge.reference.contracts import sums
from narrowgauge.reference.contracts.casts import cast
from narrowgauge.reference.contracts.interval import Interval, add
from narrowgauge.spec.formats import E8M0, FP32, Format
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import SMALLEST_NORMAL

# ---- steps -----------------------------------------------------------------------------------------------------------


def expanded(x: Interval, *others: Interval) -> Interval:
    """`x` in the shape of all operands."""
    shape = np.broadcast_shapes(*(tuple(value.shape) for value in (x, *others)))  # torch's imports sympy
    return x.arranged(lambda t: t.expand(shape))


def rolled(x: Interval, columns: int) -> Interval:
    """Every number is replaced by the number this many columns to the right."""
    return x.arranged(lambda t: t.roll(-columns, -1))


def amax_of_all(x: Interval) -> Interval:
    """Every number is replaced by the largest magnitude of the tensor."""
    row = sums.amax(x)
    return row.arranged(lambda t: (t.any() if t.dtype == torch.bool else t.amax()).expand(x.shape))


def kept(x: Interval, columns: tuple[float, float | None, int], period: int | None = None) -> Interval:
    """Some columns of every `period` columns, or of all: `some_columns`; 0 in the remaining columns."""
    size = period or x.shape[-1]
    out = torch.ones(size, dtype=torch.bool, device=x.low.device)
    out[some_columns(columns, size)] = False
    mask = out.repeat(-(-x.shape[-1] // size))[: x.shape[-1]]
    return x.arranged(lambda t: t.masked_fill(mask, 0))


def moved(x: Interval, pairs: Sequence[Sequence[int]]) -> Interval:
    """Wrong columns: pairs (right, wrong)."""
    index = torch.arange(x.shape[-1], device=x.low.device)
    for right, other in pairs:
        index[right] = other
    return x.arranged(lambda t: t[..., index])


def total_of(x: Interval, positions: Interval | None = None) -> Interval:
    """The sum of each row of weights (tokens, choices): of all, or of those whose position is not negative."""
    counted = x if positions is None else x.arranged(lambda t: t.masked_fill(positions.low < 0, 0))
    return sums.total(counted)


def partial_sums(x: Interval, dtype: str) -> Interval:
    """The sum of the last dimension in its order, from 0 on, each partial sum rounded: (…, K) to (…, 1)."""
    zero = torch.zeros_like(x.low[..., :1])
    y = Interval(zero, zero)
    for number in range(x.shape[-1]):
        term = x.arranged(lambda t, at=number: t[..., at : at + 1])  # type: ignore[misc]
        y = cast(add(y, term), dtype)
    return y


CHANGED_STEPS: Mapping[str, Callable[..., Interval]] = {
    "expanded": expanded, "rolled": rolled, "amax_of_all": amax_of_all,
    "kept": kept, "moved": moved, "total_of": total_of,
}  # fmt: skip
"""Functions of intervals and options by the name of the step."""


def some_columns(columns: tuple[float, float | None, int], size: int) -> slice:
    """The columns (first, last, step) of `size`; a fraction counts from the size."""
    first, last = (int(end * size) if isinstance(end, float) else end for end in columns[:2])
    return slice(first, last, columns[2])


def divisor(rule: tuple[str, float], size: int) -> int:
    """The divisor of a mean over `size` elements: ("plus", 1), ("times", 0.5), or the next multiple ("padded", 128)."""
    kind, number = rule
    if kind == "plus":
        return size + int(number)
    return int(size * number) if kind == "times" else -(-size // int(number)) * int(number)


OtherRow = int | str | Sequence[Any]
"""Wrong rows: a number of rows below, the "first" row, in reverse order ("reversed"), or pairs (right, wrong) of single
rows. If the rows are a product of axes, for example tokens·heads: (axis, a rule from this list)."""


def other_row(x: torch.Tensor, row: OtherRow, shape: Mapping[str, int]) -> torch.Tensor:
    """The rows of `x` (M, …) by a rule for wrong rows. `shape`: the axes whose product M is."""
    of, change = row if isinstance(row, list | tuple) and isinstance(row[0], str) else (next(iter(shape), ""), row)
    sizes = tuple(shape.values()) or (x.shape[0],)
    at = list(shape).index(of) if shape else 0
    count = sizes[at]
    index = torch.arange(count, device=x.device)
    if isinstance(change, int):
        index = index.roll(-change)
    elif change == "first":
        index = torch.zeros_like(index)
    elif change == "reversed":
        index = index.flip(0)
    else:
        for right, other in change:
            index[right] = other
    found: torch.Tensor = x.view(*sizes, *x.shape[1:]).index_select(at, index)
    return found.view(x.shape)


# ---- quantize --------------------------------------------------------------------------------------------------------


def _on_grid(x: torch.Tensor, fmt: Format, *, away: bool) -> torch.Tensor:
    """The number of a format next to zero or next to infinity; beyond the largest number, this number."""
    points = torch.tensor(fmt.values[: fmt.max_code + 1], dtype=torch.float32, device=x.device)
    size = x.abs().nan_to_num(0.0).clamp(max=fmt.max)
    code = torch.searchsorted(points, size, right=True) - 1
    code += away & (points[code] < size)
    return torch.where(x.isnan(), x, points[code].copysign(x))


def _overflowing(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    step = fmt.max - fmt.value(fmt.max_code - 1)
    return x.masked_fill(x.abs() > fmt.max + step / 2, torch.nan)


def _flushed(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    return torch.where(x.abs() < fmt.value(1 << fmt.mantissa_bits), x * 0, x)


Scaled = Callable[[torch.Tensor, Format], torch.Tensor]
ROUNDINGS: Mapping[str, Scaled] = {
    "toward zero": lambda x, fmt: _on_grid(x, fmt, away=False),
    "away from zero": lambda x, fmt: _on_grid(x, fmt, away=True),
    "to bfloat16 first": lambda x, fmt: x.bfloat16().float(),
    "to float16 first": lambda x, fmt: x.half().float(),
    "without saturation": _overflowing,
    "with subnormals flushed": _flushed,
}
"""Functions of the scaled elements before they are rounded to codes."""


def _inverse_scales(result: Quantized) -> Quantized:
    if result.recipe.scale is E8M0:
        return replace(result, scales=(254 - result.scales.int()).clamp(0, 255).to(torch.uint8))
    return replace(result, scales=1 / result.scales) if result.scales.is_floating_point() else result


def _highest_first(words: torch.Tensor) -> torch.Tensor:
    return (
        words.contiguous().view(torch.uint8).view(*words.shape, 4).flip(-1).contiguous().view(torch.int32).squeeze(-1)
    )


OTHER_BITS: Mapping[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "highest-first": ("the random bytes of a word are taken from the highest on", _highest_first),
    "inverted": ("the random bits are inverted", torch.bitwise_not),
}
"""Sentences and functions of the random words (M, K/4) of stochastic rounding by name."""
OTHER_SCALES: Mapping[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "inverted": ("the given scale is inverted", torch.reciprocal),
    "left-out": ("the given scale is left out", torch.ones_like),
    "twice": ("the given scale is a factor twice", torch.square),
    "first": ("the given scale is that of head 0", lambda scale: scale[:1].expand_as(scale)),
    "next": ("the given scale is that of the next head", lambda scale: scale.roll(-1)),
    "previous": ("the given scale is that of the previous head", lambda scale: scale.roll(1)),
    "in-bfloat16": ("the given scale is rounded to bfloat16", lambda scale: scale.bfloat16().float()),
    "in-float16": ("the given scale is rounded to float16", lambda scale: scale.half().float()),
}
"""Sentences and functions of a given scale."""
VIEWS: Mapping[str, Callable[[Quantized], Quantized]] = {
    "inverse scales": _inverse_scales,
}
"""The right result of a kernel with a mistake in storing."""


def changed_quantize(options: Mapping[str, Any]) -> tuple[Scaled | None, Callable[[Quantized], Quantized]]:
    """The rounding and the view of a step `quantize`, from its options."""
    view = options.get("view")
    return ROUNDINGS.get(options.get("rounding", "")), (lambda result: result) if view is None else VIEWS[view]


def _scales(change: Callable[[torch.Tensor, Quantized], torch.Tensor]) -> Callable[[Quantized], Quantized]:
    """A quantization with wrong stored scales."""
    return lambda q: replace(q, scales=change(q.scales, q))


def _in_blocks(index: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Quantized], Quantized]:
    """A quantization with scales of wrong blocks of the row: from its number."""

    def change(scales: torch.Tensor, q: Quantized) -> torch.Tensor:
        count = scales.shape[1]
        return scales[:, index(torch.arange(count, device=scales.device)) % max(1, count)]

    return _scales(change)


def _in_half_blocks(behind: str) -> Callable[[Quantized], Quantized]:
    """A quantization read with blocks of half the width. `behind`: the scale of the blocks behind those of a row."""

    def change(q: Quantized) -> Quantized:
        height, width = q.recipe.block
        half = replace(q.recipe, block=(height, width // 2))
        later = q.scales[:, -1:].expand_as(q.scales) if behind == "last" else q.scales.roll(-1, 0)
        return replace(q, recipe=half, scales=torch.cat([q.scales, later], 1)[:, : -(-q.shape[1] // half.block[1])])

    return change


def _least(scales: torch.Tensor, q: Quantized) -> torch.Tensor:
    """Subnormal scales as 0."""
    if q.recipe.scale is FP32:
        return torch.where(scales < SMALLEST_NORMAL, 0.0, scales)
    return torch.where(scales < 1 << q.recipe.scale.mantissa_bits, 0, scales).to(torch.uint8)


def _inverse(scales: torch.Tensor, q: Quantized) -> torch.Tensor:
    """The inverses of the scales, as bytes of powers of two."""
    if q.recipe.scale is FP32:
        return 1 / scales
    one = q.recipe.scale.bias << q.recipe.scale.mantissa_bits
    return (2 * one - scales.int()).clamp(0, 254).to(torch.uint8)


def _one(scales: torch.Tensor, q: Quantized) -> torch.Tensor:
    """Scales of 1."""
    if q.recipe.scale is FP32:
        return torch.ones_like(scales)
    return torch.full_like(scales, q.recipe.scale.bias << q.recipe.scale.mantissa_bits)


def _nibbles(q: Quantized) -> Quantized:
    return replace(q, codes=q.codes >> 4 | q.codes << 4) if q.recipe.element.bits == 4 else q


def _unsigned(q: Quantized) -> Quantized:
    return replace(q, codes=q.codes & (0x77 if q.recipe.element.bits == 4 else 0x7F))


def _zeros(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Quantized], Quantized]:
    """A quantization with wrong zero points, also negative."""
    return lambda q: q if q.zeros is None else replace(q, zeros=change(q.zeros.to(torch.int16)))


def _without_sign(q: Quantized) -> Quantized:
    """INT4 codes as numbers from 0 to 15."""
    recipe = find_recipe(f"{q.recipe.name}-zp")
    return replace(q, recipe=recipe, zeros=torch.zeros_like(q.scales, dtype=torch.uint8))


CHANGED_CODES: Mapping[str, tuple[str, Callable[[Quantized], Quantized]]] = {
    "nibbles": ("the two codes of a byte are exchanged in {}", _nibbles),
    "unsigned": ("the signs of the codes are lost in {}", _unsigned),
    "scales-next-row": ("the scales of {} are those of the next row", _scales(lambda s, q: s.roll(-1, 0))),
    "scales-previous-row": ("the scales of {} are those of the previous row", _scales(lambda s, q: s.roll(1, 0))),
    "scales-first-row": ("the scales of {} are those of row 0", _scales(lambda s, q: s[:1].expand_as(s))),
    "scales-next-block": ("the scales of {} are those of the next block", _in_blocks(lambda n: n + 1)),
    "scales-previous-block": ("the scales of {} are those of the previous block", _in_blocks(lambda n: n - 1)),
    "scales-first-block": ("the scales of {} are those of the first block of a row", _in_blocks(lambda n: 0 * n)),
    "scales-of-pairs": ("two neighbouring blocks of {} take the scale k/2 of a block twice as wide",
                        _in_blocks(lambda n: n // 2)),
    "scales-of-halves": ("the scales of {} are read as those of blocks half as wide, the last one behind them",
                         _in_half_blocks(behind="last")),
    "scales-of-halves-on": ("the scales of {} are read as those of blocks half as wide, the next row behind them",
                            _in_half_blocks(behind="next row")),
    "scales-of-even": ("two neighbouring blocks of {} take the scale of the first", _in_blocks(lambda n: n // 2 * 2)),
    "scales-one": ("the scales of {} are left out", _scales(_one)),
    "scales-inverse": ("the scales of {} are inverted", _scales(_inverse)),
    "scales-lost": ("the subnormal scales of {} become 0", _scales(_least)),
    "zeros-left-out": ("the zero points of {} are left out", _zeros(lambda z: 0 * z)),
    "zeros-eight": ("the zero points of {} are 8", _zeros(lambda z: 0 * z + 8)),
    "zeros-less-one": ("the zero points of {} are less by 1", _zeros(lambda z: z - 1)),
    "zeros-more-one": ("the zero points of {} are more by 1", _zeros(lambda z: z + 1)),
    "zeros-next-row": ("the zero points of {} are those of the next row", _zeros(lambda z: z.roll(-1, 0))),
    "extended": ("the codes of {} are read from 0 to 15, without a sign", _without_sign),
    "codes-next-row": ("the codes of {} are those of the next row", lambda q: replace(q, codes=q.codes.roll(-1, 0))),
}  # fmt: skip
"""Wrong readings of a quantized argument, with a sentence."""


def _of_expert(step: int, *parts: str) -> Callable[[Quantized, int], Quantized]:
    """Matrices of experts, one behind another, whose parts are those of the expert `step` further."""

    def change(q: Quantized, experts: int) -> Quantized:
        moved = {part: getattr(q, part) for part in parts}
        return replace(q, **{part: t.roll(-step * (t.shape[0] // experts), 0) for part, t in moved.items()})

    return change


CHANGED_MATRICES: Mapping[str, tuple[str, Callable[[Quantized, int], Quantized]]] = {
    f"{name}{side}-expert": (f"{phrase} of the {side} expert", _of_expert(step, *parts))
    for name, phrase, parts in (
        ("", "each choice takes {}", ("codes", "scales")), ("scales-", "the scales of {} are those", ("scales",)),
    )
    for side, step in (("next", 1), ("previous", -1))
}  # fmt: skip
"""Wrong matrices of experts in a quantized argument, with a sentence: from it and the number of experts."""
