"""Quantize: a matrix to codes, block scales and amax, right to the last bit."""

from __future__ import annotations

import torch

from reference.blocks import INPUT_DTYPES, block_amax, pad_columns, slabs, tensor_amax
from reference.encode import encode
from reference.layout import pack
from reference.quantized import Quantized
from reference.recipes import Recipe
from reference.recipes import recipe as find_recipe
from reference.scaling import block_scales, element_factors, tensor_scale


def check_input(x: torch.Tensor) -> None:
    """Raises TypeError or ValueError, with the dtype or shape, where `x` cannot be quantized."""
    if x.dtype not in INPUT_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in INPUT_DTYPES)
        raise TypeError(f"quantize takes {names}, not {str(x.dtype).removeprefix('torch.')}")
    if x.dim() != 2:
        raise ValueError(f"quantize takes a matrix (M, K), not shape {tuple(x.shape)}; reshape it first")


def encode_elements(x: torch.Tensor, scales: torch.Tensor, encode_scale: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Packed element codes of `x` (M, K) under stored block scales (M, ⌈K/16⌉) and S_enc (1,)."""
    block = recipe.block[1]
    columns = x.shape[1]
    factors = element_factors(scales, encode_scale, recipe)
    codes = torch.empty(x.shape[0], -(-columns // 2), dtype=torch.uint8, device=x.device)
    if codes.numel() == 0:
        return codes
    for rows in slabs(x):
        values = pad_columns(x[rows].float(), block)
        scaled = values.view(values.shape[0], -1, block) * factors[rows].unsqueeze(2)
        codes[rows] = pack(encode(scaled.view_as(values), recipe.element)[:, :columns])
    return codes


def quantize(
    x: torch.Tensor,
    recipe: str | Recipe,
    *,
    amax: torch.Tensor | None = None,
    random: torch.Tensor | None = None,
) -> Quantized:
    """Quantize `x` (M, K), float32, bfloat16 or float16, along K.

    Any M and K: a short last block is padded with zeros, which change neither its amax nor its other codes, and
    `Quantized.shape` keeps (M, K). `amax`, float32 (1,), replaces the tensor's own. `random` belongs to recipes that
    round stochastically. Source: numerics.md, "NVFP4, 1×16", steps 1 to 8.

    Raises TypeError for a dtype, ValueError for a shape, an unknown recipe, or random bits that the recipe has no use
    for.
    """
    recipe = find_recipe(recipe)
    check_input(x)
    if random is not None:
        raise ValueError(f"recipe {recipe} rounds {recipe.rounding}; it takes no random bits")
    blocks = block_amax(x, recipe.block[1], propagate_nan=recipe.nan == "propagate")
    if amax is None:
        amax = tensor_amax(blocks)
    elif amax.dtype != torch.float32 or amax.shape != (1,):
        raise ValueError(f"amax is float32 of shape (1,), not {amax.dtype} of shape {tuple(amax.shape)}")
    encode_scale = tensor_scale(amax, recipe)
    scales = block_scales(blocks, encode_scale, recipe)
    codes = encode_elements(x, scales, encode_scale, recipe)
    return Quantized(codes, scales, amax, recipe, (x.shape[0], x.shape[1]), encode_scale)
