"""The stages of one quantized matrix, each given the kernel's own result of the stage before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from harness.checks.boundary import Sources, boundary_codes, boundary_floats
from harness.checks.exact import exact_codes, exact_floats
from harness.checks.interval import Interval, rotated_interval
from harness.checks.stage import StageResult
from harness.finding import bits, float_view, spaced
from harness.inputs import Random
from reference import ops as reference
from reference.blocks import tensor_amax
from reference.layout import elements, pad_scales
from reference.quantize import block_amaxes, encode_elements, stored_scales
from reference.quantized import Quantized, scales_shape
from reference.recipes import Recipe
from reference.scaling import element_factors, scale_elements, tensor_scale


@dataclass
class Subject:
    """A matrix that is quantized along its rows, and everything that decides its bytes."""

    matrix: torch.Tensor
    """(M, K), not yet rotated."""
    recipe: Recipe
    random: Random | None = None
    first: int = 0
    """Number of the first block, where Philox counts through several matrices."""
    transposed: bool = False
    """Whether this is a columnwise half whose tiles are those of the rowwise one, 4over6's choice included."""
    free: bool = False
    """Whether the order in which a rotation adds is free."""

    @cached_property
    def x(self) -> torch.Tensor:
        """What is quantized: rotated, where the recipe rotates, in the reference's order."""
        return reference.transform(self.matrix, self.recipe) if self.recipe.transform else self.matrix

    @property
    def rule(self) -> str:
        """`boundary` where `x` is known to within an interval, else `exact`."""
        return "boundary" if self.free and self.recipe.transform else "exact"

    @cached_property
    def interval(self) -> Interval:
        """Where `x` lies, whatever the order of its sums."""
        return rotated_interval(self.matrix, self.recipe)

    @cached_property
    def blocks(self) -> torch.Tensor:
        """Block amaxes (M, ⌈K/16⌉)."""
        return block_amaxes(self.x, self.recipe)

    @cached_property
    def block_ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the greatest block amaxes."""
        least, greatest = self.interval.magnitude
        return block_amaxes(least, self.recipe), block_amaxes(greatest, self.recipe)

    def scales(
        self, amax: torch.Tensor | None, encode: torch.Tensor | None, blocks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Stored block scales under these numbers, of `blocks` where they are not those of `x`."""
        if not self.transposed:
            return stored_scales(self.x, self.blocks if blocks is None else blocks, amax, encode, self.recipe)
        rows = self.x.T.contiguous()
        stored = stored_scales(rows, block_amaxes(rows, self.recipe), amax, encode, self.recipe)
        height = self.recipe.block[0]
        return stored[::height].T.repeat_interleave(height, 0)[: self.x.shape[0]].contiguous()

    def codes(self, scales: torch.Tensor, encode: torch.Tensor | None, x: torch.Tensor | None = None) -> torch.Tensor:
        """Packed codes under these scales, of `x` where it is not the subject's own."""
        return encode_elements(self.x if x is None else x, scales, encode, self.recipe, self.random, self.first)

    def sources(self, *, rows: int = 1, columns: int = 1) -> Sources:
        """Which elements of a stage come from the same sums: at least a rotated group."""
        group = self.recipe.transform.group if self.recipe.transform else 1
        return Sources(self.matrix, rows, max(columns, group))


@dataclass
class Judged:
    """One quantized matrix with its stages judged: for those who look at single elements."""

    prefix: str
    subject: Subject
    kernel: Quantized
    """The scales linear, and the amax the reference's where the kernel shows none."""
    oracle: Quantized


def quantize_stages(
    subject: Subject, kernel: Quantized, oracle: Quantized, prefix: str = ""
) -> tuple[list[StageResult], Judged]:
    """amax, tensor scale, layout (of swizzled scales), block scales and codes of `kernel`.

    `oracle` is the reference's quantization of the subject, with linear scales. A stage that the kernel does not show
    (no amax, no tensor scale), or that its recipe has not, is not judged and does not appear.
    """
    stages = []
    amax, encode = oracle.amax, oracle.tensor_scale
    if amax is not None and encode is not None:
        if kernel.amax is not None:
            stages.append(_amax(prefix + "amax", subject, kernel.amax, amax))
            amax = kernel.amax
            encode = tensor_scale(amax, subject.recipe, subject.x.dtype)
        if kernel.tensor_scale is not None:
            stages.append(_numbers(prefix + "tensor scale", kernel.tensor_scale, encode, "tensor scales"))
            encode = kernel.tensor_scale
    as_oracle = _same(encode, oracle.tensor_scale) and _same(amax, oracle.amax)
    expected = oracle.scales if as_oracle else subject.scales(amax, encode)
    scales = kernel.scales
    if kernel.swizzled:
        layout, scales = _layout(prefix + "layout", kernel, expected)
        stages.append(layout)
    stages.append(_scales(prefix + "scales", subject, scales, expected, (amax, encode)))
    packed = oracle.codes if as_oracle and torch.equal(scales, oracle.scales) else subject.codes(scales, encode)
    stages.append(_codes(prefix + "codes", subject, kernel.codes, packed, scales, encode))
    # Where statistics are of x's dtype, nobody can find the tensor scale again without x.
    kept = kernel.tensor_scale if subject.recipe.statistics == "float32" else encode
    shown = Quantized(kernel.codes, scales, amax, kernel.recipe, kernel.shape, kept)
    return stages, Judged(prefix, subject, shown, oracle)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def of_row(numbers: torch.Tensor | None, row: int) -> torch.Tensor | None:
    """The number of a row, (1,), where there is one for each, else that of the tensor."""
    return numbers[row : row + 1] if numbers is not None and len(numbers) > 1 else numbers


def scaled_elements(x: torch.Tensor, scales: torch.Tensor, encode: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
    """What is rounded to the codes of `x` (M, K), float32 (M, K), under stored scales (M, ⌈K/16⌉)."""
    return scale_elements(x, element_factors(scales, encode, recipe, x.dtype), encode, recipe)


def _code_views(expected: int, actual: int, fmt: Any) -> dict[str, Any]:
    return {
        "expected": fmt.value(expected), "expected_bits": bits(expected, fmt.bits),
        "actual": fmt.value(actual), "actual_bits": bits(actual, fmt.bits),
    }  # fmt: skip


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
    if subject.rule == "exact" or torch.equal(actual, expected):
        return replace(_numbers(stage, actual, expected, "amaxes"), rule=subject.rule)
    low, high = (tensor_amax(blocks).unsqueeze(1) for blocks in subject.block_ends)  # no recipe rotates and scales rows
    given = actual.unsqueeze(1)
    # An amax is the magnitude of a rotated number, hence one of bfloat16; for any other there is no right value.
    low = torch.where(given.bfloat16().float() == given, low, torch.nan)
    rows, columns = subject.matrix.shape
    return boundary_floats(
        stage, given, expected.unsqueeze(1), (low, high), subject.sources(rows=rows, columns=columns), noun="amaxes",
        describe=lambda row, _: float_views(expected[row], actual[row]),
    )  # fmt: skip


def _layout(stage: str, kernel: Quantized, expected: torch.Tensor) -> tuple[StageResult, torch.Tensor]:
    """Swizzled scales: zero padding, and the right order. Gives the linear scales too.

    Scales that are the `expected` ones in another order are wrong here, and then right in the next stage.
    """
    linear = reference.unswizzle(kernel.scales, scales_shape(kernel.shape, kernel.recipe))
    result = StageResult(stage, "exact", kernel.scales.numel())
    wanted = reference.swizzle(expected)
    if not torch.equal(linear, expected) and torch.equal(
        kernel.scales.flatten().sort().values, wanted.flatten().sort().values
    ):
        result.mismatches = int((kernel.scales != wanted).sum())
        of = f"{spaced(result.mismatches)} of {spaced(result.compared)} bytes"
        result.sentence = f"the scales are right, but {of} lie in another place"
        return result, expected
    result.mismatches, result.sentence = padding(kernel.scales, linear)
    return result, linear


def padding(swizzled: torch.Tensor, linear: torch.Tensor) -> tuple[int, str]:
    """How many bytes of the padding are not 0, and the sentence that says so."""
    count = int((swizzled != reference.swizzle(linear)).sum())
    total = pad_scales(linear).numel() - linear.numel()
    return count, f"{spaced(count)} of {spaced(total)} padding bytes are not 0" if count else ""


def _scales(
    stage: str,
    subject: Subject,
    actual: torch.Tensor,
    expected: torch.Tensor,
    given: tuple[torch.Tensor | None, torch.Tensor | None],
) -> StageResult:
    fmt = subject.recipe.scale
    encode = given[1]

    def describe(row: int, column: int) -> dict[str, Any]:
        value, raw = float_view(subject.blocks[row, column])
        its_encode = of_row(encode, row)
        return {
            "row": row, "block": column, "input": value, "input_bits": raw,
            **({} if its_encode is None else {"tensor_scale": float(its_encode)}),
            **_code_views(int(expected[row, column]), int(actual[row, column]), fmt),
        }  # fmt: skip

    if subject.rule == "exact" or torch.equal(actual, expected):
        result = exact_codes(stage, actual, expected, fmt, noun="block scales", describe=describe)
        return replace(result, rule=subject.rule)
    low, high = (subject.scales(*given, blocks=blocks) for blocks in subject.block_ends)
    height, width = subject.recipe.block
    sources = subject.sources(rows=height, columns=width)
    return boundary_codes(stage, actual, expected, (low, high), fmt, sources, noun="block scales", describe=describe)


def _codes(
    stage: str,
    subject: Subject,
    actual: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    encode: torch.Tensor | None,
) -> StageResult:
    recipe, columns = subject.recipe, subject.matrix.shape[1]
    expected, found = (elements(codes, columns, recipe) for codes in (packed, actual))

    def describe(row: int, column: int) -> dict[str, Any]:
        value, raw = float_view(subject.x[row, column])
        block = column // recipe.block[1]
        here = scales[row : row + 1, block : block + 1]
        scaled = scaled_elements(subject.x[row : row + 1, column : column + 1], here, of_row(encode, row), recipe)
        return {
            "row": row, "column": column, "block": block, "lane": column % recipe.block[1], "input": value,
            "input_bits": raw, "scaled": float(scaled),
            "scale": recipe.scale.value(int(here)), "scale_bits": bits(int(here), recipe.scale.bits),
            **_code_views(int(expected[row, column]), int(found[row, column]), recipe.element),
        }  # fmt: skip

    if torch.equal(actual, packed):  # the padding nibble of an odd K is compared too
        return StageResult(stage, subject.rule, subject.matrix.numel())
    if subject.rule == "exact":
        result = exact_codes(stage, found, expected, recipe.element, noun="codes", describe=describe)
    else:
        ends = (subject.codes(scales, encode, x) for x in (subject.interval.lower, subject.interval.upper))
        low, high = (elements(codes, columns, recipe) for codes in ends)
        result = boundary_codes(
            stage, found, expected, (low, high), recipe.element, subject.sources(), noun="codes", describe=describe
        )
    if result.right and columns % 2:
        wrong = int((actual[:, -1] >> 4 != packed[:, -1] >> 4).sum())
        if wrong:
            result.mismatches = wrong
            result.sentence = f"{wrong} padding nibbles behind K = {columns} are not 0"
    return result


def values_stage(kernel: Quantized, values: torch.Tensor) -> StageResult:
    """Dequantized values of the kernel's own result."""
    expected = reference.dequantize(kernel, values.dtype)
    recipe = kernel.recipe

    def describe(row: int, column: int) -> dict[str, Any]:
        block = column // recipe.block[1]
        code = int(elements(kernel.codes[row : row + 1], kernel.shape[1], recipe)[0, column])
        scale = int(kernel.scales[row, block])
        return {
            "row": row, "column": column, "block": block, "code_bits": bits(code, recipe.element.bits),
            "scale_bits": bits(scale, recipe.scale.bits), **float_views(expected[row, column], values[row, column]),
        }  # fmt: skip

    return exact_floats("values", values, expected, noun="dequantized values", describe=describe)
