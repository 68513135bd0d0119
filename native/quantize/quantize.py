"""Quantize: an orientation, both orientations in a launch, and sections. The recipe's formats select the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from narrowgauge.native.quantize import fp8, mx, nvfp4
from narrowgauge.native.runtime.arguments import supported
from narrowgauge.spec.arguments import chosen_layout, split_random, wanted_halves
from narrowgauge.spec.formats import E4M3, E8M0, FP32, Format
from narrowgauge.spec.quantized import GroupedQuantized, Half, Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LINEAR, TILES, ScaleLayout

_FAMILIES: dict[Format, ModuleType] = {E4M3: nvfp4, E8M0: mx, FP32: fp8}


def quantize(
    x: torch.Tensor,
    recipe: str | Recipe,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: torch.Tensor | tuple[int, int] | None = None,
    scales: ScaleLayout = LINEAR,
    swizzled: bool = False,
) -> Quantized:
    """Quantize `x` (M, K), float32, bfloat16 or float16, any strides, along K; a recipe with a transform rotates it.

    Any M and K, but a transform needs whole groups; further dimensions count as rows. `amax`, float32 (1,), or (M,)
    if the recipe has an amax per row, replaces the tensor's own amax. `scale`, float32 (1,), is the encode scale
    of delayed scaling. `random`: random words, int32 (M, ⌈K/4⌉), or (seed, offset) of Philox, for recipes with
    stochastic rounding. `scales`: layout of the scales, linear or 128x4 with its padding, which `swizzled` names too.
    Raises TypeError or ValueError for inputs of another dtype or shape, NotImplementedError for a recipe or a layout
    that the kernels lack, ToolchainError if kernels cannot be compiled.
    """
    recipe = supported(recipe)
    layout = _layout(scales, recipe, swizzled=swizzled)
    if recipe.scale is E4M3:
        return nvfp4.quantize(x, recipe, amax=amax, scale=scale, random=random, layout=layout)
    result: Quantized = _FAMILIES[recipe.scale].quantize_both(
        x, recipe, (Half.ROW,), amaxes=(amax, None), scale=scale, bits=(random, None), layout=layout
    )[0]
    return result


def _layout(scales: ScaleLayout, recipe: Recipe, *, swizzled: bool) -> ScaleLayout:
    """`chosen_layout`. Raises NotImplementedError for a layout that the kernels do not write."""
    layout = chosen_layout(scales, recipe, swizzled=swizzled)
    if layout not in (LINEAR, TILES):
        raise NotImplementedError(f"the native kernels write scales in layout {LINEAR} or {TILES}, not {layout}")
    return layout


def quantize_both(
    x: torch.Tensor,
    recipe: str | Recipe,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: Sequence[torch.Tensor | None] | None = None,
    scale: torch.Tensor | None = None,
    random: tuple[torch.Tensor | None, torch.Tensor | None] | tuple[int, int] | None = None,
    scales: ScaleLayout = LINEAR,
    swizzled: bool = False,
) -> tuple[Quantized | None, Quantized | None]:
    """Both orientations of `x` (M, K), any strides, in one read: rowwise (M, K), and its transpose, columnwise (K, M).

    `Recipe.columnwise` is the layout of the columnwise result. A transform rotates the columnwise result only; groups
    other than 16 take a separate launch. `amax` and `random` have an entry for the rowwise and one for the
    columnwise result; `random` may also be (seed, offset) of Philox, and the columnwise result uses offset + 1. `scale`
    is the encode scale of both. An unrequested result is None. Raises as `quantize` does, and
    ValueError if the caller asks for neither result.
    """
    recipe = supported(recipe)
    halves = wanted_halves(rowwise=rowwise, columnwise=columnwise, method="quantize_both")
    layout = _layout(scales, recipe, swizzled=swizzled)
    amaxes = (None, None) if amax is None else amax
    results: tuple[Quantized | None, Quantized | None] = _FAMILIES[recipe.scale].quantize_both(
        x, recipe, halves, amaxes=amaxes, scale=scale, bits=split_random(random), layout=layout
    )
    return results


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
    """Quantize sections of `x` (M, K) of `sizes` rows, int64 (G,), section by section. Sections may be empty.

    One launch quantizes all sections and reads the sizes on the device; the host does not wait for a GPU. Sizes
    on a CPU are checked; on a GPU the kernel clamps wrong sizes to the rows of x. `columnwise` quantizes the transpose
    of each section, rotated if the recipe has a transform. `amax` and `scale`: float32 (G,). Raises as `quantize` does.
    """
    recipe = supported(recipe)
    result: GroupedQuantized = _FAMILIES[recipe.scale].quantize_grouped(
        x, sizes, recipe, Half.of(columnwise=columnwise), amax=amax, scale=scale, random=random
    )
    return result
