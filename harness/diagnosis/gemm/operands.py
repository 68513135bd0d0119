"""Mistakes in the operands of a GEMM: wrong scales, missing columns, wrong decoding, parts of another section."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial

import torch

from narrowgauge.harness.diagnosis.gemm.gemm_parts import GemmDeviation, GemmParts
from narrowgauge.harness.operations.swizzle.deviations import SWIZZLE_READS, wrong_offsets
from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import swap_nibbles, swizzle, unswizzle
from narrowgauge.spec.formats import E2M3, E3M2, E4M3, E5M2, E8M0, FP32, Format
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipe import mismatch
from narrowgauge.spec.scale_layouts import LAYOUTS, TILES

Change = Callable[[Quantized], Quantized | None]
"""Function to a changed operand. Its result is None if the change does not apply to the operand."""
_OTHER_FORMATS = {E4M3: E5M2, E5M2: E4M3, E2M3: E3M2, E3M2: E2M3}
_TILES = (32, 64, 128)
_BLOCKS_OF_A_STEP = (2, 4, 8)
_TABLES_OF_SECTIONS = (8, 16, 32)
"""Lengths of tables with an entry for each section, which a larger number of sections exceeds."""


def changed_scales() -> Iterator[tuple[str, str, Change]]:
    """Wrong scales of a matrix: cause, sentence with {} for the matrix, and change."""
    for step, phrase in ((1, "next"), (-1, "previous")):
        for variant, suffix in _STEP_SUFFIXES.items():
            yield (
                f"scale-of-{phrase}-block", f"blocks of {{}} take the scale of the {phrase} one{suffix}",
                _neighbour_scales(step, variant),
            )  # fmt: skip
    yield "scales-ignored", "block scales of {} are taken to be 1", _without_scales
    yield "scale-of-first-block", "every block of {} takes the scale of the row's first one", _first_scale
    for count in _BLOCKS_OF_A_STEP:
        yield (
            "scale-of-first-step", f"every {count} blocks of {{}} take the scales of the row's first {count}",
            _first_scales(count),
        )  # fmt: skip
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        yield f"scales-through-{name}", f"scales of {{}} are rounded to {name}", _rounded_scales(dtype)
    yield "scales-transposed", "scales of {} are read as if they were transposed", _transposed_scales
    yield "scales-read-swizzled", "linear scales of {} are read as swizzled ones", _read_swizzled
    yield "scales-read-linear", "scales of {} are swizzled, and read as linear ones", _read_linear


def changed_codes() -> Iterator[tuple[str, str, Change]]:
    """Wrong decoding of codes and scales: cause, sentence with {} for the matrix, and change."""
    yield "subnormal-codes-flushed", "subnormal codes of {} are taken to be 0", _flushed_codes
    yield "subnormal-scales-flushed", "subnormal scales of {} are taken to be 0", _flushed_scales
    yield "nan-read-as-number", "NaN codes of {} are read as numbers", _nan_codes_as_numbers
    yield (
        "decoded-as-other-format",
        "codes of {} are decoded as the other format of their size",
        _decoded_as_other_format,
    )


def operand_deviations() -> Iterator[GemmDeviation]:
    """Deviations of a, of b, or of both."""
    for cause, sentence, change in changed_scales():
        yield from _deviations_for_operands(cause, sentence, change)
    for cause, phrase in SWIZZLE_READS.items():
        yield from _deviations_for_operands(cause, phrase, _read_from_offsets(cause))
    yield GemmDeviation("scales-of-one-operand", "scales of a are used for b too", _scales_of_left)
    yield GemmDeviation("scales-of-one-operand", "scales of b are used for a too", _scales_of_right)
    # Swapping the pairs of a or of b gives the same products.
    yield GemmDeviation(
        "nibbles-swapped", "the two elements of a byte of one operand change places",
        _change_operands(("left",), swap_code_pairs),
    )  # fmt: skip
    yield GemmDeviation(
        "last-block-dropped", "the last block of K is left out", _change_both_operands(_without_last_block)
    )
    for tile in _TILES:
        yield GemmDeviation(
            f"tail-of-k-dropped:{tile}", f"columns of K behind the last whole {tile} are left out",
            _change_both_operands(_without_tail(tile)),
        )  # fmt: skip
    yield GemmDeviation(
        "last-element-dropped", "the last column of K is left out", _change_both_operands(_without_last_column)
    )
    for cause, sentence, change in changed_codes():
        yield from _deviations_for_operands(cause, sentence, change)
    yield GemmDeviation(
        "nan-read-as-number", "NaN scales are read as numbers", _change_both_operands(_nan_scales_as_numbers)
    )


def section_deviations(count: int) -> Iterator[GemmDeviation]:
    """Sections of a grouped GEMM with `count` sections that take a part of another section."""
    for name, position in _POSITIONS.items():
        for part_name, take_part in _SECTION_PARTS.items():
            yield GemmDeviation(
                "section-of-neighbour", f"every section takes {part_name} of the {name} one",
                _take_from_section(position, take_part),
            )  # fmt: skip
    for length in (length for length in _TABLES_OF_SECTIONS if length < count):
        for part_name, take_part in _SECTION_PARTS.items():
            yield GemmDeviation(
                "section-of-neighbour", f"section n takes {part_name} of section n modulo {length}",
                _take_from_section(partial(_modulo, length), take_part),
            )  # fmt: skip


def _deviations_for_operands(cause: str, sentence: str, change: Change) -> Iterator[GemmDeviation]:
    for operands, phrase in ((("left", "right"), "both operands"), (("left",), "a"), (("right",), "b")):
        yield GemmDeviation(cause, sentence.format(phrase), _change_operands(operands, change))


def _change_operands(operands: tuple[str, ...], change: Change) -> Callable[[GemmParts], GemmParts | None]:
    def change_parts(parts: GemmParts) -> GemmParts | None:
        changed = {name: change(getattr(parts, name)) for name in operands}
        if any(q is None for q in changed.values()):
            return None  # a change of both operands applies to both
        changed_parts = replace(parts, **changed)  # type: ignore[arg-type]
        return None if mismatch(changed_parts.left.recipe, changed_parts.right.recipe) else changed_parts

    return change_parts


def _change_both_operands(change: Change) -> Callable[[GemmParts], GemmParts | None]:
    return _change_operands(("left", "right"), change)


# ---- scales ----------------------------------------------------------------------------------------------------------

_STEP_SUFFIXES = {
    "within": ", the last its own", "around": ", the last that of the other end of the row",
    "memory": ", the last that of another row",
}  # fmt: skip


def _with_scales(q: Quantized, scales: torch.Tensor) -> Quantized | None:
    return None if q.recipe.whole or scales.shape != q.scales.shape else replace(q, scales=scales.contiguous())


def _neighbour_scales(step: int, variant: str) -> Change:
    def change(q: Quantized) -> Quantized | None:
        blocks = q.scales.shape[1]
        if variant == "memory":
            return _with_scales(q, q.scales.flatten().roll(-step).view(q.scales.shape))
        neighbours = torch.arange(blocks, device=q.scales.device) + step
        neighbours = neighbours % blocks if variant == "around" else neighbours.clamp(0, blocks - 1)
        return _with_scales(q, q.scales[:, neighbours])

    return change


def _without_scales(q: Quantized) -> Quantized | None:
    fmt = q.recipe.scale
    scale_1 = 1.0 if fmt is FP32 else float(encode(torch.ones(1, device=q.codes.device), fmt))
    return _with_scales(q, torch.full_like(q.scales, scale_1))


def _first_scale(q: Quantized) -> Quantized | None:
    return _with_scales(q, q.scales[:, :1].expand_as(q.scales))


def _first_scales(count: int) -> Change:
    def change(q: Quantized) -> Quantized | None:
        blocks = q.scales.shape[1]
        if blocks <= count:
            return None
        return _with_scales(q, q.scales[:, torch.arange(blocks, device=q.scales.device) % count])

    return change


def _rounded_scales(dtype: torch.dtype) -> Change:
    def change(q: Quantized) -> Quantized | None:
        if q.recipe.scale is not FP32:
            return None
        rounded = q.scales.to(dtype).float()
        # A scale that overflows would leave the sums unknown, and they would fit any output.
        return _with_scales(q, rounded) if torch.equal(rounded.isfinite(), q.scales.isfinite()) else None

    return change


def _transposed_scales(q: Quantized) -> Quantized | None:
    return _with_scales(q, q.scales.T.reshape(q.scales.shape))


def _read_swizzled(q: Quantized) -> Quantized | None:
    if q.scales.dtype != torch.uint8:
        return None
    return _with_scales(q, unswizzle(LAYOUTS[TILES].pad(q.scales), (q.scales.shape[0], q.scales.shape[1])))


def _read_linear(q: Quantized) -> Quantized | None:
    if q.scales.dtype != torch.uint8:
        return None
    return _with_scales(q, swizzle(q.scales).flatten()[: q.scales.numel()].view(q.scales.shape))


def _read_from_offsets(cause: str) -> Change:
    def change(q: Quantized) -> Quantized | None:
        offsets = None if q.scales.dtype != torch.uint8 else wrong_offsets(cause, q.scales.shape, q.scales.device)
        return None if offsets is None else _with_scales(q, swizzle(q.scales).flatten()[offsets])

    return change


def _flushed_scales(q: Quantized) -> Quantized | None:
    if q.recipe.scale is E8M0:  # only 2^-127 is subnormal as a float32 number
        subnormal = (q.scales == 0).repeat_interleave(q.recipe.block[1], dim=1)
        return _with_zero_codes(q, subnormal[:, : q.shape[1]])
    if q.recipe.scale is not E4M3:
        return None
    subnormal = (q.scales & (E4M3.sign_code - 1)) < 1 << E4M3.mantissa_bits
    return _with_scales(q, torch.where(subnormal, 0, q.scales))


def _repeat_rows(scales: torch.Tensor, rows: int) -> torch.Tensor:
    return scales[torch.arange(rows, device=scales.device) % len(scales)] if len(scales) else scales


def _scales_of_left(parts: GemmParts) -> GemmParts | None:
    right = _with_scales(parts.right, _repeat_rows(parts.left.scales, len(parts.right.scales)))
    return None if right is None else replace(parts, right=right)


def _scales_of_right(parts: GemmParts) -> GemmParts | None:
    left = _with_scales(parts.left, _repeat_rows(parts.right.scales, len(parts.left.scales)))
    return None if left is None else replace(parts, left=left)


# ---- codes -----------------------------------------------------------------------------------------------------------


def swap_code_pairs(q: Quantized) -> Quantized | None:
    """The matrix with both codes of every byte exchanged. None if a byte has a single code."""
    return replace(q, codes=swap_nibbles(q.codes)) if q.recipe.element.bits == 4 else None


def _zero_columns(q: Quantized, first: int) -> Quantized:
    """The matrix with zeros in the columns of K from `first` on."""
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
    return None if q.recipe.spans_k or q.shape[1] == 0 else _zero_columns(q, (q.shape[1] - 1) // width * width)


def _without_tail(tile: int) -> Change:
    return lambda q: _zero_columns(q, q.shape[1] // tile * tile) if q.shape[1] % tile else None


def _without_last_column(q: Quantized) -> Quantized | None:
    return _zero_columns(q, q.shape[1] - 1) if q.shape[1] else None


def _flushed_codes(q: Quantized) -> Quantized:
    fmt = q.recipe.element
    if fmt.bits == 4:  # the subnormal codes of E2M1 are 1 and 9, in both nibbles of a byte
        low, high = q.codes & 0xF, q.codes & 0xF0
        low = torch.where(low & 0x7 == 0x1, 0, low)
        high = torch.where(high & 0x70 == 0x10, 0, high)
        return replace(q, codes=low | high)
    subnormal = (q.codes & (fmt.sign_code - 1)) < 1 << fmt.mantissa_bits
    return replace(q, codes=torch.where(subnormal, 0, q.codes))


def _with_zero_codes(q: Quantized, zero: torch.Tensor) -> Quantized:
    """The matrix with code 0 where the mask `zero` (M, K) is True."""
    if q.recipe.element.bits != 4:
        return replace(q, codes=q.codes.masked_fill(zero, 0))
    pairs = torch.nn.functional.pad(zero, (0, q.shape[1] % 2)).view(len(zero), -1, 2)
    codes = q.codes.masked_fill(pairs[..., 0], 0) & 0xF | q.codes.masked_fill(pairs[..., 1], 0) & 0xF0
    return replace(q, codes=codes)


def _nan_codes_as_numbers(q: Quantized) -> Quantized | None:
    fmt = q.recipe.element
    if fmt.nan_code is None:
        return None
    return _with_format(q, "element", _without_nan(fmt))


def _nan_scales_as_numbers(q: Quantized) -> Quantized | None:
    fmt = q.recipe.scale
    if fmt is FP32 or fmt.nan_code is None:
        return None
    return _with_format(q, "scale", _without_nan(fmt))


def _with_format(q: Quantized, name: str, fmt: Format) -> Quantized:
    """The matrix with another format of its elements or scales, which the checks of a recipe would reject."""
    recipe = copy(q.recipe)
    object.__setattr__(recipe, name, fmt)
    return replace(q, recipe=recipe)


@lru_cache(maxsize=8)
def _without_nan(fmt: Format) -> Format:
    """The format with numbers in place of NaN and infinity."""
    return replace(fmt, max_code=max(fmt.max_code, fmt.nan_code or 0), nan_code=None, inf_code=None)


def _decoded_as_other_format(q: Quantized) -> Quantized | None:
    other_format: Format | None = _OTHER_FORMATS.get(q.recipe.element)
    if other_format is None:
        return None
    nan = other_format.max_code if other_format.nan_code is None else other_format.nan_code
    return replace(q, recipe=replace(q.recipe, element=other_format, nan_code=nan))  # type: ignore[arg-type]


# ---- sections --------------------------------------------------------------------------------------------------------

TakePart = Callable[[GemmParts, GemmParts], GemmParts | None]
"""Function from the parts of a section and of another section to the changed parts of the first section."""


def _matrix(parts: GemmParts, other_section: GemmParts) -> GemmParts | None:
    changed_parts = _factor(parts, other_section, side="b")
    return None if changed_parts is None else replace(changed_parts, right=other_section.right)


def _matrix_and_bias(parts: GemmParts, other_section: GemmParts) -> GemmParts | None:
    changed_parts = _matrix(parts, other_section)
    return None if changed_parts is None or parts.bias is None else replace(changed_parts, bias=other_section.bias)


def _matrix_scales(parts: GemmParts, other_section: GemmParts) -> GemmParts | None:
    right = _with_scales(parts.right, other_section.right.scales)
    return None if right is None else replace(parts, right=right)


def _factor(parts: GemmParts, other_section: GemmParts, side: str = "ab") -> GemmParts | None:
    if parts.tensor_factors is not None and other_section.tensor_factors is not None:
        sources = ((other_section if name in side else parts).tensor_factors for name in "ab")
        left, right = (factors[number] for number, factors in enumerate(sources) if factors is not None)
        return None if len(left.values) > 1 and "a" in side else replace(parts, tensor_factors=(left, right))
    a, b = (getattr((other_section if name in side else parts).source, name) for name in "ab")
    if "a" in side and a.recipe.granularity == "row":  # sections have different numbers of rows
        return None
    return replace(parts, factor=alpha(a, b))


_SECTION_PARTS: dict[str, TakePart] = {
    "the matrix": _matrix,
    "the matrix and the bias": _matrix_and_bias,
    "the codes and scales of b": lambda parts, other_section: replace(parts, right=other_section.right),
    "the scales of b": _matrix_scales,
    "the factors of a and b": _factor,
    "the factor of a": lambda parts, other_section: _factor(parts, other_section, side="a"),
    "the factor of b": lambda parts, other_section: _factor(parts, other_section, side="b"),
    "the bias": lambda parts, other_section: None if parts.bias is None else replace(parts, bias=other_section.bias),
}


Position = Callable[[int, int], int]
"""Function from the number of a section and the number of sections to the number of another section."""
_POSITIONS: dict[str, Position] = {
    "next": lambda number, count: min(number + 1, count - 1),
    "previous": lambda number, count: max(number - 1, 0),
    "first": lambda number, count: 0,
}


def _modulo(length: int, number: int, count: int) -> int:
    return number % length


def _take_from_section(position: Position, take_part: TakePart) -> Callable[[GemmParts], GemmParts | None]:
    def change_section(parts: GemmParts) -> GemmParts | None:
        changed_parts = take_part(parts, parts.sections[position(parts.number, len(parts.sections))])
        if changed_parts is None or changed_parts.left.shape[1] != changed_parts.right.shape[1]:
            return None  # in the GEMM of a weight gradient, sections have sums of different lengths
        return changed_parts

    return change_section
