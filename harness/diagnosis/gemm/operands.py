"""Mistakes in the operands of a GEMM: wrong scales, missing columns, wrong decoding, parts of another section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from narrowgauge.harness.diagnosis.gemm.gemm_parts import GemmParts, operand_values
from narrowgauge.harness.diagnosis.quantize.elements.roundings import NARROW
from narrowgauge.harness.operations.pack_scales.deviations import SWIZZLE_READS
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.gemm.operands import element_values
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import elements, swap_nibbles, swizzle, unswizzle
from narrowgauge.spec.formats import E2M3, E3M2, E4M3, E5M2, E8M0, FP32, Format
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipe import mismatch
from narrowgauge.spec.scale_layouts import LAYOUTS, TILES

_OTHER_FORMATS = {E4M3: E5M2, E5M2: E4M3, E2M3: E3M2, E3M2: E2M3}
_FITTED_ROWS = 8
"""Rows of wrong outputs that a number for a code is fitted to."""
_TILES = {"32": 32, "64": 64, "128": 128}
"""Columns of K of which a kernel may take whole ones alone."""
Changed = Quantized | None
"""A changed operand. None: the change does not apply to the operand."""


# ---- scales ----------------------------------------------------------------------------------------------------------


def _with_scales(q: Quantized, scales: torch.Tensor) -> Changed:
    return None if q.recipe.whole or scales.shape != q.scales.shape else replace(q, scales=scales.contiguous())


def _neighbour_scales(neighbour: tuple[int, str], q: Quantized) -> Changed:
    """Scales of the blocks at a distance. The last block of a row takes its own scale, or as the second value says."""
    (distance, last), blocks = neighbour, q.scales.shape[1]
    if last == "memory":
        return _with_scales(q, q.scales.flatten().roll(-distance).view(q.scales.shape))
    neighbours = torch.arange(blocks, device=q.scales.device) + distance
    return _with_scales(q, q.scales[:, neighbours % blocks if last == "around" else neighbours.clamp(0, blocks - 1)])


def _neighbours(distance: int) -> dict[str, tuple[int, str]]:
    return {
        "its own": (distance, "own"), "that of the other end of the row": (distance, "around"),
        "that of another row": (distance, "memory"),
    }  # fmt: skip


def _without_scales(q: Quantized) -> Changed:
    fmt = q.recipe.scale
    scale_1 = 1.0 if fmt is FP32 else float(encode(torch.ones(1, device=q.codes.device), fmt))
    return _with_scales(q, torch.full_like(q.scales, scale_1))


def _first_scale(q: Quantized) -> Changed:
    return _with_scales(q, q.scales[:, :1].expand_as(q.scales))


def _first_scales(count: int, q: Quantized) -> Changed:
    blocks = q.scales.shape[1]
    if blocks <= count:
        return None
    return _with_scales(q, q.scales[:, torch.arange(blocks, device=q.scales.device) % count])


def _rounded_scales(dtype: torch.dtype, q: Quantized) -> Changed:
    if q.recipe.scale is not FP32:
        return None
    rounded = q.scales.to(dtype).float()
    # A scale that overflows would leave the sums unknown, and they would fit any output.
    return _with_scales(q, rounded) if torch.equal(rounded.isfinite(), q.scales.isfinite()) else None


def _transposed_scales(q: Quantized) -> Changed:
    return _with_scales(q, q.scales.T.reshape(q.scales.shape))


def _read_swizzled(q: Quantized) -> Changed:
    if q.scales.dtype != torch.uint8:
        return None
    return _with_scales(q, unswizzle(LAYOUTS[TILES].pad(q.scales), (q.scales.shape[0], q.scales.shape[1])))


def _read_linear(q: Quantized) -> Changed:
    if q.scales.dtype != torch.uint8:
        return None
    return _with_scales(q, swizzle(q.scales).flatten()[: q.scales.numel()].view(q.scales.shape))


def _read_from_offsets(offsets_of: Callable[[torch.Tensor], torch.Tensor | None], q: Quantized) -> Changed:
    offsets = None if q.scales.dtype != torch.uint8 else offsets_of(q.scales)
    return None if offsets is None else _with_scales(q, swizzle(q.scales).flatten()[offsets])


def _flushed_scales(q: Quantized) -> Changed:
    if q.recipe.scale is E8M0:  # only 2^-127 is subnormal as a float32 number
        subnormal = (q.scales == 0).repeat_interleave(q.recipe.block[1], dim=1)
        return _with_zero_codes(q, subnormal[:, : q.shape[1]])
    if q.recipe.scale is not E4M3:
        return None
    subnormal = (q.scales & (E4M3.sign_code - 1)) < 1 << E4M3.mantissa_bits
    return _with_scales(q, torch.where(subnormal, 0, q.scales))


def _repeat_rows(scales: torch.Tensor, rows: int) -> torch.Tensor:
    return scales[torch.arange(rows, device=scales.device) % len(scales)] if len(scales) else scales


def _scales_of_one(side: str, parts: GemmParts) -> GemmParts | None:
    """The scales of an operand in both."""
    taken = parts.left if side == "a" else parts.right
    other, name = (parts.right, "right") if side == "a" else (parts.left, "left")
    changed = _with_scales(other, _repeat_rows(taken.scales, len(other.scales)))
    return None if changed is None else replace(parts, **{name: changed})  # type: ignore[arg-type]


# ---- codes -----------------------------------------------------------------------------------------------------------


def swap_code_pairs(q: Quantized) -> Changed:
    """The matrix with both codes of every byte exchanged. None if a byte has a single code."""
    return replace(q, codes=swap_nibbles(q.codes)) if q.recipe.element.bits == 4 else None


@dataclass(frozen=True)
class _Columns:
    """Columns of K."""

    first: int
    end: int
    depth: int
    """K."""

    @property
    def name(self) -> str:
        """The columns: `240 to 255`."""
        return f"{self.first} to {self.end - 1}"

    @property
    def others(self) -> str:
        """The other columns: `0 to 31 and 48 to 271`."""
        before, behind = _Columns(0, self.first, self.depth), _Columns(self.end, self.depth, self.depth)
        return " and ".join(part.name for part in (before, behind) if part.first < part.end)


def _zero_columns(q: Quantized, first: int, end: int | None = None) -> Quantized:
    """The matrix with zeros in the columns of K from `first` on, up to `end`."""
    numbers = torch.arange(q.shape[1], device=q.codes.device)
    zero = (numbers >= first) & (numbers < (q.shape[1] if end is None else end))
    return _with_zero_codes(q, zero.expand(q.shape))


_MOST_CUTS, _OF_SAMPLE = 128, 8
"""Columns of K at which a missing part may begin or end; rows and columns of wrong outputs that tell the part."""


def _missing_columns(parts: GemmParts) -> dict[str, _Columns]:
    """The columns of K whose products are nearest to the missing sums of a few wrong outputs, or empty.

    The sums are float64: `fits` decides if the columns explain the outputs. Parts that another row leaves out, and all
    of K, do not count.
    """
    depth = parts.left.shape[1]
    wrong = next((one for one in parts.sections or (parts,) if bool(one.wrong.any())), None)
    if wrong is None or wrong.tensor_factors is not None or wrong.left.shape[1] != depth or depth < 2:
        return {}
    rows = wrong.wrong.any(1).nonzero().flatten()[:_OF_SAMPLE]
    few = wrong.select(rows, wrong.wrong[rows].any(0).nonzero().flatten()[:_OF_SAMPLE])
    terms = operand_values(few.left).unsqueeze(1) * operand_values(few.right)
    sums = torch.nn.functional.pad(terms.cumsum(2), (1, 0)).flatten(0, 1)
    found = few.output.double()
    for addend in (few.c, few.bias):
        found = found if addend is None else found - addend.double()
    found = found if few.promotes else found / few.factor.double()
    step = 1 if depth <= _MOST_CUTS else 8 * -(-depth // (8 * _MOST_CUTS))
    cuts = torch.tensor([*range(0, depth, step), depth], device=sums.device)
    missing = sums[:, -1] - found.flatten()
    known = missing.isfinite() & sums.isfinite().all(1)
    if not bool(known.any()):
        return {}
    at_cuts = sums[known][:, cuts]
    error = (at_cuts.unsqueeze(1) - at_cuts.unsqueeze(2) - missing[known].view(-1, 1, 1)).abs().sum(0)
    error = error.masked_fill(cuts.unsqueeze(1) >= cuts, torch.inf)
    error[0, -1] = torch.inf
    first, end = (int(cuts[n]) for n in divmod(int(error.argmin()), len(cuts)))
    width = parts.left.recipe.block[1]
    named = {depth - 1, *(depth // tile * tile for tile in _TILES.values())}
    named |= set() if parts.left.recipe.spans_k else {(depth - 1) // width * width}
    columns = _Columns(first, end, depth)
    return {} if end == depth and first in named else {columns.name: columns}


def _without_columns(columns: _Columns, parts: GemmParts) -> GemmParts | None:
    return _on_both(partial(_zero_columns, first=columns.first, end=columns.end))(parts)


def _without_last_block(q: Quantized) -> Changed:
    width = q.recipe.block[1]
    return None if q.recipe.spans_k or q.shape[1] == 0 else _zero_columns(q, (q.shape[1] - 1) // width * width)


def _without_tail(tile: int, q: Quantized) -> Changed:
    return _zero_columns(q, q.shape[1] // tile * tile) if q.shape[1] % tile else None


def _without_last_column(q: Quantized) -> Changed:
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
    pairs = torch.nn.functional.pad(zero, (0, q.shape[1] % 2)).view(len(zero), -(-q.shape[1] // 2), 2)
    codes = q.codes.masked_fill(pairs[..., 0], 0) & 0xF | q.codes.masked_fill(pairs[..., 1], 0) & 0xF0
    return replace(q, codes=codes)


def _nan_codes_as_numbers(q: Quantized) -> Changed:
    fmt = q.recipe.element
    if fmt.nan_code is None:
        return None
    return _with_format(q, "element", _without_nan(fmt))


def _nan_scales_as_numbers(q: Quantized) -> Changed:
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


def _decoded_as_other_format(q: Quantized) -> Changed:
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
_TABLES_OF_SECTIONS = (8, 16, 32)
"""Lengths of tables with an entry for each section, which a larger number of sections exceeds."""


def _of_tables(parts: GemmParts) -> dict[str, tuple[Position, TakePart]]:
    return {
        f"{name} of section n modulo {length}": (partial(_modulo, length), take)
        for length in _TABLES_OF_SECTIONS
        if length < len(parts.sections)
        for name, take in _SECTION_PARTS.items()
    }


def _modulo(length: int, number: int, count: int) -> int:
    return number % length


def _of_section(taken: tuple[Position, TakePart], parts: GemmParts) -> GemmParts | None:
    position, take = taken
    changed_parts = take(parts, parts.sections[position(parts.number, len(parts.sections))])
    if changed_parts is None or changed_parts.left.shape[1] != changed_parts.right.shape[1]:
        return None  # in the GEMM of a weight gradient, sections have sums of different lengths
    return changed_parts


# ---- the tables ------------------------------------------------------------------------------------------------------

_OF_NEIGHBOUR = "blocks of {of} take the scale of the %s one, the last {}"
CHANGED_SCALES: tuple[Deviation[Quantized], ...] = (
    Deviation("scale-of-next-block", _OF_NEIGHBOUR % "next", "scales", _neighbour_scales, _neighbours(1),
              row_local=False),
    Deviation("scale-of-previous-block", _OF_NEIGHBOUR % "previous", "scales", _neighbour_scales, _neighbours(-1),
              row_local=False),
    Deviation("scales-ignored", "block scales of {of} are taken to be 1", "scales", _without_scales),
    Deviation("scale-of-first-block", "every block of {of} takes the scale of the row's first one", "scales",
              _first_scale),
    Deviation("scale-of-first-step", "every {0} blocks of {of} take the scales of the row's first {0}",
              "scales", _first_scales, {"2": 2, "4": 4, "8": 8}),
    Deviation("scales-through-{}", "scales of {of} are rounded to {}", "scales", _rounded_scales, NARROW),
    Deviation("scales-transposed", "scales of {of} are read as if they were transposed", "scales", _transposed_scales,
              row_local=False),
    Deviation("scales-read-swizzled", "linear scales of {of} are read as swizzled ones", "scales", _read_swizzled,
              row_local=False),
    Deviation("scales-read-linear", "scales of {of} are swizzled, and read as linear ones", "scales", _read_linear,
              row_local=False),
)  # fmt: skip
"""Wrong scales of a matrix. The sentence has {of} for the matrix."""
CHANGED_CODES: tuple[Deviation[Quantized], ...] = (
    Deviation("subnormal-codes-flushed", "subnormal codes of {of} are taken to be 0", "codes", _flushed_codes),
    Deviation("subnormal-scales-flushed", "subnormal scales of {of} are taken to be 0", "codes", _flushed_scales),
    Deviation("nan-read-as-number", "NaN codes of {of} are read as numbers", "codes", _nan_codes_as_numbers),
    Deviation("decoded-as-other-format", "codes of {of} are decoded as the other format of their size", "codes",
              _decoded_as_other_format),
)  # fmt: skip
"""Wrong decoding of codes and scales of a matrix. The sentence has {of} for the matrix."""


def _on(operands: tuple[str, ...], change: Callable[[Quantized], Changed], parts: GemmParts) -> GemmParts | None:
    """The parts with changed operands. A change of both operands applies to both."""
    changed = {name: change(getattr(parts, name)) for name in operands}
    if any(q is None for q in changed.values()):
        return None
    changed_parts = replace(parts, **changed)  # type: ignore[arg-type]
    return None if mismatch(changed_parts.left.recipe, changed_parts.right.recipe) else changed_parts


def _on_both(change: Callable[[Quantized], Changed]) -> Callable[[GemmParts], GemmParts | None]:
    return partial(_on, ("left", "right"), change)


def _element_table(q: Quantized) -> torch.Tensor:
    """Magnitude codes of the elements, int64 (M, K)."""
    codes = elements(q.codes, q.shape[1], q.recipe)
    return (codes & (q.recipe.element.sign_code - 1)).long()


def _with_entry(side: str, entry: tuple[int, float], parts: GemmParts) -> GemmParts:
    """The parts with another number for a code of a magnitude in a, b or both: all elements as codes of E4M3, which
    holds the numbers of 4-bit elements and quarters up to 16."""
    operands = []
    for name, q in (("a", parts.left), ("b", parts.right)):
        numbers = element_values(q)
        if side in (name, "both operands"):
            numbers = torch.where(_element_table(q) == entry[0], numbers.sign() * entry[1], numbers)
        operands.append(_with_format(replace(q, codes=encode(numbers.float(), E4M3)), "element", E4M3))
    return replace(parts, left=operands[0], right=operands[1])


def _entries(parts: GemmParts) -> Iterator[tuple[str, tuple[str, tuple[int, float]]]]:
    """Numbers for single codes of 4-bit elements that a least-squares fit of some rows of wrong outputs gives."""
    formats = {parts.left.recipe.element, parts.right.recipe.element}
    if len(formats) > 1 or parts.left.recipe.element.bits != 4 or parts.tensor_factors is not None:
        return
    rows = parts.wrong.any(1).nonzero().flatten()[:_FITTED_ROWS]
    few = parts.select(rows, torch.arange(parts.output.shape[1], device=rows.device))
    left, right = operand_values(few.left), operand_values(few.right)
    total = few.output.double() - sum(x.double() for x in (few.c, few.bias) if x is not None)
    rest = total / few.factor.double() - left @ right.T
    tables = _element_table(few.left), _element_table(few.right)
    for code in range(1, parts.left.recipe.element.max_code + 1):
        right_value = parts.left.recipe.element.values[code]
        a, b = (
            torch.where(table == code, x / right_value, 0.0) for table, x in zip(tables, (left, right), strict=True)
        )
        of_a, of_b = a @ right.T, left @ b.T
        for side, product in (("both operands", of_a + of_b), ("a", of_a), ("b", of_b)):
            fitted = rest.isfinite() & product.isfinite()
            weight = float((product[fitted] ** 2).sum())
            change = float((product[fitted] * rest[fitted]).sum()) / weight if weight else 0.0
            value = round(4 * (right_value + change)) / 4
            if 0 <= value <= 2 * parts.left.recipe.element.max and value != right_value:
                yield f"{value:g} for {right_value:g} in {side}", (side, (code, value))


TABLE_ENTRY: Deviation[GemmParts] = Deviation(
    "element-table", "the table of element values has {}", "operands",
    lambda found, parts: _with_entry(found[0], found[1], parts), _entries,
)  # fmt: skip
OPERANDS: tuple[Deviation[GemmParts], ...] = (
    Deviation("scales-of-one-operand", "scales of a are used for b too", "operands", partial(_scales_of_one, "a")),
    Deviation("scales-of-one-operand", "scales of b are used for a too", "operands", partial(_scales_of_one, "b")),
    # Swapping the pairs of a or of b gives the same products.
    Deviation("nibbles-swapped", "the two elements of a byte of one operand change places", "operands",
              partial(_on, ("left",), swap_code_pairs)),
    Deviation("last-block-dropped", "the last block of K is left out", "operands", _on_both(_without_last_block)),
    Deviation("tail-of-k-dropped:{}", "columns of K behind the last whole {} are left out", "operands",
              lambda tile, parts: _on_both(partial(_without_tail, tile))(parts), _TILES),
    Deviation("last-element-dropped", "the last column of K is left out", "operands", _on_both(_without_last_column)),
    Deviation("columns-of-k-dropped:{}", "columns {0} of K are left out: the outputs equal the product over columns "
              "{1.others}", "operands", _without_columns, _missing_columns),
    TABLE_ENTRY,
)  # fmt: skip
"""Wrong operands."""
NAN_SCALES: Deviation[GemmParts] = Deviation(
    "nan-read-as-number", "NaN scales are read as numbers", "operands", _on_both(_nan_scales_as_numbers)
)
SECTIONS: tuple[Deviation[GemmParts], ...] = (
    Deviation("section-of-neighbour", "every section takes {} one", "operands", _of_section,
              {f"{name} of the {where}": (position, take) for where, position in _POSITIONS.items()
               for name, take in _SECTION_PARTS.items()}, when=lambda parts: len(parts.sections) > 1),
    Deviation("section-of-neighbour", "section n takes {}", "operands", _of_section, _of_tables),
)  # fmt: skip
"""Sections of a grouped GEMM that take a part of another section."""


def operand_deviations(parts: GemmParts) -> Iterator[Deviation[GemmParts]]:
    """Deviations of a, of b, or of both, the most plausible first."""
    yield from _on_each(rows_of(CHANGED_SCALES, parts.left))
    reads = (row.through(_read_from_offsets) for row in rows_of(SWIZZLE_READS, parts.left.scales))
    yield from _on_each(reads)
    yield from rows_of(OPERANDS, parts)
    yield from _on_each(rows_of(CHANGED_CODES, parts.left))
    yield NAN_SCALES


def _on_each(rows: Iterable[Deviation[Any]]) -> Iterator[Deviation[GemmParts]]:
    """Each row for both operands, for a, and for b."""
    for row in rows:
        for operands, phrase in ((("left", "right"), "both operands"), (("left",), "a"), (("right",), "b")):
            yield row.through(partial(_on, operands), sentence=row.sentence.format(of=phrase), step="operands")
