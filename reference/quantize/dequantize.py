"""Dequantize: codes and scales back to values."""

from __future__ import annotations

import torch

from narrowgauge.reference.numbers.blocks import slabs
from narrowgauge.reference.numbers.decode import decode_stored
from narrowgauge.reference.quantize.layout import linear_scales, rowwise_codes
from narrowgauge.reference.quantize.scaling import decode_factors, over_elements, per_row
from narrowgauge.spec.arguments import check_out_dtype
from narrowgauge.spec.quantized import Quantized


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values (M, K) of `q` in float32, bfloat16 or float16: cast(fl(code·f)), f = fl(fl(s·amax)·fl(1/2688)).

    A rotation is not undone; 4over6-256 has 1536 in place of 2688. f has other forms in other dialects, `decode` of the
    recipe, and is the stored scale of MX and FP8. Source: docs/numerics.md#nvfp4, Dequantize. Raises TypeError for
    another dtype, ValueError where the tensor's scale was rounded to the dtype of x, which `q` does not tell, and `q`
    does not show it.
    """
    check_out_dtype(dtype, "dequantize")
    rows, columns = q.shape
    factors = per_row(decode_factors(linear_scales(q), q), q.recipe, rows)
    out = torch.empty(rows, columns, dtype=dtype, device=q.codes.device)
    if out.numel() == 0:
        return out
    codes = rowwise_codes(q)
    for part in slabs(out):
        values = decode_stored(codes[part], q.recipe.element, columns)
        out[part] = over_elements(values, factors[part], q.recipe, torch.mul)
    return out
