"""The Hadamard transform as an operation."""

from __future__ import annotations

import numpy as np
import torch

from narrowgauge.native.runtime.arguments import BLOCK, THREADS, blocks_for, supported
from narrowgauge.native.runtime.launch import launch
from narrowgauge.spec.arguments import check_rotation
from narrowgauge.spec.recipes import Recipe

_BLOCKS_PER_THREAD = {"cuda": 1, "cpu": 8}
"""Blocks of 16 of a thread. On a CPU a thread has whole groups."""


def transform(x: torch.Tensor, recipe: str | Recipe) -> torch.Tensor:
    """`x` (M, K), bfloat16, any strides, rotated along K by the recipe's transform: bfloat16 (M, K), contiguous.

    Raises ValueError if the recipe has no transform or K is no multiple of its group, TypeError for another dtype.
    """
    rotation = check_rotation(x, supported(recipe))
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    group = rotation.group
    factor = torch.tensor(group**-0.5).bfloat16().item()  # 1/√group, rounded to nearest; ¼ for 16
    launch(
        "hadamard",
        "hadamard",
        (blocks_for(rows * blocks_for(columns, BLOCK), THREADS * _BLOCKS_PER_THREAD.get(x.device.type, 1)),),
        (THREADS,),
        (x, out, np.int64(rows), np.int64(columns), np.int64(x.stride(0)), np.int64(x.stride(1)), np.int32(group),
         np.int32(rotation.signs), np.float32(factor)),
        device=x.device,
    )  # fmt: skip
    return out
