"""Quantize: one orientation, both in one launch, and sections. The family of the recipe picks the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from narrowgauge.native.quantize import fp8, mx, nvfp4
from narrowgauge.native.runtime.arguments import supported
from narrowgauge.spec.arguments import check_halves
from narrowgauge.spec.formats import E4M3, E8M0, FP32, Format
from narrowgauge.spec.quantized import GroupedQuantized, Quantized
from narrowgauge.spec.recipes import Recipe

_FAMILIES: dict[Format, ModuleType] = {E4M3: nvfp4, E8M0: mx, FP32: fp8}


def quantize(
    x: torch.Tensor,
    recipe: str | Recipe,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: torch.Tensor | tuple[int, int] | None = None,
    swizzled: bool = False,
) -> Quantized:
    """Quantize `x` (M, K), float32, bfloat16 or float16, any strides, along K; a recipe with a transform rotates it.

    Any M and K (but whole groups of a transform); more dimensions are taken as rows. `amax`, float32 (1,), or (M,)
    where every row has one, replaces the tensor's own. `scale`, float32 (1,), is the encode scale of delayed scaling.
    `random`: words, int32 (M, ⌈K/4⌉), or (seed, offset) of Philox, for recipes that round stochastically. `swizzled`
    scales are padded and in the 128×4 layout. Raises TypeError or ValueError for inputs that do not fit,
    NotImplementedError for a recipe that the kernels do not have, ToolchainError where they cannot be compiled.
    """
    r = supported(recipe)
    found: Quantized = _FAMILIES[r.scale].quantize(x, r, amax=amax, scale=scale, random=random, swizzled=swizzled)
    return found


def quantize_both(
    x: torch.Tensor,
    recipe: str | Recipe,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: Sequence[torch.Tensor | None] | None = None,
    scale: torch.Tensor | None = None,
    random: tuple[torch.Tensor | None, torch.Tensor | None] | tuple[int, int] | None = None,
    swizzled: bool = False,
) -> tuple[Quantized | None, Quantized | None]:
    """Both orientations of `x` (M, K), any strides, in one read: rowwise (M, K), and columnwise (K, M), its transpose.

    The columnwise half is stored as the recipe says (`Recipe.columnwise`). A transform rotates that half alone; groups
    other than 16 cost a launch of their own. `amax` holds that of either half, `scale` is that of both, `random` the
    words of either half, or seed and offset, of which the columnwise half uses offset + 1. A half that is not wanted is
    None. Raises as `quantize` does, and ValueError where neither half is wanted.
    """
    r = supported(recipe)
    check_halves(rowwise=rowwise, columnwise=columnwise, method="quantize_both")
    found: tuple[Quantized | None, Quantized | None] = _FAMILIES[r.scale].quantize_both(
        x, r, rowwise=rowwise, columnwise=columnwise, amax=amax, scale=scale, random=random, swizzled=swizzled
    )
    return found


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
    """Quantize `x` (M, K) in sections of `sizes` rows, int64 (G,), each by itself, some perhaps empty.

    One launch for all, which reads the sizes where they lie: the host does not wait for a GPU. Sizes on a CPU are
    checked; on a GPU, what is wrong in them is cut to the rows of x. `columnwise`: of the transpose of each section,
    rotated where the recipe rotates. `amax` and `scale`: float32 (G,). Raises as `quantize` does.
    """
    r = supported(recipe)
    found: GroupedQuantized = _FAMILIES[r.scale].quantize_grouped(
        x, sizes, r, columnwise=columnwise, amax=amax, scale=scale, random=random
    )
    return found
