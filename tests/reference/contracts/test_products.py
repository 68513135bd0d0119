"""The steps behind a quantization: its values, and products of two quantized matrices."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.reference.contracts.evaluate import judged, parts_of
from narrowgauge.reference.gemm.tensor_core import Factors, power_of_two, tensor_core_sum
from narrowgauge.spec.program import ContractError
from narrowgauge.spec.summation import Alignment

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


@pytest.mark.parametrize("order", ["sequential", "tree", "split-3", "aligned-25-16", "fraction-25-16"])
def test_known_numbers_in_a_declared_order(order: str) -> None:
    """The sums of a declared order lie inside, and are narrower than the sums of any order."""

    @c.contract
    def product(a: c.Matrix, b: Annotated[c.Codes, ("N", "K")] = "nvfp4", *, declared: bool = True):
        return c.gemm(a, c.decode(b, a.dtype), order if declared else None)

    a, w = operands("nvfp4", "normal")
    b = narrowgauge.quantize(w, "nvfp4")
    decoded = narrowgauge.dequantize(narrowgauge.Quantized(b.codes, b.scales, b.amax * 0 + 2688, b.recipe, b.shape))
    terms = (a.float().unsqueeze(1) * decoded).unbind(2)
    slices = [terms[:43], terms[43:86], terms[86:]] if order == "split-3" else [terms]
    found = []
    for some in slices:
        level = list(some)
        while len(level) > 1:
            step = 2 if order == "tree" else len(level)
            level = [sum(level[start + 1 : start + step], level[start]) for start in range(0, len(level), step)]
        found.append(level[0])
    right = sum(found[1:], found[0])
    if "-25-16" in order:
        left, right_ = (Factors(x.double(), power_of_two(x.double())) for x in (a, decoded))
        right = tensor_core_sum(left, right_, Alignment(25, 16, None), a.double() @ decoded.double().T).float()
    widths = []
    for declared in (True, False):
        program = product.trace({"a": "bfloat16", "b": "codes"}, {}, {"declared": declared})
        tensors = {"a": a, **parts_of(program, {"b": b})}
        part = dict(judged(program, tensors, {"output": right}))["output"]
        assert not part.wrong.any()
        widths.append(float((part.upper.double() - part.lower.double()).mean()))
    assert widths[0] < widths[1] / 2
