"""Causal attention and its gradients, in high precision, with what any float32 kernel can give of them.

Formulas: O = P·V with P = softmax(Q·Kᵀ/√d) over the keys up to the query's own place. Backward: dV = Pᵀ·dO,
dP = dO·Vᵀ, dS = P∘(dP − D) with D = Σ_j P_j·dP_j = Σ dO∘O, dQ = dS·K/√d, dK = dSᵀ·Q/√d (FlashAttention 2,
algorithms 1 and 2).
"""

from __future__ import annotations

import math

import torch

from narrowgauge.reference.high_precision.bounded import TRUNCATING, Bounded, exactly
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


_FACTORS = 24
"""Further roundings of a product of a matrix product: 1/√d of the scores, or its root of both sides; accumulators that
are scaled for every block of keys; and CUTLASS's 3xTF32, which leaves out the product of the low parts of float32
numbers: 2^-22 of it, and the low parts' own rounding as much (16 units of 2^-24 cover them)."""


def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, kept: torch.dtype | None = None) -> Bounded:
    """softmax(q·kᵀ/√d, causal)·v of (batch, heads, S, d) tensors of one dtype: (batch, heads, S, d).

    A number of v that is not finite makes NaN of every query, as 0·inf does; of k, of those that see it. `kept`: the
    dtype in which a kernel keeps P; the tensors' own unless said otherwise, as fused kernels do. The bound
    holds for sums in any order and for accumulators that truncate. Raises ValueError for other shapes, TypeError for
    more than one dtype.
    """
    _check(q=q, k=k, v=v)
    kept = kept or q.dtype
    probabilities = _probabilities(q, k)
    return _output(probabilities, v, kept)


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    kept: torch.dtype | None = None,
) -> tuple[Bounded, Bounded, Bounded]:
    """The gradients (dq, dk, dv) of `attention_forward` for the gradient `do` of its output; shapes as there.

    `out`: the output that the kernel itself stored, of the same shape and dtype; fused kernels have D of it. Without it
    D may be of any output that `attention_forward` allows, which is several times wider. `kept`: the dtype in which a
    kernel keeps P, dS and the output, as there. The values do not depend on either. Raises as `attention_forward`.
    """
    _check(q=q, k=k, v=v, do=do, **({} if out is None else {"out": out}))
    kept = kept or q.dtype
    factor = 1 / math.sqrt(q.shape[-1])
    probabilities = _probabilities(q, k)
    gradient = exactly(do)
    dv = _product(probabilities.rounded(kept).mT, gradient)
    dp = _product(gradient, exactly(v).mT)

    # Fused kernels have D of the output, which they have rounded; torch's own formula has it of P and dP.
    def of_output() -> Bounded:
        output = _output(probabilities, v, kept).rounded(kept) if out is None else exactly(out)
        return (gradient * output).sum(-1, keepdim=True, unit=TRUNCATING)

    d = (probabilities * dp).sum(-1, keepdim=True, unit=TRUNCATING).either(of_output)
    ds = (probabilities * (dp - d)).spread(2).rounded(kept)
    dq, dk = _product(ds, exactly(k)), _product(ds.mT, exactly(q))
    return _scaled(dq, factor), _scaled(dk, factor), dv


def _probabilities(q: torch.Tensor, k: torch.Tensor) -> Bounded:
    """P (batch, heads, S, S), 0 above the diagonal."""
    places = torch.arange(q.shape[-2], device=q.device)
    keep = (places.unsqueeze(1) >= places).expand(*q.shape[:-1], q.shape[-2])
    scores = _scaled(_product(exactly(q), exactly(k).mT), 1 / math.sqrt(q.shape[-1]))
    return softmax(scores, keep)


def _output(probabilities: Bounded, v: torch.Tensor, kept: torch.dtype) -> Bounded:
    return _product(probabilities.rounded(kept), exactly(v))


def _product(a: Bounded, b: Bounded) -> Bounded:
    return a.matmul(b, unit=TRUNCATING, roundings=_FACTORS)


def _scaled(x: Bounded, factor: float) -> Bounded:
    """Times 1/√d; its own rounding is among `_FACTORS`."""
    return Bounded(x.value * factor, lambda: x.error * factor)


def _check(**given: torch.Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 4 for shape in shapes.values()):
        raise ValueError(f"attention takes tensors (batch, heads, S, d) of one shape, not {shapes}")
    dtypes = {name: tensor.dtype for name, tensor in given.items()}
    if len(set(dtypes.values())) != 1:
        raise TypeError(f"attention takes tensors of one dtype, not {dtypes}")
