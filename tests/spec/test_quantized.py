"""`repr` and `to` of quantized operands."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from narrowgauge.reference import ops
from narrowgauge.spec.quantized import GroupedQuantized, Half, Quantized, joined_sections
from narrowgauge.spec.recipes import find_recipe

X = torch.arange(32 * 64, dtype=torch.float32).view(32, 64)
SIZES = torch.tensor([16, 0, 16])


def halves(recipe: str) -> Quantized:
    half = ops.quantize_both(X, recipe, rowwise=False)[1]
    assert half is not None
    return half


@pytest.mark.parametrize(
    ("q", "text"),
    [
        (ops.quantize(X, "nvfp4"), "Quantized(nvfp4, 32x64, cpu)"),
        (ops.quantize(X, "nvfp4@modelopt", swizzled=True), "Quantized(nvfp4@modelopt, 32x64, cpu, scales 128x4)"),
        (halves("mxfp8-e4m3"), "Quantized(mxfp8-e4m3, 64x32, cpu, transposed)"),
        (ops.quantize_grouped(X, SIZES, "nvfp4"), "GroupedQuantized(nvfp4, 32x64 in 3 sections, cpu)"),
        (
            ops.quantize_grouped(X, torch.tensor([32]), "nvfp4", columnwise=True),
            "GroupedQuantized(nvfp4, 32x64 in 1 section, cpu, columnwise)",
        ),
    ],
)
def test_repr_names_recipe_shape_device_and_storage(q: Quantized | GroupedQuantized, text: str) -> None:
    assert repr(q) == str(q) == text


@pytest.mark.parametrize(
    "q",
    [ops.quantize(X, "nvfp4"), ops.quantize(X, "mxfp8-e4m3", swizzled=True), ops.quantize_grouped(X, SIZES, "nvfp4")],
)
def test_to_moves_every_tensor_and_keeps_the_rest(q: Any) -> None:
    there, back = q.to("meta"), q.to("cpu")
    for field in fields(q):
        value, moved, same = (getattr(each, field.name) for each in (q, there, back))
        if isinstance(value, torch.Tensor):
            assert moved.device.type == "meta"
            assert (moved.shape, moved.dtype) == (value.shape, value.dtype)
            assert same is value
        else:
            assert moved == value == same
    assert isinstance(there, type(q))


@pytest.mark.parametrize("recipe", ["nvfp4-rht", "mxfp8-e4m3", "fp8-block-1x128-e4m3-fp32"])
def test_a_half_has_its_matrix_recipe_and_storage(recipe: str) -> None:
    rule, x = find_recipe(recipe), X.bfloat16()
    for half, q, stored in zip(Half, ops.quantize_both(x, recipe), ((32, 64), (64, 32)), strict=True):
        assert q is not None
        assert half.value in ("rowwise", "columnwise")
        assert half.shape(x.shape) == tuple(half.matrix(x).shape) == q.shape == stored
        assert half.recipe(rule) == q.recipe
        assert half.transposed(rule) == q.transposed
        assert half.pick(("x", "xT")) == half.operand("x").replace(" columnwise", "T")
        assert Half.of(columnwise=half is Half.COLUMN) is half
        sections = ops.quantize_grouped(x, SIZES, half.recipe(rule), columnwise=half is Half.COLUMN)
        joined = joined_sections(sections.sections(), half)
        assert all(torch.equal(tensor, getattr(sections, name)) for name, tensor in joined.items())
