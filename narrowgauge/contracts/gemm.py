"""Products of matrices that are quantized by different rules, or of which one is not quantized.

The fields say how libraries differ (`narrowgauge.contracts.dialects`). R is a rounding to the dtype of the output, acc
the float32 sum, s_a and s_b the scales that do not depend on k.

- `accumulator`: "any", or the order of a tensor core (docs/tolerance.md#declared-order);
- `decode`: an element c of b with the scale s of its block is R(c·s), "rounded-scale": R(c·R(s)), or "exact";
- `epilogue` of a product with one scale: R(s·acc) "once", or R(s·R(acc)) "sum-first"; with two scales: R(s_a·(s_b·acc))
  "b-first", R(s_b·(s_a·acc)) "a-first", R(acc·(s_a·s_b)) "scales-first", R(R(acc·s_a)·s_b) "rounded-between", or any
  form of one rounding to the output;
- `promotion` of float32 scales of blocks: `narrowgauge.contract.gemm`;
- `reduce`: the sums of the halves of K are added in "float32", or are "output" numbers R(R(s·P₁) + R(s·P₂)).
"""

from __future__ import annotations

from typing import Annotated, Literal

from narrowgauge import contract as c
from narrowgauge.contracts.dialects import SCALED, WEIGHT_ONLY

Epilogue = Literal["any", "b-first", "a-first", "scales-first", "rounded-between"]
Promotion = Literal["any", "sum-first", "scales-first"]
Wide = Literal["any", "fraction-24-8", "fraction-25-16", "aligned-25-16"]
Narrow = Literal["any", "fraction-13-32", "aligned-13-32", "aligned-13-32-128", "fraction-25-32"]
OutDtype = c.Passed[Literal["bfloat16", "float16", "float32"]]


@c.contract(dialects=WEIGHT_ONLY)
def weight_only_gemm(
    a: c.Matrix, b: Annotated[c.Codes, ("N", "K")], *, accumulator: Wide = "any",
    decode: Literal["rounded", "rounded-scale", "exact"] = "rounded",
    epilogue: Literal["once", "sum-first"] = "once", reduce: Literal["float32", "output"] = "float32",
):  # fmt: skip
    """a·bᵀ of a (M, K), bfloat16 or float16, and quantized weights b (N, K), rounded once to the dtype of a: (M, N).

    An element of b times the scale of its block is rounded to the dtype of a, which is exact for E2M1 under E4M3, and
    for scales that are powers of two. The scale of the tensor, or of a row of b, multiplies the sum: R(g·Σ a·w).
    """
    w = c.decode(b, None if decode == "exact" else a.dtype, scale=a.dtype if decode == "rounded-scale" else None)
    pairs = zip(c.halves(a), c.halves(w), strict=True) if reduce == "output" else [(a, w)]
    scale, found = c.factor(b, axis=1), []
    for left, right in pairs:
        y = c.gemm(left, right, _order(accumulator))
        y = c.float32(c.cast(y, a.dtype)) if epilogue == "sum-first" else y
        found.append(c.cast(y * scale, a.dtype))
    return found[0] if len(found) == 1 else c.cast(c.float32(found[0]) + c.float32(found[1]), a.dtype)


@c.contract(dialects=SCALED)
def scaled_gemm(
    a: Annotated[c.Codes, ("M", "K")], b: Annotated[c.Codes, ("N", "K")], *, out_dtype: OutDtype = "bfloat16",
    accumulator: Narrow = "any", epilogue: Epilogue = "any", promotion: Promotion = "any",
):  # fmt: skip
    """a·bᵀ of two quantized matrices, a (M, K) and b (N, K), rounded to out_dtype: (M, N).

    Scales of tensors and of rows multiply the sum. Scales of blocks that are powers of two, or E4M3, multiply the
    elements; float32 scales of blocks multiply the sum of each block.
    """
    y = c.gemm(c.decode(a), c.decode(b), _order(accumulator), promotion=_order(promotion))
    s_a, s_b = c.factor(a), c.factor(b, axis=1)
    forms = {"b-first": s_a * (y * s_b), "a-first": (y * s_a) * s_b, "scales-first": y * (s_a * s_b)}
    if epilogue == "rounded-between":
        return c.cast(c.float32(c.cast(y * s_a, out_dtype)) * s_b, out_dtype)
    return c.cast(c.any_of(*forms.values()) if epilogue == "any" else forms[epilogue], out_dtype)


def _order(name):
    return None if name == "any" else name
