"""Scales of NVFP4: from amaxes to stored bytes, and from elements to what is rounded to codes.

Every operation rounds to float32. Divisions have a tensor on both sides: PyTorch turns x / number into x · (1/number)
on CUDA, a third of whose values differ (dialects.md). The tensor's scale is (1,), or (M,) where each row has its own:
enc or dec, as the recipe's `tensor_scale` says, and None where it has none.
"""

from __future__ import annotations

import torch

from reference.blocks import pad_columns
from reference.decode import decode
from reference.encode import encode
from reference.quantized import Quantized
from reference.recipes import Recipe

FLT_MAX = torch.finfo(torch.float32).max


def divide(number: float, by: torch.Tensor) -> torch.Tensor:
    """fl(number / by), elementwise and correctly rounded on every device."""
    return torch.full_like(by, number) / by


def tensor_scale(amax: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor's scale, enc or dec, float32 like `amax`. `te`: fl(2688/amax) up to FLT_MAX; 1 for amax 0 or infinite.

    `dtype` is that of x, which recipes with other `statistics` than float32 round to. Raises ValueError where the
    recipe has no tensor scale, where it refuses an amax, or where it rounds to a dtype that is not given.
    """
    if recipe.tensor_limit == "amax>=1e-12":
        amax = amax.clamp(min=1e-12)
    if recipe.tensor_scale == "max/amax":
        scale = divide(recipe.max_product, amax)
    elif recipe.tensor_scale == "(1/amax)*max":
        reciprocal = divide(1.0, amax)
        if recipe.statistics == "input":
            reciprocal = _rounded(reciprocal, recipe, dtype)
        scale = reciprocal * recipe.max_product
    elif recipe.tensor_scale == "amax/max":
        scale = amax / torch.full_like(amax, recipe.max_product)
    else:
        raise ValueError(f"recipe {recipe} has no tensor scale")
    if recipe.statistics == "input":
        scale = _rounded(scale, recipe, dtype)
    return _limited(scale, amax, recipe)


def _limited(scale: torch.Tensor, amax: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """`scale` after the recipe's `tensor_limit`."""
    limit = recipe.tensor_limit
    if limit == "finite":
        scale = scale.clamp(max=FLT_MAX)
        return torch.where((amax == 0) | (scale == 0), 1.0, scale)
    if limit == "0-for-0":
        return torch.where(amax == 0, 0.0, scale)
    if limit == "1":
        return torch.where(scale.isfinite(), scale, 1.0)
    if limit == "2^-23":
        return torch.where(scale == 0, 2.0**-23, scale)
    if limit == "refuse":
        bad = (scale == 0) | ~scale.isfinite()
        if bool(bad.any()):
            raise ValueError(
                f"recipe {recipe} has no tensor scale for amax {float(amax[bad][0])}: {recipe.tensor_scale} is "
                f"{float(scale[bad][0])}"
            )
    return scale


def block_scales(
    amax: torch.Tensor, tensor: torch.Tensor | None, recipe: Recipe, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Stored decode scales, uint8 codes of `recipe.scale`, from block amaxes (M, ⌈K/16⌉) and the tensor's scale.

    `dtype` and what is raised: as in `tensor_scale`. Source: numerics.md, NVFP4 steps 3 to 5 (`te`) and its table of
    dialects (`te-2.8`); dialects.md for the rest.
    """
    scale = unrounded_scales(amax, tensor, recipe, dtype)
    stored = encode(scale, recipe.scale, ties="zero" if recipe.scale_rounding == "nearest-toward-zero" else "even")
    if recipe.zero_block == "stored-2^-3":
        eighth = encode(torch.full_like(scale, 2.0**-3), recipe.scale)
        stored = torch.where(stored == 0, eighth, stored)
    return stored


def unrounded_scales(
    amax: torch.Tensor, tensor: torch.Tensor | None, recipe: Recipe, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The float32 numbers that `block_scales` rounds."""
    largest = recipe.element.max
    form = recipe.block_scale
    if tensor is None:
        scale = _sixth(amax, recipe, dtype)
    else:
        tensor = tensor.unsqueeze(1)
        if form == "amax*(enc*(1/6))":
            scale = amax * (tensor * (1.0 / largest))
        elif form == "(amax*enc)/6":
            scale = amax * tensor / torch.full_like(amax, largest)
        elif form == "amax/(6*dec)":
            scale = amax / (tensor * largest)
        elif form == "(amax*(1/dec))*(1/6)":
            scale = amax * divide(1.0, tensor) * (1.0 / largest)
        elif form == "(amax/6)/dec":
            scale = _sixth(amax, recipe, dtype) / tensor
        else:
            scale = _sixth(amax, recipe, dtype) * tensor
    if recipe.zero_block == "1":
        scale = torch.where(scale == 0, 1.0, scale)
    elif recipe.zero_block == "1-below-sqrt(tiny)":
        tiny = torch.finfo(torch.float32 if recipe.statistics == "float32" or dtype is None else dtype).tiny
        scale = torch.where(scale < tiny**0.5, 1.0, scale)
    if recipe.smallest_scale != "0":
        scale = scale.clamp(min=2.0 ** int(recipe.smallest_scale.removeprefix("2^")))
    return scale.clamp(max=FLT_MAX)


def _sixth(amax: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None) -> torch.Tensor:
    """amax/6 in the form and the dtype that the recipe takes it in."""
    if "amax*(1/6)" in recipe.block_scale:
        sixth = amax * (1.0 / recipe.element.max)
    elif "2*amax/12" in recipe.block_scale:
        twice = amax * 2.0
        if recipe.statistics != "float32":
            twice = _rounded(twice, recipe, dtype)
        sixth = twice / torch.full_like(amax, 2.0 * recipe.element.max)
    else:
        sixth = amax / torch.full_like(amax, recipe.element.max)
    if recipe.statistics != "float32":
        sixth = _rounded(sixth, recipe, dtype)
    return torch.where(sixth == 0, 2.0**-23, sixth) if recipe.zero_block == "amax/6=2^-23" else sixth


def element_factors(
    scales: torch.Tensor, tensor: torch.Tensor | None, recipe: Recipe, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """What each block's elements are multiplied by, or divided by where `recipe.divides`, float32 like `scales`.

    `te`: min(fl(1/fl(s·fl(1/enc))), FLT_MAX), FLT_MAX for a scale of 0; not the same as fl(enc/s). Source: numerics.md,
    NVFP4 step 6, and dialects.md. `dtype` and what is raised: as in `tensor_scale`.
    """
    stored = decode(scales, recipe.scale)
    form = recipe.element_scale
    if form == "x*min(1/(s*(1/enc)),FLT_MAX)":
        assert tensor is not None
        return divide(1.0, stored * divide(1.0, tensor).unsqueeze(1)).clamp(max=FLT_MAX)
    factor = stored if tensor is None else _with_tensor(stored, tensor.unsqueeze(1), recipe, dtype)
    if recipe.zero_scale == "zeros":
        return torch.where(stored == 0, 0.0, factor)
    if recipe.zero_scale in ("1", "2^-9", "2^-23"):
        number = 1.0 if recipe.zero_scale == "1" else 2.0 ** int(recipe.zero_scale.removeprefix("2^"))
        return torch.where(factor > 0, factor, number)
    return factor


def _with_tensor(stored: torch.Tensor, tensor: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None) -> torch.Tensor:
    """`element_factors` of two levels before the rule for a scale of 0."""
    form = recipe.element_scale
    if form == "x*r(s*r(enc))":
        return _reciprocal(stored * _reciprocal(tensor))
    if form == "x*(1/(s*(1/enc)))":
        return divide(1.0, stored * divide(1.0, tensor))
    if form == "x*((1/dec)/s)":
        return divide(1.0, tensor) / stored
    if form == "x/(s*dec)":
        return stored * tensor
    if form == "x/(s/enc)":
        return stored / tensor
    if form == "R(x/R(s*(1/enc)))":
        return _rounded(stored * divide(1.0, tensor), recipe, dtype)
    return divide(1.0, stored) if form.endswith("*(1/s)") else stored


def scale_elements(x: torch.Tensor, factors: torch.Tensor, tensor: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
    """What is rounded to the codes of `x` (M, K): float32 (M, K).

    `factors` (M, ⌈K/16⌉) are the `element_factors`, `tensor` the tensor's scale. Source: numerics.md, NVFP4 step 7, and
    dialects.md.
    """
    width = recipe.block[1]
    values = pad_columns(x.float(), width)
    values = values.view(values.shape[0], values.shape[1] // width, width)
    factors = factors.unsqueeze(2)
    if tensor is not None and recipe.element_scale.startswith("(x*"):
        values = values * (tensor if "enc" in recipe.element_scale else divide(1.0, tensor)).view(-1, 1, 1)
    if not recipe.divides:
        scaled = values * factors
    elif recipe.zero_scale == "saturate":
        scaled = torch.where(values == 0, values, values / factors)
    else:
        scaled = values / factors
    if recipe.element_scale.startswith("R("):
        scaled = _rounded(scaled, recipe, x.dtype)
    return scaled.view(scaled.shape[0], scaled.shape[1] * width)[:, : x.shape[1]]


def decode_factors(scales: torch.Tensor, q: Quantized) -> torch.Tensor:
    """What the codes of `q` are multiplied by, float32 (M, ⌈K/16⌉), `scales` being its linear ones."""
    stored = decode(scales, q.recipe.scale)
    if q.recipe.decode == "s":
        return stored
    if q.recipe.decode == "(s*amax)*(1/max)":
        assert q.amax is not None
        return stored * q.amax.unsqueeze(1) * (1.0 / q.recipe.max_product)
    tensor = used_tensor_scale(q).unsqueeze(1)
    return torch.where(tensor == 0, 0.0, stored / tensor) if q.recipe.decode == "s/enc" else stored * tensor


def used_tensor_scale(q: Quantized) -> torch.Tensor:
    """The tensor's scale that `q` was quantized with: as it shows it, else from its amax. Raises as `tensor_scale`."""
    if q.tensor_scale is not None:
        return q.tensor_scale
    assert q.amax is not None
    return tensor_scale(q.amax, q.recipe)


def _reciprocal(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, 0.0, divide(1.0, values))


def _rounded(values: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None) -> torch.Tensor:
    """R(values): rounded to the dtype of x."""
    if dtype is None:
        raise ValueError(f"recipe {recipe} rounds to the dtype of x; give dtype")
    return values.to(dtype).float()
