"""Wrong roundings to the grid of a format, in place of round to nearest, ties to even."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch

from narrowgauge.reference.numbers.encode import encode
from narrowgauge.spec.formats import Format

Of = TypeVar("Of")
Rounding = Callable[[torch.Tensor, Format], torch.Tensor]
"""Function from float32 numbers to codes (uint8) of a signed format."""

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes to which a kernel rounds a number on the way."""
UPPER_BITS = {"bf16": 16, "tf32": 19}
"""Bits of a float32 number that a kernel keeps if it cuts the number to a narrower dtype."""


def upper_bits(x: torch.Tensor, bits: int) -> torch.Tensor:
    """`x` as float32 with 0 in all but the upper `bits` bits."""
    return (x.float().view(torch.int32) & -(1 << 32 - bits)).view(torch.float32)


def power_of_two(direction: int, x: torch.Tensor) -> torch.Tensor:
    """Finite positive numbers of `x`, float32, rounded up (1) or down (-1) to a power of two; the rest of `x` stays."""
    mantissa, exponent = torch.frexp(x)
    power = torch.ldexp(torch.ones_like(x), exponent - (mantissa.eq(0.5) | (direction < 0)).to(exponent.dtype))
    return torch.where((x > 0) & x.isfinite(), power, x)


POWERS = {"up": 1, "down": -1}
"""Directions of `power_of_two`."""


def flush(x: torch.Tensor) -> torch.Tensor:
    """`x` with its subnormal numbers replaced by zeros of the same sign."""
    return torch.where(x.abs() < torch.finfo(x.dtype).smallest_normal, torch.zeros_like(x).copysign(x), x)


@lru_cache(maxsize=16)
def _points(fmt: Format, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Grid points from 0 up, and the midpoint above each point (infinity above the last point), float32."""
    points = torch.tensor(fmt.values[: fmt.max_code + 1], dtype=torch.float64)
    middles = torch.nn.functional.pad((points[1:] + points[:-1]) / 2, (0, 1), value=torch.inf)
    return points.float().to(device), middles.float().to(device)


def below(magnitude: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Code (int64) of the grid point at or below, this point, and the midpoint above it. NaN has the last point."""
    points, middles = _points(fmt, str(magnitude.device))
    code = torch.searchsorted(points, magnitude, right=True).sub_(1).clamp_(min=0)
    return code, points[code], middles[code]


def signed(code: torch.Tensor, x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes with the signs of `x`, from codes of magnitudes. They saturate, and a NaN in `x` gives the code of NaN."""
    stored = code.clamp(max=fmt.max_code).to(torch.uint8) | x.signbit().to(torch.uint8) * fmt.sign_code
    return stored.masked_fill_(x.isnan(), fmt.max_code if fmt.nan_code is None else fmt.nan_code)


def _up_where(rounds_up: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Rounding:
    """Numbers round away from zero where `rounds_up` is True of magnitude, grid point below, and midpoint above it."""

    def rounding(x: torch.Tensor, fmt: Format) -> torch.Tensor:
        magnitude = x.abs()
        code, point, middle = below(magnitude, fmt)
        return signed(code + rounds_up(magnitude, point, middle), x, fmt)

    return rounding


ties_away = _up_where(lambda magnitude, point, middle: magnitude >= middle)
ties_toward_zero = _up_where(lambda magnitude, point, middle: magnitude > middle)
truncated = _up_where(lambda magnitude, point, middle: torch.zeros_like(magnitude, dtype=torch.bool))
rounded_up = _up_where(lambda magnitude, point, middle: magnitude > point)
"""Every number off the grid rounds away from zero."""


def carry_lost(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """A mantissa of ones that rounds up becomes 0, and the exponent stays: half the number."""
    nearest = encode(x, fmt)
    magnitude, binade = nearest & (fmt.sign_code - 1), 1 << fmt.mantissa_bits
    carries = (below(x.abs(), fmt)[0] < magnitude) & (magnitude & (binade - 1) == 0) & (magnitude > binade)
    return torch.where(carries & x.isfinite(), nearest - binade, nearest)


def toward_infinity(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    return torch.where(x > 0, rounded_up(x, fmt), truncated(x, fmt))


def toward_minus_infinity(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    return torch.where(x < 0, rounded_up(x, fmt), truncated(x, fmt))


def through(dtype: torch.dtype) -> Rounding:
    """Numbers are rounded to `dtype` first."""
    return lambda x, fmt: encode(x.to(dtype).float(), fmt)


def narrowed(value: Callable[[Of], torch.Tensor]) -> Callable[[torch.dtype, Of], torch.Tensor]:
    """Function to a value that is rounded to a narrower dtype, and stored in its own dtype."""

    def change(dtype: torch.dtype, of: Of) -> torch.Tensor:
        exact = value(of)
        return exact.to(dtype).to(exact.dtype)

    return change


def unsaturated(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Overflow gives infinity, or NaN if the format has no infinity. The format must have one of them."""
    return encode(x, fmt, saturate=False)


def overflow_to_nan(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Overflow and infinity give NaN with the sign of `x`."""
    codes = encode(x, fmt, saturate=False)
    code = codes & (fmt.sign_code - 1)
    return torch.where(code > fmt.max_code, codes & fmt.sign_code | (fmt.nan_code or 0), codes)


def unsigned_overflow(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Overflow and infinity give NaN without a sign."""
    codes = overflow_to_nan(x, fmt)
    return torch.where(codes & (fmt.sign_code - 1) > fmt.max_code, codes & (fmt.sign_code - 1), codes)


def top_binade_saturated(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """All numbers with the largest exponent become the largest number, with their signs."""
    codes = encode(x, fmt)
    magnitude = codes & (fmt.sign_code - 1)
    top = fmt.max_code >> fmt.mantissa_bits << fmt.mantissa_bits
    return torch.where((magnitude >= top) & (magnitude <= fmt.max_code), codes & fmt.sign_code | fmt.max_code, codes)


def flushed_before(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Numbers that are subnormal before rounding become zeros with their signs."""
    return encode(torch.where(x.abs() < 2.0 ** (1 - fmt.bias), torch.zeros_like(x).copysign(x), x), fmt)


def subnormals_to(normal: bool) -> Rounding:
    """Nonzero subnormal codes become zeros or, with `normal`, the smallest normal number, with their signs."""

    def rounding(x: torch.Tensor, fmt: Format) -> torch.Tensor:
        codes, least = encode(x, fmt), 1 << fmt.mantissa_bits
        magnitude = codes & (fmt.sign_code - 1)
        replaced = codes & fmt.sign_code | (least if normal else 0)
        return torch.where((magnitude > 0) & (magnitude < least), replaced, codes)

    return rounding


def shifted_codes(step: int, codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes that are larger by `step`. NaN stays."""
    shifted = (codes.int() + step).clamp(0, fmt.max_code).to(torch.uint8)
    return torch.where(codes > fmt.max_code, codes, shifted)
