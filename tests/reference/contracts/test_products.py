"""The steps behind a quantization: its values, and products of two quantized matrices."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.spec.program import ContractError

RECIPES = ("nvfp4", "mxfp8-e4m3", "fp8-row-e4m3", "fp8-current-e4m3")


@c.contract
def gemm_silu(x: c.Matrix, w: Annotated[c.Matrix, ("N", "K")], recipe: c.Recipe):
    """SiLU of a product."""
    return c.cast(c.silu(c.gemm(c.quantize(x, recipe), c.quantize(w, recipe))), x.dtype)


@c.contract
def values(x: c.Matrix, recipe: c.Recipe):
    """The values of a quantization."""
    return c.dequantize(c.quantize(x, recipe), x.dtype)


@c.contract
def silu_gemm(x: c.Matrix, w: Annotated[c.Matrix, ("N", "K")], recipe: c.Recipe):
    """SiLU and quantize, whose codes the kernel shows, and their product."""
    q = c.quantize(c.cast(c.silu(c.float32(x)), x.dtype), recipe)
    return {"quantized": q, "y": c.cast(c.gemm(q, c.quantize(w, recipe)), x.dtype)}


def operands(recipe: str, family: str) -> list[torch.Tensor]:
    return [narrowgauge.inputs(recipe, shape, family, seed) for seed, shape in enumerate(((24, 128), (40, 128)))]


def verdict(contract: c.Contract, result: Any, *inputs: torch.Tensor, recipe: str) -> Any:
    return narrowgauge.explain(narrowgauge.assert_result, contract, result, *inputs, recipe=recipe)


@pytest.mark.parametrize("family", ["normal", pytest.param("position", marks=pytest.mark.long), "zeros"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_sums_of_any_order_lie_inside(recipe: str, family: str) -> None:
    x, w = operands(recipe, family)
    a, b = (narrowgauge.quantize(t, recipe) for t in (x, w))
    right = narrowgauge.gemm(a, b, out_dtype=torch.float32)
    for y in (right, right.double()):
        result = (y / (1 + torch.exp(-y))).float().bfloat16()
        assert verdict(gemm_silu, result, x, w, recipe=recipe).passed
    wrong = (right * torch.sigmoid(1.702 * right)).bfloat16()
    assert not verdict(gemm_silu, wrong, x, w, recipe=recipe).passed or family != "normal"


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_are_those_of_dequantize(recipe: str) -> None:
    x, _ = operands(recipe, "normal")
    right = narrowgauge.dequantize(narrowgauge.quantize(x, recipe), torch.bfloat16)
    assert verdict(values, right, x, recipe=recipe).passed
    right[3, 5] += 1
    assert not verdict(values, right, x, recipe=recipe).passed


def test_a_product_goes_on_from_the_codes_of_the_kernel() -> None:
    """Wrong codes are one finding: the product of these codes is right."""
    x, w = operands("nvfp4", "normal")
    y = torch.nn.functional.silu(x.float()).bfloat16()
    q, b = narrowgauge.quantize(y * 1.5, "nvfp4"), narrowgauge.quantize(w, "nvfp4")
    out = narrowgauge.gemm(q, b, out_dtype=torch.bfloat16)
    found = verdict(silu_gemm, (q.codes, q.scales, q.amax, out), x, w, recipe="nvfp4")
    assert "y" not in [stage["stage"] for stage in found.stages if stage["sentence"]]
    assert not found.passed


def test_a_hidden_quantization_of_inexact_numbers_is_an_error() -> None:
    @c.contract
    def hidden(x: c.Matrix, recipe: c.Recipe):
        return c.dequantize(c.quantize(c.silu(c.float32(x)), recipe), x.dtype)

    x, _ = operands("nvfp4", "normal")
    with pytest.raises(ValueError, match=r"the quantization of line \d+ is hidden"):
        narrowgauge.assert_result(hidden, x, x, recipe="nvfp4")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda x, w: c.gemm(c.silu(c.float32(x)), w), "c.gemm takes quantizations, arguments, c.decode"),
        (lambda x, w: c.gemm(c.quantize(x, "nvfp4"), w), "one operand of c.gemm is quantized and one is not"),
        (lambda x, w: c.decode(x), "c.decode takes a result of c.quantize or an argument of the type Codes"),
        (lambda x, w: c.dequantize(c.quantize(x, "nvfp4"), "int8"), "c.dequantize gives one of"),
        (lambda x, w: c.gemm(c.quantize(x, "nvfp4"), c.quantize(w, "nvfp4"), "sideways"), "sideways"),
    ],
)
def test_wrong_operands_are_errors_with_a_line(body: Any, words: str) -> None:
    @c.contract
    def wrong(x: c.Matrix, w: Annotated[c.Matrix, ("N", "K")]):
        return body(x, w)

    with pytest.raises(ContractError, match=words):
        wrong.trace({"x": "bfloat16", "w": "bfloat16"}, {}, {})
