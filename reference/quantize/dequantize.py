"""Dequantize: values from codes and scales."""

from __future__ import annotations

import torch

from narrowgauge.reference.numbers.decode import decode_stored
from narrowgauge.reference.numbers.slabs import slabs
from narrowgauge.reference.quantize.layout import linear_scales, rowwise_codes
from narrowgauge.reference.quantize.scaling import decode_factors, over_elements, per_row
from narrowgauge.reference.quantize.zero_points import without_zeros
from narrowgauge.spec.arguments import check_out_dtype
from narrowgauge.spec.quantized import Quantized


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values (M, K) of `q` in float32, bfloat16 or float16: cast(fl(q·f)), f = fl(fl(s·gamax)·fl(1/2688)).

    4over6 has 6E in place of 2688. MX and FP8 have f = s. The form of f is `Recipe.decode`. A transform is not undone.
    Source: docs/numerics.md#nvfp4, Dequantize; docs/numerics.md#mx; docs/numerics.md#fp8-with-float32-scales.

    Raises TypeError for a wrong dtype, ValueError if the tensor scale is rounded to the dtype of x and `q` has none.
    """
    check_out_dtype(dtype, "dequantize")
    rows, columns = q.shape
    factors = per_row(decode_factors(linear_scales(q), q), q.recipe, rows)
    out = torch.empty(rows, columns, dtype=dtype, device=q.codes.device)
    if out.numel() == 0:
        return out
    codes = rowwise_codes(q)
    for part in slabs(out):
        values = without_zeros(decode_stored(codes[part], q.recipe.element, columns), q, part)
        out[part] = over_elements(values, factors[part], q.recipe, torch.mul)
    return out
