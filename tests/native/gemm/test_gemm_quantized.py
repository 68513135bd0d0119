"""gemm_quantized: the bytes of quantize(gemm(…)) for any operands, recipe and shape."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from narrowgauge.native.ops import Quantized
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.native.devices import ON_EVERY_DEVICE, ops
from tests.native.operands import random_operand
from tests.native.samples import DTYPES, FP8_NAMES, MX_NAMES, assert_same, matrix

pytestmark = ON_EVERY_DEVICE
OPERANDS = (
    ("mxfp8-e4m3", "mxfp6-e3m2"), ("fp8-block-1x128-e4m3", "fp8-block-128x128-e5m2"),
    ("fp8-current-e4m3", "fp8-delayed-e5m2"), ("nvfp4", "nvfp4-2d"),
)  # fmt: skip
"""A pair for each rule of adding blocks."""
OUTPUTS = tuple(
    name
    for name in (*MX_NAMES, *FP8_NAMES)
    if (r := find_recipe(name)).tensor_scale in ("none", "given") and r.rounding == "nearest-even"
    and "-recent" not in name and "-bulk" not in name
)  # fmt: skip
"""Recipes of a quantized output; the rule of the next scale does not matter."""
SCALE = torch.tensor([3.7])


def given(name: str | Recipe) -> dict[str, torch.Tensor]:
    """The scale that a recipe with delayed scaling is given."""
    return {"scale": SCALE} if find_recipe(name).tensor_scale == "given" else {}


def operands(left: str, right: str, m: int, n: int, k: int) -> tuple[Quantized, Quantized]:
    """Quantized by the reference, so that outputs are of every size, and few overflow in float16."""
    x, y = matrix("outliers", m, k, torch.float32, seed=1), matrix("normal", n, k, torch.float32, seed=2)
    return reference.quantize(x, left, **given(left)), reference.quantize(y, right, **given(right))


def assert_as_two(
    a: Quantized, b: Quantized, name: str | Recipe, out_dtype: torch.dtype, **added: torch.Tensor
) -> Quantized:
    """The bytes of gemm and then quantize, by the reference, too."""
    got = ops.gemm_quantized(a, b, name, out_dtype=out_dtype, **added, **given(name))
    y = ops.gemm(a, b, out_dtype=out_dtype, **added)
    assert_same(got, ops.quantize(y, name, **given(name)))
    assert_same(got, reference.quantize(y, name, **given(name)))
    return got


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", OUTPUTS)
def test_every_recipe_gives_the_bytes_of_gemm_and_quantize(name: str) -> None:
    shapes = [(130, 270, 70), (33, 45, 130)] if ops.device == "cuda" or name in OUTPUTS[::4] else [(33, 45, 130)]
    for number, ((left, right), (m, n, k)) in enumerate(product(OPERANDS, shapes)):
        a, b = operands(left, right, m, n, k)
        assert_as_two(a, b, name, DTYPES[number % 3])


@pytest.mark.long
@pytest.mark.parametrize(("left", "right"), OPERANDS, ids=[" x ".join(pair) for pair in OPERANDS])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_c_and_bias_are_in_the_codes(left: str, right: str, out_dtype: torch.dtype) -> None:
    a, b = operands(left, right, 66, 140, 96)
    c, bias = 1000 * matrix("outliers", 66, 140, torch.bfloat16), matrix("normal", 1, 140, torch.float32).view(140)
    for name in ("mxfp8-e5m2", "mxfp4-2d", "fp8-block-128x128", "fp8-delayed-e4m3"):
        found = [assert_as_two(a, b, name, out_dtype, **added) for added in ({}, {"c": c}, {"c": c, "bias": bias})]
        assert not torch.equal(found[0].codes, found[1].codes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 161])
def test_any_m_and_n_are_quantized(n: int) -> None:
    for m, name in product((1, 31, 65, 128, 129), ("mxfp8-2d", "mxfp4", "fp8-block-1x128", "fp8-block-128x128")):
        assert_as_two(*operands("mxfp8-e4m3", "mxfp6-e3m2", m, n, 33), name, torch.bfloat16)


def test_outputs_that_are_nan_infinite_or_too_large() -> None:
    """Some outputs overflow in float16; the last column, NaN, has a byte of its own."""
    a, b = random_operand("mxfp8-e5m2", 70, 64, seed=1), random_operand("mxfp8-e5m2", 141, 64, seed=2)
    a.codes[3, 5], b.codes[140, 7], b.codes[40, 9] = 0x7F, 0x7C, 0xFC
    some = [find_recipe(name) for name in ("mxfp4", "mxfp4-2d", "mxfp8-e5m2", "fp8-block-1x128", "fp8-delayed-e4m3")]
    for r, out_dtype, nan in product(some, DTYPES, ("ignore", "propagate")):
        assert_as_two(a, b, replace(r, nan=nan), out_dtype)


def test_the_scale_of_a_block_depends_on_the_output_dtype() -> None:
    """An amax so small that 448/amax is infinite gives the largest number of that type."""
    codes = torch.tensor([[0x38]], dtype=torch.uint8)
    a = Quantized(codes, torch.tensor([[60]], dtype=torch.uint8), None, find_recipe("mxfp8-e4m3"), (1, 1))
    b = Quantized(codes, torch.tensor([[60 - 5]], dtype=torch.uint8), None, find_recipe("mxfp8-e4m3"), (1, 1))
    name = "fp8-block-1x128-e4m3-fp32"
    scales = {dtype: assert_as_two(a, b, name, dtype).scales.item() for dtype in (torch.float32, torch.bfloat16)}
    assert scales[torch.float32] != scales[torch.bfloat16]


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 64), (2, 0, 64), (0, 0, 64), (2, 3, 0), (0, 0, 0)])
def test_an_empty_output_is_quantized(m: int, n: int, k: int) -> None:
    for (left, right), name in product(OPERANDS, ("mxfp8-e4m3", "mxfp4-2d", "fp8-block-128x128", "fp8-delayed-e4m3")):
        assert_as_two(*operands(left, right, m, n, k), name, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nvfp4", "depends on the whole output"),
        ("fp8-current-e4m3", "depends on the whole output"),
        ("mxfp8-e4m3-sr", "stochastically"),
    ],
)
def test_recipes_that_cannot_quantize_an_output(name: str, reason: str) -> None:
    q = reference.quantize(torch.ones(3, 32), "mxfp8-e4m3")
    with pytest.raises(NotImplementedError, match=f"recipe {name} {reason}; use gemm and then quantize"):
        ops.gemm_quantized(q, q, name, out_dtype=torch.float32)
