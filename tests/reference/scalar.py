"""docs/numerics.md#nvfp4 in plain Python, one number at a time: the twin that the vectorised reference is tested
against.

Numbers are NumPy float32 scalars, so every operation rounds to float32 by itself; roundings to a narrow format go
through exact fractions. Nothing here comes from `reference` except `Format.value`, which test_formats.py checks on
every code against two other libraries.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from narrowgauge.spec.formats import E2M1, E4M3, Format

f32 = np.float32
FLT_MAX = np.finfo(f32).max
SIXTH = np.uint32(0x3E2AAAAB).view(f32)

# Precision, exponent of the smallest subnormal, and the power of two that overflows, of IEEE-like formats.
IEEE = {"float32": (24, -149, 128), "bfloat16": (8, -133, 128), "float16": (11, -24, 16)}


# Rounding.


@lru_cache
def grid(fmt: Format) -> list[Fraction]:
    """Values of codes 0 to max_code, and the one that would come next if the exponent had no end."""
    finite = [Fraction(fmt.value(code)) for code in range(fmt.max_code + 1)]
    step = finite[-1] - finite[-2] if fmt.signed else finite[-1]
    return [*finite, finite[-1] + step]


def nearest_code(x: Fraction, fmt: Format) -> int:
    """Index in `grid` of the point nearest to x >= 0, a tie to the even one."""
    points = grid(fmt)
    above = bisect_left(points, x)
    if above == 0:
        return 0
    if above == len(points):
        return above - 1
    low, high = x - points[above - 1], points[above] - x
    if low == high:
        return above - 1 + (above - 1) % 2
    return above - 1 if low < high else above


def encode(x: float, fmt: Format) -> int:
    """Code of x, nearest even, saturating: `encode` of the reference for one number of a signed format."""
    if math.isnan(x):
        return fmt.max_code if fmt.nan_code is None else fmt.nan_code
    sign = fmt.sign_code if math.copysign(1.0, x) < 0 else 0
    if math.isinf(x):
        return sign | fmt.max_code
    return sign | min(nearest_code(abs(Fraction(float(x))), fmt), fmt.max_code)


def nearest(x: Fraction, dtype: str) -> float:
    """x rounded once to an IEEE-like dtype, ties to even, overflow to infinity. A zero comes out positive."""
    precision, smallest, overflow = IEEE[dtype]
    if x == 0:
        return 0.0
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if Fraction(2) ** exponent > abs(x):
        exponent -= 1
    quantum = max(exponent - precision + 1, smallest)
    rounded = round(x / Fraction(2) ** quantum) * Fraction(2) ** quantum
    return math.copysign(math.inf, x) if abs(rounded) >= Fraction(2) ** overflow else float(rounded)


# NVFP4 and its variants.


def largest(values: Iterable[f32], *, propagate: bool = False) -> f32:
    """Step 1: max|x|, without NaN unless it propagates."""
    amax = f32(0)
    for value in values:
        if np.isnan(value):
            if propagate:
                return f32(np.nan)
        elif abs(value) > amax:
            amax = abs(value)
    return amax


def limited(value: f32) -> f32:
    """min(value, FLT_MAX), NaN kept."""
    return FLT_MAX if value > FLT_MAX else value


def tensor_scale(gamax: f32, most: int = 448) -> f32:
    """Step 2; `most` is the E of 4over6."""
    scale = limited(f32(6 * most) / gamax)
    return f32(1) if gamax == 0 or scale == 0 else scale


def unrounded_scale(bamax: f32, scale: f32, dialect: str) -> f32:
    """Steps 3 and 4."""
    return limited(bamax * (scale * SIXTH) if dialect == "te" else (bamax / f32(6)) * scale)


def element_factor(stored: int, scale: f32) -> f32:
    """Step 6."""
    p = f32(E4M3.value(stored)) * (f32(1) / scale)
    return limited(f32(1) / p)


@dataclass(frozen=True)
class Rule:
    """The choices of a variant."""

    dialect: str = "te"
    """Of the block scale."""
    nan: str = "ignore"
    height: int = 1
    """Rows of a block."""
    by_row: bool = False
    """An amax for each row."""
    most: int = 448
    error: str | None = None
    """mae or mse, of 4over6."""


def quantize(
    x: np.ndarray, rule: Rule = Rule(), *, amax: np.ndarray | None = None, random: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed codes, scale bytes and amax, (1,) or (M,), of a float32 matrix, rotated already.

    `amax` replaces its own. `random`: a byte for every element, where rounding is stochastic.
    """
    rows, columns = x.shape
    codes = np.zeros((rows, -(-columns // 2)), np.uint8)
    scales = np.zeros((rows, -(-columns // 16)), np.uint8)
    propagate = rule.nan == "propagate"
    with np.errstate(all="ignore"):
        if amax is None:
            parts = x if rule.by_row else x[None]
            amax = np.array([largest(part.ravel(), propagate=propagate) for part in parts], f32)
        for top in range(0, rows, rule.height):
            for left in range(0, columns, 16):
                tile = x[top : top + rule.height, left : left + 16]
                gamax = amax[top if rule.by_row else 0]
                stored = tile_scale(tile, gamax, rule)
                factor = element_factor(stored, tensor_scale(gamax, rule.most))
                for i, j in np.ndindex(tile.shape):
                    row, column = top + i, left + j
                    scales[row, left // 16] = stored
                    scaled = tile[i, j] * factor
                    byte = None if random is None else int(random[row, column])
                    code = encode(float(scaled), E2M1) if byte is None else stochastic(float(scaled), byte)
                    codes[row, column // 2] |= code << 4 * (column % 2)
    return codes, scales, amax


def tile_scale(tile: np.ndarray, gamax: f32, rule: Rule) -> int:
    """Steps 1 to 5: the byte stored for a block, or for a tile of up to 16 rows, the right and lower parts cut off."""
    scale = tensor_scale(gamax, rule.most)
    base = unrounded_scale(largest(tile.ravel(), propagate=rule.nan == "propagate"), scale, rule.dialect)
    six = encode(float(base), E4M3)
    if rule.error is None:
        return six
    four = encode(float(base * f32(1.5)), E4M3)
    one, other = (tile_error(tile, stored, gamax, rule) for stored in (four, six))
    return four if one < other else six


def tile_error(tile: np.ndarray, stored: int, gamax: f32, rule: Rule) -> f32:
    """Error of 4over6 under a scale: rows by themselves, then in a tree, the row 8, 4, 2 and 1 below added to each."""
    sums = [row_error(row, stored, gamax, rule) for row in tile]
    if rule.height == 1:
        return sums[0]
    sums += [f32(0)] * (rule.height - len(sums))
    distance = rule.height // 2
    while distance:
        for i in range(distance):
            sums[i] = sums[i] + sums[i + distance]
        distance //= 2
    return sums[0]


def row_error(row: np.ndarray, stored: int, gamax: f32, rule: Rule) -> f32:
    """Sum over 16 elements, in order, of |fl(fl(fl(q·s)·gamax)/fl(6E)) − x| or its square; missing ones are 0."""
    factor = element_factor(stored, tensor_scale(gamax, rule.most))
    total = f32(0)
    for x in [*row, *[f32(0)] * (16 - len(row))]:
        q = f32(E2M1.value(encode(float(x * factor), E2M1)))
        difference = q * f32(E4M3.value(stored)) * gamax / f32(6 * rule.most) - x
        total = total + (abs(difference) if rule.error == "mae" else difference * difference)
    return total


def step(magnitude: Fraction) -> Fraction:
    """Distance of the grid points of E2M1 from |x| upward."""
    return Fraction(1, 2) if magnitude < 2 else Fraction(1) if magnitude < 4 else Fraction(2)


def stochastic(x: float, byte: int) -> int:
    """Code of x under one random byte: docs/numerics.md#stochastic-rounding, with the sum of the fma rounded once to
    float32."""
    if math.isnan(x):
        return E2M1.max_code
    sign = E2M1.sign_code if math.copysign(1.0, x) < 0 else 0
    if math.isinf(x):
        return sign | E2M1.max_code
    magnitude = abs(Fraction(x))
    t = nearest(magnitude + Fraction(byte, 256) * step(magnitude), "float32")
    if math.isinf(t):
        return sign | E2M1.max_code
    cut = Fraction(t) // step(Fraction(t)) * step(Fraction(t))
    return sign | grid(E2M1).index(min(cut, grid(E2M1)[E2M1.max_code]))


def random_bytes(words: np.ndarray) -> np.ndarray:
    """Words (M, W), below 2^32, to a byte for every element (M, 4·W): byte i of word j for element 4j + i."""
    return np.array([[int(word) >> 8 * i & 0xFF for word in row for i in range(4)] for row in words], np.uint8)


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Four words of Philox4x32-10: Salmon et al. 2011, with the products as whole numbers."""
    a, b, c, d = counter
    for number in range(10):
        k, m = ((word + number * weyl) % 2**32 for word, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        high, low = divmod(0xCD9E8D57 * c, 2**32)
        top, bottom = divmod(0xD2511F53 * a, 2**32)
        a, b, c, d = high ^ b ^ k, low, top ^ d ^ m, bottom
    return a, b, c, d


def philox_words(seed: int, offset: int, rows: int, columns: int, first: int = 0) -> np.ndarray:
    """Words (rows, 4·⌈columns/16⌉) of a matrix: four for each block of 16, blocks counted along rows from `first`."""
    blocks = -(-columns // 16)
    words = np.zeros((rows, 4 * blocks), np.uint32)
    for i, j in np.ndindex(rows, blocks):
        number = first + i * blocks + j
        counter = (offset % 2**32, offset >> 32, number % 2**32, number >> 32)
        words[i, 4 * j : 4 * j + 4] = philox(counter, (seed % 2**32, seed >> 32))
    return words


# The Hadamard transform.

# σ of docs/numerics.md#hadamard-transform.
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def coefficient(group: int) -> Fraction:
    """bf16(1/√group): a power of two, or 181/256, the bfloat16 nearest to 1/√2, times one."""
    exponent = group.bit_length() - 1
    return Fraction(181 if exponent % 2 else 256, 256) / 2 ** (exponent // 2)


def rotation(group: int, *, signs: bool = True) -> list[list[Fraction]]:
    """R = diag(σ)·H·c, exactly: Sylvester's H is −1 at (i, j) where i and j have an odd number of bits in common."""
    c = coefficient(group)
    return [
        [c * (SIGNS[i % 16] if signs else 1) * (-1) ** (i & j).bit_count() for j in range(group)] for i in range(group)
    ]


def rotate(x: list[f32], *, signs: bool = True) -> list[float]:
    """One group in the declared order: neighbours first, then 2, 4, … apart, a float32 rounding each; then bfloat16."""
    group = len(x)
    c = f32(float(coefficient(group)))
    y = [value * c * f32(SIGNS[k % 16] if signs else 1) for k, value in enumerate(x)]
    apart = 1
    with np.errstate(all="ignore"):
        while apart < group:
            y = [y[k - apart] - y[k] if k & apart else y[k] + y[k + apart] for k in range(group)]
            apart *= 2
    rounded = [nearest(Fraction(float(v)), "bfloat16") if np.isfinite(v) else float(v) for v in y]
    return [math.copysign(value, v) for value, v in zip(rounded, y, strict=True)]


# Dequantize and GEMM.


def dequantize(code: int, stored: int, amax: f32, most: int = 448) -> f32:
    """One element: fl(code·f), f = fl(fl(s·gamax)·fl(1/2688))."""
    with np.errstate(all="ignore"):
        factor = (f32(E4M3.value(stored)) * amax) * f32(1 / (6 * most))
        return f32(E2M1.value(code)) * factor


def alpha(a: f32, b: f32, expression: str, most: tuple[int, int] = (448, 448)) -> f32:
    """α of a GEMM, from the two amaxes, in the order of operations that the recipe names."""
    d = f32(36 * most[0] * most[1])
    with np.errstate(all="ignore"):
        return (a * b) / d if expression == "(a*b)/d" else (b * a) * (f32(1) / d)
