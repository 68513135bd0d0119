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


def exponent_codes(amax: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Steps 2 and 3 of MX: E8M0 codes, uint8, of block amaxes, float32 of the same shape, at least 0.

    `te`: v = fl(amax·fl(1/max)) rounded up to a power of two. Source: docs/numerics.md#mx, steps 2 and 3. The remaining
    dialects differ in `Recipe.block_scale` and `Recipe.scale_rounding`: docs/dialects.md#e8m0-scales.
    """
    # Step 2: v, and the exponent to subtract from the exponent of v.
    largest = recipe.element.max
    form = recipe.block_scale
    if form == "amax*(1/max)":
        value, drop = amax * (1.0 / largest), 0
    elif form == "amax/max":
        value, drop = amax / torch.full_like(amax, largest), 0
    else:  # amax*2^-emax: the subtraction is exact, the product could be subnormal
        value, drop = amax, math.frexp(largest)[1] - 1
    bits = value.view(torch.int32)

    # Step 3: round up if the mantissa bits are at least `up_from`. A subnormal number has its leading bit in the
    # mantissa field; its code is 0 or 1.
    up_from = _up_from(recipe)
    below = (bits >= (_ONE + up_from + 1) // 2).int()
    code = torch.where(bits < _ONE, below, (bits + (_ONE - up_from)) >> FLOAT32_MANTISSA)
    code = code.sub_(drop).clamp_(0, E8M0.max_code)
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
def _factors(device: str) -> torch.Tensor:
    exact = [math.ldexp(1.0, E8M0.bias - code) for code in range(E8M0.max_code + 1)]
    return torch.tensor([*exact, math.nan], dtype=torch.float32, device=device)


def exponent_factors(scales: torch.Tensor) -> torch.Tensor:
    """Step 4 of MX: r = 2^(127 − c) of E8M0 codes c, exact, float32 of the same shape; NaN for c = 255.

    Source: docs/numerics.md#mx, step 4.
    """
    return _factors(str(scales.device)).index_select(0, scales.reshape(-1).int()).view(scales.shape)
