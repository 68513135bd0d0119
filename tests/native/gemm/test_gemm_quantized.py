"""gemm_quantized: the bytes of quantize(gemm(…)) for any operands, recipe and shape."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from narrowgauge.native.ops import Quantized
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.native.devices import ON_EVERY_DEVICE, ops
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


@pytest.mark.sampled(80)
@pytest.mark.parametrize("name", OUTPUTS)
def test_every_recipe_gives_the_bytes_of_gemm_and_quantize(name: str) -> None:
    shapes = [(130, 270, 70), (33, 45, 130)] if ops.device == "cuda" or name in OUTPUTS[::4] else [(33, 45, 130)]
    for number, ((left, right), (m, n, k)) in enumerate(product(OPERANDS, shapes)):
        a, b = operands(left, right, m, n, k)
        assert_as_two(a, b, name, DTYPES[number % 3])


@pytest.mark.sampled(10)
@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 161])
def test_any_m_and_n_are_quantized(n: int) -> None:
    for m, name in product((1, 31, 65, 128, 129), ("mxfp8-2d", "mxfp4", "fp8-block-1x128", "fp8-block-128x128")):
        assert_as_two(*operands("mxfp8-e4m3", "mxfp6-e3m2", m, n, 33), name, torch.bfloat16)


def test_the_scale_of_a_block_depends_on_the_output_dtype() -> None:
    """A tiny amax with an infinite 448/amax gives the largest number of the type."""
    codes = torch.tensor([[0x38]], dtype=torch.uint8)
    a = Quantized(codes, torch.tensor([[60]], dtype=torch.uint8), None, find_recipe("mxfp8-e4m3"), (1, 1))
    b = Quantized(codes, torch.tensor([[60 - 5]], dtype=torch.uint8), None, find_recipe("mxfp8-e4m3"), (1, 1))
    name = "fp8-block-1x128-e4m3-fp32"
    scales = {dtype: assert_as_two(a, b, name, dtype).scales.item() for dtype in (torch.float32, torch.bfloat16)}
    assert scales[torch.float32] != scales[torch.bfloat16]


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
