"""LayerNorm and RMSNorm and their gradients, in high precision, with what any float32 kernel can give of them.

Formulas: x̂ = (x − μ)·r, r = 1/√(σ² + eps), σ² = mean (x − μ)² (LayerNorm; Ba, Kiros and Hinton, 2016), or μ = 0 and
σ² = mean x² (RMSNorm; Zhang and Sennrich, 2019); y = x̂·γ + β. Backward, g = dy·γ:
dx = r·(g − mean g − x̂·mean(g·x̂)), without mean g for RMSNorm; dγ = Σ dy·x̂ and dβ = Σ dy over the rows.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from narrowgauge.reference.high_precision.bounded import Bounded, exactly, near
from narrowgauge.spec.summation import FLT_MAX, UNIT

Kind = Literal["layer", "rms"]


def norm_forward(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, kind: Kind, eps: float) -> Bounded:
    """y (M, K) of x (M, K), γ (K,) and β (K,), which is None for RMSNorm.

    The bound covers the variance in two passes, or by Welford's updates merged in a tree, sums in any order, and
    x·r − μ·r in place of (x − μ)·r. It does not cover mean x² − μ². Raises ValueError for a kind or shapes that do not
    fit.
    """
    _check(x, gamma, kind)
    if (None if beta is None else tuple(beta.shape)) != (None if kind == "rms" else tuple(gamma.shape)):
        found = None if beta is None else f"of shape {tuple(beta.shape)}"
        raise ValueError(f"beta is (K,) for the layer norm and None for the rms norm, not {found} for the {kind} norm")
    normalised, _, _ = _normalised(x, kind, eps)
    y = normalised * exactly(gamma)
    return y.spread(1) if beta is None else y.spread(1) + exactly(beta)


def norm_backward(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, kind: Kind, eps: float
) -> tuple[Bounded, Bounded, Bounded | None]:
    """dx (M, K), dγ (K,), and dβ (K,) or None for RMSNorm, of the gradient dy (M, K) of `norm_forward`'s output.

    The bound covers dx = r·g + b·x + c with b = (μ·Σg − Σg·x)·r³/K and c = −b·μ − r·Σg/K too, torch's on CPUs. Raises
    ValueError for a kind or shapes that do not fit.
    """
    _check(x, gamma, kind)
    if dy.shape != x.shape:
        raise ValueError(f"dy has the shape of x: {tuple(dy.shape)} and {tuple(x.shape)}")
    normalised, r, mean = _normalised(x, kind, eps)
    given = exactly(dy)
    g = given * exactly(gamma)
    inner = g - normalised * (g * normalised).mean(1, keepdim=True)
    if mean is not None:
        inner = inner - g.mean(1, keepdim=True)
    dx = (r * inner).spread(2)
    dgamma = (given * normalised).sum(0)
    return dx.either(lambda: _apart(g, exactly(x), r, mean)), dgamma, None if mean is None else given.sum(0)


def _apart(g: Bounded, x: Bounded, r: Bounded, mean: Bounded | None) -> Bounded:
    """dx by sums of g and g·x, each of the row's own numbers: cancels where the mean is large."""
    inverse = near(1.0 / x.shape[1], x.value.device)
    cube = r * r * r * inverse
    products = (g * x).sum(1, keepdim=True)
    if mean is None:
        return (r * g).spread(1) - (products * cube * x).spread(4)
    total = g.sum(1, keepdim=True)
    b = ((mean * total - products) * cube).spread(2)
    # b·x − b·μ have the same b: its error moves them by b's error times x − μ, their own roundings are apart.
    moved = (b * (x - mean)).further(lambda: 4 * UNIT * b.size * (x.size + mean.size))
    return r * g + moved - (r * total * inverse).spread(2)


def _normalised(x: torch.Tensor, kind: Kind, eps: float) -> tuple[Bounded, Bounded, Bounded | None]:
    """x̂ (M, K), r (M, 1) and μ (M, 1) or None."""
    value, floor = exactly(x), near(eps, x.device)
    if kind == "rms":
        r = ((value * value).mean(1, keepdim=True).spread(1) + floor).rsqrt()
        return value * r, r, None
    mean = _mean(value)
    deviation = value - mean
    r = (_variance(value, mean) + floor).rsqrt()
    # x·r − μ·r: roundings of either product and of their difference.
    normalised = (deviation * r).further(lambda: 3 * UNIT * (value.size + mean.size) * r.size)
    return normalised, r, mean


def _mean(x: Bounded) -> Bounded:
    """The mean of every row (M, 1), by a sum in any order or by merging the means of parts of the row.

    A part of k numbers whose magnitudes add up to A has a mean that is off by e. Adding a number, m + (x − m)/k rounds
    by at most u·(A + 3·|x − m|)/k; two parts merged as w_a·m_a + w_b·m_b by at most 4·u·A/k. So k·e grows by 4·u·A a
    merge, and by little more than u·A with each number that a thread adds alone: at most min(4·k, k + 128)·u·A/k for
    merges in a tree of at most 32 levels behind that.
    """
    count = x.shape[1]
    mean = x.mean(1, keepdim=True)

    def merged() -> torch.Tensor:  # terms of the second order are within 2^-10 of it
        return UNIT * min(4.0, 1 + 128 / count) * x.size.sum(1, keepdim=True) * (1 + 2.0**-10)

    return mean.either(lambda: Bounded(mean.value, merged))


def _variance(x: Bounded, mean: Bounded) -> Bounded:
    """The mean square (M, 1) of the deviations from the mean, in two passes or by merging parts of the row.

    Let E be the largest error of the mean of any part: with A the sum of magnitudes and m the largest of them, a part
    of k numbers has at most u·min(4, 1 + 128/k)·min(A, k·m), so at most u·min(4·A, A + 128·m). Every way is a sum S of
    squares w·δ², one a merge, where δ is off by at most 2·E and its rounding, and Σ w ≤ L·K, L = max(1, log2(K)/2), as
    the smaller of the two parts counts for at most (K/2)·log2 K in all. By Cauchy and Schwarz the errors of δ make at
    most 4·E·√(L·K·S) + 4·E²·L·K of S; the squares and sums round as sums of K + 8 terms do.
    """
    count = x.shape[1]
    deviations = x.value - mean.value
    squares = (deviations * deviations).sum(1, keepdim=True)

    def error() -> torch.Tensor:
        magnitude, largest = x.size.sum(1, keepdim=True), x.size.amax(1, keepdim=True)
        far = UNIT * torch.minimum(4 * magnitude, magnitude + 128 * largest) * (1 + 2.0**-10)
        merged = max(1.0, math.log2(count) / 2) * count
        moved = 4 * far * (merged * squares).sqrt() + 4 * far * far * merged
        bound = moved + (count + 8) * UNIT * (squares + moved) + 2.0**-50 * count * squares
        bound = bound.masked_fill(squares > FLT_MAX / 2, torch.inf)
        return torch.where(squares.isfinite(), bound, 0.0)

    return Bounded(squares, error) * near(1.0 / count, x.value.device)


def _check(x: torch.Tensor, gamma: torch.Tensor, kind: str) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"the norm is one of {', '.join(get_args(Kind))}, not {kind!r}")
    if x.dim() != 2 or tuple(gamma.shape) != (x.shape[1],) or x.shape[1] == 0:
        raise ValueError(f"a norm takes x (M, K) and gamma (K,): shapes are {tuple(x.shape)} and {tuple(gamma.shape)}")
