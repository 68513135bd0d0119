"""quantize_grouped on a CPU: every section byte for byte what it gives alone, wherever empty ones lie."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.ops import GroupedQuantized, Quantized
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.golden import bits
from tests.native.guards import embedded, guarded_outputs
from tests.native.samples import (
    FAMILIES,
    MX_NAMES,
    SECTIONED,
    assert_equal,
    assert_same,
    assert_sections_same,
    dtype_in_turn,
    fitting,
    matrix,
    nearly_tied,
    seeded,
)

EVERY_RECIPE = pytest.mark.parametrize("name", SECTIONED)
EITHER = pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])

SIZES = [
    [64], [0], [0, 0], [1, 2, 3], [0, 64, 0], [16, 0, 0, 16], [100, 0, 30, 70, 0], [63, 65, 1], [3] * 64,
    [48, 16, 0, 160],
]  # fmt: skip


def sections(name: str, sizes: list[int], columnwise: bool) -> tuple[list[int], int]:
    """The sizes as the recipe can rotate them, and a number of columns that it can."""
    r = find_recipe(name)
    if r.transform is None:
        return sizes, 77
    return ([fitting(size, r) for size in sizes], 45) if columnwise else (sizes, fitting(80, r))


def expected(x: torch.Tensor, sizes: torch.Tensor, name: str | Recipe, **options: Any) -> list[Quantized]:
    """The reference's sections; a columnwise tile that 4over6 chooses is the transpose of the rowwise one."""
    r = find_recipe(name)
    if not (options["columnwise"] and r.block[0] > 1 and r.candidates != "6"):
        return reference.quantize_grouped(x, sizes, r, **options).sections()
    found = []
    for number, rows in enumerate(x.split(sizes.tolist())):
        amax = None if options.get("amax") is None else (options["amax"][number : number + 1],) * 2
        found.append(reference.quantize_both(rows, r, rowwise=False, amax=amax)[1])
    return [q for q in found if q is not None]


def assert_as_reference(x: torch.Tensor, sizes: list[int], name: str | Recipe, **options: Any) -> GroupedQuantized:
    """Every section, bit for bit; what the kernels gave is returned."""
    arguments = (x, torch.tensor(sizes), name)
    options = {"random": seeded(find_recipe(name), offset=4), **options}
    got = ops.quantize_grouped(*arguments, **options)
    assert (got.shape, got.recipe) == (tuple(x.flatten(0, -2).shape), find_recipe(name))
    assert got.columnwise == options["columnwise"]
    for one, other in zip(got.sections(), expected(*arguments, **options), strict=True):
        assert_same(one, other)
    return got


@pytest.mark.long
@EVERY_RECIPE
@EITHER
def test_every_section_has_the_references_bytes(name: str, columnwise: bool) -> None:
    group = getattr(find_recipe(name).transform, "group", 1)
    for number, wanted in enumerate(SIZES if group <= 16 else SIZES[:6]):
        sizes, columns = sections(name, wanted, columnwise)
        x = matrix("outliers", max(1, sum(sizes)), columns, torch.bfloat16, seed=number)[: sum(sizes)]
        assert_as_reference(x, sizes, name, columnwise=columnwise)


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4",
        "nvfp4-2d-sr",
        "nvfp4-rht",
        "nvfp4-4over6-256-mae",
        "nvfp4-2d-4over6-448-mse",
        "mxfp6-e3m2",
        "mxfp4-2d-sr",
    ],
)
@EITHER
def test_every_family_is_quantized_as_the_reference_does(name: str, columnwise: bool) -> None:
    sizes, columns = sections(name, [17, 0, 32], columnwise)
    for family in FAMILIES:
        x = matrix(family, sum(sizes), columns, dtype_in_turn(name, family))
        assert_as_reference(x, sizes, name, columnwise=columnwise)


@EVERY_RECIPE
@EITHER
def test_a_section_is_what_it_is_alone(name: str, columnwise: bool) -> None:
    """Also of a recipe that rounds stochastically, in its first section, where Philox begins."""
    sizes, columns = sections(name, [70, 0, 33], columnwise)
    x = matrix("outliers", sum(sizes), columns, torch.bfloat16)
    got = assert_as_reference(x, sizes, name, columnwise=columnwise).sections()
    for part, rows in zip(got, x.split(sizes), strict=True):
        random = seeded(find_recipe(name), offset=4)
        if columnwise:
            # Of both halves the columnwise one draws with the next offset.
            both = None if random is None else (random[0], random[1] - 1)
            alone = ops.quantize_both(rows, name, rowwise=False, random=both)[1]
        else:
            alone = ops.quantize(rows, name, random=random)
        assert alone is not None
        if random is None or part is got[0]:
            assert_same(part, alone)
        else:
            assert_equal(part.scales, alone.scales)


@pytest.mark.parametrize("name", ["nvfp4-2d-4over6-256-mae", "nvfp4-2d-4over6-448-mse"])
def test_a_columnwise_tile_of_a_section_is_chosen_by_the_rows_of_the_tile(name: str) -> None:
    """Numbers whose two errors are nearly equal: the order of their sum decides."""
    x = nearly_tied()
    grouped = ops.quantize_grouped(x, torch.tensor([1024, 1024]), name, columnwise=True)
    for part, rows in zip(grouped.sections(), x.split(1024), strict=True):
        assert_same(part, reference.quantize_both(rows, name, rowwise=False)[1])


@EITHER
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d-sr", "nvfp4-4over6-448-mse", "nvfp4-rht"])
def test_given_amaxes_replace_the_sections_own(name: str, columnwise: bool) -> None:
    sizes, columns = sections(name, [20, 0, 45, 30], columnwise)
    amaxes = [1e-45, 0.0, 65.0, torch.inf, torch.nan, 2688.0, 3.4028235e38]
    for shift in range(len(amaxes)):
        amax = torch.tensor(amaxes).roll(shift)[:4].clone()
        x = matrix("any bits", sum(sizes), columns, torch.bfloat16)
        assert_as_reference(x, sizes, name, columnwise=columnwise, amax=amax)


@EITHER
@pytest.mark.parametrize("nan", ["ignore", "propagate"])
def test_a_nan_stays_in_its_section(columnwise: bool, nan: str) -> None:
    recipe = replace(find_recipe("nvfp4"), nan=nan)  # type: ignore[arg-type]
    x = matrix("normal", 60, 20, torch.float32)
    x[25, 3] = torch.nan
    got = assert_as_reference(x, [20, 20, 20], recipe, columnwise=columnwise)
    assert got.amax.isnan().tolist() == [False, nan == "propagate", False]


# Views.


@EITHER
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d-4over6-448-mae", "nvfp4-2d-rht-sr", "mxfp4-sr", "mxfp8-2d"])
def test_views_are_quantized_like_their_copies(name: str, columnwise: bool) -> None:
    plain = matrix("outliers", 192, 192, torch.bfloat16)
    sizes = torch.tensor([16, 0, 48, 32])
    for view in (plain[:96].T[:96], plain[::2, ::2], plain[96:, 96:], plain.view(2, 96, 192)[:, ::2, 64:144]):
        options: dict[str, Any] = {"columnwise": columnwise, "random": seeded(find_recipe(name))}
        got = ops.quantize_grouped(view, sizes, name, **options)
        assert_sections_same(got, ops.quantize_grouped(view.contiguous(), sizes, name, **options))


# Memory.


@EITHER
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d-4over6-448-mae", "nvfp4-sr", "mxfp4", "mxfp8-2d-sr"])
@pytest.mark.parametrize("columns", [1, 17, 64, 77])
def test_nothing_outside_the_matrix_is_read_and_nothing_outside_the_outputs_is_written(
    columns: int, name: str, columnwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = embedded(matrix("outliers", 100, columns, torch.float32))
    sizes = embedded(torch.tensor([17, 0, 66, 1, 16]))
    before = x.clone()
    random = seeded(find_recipe(name))
    given = embedded(torch.tensor([3.0, 1.0, 2.0, 5.0, 0.1]))
    for amax in (None,) if name in MX_NAMES else (None, given):
        with guarded_outputs(monkeypatch):
            got = ops.quantize_grouped(x, sizes, name, columnwise=columnwise, amax=amax, random=random)
        options: dict[str, Any] = {"columnwise": columnwise, "amax": amax, "random": random}
        for one, other in zip(got.sections(), expected(before, sizes.clone(), name, **options), strict=True):
            assert_same(one, other)
    assert torch.equal(bits(x), bits(before))


MOST = torch.iinfo(torch.int64).max
WRONG = {
    "negative": ([5, -3, 15, -MOST - 1], [5, 0, 15, 0]),
    "too large": ([5, 1000, 3], [5, 15, 0]),
    "the largest": ([MOST, MOST, MOST], [20, 0, 0]),
    "too small": ([3, 4, 0], [3, 4, 0]),
    "too small and too large": ([-1, MOST], [0, 20]),
}


@EITHER
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d-4over6-448-mae", "nvfp4-rht", "mxfp4-2d", "mxfp8-e5m2"])
def test_sizes_that_nobody_has_checked_are_cut_to_the_rows_there_are(
    name: str, wrong: str, columnwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sizes on a GPU are, which the host does not see: nothing outside is read or written."""
    for check in ("narrowgauge.native.quantize.nvfp4._check_sizes", "narrowgauge.native.quantize.mx.check_sizes_of"):
        monkeypatch.setattr(check, lambda *_, **__: None)
    sizes, cut = WRONG[wrong]
    x = embedded(matrix("outliers", 20, 48, torch.bfloat16))
    with guarded_outputs(monkeypatch):
        got = ops.quantize_grouped(x, embedded(torch.tensor(sizes)), name, columnwise=columnwise)
    got.sizes = torch.tensor(cut)
    for part, rows in zip(got.sections(), x[: sum(cut)].split(cut), strict=True):
        if columnwise and name == "nvfp4-rht" and len(rows) % 16:
            continue  # what no rotation is defined for is only kept inside
        column = reference.quantize_both(rows, name, rowwise=False)[1] if columnwise else None
        assert_same(part, column or reference.quantize(rows, name))


# What is refused.


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e5m2", "fp8-current-e4m3"])
def test_strided_sizes_are_refused(name: str) -> None:
    message = "sizes of shape (2,) has strides (2,); the kernels read contiguous memory: pass sizes.contiguous()"
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.quantize_grouped(torch.ones(48, 32), torch.tensor([48, 7, 0])[::2], name)
