"""The GEMM of FP8 tensor cores has every bit of the model, on a CPU and on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowgauge.native.gemm import paths, wgmma_fp8
from narrowgauge.native.gemm.operands import product_family
from narrowgauge.native.gemm.paths import FP8, PORTABLE, SKINNY, TENSOR, columns_of, order_of, path_of, slices_of
from narrowgauge.native.ops import Quantized
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.spec.recipes import find_recipe
from tests.native.devices import ON_CPU_AND_HOPPER, ops
from tests.native.operands import (
    batched,
    operand,
    product_of_sections,
    random_addends,
    random_operand,
    random_sections,
    stored_transposed,
)
from tests.native.samples import DTYPES, assert_equal, assert_same, matrix

FP32 = torch.float32
PAIRS = (
    ("fp8-current-e4m3", "fp8-current-e4m3"), ("fp8-current-e4m3", "fp8-delayed-e5m2"),
    ("fp8-delayed-e5m2", "fp8-current-e4m3"), ("fp8-block-1x128-e4m3", "fp8-block-128x128-e4m3"),
    ("fp8-block-1x128-e5m2", "fp8-block-128x128-e4m3"), ("fp8-block-1x128-e4m3", "fp8-block-128x128-e5m2"),
    ("fp8-row-e4m3", "fp8-row-e5m2"),
)  # fmt: skip
SHAPES = ((1, 1, 16), (130, 72, 144), (70, 300, 272), (257, 5, 32), (64, 9, 16))


@pytest.fixture
def fp8_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """All operands that the kernels accept take the FP8 path."""

    def path(*_: object, fp8: bool, **__: object) -> str:
        return FP8 if fp8 else PORTABLE

    monkeypatch.setattr("narrowgauge.native.gemm.gemm.path_of", path)


ON_FP8_PATH = pytest.mark.usefixtures("fp8_path")


def expected(a: Quantized, b: Quantized, order: str = "", **options: object) -> torch.Tensor:
    """`order`: default is that of a product without slices."""
    order = order or order_of(FP8, product_family(a.recipe, b.recipe))
    return bounds(a, b, order=order, **options).expected  # type: ignore[arg-type]


def assert_order(a: Quantized, b: Quantized, order: str) -> None:
    """Every bit is that of the order, without and with addends."""
    (m, _), (n, _) = a.shape, b.shape
    c, bias = matrix("normal", m, n, torch.bfloat16), matrix("normal", 1, n, FP32).view(n)
    for out_dtype, added in ((FP32, {}), (torch.bfloat16, {"c": c, "bias": bias})):
        y = ops.gemm(a, b, out_dtype=out_dtype, **added)
        assert_equal(y, expected(a, b, order, out_dtype=out_dtype, **added))


@pytest.mark.sampled(18)
@ON_CPU_AND_HOPPER
@ON_FP8_PATH
@pytest.mark.parametrize(("left", "right"), PAIRS, ids=map(" x ".join, PAIRS))
def test_every_bit_is_the_models(left: str, right: str) -> None:
    for number, (m, n, k) in enumerate(SHAPES):
        a, b = random_operand(left, m, k, 1), random_operand(right, n, k, 2)
        c, bias = matrix("normal", m, n, torch.bfloat16), matrix("normal", 1, n, FP32).view(n)
        for added in ({}, {"c": c, "bias": bias}):
            out_dtype = DTYPES[number % 3]
            y = ops.gemm(a, b, out_dtype=out_dtype, **added)
            assert_equal(y, expected(a, b, out_dtype=out_dtype, **added))
    names = {ops.gemm_order(a, b), order_of(FP8, product_family(a.recipe, b.recipe))}
    assert names == {"aligned-13-32" if "block" in left else "aligned-13-32-128"}


@pytest.mark.sampled(0)
@ON_CPU_AND_HOPPER
@ON_FP8_PATH
@pytest.mark.parametrize(("left", "right"), PAIRS[::3], ids=map(" x ".join, PAIRS[::3]))
def test_slices_of_k_are_added_in_order(left: str, right: str) -> None:
    """A CPU counts as three multiprocessors, so a tile of outputs is split into slices of at least 1024 columns."""
    for m, n, k, most in ((3, 5, 2048, 2), (3, 5, 3072, 2), (130, 3, 2048, 1)):
        a, b = random_operand(left, m, k, 1), random_operand(right, n, k, 2)
        order = ops.gemm_order(a, b)
        if ops.device == "cpu":
            assert order == (f"split-{most}-" if most > 1 else "") + order_of(FP8, product_family(a.recipe, b.recipe))
        assert_order(a, b, order)


@pytest.mark.sampled(0)
@ON_CPU_AND_HOPPER
@ON_FP8_PATH
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("fp8-current-e4m3", "fp8-current-e4m3"), ("fp8-current-e5m2", "fp8-delayed-e4m3"),
        ("fp8-block-1x128-e4m3", "fp8-block-128x128-e4m3"),
    ],
)  # fmt: skip
def test_each_section_is_multiplied_by_its_own_matrix(left: str, right: str) -> None:
    """Sections of one output tile, of several, of no rows."""
    n, k = 264, 272
    for sizes in ([130, 0, 1, 70], [3, 64], [0, 257], [0, 0], *[[250, 0, 17, 400, 128]] * (ops.device == "cuda")):
        a, b = random_sections(left, sizes, k), [random_operand(right, n, k, seed) for seed, _ in enumerate(sizes)]
        for added in ({}, random_addends(sizes, n)):
            y = ops.gemm_grouped(a, b, out_dtype=torch.bfloat16, **added)
            assert_equal(y, product_of_sections(expected, a, b, out_dtype=torch.bfloat16, **added))
        assert ops.gemm_order(a.sections(), b) == order_of(FP8, product_family(a.recipe, b[0].recipe))


@ON_CPU_AND_HOPPER
@ON_FP8_PATH
@pytest.mark.parametrize(("left", "right"), [PAIRS[-1], ("fp8-current-e4m3", "fp8-row-e4m3")])
def test_a_batch_is_one_launch(left: str, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product has the bits of a product alone, with its own scales and bias."""
    monkeypatch.setattr("narrowgauge.native.gemm.scaled.path_of", lambda *_, fp8, **__: FP8 if fp8 else PORTABLE)
    monkeypatch.setattr("narrowgauge.native.gemm.scaled.gemm", None)
    a, b = (
        [random_operand(recipe, rows, 144, seed) for seed in range(3)] for recipe, rows in ((left, 130), (right, 72))
    )
    bias = matrix("normal", 3, 72, FP32)
    y = ops.scaled_gemm_bias(batched(a), batched(b), bias)
    alone = [expected(p, q, out_dtype=torch.bfloat16, bias=r) for p, q, r in zip(a, b, bias, strict=True)]
    assert_equal(y, torch.stack(alone))


@pytest.mark.parametrize(
    ("shape", "slices"),
    [
        ((128, 8192, 8192), 2), ((128, 6144, 8192), 4), ((128, 3072, 8192), 8),
        ((64, 2048, 7168), 4), ((64, 512, 7168), 4), ((128, 7168, 2048), 2),
        ((256, 8192, 8192), 2), ((512, 8192, 8192), 1), ((16, 64, 65536), 8), ((16, 64, 2048 + 64), 1),
        ((16, 64, 1920), 1), ((0, 64, 8192), 1),
    ],
)  # fmt: skip
def test_slices_of_a_shape(shape: tuple[int, int, int], slices: int) -> None:
    assert slices_of(*shape, 132) == slices


@pytest.mark.sampled(0)
@pytest.mark.sampled(5)  # both pairs, and both numbers of slices
@ON_CPU_AND_HOPPER
@ON_FP8_PATH
@pytest.mark.parametrize(("left", "right"), PAIRS[::3], ids=map(" x ".join, PAIRS[::3]))
@pytest.mark.parametrize(("m", "k"), [(64, 2048), (65, 2048), (3, 4096)])
def test_output_tiles_of_128_columns(left: str, right: str, m: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 260
    if ops.device == "cpu":
        monkeypatch.setattr("narrowgauge.native.gemm.wgmma.multiprocessors", lambda _: 16)
    slices = slices_of(m, n, k, 16)
    assert columns_of(m, n, slices, 16) == 128
    a, b = random_operand(left, m, k, 1), random_operand(right, n, k, 2)
    order = f"split-{slices}-{order_of(FP8, product_family(a.recipe, b.recipe))}"
    assert ops.gemm_order(a, b) == order
    assert_order(a, b, order)


@pytest.mark.parametrize(
    ("shape", "slices", "columns"),
    [
        ((128, 8192), 2, 128), ((64, 8448), 2, 128), ((64, 8449), 2, 256), ((129, 4096), 2, 128), ((256, 8192), 2, 256),
        ((128, 3072), 4, 128), ((128, 3200), 4, 256), ((128, 256), 8, 256), ((128, 256), 1, 256),
    ],
)  # fmt: skip
def test_columns_of_an_output_tile(shape: tuple[int, int], slices: int, columns: int) -> None:
    """128 if as many clusters run at once: 66 of two blocks, 24 of four."""
    assert columns_of(*shape, slices, 132) == columns


@ON_CPU_AND_HOPPER
@ON_FP8_PATH
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_all_codes_are_multiplied_with_all_codes(element: str) -> None:
    """A single product in each output, with infinities and NaN."""
    recipe = find_recipe(f"fp8-current-{element}")
    codes = torch.zeros(256, 16, dtype=torch.uint8)
    codes[:, 0] = torch.arange(256)
    a, b = operand(codes, torch.ones(1, 1), recipe), operand(codes, torch.ones(1, 1), "fp8-current-e4m3")
    y = ops.gemm(a, b, out_dtype=FP32)
    assert_equal(y, expected(a, b, out_dtype=FP32))
    assert y.isinf().any() == (element == "e5m2")
    assert y.isnan().any()


@ON_CPU_AND_HOPPER
@ON_FP8_PATH
def test_block_scales_are_powers_of_two_or_any_number() -> None:
    """Powers of two within 2^±60 are multiplied first, because their product is exact."""
    a, b = random_operand("fp8-block-1x128", 40, 512, 1), random_operand("fp8-block-128x128", 140, 512, 2)
    for exponents in ((0, 3, -5, 60), (-60, 60, 61, -61), (-100, 20, 126, -126)):
        powers = 2.0 ** torch.tensor(exponents)
        for q, part in ((a, powers), (b, powers.flip(0))):
            q.scales = part.expand(q.scales.shape).contiguous()
        assert_equal(ops.gemm(a, b, out_dtype=FP32), expected(a, b, out_dtype=FP32))
    a.scales[3, 1], a.scales[4, 2], b.scales[1, 3] = float("inf"), 0.0, float("nan")
    assert_equal(ops.gemm(a, b, out_dtype=FP32), expected(a, b, out_dtype=FP32))


@ON_CPU_AND_HOPPER
@ON_FP8_PATH
def test_a_quantized_output_is_the_quantized_product() -> None:
    a, b = random_operand(PAIRS[3][0], 70, 272, 1), random_operand(PAIRS[3][1], 136, 272, 2)
    q = ops.gemm_quantized(a, b, "mxfp8-e4m3", out_dtype=FP32)
    assert_same(q, ops.quantize(ops.gemm(a, b, out_dtype=FP32), "mxfp8-e4m3"))


def test_operands_that_the_kernels_take() -> None:
    a, b = random_operand(PAIRS[3][0], 8, 144), random_operand(PAIRS[3][1], 8, 144)
    whole = random_operand("fp8-current-e4m3", 8, 144)
    assert wgmma_fp8.takes(a, b, "fp8_block")
    assert wgmma_fp8.takes(whole, whole, "fp8_tensor")
    assert not wgmma_fp8.takes(b, a, "fp8_block"), "b has scales of single rows"
    assert not wgmma_fp8.takes(b, b, "fp8_block"), "a has scales of tiles"
    assert not wgmma_fp8.takes(whole, stored_transposed(whole), "fp8_tensor")
    assert not wgmma_fp8.takes(random_operand("mxfp8-e4m3", 8, 144), random_operand("mxfp8-e4m3", 8, 144), "mx")
    odd = random_operand("fp8-current-e4m3", 8, 152)
    assert not wgmma_fp8.takes(odd, odd, "fp8_tensor"), "rows are not aligned"
    moved = replace(whole, codes=torch.zeros(8 * 144 + 1, dtype=torch.uint8)[1:].view(8, 144))
    assert not wgmma_fp8.takes(moved, whole, "fp8_tensor"), "the address is not aligned"


def test_large_products_of_hopper_take_the_fp8_path(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, shape = torch.device("cuda", 0), (1024, 1024, 1024)
    monkeypatch.setattr(paths, "_capability", lambda _: (9, 0))
    assert path_of(*shape, "fp8_tensor", gpu, fp8=True) == path_of(*shape, "fp8_block", gpu, fp8=True) == FP8
    assert path_of(16, 1024, 1024, "fp8_tensor", gpu, fp8=True, skinny=True) == SKINNY
    assert path_of(48, 1024, 1024, "fp8_tensor", gpu, fp8=True, skinny=True) == FP8
    assert path_of(48, 1024, 1024, "fp8_tensor", gpu, skinny=True) == SKINNY
    assert path_of(64, 64, 64, "fp8_tensor", gpu, fp8=True) == PORTABLE
    assert path_of(*shape, "fp8_tensor", torch.device("cpu"), fp8=True) == PORTABLE
    monkeypatch.setenv(paths.BFLOAT16, "1")
    assert path_of(*shape, "fp8_tensor", gpu, fp8=True) == TENSOR
    assert path_of(*shape, "fp8_block", gpu, fp8=True) == FP8
    monkeypatch.setattr(paths, "_capability", lambda _: (8, 0))
    assert path_of(*shape, "fp8_tensor", gpu, fp8=True) == PORTABLE
