"""Delayed scaling: the next scales, from histories of amaxes."""

from __future__ import annotations

import numpy as np
import torch

from narrowgauge.native.runtime.arguments import THREADS, blocks_for, supported
from narrowgauge.native.runtime.launch import launch
from narrowgauge.spec.arguments import check_history
from narrowgauge.spec.recipes import Recipe

_TENSORS = 32
"""That a block of threads updates."""


def update_scale(history: torch.Tensor, scale: torch.Tensor, recipe: str | Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """The histories and the scales of N tensors after a step: float32 (H, N) amaxes, the latest first, and (N,) scales.

    A history is rolled: its first amax becomes the last, every other moves one up, and the first is 0. The scale is
    fl(fl(max·2^−margin)/amax) where the amax, that first one (`most-recent`) or the largest (`max`, which leaves NaN
    out), is finite and above 0, else the old one; FLT_MAX for an infinity. `bulk` leaves a tensor whose first amax is 0
    as it is. Source: docs/numerics.md#delayed-scaling, and Transformer Engine's delayed_scaling.cu.

    Raises ValueError for a recipe that is not of delayed scaling, ValueError or TypeError for another shape or dtype,
    NotImplementedError and ToolchainError as `quantize` does.
    """
    r = supported(recipe)
    rule = check_history(history, scale, r)
    history, scale = history.contiguous(), scale.contiguous()
    length, tensors = history.shape
    new_history, new_scale = torch.empty_like(history), torch.empty_like(scale)
    launch(
        "delayed",
        "update_scale",
        (blocks_for(tensors, _TENSORS),),
        (THREADS,),
        (history, scale, new_history, new_scale, np.int64(length), np.int64(tensors),
         np.float32(r.element.max * 2.0**-rule.margin), np.int32(rule.algorithm == "most-recent"),
         np.int32(rule.update == "bulk")),
        device=history.device,
    )  # fmt: skip
    return new_history, new_scale
