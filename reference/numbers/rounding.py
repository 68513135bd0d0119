"""Rounding of float32 magnitudes to the grid of a format, on the bits."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from narrowgauge.spec.formats import E2M1, Format

FLOAT32_INF_BITS = 0x7F800000
FLOAT32_MANTISSA = 23
FLOAT32_BIAS = 127


def nearest_even(magnitude: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round to nearest, ties to the even code, with an unbounded exponent above.

    `magnitude`: bits of non-negative float32 numbers (int32, any shape). The result (int32) counts grid points from
    zero: it is the code if it is at most `fmt.max_code`, and larger than `fmt.max_code` if the rounded value overflows.
    NaN counts as infinity. Source: docs/numerics.md#formats.
    """
    if not fmt.mantissa_bits:  # E8M0: code 0 is 2^-127, itself subnormal in float32; the tie at 1.5·2^-127 is even at 0
        half = 1 << (FLOAT32_MANTISSA - 1)
        bits = magnitude.clamp(max=FLOAT32_INF_BITS)
        odd = (bits >> FLOAT32_MANTISSA) & 1
        rounded = odd.add_(bits).add_(half - 1).bitwise_right_shift_(FLOAT32_MANTISSA)
        return torch.where(bits < 0x00800000, (bits > 0x00600000).int(), rounded)
    # The grid step at a number is 2^(e − mantissa bits), e being at least the exponent of the smallest normal number.
    # The addition of 2^(e + 23 − mantissa bits) leaves the number of steps in the low bits, rounded as IEEE 754 rounds
    # a sum. Powers of two have an even number of steps, so the even number is the even code.
    shift = FLOAT32_MANTISSA - fmt.mantissa_bits
    smallest = (FLOAT32_BIAS + 1 - fmt.bias) << FLOAT32_MANTISSA
    beyond = (math.frexp(fmt.max)[1] + FLOAT32_BIAS) << FLOAT32_MANTISSA  # the power of two above all values
    anchor = magnitude.clamp(smallest, beyond).bitwise_and_(FLOAT32_INF_BITS).add_(shift << FLOAT32_MANTISSA)
    steps = (magnitude.view(torch.float32) + anchor.view(torch.float32)).view(torch.int32).sub_(anchor)
    first = (smallest + (shift << FLOAT32_MANTISSA)) >> shift
    return steps.add_(anchor.bitwise_right_shift_(shift)).sub_(first)


def nearest_toward_zero(magnitude: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`nearest_even` with ties to the grid point nearer to zero. Source: docs/dialects.md#nvfp4."""
    rounded = nearest_even(magnitude, fmt)
    below = _midpoints(fmt, str(magnitude.device))[rounded.clamp(max=fmt.max_code)]
    return rounded - (magnitude.view(torch.float32) == below).int()


def nearest_away(magnitude: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`nearest_even` with ties to the grid point farther from zero. Source: docs/dialects.md#e8m0-scales."""
    rounded = nearest_even(magnitude, fmt)
    midpoints = torch.nn.functional.pad(_midpoints(fmt, str(magnitude.device)), (0, 1), value=torch.nan)
    above = midpoints[(rounded + 1).clamp(max=fmt.max_code + 1)]
    return rounded + (magnitude.view(torch.float32) == above).int()


@lru_cache(maxsize=16)
def _midpoints(fmt: Format, device: str) -> torch.Tensor:
    """The midpoint below each code up to `max_code`, float32; NaN below code 0."""
    points = torch.tensor(fmt.values[: fmt.max_code + 1], dtype=torch.float64)
    middles = (points[1:] + points[:-1]) / 2
    return torch.nn.functional.pad(middles, (1, 0), value=torch.nan).float().to(device)


def nearest_e2m1_within(x: torch.Tensor) -> torch.Tensor:
    """Codes (uint8) of float32 `x`: the nearest point of E2M1, with 1e-6 subtracted from distances to even codes.

    Distances round to float32 before and after the subtraction. Of equal distances the lowest code wins. NaN and
    infinity give the largest code. The sign is kept. Source: fireworks-prequant 0.2.
    """
    magnitude = x.abs()
    least = torch.full_like(magnitude, torch.inf)
    code = torch.full_like(magnitude, E2M1.max_code, dtype=torch.uint8)
    for candidate, value in enumerate(E2M1.values[: E2M1.max_code + 1]):
        distance = (magnitude - value).abs_()
        if candidate % 2 == 0:
            distance = distance.sub_(1e-6)
        nearer = distance < least
        least = torch.where(nearer, distance, least)
        code.masked_fill_(nearer, candidate)
    return code | x.signbit().byte() * E2M1.sign_code


def wrapping_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes (uint8) of float32 `x`, nearest even without saturation: a code of more than 3 bits wraps.

    From 4 on the step is 2, and the exponent and the first mantissa bit make the code: 8 and 10 give code 8, the code
    of −0; 12 and 14 give code 9. The sign bit is OR-ed in. NaN and infinity give an arbitrary code. Source: fouroversix
    1.0.5, whose pseudo-quantization rounds without a clamp before the bits are cut.
    """
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = magnitude.div_(step).round_().mul_(step)
    code = (rounded.view(torch.int32) >> (FLOAT32_MANTISSA - E2M1.mantissa_bits)) - ((FLOAT32_BIAS - E2M1.bias) << 1)
    code = torch.where(rounded < 1, rounded * 2, code)  # 0 and 0.5, which are subnormal in E2M1
    return (code.int() & 0xF).to(torch.uint8) | x.signbit().byte() * E2M1.sign_code


def stochastic(x: torch.Tensor, fmt: Format, random: torch.Tensor) -> torch.Tensor:
    """Float32 `x` rounded to the grid of `fmt` by the random bytes `random` (uint8, the same shape); a new tensor.

    The sign is kept, and NaN stays. Source: docs/numerics.md#stochastic-rounding, steps 1 to 3, the software path of
    Transformer Engine for E2M1.
    """
    # Step 1: the grid step at |v|.
    magnitude = x.abs()
    step = _step(magnitude, fmt)

    # Step 2: t = min(fma(b/256, step, |v|), max). The product is exact, so the sum rounds once.
    t = step.mul_(random.float().mul_(2.0**-8)).add_(magnitude).clamp_(max=fmt.max)

    # Step 3: ⌊t/step(t)⌋·step(t) with the sign of v.
    step = _step(t, fmt)
    return t.div_(step).floor_().mul_(step).copysign_(x)


def _step(magnitude: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Step 1: distance from the grid point at or below float32 `magnitude` to the next point; NaN for NaN."""
    smallest_normal = 2.0 ** (1 - fmt.bias)
    bits = magnitude.clamp(smallest_normal, fmt.max).view(torch.int32).bitwise_and_(FLOAT32_INF_BITS)
    return bits.view(torch.float32).mul_(2.0**-fmt.mantissa_bits)
