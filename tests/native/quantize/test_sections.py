"""quantize_grouped: every section has the bytes of a separate matrix, also between empty sections."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from narrowgauge.native.ops import GroupedQuantized, Quantized
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.native import fp8
from tests.native.devices import ON_EVERY_DEVICE, ON_EVERY_DEVICE_CPU_LONG, ops
from tests.native.fp8 import threads
from tests.native.guards import embedded, guarded_outputs
from tests.native.samples import (
    SECTIONED,
    assert_equal,
    assert_same,
    fitting,
    matrix,
    options_of,
)

__all__ = ["threads"]

EITHER = pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
SIZES = [
    [64], [0], [0, 0], [1, 2, 3], [0, 128, 0], [16, 0, 0, 16], [127, 129, 1], [63, 65, 1], [100, 0, 30, 70, 0],
    [3] * 64, [48, 16, 0, 260],
]  # fmt: skip


def sections(name: str, sizes: list[int], columnwise: bool) -> tuple[list[int], int]:
    """Sizes and a number of columns that the recipe can rotate, near to `sizes` and 140."""
    r = find_recipe(name)
    if r.transform is None:
        return sizes, 140
    return ([fitting(size, r) for size in sizes], 45) if columnwise else (sizes, fitting(80, r))


def expected(x: torch.Tensor, sizes: torch.Tensor, recipe: Recipe, **options: Any) -> list[Quantized]:
    """Sections of the reference; a columnwise tile that 4over6 chooses is the transpose of the rowwise tile."""
    if not (options["columnwise"] and recipe.block[0] > 1 and recipe.candidates != "6"):
        return reference.quantize_grouped(x, sizes, recipe, **options).sections()
    found = []
    for number, rows in enumerate(x.split(sizes.tolist())):
        amax = None if options.get("amax") is None else (options["amax"][number : number + 1],) * 2
        found.append(reference.quantize_both(rows, recipe, rowwise=False, amax=amax)[1])
    return [q for q in found if q is not None]


def assert_as_reference(x: torch.Tensor, sizes: list[int], recipe: Recipe, **options: Any) -> GroupedQuantized:
    """Every section, bit for bit. Returns the result of the kernels."""
    options = {**options_of(recipe, len(sizes)), **options}
    got = ops.quantize_grouped(x, torch.tensor(sizes), recipe, **options)
    wanted = (tuple(x.flatten(0, -2).shape), recipe, options["columnwise"])
    assert (got.shape, got.recipe, got.columnwise) == wanted
    for one, other in zip(got.sections(), expected(x, torch.tensor(sizes), recipe, **options), strict=True):
        assert_same(one, other)
    return got


@ON_EVERY_DEVICE_CPU_LONG
@EITHER
@pytest.mark.parametrize("name", [*SECTIONED, *fp8.NAMES])
def test_sections_of_any_size(name: str, columnwise: bool) -> None:
    group = getattr(find_recipe(name).transform, "group", 1)
    for number, wanted in enumerate(SIZES if group <= 16 else SIZES[:7]):
        sizes, columns = sections(name, wanted, columnwise)
        x = matrix("outliers", max(1, sum(sizes)), columns, torch.bfloat16, seed=number)[: sum(sizes)]
        assert_as_reference(x, sizes, find_recipe(name), columnwise=columnwise)


@pytest.mark.sampled(12)
@EITHER
@pytest.mark.parametrize("name", fp8.KINDS)
def test_fp8_sections_in_the_shape_of_a_gpu(name: str, columnwise: bool, threads: int) -> None:
    for number, sizes in enumerate(SIZES[4:]):
        x = matrix("outliers", sum(sizes), 140, torch.bfloat16, seed=number)
        assert_as_reference(x, sizes, find_recipe(name), columnwise=columnwise)


@EITHER
@pytest.mark.parametrize("name", [*SECTIONED, *fp8.KINDS])
def test_a_section_equals_the_matrix_alone(name: str, columnwise: bool) -> None:
    """With stochastic rounding the first section alone: the other sections continue its random bits."""
    recipe = find_recipe(name)
    sizes, columns = sections(name, [70, 0, 33], columnwise)
    x = matrix("outliers", sum(sizes), columns, torch.bfloat16)
    given = options_of(recipe, len(sizes))
    got = ops.quantize_grouped(x, torch.tensor(sizes), recipe, columnwise=columnwise, **given).sections()
    for number, (part, rows) in enumerate(zip(got, x.split(sizes), strict=True)):
        own = {key: value[number : number + 1] if key == "scale" else value for key, value in given.items()}
        if columnwise:
            # A columnwise half draws with the next offset.
            own |= {"random": (own["random"][0], own["random"][1] - 1)} if "random" in own else {}
            alone = ops.quantize_both(rows, recipe, rowwise=False, **own)[1]
        else:
            alone = ops.quantize(rows, recipe, **own)
        assert alone is not None
        if number and "random" in own:
            assert_equal(part.scales, alone.scales)
        else:
            assert_same(part, alone)


MOST = torch.iinfo(torch.int64).max
# Sizes of sections of 20 rows, and the sizes that the kernels use.
WRONG = {
    "negative": ([5, -3, 15, -MOST - 1], [5, 0, 15, 0]),
    "too large": ([5, 1000, 3], [5, 15, 0]),
    "the largest": ([MOST, MOST, MOST], [20, 0, 0]),
    "too small": ([3, 4, 0], [3, 4, 0]),
    "too small and too large": ([-1, MOST], [0, 20]),
}


@ON_EVERY_DEVICE
@EITHER
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    "name", ["nvfp4", "nvfp4-2d-4over6-448-mae", "nvfp4-rht", "mxfp4-2d", "mxfp8-e5m2", *fp8.KINDS]
)
def test_unchecked_sizes_are_cut_to_the_rows_of_x(
    name: str, wrong: str, columnwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host does not see sizes on a GPU. Nothing outside of x is read or written."""
    for check in ("nvfp4._check_sizes", "mx.check_sizes_of", "fp8.check_sizes_of"):
        monkeypatch.setattr(f"narrowgauge.native.quantize.{check}", lambda *_, **__: None)
    sizes, cut = WRONG[wrong]
    recipe, plain = find_recipe(name), matrix("outliers", 20, 48, torch.bfloat16)
    options: dict[str, Any] = {"columnwise": columnwise, **options_of(recipe, len(sizes))}
    with guarded_outputs(monkeypatch):
        got = ops.quantize_grouped(embedded(plain), embedded(torch.tensor(sizes)), name, **options)
    got.sizes, got.shape = torch.tensor(cut), (sum(cut), 48)
    if columnwise and name == "nvfp4-rht" and any(size % 16 for size in cut):
        return  # no rotation is defined for these sizes
    for one, other in zip(got.sections(), expected(plain[: sum(cut)], got.sizes, recipe, **options), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e5m2", "fp8-current-e4m3"])
def test_strided_sizes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape("sizes of shape (2,) has strides (2,)")):
        ops.quantize_grouped(torch.ones(48, 32), torch.tensor([48, 7, 0])[::2], name)
