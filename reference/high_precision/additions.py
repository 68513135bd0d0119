"""Additions of modules in high precision: residuals, and the sum of the rows of a gradient for a bias."""

from __future__ import annotations

import torch

from narrowgauge.reference.high_precision.bounded import Bounded, exactly


def residual_sum(a: torch.Tensor, b: torch.Tensor) -> Bounded:
    """a + b by a single float32 addition, so with error 0; the caller casts the sum once.

    The tensors have the same dtype, float32, bfloat16 or float16. Raises ValueError if the shapes differ. Source:
    docs/numerics.md#modules.
    """
    if a.shape != b.shape:
        raise ValueError(f"both tensors of a residual have the same shape, not {tuple(a.shape)} and {tuple(b.shape)}")
    return exactly(a.float() + b.float())


def column_sum(dy: torch.Tensor) -> Bounded:
    """Σ over the rows of (M, N), in float32 and any order: (N,). Exact if no order of summation can round.

    Raises ValueError for another number of dimensions.
    """
    if dy.dim() != 2:
        raise ValueError(f"column_sum takes a matrix (M, N), not a tensor of shape {tuple(dy.shape)}")
    return exactly(dy).sum(0)
