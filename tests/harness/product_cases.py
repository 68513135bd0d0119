"""Cases of products, a backend with the reference's methods except for given methods, and kernels with an order."""

import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.gemm.operands import operand
from narrowgauge.reference.gemm.quantized import gemm_quantized
from tests.harness.sample_backends import backend

REFERENCE = {name: getattr(reference, name) for name in (
    "quantize", "quantize_both", "quantize_grouped", "gemm", "gemm_grouped", "pad_sections", "unpad_sections",
)} | {"gemm_quantized": gemm_quantized}  # fmt: skip
PAIRS = [
    "mxfp8-e4m3", "mxfp8-e4m3+mxfp8-e5m2", "mxfp8-e5m2+mxfp8-2d", "mxfp8-e4m3-sr+mxfp8-e4m3", "mxfp6-e2m3+mxfp6-e3m2",
    "mxfp4+mxfp8-e4m3", "mxfp6-e3m2+mxfp4-2d", "fp8-block-1x128-e4m3-pow2",
    "fp8-block-1x128-e4m3-fp32+fp8-block-128x128-e5m2-fp32", "fp8-block-128x128-e4m3-pow2+fp8-block-1x128-e5m2-pow2",
    "fp8-current-e4m3", "fp8-current-e5m2+fp8-current-e4m3", "fp8-delayed-e4m3+fp8-delayed-e5m2",
]  # fmt: skip


def case_of(operation, recipe, *flags, shape=(48, 160, 32), inputs="normal", dtype="bf16xbf16-fp32"):
    return case_from_labels(operation, recipe, shape, dtype, inputs, flags)


def gemm_case(recipe, *flags, **options):
    return case_of("gemm", recipe, *flags, **options)


def quantized_case(recipe, out_recipe, *flags, **options):
    return case_of("gemm-quantized", recipe, "tn", out_recipe, *flags, **options)


def padded_case(recipe, *flags, shape=(99, 128, 32), sections="ragged:3", **options):
    return case_of("gemm-grouped", recipe, sections, "padded", *flags, shape=shape, **options)


def run(case, declares=None, **doors):
    return run_case(case, backend(**({**REFERENCE, **doors}), declares=declares or {}))


def stages(record):
    return {entry["stage"]: entry for entry in record.stages}


def wrong(record):
    return [entry["stage"] for entry in record.stages if entry["sentence"]]


def passes(case, declares=None, **doors):
    record = run(case, declares, **doors)
    assert (record.verdict, record.message) == ("pass", ""), case.id
    return record


def fails(case, stage, declares=None, **doors):
    """The record of a case in which exactly this stage is wrong."""
    record = run(case, declares, **doors)
    assert record.verdict == "fail", (case.id, record.message)
    assert wrong(record) == [stage], (case.id, record.message)
    return record


def in_order(products):
    """(M, N, K) added along K in float32, in turn."""
    total = torch.zeros(products.shape[:2])
    for column in products.unbind(-1):
        total = total + column
    return total


def blocks_of(a, b, width=32):
    left, right = operand(a), operand(b)
    products = (left.unsqueeze(1) * right.unsqueeze(0)).float()
    assert torch.equal(products.double(), left.unsqueeze(1) * right.unsqueeze(0))
    return products.split(width, dim=2)


def in_blocks(a, b, *, out_dtype):
    """MX in the order "blocks": products of a block in order of K, then blocks in order of K, in float32."""
    total = torch.zeros(a.shape[0], b.shape[0])
    for block in blocks_of(a, b):
        total = total + in_order(block)
    return total.to(out_dtype)


def last_block_first(a, b, *, out_dtype):
    """As `in_blocks`, from the last block to the first."""
    total = torch.zeros(a.shape[0], b.shape[0])
    for block in blocks_of(a, b)[::-1]:
        total = total + in_order(block)
    return total.to(out_dtype)


BLOCKS = {"gemm": "blocks"}
