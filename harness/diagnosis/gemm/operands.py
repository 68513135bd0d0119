"""Operands that a wrong GEMM multiplies in place of those that it was given: other scales, fewer columns, …"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from narrowgauge.harness.diagnosis.gemm.gemm_parts import GemmDeviation, GemmParts
from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import pad_scales, swap_nibbles, swizzle, unswizzle
from narrowgauge.spec.formats import E2M3, E3M2, E4M3, E5M2, FP32, Format
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipe import mismatch

Change = Callable[[Quantized], Quantized | None]
_OTHER = {E4M3: E5M2, E5M2: E4M3, E2M3: E3M2, E3M2: E2M3}
_TILES = (32, 64, 128)
_BLOCKS_OF_A_STEP = (2, 4, 8)


def changed_scales() -> Iterator[tuple[str, str, Change]]:
    """Scales that are read in place of a matrix's own: a cause, its sentence with {} for the matrix, and the change."""
    for step, words in ((1, "next"), (-1, "previous")):
        for way, at_the_end in _STEPS.items():
            yield (
                f"scale-of-{words}-block", f"blocks of {{}} take the scale of the {words} one{at_the_end}",
                _step(step, way),
            )  # fmt: skip
    yield "scales-ignored", "block scales of {} are taken to be 1", _without_scales
    yield "scale-of-first-block", "every block of {} takes the scale of the row's first one", _first_scale
    for count in _BLOCKS_OF_A_STEP:
        yield (
            "scale-of-first-step", f"every {count} blocks of {{}} take the scales of the row's first {count}",
            _first_scales(count),
        )  # fmt: skip
    yield "scales-transposed", "scales of {} are read as if they were transposed", _transposed_scales
    yield "scales-read-swizzled", "linear scales of {} are read as swizzled ones", _read_swizzled
    yield "scales-read-linear", "scales of {} are swizzled, and read as linear ones", _read_linear


def changed_codes() -> Iterator[tuple[str, str, Change]]:
    """The same of what codes and scales are taken for."""
    yield "subnormal-codes-flushed", "subnormal codes of {} are taken to be 0", _flushed_codes
    yield "subnormal-scales-flushed", "subnormal scales of {} are taken to be 0", _flushed_scales
    yield "decoded-as-other-format", "codes of {} are decoded as the other format of their size", _decoded


def operand_deviations() -> Iterator[GemmDeviation]:
    """What is done to a, to b, or to both."""
    for cause, sentence, change in changed_scales():
        yield from _each(cause, sentence, change)
    yield GemmDeviation("scales-of-one-operand", "scales of a are used for b too", _scales_of_left)
    yield GemmDeviation("scales-of-one-operand", "scales of b are used for a too", _scales_of_right)
    # Of either operand: the products are the same.
    yield GemmDeviation(
        "nibbles-swapped", "the two elements of a byte of one operand change places", _of(("left",), swapped)
    )
    yield GemmDeviation("last-block-dropped", "the last block of K is left out", _both(_without_last_block))
    for tile in _TILES:
        yield GemmDeviation(
            f"tail-of-k-dropped:{tile}", f"columns of K behind the last whole {tile} are left out",
            _both(_without_tail(tile)),
        )  # fmt: skip
    yield GemmDeviation("last-element-dropped", "the last column of K is left out", _both(_without_last))
    for cause, sentence, change in changed_codes():
        yield from _each(cause, sentence, change)


def section_deviations() -> Iterator[GemmDeviation]:
    """What a section of a grouped GEMM takes from another one: where there are several."""
    for name in ("next", "previous", "first"):
        for what, take in _FROM.items():
            yield GemmDeviation(
                "section-of-neighbour", f"every section takes {what} of the {name} one", _of_section(name, take)
            )


def _each(cause: str, sentence: str, change: Change) -> Iterator[GemmDeviation]:
    for operands, words in ((("left", "right"), "both operands"), (("left",), "a"), (("right",), "b")):
        yield GemmDeviation(cause, sentence.format(words), _of(operands, change))


def _of(operands: tuple[str, ...], change: Change) -> Callable[[GemmParts], GemmParts | None]:
    def of(terms: GemmParts) -> GemmParts | None:
        changed = {name: change(getattr(terms, name)) for name in operands}
        if all(q is None for q in changed.values()):
            return None
        found = replace(terms, **{name: q for name, q in changed.items() if q is not None})  # type: ignore[arg-type]
        return None if mismatch(found.left.recipe, found.right.recipe) else found

    return of


def _both(change: Change) -> Callable[[GemmParts], GemmParts | None]:
    return _of(("left", "right"), change)


# ---- scales ----------------------------------------------------------------------------------------------------------

_STEPS = {
    "within": ", the last its own", "around": ", the last that of the other end of the row",
    "memory": ", the last that of another row",
}  # fmt: skip


def _scaled(q: Quantized, scales: torch.Tensor) -> Quantized | None:
    return None if q.recipe.whole or scales.shape != q.scales.shape else replace(q, scales=scales.contiguous())


def _step(step: int, way: str) -> Change:
    def change(q: Quantized) -> Quantized | None:
        blocks = q.scales.shape[1]
        if way == "memory":
            return _scaled(q, q.scales.flatten().roll(-step).view(q.scales.shape))
        to = torch.arange(blocks, device=q.scales.device) + step
        return _scaled(q, q.scales[:, to % blocks if way == "around" else to.clamp(0, blocks - 1)])

    return change


def _without_scales(q: Quantized) -> Quantized | None:
    fmt = q.recipe.scale
    one = 1.0 if fmt is FP32 else float(encode(torch.ones(1, device=q.codes.device), fmt))
    return _scaled(q, torch.full_like(q.scales, one))


def _first_scale(q: Quantized) -> Quantized | None:
    return _scaled(q, q.scales[:, :1].expand_as(q.scales))


def _first_scales(count: int) -> Change:
    def change(q: Quantized) -> Quantized | None:
        blocks = q.scales.shape[1]
        if blocks <= count:
            return None
        return _scaled(q, q.scales[:, torch.arange(blocks, device=q.scales.device) % count])

    return change


def _transposed_scales(q: Quantized) -> Quantized | None:
    return _scaled(q, q.scales.T.reshape(q.scales.shape))


def _read_swizzled(q: Quantized) -> Quantized | None:
    if q.scales.dtype != torch.uint8:
        return None
    return _scaled(q, unswizzle(pad_scales(q.scales), (q.scales.shape[0], q.scales.shape[1])))


def _read_linear(q: Quantized) -> Quantized | None:
    if q.scales.dtype != torch.uint8:
        return None
    return _scaled(q, swizzle(q.scales).flatten()[: q.scales.numel()].view(q.scales.shape))


def _flushed_scales(q: Quantized) -> Quantized | None:
    if q.recipe.scale is not E4M3:
        return None
    return _scaled(q, torch.where(q.scales < 1 << E4M3.mantissa_bits, 0, q.scales))


def _rows(scales: torch.Tensor, rows: int) -> torch.Tensor:
    return scales[torch.arange(rows, device=scales.device) % len(scales)] if len(scales) else scales


def _scales_of_left(terms: GemmParts) -> GemmParts | None:
    right = _scaled(terms.right, _rows(terms.left.scales, len(terms.right.scales)))
    return None if right is None else replace(terms, right=right)


def _scales_of_right(terms: GemmParts) -> GemmParts | None:
    left = _scaled(terms.left, _rows(terms.right.scales, len(terms.left.scales)))
    return None if left is None else replace(terms, left=left)


# ---- codes -----------------------------------------------------------------------------------------------------------


def swapped(q: Quantized) -> Quantized | None:
    """With the two codes of every byte exchanged, where there are two."""
    return replace(q, codes=swap_nibbles(q.codes)) if q.recipe.element.bits == 4 else None


def _zeroed(q: Quantized, first: int) -> Quantized:
    """The columns of K from `first` on are 0."""
    codes = q.codes.clone()
    if q.recipe.element.bits == 4:
        codes[:, -(-first // 2) :] = 0
        if first % 2:
            codes[:, first // 2] &= 0xF
    else:
        codes[:, first:] = 0
    return replace(q, codes=codes)


def _without_last_block(q: Quantized) -> Quantized | None:
    width = q.recipe.block[1]
    return None if q.recipe.whole or q.shape[1] == 0 else _zeroed(q, (q.shape[1] - 1) // width * width)


def _without_tail(tile: int) -> Change:
    return lambda q: _zeroed(q, q.shape[1] // tile * tile) if q.shape[1] % tile else None


def _without_last(q: Quantized) -> Quantized | None:
    return _zeroed(q, q.shape[1] - 1) if q.shape[1] else None


def _flushed_codes(q: Quantized) -> Quantized:
    fmt = q.recipe.element
    if fmt.bits == 4:  # of E2M1 the codes 1 and 9 alone, in either nibble
        low, high = q.codes & 0xF, q.codes & 0xF0
        low, high = (torch.where(part & mask == one, 0, part) for part, mask, one in ((low, 7, 1), (high, 0x70, 0x10)))
        return replace(q, codes=low | high)
    subnormal = (q.codes & (fmt.sign_code - 1)) < 1 << fmt.mantissa_bits
    return replace(q, codes=torch.where(subnormal, 0, q.codes))


def _decoded(q: Quantized) -> Quantized | None:
    other: Format | None = _OTHER.get(q.recipe.element)
    if other is None:
        return None
    nan = other.max_code if other.nan_code is None else other.nan_code
    return replace(q, recipe=replace(q.recipe, element=other, nan_code=nan))  # type: ignore[arg-type]


# ---- sections --------------------------------------------------------------------------------------------------------

_From = Callable[[GemmParts, GemmParts], GemmParts | None]


def _matrix(mine: GemmParts, other: GemmParts) -> GemmParts | None:
    found = _factor(mine, other, side="b")
    return None if found is None else replace(found, right=other.right)


def _matrix_and_bias(mine: GemmParts, other: GemmParts) -> GemmParts | None:
    found = _matrix(mine, other)
    return None if found is None or mine.bias is None else replace(found, bias=other.bias)


def _matrix_scales(mine: GemmParts, other: GemmParts) -> GemmParts | None:
    right = _scaled(mine.right, other.right.scales)
    return None if right is None else replace(mine, right=right)


def _factor(mine: GemmParts, other: GemmParts, side: str = "ab") -> GemmParts | None:
    a, b = (getattr((other if name in side else mine).source, name) for name in "ab")
    if "a" in side and a.recipe.granularity == "row":  # sections have other numbers of rows
        return None
    return replace(mine, factor=alpha(a, b))


_FROM: dict[str, _From] = {
    "the matrix": _matrix,
    "the matrix and the bias": _matrix_and_bias,
    "the codes and scales of b": lambda mine, other: replace(mine, right=other.right),
    "the scales of b": _matrix_scales,
    "the factors of a and b": _factor,
    "the factor of a": lambda mine, other: _factor(mine, other, side="a"),
    "the factor of b": lambda mine, other: _factor(mine, other, side="b"),
    "the bias": lambda mine, other: None if mine.bias is None else replace(mine, bias=other.bias),
}


def _of_section(which: str, take: _From) -> Callable[[GemmParts], GemmParts | None]:
    def change(mine: GemmParts) -> GemmParts | None:
        last = len(mine.all) - 1
        number = {"next": min(mine.number + 1, last), "previous": max(mine.number - 1, 0), "first": 0}[which]
        found = take(mine, mine.all[number])
        # In the product for a weight's gradient sections have sums of other lengths.
        return None if found is None or found.left.shape[1] != found.right.shape[1] else found

    return change
