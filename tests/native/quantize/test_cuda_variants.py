"""Every variant on a GPU: byte for byte what the reference gives on a CPU and on the GPU, and the golden bytes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.ops import GroupedQuantized, Quantized
from narrowgauge.native.quantize.amax import another_grid
from narrowgauge.native.runtime.launch import launch
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.golden import bits, golden, load, quantize_input
from tests.native import conversions, declared
from tests.native.gemm.test_gemm import PAIRS, SECTIONS, section_operands
from tests.native.gpu import DEVICE, needs_gpu
from tests.native.guards import embedded, guarded_outputs
from tests.native.kernels import test_packed_bf16
from tests.native.launching import Source
from tests.native.quantize import test_stochastic
from tests.native.quantize.test_layout import SHAPES, scales
from tests.native.quantize.test_sections import SIZES, WRONG, expected, sections
from tests.native.quantize.test_variants import AMAXES, STOCHASTIC, TAILS, random_of
from tests.native.quantize.test_views import VIEWS
from tests.native.samples import (
    FAMILIES,
    NAMES,
    ROTATED,
    SECTIONED,
    TWO_LEVELS,
    assert_both_same,
    assert_equal,
    assert_same,
    dtype_in_turn,
    dtypes,
    fitting,
    matrix,
    nearly_tied,
    sample,
    seeded,
    to,
    words_for,
)

pytestmark = needs_gpu
EVERY_RECIPE = pytest.mark.parametrize("name", NAMES)
EITHER = pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])


def moved(value: Any) -> Any:
    """Tensors of an option on the GPU."""
    if isinstance(value, tuple):
        return tuple(map(moved, value))
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def assert_as_reference(x: torch.Tensor, recipe: Recipe, *, there: bool = False, **options: Any) -> None:
    """Both halves and one orientation of `x`, which lies on the CPU; with the reference `there` on the GPU, too."""
    on_gpu = {name: moved(value) for name, value in options.items()}
    both, wanted = ops.quantize_both(x.to(DEVICE), recipe, **on_gpu), reference.quantize_both(x, recipe, **options)
    assert_both_same(both, wanted)
    assert {half.codes.device.type for half in both if half is not None} == {DEVICE}
    seed = {} if seeded(recipe) is None else {"random": seeded(recipe)}
    assert_same(ops.quantize(x.to(DEVICE), recipe, **seed), reference.quantize(x, recipe, **seed))
    if there:
        assert_both_same(both, reference.quantize_both(x.to(DEVICE), recipe, **on_gpu))


@contextmanager
def without_waiting() -> Iterator[None]:
    """Within the context torch raises where the host would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not see every waiting
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


# quantize and quantize_both.


@pytest.mark.parametrize("path", golden("quantize_*.npz"))
def test_both_halves_of_every_golden_recipe_have_transformer_engines_bytes(path: Path) -> None:
    arrays = load(path)
    x = quantize_input(path, arrays).to(DEVICE)
    names = {key.removesuffix(".codes") for key in arrays if key.startswith("nvfp4") and key.endswith(".codes")}
    for name in names:
        for q, suffix in zip(ops.quantize_both(x, name), ("", "_t"), strict=True):
            assert q is not None
            if f"{name}.codes{suffix}" in arrays:
                np.testing.assert_array_equal(q.scales.cpu(), arrays[f"{name}.scales{suffix}"], err_msg=name)
                np.testing.assert_array_equal(q.codes.cpu(), arrays[f"{name}.codes{suffix}"], err_msg=name)
            if f"{name}.amax{suffix}" in arrays:
                wanted = arrays[f"{name}.amax{suffix}"].view(np.int32).reshape(-1)
                np.testing.assert_array_equal(bits(q.amax.cpu()), wanted, err_msg=name)


@EVERY_RECIPE
def test_every_family_and_shape_is_quantized_as_the_reference_does_on_either_device(name: str) -> None:
    recipe = find_recipe(name)
    for family in FAMILIES:
        assert_as_reference(
            sample(recipe, family, 70, 77, dtype_in_turn(name, family)), recipe, there=True, **random_of(recipe)
        )
    for rows, columns in [*TAILS, (130, 520)]:
        assert_as_reference(sample(recipe, "outliers", rows, columns, torch.bfloat16), recipe, **random_of(recipe))
    for shape in ((0, 0), (0, 128), (128, 0)):
        assert_as_reference(torch.empty(shape, dtype=torch.bfloat16), recipe, **random_of(recipe))
    for rows, columns in ((129, 260), (64, 65)):
        assert_as_reference(
            sample(recipe, "outliers", rows, columns, torch.bfloat16), recipe, swizzled=True, **random_of(recipe)
        )


@EVERY_RECIPE
def test_given_amaxes_and_one_half_alone(name: str) -> None:
    recipe = find_recipe(name)
    x = sample(recipe, "any bits", 20, 45, torch.bfloat16)
    for number, value in enumerate(AMAXES if name in TWO_LEVELS else ()):
        each = torch.tensor(AMAXES * 30).roll(number)
        given = (each[: x.shape[0]].clone(), each[-x.shape[1] :].clone())
        amax = given if recipe.granularity == "row" else (torch.tensor([value]), torch.tensor([AMAXES[number - 3]]))
        assert_as_reference(x, recipe, amax=amax, **random_of(recipe))
    row, column = reference.quantize_both(x, recipe, **random_of(recipe))
    assert_both_same(ops.quantize_both(x.to(DEVICE), recipe, columnwise=False, **random_of(recipe)), (row, None))
    assert_both_same(ops.quantize_both(x.to(DEVICE), recipe, rowwise=False, **random_of(recipe)), (None, column))


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("nvfp4")])
def test_whole_tiles_of_every_family_by_any_amax(name: str) -> None:
    """Blocks of finite numbers and of products below 7 go another way than the others among them."""
    for number, family in enumerate(FAMILIES):
        recipe = replace(find_recipe(name), nan=("ignore", "propagate")[number % 2])  # type: ignore[arg-type]
        x = sample(recipe, family, 128, 256, torch.bfloat16)
        assert_as_reference(x, recipe, **random_of(recipe))
        for value in AMAXES if recipe.granularity == "tensor" else ():
            amax = torch.tensor([value])
            assert_as_reference(x, recipe, amax=(amax, amax), **random_of(recipe))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d", "nvfp4-rht", "nvfp4-rht-sr"])
def test_tiles_that_are_not_finite_are_made_anew_among_those_below_each_other(name: str) -> None:
    """By a block of threads that takes five tiles, of which two are not finite, and by others that take two."""
    x, amax = matrix("normal", (16 + 5) * 64, 128, torch.bfloat16), torch.tensor([6.0])
    for tile, row, column, value in (
        (1, 5, 7, torch.nan),
        (4, 63, 127, -torch.inf),
        (5, 0, 0, torch.inf),
        (8, 9, 64, 1e30),
    ):
        x[tile * 64 + row, column] = value
    with another_grid():
        assert_as_reference(x, find_recipe(name), amax=(amax, amax), **random_of(find_recipe(name)))


@pytest.mark.parametrize("name", [name for name in NAMES if "-2d-4over6" in name])
def test_a_tile_is_chosen_by_its_rows_whichever_half_is_made(name: str) -> None:
    assert_as_reference(nearly_tied(), find_recipe(name))
    assert_same(ops.quantize(nearly_tied().to(DEVICE).T, name), reference.quantize(nearly_tied().T, name))


@pytest.mark.parametrize("name", STOCHASTIC)
def test_random_words_and_seeds(name: str) -> None:
    recipe = find_recipe(name)
    for rows, columns in TAILS:
        x = sample(recipe, "outliers", rows, columns, torch.bfloat16)
        assert_as_reference(x, recipe, random=(words_for(*x.shape), words_for(*x.T.shape, seed=1)))
    for seed, offset in product((0, -1, 1 << 32, -(1 << 63), (1 << 64) - 1), (0, -1, (1 << 32) - 1, (1 << 64) - 1)):
        assert_as_reference(sample(recipe, "normal", 33, 40, torch.bfloat16), recipe, random=(seed, offset))


@EVERY_RECIPE
def test_views_are_quantized_as_the_reference_does(name: str) -> None:
    plain, recipe = matrix("outliers", 256, 512, torch.bfloat16), find_recipe(name)
    on_gpu = plain.to(DEVICE)
    for view in VIEWS.values():
        wanted = reference.quantize_both(view(plain), recipe, **random_of(recipe))
        assert_both_same(ops.quantize_both(view(on_gpu), recipe, **random_of(recipe)), wanted)


# Device functions.


def test_philox_and_every_byte_of_a_stochastic_rounding(cuda_source: Source) -> None:
    source = cuda_source(test_stochastic.TEXT)
    given = np.random.default_rng(5).integers(0, 1 << 64, (300, 3), dtype=np.uint64)
    here, there = (test_stochastic.words(source, given, device=device) for device in ("cpu", DEVICE))
    np.testing.assert_array_equal(here, there)
    x = conversions.bf16_values()
    for part in ((x[(np.abs(x) < 8) | ~np.isfinite(x)]), test_stochastic.decisions()):
        got = test_stochastic.codes(source, part, device=DEVICE)
        assert torch.equal(got, test_stochastic.reference_codes(part))


def test_blocks_of_words_have_the_references_codes(cuda_source: Source) -> None:
    source = cuda_source(test_packed_bf16.TEXT)
    test_packed_bf16.check_decisions(source, DEVICE)
    test_packed_bf16.check_every_bfloat16(source, DEVICE)


def test_every_float32_below_8_has_the_same_codes_in_a_block_of_words_as_alone(cuda_source: Source) -> None:
    different = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    count = int(np.float32(8).view(np.int32))
    arguments = (np.uint32(0), np.int64(count), different)
    launch(
        cuda_source(test_packed_bf16.TEXT),
        "disagreements",
        (-(-count // 256),),
        (256,),
        arguments,
        device=different.device,
    )
    assert different.tolist() == [0, 0]


# transform, swizzle, dequantize.


def test_every_group_is_rotated_as_the_reference_does() -> None:
    for name, family in product(ROTATED, ("outliers", "nan", "any bits")):
        recipe = find_recipe(name)
        for rows, columns in ((1, 1), (33, 3 * 128), (130, 512)):
            x = matrix(family, rows, fitting(columns, recipe), torch.bfloat16)
            y = ops.transform(x.to(DEVICE), recipe)
            assert_equal(y, reference.transform(x, recipe))
            assert_equal(y, reference.transform(x.to(DEVICE), recipe))
        x = matrix(family, 256, 384, torch.bfloat16)
        assert_equal(
            ops.transform(x.to(DEVICE).T[:, ::2], recipe), reference.transform(x.T[:, ::2].contiguous(), recipe)
        )


@pytest.mark.parametrize("path", golden("swizzle_*.npz"))
def test_the_layout_is_transformer_engines(path: Path) -> None:
    arrays = load(path)
    np.testing.assert_array_equal(ops.swizzle(torch.from_numpy(arrays["scales"]).to(DEVICE)).cpu(), arrays["swizzled"])


def test_swizzle_is_the_references_and_unswizzle_its_inverse() -> None:
    for shape in SHAPES:
        linear = scales(*shape).to(DEVICE)
        swizzled = ops.swizzle(linear)
        assert_equal(swizzled, reference.swizzle(linear.cpu()))
        assert_equal(ops.unswizzle(swizzled, shape), linear)


def test_every_recipe_is_dequantized_as_the_reference_does() -> None:
    for name, swizzled in product(NAMES, (False, True)):
        recipe = find_recipe(name)
        for dtype in dtypes(recipe):
            x = sample(recipe, "outliers", 131, 77, dtype)
            q = reference.quantize(x, recipe, swizzled=swizzled, **random_of(recipe))
            assert_equal(ops.dequantize(to(q, DEVICE), dtype), reference.dequantize(q, dtype))


# Sections, whose sizes lie on the GPU.


def cut(q: GroupedQuantized, sizes: list[int]) -> list[Quantized]:
    """The sections under sizes that the kernels took."""
    return replace(q, sizes=torch.tensor(sizes)).sections()


@pytest.mark.parametrize("name", SECTIONED)
@EITHER
def test_every_section_has_the_references_bytes_and_nobody_waits_for_the_sizes(name: str, columnwise: bool) -> None:
    for number, wanted in enumerate(SIZES):
        sizes, columns = sections(name, wanted, columnwise)
        x = matrix("outliers", max(1, sum(sizes)), columns, torch.bfloat16, seed=number)[: sum(sizes)]
        there, sizes_there = x.to(DEVICE), torch.tensor(sizes).to(DEVICE)
        options: dict[str, Any] = {"columnwise": columnwise, **random_of(find_recipe(name))}
        ops.quantize_grouped(there, sizes_there, name, **options)  # kernels are loaded
        with without_waiting():
            got = ops.quantize_grouped(there, sizes_there, name, **options)
        for one, other in zip(got.sections(), expected(x, torch.tensor(sizes), name, **options), strict=True):
            assert_same(one, other)


@EITHER
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d-4over6-448-mae"])
def test_wrong_sizes_on_the_gpu_are_cut_to_the_rows_there_are(
    name: str, columnwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = matrix("outliers", 20, 48, torch.bfloat16)
    for sizes, taken in WRONG.values():
        x = embedded(plain.to(DEVICE))
        with guarded_outputs(monkeypatch):
            got = ops.quantize_grouped(x, torch.tensor(sizes).to(DEVICE), name, columnwise=columnwise)
        part = plain[: sum(taken)]
        wanted = expected(part, torch.tensor(taken), name, columnwise=columnwise)
        for one, other in zip(cut(got, taken), wanted, strict=True):
            assert_same(one, other)


# gemm.


def test_two_recipes_are_multiplied_with_scales_in_either_layout() -> None:
    for (left, right), one, other in product(PAIRS, (False, True), (False, True)):
        a = reference.quantize(matrix("outliers", 70, 112, torch.bfloat16, seed=1), left, swizzled=one)
        b = reference.quantize(matrix("outliers", 133, 112, torch.bfloat16, seed=2), right, swizzled=other)
        y = ops.gemm(to(a, DEVICE), to(b, DEVICE), out_dtype=torch.float32)
        assert_equal(y, declared.gemm(a, b, out_dtype=torch.float32))


def test_each_section_is_multiplied_by_its_own_matrix() -> None:
    for sizes, out_dtype, swizzled in product(SECTIONS, (torch.float32, torch.bfloat16), (False, True)):
        a, b = section_operands(sizes, 130, 45, swizzled=swizzled)
        c, bias = matrix("normal", max(1, sum(sizes)), 130, out_dtype), matrix("normal", len(sizes), 130, torch.float16)
        c = c[: sum(sizes)]
        there = replace(a, **{part: getattr(a, part).to(DEVICE) for part in ("codes", "scales", "amax", "sizes")})
        y = ops.gemm_grouped(
            there, [to(q, DEVICE) for q in b], out_dtype=out_dtype, c=c.to(DEVICE), bias=bias.to(DEVICE)
        )  # fmt: skip
        assert_equal(y, declared.gemm_grouped(a, b, out_dtype=out_dtype, c=c, bias=bias))


# Memory.


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d-4over6-448-mae", "nvfp4-sr", "nvfp4-rowscaled", "nvfp4-rht"])
def test_nothing_outside_is_read_and_nothing_outside_is_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(find_recipe(name), nan="propagate")
    for (rows, columns), swizzled in product(((1, 1), (17, 31), (65, 33), (128, 64)), (False, True)):
        plain = sample(recipe, "outliers", rows, columns, torch.bfloat16)
        options = {"swizzled": swizzled, **random_of(recipe)}
        for x in (embedded(plain.to(DEVICE)), embedded(plain.T.contiguous().to(DEVICE)).T):
            with guarded_outputs(monkeypatch):
                got = ops.quantize_both(x, recipe, **options)
            assert_both_same(got, reference.quantize_both(plain, recipe, **options))
            assert torch.equal(bits(x.cpu()), bits(plain))
