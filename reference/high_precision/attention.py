"""Causal attention and its gradients in high precision, with the intervals of correct float32 kernels.

Formulas: O = P·V with P = softmax(Q·Kᵀ/√d) over the keys up to the position of the query. Backward: dV = Pᵀ·dO,
dP = dO·Vᵀ, dS = P∘(dP − D) with D = Σ_j P_j·dP_j = Σ dO∘O, dQ = dS·K/√d, dK = dSᵀ·Q/√d (FlashAttention 2,
algorithms 1 and 2).
"""

from __future__ import annotations

import math

import torch

from narrowgauge.reference.high_precision.bounded import TRUNCATING, Bounded, exactly
from narrowgauge.spec.summation import UNIT

_BLOCK = 16
"""Fewest keys that a kernel with online softmax processes at a time."""
_EXP_ULPS = 20
"""Largest error of the exponential. CUDA's expf and exp2f: 2 ulps (CUDA C++ Programming Guide). ex2.approx.ftz, to
which fast-math compiles exp2f in FlashAttention: 2 ulps over the full range (PTX ISA). SLEEF's exp in torch's attention
on CPUs: 20 ulps."""


def softmax(scores: Bounded, keep: torch.Tensor) -> Bounded:
    """The softmax over the last dimension (…, K) of the scores with `keep` (bool, (…, K)); 0 for the other scores.

    Every row keeps at least a score. The argument of the exponential is s − m, or s·log2(e) − m·log2(e) with either
    product rounded; m is the maximum or the logarithm of the sum. The error of the argument is a few roundings of s
    and of m.
    """
    columns = scores.shape[-1]
    value = scores.value.masked_fill(~keep, -torch.inf)
    top = value.amax(-1, keepdim=True)
    blocks = -(-columns // _BLOCK)

    def argument() -> torch.Tensor:
        largest = scores.max_magnitude.masked_fill(~keep, 0.0).amax(-1, keepdim=True) + math.log(max(1, columns))
        return scores.error + 6 * UNIT * blocks * largest

    exponentials = Bounded(value - top, argument).exp(ulps=_EXP_ULPS * blocks).with_roundings(blocks).masked(keep)
    shares = (exponentials / exponentials.sum(-1, keepdim=True)).masked(keep)
    # A share of a sum of nonnegative numbers is at most 1, apart from the roundings of the sum.
    most = 1 + 4 * UNIT * columns
    return Bounded(
        shares.value, lambda: torch.where(shares.value.isfinite(), shares.error.clamp(max=most), shares.error)
    )


_FACTORS = 24
"""Further roundings of a product in a matrix product: 1/√d of the scores, or its root on both sides; accumulators
rescaled for every block of keys; CUTLASS's 3xTF32, which omits the product of the low parts of float32 numbers, 2^-22
of the product, and rounds the low parts by as much (16 units of 2^-24 cover both)."""


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, stored_dtype: torch.dtype | None = None
) -> Bounded:
    """softmax(q·kᵀ/√d, causal)·v of (batch, heads, S, d) tensors of one dtype: (batch, heads, S, d).

    An infinity or NaN in v makes the output NaN for every query, as 0·inf is NaN; in k, for every query that attends to
    the key. `stored_dtype`: dtype in which a kernel stores P; by default the dtype of the tensors, as in fused kernels.
    The bound holds for sums in any order and for truncating accumulators. Raises ValueError for other shapes, TypeError
    if the dtypes differ.
    """
    _check(q=q, k=k, v=v)
    stored_dtype = stored_dtype or q.dtype
    probabilities = _probabilities(q, k)
    return _output(probabilities, v, stored_dtype)


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    stored_dtype: torch.dtype | None = None,
) -> tuple[Bounded, Bounded, Bounded]:
    """The gradients (dq, dk, dv) of `attention_forward` for the gradient `do` of its output, all of the same shape.

    `out`: the output stored by the kernel, of the same shape and dtype; fused kernels compute D from it. Without `out`
    D may be computed from any output accepted by `attention_forward`: the bounds are several times wider.
    `stored_dtype`: dtype in which a kernel stores P, dS and the output. The values depend on neither argument. Raises
    the errors of `attention_forward`.
    """
    _check(q=q, k=k, v=v, do=do, **({} if out is None else {"out": out}))
    stored_dtype = stored_dtype or q.dtype
    factor = 1 / math.sqrt(q.shape[-1])
    probabilities = _probabilities(q, k)
    gradient = exactly(do)
    dv = _product(probabilities.rounded(stored_dtype).mT, gradient)
    dp = _product(gradient, exactly(v).mT)

    # Fused kernels compute D from the rounded output; torch's formula computes D from P and dP.
    def of_output() -> Bounded:
        output = _output(probabilities, v, stored_dtype).rounded(stored_dtype) if out is None else exactly(out)
        return (gradient * output).sum(-1, keepdim=True, roundoff=TRUNCATING)

    d = (probabilities * dp).sum(-1, keepdim=True, roundoff=TRUNCATING).hull(of_output)
    ds = (probabilities * (dp - d)).with_roundings(2).rounded(stored_dtype)
    dq, dk = _product(ds, exactly(k)), _product(ds.mT, exactly(q))
    return _scaled(dq, factor), _scaled(dk, factor), dv


def _probabilities(q: torch.Tensor, k: torch.Tensor) -> Bounded:
    """P (batch, heads, S, S), 0 above the diagonal."""
    places = torch.arange(q.shape[-2], device=q.device)
    keep = (places.unsqueeze(1) >= places).expand(*q.shape[:-1], q.shape[-2])
    scores = _scaled(_product(exactly(q), exactly(k).mT), 1 / math.sqrt(q.shape[-1]))
    return softmax(scores, keep)


def _output(probabilities: Bounded, v: torch.Tensor, stored_dtype: torch.dtype) -> Bounded:
    return _product(probabilities.rounded(stored_dtype), exactly(v))


def _product(a: Bounded, b: Bounded) -> Bounded:
    return a.matmul(b, roundoff=TRUNCATING, roundings=_FACTORS)


def _scaled(x: Bounded, factor: float) -> Bounded:
    """The product with 1/√d; `_FACTORS` includes its rounding."""
    return Bounded(x.value * factor, lambda: x.error * factor)


def _check(**given: torch.Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 4 for shape in shapes.values()):
        raise ValueError(f"attention takes tensors (batch, heads, S, d) of the same shape, not {shapes}")
    dtypes = {name: tensor.dtype for name, tensor in given.items()}
    if len(set(dtypes.values())) != 1:
        raise TypeError(f"attention takes tensors of the same dtype, not {dtypes}")
