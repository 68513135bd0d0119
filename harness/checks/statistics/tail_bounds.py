"""Upper bounds of tail probabilities, as natural logarithms. They hold for any probability and assume no normality.

`binomial` and `bennett` are two-sided: twice the smaller tail, with a logarithm of at most 0. Tensors are float64.
"""

from __future__ import annotations

import math

import torch

_ROUNDING = 2.0**-48
"""Relative error assumed for sums and differences of lgamma: about 30 times the measured error."""


def binomial(up: torch.Tensor, trials: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """log of twice the smaller tail: at least, or at most, `up` successes in `trials` with probability `p`.

    The bound is a few percent above the exact tail. Beyond the mean, the ratio of consecutive terms of the tail falls.
    The tail is therefore at most its first term times the geometric series of the first ratio. The bound is exact for
    a tail with a single term, and its relative error falls with the distance from the mean.
    """
    return torch.minimum(_upper(up, trials, p), _upper(trials - up, trials, 1 - p)).add_(math.log(2)).clamp_(max=0.0)


def _upper(up: torch.Tensor, trials: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """log of a bound of P(X >= up); 0 if `up` is at most the mean."""
    log_factorial = torch.lgamma(trials + 1)
    log_coefficient = log_factorial - torch.lgamma(up + 1) - torch.lgamma(trials - up + 1)
    first = log_coefficient + torch.xlogy(up, p) + torch.xlogy(trials - up, 1 - p)
    series = torch.log((up + 1) * (1 - p)) - torch.log(up + 1 - (trials + 1) * p)
    # The tail of up = trials has a single term.
    series = torch.where(up == trials, 0.0, series)
    return torch.where(up > trials * p, (first + series + log_factorial * _ROUNDING).clamp(max=0.0), 0.0)


def bennett(total: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """log of twice Bennett's bound of P(sum >= |total|), for a sum of independent numbers in [-1, 1] with mean 0.

    `variance`: exact variance of the sum. Source: Bennett, "Probability inequalities for the sum of independent random
    variables" (1962).
    """
    x = total.abs() / variance
    exponent = variance * ((1 + x) * torch.log1p(x) - x)
    # A sum without variance is 0.
    constant_exponent = torch.where(total == 0, 0.0, torch.inf)
    return (math.log(2) - torch.where(variance > 0, exponent, constant_exponent)).clamp(max=0.0)


def chernoff(total: float, log_mass: torch.Tensor, values: torch.Tensor, copies: torch.Tensor) -> tuple[float, float]:
    """log of bounds of P(sum <= total) and P(sum >= total) for a sum of independent numbers. Both are one-sided.

    The sum has `copies[k]` numbers of kind k. A number of kind k has the value `values[k, c]` with probability
    exp(`log_mass[k, c]`). For any t, P(sum >= s) is at most E[exp(t·sum)]·exp(-t·s) (Chernoff). t is the best power of
    two.
    """
    best = [0.0, 0.0]
    for exponent in range(-10, 7):
        for side, sign in enumerate((-1.0, 1.0)):
            t = sign * 2.0**exponent
            generating = float((torch.logsumexp(log_mass + t * values, 1) * copies).sum())
            best[side] = min(best[side], generating - t * total)
    return best[0], best[1]
