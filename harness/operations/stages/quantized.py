"""The stages of a quantized matrix, judged given the kernel's own result of the stage before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import Any

import torch

from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.checks.bit_equality import same_bytes, with_nans_of
from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.exact import exact_codes, exact_floats
from narrowgauge.harness.checks.finding import bits, float_view
from narrowgauge.harness.checks.rotation_interval import Interval, rotated_interval
from narrowgauge.harness.checks.rounding_boundary import Sources, boundary_codes, boundary_floats
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.checks.statistics.correlations import Roundings
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.black_box import Draw, distribution_stage
from narrowgauge.harness.operations.stages.oracle import (
    block_amaxes,
    encode_elements,
    stored_scales,
    tensor_amax,
    tensor_scale,
)
from narrowgauge.reference.quantize.layout import elements, linear_scales
from narrowgauge.reference.quantize.scaling import divide, element_factors, per_row, scale_elements
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.formats import FP32, Format
from narrowgauge.spec.quantized import PARTS, Half, Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LAYOUTS, LINEAR, Packing, ScaleLayout


@dataclass
class Subject:
    """A matrix to be quantized along its rows, and everything with an influence on the bytes."""

    matrix: torch.Tensor
    """(M, K), not yet rotated."""
    recipe: Recipe
    random: Random | None = None
    first: int = 0
    """Number of the first block, if Philox counts through several matrices."""
    transposed: bool = False
    """Whether the subject is a columnwise half with the tiles of the rowwise half, 4over6's choice included."""
    free: bool = False
    """Whether a rotation adds in a free order."""
    own: bool = False
    """Whether the kernel rounds by random bits of its own."""
    draw: Draw | None = None
    """Codes of its further calls, if available."""
    halves: list[Roundings] | None = None
    """Roundings of the halves judged before, if a single call with random bits of the kernel makes both halves."""
    amax_given: bool = False
    """Whether the amax is an argument, in place of the matrix's own amax."""
    ends: Interval | None = None
    """Intervals of the elements of the matrix, if unknown, for example sums in any order."""

    def __post_init__(self) -> None:
        self.matrix = dense(self.matrix)

    @classmethod
    def of_half(
        cls, half: Half, x: torch.Tensor, recipe: Recipe, random: Random | None = None, **options: Any
    ) -> Subject:
        """A half of `x` (M, K) under its own recipe. `random`: of this half. `options`: further fields."""
        transposed = half is Half.COLUMN and recipe.candidates != "6" and recipe.block[0] > 1
        return cls(half.matrix(x), recipe, random, transposed=transposed, **options)

    @cached_property
    def x(self) -> torch.Tensor:
        """The quantized numbers: rotated in the reference's order if the recipe rotates."""
        return reference.transform(self.matrix, self.recipe) if self.recipe.transform else self.matrix

    @property
    def rule(self) -> str:
        """`boundary` if `x` is known to within an interval, else `exact`."""
        return "boundary" if self.ends is not None or (self.free and self.recipe.transform) else "exact"

    @cached_property
    def interval(self) -> Interval:
        """Intervals of `x` for every order of its sums."""
        return rotated_interval(self.matrix, self.recipe) if self.ends is None else self.ends

    @cached_property
    def blocks(self) -> torch.Tensor:
        """Block amaxes, like linear scales: one for each that is stored."""
        return block_amaxes(self.x, self.recipe)

    @cached_property
    def block_ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the greatest block amaxes."""
        least, greatest = self.interval.magnitude
        return block_amaxes(least, self.recipe), block_amaxes(greatest, self.recipe)

    def scales(
        self, amax: torch.Tensor | None, encode: torch.Tensor | None, blocks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Stored block scales under these numbers, of `blocks` in place of the blocks of `x` if given."""
        if not self.transposed:
            return stored_scales(self.x, self.blocks if blocks is None else blocks, amax, encode, self.recipe)
        rows = self.x.T.contiguous()
        stored = stored_scales(rows, block_amaxes(rows, self.recipe), amax, encode, self.recipe)
        height = self.recipe.block[0]
        return stored[::height].T.repeat_interleave(height, 0)[: self.x.shape[0]].contiguous()

    def codes(self, scales: torch.Tensor, encode: torch.Tensor | None, x: torch.Tensor | None = None) -> torch.Tensor:
        """Codes stored along rows, under these scales, of `x` in place of the subject's own numbers if given."""
        own, blocks = (self.x, self.blocks) if x is None else (x, None)
        return encode_elements(own, scales, encode, self.recipe, self.random, self.first, blocks)

    @property
    def group(self) -> int:
        """Number of elements rotated together; 1 without a rotation."""
        return self.recipe.transform.group if self.recipe.transform else 1

    def sources(self, *, rows: int = 1, columns: int = 1) -> Sources | None:
        """Elements of a stage from the same sums: at least a rotated group. None: errors of the sums need
        not be symmetric."""
        return None if self.ends is not None else Sources(self.matrix, rows, max(columns, self.group))


@dataclass
class Judged:
    """A quantized matrix with judged stages: for views of single elements."""

    prefix: str
    subject: Subject
    kernel: Quantized
    """The kernel's result with linear scales, and with the reference's amax if the kernel shows no amax."""
    oracle: Quantized
    given: Quantized
    """The kernel's result, contiguous, with scales in their layout."""


def quantize_stages(
    subject: Subject, kernel: Quantized, oracle: Quantized, prefix: str = ""
) -> tuple[list[StageResult], Judged]:
    """amax, tensor scale, layout (of scales that are not linear), block scales and codes of `kernel`.

    `oracle` is the reference's quantization of the subject, with linear scales. A stage that the kernel does not show
    (no amax, no tensor scale), or that its recipe has not, is not judged and does not appear. Either both are
    `transposed` or neither; findings are in the coordinates of the given matrix.
    """
    stages = []
    recipe, kernel = subject.recipe, dense_parts(kernel)
    amax, encode = oracle.amax, oracle.tensor_scale
    if amax is not None and encode is not None:
        if kernel.amax is not None:
            stages.append(_amax(prefix + "amax", subject, kernel.amax, amax))
            amax = kernel.amax
            if recipe.tensor_scale != "given":
                encode = tensor_scale(amax, recipe, subject.matrix.dtype)  # rotations keep the dtype
        if kernel.tensor_scale is not None:
            stages.append(_numbers(prefix + "tensor scale", kernel.tensor_scale, encode, "tensor scales"))
            if recipe.tensor_scale != "given":
                encode = kernel.tensor_scale
    right, own = linear_scales(oracle), stored_along_rows(oracle)
    as_oracle = _same(encode, oracle.tensor_scale) and _same(amax, oracle.amax)
    expected = right if as_oracle else subject.scales(amax, encode)
    if kernel.scale_layout != LINEAR:
        layout, scales = _layout(prefix + "layout", kernel, expected)
        stages.append(layout)
    else:
        scales = linear_scales(kernel)
    scales = _with_nans_of(expected, scales, recipe.scale)
    transposed = kernel.transposed
    stages.append(_scales(prefix + "scales", subject, scales, expected, (amax, encode), kernel))
    used = used_scale(encode, scales, kernel)
    packed = own if as_oracle and used is encode and same_bytes(scales, right) else subject.codes(scales, used)
    found = stored_along_rows(kernel)
    codes = _with_nans_of(packed, found, recipe.element)
    stages.append(_codes(prefix + "codes", subject, codes, packed, scales, used, kernel))
    # With statistics of x's dtype, the tensor scale cannot be found again without x.
    kept = kernel.tensor_scale if recipe.statistics == "float32" else encode
    stored = scales.T.contiguous() if transposed else scales
    given_codes = kernel.codes if codes is found else codes.T.contiguous() if transposed else codes
    shown = Quantized(given_codes, stored, amax, kernel.recipe, kernel.shape, kept, transposed=transposed)
    return stages, Judged(prefix, subject, shown, oracle, kernel)


def _with_nans_of(expected: torch.Tensor, actual: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`with_nans_of`, without a look at numbers if the bytes are equal."""
    if fmt.nan_code is None or same_bytes(actual, expected):
        return actual
    return with_nans_of(expected, actual, fmt)


def used_scale(encode: torch.Tensor | None, scales: torch.Tensor, kernel: Quantized) -> torch.Tensor | None:
    """The tensor scale for the judgement of the codes of `kernel`.

    A kernel of current scaling with a wrong stored inverse and without a shown scale is taken to have used the inverse
    of its stored number: a single finding, not two.
    """
    recipe = kernel.recipe
    if encode is None or not recipe.whole or recipe.tensor_scale == "given" or kernel.tensor_scale is not None:
        return encode
    return encode if _same(divide(1.0, encode), scales.view(1)) else divide(1.0, scales.view(1))


def made_of(parts: Mapping[str, torch.Tensor], like: Quantized, prefix: str = "") -> Quantized:
    """A Quantized that has these tensors, named with a prefix, and the recipe and the shape of `like`."""
    tensors: dict[str, Any] = {name: parts.get(f"{prefix}{name}") for name in PARTS}
    return replace(like, **tensors)


def dense_parts(q: Quantized) -> Quantized:
    """`q` with contiguous tensors."""
    tensors: dict[str, Any] = {name: dense(part) for name in PARTS if (part := getattr(q, name)) is not None}
    return replace(q, **tensors)


def stored_along_rows(q: Quantized) -> torch.Tensor:
    """The codes of `q` along its rows, in the packing of its recipe."""
    return q.codes.T.contiguous() if q.transposed else q.codes


def no_codes(q: Quantized) -> torch.Tensor:
    """bool, like the codes of `q` as stored: bytes that are no code of a format of six bits, and have no value."""
    return q.codes >= q.recipe.element.codes if q.recipe.element.bits == 6 else torch.zeros_like(q.codes).bool()


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def of_row(numbers: torch.Tensor | None, row: int) -> torch.Tensor | None:
    """The number of a row, (1,), or the single number of the tensor."""
    return numbers[row : row + 1] if numbers is not None and len(numbers) > 1 else numbers


def scaled_elements(
    x: torch.Tensor,
    scales: torch.Tensor,
    encode: torch.Tensor | None,
    recipe: Recipe,
    blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What is rounded to the codes of rows of `x` (M, K) that share stored scales: float32 (M, K).

    `scales`: those of the rows, (M, ⌈K/block⌉), or (1, ⌈K/block⌉) of one tile; `blocks`: their block amaxes.
    """
    factors = per_row(element_factors(scales, encode, recipe, x.dtype, blocks), recipe, x.shape[0])
    return scale_elements(x, factors, encode, recipe)


def plain(value: float) -> float | str:
    """A number as a JSON value: NaN and infinity as words."""
    return value if isfinite(value) else str(value)


def code_view(code: int, fmt: Format) -> tuple[float | str, str]:
    """The value of a code, and its bits; a byte may be no code of a format of six bits."""
    value = plain(fmt.value(code)) if code < fmt.codes else f"no code of {fmt.name}"
    return value, bits(code, fmt.bits)


def _code_views(expected: int, actual: int, fmt: Format) -> dict[str, Any]:
    (e, e_bits), (a, a_bits) = code_view(expected, fmt), code_view(actual, fmt)
    return {"expected": e, "expected_bits": e_bits, "actual": a, "actual_bits": a_bits}


def scale_view(scale: torch.Tensor, fmt: Format) -> tuple[float | str, str]:
    """A single stored scale, as a value and as bits."""
    return float_view(scale) if fmt is FP32 else code_view(int(scale), fmt)


def float_views(expected: torch.Tensor, actual: torch.Tensor) -> dict[str, Any]:
    """Two numbers, as values and bits."""
    (e, e_bits), (a, a_bits) = float_view(expected), float_view(actual)
    return {"expected": e, "expected_bits": e_bits, "actual": a, "actual_bits": a_bits}


def _numbers(stage: str, actual: torch.Tensor, expected: torch.Tensor, noun: str) -> StageResult:
    """One number, or one a row."""

    def describe(row: int, _: int) -> dict[str, Any]:
        where = {"row": row} if len(expected) > 1 else {}
        return where | float_views(expected[row], actual[row])

    return exact_floats(stage, actual.unsqueeze(1), expected.unsqueeze(1), noun=noun, describe=describe)


def _amax(stage: str, subject: Subject, actual: torch.Tensor, expected: torch.Tensor) -> StageResult:
    if subject.rule == "exact" or subject.amax_given or torch.equal(actual, expected):
        rule = "exact" if subject.amax_given else subject.rule
        return replace(_numbers(stage, actual, expected, "amaxes"), rule=rule)
    low, high = (tensor_amax(blocks).unsqueeze(1) for blocks in subject.block_ends)  # no recipe rotates and scales rows
    given = actual.unsqueeze(1)
    # An amax is the magnitude of an element, hence a number of its dtype; for any other there is no right value.
    low = torch.where(given.to(subject.matrix.dtype).float() == given, low, torch.nan)
    rows, columns = subject.matrix.shape
    return boundary_floats(
        stage, given, expected.unsqueeze(1), (low, high), subject.sources(rows=rows, columns=columns), noun="amaxes",
        describe=lambda row, _: float_views(expected[row], actual[row]),
    )  # fmt: skip


def _layout(stage: str, kernel: Quantized, expected: torch.Tensor) -> tuple[StageResult, torch.Tensor]:
    """Scales that are not linear: zero padding, and the right order. Gives the linear scales too.

    The `expected` scales in a wrong order are wrong in this stage, and then right in the next stage.
    """
    linear = linear_scales(kernel)
    result = StageResult(stage, "exact", kernel.scales.numel())
    wanted = LAYOUTS[kernel.scale_layout].pack(expected)
    if not torch.equal(linear, expected) and torch.equal(
        kernel.scales.flatten().sort().values, wanted.flatten().sort().values
    ):
        result.mismatches = int((kernel.scales != wanted).sum())
        of = f"{format_count(result.mismatches)} of {format_count(result.compared)} bytes"
        result.sentence = f"the scales are right, but {of} lie in another place"
        return result, expected
    result.mismatches, result.sentence = padding(kernel.scales, linear, kernel.scale_layout)
    return result, linear


def padding(packed: torch.Tensor, linear: torch.Tensor, layout: ScaleLayout) -> tuple[int, str]:
    """Number of bytes of the padding of a layout that are not 0, and a sentence with the number."""
    zeros = Packing(LAYOUTS[layout], tuple(linear.shape)).cells("0")
    count, total = int((packed.cpu()[zeros] != 0).sum()), int(zeros.sum())
    return count, f"{format_count(count)} of {format_count(total)} padding bytes are not 0" if count else ""


def _place_in_layout(place: tuple[int, int], scales: torch.Tensor, kernel: Quantized) -> dict[str, Any]:
    """Place of a linear scale in the layout of `kernel`; nothing if that is linear."""
    if kernel.scale_layout == LINEAR:
        return {}
    layout = LAYOUTS[kernel.scale_layout]
    tile = tuple(number // size for number, size in zip(place, layout.tile, strict=True))
    return {"tile": str(tile), "swizzled_offset": layout.offset(*place, scales.shape)}


def _scales(
    stage: str,
    subject: Subject,
    actual: torch.Tensor,
    expected: torch.Tensor,
    given: tuple[torch.Tensor | None, torch.Tensor | None],
    kernel: Quantized,
) -> StageResult:
    """Stored scales of `kernel` along the subject's rows; of a transposed matrix in the order of memory."""
    recipe, fmt = subject.recipe, subject.recipe.scale
    encode, transposed = given[1], kernel.transposed

    def describe(row: int, column: int) -> dict[str, Any]:
        here = (column, row) if transposed else (row, column)
        value, raw = float_view(subject.blocks[here])
        its_encode = of_row(encode, here[0])
        if transposed:
            place = {"row": recipe.block[1] * row, "column": column, "block": row}
        else:  # a tile with one scale begins at that row
            place = {"row": 0 if recipe.whole else recipe.stored_rows * row, "block": column}
        place |= _place_in_layout(here, actual, kernel)
        two = (expected[here], actual[here])
        return {
            **place, "input": value, "input_bits": raw,
            **({} if its_encode is None else {"tensor_scale": plain(float(its_encode))}),
            **(float_views(*two) if fmt is FP32 else _code_views(int(two[0]), int(two[1]), fmt)),
        }  # fmt: skip

    one, other = (t.T.contiguous() if transposed else t for t in (actual, expected))
    if fmt is FP32:
        return exact_floats(stage, one, other, noun="block scales", describe=describe)
    if subject.rule == "exact" or torch.equal(actual, expected):
        result = exact_codes(stage, one, other, fmt, noun="block scales", describe=describe)
        return replace(result, rule=subject.rule)
    low, high = (subject.scales(*given, blocks=blocks) for blocks in subject.block_ends)
    height, width = recipe.block
    sources = subject.sources(rows=height, columns=width)
    return boundary_codes(stage, actual, expected, (low, high), fmt, sources, noun="block scales", describe=describe)


def _codes(
    stage: str,
    subject: Subject,
    actual: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    encode: torch.Tensor | None,
    kernel: Quantized,
) -> StageResult:
    """Codes of `kernel` along the subject's rows; of a transposed matrix in the order of memory."""
    recipe, columns, transposed = subject.recipe, subject.matrix.shape[1], kernel.transposed
    if not subject.own and same_bytes(actual, packed):  # the padding nibble of an odd K is compared too
        return StageResult(stage, subject.rule, subject.matrix.numel())
    expected, found = (elements(codes, columns, recipe) for codes in (packed, actual))

    def describe(row: int, column: int) -> dict[str, Any]:
        i, k = (column, row) if transposed else (row, column)
        value, raw = float_view(subject.x[i, k])
        place, block = scale_place(recipe, i, k), 0 if recipe.whole else k // recipe.block[1]
        scale, amax = (numbers[place].view(1, 1) for numbers in (scales, subject.blocks))
        scaled = scaled_elements(subject.x[i : i + 1, k : k + 1], scale, of_row(encode, i), recipe, amax)
        scale_value, scale_bits = scale_view(scale, recipe.scale)
        return {
            "row": row, "column": column, "block": block, "column_in_block": k if recipe.whole else k % recipe.block[1],
            **_place_in_layout(place, scales, kernel),
            "input": value, "input_bits": raw, "scaled": plain(float(scaled)), "scale": scale_value,
            "scale_bits": scale_bits, **_code_views(int(expected[i, k]), int(found[i, k]), recipe.element),
        }  # fmt: skip

    if subject.own:
        known = subject.rule == "exact"
        low = scaled_elements(subject.x if known else subject.interval.lower, scales, encode, recipe)
        high = low if known else scaled_elements(subject.interval.upper, scales, encode, recipe)
        result = distribution_stage(
            stage,
            found,
            (low, high),
            recipe,
            subject.draw,
            transposed=transposed,
            describe=describe,
            halves=subject.halves,
        )
    elif subject.rule == "exact":
        one, other = (t.T.contiguous() if transposed else t for t in (found, expected))
        result = exact_codes(stage, one, other, recipe.element, noun="codes", describe=describe)
    else:
        ends = (subject.codes(scales, encode, x) for x in (subject.interval.lower, subject.interval.upper))
        low, high = (elements(codes, columns, recipe) for codes in ends)
        result = boundary_codes(
            stage, found, expected, (low, high), recipe.element, subject.sources(), noun="codes", describe=describe
        )
    if result.passed and columns % 2 and recipe.element.bits == 4:
        wrong = int((actual[:, -1] >> 4 != packed[:, -1] >> 4).sum())
        if wrong:
            result.mismatches = wrong
            result.sentence = f"{wrong} padding nibbles behind K = {columns} are not 0"
    return result


def scale_place(recipe: Recipe, row: int, column: int) -> tuple[int, int]:
    """Index of the scale of an element among the linear scales."""
    return (0, 0) if recipe.whole else (row // recipe.stored_rows, column // recipe.block[1])


def values_stage(kernel: Quantized, values: torch.Tensor) -> StageResult:
    """Dequantized values of the kernel's own result with linear scales."""
    expected = reference.dequantize(kernel, values.dtype)
    if same_bytes(values, expected):
        return StageResult("values", "exact", values.numel())
    recipe = kernel.recipe

    def describe(row: int, column: int) -> dict[str, Any]:
        i, k = (column, row) if kernel.transposed else (row, column)
        codes, scales = elements(stored_along_rows(kernel), kernel.shape[1], recipe), linear_scales(kernel)
        scale_bits = scale_view(scales[scale_place(recipe, i, k)], recipe.scale)[1]
        return {
            "row": row, "column": column, "block": 0 if recipe.whole else k // recipe.block[1],
            "code_bits": bits(int(codes[i, k]), recipe.element.bits), "scale_bits": scale_bits,
            **float_views(expected[i, k], values[i, k]),
        }  # fmt: skip

    one, other = (t.T.contiguous() if kernel.transposed else t for t in (values, expected))
    return exact_floats("values", one, other, noun="dequantized values", describe=describe)
