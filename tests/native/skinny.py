"""GEMM with few rows of a: the skinny path, and its declared order of summation in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from narrowgauge.native.gemm import skinny
from narrowgauge.native.gemm.operands import product as gemm_product
from narrowgauge.native.gemm.operands import product_family
from narrowgauge.native.ops import Quantized
from narrowgauge.native.runtime import sources
from narrowgauge.spec.formats import E4M3, E8M0, FP32
from tests.native import declared
from tests.native.devices import on_device

f32 = np.float32
PARTS, WIDE_PARTS, KEPT = 8, 4, 25
"""Partial sums of a kernel: of warps, or of teams of the wide kernel; bits that a sum keeps."""
RUN = 4
"""Chunks in a run of the wide kernel."""


def product(a: Quantized, b: Quantized, **options: Any) -> torch.Tensor:
    """a @ b.T (+ c) (+ bias) by the skinny path, on the device of the test; options of `native.ops.gemm`."""
    found: torch.Tensor = on_device(_product, a, b, **options)
    return found


def _product(a: Quantized, b: Quantized, *, out_dtype: torch.dtype, **added: Any) -> torch.Tensor:
    family = product_family(a.recipe, b.recipe)
    assert skinny.takes(a, b, family)
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.codes.device)
    skinny.multiply(gemm_product(a, b, family, **{"out_dtype": out_dtype, "c": None, "bias": None, **added}), out)
    return out


def gemm(a: Quantized, b: Quantized, **options: Any) -> torch.Tensor:
    """The product by the declared order; α, c and bias as in other kernels."""
    return declared.finished(sums(a, b), a, b, **options)


def sums(a: Quantized, b: Quantized) -> np.ndarray:
    """Sums of the warps, or of teams of warps, in the declared order: float32 (M, N)."""
    nvfp4 = a.recipe.scale is E4M3
    wide = nvfp4 and skinny.wide(a.shape[0], *b.shape)
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
            width = 32 if a.recipe.scale is E8M0 else 128
            for first in range(start, start + 128, width):
                inner = np.zeros_like(acc)
                for columns in _of_e4m3(first, width):
                    inner = aligned(inner, left[:, columns], right[:, columns])
                of_block = (0 if a.recipe.whole else first // width), slice(None)
                acc = _added(acc, inner, a, left_scales.T[of_block][:, None], right_scales.T[of_block])
        parts[chunk // run % count] = acc
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _of_nvfp4(start: int) -> Iterator[list[int]]:
    for unit in range(4):
        for places in ((0, 2, 4, 6), (1, 3, 5, 7)):
            yield [start + 32 * t + 8 * unit + place for t in range(4) for place in places]


def _of_e4m3(start: int, width: int) -> Iterator[list[int]]:
    for block in range(start, start + width, 32):
        for half in (0, 4):
            yield [block + 8 * t + half + i for t in range(4) for i in range(4)]


def _added(acc: np.ndarray, inner: np.ndarray, a: Quantized, s_a: np.ndarray, s_b: np.ndarray) -> np.ndarray:
    """The sum of a block, times its scales, added to the previous sum."""
    if a.recipe.whole:
        return acc + inner
    if a.recipe.scale is FP32:
        return declared.fma(inner * s_a.astype(f32), np.broadcast_to(s_b.astype(f32), acc.shape), acc)
    return acc + (inner.astype(np.float64) * (s_a * s_b)).astype(f32)


def aligned(acc: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """acc + Σ of 16 products: terms truncated 25 bits below the largest exponent, the sum to float32."""
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
