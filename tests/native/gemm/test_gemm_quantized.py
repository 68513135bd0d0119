"""gemm_quantized on a CPU: the bytes of quantize(gemm(…)), whatever the operands, the recipe and the shape."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.ops import Quantized
from narrowgauge.native.runtime import host
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.native.guards import embedded, guarded_outputs
from tests.native.operands import random_operand
from tests.native.samples import DTYPES, FP8_NAMES, MX_NAMES, assert_same, matrix

OPERANDS = (
    ("mxfp8-e4m3", "mxfp6-e3m2"), ("fp8-block-1x128-e4m3", "fp8-block-128x128-e5m2"),
    ("fp8-current-e4m3", "fp8-delayed-e5m2"), ("nvfp4", "nvfp4-2d"),
)  # fmt: skip
"""Each rule of adding blocks."""
OUTPUTS = tuple(
    name
    for name in (*MX_NAMES, *FP8_NAMES)
    if (r := find_recipe(name)).tensor_scale in ("none", "given") and r.rounding == "nearest-even"
    and "-recent" not in name and "-bulk" not in name
)  # fmt: skip
"""Every recipe that a kernel can quantize its own output by; the rules for the next scale change none of them."""
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


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_recipe_gives_the_bytes_of_gemm_and_quantize(name: str) -> None:
    for number, ((left, right), (m, n, k)) in enumerate(product(OPERANDS, [(130, 270, 70), (33, 45, 130)])):
        a, b = operands(left, right, m, n, k)
        assert_as_two(a, b, name, DTYPES[number % 3])


@pytest.mark.parametrize(("left", "right"), OPERANDS, ids=[" x ".join(pair) for pair in OPERANDS])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_what_is_added_is_in_the_codes(left: str, right: str, out_dtype: torch.dtype) -> None:
    a, b = operands(left, right, 66, 140, 96)
    c, bias = 1000 * matrix("outliers", 66, 140, torch.bfloat16), matrix("normal", 1, 140, torch.float32).view(140)
    for name in ("mxfp8-e5m2", "mxfp4-2d", "fp8-block-128x128", "fp8-delayed-e4m3"):
        found = [assert_as_two(a, b, name, out_dtype, **added) for added in ({}, {"c": c}, {"c": c, "bias": bias})]
        assert not torch.equal(found[0].codes, found[1].codes)


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 161])
def test_any_m_and_n_are_quantized(n: int) -> None:
    for m, name in product((1, 31, 65, 128, 129), ("mxfp8-2d", "mxfp4", "fp8-block-1x128", "fp8-block-128x128")):
        assert_as_two(*operands("mxfp8-e4m3", "mxfp6-e3m2", m, n, 33), name, torch.bfloat16)


def test_outputs_that_are_nan_infinite_or_too_large_are_quantized_as_such() -> None:
    """In float16 some overflow; the last column, NaN, has the half of a byte to itself."""
    a, b = random_operand("mxfp8-e5m2", 70, 64, seed=1), random_operand("mxfp8-e5m2", 141, 64, seed=2)
    a.codes[3, 5], b.codes[140, 7], b.codes[40, 9] = 0x7F, 0x7C, 0xFC
    some = [find_recipe(name) for name in ("mxfp4", "mxfp4-2d", "mxfp8-e5m2", "fp8-block-1x128", "fp8-delayed-e4m3")]
    for r, out_dtype, nan in product(some, DTYPES, ("ignore", "propagate")):
        assert_as_two(a, b, replace(r, nan=nan), out_dtype)


def test_the_scale_of_a_block_depends_on_the_type_that_the_output_is_cast_to() -> None:
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


@pytest.mark.parametrize("name", ["mxfp8-e4m3", "mxfp4", "mxfp6-e2m3-2d", "fp8-block-128x128", "fp8-delayed-e4m3"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 9, 31), (129, 131, 70)])
def test_nothing_outside_is_read_and_nothing_outside_is_written(
    name: str, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = operands("mxfp8-e4m3", "mxfp6-e3m2", m, n, k)
    scale = {key: embedded(value) for key, value in given(name).items()}
    c, bias = matrix("normal", m, n, torch.bfloat16), matrix("normal", 1, n, torch.float32).view(n)
    expected = ops.quantize(ops.gemm(a, b, out_dtype=torch.float16, c=c, bias=bias), name, **scale)
    for q in (a, b):
        q.codes, q.scales = embedded(q.codes), embedded(q.scales)
    with guarded_outputs(monkeypatch):
        got = ops.gemm_quantized(
            a, b, name, out_dtype=torch.float16, c=embedded(c), bias=embedded(bias), **scale
        )  # fmt: skip
    assert_same(got, expected)


def test_threads_in_every_order_give_the_same_bytes() -> None:
    for (left, right), name in zip(
        OPERANDS, ("mxfp8-2d", "fp8-block-128x128", "fp8-delayed-e4m3", "mxfp4"), strict=True
    ):
        a, b = operands(left, right, 150, 140, 70)
        for order in host.ORDERS:
            with host.thread_order(order):
                assert_as_two(a, b, name, torch.bfloat16)


# What is refused.

WHOLE = "depends on the whole output; use gemm and then quantize"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvfp4", f"but a scale of recipe nvfp4 {WHOLE}"),
        ("fp8-current-e4m3", f"but a scale of recipe fp8-current-e4m3 {WHOLE}"),
        ("mxfp8-e4m3-sr", "nearest even, and recipe mxfp8-e4m3-sr stochastically; use gemm and then quantize"),
    ],
)
def test_what_cannot_be_quantized_is_said(name: str, message: str) -> None:
    q = ops.quantize(torch.ones(3, 32), "mxfp8-e4m3")
    with pytest.raises(NotImplementedError) as raised:
        ops.gemm_quantized(q, q, name, out_dtype=torch.float32)
    assert message in str(raised.value)
