"""Codes from numbers, bytes and words, for all codes of all formats."""

from __future__ import annotations

import math
import struct

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowgauge.adapt.number_codes import codes_of_numbers, numbers_of_exponents, stored_bytes
from narrowgauge.spec.formats import E2M1, E4M3, E5M2, E8M0, FORMATS, Format

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ML_DTYPES = {
    "E2M1": "float4_e2m1fn", "E2M3": "float6_e2m3fn", "E3M2": "float6_e3m2fn", "E4M3": "float8_e4m3fn",
    "E5M2": "float8_e5m2", "E4M3FNUZ": "float8_e4m3fnuz", "E5M2FNUZ": "float8_e5m2fnuz", "E8M0": "float8_e8m0fnu",
    "INT4": "int4", "UINT4": "uint4",
}  # fmt: skip
EXACT = {
    "INT8": [*range(128), *range(-128, 0)],
    "UINT8": [*range(256)],
    "E0M3": [*(float(n) for n in range(8)), *(-float(n) for n in range(8))],
    "UE5M3": [
        *(math.ldexp(code % 8 + (8 if code > 7 else 0), max(1, code // 8) - 18) for code in range(255)),
        math.nan,
    ],
}
"""Values of the formats that ml_dtypes does not have, in order of their codes."""


def of(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_every_code_comes_back_from_its_value(fmt: Format, dtype: torch.dtype) -> None:
    """Independent values: those of ml_dtypes, by its own conversion to float64, or written out."""
    raw = np.arange(fmt.codes, dtype=np.uint8)
    if fmt.name in EXACT:
        values = torch.tensor(EXACT[fmt.name], dtype=torch.float64)
    else:
        values = torch.from_numpy(raw.view(getattr(ml_dtypes, ML_DTYPES[fmt.name])).astype(np.float64))
    there = values.to(dtype).to(torch.float64)
    representable = (there == values) | values.isnan()
    assert bool(representable.all()) or (fmt.name in ("E8M0", "UE5M3") and dtype == torch.float16)
    codes = codes_of_numbers(values[representable].to(dtype), fmt, "x")
    expected = torch.from_numpy(raw)[representable]
    nan = values[representable].isnan()
    assert codes.dtype == torch.uint8
    assert torch.equal(codes[~nan], expected[~nan])
    assert (codes[nan] == (fmt.nan_code or 0)).all()


def test_signed_zeros_have_two_codes_and_a_nan_has_one() -> None:
    assert codes_of_numbers(of(0.0, -0.0), E2M1, "x").tolist() == [[0, 8]]
    nans = torch.tensor([[0x7FC00000, -0x00400000, 0x7F800001]], dtype=torch.int32).view(torch.float32)
    assert codes_of_numbers(nans, E4M3, "x").tolist() == [[0x7F] * 3]
    assert codes_of_numbers(nans, E8M0, "x").tolist() == [[0xFF] * 3]
    assert codes_of_numbers(of(math.inf, -math.inf), E5M2, "x").tolist() == [[0x7C, 0xFC]]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_neighbours_of_values_are_refused(fmt: Format) -> None:
    """float32 numbers an ulp above and below every value, and midpoints."""
    values = torch.tensor([v for v in fmt.values if math.isfinite(v)])
    for other in (values.nextafter(torch.tensor(math.inf)), values.nextafter(torch.tensor(-math.inf))):
        for value in other.tolist():
            with pytest.raises(ValueError, match=f"is no value of {fmt.name}"):
                codes_of_numbers(of(value), fmt, "x")


@pytest.mark.parametrize(
    ("value", "fmt"),
    [
        (5.0, E2M1), (math.nan, E2M1), (math.inf, E2M1), (480.0, E4M3), (math.inf, E4M3), (-1.0, E8M0), (0.0, E8M0),
        (-0.0, E8M0), (3.0, E8M0), (math.inf, E8M0), (1.0 + 2.0**-40, E2M1), (2.0**-130, E8M0),
    ],
)  # fmt: skip
def test_the_message_has_the_value_its_place_and_the_format(value: float, fmt: Format) -> None:
    numbers = torch.ones(3, 4, dtype=torch.float64)
    numbers[1, 2] = value
    numbers[2, 0] = value
    with pytest.raises(ValueError, match=rf"scales\[1, 2\] is {value!r}, which is no value of {fmt.name}"):
        codes_of_numbers(numbers, fmt, "scales")


def test_e8m0_bytes_give_the_bits_of_float32_powers_of_two() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    bits = numbers_of_exponents(codes).view(torch.int32)
    expected = [struct.unpack("<i", struct.pack("<f", math.ldexp(1.0, code - 127)))[0] for code in range(255)]
    assert bits.tolist() == [*expected, 0x7FC00000]


def test_subnormal_scales_survive_a_processor_that_flushes_them() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        tiny = torch.tensor([[0x00400000]], dtype=torch.int32).view(torch.float32)
        assert codes_of_numbers(tiny, E8M0, "x").tolist() == [[0]]
        assert numbers_of_exponents(torch.zeros(1, dtype=torch.uint8)).view(torch.int32).tolist() == [0x00400000]
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64, torch.uint64], ids=str)
def test_words_hold_their_lowest_byte_first(dtype: torch.dtype) -> None:
    raw = torch.arange(64, dtype=torch.uint8).view(2, 32)
    assert torch.equal(stored_bytes(raw.view(dtype), E4M3, "x"), raw)
    column_major = raw.view(dtype).T.contiguous().T
    assert torch.equal(stored_bytes(column_major, E4M3, "x"), raw)


@pytest.mark.parametrize(
    ("dtype", "fmt"),
    [
        (torch.float8_e5m2, E4M3), (torch.float8_e4m3fnuz, E4M3), (torch.float8_e4m3fn, E8M0),
        (torch.float8_e4m3fn, E2M1), (torch.float4_e2m1fn_x2, E4M3), (torch.int16, E4M3), (torch.bool, E2M1),
    ],
    ids=str,
)  # fmt: skip
def test_dtypes_of_other_formats_are_refused(dtype: torch.dtype, fmt: Format) -> None:
    stored = torch.zeros(2, 2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    with pytest.raises(
        TypeError, match=f"codes: {str(dtype).removeprefix('torch.')} does not hold codes of {fmt.name}"
    ):
        stored_bytes(stored, fmt, "codes")
