"""Codes and scales that are read from the bits of a matrix, decoded and multiplied in exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.harness.operations.quantize.given_codes import given_operand
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.spec.formats import E8M0
from narrowgauge.spec.recipes import find_recipe

RECIPES = (
    "nvfp4", "nvfp4-rowscaled", "mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "fp8-current-e4m3",
    "fp8-block-1x128-e4m3-fp32",
)  # fmt: skip


def given(recipe, shape=(256, 128), dtype="bf16"):
    case = case_from_labels("quantize", recipe, shape, dtype, "codes", ())
    return given_operand(make_inputs(case).x, find_recipe(recipe))


def element_values(q):
    """Values of the codes (M, K), float64."""
    table = torch.tensor(q.recipe.element.values, dtype=torch.float64)
    return table[elements(q.codes, q.shape[1], q.recipe).long()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_code_and_scale_byte_is_given(recipe):
    q = given(recipe)
    codes = elements(q.codes, q.shape[1], q.recipe)
    x = make_inputs(case_from_labels("quantize", recipe, (256, 128), "bf16", "codes", ())).x
    assert torch.equal(codes, (x.view(torch.int16) & (1 << q.recipe.element.bits) - 1).to(torch.uint8))
    assert len(codes.unique()) == 1 << q.recipe.element.bits
    if q.recipe.scale.bits == 8:
        assert len(q.scales.unique()) == (256 if q.recipe.scale is E8M0 else 128)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 32), (16, 0), (0, 0)])
def test_an_empty_matrix_has_the_parts_of_the_reference(recipe, shape):
    q, expected = given(recipe, shape), reference.quantize(torch.zeros(shape), recipe)
    for part in ("codes", "scales", "amax"):
        found, right = getattr(q, part), getattr(expected, part)
        assert (found is None) == (right is None)
        assert found is None or (found.shape, found.dtype) == (right.shape, right.dtype), part


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp4"])
def test_dequantize_of_given_codes_rounds_exact_products(recipe, dtype):
    q = given(recipe)
    # A code times a power of two: exact in float64.
    power = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    power[255] = torch.nan
    products = element_values(q) * power[q.scales.long()].repeat_interleave(32, 1)
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(products.numpy().astype(np.float32)).to(dtype)
    assert expected.isnan().any()
    assert expected.isinf().any()
    assert (expected == 0).any()
    for actual in (reference.dequantize(q, dtype), native.dequantize(q, dtype)):
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.nan_to_num(7).view(torch.uint8), expected.nan_to_num(7).view(torch.uint8))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["mxfp8-e4m3", "mxfp4"])
def test_products_of_given_codes_agree_with_fractions(recipe):
    a, b = given(recipe, (48, 32)), given(recipe, (40, 32), "fp32")
    limits = bounds(a, b, out_dtype=torch.float32)
    output = native.gemm(a, b, out_dtype=torch.float32)
    assert within_bounds(output, limits).all()
    left, right = element_values(a), element_values(b)
    finite = 0
    for i in range(48):
        for j in range(40):
            scales = int(a.scales[i, 0]), int(b.scales[j, 0])
            numbers = left[i].tolist(), right[j].tolist()
            if 255 in scales or not all(map(np.isfinite, (*numbers[0], *numbers[1]))):
                assert limits.expected[i, j].isnan()
                continue
            total = sum(Fraction(x) * Fraction(y) for x, y in zip(*numbers, strict=True))
            total *= Fraction(2) ** (sum(scales) - 254)
            if abs(total) >= 2**127 or not limits.lower[i, j].isfinite() or not limits.upper[i, j].isfinite():
                continue
            finite += 1
            # Half a step of the last subnormal number, and of the last bit, that the ends round away.
            slack = Fraction(1, 2**150) + abs(total) / 2**24
            assert Fraction(float(limits.lower[i, j])) - slack <= total <= Fraction(float(limits.upper[i, j])) + slack
    assert finite > 400


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8-e4m3", "fp8-current-e4m3"])
def test_half_edges_reach_both_sides_of_the_overflow(recipe):
    case = case_from_labels("gemm", recipe, (21, 128, 28), "bf16xbf16-fp16", "half-edges", ("tn",))
    inputs = make_inputs(case)
    exact = (inputs.x.double() @ inputs["w"].double().T).abs().unique().tolist()
    assert {65504.0, 65512.0, 65520.0, 65536.0} <= set(exact)
    operands = [reference.quantize(t, recipe) for t in (inputs.x, inputs["w"])]
    output = reference.gemm(*operands, out_dtype=torch.float16).abs()
    assert (output == 65504).any()
    assert output.isinf().any()


@pytest.mark.parametrize(
    ("family", "place", "exponent"),
    [("amax-2m126-first", 0, -126), ("amax-2p50-first", 0, 50), ("amax-2p120-last", -1, 120),
     ("amax-2m120-row-end", 17 * 72 - 1, -120), ("amax-2m56-last", -1, -56)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_amax_of_a_tensor_is_at_its_place(family, place, exponent, dtype):
    x = make_inputs(case_from_labels("quantize", "nvfp4", (33, 72), dtype, family, ())).x.double().flatten()
    amax = x[place]
    assert 2.0**exponent * 1.5 <= amax <= 2.0 ** (exponent + 1)
    assert int((x.abs() >= amax).sum()) == 1
