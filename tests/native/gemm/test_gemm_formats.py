"""gemm of all families: whole value sets, the declared order bit for bit, every layout in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from narrowgauge.native.ops import Quantized
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe
from tests.native import declared
from tests.native.devices import ON_EVERY_DEVICE, ops
from tests.native.operands import (
    FP8_PAIRS,
    MX,
    MX_PAIRS,
    NVFP4_PAIRS,
    PAIRS,
    operand,
    random_addends,
    random_operand,
    random_sections,
    stored_swizzled,
    stored_transposed,
)
from tests.native.samples import DTYPES, assert_equal, options_of

pytestmark = ON_EVERY_DEVICE
FP32 = torch.float32


def each(pairs: Iterable[tuple[str, str]]) -> pytest.MarkDecorator:
    pairs = list(pairs)
    return pytest.mark.parametrize(("left", "right"), pairs, ids=[" x ".join(pair) for pair in pairs])


EVERY_PAIR = each(PAIRS)
FLT = np.finfo(np.float32)


def operands(left: str, right: str, m: int, n: int, k: int) -> tuple[Quantized, Quantized]:
    return random_operand(left, m, k, seed=1), random_operand(right, n, k, seed=2)


def all_codes(name: str) -> Quantized:
    """A row for every code of the recipe's elements, K = 1, with scales of 1."""
    r = find_recipe(name)
    codes = torch.arange(r.element.codes, dtype=torch.uint8).unsqueeze(1)
    one = torch.full((len(codes), 1), 127, dtype=torch.uint8)
    return operand(codes, one if name in MX else torch.ones(1 if r.whole else len(codes), 1), r)


# Whole value sets.


@each([*product(MX, MX), *(pair for pair in FP8_PAIRS if "128x128" not in "".join(pair))])
def test_every_code_is_multiplied_by_every_code(left: str, right: str) -> None:
    a, b = all_codes(left), all_codes(right)
    values = [np.array(q.recipe.element.values) for q in (a, b)]
    with np.errstate(invalid="ignore"):
        exact = np.outer(*values) + 0.0  # a sum that begins with 0 is never -0
    assert np.array_equal(exact.astype(np.float32), exact, equal_nan=True)
    assert_equal(ops.gemm(a, b, out_dtype=FP32), torch.from_numpy(exact.astype(np.float32)))


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("mxfp8-e5m2", [0x01]),  # product of the two smallest numbers, 2^-32
        ("mxfp8-e5m2", [0x7B] * 32),  # largest sum, exact: 49·2^31
        ("mxfp8-e5m2", [0x80 | 0x3D, 0x01, 0x17, 0x2F]),
        ("mxfp8-e4m3", [0x38]),
        ("mxfp8-e4m3", [*range(0x60, 0x7F), 0x01]),  # a sum of 22 bits: too many for a subnormal number
        ("mxfp4", [1, 15, 3]),
    ],
    ids=["smallest", "largest", "negative", "one", "long", "mxfp4"],
)
def test_every_scale_is_multiplied_by_every_scale(name: str, codes: list[int]) -> None:
    """Terms from 2^-254 to 2^254 and NaN round once, also to subnormal numbers, zero and infinity."""
    every = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    a = operand(torch.tensor([codes], dtype=torch.uint8).repeat(256, 1), every, name)
    squared = np.array(a.recipe.element.values)[codes] ** 2
    inner = np.float32(0)
    for term in squared.astype(np.float32):
        inner = inner + term
    exponents = np.arange(256) - 127
    with np.errstate(over="ignore", under="ignore"):
        exact = np.ldexp(np.float64(inner), exponents[:, None] + exponents)
        expected = exact.astype(np.float32)
    expected[255], expected[:, 255] = np.nan, np.nan
    subnormal = (np.abs(expected) < FLT.smallest_normal) & (expected != 0)
    assert subnormal.any()
    assert np.isinf(expected).any()
    assert_equal(ops.gemm(a, a, out_dtype=FP32), torch.from_numpy(expected))


def test_overflow_of_a_term_or_a_sum() -> None:
    """2^127 + 2^127 stays infinite, also if the exact sum is 0; infinite terms of two signs give NaN."""
    signs = torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, -1, 1]])
    codes = torch.zeros(3, 128, dtype=torch.uint8)
    codes[:, ::32] = torch.where(signs > 0, 0x38, 0xB8)
    a = operand(codes, torch.full((3, 4), 254, dtype=torch.uint8), "mxfp8-e4m3")
    for scale, expected in ((127, [torch.inf, torch.inf, 0.0]), (128, [torch.inf, torch.nan, torch.nan])):
        b = operand(codes[:1], torch.full((1, 4), scale, dtype=torch.uint8), "mxfp8-e4m3")
        assert_equal(ops.gemm(a, b, out_dtype=FP32).flatten(), torch.tensor(expected))


# The declared order.


@pytest.mark.sampled(2)
@EVERY_PAIR
def test_products_and_blocks_are_added_in_order_of_k(left: str, right: str) -> None:
    rounds = False
    for number, (m, n, k) in enumerate([(3, 5, 32), (70, 131, 160), (129, 66, 300), (5, 3, 1000), (1, 1, 1)]):
        a, b = operands(left, right, m, n, k)
        y = ops.gemm(a, b, out_dtype=DTYPES[number % 3])
        assert_equal(y, declared.gemm(a, b, out_dtype=DTYPES[number % 3]))
        rounds |= not torch.equal(ops.gemm(a, b, out_dtype=FP32), reference.gemm(a, b, out_dtype=FP32))
    assert rounds or "mxfp4" in left, "the exact sum would not tell a wrong order from a right one"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("k", [*range(1, 18), 31, 32, 33, 63, 64, 65, 95, 127, 128, 129, 191, 257])
def test_any_k_is_multiplied(k: int) -> None:
    for left, right in (*PAIRS, *NVFP4_PAIRS):
        a, b = operands(left, right, 5, 7, k)
        assert_equal(ops.gemm(a, b, out_dtype=FP32), declared.gemm(a, b, out_dtype=FP32))


def test_c_is_added_after_the_cast_for_blocks_of_fp8() -> None:
    """1 + 2^-9 is no bfloat16 number: if it is cast to 1 first, adding -1 gives 0, else 2^-9."""
    codes, scale = torch.tensor([[0x38, 0x01]], dtype=torch.uint8), torch.ones(1, 1)
    other = torch.tensor([[0x38, 0x38]], dtype=torch.uint8)
    c = torch.tensor([[-1.0]])
    for name, left in (("fp8-block-1x128-e4m3-fp32", 0.0), ("fp8-current-e4m3", 2.0**-9)):
        a, b = operand(codes, scale, name), operand(other, scale, name)
        assert ops.gemm(a, b, out_dtype=torch.bfloat16, c=c).item() == left


# What the reference says.


# Layouts in memory.


WAYS = (lambda q: q, stored_transposed, stored_swizzled, lambda q: stored_swizzled(stored_transposed(q)))


# Sections.

SIZES = [[100, 0, 30, 70, 0], [0], [0, 0, 5], [128, 64], [129, 255, 1], [1] * 9]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_section_is_multiplied_by_its_own_matrix(sizes: list[int]) -> None:
    for left, right in (*MX_PAIRS[:4], *FP8_PAIRS[1:], NVFP4_PAIRS[0]):
        a = random_sections(left, sizes, 150)
        b = [random_operand(right, 70, 150, seed=10 + number) for number, _ in enumerate(sizes)]
        for added in ({}, random_addends(sizes, 70, torch.float16)):
            y = ops.gemm_grouped(a, b, out_dtype=torch.bfloat16, **added)
            assert_equal(y, declared.gemm_grouped(a, b, out_dtype=torch.bfloat16, **added))


# Empty products and NaN.


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 64), (2, 0, 64), (0, 0, 64), (2, 3, 0), (0, 0, 0)])
def test_an_empty_product_is_empty_or_c_and_bias(m: int, n: int, k: int) -> None:
    for (left, right), out_dtype in product((*PAIRS, *NVFP4_PAIRS), DTYPES):
        a, b = operands(left, right, m, n, k)
        c, bias = torch.full((m, n), 2.0), torch.arange(n).float()
        assert_equal(ops.gemm(a, b, out_dtype=out_dtype), torch.zeros(m, n, dtype=out_dtype))
        assert_equal(ops.gemm(a, b, out_dtype=out_dtype, c=c, bias=bias), (c + bias).to(out_dtype))


# Errors.

REFUSED = [
    ("mxfp8-e4m3", "nvfp4", "scale is E8M0 and E4M3"),
    ("mxfp8-e4m3", "fp8-block-1x128", "scale is E8M0 and FP32"),
    ("fp8-current-e5m2", "fp8-delayed-e5m2", "element is E5M2 of both; .* has to be E4M3"),
    ("fp8-block-1x128-e5m2", "fp8-block-128x128-e5m2", "element is E5M2 of both; .* has to be E4M3"),
    ("fp8-block-1x128", "fp8-current", ""),
]


@pytest.mark.parametrize(("left", "right", "words"), REFUSED, ids=[f"{r[0]} x {r[1]}" for r in REFUSED])
def test_recipes_that_cannot_be_multiplied(left: str, right: str, words: str) -> None:
    a, b = (reference.quantize(torch.ones(3, 32), name, **options_of(find_recipe(name))) for name in (left, right))
    with pytest.raises(ValueError, match=f"cannot multiply {a.recipe} by {b.recipe}: .*{words}"):
        ops.gemm(a, b, out_dtype=FP32)


def test_codes_of_e2m1_across_rows_are_refused() -> None:
    q = random_operand("mxfp4", 6, 32)
    across = replace(q, codes=torch.zeros(32, 3, dtype=torch.uint8), scales=q.scales.T.contiguous(), transposed=True)
    with pytest.raises(ValueError, match=r"a of recipe mxfp4 .*two rows in a byte"):
        ops.gemm(across, q, out_dtype=FP32)


def test_sections_with_too_few_scales_or_codes_are_refused() -> None:
    b = [random_operand("mxfp8-e4m3", 3, 64)] * 2
    whole = random_sections("mxfp8-e4m3", [3, 4], 64)
    with pytest.raises(ValueError, match=r"a\.scales has shape \(7, 2\), not \(6, 2\)"):
        ops.gemm_grouped(replace(whole, scales=whole.scales[:6]), b, out_dtype=FP32)
    with pytest.raises(ValueError, match=r"a\.codes has shape \(7, 64\), not \(6, 64\)"):
        ops.gemm_grouped(replace(whole, codes=whole.codes[:6]), b, out_dtype=FP32)
    with pytest.raises(TypeError, match=r"a\.sizes is int64, not int32"):
        ops.gemm_grouped(replace(whole, sizes=whole.sizes.int()), b, out_dtype=FP32)
