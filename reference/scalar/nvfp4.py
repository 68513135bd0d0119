"""NVFP4 in dialects `te` and `te-2.8`: docs/numerics.md#nvfp4 and docs/numerics.md#nvfp4-variants."""

from __future__ import annotations

import numpy as np

from narrowgauge.reference.scalar.rounding import encode, f32, largest, limited, stochastic
from narrowgauge.spec.formats import E2M1, E4M3
from narrowgauge.spec.recipes import Recipe

SIXTH = np.uint32(0x3E2AAAAB).view(f32)
"""fl(1/6)."""


def quantize(
    x: np.ndarray, recipe: Recipe, *, amax: np.ndarray | None = None, random: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed codes, scale bytes and gamax, (1,) or (M,), of float32 `x` (M, K), after the transform if there is one.

    `amax`: given gamax. `random`: a random byte for each element, for stochastic rounding.
    """
    rows, columns = x.shape
    codes = np.zeros((rows, -(-columns // 2)), np.uint8)
    scales = np.zeros((rows, -(-columns // 16)), np.uint8)
    by_row = recipe.granularity == "row"
    height = recipe.block[0]
    with np.errstate(all="ignore"):
        # Step 1: gamax of the tensor, or of each row.
        if amax is None:
            parts = x if by_row else x[None]
            amax = np.array([largest(part.ravel(), propagate=recipe.nan == "propagate") for part in parts], f32)
        for top in range(0, rows, height):
            gamax = amax[top if by_row else 0]

            # Step 2: S_enc.
            encode_scale = tensor_scale(gamax, recipe.scale_max)
            for left in range(0, columns, 16):
                tile = x[top : top + height, left : left + 16]

                # Steps 1 and 3 to 5: the stored scale of the tile, one in each row.
                stored = tile_scale(tile, gamax, recipe)
                scales[top : top + height, left // 16] = stored

                # Step 6: e.
                factor = element_factor(stored, encode_scale)
                for i, j in np.ndindex(tile.shape):
                    row, column = top + i, left + j

                    # Step 7: q, to nearest even or stochastic.
                    scaled = float(tile[i, j] * factor)
                    byte = None if random is None else int(random[row, column])
                    code = encode(scaled, E2M1) if byte is None else stochastic(scaled, byte, E2M1)

                    # Step 8: the first of two codes in the low nibble.
                    codes[row, column // 2] |= code << 4 * (column % 2)
    return codes, scales, amax


def tensor_scale(gamax: f32, scale_max: float = 448) -> f32:
    """Step 2: S_enc = min(fl(2688/gamax), FLT_MAX), with 6E in place of 2688 in 4over6, E = `scale_max`."""
    scale = limited(f32(6 * scale_max) / gamax)
    return f32(1) if gamax == 0 or scale == 0 else scale


def unrounded_scale(bamax: f32, encode_scale: f32, block_scale: str) -> f32:
    """Steps 3 and 4: d, in the form of dialect `te`, or of 4over6 and dialect `te-2.8`."""
    if block_scale == "amax*(enc*(1/6))":
        return limited(bamax * (encode_scale * SIXTH))
    assert block_scale == "(amax/6)*enc"
    return limited((bamax / f32(6)) * encode_scale)


def tile_scale(tile: np.ndarray, gamax: f32, recipe: Recipe) -> int:
    """Steps 1 and 3 to 5: the stored scale of a block, or of a tile of up to 16 rows; edges may cut a tile off."""
    bamax = largest(tile.ravel(), propagate=recipe.nan == "propagate")
    d = unrounded_scale(bamax, tensor_scale(gamax, recipe.scale_max), recipe.block_scale)
    if recipe.candidates == "6":
        return encode(float(d), E4M3)
    return four_over_six(tile, d, gamax, recipe)


def element_factor(stored: int, encode_scale: f32) -> f32:
    """Step 6: e = min(fl(1/p), FLT_MAX), p = fl(s·fl(1/S_enc))."""
    p = f32(E4M3.value(stored)) * (f32(1) / encode_scale)
    return limited(f32(1) / p)


def four_over_six(tile: np.ndarray, base: f32, gamax: f32, recipe: Recipe) -> int:
    """docs/numerics.md#4over6, steps 2 to 5: the stored scale of a tile."""
    # Step 2: s6 and s4.
    six, four = encode(float(base), E4M3), encode(float(base * f32(1.5)), E4M3)

    # Steps 3 to 5: s4 if its error is strictly smaller, which NaN is not.
    return four if tile_error(tile, four, gamax, recipe) < tile_error(tile, six, gamax, recipe) else six


def tile_error(tile: np.ndarray, stored: int, gamax: f32, recipe: Recipe) -> f32:
    """4over6, step 4: the errors of 16 rows in a tree: row i + 8 is added to row i, then i + 4, i + 2 and i + 1."""
    height = recipe.block[0]
    sums = [row_error(row, stored, gamax, recipe) for row in tile]
    sums += [f32(0)] * (height - len(sums))
    distance = height // 2
    while distance:
        for i in range(distance):
            sums[i] = sums[i] + sums[i + distance]
        distance //= 2
    return sums[0]


def row_error(row: np.ndarray, stored: int, gamax: f32, recipe: Recipe) -> f32:
    """4over6, steps 3 and 4: the error of 16 elements of a row under a stored scale, padded with zeros."""
    factor = element_factor(stored, tensor_scale(gamax, recipe.scale_max))
    total = f32(0)
    for x in [*row, *[f32(0)] * (16 - len(row))]:
        # Step 3: δ = fl(fl(fl(fl(q·s)·gamax)/fl(6E)) − x).
        q = f32(E2M1.value(encode(float(x * factor), E2M1)))
        delta = q * f32(E4M3.value(stored)) * gamax / f32(6 * recipe.scale_max) - x

        # Step 4: fl(|δ|) or fl(δ·δ), added in the order of K.
        total = total + (abs(delta) if recipe.candidates == "4-or-6-mae" else delta * delta)
    return total


def dequantize(code: int, stored: int, gamax: f32, scale_max: float = 448) -> f32:
    """docs/numerics.md#nvfp4, Dequantize: fl(q·f), f = fl(fl(s·gamax)·fl(1/2688)), with 6E in place of 2688."""
    with np.errstate(all="ignore"):
        factor = (f32(E4M3.value(stored)) * gamax) * f32(1 / (6 * scale_max))
        return f32(E2M1.value(code)) * factor
