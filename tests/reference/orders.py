"""Float32 GEMMs with every order of summation of a correct kernel, simulated in NumPy.

A kernel adds the exact float32 products of an output in a tree, rounds every addition to nearest, and applies
the epilogue, with or without a fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import ml_dtypes
import numpy as np
import torch

from narrowgauge.reference.scalar import rounding

f32 = np.float32


def products(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The terms of every output: (m, k) and (n, k) float64 operands to (m, n, k) float32, all exact."""
    exact = left[:, None, :] * right[None, :, :]
    terms = exact.astype(f32)
    assert (terms == exact).all(), "a product of two NVFP4 values fits float32"
    return terms


def sequential(terms: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """An accumulator that adds the terms in every order of `orders` (p, k): (p, m, n)."""
    accumulators = np.zeros((*terms.shape[:2], len(orders)), f32)
    for step in orders.T:
        accumulators += terms[:, :, step]
    return np.moveaxis(accumulators, 2, 0)


def pairwise(terms: np.ndarray) -> np.ndarray:
    """Halves added to halves: (1, m, n)."""
    while terms.shape[2] > 1:
        half = terms.shape[2] // 2
        rest = terms[:, :, 2 * half :]
        terms = np.concatenate([terms[:, :, :half] + terms[:, :, half : 2 * half], rest], axis=2)
    return terms[None, :, :, 0]


def random_trees(terms: np.ndarray, rng: np.random.Generator, count: int) -> np.ndarray:
    """Any two partial sums are added until one is left, in `count` random ways: (count, m, n)."""
    nodes = np.repeat(terms[:, :, None, :], count, axis=2)
    tree = np.arange(count)
    for live in range(terms.shape[2], 1, -1):
        one = rng.integers(0, live, count)
        other = rng.integers(0, live - 1, count)
        other += other >= one
        nodes[:, :, tree, one] += nodes[:, :, tree, other]
        nodes[:, :, tree, other] = nodes[:, :, tree, live - 1]
    return np.moveaxis(nodes[:, :, :, 0], 2, 0)


def accumulators(terms: np.ndarray, rng: np.random.Generator, count: int) -> np.ndarray:
    """Sums (p, m, n) in about 4·count ways: forward, backward, permuted, pairwise, trees, blocks of 16, split-K."""
    k = terms.shape[2]
    forward = np.arange(k)[None]
    permuted = rng.permuted(np.tile(forward, (count, 1)), axis=1)
    blocks = np.zeros((*terms.shape[:2], k // 16), f32)
    for step in range(16):
        blocks += terms[:, :, step::16]
    halves = np.stack([terms[:, :, : k // 2].copy(), terms[:, :, k // 2 :].copy()])
    split = [sequential(half, rng.permuted(np.tile(np.arange(k // 2), (count, 1)), axis=1)) for half in halves]
    ways = [
        sequential(terms, np.concatenate([forward, forward[:, ::-1], permuted])),
        pairwise(terms),
        random_trees(terms, rng, count),
        sequential(blocks, np.arange(k // 16)[None]),
        random_trees(blocks, rng, count),
        split[0] + split[1],
    ]
    sums = np.concatenate(ways)
    assert sums.dtype == f32
    return sums


def fma(factor: f32, sums: np.ndarray, addend: np.ndarray) -> np.ndarray:
    """factor·sums + addend rounded once: (p, m, n) and (m, n), all finite; fractions, once for each distinct sum."""
    out = np.empty_like(sums)
    alpha = Fraction(float(factor))
    for i, j in np.ndindex(addend.shape):
        distinct, which = np.unique(sums[:, i, j], return_inverse=True)
        term = Fraction(float(addend[i, j]))
        rounded = [rounding.nearest(alpha * Fraction(float(s)) + term, "float32") for s in distinct]
        out[:, i, j] = np.array(rounded, f32)[which]
    return out


def cast(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """float32 to the output's dtype by NumPy and ml_dtypes."""
    with np.errstate(all="ignore"):
        if dtype == torch.bfloat16:
            return torch.from_numpy(values.astype(ml_dtypes.bfloat16).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values.astype(np.float16 if dtype == torch.float16 else f32))


def outputs(
    sums: np.ndarray, factor: f32, c: np.ndarray | None, bias: np.ndarray | None, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Correct outputs of accumulators, (p, m, n), by name of the epilogue."""
    with np.errstate(all="ignore"):
        y = factor * sums
        plain = y if c is None else y + c
        plain = plain if bias is None else plain + bias
        yield "unfused", cast(plain, dtype)
        if c is not None:
            fused = fma(factor, sums, c)
            yield "c fused", cast(fused if bias is None else fused + bias, dtype)
        elif bias is not None:
            yield "bias fused", cast(fma(factor, sums, np.broadcast_to(bias, sums.shape[1:])), dtype)
