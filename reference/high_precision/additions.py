"""The additions that modules do in high precision: of residuals, and of the rows of a gradient for a bias."""

from __future__ import annotations

import torch

from narrowgauge.reference.high_precision.bounded import Bounded, exactly


def residual_sum(a: torch.Tensor, b: torch.Tensor) -> Bounded:
    """a + b as one float32 addition gives it, so without an error; one cast ends it. Raises ValueError for two shapes.

    Source: docs/numerics.md#modules; residuals are of one dtype, float32, bfloat16 or float16.
    """
    if a.shape != b.shape:
        raise ValueError(f"a residual has the shape of what it is added to: {tuple(a.shape)} and {tuple(b.shape)}")
    return exactly(a.float() + b.float())


def column_sum(dy: torch.Tensor) -> Bounded:
    """Σ over the rows of (M, N), in float32 and any order: (N,). Exact where no order of summation can round.

    Raises ValueError for another number of dimensions.
    """
    if dy.dim() != 2:
        raise ValueError(f"columns of a matrix (M, N) are summed, not of a tensor {tuple(dy.shape)}")
    return exactly(dy).sum(0)
