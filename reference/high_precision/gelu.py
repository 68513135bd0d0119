"""GELU in its tanh form and its gradient, in high precision, with what any float32 kernel can give of them.

Formula (Hendrycks and Gimpel, 2016; torch's approximate="tanh"): ½·x·(1 + tanh(u)), u = √(2/π)·(x + 0.044715·x³).
"""

from __future__ import annotations

import math

import torch

from narrowgauge.reference.high_precision.bounded import Bounded, exactly, near

_ROOT = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_OTHER_STEPS = 4
"""Roundings of kernels that multiply in another order, or round √(2/π) twice."""


def gelu_forward(x: torch.Tensor) -> Bounded:
    """GELU of every number: of the shape of `x`.

    1 + tanh(u) cancels where x is far below 0, so the bound is about 2^-23·|x| there, and not relative to the result.
    """
    value = exactly(x)
    _, one_and_tanh = _tanh(value)
    return (value.times(0.5) * one_and_tanh).spread(1)


def gelu_backward(dy: torch.Tensor, x: torch.Tensor) -> Bounded:
    """dy times the derivative at x: ½·(1 + tanh u) + ½·x·(1 − tanh² u)·u′, u′ = √(2/π)·(1 + 3·0.044715·x²).

    Raises ValueError where the shapes differ.
    """
    if dy.shape != x.shape:
        raise ValueError(f"dy has the shape of x: {tuple(dy.shape)} and {tuple(x.shape)}")
    value, one = exactly(x), exactly(torch.ones((), device=x.device))
    t, one_and_tanh = _tanh(value)
    inner = near(_ROOT, x.device) * (one + near(3 * _CUBIC, x.device) * value * value)
    right = value.times(0.5) * (one - t * t) * inner.spread(_OTHER_STEPS)
    return exactly(dy) * (one_and_tanh.times(0.5) + right)


def _tanh(x: Bounded) -> tuple[Bounded, Bounded]:
    """tanh(u) and 1 + tanh(u)."""
    device = x.value.device
    u = near(_ROOT, device) * (x + near(_CUBIC, device) * x * x * x)
    t = u.spread(_OTHER_STEPS).tanh()
    return t, exactly(torch.ones((), device=device)) + t
