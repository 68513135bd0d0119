"""The GEMM of bfloat16 tensor cores on Hopper, and on a CPU by portable twins: packed tiles, sums, paths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge.native.gemm import paths, wgmma, wgmma_grouped
from narrowgauge.native.gemm.operands import operand_fields
from narrowgauge.native.gemm.paths import ORDERS, PORTABLE, TENSOR, path_of
from narrowgauge.native.ops import Quantized
from narrowgauge.native.runtime import host
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.gemm.operands import element_values, scale_values
from narrowgauge.spec.formats import E4M3
from narrowgauge.spec.recipes import find_recipe
from tests.native.devices import ON_CPU_AND_HOPPER, ops
from tests.native.gemm.test_gemm_formats import SIZES, WAYS
from tests.native.launching import ONE, Source, run
from tests.native.operands import (
    MX,
    operand,
    product_of_sections,
    random_addends,
    random_operand,
    random_sections,
    sections_with_a_refused_matrix,
    stored_swizzled,
)
from tests.native.samples import DTYPES, assert_equal, assert_same, codes_under_every_scale, matrix
from tests.native.tensor_cores import ORDER, PAIRS, SHAPES, assert_bits, model, on_tensor_cores

FP32 = torch.float32
CPU = torch.device("cpu")

# Packing.


def packed(q: Quantized, *, multiple: int = 1) -> tuple[torch.Tensor, bool]:
    """Packed tiles of an operand as bfloat16 (rows, columns), and whether the operand is refused."""
    refused = torch.zeros(1, dtype=torch.int32)
    fields, _ = operand_fields(q, "q")
    family = "nvfp4" if q.recipe.scale is E4M3 else "fp8_tensor" if q.recipe.whole else "mx"
    tiles = wgmma.dequantize(family, fields, *q.shape, multiple, refused).view(-1, -(-q.shape[1] // 64), 128, 8, 16)
    rows = torch.arange(128).unsqueeze(1)
    straight = tiles[:, :, rows, torch.arange(8) ^ (rows % 8)]
    return straight.flatten(3).permute(0, 2, 1, 3).reshape(len(tiles) * 128, -1).view(torch.bfloat16), bool(refused)


def numbers(q: Quantized) -> torch.Tensor:
    """Elements times the scales of their blocks, float64."""
    scales = scale_values(q)
    return element_values(q) * (
        1 if q.recipe.whole else scales.repeat_interleave(q.recipe.block[1], 1)[:, : q.shape[1]]
    )


@pytest.mark.long
@pytest.mark.parametrize("blocks", [1, 4, 5])
def test_every_code_under_every_scale_is_a_bfloat16_number(blocks: int) -> None:
    q = codes_under_every_scale(1.0)
    q = replace(q, codes=q.codes.repeat(1, blocks), scales=q.scales.repeat(1, blocks), shape=(q.shape[0], 16 * blocks))
    tiles, refused = packed(q)
    expected = numbers(q)
    rows, wide = q.shape
    assert torch.equal(tiles[:rows, :wide].double().nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    assert not refused


@pytest.mark.long
@pytest.mark.parametrize("name", [*MX, "fp8-current-e4m3", "fp8-current-e5m2"])
def test_codes_are_packed_as_numbers_and_padding_as_zeros(name: str) -> None:
    r = find_recipe(name)
    codes = torch.arange(r.element.codes, dtype=torch.uint8)
    codes = codes[torch.tensor(r.element.values).isfinite()]
    for columns in (1, 7, 33, 130):
        rows = -(-len(codes) // columns) + 5
        every = codes.repeat(-(-rows * columns // len(codes)))[: rows * columns].view(rows, columns)
        scales = torch.ones(1, 1) if r.whole else torch.full((rows, -(-columns // 32)), 130, dtype=torch.uint8)
        q = operand(every, scales, r)
        tiles, refused = packed(q, multiple=2)
        assert tiles.shape == (256 * -(-rows // 256), 64 * -(-columns // 64))
        expected = torch.zeros(tiles.shape, dtype=torch.float64)
        expected[:rows, :columns] = numbers(q)
        assert torch.equal(tiles.double(), expected)
        assert not refused


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("code", "scale", "refused"),
    [
        (0x01, 127 - 46, False), (0x01, 127 - 47, True), (0x81, 127 - 47, True), (0x3C, 127 - 62, False),
        (0x3C, 127 - 63, True), (0x7B, 127 + 32, False), (0x7B, 127 + 33, True), (0xFB, 254, True), (0x00, 0, False),
        (0x80, 254, False), (0x00, 255, True), (0x7C, 127, False), (0x7D, 127, False),
        (0x7C, 127 + 33, True), (0x3C, 127 + 47, False), (0x3C, 127 + 48, True),
    ],
)  # fmt: skip
def test_numbers_whose_products_leave_float32_are_refused(code: int, scale: int, refused: bool) -> None:
    """Numbers from 2^-62 to below 2^48 are accepted."""
    codes = torch.full((130, 70), 0x3C, dtype=torch.uint8)
    scales = torch.full((130, 3), 127, dtype=torch.uint8)
    codes[129, 69], scales[129, 2] = code, scale
    codes[129, 64:69] = 0
    assert packed(operand(codes, scales, "mxfp8-e5m2"))[1] == refused


@ON_CPU_AND_HOPPER
@pytest.mark.parametrize("side", [0, 1])
def test_refused_operands_are_multiplied_by_the_portable_kernel(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [random_operand("mxfp8-e4m3", 70, 150, seed) for seed in (1, 2)]
    sides[side].scales[69, 4] = 254
    grouped = random_sections("mxfp8-e4m3", [100, 0, 30], 150)
    matrices = [random_operand("mxfp8-e4m3", 70, 150, seed) for seed in (3, 4, 5)]
    (grouped.scales if side == 0 else matrices[1].scales)[0, 0] = 0
    expected = ops.gemm(*sides, out_dtype=FP32)
    expected_each = ops.gemm_grouped(grouped, matrices, out_dtype=FP32)
    with on_tensor_cores(monkeypatch):
        assert ops.gemm_order(*sides) == ops.gemm_order(grouped.sections(), matrices) == ORDERS[PORTABLE]
        for most in (8, 1):  # with 1, a block of threads multiplies two rows of tiles
            monkeypatch.setattr(wgmma, "_PORTABLE_ROWS_OF_TILES", most)
            assert_equal(ops.gemm(*sides, out_dtype=FP32), expected)
            assert_equal(ops.gemm_grouped(grouped, matrices, out_dtype=FP32), expected_each)
        assert not torch.equal(expected, bounds(*sides, out_dtype=FP32, order=ORDER).expected)


# Products.


# `make test` has a pair of each rule, and of each layout of an amax.
STAY = (PAIRS[0], PAIRS[2], PAIRS[5], PAIRS[8])


@pytest.mark.sampled(4)
@ON_CPU_AND_HOPPER
@pytest.mark.parametrize(
    ("left", "right"),
    [pytest.param(*pair, id=" x ".join(pair), marks=() if pair in STAY else pytest.mark.long) for pair in PAIRS],
)
def test_every_bit_is_the_models(left: str, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_tensor_cores(monkeypatch):
        for number, (m, n, k) in enumerate([*SHAPES, *[(300, 520, 1000)] * (ops.device == "cuda")]):
            a, b = random_operand(left, m, k, 1), random_operand(right, n, k, 2)
            c, bias = matrix("normal", max(1, m), n, torch.bfloat16)[:m], matrix("normal", 1, n, FP32).view(n)
            for added in ({}, {"c": c, "bias": bias}):
                assert_bits(ops.gemm, a, b, out_dtype=DTYPES[number % 3], **added)
            assert ops.gemm_order(a, b) == ORDER


@pytest.mark.sampled(8)
@ON_CPU_AND_HOPPER
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e4m3"])
def test_slices_of_k_are_added_in_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU counts as three multiprocessors, so K of a single tile of outputs has two slices."""
    with on_tensor_cores(monkeypatch):
        for m, n, k in ((3, 5, 2048), (70, 3, 3072)):
            a, b = random_operand(name, m, k, 1), random_operand(name, n, k, 2)
            order = ops.gemm_order(a, b)
            assert order.startswith("split-2-" if ops.device == "cpu" else "split-")
            c = matrix("normal", m, n, torch.bfloat16)
            for out_dtype, added in ((FP32, {}), (torch.bfloat16, {"c": c})):
                y = ops.gemm(a, b, out_dtype=out_dtype, **added)
                assert_equal(y, bounds(a, b, out_dtype=out_dtype, order=order, **added).expected)  # type: ignore[arg-type]


@ON_CPU_AND_HOPPER
def test_operands_in_every_layout_are_the_same_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    for m, n, k in ((70, 133, 100), (1, 3, 33)):
        a, b = random_operand("mxfp8-e4m3", m, k, 1), random_operand("mxfp6-e3m2-2d", n, k, 2)
        expected = bounds(a, b, out_dtype=FP32, order=ORDER).expected
        with on_tensor_cores(monkeypatch):
            for one, other in product(WAYS, WAYS):
                assert_equal(ops.gemm(one(a), other(b), out_dtype=FP32), expected)
    q = random_operand("nvfp4", 130, 96)
    with on_tensor_cores(monkeypatch):
        assert_bits(ops.gemm, stored_swizzled(q), q, out_dtype=FP32)


@ON_CPU_AND_HOPPER
@pytest.mark.parametrize(
    "name",
    [
        "nvfp4",
        pytest.param("mxfp8-e4m3", marks=pytest.mark.long),
        pytest.param("fp8-current-e4m3", marks=pytest.mark.long),
    ],
)
def test_each_section_is_multiplied_by_its_own_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, sizes in enumerate((*SIZES, [300, 1], *[[1000, 0, 24, 700]] * (ops.device == "cuda"))):
        n, k = (70, 150) if number % 2 else (300, 40)
        a = random_sections(name, sizes, k)
        b = [random_operand(name, n, k, seed) for seed, _ in enumerate(sizes)]
        b[0] = stored_swizzled(b[0]) if name == "nvfp4" else b[0]
        options = {"out_dtype": torch.bfloat16, **random_addends(sizes, n)}
        with on_tensor_cores(monkeypatch):
            y = ops.gemm_grouped(a, b, **options)
            assert ops.gemm_order(a.sections(), b) == ORDER
        assert_equal(y, product_of_sections(model(ORDER), a, b, **options))


@pytest.mark.sampled(2)
@ON_CPU_AND_HOPPER
@pytest.mark.parametrize(
    "name",
    ["nvfp4", *(pytest.param(name, marks=pytest.mark.long) for name in ("mxfp8-e4m3", "mxfp4", "fp8-current-e4m3"))],
)
def test_matrices_may_be_dequantized_beside_the_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every order of threads, by one worker and by three: sections of one tile, of several, of no rows, of equal
    rows."""
    monkeypatch.setattr("narrowgauge.native.gemm.gemm.ROWS_BESIDE", 0)
    multiplied = []
    monkeypatch.setattr(wgmma_grouped, "multiply", counted(wgmma_grouped.multiply, multiplied))
    n, k = 512, 192
    for sizes in ([300, 0, 1, 130], [64, 64], [0, 0, 3], [0, 0], *[[1000, 0, 24, 700]] * (ops.device == "cuda")):
        a, b = random_sections(name, sizes, k), [random_operand(name, n, k, seed) for seed, _ in enumerate(sizes)]
        options = {"out_dtype": torch.bfloat16, **random_addends(sizes, n)}
        expected = product_of_sections(model(ORDER), a, b, **options)
        threads = torch.get_num_threads()
        try:
            for order, workers in (
                zip(host.ORDERS, (1, 3, 1), strict=True) if ops.device == "cpu" else [("forward", threads)]
            ):
                torch.set_num_threads(workers)
                with on_tensor_cores(monkeypatch), host.thread_order(order):
                    y = ops.gemm_grouped(a, b, **options)
                assert_equal(y, expected)
        finally:
            torch.set_num_threads(threads)
    assert multiplied


def counted(function: Callable[..., None], calls: list[None]) -> Callable[..., None]:
    """The function, with a note of every call."""

    def call(*arguments: Any) -> None:
        calls.append(None)
        function(*arguments)

    return call


@ON_CPU_AND_HOPPER
def test_a_matrix_refused_beside_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = sections_with_a_refused_matrix([100, 30], 256, 128)
    expected = ops.gemm_grouped(a, b, out_dtype=FP32)
    monkeypatch.setattr("narrowgauge.native.gemm.gemm.ROWS_BESIDE", 0)
    with on_tensor_cores(monkeypatch):
        assert_equal(ops.gemm_grouped(a, b, out_dtype=FP32), expected)


def test_few_rows_and_other_layouts_are_dequantized_before() -> None:
    fewest, codes = paths.ROWS_BESIDE, torch.zeros(64, dtype=torch.uint8)
    matrix_ = {"codes": codes, "scales": codes, "layout": 0}
    assert wgmma_grouped.takes(2 * fewest, 256, 64, [matrix_] * 2, fewest)
    for m, n, k, change in (
        (2 * fewest - 1, 256, 64, {}), (2 * fewest, 128, 64, {}), (2 * fewest, 256, 32, {}), (2 * fewest, 0, 64, {}),
        (2 * fewest, 256, 0, {}), (2 * fewest, 256, 64, {"layout": 1}), (2 * fewest, 256, 64, {"codes": codes[8:]}),
        (2 * fewest, 256, 64, {"scales": codes[1:]}),
    ):  # fmt: skip
        assert not wgmma_grouped.takes(m, n, k, [matrix_, matrix_ | change], fewest)


@ON_CPU_AND_HOPPER
def test_a_quantized_output_is_the_quantized_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact sums are 0, so the outputs are rounding errors, and no two orders have the same codes."""
    a, b = (twice(random_operand(name, rows, 160, rows)) for name, rows in (("mxfp8-e4m3", 70), ("mxfp8-e5m2", 133)))
    b.codes[:, 160:] ^= 0x80
    for name in ("mxfp8-e4m3", "mxfp4-2d", "fp8-delayed-e4m3"):
        scale = {"scale": torch.tensor([0.01])} if "delayed" in name else {}
        portable = ops.gemm_quantized(a, b, name, out_dtype=FP32, **scale)
        with on_tensor_cores(monkeypatch):
            y = ops.gemm(a, b, out_dtype=FP32)
            got = ops.gemm_quantized(a, b, name, out_dtype=FP32, **scale)
        assert_same(got, ops.quantize(y, name, **scale))
        assert not torch.equal(got.codes, portable.codes)


def twice(q: Quantized) -> Quantized:
    """The columns twice, side by side."""
    codes, scales = (torch.cat([part, part], 1) for part in (q.codes, q.scales))
    return replace(q, codes=codes, scales=scales, shape=(q.shape[0], 2 * q.shape[1]))


def test_every_order_and_number_of_workers_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = random_operand("mxfp8-e4m3", 140, 70, 1), random_operand("mxfp8-e4m3", 140, 70, 2)
    expected = bounds(a, b, out_dtype=FP32, order=ORDER).expected
    threads = torch.get_num_threads()
    with on_tensor_cores(monkeypatch):
        for order in host.ORDERS:
            with host.thread_order(order):
                assert_equal(ops.gemm(a, b, out_dtype=FP32), expected)
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                assert_equal(ops.gemm(a, b, out_dtype=FP32), expected)
        finally:
            torch.set_num_threads(threads)


def codes_of(name: str, rows: int, columns: int, codes: list[int], exponents: tuple[int, int]) -> Quantized:
    """Random `codes`, or all codes, with random signs, under powers of two within `exponents`."""
    r, generator = find_recipe(name), torch.Generator().manual_seed(rows)
    known = torch.tensor(codes or range(r.element.max_code + 1), dtype=torch.uint8)
    drawn = known[torch.randint(len(known), (rows, columns), generator=generator)]
    drawn |= torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.uint8) << 7
    low, high = exponents
    scales = torch.randint(127 + low, 128 + high, (rows, -(-columns // 32)), generator=generator).to(torch.uint8)
    return Quantized(drawn, scales, None, r, (rows, columns))


@pytest.mark.sampled(7)
@ON_CPU_AND_HOPPER
@pytest.mark.parametrize(
    ("name", "codes", "exponents"),
    [
        ("mxfp8-e5m2", [], (-46, 31)), ("mxfp8-e5m2", [], (-10, 10)), ("mxfp8-e4m3", [], (-50, 38)),
        ("mxfp8-e4m3", [*range(8, 16)], (-56, -56)), ("mxfp8-e5m2", [0x7B, 0x7A], (32, 32)),
        ("mxfp8-e4m3", [0x08, 0x00, 0x7E, 0x01], (0, 0)), ("mxfp8-e5m2", [*range(0x10, 0x40), 0x7C], (0, 0)),
    ],
    ids=["whole range", "wide", "E4M3", "subnormal sums", "largest sums", "sparse", "infinities"],
)  # fmt: skip
def test_every_bit_is_the_models_at_the_ends_of_the_range(
    name: str, codes: list[int], exponents: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns, shape in ((32, (200, 300)), (1024, (200, 300) if ops.device == "cuda" else (20, 30))):
        a, b = (codes_of(name, rows, columns, codes, exponents) for rows in shape)
        with on_tensor_cores(monkeypatch):
            assert ops.gemm_order(a, b) == ORDER
            y = ops.gemm(a, b, out_dtype=FP32)
        assert_equal(y, bounds(a, b, out_dtype=FP32, order=ORDER).expected)
        if exponents == (-56, -56):
            assert ((y.abs() < torch.finfo(FP32).smallest_normal) & (y != 0)).any(), "some sums are subnormal"


# Paths.


def test_tensor_cores_make_large_products_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {torch.device("cuda", index): (8 + index, 0) for index in range(3)}
    monkeypatch.setattr(paths, "_capability", devices.__getitem__)
    least = paths.SMALLEST
    assert least % 2**20 == 0
    for family, (m, n, k) in product(
        ("nvfp4", "mx", "fp8_tensor", "fp8_block"), ((1024, least // 2**20, 1024), (1, 1, 1))
    ):
        for device, capability in devices.items():
            wanted = TENSOR if capability == (9, 0) and family != "fp8_block" and m > 1 else PORTABLE
            assert path_of(m, n, k, family, device) == wanted
        assert path_of(1024, least // 2**20 - 1, 1024, family, torch.device("cuda", 1)) == PORTABLE
        assert path_of(m, n, k, family, CPU) == PORTABLE


# Twins.

TEXT = """
#include "gemm/sm90/tile.cuh"

using namespace narrowgauge;

extern "C" __global__ void sums(float* acc, const bf16* a, const bf16* b, int count) {
    for (int i = 0; i < count; ++i) {
        Decomposed left[16], right[16];
        for (int k = 0; k < 16; ++k) {
            left[k] = Decomposed(to_float(a[16 * i + k]));
            right[k] = Decomposed(to_float(b[16 * i + k]));
        }
        acc[i] = sum_bf16(acc[i], left, right);
    }
}

// Thread 0 fills three pipeline stages ten times; the remaining threads wait for every stage.
extern "C" __global__ void turns(int* out) {
    __shared__ ptx::Mbarrier full[3], empty[3];
    __shared__ u8 tiles[3][TILE_BYTES];
    const int thread = threadIdx.x;
    if (thread == 0) {
        for (int i = 0; i < 3; ++i) {
            ptx::mbarrier_init(full[i], 1);
            ptx::mbarrier_init(empty[i], 31);
        }
    }
    __syncthreads();
    u8 source[TILE_BYTES];
    for (int turn = 0; turn < 30; ++turn) {
        const int stage = turn % 3, phase = turn / 3 % 2;
        if (thread == 0) {
            for (int i = 0; i < TILE_BYTES; ++i) source[i] = static_cast<u8>(turn);
            ptx::mbarrier_try_wait_parity(empty[stage], phase ^ 1);
            ptx::mbarrier_arrive_expect_tx(full[stage], TILE_BYTES);
            ptx::cp_async_bulk_shared_global<TILE_BYTES>(tiles[stage], source, full[stage]);
        } else {
            ptx::mbarrier_try_wait_parity(full[stage], phase);
            out[turn * 32 + thread] = tiles[stage][thread] + 1;
            ptx::mbarrier_arrive(empty[stage]);
        }
    }
}
"""


def exact_sum(acc: np.float32, a: np.ndarray, b: np.ndarray) -> float:
    """docs/tolerance.md#declared-order in fractions: F = 25, the sum truncated to 23 fraction bits."""
    exponents = [math.frexp(p)[1] + math.frexp(q)[1] - 2 for p, q in zip(a, b, strict=True) if p * q]
    if acc:
        exponents.append(math.frexp(acc)[1] - 1)
    if not exponents:
        return 0.0
    unit = Fraction(2) ** (max(exponents) - 25)
    terms = [Fraction(float(acc)), *(Fraction(float(p)) * Fraction(float(q)) for p, q in zip(a, b, strict=True))]
    total = sum((math.trunc(term / unit) * unit for term in terms), Fraction(0))
    if total:
        last = Fraction(2) ** (math.frexp(float(total))[1] - 24)
        total = math.trunc(total / last) * last
    return float(total)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("spread", [0, 3, 12, 38])
def test_the_twin_of_a_product_is_exact_arithmetic(spread: int, cuda_source: Source) -> None:
    rng = np.random.default_rng(spread)
    count = 200
    shape = (count, 16)
    numbers_ = [np.ldexp(rng.integers(-255, 256, shape), rng.integers(-spread, spread + 1, shape)) for _ in range(2)]
    numbers_[0][:50, rng.integers(0, 16, 10)] = 0
    numbers_[0][50:60] = 0
    before = np.ldexp(rng.integers(-(2**24) + 1, 2**24, count), rng.integers(-20 - spread, spread + 1, count))
    before[::5] = 0
    before[60:80] = -np.einsum("ij,ij->i", *numbers_)[60:80].astype(np.float32)  # cancellation
    acc = before.astype(np.float32)
    expected = [exact_sum(x, *rows) for x, *rows in zip(acc, *numbers_, strict=True)]
    codes = [(x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in numbers_]
    run(cuda_source(TEXT), "sums", ONE, ONE, acc, *codes, np.int32(count))
    np.testing.assert_array_equal(acc, np.array(expected, np.float32))


@pytest.mark.parametrize(
    ("acc", "a", "b", "expected"),
    [
        (1.0, np.nan, 1.0, np.nan), (np.nan, 1.0, 1.0, np.nan), (1.0, np.inf, 0.0, np.nan),
        (1.0, np.inf, -2.0, -np.inf), (np.inf, 1.0, 1.0, np.inf), (np.inf, -np.inf, 1.0, np.nan),
    ],
)  # fmt: skip
def test_the_twin_adds_infinities_and_nan(acc: float, a: float, b: float, expected: float, cuda_source: Source) -> None:
    rows = [np.zeros(16, np.float32), np.zeros(16, np.float32)]
    rows[0][5], rows[1][5] = a, b
    codes = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in rows]
    out = np.array([acc], np.float32)
    run(cuda_source(TEXT), "sums", ONE, ONE, out, *codes, np.int32(1))
    np.testing.assert_array_equal(out, np.array([expected], np.float32))


@pytest.mark.parametrize("order", host.ORDERS)
def test_no_thread_passes_a_barrier_too_soon(order: str, cuda_source: Source) -> None:
    out = np.zeros((30, 32), np.int32)
    with host.thread_order(order):
        run(cuda_source(TEXT), "turns", ONE, (32, 1, 1), out)
    np.testing.assert_array_equal(out[:, 1:], np.repeat(np.arange(1, 31), 31).reshape(30, 31))


@ON_CPU_AND_HOPPER
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e4m3"])
def test_nan_scales_spread_like_in_other_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = matrix("normal", 40, 96, FP32)
    a, b = ops.quantize(x, name), ops.quantize(x[:20].contiguous(), name)
    a.scales[3, 1] = 0x7F if name == "nvfp4" else 0xFF
    b.scales[2, 2] = 0x7F if name == "nvfp4" else 0xFF
    expected = ops.gemm(a, b, out_dtype=FP32)
    with on_tensor_cores(monkeypatch):
        y = ops.gemm(a, b, out_dtype=FP32)
    assert torch.equal(y.isnan(), expected.isnan())
    assert expected.isnan().sum() == 20 + 40 - 1


@ON_CPU_AND_HOPPER
def test_infinities_and_nan_of_elements_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = random_operand("mxfp8-e5m2", 40, 96, 1), random_operand("mxfp8-e5m2", 20, 96, 2)
    a.codes[3, 7], a.codes[4, 40], b.codes[5, 70] = 0x7C, 0x7D, 0xFC
    a.codes[6, 70] = 0
    with on_tensor_cores(monkeypatch):
        assert ops.gemm_order(a, b) == ORDER
        assert_bits(ops.gemm, a, b, out_dtype=FP32)
        y = ops.gemm(a, b, out_dtype=FP32)
    assert y[6, 5].isnan()
    assert y.isinf().any()
