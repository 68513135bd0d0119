"""GELU in its tanh form and its gradient in high precision, with the intervals of correct float32 kernels.

Formula (Hendrycks and Gimpel, 2016; torch's approximate="tanh"): ½·x·(1 + tanh(u)), u = √(2/π)·(x + 0.044715·x³).
"""

from __future__ import annotations

import math

import torch

from narrowgauge.reference.high_precision.bounded import (
    TANH_ULPS,
    Bounded,
    assumption,
    exactly,
    relative_error,
    rounded_constant,
)
from narrowgauge.spec.summation import UNIT

_ROOT = math.sqrt(2 / math.pi)
CUBIC = 0.044715
_OTHER_STEPS = 6
"""Roundings of kernels with a different order of multiplications, with √(2/π) rounded twice, or with a factor 2·log2 e
for exp2f."""
_SIGMOID = 6
"""Absolute error of tanh(u) as 2·s − 1 or 1 − 2·s, with s = 1/(1 + e^(∓2u)), in units of 2^-24. Triton and CUTLASS
kernels compute tanh so, and x·s is the product ½·x·(1 + tanh u). expf and exp2f have a relative error of at most 5
units (2 ulps), so e^(∓2u) moves s by at most 5·s·(1 − s); the sum, the quotient and the difference round: together
10·s·(1 − s) + 4·s + 1, at most 5.9 for 0 ≤ s ≤ 1."""

_ASSUMES = assumption("tanhf", TANH_ULPS)


def gelu_forward(x: torch.Tensor, cubic: float = CUBIC) -> Bounded:
    """GELU of every number of `x`, of the same shape. `cubic`: coefficient of x³.

    For x far below 0 the sum 1 + tanh(u) cancels, so the bound is about 2^-23·|x| and not relative to the result.
    """
    value = exactly(x)
    _, one_and_tanh = tanh_terms(value, cubic)
    return (value.times_power_of_two(0.5) * one_and_tanh).with_roundings(1).assuming(_ASSUMES)


def gelu_backward(
    dy: torch.Tensor, x: torch.Tensor, cubic: float = CUBIC, derived_cubic: float | None = None
) -> Bounded:
    """dy times the derivative at x: ½·(1 + tanh u) + ½·x·(1 − tanh² u)·u′, u′ = √(2/π)·(1 + 3·0.044715·x²).

    `cubic`: coefficient of x³ in u. `derived_cubic`: coefficient of x² in u′, by default 3·`cubic`.

    Raises ValueError if the shapes differ.
    """
    if dy.shape != x.shape:
        raise ValueError(f"dy has the shape of x: {tuple(dy.shape)} and {tuple(x.shape)}")
    value, ones = exactly(x), exactly(torch.ones((), device=x.device))
    t, one_and_tanh = tanh_terms(value, cubic)
    square = rounded_constant(3 * cubic if derived_cubic is None else derived_cubic, x.device) * value * value
    inner = rounded_constant(_ROOT, x.device) * (ones + square)
    right = value.times_power_of_two(0.5) * (ones - t * t) * inner.with_roundings(_OTHER_STEPS)
    return (exactly(dy) * (one_and_tanh.times_power_of_two(0.5) + right)).assuming(_ASSUMES)


def tanh_terms(x: Bounded, cubic: float = CUBIC) -> tuple[Bounded, Bounded]:
    """tanh(u) and 1 + tanh(u)."""
    device = x.value.device
    u = rounded_constant(_ROOT, device) * (x + rounded_constant(cubic, device) * x * x * x)
    t = u.with_roundings(_OTHER_STEPS).tanh()
    t = t.with_error(lambda: _SIGMOID * UNIT - relative_error(TANH_ULPS) * t.value.abs())
    return t, exactly(torch.ones((), device=device)) + t
