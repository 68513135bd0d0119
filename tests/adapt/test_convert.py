"""`quantized`, `stored_as` and `padding`: round trips, witnesses of every option, errors."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowgauge
from narrowgauge import adapt
from narrowgauge.spec.formats import E8M0, FP32
from narrowgauge.spec.quantized import Quantized, scales_shape
from narrowgauge.spec.recipes import find_recipe

RECIPES = (
    "nvfp4", "nvfp4@breccia", "nvfp4@modelopt", "nvfp4-2d", "nvfp4-rowscaled", "mxfp4", "mxfp8-e4m3", "mxfp8-e5m2",
    "mxfp6-e2m3", "mxfp6-e3m2", "fp8-block-1x128", "fp8-block-128x128", "fp8-current", "fp8-current-e5m2",
)  # fmt: skip
LAYOUTS = ("linear", "padded", "128x4", "8x4")
NIBBLES = ("low-first", "high-first", "halves", "unpacked")
NARROW = {"E2M1": torch.float4_e2m1fn_x2, "E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


@cache
def oracle(recipe: str, shape: tuple[int, int] = (70, 100)) -> Quantized:
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-8, 8, shape, generator=generator))
    return narrowgauge.quantize(x, recipe)


def same(got: Quantized, q: Quantized) -> bool:
    """Equal codes and linear scales; `got` along rows."""
    assert not got.transposed
    linear = narrowgauge.unswizzle(got.scales, scales_shape(q.shape, q.recipe)) if got.swizzled else got.scales
    assert got.codes.is_contiguous()
    assert got.scales.is_contiguous()
    return (
        torch.equal(got.codes, q.codes)
        and torch.equal(linear, q.scales)
        and (got.recipe, got.shape) == (q.recipe, q.shape)
    )


@settings(deadline=None, max_examples=150)
@given(
    recipe=st.sampled_from(RECIPES),
    rows=st.integers(0, 140),
    columns=st.integers(0, 140),
    layout=st.sampled_from(LAYOUTS),
    nibbles=st.sampled_from(NIBBLES),
    transposed=st.booleans(),
)
def test_round_trip(recipe: str, rows: int, columns: int, layout: Any, nibbles: Any, transposed: bool) -> None:
    if nibbles == "halves":
        columns = -(-columns // 32) * 32
    q = oracle(recipe, (rows, columns))
    if q.recipe.scale is FP32 and "x4" in layout:
        layout = "padded"
    stored = adapt.stored_as(q, layout=layout, nibbles=nibbles, transposed=transposed)
    got = adapt.quantized(*stored, recipe, (rows, columns), layout=layout, nibbles=nibbles, transposed=transposed)
    assert same(got, q)
    assert got.amax is got.tensor_scale is None
    assert got.swizzled == (layout == "128x4")
    assert not adapt.padding(stored.scales, recipe, q.shape, layout=layout, transposed=transposed).any()


@pytest.mark.parametrize("recipe", ["mxfp8-e4m3", "mxfp8-2d", "mxfp6-e3m2"])
@pytest.mark.parametrize("swizzled", [False, True])
def test_columnwise_halves_are_transposed(recipe: str, swizzled: bool) -> None:
    x = torch.randn(70, 96, generator=torch.Generator().manual_seed(3))
    half = narrowgauge.quantize_both(x, recipe, swizzled=swizzled)[1]
    assert half.transposed
    layout = "128x4" if swizzled else "linear"
    got = adapt.quantized(half.codes, half.scales, recipe, half.shape, layout=layout, transposed=True)
    assert same(got, narrowgauge.quantize(x.T.contiguous(), recipe))
    codes, scales = adapt.stored_as(half, layout=layout, transposed=True)
    assert torch.equal(codes, half.codes)
    assert torch.equal(scales, half.scales)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_option_changes_a_result(recipe: str) -> None:
    q = oracle(recipe, (200, 320))
    whole, packed = q.recipe.whole, q.recipe.element.bits == 4
    layouts = LAYOUTS[:2] if q.recipe.scale is FP32 else LAYOUTS
    scales = [
        (layout, transposed and "x4" not in layout, adapt.stored_as(q, layout=layout, transposed=transposed).scales)
        for layout in layouts
        for transposed in (False, True)
    ]
    for layout, transposed, stored in scales:  # scales in tiles are never transposed, and one scale has no order
        for other_layout, other_transposed, other in scales:
            one_number = whole and layout == other_layout == "linear"
            alike = one_number or (layout, transposed) == (other_layout, other_transposed)
            assert torch.equal(stored, other) == alike
    codes = [
        (nibbles if packed else "", transposed, adapt.stored_as(q, nibbles=nibbles, transposed=transposed).codes)
        for nibbles in NIBBLES
        for transposed in (False, True)
    ]
    for nibbles, transposed, stored in codes:
        for other_nibbles, other_transposed, other in codes:
            assert torch.equal(stored, other) == ((nibbles, transposed) == (other_nibbles, other_transposed))


def test_nibbles_describe_the_bytes_for_every_recipe() -> None:
    given = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)
    scales = torch.zeros(1, 1, dtype=torch.uint8)
    for recipe, low, high in (
        ("nvfp4", [[0x21, 0x43]], [[0x12, 0x34]]),
        ("nvfp4@breccia", [[0x12, 0x34]], [[0x21, 0x43]]),
    ):
        assert adapt.quantized(given, scales, recipe, (1, 4)).codes.tolist() == low
        assert adapt.quantized(given, scales, recipe, (1, 4), nibbles="high-first").codes.tolist() == high
    for dtype in (torch.uint8, torch.int64, torch.uint32):
        single = torch.tensor([[1, 2, 15]], dtype=dtype)
        assert adapt.quantized(single, scales, "nvfp4", (1, 3), nibbles="unpacked").codes.tolist() == [[0x21, 0x0F]]


@pytest.mark.parametrize(("recipe", "half"), [("nvfp4", 8), ("mxfp4", 16), ("nvfp4@breccia", 8)])
def test_halves_are_the_halves_of_a_block(recipe: str, half: int) -> None:
    """Byte j of a GGML block has element j in its low nibble and element j + h in its high nibble."""
    q = oracle(recipe, (3, 64))
    single = adapt.stored_as(q, nibbles="unpacked").codes
    stored = torch.empty(3, 32, dtype=torch.uint8)
    for block in range(32 // half):
        for j in range(half):
            first = 2 * half * block
            stored[:, half * block + j] = single[:, first + j] | (single[:, first + half + j] << 4)
    assert torch.equal(adapt.stored_as(q, nibbles="halves").codes, stored)
    assert same(adapt.quantized(stored, q.scales, recipe, q.shape, nibbles="halves"), q)
    message = "halves' needs whole blocks of .* elements, and K is 40; pad the rows"
    odd = oracle(recipe, (3, 40))
    with pytest.raises(ValueError, match=message):
        adapt.stored_as(odd, nibbles="halves")
    with pytest.raises(ValueError, match=message):
        adapt.quantized(odd.codes, odd.scales, recipe, odd.shape, nibbles="halves")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_decoded_values_and_numbers_of_scales(recipe: str, dtype: torch.dtype) -> None:
    q = oracle(recipe)
    element, scale = q.recipe.element, q.recipe.scale
    codes = adapt.stored_as(q, nibbles="unpacked").codes
    values = torch.tensor(element.values, dtype=torch.float64)[codes.long()].to(dtype)
    scales = q.scales
    if scale is not FP32 and not (scale is E8M0 and dtype == torch.float16):
        scales = torch.tensor(scale.values, dtype=torch.float64)[q.scales.long()].to(dtype)
    assert same(adapt.quantized(values, scales, recipe, q.shape), q)
    assert same(adapt.quantized(values.T, scales.T, recipe, q.shape, transposed=True), q)
    padded = torch.nn.functional.pad(scales, (0, 1, 0, 1), value=0.3)  # 0.3 is no value of E4M3 or E8M0
    assert same(adapt.quantized(values, padded, recipe, q.shape, layout="padded"), q)


@pytest.mark.parametrize("recipe", RECIPES)
def test_dtypes_of_a_byte_and_words(recipe: str) -> None:
    q = oracle(recipe, (16, 128))
    codes = q.codes
    if q.recipe.packing == "high-first":
        codes = adapt.stored_as(q).codes
    kinds = [torch.int8, torch.int32, torch.uint32, torch.int64]
    kinds += [NARROW[q.recipe.element.name]] if q.recipe.element.name in NARROW else []
    for dtype in kinds:
        assert same(adapt.quantized(codes.view(dtype), q.scales, recipe, q.shape), q)
    if q.recipe.scale is FP32:
        return
    narrow = torch.float8_e8m0fnu if q.recipe.scale is E8M0 else torch.float8_e4m3fn
    for dtype in (torch.int8, narrow, torch.int32):
        assert same(adapt.quantized(codes, q.scales.view(dtype), recipe, q.shape), q)


def test_arrays_of_numpy() -> None:
    q = oracle("nvfp4")
    codes = adapt.stored_as(q, nibbles="unpacked").codes.numpy().view(ml_dtypes.float4_e2m1fn)
    scales = q.scales.numpy().view(ml_dtypes.float8_e4m3fn)
    assert same(adapt.quantized(codes, scales, "nvfp4", q.shape, nibbles="unpacked"), q)
    assert same(adapt.quantized(codes.astype(np.float32), scales.astype(np.float32), "nvfp4", q.shape), q)
    with pytest.raises(ValueError, match=r"number for each element of .*nibbles='unpacked'"):
        adapt.quantized(codes, scales, "nvfp4", q.shape)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64])
def test_words_of_e8m0_for_float32_scales(dtype: torch.dtype) -> None:
    q = oracle("fp8-block-1x128", (5, 640))  # 5 scales of a row, in 8 bytes
    exponents = torch.nn.functional.pad((q.scales.view(torch.int32) >> 23).to(torch.uint8), (0, 3), value=9)
    words = exponents.view(dtype)
    columns_first = torch.empty(words.shape[::-1], dtype=dtype).T.copy_(words)
    for stored in (words, columns_first):
        assert same(adapt.quantized(q.codes, stored, q.recipe, q.shape, layout="padded"), q)
    with pytest.raises(ValueError, match=r"have shape \(5, 5\); scales have \(5, 8\)"):
        adapt.quantized(q.codes, words, q.recipe, q.shape)


def test_several_dimensions_of_rows() -> None:
    q = oracle("nvfp4", (6, 32))
    got = adapt.quantized(q.codes.view(2, 3, 16), q.scales.view(2, 3, 2), "nvfp4", (2, 3, 32))
    assert same(got, q)


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
def test_scales_in_tiles_may_be_flat_or_tiled(layout: Any) -> None:
    q = oracle("nvfp4")
    scales = adapt.stored_as(q, layout=layout).scales
    height = {"128x4": 32, "8x4": 8}[layout]
    tiled = scales.view(-1, height, 16 if height == 32 else 4)
    for form in (scales.flatten(), tiled):
        assert same(adapt.quantized(q.codes, form, "nvfp4", q.shape, layout=layout), q)
    with pytest.raises(ValueError, match=r"not contiguous.*before permute"):
        adapt.quantized(q.codes, tiled.transpose(1, 2), "nvfp4", q.shape, layout=layout)


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
def test_padding_of_tiles(layout: Any) -> None:
    q = oracle("nvfp4")  # scales (70, 7)
    scales = adapt.stored_as(q, layout=layout).scales
    wrong = scales.clone()
    wrong[-1, -1] = 0x7F  # the last row and column of the last tile
    assert adapt.padding(wrong, "nvfp4", q.shape, layout=layout).count_nonzero() == 1
    assert adapt.padding(wrong, "nvfp4", q.shape, layout=layout).numel() == scales.numel() - 70 * 7
    got = adapt.quantized(q.codes, wrong, "nvfp4", q.shape, layout=layout)
    if layout == "128x4":
        assert torch.equal(got.scales, wrong)  # the padding stays visible
    assert same(got, q)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": "swizzled"}, "layout is 'swizzled'; it can be 'linear', '128x4', '8x4', .*'padded'"),
        ({"nibbles": "low"}, "nibbles is 'low'; it can be 'low-first', 'high-first', 'halves', 'unpacked', 'dense'"),
        ({"tensor_scale_is": "inverse"}, "tensor_scale_is is 'inverse'; it can be 'amax', 'encode', 'decode'"),
        ({"shape": (16,)}, r"shape is \(M, K\) or \(…, K\) of the input, not \(16,\)"),
        ({"recipe": "nvfp5"}, "nvfp5"),
        ({"shape": (4, 40)}, r"packed codes of \(4, 40\) have shape \(4, 20\); codes have \(4, 16\)"),
        ({"codes": torch.zeros(16, 4, dtype=torch.uint8)}, r"codes have \(16, 4\); give transposed=True"),
        ({"transposed": True}, r"have shape \(16, 4\) if transposed; codes have \(4, 16\)"),
        ({"scales": torch.zeros(4, 4, dtype=torch.uint8)}, r"layout linear, have shape \(4, 2\); scales .* \(4, 4\)"),
        ({"scales": torch.zeros(128, 4, dtype=torch.uint8)}, r"give layout='128x4', for rows of zeros layout='padded'"),
        ({"scales": torch.zeros(8, 4, dtype=torch.uint8)}, r"\(8, 4\); for scales in tiles give layout='8x4'"),
        ({"layout": "128x4"}, r"layout 128x4, have 512 bytes, padded \(128, 4\); these have \(4, 2\)"),
        ({"layout": "padded", "scales": torch.zeros(3, 9, dtype=torch.uint8)}, r"least shape \(4, 2\), not \(3, 9\)"),
        ({"scales": torch.full((4, 2), 0.3)}, r"scales\[0, 0\] is 0\.3.*, which is no value of E4M3"),
        ({"codes": torch.full((4, 32), 5.0)}, r"codes\[0, 0\] is 5\.0, which is no value of E2M1"),
        (
            {"codes": torch.full((4, 32), 0x21, dtype=torch.uint8), "nibbles": "unpacked"},
            r"codes\[0, 0\] is 0x21, no code of 4 bits; for two codes in a byte give nibbles='low-first'",
        ),
    ],
)  # fmt: skip
def test_wrong_values_are_named(arguments: dict[str, Any], message: str) -> None:
    plain: dict[str, Any] = {
        "codes": torch.zeros(4, 16, dtype=torch.uint8), "scales": torch.zeros(4, 2, dtype=torch.uint8),
        "recipe": "nvfp4", "shape": (4, 32),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        adapt.quantized(**plain | arguments)


@pytest.mark.parametrize(
    ("recipe", "codes", "scales", "nibbles", "message"),
    [
        ("nvfp4", torch.float8_e4m3fn, torch.uint8, "low-first", "codes: float8_e4m3fn does not hold codes of E2M1"),
        ("nvfp4", torch.uint8, torch.float8_e8m0fnu, "low-first", "scales: float8_e8m0fnu does not hold codes of E4M3"),
        ("nvfp4", torch.float4_e2m1fn_x2, torch.uint8, "unpacked", "float4_e2m1fn_x2 does not hold one code"),
        ("fp8-block-1x128", torch.float8_e4m3fn, torch.uint8, "low-first", "has float32 scales, not uint8"),
        ("fp8-block-1x128", torch.float8_e4m3fn, torch.float64, "low-first", "has float32 scales, not float64"),
    ],
)
def test_wrong_dtypes_are_named(
    recipe: str, codes: torch.dtype, scales: torch.dtype, nibbles: Any, message: str
) -> None:
    shape = (4, 32)
    stored = torch.zeros(4, 16 if codes == torch.uint8 else 32, dtype=torch.uint8).view(codes)
    numbers = torch.zeros(scales_shape(shape, find_recipe(recipe)))
    with pytest.raises(TypeError, match=message):
        adapt.quantized(stored, numbers.to(scales), recipe, shape, nibbles=nibbles)


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
def test_tiles_hold_bytes(layout: Any) -> None:
    q = oracle("fp8-block-1x128")
    with pytest.raises(ValueError, match=f"layout {layout} holds bytes, and the scales .* are float32; give"):
        adapt.quantized(q.codes, q.scales, q.recipe, q.shape, layout=layout)
    with pytest.raises(ValueError, match=f"layout {layout} holds bytes"):
        adapt.stored_as(q, layout=layout)
    q = oracle("nvfp4")
    with pytest.raises(ValueError, match=f"layout {layout} holds bytes, and the scales .* are bfloat16; give"):
        adapt.quantized(q.codes, q.scales.bfloat16(), q.recipe, q.shape, layout=layout)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_on_a_gpu_are_those_of_a_cpu(recipe: str, layout: Any) -> None:
    q = oracle(recipe)
    if q.recipe.scale is FP32 and "x4" in layout:
        layout = "linear"
    for nibbles in NIBBLES:
        q = oracle(recipe, (70, 96 if nibbles == "halves" else 100))  # halves are those of whole blocks
        stored = adapt.stored_as(q, layout=layout, nibbles=nibbles)
        codes, scales = (part.cuda() for part in stored)
        numbers: dict[str, Any] = {"layout": layout, "nibbles": nibbles}
        if q.amax is not None:
            shown = 1 / q.tensor_scale
            kind = "encode" if recipe == "nvfp4@modelopt" else "decode"
            numbers |= {"tensor_scale": shown.cuda(), "tensor_scale_is": kind, "true_amax": q.amax.cuda()}
        got = adapt.quantized(codes, scales, recipe, q.shape, **numbers)
        assert got.codes.device == got.scales.device == codes.device
        assert got.amax is None or (got.amax.device == codes.device and torch.equal(got.amax.cpu(), q.amax))
        assert same(got.to("cpu"), q)
    single = adapt.stored_as(q, nibbles="unpacked").codes.long()
    values = torch.tensor(q.recipe.element.values)[single].cuda()
    assert same(adapt.quantized(values, q.scales.cuda(), recipe, q.shape).to("cpu"), q)
    with pytest.raises(ValueError, match="codes are on cuda:0 and scales on cpu; move them to one device"):
        adapt.quantized(values, q.scales, recipe, q.shape)


def test_dense_codes_of_six_bits_on_every_pair_of_neighbours() -> None:
    """Four codes in three bytes, against whole numbers of Python; every code stands beside every other one."""
    first, second = (codes.flatten() for codes in torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij"))
    codes = torch.stack([first, second, 63 - first, second], 1).to(torch.uint8).view(-1, 32)
    recipe = narrowgauge.recipe("mxfp6-e2m3")
    scales = torch.full((len(codes), 1), 127, dtype=torch.uint8)
    q = narrowgauge.Quantized(codes, scales, None, recipe, tuple(codes.shape))
    stored = adapt.stored_as(q, nibbles="dense")
    assert stored.codes.shape == (len(codes), 24)
    for row in (0, 1, 77, len(codes) - 1):
        number = sum(code << 6 * place for place, code in enumerate(codes[row].tolist()))
        assert bytes(stored.codes[row].tolist()) == number.to_bytes(24, "little")
    back = adapt.quantized(stored.codes, scales, recipe, codes.shape, nibbles="dense")
    assert torch.equal(back.codes, codes)
    turned = adapt.stored_as(q, nibbles="dense", transposed=True)
    again = adapt.quantized(*turned, recipe, codes.shape, nibbles="dense", transposed=True)
    assert torch.equal(again.codes, codes)
    with pytest.raises(ValueError, match="nibbles 'dense' packs four codes of 6 bits in three bytes, and K is 30"):
        adapt.quantized(stored.codes, scales, recipe, (len(codes), 30), nibbles="dense")


@pytest.mark.parametrize("name", ["e4m3fnuz", "e5m2fnuz"])
def test_dtypes_of_fnuz_are_read(name: str) -> None:
    """Every code in the dtype of torch, whose numbers are those of the format."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    recipe, dtype = narrowgauge.recipe(f"fp8-block-1x128-{name}"), getattr(torch, f"float8_{name}")
    q = adapt.quantized(codes.view(dtype), torch.ones(2, 1), recipe, (2, 128))
    assert torch.equal(q.codes, codes)
    decoded = narrowgauge.dequantize(q, torch.float32)
    assert torch.equal(decoded.nan_to_num(nan=7e5), codes.view(dtype).float().nan_to_num(nan=7e5))
