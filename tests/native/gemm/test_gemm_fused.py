"""The GEMM that decodes b in registers has every bit of the model, on a CPU and on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowgauge.native import ops as native
from narrowgauge.native.gemm import fused
from narrowgauge.native.gemm.gemm import grouped_path_for
from narrowgauge.native.gemm.operands import product_family
from narrowgauge.native.gemm.paths import (
    FEW,
    FEW_FUSED,
    FUSED,
    MANY,
    MOST_FUSED,
    ORDERS,
    PORTABLE,
    ROWS_FUSED,
    SKINNY,
    TENSOR,
    WIDE,
    path_of,
)
from narrowgauge.native.ops import Quantized
from narrowgauge.native.runtime import host
from narrowgauge.reference.bounds.bounds import bounds
from tests.native.devices import ON_CPU_AND_HOPPER, needs_hopper, ops
from tests.native.operands import (
    operand,
    product_of_sections,
    random_addends,
    random_operand,
    random_sections,
    sections_with_a_refused_matrix,
)
from tests.native.samples import DTYPES, assert_equal, matrix
from tests.native.tensor_cores import model

FP32 = torch.float32
PAIRS = (
    ("nvfp4", "nvfp4-2d"), ("mxfp8-e4m3", "mxfp8-e4m3"), ("nvfp4-rowscaled", "nvfp4-rowscaled"),
    ("nvfp4-4over6-256-mse", "nvfp4"), ("mxfp8-2d", "mxfp8-e4m3"),
)  # fmt: skip
SHAPES = ((3, 5, 1024), (70, 133, 1024), (130, 130, 2048))


def path(*_: object, fused: bool = False, **__: object) -> str:
    """All operands that the kernels accept take the fused path."""
    return FUSED if fused else PORTABLE


@pytest.fixture
def fused_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge.native.gemm.gemm.path_of", path)


ON_FUSED_PATH = pytest.mark.usefixtures("fused_path")


def assert_bits(a: Quantized, b: Quantized, **epilogue: object) -> torch.Tensor:
    """A product has the bits of its declared order. Returns the product."""
    order = ops.gemm_order(a, b)
    assert order.startswith("split-")
    assert order.removesuffix("-tree").endswith(ORDERS[FUSED])
    y = ops.gemm(a, b, **epilogue)
    assert_equal(y, bounds(a, b, order=order, **epilogue).expected)  # type: ignore[arg-type]
    return y


@pytest.mark.sampled(28)
@ON_CPU_AND_HOPPER
@ON_FUSED_PATH
@pytest.mark.parametrize(("left", "right"), PAIRS, ids=map(" x ".join, PAIRS))
def test_every_bit_is_the_models(left: str, right: str) -> None:
    for number, (m, n, k) in enumerate(SHAPES):
        a, b = random_operand(left, m, k, 1), random_operand(right, n, k, 2)
        c, bias = matrix("normal", m, n, torch.bfloat16), matrix("normal", 1, n, FP32).view(n)
        for added in ({}, {"c": c, "bias": bias}):
            assert_bits(a, b, out_dtype=DTYPES[number % 3], **added)


@pytest.mark.sampled(0)
@ON_CPU_AND_HOPPER
@ON_FUSED_PATH
@pytest.mark.parametrize(("name", "k"), [("nvfp4", 7 * 512), ("nvfp4", 5 * 256), ("mxfp8-e4m3", 7 * 512)])
@pytest.mark.parametrize("multiprocessors", [1, 2, 12, 30])
def test_neighbouring_slices_of_k_are_added_first(
    name: str, k: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2, 4, 8 or 16 slices, whose last may be shorter."""
    monkeypatch.setattr("narrowgauge.native.gemm.wgmma.multiprocessors", lambda _: multiprocessors)
    a, b = random_operand(name, 3, k, 1), random_operand(name, 7, k, 2)
    starts = fused.slices_of(3, 7, k, product_family(a.recipe, b.recipe), multiprocessors)
    assert ops.gemm_order(a, b).endswith("-tree") == (len(starts) > 2)
    assert_bits(a, b, out_dtype=FP32)


@needs_hopper
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e4m3"])
@pytest.mark.parametrize("rows", [64, 128])
def test_loads_of_codes_end_before_the_next_copy(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """227 KB of shared memory leave a small L1 cache: loads of scales wait for the cache, and loads of codes behind
    loads of scales."""
    monkeypatch.setattr(fused, "_SHARED_BYTES", 227 * 1024)
    numbers = (torch.randn(extent, 8192, device="cuda", dtype=torch.bfloat16) for extent in (rows, 8192))
    a, b = (native.quantize(x, name) for x in numbers)
    assert native.gemm_order(a, b).startswith("split-4-decoded-")
    other = torch.empty(2**28, dtype=torch.uint8, device="cuda")  # larger than the L2 cache
    native.gemm(a, b, out_dtype=FP32)
    expected = native.gemm(a, b, out_dtype=FP32).cpu()
    for _ in range(30):
        other.zero_()
        assert_equal(native.gemm(a, b, out_dtype=FP32).cpu(), expected)


@pytest.mark.parametrize(
    ("shape", "family", "starts"),
    [
        ((64, 8192, 8192), "nvfp4", (0, 2048, 4096, 6144)), ((64, 8192, 8192), "mx", (0, 2048, 4096, 6144)),
        ((128, 2048, 7168), "mx", (0, 2048, 4096, 6144)), ((300, 8192, 8192), "mx", (0, 4096)),
        ((64, 2048, 7168), "nvfp4", (0, 1792, 3584, 5376)), ((20, 8192, 1280), "nvfp4", (0, 768)),
        ((20, 512, 1024), "mx", (0, 512)), ((20, 7168, 2048), "mx", (0, 512, 1024, 1536)),
    ],
)  # fmt: skip
def test_slices_of_a_shape(shape: tuple[int, int, int], family: str, starts: tuple[int, ...]) -> None:
    assert fused.slices_of(*shape, family, 132) == starts


@pytest.mark.sampled(0)
@ON_CPU_AND_HOPPER
@ON_FUSED_PATH
def test_all_codes_under_scales_of_every_exponent() -> None:
    """Codes of E4M3 with NaN, under scales whose products stay inside the range of tiles; a row of each code."""
    codes = torch.zeros(256, 1024, dtype=torch.uint8)
    codes[:, ::37] = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    scales = torch.full((256, 32), 127, dtype=torch.uint8)
    scales[:, :] = torch.linspace(127 - 53, 127 + 39, 32).byte()
    b = operand(codes, scales, "mxfp8-e4m3")
    a = random_operand("mxfp8-e4m3", 5, 1024, 1)
    y = assert_bits(a, b, out_dtype=FP32)
    assert y[:, [0x7F, 0xFF]].isnan().all()
    assert y.isnan().sum() == 2 * 5


@pytest.mark.sampled(2)
@ON_CPU_AND_HOPPER
@ON_FUSED_PATH
def test_all_scales_of_nvfp4() -> None:
    """A row of b for each of the 256 scales, with every code; two of the scales are NaN."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 2)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 64)
    b = replace(random_operand("nvfp4", 256, 1024, 2), codes=codes, scales=scales)
    y = assert_bits(random_operand("nvfp4", 5, 1024, 1), b, out_dtype=FP32)
    assert y.isnan().sum() == 2 * 5


@pytest.mark.sampled(8)
@ON_CPU_AND_HOPPER
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("code", "scale", "refused"),
    [
        (0x01, 127 - 53, False), (0x01, 127 - 54, True), (0x7E, 127 + 39, False), (0x7E, 127 + 40, True),
        (0x08, 127 - 54, False), (0x00, 255, True), (0x38, 0, True), (0x80, 254, False),
    ],
)  # fmt: skip
def test_numbers_outside_the_range_of_tiles_are_refused(
    side: int, code: int, scale: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the portable kernel multiplies."""
    sides = [random_operand("mxfp8-e4m3", rows, 1024, rows) for rows in (5, 70)]
    codes, scales = sides[side].codes.clone(), sides[side].scales.clone()
    codes[3, 32:64], scales[3, 1] = 0, scale
    codes[3, 41] = code
    sides[side] = replace(sides[side], codes=codes, scales=scales)
    portable = ops.gemm(*sides, out_dtype=FP32)
    monkeypatch.setattr("narrowgauge.native.gemm.gemm.path_of", path)
    if refused:
        assert ops.gemm_order(*sides) == ORDERS[PORTABLE]
        assert_equal(ops.gemm(*sides, out_dtype=FP32), portable)
    else:
        assert_bits(*sides, out_dtype=FP32)


@pytest.mark.sampled(24)
@ON_CPU_AND_HOPPER
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e4m3"])
def test_each_section_is_multiplied_by_its_own_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections of one output tile, of several, of no rows; more output tiles than blocks."""
    monkeypatch.setattr("narrowgauge.native.gemm.gemm.path_of", lambda *_, **__: TENSOR)
    monkeypatch.setattr("narrowgauge.native.gemm.gemm.MANY", 0)
    n, k = 133, 1536
    for sizes in ([70, 0, 1, 150], [3, 64], [0, 130], [0, 0], *[[250, 0, 17, 400, 128]] * (ops.device == "cuda")):
        a, b = random_sections(name, sizes, k), [random_operand(name, n, k, seed) for seed, _ in enumerate(sizes)]
        options = {"out_dtype": torch.bfloat16, **random_addends(sizes, n)}
        order = ops.gemm_order(a.sections(), b)
        assert order == ORDERS[FUSED]
        assert_equal(ops.gemm_grouped(a, b, **options), product_of_sections(model(order), a, b, **options))


@ON_CPU_AND_HOPPER
def test_a_refused_matrix_of_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = sections_with_a_refused_matrix([20, 5], 70, 1024)
    portable = ops.gemm_grouped(a, b, out_dtype=FP32)
    monkeypatch.setattr("narrowgauge.native.gemm.gemm.path_of", lambda *_, **__: TENSOR)
    monkeypatch.setattr("narrowgauge.native.gemm.gemm.MANY", 0)
    assert ops.gemm_order(a.sections(), b) == ORDERS[PORTABLE]
    assert_equal(ops.gemm_grouped(a, b, out_dtype=FP32), portable)


def test_sections_of_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge.native.gemm.gemm.path_of", lambda *_, **__: TENSOR)
    a, b = random_operand("nvfp4", 3, 1024, 1), [random_operand("nvfp4", MANY // 1024, 1024, 1)] * 3
    assert grouped_path_for(3 * ROWS_FUSED, a.codes, a.recipe, b, "nvfp4") == FUSED
    assert grouped_path_for(3 * ROWS_FUSED + 1, a.codes, a.recipe, b, "nvfp4") == TENSOR
    narrow = [random_operand("nvfp4", MANY // 1024 - 1, 1024, 1)] * 3
    assert grouped_path_for(3, a.codes, a.recipe, narrow, "nvfp4") == TENSOR
    codes = torch.cat([b[0].codes.flatten()] * 2)[8 : 8 + b[0].codes.numel()].view(b[0].codes.shape)
    assert grouped_path_for(3, a.codes, a.recipe, [*b, replace(b[0], codes=codes)], "nvfp4") == TENSOR  # not aligned
    a, b = random_operand("mxfp8-e4m3", 3, 1024, 1), [random_operand("mxfp8-e4m3", MANY // 1024, 1024, 1)]
    assert grouped_path_for(3, a.codes, a.recipe, b, "mx") == FUSED
    other = random_operand("mxfp8-e5m2", 3, 1024, 1)
    assert grouped_path_for(3, other.codes, other.recipe, b, "mx") == TENSOR


def test_operands_that_the_kernels_take() -> None:
    q = random_operand("nvfp4", 4, 1024, 1)
    assert fused.takes(q, q, "nvfp4")
    for k in (256, 1024 - 128):
        short = random_operand("nvfp4", 4, k, 1)
        assert not fused.takes(short, short, "nvfp4")
    unaligned = torch.cat([q.codes.flatten(), q.codes.flatten()])[8 : 8 + q.codes.numel()].view(q.codes.shape)
    assert not fused.takes(q, replace(q, codes=unaligned), "nvfp4")
    mx = random_operand("mxfp8-e4m3", 4, 1024, 1)
    assert fused.takes(mx, mx, "mx")
    assert not fused.takes(mx, random_operand("mxfp8-e5m2", 4, 1024, 1), "mx")
    odd = random_operand("mxfp8-e4m3", 4, 1024 + 256, 1)
    assert not fused.takes(odd, odd, "mx")
    fp8 = random_operand("fp8-current-e4m3", 4, 1024, 1)
    assert not fused.takes(fp8, fp8, "fp8_tensor")


def test_shapes_of_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge.native.gemm.paths._capability", lambda device: (9, 0))
    gpu = torch.device("cuda", 0)
    for family in ("nvfp4", "mx"):
        shapes = {
            FEW_FUSED: SKINNY, FEW_FUSED + 1: FUSED, FEW: FUSED, MOST_FUSED: FUSED, MOST_FUSED + 1: TENSOR,
        }  # fmt: skip
        for m, path in shapes.items():
            assert path_of(m, 8192, 8192, family, gpu, skinny=True, fused=True) == path
        assert path_of(FEW, 8192, 8192, family, gpu, skinny=True) == SKINNY
        assert path_of(FEW, WIDE - 1, 8192, family, gpu, skinny=True, fused=True) == SKINNY
        assert path_of(128, 1024, MANY // 1024 - 1, family, gpu, fused=True) == TENSOR
        assert path_of(128, 8192, 8192, family, torch.device("cpu"), skinny=True, fused=True) == PORTABLE


@pytest.mark.long
@ON_FUSED_PATH
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e4m3"])
def test_every_order_of_threads_gives_the_same_bits(name: str) -> None:
    a, b = random_operand(name, 70, 1024, 1), random_operand(name, 133, 1024, 2)
    for order in host.ORDERS:
        with host.thread_order(order):
            assert_bits(a, b, out_dtype=FP32)
