"""Wrong kernels, several of each class of mistakes: every one fails, and its cause is named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.gemm.operands import element_values, scale_values
from narrowgauge.reference.numbers.blocks import pad_columns, tensor_amax
from narrowgauge.reference.quantize.layout import elements, pack
from narrowgauge.reference.quantize.steps import block_amaxes, random_bytes
from tests.harness.sample_backends import backend
from tests.harness.wrong_steps import Steps, case, grid, record_of, wrong

pytestmark = [pytest.mark.usefixtures("history"), pytest.mark.long]

# ---- quantize --------------------------------------------------------------------------------------------------------


def made_twice(x: torch.Tensor, recipe: Any, *, rowwise: bool = True, columnwise: bool = True) -> Any:
    """A columnwise half of the decoded rowwise half."""
    rows, _ = reference.quantize_both(x, recipe)
    columns = reference.quantize_both(reference.dequantize(rows).to(x.dtype), recipe)[1]
    return rows if rowwise else None, columns if columnwise else None


def codes_of_rows(x: torch.Tensor, recipe: Any, *, rowwise: bool = True, columnwise: bool = True) -> Any:
    """A columnwise half with the codes of the rowwise half."""
    rows, columns = reference.quantize_both(x, recipe)
    columns = replace(columns, codes=rows.codes if columns.transposed else rows.codes.T.contiguous())
    return rows if rowwise else None, columns if columnwise else None


@pytest.mark.parametrize(
    ("both", "recipe", "cause"),
    [(made_twice, "nvfp4", "quantized-twice"), (codes_of_rows, "mxfp8-e4m3", "codes-of-other-half")],
)
def test_halves_that_depend_on_each_other(both: Callable[..., Any], recipe: str, cause: str) -> None:
    of = case_from_labels("quantize", recipe, (128, 256), "bf16", "normal", ("both",))
    record = run_case(of, backend(quantize=reference.quantize, quantize_both=both))
    assert [entry["cause"] for entry in record.explanations if entry["exact"]] == [cause], record.explanations


def by_boundaries(number: int, boundary: float, *, up: bool) -> Callable[[Steps], torch.Tensor]:
    """Codes by a table of boundaries with one wrong number: ties go to even elsewhere."""

    def codes(s: Steps) -> torch.Tensor:
        fmt, magnitude = s.recipe.element, s.scaled.abs().double()
        points = grid(fmt).double()
        table = (points[1:] + points[:-1]) / 2
        goes_up = torch.arange(len(table)) % 2 == 1
        table[number], goes_up[number] = boundary, up
        above = (magnitude.unsqueeze(-1) > table) | ((magnitude.unsqueeze(-1) == table) & goes_up)
        return above.sum(-1).to(torch.uint8) | s.scaled.signbit().byte() * fmt.sign_code

    return codes


def powers(boundary: float) -> Callable[[Steps], torch.Tensor]:
    """Float32 scales whose encode scale is rounded to a power of two, up from `boundary` times a power on."""

    def scales(s: Steps) -> torch.Tensor:
        exponent = torch.floor(torch.log2((s.recipe.element.max / s.blocks).double() / boundary)) + 1
        return torch.where(s.blocks > 0, torch.exp2(-exponent), 1.0).float()

    return scales


def of_vectors(width: int) -> Callable[[Steps], torch.Tensor]:
    """Block amaxes of the columns in whole vectors."""

    def blocks(s: Steps) -> torch.Tensor:
        kept = s.x.clone()
        kept[:, s.x.shape[1] // width * width :] = 0
        return block_amaxes(kept, s.recipe)

    return blocks


def last_column(s: Steps) -> torch.Tensor:
    right = block_amaxes(s.x, s.recipe)
    return torch.cat([right[:, :-1], right[:, -2:-1]], 1)


def lanes(*order: int) -> Callable[[Steps], torch.Tensor]:
    """The bytes of four elements in a wrong order, or with repetitions."""

    def moved(s: Steps) -> torch.Tensor:
        shape = len(s.matrix), -(-s.matrix.shape[1] // s.recipe.block[1]) * s.recipe.block[1]
        right = random_bytes(s.random, shape, slice(0, shape[0]), s.x.device, s.recipe.block[1], 0)
        return right.view(shape[0], -1, 4)[..., list(order)].reshape(shape)[:, : s.matrix.shape[1]]

    return moved


def without_zeros(s: Steps) -> torch.Tensor:
    """Codes of a kernel that divides 0 by a scale of 0."""
    zero = (s.blocks == 0).expand(len(s.x), -1)
    width = s.x.shape[1] if s.recipe.spans_k else s.recipe.block[1]
    codes = reference.quantize(s.matrix, s.recipe).codes
    return codes.masked_fill(zero.repeat_interleave(width, 1)[:, : s.x.shape[1]], s.recipe.nan_code)


def negative_zeros_lost(s: Steps) -> torch.Tensor:
    codes = elements(reference.quantize(s.matrix, s.recipe).codes, s.x.shape[1], s.recipe)
    return codes.masked_fill(codes == s.recipe.element.sign_code, 0)


def every_fourth_row(s: Steps) -> torch.Tensor:
    found = block_amaxes(s.x, s.recipe)
    found[3::4] = found[2::4][: len(found[3::4])].clone()
    return found


def whole(width: int) -> Callable[[Steps], torch.Tensor]:
    """Codes of the columns in whole tiles; the others stay 0."""

    def codes(s: Steps) -> torch.Tensor:
        found = elements(reference.quantize(s.matrix, s.recipe).codes, s.x.shape[1], s.recipe)
        found[:, s.x.shape[1] // width * width :] = 0
        return found

    return codes


def saturated(s: Steps) -> torch.Tensor:
    return (tensor_amax(s.blocks) * s.scale).clamp(max=s.recipe.element.max) / s.scale


Q = tuple[str, str, str, tuple[int, int], dict[str, Callable[[Steps], Any]]]
QUANTIZERS: list[Q] = [
    *(("midpoint-moved", recipe, "normal", (64, 128), {"codes": by_boundaries(number, boundary, up=up)})
      for recipe in ("mxfp4", "nvfp4")
      for number, boundary, up in ((6, 6.0, True), (0, 0.5, True), (4, 2.75, False), (2, 1.0, False), (5, 3.25, True))),
    ("midpoint-moved", "mxfp8-e4m3", "normal", (64, 128), {"codes": by_boundaries(104, 70.0, up=True)}),
    ("midpoint-moved", "mxfp6-e2m3", "normal", (64, 128), {"codes": by_boundaries(20, 3.1875, up=True)}),
    ("exponent:nearest", "fp8-block-1x128-e4m3-pow2", "normal", (64, 384), {"scales": powers(1.5)}),
    ("exponent:nearest-log2", "fp8-block-1x128-e4m3-pow2", "normal", (64, 384), {"scales": powers(2**0.5)}),
    ("exponent:nearest", "fp8-block-128x128-e4m3-pow2", "tiles", (256, 1024), {"scales": powers(1.5)}),
    *(("tail-dropped", recipe, "amax-2m56-last", shape, {"blocks": of_vectors(width)}) for recipe, shape, width in (
        ("fp8-row-e4m3", (16, 33), 8), ("fp8-row-e4m3", (16, 68), 16), ("fp8-row-e5m2", (16, 135), 32),
        ("mxfp8-e4m3", (16, 52), 8), ("mxfp4", (16, 80), 32), ("fp8-block-1x128-e4m3-fp32", (16, 200), 16))),
    *(("last-column-of-other", recipe, "tiles", shape, {"blocks": last_column}) for recipe, shape in (
        ("mxfp8-e4m3", (32, 128)), ("fp8-block-1x128-e4m3-fp32", (32, 640)), ("mxfp6-e3m2", (32, 160)))),
    *(("stochastic-bits-shared", recipe, "normal", (32, 128), {"bytes": lanes(*order)})
      for recipe in ("nvfp4-sr", "mxfp8-e4m3-sr") for order in ((0, 1, 0, 1), (2, 3, 2, 3), (0, 0, 2, 2))),
    *(("stochastic-bytes-reversed", recipe, "normal", (32, 128), {"bytes": lanes(*order)})
      for recipe in ("nvfp4-sr", "mxfp8-e4m3-sr")
      for order in ((2, 3, 0, 1), (1, 0, 3, 2), (1, 2, 3, 0), (3, 0, 1, 2), (3, 2, 1, 0))),
    *(("rows-of-other", recipe, "normal", (33, 128), {"blocks": every_fourth_row})
      for recipe in ("mxfp8-e4m3", "mxfp4")),
    *((f"columns-left-out:{width}", recipe, "normal", (16, 248), {"codes": whole(width)})
      for recipe in ("mxfp8-e4m3", "nvfp4") for width in (32, 64)),
    ("amax-after-saturation", "fp8-delayed-e4m3", "normal", (3, 33), {"amax": saturated}),
    ("zero-block-nan", "fp8-row-e4m3", "zero-rows", (40, 144), {"codes": without_zeros}),
    ("zero-block-nan", "mxfp8-e4m3", "zero-rows", (40, 144), {"codes": without_zeros}),
    ("zero-block-nan", "fp8-block-1x128-e4m3-fp32", "zero-rows", (40, 144), {"codes": without_zeros}),
    *(("negative-zero-lost", recipe, "normal", (32, 128), {"codes": negative_zeros_lost})
      for recipe in ("nvfp4", "mxfp4", "mxfp6-e2m3")),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "recipe", "inputs", "shape", "steps"), QUANTIZERS)
def test_a_wrong_quantizer_is_named(
    cause: str, recipe: str, inputs: str, shape: tuple[int, int], steps: dict[str, Callable[[Steps], Any]]
) -> None:
    record = record_of(case(recipe, inputs, shape=shape), quantize=wrong(**steps))
    assert record.verdict == "fail"
    assert record.explanations[0]["cause"] == cause, record.explanations


# ---- gemm ------------------------------------------------------------------------------------------------------------

Gemm = Callable[..., torch.Tensor]


def with_table(side: str, code: int, value: float) -> Gemm:
    """A product whose table of elements has a wrong number."""

    def gemm(a: Any, b: Any, *, out_dtype: torch.dtype, **_: Any) -> torch.Tensor:
        factors = []
        for name, q in (("a", a), ("b", b)):
            numbers, magnitude = element_values(q), elements(q.codes, q.shape[1], q.recipe) & 7
            if name in side:
                numbers = torch.where(magnitude == code, numbers.sign() * value, numbers)
            factors.append(numbers * scale_values(q).repeat_interleave(q.recipe.block[1], 1)[:, : q.shape[1]])
        factor = 1.0 if a.amax is None else float(a.amax) * float(b.amax) / (6 * 448) ** 2
        return ((factors[0] @ factors[1].T).float() * factor).to(out_dtype)

    return gemm


def rows_twice(side: str) -> Gemm:
    """The scales, or the amaxes, of the rows of one operand for both."""

    def gemm(a: Any, b: Any, *, out_dtype: torch.dtype, **_: Any) -> torch.Tensor:
        one, other = (a, b) if side == "a" else (b, a)
        name = "scales" if one.recipe.spans_k else "amax"
        numbers = getattr(one, name)
        wrong_one = replace(other, **{name: numbers[torch.arange(other.shape[0]) % len(numbers)]})
        return reference.gemm(*((a, wrong_one) if side == "a" else (wrong_one, b)), out_dtype=out_dtype)

    return gemm


def narrow_blocks(dtype: torch.dtype) -> Gemm:
    """Sums of the elements of a block in 16 bits, then the scales."""

    def gemm(a: Any, b: Any, *, out_dtype: torch.dtype, **_: Any) -> torch.Tensor:
        width, y = a.recipe.block[1], torch.zeros(len(a.codes), len(b.codes))
        x, w = (pad_columns(element_values(q), width) for q in (a, b))
        for number in range(x.shape[1] // width):
            block = slice(number * width, (number + 1) * width)
            scale = scale_values(a)[:, number, None] * scale_values(b)[None, :, number]
            y = y + ((x[:, block] @ w[:, block].T).to(dtype).double() * scale).float()
        return y.to(out_dtype)

    return gemm


def decoded(dtype: torch.dtype) -> Gemm:
    def gemm(a: Any, b: Any, *, out_dtype: torch.dtype, **_: Any) -> torch.Tensor:
        x, w = (reference.dequantize(q).to(dtype).float() for q in (a, b))
        return (x @ w.T).to(out_dtype)

    return gemm


def then(change: Callable[..., torch.Tensor]) -> Gemm:
    """A right product whose float32 output is changed."""

    def gemm(a: Any, b: Any, *, out_dtype: torch.dtype, c: Any = None, bias: Any = None) -> torch.Tensor:
        right = reference.gemm(a, b, out_dtype=torch.float32)
        return change(right, c, bias).to(out_dtype)

    return gemm


def of(change: Callable[[Any], Any]) -> Gemm:
    """A right product of a changed a."""
    return lambda a, b, *, out_dtype, **addends: reference.gemm(change(a), b, out_dtype=out_dtype, **addends)


def of_block(step: int) -> Callable[[Any], Any]:
    def change(q: Any) -> Any:
        last = q.scales.shape[1] - 1
        numbers = (torch.arange(last + 1) + step).clamp(0, last) if step else torch.zeros(last + 1, dtype=torch.int64)
        return replace(q, scales=q.scales[:, numbers])

    return change


def swapped(q: Any) -> Any:
    codes = elements(q.codes, q.shape[1], q.recipe).view(len(q.codes), -1, 2).flip(2).reshape(len(q.codes), -1)
    return replace(q, codes=pack(codes))


G = tuple[str, str, str, tuple[str, ...], Gemm]
PRODUCTS: list[G] = [
    *(("element-table", recipe, "normal", (), with_table(side, code, value)) for recipe, side, code, value in (
        ("nvfp4", "b", 7, 5.0), ("nvfp4", "a", 7, 5.0), ("nvfp4", "a", 5, 2.5), ("mxfp4", "b", 3, 1.25),
        ("mxfp4", "a", 6, 8.0), ("mxfp4", "ab", 7, 5.0))),
    *(("alpha-amax-twice", recipe, "normal", (), rows_twice(side))
      for recipe in ("fp8-row-e4m3", "nvfp4-rowscaled") for side in "ab"),
    ("partial-sums-fp16", "mxfp8-e4m3", "normal", (), narrow_blocks(torch.float16)),
    ("partial-sums-bf16", "mxfp8-e4m3", "normal", (), narrow_blocks(torch.bfloat16)),
    ("partial-sums-bf16", "mxfp4", "normal", (), narrow_blocks(torch.bfloat16)),
    ("operands-decoded-first", "nvfp4", "inf", (), decoded(torch.float32)),
    ("operands-decoded-first", "nvfp4", "normal", (), decoded(torch.bfloat16)),
    ("operands-decoded-first", "nvfp4", "normal", (), decoded(torch.float16)),
    ("c-ignored", "nvfp4", "normal", ("accumulate",), then(lambda y, c, bias: y)),
    ("c-twice", "mxfp8-e4m3", "normal", ("accumulate",), then(lambda y, c, bias: y + 2 * c.float())),
    ("bias-twice", "nvfp4", "normal", ("bias",), then(lambda y, c, bias: y + 2 * bias.float())),
    ("bias-ignored", "mxfp4", "normal", ("bias",), then(lambda y, c, bias: y)),
    ("output-transposed", "nvfp4", "normal", (), then(lambda y, c, bias: y.T.reshape(y.shape))),
    ("gain", "mxfp8-e4m3", "normal", (), then(lambda y, c, bias: y * 1.01)),
    ("scale-of-next-block", "mxfp8-e4m3", "rounding", (), of(of_block(1))),
    ("scale-of-first-block", "nvfp4", "rounding", (), of(of_block(0))),
    ("nibbles-swapped", "nvfp4", "normal", (), of(swapped)),
    ("outputs-zero", "nvfp4", "amax-2m126-first", (), then(lambda y, c, bias: 0 * y.abs())),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "recipe", "inputs", "flags", "gemm"), PRODUCTS)
def test_a_wrong_product_is_named(cause: str, recipe: str, inputs: str, flags: tuple[str, ...], gemm: Gemm) -> None:
    made = case_from_labels("gemm", recipe, (40, 288, 24), "bf16xbf16-fp32", inputs, ("tn", *flags))
    record = run_case(made, backend(quantize=reference.quantize, gemm=gemm))
    assert record.verdict == "fail"
    assert record.explanations[0]["cause"] == cause, record.explanations


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-current-e4m3"])
def test_one_amax_of_all_sections_is_named(recipe: str) -> None:
    def grouped(x: torch.Tensor, sizes: torch.Tensor, recipe: Any) -> list[Any]:
        return [
            reference.quantize(part, recipe, amax=x.abs().float().amax().view(1)) for part in x.split(sizes.tolist())
        ]

    made = case_from_labels("quantize-grouped", recipe, (128, 128), "bf16", "normal", ("ragged:4",))
    record = run_case(made, backend(quantize_grouped=grouped))
    assert record.verdict == "fail"
    assert [entry["cause"] for entry in record.explanations if entry["exact"]] == ["amax-of-all-sections"]
