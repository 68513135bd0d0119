"""Rows of a cache in the form of its recipe: codes, and scales of blocks."""

from __future__ import annotations

import math

import torch

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.spec.formats import E2M1, E4M3, FP32
from narrowgauge.spec.kv_cache import DATA, SCALES
from narrowgauge.spec.recipes import Recipe

Parts = dict[str, torch.Tensor]
"""Codes, and stored scales if any, by `DATA` and `SCALES`: uint8 (…, columns); of rows, float32."""
_BLOCK_SCALES = (*map(float, range(1, 17)), 64.0)
"""Numbers of E4M3."""
_DIGITS = {E4M3.name: (126, (2, 1, 1)), E2M1.name: (7, (4, 3, 2))}
"""Format of the elements: its positive codes without NaN, and the digits of a page, an offset and a head."""


def rounded(x: torch.Tensor, recipe: Recipe) -> Parts:
    """Numbers (…, D), quantized."""
    if not stores_scales(recipe):
        return {DATA: encode(x.float(), recipe.element)}
    q = quantize(x.float().flatten(0, -2), recipe)
    assert q.scales is not None
    scales = q.scales if recipe.scale is FP32 else q.scales.view(torch.uint8)
    return {name: part.view(*x.shape[:-1], -1) for name, part in ((DATA, q.codes), (SCALES, scales))}


def exact(x: torch.Tensor, recipe: Recipe) -> Parts:
    """Numbers (N, P, G, D), stored without a rounding: 4-bit elements times a scale of `_BLOCK_SCALES`, or 8-bit
    elements, of rows with a scale times `_powers`.

    Raises ValueError for other numbers."""
    if not stores_scales(recipe):
        return {DATA: encode(x.float(), recipe.element)}
    if recipe.spans_k:
        sizes = x.shape[0], x.shape[1], x.shape[2], x.shape[3]
        scales = _powers(sizes, recipe)
        return _stored(encode(x.float() / scales, recipe.element), scales, recipe)
    blocks = x.float().view(*x.shape[:-1], -1, recipe.block[1])
    scales = torch.zeros(blocks.shape[:-1])
    for scale in reversed(_BLOCK_SCALES if recipe.element.bits == 4 else _BLOCK_SCALES[:1]):
        elements = blocks / scale
        fits = (decode(encode(elements, recipe.element), recipe.element) == elements).all(-1)
        scales = torch.where(fits, scale, scales)
    if bool((scales == 0).any()):
        raise ValueError(f"a block of {recipe.block[1]} numbers is no multiple of elements of {recipe.name}")
    return _stored(encode(blocks / scales.unsqueeze(-1), recipe.element).flatten(-2), scales, recipe)


def integers(draw: Draw, largest: int, sizes: tuple[int, int, int, int], recipe: Recipe) -> Parts:
    """Small integers (N, P, G, E) up to `largest`, at most 4 in E2M1, of one sign in a column; times `_powers`."""
    most = min(largest, 4) if recipe.element.bits == 4 else largest
    elements = (1 + draw.below(most, *sizes)).float() * draw.signs(sizes[3])
    return _stored(encode(elements, recipe.element), _powers(sizes, recipe), recipe)


def positions(sizes: tuple[int, int, int, int], recipe: Recipe) -> Parts:
    """Codes of their page, offset, head and column (N, P, G, E); times `_powers`."""
    base, counts = _DIGITS[recipe.element.name]
    *places, column = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    digits = [place // base**digit for place, count in zip(places, counts, strict=True) for digit in range(count)]
    several = len(digits) + 1
    found = torch.stack([*digits, column // several]).gather(0, (column % several).unsqueeze(0))[0]
    return _stored(1 + found % base, _powers(sizes, recipe), recipe)


def stores_scales(recipe: Recipe) -> bool:
    """Whether a row has scales of blocks."""
    return recipe.tensor_scale != "given"


def unused_code(recipe: Recipe, part: str, *, nan: bool) -> float:
    """The code or the scale of a cell without a token: NaN, or the lowest code with a scale that keeps the number
    finite."""
    if part == DATA:
        return 0x7F if nan else 0xFE
    if recipe.scale is FP32:
        return math.nan if nan else 1.0
    if recipe.scale is E4M3:
        return 0x7F if nan else 0x7E
    return 0xFF if nan else 0x7F


def _powers(sizes: tuple[int, int, int, int], recipe: Recipe) -> torch.Tensor:
    """A scale from 1 to 8 of each block, by its head and place in the row, or of each row, by its slot and head."""
    head = torch.arange(sizes[2]).view(-1, 1)
    if stores_scales(recipe) and recipe.spans_k:
        slot = torch.arange(sizes[0] * sizes[1]).view(*sizes[:2], 1, 1)
        return 2.0 ** ((slot + head) % 4)
    block = torch.arange(sizes[3] // recipe.block[1] if stores_scales(recipe) else 1)
    return (2.0 ** ((head + block) % 4)).expand(*sizes[:2], -1, -1)


def _stored(codes: torch.Tensor, scales: torch.Tensor, recipe: Recipe) -> Parts:
    if not stores_scales(recipe):
        return {DATA: codes}
    if recipe.element.bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return {DATA: codes, SCALES: scales if recipe.scale is FP32 else encode(scales.contiguous(), recipe.scale)}
