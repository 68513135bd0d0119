"""FP8 with float32 scales on a CPU: Transformer Engine's bytes, exact arithmetic's, and the reference's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.ops import Quantized
from narrowgauge.native.quantize import fp8
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.golden import bits, golden, load, quantize_input
from tests.native.fp8 import (
    AMAXES,
    BLOCKS,
    KINDS,
    NAMES,
    SCALES,
    WHOLE,
    amaxes_of_every_exponent,
    encode_scale,
    given_scale,
    halves,
    inverse,
    model,
    propagating,
    threads,
)
from tests.native.guards import embedded, guarded_outputs
from tests.native.quantize.test_views import VIEWS, sparse
from tests.native.samples import DTYPES, FAMILIES, assert_both_same, assert_same, matrix

__all__ = ["threads"]

EVERY_RECIPE = pytest.mark.parametrize("name", NAMES)
EVERY_KIND = pytest.mark.parametrize("name", KINDS)
TAILS = [
    (1, 1), (1, 129), (129, 1), (3, 127), (16, 16), (17, 31), (64, 128), (127, 5), (128, 128), (130, 257), (257, 130),
]  # fmt: skip


def assert_as_reference(x: torch.Tensor, recipe: Recipe, **options: Any) -> None:
    """Both halves, either alone, and one orientation."""
    expected = reference.quantize_both(x, recipe, **options)
    assert_both_same(ops.quantize_both(x, recipe, **options), expected)
    assert_both_same(ops.quantize_both(x, recipe, rowwise=False, **options), (None, expected[1]))
    amax = {} if options.get("amax") is None else {"amax": options["amax"][0]}
    assert_same(ops.quantize(x, recipe, **{**options, **amax}), expected[0])


# Transformer Engine's bytes.


@pytest.mark.parametrize("path", golden("quantize_*.npz"))
def test_both_halves_of_every_golden_recipe_have_transformer_engines_bytes(path: Path) -> None:
    arrays = load(path)
    x = quantize_input(path, arrays)
    names = {key.removesuffix(".codes") for key in arrays if key.startswith("fp8") and key.endswith(".codes")}
    assert len(names) == 10
    for name in names:
        row, column = ops.quantize_both(x, name)
        assert row is not None
        assert column is not None
        found = {"codes": row.codes, "scales": row.scales, "codes_t": column.codes, "scales_t": column.scales}
        found["scale"] = row.scales.view(-1)
        compared = {what for what in found if f"{name}.{what}" in arrays}
        assert compared == ({"codes", "scale"} if find_recipe(name).whole else set(found) - {"scale"})
        for what in compared:
            expected = arrays[f"{name}.{what}"]
            got = found[what].numpy()
            np.testing.assert_array_equal(got.view("u1"), expected.view("u1"), err_msg=f"{name}.{what}")


# Exact arithmetic's.


@pytest.mark.long
@EVERY_RECIPE
@pytest.mark.parametrize("nan", ["ignore", "propagate"])
def test_every_family_is_quantized_as_exact_arithmetic_does(name: str, nan: str) -> None:
    recipe = replace(find_recipe(name), nan=nan)  # type: ignore[arg-type]
    for number, family in enumerate(FAMILIES):
        x = matrix(family, 3, 133, DTYPES[(number + NAMES.index(name)) % len(DTYPES)])
        options = given_scale(recipe)
        codes, scales = model(x, recipe, **options)
        got = ops.quantize(x, recipe, **options)
        np.testing.assert_array_equal(got.codes, codes, err_msg=family)
        np.testing.assert_array_equal(bits(got.scales), scales.view("i4"), err_msg=family)


@pytest.mark.parametrize("name", [name for name in NAMES if find_recipe(name).tensor_scale != "given"])
def test_every_exponent_of_an_amax_has_the_scale_of_exact_arithmetic(name: str) -> None:
    """Powers of two and the largest element times one, ± 1 ulp; tiles and tensors as many matrices of one row."""
    recipe = find_recipe(name)
    x = amaxes_of_every_exponent(recipe)
    amaxes = x.abs().amax(1)
    if recipe.whole:
        for amax in amaxes[:: len(amaxes) // 40]:
            q = ops.quantize(torch.zeros(1, 1), recipe, amax=amax.view(1))
            assert_scale(q, 0, float(amax), recipe)
        return
    if recipe.block[0] > 1:  # a tile from every row, one below the other
        padded = torch.zeros(len(x), 128, 128)
        padded[:, 5] = x
        x = padded.view(-1, 128)[: 128 * 200]
    q = ops.quantize(x, recipe)
    for row in range(len(q.scales)):
        assert_scale(q, row, float(amaxes[row]), recipe)


def assert_scale(q: Quantized, row: int, amax: float, recipe: Recipe) -> None:
    """The stored scale of a block of float32 of this amax, bit for bit."""
    got, expected = q.scales[row, 0].numpy(), np.float32(inverse(encode_scale(amax, recipe, torch.float32)))
    assert got.tobytes() == expected.tobytes(), (amax, got, expected)


# The reference's.


@EVERY_RECIPE
@pytest.mark.parametrize("nan", ["ignore", "propagate"])
def test_every_family_is_quantized_as_the_reference_does(name: str, nan: str) -> None:
    """In four tiles, with tails in M and K."""
    recipe = replace(find_recipe(name), nan=nan)  # type: ignore[arg-type]
    for number, family in enumerate(FAMILIES):
        x = matrix(family, 131, 140, DTYPES[(number + NAMES.index(name)) % len(DTYPES)])
        assert_both_same(
            ops.quantize_both(x, recipe, **given_scale(recipe)),
            reference.quantize_both(x, recipe, **given_scale(recipe)),
        )


@EVERY_KIND
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_any_shape_is_quantized_as_the_reference_does(name: str, dtype: torch.dtype, threads: int) -> None:
    """In the shape of a GPU's blocks of threads, too."""
    recipe = find_recipe(name)
    for rows, columns in TAILS:
        assert_as_reference(matrix("outliers", rows, columns, dtype), recipe, **given_scale(recipe))


@EVERY_RECIPE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_is_quantized_as_the_reference_does(name: str, dtype: torch.dtype) -> None:
    """In blocks of numbers near each other, and of numbers far from each other."""
    recipe = find_recipe(name)
    for x in (halves(dtype), halves(dtype).view(-1).view(128, 512).T):
        assert_both_same(
            ops.quantize_both(x, recipe, **given_scale(recipe)),
            reference.quantize_both(x, recipe, **given_scale(recipe)),
        )


@EVERY_RECIPE
def test_every_exponent_of_an_amax_is_quantized_as_the_reference_does(name: str) -> None:
    recipe = find_recipe(name)
    x = amaxes_of_every_exponent(recipe)
    assert_both_same(
        ops.quantize_both(x, recipe, **given_scale(recipe)), reference.quantize_both(x, recipe, **given_scale(recipe))
    )


@EVERY_RECIPE
@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 128), (128, 0)])
def test_an_empty_matrix_has_empty_codes_and_a_scale_of_1_where_it_has_one(name: str, rows: int, columns: int) -> None:
    recipe = find_recipe(name)
    x = torch.empty(rows, columns, dtype=torch.bfloat16)
    assert_as_reference(x, recipe, **given_scale(recipe))
    q = ops.quantize(x, recipe, **given_scale(recipe))
    assert q.codes.shape == (rows, columns)
    if recipe.whole and recipe.tensor_scale != "given" and not recipe.smallest_amax:
        assert q.scales.tolist() == [[1.0]]
        assert q.tensor_scale.tolist() == [1.0]  # type: ignore[union-attr]
        assert q.amax.tolist() == [0.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", WHOLE)
def test_a_given_amax_replaces_the_tensors_own(name: str) -> None:
    """Another one for either half."""
    recipe = find_recipe(name)
    x = matrix("any bits", 20, 45, torch.bfloat16)
    for number, value in enumerate(AMAXES):
        amax = (torch.tensor([value]), torch.tensor([AMAXES[number - 3]]))
        assert_both_same(
            ops.quantize_both(x, recipe, amax=amax, **given_scale(recipe)),
            reference.quantize_both(x, recipe, amax=amax, **given_scale(recipe)),
        )
        one_missing = (amax[0], None)
        row, column = ops.quantize_both(x, recipe, amax=one_missing, **given_scale(recipe))
        assert_same(row, reference.quantize(x, recipe, amax=amax[0], **given_scale(recipe)))
        assert_same(column, reference.quantize(x.T, recipe, **given_scale(recipe)))


@pytest.mark.parametrize("name", ["fp8-delayed-e4m3", "fp8-delayed-e5m2-bulk"])
def test_whatever_scale_is_given_multiplies_the_elements_and_the_amax_is_observed(name: str) -> None:
    x = matrix("any bits", 20, 45, torch.bfloat16)
    for value in SCALES:
        scale = torch.tensor([value])
        assert_as_reference(x, find_recipe(name), scale=scale)
        q = ops.quantize(x, name, scale=scale)
        assert torch.equal(bits(q.amax), bits(ops.amax(x)))  # type: ignore[arg-type]
        assert q.tensor_scale is not scale


def test_delayed_scaling_reads_a_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other recipes need the amax before the first element can be scaled."""

    def read_before(*_: object, **__: object) -> None:
        raise AssertionError("an amax of its own was asked for")

    for name in ("tensor_amax", "oriented_amax"):
        monkeypatch.setattr(fp8, name, read_before)
    x, options = matrix("outliers", 130, 140, torch.bfloat16), {"scale": torch.tensor([2.0])}
    for view in (x, x.T, x[:, ::2]):
        assert_both_same(ops.quantize_both(view, DELAYED, **options), reference.quantize_both(view, DELAYED, **options))
    sizes = torch.tensor([100, 0, 30])
    got, expected = (one.quantize_grouped(x, sizes, DELAYED, scale=torch.ones(3)) for one in (ops, reference))
    assert torch.equal(got.amax, expected.amax)
    with pytest.raises(AssertionError, match="an amax of its own"):
        ops.quantize(x, CURRENT)


@pytest.mark.parametrize("kind", ["block-1x128", "block-128x128", "current"])
@pytest.mark.parametrize(("dtype", "smallest"), [(torch.float32, 1e-45), (torch.bfloat16, 1e-40)])
def test_an_infinite_scale_is_the_largest_number_of_the_input_or_of_float32(
    kind: str, dtype: torch.dtype, smallest: float
) -> None:
    """float16 has no number so small that it would be."""
    x = torch.full((2, 3), smallest, dtype=dtype)
    most = torch.finfo(torch.float32 if kind == "current" else dtype).max
    for power in (True, False):
        name = f"fp8-{kind}-e4m3" + ("-pow2" if power else "" if kind == "current" else "-fp32")
        scale = 2.0**127 if power else most
        expected = torch.tensor(1.0) / torch.tensor(scale)
        assert torch.equal(bits(ops.quantize(x, name).scales).unique(), bits(expected.view(1)))


def test_every_choice_of_a_recipe_changes_some_byte() -> None:
    """The largest scale of the input's dtype, and of float32, is seen above."""
    x = matrix("nan", 140, 150, torch.float32)
    base = find_recipe("fp8-block-1x128-e4m3-fp32")
    current = find_recipe("fp8-current-e4m3")
    changes = [
        (base, find_recipe("fp8-block-1x128-e4m3-pow2")), (base, find_recipe("fp8-block-1x128-e5m2-fp32")),
        (base, find_recipe("fp8-block-128x128-e4m3-fp32")), (base, replace(base, smallest_amax=20.0)),
        (base, replace(base, nan="propagate")), (current, replace(current, smallest_amax=20.0)),
        (current, replace(current, nan="propagate")), (current, find_recipe("fp8-current-e4m3-pow2")),
    ]  # fmt: skip
    for one, other in changes:
        halves_of = [ops.quantize_both(x, recipe) for recipe in (one, other)]
        for left, right in zip(*halves_of, strict=True):
            assert left is not None
            assert right is not None
            assert not torch.equal(left.codes, right.codes), (str(one), str(other))


# Views and memory.


@EVERY_KIND
def test_views_are_quantized_like_their_copies(name: str, threads: int) -> None:
    recipe = find_recipe(name)
    plain = matrix("outliers", 256, 512, torch.bfloat16)
    for view in VIEWS.values():
        x = view(plain)
        copy = x.flatten(0, -2).contiguous()
        both = ops.quantize_both(copy, recipe, **given_scale(recipe))
        assert_both_same(both, reference.quantize_both(copy, recipe, **given_scale(recipe)))
        assert_both_same(ops.quantize_both(x, recipe, **given_scale(recipe)), both)
        assert_same(ops.quantize(x, recipe, **given_scale(recipe)), both[0])


@EVERY_KIND
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 31), (130, 140), (128, 64)])
def test_nothing_but_the_elements_is_read_and_nothing_outside_the_outputs_is_written(
    name: str, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """NaN would propagate: a single one that is read shows."""
    recipe = propagating(name)
    for dtype in (torch.float32, torch.bfloat16):
        plain = matrix("outliers", rows, columns, dtype)
        options: dict[str, Any] = {key: embedded(value) for key, value in given_scale(recipe).items()}
        expected = reference.quantize_both(plain, recipe, **options)
        for x in (embedded(plain), embedded(plain.T.contiguous()).T, sparse(plain)):
            with guarded_outputs(monkeypatch):
                got = ops.quantize_both(x, recipe, **options)
                alone = ops.quantize(x, recipe, **options)
                column = ops.quantize_both(x, recipe, rowwise=False, **options)
            assert_both_same(got, expected)
            assert_both_same((alone, column[1]), expected)
            assert torch.equal(bits(x), bits(plain))


def test_nothing_outside_given_amaxes_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x, amaxes = matrix("outliers", 17, 31, torch.float32), (torch.tensor([3.0]), torch.tensor([2.0]))
    with guarded_outputs(monkeypatch):
        got = ops.quantize_both(embedded(x), "fp8-current-e4m3", amax=tuple(map(embedded, amaxes)))
    assert_both_same(got, reference.quantize_both(x, "fp8-current-e4m3", amax=amaxes))


def test_more_dimensions_are_rows() -> None:
    x = matrix("outliers", 30, 40, torch.float16)
    for name in BLOCKS[:2]:
        assert_same(ops.quantize(x.view(2, 3, 5, 40), name), reference.quantize(x, name))


# What is refused.

X, ONE = torch.ones(3, 32), torch.ones(1)
CURRENT, DELAYED, BLOCK = "fp8-current-e4m3", "fp8-delayed-e4m3", "fp8-block-1x128-e4m3-pow2"
REFUSED: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    ("a scale elsewhere", lambda: ops.quantize(X, DELAYED, scale=ONE.to("meta")), ValueError,
     "kernel quantize_fp8_fp32 runs on cpu, but a tensor lies on meta; move it first"),
    ("x on no device", lambda: ops.quantize(X.to("meta"), BLOCK), ValueError,
     "kernel quantize_fp8_fp32 runs on cpu and cuda, not meta"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "message"), [recipe[1:] for recipe in REFUSED], ids=[recipe[0] for recipe in REFUSED]
)
def test_it_is_refused_with_a_sentence(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
