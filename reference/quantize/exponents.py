"""Block scales of E8M0, powers of two: codes from block amaxes, and element factors from codes.

The functions work on the bits of float32 numbers. A float32 logarithm is wrong beside powers of two.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from narrowgauge.reference.numbers.rounding import FLOAT32_INF_BITS, FLOAT32_MANTISSA
from narrowgauge.spec.formats import E8M0
from narrowgauge.spec.recipes import Recipe

_ONE = 1 << FLOAT32_MANTISSA
_ABOVE_ROOT = 0x3504F4
"""Mantissa bits of the smallest float32 above √2. From √2 on, log2 is nearer to the power of two above."""


def exponent_codes(amax: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Steps 2 and 3 of MX: E8M0 codes, uint8, of block amaxes, float32 of the same shape, at least 0.

    `dtype`: the dtype of x, to which recipes round amax/max whose `statistics` are not float32; ValueError if None.
    `te`: v = fl(amax·fl(1/max)) rounded up to a power of two. Source: docs/numerics.md#mx, steps 2 and 3. The remaining
    dialects differ in `Recipe.block_scale` and `Recipe.scale_rounding`: docs/dialects.md#e8m0-scales.
    """
    # Step 2: v, and the exponent to subtract from the exponent of v.
    if recipe.smallest_amax:
        amax = amax.clamp(min=recipe.smallest_amax)
    largest = recipe.element.max
    form = recipe.block_scale
    if form == "amax*(1/max)":
        value, drop = amax * (1.0 / largest), 0
    elif form == "amax/max":
        value, drop = amax / torch.full_like(amax, largest), 0
        if recipe.statistics == "input":
            if dtype is None:
                raise ValueError(f"recipe {recipe} rounds to the dtype of x; give dtype")
            value = value.to(dtype).float()
    else:  # amax*2^-emax: the subtraction is exact, the product could be subnormal
        value, drop = amax, math.frexp(largest)[1] - 1
    bits = value.view(torch.int32)

    # Step 3: round up if the mantissa bits are at least `up_from`. A subnormal number has its leading bit in the
    # mantissa field; its code is 0 or 1.
    if recipe.scale_rounding in ("up-log2", "down-log2"):
        thresholds = _log2_thresholds(recipe.scale_rounding, str(bits.device))
        up_from: torch.Tensor | int = thresholds[(bits >> FLOAT32_MANTISSA).clamp(0, E8M0.max_code)]
        below = (bits >= (_ONE + thresholds[0] + 1) // 2).int()
    else:
        up_from = _up_from(recipe)
        below = (bits >= (_ONE + up_from + 1) // 2).int()
    code = torch.where(bits < _ONE, below, (bits + (_ONE - up_from)) >> FLOAT32_MANTISSA)
    code = code.sub_(drop).clamp_(0, E8M0.max_code)
    if recipe.zero_block == "1":
        code.masked_fill_(value == 0, E8M0.bias)
    return code.masked_fill_(bits > FLOAT32_INF_BITS, E8M0.nan_code or 0).to(torch.uint8)


def _up_from(recipe: Recipe) -> int:
    """The smallest mantissa bits that round up to the next power of two: 1 to 2^23, which stands for never."""
    if recipe.scale_rounding == "up":
        return 1
    if recipe.scale_rounding == "as-element":
        return _ONE - (_ONE >> (recipe.element.mantissa_bits + 1))
    if recipe.scale_rounding == "up-from-1.75":
        return 3 * _ONE // 4
    return _ABOVE_ROOT if recipe.scale_rounding == "nearest-log2" else _ONE


@lru_cache(maxsize=8)
def _log2_thresholds(rounding: str, device: str) -> torch.Tensor:
    """`_up_from` of every exponent e, by e + 127, int32 (255,), for a logarithm that is correctly rounded to float32.

    A number 2^e·(1 + m) has the logarithm e, not above, if log2(1 + m) is below half the distance h from e to the next
    float32 number, so `up-log2` goes up from m = 2^(h/2) − 1 on. `down-log2` goes up if the logarithm rounds to e + 1:
    from 1 + m = 2^(1 − h/2) on, h being the distance from e + 1 to the float32 number below.
    """
    thresholds = []
    for exponent in range(-E8M0.bias, E8M0.bias + 1):
        whole, outward = (exponent, exponent > 0) if rounding == "up-log2" else (exponent + 1, exponent + 1 < 0)
        if whole == 0:
            thresholds.append(1 if rounding == "up-log2" else _ONE)
            continue
        fraction, power = math.frexp(abs(whole))
        spacing = 2.0 ** (power - 1 - FLOAT32_MANTISSA - (fraction == 0.5 and not outward))
        mantissa = 2.0 ** (spacing / 2) - 1 if rounding == "up-log2" else 2.0 ** (1 - spacing / 2) - 1
        thresholds.append(math.floor(mantissa * _ONE) + 1)
    return torch.tensor(thresholds, dtype=torch.int32, device=device)


@lru_cache(maxsize=8)
def _factors(device: str) -> torch.Tensor:
    exact = [math.ldexp(1.0, E8M0.bias - code) for code in range(E8M0.max_code + 1)]
    return torch.tensor([*exact, math.nan], dtype=torch.float32, device=device)


def exponent_factors(scales: torch.Tensor) -> torch.Tensor:
    """Step 4 of MX: r = 2^(127 − c) of E8M0 codes c, exact, float32 of the same shape; NaN for c = 255.

    Source: docs/numerics.md#mx, step 4.
    """
    return _factors(str(scales.device)).index_select(0, scales.reshape(-1).int()).view(scales.shape)
