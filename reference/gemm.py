"""GEMM of quantized operands with the exact sum: what every accumulation order is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reference.blocks import INPUT_DTYPES
from reference.decode import decode, decode_packed
from reference.layout import linear_scales, low_first
from reference.quantized import GroupedQuantized, Quantized
from reference.scaling import divide, used_tensor_scale

# Every NVFP4 operand value is a multiple of 2^-10 (E2M1's 2^-1 times E4M3's 2^-9) of at most 2688 < 2^12, so a product
# is a multiple of 2^-20 below 2^23: 1024 of them stay under 2^53 units, and int64 holds 2^20 of them.
_UNIT_LOG2 = -20
_FLOAT64_COLUMNS = 1024
_INT64_COLUMNS = 1 << 20
FLOAT64_EXACT = 2.0**53


@dataclass
class ExactSum:
    """Sums (M, N) as high + low, both float64, |low| below half an ulp of high: exact, not rounded."""

    high: torch.Tensor
    low: torch.Tensor | None
    """None where the sums are float64 numbers."""

    def to_float32(self) -> torch.Tensor:
        """Each sum rounded once, to nearest even."""
        return (self.high if self.low is None else round_to_odd(self.high, self.low)).float()


def round_to_odd(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """high + low as one float64 whose rounding to float32 is that of the exact sum.

    `high` is the sum rounded to float64. Where `low` is not 0 and the last bit of `high` is even, the neighbour on
    low's side is taken, whose last bit is odd: with 53 ≥ 24 + 2 bits a second rounding to nearest is then the same as
    one (Boldo and Melquiond, 2008). Not-finite sums stay.
    """
    even = (high.view(torch.int64) & 1) == 0
    inexact = (low != 0) & torch.isfinite(high) & torch.isfinite(low)
    toward = torch.where(low > 0, torch.inf, -torch.inf).to(torch.float64)
    return torch.where(inexact & even, torch.nextafter(high, toward), high)


def two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(s, e) with s = fl(a + b) and s + e = a + b exactly (Knuth)."""
    s = a + b
    back = s - a
    return s, (a - (s - back)) + (b - back)


def operand(q: Quantized) -> torch.Tensor:
    """code·scale of every element, float64 (M, K), exact; the tensor's factor is left to α."""
    rows, columns = q.shape
    block = q.recipe.block[1]
    values = decode_packed(low_first(q), q.recipe.element, columns, torch.float64)
    scales = decode(linear_scales(q), q.recipe.scale, torch.float64)
    full = columns // block * block
    out = values if values.is_contiguous() else values.contiguous()
    out[:, :full].view(rows, full // block, block).mul_(scales[:, : full // block].unsqueeze(2))
    if full < columns:
        out[:, full:].mul_(scales[:, -1:])
    return out


def lowest_bit(values: torch.Tensor) -> torch.Tensor:
    """The largest power of two that divides every nonzero number of a row: (M, K) float64 to (M,) float64.

    Values are multiples of 2^-10 below 2^12, so their count of units fits an int64. NaN is left out; a row of zeros
    gives 2^-10.
    """
    units = values.mul(2.0 ** -(_UNIT_LOG2 // 2)).nan_to_num_(nan=0.0).long()
    if units.shape[1] == 0:
        units = units.new_zeros(units.shape[0], 1)
    lowest = (units & -units).masked_fill_(units == 0, 1 << 62).amin(dim=1)
    return torch.where(lowest == 1 << 62, 1, lowest).double().mul_(2.0 ** (_UNIT_LOG2 // 2))


def exact_sum(a: torch.Tensor, b: torch.Tensor) -> ExactSum:
    """Σ_k a[i, k]·b[j, k], exactly: (M, K) and (N, K) float64 operands of NVFP4 to (M, N).

    A float64 matmul is exact in any order once the sum of magnitudes counts at most 2^53 units: certified by
    ‖a_i‖₁·max|b| against the lowest bits present. Where that fails, partial sums over 1024 columns, which are always
    exact, are added in int64. Raises ValueError for K above 2^20, where int64 could overflow.
    """
    columns = a.shape[1]
    if columns > _INT64_COLUMNS:
        raise ValueError(f"the exact sum of K = {columns} products could overflow int64; K can be {_INT64_COLUMNS}")
    if columns <= _FLOAT64_COLUMNS or _certified(a, b):
        return ExactSum(a @ b.T, None)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int64, device=a.device)
    nan = torch.zeros_like(total, dtype=torch.bool)
    for start in range(0, columns, _FLOAT64_COLUMNS):
        part = a[:, start : start + _FLOAT64_COLUMNS] @ b[:, start : start + _FLOAT64_COLUMNS].T
        nan |= part.isnan()
        total += part.nan_to_num_(nan=0.0).mul_(2.0**-_UNIT_LOG2).long()
    high = total.double()
    # The remainder fits an int64 except at its very ends, which K <= 2^20 keeps away.
    low = (total - high.long()).double().mul_(2.0**_UNIT_LOG2)
    return ExactSum(high.mul_(2.0**_UNIT_LOG2).masked_fill_(nan, torch.nan), low)


def _certified(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape[0] == 0 or b.shape[0] == 0:
        return True
    unit = lowest_bit(a).amin() * lowest_bit(b).amin()
    norm = torch.minimum(a.abs().sum(1).amax() * b.abs().amax(), b.abs().sum(1).amax() * a.abs().amax())
    return bool(norm < FLOAT64_EXACT * (1 - 2.0**-20) * unit)


def check_operands(a: Quantized, b: Quantized) -> None:
    """Raises ValueError where two operands cannot be multiplied."""
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"gemm multiplies (M, K) by (N, K): K is {a.shape[1]} in a {a.shape} and {b.shape[1]} in b {b.shape}"
        )
    for what in ("element", "scale", "transform", "alpha"):
        one, other = getattr(a.recipe, what), getattr(b.recipe, what)
        if one != other:
            reason = "rotations cancel only where both operands have the same" if what == "transform" else "they differ"
            raise ValueError(f"gemm cannot multiply {a.recipe} by {b.recipe}: {what} is {one} and {other}; {reason}")


def alpha(a: Quantized, b: Quantized) -> torch.Tensor:
    """The factor of a product of the two operands, float32, in the order that the recipe names.

    (1, 1); (M, 1), (1, N) or (M, N) where a, b or both have an amax for each row. d is the product of the two recipes'
    max_product: 36·448·448 for plain NVFP4. Of two tensor scales, 1/(a_enc*b_enc) is 0 where the product is 0, and 1
    stands for operands without. Raises as `used_tensor_scale` does.
    """
    if a.recipe.alpha == "1":
        return torch.ones(1, 1, device=a.codes.device)
    if a.recipe.alpha in ("1/(a_enc*b_enc)", "a_dec*b_dec"):
        product = used_tensor_scale(a).unsqueeze(1) * used_tensor_scale(b).unsqueeze(0)
        return product if a.recipe.alpha == "a_dec*b_dec" else torch.where(product == 0, 0.0, divide(1.0, product))
    assert a.amax is not None
    assert b.amax is not None
    constant = a.recipe.max_product * b.recipe.max_product
    left, right = a.amax.unsqueeze(1), b.amax.unsqueeze(0)
    if a.recipe.alpha == "(a*b)/d":
        product = left * right
        return product / torch.full_like(product, constant)
    return (right * left) * (1.0 / constant)


def gemm(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b.T (+ c) (+ bias): (M, K) and (N, K) to (M, N) in float32, bfloat16 or float16.

    The sum is exact, then rounded once to float32; α multiplies it, `c` (M, N) and then `bias` (N,) are added, each
    step rounding to float32, and one cast ends it. Source: numerics.md, "NVFP4 GEMM".

    Raises ValueError for shapes or recipes that do not fit, TypeError for the output's dtype.
    """
    check_operands(a, b)
    check_epilogue((a.shape[0], b.shape[0]), out_dtype, c, bias)
    acc = exact_sum(operand(a), operand(b)).to_float32()
    y = alpha(a, b) * acc
    if c is not None:
        y = y + c.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)


def gemm_grouped(
    a: GroupedQuantized,
    b: Sequence[Quantized],
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each section of `a` (M, K), quantized rowwise, times its own matrix of `b` (N, K), one below the other: (M, N).

    `c` is (M, N); `bias` (G, N), a row for each section. As `gemm` for every section; raises as it does, and ValueError
    where sections and matrices are not as many, or matrices have not the same N.
    """
    if a.columnwise:
        raise ValueError("gemm_grouped multiplies sections that were quantized rowwise; these are columnwise")
    sections = a.sections()
    if len(sections) != len(b) or not b:
        raise ValueError(f"gemm_grouped multiplies each section by one matrix: {len(sections)} sections, {len(b)} of b")
    columns = b[0].shape[0]
    if any(matrix.shape[0] != columns for matrix in b):
        heights = ", ".join(str(matrix.shape[0]) for matrix in b)
        raise ValueError(f"gemm_grouped gives one output ({a.shape[0]}, N): the matrices of b have {heights} rows")
    check_epilogue((a.shape[0], columns), out_dtype, c, None)
    if bias is not None and tuple(bias.shape) != (len(b), columns):
        raise ValueError(f"bias has a row for each section, {(len(b), columns)}, not shape {tuple(bias.shape)}")
    parts = []
    start = 0
    for number, (section, matrix) in enumerate(zip(sections, b, strict=True)):
        rows = slice(start, start + section.shape[0])
        start = rows.stop
        added = None if c is None else c[rows]
        parts.append(gemm(section, matrix, out_dtype=out_dtype, c=added, bias=None if bias is None else bias[number]))
    return torch.cat(parts)


def check_epilogue(
    shape: tuple[int, int], out_dtype: torch.dtype, c: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    """Raises TypeError or ValueError where the output (M, N) or what is added to it does not fit."""
    if out_dtype not in INPUT_DTYPES:
        raise TypeError(f"gemm gives float32, bfloat16 or float16, not {out_dtype}")
    if c is not None and tuple(c.shape) != shape:
        raise ValueError(f"c is added to the output {shape}, but has shape {tuple(c.shape)}")
    if bias is not None and tuple(bias.shape) != (shape[1],):
        raise ValueError(
            f"bias is added to every row of the output {shape}, so it is ({shape[1]},), not {tuple(bias.shape)}"
        )
