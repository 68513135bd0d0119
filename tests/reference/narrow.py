"""Random operands of every recipe that is not NVFP4's, made of codes and scales directly."""

from __future__ import annotations

import numpy as np
import torch

from narrowgauge.reference.quantize.layout import pack
from narrowgauge.spec.formats import Format
from narrowgauge.spec.quantized import Quantized, scales_shape
from narrowgauge.spec.recipes import find_recipe

MX = ("mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp4")
# Exponent codes of scales: equal, of random data, and wild at both ends and over the whole range.
EXPONENTS = {"equal": (127, 128), "near": (125, 129), "wide": (100, 150), "small": (0, 60), "large": (195, 255),
             "wild": (0, 255)}  # fmt: skip
# Exponents of float32 scales, and whether they are powers of two.
FLOATS = {"one": (0, 1, True), "pow2": (-3, 3, True), "near": (-3, 3, False), "wide": (-40, 40, False),
          "small": (-140, -60, False), "large": (60, 127, False), "wild": (-149, 127, False)}  # fmt: skip
# FP8 with scales of blocks: any scales, and powers of two.
BLOCK_PAIRS = [
    ("fp8-block-1x128-e4m3-fp32", "fp8-block-128x128-e4m3-fp32"),
    ("fp8-block-1x128-e5m2-pow2", "fp8-block-1x128-e4m3-fp32"),
    ("fp8-block-128x128-e4m3-pow2", "fp8-block-1x128-e5m2-pow2"),
]


def finite_codes(fmt: Format) -> np.ndarray:
    """Every code that stands for a number, of either sign."""
    positive = np.arange(fmt.max_code + 1)
    return np.concatenate([positive, positive | fmt.sign_code]).astype(np.uint8)


def codes(name: str, rng: np.random.Generator, rows: int, columns: int, family: str = "any") -> np.ndarray:
    """Codes (rows, columns), one a byte. `any`: uniform; `data`: codes of normal numbers; `lattice`: 0, ±1, ±2, ±3;
    `positive`: uniform without a sign; `sparse`: mostly 0."""
    fmt = find_recipe(name).element
    finite = finite_codes(fmt)
    if family in ("data", "lattice"):
        values = np.array([fmt.value(int(code)) for code in finite])
        if family == "lattice":
            finite = finite[np.isin(np.abs(values), [0, 1, 2, 3])]
            return rng.choice(finite, (rows, columns))
        wanted = rng.standard_normal((rows, columns)) * fmt.max / 4
        order = np.argsort(values, kind="stable")
        found = np.searchsorted(values[order], wanted).clip(0, len(order) - 1)
        return finite[order][found]
    if family == "positive":
        finite = finite[finite <= fmt.max_code]
    chosen = rng.choice(finite, (rows, columns))
    if family == "sparse":
        chosen[rng.random(chosen.shape) < 0.8] = 0
    return chosen


def scales(name: str, rng: np.random.Generator, shape: tuple[int, int], kind: str = "near") -> torch.Tensor:
    """Scales of a matrix of `shape`, as its recipe stores them."""
    recipe = find_recipe(name)
    stored = scales_shape(shape, recipe)
    if recipe.scale.name == "E8M0":
        return torch.from_numpy(rng.integers(*EXPONENTS[kind], stored).astype(np.uint8))
    low, high, pow2 = FLOATS[kind]
    mantissa = np.ones(stored) if pow2 else rng.uniform(1, 2, stored)
    return torch.from_numpy(np.ldexp(mantissa, rng.integers(low, high, stored)).astype(np.float32))


def narrow(
    name: str, rng: np.random.Generator, rows: int, columns: int, *, kind: str = "near", family: str = "any"
) -> Quantized:
    """A Quantized (rows, columns) of the recipe."""
    one = torch.from_numpy(codes(name, rng, rows, columns, family))
    recipe = find_recipe(name)
    held = pack(one) if recipe.element.bits == 4 else one
    return Quantized(held, scales(name, rng, (rows, columns), kind), None, recipe, (rows, columns))


def pair(
    names: tuple[str, str], seed: int, shape: tuple[int, int, int], kind: str = "near", family: str = "any"
) -> tuple[Quantized, Quantized]:
    """Operands of `shape`, (M, N, K)."""
    rng = np.random.default_rng(seed)
    m, n, k = shape
    a, b = (narrow(one, rng, rows, k, kind=kind, family=family) for one, rows in zip(names, (m, n), strict=True))
    return a, b


def one_a_byte(q: Quantized) -> np.ndarray:
    """The codes of a Quantized as (M, K), for any layout; written independently of the reference."""
    held = q.codes.numpy().T if q.transposed else q.codes.numpy()
    if q.recipe.element.bits != 4:
        return held
    return np.stack([held & 15, held >> 4], axis=2).reshape(len(held), -1)[:, : q.shape[1]]


def elements(q: Quantized) -> np.ndarray:
    """What the codes stand for: float64 (M, K)."""
    return np.array(q.recipe.element.values)[one_a_byte(q)]


def factors(q: Quantized) -> np.ndarray:
    """The scale of every element of a linear, not transposed Quantized, float64 (M, K)."""
    held = q.scales.numpy()
    found = np.array(q.recipe.scale.values)[held] if held.dtype == np.uint8 else held.astype(np.float64)
    if q.recipe.whole:
        return np.broadcast_to(found, q.shape)
    rows = found.repeat(q.recipe.stored_rows, axis=0)[: q.shape[0]]
    return rows.repeat(q.recipe.block[1], axis=1)[:, : q.shape[1]]


def values(q: Quantized) -> np.ndarray:
    """code·scale, float64 (M, K), exact: at most 28 bits."""
    return elements(q) * factors(q)
