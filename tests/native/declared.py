"""GEMM in the declared order of kernels/gemm/portable/gemm.cuh, in NumPy: the expected bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from narrowgauge.native.ops import GroupedQuantized, Quantized
from narrowgauge.reference.quantize.layout import unswizzle
from narrowgauge.reference.scalar.gemm import alpha
from narrowgauge.spec.formats import E4M3, E8M0, FP32
from tests.native.operands import product_of_sections

f32 = np.float32


def elements(q: Quantized) -> np.ndarray:
    """Values of the codes, float64 (M, K)."""
    codes = q.codes.cpu().numpy()
    rows, columns = q.shape
    if q.recipe.element.bits == 4:
        codes = np.stack([codes & 0xF, codes >> 4], axis=-1).reshape(rows, 2 * codes.shape[1])[:, :columns]
    return np.array(q.recipe.element.values)[codes.T if q.transposed else codes]


def scales(q: Quantized) -> np.ndarray:
    """Values of the scales, float64, for each row and block (M, ⌈K/width⌉); (1, 1) of a whole tensor."""
    rows, columns = q.shape
    stored = q.scales.cpu()
    if q.swizzled:
        stored = unswizzle(stored, (rows, -(-columns // q.recipe.block[1])))
    elif q.transposed:
        stored = stored.T
    if q.recipe.scale is not FP32:
        return np.array(q.recipe.scale.values)[stored.numpy()]
    found = stored.numpy().astype(np.float64)
    return found if q.recipe.whole else found.repeat(q.recipe.stored_rows, axis=0)[:rows]


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x·y + z of float32 numbers, rounded once: in float64 the product is exact, and the sum rounds to odd."""
    product, wide = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + wide
    back = total - product
    error = (product - (total - back)) + (wide - back)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    odd = np.where(np.isfinite(total) & (error != 0) & even, np.nextafter(total, toward), total)
    return odd.astype(f32)


def inner_sums(left: np.ndarray, right: np.ndarray, exact: bool) -> np.ndarray:
    """The sum of a block: products added in order, each sum rounded to float32 unless all sums are exact."""
    if exact:
        return (left @ right.T).astype(f32)
    inner = np.zeros((len(left), len(right)), f32)
    for k in range(left.shape[1]):
        product = np.outer(left[:, k], right[:, k])
        assert np.array_equal(product.astype(f32), product, equal_nan=True), "products of elements fit float32"
        inner = inner + product.astype(f32)
    return inner


def sums(a: Quantized, b: Quantized) -> np.ndarray:
    """Products added in order of K within a block, and blocks, times their scales, in order of K: float32 (M, N)."""
    left, right = elements(a), elements(b)
    columns, whole = a.shape[1], a.recipe.whole
    width = max(1, columns if whole else a.recipe.block[1])
    left_scales, right_scales = scales(a), scales(b)
    acc = np.zeros((a.shape[0], b.shape[0]), f32)
    for block, start in enumerate(range(0, columns, width)):
        inner = inner_sums(left[:, start : start + width], right[:, start : start + width], a.recipe.scale is E4M3)
        if whole:
            return inner
        s_a, s_b = left_scales[:, block, None], right_scales[None, :, block]
        if a.recipe.scale is FP32:
            s_a, s_b = s_a.astype(f32), s_b.astype(f32)
            acc = fma(inner * s_a, np.broadcast_to(s_b, acc.shape), acc)
            continue
        exact = inner.astype(np.float64) * (s_a * s_b)
        if a.recipe.scale is E4M3:
            assert np.array_equal(exact.astype(f32), exact, equal_nan=True), "a block's term fits float32"
        acc = acc + exact.astype(f32)
    return acc


def factor(a: Quantized, b: Quantized) -> np.ndarray:
    """α, float32: of two tensor amaxes, of two float32 scales of tensors, or 1."""
    if a.recipe.scale is E4M3:
        left_amax, right_amax = (q.amax.cpu().numpy() for q in (a, b))
        most = (int(a.recipe.scale_max), int(b.recipe.scale_max))
        return np.asarray(alpha(left_amax[:, None], right_amax, a.recipe.alpha, most))
    if a.recipe.scale is E8M0 or not a.recipe.whole:
        return np.ones((1, 1), f32)
    return scales(a).astype(f32) * scales(b).astype(f32)


def gemm(a: Quantized, b: Quantized, **options: Any) -> torch.Tensor:
    """The sums, then α, c, bias and one cast; FP8 with scales of blocks adds c after the cast."""
    with np.errstate(all="ignore"):
        found = sums(a, b)
    return finished(found, a, b, **options)


def finished(
    found: np.ndarray,
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output of the sums: α, c, bias and the cast."""
    with np.errstate(all="ignore"):
        y = torch.from_numpy(factor(a, b) * found)
    late = a.recipe.scale is FP32 and not a.recipe.whole
    for addend in (bias,) if late else (c, bias):
        if addend is not None:
            y = y + addend.cpu().float()
    y = y.to(out_dtype)
    return (y.float() + c.cpu().float()).to(out_dtype) if late and c is not None else y


def gemm_grouped(
    a: GroupedQuantized,
    b: Sequence[Quantized],
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The products of the sections, section below section."""
    return product_of_sections(gemm, a, b, out_dtype=out_dtype, c=c, bias=bias)
