"""The softmax of attention's scores over the keys that a mask keeps, with what fused kernels do to it.

Formula: p_j = exp(s_j − max s) / Σ_k exp(s_k − max s). Fused kernels (FlashAttention 2, algorithm 1) see the keys in
blocks, subtract the largest score so far and scale what they have whenever that grows.
"""

from __future__ import annotations

import math

import torch

from narrowgauge.reference.high_precision.bounded import Bounded
from narrowgauge.spec.summation import UNIT

_BLOCK = 16
"""Kernels see at least as many keys at a time."""
_EXP_ULPS = 20
"""Of the exponential. CUDA's expf and exp2f have 2 (CUDA C++ Programming Guide), ex2.approx.ftz 2 over the full range
(PTX ISA), as fast-math makes of exp2f in FlashAttention; torch's attention on CPUs takes SLEEF's exp of 20 ulps."""


def softmax(scores: Bounded, keep: torch.Tensor) -> Bounded:
    """The softmax over the last dimension (…, K), of the scores that `keep` (bool, (…, K)) marks; 0 elsewhere.

    Every row keeps a score. The argument of the exponential may be s − m, or s·log2(e) − m·log2(e) with either product
    rounded or the logarithm of the sum in place of m, so it may be off by a few roundings of s and of m.
    """
    columns = scores.shape[-1]
    value = scores.value.masked_fill(~keep, -torch.inf)
    top = value.amax(-1, keepdim=True)
    blocks = -(-columns // _BLOCK)

    def argument() -> torch.Tensor:
        reach = scores.size.masked_fill(~keep, 0.0).amax(-1, keepdim=True) + math.log(max(1, columns))
        return scores.error + 6 * UNIT * blocks * reach

    exponentials = Bounded(value - top, argument).exp(ulps=_EXP_ULPS * blocks).spread(blocks).masked(keep)
    shares = (exponentials / exponentials.sum(-1, keepdim=True)).masked(keep)
    # A share of a sum of numbers that are not negative is no more than 1, but for the roundings of the sum.
    most = 1 + 4 * UNIT * columns
    return Bounded(
        shares.value, lambda: torch.where(shares.value.isfinite(), shares.error.clamp(max=most), shares.error)
    )
