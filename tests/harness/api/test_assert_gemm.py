"""`assert_gemm`: the verdict equals the verdict of the bounds, for every computed part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge.harness.api.judging import judge_output
from narrowgauge.harness.api.judging.judge_output import OutputArguments
from narrowgauge.harness.api.judging.judge_output import judge_output as judge
from narrowgauge.harness.api.verdict import Verdict, WrongResult
from narrowgauge.harness.checks.gemm_bound import within_bounds
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.gemm.operands import operand
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import Summation

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
RECIPES = (
    ("nvfp4", "nvfp4"), ("nvfp4-2d", "nvfp4"), ("nvfp4-rowscaled", "nvfp4-rowscaled"), ("nvfp4@modelopt",) * 2,
    ("mxfp8-e4m3", "mxfp4"), ("mxfp8-2d", "mxfp8-e5m2"), ("fp8-block-1x128", "fp8-block-128x128"),
    ("fp8-block-128x128", "fp8-block-1x128-e4m3-fp32"), ("fp8-current", "fp8-current-e5m2"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved arguments of this test, and several slabs in a small matrix."""
    monkeypatch.setenv("NARROWGAUGE_FAILURES", str(tmp_path))
    monkeypatch.setattr(judge_output, "SLAB", 48)


def operands(recipes: tuple[str, str] = ("nvfp4", "nvfp4"), device: str = "cpu") -> tuple[Quantized, Quantized]:
    """Two operands, (160, 256) and (144, 256), with sums that round."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.rand(1, 256, generator=generator) * 100 + 1
    x, w = (torch.randn(rows, 256, generator=generator) * scale for rows in (160, 144))
    a, b = (ng.quantize(t.bfloat16().to(device), recipe) for t, recipe in zip((x, w), recipes, strict=True))
    return a, b


def wrong(*args: Any, **kwargs: Any) -> Verdict:
    with pytest.raises(WrongResult) as caught:
        ng.assert_gemm(*args, **kwargs)
    assert caught.value.verdict.message.startswith("output: ")
    return caught.value.verdict


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipes", RECIPES, ids="+".join)
@pytest.mark.parametrize("order", [None, "blocks", "aligned-25-32"])
def test_bounds_of_selected_outputs_equal_bounds_of_the_product(recipes: tuple[str, str], order: str | None) -> None:
    a, b = operands(recipes)
    c, bias = torch.randn(160, 144).bfloat16(), torch.randn(144)
    declared = Summation(order)
    arguments = OutputArguments(a, b, torch.bfloat16, c, bias, declared)
    whole = bounds(a, b, out_dtype=torch.bfloat16, c=c, bias=bias, order=declared)
    rows, columns = torch.tensor([0, 3, 130, 159]), torch.tensor([1, 2, 77, 143])
    part, slab = arguments.select(rows, columns).bounds(), arguments.select(rows).bounds()
    for field in fields(whole):
        expected = getattr(whole, field.name)[rows]
        assert torch.equal(getattr(slab, field.name), expected), field.name
        assert torch.equal(getattr(part, field.name), expected[:, columns]), field.name


@pytest.mark.sampled(7)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipes", RECIPES, ids="+".join)
def test_the_verdict_is_that_of_the_bounds(recipes: tuple[str, str], device: str) -> None:
    a, b = operands(recipes, device)
    arguments = OutputArguments(a, b, torch.float32, None, None, Summation())
    limits, y = arguments.bounds(), arguments.expected()
    outputs = [y, limits.lower, limits.upper, limits.fused]
    generator = torch.Generator().manual_seed(0)
    for share in (0.001, 0.3, 1.0):
        for ends in ((limits.lower, limits.upper), (y - y.abs() * 2.0**-20, y + y.abs() * 2.0**-20)):
            moved = torch.where((torch.rand(y.shape, generator=generator) < 0.5).to(device), *ends)
            outputs.append(torch.where((torch.rand(y.shape, generator=generator) < share).to(device), moved, y))
    for output in outputs:
        correct = bool(within_bounds(output, limits).all())
        assert judge(arguments, output).stages[0].passed is correct
    beyond = y.clone()
    beyond[150, 99] = torch.nextafter(limits.upper[150, 99], limits.upper.new_tensor(torch.inf))
    element = wrong(a, b, beyond, out_dtype=torch.float32).findings[0]["elements"][0]
    assert (element["row"], element["column"]) == (150, 99)


def sequential(a: Quantized, b: Quantized) -> torch.Tensor:
    """Products of operands added in order in float32, without α: (M, N)."""
    left, right = operand(a).float(), operand(b).float()
    total = torch.zeros(a.shape[0], b.shape[0])
    for k in range(a.shape[1]):
        total += torch.outer(left[:, k], right[:, k])
    return total


def test_a_float32_kernel_is_correct_in_its_own_and_in_any_order() -> None:
    a, b = operands(("mxfp8-e4m3", "mxfp8-e4m3"))
    y = sequential(a, b)
    assert not torch.equal(y, ng.gemm(a, b, out_dtype=torch.float32))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ng.assert_gemm(a, b, y.to(dtype), out_dtype=dtype)
        ng.assert_gemm(a, b, y.to(dtype), out_dtype=dtype, order="sequential")
    ng.assert_gemm(a, b, y, out_dtype=torch.float32, accumulator="truncating", subnormals="flushed")
    assert "aligned" not in wrong(a, b, y, out_dtype=torch.float32, order="aligned-13-32").message
    bias, c = torch.randn(144), 1e6 * torch.randn(160, 144)
    ng.assert_gemm(a, b, (y + c) + bias, out_dtype=torch.float32, c=c, bias=bias.numpy())
    wrong(a, b, y + bias, out_dtype=torch.float32, c=c, bias=bias)


def test_a_tensor_core_with_few_bits_needs_its_declaration() -> None:
    a, b = operands(("fp8-current", "fp8-current"))
    simulated = bounds(a, b, out_dtype=torch.float32, order="aligned-13-32").expected
    wrong(a, b, simulated, out_dtype=torch.float32)
    ng.assert_gemm(a, b, simulated, out_dtype=torch.float32, order="aligned-13-32")
    wrong(a, b, ng.gemm(a, b, out_dtype=torch.float32), out_dtype=torch.float32, order="aligned-13-32")


def test_a_cause_is_named() -> None:
    a, b = operands()
    bias = torch.arange(144.0)
    y = ng.gemm(a, b, out_dtype=torch.bfloat16)
    verdict = wrong(a, b, y, out_dtype=torch.bfloat16, bias=bias, diagnose="full")
    assert str(verdict).startswith("explained exactly by: ")
    assert "bias" in verdict.explanations[0]["sentence"]


def test_empty_products() -> None:
    for rows, columns, depth in ((0, 16, 64), (16, 0, 64), (16, 16, 0)):
        a, b = (ng.quantize(torch.zeros(extent, depth).bfloat16(), "mxfp8-e4m3") for extent in (rows, columns))
        y = torch.zeros(rows, columns)
        ng.assert_gemm(a, b, y, out_dtype=torch.float32)
        if y.numel():
            wrong(a, b, y + 1, out_dtype=torch.float32)


ERRORS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("a", {"a": torch.ones(2, 2)}, TypeError, "a is a Quantized"),
    ("actual", {"actual": torch.ones(3, 3)}, ValueError, "actual has shape"),
    ("dtype", {"actual": torch.ones(160, 144).half()}, TypeError, "actual is float32, not float16"),
    ("out_dtype", {"out_dtype": torch.int32}, TypeError, "int32"),
    ("c", {"c": torch.ones(160, 2)}, ValueError, "c has shape"),
    ("bias", {"bias": torch.ones(2)}, ValueError, "bias has shape"),
    ("order", {"order": "random"}, ValueError, "random"),
    ("accumulator", {"accumulator": "exact"}, ValueError, "accumulator is 'nearest' or 'truncating', not 'exact'"),
    ("recipes", {"b": ng.quantize(torch.ones(144, 256), "mxfp8-e4m3")}, ValueError, "mxfp8-e4m3"),
    ("columns", {"b": ng.quantize(torch.ones(144, 128), "nvfp4")}, ValueError, "K is 256"),
    ("mapping", {"b": {"codes": torch.ones(2, 2)}}, ValueError, "recipe"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "kind", "text"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_a_mistake_in_the_arguments_names_the_argument(
    changed: dict[str, Any], kind: type[Exception], text: str
) -> None:
    a, b = operands()
    given = {"a": a, "b": b, "actual": torch.ones(160, 144), "out_dtype": torch.float32} | changed
    call: Callable[..., None] = ng.assert_gemm
    with pytest.raises(kind, match=text):
        call(**given)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("operands", ["decoded-float32", "decoded-bfloat16"])
def test_declared_operands(operands: str) -> None:
    """Undeclared, the cause has the declaration; declared, the kernel passes, and `bounds` has the interval."""
    dtype = {"decoded-float32": torch.float32, "decoded-bfloat16": torch.bfloat16}[operands]
    generator = torch.Generator().manual_seed(2)
    a, b = (ng.quantize(torch.randn(rows, 256, generator=generator), "nvfp4") for rows in (24, 16))
    y = ng.dequantize(a, dtype).float() @ ng.dequantize(b, dtype).float().T
    with pytest.raises(AssertionError, match=f'{{"operands": "{operands}"}}'):
        ng.assert_gemm(a, b, y, out_dtype=torch.float32, diagnose="full")
    ng.assert_gemm(a, b, y, out_dtype=torch.float32, operands=operands)
    lower, upper = ng.bounds(a, b, out_dtype=torch.float32, operands=operands)
    assert bool(((lower <= y) & (y <= upper)).all())
    with pytest.raises(AssertionError, match=r"outputs are 1\.01 times"):
        ng.assert_gemm(a, b, 1.01 * y, out_dtype=torch.float32, operands=operands, diagnose="full")


def test_scaled_mm_of_torch_on_a_cpu() -> None:
    """torch decodes FP8 operands to float32 first: correct with the declaration."""
    generator = torch.Generator().manual_seed(3)
    a, b = (ng.quantize(torch.randn(rows, 256, generator=generator), "fp8-current-e4m3") for rows in (64, 48))
    left, right = (q.codes.view(torch.float8_e4m3fn) for q in (a, b))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = torch._scaled_mm(left, right.T, a.scales.view(()), b.scales.view(()), out_dtype=dtype)
        ng.assert_gemm(a, b, y, out_dtype=dtype, operands="decoded-float32")
