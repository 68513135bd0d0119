"""Delayed scaling: next scales from histories of amaxes."""

from __future__ import annotations

import numpy as np
import torch

from narrowgauge.native.runtime.arguments import THREADS, blocks_for, supported
from narrowgauge.native.runtime.launch import launch
from narrowgauge.spec.arguments import check_history
from narrowgauge.spec.recipes import Recipe

_TENSORS = 32
"""Tensors of a thread block."""


def update_scale(history: torch.Tensor, scale: torch.Tensor, recipe: str | Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """The histories and the scales of N tensors after a step: float32 (H, N) amaxes, the latest first, and (N,) scales.

    The history is rolled: its first amax becomes the last, the others move up by a row, and the first row is 0. The
    scale is fl(fl(max·2^−margin)/amax) if the amax is finite and above 0, else the old scale; FLT_MAX for an infinity.
    The amax is the first of the history (`most-recent`), or the largest without NaN (`max`). With `bulk` a tensor whose
    first amax is 0 keeps history and scale. Source: docs/numerics.md#delayed-scaling, and delayed_scaling.cu of
    Transformer Engine.

    Raises ValueError for a recipe without delayed scaling, ValueError or TypeError for another shape or dtype,
    NotImplementedError and ToolchainError as `quantize` does.
    """
    recipe = supported(recipe)
    delayed = check_history(history, scale, recipe)
    history, scale = history.contiguous(), scale.contiguous()
    length, tensors = history.shape
    new_history, new_scale = torch.empty_like(history), torch.empty_like(scale)
    launch(
        "delayed",
        "update_scale",
        (blocks_for(tensors, _TENSORS),),
        (THREADS,),
        (history, scale, new_history, new_scale, np.int64(length), np.int64(tensors),
         np.float32(recipe.element.max * 2.0**-delayed.margin), np.int32(delayed.algorithm == "most-recent"),
         np.int32(delayed.update == "bulk")),
        device=history.device,
    )  # fmt: skip
    return new_history, new_scale
