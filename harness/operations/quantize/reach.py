"""Coverage of numbers of a matrix: reached scales, codes and sides of rounding boundaries under a recipe."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from narrowgauge.harness.inputs.reached import SIDES, BitSet, Reached
from narrowgauge.reference.numbers.blocks import pad_columns
from narrowgauge.reference.quantize.scaling import block_scales, element_factors, scale_elements, tensor_scale
from narrowgauge.reference.quantize.steps import row_factors
from narrowgauge.spec.formats import E2M1, FP32, Format
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

NAN = len(SIDES)
"""Side of NaN."""
_ELEMENTS = 1 << 19
"""Elements of a matrix that are counted."""
_NAN_BITS = 0x7F800001
_INFINITY = 0x7F80
"""Bits of infinity in bfloat16: the number of finite magnitudes."""


def boundaries(scaled: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The code at or below the magnitude of scaled elements, and the side of the midpoint above it as a number of
    `SIDES`, or `NAN`: int64, the shape of `scaled`, float32."""
    points = torch.tensor(fmt.values[: fmt.max_code + 1], device=scaled.device)
    merged = torch.stack([points, (points + points.roll(-1)) / 2], 1).flatten()[:-1]  # exact: few bits
    magnitude = scaled.abs()
    place = torch.searchsorted(merged, magnitude, right=True).sub_(1).clamp_(0, len(merged) - 1)
    lower, odd = place >> 1, place & 1
    side = 2 * odd + (magnitude != merged[place])
    side.masked_fill_(magnitude > merged[-1], 4).masked_fill_(magnitude.isnan(), NAN)
    return lower, side


def has_coverage(recipe: Recipe) -> bool:
    """Whether coverage is defined: byte scales, none of them given, no rotation, rounding to nearest."""
    plain = recipe.transform is None and recipe.rounding != "stochastic" and recipe.tensor_scale != "given"
    return plain and recipe.scale is not FP32


def reached(x: torch.Tensor, q: Quantized) -> Reached:
    """Sets reached by a matrix `x` (M, K) and by its quantization `q`, with linear scales, under a recipe with
    `has_coverage`: by the first rows, of about `_ELEMENTS` elements."""
    recipe, width, cells_of = q.recipe, q.recipe.block[1], _cells_of(q.recipe.element)
    height = recipe.block[0]
    rows = max(height, _ELEMENTS // max(1, x.shape[1]) // height * height)
    x, codes, scales, tensor = x[:rows], q.codes[:rows], q.scales[: -(-rows // recipe.stored_rows)], q.tensor_scale
    tensor = tensor if tensor is None or len(tensor) == 1 else tensor[:rows]
    sizes = recipe.scale.codes * cells_of, 256 if recipe.element is E2M1 else 0, width
    cells, pairs, places = (torch.zeros(size, dtype=torch.bool, device=x.device) for size in sizes)
    if x.numel():
        factors = row_factors(scales, tensor, recipe, x, None)
        found = _sides(scale_elements(x, factors, tensor, recipe), recipe.element)
        first = scales.repeat_interleave(recipe.stored_rows, 0)[: len(x)].long() * cells_of
        whole = x.shape[1] // width * width
        found[:, :whole].view(len(x), -1, width).add_(first[:, : whole // width, None])
        found[:, whole:] += first[:, whole // width :]
        cells.index_fill_(0, found.view(-1), True)
        cells.view(-1, cells_of)[:, -1] = False  # NaN
        places[pad_columns(x.float().abs().nan_to_num_(nan=0.0), width).view(-1, width).argmax(1)] = True
        if len(pairs):
            pairs[codes[:, : x.shape[1] // 2].int()] = True
    tails = BitSet(width, 1 << x.shape[1] % width)
    return Reached(recipe.element, _bit_set(cells), reachable(recipe), _bit_set(pairs), _bit_set(places), tails)


def _cells_of(element: Format) -> int:
    return element.codes * len(SIDES)


def _bit_set(members: torch.Tensor) -> BitSet:
    """A mask, bool (n,), as a set."""
    data = np.packbits(members.cpu().numpy(), bitorder="little")
    return BitSet(len(members), int.from_bytes(data.tobytes(), "little"))


@lru_cache(maxsize=16)
def _table(element: Format, device: torch.device) -> torch.Tensor:
    """Cell of a scaled element without the part of its scale, int64, by 2 · leading bits of its magnitude + whether a
    bit behind the leading bits is set. No boundary needs the bits behind them. NaN has the last number of all."""
    index = torch.arange(2 << (8 + _leading(element)), dtype=torch.int32, device=device)
    bits = (index >> 1 << (23 - _leading(element))) + (index & 1)
    lower, side = boundaries(bits.view(torch.float32), element)
    return torch.where(side == NAN, _cells_of(element) - 1, lower * len(SIDES) + side)


def _leading(element: Format) -> int:
    """Bits of a float32 mantissa that tell every number and every midpoint of a format apart."""
    return element.mantissa_bits + 1


def _sides(scaled: torch.Tensor, element: Format) -> torch.Tensor:
    """Cells of scaled elements, float32, without the part of the scale: int64, the shape of `scaled`."""
    behind = 23 - _leading(element)
    bits = scaled.contiguous().view(torch.int32).bitwise_and(0x7FFFFFFF).clamp_(max=_NAN_BITS)
    # Leading bits, rounded up, plus leading bits, rounded down.
    index = bits.add((1 << behind) - 1).bitwise_right_shift_(behind).add_(bits.bitwise_right_shift_(behind))
    return _table(element, scaled.device).index_select(0, index.view(-1)).view(scaled.shape)


@lru_cache(maxsize=64)
def reachable(recipe: Recipe) -> BitSet:
    """The cells of all bfloat16 numbers, with two levels of scales under the tensor amax `recipe.max_product`: the
    tensor scale is then 1, and ties are possible.

    The scaled elements of a block grow with their numbers, so every cell has a number within two steps of a boundary.
    """
    tensor, top = None, _INFINITY
    if recipe.tensor_scale != "none":
        amax = torch.tensor([recipe.max_product])
        tensor, top = tensor_scale(amax, recipe, torch.bfloat16), int(amax.bfloat16().view(torch.int16))
    magnitudes = torch.arange(top + 1, dtype=torch.int16)
    scales = block_scales(_bfloat16(magnitudes).view(1, -1).float(), tensor, recipe, torch.bfloat16).flatten()
    codes, owner = torch.unique(scales, return_inverse=True)
    tops = torch.zeros(len(codes), dtype=torch.int32).scatter_reduce(0, owner, magnitudes.int(), "amax").view(-1, 1)
    factors = element_factors(codes.view(-1, 1), tensor, recipe, torch.bfloat16, _bfloat16(tops).float())
    points = torch.tensor(recipe.element.values[: recipe.element.max_code + 1])
    edges = torch.cat([points, (points[1:] + points[:-1]) / 2])
    near = (edges * factors if recipe.divides else edges / factors).bfloat16().view(torch.int16).int()
    steps = torch.arange(-2, 3, dtype=torch.int32).view(1, 1, -1)
    numbers = (near.unsqueeze(2) + steps).flatten(1).clamp(min=0).minimum(tops)
    each_factor = factors.repeat_interleave(numbers.shape[1], 0)
    sides = _sides(scale_elements(_bfloat16(numbers).view(-1, 1), each_factor, tensor, recipe), recipe.element)
    cells_of = _cells_of(recipe.element)
    mask = torch.zeros(recipe.scale.codes, cells_of, dtype=torch.bool)
    mask[codes.long().view(-1, 1), sides.view(numbers.shape)] = True
    mask[:, cells_of - 1] = False  # NaN
    return _bit_set(mask.flatten())


def _bfloat16(magnitudes: torch.Tensor) -> torch.Tensor:
    return magnitudes.to(torch.int16).view(torch.bfloat16)
