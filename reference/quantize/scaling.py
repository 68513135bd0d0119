"""Scales: from amaxes to what is stored, and from elements to what is rounded to codes.

Every operation rounds to float32. Divisions have a tensor on both sides: PyTorch turns x / number into x · (1/number)
on CUDA, a third of whose values differ (docs/dialects.md#oracles-and-their-limits). The tensor's scale is (1,), or (M,)
where each row has its own: enc or dec, as the recipe's `tensor_scale` says, and None where it has none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from narrowgauge.reference.numbers.blocks import pad_columns
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.rounding import FLOAT32_INF_BITS
from narrowgauge.reference.quantize.exponents import exponent_codes, exponent_factors
from narrowgauge.spec.formats import E8M0, FP32
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

FLT_MAX = torch.finfo(torch.float32).max


def divide(number: float, by: torch.Tensor) -> torch.Tensor:
    """fl(number / by), elementwise and correctly rounded on every device."""
    return by.new_full((), number) / by


def tensor_scale(amax: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor's scale, enc or dec, float32 like `amax`. `te`: fl(2688/amax) up to FLT_MAX; 1 for amax 0 or infinite.

    FP8 current scaling: fl(max/amax) up to FLT_MAX, 1 for amax 0, infinite or NaN, perhaps cut to a power of two.

    `dtype` is that of x, which recipes with other `statistics` than float32 round to. Raises ValueError where the
    recipe has no tensor scale, where it refuses an amax, or where it rounds to a dtype that is not given.
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
    """`scale` after the recipe's `tensor_limit`."""
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
    """FP8's scale from max/amax: `largest` where that is infinite, 1 where `amax` is 0, infinite or NaN; rounded."""
    finite = torch.where(quotient.isinf(), largest, quotient)
    scale = torch.where((amax > 0) & amax.isfinite(), finite, 1.0)
    if recipe.scale_rounding == "down":
        scale = scale.view(torch.int32).bitwise_and(FLOAT32_INF_BITS).view(torch.float32)
    return scale


def encode_scales(amax: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None) -> torch.Tensor:
    """FP8's block scales before they are inverted: fl(max/amax), float32 like `amax`, the blocks' amaxes.

    1 where amax is 0, infinite or NaN; where the quotient is infinite, the largest number of `dtype`, that of x.
    Source: docs/numerics.md#fp8-with-float32-scales. Raises ValueError where it needs `dtype` and is not given it.
    """
    if recipe.smallest_amax:
        amax = amax.clamp(min=recipe.smallest_amax)
    if recipe.largest_scale == "input" and dtype is None:
        raise ValueError(f"recipe {recipe} has a largest scale of the dtype of x; give dtype")
    largest = FLT_MAX if recipe.largest_scale == "float32" or dtype is None else torch.finfo(dtype).max
    return _encode_scale(divide(recipe.element.max, amax), amax, largest, recipe)


def block_scales(
    amax: torch.Tensor, tensor: torch.Tensor | None, recipe: Recipe, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Stored decode scales from block amaxes and the tensor's scale: uint8 codes of `recipe.scale`, or float32.

    `amax`: (M, ⌈K/block⌉), of float32 scales (⌈M/rows⌉, ⌈K/block⌉); not looked at where the tensor has one scale.
    `dtype` and what is raised: as in `tensor_scale`. Source: docs/numerics.md#nvfp4, steps 3 to 5 (`te`),
    docs/numerics.md#mx, docs/numerics.md#fp8-with-float32-scales; docs/dialects.md#nvfp4 for the other dialects.
    """
    if recipe.scale is E8M0:
        return exponent_codes(amax, recipe)
    if recipe.scale is FP32:
        return divide(1.0, encode_scales(amax, recipe, dtype) if tensor is None else tensor.unsqueeze(1))
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
    scales: torch.Tensor,
    tensor: torch.Tensor | None,
    recipe: Recipe,
    dtype: torch.dtype | None = None,
    amax: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each block's elements are multiplied by, or divided by where `recipe.divides`, float32 like `scales`.

    `te`: min(fl(1/fl(s·fl(1/enc))), FLT_MAX), FLT_MAX for a scale of 0; not the same as fl(enc/s). MX: 1/s. One scale
    for the tensor: that scale. FP8 blocks: the encode scale of the block's `amax` where `scales` holds its inverse; of
    another scale, and without `amax`, fl(1/s), since an inverse does not tell what it is the inverse of. Source:
    docs/numerics.md#nvfp4, step 6, docs/numerics.md#mx, docs/dialects.md#nvfp4. `dtype` and what is raised: as in
    `tensor_scale`.
    """
    form = recipe.element_scale
    if form == "x*enc":
        assert tensor is not None
        return tensor.unsqueeze(1)
    if form == "x*(max/amax)":
        inverse = divide(1.0, scales)
        if amax is None:
            return inverse
        own = encode_scales(amax, recipe, dtype)
        return torch.where(divide(1.0, own) == scales, own, inverse)
    if recipe.scale is E8M0 and form == "x*(1/s)":
        return exponent_factors(scales)
    stored = decode(scales, recipe.scale)
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

    `factors` (M, ⌈K/block⌉) are the `element_factors`, `tensor` the tensor's scale. Source:
    docs/numerics.md#nvfp4, step 7, and docs/dialects.md#nvfp4.
    """
    values = x.float()
    if tensor is not None and recipe.element_scale.startswith("(x*"):
        values = values * (tensor if "enc" in recipe.element_scale else divide(1.0, tensor)).view(-1, 1)
    scaled = over_elements(values, factors, recipe, torch.div if recipe.divides else torch.mul)
    if recipe.divides and recipe.zero_scale == "saturate":
        scaled = torch.where(values == 0, values, scaled)
    return _rounded(scaled, recipe, x.dtype) if recipe.element_scale.startswith("R(") else scaled


def per_row(numbers: torch.Tensor, recipe: Recipe, rows: int) -> torch.Tensor:
    """Numbers of blocks, like stored scales, as those of `rows` rows: (M, ⌈K/block⌉), (M, 1) of a whole tensor."""
    if recipe.whole:
        return numbers.expand(rows, 1)
    return numbers.repeat_interleave(recipe.stored_rows, 0)[:rows] if recipe.stored_rows > 1 else numbers


def over_elements(
    values: torch.Tensor,
    numbers: torch.Tensor,
    recipe: Recipe,
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`combine(value, number)` of every element of `values` (M, K) and the number of its block, `numbers` `per_row`."""
    if recipe.whole:
        return combine(values, numbers)
    width, columns = recipe.block[1], values.shape[1]
    blocks = pad_columns(values, width).view(values.shape[0], -(-columns // width), width)
    return combine(blocks, numbers.unsqueeze(2)).view(blocks.shape[0], blocks.shape[1] * width)[:, :columns]


def decode_factors(scales: torch.Tensor, q: Quantized) -> torch.Tensor:
    """What the codes of `q` are multiplied by, float32 like `scales`, which are its linear ones."""
    stored = scales if q.recipe.scale is FP32 else decode(scales, q.recipe.scale)
    if q.recipe.decode == "s":
        return stored
    if q.recipe.decode == "(s*amax)*(1/max)":
        return stored * q.required_amax.unsqueeze(1) * (1.0 / q.recipe.max_product)
    tensor = used_tensor_scale(q).unsqueeze(1)
    return torch.where(tensor == 0, 0.0, stored / tensor) if q.recipe.decode == "s/enc" else stored * tensor


def used_tensor_scale(q: Quantized) -> torch.Tensor:
    """The tensor's scale that `q` was quantized with: as it shows it, else from its amax. Raises as `tensor_scale`."""
    if q.tensor_scale is not None:
        return q.tensor_scale
    return tensor_scale(q.required_amax, q.recipe)


def _reciprocal(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, 0.0, divide(1.0, values))


def _rounded(values: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None) -> torch.Tensor:
    """R(values): rounded to the dtype of x."""
    if dtype is None:
        raise ValueError(f"recipe {recipe} rounds to the dtype of x; give dtype")
    return values.to(dtype).float()
