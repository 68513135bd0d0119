"""Device functions of formats.cuh on whole value sets, against ml_dtypes and torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowgauge.reference.numbers.encode import encode
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, Format
from tests.native import conversions
from tests.native.conversions import EVERY_BYTE, EVERY_HALF, TEXT, convert
from tests.native.devices import EVERY_BUILD, ON_EVERY_DEVICE
from tests.native.launching import Source

Flags = tuple[str, ...]

FORMATS: dict[str, tuple[Format, Any]] = {
    "e2m1": (E2M1, ml_dtypes.float4_e2m1fn),
    "e2m3": (E2M3, ml_dtypes.float6_e2m3fn),
    "e3m2": (E3M2, ml_dtypes.float6_e3m2fn),
    "e4m3": (E4M3, ml_dtypes.float8_e4m3fn),
    "e5m2": (E5M2, ml_dtypes.float8_e5m2),
}
"""Formats of elements, and their types in ml_dtypes."""
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits; NaN only as NaN, whose payload no format defines."""
    assert got.dtype.itemsize == expected.dtype.itemsize
    both_nan = np.isnan(got.view(expected.dtype)) & np.isnan(expected)
    bits = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(np.where(both_nan, 0, got.view(bits)), np.where(both_nan, 0, expected.view(bits)))


def torch_cast(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Bits of torch's cast of float32 `x`."""
    return torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16)


# To float32.


@pytest.mark.sampled(2)
@EVERY_BUILD
def test_every_bfloat16_becomes_its_float32(cuda_source: Source, flags: Flags) -> None:
    got = convert(cuda_source(TEXT), "bf16_to_float", EVERY_HALF, flags)
    np.testing.assert_array_equal(got >> 16, EVERY_HALF)
    assert_same(got, torch.from_numpy(EVERY_HALF.view(np.int16)).view(torch.bfloat16).float().numpy())


@EVERY_BUILD
def test_every_float16_becomes_its_float32(cuda_source: Source, flags: Flags) -> None:
    got = convert(cuda_source(TEXT), "fp16_to_float", EVERY_HALF, flags)
    assert_same(got, EVERY_HALF.view(np.float16).astype(np.float32))
    assert_same(got, torch.from_numpy(EVERY_HALF.view(np.int16)).view(torch.float16).float().numpy())


@EVERY_BUILD
@EVERY_FORMAT
def test_every_code_becomes_its_value(cuda_source: Source, name: str, flags: Flags) -> None:
    fmt, theirs = FORMATS[name]
    codes = EVERY_BYTE[: fmt.codes]
    got = convert(cuda_source(TEXT), f"{name}_to_floats", codes, flags)
    assert_same(got, np.array(fmt.values, np.float32))
    assert_same(got, codes.view(theirs).astype(np.float32))
    if name in TORCH:
        assert_same(got, torch.from_numpy(codes).view(TORCH[name]).float().numpy())


# From float32 to the input dtypes.


def halves() -> np.ndarray:
    """Decisions of a cast to bfloat16 or float16, and every bfloat16, with infinities and NaN."""
    return np.concatenate([conversions.bf16_values(), conversions.bf16_decisions(), conversions.fp16_decisions()])


@EVERY_BUILD
@pytest.mark.parametrize(
    ("kernel", "theirs", "dtype"),
    [("bf16_from_float", ml_dtypes.bfloat16, torch.bfloat16), ("fp16_from_float", np.float16, torch.float16)],
)
def test_a_cast_to_a_half_is_nearest_even(
    cuda_source: Source, kernel: str, theirs: Any, dtype: torch.dtype, flags: Flags
) -> None:
    x = halves()
    got = convert(cuda_source(TEXT), kernel, x, flags)
    with np.errstate(invalid="ignore", over="ignore"):
        assert_same(got, x.astype(theirs))
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(got[numbers], torch_cast(x, dtype)[numbers])


# From float32 to narrow formats.


@EVERY_BUILD
def test_a_cast_to_e8m0_goes_up_or_down_and_saturates(cuda_source: Source, flags: Flags) -> None:
    """Numbers below 2^-127 become 2^-127; if 8 is subtracted from the exponent, infinity counts as 2^128."""
    source, x = cuda_source(TEXT), conversions.powers()
    exact = x.astype(np.float64)
    with np.errstate(divide="ignore"):
        for kernel, rounded in (
            ("e8m0_up", np.ceil(np.log2(exact))),
            ("e8m0_down", np.floor(np.log2(exact))),
            ("e8m0_down_and_8_less", np.floor(np.log2(np.minimum(exact, 2.0**128))) - 8),
        ):
            expected = np.where(np.isnan(x), 255, np.clip(rounded, -127, 127) + 127)
            np.testing.assert_array_equal(convert(source, kernel, x, flags), expected.astype(np.uint8), kernel)


def inputs(name: str) -> np.ndarray:
    """Decisions of a cast, also above the largest number, and every bfloat16."""
    fmt = FORMATS[name][0]
    points = np.array(fmt.values[: fmt.max_code + 1])
    beyond = 2 * points[-1] - points[-2]
    return np.concatenate(
        [conversions.bf16_values(), conversions.fp16_decisions(), conversions.grid_decisions(points, beyond)]
    )


@pytest.mark.sampled(2)
@EVERY_BUILD
@EVERY_FORMAT
def test_a_cast_is_nearest_even_and_saturates(cuda_source: Source, name: str, flags: Flags) -> None:
    """ml_dtypes and torch overflow, and get limited numbers; NaN of either sign is NaN, or the largest number."""
    fmt, theirs = FORMATS[name]
    x = inputs(name)
    got = convert(cuda_source(TEXT), f"{name}_from_floats", x, flags)
    numbers = ~np.isnan(x)
    limited = np.clip(x[numbers], -fmt.max, fmt.max)
    np.testing.assert_array_equal(got[numbers], limited.astype(theirs).view(np.uint8))
    if name in TORCH:
        casted = torch.from_numpy(limited).to(TORCH[name]).view(torch.uint8).numpy()
        np.testing.assert_array_equal(got[numbers], casted)
    assert set(got[~numbers].tolist()) == {fmt.max_code if fmt.nan_code is None else fmt.nan_code}
    np.testing.assert_array_equal(got, encode(torch.from_numpy(x), fmt).numpy())
    assert set(got.tolist()) >= {sign | code for sign in (0, fmt.sign_code) for code in range(fmt.max_code + 1)}


@pytest.mark.sampled(3)
@EVERY_BUILD
@EVERY_FORMAT
def test_a_pair_is_its_two_codes_the_first_one_low(cuda_source: Source, name: str, flags: Flags) -> None:
    """Every pair of codes, and every input in either place."""
    source, x = cuda_source(TEXT), inputs(name)
    values = np.array(FORMATS[name][0].values, np.float32)
    pairs = np.stack(np.meshgrid(values, values), axis=-1).ravel()
    partner = np.roll(x, 12345)
    x = np.concatenate([pairs, np.stack([x, partner], axis=1).ravel(), np.stack([partner, x], axis=1).ravel()])
    codes = convert(source, f"{name}_from_floats", x, flags)
    got = convert(source, f"{name}x2_from_floats", x, flags)
    np.testing.assert_array_equal(got, codes[::2] | codes[1::2].astype(np.uint16) << (4 if name == "e2m1" else 8))


@EVERY_BUILD
def test_every_e8m0_code_becomes_its_value(cuda_source: Source, flags: Flags) -> None:
    """0 is 2^-127, a subnormal number, and 255 is NaN."""
    got = convert(cuda_source(TEXT), "e8m0_to_floats", EVERY_BYTE, flags)
    assert_same(got, np.array(E8M0.values, np.float32))
    assert_same(got, EVERY_BYTE.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


@ON_EVERY_DEVICE
@pytest.mark.parametrize(
    ("x", "bits"),
    [
        (65504.0, 0x7BFF),
        (65519.996, 0x7BFF),  # the float32 below the midpoint
        (65520.0, 0x7C00),
        (2.0**-14, 0x0400),
        (2.0**-14 - 2.0**-25, 0x0400),  # a tie, to the even code: the smallest normal number
        (2.0**-24, 0x0001),
        (2.0**-25, 0x0000),
        (2.0**-25 * (1 + 2.0**-23), 0x0001),
        (1.5 * 2.0**-24, 0x0002),
    ],
)
def test_a_cast_to_float16_at_its_ends(cuda_source: Source, x: float, bits: int) -> None:
    got = convert(cuda_source(TEXT), "fp16_from_float", np.array([x, -x], np.float32))
    assert got.tolist() == [bits, bits | 0x8000]


@ON_EVERY_DEVICE
@pytest.mark.parametrize("sign", [1, -1])
def test_ties_between_e2m1_codes_go_to_the_even_one(cuda_source: Source, sign: int) -> None:
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32) * np.float32(sign)
    got = convert(cuda_source(TEXT), "e2m1_from_floats", ties)
    assert (got & 7).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert (got >> 3 == (sign < 0)).all()
