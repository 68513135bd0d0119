"""Scales of NVFP4: from amaxes to stored bytes and to the factor that elements are multiplied by.

Every operation rounds to float32. Divisions have a tensor on both sides: PyTorch turns x / number into x · (1/number)
on CUDA, a third of whose values differ (dialects.md). The encode factor is (1,), or (M,) where each row has its own.
"""

from __future__ import annotations

import torch

from reference.decode import decode
from reference.encode import encode
from reference.recipes import Recipe

FLT_MAX = torch.finfo(torch.float32).max


def divide(number: float, by: torch.Tensor) -> torch.Tensor:
    """fl(number / by), elementwise and correctly rounded on every device."""
    return torch.full_like(by, number) / by


def tensor_scale(amax: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """S_enc, the encode factor, float32 like `amax`: fl(2688/amax) up to FLT_MAX; 1 where amax is 0 or infinite."""
    scale = divide(recipe.max_product, amax).clamp(max=FLT_MAX)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def block_scales(amax: torch.Tensor, encode_scale: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Stored decode scales, uint8 codes of `recipe.scale`, from block amaxes (M, ⌈K/16⌉) and S_enc.

    Source: numerics.md, NVFP4 steps 3 to 5 (`te`) and its table of dialects (`te-2.8`).
    """
    return encode(unrounded_scales(amax, encode_scale, recipe), recipe.scale)


def unrounded_scales(amax: torch.Tensor, encode_scale: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The float32 numbers that `block_scales` rounds."""
    largest = recipe.element.max
    encode_scale = encode_scale.unsqueeze(1)
    if recipe.block_scale == "amax*(enc*(1/6))":
        scale = amax * (encode_scale * (1.0 / largest))
    else:
        scale = amax / torch.full_like(amax, largest) * encode_scale
    return scale.clamp(max=FLT_MAX)


def element_factors(scales: torch.Tensor, encode_scale: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """What each block's elements are multiplied by before rounding, float32, the shape of `scales`.

    min(fl(1/fl(s·fl(1/S_enc))), FLT_MAX): FLT_MAX for a scale of 0. Not the same as fl(S_enc/s). Source: numerics.md,
    NVFP4 step 6.
    """
    decoded = decode(scales, recipe.scale) * divide(1.0, encode_scale).unsqueeze(1)
    return divide(1.0, decoded).clamp(max=FLT_MAX)
