"""Rounding of float32 magnitudes to the grid of a format, on the bits."""

from __future__ import annotations

import torch

from reference.formats import Format

FLOAT32_INF_BITS = 0x7F800000
FLOAT32_MANTISSA = 23
FLOAT32_BIAS = 127


def nearest_even(magnitude: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round to nearest, ties to the even code, with an unbounded exponent above.

    `magnitude` holds the bits of non-negative float32 numbers (int32, any shape). The result (int32) counts grid
    points from zero: it is the code wherever it is at most `fmt.max_code`, and larger where the rounded value
    overflows. NaN counts as infinity. Ties are decided on the last kept bit, as IEEE 754 roundTiesToEven does.
    """
    shift = FLOAT32_MANTISSA - fmt.mantissa_bits
    rebias = (FLOAT32_BIAS - fmt.bias) << fmt.mantissa_bits
    bits = magnitude.clamp(max=FLOAT32_INF_BITS)
    rounded = bits >> shift
    odd = rounded & 1
    rounded = odd.add_(bits).add_((1 << (shift - 1)) - 1).bitwise_right_shift_(shift).sub_(rebias)
    if not fmt.signed:  # E8M0: code 0 is 2^-127, itself subnormal in float32; the tie at 1.5·2^-127 is even at 0
        return torch.where(bits < 0x00800000, (bits > 0x00600000).int(), rounded)
    smallest_normal = (FLOAT32_BIAS + 1 - fmt.bias) << FLOAT32_MANTISSA
    # A power of two times a float32 below the smallest normal is exact, and torch.round takes ties to even.
    below = bits.view(torch.float32).mul(2.0 ** (fmt.bias - 1 + fmt.mantissa_bits)).round_()
    below = below.clamp_(max=float(1 << fmt.mantissa_bits)).int()
    return torch.where(bits < smallest_normal, below, rounded)
