"""LayerNorm and RMSNorm and their gradients in high precision, with the intervals of correct float32 kernels.

Formulas: x̂ = (x − μ)·r, r = 1/√(σ² + eps), σ² = mean (x − μ)² (LayerNorm; Ba, Kiros and Hinton, 2016), or μ = 0 and
σ² = mean x² (RMSNorm; Zhang and Sennrich, 2019); y = x̂·γ + β. Backward, g = dy·γ:
dx = r·(g − mean g − x̂·mean(g·x̂)), without mean g for RMSNorm; dγ = Σ dy·x̂ and dβ = Σ dy over the rows.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from narrowgauge.reference.high_precision.bounded import RSQRT_ULPS, Bounded, assumption, exactly, rounded_constant
from narrowgauge.spec.summation import FLT_MAX, UNIT

Kind = Literal["layer", "rms"]
_ASSUMES = assumption("rsqrtf", RSQRT_ULPS)


def norm_forward(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, kind: Kind, eps: float) -> Bounded:
    """y (M, K) from x (M, K), γ (K,) and β (K,); β is None for RMSNorm.

    The bound covers the variance in two passes or by Welford's updates merged in a tree, sums in any order, and
    x·r − μ·r in place of (x − μ)·r. The bound does not cover mean x² − μ². Raises ValueError for an unknown kind or
    shapes that do not fit together.
    """
    _check(x, gamma, kind)
    if (None if beta is None else tuple(beta.shape)) != (None if kind == "rms" else tuple(gamma.shape)):
        actual = None if beta is None else f"of shape {tuple(beta.shape)}"
        raise ValueError(f"beta is (K,) for the layer norm and None for the rms norm, not {actual} for the {kind} norm")
    y = normalised(x, kind, eps)[0] * exactly(gamma)
    y = y.with_roundings(1) if beta is None else y.with_roundings(1) + exactly(beta)
    return y.assuming(_ASSUMES)


def norm_backward(
    dy: torch.Tensor | Bounded, x: torch.Tensor, gamma: torch.Tensor, kind: Kind, eps: float
) -> tuple[Bounded, Bounded, Bounded | None]:
    """dx (M, K), dγ (K,), and dβ (K,) or None for RMSNorm, for the gradient dy (M, K) of the output of `norm_forward`,
    which is known exactly or bounded.

    The bound also covers the formula of torch on CPUs, dx = r·g + b·x + c with b = (μ·Σg − Σg·x)·r³/K and
    c = −b·μ − r·Σg/K. Raises ValueError for an unknown kind or shapes that do not fit together.
    """
    _check(x, gamma, kind)
    if dy.shape != x.shape:
        raise ValueError(f"dy has the shape of x: {tuple(dy.shape)} and {tuple(x.shape)}")
    unit, r, mean = normalised(x, kind, eps)
    output_gradient = exactly(dy)
    g = output_gradient * exactly(gamma)
    inner = g - unit * (g * unit).mean(1, keepdim=True)
    if mean is not None:
        inner = inner - g.mean(1, keepdim=True)
    dx = (r * inner).with_roundings(2)
    dgamma = (output_gradient * unit).sum(0).assuming(_ASSUMES)
    dbeta = None if mean is None else output_gradient.sum(0)
    return dx.hull(lambda: _dx_by_row_sums(g, exactly(x), r, mean)).assuming(_ASSUMES), dgamma, dbeta


def _dx_by_row_sums(g: Bounded, x: Bounded, r: Bounded, mean: Bounded | None) -> Bounded:
    """dx computed from the row sums of g and g·x, which cancel if the mean is large."""
    inverse = rounded_constant(1.0 / x.shape[1], x.value.device)
    cube = r * r * r * inverse
    products = (g * x).sum(1, keepdim=True)
    if mean is None:
        return (r * g).with_roundings(1) - (products * cube * x).with_roundings(4)
    total = g.sum(1, keepdim=True)
    b = ((mean * total - products) * cube).with_roundings(2)
    # b·x and b·μ contain the same b: its error moves b·x − b·μ by the error times x − μ. Both products round.
    difference = (b * (x - mean)).with_error(
        lambda: 4 * UNIT * b.max_magnitude * (x.max_magnitude + mean.max_magnitude)
    )
    return r * g + difference - (r * total * inverse).with_roundings(2)


def normalised(x: torch.Tensor, kind: Kind, eps: float) -> tuple[Bounded, Bounded, Bounded | None]:
    """x̂ (M, K), r (M, 1) and μ (M, 1) or None."""
    value, floor = exactly(x), rounded_constant(eps, x.device)
    if kind == "rms":
        r = ((value * value).mean(1, keepdim=True).with_roundings(1) + floor).rsqrt()
        return value * r, r, None
    mean = _mean(value)
    deviation = value - mean
    r = (_variance(value, mean) + floor).rsqrt()
    # x·r − μ·r: roundings of both products and of the difference.
    unit = (deviation * r).with_error(lambda: 3 * UNIT * (value.max_magnitude + mean.max_magnitude) * r.max_magnitude)
    return unit, r, mean


def _mean(x: Bounded) -> Bounded:
    """The mean of every row (M, 1), by a sum in any order or by merging the means of parts of the row.

    Let the mean of a part of k numbers have error e, and let A be the sum of their magnitudes. Adding a number by
    m + (x − m)/k rounds by at most u·(A + 3·|x − m|)/k; merging two parts by w_a·m_a + w_b·m_b, by at most 4·u·A/k.
    Hence k·e grows by 4·u·A per merge, and by little more than u·A per number that a thread adds alone. With merges in
    a tree of at most 32 levels afterwards, e is at most min(4·k, k + 128)·u·A/k.
    """
    count = x.shape[1]
    mean = x.mean(1, keepdim=True)

    def merged() -> torch.Tensor:  # 2^-10 covers the terms of second order
        return UNIT * min(4.0, 1 + 128 / count) * x.max_magnitude.sum(1, keepdim=True) * (1 + 2.0**-10)

    return mean.hull(lambda: Bounded(mean.value, merged))


def _variance(x: Bounded, mean: Bounded) -> Bounded:
    """The mean square (M, 1) of the deviations from the mean, in two passes or by merging parts of the row.

    Let E be the largest error of the mean of a part, A the sum of magnitudes and m the largest magnitude. The mean of a
    part of k numbers has an error of at most u·min(4, 1 + 128/k)·min(A, k·m), so E ≤ u·min(4·A, A + 128·m).
    Every algorithm computes a sum S of squares w·δ², a square per merge. δ has an error of at most 2·E plus its
    rounding. The smaller parts of all merges have at most (K/2)·log2 K numbers, so Σ w ≤ L·K with
    L = max(1, log2(K)/2). By Cauchy and Schwarz the errors of δ change S by at most 4·E·√(L·K·S) + 4·E²·L·K. Squares
    and sums round like a sum of K + 8 terms.
    """
    count = x.shape[1]
    deviations = x.value - mean.value
    squares = (deviations * deviations).sum(1, keepdim=True)

    def error() -> torch.Tensor:
        magnitude, largest = x.max_magnitude.sum(1, keepdim=True), x.max_magnitude.amax(1, keepdim=True)
        mean_error = UNIT * torch.minimum(4 * magnitude, magnitude + 128 * largest) * (1 + 2.0**-10)
        weights = max(1.0, math.log2(count) / 2) * count
        propagated = 4 * mean_error * (weights * squares).sqrt() + 4 * mean_error * mean_error * weights
        bound = propagated + (count + 8) * UNIT * (squares + propagated) + 2.0**-50 * count * squares
        bound = bound.masked_fill(squares > FLT_MAX / 2, torch.inf)
        return torch.where(squares.isfinite(), bound, 0.0)

    return Bounded(squares, error) * rounded_constant(1.0 / count, x.value.device)


def _check(x: torch.Tensor, gamma: torch.Tensor, kind: str) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"unknown norm {kind!r}; norms are {', '.join(get_args(Kind))}")
    if x.dim() != 2 or tuple(gamma.shape) != (x.shape[1],) or x.shape[1] == 0:
        raise ValueError(f"a norm takes x (M, K) and gamma (K,): shapes are {tuple(x.shape)} and {tuple(gamma.shape)}")
