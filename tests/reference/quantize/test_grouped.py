"""Sections: every section is the result of `quantize`, and `gemm_grouped` multiplies a section by its matrix."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from narrowgauge.reference.ops import GroupedQuantized, gemm, gemm_grouped, quantize, quantize_grouped
from narrowgauge.reference.scalar import philox
from narrowgauge.spec.quantized import Quantized, codes_shape, scales_shape
from narrowgauge.spec.recipes import find_recipe
from tests.golden import bits
from tests.reference.samples import matrix
from tests.reference.twins import assert_same

SIZES = {
    "one": [5],
    "one empty": [0],
    "plain": [16, 32, 48],
    "no multiples": [1, 17, 3, 130, 31],
    "empty in front": [0, 0, 7, 9],
    "empty in the middle": [7, 0, 0, 9],
    "empty at the end": [7, 9, 0],
    "all empty": [0, 0, 0],
    "64": [(7 * n) % 5 for n in range(64)],
}
EVERY = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def source(sizes: list[int], columns: int, seed: int = 1) -> torch.Tensor:
    """Sections whose amaxes differ."""
    x = matrix("normal", seed, sum(sizes), columns)
    section = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return x * (1 + section % 7).unsqueeze(1) * 0.37


def sections_of(x: torch.Tensor, sizes: list[int], columnwise: bool) -> list[torch.Tensor]:
    return [part.T if columnwise else part for part in torch.split(x, sizes)]


def check(q: GroupedQuantized, x: torch.Tensor, sizes: list[int], expected: list[Quantized]) -> None:
    """`q` holds the sections `expected`, in the memory that its docstring says, and their amaxes."""
    assert q.shape == tuple(x.shape)
    assert q.sizes.tolist() == sizes
    assert q.tensor_scale is not None
    assert tuple(q.amax.shape) == tuple(q.tensor_scale.shape) == (len(sizes),)
    parts = q.sections()
    assert len(parts) == len(sizes)
    for part, one in zip(parts, expected, strict=True):
        assert part.recipe == one.recipe == q.recipe
        assert_same(part, one)
    codes, scales = ([getattr(one, name) for one in expected] for name in ("codes", "scales"))
    if q.columnwise:
        codes, scales = ([part.flatten() for part in some] for some in (codes, scales))
    else:
        assert tuple(q.codes.shape) == codes_shape(q.shape, q.recipe)
        assert tuple(q.scales.shape) == scales_shape(q.shape, q.recipe)
    assert torch.equal(q.codes, torch.cat(codes))
    assert torch.equal(q.scales, torch.cat(scales))


@pytest.mark.sampled(4)
@EVERY
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d", "nvfp4-4over6-448-mae", "nvfp4-2d-4over6-256-mse"])
def test_each_section_is_quantized_by_itself(name: str, columnwise: bool, sizes: list[int]) -> None:
    x = source(sizes, 37)
    expected = [quantize(part.contiguous(), name) for part in sections_of(x, sizes, columnwise)]
    check(quantize_grouped(x, torch.tensor(sizes), name, columnwise=columnwise), x, sizes, expected)


@pytest.mark.sampled(4)
@EVERY
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("name", ["nvfp4-rht", "nvfp4-rht2-nosign", "nvfp4-2d-rht", "nvfp4-rht32"])
def test_each_section_is_rotated_by_itself(name: str, columnwise: bool, sizes: list[int]) -> None:
    rotation = find_recipe(name).transform
    assert rotation is not None
    sizes = [size * rotation.group for size in sizes] if columnwise else sizes
    x = source(sizes, 37 if columnwise else 64).bfloat16()
    expected = [quantize(part.contiguous(), name) for part in sections_of(x, sizes, columnwise)]
    check(quantize_grouped(x, torch.tensor(sizes), name, columnwise=columnwise), x, sizes, expected)


@pytest.mark.sampled(3)
@EVERY
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("name", ["nvfp4-sr", "nvfp4-2d-sr", "nvfp4-rht2-sr"])
def test_random_bits_count_the_blocks_of_all_sections(name: str, columnwise: bool, sizes: list[int]) -> None:
    sizes = [2 * size for size in sizes]
    x = source(sizes, 38).bfloat16()
    expected, first = [], 0
    for part in sections_of(x, sizes, columnwise):
        made = philox.philox_words(3, 4, *part.shape, first=first)
        first += made.size // 4
        cut = torch.from_numpy(made.view(np.int32)[:, : -(-part.shape[1] // 4)].copy())
        expected.append(quantize(part.contiguous(), name, random=cut))
    q = quantize_grouped(x, torch.tensor(sizes), name, columnwise=columnwise, random=(3, 4))
    check(q, x, sizes, expected)


@pytest.mark.parametrize("columnwise", [False, True])
def test_a_given_amax_is_that_of_its_section(columnwise: bool) -> None:
    sizes = [3, 0, 20]
    x, amax = source(sizes, 33), torch.tensor([4.0, 5.0, 6.0])
    parts = sections_of(x, sizes, columnwise)
    expected = [quantize(part, "nvfp4", amax=amax[i : i + 1]) for i, part in enumerate(parts)]
    check(quantize_grouped(x, torch.tensor(sizes), "nvfp4", columnwise=columnwise, amax=amax), x, sizes, expected)


def test_bytes_behind_the_last_section_are_not_used() -> None:
    sizes = [3, 20]
    x = source(sizes, 33)
    q = quantize_grouped(x, torch.tensor(sizes), "nvfp4", columnwise=True)
    more = torch.full((100,), 0xFF, dtype=torch.uint8)
    longer = dataclasses.replace(q, codes=torch.cat([q.codes, more]), scales=torch.cat([q.scales, more]))
    for one, other in zip(longer.sections(), q.sections(), strict=True):
        assert_same(one, other)


# GEMM.


def matrices(count: int, rows: int, columns: int, name: str) -> list[Quantized]:
    return [quantize(matrix("normal", 10 + n, rows, columns).bfloat16(), name) for n in range(count)]


@pytest.mark.sampled(4)
@EVERY
@pytest.mark.parametrize("added", ["", "c", "bias", "c and bias"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_each_section_is_multiplied_by_its_own_matrix(sizes: list[int], added: str, out_dtype: torch.dtype) -> None:
    a = quantize_grouped(source(sizes, 40), torch.tensor(sizes), "nvfp4")
    b = matrices(len(sizes), 6, 40, "nvfp4")
    c = matrix("normal", 4, sum(sizes), 6) if "c" in added else None
    bias = matrix("normal", 5, len(sizes), 6).bfloat16() if "bias" in added else None
    y = gemm_grouped(a, b, out_dtype=out_dtype, c=c, bias=bias)
    assert tuple(y.shape) == (sum(sizes), 6)
    assert y.dtype == out_dtype
    start = 0
    for n, (part, other) in enumerate(zip(a.sections(), b, strict=True)):
        stop = start + sizes[n]
        alone = gemm(
            part, other, out_dtype=out_dtype, c=None if c is None else c[start:stop],
            bias=None if bias is None else bias[n],
        )  # fmt: skip
        assert torch.equal(bits(y[start:stop]), bits(alone))
        start = stop
