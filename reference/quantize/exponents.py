"""Block scales of E8M0, powers of two: from amaxes to codes, and from codes to what elements are multiplied by.

Everything is done on the bits of float32 numbers, never with a logarithm, which is wrong beside powers of two.
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
"""Mantissa bits of the first float32 above √2, from which on, in log2, the power of two above is nearer."""


def exponent_codes(amax: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Codes of E8M0, uint8 like `amax`, float32 and not negative: by the recipe's `block_scale` and `scale_rounding`.

    `te`: v = fl(amax·fl(1/max)), rounded up to a power of two, which is that of amax/max at every mantissa. Below
    2^-126 the code is 0 up to 2^-127, else 1; infinity gives 254, the largest, and NaN 255. Source:
    docs/numerics.md#mx, and docs/dialects.md#e8m0-scales for the other rules.
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
    up_from = _up_from(recipe)
    # A subnormal number has its leading bit among the mantissa's; below 2^-127, whose bits are half of 2^-126's, is
    # code 0.
    below = (bits >= (_ONE + up_from + 1) // 2).int()
    code = torch.where(bits < _ONE, below, (bits + (_ONE - up_from)) >> FLOAT32_MANTISSA)
    code = code.sub_(drop).clamp_(0, E8M0.max_code)
    return code.masked_fill_(bits > FLOAT32_INF_BITS, E8M0.nan_code or 0).to(torch.uint8)


def _up_from(recipe: Recipe) -> int:
    """The mantissa bits from which on the rule rounds up to the next power of two: 1 to 2^23, which is never."""
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
    """1/scale of codes of E8M0, float32 like `scales`, exact: 2^(127−code), 2^-127 for 254, NaN for 255."""
    return _factors(str(scales.device)).index_select(0, scales.reshape(-1).int()).view(scales.shape)
