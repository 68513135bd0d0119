"""Matrices to quantize, on every device the same: made on the CPU, from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from narrowgauge.native.ops import Quantized
from narrowgauge.spec.formats import E4M3, E8M0
from narrowgauge.spec.recipes import Recipe, find_recipe, recipe_names
from tests.golden import bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

RECIPES = {
    "te": find_recipe("nvfp4"),
    "te-2.8": find_recipe("nvfp4@te-2.8"),
    "te-native": find_recipe("nvfp4@te-native"),
    "te-propagate": replace(find_recipe("nvfp4"), nan="propagate"),
    "te-2.8-propagate": replace(find_recipe("nvfp4@te-2.8"), nan="propagate"),
}

DIALECTS = ("te", "te-2.8", "te-native")
"""Dialects of NVFP4 that the kernels have."""
MX_DIALECTS = ("te", "ocp", "even", "ceil", "compressed-tensors", "floor-448", "nearest")
"""Dialects of MX that the kernels have."""
MX_NAMES = tuple(
    name for name in recipe_names() if find_recipe(name).scale is E8M0 and find_recipe(name).dialect in MX_DIALECTS
)
FP8_NAMES = tuple(
    name for name in recipe_names()
    if name.startswith("fp8-") and "@" not in name and "fnuz" not in name and not name.startswith("fp8-row")
)  # fmt: skip
"""Recipes of FP8 that the kernels have: recipes of Transformer Engine, and recipes with a given scale."""
TWO_LEVELS = tuple(
    name for name in recipe_names() if find_recipe(name).scale is E4M3 and find_recipe(name).dialect in DIALECTS
)
"""Recipes with a tensor scale."""
NAMES = TWO_LEVELS + MX_NAMES
"""Every recipe of these two families that the kernels have."""
ROTATED = tuple(name for name in NAMES if find_recipe(name).transform is not None)
SECTIONED = tuple(name for name in NAMES if find_recipe(name).granularity == "tensor")
"""Recipes that quantize sections."""

FAMILIES = (
    "normal", "outliers", "e2m1 ties", "e4m3 ties", "zeros", "negative zeros", "nan", "inf", "subnormal", "huge",
    "any bits",
)  # fmt: skip


def matrix(family: str, rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A (rows, columns) matrix of a family."""
    generator = torch.Generator().manual_seed(1000 * seed + rows * 7 + columns)
    normal = torch.randn(rows, columns, generator=generator)
    pick = torch.rand(rows, columns, generator=generator)
    match family:
        case "normal":
            x = normal
        case "outliers":
            x = torch.where(pick < 0.02, 300 * normal, normal)
        case "e2m1 ties":  # under S_enc = 1 and block scales of powers of two
            ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
            x = ties[(pick * 8).long()] * normal.sign()
            x[:, ::16] = 6.0
            x = x * 2.0 ** (torch.arange(rows) % 5).unsqueeze(1)
            x.view(-1)[:1] = 2688.0
        case "e4m3 ties":  # a tensor amax of 65 and block amaxes of 48.75·2^-j
            x = 2 * pick - 1
            x[:, ::16] = 1.0
            x *= 48.75 * 2.0 ** -((torch.arange(columns) // 16 + torch.arange(rows).unsqueeze(1)) % 12)
            x.view(-1)[:1] = 65.0
        case "zeros":
            x = torch.zeros(rows, columns)
        case "negative zeros":
            x = torch.where(pick < 0.5, -0.0, normal)
            x[::2] = -0.0
        case "nan":
            x = torch.where(pick < 0.05, torch.nan, normal)
            x[:, :16] = torch.where(pick[:, :16] < 0.5, torch.nan, x[:, :16])
            x[::3, 16:32] = torch.nan
        case "inf":
            x = torch.where(pick < 0.01, torch.inf, normal)
            x.view(-1)[:2] = -torch.inf
        case "subnormal":
            x = normal * torch.finfo(dtype).smallest_normal / 4
        case "huge":
            x = normal / 1000
            x.view(-1)[-1:] = torch.finfo(dtype).max
        case "any bits":
            size = torch.finfo(dtype).bits
            low, high = -(1 << (size - 1)), 1 << (size - 1)
            integers = torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.int64)
            return integers.to(torch.int32 if size == 32 else torch.int16).view(dtype)
        case _:
            raise ValueError(family)
    return x.to(dtype)


def nearly_tied(rows: int = 2048) -> torch.Tensor:
    """(rows, 64) of tiles with two nearly equal errors of 4over6: the order of the sum decides."""
    x = torch.randint(-24, 25, (rows, 64), generator=torch.Generator().manual_seed(0)) * (1 / 3)
    x[::16, ::16] = 8.0
    return x * 2.0 ** -(torch.arange(rows) // 16 % 3).unsqueeze(1)


def dtypes(recipe: Recipe) -> tuple[torch.dtype, ...]:
    """Dtypes of the input: rotations take bfloat16 alone."""
    return DTYPES if recipe.transform is None else (torch.bfloat16,)


def dtype_in_turn(name: str, family: str) -> torch.dtype:
    """A dtype of the recipe; every family and every recipe has each dtype in turn."""
    some = dtypes(find_recipe(name))
    return some[(len(name) + FAMILIES.index(family)) % len(some)]


def fitting(extent: int, recipe: Recipe) -> int:
    """`extent`, rounded up to whole groups if the recipe rotates."""
    return extent if recipe.transform is None else -(-extent // recipe.transform.group) * recipe.transform.group


def sample(recipe: Recipe, family: str, rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A matrix of a family about as large as said, whose rows and columns the recipe can rotate."""
    return matrix(family, fitting(rows, recipe), fitting(columns, recipe), dtype, seed)


# Views of a matrix (256, 512) with whole groups of 128 in both dimensions.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x[:128, :256].T,
    "every second row": lambda x: x[::2],
    "every second column": lambda x: x[:128, ::2],
    "every third of a transpose": lambda x: x.T[:384:3, :128],
    "from within": lambda x: x[128:, 256:],
    "three dimensions": lambda x: x.view(2, 128, 512)[:, ::2, :128],
    "three dimensions, the last strided": lambda x: x.view(2, 128, 512).transpose(1, 2)[:, :128],
    "four dimensions": lambda x: x.view(2, 2, 64, 512)[:, :, ::2, 128:256],
    "one row for all": lambda x: x[:1].expand(128, 512),
    "one column for all": lambda x: x[:128, :1].expand(128, 256),
}


def seeded(recipe: Recipe, seed: int = 1234, offset: int = 5) -> tuple[int, int] | None:
    """Seed and offset for a recipe with stochastic rounding; None for other recipes."""
    return (seed, offset) if recipe.rounding == "stochastic" else None


def options_of(recipe: Recipe, count: int = 1) -> dict[str, Any]:
    """Options that the recipe requires: `random`, or `scale` with a number for each of `count` tensors."""
    if recipe.tensor_scale == "given":
        return {"scale": 0.37 * 1.9 ** (torch.arange(count) % 40)}
    return {} if seeded(recipe) is None else {"random": seeded(recipe)}


def codes_under_every_scale(amax: float, columns: int = 16) -> Quantized:
    """A row for every scale byte, with all 16 codes, or 15 codes in a matrix of 15 columns."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[::2] | codes[1::2] << 4).repeat(256, 1)
    if columns % 2:
        packed[:, -1] &= 0xF
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    return Quantized(packed.contiguous(), scales, torch.tensor([amax]), RECIPES["te"], (256, columns))


def codes_under_every_power(name: str) -> Quantized:
    """Of an MX recipe: a row for every scale byte, every code in each, as often as whole blocks take."""
    recipe = find_recipe(name)
    columns = max(32, recipe.element.codes)
    codes = (torch.arange(columns) % recipe.element.codes).byte()
    stored = codes[::2] | codes[1::2] << 4 if recipe.element.bits == 4 else codes
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, columns // 32)
    return Quantized(stored.repeat(256, 1), scales, None, recipe, (256, columns))


def assert_equal(got: torch.Tensor, expected: torch.Tensor, what: str = "values") -> None:
    """The same shape, dtype and bits on the CPU; NaN only as NaN, since nobody defines its payload."""
    assert got.dtype == expected.dtype, what
    assert got.shape == expected.shape, what
    got, expected = got.cpu(), expected.cpu()
    if not got.is_floating_point():
        differ = got != expected
    else:
        differ = (bits(got) != bits(expected)) & ~(got.isnan() & expected.isnan())
    if differ.any():
        first = tuple(differ.nonzero()[0].tolist())
        count = int(differ.sum())
        raise AssertionError(f"{count} {what} differ, the first at {first}: {got[first]!r} is not {expected[first]!r}")


def assert_same(got: Quantized | None, expected: Quantized | None) -> None:
    """Codes, scales, amax and tensor scale, bit for bit. Both sides may lack a half or a part."""
    assert (got is None) == (expected is None)
    if got is None or expected is None:
        return
    for part in ("shape", "recipe", "swizzled", "transposed"):
        assert getattr(got, part) == getattr(expected, part), part
    for part in ("tensor_scale", "amax", "scales", "codes"):
        one, other = getattr(got, part), getattr(expected, part)
        assert (one is None) == (other is None), part
        if one is not None:
            assert_equal(one, other, part)


def assert_both_same(
    got: tuple[Quantized | None, Quantized | None], expected: tuple[Quantized | None, Quantized | None]
) -> None:
    """Either half, bit for bit."""
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)


def to(q: Quantized, device: torch.device | str) -> Quantized:
    """`q` on another device."""
    amax = None if q.amax is None else q.amax.to(device)
    return replace(q, codes=q.codes.to(device), scales=q.scales.to(device), amax=amax, tensor_scale=None)
