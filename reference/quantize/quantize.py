"""`quantize`, `quantize_both` and `quantize_grouped`: argument checks, orientations and sections.

The numbers are made by `quantize_matrix` in `steps.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from narrowgauge.reference.quantize.layout import pack, unpack, with_layout
from narrowgauge.reference.quantize.steps import quantize_matrix
from narrowgauge.reference.quantize.zero_points import quantize_with_zeros
from narrowgauge.spec.arguments import (
    Random,
    as_matrix,
    check_amax,
    check_random,
    check_random_of_sections,
    check_rotated,
    check_rotated_sections,
    check_scale,
    check_section_recipe,
    chosen_layout,
    section_rows,
    split_random,
    wanted_halves,
)
from narrowgauge.spec.quantized import GroupedQuantized, Half, Quantized, amax_shape, joined_sections
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LINEAR, ScaleLayout


def quantize(
    x: torch.Tensor,
    recipe: str | Recipe,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: Random | None = None,
    scales: ScaleLayout = LINEAR,
    swizzled: bool = False,
) -> Quantized:
    """Quantize `x` (M, K), float32, bfloat16 or float16, along K.

    M and K are arbitrary, but a transform needs whole groups. A short last block is padded with zeros, which are not
    stored; `Quantized.shape` is (M, K). If `x` has more dimensions, all dimensions but the last are rows.
    `amax`: float32 (1,), or (M,) for row scales; replaces the amax of step 1 (after the transform).
    `scale`: float32 (1,), the encode scale, required by delayed scaling and refused by the remaining recipes.
    `random`: words or (seed, offset), see `Random`, required by stochastic rounding.
    `scales`: layout of byte scales, with its padding. `swizzled`: the layout 128x4.
    Source: docs/numerics.md#nvfp4, steps 1 to 8; docs/numerics.md#nvfp4-variants; docs/numerics.md#mx;
    docs/numerics.md#fp8-with-float32-scales.

    Raises TypeError for a wrong dtype; ValueError for a wrong shape, an unknown recipe, and for an amax, a scale or
    random bits that the recipe needs and does not get, or gets and does not use.
    """
    recipe = find_recipe(recipe)
    layout = chosen_layout(scales, recipe, swizzled=swizzled)
    return with_layout(_quantize(as_matrix(x), recipe, amax, scale, random), layout)


def _quantize(
    x: torch.Tensor,
    recipe: Recipe,
    amax: torch.Tensor | None,
    scale: torch.Tensor | None,
    random: Random | None,
    first: int = 0,
) -> Quantized:
    """`quantize` of a matrix (M, K), rowwise and with linear scales. `first`: see `quantize_matrix`."""
    shape = (x.shape[0], x.shape[1])
    check_random(random, shape, recipe)
    check_scale(scale, 1, recipe)
    check_rotated(x, shape[1], recipe)
    check_amax(amax, amax_shape(shape, recipe), recipe)
    if recipe.zero_points:
        return quantize_with_zeros(x, recipe)
    return quantize_matrix(x.contiguous(), recipe, amax=amax, scale=scale, random=random, first=first)


def quantize_both(
    x: torch.Tensor,
    recipe: str | Recipe,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    scale: torch.Tensor | None = None,
    random: tuple[torch.Tensor | None, torch.Tensor | None] | tuple[int, int] | None = None,
    scales: ScaleLayout = LINEAR,
    swizzled: bool = False,
) -> tuple[Quantized | None, Quantized | None]:
    """Both orientations of `x` (M, K): rowwise (M, K), and columnwise (K, M), the transpose quantized along M.

    `rowwise`, `columnwise`: halves to compute; the result has None for a half with False. `Recipe.columnwise` is the
    memory layout of the columnwise half. A transform rotates the columnwise half alone. `amax`: the amaxes of the two
    halves. `random`: the words of the two halves, or (seed, offset), and the columnwise half uses offset + 1.
    `scale`: the scale of both halves. In 2-D the columnwise half is the transpose of the rowwise half, with the choices
    of 4over6; stochastic rounding draws separate bits for each half. Source: docs/numerics.md#nvfp4,
    docs/numerics.md#mx, docs/numerics.md#fp8-with-float32-scales. Raises as `quantize` does, and ValueError if both
    halves are False.
    """
    recipe = find_recipe(recipe)
    halves = wanted_halves(rowwise=rowwise, columnwise=columnwise, method="quantize_both")
    layout = chosen_layout(scales, recipe, swizzled=swizzled)
    x = as_matrix(x)
    given = (None, None) if amax is None else amax
    bits = split_random(random)
    for half in halves:
        check_amax(half.pick(given), amax_shape(half.shape(x.shape), recipe), recipe, f"{half} amax")
        check_rotated(x, half.shape(x.shape)[1], half.recipe(recipe))
    row, column = (
        with_layout(quantize_half(half, x, half.recipe(recipe), half.pick(given), scale, half.pick(bits)), layout)
        if half in halves
        else None
        for half in Half
    )
    return row, column


def quantize_half(
    half: Half,
    x: torch.Tensor,
    recipe: Recipe,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: Random | None = None,
    first: int = 0,
) -> Quantized:
    """A half of `x` (M, K) with linear scales, as it is stored, under its own recipe. `first`: see `quantize_matrix`.

    Square tiles of 4over6 choose the scales of both halves along the rows of `x`. Raises as `quantize` does.
    """
    if half is Half.ROW:
        return _quantize(x, recipe, amax, scale, random, first)
    if recipe.columnwise == "in-place":
        q = _quantize(x.T, recipe, amax, scale, random, first)
        return replace(q, codes=q.codes.T.contiguous(), scales=q.scales.T.contiguous(), transposed=True)
    if recipe.candidates == "6" or recipe.block[0] == 1:
        return _quantize(x.T, recipe, amax, scale, random, first)
    q = _quantize(x, recipe, amax, scale, random, first)
    rows, columns = q.shape
    height = q.recipe.block[0]
    codes = pack(unpack(q.codes, columns).T)
    scales = q.scales[::height].T.repeat_interleave(height, 0)[:columns].contiguous()
    return replace(q, codes=codes, scales=scales, shape=(columns, rows))


def quantize_grouped(
    x: torch.Tensor,
    sizes: torch.Tensor,
    recipe: str | Recipe,
    *,
    columnwise: bool = False,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: tuple[int, int] | None = None,
) -> GroupedQuantized:
    """Quantize sections of rows of `x` (M, K) separately. `sizes`: int64 (G,), the rows of each section, may be 0.

    A section has the bytes of `quantize`, or with `columnwise` the bytes of the columnwise half of `quantize_both`.
    Philox counts the blocks of all sections through. `amax`, `scale`: float32 (G,). Source: docs/numerics.md#sections.
    Raises ValueError if the sizes do not sum to M or the recipe has row scales, and as `quantize` does.
    """
    recipe = find_recipe(recipe)
    x = as_matrix(x)
    check_section_recipe(recipe)
    rows = section_rows(sizes, x.shape[0])
    check_scale(scale, len(rows), recipe)
    check_random_of_sections(random, recipe)
    check_amax(amax, sizes.shape, recipe)
    half = Half.of(columnwise=columnwise)
    if half is Half.COLUMN:
        check_rotated_sections(rows, recipe)
    else:
        check_rotated(x, x.shape[1], recipe)
    parts: list[Quantized] = []
    first = 0
    for number, section in enumerate(torch.split(x, rows)):
        amax_of_section = None if amax is None else amax[number : number + 1]
        scale_of_section = None if scale is None else scale[number : number + 1]
        parts.append(quantize_half(half, section, recipe, amax_of_section, scale_of_section, random, first))
        first += parts[-1].scales.numel()
    tensors: dict[str, Any] = {"amax": None} | joined_sections(parts, half)
    return GroupedQuantized(**tensors, recipe=recipe, shape=Half.ROW.shape(x.shape), sizes=sizes, columnwise=columnwise)
