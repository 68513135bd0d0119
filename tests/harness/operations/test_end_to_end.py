"""A product end to end: the effect of a wrong operand on the output is measured, and fails in its own stage alone."""

import math
from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.gemm.quantized import gemm_quantized
from tests.harness.sample_backends import GEMM, backend, gemm

DOORS = {name: getattr(reference, name) for name in (
    "quantize", "quantize_both", "quantize_grouped", "gemm", "gemm_grouped", "pad_sections", "unpad_sections",
)} | {"gemm_quantized": gemm_quantized}  # fmt: skip

GROUPED = case_from_labels("gemm-grouped", "mxfp8-e4m3", (48, 64, 24), "bf16xbf16-fp32", "normal", ("ragged:3",))
CASES = {
    "gemm": GEMM,
    "gemm with addends": replace(GEMM, accumulate=True, bias=True),
    "columnwise": replace(GEMM, recipe="mxfp8-e4m3", layout="nt"),
    "quantized": case_from_labels(
        "gemm-quantized", "mxfp8-e4m3", (16, 64, 32), "bf16xbf16-fp32", "normal", ("tn", "mxfp8-e4m3"),
    ),
    "grouped": GROUPED,
    "padded": replace(GROUPED, sections="ragged:3", padded=True, bias=True),
}  # fmt: skip
every_product = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def run(case, **doors):
    return run_case(case, backend(**{**DOORS, **doors}))


def wrong(record):
    return [entry["stage"] for entry in record.stages if entry["sentence"]]


def spoilt_codes(name):
    """The method of this name. Its codes of matrices with as many rows as x are wrong in row 3."""
    door = DOORS[name]

    def spoil(x, *arguments, **options):
        found = door(x, *arguments, **options)
        if name == "quantize_both":
            found[1].codes[:, 3] ^= 0x07
        elif len(found.codes) > 8:  # of x, and of the w of no section
            found.codes[3] ^= 0x07
        return found

    return spoil


@every_product
def test_right_operands_and_a_right_product_are_right_end_to_end(case):
    record = run(case)
    assert (record.verdict, record.outside_share) == ("pass", 0)
    assert (record.allclose, record.sqnr_db, record.sweep) == (True, math.inf, [1.0] * 6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "door", "stages"),
    [
        (CASES["gemm"], "quantize", ["x.codes", "w.codes"]),
        (CASES["columnwise"], "quantize_both", ["x.codes", "w.codes"]),
        (CASES["quantized"], "quantize", ["x.codes", "w.codes"]),
        (CASES["grouped"], "quantize_grouped", ["x.codes"]),
        (CASES["padded"], "quantize_grouped", ["x.codes"]),
    ],
    ids=["gemm", "columnwise", "quantized", "grouped", "padded"],
)
def test_wrong_codes_fail_in_their_stage_and_show_at_the_end(case, door, stages):
    doors = {door: spoilt_codes(door)}
    if case.operation == "gemm-quantized":  # quantizes its output by a second method, which would be wrong too
        doors["quantize"] = lambda x, *a, **o: (
            spoilt_codes(door) if x.dtype == torch.bfloat16 else reference.quantize
        )(x, *a, **o)
    record = run(case, **doors)
    assert record.verdict == "fail"
    assert wrong(record) == stages
    assert 0 < record.outside_share < 1
    assert record.allclose is False
    assert record.sqnr_db < 60
    assert record.sweep[-1] < 1


@pytest.mark.sampled(2)
@every_product
def test_a_wrong_product_of_right_codes_shows_in_both_stages(case):
    def spoil(output):
        output[3, 5] = 2 * output[3, 5] + 1

    def grouped(a, b, **options):
        output = reference.gemm_grouped(a, b, **options)
        spoil(output)
        return output

    def fused(a, b, recipe, *, out_dtype, **options):
        return reference.quantize(gemm(spoil)(a, b, out_dtype=out_dtype, **options), recipe)

    record = run(case, gemm=gemm(spoil), gemm_grouped=grouped, gemm_quantized=fused)
    assert wrong(record) == ["output"]
    outputs = next(entry for entry in record.stages if entry["stage"] == "output")
    assert outputs["mismatches"] == 1
    assert record.outside_share == 1 / outputs["compared"]
    assert record.allclose is False


def test_padding_that_raises_an_amax_shows_at_the_end():
    """The end is judged with the reference's own padding."""

    def pad(x, sizes, recipe):
        padded, aligned = reference.pad_sections(x, sizes, recipe)
        padded[11:32] = 100 * padded.abs().amax()
        return padded, aligned

    case = replace(GROUPED, recipe="fp8-current-e4m3", shape=(99, 64, 24), sections="ragged:3", padded=True)
    record = run(case, pad_sections=pad)
    assert wrong(record) == ["padding", "rows"]
    assert record.outside_share > 0
