"""Wrong fused kernels, each by one change of the source: the shipped contracts refuse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge.contracts import CONTRACTS
from narrowgauge.native import ops
from narrowgauge.native.runtime.sources import FOLDER, replaced

pytestmark = pytest.mark.long

NORM, ACTIVATION, ROPE, ROW = (f"fused/{name}" for name in ("norm_quantize.cu", "activation_quantize.cu",
                                                            "rope_quantize.cu", "quantize_row.cuh"))  # fmt: skip
FUNCTIONS, PRODUCERS, ROWS = "fused/functions.cuh", "fused/producers.cuh", "fused/produced_rows.cu"
WRONG = {
    # name: (operation, recipe, file, text, its replacement)
    "eps-left-out": (
        "rmsnorm-quantize", "fp8-row-e4m3", NORM, "total, p.per_column, p.eps", "total, p.per_column, 0.0f",
    ),
    "eps-inside-the-sum": (
        "rmsnorm-quantize", "fp8-row-e4m3", NORM, "__fmaf_rn(total, p.per_column, p.eps)",
        "(total + p.eps) * p.per_column",
    ),
    "sum-in-place-of-mean": (
        "rmsnorm-quantize", "fp8-row-e4m3", NORM, "__fmaf_rn(total, p.per_column, p.eps)", "(total + p.eps)",
    ),
    "first-chunk-not-summed": (
        "rmsnorm-quantize", "mxfp8-e4m3", NORM,
        "= sum_over_row(sum_of_chunks(part, z, !norm.layer_norm), words",
        "= sum_over_row(threadIdx.x == 0 ? 0.0f : sum_of_chunks(part, z, !norm.layer_norm), words",
    ),
    "weight-of-next-column": (
        "rmsnorm-quantize", "mxfp8-e4m3", NORM, ": normalized * weight[j];", ": normalized * weight[j ^ 1];",
    ),
    "one-plus-weight": (
        "rmsnorm-quantize", "mxfp8-e4m3", NORM, "norm.zero_centered ? 1.0f : 0.0f", "norm.zero_centered ? 0.0f : 1.0f",
    ),
    "weight-left-out": ("rmsnorm-quantize", "mxfp8-e4m3", NORM, ": normalized * weight[j];", ": normalized;"),
    "norm-rounded-before-the-weight": (
        "rmsnorm-quantize", "fp8-row-e4m3", NORM, "normalized = z[i][j] * by;",
        "normalized = rounded<T>(z[i][j] * by);",
    ),
    "residual-not-added-to-the-norm": (
        "add-rmsnorm-quantize", "mxfp8-e4m3", NORM, "unpack_floats(total, z[i]);", "",
    ),
    "residual-subtracted": ("add-rmsnorm-quantize", "mxfp8-e4m3", NORM, "z[i][j] += r[j];", "z[i][j] -= r[j];"),
    "mean-not-subtracted": ("layernorm-quantize", "mxfp8-e4m3", NORM, "count > 0 ? mean : 0.0f", "0.0f"),
    "bias-left-out": (
        "layernorm-quantize", "mxfp8-e4m3", NORM, "__fmaf_rn(normalized, weight[j], bias[j])", "normalized * weight[j]",
    ),
    "bias-times-weight": (
        "layernorm-quantize", "mxfp8-e4m3", NORM, "__fmaf_rn(normalized, weight[j], bias[j])",
        "(normalized + bias[j]) * weight[j]",
    ),
    "halves-exchanged": (
        "silu-mul-quantize", "mxfp8-e4m3", ACTIVATION, "activated<T>(gate[j], up[j], activation, p)",
        "activated<T>(up[j], gate[j], activation, p)",
    ),
    "sigmoid-in-place-of-silu": (
        "silu-mul-quantize", "mxfp8-e4m3", ACTIVATION, "return x * sigmoid_approx(x, false) * up;",
        "return sigmoid_approx(x, false) * up;",
    ),
    "minus-left-out": ("silu-mul-quantize", "mxfp8-e4m3", FUNCTIONS, "exp_approx(-x)", "exp_approx(x)"),
    "cubic-constant": ("gelu-mul-quantize", "fp8-row-e4m3", ACTIVATION, "0.044715f", "0.04f"),
    "gelu-argument-not-doubled": ("gelu-mul-quantize", "mxfp8-e4m3", ACTIVATION, "1.5957691216f", "0.7978845608f"),
    "sine-with-the-other-sign": ("rope-quantize", "mxfp8-e4m3", ROPE, "-other[j] : other[j]", "other[j] : -other[j]"),
    "partner-of-the-same-half": (
        "rope-quantize", "mxfp8-e4m3", ROPE, "first ? chunk.column + half : in_half", "chunk.column",
    ),
    "scale-of-each-lane": (
        "silu-mul-quantize", "mxfp8-e4m3", ROW, "amaxes[i], variant.lanes)", "amaxes[i], 1)",
    ),
    "amax-of-a-thread": (
        "silu-mul-quantize", "fp8-row-e4m3", ROW,
        "over_row(amax, words[2], 0.0f, larger_bits)", "amax",
    ),
    "scale-not-inverted": (
        "silu-mul-quantize", "fp8-row-e4m3", ROW, "static_cast<float*>(p.scales)[part.row] = 1.0f / factor;",
        "static_cast<float*>(p.scales)[part.row] = factor;",
    ),
    "scales-in-order-of-columns": (
        "silu-mul-quantize", "mxfp8-e4m3", ROW, ": row * groups + group] = scale;", ": group * p.rows + row] = scale;",
    ),
    "silu-rounded-once": (
        "silu-mul-quantize-static", "fp8-static-e4m3@vllm-silu-static", ACTIVATION, "return rounded<T>(x *",
        "return (x *",
    ),
    "decode-scale-as-encode-scale": (
        "rmsnorm-quantize-static", "fp8-static-e4m3@vllm-static", ROW, "? 1.0f / *p.given : *p.given",
        "? *p.given : *p.given",
    ),
    "second-half-turned": (
        "rope-partial-quantize", "mxfp8-e4m3", ROPE, "< p.rotated ? turned : own[j]",
        "< 2 * p.rotated ? turned : own[j]",
    ),
    "norm-without-weight-in-tiles": (
        "rmsnorm-quantize-both", "mxfp8-e4m3", PRODUCERS, "y[j] = x * rs * weight;", "y[j] = x * rs;",
    ),
    "mean-square-without-eps": (
        "rmsnorm-quantize-both", "mxfp8-e4m3", ROWS, "rsqrt_approx(mean + p.eps)", "rsqrt_approx(mean)",
    ),
    "projection-left-out": (
        "rmsnorm-backward-quantize-both", "mxfp8-e4m3", PRODUCERS, "- projection * (x * rs)", "- 0.0f * projection",
    ),
    "projection-of-dy": (
        "rmsnorm-backward", "", ROWS, "operands.dy[j] * operands.weight[j], n, total", "operands.dy[j], n, total",
    ),
    "sum-in-place-of-projection": (
        "rmsnorm-backward", "", ROWS, "const float mean = total * p.per_column", "const float mean = total",
    ),
    "dweight-of-x": (
        "rmsnorm-backward", "", ROWS, "__fmaf_rn(operands.dy[j], n, sums",
        "__fmaf_rn(operands.dy[j], operands.x[j], sums",
    ),
    "last-partial-sum-left-out": (
        "silu-mul-backward-quantize-both", "mxfp8-e4m3", ROWS, "part < p.parts; ++part", "part < p.parts - 1; ++part",
    ),
    "slope-without-the-second-term": (
        "silu-mul-backward", "", PRODUCERS, "s * (gate * (1.0f - s) + 1.0f)", "s",
    ),
    "gradient-of-up-without-gate": (
        "silu-mul-backward-quantize-both", "mxfp8-e4m3", PRODUCERS, "dy * gate * s};", "dy * s};",
    ),
    "gradients-exchanged": (
        "silu-mul-backward-quantize-both", "mxfp8-e4m3", PRODUCERS, "? gradients.gate : gradients.up",
        "? gradients.up : gradients.gate",
    ),
    "gradients-rounded-before-dbias": (
        "silu-mul-backward-quantize-both", "mxfp8-e4m3", ROWS, "sums[i][j] += gate[j];",
        "sums[i][j] += rounded<T>(gate[j]);",
    ),
}  # fmt: skip


COLUMNS = {"weight": 256, "bias": 256, "residual": 256, "cos": 128, "sin": 128, "dy": 256, "rs": 1, "scale": 1}


def inputs(operation: str) -> tuple[Any, ...]:
    """x (17, 256), with rows around eps, and further tensors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(17, 256, generator=generator) * torch.exp2(torch.arange(-12.0, 5.0)).unsqueeze(1)
    tensors = {"x": x.bfloat16()}
    for name in CONTRACTS[operation].tensors:
        columns = COLUMNS.get(name, 0) // (2 if name in ("cos", "sin") and "partial" in operation else 1)
        columns = columns // 2 if name == "dy" and operation.startswith("silu") else columns
        rows = () if name in ("weight", "bias", "scale") else (17,)
        made = torch.randn((*rows, columns), generator=generator)
        if name in ("rs", "scale"):
            tensors[name] = torch.rsqrt(x.square().mean(1, keepdim=True)) if name == "rs" else made.abs() + 0.3
        tensors.setdefault(name, made.bfloat16())
    return tuple(tensors[name] for name in CONTRACTS[operation].tensors)


def passes(operation: str, recipe: str) -> bool:
    tensors = inputs(operation)
    named = {"recipe": recipe} if recipe else {}
    result = getattr(ops, operation.replace("-", "_"))(*tensors, **named)
    return bool(narrowgauge.explain(narrowgauge.assert_result, CONTRACTS[operation], result, *tensors, **named).passed)


@pytest.mark.parametrize(("operation", "recipe"), sorted({row[:2] for row in WRONG.values()}))
def test_a_contract_accepts_the_kernel(operation: str, recipe: str) -> None:
    assert passes(operation, recipe)


@pytest.mark.parametrize("name", WRONG)
def test_a_contract_refuses_a_wrong_kernel(name: str, tmp_path: Path) -> None:
    operation, recipe, file, text, replacement = WRONG[name]
    source = (FOLDER / file).read_text(encoding="utf-8")
    assert source.count(text) == 1, text
    with replaced(file, source.replace(text, replacement), tmp_path):
        assert not passes(operation, recipe)
