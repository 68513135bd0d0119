"""What becomes of an output where float32 numbers below 2^-126 may become 0: intervals that hold both answers."""

from __future__ import annotations

import torch

from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.quantize.scaling import used_tensor_scale
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import TINY


def below_normal(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """bool: something in [lower, upper] may be flushed. 2^-126 itself may have been less before it was rounded."""
    return (lower <= TINY) & (upper >= -TINY)


def flushed_ends(
    lower: torch.Tensor, upper: torch.Tensor, vanishes: torch.Tensor | bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ends of [lower, upper] with 0, where something in it may be flushed or `vanishes` anyway."""
    widen = below_normal(lower, upper) | vanishes
    return torch.where(widen, lower.clamp(max=0.0), lower), torch.where(widen, upper.clamp(min=0.0), upper)


def subnormal(x: torch.Tensor) -> torch.Tensor:
    """bool: a float32 number that may be flushed."""
    return (x != 0) & (x.abs() < TINY)


def alpha_vanishes(a: Quantized, b: Quantized) -> torch.Tensor:
    """bool, of a shape that fits (M, N): `alpha(a, b)`, or one of the factors that it is made of, may be flushed."""
    found = alpha(a, b)
    if a.recipe.alpha == "1":
        return torch.zeros_like(found, dtype=torch.bool)
    if a.recipe.alpha in ("(a*b)/d", "(b*a)*(1/d)"):
        left, right = a.required_amax, b.required_amax
    elif a.recipe.alpha == "s_a*s_b":
        left, right = a.scales.view(-1), b.scales.view(-1)
    else:
        left, right = used_tensor_scale(a), used_tensor_scale(b)
    left, right = left.unsqueeze(1), right.unsqueeze(0)
    return subnormal(found) | subnormal(left) | subnormal(right) | subnormal(left * right)
