"""Quantize: a matrix to codes, block scales and amax, right to the last bit."""

from __future__ import annotations

from dataclasses import replace

import torch

from narrowgauge.reference.numbers.blocks import block_amax, by_slabs, of_rows, over_tiles, tensor_amax
from narrowgauge.reference.numbers.philox import ROUNDS, philox
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.reference.quantize.four_over_six import choose_scales
from narrowgauge.reference.quantize.hadamard import transform
from narrowgauge.reference.quantize.layout import linear_scales, pack, swap_nibbles, swizzle, unpack
from narrowgauge.reference.quantize.scaling import block_scales, element_factors, per_row, scale_elements, tensor_scale
from narrowgauge.spec.arguments import (
    Random,
    as_matrix,
    check_amax,
    check_halves,
    check_random,
    check_random_of_sections,
    check_rotated,
    check_rotated_sections,
    check_scale,
    check_section_recipe,
    check_swizzled,
    section_rows,
    split_random,
)
from narrowgauge.spec.quantized import GroupedQuantized, Quantized, amax_shape, codes_shape
from narrowgauge.spec.recipes import Recipe, find_recipe

_RUN = 128
"""Elements of a row whose largest is found at once, on the way to that of a tensor with one scale."""


def random_bytes(
    random: Random,
    shape: tuple[int, int],
    rows: slice,
    device: torch.device,
    block: int = 16,
    first: int = 0,
    rounds: int = ROUNDS,
) -> torch.Tensor:
    """The byte of every element of `rows`, uint8 (rows, K). `first`: number of the first block of `block` elements.

    `rounds`: those of Philox.
    """
    if isinstance(random, torch.Tensor):
        words = random[rows]
    else:
        sixteens = -(-shape[1] // block) * (block // 16)
        subsequence = torch.arange(rows.start * sixteens, rows.stop * sixteens, device=device)
        words = philox(*random, subsequence + first * (block // 16), rounds).to(torch.int32).view(-1, 4 * sixteens)
    return words.contiguous().view(torch.uint8)[:, : shape[1]]


def encode_elements(
    x: torch.Tensor,
    scales: torch.Tensor,
    tensor: torch.Tensor | None,
    recipe: Recipe,
    random: Random | None = None,
    first: int = 0,
    blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Element codes of `x` (M, K), rotated already, as they are stored, under stored block scales.

    `tensor`: the tensor's scale, None where the recipe has none. `first`: as in `random_bytes`. `blocks`: the
    `block_amaxes` of `x`, where they are known; FP8 blocks need them, see `element_factors`.
    """
    shape = (x.shape[0], x.shape[1])
    if 0 in shape:
        return torch.empty(codes_shape(shape, recipe), dtype=torch.uint8, device=x.device)
    if blocks is None and recipe.element_scale == "x*(max/amax)":
        blocks = block_amaxes(x, recipe)

    def factors_of(rows: slice) -> torch.Tensor:
        own = None if blocks is None else blocks[rows]
        return element_factors(scales[rows], _of_rows(tensor, rows), recipe, x.dtype, own)

    factors = per_row(by_slabs(scales, factors_of), recipe, shape[0])

    def codes_of(rows: slice) -> torch.Tensor:
        scaled = scale_elements(x[rows], factors[rows], _of_rows(tensor, rows), recipe)
        bits = None if random is None else random_bytes(random, shape, rows, x.device, recipe.block[1], first)
        found = element_codes(scaled, recipe, bits)
        return pack(found) if recipe.element.bits == 4 else found

    codes = by_slabs(x, codes_of)
    return codes if recipe.packing == "low-first" else swap_nibbles(codes)


def stored_scales(
    x: torch.Tensor, blocks: torch.Tensor, amax: torch.Tensor | None, tensor: torch.Tensor | None, recipe: Recipe
) -> torch.Tensor:
    """Block scales as they are stored, of `x`, rotated already, whose `block_amaxes` are `blocks`.

    `amax` and `tensor` are the tensor's amax and scale, None where the recipe has none.
    """
    if recipe.candidates != "6":
        assert amax is not None
        assert tensor is not None
        return choose_scales(x, blocks, amax, tensor, recipe)
    return by_slabs(blocks, lambda rows: block_scales(blocks[rows], _of_rows(tensor, rows), recipe, x.dtype))


def _of_rows(tensor: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if tensor is None else of_rows(tensor, rows)


def block_amaxes(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The amax of every block of `x` (M, K), rotated already, float32, like linear scales: of every stored one.

    Those of a tile are repeated for its rows, unless scales are float32 numbers. (1, 1) of a whole tensor.
    """
    propagate = recipe.nan == "propagate"
    if recipe.whole:
        return tensor_amax(block_amax(x, _RUN, propagate_nan=propagate)).unsqueeze(1)
    return over_tiles(block_amax(x, recipe.block[1], propagate_nan=propagate), recipe.block[0])[:: recipe.stored_rows]


def quantize(
    x: torch.Tensor,
    recipe: str | Recipe,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: Random | None = None,
    swizzled: bool = False,
) -> Quantized:
    """Quantize `x` (M, K), float32, bfloat16 or float16, along K; a recipe with a transform rotates it first.

    Any M and K (but whole groups of a transform): a short last block is padded with zeros, which change neither its
    amax nor its other codes, and `Quantized.shape` keeps (M, K). More dimensions are taken as rows. `amax`, float32
    (1,), or (M,) for one a row, replaces the tensor's own (after a rotation). `scale`, float32 (1,), is the encode
    scale of delayed scaling, which has no other. `random`, see `Random`, belongs to recipes that round stochastically.
    `swizzled` scales, bytes all, are padded and in the 128×4 layout. Source: docs/numerics.md#nvfp4, steps 1 to 8,
    docs/numerics.md#nvfp4-variants, docs/numerics.md#mx, docs/numerics.md#fp8-with-float32-scales.

    Raises TypeError for a dtype, ValueError for a shape, an unknown recipe, or an amax, a scale or random bits that the
    recipe has no use for, or lacks.
    """
    recipe = find_recipe(recipe)
    check_swizzled(recipe, swizzled=swizzled)
    return _swizzled(_quantize(as_matrix(x), recipe, amax, scale, random), swizzled=swizzled)


def _swizzled(q: Quantized, *, swizzled: bool) -> Quantized:
    return replace(q, scales=swizzle(linear_scales(q)), swizzled=True) if swizzled else q


def _quantize(
    x: torch.Tensor,
    recipe: Recipe,
    amax: torch.Tensor | None,
    scale: torch.Tensor | None,
    random: Random | None,
    first: int = 0,
) -> Quantized:
    shape = (x.shape[0], x.shape[1])
    check_random(random, shape, recipe)
    check_scale(scale, 1, recipe)
    x = x.contiguous()
    if recipe.transform is not None:
        x = transform(x, recipe)
    blocks = block_amaxes(x, recipe)
    check_amax(amax, amax_shape(shape, recipe), recipe)
    if recipe.tensor_scale == "none":
        scales = stored_scales(x, blocks, None, None, recipe)
        codes = encode_elements(x, scales, None, recipe, random, first, blocks)
        return Quantized(codes, scales, None, recipe, shape)
    if amax is None:
        amax = tensor_amax(blocks) if recipe.granularity == "tensor" else row_amax(blocks)
    tensor = tensor_scale(amax, recipe, x.dtype) if scale is None else scale
    scales = stored_scales(x, blocks, amax, tensor, recipe)
    codes = encode_elements(x, scales, tensor, recipe, random, first)
    return Quantized(codes, scales, amax, recipe, shape, tensor)


def row_amax(blocks: torch.Tensor) -> torch.Tensor:
    """The largest block amax of each row, float32 (M,)."""
    return blocks.amax(1) if blocks.shape[1] else torch.zeros(blocks.shape[0], device=blocks.device)


def quantize_both(
    x: torch.Tensor,
    recipe: str | Recipe,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    scale: torch.Tensor | None = None,
    random: tuple[torch.Tensor | None, torch.Tensor | None] | tuple[int, int] | None = None,
    swizzled: bool = False,
) -> tuple[Quantized | None, Quantized | None]:
    """Both orientations of `x` (M, K): rowwise (M, K), and columnwise (K, M), the transpose quantized along M.

    The columnwise half is stored as the recipe says (`Recipe.columnwise`). A transform rotates that half alone. `amax`
    holds that of either half, `random` the words of either half, or seed and offset, of which the columnwise half uses
    offset + 1; `scale` is that of both. A half that is not wanted is None. In 2-D the columnwise half is the transpose
    of the rowwise one, the choice of 4over6 included; only stochastic rounding draws for each half by itself. Raises as
    `quantize` does, and ValueError where neither half is wanted.
    """
    recipe = find_recipe(recipe)
    check_halves(rowwise=rowwise, columnwise=columnwise, method="quantize_both")
    check_swizzled(recipe, swizzled=swizzled)
    x = as_matrix(x)
    given = (None, None) if amax is None else amax
    bits = split_random(random)
    row = column = None
    for asked, shape, given_amax, half in (
        (rowwise, x.shape, given[0], "rowwise"), (columnwise, x.shape[::-1], given[1], "columnwise")
    ):  # fmt: skip
        if asked:
            check_amax(given_amax, amax_shape((shape[0], shape[1]), recipe), recipe, f"{half} amax")
    if columnwise:
        check_rotated(x, x.shape[0], recipe)
    if rowwise:
        row = quantize(x, recipe.rowwise, amax=given[0], scale=scale, random=bits[0], swizzled=swizzled)
    if columnwise:
        column = _swizzled(_quantize_transpose(x, recipe, given[1], scale, bits[1]), swizzled=swizzled)
    return row, column


def _quantize_transpose(
    x: torch.Tensor,
    recipe: Recipe,
    amax: torch.Tensor | None,
    scale: torch.Tensor | None,
    random: Random | None,
    first: int = 0,
) -> Quantized:
    """The transpose of `x`, quantized; in square tiles the choice of 4over6 is made along the rows of `x`."""
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
    """Quantize `x` (M, K) in sections of `sizes` rows, int64 (G,), each by itself, some perhaps empty.

    Each section's bytes are those of `quantize`, or, `columnwise`, those of the columnwise half of `quantize_both`, and
    Philox counts the blocks of all sections through. `amax` and `scale`: float32 (G,). Raises ValueError where the
    sizes are not those of M rows, or the recipe has an amax for every row, and as `quantize` does.
    """
    recipe = find_recipe(recipe)
    x = as_matrix(x)
    check_section_recipe(recipe)
    rows = section_rows(sizes, x.shape[0])
    check_scale(scale, len(rows), recipe)
    check_random_of_sections(random, recipe)
    check_amax(amax, sizes.shape, recipe)
    if columnwise:
        check_rotated_sections(rows, recipe)
    else:
        check_rotated(x, x.shape[1], recipe)
    parts: list[Quantized] = []
    first = 0
    for number, section in enumerate(torch.split(x, rows)):
        given, used = (None if every is None else every[number : number + 1] for every in (amax, scale))
        parts.append((_quantize_transpose if columnwise else _quantize)(section, recipe, given, used, random, first))
        first += parts[-1].scales.numel()
    codes, scales = ([getattr(part, name) for part in parts] for name in ("codes", "scales"))
    if columnwise:
        codes, scales = ([part.flatten() for part in some] for some in (codes, scales))
    amaxes = [part.amax for part in parts if part.amax is not None]
    encode = [part.tensor_scale for part in parts if part.tensor_scale is not None]
    shape = (x.shape[0], x.shape[1])
    return GroupedQuantized(
        torch.cat(codes), torch.cat(scales), torch.cat(amaxes) if amaxes else None, recipe, shape, sizes,
        torch.cat(encode) if encode else None, columnwise=columnwise,
    )  # fmt: skip
