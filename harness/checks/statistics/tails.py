"""Bounds of tail probabilities, as natural logarithms: each holds at any depth, and none takes a sum for normal.

All are two-sided: twice the smaller tail, at most 0. Tensors are float64.
"""

from __future__ import annotations

import math

import torch

_ROUNDING = 2.0**-48
"""Relative error that sums and differences of lgamma are given: some 30 times what was measured."""


def binomial(up: torch.Tensor, trials: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """log of twice the probability that of `trials` at `p` at least, or at most, `up` succeed; within some percent.

    Beyond the mean each term of the tail is the one before times a ratio that only falls, so the tail is at most its
    first term times the geometric series of the first ratio: exact for one term, and ever nearer further out.
    """
    return torch.minimum(_upper(up, trials, p), _upper(trials - up, trials, 1 - p)).add_(math.log(2)).clamp_(max=0.0)


def _upper(up: torch.Tensor, trials: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """log of a bound of P(X >= up), 0 up to the mean."""
    everything = torch.lgamma(trials + 1)
    arrangements = everything - torch.lgamma(up + 1) - torch.lgamma(trials - up + 1)
    first = arrangements + torch.xlogy(up, p) + torch.xlogy(trials - up, 1 - p)
    series = torch.log((up + 1) * (1 - p)) - torch.log(up + 1 - (trials + 1) * p)
    # With up = trials there is nothing behind the first term.
    series = torch.where(up == trials, 0.0, series)
    return torch.where(up > trials * p, (first + series + everything * _ROUNDING).clamp(max=0.0), 0.0)


def bennett(total: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """log of twice the bound that a sum is as far from 0 as `total`: of independent numbers within [-1, 1], mean 0.

    `variance` is that of the sum, and exact. Source: Bennett, "Probability inequalities for the sum of independent
    random variables" (1962).
    """
    x = total.abs() / variance
    exponent = variance * ((1 + x) * torch.log1p(x) - x)
    # Nothing varies: a sum other than 0 does not happen.
    still = torch.where(total == 0, 0.0, torch.inf)
    return (math.log(2) - torch.where(variance > 0, exponent, still)).clamp(max=0.0)


def chernoff(total: float, log_mass: torch.Tensor, values: torch.Tensor, copies: torch.Tensor) -> tuple[float, float]:
    """log of bounds that a sum of independent numbers is at most, and at least, `total`; neither is doubled.

    Of kind k (K,) there are `copies[k]`, and each is `values[k, c]` with probability exp(`log_mass[k, c]`). For any t
    the chance of a sum of at least s is at most E[exp(t·sum)]·exp(-t·s); the best of powers of two is taken for t.
    """
    best = [0.0, 0.0]
    for exponent in range(-10, 7):
        for side, sign in enumerate((-1.0, 1.0)):
            t = sign * 2.0**exponent
            generating = float((torch.logsumexp(log_mass + t * values, 1) * copies).sum())
            best[side] = min(best[side], generating - t * total)
    return best[0], best[1]
