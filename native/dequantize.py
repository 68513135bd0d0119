"""Dequantize: codes and scales back to values."""

from __future__ import annotations

import numpy as np
import torch

from native.arguments import DTYPES, THREADS, blocks_for, check_operand, suffix, supported
from native.launch import launch
from native.layout import linear_scales
from reference.quantized import Quantized


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values (M, K) of `q` in float32, bfloat16 or float16; a rotation is not undone. Raises as `quantize` does."""
    supported(q.recipe)
    if dtype not in DTYPES:
        raise TypeError(f"dequantize gives float32, bfloat16 or float16, not {dtype}")
    amax = check_operand(q, "q")
    rows, columns = q.shape
    scales = linear_scales(q)
    out = torch.empty(rows, columns, dtype=dtype, device=q.codes.device)
    launch(
        "dequantize_nvfp4",
        f"dequantize_nvfp4_{suffix(dtype)}",
        (blocks_for(scales.numel(), THREADS),),
        (THREADS,),
        (q.codes, scales, amax, out, np.int64(rows), np.int64(columns), np.int32(q.recipe.granularity == "row"),
         np.float32(1 / q.recipe.max_product)),
        device=q.codes.device,
    )  # fmt: skip
    return out
