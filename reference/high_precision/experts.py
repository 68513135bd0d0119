"""What a mixture of experts computes in high precision: SwiGLU, and the rows of the choices of tokens, forward and
backward, with the intervals of correct float32 kernels.

SwiGLU (Shazeer, 2020): silu(g)·u of gate and up, silu(g) = g·σ(g), σ(g) = 1/(1 + e^−g).
"""

from __future__ import annotations

import torch

from narrowgauge.reference.high_precision.bounded import EXP_ULPS, TANH_ULPS, Bounded, assumption, exactly
from narrowgauge.spec.summation import UNIT

_SIGMOID = 5
"""Absolute error of σ(g) in units of 2^-24. As 1/(1 + e^−g) with expf or exp2f: e^−g has a relative error of 5 units (2
ulps), which moves σ by at most 5·σ·(1 − σ), below 1.3; a rounded argument g·log2 e of exp2f, 2 units, by 2·|g|·σ·(1 −
σ), below 0.5; the sum and the quotient round: together below 4. As ½ + ½·tanh(½·g): 5 units of a tanh, halved, and the
rounding of the sum, below 4."""
_ORDERS = 3
"""Roundings of kernels that multiply in another order, or that divide g by 1 + e^−g."""
_ASSUMES = "; ".join((assumption("expf", EXP_ULPS), assumption("tanhf", TANH_ULPS)))


def _sigmoid(x: torch.Tensor) -> Bounded:
    value = torch.sigmoid(x.double())
    error = torch.full_like(value, _SIGMOID * UNIT).masked_fill(x.isnan(), 0.0)
    return Bounded(value, error)


def swiglu_forward(x: torch.Tensor) -> Bounded:
    """silu(g)·u of `x` (M, 2·F), whose first F columns are g and whose last are u: (M, F)."""
    gate, up = x.chunk(2, dim=-1)
    return (exactly(gate) * _sigmoid(gate) * exactly(up)).with_roundings(_ORDERS).assuming(_ASSUMES)


def swiglu_backward(dy: torch.Tensor, x: torch.Tensor) -> Bounded:
    """Gradient of `x` (M, 2·F) for the gradient `dy` (M, F) of SwiGLU: dy·u·(σ + g·σ·(1 − σ)), and dy·silu(g).

    Raises ValueError if the shapes do not belong together.
    """
    if dy.shape[:-1] != x.shape[:-1] or 2 * dy.shape[-1] != x.shape[-1]:
        raise ValueError(f"dy has half as many columns as x: {tuple(dy.shape)} and {tuple(x.shape)}")
    gate, up = x.chunk(2, dim=-1)
    s, g, ones = _sigmoid(gate), exactly(gate), exactly(torch.ones((), device=x.device))
    slope = (s + g * s * (ones - s)).with_roundings(_ORDERS)
    of_gate = (exactly(dy) * (exactly(up) * slope)).with_roundings(_ORDERS)
    of_up = (exactly(dy) * (g * s)).with_roundings(_ORDERS)
    value = torch.cat([of_gate.value, of_up.value], -1)
    return Bounded(value, lambda: torch.cat([of_gate.error, of_up.error], -1), _ASSUMES)


def _chosen(y: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows `positions` (T, k) of `y` (rows, N), any row for a negative position: (T, k, N)."""
    return (y if len(y) else y.new_zeros(1, y.shape[1]))[positions.clamp(min=0)]


def weighted_sum(y: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None = None) -> Bounded:
    """Σ weights[t, j]·y[positions[t, j]] over the choices j of token t with a position that is not negative: (T, N).

    `y` (rows, N), `positions` int64 (T, k), `weights` float32 (T, k); None: weights of 1. In float32 and any order."""
    terms = exactly(_chosen(y, positions))
    if weights is not None:
        terms = terms * exactly(weights.unsqueeze(-1))
    return terms.masked((positions >= 0).unsqueeze(-1)).sum(1)


def weighted_rows(dy: torch.Tensor, source_rows: torch.Tensor, weights: torch.Tensor) -> Bounded:
    """Gradient of y for the gradient `dy` (T, N) of `weighted_sum`: weights[t, j]·dy[t] in row r: (rows, N).

    `source_rows` int64 (rows,): t·k + j of the choice of each row."""
    choices = max(1, weights.shape[1])
    return exactly(dy[source_rows // choices]) * exactly(weights.flatten()[source_rows].unsqueeze(-1))


def weight_gradient(dy: torch.Tensor, y: torch.Tensor, positions: torch.Tensor) -> Bounded:
    """Gradient of the weights for the gradient `dy` (T, N) of `weighted_sum`: Σₙ dy[t, n]·y[positions[t, j], n].

    (T, k), in float32 and any order; 0 for a choice without a position."""
    terms = exactly(dy.unsqueeze(1)) * exactly(_chosen(y, positions))
    return terms.masked((positions >= 0).unsqueeze(-1)).sum(-1)
