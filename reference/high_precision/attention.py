"""Causal attention and its gradients in high precision, with the intervals of correct float32 kernels.

Formulas: O = P·V with P = softmax(Q·Kᵀ/√d) over the keys up to the position of the query. Backward: dV = Pᵀ·dO,
dP = dO·Vᵀ, dS = P∘(dP − D) with D = Σ_j P_j·dP_j = Σ dO∘O, dQ = dS·K/√d, dK = dSᵀ·Q/√d (FlashAttention 2,
algorithms 1 and 2).
"""

from __future__ import annotations

import math
from functools import cached_property

import torch

from narrowgauge.reference.high_precision.bounded import (
    EXP_ULPS,
    TRUNCATING,
    Bounded,
    assumption,
    exactly,
    half_ulp,
    relative_error,
)
from narrowgauge.spec.summation import FLT_MAX, SMALLEST_NORMAL, UNIT

_EXP_ULPS = 20
"""Largest error of an exponential of scores. CUDA's expf and exp2f: `EXP_ULPS`. ex2.approx.ftz, to which fast-math
compiles exp2f in FlashAttention: 2 ulps over the full range (PTX ISA). Vectorised exp_u20 in torch's attention on CPUs:
20 ulps."""
_BLOCK = 16
"""Fewest keys at a time for which a kernel with online softmax may use exponentials with an error of `_EXP_ULPS`."""
_ASSUMES = assumption("expf", EXP_ULPS)
_ELEMENTS = 1 << 22
"""Largest number of differences v − O in memory at a time."""
_TINY = 4 * SMALLEST_NORMAL
"""Largest error of a share of a row by underflow, as the largest exponential of a row is 1."""


class Softmax:
    """The softmax over the last dimension (…, K) of the scores with `keep` (bool, (…, K)); 0 for the other scores.

    Every row keeps at least a score. The number of keys at a time is free: all keys (two passes), blocks, a single key
    (online softmax), or parts of a row merged by their maxima or by the logarithms of their sums.

    Source of the bound: docs/tolerance.md#softmax-and-attention. In float32 the weight of a key before the division by
    the sum of the weights is e^(s − m)·(1 + w) with |log(1 + w)| ≤ `_exponent`. All keys of a row have the same m, so
    it cancels in the division.
    """

    def __init__(self, scores: Bounded, keep: torch.Tensor) -> None:
        self._scores, self.keep = scores, keep
        self.values = scores.value.masked_fill(~keep, -torch.inf).softmax(-1)

    @cached_property
    def _exponent(self) -> torch.Tensor:
        """(…, K): the sum of these errors of a weight, in the exponent.

        - Score.
        - Argument s − m, or s·c − m·c with c = log2(e)/√d rounded: c, both products and the difference, 8·u·T with T
          the largest magnitude of a score; the same for parts merged by the logarithms of their sums, at most
          T + log K.
        - Factors e^(m − m′) of an online softmax, for each increase of the maximum m to m′. The rounding of their
          differences is at most 3·u·(m′ − m), in all 6·u·T. If m′·c is rounded anew in every factor, each adds
          u·|m′|. Every key is the maximum at most once: in all u·Σ|s|.
        - Exponentials: of the weight and of a merge `_EXP_ULPS`; of each factor `EXP_ULPS`, which covers `_EXP_ULPS` in
          every `_BLOCK` keys.
        """
        magnitude = self._scores.max_magnitude.masked_fill(~self.keep, 0.0)
        largest, count = magnitude.amax(-1, keepdim=True), self.count
        argument = UNIT * (24 * (largest + count.log()) + magnitude.sum(-1, keepdim=True))
        factors = max(relative_error(EXP_ULPS), relative_error(_EXP_ULPS) / _BLOCK) * count
        exponentials = (2 * relative_error(_EXP_ULPS) + factors) * (1 + 2.0**-10)
        error = self._scores.error + argument + exponentials + 2.0**-45
        return error.masked_fill(~self.keep, 0.0)

    @cached_property
    def count(self) -> torch.Tensor:
        """Kept keys of each row (…, 1), float64."""
        return self.keep.sum(-1, keepdim=True).double()

    @cached_property
    def roundoff(self) -> torch.Tensor:
        """Relative error (…, 1) of the sum of n weights, or of partial sums of weights times values.

        n additions of a truncating accumulator and a rescaling for every 16 keys; or n additions and n rescalings to
        nearest.
        """
        return (self.count + (self.count / _BLOCK).ceil()) * TRUNCATING

    @cached_property
    def least_sum(self) -> torch.Tensor:
        """Least sum (…, 1) of the computed weights, in units of their exact sum."""
        return (self.values * (-self._exponent).exp()).sum(-1, keepdim=True)

    @cached_property
    def errors(self) -> torch.Tensor:
        """Largest error (…, K) of a weight, in units of the exact sum of the weights."""
        return (self.values * self._exponent.expm1()).nan_to_num(nan=torch.inf)

    @cached_property
    def unbounded(self) -> torch.Tensor:
        """bool (…, 1): a score may overflow, so every share may be NaN."""
        return (self._scores.unbounded & self.keep).any(-1, keepdim=True)

    @cached_property
    def shares(self) -> Bounded:
        """The shares (…, K), in float32."""

        def error() -> torch.Tensor:
            moved = (self.errors + self.values * self.errors.sum(-1, keepdim=True)) / self.least_sum
            moved = moved.nan_to_num(nan=torch.inf)
            bound = moved + (self.values + moved) * (self.roundoff + 4 * UNIT) / (1 - self.roundoff) + _TINY
            # A share of a sum of nonnegative numbers is at most 1, apart from the roundings of the sum.
            bound = torch.minimum(bound, 1 + 2 * self.roundoff).masked_fill(~self.keep, 0.0)
            bound = torch.where(self.values.isfinite(), bound, 0.0)
            return bound.masked_fill(self.unbounded & self.values.isfinite(), torch.inf)

        return Bounded(self.values, error)


def _roundings(*dtypes: torch.dtype) -> int:
    """Further roundings of a product in a matrix product: 1/√d of the scores, or its root on both sides, and log2(e).

    With float32 operands also those of CUTLASS's 3xTF32, which omits the product of the low parts, 2^-22 of the
    product, and rounds the low parts by as much: 16 units of 2^-24 cover both.
    """
    return 24 if torch.float32 in dtypes else 4


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, stored_dtype: torch.dtype | None = None
) -> Bounded:
    """softmax(q·kᵀ/√d, causal)·v of (batch, heads, S, d) tensors of one dtype: (batch, heads, S, d).

    An infinity or NaN in v or k makes the output NaN for every query that attends to the key. For the other queries any
    output is accepted if v has an infinity or NaN: 0·inf is NaN in a kernel that multiplies hidden keys by 0.
    `stored_dtype`: dtype in which a kernel stores P; by default the dtype of the tensors, as in fused kernels. The
    bound holds for sums in any order and for truncating accumulators. Raises ValueError for other shapes, TypeError if
    the dtypes differ.
    """
    _check(q=q, k=k, v=v)
    return weighted_mean(Softmax(scores(q, k), causal(q)), v, stored_dtype or q.dtype).assuming(_ASSUMES)


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
    softmax, factor = Softmax(scores(q, k), causal(q)), 1 / math.sqrt(q.shape[-1])
    shares, gradient = softmax.shares, exactly(do)
    dv = attention_product(shares.rounded(stored_dtype).mT, gradient, torch.float32)
    dp = attention_product(gradient, exactly(v).mT, do.dtype)

    def of_scores(d: Bounded) -> tuple[Bounded, Bounded]:
        ds = (shares * (dp - d)).with_roundings(2).rounded(stored_dtype)
        dq, dk = (attention_product(a, exactly(b), torch.float32) for a, b in ((ds, k), (ds.mT, q)))
        return _scaled(dq, factor), _scaled(dk, factor)

    # Fused kernels compute D from the rounded output; torch's formula computes D from P and dP. A kernel computes all
    # of D in the same way, so the hull is that of the two gradients.
    output = weighted_mean(softmax, v, stored_dtype).rounded(stored_dtype) if out is None else exactly(out)
    of_shares, of_output = (
        of_scores(x.sum(-1, keepdim=True, roundoff=TRUNCATING)) for x in (shares * dp, gradient * output)
    )
    dq, dk = (one.hull(lambda other=other: other) for one, other in zip(of_shares, of_output, strict=True))  # type: ignore[misc]
    return dq.assuming(_ASSUMES), dk.assuming(_ASSUMES), dv.assuming(_ASSUMES)


def causal(q: torch.Tensor, future: int = 0) -> torch.Tensor:
    """bool (…, S, S): the keys that a query of `q` (…, S, d) sees, with `future` keys behind its own."""
    return torch.ones(*q.shape[:-1], q.shape[-2], dtype=torch.bool, device=q.device).tril(future)


def scores(q: torch.Tensor, k: torch.Tensor, factor: float | None = None) -> Bounded:
    """q·kᵀ times a factor, by default 1/√d: (…, S, S)."""
    factor = 1 / math.sqrt(q.shape[-1]) if factor is None else factor
    return _scaled(attention_product(exactly(q), exactly(k).mT, q.dtype), factor)


def weighted_mean(softmax: Softmax, v: torch.Tensor, stored_dtype: torch.dtype) -> Bounded:
    """P·V / Σ P, with P in `stored_dtype` or in float32, and the sum of P before or after its rounding to the dtype."""
    numbers = v.double()
    known = torch.where(numbers.isfinite(), numbers, 0.0)
    value = softmax.values @ known
    free = torch.zeros_like(value, dtype=torch.bool)
    if not bool(numbers.isfinite().all()):
        weights = softmax.values.nan_to_num(nan=1.0)
        high, low = ((weights > 2.0**-100).double() @ (~(side <= FLT_MAX)).double() > 0 for side in (numbers, -numbers))
        infinite = torch.where(high & low, torch.nan, torch.where(high, torch.inf, -torch.inf))
        value = torch.where((high | low) & ~value.isnan(), infinite, value)
        free = ~high & ~low & ~numbers.isfinite().all(-2, keepdim=True)

    def error() -> torch.Tensor:
        relative, absolute = half_ulp(stored_dtype)
        shares = softmax.shares.max_magnitude
        magnitude = shares @ known.abs()
        moved, apart = _deviations((softmax.errors, shares), known, value)
        # A mean with other nonnegative weights is at most the largest magnitude.
        moved = (moved / softmax.least_sum).nan_to_num(nan=torch.inf)
        moved = torch.minimum(moved, value.abs() + known.abs().amax(-2, keepdim=True))
        bound = moved + relative / (1 - relative) * torch.maximum(magnitude, apart + moved)
        underflow = softmax.keep.double() @ known.abs() + softmax.count * value.abs()
        bound = bound + (absolute + _TINY) * underflow
        largest = (magnitude * (1 + relative) + value.abs() + bound) / 2
        terms = softmax.roundoff
        factors = _roundings(torch.float32) * TRUNCATING
        rounding = terms * largest + (terms + 4 * UNIT) * (value.abs() + bound) + factors * magnitude
        bound = (bound + rounding / (1 - 2 * terms - factors).clamp(min=0) + 2.0**-48 * magnitude) * (1 + 2.0**-40)
        overflow = magnitude * softmax.count > FLT_MAX
        bound = bound.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(overflow | free, torch.inf)
        bound = bound.masked_fill(softmax.unbounded, torch.inf)
        return torch.where(value.isfinite(), bound, 0.0)

    return Bounded(value, error)


def _deviations(weights: tuple[torch.Tensor, ...], v: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Σ_j w_ij·|v_j − O_i| (…, S, d) for each of the `weights` w (…, S, S), of v and O (…, S, d)."""
    sums = tuple(torch.zeros_like(output) for _ in weights)
    rows = max(1, _ELEMENTS // max(1, v.numel()))
    for start in range(0, output.shape[-2], rows):
        here = slice(start, start + rows)
        apart = (v.unsqueeze(-3) - output[..., here, :].unsqueeze(-2)).abs()
        for total, weight in zip(sums, weights, strict=True):
            total[..., here, :] = (weight[..., here, :].unsqueeze(-2) @ apart).squeeze(-2)
    return sums


def attention_product(a: Bounded, b: Bounded, *dtypes: torch.dtype) -> Bounded:
    """a·b by a truncating accumulator, with the roundings of operands of these dtypes."""
    return a.matmul(b, roundoff=TRUNCATING, roundings=_roundings(*dtypes))


def _scaled(x: Bounded, factor: float) -> Bounded:
    """The product with 1/√d; `_roundings` includes its rounding."""
    return Bounded(x.value * factor, lambda: x.error * factor)


def _check(**given: torch.Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 4 for shape in shapes.values()):
        raise ValueError(f"attention takes tensors (batch, heads, S, d) of the same shape, not {shapes}")
    dtypes = {name: tensor.dtype for name, tensor in given.items()}
    if len(set(dtypes.values())) != 1:
        raise TypeError(f"attention takes tensors of the same dtype, not {dtypes}")
