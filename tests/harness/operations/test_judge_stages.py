"""Single bytes and numbers, wrong in one stage of a case: the sentences of the stages about zeros, NaN, infinities,
single steps.

Right results are known here by construction, from bits, and not from the harness.
"""

import struct
from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks.distance import steps_words
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from tests.harness.sample_backends import QUANTIZE, backend, quantize

MX = replace(QUANTIZE, recipe="mxfp8-e4m3@ocp", shape=(32, 64), inputs="nan")  # of a block with a NaN, 255
BLOCKS = replace(QUANTIZE, recipe="fp8-block-1x128-e4m3-fp32", shape=(16, 256))
SWIZZLED = replace(QUANTIZE, shape=(130, 80), inputs="position", scales="swizzled")


def run(case, **doors):
    return run_case(case, backend(**doors))


def wrong(record):
    return {entry["stage"]: entry["sentence"] for entry in record.stages if entry["sentence"]}


def changing(change):
    """A quantize with the reference's result after `change`."""

    def change_alone(q):
        change(q)

    return quantize(change_alone)


def spoilt(part, place, number):
    """A quantize whose `part` is `number` at a place: a byte, or the bits of a float32."""

    def change(q):
        tensor = getattr(q, part)
        if tensor.dtype == torch.float32:
            tensor.view(torch.int32)[place] = struct.unpack("<i", struct.pack("<I", number))[0]
        else:
            tensor[place] = number

    return quantize(change)


# Scales of E8M0.


def place_of(case, byte, *, equal=True):
    """A scale of the reference, replaced by a byte or by a second byte."""
    scales = reference.quantize(make_inputs(case).x, case.recipe).scales
    return tuple(((scales == byte) == equal).nonzero()[0].tolist())


@pytest.mark.parametrize("number", [0, 1, 127, 254])
def test_a_number_where_the_scale_is_nan(number):
    place = place_of(MX, 255)
    record = run(MX, quantize=spoilt("scales", place, number))
    assert record.stage == "scales"
    assert wrong(record)["scales"].startswith("1 of 64 block scales differ, each ")
    (element,) = record.findings[0]["elements"]
    assert (element["row"], element["block"], element["expected_bits"]) == (*place, "0b11111111")
    assert element["distance"] == "a number where NaN is expected"
    assert element["expected"] == "nan"


# Scales of float32.


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("bits", "steps"),
    [
        (0x7FC00000, None), (0xFFC00000, None), (0x7F800000, None), (0xFF800000, None), (0x80000000, None),
        (0x00000001, None), ("up", 1), ("down", 1), ("negative", None),
    ],
)  # fmt: skip
def test_a_wrong_scale_of_float32(bits, steps):
    right = reference.quantize(make_inputs(BLOCKS).x, BLOCKS.recipe).scales
    raw = struct.unpack("<I", struct.pack("<f", float(right[5, 1])))[0]
    bits = {"up": raw + 1, "down": raw - 1, "negative": raw ^ 0x80000000}.get(bits, bits)
    record = run(BLOCKS, quantize=spoilt("scales", (5, 1), bits))
    assert record.stage == "scales"
    assert wrong(record)["scales"].startswith("1 of 32 block scales differ, each ")
    (element,) = record.findings[0]["elements"]
    assert (element["row"], element["block"], element["actual_bits"]) == (5, 1, f"0x{bits:08X}")
    if steps is not None:
        assert element["distance"] == steps_words(steps)


# The tensor's numbers.


NUMBERS = [0x7FC00000, 0x7F800000, 0x80000000, 0xBF800000]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("part", "bits"),
    [*(("amax", bits) for bits in NUMBERS), *(("tensor_scale", bits) for bits in NUMBERS)],
)
def test_a_wrong_number_of_the_tensor(part, bits):
    record = run(QUANTIZE, quantize=spoilt(part, (0,), bits))
    stage = part.replace("_", " ")
    assert record.stage == stage
    assert wrong(record)[stage].startswith("1 of 1 ")
    (element,) = record.findings[0]["elements"]
    assert element["actual_bits"] == f"0x{bits:08X}"


# Codes: every bit of a byte, in every format.

ELEMENTS = ["nvfp4", "mxfp4", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp8-e4m3", "mxfp8-e5m2"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_bit_of_a_code_counts(name):
    case = replace(QUANTIZE, recipe=name, shape=(8, 64))
    for bit in range(8):
        record = run(case, quantize=changing(lambda q, bit=bit: q.codes[5, 9].bitwise_xor_(1 << bit)))
        assert list(wrong(record)) == ["codes"], bit
        assert record.mismatches == 1
        (element,) = record.findings[0]["elements"]
        column = 18 + bit // 4 if name in ("nvfp4", "mxfp4") else 9
        assert (element["row"], element["column"]) == (5, column)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_other_sign_of_zero_is_a_wrong_code(name):
    case = replace(QUANTIZE, recipe=name, shape=(4, 64), inputs="zeros")
    minus = {"nvfp4": 0x88, "mxfp4": 0x88, "mxfp6-e2m3": 0x20, "mxfp6-e3m2": 0x20}.get(name, 0x80)
    record = run(case, quantize=changing(lambda q: q.codes.fill_(minus)))
    assert wrong(record) == {
        "codes": "256 of 256 codes differ, each the other zero, the first at row 0, column 0",
    }
    assert (record.mismatches, record.max_ulp) == (256, 0)


# Layout.


def test_two_scales_that_are_exchanged_are_a_matter_of_layout():
    def exchange(q):
        q.scales.view(-1)[[0, 1]] = q.scales.view(-1)[[1, 0]]

    record = run(SWIZZLED, quantize=swizzling(exchange))
    assert list(wrong(record)) == ["layout"]
    assert wrong(record)["layout"] == "the scales are right, but 2 of 2 048 bytes lie in another place"


def swizzling(change):
    """A quantize that swizzles its scales and applies `change`."""

    def door(x, recipe, *, swizzled=False, **options):
        q = reference.quantize(x, recipe, **options)
        if swizzled:
            q = replace(q, scales=reference.swizzle(q.scales), swizzled=True)
            change(q)
        return q

    return door


# Values.


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("inputs", "number"),
    [("normal", float("nan")), ("nan", 1.0), ("zeros", -0.0), ("normal", float("inf")), ("normal", float("-inf"))],
)
def test_a_wrong_value(dtype, inputs, number):
    def dequantize(q, kind):
        values = reference.dequantize(q, kind)
        values[0, 0] = number  # the place of the family's NaN, if any
        return values

    record = run(replace(QUANTIZE, dtype=dtype, inputs=inputs), quantize=reference.quantize, dequantize=dequantize)
    assert list(wrong(record)) == ["values"]
    assert record.mismatches == 1
    assert wrong(record)["values"].endswith("at row 0, column 0")
    assert ("the other zero" in wrong(record)["values"]) == (inputs == "zeros")


# Halves, repeats, inputs: bytes, without their meaning.


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("inputs", "before", "after"),
    [("nan", 0x7FC0, 0x7FC1), ("zeros", 0, -0x8000), ("normal", 0x3F80, 0x3F81)],
    ids=["another NaN", "the other zero", "one step"],
)
def test_a_second_run_with_other_bits(inputs, before, after):
    """Equal numbers, or two NaN, can differ in bits."""
    calls = []

    def transform(x, recipe):
        out = reference.transform(x, recipe)
        calls.append(out)
        out.view(torch.int16)[0, 0] = before if len(calls) == 1 else after
        return out

    case = case_from_labels("transform", "nvfp4-rht", (16, 32), "bf16", inputs)
    record = run(case, transform=transform)
    said = wrong(record)["repeat"]
    assert said.startswith("1 of 512 elements of output differ between first run and second run")


# Results with strides of torch's own.


def with_zero_strides(value):
    """A tensor whose extents of 1 have the stride 0, as of `expand`; of a Quantized all tensors."""
    if isinstance(value, torch.Tensor):
        strides = [0 if extent == 1 else stride for extent, stride in zip(value.shape, value.stride(), strict=True)]
        return value.as_strided(value.shape, strides)
    parts = {name: getattr(value, name) for name in ("codes", "scales", "amax", "tensor_scale")}
    return replace(value, **{name: with_zero_strides(part) for name, part in parts.items() if part is not None})


ZERO_STRIDES = {
    "quantize": lambda *args, **options: with_zero_strides(reference.quantize(*args, **options)),
    "quantize_both": lambda *args, **options: tuple(
        half and with_zero_strides(half) for half in reference.quantize_both(*args, **options)
    ),
    "dequantize": lambda *args: with_zero_strides(reference.dequantize(*args)),
    "gemm": lambda *args, **options: with_zero_strides(reference.gemm(*args, **options)),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("shape", [(1, 16), (16, 1), (1, 1), (3, 32), (0, 16), (16, 0)])
@pytest.mark.parametrize("declares", [{}, {"random": "own"}])
def test_an_extent_of_1_may_have_the_stride_0(shape, declares):
    """Empty matrices pass too, with random bits that the harness does not know."""
    recipes = ("nvfp4", "mxfp8-e4m3", "nvfp4-sr", "fp8-current-e4m3", "fp8-block-1x128-e4m3")
    for recipe in recipes if not declares else ["nvfp4-sr"]:
        for usage in ("rowwise", "both") if not declares else ["both"]:
            case = replace(QUANTIZE, recipe=recipe, shape=shape, dtype="bf16", inputs="normal", usage=usage)
            record = run(case, declares=declares, **ZERO_STRIDES)
            assert (record.verdict, record.message) == ("pass", ""), case.id
