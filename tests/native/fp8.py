"""FP8 with float32 scales for tests: its recipes, and docs/numerics.md#fp8-with-float32-scales one number at a time, in
exact fractions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge.native.ops import Quantized
from narrowgauge.native.quantize import fp8
from narrowgauge.native.runtime.arguments import GENERAL_THREADS
from narrowgauge.native.runtime.launch import launch
from narrowgauge.reference.scalar.rounding import encode, nearest
from narrowgauge.spec.recipes import Delayed, Recipe, find_recipe
from tests.native.samples import FP8_NAMES

f32 = np.float32

EPSILONS = ("fp8-block-1x128-e4m3-pow2-eps0.01", "fp8-block-128x128-e5m2-fp32-eps1e-12", "fp8-current-e4m3-eps0.5")
NAMES = (
    *(name for name in FP8_NAMES if find_recipe(name).delayed in (None, Delayed())),
    *EPSILONS,
)
"""Every recipe (of delayed scaling: a single rule of the update), and recipes with a smallest amax."""
BLOCKS = tuple(name for name in NAMES if not find_recipe(name).whole)
WHOLE = tuple(name for name in NAMES if find_recipe(name).whole)
KINDS = ("fp8-block-1x128-e4m3-fp32", "fp8-block-128x128-e5m2-pow2", "fp8-current-e4m3", "fp8-delayed-e5m2")
"""A recipe of each kind: elements that share a scale, and origin of the scale."""

SCALES = (2.7, 0.01, 1e30, 1e-40, 0.0, -0.0, -3.0, math.inf, -math.inf, math.nan, 3.4028235e38)
"""Scales of a caller."""
AMAXES = (0.0, -0.0, -1.0, 1e-45, 1e-40, 1.3e-36, 0.1, 448.0, 57344.0, 1e30, 3.4028235e38, math.inf, math.nan)


# In exact fractions.


def times(a: float, b: float) -> float:
    """a·b rounded to float32."""
    if math.isfinite(a) and math.isfinite(b):
        return math.copysign(
            nearest(Fraction(abs(a)) * Fraction(abs(b)), "float32"), math.copysign(1, a) * math.copysign(1, b)
        )
    return math.nan if a == 0 or b == 0 else a * b


def inverse(scale: float) -> float:
    """1/scale rounded to float32."""
    if scale == 0:
        return math.copysign(math.inf, scale)
    if not math.isfinite(scale):
        return math.nan if math.isnan(scale) else math.copysign(0.0, scale)
    return nearest(1 / Fraction(scale), "float32")


def encode_scale(amax: float, recipe: Recipe, dtype: torch.dtype) -> float:
    """Factor of the elements of a block, or of a tensor, with this amax."""
    amax = max(amax, float(f32(recipe.smallest_amax)))  # NaN, which comes first, stays
    if amax == 0 or not math.isfinite(amax):
        return 1.0
    scale = nearest(Fraction(recipe.element.max) / Fraction(amax), "float32")
    if math.isinf(scale):
        scale = torch.finfo(dtype if recipe.largest_scale == "input" else torch.float32).max
    return 2.0 ** (math.frexp(scale)[1] - 1) if recipe.scale_rounding == "down" else scale


def largest(values: np.ndarray, recipe: Recipe) -> float:
    """The amax of a block."""
    some = np.abs(values[~np.isnan(values)])
    return math.nan if recipe.nan == "propagate" and some.size < values.size else float(max(some, default=0.0))


def model(x: torch.Tensor, recipe: Recipe, *, scale: torch.Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Codes and stored scales of `x` (M, K)."""
    values = x.float().numpy()
    rows, columns = values.shape
    height, width = (max(rows, 1), max(columns, 1)) if recipe.whole else recipe.block
    codes = np.zeros(values.shape, np.uint8)
    scales = np.zeros((-(-rows // height), -(-columns // width)), f32) if not recipe.whole else np.zeros((1, 1), f32)
    for i, j in np.ndindex(*scales.shape):
        block = values[i * height : (i + 1) * height, j * width : (j + 1) * width]
        factor = encode_scale(largest(block, recipe), recipe, x.dtype) if scale is None else float(scale)
        scales[i, j] = inverse(factor)
        part = codes[i * height : (i + 1) * height, j * width : (j + 1) * width]
        for at in np.ndindex(*block.shape):
            part[at] = encode(times(float(block[at]), factor), recipe.element)
    return codes, scales


# Inputs.


def amaxes_of_every_exponent(recipe: Recipe) -> torch.Tensor:
    """Rows whose amaxes are powers of two, also times the largest element, ± 1 ulp: float32 (M, 128)."""
    exact = [Fraction(2) ** k * m for k, m in product(range(-149, 128), (Fraction(1), Fraction(recipe.element.max)))]
    amaxes = np.array([nearest(amax, "float32") for amax in exact], f32)
    amaxes = np.unique(amaxes[np.isfinite(amaxes)])
    near = np.concatenate([amaxes, np.nextafter(amaxes, f32(0)), np.nextafter(amaxes, f32(math.inf))])
    near = torch.from_numpy(near[np.isfinite(near)])
    shares = torch.cat([torch.tensor([1.0, -0.75, 0.31, -0.1, 1e-2, 1e-3, 0.0]), torch.linspace(-1, 1, 121)])
    return near.unsqueeze(1) * shares


# The kernels in the shape of a GPU.


@pytest.fixture(params=[8, 256])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Threads of a block on the CPU: the usual number, and the number of a GPU, with the kernel of whole tiles."""
    count: int = request.param
    monkeypatch.setitem(GENERAL_THREADS["quantize_fp8"], "cpu", count)
    if count != 8:
        monkeypatch.setitem(fp8._TILE_THREADS, "cpu", count)
        flags = (f"-DFP8_THREADS={count}", "-O0")  # compiled sooner

        def with_flags(*given: Any, extra_flags: tuple[str, ...] = (), **options: Any) -> None:
            launch(*given, **options, extra_flags=(*extra_flags, *flags))

        monkeypatch.setattr(fp8, "launch", with_flags)
    return count


def parts(*some: Quantized | None) -> Iterator[torch.Tensor]:
    """All outputs of the kernels."""
    for q in some:
        if q is not None:
            yield from (q.codes, q.scales)
            yield from (part for part in (q.amax, q.tensor_scale) if part is not None)
