"""Float32 additions of kernels in NumPy, and sums in declared orders.

Additions round to nearest or truncate; numbers below 2^-126 stay, or become 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from narrowgauge.spec.quantized import Quantized
from tests.reference import kernels, narrow

f32, f64 = np.float32, np.float64


@dataclass(frozen=True)
class Adder:
    """How a unit adds two float32 numbers."""

    truncates: bool = False
    flushes: bool = False

    def flushed(self, x: np.ndarray) -> np.ndarray:
        """float32 numbers as the unit sees them."""
        return np.where(np.abs(x) < f32(2.0**-126), x * f32(0), x) if self.flushes else x

    def rounded(self, exact: np.ndarray, rest: np.ndarray | float = 0.0) -> np.ndarray:
        """`exact` + `rest`, float64, the second at most half an ulp of the first, as a float32 number."""
        with np.errstate(all="ignore"):
            near = exact.astype(f32)
            if self.truncates:
                beyond = near.astype(f64) - exact
                beyond = np.where(beyond == 0, -np.asarray(rest), beyond) * np.sign(exact)
                near = np.where(beyond > 0, np.nextafter(near, f32(0)), near)
            elif np.any(rest):
                odd = (exact.view(np.int64) & 1) == 1
                toward = np.nextafter(exact, np.sign(rest) * np.inf)
                near = np.where(odd | (np.asarray(rest) == 0), near, toward.astype(f32))
            return self.flushed(near)

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """x + y."""
        one, other = self.flushed(x).astype(f64), self.flushed(y).astype(f64)
        total = one + other
        back = total - one
        return self.rounded(total, (one - (total - back)) + (other - back))


def in_turn(terms: np.ndarray, adder: Adder) -> np.ndarray:
    """Terms (m, n, k) added in order, from 0: (m, n)."""
    total = np.zeros(terms.shape[:2], f32)
    for k in range(terms.shape[2]):
        total = adder.add(total, terms[:, :, k])
    return total


def in_pairs(terms: np.ndarray, adder: Adder) -> np.ndarray:
    """Neighbours, then sums of neighbours, zeros up to a power of two: (m, n)."""
    width = 1 << max(0, terms.shape[2] - 1).bit_length()
    terms = np.pad(terms, ((0, 0), (0, 0), (0, width - terms.shape[2])))
    while terms.shape[2] > 1:
        terms = adder.add(terms[:, :, ::2], terms[:, :, 1::2])
    return terms[:, :, 0]


def in_trees(terms: np.ndarray, adder: Adder, rng: np.random.Generator, count: int) -> np.ndarray:
    """Any two partial sums, until one is left, in `count` random ways: (count, m, n)."""
    nodes = np.repeat(terms[None], count, axis=0)
    way = np.arange(count)
    for live in range(terms.shape[2], 1, -1):
        one = rng.integers(0, live, count)
        other = (one + rng.integers(1, live, count)) % live
        nodes[way, :, :, one] = adder.add(nodes[way, :, :, one], nodes[way, :, :, other])
        nodes[way, :, :, other] = nodes[:, :, :, live - 1]
    return nodes[:, :, :, 0]


def scaled_terms(a: Quantized, b: Quantized, adder: Adder) -> np.ndarray:
    """Products of codes and scales, as float32 numbers: (m, n, k). Without the scale of a whole tensor."""
    if a.recipe.whole:
        return kernels.code_terms(a, b)
    return adder.rounded(narrow.values(a)[:, None, :] * narrow.values(b)[None])


def in_blocks(a: Quantized, b: Quantized, adder: Adder, columns: slice = slice(None)) -> np.ndarray:
    """Sums of the blocks that begin in `columns`, or of this part of a single block: (m, n)."""
    terms = kernels.code_terms(a, b)
    total = np.zeros(terms.shape[:2], f32)
    if a.recipe.whole:
        return in_turn(terms[:, :, columns], adder)
    scale = narrow.factors(a)[:, None, :] * narrow.factors(b)[None]
    for block in kernels.blocks_of(a):
        if block.start in range(a.shape[1])[columns]:
            inner = in_turn(terms[:, :, block], adder).astype(f64) * scale[:, :, block.start]
            total = adder.add(total, adder.rounded(inner))
    return total


def in_slices(a: Quantized, b: Quantized, adder: Adder, slices: int, *, tree: bool = False) -> np.ndarray:
    """n slices of whole blocks, or of columns, and their sums in turn or as a tree: (m, n)."""
    columns = a.shape[1]
    cut = 1 if a.recipe.whole else a.recipe.block[1]
    blocks = -(-columns // cut)
    each = -(-blocks // slices) * cut
    parts = [in_blocks(a, b, adder, slice(start, start + each)) for start in range(0, columns, each)]
    return (in_pairs if tree else in_turn)(np.stack(parts, axis=2), adder)


def in_order(order: str, a: Quantized, b: Quantized, adder: Adder) -> np.ndarray:
    """The sum (m, n), float32, in a declared order, of operands whose blocks are not promoted."""
    if order == "sequential":
        return in_turn(scaled_terms(a, b, adder), adder)
    if order == "tree":
        return in_pairs(scaled_terms(a, b, adder), adder)
    if order == "blocks":
        return in_blocks(a, b, adder)
    return in_slices(a, b, adder, int(order.split("-")[1]), tree=order.endswith("-tree"))
