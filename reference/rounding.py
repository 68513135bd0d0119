"""Rounding of float32 magnitudes to the grid of a format, on the bits."""

from __future__ import annotations

import torch

from reference.formats import E2M1, Format

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


def stochastic_e2m1(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Float32 `x` rounded to the grid of E2M1 by the random bytes `random` (uint8, the same shape); a new tensor.

    With u = byte/256 and the grid's step at |x|, t = |x| + u·step is cut down to the grid at t, at most 6; the sign is
    kept and NaN gives 6. A number of the grid never moves, and |x| goes up in ⌊256·f⌋ of 256 cases, f the distance to
    the grid point below in steps. Source: numerics.md, `nvfp4-sr` (Transformer Engine's software path).
    """
    magnitude = x.abs()
    step = _e2m1_step(magnitude)
    # u·step is exact, so the sum rounds once, as a fused multiply-add does.
    moved = step.mul_(random.float().mul_(2.0**-8)).add_(magnitude)
    step = _e2m1_step(moved)
    rounded = moved.div_(step).floor_().mul_(step).clamp_(max=E2M1.max)
    return torch.where(x.isnan(), E2M1.max, rounded.copysign_(x))


def _e2m1_step(magnitude: torch.Tensor) -> torch.Tensor:
    return torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
