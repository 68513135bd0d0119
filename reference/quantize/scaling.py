"""Scales from amaxes, element factors from scales, and scaled elements: steps 2 to 7 of docs/numerics.md#nvfp4.

Every operation rounds to float32. Both operands of a division are tensors: on CUDA, PyTorch turns x / number into
x · (1/number), and a third of the quotients change (docs/dialects.md#oracles-and-their-limits). `tensor` is the tensor
scale, float32 (1,), or (M,) with row scales: enc or dec, by `Recipe.tensor_scale`, or None if the recipe has one level.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from narrowgauge.reference.numbers.blocks import pad_columns
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.rounding import FLOAT32_INF_BITS, FLOAT32_MANTISSA
from narrowgauge.reference.quantize.exponents import exponent_codes, exponent_factors
from narrowgauge.spec.formats import E8M0, FP32
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

FLT_MAX = torch.finfo(torch.float32).max


def divide(number: float, by: torch.Tensor) -> torch.Tensor:
    """fl(number / by), elementwise and correctly rounded on every device."""
    return by.new_full((), number) / by


def tensor_scale(amax: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Step 2: the tensor scale, enc or dec, float32, from `amax`, float32 of the same shape.

    `te`: min(fl(2688/amax), FLT_MAX), and 1 for amax 0 or Inf. FP8 current scaling: min(fl(max/amax), FLT_MAX), and 1
    for amax 0, Inf or NaN; -pow2 rounds the scale down to a power of two. `dtype`: the dtype of x, to which recipes
    round whose `statistics` are not float32. Source: docs/numerics.md#nvfp4, step 2;
    docs/numerics.md#fp8-with-float32-scales, steps 1 to 3; docs/dialects.md#nvfp4.

    Raises ValueError if the recipe has no tensor scale, refuses the amax, or needs a `dtype` that is None.
    """
    if recipe.tensor_limit == "amax>=1e-12":
        amax = amax.clamp(min=1e-12)
    if recipe.smallest_amax:
        amax = amax.clamp(min=recipe.smallest_amax)
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
    """Step 2: `scale` after the limit `Recipe.tensor_limit`."""
    limit = recipe.tensor_limit
    if limit == "1-for-nan":
        return _encode_scale(scale, amax, FLT_MAX, recipe)
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


def _encode_scale(quotient: torch.Tensor, amax: torch.Tensor, largest: float, recipe: Recipe) -> torch.Tensor:
    """FP8, steps 2 and 3: the scale from max/amax: `largest` for an infinite quotient, 1 for amax 0, Inf or NaN."""
    scale = quotient
    if recipe.largest_scale != "none":
        finite = torch.where(quotient.isinf(), largest, quotient)
        scale = torch.where((amax > 0) & amax.isfinite(), finite, 1.0)
    if recipe.scale_rounding == "down":
        powers = scale.view(torch.int32).bitwise_and(FLOAT32_INF_BITS).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, powers)
    return scale


def encode_scales(amax: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None) -> torch.Tensor:
    """FP8, steps 1 to 3: block scales before the inversion, fl(max/amax), float32, from block amaxes of the same shape.

    The scale is 1 for amax 0, Inf or NaN, and the largest number of `dtype`, the dtype of x, for an infinite quotient;
    with `largest_scale` none it is the quotient.
    Source: docs/numerics.md#fp8-with-float32-scales, steps 1 to 3. Raises ValueError if `dtype` is needed and None.
    """
    if recipe.smallest_amax:
        amax = amax.clamp(min=recipe.smallest_amax)
    if recipe.largest_scale == "input" and dtype is None:
        raise ValueError(f"recipe {recipe} has a largest scale of the dtype of x; give dtype")
    largest = torch.finfo(dtype).max if recipe.largest_scale == "input" and dtype is not None else FLT_MAX
    return _encode_scale(divide(recipe.element.max, amax), amax, largest, recipe)


def block_scales(
    amax: torch.Tensor, tensor: torch.Tensor | None, recipe: Recipe, dtype: torch.dtype | None = None, moved: int = 0
) -> torch.Tensor:
    """Steps 3 to 5: stored decode scales, uint8 codes of `recipe.scale` or float32, from block amaxes.

    `amax`: float32 (M, ⌈K/block⌉), or (⌈M/rows⌉, ⌈K/block⌉) for float32 scales; ignored if the tensor has one scale.
    `moved`: by how many ulps 1/6 of a scale of E4M3 is off, 1, 0 or −1.
    `dtype`, errors: see `tensor_scale`. Source: docs/numerics.md#nvfp4, steps 3 to 5; docs/numerics.md#mx, steps 2 and
    3; docs/numerics.md#fp8-with-float32-scales, step 5; docs/dialects.md#nvfp4.
    """
    if recipe.scale is E8M0:
        return exponent_codes(amax, recipe, dtype)
    if recipe.scale is FP32:
        if tensor is not None:
            return tensor.unsqueeze(1) if recipe.block_scale == "given" else divide(1.0, tensor.unsqueeze(1))
        if recipe.block_scale == "1/(max/amax)":
            return divide(1.0, encode_scales(amax, recipe, dtype))
        return _decode_scales(amax, recipe, dtype)
    scale = unrounded_scales(amax, tensor, recipe, dtype, moved)
    stored = encode(scale, recipe.scale, ties="zero" if recipe.scale_rounding == "nearest-toward-zero" else "even")
    if recipe.zero_block == "stored-2^-3":
        eighth = encode(torch.full_like(scale, 2.0**-3), recipe.scale)
        stored = torch.where(stored == 0, eighth, stored)
    return stored


def _decode_scales(amax: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None) -> torch.Tensor:
    """FP8 dialects: amax/max, or amax·fl(1/max); rounded up to a power of two if `scale_rounding` is up.

    Source: docs/numerics.md#fp8-with-a-decode-scale.
    """
    if recipe.smallest_amax:
        amax = amax.clamp(min=recipe.smallest_amax)
    largest = recipe.element.max
    scale = amax / torch.full_like(amax, largest) if recipe.block_scale == "amax/max" else amax * (1.0 / largest)
    if recipe.statistics == "input":
        scale = _rounded(scale, recipe, dtype)
    if recipe.zero_block == "eps":
        scale = torch.where(scale == 0, _eps(recipe, dtype), scale)
    return _power_above(scale) if recipe.scale_rounding == "up" else scale


def _power_above(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two not below `scale`, float32, from 2^-126 to 2^127, which infinity and NaN give too."""
    bits = scale.abs().view(torch.int32).clamp(max=FLOAT32_INF_BITS).add_((1 << FLOAT32_MANTISSA) - 1)
    return bits.bitwise_and_(FLOAT32_INF_BITS).view(torch.float32).clamp(2.0**-126, 2.0**127)


def _eps(recipe: Recipe, dtype: torch.dtype | None) -> float:
    """The distance from 1 to the next number of the dtype of x."""
    if dtype is None:
        raise ValueError(f"recipe {recipe} has the epsilon of the dtype of x; give dtype")
    return torch.finfo(dtype).eps


def unrounded_scales(
    amax: torch.Tensor, tensor: torch.Tensor | None, recipe: Recipe, dtype: torch.dtype | None = None, moved: int = 0
) -> torch.Tensor:
    """Steps 3 and 4: the float32 scales d that `block_scales` rounds. Source: docs/numerics.md#nvfp4."""
    largest = recipe.element.max
    reciprocal = float(np.float32(1.0 / largest) + moved * np.spacing(np.float32(1.0 / largest)))
    form = recipe.block_scale
    if tensor is None:
        scale = _sixth(amax, recipe, dtype, reciprocal)
    else:
        tensor = tensor.unsqueeze(1)
        if form == "amax*(enc*(1/6))":
            scale = amax * (tensor * reciprocal)
        elif form == "(amax*enc)*(1/6)":
            scale = amax * tensor * reciprocal
        elif form == "(amax*enc)/6":
            scale = amax * tensor / torch.full_like(amax, largest)
        elif form == "amax/(6*dec)":
            scale = amax / (tensor * largest)
        elif form == "(amax*(1/dec))*(1/6)":
            scale = amax * divide(1.0, tensor) * reciprocal
        elif form in ("(amax/6)/dec", "(amax*(1/6))/dec"):
            scale = _sixth(amax, recipe, dtype, reciprocal) / tensor
        else:
            scale = _sixth(amax, recipe, dtype, reciprocal) * tensor
    if recipe.zero_block == "1":
        scale = torch.where(scale == 0, 1.0, scale)
    elif recipe.zero_block == "1-below-sqrt(tiny)":
        tiny = torch.finfo(torch.float32 if recipe.statistics == "float32" or dtype is None else dtype).tiny
        scale = torch.where(scale < tiny**0.5, 1.0, scale)
    if recipe.smallest_scale != "0":
        scale = scale.clamp(min=2.0 ** int(recipe.smallest_scale.removeprefix("2^")))
    return scale.clamp(max=FLT_MAX)


def _sixth(amax: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None, reciprocal: float) -> torch.Tensor:
    """amax/6 in the form of `Recipe.block_scale`, rounded to the dtype of `Recipe.statistics`."""
    if "amax*(1/6)" in recipe.block_scale:
        sixth = amax * reciprocal
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
    scales: torch.Tensor,
    tensor: torch.Tensor | None,
    recipe: Recipe,
    dtype: torch.dtype | None = None,
    amax: torch.Tensor | None = None,
) -> torch.Tensor:
    """Step 6: the factor (divisor if `recipe.divides`) of the elements of each block, float32, the shape of `scales`.

    `te`: min(fl(1/fl(s·fl(1/enc))), FLT_MAX), which is FLT_MAX for s = 0 and differs from fl(enc/s). MX: 1/s. One scale
    for the tensor: `tensor`. FP8 blocks: the encode scale of the block amax if `scales` holds the inverse of this
    encode scale; else, and without `amax`, fl(1/s), because several encode scales have the same inverse. `dtype`,
    errors: see `tensor_scale`. Source: docs/numerics.md#nvfp4, step 6; docs/numerics.md#mx, step 4;
    docs/numerics.md#fp8-with-float32-scales; docs/dialects.md#nvfp4.
    """
    form = recipe.element_scale
    if form == "x*enc":
        assert tensor is not None
        return tensor.unsqueeze(1)
    if form == "x*(max/amax)":
        inverse = divide(1.0, scales)
        if amax is None:
            return inverse
        if recipe.block_scale != "1/(max/amax)":
            powers = recipe.scale_rounding == "up"
            return inverse if powers else divide(recipe.element.max, amax.clamp(min=recipe.smallest_amax))
        own = encode_scales(amax, recipe, dtype)
        return torch.where(divide(1.0, own) == scales, own, inverse)
    if recipe.scale is E8M0 and form == "x*(1/s)":
        return exponent_factors(scales)
    stored = scales if recipe.scale is FP32 else decode(scales, recipe.scale)
    if form == "R(x/s)*enc":
        return _rounded(stored, recipe, dtype)
    if recipe.block_scale == "given":
        tensor = None
    if form == "x*min(1/(s*(1/enc)),FLT_MAX)":
        assert tensor is not None
        return divide(1.0, stored * divide(1.0, tensor).unsqueeze(1)).clamp(max=FLT_MAX)
    if tensor is None:
        factor = divide(1.0, stored) if form == "x*(1/s)" else stored
    else:
        factor = _with_tensor(stored, tensor.unsqueeze(1), recipe, dtype)
    if recipe.zero_scale == "zeros" and not recipe.divides:
        return torch.where(stored == 0, 0.0, factor)
    if recipe.zero_scale in ("1", "2^-9", "2^-23"):
        number = 1.0 if recipe.zero_scale == "1" else 2.0 ** int(recipe.zero_scale.removeprefix("2^"))
        return torch.where(factor > 0, factor, number)
    return factor


def _with_tensor(stored: torch.Tensor, tensor: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None) -> torch.Tensor:
    """Step 6 with a tensor scale, before the rule `Recipe.zero_scale`."""
    form = recipe.element_scale
    if form == "x*r(s*r(enc))":
        return _reciprocal(stored * _reciprocal(tensor))
    if form == "x*(r(s)*enc)":
        return _reciprocal(stored) * tensor
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
    """Step 7, scaling: the scaled elements of `x` (M, K), float32 (M, K), which `element_codes` rounds.

    `factors`: `element_factors` of each row, (M, ⌈K/block⌉) or (M, 1). Source: docs/numerics.md#nvfp4, step 7;
    docs/numerics.md#mx, step 5; docs/numerics.md#fp8-with-float32-scales, step 4; docs/dialects.md#nvfp4.
    """
    values = x.float()
    if tensor is not None and recipe.element_scale.startswith("(x*"):
        values = values * (tensor if "enc" in recipe.element_scale else divide(1.0, tensor)).view(-1, 1)
    scaled = over_elements(values, factors, recipe, torch.div if recipe.divides else torch.mul)
    if recipe.divides and recipe.zero_scale == "saturate":
        scaled = torch.where(values == 0, values, scaled)
    if recipe.divides and recipe.zero_scale == "zeros":
        dead = over_elements(torch.ones_like(values), factors, recipe, torch.mul) == 0
        scaled = scaled.masked_fill(dead, 0.0)
    if recipe.element_scale.startswith("R("):
        scaled = _rounded(scaled, recipe, x.dtype)
    if tensor is not None and recipe.element_scale == "R(x/s)*enc":
        scaled = scaled * tensor.view(-1, 1)
    return scaled


def per_row(numbers: torch.Tensor, recipe: Recipe, rows: int) -> torch.Tensor:
    """Numbers of blocks, in the shape of stored scales, for each of `rows` rows: (M, ⌈K/block⌉), or (M, 1)."""
    if recipe.whole:
        return numbers.expand(rows, 1)
    return numbers.repeat_interleave(recipe.stored_rows, 0)[:rows] if recipe.stored_rows > 1 else numbers


def over_elements(
    values: torch.Tensor,
    numbers: torch.Tensor,
    recipe: Recipe,
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`combine(value, number)` for each element of `values` (M, K); `numbers` are the numbers of blocks `per_row`."""
    if recipe.spans_k:
        return combine(values, numbers)
    width, columns = recipe.block[1], values.shape[1]
    blocks = pad_columns(values, width).view(values.shape[0], -(-columns // width), width)
    return combine(blocks, numbers.unsqueeze(2)).view(blocks.shape[0], blocks.shape[1] * width)[:, :columns]


def decode_factors(scales: torch.Tensor, q: Quantized) -> torch.Tensor:
    """The factor f of the codes of each block of `q`, float32; `scales`: the linear scales of `q`, of the same shape.

    Source: docs/numerics.md#nvfp4, Dequantize; `Recipe.decode`.
    """
    stored = scales if q.recipe.scale is FP32 else decode(scales, q.recipe.scale)
    if q.recipe.decode == "s":
        return stored
    if q.recipe.decode == "(s*amax)*(1/max)":
        return stored * q.required_amax.unsqueeze(1) * (1.0 / q.recipe.max_product)
    tensor = used_tensor_scale(q).unsqueeze(1)
    return torch.where(tensor == 0, 0.0, stored / tensor) if q.recipe.decode == "s/enc" else stored * tensor


def used_tensor_scale(q: Quantized) -> torch.Tensor:
    """The tensor scale of `q`: `q.tensor_scale`, or if it is None the scale of `q.amax`. Raises as `tensor_scale`."""
    if q.tensor_scale is not None:
        return q.tensor_scale
    return tensor_scale(q.required_amax, q.recipe)


def _reciprocal(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, 0.0, divide(1.0, values))


def _rounded(values: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None) -> torch.Tensor:
    """R(values): `values` rounded to the dtype of x."""
    if dtype is None:
        raise ValueError(f"recipe {recipe} rounds to the dtype of x; give dtype")
    return values.to(dtype).float()
