"""The product of a few rows: called by itself, and in the orders that kernels/gemm_skinny_*.cu declare, in
NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from native import gemm_skinny, sources
from native.operands import epilogue, product_arguments, rule_of
from native.ops import Quantized
from reference.formats import E4M3
from tests.native import declared

f32 = np.float32
PARTS, WIDE_PARTS, KEPT = 8, 4, 25
"""Sums of a kernel that are added last: those of its warps, or of the teams of the wide one."""
RUN = 4
"""Chunks that follow each other in one of the wide kernel's."""


def product(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b.T (+ c) (+ bias), whatever the path of `native.ops.gemm` is."""
    rule = rule_of(a.recipe, b.recipe)
    assert gemm_skinny.takes(a, b, rule)
    shape = a.shape[0], b.shape[0], a.shape[1]
    operands, factors = product_arguments(a, b)
    out = torch.empty(shape[0], shape[1], dtype=out_dtype, device=a.codes.device)
    ends = (c, bias, out, *epilogue(shape, out_dtype, c, bias))
    gemm_skinny.multiply(rule, shape, operands, factors, ends)
    return out


def gemm(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by the declared order, α, c and bias as everywhere."""
    y = torch.from_numpy(declared.factor(a, b) * sums(a, b))
    for addend in (c, bias):
        y = y if addend is None else y + addend.cpu().float()
    return y.to(out_dtype)


def sums(a: Quantized, b: Quantized) -> np.ndarray:
    """What the warps, or teams of them, have summed, in their order: float32 (M, N)."""
    nvfp4 = a.recipe.scale is E4M3
    wide = nvfp4 and gemm_skinny.wide(a.shape[0], *b.shape)
    count, run = (WIDE_PARTS, RUN) if wide else (PARTS, 1)
    parts = np.zeros((count, a.shape[0], b.shape[0]), f32)
    left, right, left_scales, right_scales = (
        *(declared.elements(q) for q in (a, b)),
        declared.scales(a),
        declared.scales(b),
    )
    if nvfp4:
        left, right = (x * s.repeat(16, 1) for x, s in ((left, left_scales), (right, right_scales)))
    for chunk, start in enumerate(range(0, a.shape[1], 128)):
        acc = parts[chunk // run % count]
        if nvfp4:
            for columns in _of_nvfp4(start):
                acc = aligned(acc, left[:, columns], right[:, columns])
        else:
            for block in range(start // 32, start // 32 + 4):
                inner = np.zeros_like(acc)
                for half in (0, 4):
                    columns = [32 * block + 8 * t + half + i for t in range(4) for i in range(4)]
                    inner = aligned(inner, left[:, columns], right[:, columns])
                scaled = inner.astype(np.float64) * (left_scales[:, block, None] * right_scales[None, :, block])
                acc = acc + scaled.astype(f32)
        parts[chunk // run % count] = acc
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _of_nvfp4(start: int) -> Iterator[list[int]]:
    for unit in range(4):
        for places in ((0, 2, 4, 6), (1, 3, 5, 7)):
            yield [start + 32 * t + 8 * unit + place for t in range(4) for place in places]


def aligned(acc: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """acc + Σ of 16 products: cut off 25 bits behind the largest exponent, and their sum to float32."""
    terms = np.concatenate([acc[..., None].astype(np.float64), left[:, None] * right[None]], axis=2)
    exponents = np.concatenate([_exponent(acc)[..., None], _exponent(left)[:, None] + _exponent(right)[None]], axis=2)
    largest = np.where(terms != 0, exponents, -1000).max(2)
    kept = np.trunc(np.ldexp(terms, (KEPT - largest)[..., None])).sum(2)
    total = np.ldexp(kept, largest - KEPT)
    near = total.astype(f32)
    return np.where(np.abs(near.astype(np.float64)) > np.abs(total), np.nextafter(near, f32(0)), near)


def _exponent(x: np.ndarray) -> np.ndarray:
    return np.frexp(x.astype(np.float64))[1] - 1


def text(kernel: str) -> str:
    """A kernel's source, its headers put in."""
    return sources.text(f"gemm_skinny_{kernel}")
