"""Tensors of any strides: quantized like their copies, and nothing between their elements is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe
from tests.golden import bits
from tests.native.guards import embedded, guarded_outputs
from tests.native.samples import NAMES, assert_both_same, assert_same, matrix, seeded, words_for
from tests.thinned import thinned

View = Callable[[torch.Tensor], torch.Tensor]

# Of a matrix (256, 512) those that have whole groups of 128 both ways.
VIEWS: dict[str, View] = {
    "transposed": lambda x: x[:128, :256].T,
    "every second row": lambda x: x[::2],
    "every second column": lambda x: x[:128, ::2],
    "every third of a transpose": lambda x: x.T[:384:3, :128],
    "from within": lambda x: x[128:, 256:],
    "three dimensions": lambda x: x.view(2, 128, 512)[:, ::2, :128],
    "three dimensions the last one strided": lambda x: x.view(2, 128, 512).transpose(1, 2)[:, :128],
    "four dimensions": lambda x: x.view(2, 2, 64, 512)[:, :, ::2, 128:256],
    "one row for all": lambda x: x[:1].expand(128, 512),
    "one column for all": lambda x: x[:128, :1].expand(128, 256),
}


@pytest.mark.parametrize("name", thinned(NAMES, 3))
def test_views_are_quantized_like_their_copies(name: str) -> None:
    """The copies are compared with the reference elsewhere."""
    plain, r = matrix("outliers", 256, 512, torch.bfloat16), find_recipe(name)
    for what, view in VIEWS.items():
        x = view(plain)
        copy = x.flatten(0, -2).contiguous()
        assert x.dim() > 2 or not x.is_contiguous(), what
        assert_same(ops.quantize(x, r, random=seeded(r)), ops.quantize(copy, r, random=seeded(r)))
        both = ops.quantize_both(copy, r, random=seeded(r))
        assert_both_same(ops.quantize_both(x, r, random=seeded(r)), both)
        assert_both_same(ops.quantize_both(x, r, rowwise=False, random=seeded(r)), (None, both[1]))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_views_of_other_dtypes_are_quantized_as_the_reference_does(view: str, dtype: torch.dtype) -> None:
    x = VIEWS[view](matrix("outliers", 256, 512, dtype))
    for name in ("nvfp4", "nvfp4-rowscaled"):
        assert_both_same(ops.quantize_both(x, name), reference.quantize_both(x, name))


def sparse(x: torch.Tensor) -> torch.Tensor:
    """`x` as every second row and third column of a poisoned matrix."""
    poison = torch.full((2 * x.shape[0], 3 * x.shape[1] * x.itemsize), 0xFF, dtype=torch.uint8)
    inside = poison.view(x.dtype)[::2, ::3]
    return inside.copy_(x)


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4",
        "nvfp4-2d",
        "nvfp4-sr",
        "nvfp4-rowscaled",
        "nvfp4-2d-4over6-448-mae",
        "mxfp8-e4m3",
        "mxfp6-e2m3-2d",
        "mxfp4",
        "mxfp8-e5m2-sr",
        "mxfp4-2d-sr",
    ],
)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 31), (65, 33), (128, 64)])
@pytest.mark.parametrize("swizzled", [False, True], ids=["linear", "swizzled"])
def test_nothing_but_the_elements_is_read_and_nothing_outside_the_outputs_is_written(
    name: str, rows: int, columns: int, swizzled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN would propagate: a single one that is read shows."""
    r = replace(find_recipe(name), nan="propagate")
    plain = matrix("outliers", rows, columns, torch.float32)
    options: dict[str, Any] = {"swizzled": swizzled, "random": seeded(r)}
    expected = reference.quantize_both(plain, r, **options)
    for x in (embedded(plain), embedded(plain.T.contiguous()).T, sparse(plain)):
        with guarded_outputs(monkeypatch):
            got = ops.quantize_both(x, r, **options)
            alone = ops.quantize(x, r, **options)
            column = ops.quantize_both(x, r, rowwise=False, **options)
        assert_both_same(got, expected)
        assert_both_same((alone, column[1]), expected)
        assert torch.equal(bits(x), bits(plain))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 31), (65, 33)])
def test_nothing_outside_given_words_and_amaxes_is_read(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = matrix("outliers", rows, columns, torch.float32)
    words, amaxes = (words_for(rows, columns), words_for(columns, rows)), (torch.tensor([3.0]), torch.tensor([2.0]))
    with guarded_outputs(monkeypatch):
        got = ops.quantize_both(
            embedded(plain), "nvfp4-sr", amax=tuple(map(embedded, amaxes)), random=tuple(map(embedded, words))
        )  # fmt: skip
    assert_both_same(got, reference.quantize_both(plain, "nvfp4-sr", amax=amaxes, random=words))
    each = (torch.linspace(0.5, 3, rows), torch.linspace(0.5, 3, columns))
    with guarded_outputs(monkeypatch):
        got = ops.quantize_both(embedded(plain), "nvfp4-rowscaled", amax=tuple(map(embedded, each)))
    assert_both_same(got, reference.quantize_both(plain, "nvfp4-rowscaled", amax=each))
