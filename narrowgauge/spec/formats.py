"""Narrow number formats as data, with the scalar definition of the value of a code.

Sources: OCP 8-bit Floating Point (OFP8) 1.0 for E4M3 and E5M2; OCP Microscaling Formats (MX) 1.0 for
E2M1, E2M3, E3M2 and E8M0; ml_dtypes 0.6 for E4M3FNUZ and E5M2FNUZ, the formats of AMD CDNA 3; PTX ISA 9.4 for UE5M3.
INT4 and INT8 are whole numbers in two's complement, E0M3 whole numbers with a sign bit, UINT4 and UINT8 those from 0 to
15 and 255. This module does not import torch, so that listing recipes and cases is fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Format:
    """Encoding of a single number. Codes are the unsigned integers below `codes`."""

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    """Code of the largest finite positive value."""
    inf_code: int | None = None
    """Code of +infinity; None in a format without infinity."""
    nan_code: int | None = None
    """Code of the canonical NaN; None in a format without NaN."""
    signed: bool = True
    complement: bool = False
    """Whether negative numbers are the two's complement of their magnitude. There is one negative number more."""

    @property
    def codes(self) -> int:
        """Number of codes: 2 to the power of `bits`."""
        return 1 << self.bits

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        return self.value(self.max_code)

    @property
    def largest_magnitude(self) -> float:
        """The largest magnitude: `max`, or that of the negative number without a positive one."""
        return self.max + self.value(1) if self.complement else self.max

    @property
    def sign_code(self) -> int:
        """The sign bit as a code (8 for E2M1); 0 for an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def negative_zero(self) -> bool:
        """Whether the format has −0. Formats called fnuz (finite, no unsigned zero) have NaN in its place."""
        return self.signed and self.nan_code != self.sign_code and not self.complement

    def value(self, code: int) -> float:
        """The number with this code. All tables and kernels are tested against this definition.

        Raises ValueError if the code does not exist.
        """
        if not 0 <= code < self.codes:
            raise ValueError(f"{self.name} has codes 0 to {self.codes - 1}; {code} is none of them")
        if code == self.nan_code and self.signed and not self.negative_zero:  # fnuz: NaN takes the place of −0
            return math.nan
        if not self.mantissa_bits:  # E8M0 has an exponent only
            return math.nan if code == self.nan_code else math.ldexp(1.0, code - self.bias)
        sign = -1.0 if code & self.sign_code else 1.0
        magnitude = code & ~self.sign_code
        if self.complement and sign < 0:
            magnitude = self.codes - code
            return -math.ldexp(magnitude, 1 - self.bias - self.mantissa_bits)
        if magnitude > self.max_code:
            return math.copysign(math.inf, sign) if magnitude == self.inf_code else math.nan
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        if exponent == 0:
            return sign * math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)
        return sign * math.ldexp((1 << self.mantissa_bits) + mantissa, exponent - self.bias - self.mantissa_bits)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The value of every code, in code order."""
        return tuple(self.value(code) for code in range(self.codes))

    def __reduce__(self) -> tuple[Callable[[str], Format], tuple[str]]:
        """A copy or an unpickled format is the constant of this module: formats are compared by identity."""
        return _format_called, (self.name,)


E2M1 = Format("E2M1", bits=4, exponent_bits=2, mantissa_bits=1, bias=1, max_code=0x7)
E2M3 = Format("E2M3", bits=6, exponent_bits=2, mantissa_bits=3, bias=1, max_code=0x1F)
E3M2 = Format("E3M2", bits=6, exponent_bits=3, mantissa_bits=2, bias=3, max_code=0x1F)
E4M3 = Format("E4M3", bits=8, exponent_bits=4, mantissa_bits=3, bias=7, max_code=0x7E, nan_code=0x7F)
E5M2 = Format("E5M2", bits=8, exponent_bits=5, mantissa_bits=2, bias=15, max_code=0x7B, inf_code=0x7C, nan_code=0x7F)
E4M3FNUZ = Format(
    "E4M3FNUZ", bits=8, exponent_bits=4, mantissa_bits=3, bias=8, max_code=0x7F, nan_code=0x80,
)  # fmt: skip
E5M2FNUZ = Format(
    "E5M2FNUZ", bits=8, exponent_bits=5, mantissa_bits=2, bias=16, max_code=0x7F, nan_code=0x80,
)  # fmt: skip
E8M0 = Format("E8M0", bits=8, exponent_bits=8, mantissa_bits=0, bias=127, max_code=0xFE, nan_code=0xFF, signed=False)

UE5M3 = Format("UE5M3", bits=8, exponent_bits=5, mantissa_bits=3, bias=15, max_code=0xFE, nan_code=0xFF, signed=False)
E0M3 = Format("E0M3", bits=4, exponent_bits=0, mantissa_bits=3, bias=-2, max_code=0x7)
INT4 = Format("INT4", bits=4, exponent_bits=0, mantissa_bits=3, bias=-2, max_code=0x7, complement=True)
INT8 = Format("INT8", bits=8, exponent_bits=0, mantissa_bits=7, bias=-6, max_code=0x7F, complement=True)
UINT4 = Format("UINT4", bits=4, exponent_bits=0, mantissa_bits=4, bias=-3, max_code=0xF, signed=False)
UINT8 = Format("UINT8", bits=8, exponent_bits=0, mantissa_bits=8, bias=-7, max_code=0xFF, signed=False)

BYTE = Format("BYTE", bits=8, exponent_bits=0, mantissa_bits=8, bias=-7, max_code=0xFF, signed=False)
"""A byte as a number, of memory that a kernel must keep."""
FP32 = Format(
    "FP32", bits=32, exponent_bits=8, mantissa_bits=23, bias=127, max_code=0x7F7FFFFF, inf_code=0x7F800000,
    nan_code=0x7FC00000,
)  # fmt: skip
"""float32, for scales stored as float32 numbers."""

FORMATS = {
    f.name: f for f in (E2M1, E2M3, E3M2, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0, UE5M3, E0M3, INT4, INT8, UINT4, UINT8)
}  # fmt: skip
"""The narrow formats by name."""


def _format_called(name: str) -> Format:
    return {FP32.name: FP32, BYTE.name: BYTE}.get(name) or FORMATS[name]
