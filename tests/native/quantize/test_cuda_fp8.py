"""FP8, scale updates and padding on a GPU: byte for byte what the reference gives on either device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.reference.quantize import quantize as reference
from narrowgauge.reference.quantize import sections as sections_reference
from narrowgauge.reference.quantize.delayed import update_scale
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.golden import bits, golden, load, quantize_input
from tests.native.fp8 import (
    AMAXES,
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
)
from tests.native.gpu import DEVICE, needs_compiler, needs_gpu
from tests.native.guards import embedded, guarded_outputs
from tests.native.quantize import test_delayed, test_padding
from tests.native.quantize.test_cuda_variants import moved, without_waiting
from tests.native.quantize.test_fp8 import TAILS
from tests.native.quantize.test_fp8_sections import SIZES
from tests.native.quantize.test_sections import WRONG
from tests.native.quantize.test_views import VIEWS
from tests.native.samples import (
    DTYPES,
    FAMILIES,
    assert_both_same,
    assert_equal,
    assert_same,
    assert_sections_same,
    matrix,
)

pytestmark = needs_gpu

EVERY_RECIPE = pytest.mark.parametrize("name", NAMES)
EVERY_KIND = pytest.mark.parametrize("name", KINDS)
EITHER = pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])


def there(options: dict[str, Any]) -> dict[str, Any]:
    """Options with their tensors on the GPU."""
    return {name: moved(value) for name, value in options.items()}


def assert_as_reference(x: torch.Tensor, recipe: Recipe, *, on_gpu: bool = False, **options: Any) -> None:
    """Both halves and either alone of `x`, which lies on the CPU; with the reference `on_gpu`, too."""
    options = {**given_scale(recipe), **options}
    expected = reference.quantize_both(x, recipe, **options)
    both = ops.quantize_both(x.to(DEVICE), recipe, **there(options))
    assert_both_same(both, expected)
    assert {half.codes.device.type for half in both if half is not None} == {DEVICE}
    assert_both_same(ops.quantize_both(x.to(DEVICE), recipe, rowwise=False, **there(options)), (None, expected[1]))
    assert_both_same(ops.quantize_both(x.to(DEVICE), recipe, columnwise=False, **there(options)), (expected[0], None))
    if on_gpu:
        assert_both_same(both, reference.quantize_both(x.to(DEVICE), recipe, **there(options)))


# quantize and quantize_both.


@pytest.mark.parametrize("path", golden("quantize_*.npz"))
def test_both_halves_of_every_golden_recipe_have_transformer_engines_bytes(path: Path) -> None:
    arrays = load(path)
    x = quantize_input(path, arrays).to(DEVICE)
    names = {key.removesuffix(".codes") for key in arrays if key.startswith("fp8") and key.endswith(".codes")}
    for name in names:
        for q, suffix in zip(ops.quantize_both(x, name), ("", "_t"), strict=True):
            assert q is not None
            found = {f"codes{suffix}": q.codes, f"scales{suffix}": q.scales, "scale": q.scales.view(-1)}
            for what in found.keys() & {key.removeprefix(f"{name}.") for key in arrays if key.startswith(f"{name}.")}:
                got, expected = found[what].cpu().numpy(), arrays[f"{name}.{what}"]
                np.testing.assert_array_equal(got.view("u1"), expected.view("u1"), err_msg=f"{name}.{what}")


@EVERY_RECIPE
def test_every_family_is_quantized_as_exact_arithmetic_does(name: str) -> None:
    recipe = find_recipe(name)
    for number, family in enumerate(FAMILIES):
        x = matrix(family, 3, 133, DTYPES[(number + NAMES.index(name)) % len(DTYPES)])
        codes, scales = model(x, recipe, **given_scale(recipe))
        got = ops.quantize(x.to(DEVICE), recipe, **there(given_scale(recipe)))
        np.testing.assert_array_equal(got.codes.cpu(), codes, err_msg=family)
        np.testing.assert_array_equal(bits(got.scales.cpu()), scales.view("i4"), err_msg=family)


@EVERY_RECIPE
def test_every_family_and_shape_is_quantized_as_the_reference_does_on_either_device(name: str) -> None:
    recipe = find_recipe(name)
    for number, family in enumerate(FAMILIES):
        x = matrix(family, 131, 140, DTYPES[(number + NAMES.index(name)) % len(DTYPES)])
        assert_as_reference(x, recipe, on_gpu=True)
        assert_as_reference(x, replace(recipe, nan="propagate"))
    for rows, columns in [*TAILS, (300, 520)]:
        assert_as_reference(matrix("outliers", rows, columns, torch.bfloat16), recipe)
    for shape in ((0, 0), (0, 128), (128, 0)):
        assert_as_reference(torch.empty(shape, dtype=torch.bfloat16), recipe, on_gpu=True)


@needs_compiler
@EVERY_KIND
def test_quantize_gives_the_bytes_that_it_gives_on_a_cpu(name: str) -> None:
    recipe = find_recipe(name)
    for dtype in DTYPES:
        x = matrix("any bits", 300, 520, dtype)
        got = ops.quantize_both(x.to(DEVICE), recipe, **there(given_scale(recipe)))
        assert_both_same(got, ops.quantize_both(x, recipe, **given_scale(recipe)))


@EVERY_RECIPE
def test_every_half_precision_number_and_every_exponent_of_an_amax(name: str) -> None:
    recipe = find_recipe(name)
    for x in (halves(torch.bfloat16), halves(torch.float16).T, amaxes_of_every_exponent(recipe)):
        assert_as_reference(x, recipe)


@pytest.mark.parametrize("name", [name for name in NAMES if find_recipe(name).block == (1, 128)])
def test_every_exponent_of_an_amax_has_the_scale_of_exact_arithmetic(name: str) -> None:
    """Divisions are rounded to nearest, and subnormal numbers kept."""
    recipe = find_recipe(name)
    x = amaxes_of_every_exponent(recipe)
    scales = ops.quantize(x.to(DEVICE), recipe).scales.cpu()
    exact = [inverse(encode_scale(float(amax), recipe, x.dtype)) for amax in x.abs().amax(1)]
    assert_equal(scales[:, 0].contiguous(), torch.tensor(exact))


@pytest.mark.parametrize("name", WHOLE)
def test_given_amaxes_and_scales(name: str) -> None:
    recipe = find_recipe(name)
    x = matrix("any bits", 20, 45, torch.bfloat16)
    for number, value in enumerate(AMAXES):
        assert_as_reference(x, recipe, amax=(torch.tensor([value]), torch.tensor([AMAXES[number - 3]])))
    for value in SCALES if recipe.delayed else ():
        assert_as_reference(x, recipe, scale=torch.tensor([value]))


@EVERY_KIND
def test_views_are_quantized_as_the_reference_does(name: str) -> None:
    plain, recipe = matrix("outliers", 256, 512, torch.bfloat16), find_recipe(name)
    on_gpu = plain.to(DEVICE)
    for view in VIEWS.values():
        wanted = reference.quantize_both(view(plain), recipe, **given_scale(recipe))
        assert_both_same(ops.quantize_both(view(on_gpu), recipe, **there(given_scale(recipe))), wanted)
        assert_same(ops.quantize(view(on_gpu), recipe, **there(given_scale(recipe))), wanted[0])


@EVERY_RECIPE
def test_every_bfloat16_number_is_quantized_in_whole_tiles_as_the_reference_does(name: str) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for x in (patterns.view(-1, 128), patterns.view(128, -1)):
        for nan in ("ignore", "propagate"):
            recipe = replace(find_recipe(name), nan=nan)  # type: ignore[arg-type]
            wanted = reference.quantize_both(x, recipe, **given_scale(recipe))
            assert_both_same(ops.quantize_both(x.to(DEVICE), recipe, **there(given_scale(recipe))), wanted)
            assert_same(ops.quantize(x.to(DEVICE), recipe, **there(given_scale(recipe))), wanted[0])


@EVERY_KIND
def test_many_tiles_and_rows_that_are_not_aligned(name: str) -> None:
    """Wide loads and stores where addresses allow them, bytes where they do not."""
    recipe = find_recipe(name)
    for rows, columns in ((1024, 2048), (1008, 2000), (999, 1001)):
        x = matrix("outliers", rows, columns, torch.bfloat16).to(DEVICE)
        for part in (x, x[1:, 1:], x[3:, 8:]):
            got = ops.quantize_both(part, recipe, **there(given_scale(recipe)))
            assert_both_same(got, reference.quantize_both(part, recipe, **there(given_scale(recipe))))


# Sections, whose sizes lie on the GPU.


@EITHER
@EVERY_RECIPE
def test_every_section_has_the_references_bytes_and_nobody_waits_for_the_sizes(name: str, columnwise: bool) -> None:
    recipe = find_recipe(name)
    for number, sizes in enumerate(SIZES):
        x = matrix("outliers", max(1, sum(sizes)), 140, torch.bfloat16, seed=number)[: sum(sizes)]
        options: dict[str, Any] = {"columnwise": columnwise, **given_scale(recipe, len(sizes))}
        on_gpu, counts, given = x.to(DEVICE), torch.tensor(sizes).to(DEVICE), there(options)
        ops.quantize_grouped(on_gpu, counts, recipe, **given)  # kernels are loaded
        with without_waiting():
            got = ops.quantize_grouped(on_gpu, counts, recipe, **given)
        expected = reference.quantize_grouped(x, torch.tensor(sizes), recipe, **options)
        assert_sections_same(got, expected)
        for part in ("amax", "tensor_scale") if recipe.whole else ():
            assert_equal(getattr(got, part), getattr(expected, part), part)


@EITHER
@EVERY_KIND
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_sizes_on_the_gpu_are_cut_to_the_rows_there_are(
    wrong: str, name: str, columnwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, cut = WRONG[wrong]
    recipe, plain = find_recipe(name), matrix("outliers", 20, 140, torch.bfloat16)
    options: dict[str, Any] = {"columnwise": columnwise, **given_scale(recipe, len(sizes))}
    with guarded_outputs(monkeypatch):
        got = ops.quantize_grouped(embedded(plain.to(DEVICE)), torch.tensor(sizes).to(DEVICE), recipe, **there(options))
    got.sizes, got.shape = torch.tensor(cut), (sum(cut), 140)
    assert_sections_same(got, reference.quantize_grouped(plain[: sum(cut)], torch.tensor(cut), recipe, **options))


# Memory.


@EVERY_KIND
def test_nothing_outside_is_read_and_nothing_outside_is_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = propagating(name)
    for rows, columns in ((1, 1), (17, 31), (130, 140), (128, 128)):
        plain = matrix("outliers", rows, columns, torch.bfloat16)
        for x in (embedded(plain.to(DEVICE)), embedded(plain.T.contiguous().to(DEVICE)).T):
            with guarded_outputs(monkeypatch):
                got = ops.quantize_both(x, recipe, **there(given_scale(recipe)))
            assert_both_same(got, reference.quantize_both(plain, recipe, **given_scale(recipe)))
            assert torch.equal(bits(x.cpu()), bits(plain))


# update_scale.


@pytest.mark.parametrize("name", test_delayed.NAMES)
def test_histories_are_updated_as_exact_arithmetic_and_the_reference_do(name: str) -> None:
    recipe = find_recipe(name)
    for length, tensors in ((1, 1), (1, 40), (2, 33), (7, 64), (40, 65)):
        history, scale = test_delayed.histories(length, tensors), test_delayed.scales_for(tensors)
        new_history, new_scale = ops.update_scale(history.to(DEVICE), scale.to(DEVICE), name)
        for tensor in range(tensors):
            expected, factor = test_delayed.step(history[:, tensor].tolist(), float(scale[tensor]), recipe)
            assert_equal(new_history[:, tensor], torch.tensor(expected), f"history {tensor}")
            assert_equal(new_scale[tensor], torch.tensor(factor), f"scale {tensor}")
    for length in (1024, 4096):
        history, scale = test_delayed.histories(length, 300), test_delayed.scales_for(300, (1.0, 0.3, 0.0))
        got = ops.update_scale(history.to(DEVICE), scale.to(DEVICE), name)
        for one, other in zip(got, update_scale(history, scale, name), strict=True):
            assert_equal(one, other)


def test_an_update_does_not_wait() -> None:
    history, scale = torch.ones(16, 5).to(DEVICE), torch.ones(5).to(DEVICE)
    ops.update_scale(history, scale, "fp8-delayed-e4m3")  # kernels are loaded
    with without_waiting():
        ops.update_scale(history, scale, "fp8-delayed-e4m3")


# Padding.


@pytest.mark.parametrize("name", test_padding.ALIGNED)
def test_sections_are_padded_and_cut_as_the_reference_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in test_padding.DTYPES:
        for sizes, width in zip(test_padding.SIZES, (*test_padding.WIDTHS, 1, 24, 40), strict=True):
            x, counts = test_padding.rows_of(sizes, width, dtype), torch.tensor(sizes)
            with guarded_outputs(monkeypatch):
                got, aligned = ops.pad_sections(embedded(x.to(DEVICE)), counts.to(DEVICE), name)
                back = ops.unpad_sections(embedded(got), counts, name)
            expected = sections_reference.pad_sections(x, counts, name)
            for one, other in zip((got, aligned, back), (*expected, x), strict=True):
                assert one.device.type == DEVICE
                assert_equal(one, other)


def test_more_rows_than_the_grid_has_warps_are_moved() -> None:
    sizes = torch.tensor([700_000, 0, 3, 30_000])
    x = torch.arange(730_003 * 4, device=DEVICE).view(-1, 4)
    got, aligned = ops.pad_sections(x, sizes, "fp8-current-e4m3")
    assert_equal(got, sections_reference.pad_sections(x, sizes, "fp8-current-e4m3")[0])
    assert int(aligned.sum()) == len(got)
    assert_equal(ops.unpad_sections(got, sizes, "fp8-current-e4m3"), x)
