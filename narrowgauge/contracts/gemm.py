"""Products of matrices that are quantized by different rules, or of which one is not quantized.

The fields say how libraries differ (`narrowgauge.contracts.dialects`). R is a rounding to the dtype of the output, acc
the sum, s_a and s_b the scales that do not depend on k.

- `accumulator`: "any", or the order of a tensor core (docs/tolerance.md#declared-order). Sums of INT8 by INT8 are
  int32; "fraction-24-8" is float32;
- `decode`: an element c of b with the scale s of its block is R(c·s), "rounded-scale": R(c·R(s)), or "exact". With a
  zero point z it is R((c − z)·s), or "zero-apart": R(c·s − R(z·s));
- `epilogue` of a product with one scale: R(s·acc) "once", or R(s·R(acc)) "sum-first"; with two scales: R(s_a·(s_b·acc))
  "b-first", R(s_b·(s_a·acc)) "a-first", R(acc·(s_a·s_b)) "scales-first", R(R(acc·s_a)·s_b) "rounded-between", or any
  form of one rounding to the output;
- `bias_added`: "unrounded", in float32 before the last rounding and fused or not, or "rounded": R(R(y) + bias);
- `promotion` of float32 scales of blocks: `narrowgauge.contract.gemm`;
- `reduce`: the sums of the halves of K are added in "float32", or are "output" numbers R(R(s·P₁) + R(s·P₂)).
"""

from __future__ import annotations

from typing import Annotated, Literal

from narrowgauge import contract as c
from narrowgauge.contract.values import Value
from narrowgauge.contracts.dialects import SCALED, WEIGHT_ONLY

Decode = Literal["rounded", "rounded-scale", "zero-apart", "exact"]
Epilogue = Literal["any", "b-first", "a-first", "scales-first", "rounded-between"]
Promotion = Literal["any", "sum-first", "scales-first"]
Wide = Literal["any", "fraction-24-8", "fraction-25-16", "aligned-25-16"]
Narrow = Literal[
    "any", "fraction-13-32", "aligned-13-32", "aligned-13-32-128", "fraction-25-32", "fraction-24-8",
]  # fmt: skip
OutDtype = c.Passed[Literal["bfloat16", "float16", "float32"]]
BiasAdded = Literal["unrounded", "rounded"]
Weight = Annotated[c.Codes, ("N", "K")]
Bias = Annotated[c.Row, ("N",)]


@c.contract(dialects=WEIGHT_ONLY)
def weight_only_gemm(
    a: c.Matrix, b: Weight, *, accumulator: Wide = "any", decode: Decode = "rounded",
    epilogue: Literal["once", "sum-first"] = "once", reduce: Literal["float32", "output"] = "float32",
):  # fmt: skip
    """a·bᵀ of a (M, K), bfloat16 or float16, and quantized weights b (N, K), rounded once to the dtype of a: (M, N).

    An element of b times the scale of its block is rounded to the dtype of a, which is exact for E2M1 under E4M3, and
    for scales that are powers of two. The scale of the tensor, or of a row of b, multiplies the sum: R(g·Σ a·w).
    """
    w = _decoded(a, b, decode)
    pairs = zip(c.halves(a), c.halves(w), strict=True) if reduce == "output" else [(a, w)]
    scale, found = c.factor(b, axis=1), []
    for left, right in pairs:
        found.append(c.cast(_sum(left, right, accumulator, epilogue) * scale, a.dtype))
    return found[0] if len(found) == 1 else c.cast(c.float32(found[0]) + c.float32(found[1]), a.dtype)


@c.contract(dialects=WEIGHT_ONLY)
def weight_only_gemm_bias(
    a: c.Matrix, b: Weight, bias: Bias, *, accumulator: Wide = "any", decode: Decode = "rounded",
    epilogue: Literal["once", "sum-first"] = "once", bias_added: BiasAdded = "unrounded",
):  # fmt: skip
    """`weight_only_gemm` and a bias (N,), added last: (M, N)."""
    y = _sum(a, _decoded(a, b, decode), accumulator, epilogue) * c.factor(b, axis=1)
    return _with_bias(y, bias, bias_added, a.dtype)


@c.contract(dialects=SCALED)
def scaled_gemm(
    a: Annotated[c.Codes, ("M", "K")], b: Weight, *, out_dtype: OutDtype = "bfloat16",
    accumulator: Narrow = "any", epilogue: Epilogue = "any", promotion: Promotion = "any",
):  # fmt: skip
    """a·bᵀ of two quantized matrices, a (M, K) and b (N, K), rounded to out_dtype: (M, N).

    Scales of tensors and of rows multiply the sum. Scales of blocks that are powers of two, or E4M3, multiply the
    elements; float32 scales of blocks multiply the sum of each block.
    """
    return c.cast(_scaled(a, b, out_dtype, accumulator, epilogue, promotion), out_dtype)


@c.contract(dialects=SCALED)
def scaled_gemm_bias(
    a: Annotated[c.Codes, ("M", "K")], b: Weight, bias: Bias, *, out_dtype: OutDtype = "bfloat16",
    accumulator: Narrow = "any", epilogue: Epilogue = "any", promotion: Promotion = "any",
    bias_added: BiasAdded = "unrounded",
):  # fmt: skip
    """`scaled_gemm` and a bias (N,), added last: (M, N)."""
    return _with_bias(_scaled(a, b, out_dtype, accumulator, epilogue, promotion), bias, bias_added, out_dtype)


def _decoded(a: Value, b: Value, decode: str) -> Value:
    """The numbers of the weights."""
    return c.decode(
        b, None if decode == "exact" else a.dtype, scale=a.dtype if decode == "rounded-scale" else None,
        zero="rounded" if decode == "zero-apart" else None,
    )  # fmt: skip


def _sum(a: Value, w: Value, accumulator: str, epilogue: str) -> Value:
    y = c.gemm(a, w, _order(accumulator))
    return c.float32(c.cast(y, a.dtype)) if epilogue == "sum-first" else y


def _scaled(a: Value, b: Value, out_dtype: str, accumulator: str, epilogue: str, promotion: str) -> Value:
    """The float32 product with its scales."""
    y = c.gemm(c.decode(a), c.decode(b), _order(accumulator), promotion=_order(promotion))
    s_a, s_b = c.factor(a), c.factor(b, axis=1)
    forms = {"b-first": s_a * (y * s_b), "a-first": (y * s_a) * s_b, "scales-first": y * (s_a * s_b)}
    if epilogue == "rounded-between":
        return c.float32(c.cast(y * s_a, out_dtype)) * s_b
    return c.any_of(*forms.values()) if epilogue == "any" else forms[epilogue]


def _with_bias(y: Value, bias: Value, added: str, dtype: str) -> Value:
    y = c.float32(c.cast(y, dtype)) if added == "rounded" else y
    return c.cast(y + c.float32(bias), dtype)


def _order(name: str) -> str | None:
    return None if name == "any" else name
