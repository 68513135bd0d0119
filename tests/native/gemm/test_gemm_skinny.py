"""Products of a few rows: the declared order bit for bit, whole value sets, and accepted operands."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.gemm import paths
from narrowgauge.native.gemm import skinny as gemm_skinny
from narrowgauge.native.gemm.operands import product_family
from narrowgauge.native.gemm.paths import FEW, MANY, PORTABLE, SKINNY, path_of
from narrowgauge.native.ops import Quantized
from narrowgauge.native.runtime import host
from narrowgauge.spec.recipes import find_recipe
from tests.native import declared, skinny
from tests.native.devices import ON_EVERY_DEVICE, on_every_device
from tests.native.gemm.test_orders import TEXTS, lost, seen_in_orders
from tests.native.launching import Source
from tests.native.operands import operand, random_operand, stored_swizzled, stored_transposed
from tests.native.samples import assert_equal, matrix

FP32 = torch.float32
SHAPES = [(16, 32, 512), (7, 40, 2560), (33, 86, 512), (17, 150, 1152), (1, 1, 512)]
"""M, N and K: whole tiles, tails of M and N, more chunks than warps, more strips than a block takes at a time."""

FP8 = ("fp8-current-e4m3", "fp8-block-1x128-e4m3", "fp8-block-128x128-e4m3")
E4M3 = ("mxfp8-e4m3", *FP8)
NAMES = ["nvfp4", "nvfp4-2d", "nvfp4-rowscaled", *E4M3]
"""Recipes of b. The recipe of a can be multiplied by b's."""

SOURCES = {family: skinny.text(family) for family in ("nvfp4", "mx", "fp8")}


def spread(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Blocks of 32 numbers of very different size: sums round."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-8, 8, (rows, columns // 32, 1), generator=generator)
    numbers = torch.randn(rows, columns // 32, 32, generator=generator)
    return (numbers * 2.0**powers).view(rows, columns)


def operands(name: str, m: int, n: int, k: int) -> tuple[Quantized, Quantized]:
    if name in E4M3:
        return random_operand(name.replace("128x128", "1x128"), m, k, seed=1), random_operand(name, n, k, seed=2)
    return ops.quantize(spread(m, k, 1), "nvfp4"), ops.quantize(spread(n, k, 2), name)


def hold_order(name: str, m: int, n: int, k: int) -> None:
    """Asserts the declared order of sums; for small products with and without c and bias, in every dtype."""
    a, b = operands(name, m, n, k)
    c, bias = matrix("normal", m, n, torch.bfloat16), matrix("normal", 1, n, FP32).view(n)
    added = ((FP32, None, None), (torch.bfloat16, c, None), (torch.float16, None, bias), (FP32, c, bias))
    sums = skinny.sums(a, b)
    for dtype, c, bias in added if m * n * k < 2**19 else added[-1:]:
        expected = declared.finished(sums, a, b, out_dtype=dtype, c=c, bias=bias)
        assert_equal(skinny.product(a, b, out_dtype=dtype, c=c, bias=bias), expected)


@pytest.mark.sampled(45)
@on_every_device("name", NAMES, 3)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=str)
def test_sums_are_in_the_declared_order(name: str, m: int, n: int, k: int) -> None:
    hold_order(name, m, n, k)


@pytest.mark.long
def test_scales_of_tiles_are_those_of_128_rows_of_either_operand() -> None:
    lines, tiles = (random_operand(f"fp8-block-{kind}-e4m3", 130, 512, seed=3) for kind in ("1x128", "128x128"))
    for a, b in ((lines, tiles), (tiles, lines)):
        assert_equal(skinny.product(a, b, out_dtype=FP32), skinny.gemm(a, b, out_dtype=FP32))


def one_element(name: str, codes: torch.Tensor, scales: torch.Tensor, columns: int) -> Quantized:
    """A row for each code and scale: the code is its second element, the others are 0."""
    r = find_recipe(name)
    whole = torch.zeros(len(codes), columns, dtype=torch.uint8)
    whole[:, 1] = codes
    found = operand(whole, scales[:1, None] if r.whole else scales.unsqueeze(1).repeat(1, columns // r.block[1]), r)
    return found if r.scale.name == "E8M0" else replace(found, tensor_scale=None)


POWERS = torch.cat([torch.exp2(torch.arange(-149, 104)), torch.tensor([0.0, math.inf, math.nan])])
"""float32 scales, subnormal ones too, whose products leave the range of float32 at either end."""


def every_code_and_scale(*names: str, columns: int) -> Iterator[Quantized]:
    """With NaN, and products below and above the range of float32."""
    every = torch.arange(256, dtype=torch.uint8)
    cases = {
        "mxfp8-e4m3": [(every, torch.full_like(every, 127)), (torch.full_like(every, 0x39), every)],
        "fp8-current-e4m3": [(every, torch.full((256,), 1.5)), (every, torch.full((256,), 2.0**-70))],
        "fp8-block-1x128-e4m3": [(every, torch.full((256,), 1.5)), (torch.full_like(every, 0x39), POWERS)],
        "nvfp4": [(every[:16].repeat(16), torch.full_like(every, 0x38)), (torch.full_like(every, 0x7), every)],
    }
    for name in names:
        for codes, scales in cases[name]:
            yield one_element(name, codes, scales, columns)


def hold_every_code_and_scale(*names: str, columns: int) -> None:
    """Products of every code and scale of an operand by 16 codes and scales of the other operand."""
    for every in every_code_and_scale(*names, columns=columns):
        codes, scales = every.codes[::17].contiguous(), every.scales[:: 1 if every.recipe.whole else 17].contiguous()
        some = replace(every, codes=codes, scales=scales, shape=(16, columns))
        for a, b in ((some, every), (every, some)):
            assert_equal(skinny.product(a, b, out_dtype=FP32), ops.gemm(a, b, out_dtype=FP32))


@pytest.mark.sampled(0)
@ON_EVERY_DEVICE
def test_every_code_and_every_scale_is_multiplied() -> None:
    hold_every_code_and_scale("nvfp4", *E4M3[:3], columns=128)


EXTREMES = torch.tensor([0x00, 0x01, 0x81, 0x07, 0x08, 0x7E, 0xFE, 0x38], dtype=torch.uint8)
"""Zero, subnormal numbers, the smallest normal number, the largest number, and 1."""


def scaled(scale: int, seed: int) -> Quantized:
    """16 rows by 512 columns with the same scale."""
    codes = EXTREMES[torch.randint(len(EXTREMES), (16, 512), generator=torch.Generator().manual_seed(seed))]
    return operand(codes, torch.full((16, 16), scale, dtype=torch.uint8), find_recipe("mxfp8-e4m3"))


def ends() -> Iterator[tuple[Quantized, Quantized]]:
    """Scales at both ends of the fast path of gemm_skinny_e4m3.cuh, with other scales of a at any place."""
    every = product((64, 65, 161, 162), (63, 64, 191, 192), ((-6, 6), (-7, 0), (0, 7)))
    for number, (left, right, others) in enumerate(every):
        a, b = scaled(left, 1), scaled(right, 2)
        place = 1 + number % 14
        a.scales[number % 16, place : place + 2] = left + torch.tensor(others, dtype=torch.int32).to(torch.uint8)
        yield a, b


@pytest.mark.sampled(0)
@ON_EVERY_DEVICE
def test_scales_of_a_are_multiplied_first_if_exact() -> None:
    for a, b in ends():
        assert_equal(skinny.product(a, b, out_dtype=FP32), skinny.gemm(a, b, out_dtype=FP32))


def test_empty_products_are_empty() -> None:
    a, b = operands("mxfp8-e4m3", 3, 5, 512)
    none = replace(a, codes=a.codes[:0], scales=a.scales[:0], shape=(0, 512))
    assert skinny.product(none, b, out_dtype=FP32).shape == (0, 5)
    assert skinny.product(a, none, out_dtype=FP32).shape == (3, 0)


def test_accepted_operands() -> None:
    def taken(a: Quantized, b: Quantized | None = None) -> bool:
        b = a if b is None else b
        return gemm_skinny.takes(a, b, product_family(a.recipe, b.recipe))

    mx, nvfp4 = random_operand("mxfp8-e4m3", 4, 512), ops.quantize(torch.randn(4, 128), "nvfp4")
    assert taken(mx)
    assert taken(nvfp4)
    assert not taken(random_operand("mxfp8-e4m3", 4, 576))
    assert not taken(ops.quantize(torch.randn(4, 64), "nvfp4"))
    assert not taken(random_operand("mxfp8-e4m3", 4, 0))
    assert not taken(random_operand("mxfp8-e5m2", 4, 512))
    assert not taken(mx, random_operand("mxfp4", 4, 512))
    for name in FP8[:2]:
        assert taken(random_operand(name, 4, 512))
        assert not taken(random_operand(name, 4, 576))
        assert not taken(random_operand(name, 4, 512), random_operand(name.replace("e4m3", "e5m2"), 4, 512))
    assert taken(mx, replace(mx, shape=(2**20, 512)))
    assert not taken(mx, replace(mx, shape=(2**20 + 1, 512)))
    assert not taken(*[replace(mx, shape=(4, 2**20 + 512))] * 2)
    assert not taken(mx, stored_transposed(mx))
    assert not taken(stored_swizzled(nvfp4), nvfp4)
    for q, part, by in ((nvfp4, "codes", 8), (nvfp4, "scales", 1), (mx, "codes", 8), (mx, "scales", 2)):
        whole = getattr(q, part)
        buffer = torch.zeros(whole.nbytes + 16, dtype=torch.uint8)
        moved = buffer[by : by + whole.nbytes].view(whole.shape).copy_(whole)
        assert not taken(replace(q, **{part: moved}))


def test_few_rows_of_a_large_matrix_take_this_path_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_capability", lambda device: (9, device.index))
    hopper, other = torch.device("cuda", 0), torch.device("cuda", 1)
    for family in ("nvfp4", "mx", "fp8_tensor", "fp8_block"):
        assert path_of(16, 8192, 8192, family, hopper, skinny=True) == SKINNY
        assert path_of(FEW, 1024, MANY // 1024, family, hopper, skinny=True) == SKINNY
        for m, n, device, taken in (
            (FEW + 1, 8192, hopper, True), (16, 8192, hopper, False), (1, MANY // 8192 - 1, hopper, True),
            (16, 8192, other, True), (16, 8192, torch.device("cpu"), True),
        ):  # fmt: skip
            assert path_of(m, n, 8192, family, device, skinny=taken) != SKINNY


def test_gemm_uses_the_path_and_gemm_order_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections, and a K that is no multiple, use different kernels."""
    a, b = operands("mxfp8-e4m3", 5, 33, 512)
    assert ops.gemm_order(a, b) == "blocks"
    monkeypatch.setattr(
        "narrowgauge.native.gemm.gemm.path_of", lambda *_, skinny=False, **__: SKINNY if skinny else PORTABLE
    )
    assert_equal(ops.gemm(a, b, out_dtype=FP32), skinny.gemm(a, b, out_dtype=FP32))
    assert ops.gemm_order(a, b) == "truncating"
    assert ops.gemm_order([a], [b]) == "blocks"
    a, b = operands("mxfp8-e4m3", 5, 33, 96)
    assert ops.gemm_order(a, b) == "blocks"
    assert_equal(ops.gemm(a, b, out_dtype=FP32), declared.gemm(a, b, out_dtype=FP32))


def hold_every_order(a: Quantized, b: Quantized) -> None:
    expected = skinny.product(a, b, out_dtype=FP32)
    for order in host.ORDERS[1:]:
        with host.thread_order(order):
            assert_equal(skinny.product(a, b, out_dtype=FP32), expected)


@pytest.mark.long
def test_every_order_of_threads_gives_the_same_bits() -> None:
    for name in ("nvfp4", *E4M3[:3]):
        a, b = operands(name, 17, 33, 512)
        hold_every_order(a, b)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("family", "name", "k", "which"),
    [
        ("nvfp4", "nvfp4", 128, 0), ("nvfp4", "nvfp4", 128, 1), ("mx", "mxfp8-e4m3", 512, 0),
        ("fp8", "fp8-block-1x128-e4m3", 512, 0),
    ],
)  # fmt: skip
def test_a_lost_barrier_changes_bits(
    family: str, name: str, k: int, which: int, cuda_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For E4M3 the barrier before the sums of all warps are added: no thread of a CPU gets far enough ahead of the
    others to need the barrier before the next strips, or the synchronization of a warp."""
    monkeypatch.setitem(TEXTS, f"gemm_skinny_{family}", text := SOURCES[family])
    start = text.index("multiply_skinny(" if family == "nvfp4" else "multiply_rows(")
    assert text[start:].count("__syncthreads();") == 2
    before = text[:start].count("__syncthreads();")
    products = {real: operands(name, 16, 32, k if real else 2 * k) for real in (True, False)}
    with lost("gemm.skinny", f"gemm_skinny_{family}", before + which, cuda_source, monkeypatch):
        seen = seen_in_orders(lambda real: iter([skinny.product(*products[real], out_dtype=FP32)]))
    assert len(seen) > 1
