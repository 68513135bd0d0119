"""The GEMM of tensor cores on a Hopper GPU: every bit is the model's, and its twin's on a CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.gemm import paths
from narrowgauge.native.ops import GroupedQuantized, Quantized
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.spec.recipes import find_recipe
from tests.native.gemm.test_gemm_formats import SIZES
from tests.native.gpu import DEVICE, needs_compiler, needs_gpu
from tests.native.guards import embedded, guarded_outputs
from tests.native.operands import random_operand, random_sections, stored_swizzled, stored_transposed
from tests.native.samples import DTYPES, assert_equal, matrix, to
from tests.native.tensor_cores import ORDER, PAIRS, SHAPES, on_tensor_cores, operand

FP32 = torch.float32
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    needs_gpu,
    pytest.mark.skipif(not HOPPER, reason="this GPU is no Hopper; the kernels of its tensor cores are not run"),
]


def there(q: Quantized) -> Quantized:
    return to(q, DEVICE)


@pytest.mark.parametrize(("left", "right"), PAIRS, ids=map(" x ".join, PAIRS))
def test_every_bit_is_the_models(left: str, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_tensor_cores(monkeypatch):
        for number, (m, n, k) in enumerate([*SHAPES, (300, 520, 1000)]):
            a, b = operand(left, m, k, 1), operand(right, n, k, 2)
            c, bias = matrix("normal", max(1, m), n, torch.bfloat16)[:m], matrix("normal", 1, n, FP32).view(n)
            for added in ({}, {"c": c, "bias": bias}):
                given = {name: tensor.to(DEVICE) for name, tensor in added.items()}
                y = ops.gemm(there(a), there(b), out_dtype=DTYPES[number % 3], **given)
                expected = bounds(a, b, out_dtype=DTYPES[number % 3], **added, order=ORDER).expected
                assert_equal(y, expected)
            assert ops.gemm_order(there(a), there(b)) == ORDER


def codes_of(name: str, rows: int, columns: int, codes: list[int], exponents: tuple[int, int]) -> Quantized:
    """Random ones of `codes` with either sign, all where there are none, under powers of two within `exponents`."""
    r, generator = find_recipe(name), torch.Generator().manual_seed(rows)
    known = torch.tensor(codes or range(r.element.max_code + 1), dtype=torch.uint8)
    drawn = known[torch.randint(len(known), (rows, columns), generator=generator)]
    drawn |= torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.uint8) << 7
    low, high = exponents
    scales = torch.randint(127 + low, 128 + high, (rows, -(-columns // 32)), generator=generator).to(torch.uint8)
    return Quantized(drawn, scales, None, r, (rows, columns))


@pytest.mark.parametrize("columns", [32, 1024])
@pytest.mark.parametrize(
    ("name", "codes", "exponents"),
    [
        ("mxfp8-e5m2", [], (-46, 31)),
        ("mxfp8-e5m2", [], (-10, 10)),
        ("mxfp8-e4m3", [], (-50, 38)),
        ("mxfp8-e4m3", [*range(8, 16)], (-56, -56)),
        ("mxfp8-e5m2", [0x7B, 0x7A], (32, 32)),
        ("mxfp8-e4m3", [0x08, 0x00, 0x7E, 0x01], (0, 0)),
        ("mxfp8-e5m2", [*range(0x10, 0x40), 0x7C], (0, 0)),
    ],
    ids=["whole range", "wide", "E4M3", "subnormal sums", "largest sums", "sparse", "infinities"],
)
def test_every_bit_is_the_models_at_the_ends_of_what_is_packed(
    name: str, codes: list[int], exponents: tuple[int, int], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (there(codes_of(name, rows, columns, codes, exponents)) for rows in (200, 300))
    with on_tensor_cores(monkeypatch):
        assert ops.gemm_order(a, b) == ORDER
        y = ops.gemm(a, b, out_dtype=FP32)
    assert_equal(y, bounds(a, b, out_dtype=FP32, order=ORDER).expected)
    if exponents == (-56, -56):
        assert ((y.abs() < torch.finfo(FP32).smallest_normal) & (y != 0)).any(), "some sums are subnormal"


def test_a_product_that_is_refused_is_the_portable_one(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (there(random_operand("mxfp8-e4m3", 150, 150, seed)) for seed in (1, 2))
    a.scales[149, 4] = 254
    expected = ops.gemm(a, b, out_dtype=FP32)
    with on_tensor_cores(monkeypatch):
        assert ops.gemm_order(a, b) == "blocks"
        assert_equal(ops.gemm(a, b, out_dtype=FP32), expected.cpu())


def test_operands_in_every_layout_are_the_same_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = (lambda q: q, stored_transposed, stored_swizzled, lambda q: stored_swizzled(stored_transposed(q)))
    a, b = random_operand("mxfp8-e4m3", 170, 200, 1), random_operand("mxfp6-e3m2-2d", 333, 200, 2)
    with on_tensor_cores(monkeypatch):
        for one, other in product(ways, ways):
            y = ops.gemm(there(one(a)), there(other(b)), out_dtype=FP32)
            assert_equal(y, bounds(a, b, out_dtype=FP32, order=ORDER).expected)


def sections_there(q: GroupedQuantized) -> GroupedQuantized:
    amax = None if q.amax is None else q.amax.to(DEVICE)
    moved = {part: getattr(q, part).to(DEVICE) for part in ("codes", "scales", "sizes")}
    return replace(q, **moved, amax=amax, tensor_scale=None)


@pytest.mark.parametrize("name", ["mxfp8-e4m3", "fp8-current-e4m3"])
def test_each_section_is_multiplied_by_its_own_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in (*SIZES, [300, 1], [1000, 0, 24, 700]):
        a = random_sections(name, sizes, 150)
        b = [random_operand(name, 300, 150, seed) for seed, _ in enumerate(sizes)]
        with on_tensor_cores(monkeypatch):
            y = ops.gemm_grouped(sections_there(a), [there(q) for q in b], out_dtype=torch.bfloat16)
        parts = [
            bounds(section, q, out_dtype=torch.bfloat16, order=ORDER).expected
            for section, q in zip(a.sections(), b, strict=True)
        ]
        assert_equal(y, torch.cat(parts))


@needs_compiler
def test_the_twin_on_a_cpu_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_tensor_cores(monkeypatch):
        for left, right in PAIRS:
            a, b = operand(left, 130, 150, 1), operand(right, 257, 150, 2)
            y = ops.gemm(there(a), there(b), out_dtype=FP32)
            assert_equal(y, ops.gemm(a, b, out_dtype=FP32))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 9, 31), (131, 130, 130), (5, 264, 64)])
def test_nothing_outside_is_read_and_nothing_outside_is_written(
    m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for left, right in PAIRS:
        plain = operand(left, m, k, 1), operand(right, n, k, 2)
        a, b = (there(q) for q in plain)
        for q in (a, b):
            q.codes, q.scales = embedded(q.codes), embedded(q.scales)
        with on_tensor_cores(monkeypatch), guarded_outputs(monkeypatch):
            y = ops.gemm(a, b, out_dtype=torch.bfloat16)
        assert_equal(y, bounds(*plain, out_dtype=torch.bfloat16, order=ORDER).expected)


def test_large_products_take_tensor_cores_of_themselves() -> None:
    for name in ("nvfp4", "mxfp8-e4m3"):
        for side, path in ((1024, paths.TENSOR), (64, paths.PORTABLE)):
            a = ops.quantize(matrix("outliers", side, side, FP32).to(DEVICE), name)
            assert ops.gemm_order(a, a) == paths.ORDERS[path]
            once = ops.gemm(a, a, out_dtype=torch.bfloat16)
            expected = bounds(a, a, out_dtype=torch.bfloat16, order=paths.ORDERS[path])
            exact = expected.exact
            assert torch.equal(once[exact], expected.expected[exact])
            assert torch.equal(once, ops.gemm(a, a, out_dtype=torch.bfloat16))
