"""Fused kernels that quantize sums before their rounding are named, and no further wrong fusion is."""

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from tests.harness.sample_backends import backend


def causes(recipe, out_recipe, inputs, make):
    """Exact causes of a fused kernel with `make(output in float32, output)`, and right gemm and quantize."""

    def fused(a, b, out_recipe, *, out_dtype, scale=None, **addends):
        wide = reference.gemm(a, b, out_dtype=torch.float32, **addends)
        return make(wide, reference.gemm(a, b, out_dtype=out_dtype, **addends), out_recipe)

    doors = {name: getattr(reference, name) for name in ("quantize", "gemm")}
    case = case_from_labels("gemm-quantized", recipe, (32, 128, 64), "bf16xbf16-bf16", inputs, ("tn", out_recipe))
    record = run_case(case, backend(**doors, gemm_quantized=fused, declares={"gemm": "tree"}))
    assert record.verdict == "fail", record.message
    assert record.stage.startswith("fused."), record.message
    return [e["cause"] for e in record.explanations if e["exact"]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("out_recipe", ["mxfp8-e4m3", "nvfp4", "fp8-block-1x128-e4m3-fp32"])
def test_sums_that_are_not_rounded(out_recipe):
    found = causes("mxfp8-e4m3", out_recipe, "normal", lambda wide, _, recipe: reference.quantize(wide, recipe))
    assert "fused-output-not-cast" in found


def test_another_wrong_fusion():
    def truncated(wide, right, recipe):
        cut = (wide.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()
        return reference.quantize(cut, recipe)

    assert "fused-output-not-cast" not in causes("mxfp8-e4m3", "mxfp8-e4m3", "normal", truncated)
    assert "fused-output-not-cast" not in causes(
        "mxfp8-e4m3", "mxfp8-e4m3", "normal", lambda wide, right, recipe: reference.quantize(-right, recipe)
    )


def test_scales_of_an_output_without_its_bias():
    def fused(a, b, out_recipe, *, out_dtype, bias, scale=None):
        without, right = (reference.gemm(a, b, out_dtype=out_dtype, bias=each) for each in (None, bias))
        scales = reference.quantize(without, out_recipe).scales
        scaled = right.float() * torch.exp2(127.0 - scales.float()).repeat_interleave(32, 1)
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scales

    doors = {name: getattr(reference, name) for name in ("quantize", "gemm")}
    flags = ("tn", "mxfp8-e4m3", "bias")
    case = case_from_labels("gemm-quantized", "nvfp4", (32, 64, 64), "bf16xbf16-bf16", "normal", flags)
    record = run_case(case, backend(**doors, gemm_quantized=fused))
    assert record.stage == "fused.scales"
    assert "fused-scales-of:bias-ignored" in [e["cause"] for e in record.explanations if e["exact"]]
