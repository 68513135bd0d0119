"""Float32 kernels for narrow operands, simulated in NumPy: the declared order, and other correct orders."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from narrowgauge.reference.numbers.exact import fma as exact_fma
from narrowgauge.spec.quantized import Quantized
from tests.reference import narrow, orders

f32 = np.float32


def scaled_terms(a: Quantized, b: Quantized) -> np.ndarray:
    """Products of dequantized elements, rounded to float32: (m, n, k)."""
    with np.errstate(all="ignore"):
        return (narrow.values(a)[:, None, :] * narrow.values(b)[None]).astype(f32)


def code_terms(a: Quantized, b: Quantized) -> np.ndarray:
    """Products of codes, exact in float32: (m, n, k)."""
    return orders.products(narrow.elements(a), narrow.elements(b))


def blocks_of(q: Quantized) -> list[slice]:
    """Columns of every block of K."""
    width = min(q.recipe.block[1], max(1, q.shape[1]))
    return [slice(start, min(start + width, q.shape[1])) for start in range(0, q.shape[1], width)]


def in_turn(terms: np.ndarray) -> np.ndarray:
    """Terms added in order, from 0: (m, n)."""
    return orders.sequential(terms, np.arange(terms.shape[2])[None])[0]


def in_some_tree(terms: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Terms added in a random tree: (m, n)."""
    return orders.random_trees(terms, rng, 1)[0]


def declared(a: Quantized, b: Quantized) -> np.ndarray:
    """The sum in the order "blocks" of operands with power-of-two scales, or a scale for the tensor: (m, n)."""
    terms, scale = code_terms(a, b), narrow.factors(a)[:, None, :] * narrow.factors(b)[None]
    y = np.zeros(terms.shape[:2], f32)
    for block in blocks_of(a):
        partial = in_turn(terms[:, :, block])
        with np.errstate(all="ignore"):
            y = y + (partial if a.recipe.whole else (partial.astype(np.float64) * scale[:, :, block.start]).astype(f32))
    return y


def scaled_blocks(a: Quantized, b: Quantized, rng: np.random.Generator, count: int) -> Iterator[np.ndarray]:
    """Sums of blocks in random trees, times their scales, in random trees."""
    terms, scale = code_terms(a, b), narrow.factors(a)[:, None, :] * narrow.factors(b)[None]
    for _ in range(count):
        with np.errstate(all="ignore"):
            partials = [
                (in_some_tree(terms[:, :, block], rng).astype(np.float64) * scale[:, :, block.start]).astype(f32)
                for block in blocks_of(a)
            ]
            yield in_some_tree(np.stack(partials, axis=2), rng)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """fl(x·y + z), rounded once; test_promotion.py checks it against fractions."""
    tensors = (torch.from_numpy(np.array(np.broadcast_to(v, z.shape))) for v in (x, y, z))
    return exact_fma(*tensors).numpy()


def promoted(a: Quantized, b: Quantized, rng: np.random.Generator | None = None) -> np.ndarray:
    """y = fma(fl(P·s_a), s_b, y): blocks in order, P in order of K, or with `rng` everything in random orders."""
    terms = code_terms(a, b)
    s_a, s_b = (narrow.factors(q).astype(f32) for q in (a, b))
    y = np.zeros(terms.shape[:2], f32)
    blocks = blocks_of(a)
    with np.errstate(all="ignore"):
        for number in range(len(blocks)) if rng is None else rng.permutation(len(blocks)):
            block = blocks[number]
            partial = in_turn(terms[:, :, block]) if rng is None else in_some_tree(terms[:, :, block], rng)
            y = fma(partial * s_a[:, block.start, None], s_b[None, :, block.start], y)
    return y


def promoted_otherwise(a: Quantized, b: Quantized, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Other ways to apply two float32 scales: to elements, terms or blocks, in any association."""
    terms = code_terms(a, b)
    s_a, s_b = (narrow.factors(q).astype(f32) for q in (a, b))
    left, right = narrow.elements(a).astype(f32), narrow.elements(b).astype(f32)
    with np.errstate(all="ignore"):
        yield "fma, blocks in any order", promoted(a, b, rng)
        blocks = [(block.start, in_some_tree(terms[:, :, block], rng)) for block in blocks_of(a)]
        both = [partial * (s_a[:, at, None] * s_b[None, :, at]) for at, partial in blocks]
        yield "P(s_a·s_b)", in_some_tree(np.stack(both, axis=2), rng)
        other = [partial * s_b[None, :, at] * s_a[:, at, None] for at, partial in blocks]
        yield "(P·s_b)s_a", in_some_tree(np.stack(other, axis=2), rng)
        x, y = left * s_a, right * s_b
        yield "dequantized", in_some_tree(x[:, None, :] * y[None], rng)
        fused = np.zeros(terms.shape[:2], f32)
        for k in rng.permutation(terms.shape[2]):
            fused = fma(x[:, k, None], y[None, :, k], fused)
        yield "dequantized, fused", fused
        yield "terms", in_some_tree(terms * s_a[:, None, :] * s_b[None], rng)
