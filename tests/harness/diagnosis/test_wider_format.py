"""Kernels that quantize and then multiply wider numbers are named, and no further mistake has this name."""

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from tests.harness.sample_backends import backend

CAUSE = "computed-in-wider-format"


class Cheat:
    """Right codes, and products of `widen(x)` and `widen(w)`, kept from the call of quantize."""

    def __init__(self, widen=lambda x: x, scale=lambda out: out):
        self.widen, self.scale = widen, scale
        self.inputs = {}

    def keep(self, q, x):
        # The kernel is given copies of the codes: it finds its inputs by the values.
        self.inputs[bytes(q.codes.flatten().tolist())] = x.clone()
        return q

    def quantize(self, x, recipe, **options):
        return self.keep(reference.quantize(x, recipe, **options), x)

    def quantize_both(self, x, recipe, **options):
        halves = reference.quantize_both(x, recipe, **options)
        return tuple(q and self.keep(q, x.T if number else x) for number, q in enumerate(halves))

    def quantize_grouped(self, x, sizes, recipe, **options):
        grouped = reference.quantize_grouped(x, sizes, recipe, **options)
        for q, rows in zip(grouped.sections(), torch.split(x, sizes.tolist()), strict=True):
            self.keep(q, rows)
        return grouped

    def gemm(self, a, b, *, out_dtype, c=None, bias=None):
        x, w = (self.widen(self.inputs[bytes(q.codes.flatten().tolist())]).float() for q in (a, b))
        out = self.scale(x @ w.T)
        for addend in (c, bias):
            out = out if addend is None else out + addend.float()
        return out.to(out_dtype)

    def gemm_grouped(self, a, b, *, out_dtype, c=None, bias=None):
        rows = a.sizes.tolist()
        parts = zip(
            a.sections(), b, [None] * len(b) if c is None else torch.split(c, rows),
            [None] * len(b) if bias is None else bias, strict=True,
        )  # fmt: skip
        return torch.cat([self.gemm(q, w, out_dtype=out_dtype, c=add, bias=row) for q, w, add, row in parts])

    def gemm_quantized(self, a, b, recipe, **options):
        scale = options.pop("scale", None)
        return reference.quantize(self.gemm(a, b, **options), recipe, scale=scale)


DOORS = {
    "gemm": ("quantize", "quantize_both", "gemm"),
    "gemm-grouped": ("quantize", "quantize_grouped", "gemm_grouped"),
    "gemm-quantized": ("quantize", "quantize_both", "gemm", "gemm_quantized"),
}


def record_of(cheat, operation, recipe, *flags, shape=(33, 160, 24), inputs="normal", dtype="bf16xbf16-bf16"):
    case = case_from_labels(operation, recipe, shape, dtype, inputs, flags)
    doors = {name: getattr(cheat, name) for name in DOORS[operation]}
    return run_case(case, backend(**doors))


def causes(record):
    assert record.verdict == "fail", record.message
    return [explanation["cause"] for explanation in record.explanations if explanation["exact"]]


@pytest.mark.parametrize(
    ("operation", "recipe", "flags", "options"),
    [
        ("gemm", "nvfp4", ("tn",), {}),
        ("gemm", "nvfp4", ("tn", "accumulate", "bias"), {"dtype": "bf16xbf16-fp32"}),
        ("gemm", "nvfp4-rht", ("nt",), {"shape": (32, 160, 48)}),
        ("gemm", "mxfp8-e4m3", ("nn",), {"inputs": "outliers"}),
        ("gemm", "fp8-block-1x128-e4m3-pow2+fp8-block-128x128-e5m2-pow2", ("tn", "accumulate"), {}),
        ("gemm", "fp8-delayed-e4m3", ("tn",), {"dtype": "fp32xfp32-fp32"}),
        ("gemm-grouped", "mxfp6-e2m3", ("ragged:3", "bias"), {"shape": (99, 96, 40)}),
        ("gemm-quantized", "nvfp4", ("tn", "nvfp4"), {"shape": (32, 96, 48)}),
    ],
)
def test_products_of_the_inputs_are_named(operation, recipe, flags, options):
    record = record_of(Cheat(), operation, recipe, *flags, **options)
    assert causes(record) == [CAUSE]
    (explanation,) = (e for e in record.explanations if e["cause"] == CAUSE)
    assert explanation["stage"] == "output"
    assert "the inputs as they were before quantization" in explanation["sentence"]


@pytest.mark.parametrize(
    ("widen", "named"),
    [
        (lambda x: x.bfloat16(), "the inputs in bf16"),
        (lambda x: x.half(), "the inputs in fp16"),
        (lambda x: reference.dequantize(reference.quantize(x, "mxfp8-e4m3")), "MXFP8 E4M3"),
        (lambda x: reference.dequantize(reference.quantize(x, "fp8-current-e4m3")), "FP8 E4M3 with one scale"),
    ],
)
def test_the_wider_format_is_named(widen, named):
    record = record_of(Cheat(widen), "gemm", "nvfp4", "tn", dtype="fp32xfp32-fp32")
    assert causes(record) == [CAUSE]
    assert any(named in explanation["sentence"] for explanation in record.explanations)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("widen", "scale", "inputs", "recipe"),
    [
        (lambda x: x, lambda out: out * (1 + 2.0**-22), "lattice", "nvfp4"),  # the codes hold the inputs exactly
        (lambda x: x, lambda out: out * 1.001, "normal", "nvfp4"),
        (lambda x: x, lambda out: torch.where(out == out.max(), out * 2, out), "normal", "nvfp4"),
        (lambda x: reference.dequantize(reference.quantize(x, "mxfp6-e2m3")), lambda out: out, "normal", "mxfp4"),
        (torch.zeros_like, lambda out: out, "normal", "nvfp4"),
        (lambda x: x, lambda out: out, "nan", "nvfp4"),
    ],
    ids=["exact codes", "a factor", "one wrong output", "another narrow format", "zeros", "nan"],
)
def test_other_mistakes_are_not_named_so(widen, scale, inputs, recipe):
    record = record_of(Cheat(widen, scale), "gemm", recipe, "tn", inputs=inputs, dtype="bf16xbf16-fp32")
    assert CAUSE not in causes(record)
