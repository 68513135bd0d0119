"""The GEMMs of MX and FP8, and those with quantized output, on a GPU: the declared order, and a CPU's bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.ops import GroupedQuantized
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe
from tests.native import declared
from tests.native.gemm.test_gemm_formats import EVERY_PAIR, SIZES, all_codes, operands
from tests.native.gemm.test_gemm_quantized import OPERANDS, OUTPUTS, given
from tests.native.gemm.test_gemm_quantized import operands as quantized_operands
from tests.native.gpu import DEVICE, needs_compiler, needs_gpu
from tests.native.guards import embedded, guarded_outputs
from tests.native.operands import (
    FP8_PAIRS,
    MX,
    MX_PAIRS,
    PAIRS,
    random_operand,
    random_sections,
    stored_swizzled,
    stored_transposed,
)
from tests.native.samples import DTYPES, assert_equal, assert_same, matrix, to

pytestmark = needs_gpu
FP32 = torch.float32


def sections_to(q: GroupedQuantized) -> GroupedQuantized:
    amax = None if q.amax is None else q.amax.to(DEVICE)
    moved = {part: getattr(q, part).to(DEVICE) for part in ("codes", "scales", "sizes")}
    return replace(q, **moved, amax=amax, tensor_scale=None)


@EVERY_PAIR
def test_products_and_blocks_are_added_in_order_of_k(left: str, right: str) -> None:
    shapes = [(3, 5, 32), (70, 131, 160), (129, 66, 300), (5, 3, 1000), (1, 1, 1), (2, 3, 0), (0, 3, 64)]
    for number, (m, n, k) in enumerate(shapes):
        a, b = operands(left, right, m, n, k)
        c, bias = matrix("normal", max(1, m), n, torch.bfloat16)[:m], matrix("normal", 1, n, FP32).view(n)
        for added in ({}, {"c": c, "bias": bias}):
            there = {name: tensor.to(DEVICE) for name, tensor in added.items()}
            y = ops.gemm(to(a, DEVICE), to(b, DEVICE), out_dtype=DTYPES[number % 3], **there)
            assert_equal(y, declared.gemm(a, b, out_dtype=DTYPES[number % 3], **added))


def test_every_code_is_multiplied_by_every_other() -> None:
    for left, right in (*product(MX, MX), ("fp8-current-e4m3", "fp8-current-e5m2")):
        a, b = all_codes(left), all_codes(right)
        assert_equal(ops.gemm(to(a, DEVICE), to(b, DEVICE), out_dtype=FP32), declared.gemm(a, b, out_dtype=FP32))


def test_every_scale_is_multiplied_by_every_other() -> None:
    """Subnormal terms, zero, infinity and NaN."""
    every = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    for name, columns in (("mxfp8-e5m2", 32), ("mxfp8-e4m3", 7), ("mxfp4", 1)):
        q = replace(random_operand(name, 256, columns), scales=every)
        q.codes = q.codes[:1].repeat(256, 1).contiguous()
        assert_equal(ops.gemm(to(q, DEVICE), to(q, DEVICE), out_dtype=FP32), declared.gemm(q, q, out_dtype=FP32))


def test_operands_in_every_layout_are_the_same_operands() -> None:
    ways = (lambda q: q, stored_transposed, stored_swizzled, lambda q: stored_swizzled(stored_transposed(q)))
    for m, n, k in ((70, 133, 100), (1, 3, 33), (129, 5, 64)):
        a, b = operands("mxfp8-e4m3", "mxfp6-e3m2-2d", m, n, k)
        expected = declared.gemm(a, b, out_dtype=FP32)
        for one, other in product(ways, ways):
            assert_equal(ops.gemm(to(one(a), DEVICE), to(other(b), DEVICE), out_dtype=FP32), expected)


def test_each_section_is_multiplied_by_its_own_matrix() -> None:
    for sizes, (left, right) in product(SIZES, (*MX_PAIRS[:4], *FP8_PAIRS[1:])):
        a = random_sections(left, sizes, 150)
        b = [random_operand(right, 70, 150, seed=10 + number) for number, _ in enumerate(sizes)]
        y = ops.gemm_grouped(sections_to(a), [to(q, DEVICE) for q in b], out_dtype=torch.bfloat16)
        assert_equal(y, declared.gemm_grouped(a, b, out_dtype=torch.bfloat16))


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_recipe_gives_the_bytes_of_gemm_and_quantize(name: str) -> None:
    scale = {key: value.to(DEVICE) for key, value in given(name).items()}
    shapes = [(130, 270, 70), (33, 45, 130), (1, 1, 1), (0, 5, 32), (5, 7, 0)]
    for number, ((left, right), (m, n, k)) in enumerate(product(OPERANDS, shapes)):
        a, b = (to(q, DEVICE) for q in quantized_operands(left, right, m, n, k))
        out_dtype = DTYPES[number % 3]
        got = ops.gemm_quantized(a, b, name, out_dtype=out_dtype, **scale)
        y = ops.gemm(a, b, out_dtype=out_dtype)
        assert_same(got, ops.quantize(y, name, **scale))
        assert_same(got, reference.quantize(y.cpu(), name, **given(name)))


@needs_compiler
def test_a_quantized_output_has_the_bytes_that_it_has_on_a_cpu() -> None:
    for (left, right), name, out_dtype in product(OPERANDS, ("mxfp8-2d", "mxfp4", "fp8-block-128x128"), DTYPES):
        a, b = quantized_operands(left, right, 150, 141, 300)
        there = ops.gemm_quantized(to(a, DEVICE), to(b, DEVICE), name, out_dtype=out_dtype)
        assert_same(there, ops.gemm_quantized(a, b, name, out_dtype=out_dtype))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 9, 31), (65, 130, 130)])
def test_nothing_outside_is_read_and_nothing_outside_is_written(
    m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for left, right in PAIRS:
        plain = operands(left, right, m, n, k)
        a, b = (to(q, DEVICE) for q in plain)
        for q in (a, b):
            q.codes, q.scales = embedded(q.codes), embedded(q.scales)
        with guarded_outputs(monkeypatch):
            y = ops.gemm(a, b, out_dtype=FP32)
        assert_equal(y, declared.gemm(*plain, out_dtype=FP32))
        for name in ("mxfp4", "mxfp8-2d", "fp8-block-128x128", "fp8-delayed-e4m3"):
            scale = {key: value.to(DEVICE) for key, value in given(name).items()}
            with guarded_outputs(monkeypatch):
                got = ops.gemm_quantized(a, b, name, out_dtype=FP32, **scale)
            assert_same(got, reference.quantize(y.cpu(), find_recipe(name), **given(name)))
