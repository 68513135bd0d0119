"""Steps of causal attention with quantized operands, forward and backward, as intervals of correct float32 kernels.

Forward: S = softmax(q·kᵀ/√d) and O = Ŝ·v. Backward: dP = S∘(dS − Σ_j S_j·dS_j) with dS = dO·vᵀ, then dq = dP̂·k/√d,
dk = dP̂ᵀ·q/√d and dv = Ŝᵀ·dO. q, k, v, dO, Ŝ and dP̂ are the decoded operands, S is the softmax before its
quantization. P, S, O and their gradients are named as in Transformer Engine (v2.9,
transformer_engine/pytorch/attention/dot_product_attention/backends.py, FP8EmulationFunc): P are the scores.

All tensors are (batch, heads, S, d) or (batch, heads, S, S).
"""

from __future__ import annotations

import math

import torch

from narrowgauge.reference.high_precision.attention import Softmax, attention_product, causal
from narrowgauge.reference.high_precision.bounded import EXP_ULPS, TRUNCATING, Bounded, assumption


def softmax(q: Bounded, k: Bounded) -> Bounded:
    """softmax(q·kᵀ/√d) over the keys up to the position of the query, 0 for the other keys."""
    scores = _scaled(attention_product(q, k.mT, torch.float32), q.shape[-1])
    return Softmax(scores, causal(q.value)).shares.assuming(assumption("expf", EXP_ULPS))


def weighted_values(s: Bounded, v: Bounded) -> Bounded:
    """S·v."""
    return attention_product(s, v, torch.float32)


def scores_gradient(do: Bounded, v: Bounded, s: Bounded, dtype: torch.dtype) -> Bounded:
    """dP = S∘(dS − Σ S∘dS), with dS = dO·vᵀ. `s`: S before its quantization, rounded to `dtype`.

    A kernel may keep S in float32, and may round dS to `dtype`.
    """
    return softmax_gradient(attention_product(do, v.mT, torch.float32).rounded(dtype), s.rounded(dtype))


def softmax_gradient(ds: Bounded, s: Bounded, row: Bounded | None = None) -> Bounded:
    """S∘(dS − row), with the sum of S∘dS of each row (…, S, 1)."""
    row = (s * ds).sum(-1, keepdim=True, roundoff=TRUNCATING) if row is None else row
    return (s * (ds - row)).with_roundings(2)


def query_gradient(dp: Bounded, k: Bounded) -> Bounded:
    """dq = dP·k/√d."""
    return _scaled(attention_product(dp, k, torch.float32), k.shape[-1])


def key_gradient(dp: Bounded, q: Bounded) -> Bounded:
    """dk = dPᵀ·q/√d."""
    return _scaled(attention_product(dp.mT, q, torch.float32), q.shape[-1])


def value_gradient(s: Bounded, do: Bounded) -> Bounded:
    """dv = Sᵀ·dO."""
    return attention_product(s.mT, do, torch.float32)


def _scaled(x: Bounded, size: int) -> Bounded:
    """x/√size; `attention_product` includes the rounding."""
    factor = 1 / math.sqrt(size)
    return Bounded(x.value * factor, lambda: x.error * factor)
