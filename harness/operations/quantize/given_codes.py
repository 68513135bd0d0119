"""Operands that quantize never makes: codes and scale bytes read from the bits of a matrix of the family `codes`."""

from __future__ import annotations

import torch

from narrowgauge.spec.formats import E8M0
from narrowgauge.spec.quantized import Quantized, scales_shape
from narrowgauge.spec.recipes import Recipe


def given_operand(x: torch.Tensor, recipe: Recipe) -> Quantized:
    """The operand in the bits of `x` (M, K), float32, bfloat16 or float16, with linear scales.

    The upper 16 bits of an element count. Their low byte has the code of the element. The high byte of the first
    element of a block is its scale byte, without the sign of E4M3: tensor cores read E4M3 scales as UE4M3, in which
    bytes above 127 have no meaning (PTX ISA, mma with block scaling). A float32 scale has these 16 bits, or the 32 of a
    float32 x, as its own upper bits. The amax is 2^(b - 127)·(1 + c/256): b is the high byte, and c the low byte, of
    the second element of the tensor or the row, of the only element if K is 1; an empty matrix has the amax 0 and
    the float32 scale 1.
    """
    rows, columns = x.shape
    x = x.contiguous()
    whole = x.view(torch.int32) if x.dtype == torch.float32 else x.view(torch.int16).int() << 16
    codes = (whole >> 16) & ((1 << recipe.element.bits) - 1)
    if recipe.element.bits == 4:
        low = torch.nn.functional.pad(codes, (0, columns % 2)).view(rows, -(-columns // 2), 2)
        first = 0 if recipe.packing == "low-first" else 1
        codes = low[..., first] | low[..., 1 - first] << 4
    height = max(rows, 1) if recipe.whole else recipe.block[0]
    width = max(columns, 1) if recipe.spans_k else recipe.block[1]
    of_blocks = whole[::height, ::width]
    if recipe.scale.bits == 8:
        scales = (
            ((of_blocks >> 24) & (255 if recipe.scale is E8M0 else 127))
            .to(torch.uint8)
            .repeat_interleave(height, 0)[:rows]
        )
    else:
        own = of_blocks.contiguous().view(torch.float32)
        scales = own if x.numel() else torch.ones(scales_shape((rows, columns), recipe))
    amax = None
    if recipe.tensor_scale != "none" and not x.numel():
        amax = torch.zeros(rows if recipe.granularity == "row" else 1)
    elif recipe.tensor_scale != "none":
        at = whole[:, min(1, columns - 1)] if recipe.granularity == "row" else whole[:1, min(1, columns - 1)]
        amax = torch.ldexp(1 + ((at >> 16) & 255).double() / 256, ((at >> 24) & 255) - 127).float()
    shape = (rows, columns)
    return Quantized(codes.to(torch.uint8), scales.reshape(scales_shape(shape, recipe)), amax, recipe, shape)
