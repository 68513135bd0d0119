"""Formats, decode and encode on every code and every bfloat16 and float16 number, against ml_dtypes and gfloat.

If the policy of an oracle differs from the docstring of `encode` (NaN, overflow, E8M0 of zero and of negative
numbers), a separate test states the policy, and the comparison omits these inputs.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import pack, unpack
from narrowgauge.reference.scalar import rounding
from narrowgauge.spec.formats import E0M3, E2M1, E2M3, E3M2, E4M3, E8M0, FORMATS, UE5M3, Format
from tests.reference.samples import boundaries, every_input

ALL = list(FORMATS.values())
SIGNED = [fmt for fmt in ALL if fmt.signed]
OF_GFLOAT = [fmt for fmt in ALL if (fmt.negative_zero or not fmt.mantissa_bits) and fmt.exponent_bits]
"""gfloat 0.5 has no fnuz formats, and neither UE5M3 nor whole numbers without a factor."""
NOT_SATURATING = [fmt for fmt in ALL if fmt.nan_code is not None]

ML_DTYPES = {
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "E8M0": ml_dtypes.float8_e8m0fnu,
    "INT4": ml_dtypes.int4,
    "INT8": np.int8,
    "UINT4": ml_dtypes.uint4,
    "UINT8": np.uint8,
}
OF_ML_DTYPES = [fmt for fmt in ALL if fmt.name in ML_DTYPES]
"""ml_dtypes 0.6 has neither UE5M3 nor E0M3."""


def formats(some: list[Format]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fmt", some, ids=lambda fmt: fmt.name)


# A format without NaN always saturates: it has no code for overflow.
def saturating_or_not(some: list[Format]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("fmt", "saturate"),
        [
            pytest.param(fmt, saturate, id=f"{fmt.name}-{'saturating' if saturate else 'not'}")
            for fmt in some
            for saturate in (True, False)
            if saturate or fmt.nan_code is not None
        ],
    )


@pytest.fixture
def gfloat() -> ModuleType:
    why = "gfloat is not installed: pip install gfloat"
    pytest.importorskip("gfloat.formats", reason=why)
    return pytest.importorskip("gfloat", reason=why)


def gfloat_format(gfloat: ModuleType, fmt: Format) -> Any:
    return getattr(gfloat.formats, f"format_info_ocp_{fmt.name.lower()}")


def all_codes(fmt: Format) -> np.ndarray:
    return np.arange(fmt.codes, dtype=np.uint8)


def codes_of(x: np.ndarray, fmt: Format, *, saturate: bool = True) -> np.ndarray:
    return encode(torch.from_numpy(x), fmt, saturate=saturate).numpy()


def encode_scalars(x: np.ndarray | list[float], fmt: Format, *, saturate: bool = True) -> list[int]:
    return codes_of(np.array(x, dtype=np.float32), fmt, saturate=saturate).tolist()


def overflows(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Whether |x| rounds above the largest finite value: a half-way case counts where the largest code is odd."""
    *_, last, beyond = rounding.grid(fmt)
    threshold = float((last + beyond) / 2)
    return (np.abs(x) >= threshold) if fmt.max_code % 2 else (np.abs(x) > threshold)


def assert_same_values(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal numbers, zeros of the same sign, NaN in the same places."""
    np.testing.assert_array_equal(ours, theirs)
    number = ~np.isnan(ours)
    np.testing.assert_array_equal(np.signbit(ours[number]), np.signbit(theirs[number]))


# Decode.


def test_ue5m3_and_e0m3_are_exact_fractions() -> None:
    """PTX ISA 9.4: five exponent bits with bias 15, three mantissa bits, no sign, NaN 0xFF. E0M3: sign and number."""
    for code in range(255):
        exponent, mantissa = divmod(code, 8)
        exact = Fraction(mantissa, 8) * Fraction(2) ** -14 if not exponent else (1 + Fraction(mantissa, 8)) * Fraction(
            2) ** (exponent - 15)  # fmt: skip
        assert Fraction(UE5M3.value(code)) == exact
    assert math.isnan(UE5M3.value(255))
    assert UE5M3.max == 1.75 * 2.0**16
    assert [E0M3.value(code) for code in range(16)] == [*range(8), *(-number for number in range(8))]
    assert math.copysign(1.0, E0M3.value(8)) == -1.0


def test_e5m2_of_positive_codes_is_a_coarser_ue5m3() -> None:
    """ml_dtypes: both have a bias of 15, so every finite positive E5M2 number is a number of UE5M3."""
    fewer = np.arange(0x7C, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float64)
    assert set(fewer) <= set(UE5M3.values)


@formats(OF_ML_DTYPES)
def test_every_code_means_what_ml_dtypes_says(fmt: Format) -> None:
    theirs = all_codes(fmt).view(ML_DTYPES[fmt.name]).astype(np.float64)
    assert_same_values(np.array(fmt.values), theirs)


@formats(OF_GFLOAT)
def test_every_code_means_what_gfloat_says(gfloat: ModuleType, fmt: Format) -> None:
    theirs = [gfloat.decode_float(gfloat_format(gfloat, fmt), code).fval for code in range(fmt.codes)]
    assert_same_values(np.array(fmt.values), np.array(theirs))


@formats(ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_decode_table_is_the_definition(fmt: Format, dtype: torch.dtype) -> None:
    codes = torch.from_numpy(all_codes(fmt)).view(2, -1)
    decoded = decode(codes, fmt, dtype)
    assert decoded.dtype == dtype
    assert decoded.shape == codes.shape
    assert_same_values(decoded.double().numpy().ravel(), np.array([fmt.value(code) for code in range(fmt.codes)]))


def test_pack_and_unpack_are_inverse_on_every_pair_of_codes() -> None:
    low, high = (codes.reshape(-1, 1) for codes in torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij"))
    codes = torch.cat([low, high], dim=1).to(torch.uint8)
    packed = pack(codes)
    assert torch.equal(packed, (low | high << 4).to(torch.uint8))
    assert torch.equal(unpack(packed, 2), codes)


@formats(ALL)
def test_derived_figures_of_a_format_follow_from_its_table(fmt: Format) -> None:
    finite = [value for value in fmt.values if math.isfinite(value)]
    assert fmt.codes == len(fmt.values)
    assert fmt.max == max(finite)
    assert fmt.values[fmt.max_code] == max(finite)
    assert fmt.sign_code == (fmt.codes // 2 if min(finite) < 0 else 0)
    assert fmt.complement == (min(finite) < -fmt.max)


@formats(ALL)
def test_a_code_that_does_not_exist_is_refused(fmt: Format) -> None:
    for code in (-1, fmt.codes):
        with pytest.raises(ValueError, match=f"{fmt.name} has codes 0 to {fmt.codes - 1}; {code} is none of them"):
            fmt.value(code)


@formats([fmt for fmt in ALL if fmt.bits < 8])
def test_decode_refuses_a_byte_that_is_no_code(fmt: Format) -> None:
    with pytest.raises(IndexError):
        decode(torch.tensor([fmt.codes], dtype=torch.uint8), fmt)


def test_decode_refuses_codes_that_are_not_bytes() -> None:
    with pytest.raises(TypeError, match=r"decode takes uint8 codes of E4M3, not torch\.int32"):
        decode(torch.tensor([1], dtype=torch.int32), E4M3)


# Encode.


@formats([fmt for fmt in SIGNED if fmt in OF_ML_DTYPES])
def test_encode_agrees_with_ml_dtypes(fmt: Format) -> None:
    x = every_input(fmt)
    x = x[~np.isnan(x)]
    if fmt.complement:  # numpy rounds to whole numbers, ties to even, and does not saturate
        whole = np.clip(np.rint(x), -fmt.max_code - 1, fmt.max_code).astype(np.int64)
        np.testing.assert_array_equal(codes_of(x, fmt), whole % fmt.codes)
        return
    with np.errstate(all="ignore"):
        theirs = x.astype(ML_DTYPES[fmt.name]).view(np.uint8)
    if fmt.nan_code is not None:  # ml_dtypes does not saturate; E4M3 overflows to NaN, E5M2 to infinity
        np.testing.assert_array_equal(codes_of(x, fmt, saturate=False), theirs)
        theirs = np.where(overflows(x, fmt), fmt.max_code | np.signbit(x) * np.uint8(fmt.sign_code), theirs)
    np.testing.assert_array_equal(codes_of(x, fmt), theirs)


def test_encode_agrees_with_ml_dtypes_on_e8m0() -> None:
    """Inputs that ml_dtypes rounds to nearest even: no ties, which go up, and no number between 2^-127 and 2^-126."""
    x = every_input(E8M0)
    x = x[(x >= 2.0**-126) & (x.view(np.int32) & 0x7FFFFF != 0x400000)]
    with np.errstate(all="ignore"):
        theirs = x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    np.testing.assert_array_equal(codes_of(x, E8M0, saturate=False), theirs)
    np.testing.assert_array_equal(codes_of(x, E8M0), np.where(overflows(x, E8M0), 0xFE, theirs))


@saturating_or_not(OF_GFLOAT)
def test_encode_agrees_with_gfloat(gfloat: ModuleType, fmt: Format, saturate: bool) -> None:
    x = every_input(fmt)
    x = x[~np.isnan(x)]
    if fmt.nan_code is None:  # gfloat has no infinity here
        x = x[np.isfinite(x)]
    if not fmt.signed:  # gfloat encodes neither negative numbers nor any below the smallest
        x = x[x >= 2.0**-127]
    info = gfloat_format(gfloat, fmt)
    theirs = gfloat.encode_ndarray(info, gfloat.round_ndarray(info, x.astype(np.float64), sat=saturate))
    ours = codes_of(x, fmt, saturate=saturate)
    if fmt == E4M3 and not saturate:  # gfloat's NaN is 0xFF for either sign
        ours = np.where(ours == 0x7F, 0xFF, ours)
    np.testing.assert_array_equal(ours, theirs)


@formats(SIGNED)
def test_encode_agrees_with_exact_fractions_at_every_boundary(fmt: Format) -> None:
    x = boundaries(fmt)
    np.testing.assert_array_equal(codes_of(x, fmt), [rounding.encode(float(v), fmt) for v in x])


# The policies of encode's docstring, if oracles differ.

NAN = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)


@formats(NOT_SATURATING)
@pytest.mark.parametrize("saturate", [True, False])
def test_nan_of_any_sign_and_payload_is_the_canonical_nan(fmt: Format, saturate: bool) -> None:
    assert encode_scalars(NAN, fmt, saturate=saturate) == [fmt.nan_code] * len(NAN)


@formats(ALL)
def test_all_sixteen_leading_bits_round_to_the_nearest_code(fmt: Format) -> None:
    """The first bits decide except for ties, which the last bits break: 0, 1, all but 1, all, and the bits beside
    the middle."""
    words = torch.arange(1 << 16).unsqueeze(1) << 16
    lasts = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    x = (words + lasts).flatten().to(torch.int32).view(torch.float32)
    values = np.array([abs(v) for v in fmt.values[: fmt.max_code + 1]])
    middles, magnitude = (values[1:] + values[:-1]) / 2, x.abs().double().numpy()
    below = np.searchsorted(middles, magnitude, side="left")
    tie = magnitude == np.append(middles, np.nan)[below]
    expected = below + (tie & (below % 2 == 1))
    negative = np.signbit(x.numpy())
    if fmt.signed:
        if fmt.complement:
            expected = np.where(negative & (magnitude >= fmt.max_code + 0.5), fmt.max_code + 1, expected)
            expected = np.where(negative, -expected % fmt.codes, expected)
        else:
            expected[negative & ((expected > 0) | fmt.negative_zero)] += fmt.sign_code
    else:
        expected[negative & (magnitude > 0)] = fmt.nan_code or 0
    nan = np.isnan(magnitude)
    expected[nan] = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    np.testing.assert_array_equal(encode(x, fmt).numpy(), expected)
    numbers = torch.from_numpy(~nan)
    np.testing.assert_array_equal(encode(x[numbers], fmt).numpy(), expected[~nan])


def test_e8m0_agrees_with_exact_fractions_at_every_boundary() -> None:
    x = boundaries(E8M0)
    x = x[x > 0]
    expected = [min(rounding.nearest_code(Fraction(float(v)), E8M0), 0xFE) for v in x]
    np.testing.assert_array_equal(codes_of(x, E8M0), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_encode_refuses_another_dtype(dtype: torch.dtype) -> None:
    message = f"encode takes float32 values, not {dtype}; convert them first, exactly"
    with pytest.raises(TypeError, match=re.escape(message)):
        encode(torch.ones(1, dtype=dtype), E4M3)


# Errors.


@formats([E2M1, E2M3, E3M2, E0M3])
def test_a_format_without_nan_has_to_saturate(fmt: Format) -> None:
    message = f"{fmt.name} has no code for overflow, so it must saturate; formats that need not: E4M3, E5M2, E4M3FNUZ, "
    with pytest.raises(ValueError, match=re.escape(message)):
        encode(torch.ones(1), fmt, saturate=False)
