"""Codes of a narrow format from the bytes, words or numbers in which a library stores them."""

from __future__ import annotations

import math

import torch

from narrowgauge.spec.formats import E8M0, Format

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WORDS = (torch.int32, torch.uint32, torch.int64, torch.uint64)
_NARROW = {
    torch.float4_e2m1fn_x2: "E2M1", torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2",
    torch.float8_e8m0fnu: "E8M0", torch.float8_e4m3fnuz: "E4M3FNUZ", torch.float8_e5m2fnuz: "E5M2FNUZ",
}  # fmt: skip
_INF_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000


def stored_bytes(stored: torch.Tensor, fmt: Format, name: str) -> torch.Tensor:
    """The bytes, uint8, of a tensor with codes of `fmt`, packed codes included. Words give several bytes in a row.

    stored: uint8, int8, the dtype of torch for `fmt`, or words of 32 or 64 bits, lowest byte first. Raises TypeError
    for another dtype; the message calls the tensor `name`.
    """
    if stored.dtype in (torch.uint8, torch.int8) or _NARROW.get(stored.dtype) == fmt.name:
        return stored.view(torch.uint8)
    if stored.dtype in _WORDS and stored.dim():
        *rows, words = stored.shape  # a column of words is contiguous with any stride, which view refuses
        return stored.contiguous().flatten().view(torch.uint8).view(*rows, words * stored.element_size())
    raise TypeError(
        f"{name}: {_dtype_name(stored)} does not hold codes of {fmt.name}; give uint8 codes, words of 32 bits, "
        f"{_narrow_name(fmt)}or the numbers in float32"
    )


def holds_numbers(stored: torch.Tensor) -> bool:
    """Whether a tensor holds numbers, not codes."""
    return stored.dtype in _NUMBERS


def holds_words(stored: torch.Tensor) -> bool:
    """Whether a tensor holds words with several codes."""
    return stored.dtype in _WORDS


def codes_of_numbers(numbers: torch.Tensor, fmt: Format, name: str) -> torch.Tensor:
    """Codes, uint8, of numbers of `fmt` in float32, bfloat16, float16 or float64. Nothing is rounded.

    −0 and +0 have different codes. NaN has the canonical code. Raises ValueError if a number is no value of `fmt`; the
    message calls the tensor `name` and has the first such number and its place.
    """
    single = numbers.float()
    raw = single.contiguous().view(torch.int32)
    magnitude = raw & 0x7FFFFFFF
    grid = torch.tensor(_magnitudes(fmt), dtype=torch.int32, device=numbers.device)
    codes = torch.searchsorted(grid, magnitude).clamp_(max=len(grid) - 1)
    found = grid[codes] == magnitude
    nan = magnitude > _INF_BITS
    for code, here in ((fmt.inf_code, magnitude == _INF_BITS), (fmt.nan_code, nan)):
        if code is not None:
            codes, found = torch.where(here, code, codes), found | here
    negative = (raw < 0) & ~nan
    if not fmt.signed:
        found &= ~negative
    if fmt.complement:
        found &= negative | (codes <= fmt.max_code)
    if numbers.dtype == torch.float64:
        found &= (single.double() == numbers) | nan
    if not bool(found.all()):
        place = tuple((~found).nonzero()[0].tolist())
        raise ValueError(
            f"{name}{list(place)} is {float(numbers[place])!r}, which is no value of {fmt.name}; give numbers of "
            f"{fmt.name} without any further factor, or codes"
        )
    if fmt.complement:
        return torch.where(negative, -codes, codes).bitwise_and_(fmt.codes - 1).to(torch.uint8)
    return (codes | (negative * fmt.sign_code)).to(torch.uint8)


def numbers_of_exponents(stored: torch.Tensor) -> torch.Tensor:
    """The float32 numbers 2^(c − 127) of codes c of E8M0, uint8; NaN of code 255."""
    bits = torch.tensor([*_magnitudes(E8M0), _NAN_BITS], dtype=torch.int32, device=stored.device)
    return bits[stored.long()].view(torch.float32)


def _magnitudes(fmt: Format) -> list[int]:
    """Bits of the float32 numbers of the codes 0 to `max_code`, in ascending order; in two's complement one more."""
    magnitudes = [_bits(value) for value in fmt.values[: fmt.max_code + 1]]
    return [*magnitudes, _bits(-fmt.values[fmt.sign_code])] if fmt.complement else magnitudes


def _bits(value: float) -> int:
    """Bits of a finite float32 number that is not negative, computed without float32 arithmetic.

    The arithmetic of a processor that flushes subnormal numbers would lose the E8M0 value 2^-127.
    """
    if value < 2.0**-126:
        return int(math.ldexp(value, 149))
    mantissa, exponent = math.frexp(value)
    return ((exponent + 126) << 23) + int(math.ldexp(mantissa, 24)) - (1 << 23)


def _narrow_name(fmt: Format) -> str:
    return next((f"{dtype}, ".removeprefix("torch.") for dtype, name in _NARROW.items() if name == fmt.name), "")


def _dtype_name(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
