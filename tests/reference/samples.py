"""Inputs that the tests share: whole value sets, the neighbourhood of every rounding decision, random operands."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from narrowgauge.reference.scalar.rounding import grid
from narrowgauge.spec.formats import E2M1, E4M3, Format
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe


def boundaries(fmt: Format) -> np.ndarray:
    """float32: every value and midpoint of `fmt`, also the midpoint to overflow, ± 1 ulp."""
    points = grid(fmt)
    exact = [float(p) for p in points] + [float((p + q) / 2) for p, q in pairwise(points)]
    with np.errstate(over="ignore"):
        at = np.array(exact).astype(np.float32)
    at = at[np.isfinite(at)]
    near = np.concatenate([at, np.nextafter(at, np.float32(np.inf)), np.nextafter(at, np.float32(0))])
    return np.concatenate([near, -near])


@lru_cache
def every_input(fmt: Format) -> np.ndarray:
    """float32: all 65536 bfloat16 numbers, all 65536 float16 numbers, and the boundaries of `fmt`."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    halves = [patterns.view(dtype).float().numpy() for dtype in (torch.bfloat16, torch.float16)]
    return np.concatenate([*halves, boundaries(fmt)])


def quantized(
    codes: np.ndarray, scales: np.ndarray, amax: float = 2688.0, *, name: str = "nvfp4", columns: int | None = None
) -> Quantized:
    """A `Quantized` of unpacked E2M1 codes (M, K), K even, E4M3 scale bytes and an amax. α is 1 for two of 2688."""
    rows, width = codes.shape
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    amaxes = torch.tensor([amax], dtype=torch.float32)
    return Quantized(
        torch.from_numpy(packed), torch.from_numpy(scales), amaxes, find_recipe(name), (rows, columns or width)
    )


def values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """code·scale of unpacked codes (M, K), float64: what the operand of a GEMM stands for, without its amax."""
    elements, factors = np.array(E2M1.values), np.array(E4M3.values)
    return elements[codes] * factors[scales].repeat(16, axis=1)[:, : codes.shape[1]]


FAMILIES = ("randn", "wide", "positive", "cancel", "lattice", "sparse")


def operand(family: str, rng: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Unpacked codes (rows, columns) and scale bytes of a family; `columns` is a multiple of 16."""
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    shape = (rows, columns // 16)
    if family == "randn":  # scales within a factor of 2, as random data give
        return codes, rng.integers(0x70, 0x78, shape, dtype=np.uint8)
    if family == "lattice":  # one scale: every sum is exact
        return codes & 0xB, np.full(shape, 0x38, np.uint8)
    scales = rng.integers(0, 0x7F, shape, dtype=np.uint8)  # the whole range of E4M3
    if family == "positive":
        codes &= 7
    if family == "sparse":
        codes[rng.random(codes.shape) < 0.8] = 0
    return codes, scales


def operands(family: str, rng: np.random.Generator, m: int, n: int, k: int) -> tuple[np.ndarray, ...]:
    """codes (m, k), scales, codes (n, k), scales of the two operands of a GEMM; k is a multiple of 16.

    `cancel`: the second half of the sum is the first with the other sign, but for the last block.
    """
    left, left_scales = operand(family, rng, m, k)
    right, right_scales = operand(family, rng, n, k)
    if family == "cancel":
        half = k // 32 * 16
        left[:, half : 2 * half], right[:, half : 2 * half] = left[:, :half], right[:, :half] ^ 8
        for scales in (left_scales, right_scales):
            scales[:, half // 16 : half // 8] = scales[:, : half // 16]
            scales[:, -1] = rng.integers(0, 0x7F, len(scales))
    return left, left_scales, right, right_scales


MIDPOINTS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
NASTY = [0.0, -0.0, 1e-45, -1e-45, 1.17549435e-38, 7.9e-36, 2.18e-6, 448.0, 2688.0, 3.4028234663852886e38]
NASTY += [-3.4028234663852886e38, math.inf, -math.inf, math.nan]
MATRICES = ("normal", "spread", "ties", "tiny", "any", "nasty")


def matrix(family: str, seed: int, rows: int, columns: int) -> torch.Tensor:
    """float32 (rows, columns) of a family; `ties` are those of E2M1 and of E4M3, `any` has random bits."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns)
    ties = rng.choice([*MIDPOINTS, 65.0, 48.75, 6.0, 4.0, 8.5, 9.5], shape)
    ties *= 2.0 ** rng.choice([0, 0, 1, -1, -4, -8], shape)
    ties *= rng.choice([1.0, -1.0], shape)
    found = {
        "normal": rng.standard_normal(shape),
        "spread": rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 31, shape),
        "ties": ties,
        "tiny": np.where(rng.random(shape) < 0.5, ties, rng.standard_normal(shape)) * 2.0**-124,
        "any": rng.integers(0, 1 << 32, shape).astype(np.uint32).view(np.float32),
        "nasty": np.where(rng.random(shape) < 0.8, ties, rng.choice(NASTY, shape)),
    }[family]
    return torch.from_numpy(np.asarray(found, np.float32))


def words(seed: int, rows: int, columns: int) -> torch.Tensor:
    """Random words of a matrix (rows, columns) that is rounded stochastically."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 1 << 32, (rows, -(-columns // 4))).astype(np.uint32).view(np.int32))
