"""Bounds of a GEMM that flushes subnormal numbers: float32 numbers below 2^-126 may become 0.

An affected interval is extended to 0. Source: docs/tolerance.md#subnormals-flushed-to-zero.
"""

from __future__ import annotations

import torch

from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.quantize.scaling import used_tensor_scale
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import SMALLEST_NORMAL


def may_flush(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """bool: a number in [lower, upper] may be flushed. 2^-126 is included: it may be a smaller number, rounded up."""
    return (lower <= SMALLEST_NORMAL) & (upper >= -SMALLEST_NORMAL)


def extended_to_zero(
    lower: torch.Tensor, upper: torch.Tensor, flushes: torch.Tensor | bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ends of [lower, upper], extended to 0 if a number of the interval may be flushed or if `flushes`."""
    extended = may_flush(lower, upper) | flushes
    return torch.where(extended, lower.clamp(max=0.0), lower), torch.where(extended, upper.clamp(min=0.0), upper)


def is_subnormal(x: torch.Tensor) -> torch.Tensor:
    """bool: a nonzero float32 number below 2^-126."""
    return (x != 0) & (x.abs() < SMALLEST_NORMAL)


def alpha_may_flush(a: Quantized, b: Quantized) -> torch.Tensor:
    """bool, of a shape that broadcasts to (M, N): `alpha(a, b)` or a factor of it may be flushed."""
    factor = alpha(a, b)
    if a.recipe.alpha == "1":
        return torch.zeros_like(factor, dtype=torch.bool)
    if a.recipe.alpha in ("(a*b)/d", "(b*a)*(1/d)"):
        left, right = a.required_amax, b.required_amax
    elif a.recipe.alpha == "s_a*s_b":
        left, right = a.scales.view(-1), b.scales.view(-1)
    else:
        left, right = used_tensor_scale(a), used_tensor_scale(b)
    left, right = left.unsqueeze(1), right.unsqueeze(0)
    return is_subnormal(factor) | is_subnormal(left) | is_subnormal(right) | is_subnormal(left * right)
