"""Operands of a GEMM, made of codes and scales: whole value sets, and every layout in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from narrowgauge.native.ops import GroupedQuantized, Quantized
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.layout import pack, swizzle
from narrowgauge.spec.formats import E4M3, E8M0, Format
from narrowgauge.spec.quantized import PARTS, BatchedQuantized, scales_shape
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.native.samples import matrix

MX = ("mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp4")
"""A recipe for each element format."""
FP8_PAIRS = (
    ("fp8-block-1x128-e4m3", "fp8-block-1x128-e4m3"), ("fp8-block-1x128-e4m3", "fp8-block-128x128-e5m2"),
    ("fp8-block-128x128-e5m2", "fp8-block-1x128-e4m3"), ("fp8-block-1x128-e5m2", "fp8-block-128x128-e4m3"),
    ("fp8-current-e4m3", "fp8-current-e4m3"), ("fp8-current-e4m3", "fp8-delayed-e5m2"),
    ("fp8-delayed-e5m2", "fp8-current-e4m3"),
)  # fmt: skip
MX_PAIRS = (
    ("mxfp8-e4m3", "mxfp8-e4m3"), ("mxfp8-e5m2", "mxfp8-e5m2"), ("mxfp8-e4m3", "mxfp4"), ("mxfp4", "mxfp6-e3m2-2d"),
    ("mxfp6-e2m3", "mxfp8-e5m2"), ("mxfp8-2d", "mxfp6-e2m3-2d"), ("mxfp8-e5m2-2d", "mxfp4-2d"),
    ("mxfp8-e4m3@ocp", "mxfp6-e3m2@nearest"),
)  # fmt: skip
PAIRS = MX_PAIRS + FP8_PAIRS
NVFP4_PAIRS = (("nvfp4", "nvfp4-2d"), ("nvfp4-rowscaled", "nvfp4"))


def finite_codes(fmt: Format) -> torch.Tensor:
    """Codes of the finite numbers of a format, uint8."""
    magnitudes = torch.arange(fmt.max_code + 1)
    return torch.cat([magnitudes, magnitudes | fmt.sign_code]).to(torch.uint8)


def operand(codes: torch.Tensor, scales: torch.Tensor, recipe: Recipe | str) -> Quantized:
    """An operand of codes (M, K), a byte for each element, and stored scales."""
    recipe = find_recipe(recipe)
    one = torch.ones(1) if recipe.tensor_scale != "none" else None
    stored = pack(codes) if recipe.element.bits == 4 else codes.contiguous()
    return Quantized(
        stored, scales, one, recipe, (codes.shape[0], codes.shape[1]), None if one is None else 1 / scales[0]
    )


def random_operand(name: str, rows: int, columns: int, seed: int = 0, *, spread: int = 6) -> Quantized:
    """Random finite codes and scales within 2^±spread, equal in the rows of a tile. NVFP4: quantized numbers."""
    recipe = find_recipe(name)
    if recipe.scale is E4M3:
        x = matrix("outliers", max(1, rows), max(1, columns), torch.float32, seed)[:rows, :columns]
        return reference.quantize(x, recipe)
    generator = torch.Generator().manual_seed(seed)
    known = finite_codes(recipe.element)
    codes = known[torch.randint(len(known), (rows, columns), generator=generator)]
    shape = scales_shape((rows, columns), recipe)
    if recipe.scale is E8M0:
        scales = torch.randint(127 - spread, 128 + spread, shape, generator=generator).to(torch.uint8)
        return operand(codes, scales[torch.arange(rows) // recipe.block[0] * recipe.block[0]], recipe)
    exponents = torch.randint(-spread, spread + 1, shape, generator=generator)
    return operand(codes, (1 + torch.rand(shape, generator=generator)) * 2.0**exponents, recipe)


def lattice(name: str, rows: int, columns: int, seed: int = 0) -> Quantized:
    """Small integers under scales that are all the same power of two: every sum is exact."""
    recipe = find_recipe(name)
    values = torch.tensor(recipe.element.values)
    whole = ((values == values.round()) & (values.abs() <= 3)).nonzero().flatten().to(torch.uint8)
    codes = whole[torch.randint(len(whole), (rows, columns), generator=torch.Generator().manual_seed(seed))]
    shape = scales_shape((rows, columns), recipe)
    return operand(
        codes, torch.full(shape, 129, dtype=torch.uint8) if recipe.scale is E8M0 else torch.full(shape, 0.25), recipe
    )


def batched(several: list[Quantized]) -> BatchedQuantized:
    """Matrices of one shape and recipe as a batch."""
    parts = {name: [getattr(q, name) for q in several] for name in (*PARTS, "zeros")}
    stacked = {name: None if part[0] is None else torch.stack(part) for name, part in parts.items()}
    return BatchedQuantized(**stacked, recipe=several[0].recipe, shape=(len(several), *several[0].shape))


def stored_transposed(q: Quantized) -> Quantized:
    """The same operand in memory as a columnwise MX half is: codes (K, M), scales (⌈K/32⌉, M)."""
    return replace(q, codes=q.codes.T.contiguous(), scales=q.scales.T.contiguous(), transposed=True)


def stored_swizzled(q: Quantized) -> Quantized:
    """The same operand with the scales of the logical matrix in the 128×4 layout."""
    return replace(q, scales=swizzle(q.scales.T.contiguous() if q.transposed else q.scales), swizzled=True)


def random_sections(name: str, sizes: list[int], columns: int) -> GroupedQuantized:
    """Random operands as sections, section below section."""
    if find_recipe(name).scale is E4M3:
        x = matrix("outliers", max(1, sum(sizes)), columns, torch.float32)[: sum(sizes)]
        return reference.quantize_grouped(x, torch.tensor(sizes), name)
    parts = [random_operand(name, rows, columns, seed=number) for number, rows in enumerate(sizes)]
    amaxes = None if parts[0].amax is None else torch.ones(len(sizes))
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    recipe = find_recipe(name)
    return GroupedQuantized(codes, scales, amaxes, recipe, (sum(sizes), columns), torch.tensor(sizes), amaxes)


def random_addends(sizes: list[int], columns: int, c_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """c (M, N) and bias (sections, N) of a grouped product."""
    c = matrix("normal", max(1, sum(sizes)), columns, c_dtype)[: sum(sizes)]
    return {"c": c, "bias": matrix("normal", len(sizes), columns, torch.float32)}


def product_of_sections(
    multiply: Callable[..., torch.Tensor],
    a: GroupedQuantized,
    b: Sequence[Quantized],
    *,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The products of the sections by `multiply`, section below section."""
    sizes = a.sizes.tolist()
    missing = [None] * len(sizes)
    added, biases = missing if c is None else c.split(sizes), missing if bias is None else bias
    operands = zip(a.sections(), b, added, biases, strict=True)
    return torch.cat([multiply(section, other, c=one, bias=more, **options) for section, other, one, more in operands])


def sections_with_a_refused_matrix(sizes: list[int], n: int, k: int) -> tuple[GroupedQuantized, list[Quantized]]:
    """MXFP8 whose second matrix has a number outside the range of tiles in one of its last rows."""
    b = [random_operand("mxfp8-e4m3", n, k, seed) for seed, _ in enumerate(sizes, 3)]
    b[1].scales[n - 10, 3] = 254
    return random_sections("mxfp8-e4m3", sizes, k), b
