"""gemm of NVFP4: golden outputs, the declared order bit for bit, and the proved bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge.native.ops import Quantized
from narrowgauge.reference import ops as reference
from narrowgauge.reference.bounds.bounds import bounds
from tests.golden import bits, floats, golden, load
from tests.native import declared
from tests.native.devices import ON_EVERY_DEVICE, ops
from tests.native.samples import RECIPES, assert_equal, matrix
from tests.reference import samples

pytestmark = ON_EVERY_DEVICE


def pair(family: str, m: int, n: int, k: int, amax: float = 2688.0, seed: int = 0) -> tuple[Quantized, Quantized]:
    """Two operands of a family of tests.reference.samples; k is a multiple of 16."""
    left, left_scales, right, right_scales = samples.operands(family, np.random.default_rng(seed), m, n, k)
    return samples.quantized(left, left_scales, amax), samples.quantized(right, right_scales, amax)


def assert_within(y: torch.Tensor, a: Quantized, b: Quantized, **epilogue: object) -> torch.Tensor:
    """Every output lies in its proved interval; if no sum can round, the output is the reference's."""
    limits = bounds(a, b, **epilogue)  # type: ignore[arg-type]
    assert ((limits.lower <= y) & (y <= limits.upper)).all()
    exact = limits.exact & ~limits.zero_sum
    assert torch.equal(bits(y)[exact], bits(limits.expected)[exact])
    return exact


# Golden outputs of Transformer Engine.


@pytest.mark.parametrize("path", golden("gemm_*.npz"))
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_golden_outputs_if_no_sum_can_round(path: Path, accumulate: bool, out_dtype: torch.dtype) -> None:
    """Transformer Engine rounds c to the output's type first."""
    arrays = load(path)
    a, b = (ops.quantize(floats(arrays[side], torch.bfloat16), "nvfp4") for side in ("x", "w"))
    for q, side in ((a, "x"), (b, "w")):
        np.testing.assert_array_equal(q.codes, arrays[f"{side}.codes"])
        np.testing.assert_array_equal(q.scales, arrays[f"{side}.scales"])
        np.testing.assert_array_equal(q.amax, arrays[f"{side}.amax"])
    short = "fp32" if out_dtype == torch.float32 else "bf16"
    theirs = floats(arrays[f"y.{short}{'.accumulate' * accumulate}"], out_dtype)
    c = torch.from_numpy(arrays["c"]).to(out_dtype) if accumulate else None
    ours = ops.gemm(a, b, out_dtype=out_dtype, c=c)
    exact = assert_within(ours, a, b, out_dtype=out_dtype, c=c)
    assert exact.any()
    assert torch.equal(bits(ours)[exact], bits(theirs)[exact])


# The declared order.


def test_every_code_under_every_scale_is_multiplied() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
    one = samples.quantized(codes, np.arange(256, dtype=np.uint8).reshape(256, 1))
    each = samples.quantized(2 * np.eye(16, dtype=np.uint8), np.full((16, 1), 0x38, np.uint8))
    y = ops.gemm(one, each, out_dtype=torch.float32)
    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(samples.values(codes, one.scales.numpy()).astype(np.float32))
    assert_equal(y + 0.0, expected + 0.0)  # a sum of zeros is +0


# The epilogue.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["te", "te-native"])
def test_alpha_is_formed_in_the_recipes_order(recipe: str) -> None:
    """For amaxes with different results of the two orders, and at the ends of float32."""
    one = ops.quantize(torch.ones(1, 16), RECIPES[recipe])
    other = RECIPES["te-native" if recipe == "te" else "te"]
    amaxes = [1e-45, 1e-20, 1.0, 1e30, 3.4e38, 0.0, math.inf, *np.random.default_rng(1).uniform(0.1, 300, 10).tolist()]
    differ = 0
    for x, y in product(amaxes, amaxes):
        a, b = (replace(one, amax=torch.tensor([v])) for v in (x, y))
        got = ops.gemm(a, b, out_dtype=torch.float32)
        assert_equal(got, declared.gemm(a, b, out_dtype=torch.float32))
        a.recipe = b.recipe = other
        differ += bool(got != ops.gemm(a, b, out_dtype=torch.float32)) and not got.isnan()
    assert differ > 10


# Row scales, operands of two recipes, swizzled scales.

PAIRS = [
    ("nvfp4-rowscaled", "nvfp4"), ("nvfp4", "nvfp4-rowscaled"), ("nvfp4-rowscaled", "nvfp4-rowscaled"),
    ("nvfp4-rowscaled@te-native", "nvfp4-2d@te-native"), ("nvfp4@te-native", "nvfp4-rowscaled@te-native"),
    ("nvfp4-4over6-256-mae", "nvfp4-2d"), ("nvfp4-2d", "nvfp4-4over6-256-mse"),
    ("nvfp4-4over6-256-mae", "nvfp4-2d-4over6-256-mae"), ("nvfp4-rowscaled-4over6-256-mse", "nvfp4-4over6-448-mae"),
    ("nvfp4", "nvfp4@te-2.8"), ("nvfp4-rht", "nvfp4-2d-rht"),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("left", "right"), PAIRS, ids=[" x ".join(pair) for pair in PAIRS])
@pytest.mark.parametrize("swizzled", [(False, False), (True, False), (False, True), (True, True)])
def test_two_recipes_are_multiplied_with_scales_in_either_layout(
    left: str, right: str, swizzled: tuple[bool, bool]
) -> None:
    """M and N end inside a tile; α has an amax for each row of a recipe with row scales."""
    sides = zip((70, 133), (left, right), swizzled, strict=True)
    a, b = (
        reference.quantize(matrix("outliers", rows, 112, torch.bfloat16, seed=rows), name, swizzled=layout)
        for rows, name, layout in sides
    )
    c, bias = matrix("normal", 70, 133, torch.bfloat16), matrix("normal", 1, 133, torch.float32).view(133)
    for out_dtype, added in ((torch.float32, {}), (torch.bfloat16, {"c": c, "bias": bias})):
        y = ops.gemm(a, b, out_dtype=out_dtype, **added)
        assert_equal(y, declared.gemm(a, b, out_dtype=out_dtype, **added))


# Sections.


# NaN and infinity.


@pytest.mark.parametrize("scale", [0x7F, 0xFF])
def test_a_nan_scale_makes_its_row_nan_and_no_other(scale: int) -> None:
    a, b = pair("wide", 66, 70, 96)
    clean = ops.gemm(a, b, out_dtype=torch.float32)
    a.scales[65, 2] = scale
    b.scales[3, 5] = scale
    expected = clean.clone()
    expected[65], expected[:, 3] = torch.nan, torch.nan
    assert_equal(ops.gemm(a, b, out_dtype=torch.float32), expected)
