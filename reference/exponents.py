"""Block scales of E8M0, powers of two: from amaxes to codes, and from codes to what elements are multiplied by.

Everything is done on the bits of float32 numbers, never with a logarithm, which is wrong beside powers of two.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from reference.formats import E8M0
from reference.recipes import Recipe
from reference.rounding import FLOAT32_INF_BITS, FLOAT32_MANTISSA

_MANTISSA_BITS = (1 << FLOAT32_MANTISSA) - 1
_HALF = 1 << (FLOAT32_MANTISSA - 1)
# In log2 the power of two above is nearer from √2 on: the mantissa of the first float32 above it, and, among subnormal
# numbers, the first above 2^-126·√½, where code 1 is nearer.
_ABOVE_ROOT = 0x3504F4
_SUBNORMAL_ABOVE_ROOT = 0x5A827A


def exponent_codes(amax: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Codes of E8M0, uint8 like `amax`, float32 and not negative: by the recipe's `block_scale` and `scale_rounding`.

    `te`: v = fl(amax·fl(1/max)), rounded up to a power of two, which is that of amax/max at every mantissa. Below
    2^-126 the code is 0 up to 2^-127, else 1; infinity gives 254, the largest, and NaN 255. Source: numerics.md,
    "MXFP8", and dialects.md for the other rules.
    """
    largest = recipe.element.max
    form = recipe.block_scale
    if form == "amax*(1/max)":
        value, drop = amax * (1.0 / largest), 0
    elif form == "amax/max":
        value, drop = amax / torch.full_like(amax, largest), 0
    else:  # amax*2^-emax, on the exponent: the product could be subnormal
        value, drop = amax, math.frexp(largest)[1] - 1
    bits = value.view(torch.int32)
    code = (bits + _carry(recipe)) >> FLOAT32_MANTISSA
    if recipe.scale_rounding == "up":
        # A subnormal number is at most 2^-127, which is code 0, up to 0.5·2^-126.
        code = torch.where(bits <= _HALF, 0, code)
    elif recipe.scale_rounding == "nearest-log2":
        code = torch.where(bits < 1 << FLOAT32_MANTISSA, (bits >= _SUBNORMAL_ABOVE_ROOT).int(), code)
    code = code.sub_(drop).clamp_(0, E8M0.max_code)
    return code.masked_fill_(bits > FLOAT32_INF_BITS, E8M0.nan_code or 0).to(torch.uint8)


def _carry(recipe: Recipe) -> int:
    """What added to the bits of a float32 number carries into its exponent exactly where the rule rounds up."""
    if recipe.scale_rounding == "up":
        return _MANTISSA_BITS
    if recipe.scale_rounding == "as-element":
        return 1 << (FLOAT32_MANTISSA - recipe.element.mantissa_bits - 1)
    if recipe.scale_rounding == "up-from-1.75":
        return 1 << (FLOAT32_MANTISSA - 2)
    if recipe.scale_rounding == "nearest-log2":
        return _MANTISSA_BITS + 1 - _ABOVE_ROOT
    return 0


@lru_cache(maxsize=8)
def _factors(device: str) -> torch.Tensor:
    exact = [math.ldexp(1.0, E8M0.bias - code) for code in range(E8M0.max_code + 1)]
    return torch.tensor([*exact, math.nan], dtype=torch.float32, device=device)


def exponent_factors(scales: torch.Tensor) -> torch.Tensor:
    """1/scale of codes of E8M0, float32 like `scales`, exact: 2^(127−code), 2^-127 for 254, NaN for 255."""
    return _factors(str(scales.device)).index_select(0, scales.reshape(-1).int()).view(scales.shape)
