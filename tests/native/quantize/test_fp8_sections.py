"""quantize_grouped to FP8 on a CPU: every section byte for byte what it gives alone, wherever empty ones lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.ops import GroupedQuantized
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.golden import bits
from tests.native.fp8 import AMAXES, KINDS, NAMES, given_scale, propagating, threads
from tests.native.guards import embedded, guarded_outputs
from tests.native.quantize.test_sections import WRONG
from tests.native.samples import FAMILIES, assert_equal, assert_same, assert_sections_same, matrix

__all__ = ["threads"]

EVERY_RECIPE = pytest.mark.parametrize("name", NAMES)
EVERY_KIND = pytest.mark.parametrize("name", KINDS)
EITHER = pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])

SIZES = [
    [64], [0], [0, 0], [1, 2, 3], [0, 128, 0], [16, 0, 0, 16], [100, 0, 30, 70, 0], [127, 129, 1], [3] * 50,
    [48, 16, 0, 260],
]  # fmt: skip


def assert_as_reference(x: torch.Tensor, sizes: list[int], recipe: Recipe, **options: Any) -> GroupedQuantized:
    """Every section, bit for bit, and what they have together; what the kernels gave is returned."""
    options = {**given_scale(recipe, len(sizes)), **options}
    got = ops.quantize_grouped(x, torch.tensor(sizes), recipe, **options)
    expected = reference.quantize_grouped(x, torch.tensor(sizes), recipe, **options)
    assert_sections_same(got, expected)
    for part in ("amax", "tensor_scale"):
        one, other = getattr(got, part), getattr(expected, part)
        assert (one is None) == (other is None)
        if one is not None:
            assert_equal(one, other, part)
    return got


@EVERY_KIND
@EITHER
def test_every_section_has_the_references_bytes(name: str, columnwise: bool, threads: int) -> None:
    for number, sizes in enumerate(SIZES):
        x = matrix("outliers", max(1, sum(sizes)), 140, torch.bfloat16, seed=number)[: sum(sizes)]
        assert_as_reference(x, sizes, find_recipe(name), columnwise=columnwise)


@EVERY_RECIPE
@EITHER
def test_every_family_is_quantized_as_the_reference_does(name: str, columnwise: bool) -> None:
    for number, family in enumerate(FAMILIES):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        assert_as_reference(matrix(family, 162, 20, dtype), [17, 0, 130, 15], find_recipe(name), columnwise=columnwise)


@EVERY_KIND
@EITHER
def test_a_section_is_what_it_is_alone(name: str, columnwise: bool) -> None:
    recipe = find_recipe(name)
    sizes = [140, 0, 33]
    x = matrix("outliers", sum(sizes), 130, torch.bfloat16)
    scales = given_scale(recipe, 3).get("scale")
    got = assert_as_reference(x, sizes, recipe, columnwise=columnwise).sections()
    for number, (part, rows) in enumerate(zip(got, x.split(sizes), strict=True)):
        own = {} if scales is None else {"scale": scales[number : number + 1]}
        row, column = ops.quantize_both(rows, recipe, **own)
        assert_same(part, column if columnwise else row)


@EITHER
@pytest.mark.parametrize("name", ["fp8-current-e4m3", "fp8-current-e5m2-pow2", "fp8-delayed-e4m3"])
def test_given_amaxes_replace_the_sections_own(name: str, columnwise: bool) -> None:
    for shift in range(len(AMAXES)):
        amax = torch.tensor(AMAXES).roll(shift)[:4].clone()
        x = matrix("any bits", 95, 40, torch.bfloat16)
        got = assert_as_reference(x, [20, 0, 45, 30], find_recipe(name), columnwise=columnwise, amax=amax)
        assert_equal(got.amax, amax)  # type: ignore[arg-type]


@EITHER
def test_columns_that_there_are_none_of(columnwise: bool) -> None:
    for name in KINDS:
        assert_as_reference(torch.empty(20, 0), [15, 0, 5], find_recipe(name), columnwise=columnwise)


@EITHER
@EVERY_KIND
def test_views_are_quantized_like_their_copies(name: str, columnwise: bool) -> None:
    plain, sizes = matrix("outliers", 192, 192, torch.bfloat16), [16, 0, 48, 32]
    for view in (plain[:96].T[:96], plain[::2, ::2], plain[96:, 96:], plain.view(2, 96, 192)[:, ::2, 64:144]):
        got = assert_as_reference(view, sizes, find_recipe(name), columnwise=columnwise)
        copy = ops.quantize_grouped(
            view.contiguous(), torch.tensor(sizes), name, columnwise=columnwise, **given_scale(find_recipe(name), 4)
        )  # fmt: skip
        assert_sections_same(got, copy)


# Memory.


@EITHER
@EVERY_KIND
@pytest.mark.parametrize("columns", [1, 64, 140])
def test_nothing_outside_the_matrix_is_read_and_nothing_outside_the_outputs_is_written(
    columns: int, name: str, columnwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = propagating(name)
    plain = matrix("outliers", 300, columns, torch.float32)
    x, sizes = embedded(plain), embedded(torch.tensor([17, 0, 130, 1, 152]))
    scale = {key: embedded(value) for key, value in given_scale(recipe, 5).items()}
    with guarded_outputs(monkeypatch):
        got = ops.quantize_grouped(x, sizes, recipe, columnwise=columnwise, **scale)
    assert_sections_same(got, reference.quantize_grouped(plain, sizes.clone(), recipe, columnwise=columnwise, **scale))
    assert torch.equal(bits(x), bits(plain))


@EITHER
@EVERY_KIND
@pytest.mark.parametrize("wrong", WRONG)
def test_sizes_that_nobody_has_checked_are_cut_to_the_rows_there_are(
    wrong: str, name: str, columnwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sizes on a GPU are, which the host does not see: nothing outside is read or written."""
    monkeypatch.setattr("narrowgauge.native.quantize.fp8.check_sizes_of", lambda *_: None)
    sizes, cut = WRONG[wrong]
    recipe = find_recipe(name)
    x = embedded(matrix("outliers", 20, 140, torch.bfloat16))
    options: dict[str, Any] = {"columnwise": columnwise, **given_scale(recipe, len(sizes))}
    with guarded_outputs(monkeypatch):
        got = ops.quantize_grouped(x, embedded(torch.tensor(sizes)), recipe, **options)
    got.sizes, got.shape = torch.tensor(cut), (sum(cut), 140)
    assert_sections_same(got, reference.quantize_grouped(x[: sum(cut)], torch.tensor(cut), recipe, **options))
