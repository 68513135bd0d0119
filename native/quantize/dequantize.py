"""Dequantize: codes and scales back to values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from narrowgauge.native.quantize.layout import linear_scales
from narrowgauge.native.runtime.arguments import THREADS, blocks_for, check_operand, suffix, supported
from narrowgauge.native.runtime.launch import Argument, launch
from narrowgauge.spec.arguments import check_out_dtype
from narrowgauge.spec.formats import E2M1, E4M3, E8M0, FP32
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.scale_layouts import LINEAR

_PER_THREAD = 16
"""Elements of a thread of the general kernel."""
_UNITS = 2
"""Units of a thread of the kernels for contiguous blocks: 16 bytes of the output each, on a CPU 16 elements."""
_SCALE_KIND = {E4M3: 0, E8M0: 1, FP32: 2}


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values (M, K) of `q` in float32, bfloat16 or float16. A rotation is not inverted. Raises as `quantize` does.

    Strided codes and scales are copied first.
    """
    recipe = supported(q.recipe)
    check_out_dtype(dtype, "dequantize")
    q = replace(q, codes=q.codes.contiguous(), scales=q.scales.contiguous())  # a kernel may give strided results
    amax = check_operand(q, "q")
    if q.transposed and recipe.element is E2M1:
        raise ValueError(
            f"q of recipe {recipe} is stored transposed, two rows in a byte; the kernels read E2M1 along K"
        )
    rows, columns = q.shape
    scales = linear_scales(q)
    out = torch.empty(rows, columns, dtype=dtype, device=q.codes.device)
    flags = (f"-DELEMENT={recipe.element.name}",)
    if _in_lines(q, scales, out):
        unit = 16 // out.element_size() if out.device.type == "cuda" else _PER_THREAD
        block_log2, factor = np.int32(recipe.block[1].bit_length() - 1), np.float32(1 / recipe.max_product)
        arguments: list[Argument]
        if recipe.granularity == "row":
            name, arguments = "rows", [q.codes, scales, block_log2, amax, np.int64(columns), factor]
        else:
            name = "lines"
            arguments = [q.codes, scales, np.int32(_SCALE_KIND[recipe.scale]), block_log2, amax, factor]
        launch(
            "dequantize",
            f"dequantize_{name}_{suffix(dtype)}",
            (blocks_for(out.numel() // unit, THREADS * _UNITS),),
            (THREADS,),
            (*arguments, out, np.int64(out.numel())),
            device=q.codes.device,
            extra_flags=flags,
        )
        return out
    launch(
        "dequantize",
        f"dequantize_{suffix(dtype)}",
        (blocks_for(rows * -(-columns // _PER_THREAD), THREADS),),
        (THREADS,),
        (q.codes, np.int32(q.transposed), scales, np.int32(_SCALE_KIND[recipe.scale]), np.int64(recipe.stored_rows),
         np.int64(recipe.block[1]), np.int32(q.transposed and q.scale_layout == LINEAR), amax,
         np.int32(recipe.granularity == "row"), np.float32(1 / recipe.max_product), out,
         np.int64(rows), np.int64(columns)),
        device=q.codes.device,
        extra_flags=flags,
    )  # fmt: skip
    return out


def _in_lines(q: Quantized, scales: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether scale blocks, of one row or of the whole tensor, are contiguous, and codes and output are aligned."""
    recipe = q.recipe
    contiguous = recipe.whole or (recipe.stored_rows == 1 and q.shape[1] % recipe.block[1] == 0)
    aligned = out.numel() % _PER_THREAD == 0 and q.codes.data_ptr() % _PER_THREAD == out.data_ptr() % _PER_THREAD == 0
    return contiguous and aligned and out.numel() > 0 and not q.transposed
